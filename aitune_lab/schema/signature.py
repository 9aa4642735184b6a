"""A call's contract as data: structure, leaves, symbols, points and the facts found while recording."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Key = str | int | float | bool | None
"""A key of a container: a dict key, a field name, or nothing for sequences."""

Dim = int | str
"""One dimension: a number, a symbol (`"b"`) or a whole multiple of one (`"2*b"`)."""

NodeKind = Literal["leaf", "tuple", "list", "dict", "namedtuple", "dataclass", "mapping", "pytree"]


@dataclass(frozen=True)
class Node:
    """One level of a call's structure.

    `type` is `"module:qualname"` of the container's class (empty for leaves), `keys` the dict keys or
    field names in their order. Leaves are numbered by the order in which they are met.
    """

    kind: NodeKind
    type: str = ""
    keys: tuple[Key, ...] = ()
    children: tuple[Node, ...] = ()


LEAF = Node("leaf")


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor (or numpy array) inside a call. `path` reads like Python: `x`, `batch['ids']`, `past[0].k`."""

    path: str
    dtype: str
    dims: tuple[Dim, ...]
    device: str
    layout: str = "strided"
    holder: Literal["torch", "numpy"] = "torch"


@dataclass(frozen=True)
class ValueLeaf:
    """Anything else that is compared by value: None, bool, int, float, str, enum member, dtype, device, …

    `text` is its canonical form: two values of the same `type` are equal if their texts are equal.
    """

    path: str
    type: str
    text: str


@dataclass(frozen=True)
class OpaqueLeaf:
    """An object known only by its class (a custom cache, a `torch.Generator`); the original sees the very object."""

    path: str
    opaque_type: str


Leaf = TensorLeaf | ValueLeaf | OpaqueLeaf


@dataclass(frozen=True)
class Symbol:
    """A dimension that varies, with the range in which executables are used.

    `declared` says that the user gave the range; otherwise it is what was seen while recording.
    """

    name: str
    min: int
    opt: int
    max: int
    declared: bool = False


@dataclass(frozen=True)
class Point:
    """A concrete shape inside a signature: a size for each symbol. Every figure names its point."""

    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.sizes) or "static"

    def as_dict(self) -> dict[str, int]:
        return dict(self.sizes)


@dataclass(frozen=True)
class Alias:
    """An output that shares memory with an input, or with an earlier output: the very tensor, or a view of it."""

    output: str
    input: str
    kind: Literal["same", "view"]


@dataclass(frozen=True)
class Facts:
    """What a module does beside computing outputs from inputs. A candidate that can't keep it is refused.

    Attributes:
        mutated: paths of input leaves changed in place.
        random: the outputs depend on torch's random state.
        state: names of buffers, parameters or attributes (with the submodule's path) that a call changes.
        aliases: outputs that share memory with inputs.
        varying_values: output leaves that are no tensors and differ between samples (`float(y.max())`).
        hooked: submodules that carry forward hooks of the user.
        grad_modes: grad modes seen at calls: `"grad"`, `"no_grad"`, `"inference"`.
        twins: outputs that share elements with an earlier output, whose path stands as `input`.
        strided: paths of input leaves on whose strides the result depends (`as_strided`, `is_contiguous`, a `view` that
            fails): tuned calls take them contiguous only.
    """

    mutated: tuple[str, ...] = ()
    random: bool = False
    state: tuple[str, ...] = ()
    aliases: tuple[Alias, ...] = ()
    varying_values: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    grad_modes: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    twins: tuple[Alias, ...] = ()


@dataclass(frozen=True)
class Signature:
    """A call's contract: arguments by parameter name, structure, leaves, symbols, autocast.

    `inputs` is a dict node whose keys are parameter names (`*args` and `**kwargs` under their own names,
    marked by the stars); arguments equal to their default are left out, so that a call with a default
    spelled out has the same signature. `outputs` and `output_leaves` describe what eager returned.
    """

    method: str
    inputs: Node
    leaves: tuple[Leaf, ...]
    symbols: tuple[Symbol, ...] = ()
    outputs: Node = LEAF
    output_leaves: tuple[Leaf, ...] = ()
    autocast: tuple[tuple[str, str], ...] = ()
    shared: tuple[tuple[int, ...], ...] = ()
    """Groups of tensor leaves, by number, that are one and the same object; all others are different objects."""
    facts: Facts = field(default_factory=Facts)

    @cached_property
    def key(self) -> str:
        """Twelve hex digits: equal for equal contracts, in any process. Facts and outputs don't count."""
        text = json.dumps(
            [
                self.method,
                _node_list(self.inputs),
                [sorted((k, str(v)) for k, v in vars(leaf).items()) for leaf in self.leaves],
                [[s.name, s.min, s.max] for s in self.symbols],
                self.autocast,
                self.shared,
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """One line for people: `(ids: int64[b, s], mask: int64[b, s], causal=True)`."""
        return "(" + ", ".join(leaf_label(leaf) for leaf in self.leaves) + ")"

    @property
    def tensor_leaves(self) -> tuple[TensorLeaf, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorLeaf))


def leaf_label(leaf: Leaf) -> str:
    """`x: float32[b, 3]`, `causal=True` or `cache: DynamicCache`."""
    if isinstance(leaf, TensorLeaf):
        return f"{leaf.path}: {leaf.dtype}[{', '.join(map(str, leaf.dims))}]"
    if isinstance(leaf, ValueLeaf):
        return f"{leaf.path}={leaf.text}"
    return f"{leaf.path}: {leaf.opaque_type.rpartition(':')[2]}"


def _node_list(node: Node) -> list[object]:
    return [node.kind, node.type, list(node.keys), [_node_list(child) for child in node.children]]


def evaluate_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Size of a dimension at a point: `evaluate_dim("2*b", {"b": 3})` is 6. Raises KeyError for an unknown symbol."""
    if isinstance(dim, int):
        return dim
    factor, _, name = dim.rpartition("*")
    return sizes[name] * int(factor or 1)


def dim_symbol(dim: Dim) -> str | None:
    """The symbol in a dimension, or None for a number."""
    return None if isinstance(dim, int) else dim.rpartition("*")[2]
