"""What a worker thread prints goes where the worker wants it, never into the output of whichever cell runs by then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

Sink = Callable[[str], None]
"""Takes a line of text, without its end."""

_lock = threading.RLock()
_sinks: dict[int, _Lines] = {}
_installed: list[tuple[str, ThreadStream]] = []


class _Lines:
    """Cuts what is written into lines. Of a progress bar that rewrites its line only the last state counts."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._rest = sink, ""

    def write(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._emit(line)

    def end(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self._emit(rest)

    def _emit(self, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if shown:
            self._sink(shown)


class ThreadStream:
    """Stands in for `sys.stdout` or `sys.stderr`: threads with a sink write there, all others where they always did."""

    def __init__(self, original: TextIO) -> None:
        self.original = original

    def write(self, text: str) -> int:
        lines = _sinks.get(threading.get_ident())
        if lines is None:
            return self.original.write(text)
        lines.write(text)
        return len(text)

    def flush(self) -> None:
        if threading.get_ident() not in _sinks:
            self.original.flush()

    def isatty(self) -> bool:
        return False if threading.get_ident() in _sinks else self.original.isatty()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.original.fileno()

    def __copy__(self) -> ThreadStream:
        return self

    def __deepcopy__(self, memo: Any) -> ThreadStream:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # an object that was made without `__init__`
            raise AttributeError(name)
        return getattr(self.original, name)


@contextmanager
def captured(sink: Sink) -> Iterator[None]:
    """Lines that this thread prints, to stdout or stderr, go to `sink` while entered. Other threads notice nothing.

    `sink` is called on this thread; what it prints itself is printed as usual.
    """
    ident = threading.get_ident()

    def unnested(line: str) -> None:
        held = _sinks.pop(ident, None)
        try:
            sink(line)
        finally:
            if held is not None:
                _sinks[ident] = held

    lines = _Lines(unnested)
    with _lock:
        outer = _sinks.get(ident)
        _sinks[ident] = lines
        if not _installed:
            for name in ("stdout", "stderr"):
                stream = ThreadStream(getattr(sys, name))
                setattr(sys, name, stream)
                _installed.append((name, stream))
    try:
        yield
    finally:
        lines.end()
        with _lock:
            if outer is None:
                _sinks.pop(ident, None)
            else:
                _sinks[ident] = outer
            if not _sinks:
                for name, stream in _installed:
                    # Whoever put another stream there meanwhile puts ours back later; it passes everything on.
                    if getattr(sys, name) is stream:
                        setattr(sys, name, stream.original)
                _installed.clear()
