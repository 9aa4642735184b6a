"""Whatever people pass comes apart into leaves and goes together again, of the same classes."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings, strategies as st

from aitune_lab.capture.structure import (
    describe_leaf,
    flatten,
    flatten_call,
    resolve_type,
    type_key,
    unflatten,
    unflatten_call,
    value_from_text,
    value_text,
)
from aitune_lab.schema import OpaqueLeaf, TensorLeaf, ValueLeaf, from_data, to_data
from aitune_lab.schema.signature import Node


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


class Named(NamedTuple):
    a: Any
    b: Any = None


class Own(collections.UserDict):
    pass


class Registered:
    def __init__(self, parts: list[Any], note: str) -> None:
        self.parts, self.note = parts, note

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and same(self.parts, other.parts) and self.note == other.note

    __hash__ = None  # type: ignore[assignment]


torch_pytree.register_pytree_node(
    Registered, lambda r: (r.parts, r.note), lambda parts, note: Registered(list(parts), note)
)


class Colour(enum.Enum):
    RED = 1


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from([Colour.RED, torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided]),
    st.sampled_from([np.float32(1.5), np.int64(3), slice(0, 4, None), range(3)]),
)
arrays = st.builds(lambda n, kind: kind(n), st.integers(0, 3), st.sampled_from([torch.arange, np.arange]))
names = st.text("abc", min_size=1, max_size=3)


def containers(inner: Any) -> Any:
    lists = st.lists(inner, max_size=3)
    keys = st.one_of(names, st.integers(0, 5), st.booleans(), st.none())
    return st.one_of(
        lists,
        lists.map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(names, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(names, inner, max_size=3).map(Own),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Named, inner, inner),
        st.builds(Registered, lists, st.text(max_size=2)),
    )


things = st.recursive(st.one_of(values, arrays), containers, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Equal classes, equal content, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (dict, collections.UserDict)):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b or (a != a and b != b)


@given(things)
@settings(max_examples=150, deadline=None)
def test_round_trip(value: Any) -> None:
    flat = flatten(value)
    assert len(flat.leaves) == len(flat.paths)
    again = unflatten(flat.node, flat.leaves)
    assert same(again, value)
    second = flatten(again)
    assert second.node == flat.node
    assert second.paths == flat.paths
    assert all(x is y for x, y in zip(flat.leaves, second.leaves, strict=True))


@given(things)
@settings(max_examples=80, deadline=None)
def test_structure_is_plain_data(value: Any) -> None:
    flat = flatten(value)
    assert from_data(to_data(flat.node), Node) == flat.node
    assert len(set(flat.paths)) == len(flat.paths) or any(type(k) is not str for k in _keys(flat.node))


def _keys(node: Node) -> list[Any]:
    return [*node.keys, *(k for child in node.children for k in _keys(child))]


@given(st.dictionaries(names, things, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_calls_round_trip(call: dict[str, Any]) -> None:
    flat = flatten_call(call)
    assert same(unflatten_call(flat.node, flat.leaves), call)


@given(values)
@settings(max_examples=150, deadline=None)
def test_values_come_back_from_their_text(value: Any) -> None:
    leaf = describe_leaf(value, "v")
    assert isinstance(leaf, ValueLeaf)
    try:
        made = value_from_text(leaf.type, leaf.text)
    except ValueError:
        assert isinstance(value, slice) or not isinstance(value, (int, float, str, bytes, bool, type(None)))
        return
    assert type(made) is type(value)
    assert value_text(made) == value_text(value)


def test_paths_read_like_python() -> None:
    value = {"ids": [torch.ones(1), Plain(a=(1, 2), b={"x y": 3})], 4: Named(5)}
    assert flatten(value, "batch").paths == [
        "batch['ids'][0]",
        "batch['ids'][1].a[0]",
        "batch['ids'][1].a[1]",
        "batch['ids'][1].b['x y']",
        "batch[4].a",
        "batch[4].b",
    ]


def test_classes_of_transformers_and_diffusers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    base = pytest.importorskip("transformers.tokenization_utils_base")
    diffusers = pytest.importorskip("diffusers.utils")

    @dataclasses.dataclass
    class Images(diffusers.BaseOutput):
        images: Any
        extra: Any = None

    tensor = torch.ones(2)
    made = outputs.BaseModelOutput(last_hidden_state=tensor, hidden_states=(tensor, tensor))
    flat = flatten(made)
    again = unflatten(flat.node, flat.leaves)
    assert type(again) is outputs.BaseModelOutput
    assert again.keys() == made.keys()
    assert again[0] is tensor
    assert again.attentions is None
    assert again.to_tuple() == made.to_tuple()

    encoding = base.BatchEncoding({"input_ids": tensor, "attention_mask": tensor})
    flat = flatten(encoding)
    again = unflatten(flat.node, flat.leaves)
    assert type(again) is base.BatchEncoding
    assert again["input_ids"] is tensor
    assert again.data.keys() == encoding.data.keys()

    images = Images(images=tensor)
    flat = flatten(images)
    again = unflatten(flat.node, flat.leaves)
    assert type(again) is Images
    assert again["images"] is again.images is tensor
    assert again.extra is None


def test_return_types_of_torch() -> None:
    made = torch.max(torch.ones(2, 3), dim=1)
    flat = flatten(made)
    again = unflatten(flat.node, flat.leaves)
    assert type(again) is type(made)
    assert again.values is made.values


def test_our_flattening_teaches_torch_nothing() -> None:
    before = set(torch_pytree.SUPPORTED_NODES)
    flatten([Plain(1), Own(a=1), Named(2)])
    assert set(torch_pytree.SUPPORTED_NODES) == before


def test_leaves_are_described() -> None:
    described = describe_leaf(torch.ones(2, 3, dtype=torch.int64), "x")
    assert described == TensorLeaf("x", "int64", (2, 3), "cpu")
    assert describe_leaf(np.ones(2, np.float32), "x") == TensorLeaf("x", "float32", (2,), "cpu", "strided", "numpy")
    assert describe_leaf(torch.eye(2).to_sparse(), "x").layout == "sparse_coo"  # type: ignore[union-attr]
    assert describe_leaf(torch.nn.Parameter(torch.ones(1)), "x") == TensorLeaf("x", "float32", (1,), "cpu")
    assert isinstance(describe_leaf(torch.Generator(), "g"), OpaqueLeaf)
    assert isinstance(describe_leaf(np.array(["a"]), "s"), OpaqueLeaf)
    subclass = torch.ones(1).as_subclass(type("Sub", (torch.Tensor,), {}))
    assert isinstance(describe_leaf(subclass, "t"), OpaqueLeaf)


def test_two_local_classes_of_one_name_are_two() -> None:
    def make() -> type:
        class Local:
            pass

        return Local

    a, b = make(), make()
    assert type_key(a) != type_key(b)
    assert type_key(a) == type_key(a)
    assert resolve_type(type_key(a)) is a
    assert resolve_type(type_key(b)) is b
    assert resolve_type("no_such_module:Thing") is None


def test_unknown_class_is_refused_or_becomes_plain() -> None:
    node = Node("dataclass", "gone:Gone", ("a",), (Node("leaf"),))
    with pytest.raises(TypeError, match="gone:Gone"):
        unflatten(node, [1])
    assert unflatten(node, [1], fallback=True) == {"a": 1}
    assert unflatten(Node("namedtuple", "gone:N", ("a",), (Node("leaf"),)), [1], fallback=True) == (1,)
    with pytest.raises(ValueError, match="1 leaves, but got 2"):
        unflatten(node, [1, 2], fallback=True)


def test_endless_structures_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert len(flatten(endless).leaves) == 1
