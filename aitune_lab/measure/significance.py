"""Statistics of paired timings: a confidence interval of the median, the signed-rank test, Holm's correction."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist, median

import numpy as np

_LARGEST_EXACT = 60


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """A distribution-free confidence interval of the median: two order statistics.

    The i-th smallest and i-th largest values enclose the median unless fewer than i values lie on one side, which
    has the binomial probability 2 P(B(n, 1/2) < i). With fewer than 6 values 95 % can't be had: all of them enclose
    it. Source: Hahn, Meeker, *Statistical Intervals*, section 5.2.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("an interval needs at least one value, but got none")
    ordered = sorted(values)
    low = _interval_rank(len(ordered), confidence)
    return ordered[low], ordered[len(ordered) - 1 - low]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def signed_rank_p_value(differences: Sequence[float]) -> float:
    """One-sided p-value of Wilcoxon's signed-rank test that the differences are centred above 0.

    Zeros are left out, ties share their mean rank. Up to 60 differences the distribution is exact (given the ranks);
    above, normal with continuity and tie correction. Without any difference other than 0 it is 1. Source: Wilcoxon,
    *Individual comparisons by ranking methods*, 1945; Hollander, Wolfe, *Nonparametric Statistical Methods*, 3.1.
    """
    nonzero = [d for d in differences if d != 0]
    n = len(nonzero)
    if n == 0 or any(math.isnan(d) for d in nonzero):
        return 1.0
    doubled = _doubled_ranks([abs(d) for d in nonzero])
    positive = sum(rank for rank, d in zip(doubled, nonzero, strict=True) if d > 0)
    if n > _LARGEST_EXACT:
        mean = sum(doubled) / 2
        deviation = math.sqrt(sum(rank * rank for rank in doubled)) / 2
        return 1 - NormalDist().cdf((positive - mean - 1) / deviation)
    # How many of the 2^n assignments of signs give each sum of positive ranks.
    ways = np.zeros(sum(doubled) + 1)
    ways[0] = 1
    for rank in doubled:
        ways[rank:] += ways[:-rank].copy()
    return float(ways[positive:].sum() / ways.sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: those below α hold together at family-wise error α.

    Source: Holm, *A simple sequentially rejective multiple test procedure*, 1979.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - place)))
        adjusted[i] = largest
    return adjusted


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of paired ratios; infinite where a denominator is 0."""
    return median(a / b if b > 0 else math.inf for a, b in zip(numerators, denominators, strict=True))


@functools.lru_cache(maxsize=256)
def _interval_rank(n: int, confidence: float) -> int:
    """How many values to leave out at each end."""
    rank, tail = 0, 0.0
    while rank < n // 2:
        tail += math.comb(n, rank) / 2**n
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    return max(0, rank - 1)


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value (ties share their mean rank, so twice a rank is whole)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            ranks[i] = start + end + 2
        start = end + 1
    return ranks
