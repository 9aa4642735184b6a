"""Who is faster: decided on paired rounds, never on one look at two medians."""

from __future__ import annotations

import math
from typing import NamedTuple

from .benchmark import Timing
from .significance import holm, median_ratio, signed_rank_p_value


class Verdict(NamedTuple):
    """`ratio` is the median of baseline over winner, round by round: 1.25 is 25 % more calls per second."""

    is_faster: bool
    p_value: float
    ratio: float


def faster(timing: Timing, winner: str, baseline: str, alpha: float = 0.01, min_gain: float = 0.01) -> Verdict:
    """Whether the winner is faster than the baseline, by more than `min_gain`: a paired test over rounds.

    Wilcoxon's signed-rank test on log(baseline / winner) - log(1 + min_gain), one-sided. Fewer than 7 rounds can't
    reach α = 0.01. Nothing is faster in a disturbed measurement, and NaN never wins.

    Raises:
        KeyError: a label wasn't measured.
    """
    ours, theirs = timing.blocks_ms[winner], timing.blocks_ms[baseline]
    if not all(math.isfinite(value) and value > 0 for value in (*ours, *theirs)):
        return Verdict(False, 1.0, math.nan)
    shift = math.log1p(min_gain)
    p_value = signed_rank_p_value([math.log(b / a) - shift for a, b in zip(ours, theirs, strict=True)])
    disturbed = timing.measurements[winner].disturbed or timing.measurements[baseline].disturbed
    return Verdict(p_value < alpha and disturbed is None, p_value, median_ratio(theirs, ours))


def shown_faster(
    timing: Timing, baseline: str, alpha: float = 0.01, min_gain: float = 0.01
) -> list[tuple[str, Verdict]]:
    """All contenders shown to be faster than the baseline, Holm's correction included, lowest median first.

    The p-values in the verdicts are the corrected ones.
    """
    others = [label for label in timing.blocks_ms if label != baseline]
    verdicts = [faster(timing, label, baseline, alpha, min_gain) for label in others]
    corrected = holm([verdict.p_value for verdict in verdicts])
    shown = [
        (label, verdict._replace(p_value=p_value))
        for label, verdict, p_value in zip(others, verdicts, corrected, strict=True)
        if verdict.is_faster and p_value < alpha
    ]
    return sorted(shown, key=lambda item: timing.measurements[item[0]].median_ms)


def hopeless(timing: Timing, label: str, baseline: str, margin: float = 0.2) -> bool:
    """Whether even the contender's quickest block is slower than the baseline's median by more than `margin`."""
    return min(timing.blocks_ms[label]) > (1 + margin) * timing.measurements[baseline].median_ms
