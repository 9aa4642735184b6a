"""Search levels, the rough look and the second look, on scripted latencies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.backends import registry
from aitune_lab.measure.benchmark import Timing
from aitune_lab.schema import Candidate, Limits, Plan, Rule, Signature, StrategyConfig, Trial
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.strategies import MinLatencyStrategy, OneBackendStrategy, ParetoStrategy


class Quick(ScriptedBackend):
    """Proposes two variants; the test says their latencies."""

    name = "quick"
    latencies: tuple[float, ...] = (0.4, 0.41)

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        return [type(self)(latency_ms=ms).candidate() for ms in self.latencies]


class Slow(Quick):
    name = "slow"
    latencies = (0.9, 0.3)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with scripted_backend():
        registry.register(Quick)
        registry.register(Slow)
        yield
        registry.unregister("quick")
        registry.unregister("slow")


def tune(
    search: Any = "normal",
    *backends: Any,
    meter: Any = None,
    strategy: StrategyConfig | None = None,
    rules: tuple[Rule, ...] = (),
    **others: Any,
) -> tuple[TuneResult, Any]:
    torch.manual_seed(0)
    target = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    plan = Plan(rules, strategy=strategy or MinLatencyStrategy().config(), limits=Limits(search=search))
    meter = meter or ScriptedMeter()
    options = TuneOptions(**{"meter": meter, "backends": backends or ("quick", "slow"), **others})
    return run(make_tuner(target, [torch.randn(2, 4), torch.randn(3, 4)], plan, options)), meter


def by_label(result: TuneResult) -> dict[str, Trial]:
    return {t.candidate.label: t for t in result.trials.values()}


def test_exhaustive_measures_every_proposal_in_full() -> None:
    result, _ = tune("exhaustive")
    assert set(by_label(result)) == {
        "eager",
        "quick[latency_ms=0.4]",
        "quick[latency_ms=0.41]",
        "slow[latency_ms=0.9]",
        "slow[latency_ms=0.3]",
    }
    assert all(p.latency is not None for t in result.trials.values() for p in t.points)
    assert result.choices[0].candidate.label == "slow[latency_ms=0.3]"


def test_normal_stops_a_hopeless_first_proposal_and_leaves_out_its_variants() -> None:
    result, _ = tune("normal")
    trials = by_label(result)
    stopped = trials["slow[latency_ms=0.9]"]
    assert stopped.status == "ok"
    assert stopped.reason.startswith("stopped after a rough look: about ")
    assert "quick[latency_ms=0.4] takes 4" in stopped.reason
    assert all(p.latency is None and p.comparison is not None for p in stopped.points)
    assert "slow[latency_ms=0.3]" not in trials
    choice = result.choices[0]
    assert choice.candidate.label == "quick[latency_ms=0.4]"
    assert choice.losers["slow[latency_ms=0.9]"] == stopped.reason
    assert "the first of its kind, was stopped after a rough look" in choice.losers["slow[latency_ms=0.3]"]


def test_normal_tries_the_variants_of_whoever_leads() -> None:
    result, _ = tune("normal")
    assert by_label(result)["quick[latency_ms=0.41]"].points[0].latency is not None


def test_normal_leaves_out_variants_of_a_measured_first_proposal_that_does_not_keep_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Slow, "latencies", (0.475, 0.3))
    result, _ = tune("normal")
    assert by_label(result)["slow[latency_ms=0.475]"].points[0].latency is not None
    reason = result.choices[0].losers["slow[latency_ms=0.3]"]
    assert "slow[latency_ms=0.475], the first of its kind, takes 1.1" in reason or "takes 1.2" in reason
    assert reason.endswith("times as long as quick[latency_ms=0.4]")


def test_normal_tries_the_variants_of_a_first_proposal_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def proposals(self: Slow, signature: Signature, module: nn.Module) -> list[Candidate]:
        return [Slow(latency_ms=0.2, error="scaled").candidate(), Slow(latency_ms=0.3).candidate()]

    monkeypatch.setattr(Slow, "candidates", proposals)
    result, _ = tune("normal")
    assert result.choices[0].candidate.label == "slow[latency_ms=0.3]"


def test_normal_tries_fallbacks_only_where_the_first_proposal_can_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quick, "further", "fallbacks")
    result, _ = tune("normal", "quick")
    assert "quick[latency_ms=0.4] can be used" in result.choices[0].losers["quick[latency_ms=0.41]"]
    monkeypatch.setattr(
        Quick, "candidates", lambda *_: [Quick(fails_at="build").candidate(), Quick(latency_ms=0.41).candidate()]
    )
    result, _ = tune("normal", "quick")
    assert result.choices[0].candidate.label == "quick[latency_ms=0.41]"


@pytest.mark.parametrize(("times", "tried"), [(1.0, True), (10.0, False)], ids=["short calls", "long calls"])
def test_normal_tries_kin_only_where_calls_are_short(
    times: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "names", lambda: ["quick", "slow"])
    monkeypatch.setattr(Slow, "kin", "quick")
    monkeypatch.setattr(Slow, "latencies", (0.3 * times,))
    monkeypatch.setattr(Quick, "latencies", (0.4 * times,))
    label = Slow(latency_ms=0.3 * times).candidate().label
    result, _ = tune("normal", meter=ScriptedMeter({"eager": times}), backends=None)
    assert (label in by_label(result)) is tried
    if not tried:
        assert "runs nearly the same kernels" in result.choices[0].losers[label]
    named, _ = tune("normal", meter=ScriptedMeter({"eager": times}))
    assert label in by_label(named)


def test_quick_tries_first_proposals_only_and_measures_less() -> None:
    quick, few = tune("quick")
    exhaustive, many = tune("exhaustive")
    assert set(by_label(quick)) == {"eager", "quick[latency_ms=0.4]", "slow[latency_ms=0.9]"}
    reason = quick.choices[0].losers["quick[latency_ms=0.41]"]
    assert "search='quick' tries quick[latency_ms=0.4] only of its kind" in reason
    full = by_label(exhaustive)["quick[latency_ms=0.4]"].points[0].latency
    brief = by_label(quick)["quick[latency_ms=0.4]"].points[0].latency
    assert brief is not None
    assert full is not None
    assert 7 <= brief.n <= full.n
    assert len(few.measured) < len(many.measured)


@pytest.mark.parametrize("search", ["quick", "normal"])
def test_what_the_user_names_is_always_tried(search: str) -> None:
    named = [ScriptedBackend(latency_ms=ms) for ms in (0.5, 0.9, 0.3)]
    result, _ = tune(search, *named)
    assert len(result.trials) == 4
    assert result.choices[0].candidate.label == "scripted[latency_ms=0.3]"


def test_a_candidate_slower_than_eager_is_stopped_where_nothing_else_is_faster() -> None:
    result, meter = tune("normal", ScriptedBackend(latency_ms=2.0))
    whole = [t for t in result.trials.values() if t.path == "" and t.candidate.label != "eager"]
    assert [t.reason.partition(":")[0] for t in whole] == ["stopped after a rough look"]
    assert {c.candidate.label for c in result.choices} == {"eager"}
    assert not any(p.latency for t in result.trials.values() for p in t.points)
    assert len(meter.measured) == 2 * len(result.choices)  # a rough look at each point


def test_pins_and_one_backend_are_measured_in_full_however_slow() -> None:
    slow = ScriptedBackend(latency_ms=2.0)
    pinned, _ = tune("normal", rules=(Rule("", "pin", candidate=slow.candidate()),))
    asked, _ = tune("normal", slow, strategy=OneBackendStrategy("scripted").config())
    for result in (pinned, asked):
        assert result.choices[0].candidate == slow.candidate()
        assert all(p.latency is not None for p in by_label(result)[slow.candidate().label].points)


def test_a_strategy_that_weighs_more_than_speed_stops_by_eager_only() -> None:
    result, _ = tune(
        "normal", *(ScriptedBackend(latency_ms=ms) for ms in (0.3, 0.9, 2.0)), strategy=ParetoStrategy().config()
    )
    trials = by_label(result)
    assert trials["scripted[latency_ms=0.9]"].points[0].latency is not None
    assert trials["scripted[latency_ms=2.0]"].points[0].latency is None


class Fickle(ScriptedMeter):
    """Measures the candidate fast at the first full measurement of it, and as slow as eager from then on."""

    def __call__(self, contenders: Any, **options: Any) -> Timing:
        timing = super().__call__(contenders, **options)
        if options["limits"].max_blocks > 3:
            self.latency_ms.update({c.label: 1.0 for c in contenders})
        return timing


def test_a_winner_that_does_not_win_again_in_the_second_look_is_dropped() -> None:
    torch.manual_seed(0)
    target = nn.Linear(4, 2).eval()
    meter = Fickle({"scripted": 0.8})
    options = TuneOptions(meter=meter, backends=(ScriptedBackend(),))
    result = run(make_tuner(target, torch.randn(2, 4), Plan(), options))
    assert result.choices[0].candidate.label == "eager"
    assert "not again in the second look (p=" in result.choices[0].losers["scripted"]


class DisturbedLater(ScriptedMeter):
    """Other load disturbs every measurement after the first full one."""

    def __call__(self, contenders: Any, **options: Any) -> Timing:
        timing = super().__call__(contenders, **options)
        if options["seed"] == 0:
            return timing
        spoilt = {label: replace(m, disturbed="other load") for label, m in timing.measurements.items()}
        return Timing(spoilt, timing.blocks_ms)


def test_a_disturbed_second_look_confirms_nothing_and_says_so() -> None:
    torch.manual_seed(0)
    target = nn.Linear(4, 2).eval()
    options = TuneOptions(meter=DisturbedLater({"scripted": 0.5}), backends=(ScriptedBackend(),))
    result = run(make_tuner(target, torch.randn(2, 4), Plan(), options))
    assert result.choices[0].candidate.label == "eager"
    reason = result.choices[0].losers["scripted"]
    assert reason.startswith("could not be confirmed: 2 times as fast at first")
    assert "other load disturbed the second look; tune again on a quieter machine" in reason


def test_a_winner_is_measured_a_second_time_on_fresh_blocks() -> None:
    result, meter = tune("exhaustive", ScriptedBackend(latency_ms=0.5))
    assert result.choices[0].candidate.label == "scripted"
    assert meter.measured.count(("eager", "scripted")) == 4  # two points, twice
    assert any("a second time" in str(e.data.get("message")) for e in result.events if e.kind == "log")
