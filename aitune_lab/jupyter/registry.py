"""Which Lab has which target, so that no target is ever tuned by two engines at once."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from ..capture.tree import modules_of
from ..errors import TargetError

if TYPE_CHECKING:
    from .core import LabCore

_lock = threading.Lock()
_labs: weakref.WeakValueDictionary[int, LabCore] = weakref.WeakValueDictionary()
"""The last Lab of each target, by the target's `id`; a Lab holds its target, so the id stays its own."""
_running: dict[int, LabCore] = {}
"""Labs whose engine runs, by the ids of the modules that it may touch."""


def lab_of(target: Any) -> LabCore | None:
    """The last Lab made for this very target that is still there."""
    found = _labs.get(id(target))
    return found if found is not None and found.target is target else None


def remember(lab: LabCore) -> None:
    """This is the target's Lab from now on."""
    _labs[id(lab.target)] = lab


def claim(lab: LabCore) -> None:
    """The Lab's engine is about to run on its target.

    Raises TargetError if another one's runs on the target or on a part of it.
    """
    ids = {id(lab.target), *(id(module) for module in modules_of(lab.target).values())}
    with _lock:
        other = next((_running[i] for i in ids if i in _running and _running[i] is not lab), None)
        if other is not None:
            raise TargetError(
                f"another tune of this {type(other.target).__name__} is running; wait for it with .wait(), or end it with "
                ".cancel()"
            )
        _running.update(dict.fromkeys(ids, lab))


def release(lab: LabCore) -> None:
    """The Lab's engine has ended."""
    with _lock:
        for key in [key for key, held in _running.items() if held is lab]:
            del _running[key]
