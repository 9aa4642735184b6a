"""The one way in which aitune_lab gets between a module and its `forward` (or another method).

A swapped method is a `functools.partial` subclass in the instance's `__dict__`: class, identity, hooks, `state_dict` and
`isinstance` stay what they were, a call costs no extra Python frame, and Dynamo traces through it. Where accelerate
has put a hook, its `_old_forward` is swapped, so that its hook still runs around. Copies and pickles of the module
are the plain original: instance entries `__reduce_ex__`, `__getstate__` (and `__deepcopy__` where the class has one)
lift our entries while the class does the work.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import TargetError


class SwappedMethod(functools.partial):  # type: ignore[type-arg]
    """What stands in a module's `__dict__` in place of a method. Called, it runs the function it was made with."""

    module_ref: weakref.ref[torch.nn.Module]
    method: str
    previous: Any
    """What stood in the instance before: another callable, or None where the class's method was used."""

    def original(self) -> Callable[..., Any]:
        """The method as it was before the swap, bound to its module."""
        module = self.module_ref()
        if module is None:
            raise TargetError(f"the module of this {self.method} no longer exists")
        if self.previous is not None:
            return self.previous  # type: ignore[no-any-return]
        return getattr(type(module), self.method).__get__(module)  # type: ignore[no-any-return]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original()

    @property
    def _torchscript_modifier(self) -> Any:
        # torch.jit.script asks this of every method that it compiles; it would compile the dispatch. torch.jit.trace,
        # which sees the original, asks too, whether the method is exported.
        if sys._getframe(2).f_code.co_name == "module_has_exports":
            return None
        raise TargetError("torch.jit.script cannot compile a tuned module: call aitune_lab.unwrap(target) first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.original()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.module_ref(), self.method)


class _Kept:
    """Something of ours that lives and dies with a module, and is not copied with it."""

    def __init__(self, value: Any) -> None:
        self.value = value


_KEPT = "_aitune_lab"


def keep(module: torch.nn.Module, value: Any) -> None:
    """Attach a value to a module that has swaps; None takes it off again."""
    if value is None:
        module.__dict__.pop(_KEPT, None)
    else:
        module.__dict__[_KEPT] = _Kept(value)


def kept(module: torch.nn.Module) -> Any:
    """The value attached by `keep`, or None."""
    held = module.__dict__.get(_KEPT)
    return held.value if isinstance(held, _Kept) else None


def is_ours(value: Any) -> bool:
    """Whether something in a module's `__dict__` was put there by `swap` or `keep`."""
    return isinstance(value, (SwappedMethod, _CopyHook, _RefuseReplicas, _RefuseCopies, _Kept))


class _Lifted:
    """While entered, the module's `__dict__` holds what it held before any swap."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.entries = module.__dict__

    def __enter__(self) -> None:
        self.taken: dict[str, Any] = {}
        for name, value in list(self.entries.items()):
            if is_ours(value):
                self.taken[name] = value
                if isinstance(value, SwappedMethod) and value.previous is not None:
                    self.entries[name] = value.previous
                else:
                    del self.entries[name]

    def __exit__(self, *_: object) -> None:
        self.entries.update(self.taken)


class _CopyHook:
    """An instance entry that runs the class's own copy protocol on the module without our entries."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module_ref = weakref.ref(module)
        self.name = name

    def __call__(self, *args: Any) -> Any:
        module = self.module_ref()
        assert module is not None
        with _Lifted(module):
            if self.name == "__getstate__":
                # Before Python 3.11 object has no __getstate__.
                own = getattr(type(module), "__getstate__", None)
                state = own(module) if own is not None else module.__dict__
                return dict(state) if state is module.__dict__ else state
            result = getattr(module, self.name)(*args)
            if isinstance(result, tuple) and len(result) > 2 and result[2] is module.__dict__:
                result = (*result[:2], dict(result[2]), *result[3:])
            return result


class _RefuseReplicas:
    """`nn.DataParallel` copies `__dict__` onto replicas, whose calls would then use this module's executables."""

    def __call__(self) -> Any:
        raise TargetError("nn.DataParallel cannot replicate a tuned module: call aitune_lab.unwrap(target) first")


class _RefuseCopies:
    """An instance entry in place of a copy protocol, for a module that can't be copied any more."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, *_: Any) -> Any:
        raise TargetError(self.reason)


def refuse_copies(module: torch.nn.Module, reason: str) -> None:
    """Let copies and pickles of a module raise TargetError with the reason, for good."""
    for name in ("__reduce_ex__", "__deepcopy__"):
        module.__dict__[name] = _RefuseCopies(reason)


def _slot(module: torch.nn.Module, method: str) -> str:
    hooked = method == "forward" and "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__
    return "_old_forward" if hooked else method


def swap(module: torch.nn.Module, method: str, function: Callable[..., Any]) -> SwappedMethod:
    """Let calls of `module.method` run `function`; gives the entry that `restore` takes back.

    Raises TargetError if the module has no such method, or is a script module (whose methods can't be replaced).
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise TargetError("a torch.jit script module runs as compiled TorchScript; its forward cannot be replaced")
    if not callable(getattr(module, method, None)):
        raise TargetError(f"{type(module).__name__} has no method {method!r}")
    slot = _slot(module, method)
    entry = SwappedMethod(function)
    entry.module_ref = weakref.ref(module)
    entry.method = method
    entry.previous = module.__dict__.get(slot)
    entries = module.__dict__
    entries[slot] = entry
    for name in ("__reduce_ex__", "__getstate__", "__deepcopy__"):
        if name not in entries and (name != "__deepcopy__" or hasattr(type(module), name)):
            entries[name] = _CopyHook(module, name)
    entries.setdefault("_replicate_for_data_parallel", _RefuseReplicas())
    return entry


def restore(entry: SwappedMethod) -> None:
    """Take a swap back, exactly, also from beneath later ones.

    Taking it back twice, or after the user replaced the method, does nothing.
    """
    module = entry.module_ref()
    if module is None:
        return
    entries = module.__dict__
    for slot in (entry.method, "_old_forward"):
        current = entries.get(slot)
        if current is entry:
            if entry.previous is not None or slot != entry.method:
                entries[slot] = entry.original()  # accelerate needs its `_old_forward`
            else:
                del entries[slot]
        while isinstance(current, SwappedMethod):
            if current.previous is entry:
                current.previous = entry.previous
            current = current.previous
    if not any(isinstance(value, SwappedMethod) for value in entries.values()):
        for name in ("__reduce_ex__", "__getstate__", "__deepcopy__", "_replicate_for_data_parallel"):
            if isinstance(entries.get(name), (_CopyHook, _RefuseReplicas)):
                del entries[name]


def swapped(module: torch.nn.Module) -> list[SwappedMethod]:
    """The swaps in force on a module."""
    return [value for value in list(module.__dict__.values()) if isinstance(value, SwappedMethod)]


def original_method(module: torch.nn.Module, method: str) -> Callable[..., Any]:
    """The module's method beneath any swap of ours (and beneath accelerate's hook)."""
    current = module.__dict__.get(_slot(module, method))
    if current is None:
        return getattr(module, method)  # type: ignore[no-any-return]
    while isinstance(current, SwappedMethod):
        current = current.original()
    return current  # type: ignore[no-any-return]
