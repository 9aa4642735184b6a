"""Tells watches of what is registered on modules: torch has hooks for that on all modules together only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.utils._named_member_accessor


class Watch(Protocol):
    """Who listens."""

    def mark(self, found: str) -> None: ...


_listeners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[Watch]] = weakref.WeakKeyDictionary()
_hooks: list[Callable[[], None]] = []
_hooks_lock = threading.RLock()


def _add_hooks() -> None:
    """Global, only while something is watched: torch has no such hooks on instances."""
    hooks = torch.nn.modules.module
    register: list[Callable[..., Any]] = [
        hooks.register_module_parameter_registration_hook,
        hooks.register_module_buffer_registration_hook,
        hooks.register_module_module_registration_hook,
    ]
    _hooks.extend(add(_registered).remove for add in register)
    # `torch.func.functional_call` writes parameters into the modules' dicts without registering them.
    accessor = torch.nn.utils._named_member_accessor
    original = accessor.swap_tensor

    def swap_tensor(module: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        result = original(module, name, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _registered(module, name, None)
        return result

    def put_back() -> None:
        if accessor.swap_tensor is swap_tensor:
            accessor.swap_tensor = original

    accessor.swap_tensor = swap_tensor
    _hooks.append(put_back)


def listen(module: torch.nn.Module, watch: Watch) -> None:
    """Tell the watch of parameters, buffers and submodules registered on the module or any submodule."""
    with _hooks_lock:
        if not _hooks:
            _add_hooks()
        for child in module.modules():
            _listeners.setdefault(child, weakref.WeakSet()).add(watch)
    weakref.finalize(watch, _remove_idle_hooks)


def unlisten(watch: Watch) -> None:
    """Forget a watch, also on modules that were replaced since; the last one takes the hooks with it."""
    with _hooks_lock:
        for child, watches in list(_listeners.items()):
            watches.discard(watch)
            if not watches:
                del _listeners[child]
    _remove_idle_hooks()


def _remove_idle_hooks() -> None:
    if not any(map(len, list(_listeners.values()))):
        while _hooks:
            _hooks.pop()()


def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    for watch in list(_listeners.get(module, ())):
        watch.mark(f"{name!r} was registered or replaced")
