"""Is a trial right, and what does it cost: the pure figures that all strategies decide by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...schema import ErrorClass, Measurement, Point, PointResult, Tolerance, Trial
from .words import milliseconds, number, out_of_tolerance, times, why_not_ok

TIE_SHARE = 0.02
"""Costs this close, with overlapping confidence intervals, are a tie: well under what a user would notice."""


@dataclass(frozen=True)
class Contender:
    """A right candidate with the figure that a strategy compares.

    `cost` is relative to eager's (1.0 is as good as eager, lower is better), `low` and `high` bound it at
    95 % confidence; `figures` says in words what it rests on, at a named point.
    """

    trial: Trial
    cost: float
    low: float
    high: float
    figures: str

    @property
    def label(self) -> str:
        return self.trial.candidate.label

    @property
    def speedup(self) -> float:
        return 1.0 / self.cost


def admitted(error_class: ErrorClass | None, tolerance: Tolerance) -> bool:
    """Whether the tolerance admits the class: `accuracy="exact"` admits only the first."""
    return error_class == "exact" or (error_class == "within budget" and tolerance.accuracy == "budget")


def why_wrong(trial: Trial, points: Iterable[Point], tolerance: Tolerance) -> str | None:
    """Why the trial may not win at these points, with its figures; None if it is right at every one.

    Other points don't count, except that a refusal at any of them does.
    """
    if trial.status != "ok":
        return why_not_ok(trial)
    results = {result.point: result for result in trial.points}
    for point in points:
        if point not in results or results[point].comparison is None:
            return f"not compared with eager at {point.label}, so it may not win"
    if not admitted(trial.error_class, tolerance):
        return out_of_tolerance(trial, tolerance)
    for result in trial.points:
        for leaf in result.comparison.leaves if result.comparison else ():
            if math.isnan(leaf.relative_l2):
                return f"its error is not a number: {leaf.path or 'the output'} at {result.point.label}"
    if trial.reason and all(result.latency is None for result in trial.points):
        return trial.reason  # right, and not measured in full for this reason
    return None


def what_became(trial: Trial, tolerance: Tolerance) -> str:
    """What became of a trial that decides nothing, in a few words that can be counted: `was out of tolerance`."""
    if trial.status != "ok":
        return {
            "refused": "was refused by its backend",
            "unavailable": "was unavailable",
            "cancelled": "was not finished",
        }.get(trial.status, trial.status)
    if trial.error_class is not None and not admitted(trial.error_class, tolerance):
        return "was out of tolerance"
    timed = [m for result in trial.points for m in (result.latency, result.eager) if m is not None]
    if any(measurement.disturbed for measurement in timed):
        return "was right but disturbed by other load"
    if trial.reason and not timed:
        return "was right but clearly slower in a rough look"
    return "was not measured at every point"


def points_of(trial: Trial, eager: Trial) -> tuple[Point, ...]:
    """The points at which a candidate must be right and timed: eager's, or its own if eager names none."""
    return tuple(result.point for result in (eager.points or trial.points))


def eager_at(result: PointResult, eager: Trial) -> Measurement | None:
    """Eager's latency at a point: measured in alternation with the candidate if it was, else by its own trial."""
    if result.eager is not None:
        return result.eager
    return next((other.latency for other in eager.points if other.point == result.point), None)


def why_untimed(measurement: Measurement | None, whose: str, point: Point) -> str | None:
    """Why a measurement decides nothing, or None if it counts."""
    if measurement is None:
        return f"{whose} latency was not measured at {point.label}"
    if measurement.disturbed:
        return f"{whose} measurement at {point.label} was disturbed ({measurement.disturbed}) and decides nothing"
    if not (math.isfinite(measurement.median_ms) and measurement.median_ms > 0):
        return f"{whose} latency at {point.label} is no positive number ({measurement.median_ms} ms)"
    return None


