"""What varies between recorded calls, with what it varies, and what the user declares to vary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import BatchDim, DataError, DynamicDim
from aitune_lab.capture.declared import declared_signatures
from aitune_lab.capture.recorder import Recorder, Recording
from aitune_lab.capture.signature import RecordedSignature, resized, signatures_of
from aitune_lab.schema import Point, TensorLeaf


class Any2(nn.Module):
    """Takes anything, returns something of the first tensor's size."""

    def forward(self, x: Any, y: Any = None, flag: bool = True) -> Any:
        first = x
        while not isinstance(first, torch.Tensor):
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        return first + 1


def record(module: nn.Module, *calls: tuple[Any, ...], batches: list[int] | None = None) -> Recording:
    recorder = Recorder([("", module, "forward")])
    with torch.no_grad(), recorder.recording():
        for i, args in enumerate(calls):
            recorder.batch = batches[i] if batches else None
            module(*args)
    return recorder.recordings[0]


def labels(*calls: tuple[Any, ...], batches: list[int] | None = None, declared: Any = None) -> list[str]:
    return [r.signature.label for r in signatures_of(record(Any2(), *calls, batches=batches), declared)]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_what_never_varied_is_static() -> None:
    assert labels((ones(2, 3),), (ones(2, 3),)) == ["(x: float32[2, 3])"]


def test_first_axis_that_varies_is_the_batch() -> None:
    assert labels((ones(2, 3),), (ones(4, 3),)) == ["(x: float32[b, 3])"]


def test_batch_on_another_axis_is_found_by_the_batch_sizes() -> None:
    assert labels((ones(7, 1),), (ones(7, 4),), batches=[1, 4]) == ["(x: float32[7, b])"]
    assert labels((ones(5, 1),), (ones(9, 4),), batches=[1, 4]) == ["(x: float32[s0, b])"]


def test_whole_multiples_of_the_batch() -> None:
    assert labels((ones(2, 3), ones(1)), (ones(8, 3), ones(4)), batches=[1, 4]) == [
        "(x: float32[2*b, 3], y: float32[b])"
    ]
    # Without batch sizes too, whichever comes first.
    assert labels((ones(4), ones(2)), (ones(10), ones(5))) == ["(x: float32[2*b], y: float32[b])"]
    assert labels((ones(2), ones(4)), (ones(5), ones(10))) == ["(x: float32[b], y: float32[2*b])"]
    assert labels((ones(6, 2), ones(4)), (ones(15, 5), ones(10))) == ["(x: float32[3*b, b], y: float32[2*b])"]


def test_several_symbols() -> None:
    calls = [(ones(b, s), ones(b, h)) for b, s, h in ((1, 5, 2), (2, 9, 2), (2, 7, 3))]
    assert labels(*calls) == ["(x: float32[b, s0], y: float32[b, s1])"]


def test_zero_sizes_follow_only_what_is_zero_with_them() -> None:
    assert labels((ones(0, 3), ones(0)), (ones(2, 3), ones(4))) == ["(x: float32[b, 3], y: float32[2*b])"]
    assert labels((ones(2), ones(0)), (ones(2 + 2), ones(4))) == ["(x: float32[b], y: float32[s0])"]


def test_calls_of_other_structure_dtype_rank_value_or_autocast_are_other_signatures() -> None:
    x = ones(2, 3)
    calls = [
        (x,),
        (x.double(),),
        (x[0],),
        ((x,),),
        ([x],),
        ({"a": x},),
        (x, x),
        (x, None, False),
        (x, 1),
        (x, 1.0),
        (x, True),
    ]
    assert len(labels(*calls)) == len(calls)
    module = Any2()
    recorder = Recorder([("", module, "forward")])
    with torch.no_grad(), recorder.recording():
        module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module(x)
    found = signatures_of(recorder.recordings[0])
    assert [f.signature.autocast for f in found] == [(), (("cpu", "bfloat16"),)]


def test_signature_keys_are_equal_for_equal_contracts() -> None:
    def key(*calls: Any) -> str:
        (found,) = signatures_of(record(Any2(), *calls))
        return found.signature.key

    assert key((ones(2, 3),)) == key((torch.zeros(2, 3), None)) == key((ones(2, 3), None, True))
    assert len({key((ones(2, 3),)), key((ones(2, 4),)), key((ones(2, 3),), (ones(3, 3),)), key((ones(2, 3), 1))}) == 4


def test_points_hold_samples_and_calls() -> None:
    recording = record(Any2(), (ones(2, 3),), (ones(4, 3),), (ones(4, 3),), (ones(4, 3),))
    (found,) = signatures_of(recording)
    two, four = Point((("b", 2),)), Point((("b", 4),))
    assert found.calls == {two: 1, four: 3}
    assert [len(found.samples[p]) for p in (two, four)] == [1, 2]
    (symbol,) = found.signature.symbols
    assert (symbol.name, symbol.min, symbol.opt, symbol.max, symbol.declared) == ("b", 2, 4, 4, False)


