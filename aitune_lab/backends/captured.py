"""What has to live as long as a captured CUDA graph: said by executables during the capture, held by whoever has the graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_capture = threading.local()


@contextmanager
def keeping(things: list[Any]) -> Iterator[None]:
    """While entered, in a capture, what this thread's executables give to `keep` is added to `things`."""
    before = getattr(_capture, "things", None)
    _capture.things = things
    try:
        yield
    finally:
        _capture.things = before


def keep(thing: Any) -> bool:
    """Keep something as long as the graph that is being captured. False if nobody has said how long that is."""
    things = getattr(_capture, "things", None)
    if things is not None:
        things.append(thing)
    return things is not None
