"""Tuning from the public API: what is chosen, what is refused, and that the target is untouched where it must be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aitune_lab as ait
from aitune_lab.capture.inspector import inspect
from aitune_lab.capture.swap import swapped
from aitune_lab.capture.tree import modules_of
from aitune_lab.runtime.installed import installed_in, stats
from aitune_lab.schema import Candidate, Event, Limits, Plan, Rule, StrategyConfig, Tolerance, from_json, to_json
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run, unwrap, wrap
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.session import replay
from aitune_lab.tuning.strategies import MinLatencyStrategy, OneBackendStrategy
from aitune_lab.tuning.tuner import Tuner


@pytest.fixture(autouse=True)
def _scripted():
    with scripted_backend():
        yield


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


class Pipe:
    """Two modules that nobody registered."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
        self.heads = {"cls": nn.Linear(16, 4).eval()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["cls"](self.encoder(x))


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


def tune(
    target: Any,
    data: Any,
    *candidates: Candidate,
    plan: Plan | None = None,
    meter: Callable[..., Any] | None = None,
    **options: Any,
) -> TuneResult:
    """`ait.tune` with scripted latencies and only the given candidates."""
    made = TuneOptions(
        backends=candidates or (scripted(),), meter=meter or ScriptedMeter(), **{"dry_run": False, **options}
    )
    return run(make_tuner(target, data, plan or Plan(), made))


def untouched(target: Any) -> bool:
    return not any(swapped(m) for m in modules_of(target).values()) and not installed_in(target)


def test_the_faster_right_candidate_is_installed_and_answers() -> None:
    model, x = mlp(), torch.randn(4, 8)
    expected = model(x).detach()
    result = tune(model, [x, torch.randn(2, 8)], scripted(latency_ms=0.5), scripted(latency_ms=0.8))
    (choice,) = result.choices
    assert choice.candidate == scripted(latency_ms=0.5)
    assert choice.speedup == pytest.approx(2.0, rel=0.1)
    assert choice.error_class == "exact"
    assert "2 times as fast as eager" in choice.reason
    assert set(choice.losers) >= {"eager", scripted(latency_ms=0.8).label}
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert stats(model).dispatched == 1


def test_a_placebo_does_not_win() -> None:
    model = mlp()
    result = tune(model, [torch.randn(4, 8)], scripted(latency_ms=1.0))
    assert result.choices[0].candidate.backend == "eager"
    assert "eager stays" in result.choices[0].reason
    assert untouched(model)


@pytest.mark.parametrize("error", ["scaled", "dtype", "nan", "structure"])
def test_a_wrong_candidate_is_refused_with_figures(error: str) -> None:
    result = tune(mlp(), [torch.randn(4, 8)], scripted(latency_ms=0.1, error=error))
    choice = result.choices[0]
    assert choice.candidate.backend == "eager"
    (lost,) = [why for label, why in choice.losers.items() if label.startswith("scripted")]
    assert "output" in lost
    assert any(figure in lost for figure in ("eager gives", "float64", "shape", "(1, 4, 4)"))


@dataclass
class Inner:
    values: torch.Tensor
    name: str


@dataclass
class Outer:
    inner: Inner
    count: torch.Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Outer:
        return Outer(Inner(self.l(x), "a"), (x > 0).sum())


def test_nan_in_a_nested_dataclass_is_refused_and_named() -> None:
    result = tune(Nested().eval(), [torch.randn(4, 8)], scripted(latency_ms=0.1, error="nan"))
    assert any("output.inner.values" in why for why in result.choices[0].losers.values())


def test_a_nested_dataclass_comes_back_as_its_class() -> None:
    model = Nested().eval()
    tune(model, [torch.randn(4, 8)], scripted(latency_ms=0.1))
    with torch.inference_mode():
        output = model(torch.randn(4, 8))
    assert type(output) is Outer
    assert type(output.inner) is Inner
    assert output.inner.name == "a"
    assert stats(model).dispatched == 1


class NotFinite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.l(x)
        return y.masked_fill(y < 0, float("-inf")), (y - y) / (y - y)


def test_a_right_answer_with_inf_and_nan_is_accepted() -> None:
    result = tune(NotFinite().eval(), [torch.randn(4, 8)], scripted(latency_ms=0.1))
    assert result.choices[0].candidate.backend == "scripted"
    assert result.choices[0].error_class == "exact"


def test_a_pin_out_of_tolerance_is_refused_with_its_figures_unless_accepted() -> None:
    wrong = scripted(error="scaled")
    model = mlp()
    pin = Rule("", "pin", wrong)
    with pytest.raises(ait.PlanError, match=r"relative L2 error 0\.5.*accept_error"):
        tune(model, [torch.randn(4, 8)], plan=Plan((pin,)))
    assert untouched(model)
    result = tune(model, [torch.randn(4, 8)], plan=Plan((replace(pin, accept_error=True),)))
    (choice,) = result.choices
    assert choice.candidate == wrong
    assert choice.accepted_error
    assert choice.error_class == "refused"


def test_a_pin_holds_however_slow_it_is() -> None:
    slow = scripted(latency_ms=9.0)
    result = tune(mlp(), [torch.randn(4, 8)], plan=Plan((Rule("", "pin", slow),)))
    assert result.choices[0].candidate == slow
    assert result.choices[0].pinned


def test_exact_admits_only_the_first_class() -> None:
    tolerance = Tolerance(max_relative_error=1.0)
    wide = tune(mlp(), [torch.randn(4, 8)], scripted(latency_ms=0.1, error="scaled"), plan=Plan(tolerance=tolerance))
    assert wide.choices[0].error_class == "within budget"
    exact = replace(tolerance, accuracy="exact")
    narrow = tune(mlp(), [torch.randn(4, 8)], scripted(latency_ms=0.1, error="scaled"), plan=Plan(tolerance=exact))
    assert narrow.choices[0].candidate.backend == "eager"


@pytest.mark.parametrize("fails_at", ["build", "refuse", "run"])
def test_a_failing_candidate_is_a_row_with_its_reason_and_the_next_is_tried(fails_at: str) -> None:
    bad, good = scripted(latency_ms=0.1, fails_at=fails_at), scripted(latency_ms=0.5)
    result = tune(mlp(), [torch.randn(4, 8)], bad, good)
    assert result.choices[0].candidate == good
    trial = next(t for t in result.trials.values() if t.candidate == bad)
    assert trial.status == ("refused" if fails_at == "refuse" else "failed")
    assert "scripted" in trial.reason


def test_exclusions_and_modules_left_alone() -> None:
    excluded = Plan((Rule("re:.*", "exclude", excluded="scripted"),))
    result = tune(mlp(), [torch.randn(4, 8)], plan=excluded)
    assert result.choices[0].candidate.backend == "eager"
    assert "excluded" in result.choices[0].losers[scripted().label]
    left = tune(Pipe(), [torch.randn(4, 8)], plan=Plan((Rule("encoder", "leave"),)))
    assert {c.path for c in left.choices} == {"heads.cls"}


def test_wrap_notes_and_tune_heeds_it() -> None:
    pipe = Pipe()
    assert wrap(pipe, [pipe.encoder], strategy=OneBackendStrategy("scripted")) is pipe
    assert untouched(pipe)
    result = tune(pipe, [torch.randn(4, 8)], scripted(latency_ms=5.0))
    assert [(c.path, c.candidate.backend) for c in result.choices] == [("encoder", "scripted")]
    unwrap(pipe)
    assert untouched(pipe)
    assert {c.path for c in tune(pipe, [torch.randn(4, 8)]).choices} == {"encoder", "heads.cls"}


def test_module_returns_the_module_itself() -> None:
    model = mlp()
    assert ait.Module(model, strategy=MinLatencyStrategy()) is model
    assert ait.wrap(model, ["0"]) is model


def test_dry_run_says_what_it_would_try_and_tries_nothing() -> None:
    model = mlp()
    result = tune(model, [torch.randn(4, 8)], scripted(), scripted(latency_ms=0.2), dry_run=True)
    started = next(e for e in result.events if e.kind == "run_started")
    assert started.data["trials"] == 2
    assert not result.trials
    assert untouched(model)


def test_a_parent_that_stays_eager_passes_to_its_children() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x), iter(())

    result = tune(Parent().eval(), [torch.randn(4, 8)], scripted(latency_ms=0.1))
    chosen = {c.path: c.candidate.backend for c in result.choices}
    assert chosen == {"": "eager", "body": "scripted"}