def test_outputs_follow_the_inputs_or_are_unknown() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"same": x, "twice": torch.cat([x, x]), "positive": x[x > 0], "n": len(x), "label": "a"}

    (found,) = signatures_of(record(Counts(), (ones(2),), (ones(4),), (-ones(4),)))
    dims = {leaf.path: leaf.dims for leaf in found.signature.output_leaves if isinstance(leaf, TensorLeaf)}
    assert dims == {"output['same']": ("b",), "output['twice']": ("2*b",), "output['positive']": ("?",)}
    assert found.signature.facts.varying_values == ("output['n']",)


def test_changing_output_structure_is_a_fact() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x if x.shape[0] > 2 else (x, x)

    (found,) = signatures_of(record(Sometimes(), (ones(2),), (ones(4),)))
    assert found.signature.facts.varying_values == ("output",)


def test_declared_dims_are_shared_by_name_and_found_in_nested_paths() -> None:
    s = DynamicDim("s", 1, 8, 32)
    declared = {"x['ids']": {0: BatchDim(1, 2, 8), 1: s}, "x['more'][0]": {0: s}}
    call = ({"ids": ones(2, 6), "more": [ones(6)]},)
    (found,) = signatures_of(record(Any2(), call), declared)
    assert found.signature.label == "(x['ids']: float32[b, s], x['more'][0]: float32[s])"
    ranges = {s.name: (s.min, s.opt, s.max, s.declared) for s in found.signature.symbols}
    assert ranges == {"b": (1, 2, 8, True), "s": (1, 8, 32, True)}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"z": {0: BatchDim(1, 1, 2)}}, r"must name tensors among \['x', 'y'\], but got 'z'"),
        ({"x": {2: BatchDim(1, 1, 2)}}, "axis of 'x' must be from 0 to 1, but got 2"),
        ({"x": {0: BatchDim(3, 3, 4)}}, "must be from 3 to 4, but the data has"),
        ({"x": {0: BatchDim(1, 1, 4), 1: BatchDim(1, 1, 4)}}, "must be equal at every call"),
    ],
)
def test_declarations_that_the_data_contradicts(declared: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        labels((ones(2, 3), ones(5)), declared=declared)


@pytest.mark.parametrize("bounds", [(2, 1, 3), (1, 4, 3), (-1, 1, 2)])
def test_bounds_must_be_in_order(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(DataError, match="0 <= min <= opt <= max must hold"):
        BatchDim(*bounds)


class Positions(nn.Module):
    """Has 16 positions, so it rejects longer sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.table(torch.arange(ids.shape[1])) + ids[..., None]


def exercised(module: nn.Module, declared: Any, *calls: Any) -> RecordedSignature:
    (found,) = declared_signatures(record(module, *calls), declared)
    return found


def test_declared_ends_are_run_through_the_module() -> None:
    module = Positions()
    declared = {"ids": {0: BatchDim(1, 2, 8), 1: DynamicDim("s", 2, 5, 16)}}
    found = exercised(module, declared, (ones(2, 5),))
    assert {p.sizes: n for p, n in found.calls.items()} == {
        (("b", 2), ("s", 5)): 1,
        (("b", 1), ("s", 2)): 0,
        (("b", 8), ("s", 16)): 0,
    }
    assert [s.synthetic for s in found.all_samples()] == [False, True, True]
    (output,) = found.signature.output_leaves
    assert output.dims == ("b", "s", 4)  # type: ignore[union-attr]
    assert found.notes == ()
    assert module.calls == 1  # the state of the module was put back


def test_end_that_the_module_rejects_is_cut_back_with_a_note() -> None:
    declared = {"ids": {0: BatchDim(1, 2, 8), 1: DynamicDim("s", 2, 5, 64)}}
    found = exercised(Positions(), declared, (ones(2, 5),))
    ranges = {s.name: (s.min, s.max) for s in found.signature.symbols}
    assert ranges == {"b": (1, 8), "s": (2, 5)}
    (note,) = found.notes
    assert "declared max of 's', 64, is not used: the module rejects b=2, s=64: IndexError" in note


def test_dim_declared_for_one_of_two_tensors_is_cut_back() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    found = exercised(Adds(), {"x": {0: BatchDim(2, 3, 8)}}, (ones(3), ones(3)))
    assert [(s.min, s.max) for s in found.signature.symbols] == [(3, 3)]
    assert len(found.notes) == 2


def test_synthetic_samples_repeat_what_was_recorded() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    (found,) = signatures_of(record(Any2(), (ids,), (ids[:1, :2],)))
    sample = next(s for s in found.all_samples() if s.leaves[0].shape == (2, 3))
    made = resized(sample, found.signature, Point((("b", 3), ("s0", 4))))
    assert made.leaves[0].tolist() == [[1, 2, 3, 1], [4, 5, 6, 4], [1, 2, 3, 1]]
    assert made.synthetic
    assert sample.leaves[0].shape == (2, 3)
