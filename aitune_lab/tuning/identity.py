"""Digests of what a module computes, as far as it can be read: its code, its settings, how it is set up; and of data.

Two modules of equal digests and equal weights give equal outputs, short of what happens in compiled code or in objects
that can't be read. What is loaded from the store is compared with eager again, so a change that is not seen here costs
time, never right answers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..capture.structure import Flat, is_tensor, is_value, type_key, value_text
from ..capture.swap import SwappedMethod, is_ours, original_method
from ..checkpoint.structure import class_name, structure_of
from ..runtime.traits import assigned_forward

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "aitune_lab"}
"""Packages whose code goes by their versions, which are in every key."""
_NO_SETTINGS = frozenset(vars(torch.nn.Module())) | {"forward", "_old_forward", "_hf_hook"}
"""Attributes that hold no settings, beside what tuning itself has put there."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEPTH = 3
"""How deep settings held in objects (a config of a config) are read."""
_MOST_ITEMS = 1000


class Digest:
    """SHA-256 over parts, each of which is set apart from the next."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *parts: object) -> None:
        for part in parts:
            text = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            self._hash.update(len(text).to_bytes(8, "big") + text)

    def tensor(self, tensor: torch.Tensor) -> None:
        """A tensor's dtype, shape and content; one that can't be read as bytes by its description alone."""
        self.add(type_key(type(tensor)), tensor.dtype, tuple(tensor.shape), tensor.layout)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
            return
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        self.add(flat.view(torch.uint8).numpy().tobytes())

    def hex(self) -> str:
        return self._hash.hexdigest()


def module_digest(module: torch.nn.Module, method: str, state: Collection[str] = ()) -> str:
    """Digest of classes, settings, code reached from the method, and how weights are laid out; weights' values don't count.

    Args:
        state: attributes (with the submodule's path) that calls change; they don't count.
    """
    digest, code = Digest(), _Code()
    for part in structure_of(module):
        digest.add(part.path, part.type, part.settings)
    for path, child in module.named_modules():
        digest.add(path, child.training)
        for name, value in sorted(vars(child).items()):
            full = f"{path}.{name}" if path else name
            if name not in _NO_SETTINGS and full not in state and not is_ours(value):
                digest.add(name, *_described(value, _DEPTH, code))
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.layout is torch.strided:
                    digest.add(name, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values()):
            digest.add("hook")
            code.function(hook, None)
        code.function(assigned_forward(vars(child)) or type(child).forward, type(child))
    code.function(original_method(module, method), type(module))
    digest.add(code.hex())
    return digest.hex()


def function_digest(function: Any) -> str:
    """Digest of a function's code and of what it calls."""
    code = _Code()
    code.function(function, None)
    return code.hex()


def flat_digest(flats: Sequence[Flat]) -> str | None:
    """Digest of calls taken apart: structure, tensors and values; None if they hold objects that can't be read."""
    digest = Digest()
    for flat in flats:
        digest.add(json.dumps(flat.paths), flat.node)
        if not leaves_into(digest, flat.leaves):
            return None
    return digest.hex()


def leaves_into(digest: Digest, leaves: Sequence[Any]) -> bool:
    """Add leaves to a digest; False if one of them is an object that can't be read."""
    for leaf in leaves:
        if is_tensor(leaf):
            digest.tensor(leaf)
            digest.add(leaf.device, leaf.stride() if leaf.layout is torch.strided else "")
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiubc":
            digest.add(leaf.dtype, leaf.shape, np.ascontiguousarray(leaf).tobytes())
        elif is_value(leaf):
            digest.add(type_key(type(leaf)), value_text(leaf))
        else:
            return False
    return True


def _described(value: Any, depth: int, code: _Code) -> Iterator[object]:
    """What can be read of an attribute, in parts."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, torch.Tensor):
        held = Digest()
        held.tensor(value)
        yield held.hex()
    elif isinstance(value, torch.nn.Module):
        yield class_name(value)  # modules in attributes that are no submodules are not followed
    elif isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)):
        yield "function"
        code.function(value, None)
    elif isinstance(value, (list, tuple)) and depth:
        yield f"{type(value).__name__} {len(value)}"
        for item in value[:_MOST_ITEMS]:
            yield from _described(item, depth - 1, code)
    elif isinstance(value, dict) and depth:
        yield f"{type(value).__name__} {len(value)}"
        for key, item in list(value.items())[:_MOST_ITEMS]:
            if isinstance(key, _PLAIN):
                yield repr(key)
                yield from _described(item, depth - 1, code)
    elif isinstance(value, (set, frozenset)):
        yield sorted(repr(item) for item in value if isinstance(item, _PLAIN))
    else:
        yield class_name(value)
        if depth and (hasattr(value, "__dict__") or dataclasses.is_dataclass(value)) and not isinstance(value, type):
            for name, item in sorted(getattr(value, "__dict__", {}).items()):
                yield name
                yield from _described(item, depth - 1, code)


class _Code:
    """A digest over functions and whatever of the user's code they reach by name."""

    def __init__(self) -> None:
        self._digest = Digest()
        self._seen: set[Any] = set()

    def hex(self) -> str:
        return self._digest.hex()

    def function(self, value: Any, owner: type | None) -> None:
        """Add a function, method or partial; `owner` is the class in whose methods names of `self` are looked up."""
        for found in self._unwrapped(value):
            if not isinstance(found, types.FunctionType):
                self._digest.add(getattr(found, "__qualname__", None) or type_key(type(found)))
            elif _is_foreign(found):
                self._digest.add(found.__module__, found.__qualname__)
            else:
                self._user_function(found, owner)

    def _unwrapped(self, value: Any) -> Iterator[Any]:
        while isinstance(value, SwappedMethod):
            value = value.original()
        if isinstance(value, functools.partial):
            self._digest.add(repr([x for x in (*value.args, *value.keywords.items()) if isinstance(x, _PLAIN)]))
            yield from self._unwrapped(value.func)
        elif isinstance(value, property):
            yield from (f for f in (value.fget,) if f is not None)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            yield from self._unwrapped(value.__func__)
        else:
            yield value

    def _user_function(self, function: types.FunctionType, owner: type | None) -> None:
        if (function.__code__, owner) in self._seen:
            return
        self._seen.add((function.__code__, owner))
        self._digest.add(repr([d for d in function.__defaults__ or () if isinstance(d, _PLAIN)]))
        for cell in function.__closure__ or ():
            try:
                self._reached(cell.cell_contents, owner)
            except ValueError:
                continue  # not filled yet
        self._body(function.__code__, function.__globals__, owner)

    def _body(self, code: types.CodeType, names: dict[str, Any], owner: type | None) -> None:
        self._digest.add(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._body(constant, names, owner)
            else:
                self._digest.add(sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant))
        for name in code.co_names:
            if name in names:
                self._reached(names[name], None, code.co_names)
            elif owner is not None:
                attribute = next((vars(c)[name] for c in owner.__mro__ if name in vars(c)), None)
                if isinstance(attribute, (types.FunctionType, property, staticmethod, classmethod)):
                    self.function(attribute, owner)

    def _reached(self, value: Any, owner: type | None, names: Sequence[str] = ()) -> None:
        """Something that code names: constants count by value, code by its own digest, other things not at all."""
        if isinstance(value, _PLAIN):
            self._digest.add(repr(value))
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value, owner)
        elif isinstance(value, types.ModuleType) and not _is_foreign(value):
            for name in names:
                attribute = vars(value).get(name)
                if isinstance(attribute, types.FunctionType):
                    self.function(attribute, None)
        elif isinstance(value, type) and not _is_foreign(value) and value not in self._seen:
            self._seen.add(value)
            for name, attribute in sorted(vars(value).items()):
                if isinstance(attribute, (types.FunctionType, staticmethod, classmethod)):
                    self._digest.add(name)
                    self.function(attribute, None)


def _is_foreign(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return name.partition(".")[0] in _FOREIGN
