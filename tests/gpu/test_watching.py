"""What is seen of a run on a GPU: NVML's figures, NVTX ranges, profiles, conditions of a measurement, memory limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import CUDA, DIM, GRAPH, INDUCTOR_GRAPH, Chain, on_gpu, pinned, quiet, random
from torch import nn

import aitune_lab as ait
from aitune_lab.measure.blocks import MeasureLimits
from aitune_lab.measure.monitor import Doing, Monitor
from aitune_lab.measure.throughput import call_peak_memory_bytes, search_batch
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.tuner import TuneOptions

pytestmark = pytest.mark.gpu


def test_a_sample_holds_the_gpus_figures() -> None:
    pytest.importorskip("pynvml")
    held = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    monitor = Monitor()
    monitor.sample()
    sample = monitor.samples[0]
    assert len(sample.gpus) >= 1
    assert max(gpu.memory_used_bytes or 0 for gpu in sample.gpus) >= held.numel()
    assert all(0 < (gpu.temperature_c or 0) < 120 for gpu in sample.gpus)
    assert all((gpu.power_watts or 0) > 0 for gpu in sample.gpus)
    assert sample.doing == Doing()


def test_observing_a_run_gives_gpu_metrics_by_trial() -> None:
    pytest.importorskip("pynvml")
    module = on_gpu(Chain(4))
    with ait.observe(metrics=True, nvtx=True) as seen:
        pinned(module, [random(4, DIM)], INDUCTOR_GRAPH)
        x = random(4, DIM)
        y = quiet(module, x)
        trials = seen.by_trial()
    torch.testing.assert_close(y, Chain.forward(module, x), rtol=1e-3, atol=1e-4)
    (trial,) = [t for t in trials if t.candidate == INDUCTOR_GRAPH.label]
    assert trial.gpu_peak_memory_bytes is not None
    assert trial.gpu_peak_memory_bytes > 0
    assert trial.gpu_max_temperature_c is not None
    seen.clear()


def test_nvtx_ranges_around_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_gpu(Chain(4))
    pinned(module, [random(4, DIM)])
    seen: list[str] = []
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: (seen.append(text), push(text))[1])
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: (seen.append("end"), pop())[1])
    with ait.observe(nvtx=True):
        quiet(module, random(4, DIM), calls=2)
    quiet(module, random(4, DIM))
    assert seen == [seen[0], "end"] * 2
    assert GRAPH.label in seen[0]
    assert ait.stats(module).dispatched == 3


def test_a_profile_tells_kernels_and_device_time() -> None:
    model = nn.Sequential(on_gpu(Chain(6)), nn.Softmax(-1)).eval()
    pinned(model[0], [random(4, DIM)])
    found = ait.profile(model, [random(4, DIM)], passes=3)
    assert found.tuned is not None
    tuned = [r for r in found.regions if r.kind == "tuned"]
    assert [r.path for r in tuned] == ["0"]
    assert tuned[0].candidates == (GRAPH.label,)
    eager = found.kernels_of(tuned[0])
    assert sum(kernel.device_ms or 0.0 for kernel in eager) > 0
    assert any("gemm" in name.lower() or "cutlass" in name.lower() for kernel in eager for name in kernel.launched)
    replayed = found.kernels_of(tuned[0], "tuned")
    assert sum(kernel.device_ms or 0.0 for kernel in replayed) > 0, replayed
    assert str(found)


def test_a_measurement_keeps_what_it_rests_on() -> None:
    pytest.importorskip("pynvml")
    short = MeasureLimits(min_blocks=4, max_blocks=6, block_ms=2.0, max_seconds=2.0, warmup_seconds=0.2)
    options = TuneOptions(backends=(GRAPH,), measure_limits=short, end_to_end=False)
    result = run(make_tuner(on_gpu(Chain(8)), [random(4, DIM)], ait.Plan(), options))
    (trial,) = [t for t in result.trials.values() if t.candidate == GRAPH and t.path == ""]
    measured = trial.points[0].latency
    assert measured is not None
    assert {"gpu_clock_mhz", "temperature_c", "throttled", "float16_reduced_sums", "tf32_matmul"} <= set(
        measured.conditions
    )
    assert measured.device_ms is not None


class _Widening(nn.Module):
    """Needs 64 MiB for each item of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None, None] + torch.zeros(1, 1, 1024, 1024 // 16, device=x.device)).mean((2, 3))


@pytest.fixture
def small_gpu() -> Any:
    """Torch may take 2 GiB of the GPU."""
    torch.cuda.empty_cache()
    limit = 2 << 30
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(CUDA).total_memory)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_throughput_is_searched_up_to_the_memory_limit(small_gpu: int) -> None:
    module, width = _Widening(), 256  # 256 x 65,536 floats: 64 MiB an item

    def call(batch_size: int) -> Any:
        return lambda: module(torch.ones(batch_size, width, device=CUDA))

    def latency_ms(batch_size: int) -> float:
        call(batch_size)()
        return 1.0

    found = search_batch(latency_ms)
    assert found.ended.startswith("out of memory at batch size")
    assert found.best is not None
    assert found.best.batch_size == found.tried[-1].batch_size >= 8
    peak = call_peak_memory_bytes(call(4), CUDA)
    assert peak is not None
    bounded = search_batch(
        latency_ms,
        peak_memory_bytes=lambda n: call_peak_memory_bytes(call(n), CUDA),
        memory_limit_bytes=peak + peak // 4,
    )
    assert bounded.best is not None
    assert bounded.best.batch_size == 4
    assert "bytes" in bounded.ended
