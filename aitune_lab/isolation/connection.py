"""The helper process as the tuning process sees it: started, asked, ended."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from ..capture.interrupts import guarded
from .helper import interpreter
from .outcome import tail
from .parcel import Outbox
from .processes import kill, marked
from .wire import Channel

_MARK = "AITUNE_LAB_CHILD_OF"
"""In the environment of the helper and all that descends from it."""
_POLL_SECONDS = 0.1
"""Between two looks at whether the user cancelled."""
_START_SECONDS = 120.0
"""For which the helper may import torch, on a slow disk and a busy machine."""
_END_SECONDS = 15.0


Phase = tuple[str, float | None]
"""What a build does just now, and how much of that is done."""


class Unreachable(Exception):
    """A job reached no child; the message says why."""


class Connection:
    """The helper process and the socket to it."""

    def __init__(self, folder: Path, outbox: Outbox) -> None:
        self.log = folder / "helper.log"
        self.is_ready = False
        token = f"{os.getpid()}-{os.urandom(8).hex()}"
        environment = {**os.environ, _MARK: token, "TORCH_WARM_POOL": "0", "OPENBLAS_NUM_THREADS": "1"}
        # Importing compilers asks whether there is a GPU. Asked of the CUDA runtime, no fork could use one any more.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with guarded(), theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                interpreter("helper", theirs.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # an interrupt in the terminal is this process's to decide on
            )
            self.close: Callable[[], Any] = weakref.finalize(
                self, _end, self.channel, self.process, token, outbox, os.getpid()
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it has imported torch. Raises Unreachable if it ended instead."""
        try:
            if not self.is_ready and self.channel.receive(_START_SECONDS) is None:
                raise Unreachable(f"the process that starts children wasn't ready within {_START_SECONDS:.0f} s")
            self.is_ready = True
        except EOFError:
            last = next(iter(reversed(tail(self.log).strip().splitlines())), "no output")
            raise Unreachable(f"no process to start children from could be started ({last[:200]})") from None

    def run(self, request: dict[str, Any]) -> Generator[Phase, None, dict[str, Any]]:
        """A job's answer, `lost` if the helper ended or fell silent; until then its phase, ten times a second at least."""
        phase: Phase = ("starting a child", None)
        patience = time.monotonic() + request["limits"]["seconds"] + _START_SECONDS
        try:
            self.channel.send(request)
            while time.monotonic() < patience:
                yield phase
                message = self.channel.receive(_POLL_SECONDS)
                if message is None:
                    continue
                if message["kind"] != "progress":
                    return message
                phase = message["phase"], message["fraction"]
        except (EOFError, OSError):
            return {"kind": "lost", "text": "the process that starts children ended"}
        return {"kind": "lost", "text": "the process that starts children didn't answer"}


def _end(channel: Any, process: subprocess.Popen[bytes], token: str, outbox: Outbox, owner: int) -> None:
    """End the helper, which ends its children; what survives its sudden end is found by its environment."""
    if os.getpid() != owner:  # a fork of the user's process
        return
    channel.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.returncode:
        kill(marked(_MARK, token))
    outbox.close()
