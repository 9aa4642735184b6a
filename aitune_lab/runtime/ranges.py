"""NVTX ranges around tuned calls, switched at any time; while off, a tuned call pays nothing for them.

Generated dispatch code finds its executable under a name in its own namespace. Switching on puts an annotated one in
that place, switching off the plain one back; each is one assignment, so calls in other threads take the one or the
other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import AituneError


@dataclass(frozen=True)
class Slot:
    """Where generated code finds an executable: `namespace[name]`; `text` is what its range is called."""

    namespace: dict[str, Any]
    name: str
    text: str


class HasSlots(Protocol):
    """A dispatch: where it finds its executables."""

    slots: list[Slot]


class _Annotated:
    """An executable's call inside an NVTX range."""

    def __init__(self, run: Callable[..., Any], text: str) -> None:
        self.run, self.text = run, text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.nvtx.range_push(self.text)
        try:
            return self.run(*args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()


_lock = threading.Lock()
_installed: weakref.WeakSet[HasSlots] = weakref.WeakSet()
_on = False


def switch(on: bool) -> None:
    """Annotate the tuned calls of all targets in this process, also of those tuned later, or stop it.

    Raises AituneError where this build of torch has no NVTX.
    """
    global _on
    if on:
        check_nvtx()
    with _lock:
        _on = on
        for dispatch in _installed:
            _set(dispatch, on)


def is_on() -> bool:
    """Whether tuned calls are annotated."""
    return _on


def installed(dispatch: HasSlots) -> None:
    """A dispatch was put into a target."""
    with _lock:
        _installed.add(dispatch)
        _set(dispatch, _on)


def uninstalled(dispatch: HasSlots) -> None:
    """A dispatch was taken off."""
    with _lock:
        _installed.discard(dispatch)
        _set(dispatch, False)


def check_nvtx() -> None:
    """Raise AituneError where this build of torch has no NVTX."""
    try:
        torch.cuda.nvtx.mark("aitune_lab")
    except RuntimeError as error:
        raise AituneError(
            f"NVTX ranges need a build of torch with CUDA, and torch {torch.__version__} has none ({error}). "
            "Leave nvtx off here"
        ) from error


def _set(dispatch: HasSlots, on: bool) -> None:
    for slot in dispatch.slots:
        run = slot.namespace[slot.name]
        plain = run.run if isinstance(run, _Annotated) else run
        slot.namespace[slot.name] = _Annotated(plain, slot.text) if on else plain
