"""What a child may use, and the watch that says when it used more."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARE = 0.8
"""Of what is available when a build starts: the bound where none is given."""
_MEASURE_SECONDS = 0.1
"""Between two looks at memory and files; each look costs some milliseconds."""


@dataclass(frozen=True)
class BuildLimits:
    """Bounds of one build with its first calls, for its process and all that it starts.

    Attributes:
        seconds: from the start of the build to the end of the first calls.
        memory_bytes: resident memory of all its processes together; None: 80 % of what is available at its start.
        disk_bytes: what it may write into its folders; None: 80 % of what is free there at its start.
    """

    seconds: float = 300.0
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, but got {value}")

    def settled(self, folder: Path) -> BuildLimits:
        """The limits with figures in place of None."""
        return BuildLimits(
            self.seconds,
            self.memory_bytes or int(_SHARE * psutil.virtual_memory().available),
            self.disk_bytes or int(_SHARE * shutil.disk_usage(folder).free),
        )


@dataclass(frozen=True)
class Excess:
    """A limit that was passed: `what` is `"time"`, `"memory"` or `"disk"`, with the limit and what was used."""

    what: str
    limit: float
    used: float


class Watch:
    """Compares what the processes of a build use with its limits."""

    def __init__(self, limits: BuildLimits, folders: Sequence[Path]) -> None:
        self.limits = limits
        self.folders = folders
        self.peak_bytes = 0
        self._start = time.monotonic()
        self._next = 0.0
        self._before = sum(map(size_on_disk, folders))

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def excess(self, processes: Iterable[psutil.Process]) -> Excess | None:
        """The limit that is passed now, if any. Memory and files are looked at ten times a second at most."""
        limits, seconds = self.limits, self.seconds
        if seconds > limits.seconds:
            return Excess("time", limits.seconds, seconds)
        if seconds < self._next:
            return None
        self._next = seconds + _MEASURE_SECONDS
        resident = sum(map(_resident_bytes, processes))
        self.peak_bytes = max(self.peak_bytes, resident)
        if limits.memory_bytes is not None and resident > limits.memory_bytes:
            return Excess("memory", limits.memory_bytes, resident)
        written = sum(map(size_on_disk, self.folders)) - self._before
        if limits.disk_bytes is not None and written > limits.disk_bytes:
            return Excess("disk", limits.disk_bytes, written)
        return None


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def size_on_disk(folder: Path) -> int:
    """Bytes that the files under a folder take; files that vanish meanwhile count nothing."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    found = entry.stat(follow_symlinks=False)
                    total += 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size
            except OSError:
                continue
    return total
