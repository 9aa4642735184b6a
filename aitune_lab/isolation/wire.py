"""Messages between the processes: JSON objects over a private socket, nothing that could run code."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_HEADER_BYTES = 4


class Channel:
    """One end of a connected socket. Not for use by several threads at once."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        text = json.dumps(message).encode()
        self.socket.settimeout(None)
        self.socket.sendall(len(text).to_bytes(_HEADER_BYTES, "big") + text)

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None if none is complete after `timeout` seconds. Raises EOFError if the other end is gone."""
        deadline = time.monotonic() + timeout
        while (message := self._taken()) is None:
            # A timeout of 0 would mean a socket that doesn't block, which raises another error.
            self.socket.settimeout(max(deadline - time.monotonic(), 1e-4))
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError as error:
                raise EOFError(str(error)) from None
            if not data:
                raise EOFError("the other end is closed")
            self._buffer += data
        return message

    def _taken(self) -> dict[str, Any] | None:
        """The first message of the buffer, if it is there as a whole."""
        if len(self._buffer) < _HEADER_BYTES:
            return None
        end = _HEADER_BYTES + int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
        if len(self._buffer) < end:
            return None
        message: dict[str, Any] = json.loads(bytes(self._buffer[_HEADER_BYTES:end]))
        del self._buffer[:end]
        return message

    def close(self) -> None:
        """Close, also for processes that inherited this end."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end is gone
            pass
        self.socket.close()
