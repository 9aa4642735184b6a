"""Keeps Ctrl-C from tearing a change of the target in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Guard:
    """`allowed` is read by the signal handler: while False an interrupt waits until `check` or the end."""

    __slots__ = ("allowed", "pending")

    def __init__(self) -> None:
        self.allowed = False
        self.pending = False

    def check(self) -> None:
        """Raise an interrupt that waits, if there is one."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


_OURS = __name__.rpartition(".")[0]


def _between(frame: FrameType | None) -> bool:
    """Whether a frame belongs to what sets up and takes down, so that an exception there would skip the taking down."""
    name = frame.f_globals.get("__name__", "") if frame is not None else ""
    return name == "contextlib" or name.startswith(_OURS)


@contextmanager
def guarded() -> Iterator[Guard]:
    """Defer KeyboardInterrupt except while `guard.allowed` is True and code other than this package's runs.

    Used as::

        with guarded() as guard:
            try:
                install()
                guard.allowed = True
                run()               # calls `guard.check()` now and then
            finally:
                guard.allowed = False
                restore()

    Off the main thread, or where the user has an own handler, nothing is changed.
    """
    guard = Guard()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        guard.allowed = True
        yield guard
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if guard.allowed and not _between(frame):
            raise KeyboardInterrupt
        guard.pending = True

    signal.signal(signal.SIGINT, handler)
    try:
        yield guard
    finally:
        guard.allowed = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
    guard.check()
