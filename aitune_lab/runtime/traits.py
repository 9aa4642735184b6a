"""What a traced call depends on beside weights: submodules, what runs around their `forward`, plain attributes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..capture.swap import SwappedMethod

_PLAIN = (bool, int, float, complex, str)
_TORCH_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def plain_attributes(module: torch.nn.Module, ignored: Collection[str]) -> dict[tuple[str, str], str]:
    """The text of every number, string and tuple of those that stands in an attribute, by path and name."""
    return {
        (path, key): repr(value)
        for path, child in module.named_modules()
        for key, value in list(vars(child).items())
        if key not in _TORCH_ATTRIBUTES and _is_plain(value) and (f"{path}.{key}" if path else key) not in ignored
    }


def parts_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """All submodules, each followed by its children: equal only for the same modules in the same places."""
    return [p for child in module.modules() for p in (child, *child._modules.values()) if p is not None]


def assigned_forward(entries: dict[str, Any]) -> Any:
    """The `forward` that the user has put into an instance, beneath ours; None if it is the class's."""
    current = entries.get("forward")
    while isinstance(current, SwappedMethod):
        current = current.previous
    return current


def around(module: torch.nn.Module) -> list[Any]:
    """What makes calls of submodules what they are: classes, hooks and instances' own `forward`."""
    return [
        (
            type(child),
            tuple(child._forward_hooks.values()),
            tuple(child._forward_pre_hooks.values()),
            assigned_forward(vars(child)),
        )
        for child in module.modules()
        if child is not module
    ]
