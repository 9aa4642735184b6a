"""First call, peak memory, and the batch size with the highest throughput."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class BatchFigure:
    """What one batch size gives; `peak_memory_bytes` is None where it isn't known."""

    batch_size: int
    latency_ms: float
    peak_memory_bytes: int | None = None

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.latency_ms * 1e3 if self.latency_ms > 0 else 0.0


@dataclass(frozen=True)
class BatchSearch:
    """All batch sizes tried, the one with the highest throughput (None if none ran), and why the search ended."""

    tried: tuple[BatchFigure, ...]
    best: BatchFigure | None
    ended: str


def search_batch(
    latency_ms: Callable[[int], float],
    *,
    start: int = 1,
    largest: int = 1 << 20,
    peak_memory_bytes: Callable[[int], int | None] = lambda batch_size: None,
    memory_limit_bytes: int | None = None,
    patience: int = 2,
    min_gain: float = 0.01,
    cancelled: Callable[[], bool | None] = lambda: False,
) -> BatchSearch:
    """Double the batch size until throughput stops rising, memory ends or `largest` is reached.

    Args:
        latency_ms: measures a batch size (median latency in ms); may run out of memory.
        start: the first batch size.
        largest: no batch size above it is tried.
        peak_memory_bytes: the memory a batch size takes at its peak, asked before it is measured.
        memory_limit_bytes: a batch size is not tried if twice the memory of the one before exceeds it.
        patience: how many batch sizes in a row may bring no more than `min_gain` before the search ends.
        min_gain: share by which the best throughput must be exceeded to count as more.
        cancelled: asked before every batch size.

    Raises:
        ValueError: `start` is not positive.
    """
    if start < 1:
        raise ValueError(f"start must be a positive batch size, but got {start}")
    tried: list[BatchFigure] = []
    best: BatchFigure | None = None
    without_gain = 0
    batch_size = start
    ended = f"the largest batch size {largest} was reached"
    while batch_size <= largest:
        if cancelled():
            ended = "cancelled"
            break
        before = tried[-1].peak_memory_bytes if tried else None
        if memory_limit_bytes is not None and before is not None and 2 * before > memory_limit_bytes:
            ended = f"batch size {batch_size} would need about {2 * before} of {memory_limit_bytes} bytes"
            break
        try:
            memory = peak_memory_bytes(batch_size)
            if memory_limit_bytes is not None and memory is not None and memory > memory_limit_bytes:
                ended = f"batch size {batch_size} needs {memory} of {memory_limit_bytes} bytes"
                break
            figure = BatchFigure(batch_size, latency_ms(batch_size), memory)
        except (torch.OutOfMemoryError, MemoryError):
            _free()
            ended = f"out of memory at batch size {batch_size}"
            break
        tried.append(figure)
        if best is None or figure.samples_per_second > best.samples_per_second * (1 + min_gain):
            best, without_gain = figure, 0
        else:
            without_gain += 1
            if without_gain >= patience:
                ended = f"throughput did not rise beyond batch size {best.batch_size}"
                break
        batch_size *= 2
    return BatchSearch(tuple(tried), best, ended)


def first_call_ms(
    call: Callable[[], Any], device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> tuple[Any, float]:
    """(result, wall milliseconds to the synchronised result) of a first call, in which runtimes set themselves up."""
    device = torch.device(device)
    _synchronize(device)
    start = clock()
    result = call()
    _synchronize(device)
    return result, (clock() - start) * 1e3


def call_peak_memory_bytes(call: Callable[[], Any], device: torch.device | str = "cpu") -> int | None:
    """Memory that a call takes at its peak, beyond what is in use before it; None where it can't be told.

    On CUDA: what torch's allocator gave out (a runtime with an allocator of its own isn't seen); resets torch's peak
    statistics. On the CPU: growth of the process's peak resident size, which Linux alone can reset; what other
    threads allocate meanwhile counts in, and memory that was freed and kept by the allocator before doesn't.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    try:
        _CLEAR_REFS.write_text("5")
        resident = _status_bytes("VmRSS")
        call()
        return max(0, _status_bytes("VmHWM") - resident)
    except OSError:
        return None


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no line {name}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free() -> None:
    """Give back what a failed call left, so that what follows finds the memory free."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
