"""Which process something belongs to, and whether it still lives."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass

import psutil

_TEXT = re.compile(r"(?P<node>[\w.]+)-(?P<pid>\d+)-(?P<started>\d+)")
_CLOCK_MS = 2000
"""Start times of one process read twice may differ by a little, as the system's clock is set."""
FOREIGN_SECONDS = 7 * 24 * 3600.0
"""A process of another machine (on a shared file system) can't be looked at: it counts as alive for this long."""


@dataclass(frozen=True)
class Owner:
    """A process: its machine's name, its id there, and when it started, in milliseconds since the epoch."""

    node: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(_node(), os.getpid(), _started(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner that a text begins with, as `str` gives it; None for any other text."""
        found = _TEXT.match(text)
        return cls(found["node"], int(found["pid"]), int(found["started"])) if found else None

    def __str__(self) -> str:
        return f"{self.node}-{self.pid}-{self.started}"

    def alive(self, since: float) -> bool:
        """Whether it still runs. `since` is when it was last heard of, in seconds since the epoch."""
        if self.node != _node():
            return time.time() - since < FOREIGN_SECONDS
        started = _started(self.pid)
        return started is not None and abs(started - self.started) <= _CLOCK_MS


def _node() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname()) or "localhost"


def _started(pid: int) -> int | None:
    """When a process started; None if there is none of this id (a zombie answers nothing any more)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
