"""Starting and ending processes so that nothing is left of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 10.0
"""For which killed processes are waited for: one in an uninterruptible call of the kernel may take longer."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they are found. Linux only; elsewhere nothing."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent process ends. Linux only; elsewhere nothing."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:  # it ended before
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Reaper:
    """Collects the ends of this process's children: its own and those it adopted."""

    def __init__(self) -> None:
        self._ended: dict[int, int] = {}

    def reap(self) -> None:
        """Take in whatever ended; leaves no zombie."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._ended[pid] = os.waitstatus_to_exitcode(status)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a child that ended, negative for a signal; None while it runs."""
        self.reap()
        return self._ended.get(pid)


def descendants(*, but: Iterable[int] = ()) -> list[psutil.Process]:
    """Everything that descends from this process, but for the given processes and theirs."""
    left_out: set[int] = set(but)
    for pid in tuple(left_out):
        with suppress(psutil.Error):
            left_out |= {p.pid for p in psutil.Process(pid).children(recursive=True)}
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in left_out]


def end_descendants(reaper: Reaper, groups: Iterable[int] = (), *, but: Iterable[int] = ()) -> None:
    """Kill the groups and everything that descends from this process, but for the given processes and theirs.

    Who starts new processes while being killed is met again: this goes on until nothing is left.
    """
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        reaper.reap()
        left = descendants(but=but)
        if not left:
            return
        kill(left)
        time.sleep(0.002)


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def marked(variable: str, value: str) -> list[psutil.Process]:
    """This user's processes that were started with a variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(variable) == value:
                found.append(process)
    return found
