from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from aitune_lab.backends.base import BuildJob
from aitune_lab.capture.calls import CallForm
from aitune_lab.capture.recorder import Sample, same_values
from aitune_lab.capture.structure import describe_leaf, flatten, flatten_call
from aitune_lab.checkpoint.golden import (
    Golden,
    Unstorable,
    collect,
    described,
    pack,
    placeholder,
    run_original,
    synthetic_sample,
    unpack,
)
from aitune_lab.errors import CheckpointError
from aitune_lab.runtime.installed import installed_in
from aitune_lab.schema import Candidate, GoldenSample, Point, Signature, Symbol, TensorLeaf, from_json, to_json

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


def sample_of(**call: Any) -> Sample:
    flat = flatten_call(call)
    return Sample(flat.node, flat.leaves)


def synthetic(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = synthetic_sample(sample_of(x=tensor)).leaves[0]
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(-50, 50),
    st.integers(0, 100),
)
def test_same_form_same_range_and_the_same_each_time(dtype: torch.dtype, shape: list[int], low: int, span: int) -> None:
    if dtype is torch.uint8:
        low = abs(low)
    values = low + span * torch.rand(shape, dtype=torch.float64)
    recorded = (values > low + span / 2) if dtype is torch.bool else values.to(dtype)
    made = synthetic(recorded)
    assert (made.dtype, made.shape) == (recorded.dtype, recorded.shape)
    assert same_values(made, synthetic(recorded))
    if recorded.numel() and dtype is not torch.complex64:
        low_high = made.double().min(), made.double().max()
        assert recorded.double().min() <= low_high[0]
        assert low_high[1] <= recorded.double().max()


def test_floats_follow_the_recorded_distribution() -> None:
    recorded = 5 + 2 * torch.randn(20_000)
    made = synthetic(recorded)
    assert abs(made.mean() - 5) < 0.1
    assert abs(made.std() - 2) < 0.1
    assert not (made == recorded).any()


def test_what_is_not_finite_stays_in_place() -> None:
    mask = torch.zeros(1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    assert same_values(synthetic(mask), mask)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_masks_show_something_in_every_row_that_did(dtype: torch.dtype) -> None:
    recorded = torch.zeros(64, 16, dtype=dtype)
    for row in range(48):
        recorded[row, : 1 + row % 16] = 1
    made = synthetic(recorded)
    assert torch.equal(made.any(-1), recorded.any(-1))
    assert not torch.equal(made, recorded)
    assert torch.equal(synthetic(torch.ones(3, 4, dtype=dtype)), torch.ones(3, 4, dtype=dtype))


def test_no_recorded_value_is_stored() -> None:
    secret = torch.randn(50, dtype=torch.float64)
    packed = pack([Golden(synthetic_sample(sample_of(x=secret)), flatten(torch.zeros(1)))])
    middle = secret[(secret > secret.min()) & (secret < secret.max())]
    assert not any(value.numpy().tobytes() in packed for value in middle)


class Bag(collections.UserDict[str, Any]):
    pass


def test_everything_storable_comes_back() -> None:
    x = torch.randn(2, 3)
    sample = sample_of(
        x=x,
        items=[x.half(), (x.to(torch.bfloat16), None)],
        bag=Bag(ids=torch.arange(3), flag=True),
        array=np.arange(6, dtype=np.int32).reshape(2, 3),
        scalar=torch.tensor(2.5),
        empty=torch.zeros(0, 4),
        number=complex(1, 2),
        dtype=torch.float16,
        turned=x.t(),
        signal=torch.randn(4, dtype=torch.complex64),
    )
    sample.point = Point((("b", 2),))
    golden = Golden(sample, flatten({"y": x * 2, "n": 7}))
    kept = from_json(to_json(described(golden)), GoldenSample)
    (found,) = unpack(pack([golden]), [kept])
    assert (found.sample.node, found.sample.point) == (sample.node, sample.point)
    assert found.expected.node == golden.expected.node
    assert found.expected.paths == golden.expected.paths
    pairs = [*zip(found.sample.leaves, sample.leaves, strict=True)]
    pairs += zip(found.expected.leaves, golden.expected.leaves, strict=True)
    for got, wanted in pairs:
        assert type(got) is type(wanted)
        if isinstance(wanted, torch.Tensor):
            assert same_values(got, wanted)
        elif isinstance(wanted, np.ndarray):
            assert np.array_equal(got, wanted)
        else:
            assert got == wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [(object(), "only its own process knows"), (torch.eye(3).to_sparse(), "layout sparse_coo")],
)
def test_what_no_file_can_hold(value: Any, reason: str) -> None:
    with pytest.raises(Unstorable, match=reason):
        described(Golden(sample_of(x=value), flatten(None)))


