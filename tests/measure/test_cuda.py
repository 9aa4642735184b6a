"""What differs on a GPU: where figures are computed, full precision, synchronised timing, memory."""

import copy

import pytest
import torch
from torch import nn

from aitune_lab.capture.structure import flatten
from aitune_lab.measure.benchmark import measure
from aitune_lab.measure.blocks import Contender, MeasureLimits
from aitune_lab.measure.conditions import conditions
from aitune_lab.measure.figures import relative_l2
from aitune_lab.measure.numerics import Call, compare
from aitune_lab.measure.reference import reference_outputs
from aitune_lab.measure.throughput import call_peak_memory_bytes, first_call_ms, search_batch
from aitune_lab.measure.verdict import faster
from aitune_lab.schema import Tolerance

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def compared(expected, actual):
    return compare([Call(flatten(expected), flatten(actual))], Tolerance())


def test_comparison():
    y = torch.randn(1500, 1500, device=CUDA)
    off = y.clone()
    off[1400, 7] += 1.0
    found = compared(y, off)
    assert found.leaves[0].worst_index == (1400, 7)
    assert found.error_class == "refused"
    assert compared(y, y.clone()).error_class == "exact"
    assert "device cpu where eager gives cuda:0" in compared(y, y.cpu()).problem
    best = {"logits": y, "best": y.argmax(1)}
    wrong = {"logits": y, "best": y.argmin(1)}
    assert compared(best, copy.copy(best)).error_class == "exact"
    assert compared(best, wrong).error_class == "refused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tf32", [False, True])
def test_reference_is_in_full_precision(dtype, tf32):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 16, 3)
            self.norm = nn.BatchNorm2d(16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.lstm = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            y = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
            return self.lstm(self.attention(y, y, y)[0])[0]

    module, x = Net().eval().to(CUDA, dtype), torch.randn(2, 8, 12, 12, device=CUDA, dtype=dtype)
    before = torch.backends.cuda.matmul.allow_tf32
    state = torch.cuda.get_rng_state()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        found = reference_outputs(module, (x,), {})
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert found.reason == ""
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
    assert relative_l2(found.outputs, exact) < 1e-5
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert found.cross_checked


def test_dropout_on_the_gpu_is_seen():
    module = nn.Dropout(0.5).train()
    assert "random numbers" in reference_outputs(module, (torch.ones(100, device=CUDA),), {}).reason


def test_attention_on_half_inputs():
    class Attention(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 64, 32, device=CUDA, dtype=torch.float16)
    found = reference_outputs(Attention(), (q,), {}, torch.float32)
    assert found.reason == ""
    assert 0 < relative_l2(Attention()(q), found.outputs) < 2e-3


@pytest.mark.alone
def test_latency_is_that_of_the_synchronised_result():
    small, large = (torch.randn(n, n, device=CUDA) for n in (512, 8192))
    timing = measure(
        [Contender("small", [lambda: small @ small]), Contender("large", [lambda: large @ large])],
        device=CUDA,
        limits=MeasureLimits(min_blocks=8, max_seconds=20.0),
    )
    measured = timing.measurements["large"]
    assert measured.method == "host wall time to the synchronised result"
    assert 0 < measured.device_ms <= measured.median_ms
    assert measured.device_ms > 0.8 * measured.median_ms  # launching is nothing beside it
    assert measured.median_ms > 5 * timing.measurements["small"].median_ms
    assert measured.disturbed is not None or faster(timing, "small", "large").is_faster
    assert {"tf32_matmul", "tf32_cudnn", "cudnn_benchmark"} <= set(measured.conditions)


@pytest.mark.alone
def test_inputs_prepared_outside_of_the_timed_region():
    x = torch.randn(4096, 4096, device=CUDA)

    def prepare(i):
        y = (x @ x).clone()
        return lambda: y.add_(1)

    timing = measure([Contender("add", prepare=prepare)], device=CUDA, limits=MeasureLimits.rough())
    assert timing.measurements["add"].device_ms < 0.5


def test_nvml_tells_clocks_and_temperature():
    pytest.importorskip("pynvml")
    found = conditions(CUDA)
    assert found["gpu_clock_mhz"] > 0
    assert 0 < found["temperature_c"] < 120
    assert isinstance(found["power_capped"], bool)
    assert isinstance(found["throttled"], str)


def test_settings_that_reduce_precision_are_recorded():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_tf32
    try:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_tf32 = False, True
        found = conditions(CUDA)
        assert (found["float16_reduced_sums"], found["tf32_matmul"]) == (False, True)
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_tf32 = True, False
        found = conditions(CUDA)
        assert (found["float16_reduced_sums"], found["tf32_matmul"]) == (True, False)
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_tf32 = before


def test_memory_and_batches():
    size = 256 << 20
    assert size <= call_peak_memory_bytes(lambda: torch.empty(size, dtype=torch.uint8, device=CUDA), CUDA) < 1.1 * size
    _, milliseconds = first_call_ms(lambda: torch.ones(8, device=CUDA).sum(), CUDA)
    assert milliseconds > 0

    def latency(batch_size):
        torch.empty(batch_size << 28, dtype=torch.uint8, device=CUDA)
        return 1.0

    limit = 2 << 30
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(CUDA).total_memory)
    try:
        found = search_batch(latency)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.ended.startswith("out of memory at batch size")
    assert [figure.batch_size for figure in found.tried] in ([1, 2, 4], [1, 2, 4, 8])
    assert found.best.batch_size == found.tried[-1].batch_size
    assert torch.cuda.memory_reserved() < 1 << 30
