"""What a cell executed: the outermost modules that were called, with the first calls of each, as data to tune with."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture.recorder import clone_leaf
from ..capture.structure import flatten_call, unflatten_call

KEPT_CALLS = 4
"""Calls of a module that are kept as data."""


@dataclass
class Executed:
    """A module that was called by other code than a module's, with its first calls.

    Attributes:
        module: the module itself.
        calls: how often it was called.
        data: its first calls, as (arguments, keywords), copied before they ran.
    """

    module: torch.nn.Module
    calls: int = 0
    data: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@contextmanager
def watching() -> Iterator[dict[int, Executed]]:
    """While entered, calls of modules on this thread are noted; those that a module makes itself are not.

    The mapping is by `id` of the module, in the order in which they were first called.
    """
    found: dict[int, Executed] = {}
    mine = threading.get_ident()
    depth = 0
    original = torch.nn.Module.__call__

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if threading.get_ident() != mine or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if depth == 0:
            held = found.setdefault(id(module), Executed(module))
            held.calls += 1
            if len(held.data) < KEPT_CALLS:
                held.data.append(_copied(args, kwargs))
        depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            depth -= 1

    torch.nn.Module.__call__ = noted  # type: ignore[assignment,method-assign]
    try:
        yield found
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]


def names_of(found: Mapping[int, Executed], names: Mapping[str, Any]) -> dict[str, Executed]:
    """The executed modules by the names that lead to them: a variable, or an attribute of one. Others are left out."""
    result: dict[str, Executed] = {}
    for held in found.values():
        name = _name(held.module, names)
        if name is not None:
            result[name] = held
    return result


def _name(module: torch.nn.Module, names: Mapping[str, Any]) -> str | None:
    shown = {name: value for name, value in names.items() if not name.startswith("_")}
    for name, value in shown.items():
        if value is module:
            return name
    for name, value in shown.items():
        for attribute, inner in getattr(value, "__dict__", {}).items():
            if inner is module and attribute.isidentifier():
                return f"{name}.{attribute}"
        if isinstance(value, torch.nn.Module):
            for attribute, child in value.named_children():
                if child is module and attribute.isidentifier():
                    return f"{name}.{attribute}"
    return None


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    flat = flatten_call({"args": args, "kwargs": kwargs})
    copies = unflatten_call(flat.node, [clone_leaf(leaf) for leaf in flat.leaves])
    return tuple(copies["args"]), dict(copies["kwargs"])
