"""How far a run looks: which candidates it tries, how long it measures, and whom it stops after a rough look.

- `quick`: the first proposal of every backend, measured more briefly;
- `normal`: first proposals before their variants. A variant (the same backend in the same precision, with other options)
  is tried only where the first of its kind keeps up with the best so far; one that its backend calls a fallback, where
  the first can't be used; one by another backend of the same kernels, where calls are so short that what surrounds the
  kernels counts. A candidate that a rough look shows to be hopeless is not measured in full, and its rough latency decides
  nothing;
- `exhaustive`: every proposal, measured in full.

What users name themselves is always tried. Pins and `OneBackendStrategy` are always measured in full. Comparison with
eager is the same at every level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..backends import registry
from ..measure.benchmark import Timing
from ..measure.blocks import MeasureLimits
from ..measure.verdict import hopeless
from ..schema import Candidate, Point, Tolerance, Trial
from .candidates import typical_error
from .strategies import Strategy
from .strategies.score import Contender, admitted, weighted_latency
from .strategies.words import milliseconds, times

Level = Literal["quick", "normal", "exhaustive"]

KEEPS_UP = 1.05
"""A first proposal within this factor of the latency of the best one keeps up: other options may make up for that."""
SHORT_MS = 1.0
"""In shorter calls what surrounds the kernels counts, in which kin backends differ."""
HOPELESS_MARGIN = 0.2
"""Even its quickest block must be slower than the rival by more than this share."""


@dataclass(frozen=True)
class Rival:
    """Who a rough look compares with: a label, and its latency over eager's at each point (1.0: eager itself)."""

    label: str = "eager"
    over_eager: Mapping[Point, float] = field(default_factory=dict)


def limits_of(level: Level, limits: MeasureLimits) -> MeasureLimits:
    """The measuring limits at a level; `quick` keeps enough blocks for a second look to mean something."""
    if level != "quick":
        return limits
    return replace(
        limits,
        min_blocks=min(limits.min_blocks, 10),
        max_blocks=min(limits.max_blocks, 20),
        max_seconds=min(limits.max_seconds, 3.0),
        warmup_seconds=min(limits.warmup_seconds, 0.7),
    )


def looks_first(level: Level, strategy: Strategy, *, pinned: bool) -> bool:
    """Whether candidates get a rough look before they are measured in full."""
    return level != "exhaustive" and strategy.needs_second_look and not pinned


def best_so_far(trials: Sequence[Trial], eager: Trial, tolerance: Tolerance) -> Contender | None:
    """The right candidate with the lowest weighted latency, if it is below eager's."""
    right = [t for t in trials if t.status == "ok" and admitted(t.error_class, tolerance)]
    judged = [c for c in (weighted_latency(t, eager) for t in right) if isinstance(c, Contender) and c.cost < 1]
    return min(judged, key=lambda c: (c.cost, c.label), default=None)


def rival_of(best: Contender | None, strategy: Strategy) -> Rival:
    """The best so far where the fastest wins, else eager: a slower candidate may be wanted for something else."""
    if best is None or not strategy.fastest_wins:
        return Rival()
    results = [r for r in best.trial.points if r.latency is not None and r.eager is not None]
    return Rival(best.label, {r.point: 1 / r.speedup for r in results if r.speedup})


def why_skipped(
    level: Level,
    candidate: Candidate,
    first: Candidate | None,
    trials: Sequence[Trial],
    best: Contender | None,
    strategy: Strategy,
) -> str | None:
    """Why a variant is not tried at this level, in a sentence; None if it is tried.

    Args:
        level: the search level.
        candidate: what would be tried next.
        first: its backend's first proposal, None if this is it, or the user named it.
        trials: what was tried so far.
        best: the best so far.
        strategy: who decides.
    """
    if first is None or level == "exhaustive":
        return None
    if level == "quick":
        return f"not tried: search='quick' tries {first.label} only of its kind"
    if not (strategy.fastest_wins and kind_of(first) == kind_of(candidate)):
        return None
    trial = next((t for t in trials if t.candidate == first), None)
    if trial is None or trial.status != "ok" or trial.error_class == "refused":
        return None
    if any(r.latency.disturbed for r in trial.points if r.latency is not None):
        return None  # a disturbed measurement decides nothing, also not about variants
    timed = [r for r in trial.points if r.speedup]
    if not timed:
        return f"not tried: {first.label}, the first of its kind, was stopped after a rough look"
    if candidate.backend != first.backend:
        if min(r.latency.median_ms for r in timed if r.latency is not None) >= SHORT_MS:
            return f"not tried: {first.label} runs nearly the same kernels, in calls of more than {SHORT_MS:.0f} ms"
    elif registry.get(candidate.backend).further == "fallbacks":
        return f"not tried: {first.label} can be used, which is usually the faster form"
    if best is None or best.label == first.label:
        return None
    slower = [r.latency.median_ms / r.eager.median_ms for r in timed if r.latency is not None and r.eager is not None]
    ratio = min(slower) / best.cost
    if ratio <= KEEPS_UP:
        return None
    return f"not tried: {first.label}, the first of its kind, takes {times(ratio)} times as long as {best.label}"


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """What variants have in common: everything but those of the backend's options that leave the precision as it is."""
    off = typical_error(candidate)
    family = registry.get(candidate.backend).kin or candidate.backend
    return family, candidate.precision, candidate.memory_format, candidate.cuda_graph, off


def rough_look(
    label: str, points: Sequence[Point], rival: Rival, look: Callable[[Point, MeasureLimits], Timing]
) -> str | None:
    """Why a candidate is hopeless, with its figures; None if it isn't, at one point at least, or can't be told.

    Args:
        label: the candidate's.
        points: those at which it will be measured, the heaviest first.
        rival: who it must keep up with.
        look: times eager and the candidate at a point.
    """
    said = ""
    for point in points:
        timing = look(point, MeasureLimits.rough())
        if label not in timing.blocks_ms or any(m.disturbed for m in timing.measurements.values()):
            return None
        over = min(1.0, rival.over_eager.get(point, 1.0))
        if not hopeless(_against(timing, over), label, "eager", HOPELESS_MARGIN):
            return None
        if not said:
            mine, eager = (timing.measurements[who].median_ms for who in (label, "eager"))
            against = "" if over == 1.0 else f", of which {rival.label} takes {100 * over:.0f} %"
            said = f"about {milliseconds(mine)} against eager's {milliseconds(eager)}{against} at {point.label}"
    if not said:
        return None
    return f"stopped after a rough look: {said}; not measured in full"


def _against(timing: Timing, over_eager: float) -> Timing:
    """The timing with eager scaled to the rival's latency."""
    eager = timing.measurements["eager"]
    scaled = {**timing.measurements, "eager": replace(eager, median_ms=eager.median_ms * over_eager)}
    return Timing(scaled, timing.blocks_ms)
