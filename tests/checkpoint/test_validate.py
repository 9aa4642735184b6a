from __future__ import annotations

import collections
import dataclasses
import enum
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from aitune_lab.capture.structure import describe_leaf, flatten, flatten_call, type_key
from aitune_lab.checkpoint import load, save
from aitune_lab.checkpoint.validate import signature_problem
from aitune_lab.errors import AituneWarning
from aitune_lab.schema import LEAF, Candidate, Node, Signature, Symbol, TensorLeaf, ValueLeaf, from_data, to_data


class Mode(enum.Enum):
    FAST = 1


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Box:
    value: torch.Tensor
    name: str


class Bag(collections.UserDict[str, Any]):
    pass


class Trap:
    """Does harm when it is made."""

    sprung = False

    def __init__(self, *args: object) -> None:
        type(self).sprung = True

    def __new__(cls, *args: object) -> Any:
        cls.sprung = True
        return super().__new__(cls)


def signature_of(call: dict[str, Any], output: Any) -> Signature:
    inputs, outputs = flatten_call(call), flatten(output)
    return Signature(
        "forward",
        inputs.node,
        tuple(map(describe_leaf, inputs.leaves, inputs.paths)),
        outputs=outputs.node,
        output_leaves=tuple(map(describe_leaf, outputs.leaves, outputs.paths)),
    )


def everything() -> Signature:
    x = torch.zeros(2, 3)
    call = {
        "x": x,
        "nested": {"a": [x, (x,)], "b": Bag(ids=x), 3: None, True: 1.5},
        "pair": Pair(x, x),
        "box": Box(x, "name with 'quotes'"),
        "values": [
            True,
            -3,
            float("inf"),
            1 + 2j,
            b"bytes",
            Mode.FAST,
            torch.float16,
            torch.device("cpu"),
            slice(1, 2),
        ],
        "*more": (x, x.numpy()),
        "**extra": {"scale": 2.0},
    }
    return signature_of(call, Box(x, "out"))


def test_what_recording_writes_goes_through() -> None:
    signature = everything()
    assert signature_problem(signature) is None
    assert signature_problem(from_data(to_data(signature), Signature)) is None


def with_output(node: Node, leaves: int) -> Signature:
    leaf = TensorLeaf("output", "float32", (2,), "cpu")
    return replace(signature_of({"x": torch.zeros(2)}, torch.zeros(2)), outputs=node, output_leaves=(leaf,) * leaves)


@pytest.mark.parametrize(
    "node",
    [
        Node(kind, type_key(Trap), keys, (LEAF,))  # type: ignore[arg-type]
        for kind, keys in [
            ("namedtuple", ("a",)), ("dict", ("a",)), ("dataclass", ("a",)), ("mapping", ("a",)), ("pytree", (0,)),
            ("tuple", ()), ("list", ()),
        ]
    ],
)  # fmt: skip
def test_classes_that_are_no_such_container(node: Node) -> None:
    assert signature_problem(with_output(node, 1)) is not None
    assert not Trap.sprung


@pytest.mark.parametrize(
    "node",
    [
        Node("namedtuple", "subprocess:Popen", ("a",), (LEAF,)),
        Node("dict", "subprocess:Popen", ("a",), (LEAF,)),
        Node("dict", "not_imported_anywhere:Out", ("a",), (LEAF,)),
        Node("namedtuple", type_key(Pair), ("right", "left"), (LEAF, LEAF)),
        Node("dataclass", type_key(Box), ("value)\n  import os", "name"), (LEAF, LEAF)),
        Node("dataclass", type_key(Box), ("__class__",), (LEAF,)),
        Node("dict", "builtins:dict", ("a", "a"), (LEAF, LEAF)),
        Node("dict", "builtins:dict", ("a",), (LEAF, LEAF)),
        Node("dict", "builtins:dict", (float("nan"),), (LEAF,)),
        Node("leaf", "", (), (LEAF,)),
        Node("tuple", "builtins:tuple", (), (LEAF, LEAF, LEAF)),
    ],
)
def test_structures_that_recording_never_writes(node: Node) -> None:
    leaves = 2 if len(node.children) != 1 and node.kind != "tuple" else 1
    assert signature_problem(with_output(node, leaves)) is not None


def change(**fields: Any) -> Signature:
    return replace(signature_of({"x": torch.zeros(2)}, torch.zeros(2)), **fields)


@pytest.mark.parametrize(
    "signature",
    [
        change(method="forward; import os"),
        change(method="class"),
        change(inputs=Node("dict", "builtins:dict", ("x=__import__('os')",), (LEAF,))),
        change(inputs=Node("tuple", "builtins:tuple", (), (LEAF,))),
        change(symbols=(Symbol("b or True", 1, 2, 3),)),
        change(symbols=(Symbol("b", 3, 2, 1),)),
        change(autocast=(("cpu", "load"),)),
        change(leaves=(TensorLeaf("x", "load", (2,), "cpu"),)),
        change(leaves=(TensorLeaf("x", "float32", (2,), "cpu", layout="load"),)),
        change(leaves=(TensorLeaf("x", "float32", (2,), "cpu'"),)),
        change(leaves=(TensorLeaf("x", "float32", (-2,), "cpu"),)),
        change(leaves=(TensorLeaf("x", "float32", ("b",), "cpu"),)),
        change(leaves=(TensorLeaf("x", "float32", ("2*b+1",), "cpu"),)),
        change(leaves=(ValueLeaf("x", "builtins:int", "__import__('os')"),)),
        change(leaves=(ValueLeaf("x", "builtins:int", "1 "),)),
        change(leaves=(ValueLeaf("x", "os:_Environ", "1"),)),
        change(leaves=()),
    ],
)
def test_names_that_hide_code(signature: Signature) -> None:
    assert signature_problem(signature) is not None


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Pair:
        y = self.layer(x)
        return Pair(y, y + 1)


def test_a_saved_structure_that_names_a_trap(lab: SimpleNamespace, tmp_path: Path) -> None:
    net = lab.make(Boxed)
    lab.tune(net, {"": Candidate("rebuilt")}, lambda: net(lab.inputs(2)))
    save(net, tmp_path / "x.ait")
    fresh = lab.make(Boxed)
    assert len(load(fresh, tmp_path / "x.ait", self_test=False).loaded) == 1

    def trap(data: dict[str, Any]) -> None:
        data["choices"][0]["signature"]["outputs"]["type"] = type_key(Trap)
        data["choices"][0]["samples"][0]["outputs"]["type"] = type_key(Trap)

    net = lab.make(Boxed)
    with pytest.warns(AituneWarning, match=r"Trap is no namedtuple of that form"):
        load(net, lab.rewrite(tmp_path / "x.ait", tmp_path / "y.ait", manifest=trap))
    with torch.no_grad():
        assert type(net(lab.inputs(2))) is Pair
    assert not Trap.sprung


@pytest.mark.parametrize("method", ["to", "eval", "__init__", "add_module", "missing"])
def test_methods_that_are_not_for_tuning(method: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    save(lab.tuned_net("rebuilt"), tmp_path / "x.ait")

    def redirect(data: dict[str, Any]) -> None:
        data["choices"][0]["choice"]["method"] = data["choices"][0]["signature"]["method"] = method

    with pytest.warns(AituneWarning, match=f"has no method '{method}' that can be tuned"):
        load(lab.make(), lab.rewrite(tmp_path / "x.ait", tmp_path / "y.ait", manifest=redirect))