def test_a_second_tuning_replaces_the_first() -> None:
    model, x = mlp(), torch.randn(4, 8)
    expected = model(x).detach()
    tune(model, [x], scripted(latency_ms=0.5))
    tune(model, [x], scripted(latency_ms=0.2))
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert [s.candidate for s in stats(model).signatures] == [scripted(latency_ms=0.2).label]
    unwrap(model)
    assert untouched(model)
    assert torch.equal(model(x), expected)


def test_cancel_leaves_the_target_as_it_was() -> None:
    model, x = mlp(), torch.randn(4, 8)
    tuner = make_tuner(model, [x], Plan(), TuneOptions(backends=(scripted(),), meter=ScriptedMeter()))
    kinds = []
    for event in tuner.steps():
        kinds.append(event.kind)
        if event.kind == "trial_progress":
            tuner.cancel()
    assert kinds[-1] == "run_cancelled"
    assert untouched(model)
    assert tune(model, [x]).choices[0].candidate.backend == "scripted"


@pytest.mark.parametrize("moment", range(4, 14, 3))
def test_closing_the_generator_leaves_the_target_as_it_was(moment: int) -> None:
    model, x = mlp(), torch.randn(4, 8)
    steps = make_tuner(model, [x], Plan(), TuneOptions(backends=(scripted(),), meter=ScriptedMeter())).steps()
    for _ in range(moment):
        next(steps, None)
    steps.close()
    assert untouched(model) or stats(model).signatures


