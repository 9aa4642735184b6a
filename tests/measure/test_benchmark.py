"""Timing by a scripted clock: what is measured, when it stops, and who may be called faster."""

import gc
import math
import random
from dataclasses import replace

import pytest
import torch

from aitune_lab.measure.benchmark import measure
from aitune_lab.measure.blocks import Contender, MeasureLimits
from aitune_lab.measure.conditions import both, conditions, cpu_watch
from aitune_lab.measure.verdict import faster, hopeless, shown_faster
from aitune_lab.testing.clock import ScriptedClock

LIMITS = MeasureLimits(max_seconds=1e6)


def quiet():
    return lambda: None


def timed(clock, contenders, limits=LIMITS, **options):
    options.setdefault("load", quiet)
    return measure(contenders, limits=limits, clock=clock, threads=2, **options)


def scripted(clock, **latencies):
    return [Contender(label, [clock.call(latency)]) for label, latency in latencies.items()]


def test_figures():
    clock = ScriptedClock()
    timing = timed(clock, scripted(clock, eager=2.0, fast=1.0))
    eager, fast = timing.measurements["eager"], timing.measurements["fast"]
    assert eager.median_ms == pytest.approx(2.0, rel=0.1)
    assert fast.median_ms == pytest.approx(1.0, rel=0.1)
    assert eager.ci_low_ms <= eager.median_ms <= eager.ci_high_ms
    assert eager.min_ms <= eager.median_ms <= eager.p90_ms
    assert eager.n == len(timing.blocks_ms["eager"]) == len(timing.blocks_ms["fast"]) >= LIMITS.min_blocks
    assert (eager.threads, eager.disturbed, eager.device_ms, eager.method) == (2, None, None, "wall time")
    assert eager.calls_per_block * eager.median_ms >= 0.8 * LIMITS.block_ms
    assert "float32_matmul_precision" in eager.conditions


def test_same_seed_same_figures():
    def run(seed):
        clock = ScriptedClock(seed=3)
        return timed(clock, scripted(clock, a=1.0, b=1.0), seed=seed)

    assert run(1) == run(1)
    assert run(1).blocks_ms != run(2).blocks_ms


def test_every_contender_meets_the_same_drift():
    clock = ScriptedClock(drift=lambda seconds: 1 + seconds)  # the machine gets slower and slower
    timing = timed(clock, scripted(clock, a=1.0, b=1.0), replace(LIMITS, max_blocks=40))
    a, b = timing.measurements["a"], timing.measurements["b"]
    assert a.spread > 0.2
    assert a.median_ms == pytest.approx(b.median_ms, rel=0.05)
    assert not faster(timing, "a", "b").is_faster
    assert not faster(timing, "b", "a").is_faster


def test_order_within_rounds_is_random_and_the_first_call_of_a_block_is_not_counted():
    clock, order = ScriptedClock(), []

    def contender(label):
        def call():
            first = not order or order[-1] != label
            order.append(label)
            clock.advance(500.0 if first else 10.0)

        return Contender(label, [call])

    timing = timed(clock, [contender("a"), contender("b"), contender("c")])
    assert [m.median_ms for m in timing.measurements.values()] == pytest.approx([10.0] * 3)
    switches = [x for x, y in zip(order, [None, *order]) if x != y]
    assert len({tuple(switches[i : i + 3]) for i in range(3, 30, 3)}) > 1


def test_inputs_rotate():
    clock, seen = ScriptedClock(), []

    def call(i, latency):
        return lambda: (seen.append(i), clock.advance(latency))

    timed(clock, [Contender("short", [call(i, 1.0) for i in range(3)])])
    assert min(seen.count(i) for i in range(3)) > 0.8 * max(seen.count(i) for i in range(3))
    seen.clear()
    timed(clock, [Contender("long", [call(i, 100.0) for i in range(3)])])
    assert set(seen) == {0, 1, 2}


def test_preparation_is_not_timed():
    clock = ScriptedClock()
    state = []

    def prepare(i):
        clock.advance(1000.0)
        x = torch.ones(2)
        return lambda: (state.append(float(x.add_(1)[0])), clock.advance(3.0))

    timing = timed(clock, [Contender("mutates", prepare=prepare)])
    assert timing.measurements["mutates"].median_ms == pytest.approx(3.0)
    assert set(state) == {2.0}


def test_stops_when_intervals_are_narrow():
    clock = ScriptedClock()
    still = timed(clock, [Contender("still", [clock.call(1.0, noise=0.001)])])
    noisy = timed(clock, [Contender("noisy", [clock.call(30.0, noise=0.5)])])
    assert still.measurements["still"].n == LIMITS.min_blocks
    assert noisy.measurements["noisy"].n == LIMITS.max_blocks


def test_stops_when_the_budget_ends():
    clock = ScriptedClock()
    limits = MeasureLimits(max_seconds=30.0, warmup_seconds=0.0)
    timing = timed(clock, scripted(clock, slow=5000.0), limits)
    assert timing.measurements["slow"].n < 6
    assert clock() < 60


