"""Flattening of calls and outputs into leaves and a structure that is plain data.

torch's own pytree gives some containers people really pass (`UserDict`, `BatchEncoding`, plain dataclasses) as one
opaque leaf, and teaching it those classes would change the user's process. So this is our own flattening: it knows
tuple, list, dict, named tuples, dataclasses (also frozen ones, and the `OrderedDict` dataclasses of transformers and
diffusers), `UserDict`s, and whatever is registered with torch's pytree.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as torch_pytree

from ..schema import LEAF, Dim, Leaf, Node, OpaqueLeaf, TensorLeaf, ValueLeaf

_PRIMITIVES = (type(None), bool, int, float, complex, str, bytes)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_contexts: dict[type, list[Any]] = {}
_placeholders: list[type] = []


@dataclass
class Flat:
    """A value taken apart: its structure, its leaves in order, and a path for each leaf."""

    node: Node
    leaves: list[Any]
    paths: list[str]


def type_key(cls: type) -> str:
    """`"module:qualname"`; two different local classes of the same name get different keys in one process."""
    base = key = f"{cls.__module__}:{cls.__qualname__}"
    number = 1
    while (known := _classes.get(key)) is not None and known is not cls:
        number += 1
        key = f"{base}#{number}"
    _classes[key] = cls
    return key


def resolve_type(key: str) -> type | None:
    """The class of a key, among those seen or already imported; nothing is imported for it."""
    known = _classes.get(key)
    if known is not None:
        return known
    module, _, qualname = key.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def classes_of(keys: Iterable[str]) -> dict[str, tuple[type, list[Any]]]:
    """The classes behind type keys, those known here, with what rebuilds them beside their children (pytree contexts).

    With `adopt_classes` another process understands structures of classes that it could not import.
    """
    known = {key: resolve_type(key) for key in keys}
    return {key: (cls, _contexts.get(cls, [])) for key, cls in known.items() if cls is not None}


def adopt_classes(classes: Mapping[str, tuple[type, list[Any]]]) -> None:
    """Let type keys of another process name the same classes here; to be called before any class is met."""
    for key, (cls, contexts) in classes.items():
        base, _, number = key.partition("#")
        for earlier in [base, *(f"{base}#{i}" for i in range(2, int(number)))] if number else ():
            if earlier not in _classes:  # names are given in order, so those before must be taken
                _placeholders.append(type("Elsewhere", (), {}))
                _classes[earlier] = _placeholders[-1]
        _classes[key] = cls
        if contexts:
            _contexts[cls] = list(contexts)


def is_tensor(value: Any) -> bool:
    """Exactly a tensor, parameter or buffer; subclasses with behaviour of their own are opaque."""
    return type(value) in _TENSOR_TYPES


def is_value(value: Any) -> bool:
    """Whether a leaf is compared by value: primitives, enum members, dtypes, devices, numpy scalars, slices."""
    if type(value) in _PRIMITIVES or isinstance(value, (enum.Enum, np.generic, *_TORCH_VALUES)):
        return True
    if type(value) is slice:
        return all(is_value(part) for part in (value.start, value.stop, value.step))
    return type(value) is range


def value_text(value: Any) -> str:
    """The canonical text of a value leaf: equal texts and equal types mean equal values."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):
        return repr(value.item())
    return repr(value)


def flatten(value: Any, root: str = "output") -> Flat:
    """Take a value apart. Paths start with `root` and read like Python: `output['logits']`, `output[0].hidden`."""
    flat = Flat(LEAF, [], [])
    flat.node = _flatten(value, root, flat, 0)
    return flat


def flatten_call(call: Mapping[str, Any]) -> Flat:
    """Take a normalised call apart (see `CallForm.normalize`); paths start with the parameters' names."""
    flat = Flat(LEAF, [], [])
    children = tuple(_flatten(value, name, flat, 0) for name, value in call.items())
    flat.node = Node("dict", "builtins:dict", tuple(call), children)
    return flat


