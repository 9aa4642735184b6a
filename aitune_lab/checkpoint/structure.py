"""What a module computes beside its weights, as far as it can be seen: its submodules' classes and settings.

Equal weights fit many modules: GELU in place of ReLU, another stride, another `eps`, another number of heads.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Any

import torch

from ..capture.structure import type_key
from ..capture.swap import SwappedMethod
from ..schema import Submodule

_TORCH_ATTRIBUTES = set(vars(torch.nn.Module()))
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_KINDS: tuple[Any, ...] = (bool, int, float, complex)


def class_name(value: Any) -> str:
    """`module:qualname` of an object's class, equal in every process that imports it from the same place."""
    # Local classes of one name are numbered within a process.
    return type_key(type(value)).partition("#")[0]


def same_class(saved: str, own: str) -> bool:
    """Equal names; a class of a script or notebook (`__main__`) may come from a module of its own elsewhere."""
    (saved_module, _, saved_name), (own_module, _, own_name) = saved.partition(":"), own.partition(":")
    return saved_name == own_name and (saved_module == own_module or "__main__" in (saved_module, own_module))


def structure_of(module: torch.nn.Module) -> tuple[Submodule, ...]:
    """The module itself (path `""`) and all submodules, under every name that they have."""
    return tuple(
        Submodule(path, class_name(child), _digest(_representation(child)), _numbers(child))
        for path, child in module.named_modules(remove_duplicate=False)
    )


def structure_mismatch(
    saved: Collection[Submodule], module: torch.nn.Module, state: Collection[str] = ()
) -> str | None:
    """What differs first between a module and the saved one, in words; None if nothing does.

    Args:
        state: attributes (with the submodule's path) that calls change; they don't count.
    """
    children = dict(module.named_modules(remove_duplicate=False))
    known = {item.path for item in saved}
    extra = next((path for path in children if path not in known), None)
    for item in saved:
        child = children.get(item.path)
        if child is None:
            return f"it lacks submodule {item.path!r}"
        what = f"submodule {item.path!r}" if item.path else "it"
        own = class_name(child)
        if not same_class(item.type, own):
            return f"{what} is a {own}, but was a {item.type}"
        numbers = dict(_numbers(child))
        for name, value in item.numbers:
            here = numbers.get(name, "None")
            # None often stands where a first call fills something in.
            if here == value or "None" in (here, value) or f"{item.path}.{name}".removeprefix(".") in state:
                continue
            return f"{what} has {name}={here}, but had {name}={value}"
        if item.settings != _digest(_representation(child)):
            shown = f"{type(child).__name__}({_representation(child)[:200]})"
            return f"{what} is set up otherwise than the saved one; here it is {shown}"
    if extra is not None:
        return f"it has submodule {extra!r}, which the saved one had not"
    return None


def foreign_code(module: torch.nn.Module, method: str) -> str | None:
    """What of the user's runs inside a module's method that an executable made elsewhere leaves out; None if nothing.

    That is forward hooks on submodules, and a `forward` put on an instance (on the module itself: the method).
    """
    for path, child in module.named_modules():
        if path and (child._forward_hooks or child._forward_pre_hooks):
            return f"submodule {path!r} has forward hooks here, which it would not run"
        name = "forward" if path else method
        own = _assigned(child, name)
        # What `m.forward = m.forward` leaves behind is the class's own method.
        if own is not None and getattr(own, "__func__", own) is not getattr(type(child), name, None):
            where = f"submodule {path!r}" if path else "the module"
            return f"{where} has a {name} of its own here (assigned on the instance), which it would not run"
    return None


def _assigned(module: torch.nn.Module, name: str) -> Any:
    """What the user put into the instance in place of a method: beneath our swaps, and beneath accelerate's hook."""
    hooked = name == "forward" and "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    current = vars(module).get("_old_forward" if hooked else name)
    while isinstance(current, SwappedMethod):
        current = current.previous
    return current


def _representation(module: torch.nn.Module) -> str:
    try:
        return _ADDRESS.sub("0x", module.extra_repr())
    except Exception:  # the user's code; what it can't show is compared by its numbers
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _numbers(module: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    """Plain attributes that are numbers, None or tuples of those; strings (paths, devices) differ between machines."""
    found = ((name, _text(value)) for name, value in vars(module).items() if name not in _TORCH_ATTRIBUTES)
    return tuple(sorted((name, text) for name, text in found if text is not None))


def _text(value: Any) -> str | None:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        parts = [_text(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    for kind in _KINDS:
        if isinstance(value, kind):
            return repr(kind(value))  # of a subclass (an enum, a NumPy scalar) the number alone
    return None