def test_events_are_numbered_json_and_replay_into_the_result() -> None:
    result = tune(mlp(), [torch.randn(4, 8)], scripted(latency_ms=0.5), scripted(fails_at="build"))
    assert [e.seq for e in result.events] == list(range(len(result.events)))
    again = [from_json(to_json(e), Event) for e in result.events]
    state = replay(again)
    assert state.status == "finished"
    assert list(state.choices.values()) == list(result.choices)
    assert set(state.trials) == set(result.trials)


def test_batch_sizes_make_one_signature_with_equal_weights() -> None:
    model = mlp()
    result = tune(model, [torch.randn(8) for _ in range(4)], scripted(latency_ms=0.5), batch_sizes=(1, 4))
    (choice,) = result.choices
    trial = result.trials[choice.trial or ""]
    assert [p.point.as_dict() for p in trial.points] == [{"b": 1}, {"b": 4}]
    costs = [p.weight * p.eager.median_ms for p in trial.points]
    assert costs[0] == pytest.approx(costs[1])
    with torch.inference_mode():
        model(torch.randn(3, 8))
    assert stats(model).dispatched == 1


def test_a_data_loader_is_cut_and_joined() -> None:
    loader = DataLoader(TensorDataset(torch.randn(6, 8)), batch_size=3)
    result = tune(mlp(), loader, scripted(latency_ms=0.5), batch_sizes=(2,))
    assert "DataLoader" in result.understood


class _Boom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("wrong shape somewhere")


