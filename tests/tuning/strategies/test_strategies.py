from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aitune_lab import errors
from aitune_lab.backends.base import Availability, Backend, BackendConfig
from aitune_lab.backends.registry import register, unregister
from aitune_lab.schema import (
    Candidate,
    Comparison,
    LeafDifference,
    Measurement,
    Point,
    PointResult,
    StrategyConfig,
    Tolerance,
    Trial,
)
from aitune_lab.tuning.strategies import (
    ChoiceContext,
    Decision,
    FirstWinsStrategy,
    HighestThroughputStrategy,
    LatencyBudgetStrategy,
    MaxThroughputStrategy,
    MinLatencyStrategy,
    OneBackendStrategy,
    ParetoStrategy,
    Strategy,
    strategy_names,
    strategy_of,
)

Make = Callable[..., Trial]


def settle(
    strategy: Strategy, trials: Sequence[Trial], eager: Trial, confirmed: Any = None, **context: Any
) -> Decision:
    """Choose, and take the second looks that are asked for: each wins again unless `confirmed` says otherwise."""
    looks: dict[str, bool | None] = {}
    for _ in range(len(trials) + 1):
        decision = strategy.choose(trials, eager, ChoiceContext(confirmed=looks, **context))
        if not decision.second_look:
            return decision
        label = decision.second_look[0].candidate.label
        looks[label] = (confirmed or {}).get(label, True)
    raise AssertionError("the second looks never end")


# --- MinLatency ---------------------------------------------------------------------------------------------------


def test_winner_must_win_twice(make: Make) -> None:
    eager = make("eager", {8: 6.52})
    trial = make("onnxruntime", {8: 3.1}, eager={8: 6.52})
    first = MinLatencyStrategy().choose([eager, trial], eager, ChoiceContext())
    assert first.winner is eager
    assert first.second_look == (trial,)
    assert "not measured a second time" in first.reason
    won = settle(MinLatencyStrategy(), [eager, trial], eager)
    assert won.winner is trial
    assert won.reason == "onnxruntime is 2.1 times as fast as eager (3.10 ms against 6.52 ms at b=8), exact"
    assert won.losers == {"eager": "onnxruntime is 2.1 times as fast (3.10 ms against 6.52 ms at b=8)"}


def test_eager_stays_if_the_second_look_fails(make: Make) -> None:
    eager = make("eager", {8: 1.01})
    trial = make("inductor", {8: 1.0})
    context = ChoiceContext(confirmed={"inductor": False}, p_values={"inductor": 0.2})
    decision = MinLatencyStrategy().choose([trial], eager, context)
    assert decision.winner is eager
    assert decision.reason == (
        "eager stays: the best right candidate, inductor, could not be told from eager beyond noise: "
        "1.01 times as fast at first (1.00 ms against 1.01 ms at b=8), not again in the second look (p=0.2)"
    )
    assert decision.losers["inductor"].startswith("could not be told from eager beyond noise: 1.01 times")


def test_the_next_best_wins_if_the_best_fails_its_second_look(make: Make) -> None:
    eager = make("eager", {1: 4.0})
    trials = [make("inductor", {1: 1.0}), make("onnxruntime", {1: 2.0})]
    decision = settle(MinLatencyStrategy(), trials, eager, {"inductor": False})
    assert decision.winner.candidate.backend == "onnxruntime"
    assert "not again in the second look" in decision.losers["inductor"]


def test_why_no_candidate_counts_is_said_by_kind(make: Make) -> None:
    eager = make("eager", {8: 6.52})
    disturbed = [make(name, {8: 3.1}, eager={8: 6.52}, disturbed="other load") for name in ("a", "b")]
    wrong = make("c", {8: 1.0}, eager={8: 6.52}, error_class="refused", relative_l2=0.5)
    limit = ChoiceContext(not_tried={"d": "not tried: the run's limit of 5 s was reached"})

    def reason(trials: list[Trial], context: ChoiceContext | None = None) -> str:
        return MinLatencyStrategy().choose(trials, eager, context or ChoiceContext()).reason

    assert reason([*disturbed, wrong], limit) == (
        "eager stays: of 4 candidates 2 were right but disturbed by other load, "
        "1 was not tried (the run's limit of 5 s was reached), 1 was out of tolerance; measure again on a quieter machine"
    )
    assert reason([wrong]) == "eager stays: the only candidate, c, was out of tolerance"
    assert reason(disturbed).startswith("eager stays: all 2 candidates were right but disturbed by other load;")
    assert reason([]) == "eager stays: no candidate was tried"


