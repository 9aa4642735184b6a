"""Keeps Ctrl-C from tearing a change of the target in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Guard:
    """`allowed` is read by the signal handler: while False an interrupt waits until `allow` or the end."""

    __slots__ = ("allowed", "pending")

    def __init__(self) -> None:
        self.allowed = False
        self.pending = False

    def check(self) -> None:
        """Raise an interrupt that waits, if there is one."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


@contextmanager
def guarded() -> Iterator[Guard]:
    """Defer KeyboardInterrupt except while `guard.allowed` is True.

    Used as::

        with guarded() as guard:
            try:
                install()
                guard.allowed = True
                run()
            finally:
                guard.allowed = False   # a plain store: no interrupt can come between
                restore()

    Off the main thread, or where the user has an own handler, nothing is changed.
    """
    guard = Guard()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        guard.allowed = True
        yield guard
        return

    def handler(number: int, frame: Any) -> None:
        if guard.allowed:
            raise KeyboardInterrupt
        guard.pending = True

    signal.signal(signal.SIGINT, handler)
    try:
        yield guard
    finally:
        guard.allowed = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
    guard.check()
