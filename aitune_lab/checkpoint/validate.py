"""Checks a manifest's descriptions of calls before anything is built from them.

A structure names classes that values are put together with, and dispatch writes Python source from names in it. So a
file could name a class that does harm when called, or hide code in a name. Only what recording itself could have
written goes through: containers of the kind that is claimed, identifiers, torch's own dtypes. Classes are looked up
among those imported already; nothing is imported for them.
"""

from __future__ import annotations

import collections
import dataclasses
import keyword
import math
import re

import numpy as np
import torch

from ..capture.structure import resolve_type, value_from_text, value_text
from ..schema import GoldenSample, Leaf, Node, Signature, TensorLeaf, ValueLeaf

_DIM = re.compile(r"\?|([1-9]\d{0,9}\*)?[a-z]\w{0,60}")
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?")
_BUILTIN = {"tuple": "builtins:tuple", "list": "builtins:list"}


def signature_problem(signature: Signature) -> str | None:
    """Why a saved signature can't be used in this process, or None."""
    inputs = signature.inputs
    if not _is_name(signature.method):
        return f"method {signature.method!r} is no name"
    if (inputs.kind, inputs.type) != ("dict", "builtins:dict"):
        return "its inputs are no arguments by name"
    if not all(isinstance(key, str) and _is_name(key.removeprefix("*").removeprefix("*")) for key in inputs.keys):
        return "an argument has no proper name"
    if not all(_is_name(symbol.name) and 0 <= symbol.min <= symbol.opt <= symbol.max for symbol in signature.symbols):
        return "a symbol has no proper name or range"
    known = {symbol.name for symbol in signature.symbols}
    for leaf in signature.tensor_leaves:
        used = {d.rpartition("*")[2] for d in leaf.dims if isinstance(d, str)}
        if not used <= known:
            return f"{leaf.path} has dimensions {sorted(used - known)} without a range"
    if not all(_is_name(device) and _is_dtype(dtype) for device, dtype in signature.autocast):
        return "its autocast context is none of torch's"
    return _parts_problem(signature.inputs, signature.leaves) or (
        # A structure of outputs that varies is recorded as a leaf without a description.
        _parts_problem(signature.outputs, signature.output_leaves) if signature.output_leaves else None
    )


def sample_problem(sample: GoldenSample) -> str | None:
    """Why a saved sample can't be rebuilt in this process, or None."""
    return _parts_problem(sample.inputs, sample.leaves) or _parts_problem(sample.outputs, sample.output_leaves)


def _parts_problem(node: Node, leaves: tuple[Leaf, ...]) -> str | None:
    if _count_leaves(node) != len(leaves):
        return f"its structure has {_count_leaves(node)} leaves, but {len(leaves)} are described"
    return _node_problem(node) or next((p for p in map(_leaf_problem, leaves) if p), None)


def _count_leaves(node: Node) -> int:
    return 1 if node.kind == "leaf" else sum(map(_count_leaves, node.children))


def _node_problem(node: Node) -> str | None:
    if node.kind == "leaf":
        return None if node == Node("leaf") else "a leaf has children"
    if node.kind in ("tuple", "list"):
        if node.type != _BUILTIN[node.kind] or node.keys:
            return f"a {node.kind} is described as {node.type!r}"
    else:
        cls = resolve_type(node.type)
        if cls is None:
            return f"class {node.type} is not imported here; import it before loading"
        if node.kind == "pytree":
            return f"what {node.type} holds beside tensors is known to its own process only"
        if not _fits(node, cls):
            return f"{node.type} is no {node.kind} of that form"
    return next((p for p in map(_node_problem, node.children) if p), None)


def _fits(node: Node, cls: type) -> bool:
    """Whether values of the class are put together as the node's kind says, by code that only stores what it gets."""
    keys = node.keys
    if len(keys) != len(node.children) or len(set(keys)) != len(keys):
        return False
    if node.kind == "dict":
        finite = all(not isinstance(key, float) or math.isfinite(key) for key in keys)
        return finite and (cls is dict or cls is collections.OrderedDict)
    if not all(isinstance(key, str) for key in keys):
        return False
    if node.kind == "namedtuple":
        fields = getattr(cls, "_fields", None)
        if fields is None:
            return issubclass(cls, tuple) and getattr(cls, "n_sequence_fields", None) == len(keys)
        return issubclass(cls, tuple) and keys == tuple(fields)
    if node.kind == "mapping":
        return issubclass(cls, collections.UserDict)
    names = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    return all(key in names and _is_name(str(key)) for key in keys)


def _leaf_problem(leaf: Leaf) -> str | None:
    if isinstance(leaf, TensorLeaf):
        if not (_is_dtype(leaf.dtype) or (leaf.holder == "numpy" and _is_numpy_dtype(leaf.dtype))):
            return f"{leaf.path} has the unknown dtype {leaf.dtype!r}"
        if not isinstance(getattr(torch, leaf.layout, None), torch.layout) or not _DEVICE.fullmatch(leaf.device):
            return f"{leaf.path} has the unknown layout or device {leaf.layout!r}, {leaf.device!r}"
        if not all(d >= 0 if isinstance(d, int) else _DIM.fullmatch(d) for d in leaf.dims):
            return f"{leaf.path} has dimensions that are no sizes: {leaf.dims}"
        return None
    if isinstance(leaf, ValueLeaf):
        try:
            value = value_from_text(leaf.type, leaf.text)
        except Exception:
            return f"the value of {leaf.path} cannot be made here: {leaf.type} {leaf.text[:80]!r}"
        return None if value_text(value) == leaf.text else f"the value of {leaf.path} is not in its canonical form"
    return None if resolve_type(leaf.opaque_type) else f"class {leaf.opaque_type} is not imported here"


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def _is_numpy_dtype(name: str) -> bool:
    try:
        return np.dtype(name).kind in "fiubc"
    except (TypeError, ValueError):
        return False