def weighted_latency(trial: Trial, eager: Trial) -> Contender | str:
    """Sum over points of weight x median latency, relative to eager's sum; or why it decides nothing.

    Eager's figures are those measured in alternation with the candidate, so that drift between one candidate
    and the next cancels. Every point must be timed. Method: a ratio of weighted sums of medians; its bounds
    take the candidate's 95 % bounds of each median and eager's medians.
    """
    needed = points_of(trial, eager)
    results = [result for result in trial.points if result.point in needed]
    if missing := [point.label for point in needed if all(result.point != point for result in results)]:
        return f"not measured at {', '.join(missing)}"
    mine = low = high = theirs = 0.0
    heaviest: tuple[float, str, str] = (-1.0, "", "")
    ratios: list[float] = []
    for result in results:
        reference = eager_at(result, eager)
        problem = why_untimed(result.latency, "its", result.point) or why_untimed(reference, "eager's", result.point)
        if problem:
            return problem
        assert result.latency is not None
        assert reference is not None
        if not (math.isfinite(result.weight) and result.weight >= 0):
            return f"the weight of {result.point.label} is no number of at least 0 ({result.weight})"
        mine += result.weight * result.latency.median_ms
        low += result.weight * _bound(result.latency.ci_low_ms, result.latency)
        high += result.weight * _bound(result.latency.ci_high_ms, result.latency)
        theirs += result.weight * reference.median_ms
        ratios.append(reference.median_ms / result.latency.median_ms)
        share = result.weight * reference.median_ms
        if share > heaviest[0]:
            pair = f"{milliseconds(result.latency.median_ms)} against {milliseconds(reference.median_ms)}"
            heaviest = (share, pair, result.point.label)
    if not (theirs > 0 and mine > 0 and math.isfinite(theirs) and math.isfinite(mine)):
        return "no point has a weight, so its latency decides nothing"
    figures = f"{heaviest[1]} at {heaviest[2]}"
    if len(ratios) > 1:
        # The pair's own ratio lies in this range, and differs from the weighted one.
        least, most = times(min(ratios)), times(max(ratios))
        spread = f"{least if least == most else f'{least} to {most}'} times at each"
        figures = f"weighted over {len(ratios)} points, {spread}; {figures}"
    return Contender(trial, mine / theirs, low / theirs, high / theirs, figures)


def best_throughput(
    trial: Trial, eager: Trial, batch_symbol: str, memory_limit_bytes: int | None
) -> tuple[Contender, Point] | str:
    """Items per second at the candidate's best point, relative to eager's at its own best, and that point.

    A point counts if it is timed and under the memory limit. Eager's best is over the same alternated
    figures and over its own trial.
    """
    mine: dict[Point, Measurement] = {}
    theirs: dict[Point, float] = {}
    problem = "not measured at any point under the memory limit"
    for result in trial.points:
        if _too_big(result, memory_limit_bytes):
            continue
        reference = eager_at(result, eager)
        reason = why_untimed(result.latency, "its", result.point) or why_untimed(reference, "eager's", result.point)
        if reason:
            problem = reason
            continue
        assert result.latency is not None
        assert reference is not None
        mine[result.point] = result.latency
        theirs[result.point] = _items(result.point, batch_symbol) / reference.median_ms
    for result in eager.points:
        timed = result.latency is not None and why_untimed(result.latency, "eager's", result.point) is None
        if timed and result.point not in theirs and not _too_big(result, memory_limit_bytes):
            assert result.latency is not None
            theirs[result.point] = _items(result.point, batch_symbol) / result.latency.median_ms
    if not mine:
        return problem
    point = max(mine, key=lambda p: (_items(p, batch_symbol) / mine[p].median_ms, p.label))
    eager_point = max(theirs, key=lambda p: (theirs[p], p.label))
    latency, items, eager_rate = mine[point], _items(point, batch_symbol), theirs[eager_point]
    where = point.label if point == eager_point else f"{point.label}, eager's best at {eager_point.label}"
    figures = f"{number(1000 * items / latency.median_ms)} against {number(1000 * eager_rate)} items/s at {where}"
    low, high = (eager_rate * _bound(b, latency) / items for b in (latency.ci_low_ms, latency.ci_high_ms))
    return Contender(trial, eager_rate * latency.median_ms / items, low, high, figures), point


def preference(contenders: Sequence[Contender], complexity: dict[str, int]) -> list[Contender]:
    """Best first: the lowest cost; among those tied with it the simplest, then the most exact, then the cheapest.

    The order is the same for any order of the input.
    """
    rest = sorted(contenders, key=lambda c: (c.cost, c.label))
    order = []
    while rest:
        tied = [c for c in rest if is_tie(c, rest[0])]
        pick = min(tied, key=lambda c: (complexity.get(c.label, 1), c.trial.error_class != "exact", c.cost, c.label))
        order.append(pick)
        rest.remove(pick)
    return order


def is_tie(one: Contender, other: Contender) -> bool:
    """Whether two costs can't be told apart: intervals overlap, and they differ by at most `TIE_SHARE`."""
    overlap = one.low <= other.high and other.low <= one.high
    return one.cost == other.cost or (overlap and abs(one.cost - other.cost) <= TIE_SHARE * min(one.cost, other.cost))


def _items(point: Point, batch_symbol: str) -> int:
    return point.as_dict().get(batch_symbol, 1)


def _too_big(result: PointResult, memory_limit_bytes: int | None) -> bool:
    peak = result.peak_memory_bytes
    return memory_limit_bytes is not None and peak is not None and peak > memory_limit_bytes


def _bound(value: float, latency: Measurement) -> float:
    return value if math.isfinite(value) else latency.median_ms
