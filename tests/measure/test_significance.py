"""The statistics, against definitions worked out by brute force."""

import itertools
import math
import random
from statistics import median

import pytest
from hypothesis import given, settings, strategies as st

from aitune_lab.measure.significance import holm, median_interval, percentile, signed_rank_p_value


def brute_force_p(differences):
    ranks = {}
    ordered = sorted(abs(d) for d in differences)
    for value in set(ordered):
        places = [i + 1 for i, other in enumerate(ordered) if other == value]
        ranks[value] = sum(places) / len(places)
    observed = sum(ranks[abs(d)] for d in differences if d > 0)
    sums = [
        sum(ranks[abs(d)] for d, sign in zip(differences, signs) if sign)
        for signs in itertools.product((False, True), repeat=len(differences))
    ]
    return sum(s >= observed for s in sums) / len(sums)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(-5, 5).filter(bool), min_size=1, max_size=9))
def test_signed_rank_is_exact_with_ties(differences):
    assert signed_rank_p_value(differences) == pytest.approx(brute_force_p(differences))


def test_signed_rank_edges():
    assert signed_rank_p_value([]) == 1.0
    assert signed_rank_p_value([0.0, 0.0]) == 1.0
    assert signed_rank_p_value([math.nan, 1.0]) == 1.0
    assert signed_rank_p_value([1.0] * 7) == pytest.approx(2**-7)
    assert signed_rank_p_value([1.0, 0.0, 2.0]) == signed_rank_p_value([1.0, 2.0])


def test_normal_approximation_joins_the_exact_distribution():
    source = random.Random(4)
    differences = [source.gauss(0.2, 1) for _ in range(60)]
    exact = signed_rank_p_value(differences)
    padded = signed_rank_p_value([*differences, 1e-9])  # 61 differences, the added one of the lowest rank
    assert padded == pytest.approx(exact, abs=0.01)


def test_p_values_are_uniform_without_an_effect():
    source = random.Random(0)
    p_values = [signed_rank_p_value([source.gauss(0, 1) for _ in range(12)]) for _ in range(2000)]
    assert sum(p < 0.05 for p in p_values) / 2000 == pytest.approx(0.05, abs=0.015)


def test_median_interval_covers():
    source = random.Random(1)
    covered = 0
    for _ in range(1000):
        low, high = median_interval([source.expovariate(1.0) for _ in range(15)])
        covered += low <= math.log(2) <= high
    assert 0.95 <= covered / 1000 <= 0.99


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
def test_median_lies_in_its_interval(values):
    low, high = median_interval(values)
    assert low <= median(values) <= high


def test_known_ranks_of_the_interval():
    # Tables: n = 10 takes the 2nd and 9th, n = 20 the 6th and 15th, n = 5 all.
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 21)) == (6, 15)
    assert median_interval(range(1, 6)) == (1, 5)
    with pytest.raises(ValueError, match="at least one value"):
        median_interval([])


def test_percentile():
    assert percentile([3, 1, 2, 4], 0.5) == 2
    assert percentile(range(1, 11), 0.9) == 9
    assert percentile([7], 0.9) == 7


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_never_lowers_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    assert all(a >= p for a, p in zip(adjusted, p_values))
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)