def test_tensors_that_do_not_fit_their_description() -> None:
    golden = Golden(sample_of(x=torch.zeros(2)), flatten(torch.zeros(3)))
    kept = described(golden)
    other = pack([Golden(sample_of(x=torch.zeros(4)), flatten(torch.zeros(3)))])
    with pytest.raises(CheckpointError, match=r"no float32\[2\] for x"):
        unpack(other, [kept])
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        unpack(b"nonsense", [kept])


def job_for(module: nn.Module, samples: list[Sample], folder: Any) -> BuildJob:
    leaves = tuple(map(describe_leaf, samples[0].leaves, flatten_call(samples[0].call()).paths))
    signature = Signature("forward", samples[0].node, leaves)
    form = CallForm(module.forward)
    return BuildJob("net", module, module.forward, form, signature, samples, Candidate("data"), folder)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if (x > 3).any():
            raise ValueError("too large")
        return x * self.calls + torch.rand(x.shape)


def test_running_the_original_leaves_no_trace(tmp_path: Any) -> None:
    net = Counting().eval()
    sample = sample_of(x=torch.ones(2))
    state = torch.get_rng_state()
    first, second = (run_original(job_for(net, [sample], tmp_path), sample) for _ in range(2))
    assert same_values(first.leaves[0], second.leaves[0])
    assert net.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_one_sample_a_point_and_reasons_for_those_left_out(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large, failing = torch.ones(2), torch.ones(300), torch.full((3,), 9.0)
    samples = []
    for size, tensor in ((2, small), (2, small + 1), (300, large), (3, failing)):
        sample = sample_of(x=tensor)
        sample.point = Point((("b", size),))
        samples.append(sample)
    monkeypatch.setattr("aitune_lab.checkpoint.golden.MAX_GOLDEN_BYTES", 1000)
    found, notes = collect(job_for(Counting().eval(), samples, tmp_path), synthetic=False)
    assert [golden.sample.point.label for golden in found] == ["b=2"]
    assert torch.equal(found[0].sample.leaves[0], small)
    assert any("net at b=3: the original fails on recorded inputs: too large" in note for note in notes)
    assert any("net at b=300: larger than" in note for note in notes)


def test_placeholders_have_the_signatures_shapes() -> None:
    leaves = (
        TensorLeaf("x", "float16", ("b", "2*b"), "cpu"),
        TensorLeaf("ids", "int64", ("b",), "cpu", holder="numpy"),
    )
    node = flatten_call({"x": 1, "ids": 2}).node
    signature = Signature("forward", node, leaves, (Symbol("b", 1, 2, 4),))
    x, ids = placeholder(signature, Point((("b", 3),))).leaves
    assert (x.dtype, tuple(x.shape)) == (torch.float16, (3, 6))
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == [0, 0, 0]


def test_a_sample_for_each_tuned_point(lab: SimpleNamespace) -> None:
    net = lab.tuned_net()
    entry = installed_in(net)[0].entries[0]
    found, notes = collect(entry.job, synthetic=True)
    assert notes == []
    assert [golden.sample.point.label for golden in found] == ["b=1", "b=4"]
    recorded = {sample.point.label: sample.leaves[0] for sample in entry.job.samples}
    assert not any(torch.equal(golden.sample.leaves[0], recorded[golden.sample.point.label]) for golden in found)