def _flatten(value: Any, path: str, flat: Flat, depth: int) -> Node:
    parts = _parts(value) if depth < 64 else None
    if parts is None:
        flat.leaves.append(value)
        flat.paths.append(path)
        return LEAF
    kind, key, keys, children = parts
    sequence = kind in ("tuple", "list", "pytree")
    nodes = []
    for i, child in enumerate(children):
        if sequence:
            step = f"[{i}]"
        else:
            step = f"[{keys[i]!r}]" if kind in ("dict", "mapping") else f".{keys[i]}"
        nodes.append(_flatten(child, path + step, flat, depth + 1))
    return Node(kind, key, keys, tuple(nodes))


def _parts(value: Any) -> tuple[Any, str, tuple[Any, ...], list[Any]] | None:
    """(kind, type key, keys, children) of a container, None for a leaf."""
    cls = type(value)
    if cls is tuple:
        return "tuple", "builtins:tuple", (), list(value)
    if cls is list:
        return "list", "builtins:list", (), value
    if cls is dict or cls is collections.OrderedDict:
        if all(type(k) in (str, int, float, bool, type(None)) for k in value):
            return "dict", type_key(cls), tuple(value), list(value.values())
        return None
    if isinstance(value, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")):
        names = getattr(cls, "_fields", None) or tuple(map(str, range(len(value))))
        return "namedtuple", type_key(cls), tuple(names), list(value)
    if isinstance(value, (torch.Tensor, type)):
        return None
    if dataclasses.is_dataclass(value) and not _more_than_fields(value):
        names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        return "dataclass", type_key(cls), names, [getattr(value, name) for name in names]
    if isinstance(value, collections.UserDict) and not _public(value) - {"data"}:
        if all(type(k) is str for k in value.data):
            return "mapping", type_key(cls), tuple(value.data), list(value.data.values())
        return None
    registered = torch_pytree.SUPPORTED_NODES.get(cls)
    if registered is not None and not is_value(value) and cls.__module__ != "collections":
        children, context = registered.flatten_fn(value)
        known = _contexts.setdefault(cls, [])
        if context not in known:
            known.append(context)
        return "pytree", type_key(cls), (known.index(context),), list(children)
    return None


def _public(value: Any) -> set[str]:
    return {name for name in getattr(value, "__dict__", ()) if not name.startswith("_")}


def _more_than_fields(value: Any) -> bool:
    """Whether a dataclass holds attributes or items that are no fields, which taking it apart would lose."""
    names = {f.name for f in dataclasses.fields(value)}
    return bool(_public(value) - names) or (isinstance(value, dict) and not names >= set(value))


def unflatten(node: Node, leaves: Sequence[Any], *, fallback: bool = False) -> Any:
    """Put a value together again, with the same classes.

    With `fallback` a class that is not imported here becomes a dict or tuple; otherwise it raises TypeError.
    Dataclasses are filled field by field without calling `__init__`, as copying would.
    """
    value, used = _unflatten(node, leaves, 0, fallback)
    if used != len(leaves):
        raise ValueError(f"the structure holds {used} leaves, but got {len(leaves)}")
    return value


def unflatten_call(node: Node, leaves: Sequence[Any]) -> dict[str, Any]:
    """The normalised call of `flatten_call`."""
    call: dict[str, Any] = unflatten(node, leaves)
    return call


def _unflatten(node: Node, leaves: Sequence[Any], at: int, fallback: bool) -> tuple[Any, int]:
    if node.kind == "leaf":
        return leaves[at], at + 1
    children = []
    for child in node.children:
        value, at = _unflatten(child, leaves, at, fallback)
        children.append(value)
    return build_container(node, children, fallback=fallback), at


def build_container(node: Node, children: list[Any], *, fallback: bool = False) -> Any:
    """One level of `unflatten`: the container of `node` around its children."""
    if node.kind == "list":
        return children
    if node.kind == "tuple":
        return tuple(children)
    cls = resolve_type(node.type)
    if cls is None:
        if not fallback:
            raise TypeError(f"class {node.type} of a call's structure is not imported here")
        return tuple(children) if node.kind in ("namedtuple", "pytree") else dict(zip(node.keys, children, strict=True))
    return constructor(node.kind, cls, node.keys)(children)


def constructor(kind: str, cls: type, keys: tuple[Any, ...]) -> Any:
    """A function from the list of children to the container, for the kinds that have a class."""
    made: Any = cls
    if kind == "dict":
        return lambda children: made(zip(keys, children, strict=True))
    if kind == "namedtuple":
        return getattr(cls, "_make", cls)
    if kind == "pytree":
        context = _contexts[cls][keys[0]]
        rebuild = torch_pytree.SUPPORTED_NODES[cls].unflatten_fn
        return lambda children: rebuild(children, context)
    if kind == "mapping":
        return lambda children: _filled(made, {"data": dict(zip(keys, children, strict=True))})
    if issubclass(cls, dict):
        return lambda children: _dict_dataclass(made, keys, children)
    return lambda children: _filled(made, dict(zip(keys, children, strict=True)))


def _filled(cls: Any, attributes: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _dict_dataclass(cls: Any, keys: tuple[Any, ...], children: list[Any]) -> Any:
    """transformers' ModelOutput, diffusers' BaseOutput and their like: fields, and items for those that aren't None."""
    made = _filled(cls, dict(zip(keys, children, strict=True)))
    setitem = collections.OrderedDict.__setitem__ if issubclass(cls, collections.OrderedDict) else dict.__setitem__
    for key, value in zip(keys, children, strict=True):
        if value is not None:
            setitem(made, key, value)
    return made


def describe_leaf(value: Any, path: str) -> Leaf:
    """A leaf as data, with concrete dimensions."""
    if is_tensor(value):
        layout = str(value.layout).removeprefix("torch.")
        dims: tuple[Dim, ...] = tuple(value.shape)
        return TensorLeaf(path, str(value.dtype).removeprefix("torch."), dims, str(value.device), layout)
    if type(value) is np.ndarray and value.dtype.kind in "fiubc":
        dims = tuple(value.shape)
        return TensorLeaf(path, str(value.dtype), dims, "cpu", "strided", "numpy")
    if is_value(value):
        return ValueLeaf(path, type_key(type(value)), value_text(value))
    return OpaqueLeaf(path, type_key(type(value)))


def value_from_text(type_name: str, text: str) -> Any:
    """The value of a value leaf. Raises ValueError for one that can't be made from its text in this process."""
    if type_name.partition("#")[0] in {f"builtins:{t.__name__}" for t in _PRIMITIVES}:
        if text in ("nan", "inf", "-inf"):
            return float(text)
        return complex(text) if type_name == "builtins:complex" else ast.literal_eval(text)
    cls = resolve_type(type_name)
    if cls is torch.Size:
        return torch.Size(ast.literal_eval(text.removeprefix("torch.Size(").removesuffix(")")))
    if cls is torch.device:
        return torch.device(
            *ast.literal_eval(
                "(" + text.removeprefix("device(").removesuffix(")").replace("type=", "").replace("index=", "") + ",)"
            )
        )
    if cls in (torch.dtype, torch.layout, torch.memory_format):
        return getattr(torch, text.removeprefix("torch."))
    if cls is not None and issubclass(cls, enum.Enum):
        return cls[text.rpartition(".")[2]]
    if cls is not None and issubclass(cls, np.generic):
        return cls(ast.literal_eval(text))  # type: ignore[call-arg]
    if cls is range or cls is slice:
        arguments = ast.literal_eval("(" + text.partition("(")[2].removesuffix(")") + ",)")
        return cls(*arguments)
    raise ValueError(f"a value of type {type_name} cannot be made from {text!r}")
