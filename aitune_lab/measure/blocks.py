"""Blocks of timed calls, and the warm-up that says how many calls fill one."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Thunk = Callable[[], Any]


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

    min_blocks: int = 12
    max_blocks: int = 60
    block_ms: float = 20.0
    max_seconds: float = 10.0
    target_relative_ci: float = 0.02
    warmup_seconds: float = 2.0

    @classmethod
    def rough(cls) -> MeasureLimits:
        """A quick look, enough to tell who is hopeless."""
        return cls(min_blocks=3, max_blocks=3, block_ms=10.0, max_seconds=2.0, warmup_seconds=0.5)


class Timer:
    """Times blocks of calls on one device."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.device = device
        self.clock = clock

    def block(self, contender: Contender, calls: int, turn: int) -> tuple[float, float | None]:
        """(mean latency of a call in ms, mean device time in ms or None), after one call that isn't counted.

        `turn` rotates the inputs where a block is shorter than their number.
        """
        collecting = gc.isenabled()
        gc.disable()
        try:
            if self.device.type == "cuda":
                return self._on_cuda(contender, calls, turn)
            return self._on_host(contender, calls, turn), None
        finally:
            if collecting:
                gc.enable()

    def _on_host(self, contender: Contender, calls: int, turn: int) -> float:
        clock = self.clock
        if contender.prepare is not None:
            seconds = 0.0
            for i in range(-1, calls):
                call = contender.prepare(turn * calls + max(0, i))
                start = clock()
                call()
                if i >= 0:
                    seconds += clock() - start
            return seconds / calls * 1e3
        sequence = _sequence(contender.calls, calls, turn)
        sequence[0]()
        start = clock()
        for call in sequence:
            call()
        return (clock() - start) / calls * 1e3

    def _on_cuda(self, contender: Contender, calls: int, turn: int) -> tuple[float, float]:
        clock, device = self.clock, self.device
        stream = torch.cuda.current_stream(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sequence = [] if contender.prepare is not None else _sequence(contender.calls, calls, turn)
        seconds = device_ms = 0.0
        for i in range(-1, calls):
            at = max(0, i)
            call = contender.prepare(turn * calls + at) if contender.prepare is not None else sequence[at]
            torch.cuda.synchronize(device)
            start = clock()
            begin.record(stream)
            result = call()
            end.record(stream)
            torch.cuda.synchronize(device)
            elapsed = clock() - start
            del result
            if i >= 0:
                seconds += elapsed
                device_ms += begin.elapsed_time(end)
        return seconds / calls * 1e3, device_ms / calls


def _sequence(calls: Sequence[Thunk], number: int, turn: int) -> list[Thunk]:
    offset = turn * number
    return [calls[(offset + i) % len(calls)] for i in range(number)]


def warm_up(contender: Contender, timer: Timer, limits: MeasureLimits) -> int:
    """Call until two blocks of full length agree within 10 % or warm-up time is over; the calls that fill a block."""
    started = timer.clock()
    calls, previous = 1, math.inf
    while True:
        latency_ms, _ = timer.block(contender, calls, 0)
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
    calls = max(1, math.ceil(limits.block_ms / latency_ms)) if latency_ms > 0 else calls
    samples = len(contender.calls)
    # Whole turns through the samples, so that every block has the same mix; longer calls rotate from block to block.
    return calls if contender.prepare is not None or calls < samples else -(-calls // samples) * samples