def test_slower_candidates_need_no_second_look(make: Make) -> None:
    eager = make("eager", {1: 1.0})
    decision = MinLatencyStrategy().choose([make("inductor", {1: 2.0})], eager, ChoiceContext())
    assert decision.second_look == ()
    assert decision.reason == (
        "eager stays: the best right candidate, inductor, was only 0.5 times as fast (2.00 ms against 1.00 ms at b=1)"
    )
    assert decision.losers["inductor"].startswith("not faster than eager: 0.5 times")


def test_cost_is_the_weighted_sum_over_points(make: Make) -> None:
    weights = {1: 9.0, 8: 1.0}
    eager = make("eager", {1: 1.0, 8: 10.0}, weights=weights)
    small = make("small", {1: 0.5, 8: 11.0}, weights=weights)  # 15.5 of 19
    large = make("large", {1: 1.1, 8: 2.0}, weights=weights)  # 11.9 of 19
    decision = settle(MinLatencyStrategy(), [small, large], eager)
    assert decision.winner is large
    assert decision.reason.startswith(
        "large is 1.6 times as fast as eager (weighted over 2 points, 0.909 to 5 times at each; 2.00 ms against 10.0 ms at b=8)"
    )
    assert decision.losers["small"].startswith("slower than large: 1.23 times as fast as eager")


def test_eager_beside_the_candidate_counts_not_eager_of_another_time(make: Make) -> None:
    eager = make("eager", {1: 2.0})
    drifted = make("inductor", {1: 1.5}, eager={1: 1.0})
    assert MinLatencyStrategy().choose([drifted], eager, ChoiceContext()).second_look == ()


def test_ties_go_to_the_simpler_then_the_more_exact(make: Make) -> None:
    eager = make("eager", {1: 4.0})
    one = make("one", {1: 1.000}, noise=0.05, error_class="within budget")
    two = make("two", {1: 1.010}, noise=0.05)
    assert settle(MinLatencyStrategy(), [one, two], eager, complexity={"one": 1, "two": 2}).winner is one
    tied = settle(MinLatencyStrategy(), [one, two], eager)
    assert tied.winner is two
    assert tied.losers["one"].startswith("as fast as two within noise, which is simpler or more exact")
    clear = replace(two, points=make("two", {1: 1.2}).points)
    assert settle(MinLatencyStrategy(), [one, clear], eager).winner is one


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"error_class": "refused", "relative_l2": 3.2}, "out of tolerance at b=1: logits relative L2 error 3.2, allowed 0.0001; worst at index [0, 3]: expected 1.25, got 1252.0"),
        ({"error_class": "refused", "problem": "dtype float16 instead of float32"}, "out of tolerance at b=1: dtype float16"),
        ({"relative_l2": math.nan}, "not a number"),
        ({"disturbed": "other load"}, "disturbed (other load) and decides nothing"),
        ({"status": "failed", "reason": "no operator aten::foo"}, "failed: no operator aten::foo"),
        ({"status": "unavailable", "reason": "not installed. pip install x"}, "unavailable: not installed. pip install x"),
        ({"status": "cancelled", "reason": "3 times slower in a rough look"}, "not finished: 3 times slower"),
        ({"status": "crashed"}, "crashed: no reason was given"),
    ],
)  # fmt: skip
def test_what_is_not_right_never_wins(make: Make, wrong: dict[str, Any], said: str) -> None:
    eager = make("eager", {1: 4.0})
    for name in strategy_names():
        options = {"OneBackend": (("backend", "fast"),), "LatencyBudget": (("budget_ms", 5.0),)}.get(name, ())
        decision = settle(strategy_of(StrategyConfig(name, options)), [make("fast", {1: 0.1}, **wrong)], eager)
        if name == "OneBackend" and "disturbed" in wrong:
            assert "disturbed" in decision.reason  # it was asked for, and speed decides nothing there
            continue
        assert decision.winner is eager, name
        assert said in decision.losers["fast"]


