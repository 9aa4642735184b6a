"""Blocks of timed calls, and the warm-up that says how many calls fill one."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch

Thunk = Callable[[], Any]

SLICE_MS = 0.2
"""Shorter than this, reading the clock would count."""


@dataclass(frozen=True)
class Contender:
    """Something to time. Labels are unique within a measurement.

    Attributes:
        calls: calls without arguments, of the same shapes, one for each recorded sample; they are rotated through.
        prepare: for calls that change their inputs: `prepare(i)` gives a call on fresh copies of sample `i` (to be
            taken modulo their number); it runs outside of the timed region, and `calls` may be empty.
    """

    label: str
    calls: Sequence[Thunk] = ()
    prepare: Callable[[int], Thunk] | None = None

    def __post_init__(self) -> None:
        if not self.calls and self.prepare is None:
            raise ValueError(f"contender {self.label!r} must have calls or prepare, but has neither")


@dataclass(frozen=True)
class MeasureLimits:
    """When measuring stops: the 95 % interval of every median is narrow, or time is up (after at least one round).

    `target_relative_ci` is half of the interval's width over the median.
    """

    min_blocks: int = 15
    max_blocks: int = 60
    block_ms: float = 20.0
    max_seconds: float = 10.0
    target_relative_ci: float = 0.02
    warmup_seconds: float = 2.0

    @classmethod
    def rough(cls) -> MeasureLimits:
        """A quick look, enough to tell who is hopeless."""
        return cls(min_blocks=3, max_blocks=3, block_ms=10.0, max_seconds=2.0, warmup_seconds=0.5)


@dataclass(frozen=True)
class Plan:
    """How a block is cut: the median of its slices is its figure, so that a few slow calls don't speak for all.

    A slice is timed as a whole and lasts at least `SLICE_MS`, or is a call timed on its own; where that fits in a
    block, it is a whole number of turns through the samples, so that all slices are alike.
    """

    slices: int = 1
    calls_per_slice: int = 1

    @property
    def calls(self) -> int:
        return self.slices * self.calls_per_slice


@dataclass(frozen=True)
class Block:
    """Latency of a call in each slice, in ms; `device_ms` is the median of the device's time, None on the CPU."""

    slices_ms: tuple[float, ...]
    device_ms: float | None

    @cached_property
    def latency_ms(self) -> float:
        return median(self.slices_ms)


class Timer:
    """Times blocks of calls on one device."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.device = device
        self.clock = clock

    def block(self, contender: Contender, plan: Plan, turn: int) -> Block:
        """One block, after one call that isn't counted. `turn` rotates samples where a slice doesn't hold all."""
        first = turn * plan.calls
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._slice(contender, first, 1)
            starts = range(first, first + plan.calls, plan.calls_per_slice)
            slices = [self._slice(contender, start, plan.calls_per_slice) for start in starts]
        finally:
            if collecting:
                gc.enable()
        device_ms = [device for _, device in slices if device is not None]
        return Block(tuple(wall for wall, _ in slices), median(device_ms) if device_ms else None)

    def _slice(self, contender: Contender, first: int, calls: int) -> tuple[float, float | None]:
        """(mean latency of a call in ms, mean device time in ms or None) over calls on the samples from `first` on."""
        if self.device.type == "cuda":
            timed = [self._on_cuda(_call(contender, first + i)) for i in range(calls)]
            return sum(wall for wall, _ in timed) / calls, sum(device for _, device in timed) / calls
        clock = self.clock
        if contender.prepare is not None:
            seconds = 0.0
            for i in range(calls):
                call = contender.prepare(first + i)
                start = clock()
                call()
                seconds += clock() - start
            return seconds / calls * 1e3, None
        sequence = [_call(contender, first + i) for i in range(calls)]
        start = clock()
        for call in sequence:
            call()
        return (clock() - start) / calls * 1e3, None

    def _on_cuda(self, call: Thunk) -> tuple[float, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        start = self.clock()
        begin.record(stream)
        result = call()
        end.record(stream)
        torch.cuda.synchronize(self.device)
        wall_ms = (self.clock() - start) * 1e3
        del result
        return wall_ms, begin.elapsed_time(end)


def _call(contender: Contender, i: int) -> Thunk:
    return contender.prepare(i) if contender.prepare is not None else contender.calls[i % len(contender.calls)]


def warm_up(contender: Contender, timer: Timer, limits: MeasureLimits) -> Plan:
    """Call until two blocks of full length agree within 10 % or warm-up time is over; then how a block is cut."""
    started = timer.clock()
    calls, previous = 1, math.inf
    while True:
        latency_ms = timer.block(contender, Plan(1, calls), 0).latency_ms
        over = timer.clock() - started > limits.warmup_seconds
        if latency_ms * calls >= limits.block_ms:
            if over or abs(latency_ms - previous) <= 0.1 * previous:
                break
            previous = latency_ms
        elif over:
            break
        else:
            needed = math.ceil(limits.block_ms / latency_ms) if latency_ms > 0 else 10 * calls
            calls = max(calls + 1, min(needed, 10 * calls))
    return _plan(contender, latency_ms, limits.block_ms, alone=timer.device.type == "cuda")


def _plan(contender: Contender, latency_ms: float, block_ms: float, *, alone: bool) -> Plan:
    if latency_ms <= 0:
        return Plan(1, 1)
    alone = alone or contender.prepare is not None
    samples = len(contender.calls) if contender.prepare is None else 1
    calls = 1 if alone else math.ceil(SLICE_MS / latency_ms)
    if samples * latency_ms <= block_ms:
        calls = math.ceil(calls / samples) * samples
    return Plan(max(1, math.ceil(block_ms / latency_ms / calls)), calls)