BAD = {
    "no modules": (lambda: (object(), [torch.ones(1)], {}), ait.TargetError, "no torch.nn.Module"),
    "empty data": (lambda: (mlp(), [], {}), ait.DataError, "at least one item"),
    "not data": (lambda: (mlp(), 5, {}), ait.DataError, "data must be"),
    "rejected data": (lambda: (mlp(), [torch.ones(2, 3)], {}), ait.DataError, r"float32\[2, 3\]"),
    "model raises": (lambda: (_Boom().eval(), [torch.ones(2, 3)], {}), ait.DataError, "wrong shape somewhere"),
    "bad batch": (lambda: (mlp(), [torch.ones(8)], {"batch_sizes": (0,)}), ait.DataError, "positive"),
    "ragged": (
        lambda: (mlp(), [torch.ones(8), torch.ones(7)], {"batch_sizes": (2,)}),
        ait.DataError,
        "equal shapes",
    ),
    "unknown path": (
        lambda: (mlp(), [torch.ones(2, 8)], {"plan": Plan((Rule("encodr", "pin", scripted()),))}),
        ait.PlanError,
        "encodr",
    ),
    "overlapping pins": (
        lambda: (
            mlp(),
            [torch.ones(2, 8)],
            {"plan": Plan((Rule("", "pin", scripted()), Rule("0", "pin", scripted())))},
        ),
        ait.PlanError,
        "'0'",
    ),
    "unknown pin backend": (
        lambda: (mlp(), [torch.ones(2, 8)], {"plan": Plan((Rule("", "pin", Candidate("tensrt")),))}),
        ait.PlanError,
        "tensrt",
    ),
    "unknown strategy": (
        lambda: (mlp(), [torch.ones(2, 8)], {"plan": Plan(strategy=StrategyConfig("Fastest"))}),
        ait.PlanError,
        "Fastest",
    ),
    "training mode": (lambda: (mlp().train(), [torch.ones(2, 8)], {}), ait.TargetError, "eval"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error_and_the_target_is_untouched(name: str) -> None:
    make, error, words = BAD[name]
    target, data, options = make()
    before = copy.deepcopy(target) if isinstance(target, nn.Module) else None
    with pytest.raises(error, match=words):
        tune(target, data, **options)
    if before is not None:
        assert untouched(target)
        assert target.__dict__.keys() == before.__dict__.keys()


def test_unknown_backends_are_named() -> None:
    with pytest.raises(ait.PlanError, match="onnxruntim"):
        ait.tune(mlp(), [torch.ones(2, 8)], backends=["onnxruntim"], progress=False)


def test_modules_of_another_target_are_refused() -> None:
    with pytest.raises(ait.TargetError, match="among those of the target"):
        wrap(mlp(), [nn.Linear(2, 2)])


def test_limits_end_a_run_with_the_best_so_far() -> None:
    plan = Plan(limits=Limits(max_trials=1))
    result = tune(mlp(), [torch.randn(4, 8)], scripted(latency_ms=0.5), scripted(latency_ms=0.1), plan=plan)
    assert result.choices[0].candidate == scripted(latency_ms=0.5)
    assert "limit" in result.choices[0].losers[scripted(latency_ms=0.1).label]


def test_first_wins_stops_at_the_first() -> None:
    plan = Plan(strategy=StrategyConfig("FirstWins"))
    result = tune(mlp(), [torch.randn(4, 8)], scripted(latency_ms=0.5), scripted(latency_ms=0.1), plan=plan)
    assert result.choices[0].candidate == scripted(latency_ms=0.5)
    assert "not tried" in result.choices[0].losers[scripted(latency_ms=0.1).label]


def test_on_miss_error_raises_with_the_reason() -> None:
    model = mlp()
    tune(model, [torch.randn(4, 8)], scripted(latency_ms=0.1), on_miss="error")
    with torch.inference_mode(), pytest.raises(ait.SignatureMiss, match="size 5 in dimension 0"):
        model(torch.randn(5, 8))


def test_two_targets_can_be_tuned_at_once_and_untuned_alone() -> None:
    one, two, x = Pipe(), Pipe(), torch.randn(4, 8)
    tune(one, [x])
    tune(two, [x])
    unwrap(one)
    assert untouched(one)
    with torch.inference_mode():
        two(x)
    assert stats(two).dispatched == 2


def test_inspect_leaves_state_and_data_alone() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen += 1
            return x.mul_(2)

    model, x = Counts().eval(), torch.ones(3)
    inspect(model, [x])
    tune(model, [x], scripted(latency_ms=0.1))
    assert torch.equal(x, torch.ones(3))
    assert model.calls == 0
    assert model.seen == 0


def test_a_tuner_can_be_driven_by_hand() -> None:
    model = mlp()
    tuner = Tuner(model, [torch.randn(2, 8)], options=TuneOptions(backends=(scripted(),), meter=ScriptedMeter()))
    kinds = [event.kind for event in tuner.steps()]
    order = ["inspected", "run_started", "trial_started", "trial_finished", "choice_made", "run_finished"]
    assert [k for k in kinds if k in order] == order


@pytest.mark.parametrize("named", ["scripted[latency_ms=9.0]", ScriptedBackend(latency_ms=9.0), ScriptedBackend])
def test_a_pin_may_name_a_label_a_class_or_an_instance(named: Any) -> None:
    result = tune(mlp(), [torch.randn(4, 8)], plan=Plan((Rule("", "pin", named),)))
    assert result.choices[0].pinned
    assert result.choices[0].candidate.backend == "scripted"


@pytest.mark.parametrize("option", ["on_miss", "weights", "on_module_failure"])
def test_unknown_values_of_options_are_refused(option: str) -> None:
    with pytest.raises(ait.PlanError, match=f"{option} must be one of"):
        ait.tune(mlp(), [torch.ones(2, 8)], progress=False, **{option: "eagre"})


def test_unknown_actions_of_rules_are_refused() -> None:
    with pytest.raises(ait.PlanError, match="pinn"):
        tune(mlp(), [torch.ones(2, 8)], plan=Plan((Rule("", "pinn", scripted()),)))  # type: ignore[arg-type]


def test_on_miss_error_also_raises_where_gradients_are_wanted() -> None:
    model = mlp()
    tune(model, [torch.randn(4, 8)], scripted(latency_ms=0.1), on_miss="error")
    with pytest.raises(ait.SignatureMiss, match="inference_mode"):
        model(torch.randn(4, 8))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.d = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.e(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.d(z)


class CoderPipe:
    def __init__(self) -> None:
        self.vae = Coder().eval()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(self.vae.encode(x))


def test_methods_other_than_forward_are_tuned_saved_wrapped_and_parted_by_pins(tmp_path: Path) -> None:
    pipe = CoderPipe()
    assert {c.path for c in tune(pipe, [torch.randn(4, 8)], scripted(latency_ms=0.1)).choices} == {
        "vae.encode",
        "vae.decode",
    }
    with torch.inference_mode():
        pipe(torch.randn(4, 8))
    assert stats(pipe).dispatched == 2
    ait.save(pipe, tmp_path / "coder.ait")
    fresh = CoderPipe()
    fresh.vae.load_state_dict(pipe.vae.state_dict())
    assert len(ait.load(fresh, tmp_path / "coder.ait").loaded) == 2
    with torch.inference_mode():
        fresh(torch.randn(4, 8))
    assert stats(fresh).dispatched == 2
    unwrap(pipe)
    wrap(pipe, ["vae.decode"])
    assert {c.path for c in tune(pipe, [torch.randn(4, 8)]).choices} == {"vae.decode"}
    unwrap(pipe)
    result = tune(pipe, [torch.randn(4, 8)], plan=Plan((Rule("vae.d", "pin", scripted()),)))
    assert {c.path for c in result.choices} == {"vae.d", "vae.e"}
    assert any("tuned in parts" in str(e.data.get("message")) for e in result.events)
