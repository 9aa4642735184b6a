"""The search over batch sizes ends well; first call and peak memory."""

import sys

import pytest
import torch

from aitune_lab.measure.throughput import call_peak_memory_bytes, first_call_ms, search_batch
from aitune_lab.testing.clock import ScriptedClock


def saturating(batch_size):
    return 1.0 + batch_size / 8 + (batch_size / 64) ** 2


def test_doubles_until_throughput_falls():
    found = search_batch(saturating)
    assert found.best is not None
    assert found.best.batch_size == 64
    assert [f.batch_size for f in found.tried] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found.ended == "throughput did not rise beyond batch size 64"
    assert found.best.samples_per_second == pytest.approx(64 / saturating(64) * 1000)


def test_ends_at_the_largest():
    found = search_batch(lambda b: 1.0, largest=12, start=3)
    assert [f.batch_size for f in found.tried] == [3, 6, 12]
    assert found.ended == "the largest batch size 12 was reached"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError()])
def test_ends_when_memory_ends(error):
    def latency(batch_size):
        if batch_size > 16:
            raise error
        return 1.0

    found = search_batch(latency)
    assert found.best.batch_size == 16
    assert found.ended == "out of memory at batch size 32"


def test_stops_before_the_memory_limit():
    tried = []
    found = search_batch(
        lambda b: 1.0,
        peak_memory_bytes=lambda b: tried.append(b) or 100 * b,
        memory_limit_bytes=1000,
    )
    assert tried == [1, 2, 4, 8]
    assert found.best.batch_size == 8
    assert found.best.peak_memory_bytes == 800
    assert found.ended == "batch size 16 would need about 1600 of 1000 bytes"
    nothing = search_batch(lambda b: 1.0, peak_memory_bytes=lambda b: 5000, memory_limit_bytes=1000)
    assert nothing.best is None
    assert nothing.ended == "batch size 1 needs 5000 of 1000 bytes"


def test_cancel_and_wrong_start():
    answers = iter([False, False, True])
    assert len(search_batch(lambda b: 1.0, cancelled=lambda: next(answers)).tried) == 2
    with pytest.raises(ValueError, match="positive batch size, but got 0"):
        search_batch(saturating, start=0)


def test_other_errors_pass():
    def broken(batch_size):
        raise RuntimeError("shape")

    with pytest.raises(RuntimeError, match="shape"):
        search_batch(broken)


def test_first_call():
    clock = ScriptedClock()

    def call():
        clock.advance(250.0)
        return "result"

    assert first_call_ms(call, clock=clock) == ("result", pytest.approx(250.0))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset a process's peak")
def test_peak_memory_of_a_call():
    size = 64 << 20
    peak = call_peak_memory_bytes(lambda: torch.ones(size // 4).sum())
    assert peak is None or 0.9 * size < peak < 4 * size
    assert call_peak_memory_bytes(lambda: None, "meta") is None
