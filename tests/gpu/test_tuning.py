"""Whole runs on a GPU: what is tried, what wins, what it costs in memory, and what stays as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from common import DIM, GRAPH, INDUCTOR_GRAPH, Chain, Function, Net, on_gpu, pinned, quiet, random, untouched, used_mib
from torch import nn

import aitune_lab as ait
from aitune_lab.errors import AituneError
from aitune_lab.measure.blocks import MeasureLimits
from aitune_lab.schema import Candidate
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.tuner import TuneOptions

pytestmark = pytest.mark.gpu
SHORT = MeasureLimits(min_blocks=8, max_blocks=12, block_ms=3.0, max_seconds=2.0, warmup_seconds=0.3)


def tuned(module: nn.Module, data: Any, *backends: Any) -> Any:
    options = TuneOptions(backends=backends, measure_limits=SHORT, end_to_end=False)
    return run(make_tuner(module, data, ait.Plan(), options))


@pytest.mark.alone
def test_a_graph_wins_where_launches_bound() -> None:
    module = on_gpu(Chain(60))
    result = tuned(module, [random(4, DIM)], GRAPH)
    assert result.choices[0].candidate == GRAPH, result.choices[0].reason
    assert result.choices[0].speedup > 1.5
    x = random(4, DIM)
    torch.testing.assert_close(quiet(module, x), Chain.forward(module, x), rtol=1e-3, atol=1e-3)
    assert ait.stats(module).dispatched == 1


def test_what_cannot_be_captured_stays_eager_with_the_reason() -> None:
    module = on_gpu(Function(lambda self, x: x * x.sum().item()))
    result = tuned(module, [random(4, DIM)], GRAPH)
    assert result.choices[0].candidate == Candidate("eager")
    assert any("can't be captured" in t.reason for t in result.trials.values())


@pytest.mark.alone
def test_a_second_tune_adds_no_memory() -> None:
    module = on_gpu(Chain(20))
    tuned(module, [random(64, DIM)], GRAPH)
    quiet(module, random(64, DIM))
    gc.collect()
    torch.cuda.empty_cache()
    before = used_mib()
    tuned(module, [random(64, DIM)], GRAPH)
    quiet(module, random(64, DIM))
    gc.collect()
    torch.cuda.empty_cache()
    assert used_mib() - before <= 16


@pytest.mark.alone
def test_unwrapping_gives_the_memory_back() -> None:
    data = [random(1 << 14, DIM)]
    for last in (False, True):
        module = on_gpu(Chain(2))
        gc.collect()
        torch.cuda.empty_cache()
        before = used_mib()
        tuned(module, data, GRAPH)
        ait.unwrap(module)
        gc.collect()
        torch.cuda.empty_cache()
        if last:  # the first run starts libraries, whose memory stays
            assert used_mib() - before <= 16


INDUCTOR = [
    Candidate("inductor"),
    INDUCTOR_GRAPH,
    Candidate("inductor", memory_format="channels_last"),
    Candidate("inductor", memory_format="channels_last", cuda_graph=True),
    Candidate("inductor", (("freezing", True),), cuda_graph=True),
    Candidate("eager", memory_format="channels_last", cuda_graph=True),
]
LOWER = [
    Candidate("eager", precision="float16", cuda_graph=True),
    Candidate("eager", precision="bfloat16"),
    Candidate("inductor", precision="float16", cuda_graph=True),
    Candidate("inductor", precision="bfloat16", cuda_graph=True),
]


@pytest.mark.parametrize("candidate", INDUCTOR, ids=lambda c: c.label)
def test_candidates_are_right_and_dispatched(candidate: Candidate) -> None:
    module = on_gpu(Net())
    before = {k: v.clone() for k, v in module.state_dict().items()}
    strides = [p.stride() for p in module.parameters()]
    pinned(module, [random(2, 3, 16, 16), random(5, 3, 16, 16)], candidate, budget=1e-3)
    plain = untouched(module)
    for rows in (2, 5):
        x = random(rows, 3, 16, 16)
        y, want = quiet(module, x), quiet(plain, x)
        torch.testing.assert_close(y["logits"], want["logits"], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(y["parts"][0], want["parts"][0], rtol=1e-2, atol=1e-3)
    assert ait.stats(module).dispatched == 2
    assert [p.stride() for p in module.parameters()] == strides
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize("candidate", LOWER, ids=lambda c: c.label)
def test_lower_precision_within_a_wide_budget(candidate: Candidate) -> None:
    module = on_gpu(Net())
    pinned(module, [random(2, 3, 16, 16)], candidate, budget=5e-2)
    x = random(2, 3, 16, 16)
    y, want = quiet(module, x), quiet(untouched(module), x)
    assert y["logits"].dtype == torch.float32
    torch.testing.assert_close(y["logits"], want["logits"], rtol=5e-2, atol=5e-2)
    assert not torch.equal(y["logits"], want["logits"])
    assert ait.stats(module).dispatched == 1


TF32 = Candidate("eager", precision="tf32", cuda_graph=True)


def test_tf32_is_a_choice_of_its_own() -> None:
    module = on_gpu(Chain(4, 1024))
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with pytest.raises(AituneError, match=r"tolerance|budget|error"):
        pinned(module, [random(256, 1024)], TF32)
    result = pinned(module, [random(256, 1024)], TF32, budget=5e-3)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == flags
    assert 1e-5 < result.choices[0].relative_l2 < 5e-3
    x = random(256, 1024)
    y, want = quiet(module, x), Chain.forward(module, x)
    assert 0 < (y - want).norm() / want.norm() < 5e-3


def test_lower_precision_on_a_float32_module_is_refused_by_default() -> None:
    with pytest.raises(AituneError):
        pinned(on_gpu(Chain(4)), [random(8, DIM)], Candidate("eager", precision="float16", cuda_graph=True))


def test_tuned_on_a_side_stream_and_under_inference_mode() -> None:
    module, side = on_gpu(Chain(8)), torch.cuda.Stream()
    with torch.cuda.stream(side), torch.inference_mode():
        pinned(module, [random(4, DIM)])
        x = random(4, DIM)
        y = quiet(module, x)
    side.synchronize()
    torch.testing.assert_close(y, Chain.forward(module, x), rtol=1e-3, atol=1e-4)
    assert ait.stats(module).dispatched == 1


def test_saved_and_loaded_choices_are_captured_again(tmp_path: Any) -> None:
    module = on_gpu(Chain(8))
    pinned(module, [random(4, DIM)])
    fresh = untouched(module)
    digest = ait.save(module, tmp_path / "tuned.ait")
    ait.load(fresh, tmp_path / "tuned.ait", trust=digest)
    x = random(4, DIM)
    torch.testing.assert_close(quiet(fresh, x), Chain.forward(fresh, x), rtol=1e-3, atol=1e-4)
    assert ait.stats(fresh).dispatched == 1
    with torch.no_grad():
        fresh.load_state_dict({k: v * 1.5 for k, v in fresh.state_dict().items()}, assign=True)
    torch.testing.assert_close(quiet(fresh, x), Chain.forward(fresh, x), rtol=1e-3, atol=1e-4)


def test_a_changed_default_device_does_not_matter() -> None:
    module = on_gpu(Chain(4))
    pinned(module, [random(4, DIM)])
    x = random(4, DIM)
    with torch.device("meta"):
        y = quiet(module, x)
    torch.testing.assert_close(y, Chain.forward(module, x), rtol=1e-3, atol=1e-4)


def test_offloaded_modules_stay_right() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = on_gpu(Chain(3))
    plain = untouched(module)
    accelerate.cpu_offload(module, execution_device=0)
    with pytest.raises(AituneError):  # its weights come and go with each call: no graph reads them by address
        pinned(module, [random(4, DIM)])
    x = random(4, DIM)
    torch.testing.assert_close(quiet(module, x), plain(x), rtol=1e-3, atol=1e-4)


def test_a_tuned_module_that_is_offloaded_later() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = on_gpu(Chain(3))
    plain = untouched(module)
    pinned(module, [random(4, DIM)])
    quiet(module, random(4, DIM))
    accelerate.cpu_offload(module, execution_device=0)
    x = random(4, DIM)
    for _ in range(3):
        torch.testing.assert_close(quiet(module, x), plain(x), rtol=1e-3, atol=1e-4)
