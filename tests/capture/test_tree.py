"""Modules are found wherever a target keeps them, each once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aitune_lab.capture.tree import find_modules, module_path, modules_of, tuned_methods, unit_path
from aitune_lab.testing.models import AutoEncoder, Mlp, Pair


@dataclass
class Extras:
    heads: dict[str, nn.Module] = field(default_factory=dict)


class Pipeline:
    def __init__(self) -> None:
        self.encoders = {"text": Mlp(), "alt": Mlp()}
        self.blocks = [Mlp() for _ in range(2)]
        self.blocks.append(self.blocks[0])
        self.extras = Extras({"cls": nn.Linear(4, 3)})
        self.inner: Any = None
        self.itself = self
        self.name = "demo"


def test_attributes_lists_dicts_dataclasses_and_inner_objects() -> None:
    pipeline = Pipeline()
    pipeline.inner = Pipeline()
    pipeline.inner.blocks[1] = pipeline.encoders["text"]
    found = {item.paths[0]: item for item in find_modules(pipeline)}
    outer = [p for p in found if p.count(".") <= 1 and not p.startswith("inner")]
    assert outer == ["encoders.text", "encoders.alt", "blocks.0", "blocks.1"]
    assert "extras.heads.cls" in found
    assert "inner.blocks.0" in found
    assert "inner.extras.heads.cls" in found
    assert found["blocks.0"].paths == ["blocks.0", "blocks.2"]
    assert found["encoders.text"].paths == ["encoders.text", "inner.blocks.1"]
    assert len({id(item.module) for item in found.values()}) == len(found)


def test_a_module_is_its_own_root() -> None:
    assert list(modules_of(Pair())) == ["", "first", "first.up", "first.down", "second", "second.up", "second.down"]


def test_modules_in_plain_attributes_of_modules() -> None:
    pair = Pair()
    pair.__dict__["loose"] = [Mlp()]
    assert "loose.0.up" in modules_of(pair)


def test_closures_partials_and_bound_methods() -> None:
    module = Mlp()

    def closure(x: torch.Tensor) -> torch.Tensor:
        return module(x)

    assert "module" in modules_of(closure)
    assert any(m is module for m in modules_of(functools.partial(closure)).values())
    assert any(m is module for m in modules_of(functools.partial(lambda m, x: m(x), module)).values())
    assert any(m is module for m in modules_of(module.forward).values())


def test_slots_and_tuples() -> None:
    class Slotted:
        __slots__ = ("held", "never_set")

        def __init__(self) -> None:
            self.held = (Mlp(), {"b": Mlp()})

    assert [p for p in modules_of(Slotted()) if "up" not in p and "down" not in p] == ["held.0", "held.1.b"]


def test_equal_leaf_names_are_told_apart() -> None:
    class Two:
        def __init__(self) -> None:
            self.a, self.b = Pair(), Pair()

    assert {"a.first.up", "b.first.up"} <= set(modules_of(Two()))


def test_tied_and_shared_modules_count_once() -> None:
    shared = Mlp()
    pair = Pair(shared, shared)
    item = next(i for i in find_modules(pair) if i.module is shared)
    assert item.paths == ["first", "second"]


def test_nothing_to_find() -> None:
    for target in (3, "text", None, [1, 2], {"a": torch.ones(1)}, object()):
        assert find_modules(target) == []


def test_case_of_a_nested_pipeline() -> None:
    import importlib.util
    from pathlib import Path

    file = Path(__file__).parent.parent / "cases" / "32_nested_pipeline.py"
    spec = importlib.util.spec_from_file_location("case_nested_pipeline", file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    import sys

    sys.modules["case_nested_pipeline"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    target, _, meta = module.make()
    assert set(meta["targets"]) <= set(modules_of(target))


def test_units_of_methods() -> None:
    assert unit_path("vae", "forward") == "vae"
    assert unit_path("vae", "encode") == "vae.encode"
    assert unit_path("", "encode") == "encode"
    for path, method in (("vae", "forward"), ("vae", "encode"), ("", "encode"), ("", "forward")):
        assert module_path(unit_path(path, method), method) == path


def test_methods_that_could_be_tuned() -> None:
    class Derived(AutoEncoder):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return super().encode(x)

        def _private(self) -> None: ...

        @property
        def size(self) -> int:
            return 1

        @staticmethod
        def helper() -> None: ...

    assert set(tuned_methods(Derived)) == {"encode", "decode"}
    assert tuned_methods(Mlp) == []
