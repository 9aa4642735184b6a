"""Honest timing: contenders alternate in randomised rounds, so that drift and load hit all of them alike.

One round times one block of calls of every contender, in random order. A block lasts about `block_ms`, its first call
is not counted, and its figure is the median latency of its slices (single calls, or as many as the clock can tell);
inputs rotate. Figures of one round are paired, and
whether one contender is faster than another is decided on these pairs (`verdict.py`). A round overlapped by heavy other
load is repeated; if that doesn't help, the measurement is marked as disturbed and decides nothing.

CPU latency is wall time. CUDA latency is the host's wall time from the call to the synchronised result, with the
device's time between two events beside it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ..schema import Measurement
from .blocks import Block, Contender, MeasureLimits, Plan, Timer, warm_up
from .conditions import Watch, both, conditions, cpu_watch, gpu_watch
from .significance import median_interval, percentile


@dataclass(frozen=True)
class Timing:
    """What was measured.

    `blocks_ms[label][i]` is the contender's latency in round `i`, of undisturbed rounds only; of all if the
    measurement is disturbed.
    """

    measurements: Mapping[str, Measurement]
    blocks_ms: Mapping[str, tuple[float, ...]]

    def joined(self, later: Timing) -> Timing:
        """The rounds of both; the measurements are the later ones'. Raises KeyError if a label is missing there."""
        return Timing(
            later.measurements, {label: blocks + later.blocks_ms[label] for label, blocks in self.blocks_ms.items()}
        )


@dataclass
class _Track:
    """A contender while it is measured, with its block of every round."""

    contender: Contender
    plan: Plan = field(default_factory=Plan)
    blocks: list[Block] = field(default_factory=list)

    def latencies_ms(self, rounds: Sequence[int]) -> list[float]:
        return [self.blocks[i].latency_ms for i in rounds]


def measure(
    contenders: Sequence[Contender],
    *,
    device: torch.device | str = "cpu",
    limits: MeasureLimits | None = None,
    threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    load: Watch | None = None,
    cancelled: Callable[[], bool | None] = lambda: False,
) -> Timing:
    """Time contenders against each other.

    Args:
        contenders: at least one, with unique labels; calls must not need gradients.
        device: where the calls run.
        limits: by default `MeasureLimits()`.
        threads: intra-op threads that the calls use, for the record and for telling other load; None: torch's.
        clock: seconds, monotonic.
        seed: of the order within rounds.
        load: watches each round for other load (`cpu_watch`, `gpu_watch`); None: what suits the device.
        cancelled: asked between blocks; if true, what was measured so far is returned (nothing, if no round is whole).
            It may as well raise.

    Raises:
        ValueError: no contender, or a label twice.
        Exception: whatever a call raises.
    """
    limits = limits or MeasureLimits()
    device = torch.device(device)
    labels = [contender.label for contender in contenders]
    if not labels or len(set(labels)) != len(labels):
        raise ValueError(f"contenders must be at least one and have unique labels, but got {labels}")
    threads = threads or torch.get_num_threads()
    if load is None:
        load = both(cpu_watch(threads), gpu_watch(device)) if device.type == "cuda" else cpu_watch(threads)
    timer = Timer(device, clock)
    order = random.Random(seed)
    tracks = [_Track(contender) for contender in contenders]
    reasons: list[str | None] = []
    for track in tracks:
        if not cancelled():
            track.plan = warm_up(track.contender, timer, limits)
    started = clock()
    while not cancelled() and not _enough(tracks, reasons, limits, clock() - started):
        end_watch = load()
        results: dict[str, Block] = {}
        for track in order.sample(tracks, len(tracks)):
            if cancelled():
                break
            results[track.contender.label] = timer.block(track.contender, track.plan, len(reasons))
        disturbed = end_watch()
        if len(results) < len(tracks):  # cancelled: a round without all contenders has no pairs
            break
        reasons.append(disturbed)
        for track in tracks:
            track.blocks.append(results[track.contender.label])

    clean = _clean_rounds(reasons, limits)
    kept = clean if clean is not None else list(range(len(reasons)))
    common = Counter(reason for reason in reasons if reason is not None).most_common(1)
    disturbance = common[0][0] if clean is None and common else None
    facts = conditions(device)
    return Timing(
        {
            track.contender.label: _measurement(track, kept, device, threads, disturbance, facts)
            for track in tracks
            if kept
        },
        {track.contender.label: tuple(track.latencies_ms(kept)) for track in tracks if kept},
    )


def _clean_rounds(reasons: Sequence[str | None], limits: MeasureLimits) -> list[int] | None:
    """The undisturbed rounds if there are enough of them, else None."""
    clean = [i for i, reason in enumerate(reasons) if reason is None]
    return clean if len(clean) >= limits.min_blocks or len(clean) == len(reasons) else None


def _enough(tracks: Sequence[_Track], reasons: Sequence[str | None], limits: MeasureLimits, seconds: float) -> bool:
    if not reasons:
        return False
    if seconds >= limits.max_seconds or len(reasons) >= limits.max_blocks:
        return True
    clean = [i for i, reason in enumerate(reasons) if reason is None]
    if len(reasons) - len(clean) >= 2 * limits.min_blocks > 2 * len(clean):
        return True  # the load stays
    return len(clean) >= limits.min_blocks and all(
        _relative_half_width(track.latencies_ms(clean)) <= limits.target_relative_ci for track in tracks
    )


def _relative_half_width(values: Sequence[float]) -> float:
    low, high = median_interval(values)
    middle = median(values)
    return (high - low) / 2 / middle if middle > 0 else 0.0


def _measurement(
    track: _Track,
    kept: Sequence[int],
    device: torch.device,
    threads: int,
    disturbed: str | None,
    facts: Mapping[str, Any],
) -> Measurement:
    values = track.latencies_ms(kept)
    slices = [value for i in kept for value in track.blocks[i].slices_ms]
    device_ms = [value for value in (track.blocks[i].device_ms for i in kept) if value is not None]
    middle = median(values)
    low, high = median_interval(values)
    spread = percentile(values, 0.75) - percentile(values, 0.25)
    return Measurement(
        median_ms=middle,
        p90_ms=percentile(slices, 0.9),
        min_ms=min(slices),
        ci_low_ms=low,
        ci_high_ms=high,
        spread=spread / middle if middle > 0 else 0.0,
        n=len(values),
        calls_per_block=track.plan.calls,
        method="host wall time to the synchronised result" if device.type == "cuda" else "wall time",
        threads=threads,
        disturbed=disturbed,
        device_ms=median(device_ms) if device_ms else None,
        conditions=dict(facts),
    )
