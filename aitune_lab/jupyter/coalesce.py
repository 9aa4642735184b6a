"""All messages of a Lab to its page go through one place, which keeps them few: the last of a kind is what counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PER_SECOND = 12
"""Messages in a second. A Lab may send 15; what is left is for answers to the page's commands."""

_log = logging.getLogger("aitune_lab")


class Coalescer:
    """Sends at most so many messages in a second, in the order in which their keys were first posted.

    A message that waits is replaced by a newer one of the same key; it is made only when its turn comes, so what is
    sent is always the present state. `post` returns at once, on any thread.

    Args:
        per_second: the most messages in any second.
    """

    def __init__(self, per_second: float = PER_SECOND) -> None:
        self._gap = 1.0 / per_second
        self._condition = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._thread: threading.Thread | None = None
        self._last = float("-inf")

    def post(self, key: str, send: Callable[[], object]) -> None:
        """Send soon. `send` is called on the coalescer's own thread, sends at most one message, and gives False if none."""
        with self._condition:
            self._waiting[key] = send
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="aitune-lab-messages", daemon=True)
                self._thread.start()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything posted was sent; tells whether that came to be in time (seconds)."""
        thread = self._thread
        if thread is threading.current_thread():
            return False
        if thread is not None:
            thread.join(timeout)
        return self._thread is None

    def drop(self) -> None:
        """Forget what waits."""
        with self._condition:
            self._waiting.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                while self._waiting and (wait := self._last + self._gap - time.monotonic()) > 0:
                    self._condition.wait(wait)
                if not self._waiting:
                    self._thread = None
                    return
                key = next(iter(self._waiting))
                send = self._waiting.pop(key)
            try:
                if send() is not False:
                    self._last = time.monotonic()
            except Exception:
                # The run must not end because a page could not be drawn; the next message may well succeed.
                _log.exception("what the workbench shows (%s) could not be sent", key)