def test_cancelled():
    clock, asked = ScriptedClock(), iter([False] * 12 + [True] * 1000)
    timing = timed(clock, scripted(clock, a=1.0, b=1.0), cancelled=lambda: next(asked))
    assert len(timing.blocks_ms["a"]) == len(timing.blocks_ms["b"]) < LIMITS.min_blocks
    assert timed(clock, scripted(clock, a=1.0), cancelled=lambda: True).measurements == {}


def test_errors_pass_and_garbage_collection_stays_on():
    def broken():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        timed(ScriptedClock(), [Contender("broken", [broken])])
    assert gc.isenabled()


def test_wrong_contenders():
    with pytest.raises(ValueError, match="must have calls or prepare"):
        Contender("empty")
    same = Contender("same", [print])
    for contenders in ([], [same, same]):
        with pytest.raises(ValueError, match="at least one and have unique labels"):
            measure(contenders)


class TestDisturbance:
    def load(self, reasons):
        return lambda: lambda: next(reasons)

    def test_disturbed_rounds_are_repeated(self):
        clock = ScriptedClock()
        reasons = iter(["a backup ran"] * 5 + [None] * 1000)
        timing = timed(clock, scripted(clock, a=1.0), load=self.load(reasons))
        assert timing.measurements["a"].disturbed is None
        assert timing.measurements["a"].n >= LIMITS.min_blocks

    def test_load_that_stays_marks_the_measurement_which_then_decides_nothing(self):
        clock = ScriptedClock()
        timing = timed(clock, scripted(clock, eager=2.0, fast=1.0), load=lambda: lambda: "a backup runs")
        assert timing.measurements["fast"].disturbed == "a backup runs"
        assert timing.measurements["fast"].n <= 2 * LIMITS.min_blocks
        assert not faster(timing, "fast", "eager").is_faster
        assert shown_faster(timing, "eager") == []

    def test_watches_together(self):
        watch = both(quiet, lambda: lambda: "heat", lambda: lambda: "load")
        assert watch()() == "heat"
        assert both(quiet, quiet)()() is None

    def test_cpu_watch_hears_an_idle_machine_or_names_the_load(self):
        said = cpu_watch(1)()()
        assert said is None or "CPUs" in said

    def test_conditions_of_the_cpu(self):
        assert set(conditions(torch.device("cpu"))) == {"deterministic", "float32_matmul_precision"}


class TestVerdict:
    def test_faster(self):
        clock = ScriptedClock()
        timing = timed(clock, scripted(clock, eager=2.0, fast=1.0, same=2.0))
        verdict = faster(timing, "fast", "eager")
        assert verdict.is_faster
        assert verdict.ratio == pytest.approx(2.0, rel=0.1)
        assert not faster(timing, "same", "eager").is_faster
        assert not faster(timing, "eager", "fast").is_faster
        assert [label for label, _ in shown_faster(timing, "eager")] == ["fast"]

    def test_a_gain_below_the_margin_is_no_win(self):
        clock = ScriptedClock()
        contenders = [Contender("eager", [clock.call(1.0, 0.0)]), Contender("bit", [clock.call(0.995, 0.001)])]
        timing = timed(clock, contenders)
        assert not faster(timing, "bit", "eager").is_faster
        assert faster(timing, "bit", "eager", min_gain=0.0).is_faster

    def test_few_rounds_decide_nothing(self):
        clock = ScriptedClock()
        timing = timed(clock, scripted(clock, eager=2.0, fast=1.0), MeasureLimits.rough())
        assert not faster(timing, "fast", "eager").is_faster

    def test_nan_never_wins(self):
        clock = ScriptedClock()
        timing = timed(clock, scripted(clock, eager=2.0, fast=1.0))
        broken = replace(timing, blocks_ms={**timing.blocks_ms, "fast": (math.nan,) * len(timing.blocks_ms["fast"])})
        assert not faster(broken, "fast", "eager").is_faster

    def test_a_rough_look_tells_who_is_hopeless(self):
        clock = ScriptedClock()
        timing = timed(clock, scripted(clock, eager=1.0, slow=2.0, close=1.05), MeasureLimits.rough())
        assert hopeless(timing, "slow", "eager")
        assert not hopeless(timing, "close", "eager")
        assert clock() < 3


def tuned(seed, latencies):
    """What a tuner does: all candidates against eager, then the best of those shown faster once more."""
    source = random.Random(seed)
    rate = source.uniform(0.5, 3.0)
    clock = ScriptedClock(seed, drift=lambda seconds: 1 + 0.1 * math.sin(rate * seconds))
    contenders = scripted(clock, **latencies)
    shown = shown_faster(timed(clock, contenders, seed=seed), "eager")
    for label, _ in shown[:1]:
        again = timed(clock, [c for c in contenders if c.label in ("eager", label)], seed=seed + 1000)
        if faster(again, label, "eager").is_faster:
            return label
    return "eager"


PLACEBOS = {f"placebo{i}": 2.0 for i in range(10)}


def test_placebos_do_not_win():
    wins = sum(tuned(seed, {"eager": 2.0, **PLACEBOS}) != "eager" for seed in range(30))
    assert wins <= 1


def test_five_percent_are_found_among_placebos():
    found = sum(tuned(seed, {"eager": 2.0, **PLACEBOS, "better": 2.0 / 1.05}) == "better" for seed in range(30))
    assert found >= 27