@pytest.mark.parametrize("ms", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_latency_that_is_no_positive_number_never_wins(make: Make, ms: float) -> None:
    eager = make("eager", {1: 4.0})
    for strategy in (MinLatencyStrategy(), MaxThroughputStrategy(), ParetoStrategy(), LatencyBudgetStrategy(1.0)):
        decision = settle(strategy, [make("odd", {1: ms})], eager)
        assert decision.winner is eager
        assert "no positive number" in decision.losers["odd"]


def test_exact_admits_only_exact(make: Make) -> None:
    eager = make("eager", {1: 4.0})
    trial = make("fast", {1: 1.0}, error_class="within budget", relative_l2=3e-5)
    assert settle(MinLatencyStrategy(), [trial], eager).reason.endswith("within budget (relative L2 3e-05)")
    decision = settle(MinLatencyStrategy(), [trial], eager, tolerance=Tolerance(accuracy="exact"))
    assert decision.winner is eager
    assert decision.losers["fast"] == (
        "within budget only, and the plan asks for exact (logits is off by relative L2 3e-05, 1.5 times eager's own)"
    )


def test_every_point_must_be_compared_and_timed(make: Make) -> None:
    eager = make("eager", {1: 4.0, 8: 9.0})
    missing = make("fast", {1: 1.0})
    assert "not compared with eager at b=8" in settle(MinLatencyStrategy(), [missing], eager).losers["fast"]
    full = make("fast", {1: 1.0, 8: 1.0})
    unseen = replace(full, points=(full.points[0], replace(full.points[1], comparison=None)))
    assert "not compared with eager at b=8" in settle(MinLatencyStrategy(), [unseen], eager).losers["fast"]
    untimed = replace(full, points=(full.points[0], replace(full.points[1], latency=None)))
    assert "its latency was not measured at b=8" in settle(MinLatencyStrategy(), [untimed], eager).losers["fast"]


def test_what_was_not_tried_is_among_the_losers(make: Make) -> None:
    eager = make("eager", {1: 4.0})
    decision = settle(MinLatencyStrategy(), [], eager, not_tried={"tensorrt": "not tried: the time limit of 600 s"})
    assert decision.losers == {"tensorrt": "not tried: the time limit of 600 s"}
    assert settle(MinLatencyStrategy(), [], eager).reason == "eager stays: no candidate was tried"


# --- properties ---------------------------------------------------------------------------------------------------

numbers = st.one_of(st.floats(0.05, 20), st.sampled_from([math.nan, math.inf, 0.0]))


def scripted(name: str, ms: float, error_class: Any, status: Any, noise: float, off: float, memory: int) -> Trial:
    latency = Measurement(ms, ms, ms, ms * (1 - noise), ms * (1 + noise), noise, 9, 1, "perf_counter", 1)
    leaf = LeafDifference("y", error_class, 0, 0, 0, 0, 0, off, 1, 99, 0, None, 0, 1e-4)
    result = PointResult(
        Point((("b", 4),)), 1, 1.0, Comparison(error_class, "float64", (leaf,), 1), latency, None, memory
    )
    return Trial(name, "m", "s", Candidate(name), status, points=(result,))


@st.composite
def trial_lists(draw: st.DrawFn) -> list[Trial]:
    count = draw(st.integers(0, 6))
    return [
        scripted(
            f"c{i}",
            draw(numbers),
            draw(st.sampled_from(["exact", "within budget", "refused"])),
            draw(st.sampled_from(["ok", "ok", "ok", "failed"])),
            draw(st.sampled_from([0.0, 0.01, 0.2])),
            draw(st.sampled_from([0.0, 1e-7, 3e-5, 1e-3, math.nan])),
            draw(st.integers(1, 4)),
        )
        for i in range(count)
    ]


EAGER = scripted("eager", 5.0, "exact", "ok", 0.01, 0.0, 2)
ORDERLESS = [
    MinLatencyStrategy(),
    MaxThroughputStrategy(),
    LatencyBudgetStrategy(2.0),
    ParetoStrategy(),
    ParetoStrategy(max_relative_error=1e-5, max_memory_bytes=3),
    OneBackendStrategy("c1"),
]


@given(trial_lists(), st.sampled_from(ORDERLESS), st.sampled_from(["budget", "exact"]), st.data())
def test_only_the_right_win_and_every_loser_has_a_reason(
    trials: list[Trial], strategy: Strategy, accuracy: Any, data: st.DataObject
) -> None:
    confirmed = data.draw(st.dictionaries(st.sampled_from([f"c{i}" for i in range(6)]), st.booleans()))
    decision = settle(strategy, trials, EAGER, confirmed, tolerance=Tolerance(accuracy=accuracy))
    winner = decision.winner
    assert decision.reason
    assert (
        set(decision.losers) == {t.candidate.label for t in [EAGER, *trials]} - {winner.candidate.label}
        or winner is EAGER
    )
    assert {t.candidate.label for t in trials} - {winner.candidate.label} <= set(decision.losers)
    assert all(decision.losers.values())
    if winner is not EAGER:
        assert winner.status == "ok"
        assert winner.error_class in (("exact",) if accuracy == "exact" else ("exact", "within budget"))
        assert not math.isnan(winner.relative_l2 or 0)
        if not isinstance(strategy, OneBackendStrategy):
            latency = winner.points[0].latency
            assert latency is not None
            assert math.isfinite(latency.median_ms)
            assert latency.median_ms < 5.0
            assert confirmed.get(winner.candidate.label, True)


@given(trial_lists(), st.sampled_from(ORDERLESS), st.randoms(use_true_random=False))
def test_order_of_trials_does_not_matter(trials: list[Trial], strategy: Strategy, random: Any) -> None:
    shuffled = list(trials)
    random.shuffle(shuffled)
    one, other = settle(strategy, trials, EAGER), settle(strategy, shuffled, EAGER)
    assert one.winner == other.winner
    assert one.reason == other.reason
    assert one.losers == other.losers


@given(trial_lists(), st.sampled_from(ORDERLESS[:5]), st.sampled_from(["slow", "refused", "failed", "nan"]))
def test_a_worse_candidate_changes_nothing(trials: list[Trial], strategy: Strategy, how: str) -> None:
    worse = {
        "slow": scripted("worse", 50.0, "exact", "ok", 0.0, 1e-2, 9),
        "refused": scripted("worse", 0.01, "refused", "ok", 0.0, 1.0, 1),
        "failed": scripted("worse", 0.01, "exact", "failed", 0.0, 0.0, 1),
        "nan": scripted("worse", math.nan, "exact", "ok", 0.0, 0.0, 1),
    }[how]
    before, after = settle(strategy, trials, EAGER), settle(strategy, [*trials, worse], EAGER)
    assert before.winner == after.winner
    assert "worse" in after.losers


@given(trial_lists())
def test_min_latency_takes_one_close_to_the_fastest_right_one(trials: list[Trial]) -> None:
    right = [
        t.points[0].latency.median_ms
        for t in trials
        if t.status == "ok"
        and t.error_class != "refused"
        and not math.isnan(t.relative_l2 or 0)
        and t.points[0].latency
    ]
    fastest = min((ms for ms in right if 0 < ms < 5.0), default=5.0)
    winner = settle(MinLatencyStrategy(), trials, EAGER).winner
    assert winner.points[0].latency is not None
    assert winner.points[0].latency.median_ms <= fastest * 1.02


# --- the others ---------------------------------------------------------------------------------------------------


def test_first_wins_takes_the_first_and_has_enough(make: Make) -> None:
    eager = make("eager", {1: 4.0})
    slow, good, better = make("slow", {1: 5.0}), make("good", {1: 3.0}), make("better", {1: 1.0})
    strategy = FirstWinsStrategy()
    pending = strategy.choose([slow, good], eager, ChoiceContext())
    assert not strategy.enough(pending)
    decision = settle(strategy, [slow, good, better], eager)
    assert decision.winner is good
    assert strategy.enough(decision)
    assert decision.losers["better"].startswith("good came first: 4 times as fast")
    assert settle(strategy, [good, better], eager, {"good": False}).winner is better
    assert not MinLatencyStrategy().enough(decision)


def test_max_throughput_takes_the_best_point(make: Make) -> None:
    eager = make("eager", {1: 1.0, 8: 4.0})  # 2000 items/s at b=8
    small = make("small", {1: 0.4, 8: 4.0})  # 2500 items/s at b=1
    large = make("large", {1: 3.0, 8: 2.0})  # 4000 items/s at b=8
    decision = settle(MaxThroughputStrategy(), [small, large], eager)
    assert decision.winner is large
    assert decision.reason == "large is 2 times as fast as eager (4000 against 2000 items/s at b=8), exact"
    assert "2500 against 2000 items/s at b=1, eager's best at b=8" in decision.losers["small"]
    assert MaxThroughputStrategy().decisive_points(large, eager, ChoiceContext()) == (Point((("b", 8),)),)
    assert HighestThroughputStrategy is MaxThroughputStrategy


def test_max_throughput_leaves_out_points_above_the_memory_limit(make: Make) -> None:
    eager = make("eager", {1: 1.0, 8: 4.0}, memory=10)
    big = make("big", {8: 1.0}, memory=1000)
    assert settle(MaxThroughputStrategy(), [big], eager).winner is big
    decision = settle(MaxThroughputStrategy(), [big], eager, memory_limit_bytes=100)
    assert decision.winner is eager
    assert "not measured at any point under the memory limit" in decision.losers["big"]


def test_latency_budget_bounds_each_point(make: Make) -> None:
    eager = make("eager", {1: 2.0, 8: 12.0})
    uneven = make("uneven", {1: 0.1, 8: 11.0})
    steady = make("steady", {1: 3.0, 8: 9.0})
    decision = settle(LatencyBudgetStrategy(10.0), [uneven, steady], eager)
    assert decision.winner is steady
    assert decision.reason.endswith("; within the budget of 10.0 ms")
    assert decision.losers["uneven"] == "over the budget of 10.0 ms: 11.0 ms at b=8"
    assert decision.losers["eager"] == "over the budget of 10.0 ms at b=8"


def test_latency_budget_is_worth_a_slower_sum(make: Make) -> None:
    eager = make("eager", {1: 1.0, 8: 12.0})
    steady = make("steady", {1: 9.0, 8: 9.0})
    strategy = LatencyBudgetStrategy(10.0)
    assert settle(strategy, [steady], eager).winner is steady
    assert strategy.decisive_points(steady, eager, ChoiceContext()) == (Point((("b", 8),)),)


def test_latency_budget_keeps_eager_where_only_eager_keeps_it(make: Make) -> None:
    eager = make("eager", {1: 4.0, 8: 9.0})
    uneven = make("uneven", {1: 0.1, 8: 11.0})
    decision = settle(LatencyBudgetStrategy(10.0), [uneven], eager)
    assert decision.winner is eager
    assert "over the budget of 10.0 ms: 11.0 ms at b=8" in decision.reason


def test_latency_budget_that_nobody_keeps_says_so(make: Make) -> None:
    eager = make("eager", {8: 12.0})
    decision = settle(LatencyBudgetStrategy(1.0), [make("fast", {8: 2.0})], eager)
    assert decision.winner.candidate.backend == "fast"
    assert "no candidate keeps to the budget of 1.00 ms (2.00 ms at b=8)" in decision.reason


def test_pareto_budgets_and_front(make: Make) -> None:
    eager = make("eager", {1: 8.0}, memory=100, relative_l2=0.0)
    rough = make("rough", {1: 1.0}, memory=150, relative_l2=8e-5, error_class="within budget")
    fine = make("fine", {1: 2.0}, memory=110, relative_l2=1e-7)
    poor = make("poor", {1: 3.0}, memory=200, relative_l2=9e-5, error_class="within budget")
    trials = [poor, rough, fine]
    assert ParetoStrategy().front(trials, eager, ChoiceContext()) == (rough, fine, eager)
    knee = settle(ParetoStrategy(), trials, eager)
    assert knee.winner is fine
    assert knee.reason.endswith("the knee of the front (relative L2 1e-07, peak 110 B)")
    assert knee.losers["poor"] == "rough is no worse in latency, error and memory"
    assert "farther from the knee of the front than" in knee.losers["rough"]
    assert settle(ParetoStrategy(max_relative_error=1e-4), trials, eager).winner is rough
    exact = settle(ParetoStrategy(max_relative_error=1e-6), trials, eager)
    assert exact.winner is fine
    assert exact.losers["rough"] == "over the error budget: relative L2 8e-05, allowed 1e-06"
    assert settle(ParetoStrategy(max_memory_bytes=120), trials, eager).winner is fine
    assert settle(ParetoStrategy(max_memory_bytes=50), trials, eager).reason.startswith(
        "eager stays: the best right candidate, rough, was not chosen: over the memory budget"
    )
    unknown = settle(ParetoStrategy(max_memory_bytes=120), [make("fast", {1: 1.0})], eager)
    assert "peak memory was not measured" in unknown.losers["fast"]


# --- OneBackend ---------------------------------------------------------------------------------------------------


def test_one_backend_needs_no_speed(make: Make) -> None:
    eager = make("eager", {1: 1.0})
    slow, slower, fast = (
        make("inductor", {1: 2.0}),
        make("inductor", {1: 3.0}, options=(("freezing", True),)),
        make("ort", {1: 0.1}),
    )
    decision = settle(OneBackendStrategy("inductor"), [slow, slower, fast], eager)
    assert decision.winner is slow
    assert (
        decision.reason == "inductor is 0.5 times as fast as eager (2.00 ms against 1.00 ms at b=1), exact; asked for"
    )
    assert decision.losers["ort"] == "inductor was asked for"
    assert decision.losers["inductor[freezing]"].startswith("inductor was preferred: 0.333 times as fast")


def test_one_backend_that_is_wrong_or_absent_leaves_eager(make: Make) -> None:
    eager = make("eager", {1: 1.0})
    wrong = make("inductor", {1: 0.1}, error_class="refused", relative_l2=2.0)
    decision = settle(OneBackendStrategy("inductor"), [wrong], eager)
    assert decision.winner is eager
    assert decision.reason.startswith("eager stays: inductor was asked for but can't be used: out of tolerance at b=1")
    absent = settle(OneBackendStrategy("inductor"), [], eager, not_tried={"inductor": "unavailable: no compiler"})
    assert absent.reason == "eager stays: inductor was not tried (inductor: unavailable: no compiler)"
    assert settle(OneBackendStrategy("eager"), [eager, wrong], eager).reason == "eager was asked for"


class Toy(Backend):
    name = "toy"

    @classmethod
    def available(cls) -> Availability:
        return Availability(True)

    def candidates(self, signature: Any, module: Any) -> list[Candidate]:
        return [self.candidate()]

    def build(self, job: Any) -> Any:
        raise NotImplementedError


def test_one_backend_takes_names_classes_and_instances() -> None:
    from dataclasses import make_dataclass

    Toy.config_type = make_dataclass(
        "Config", [("level", int, 1), ("fast", bool, False)], bases=(BackendConfig,), frozen=True
    )
    register(Toy)
    try:
        assert OneBackendStrategy(Toy) == OneBackendStrategy("toy") == OneBackendStrategy(Toy())
        strategy = OneBackendStrategy(Toy(level=3))
        assert strategy == OneBackendStrategy("toy", level=3, fast=False)
        assert strategy.config() == StrategyConfig("OneBackend", (("backend", "toy"), ("level", 3)))
        assert strategy_of(strategy.config()) == strategy
        assert strategy.extra_candidates() == (Candidate("toy", (("level", 3),)),)
        assert strategy.admits(Candidate("toy", (("fast", True), ("level", 3))))
        assert not strategy.admits(Candidate("toy"))
        with pytest.raises(errors.PlanError, match="'depth'"):
            OneBackendStrategy("toy", depth=3)
    finally:
        unregister("toy")
    with pytest.raises(errors.PlanError, match="backend must be a name"):
        OneBackendStrategy(3)  # type: ignore[arg-type]


# --- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [*ORDERLESS, FirstWinsStrategy(), OneBackendStrategy("inductor")])
def test_config_and_back(strategy: Strategy) -> None:
    assert strategy_of(strategy.config()) == strategy
    assert strategy_of(strategy) is strategy


def test_names_as_others_write_them() -> None:
    assert strategy_of("MinLatencyStrategy") == MinLatencyStrategy()
    assert strategy_of("HighestThroughputStrategy") == MaxThroughputStrategy()
    assert MinLatencyStrategy().config() == StrategyConfig()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (StrategyConfig("Fastest"), r"must be one of \['MinLatency', .*'Pareto'\], but got 'Fastest'"),
        (StrategyConfig("MinLatency", (("budget", 1),)), r"'MinLatency' must be among \[\], but got \['budget'\]"),
        (StrategyConfig("LatencyBudget"), "needs the option 'budget_ms'"),
        (StrategyConfig("LatencyBudget", (("budget_ms", -1.0),)), "positive number of milliseconds, but got -1.0"),
        (StrategyConfig("LatencyBudget", (("budget_ms", "5"),)), "but got '5'"),
        (StrategyConfig("Pareto", (("max_memory_bytes", math.nan),)), "at least 0, but got nan"),
        (StrategyConfig("OneBackend"), "needs the option 'backend'"),
    ],
)
def test_bad_configs(config: StrategyConfig, said: str) -> None:
    with pytest.raises(errors.PlanError, match=said):
        strategy_of(config)
