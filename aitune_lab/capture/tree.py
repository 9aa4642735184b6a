"""Finds the modules of any target: a module, or any object that holds modules."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import TargetError

MAX_DEPTH = 12
MAX_OBJECTS = 20_000
_LEAF_TYPES = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, type, types.ModuleType)
_FOREIGN = ("torch.", "numpy", "builtins", "threading", "logging", "collections", "concurrent", "PIL", "tokenizers")


@dataclass
class Found:
    """A module with every path at which the target holds it; the first is the one it goes by."""

    module: torch.nn.Module
    paths: list[str] = field(default_factory=list)


def find_modules(target: Any) -> list[Found]:
    """All modules of a target, parents before children, each object once, however often it is held.

    Attributes, items of lists, tuples and dicts, fields of dataclasses, closures and bound arguments of functions are
    followed, in inner objects too. A module's own path comes before its children's: `unet`, `unet.down_blocks.0`.
    """
    found: dict[int, Found] = {}
    seen: set[int] = set()
    queue = collections.deque([("", target, 0)])
    while queue:
        path, value, depth = queue.popleft()
        # By type, not isinstance: mocks and proxies claim other classes.
        if issubclass(type(value), torch.nn.Module):
            for name, child in value.named_modules(remove_duplicate=False):
                full = ".".join(p for p in (path, name) if p)
                known = found.setdefault(id(child), Found(child))
                if full not in known.paths:
                    known.paths.append(full)
                if id(child) not in seen:
                    seen.add(id(child))
                    queue.extend((f"{full}.{k}" if full else k, v, depth + 1) for k, v in _loose(child))
            continue
        if issubclass(type(value), _LEAF_TYPES) or depth > MAX_DEPTH or len(seen) > MAX_OBJECTS or id(value) in seen:
            continue
        seen.add(id(value))
        queue.extend((f"{path}.{k}" if path else k, v, depth + 1) for k, v in _inner(value))
    return list(found.values())


def require_modules(target: Any) -> list[Found]:
    """`find_modules`, but raises TargetError if the target holds none."""
    found = find_modules(target)
    if not found:
        raise TargetError(
            f"no torch.nn.Module was found in this {type(target).__name__}; pass a module, or an object that holds modules "
            "in attributes, lists, tuples or dicts"
        )
    return found


def modules_of(target: Any) -> dict[str, torch.nn.Module]:
    """Module by path, each module once."""
    return {item.paths[0]: item.module for item in find_modules(target)}


def unit_path(path: str, method: str) -> str:
    """What a tunable method goes by: its module's path for `forward`, else with the method's name: `vae.encode`."""
    return path if method == "forward" else ".".join(p for p in (path, method) if p)


def module_path(unit: str, method: str) -> str:
    """The inverse of `unit_path`: the path of the module that has the method."""
    if method == "forward" or (unit != method and not unit.endswith(f".{method}")):
        return unit
    return unit[: -len(method)].rstrip(".")


def _loose(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds beside its registered children: lists, dicts and objects in plain attributes."""
    for name, value in vars(module).items():
        if not name.startswith("_") and not isinstance(value, _LEAF_TYPES) and not callable(value):
            yield name, value


def _inner(value: Any) -> list[tuple[str, Any]]:
    """What an object holds, without plain values; nothing if it can't be looked into (proxies, mocks)."""
    try:
        return [(k, v) for k, v in _held(value) if not issubclass(type(v), _LEAF_TYPES)]
    except Exception:
        return []


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(k), v) for k, v in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(i), v) for i, v in enumerate(value))
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args.{i}", v) for i, v in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a cell not filled yet
                continue
    elif not type(value).__module__.startswith(_FOREIGN):
        yield from vars(value).items() if hasattr(value, "__dict__") else ()
        for cls in type(value).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if isinstance(name, str) and hasattr(value, name):
                    yield name, getattr(value, name)


def outermost(found: Iterable[Found]) -> list[torch.nn.Module]:
    """The modules of a target that lie in no other one."""
    items = list(found)
    inner = {id(child) for item in items for child in item.module.modules() if child is not item.module}
    return [item.module for item in items if id(item.module) not in inner]


def tuned_methods(cls: type) -> list[str]:
    """Public methods of a module's class, beside `forward`, that could be entry points (`encode`, `decode`)."""
    names: list[str] = []
    for base in cls.__mro__:
        if base is torch.nn.Module:
            break
        for name, value in vars(base).items():
            if (
                isinstance(value, types.FunctionType)
                and not name.startswith("_")
                and not hasattr(torch.nn.Module, name)
            ):
                names.append(name)
    return list(dict.fromkeys(names))
