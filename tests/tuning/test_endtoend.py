"""The tuned target as a whole against the untuned one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aitune_lab.runtime.installed import stats, untuned
from aitune_lab.schema import Plan, Tolerance, from_json, to_json
from aitune_lab.testing.models import CountsCalls, Heads, Mlp, Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, install_scripted, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.endtoend import EndToEnd, check
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.strategies import OneBackendStrategy


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


def meter() -> ScriptedMeter:
    return ScriptedMeter({"eager": 2.0, "tuned": 1.0})


def tuned(error: str = "ok") -> Pair:
    target = Pair().eval()
    install_scripted(target.first, torch.randn(2, 4), path="first", error=error)
    return target


def test_untuned_runs_the_originals_in_this_thread_only_and_leaves_no_trace() -> None:
    target, x = tuned("scaled"), torch.randn(2, 4)
    plain = Pair(target.first, target.second)
    before = dict(target.first.__dict__)
    seen: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        wrong = target(x)
        with untuned(target):
            right = target(x)
            thread = threading.Thread(target=lambda: seen.update(other=_in_inference(plain, x)))
            thread.start()
            thread.join()
        again = target(x)
    assert torch.equal(seen["other"], wrong)
    assert torch.equal(again, wrong)
    assert not torch.equal(right, wrong)
    assert target.first.__dict__ == before
    assert stats(target).dispatched == 3


def _in_inference(module: nn.Module, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return module(x)


def test_a_right_target_is_exact_with_measured_latencies() -> None:
    result = check(tuned(), [torch.randn(2, 4), torch.randn(2, 4)], meter=meter())
    assert result.within_budget
    assert result.items == 2
    assert result.comparison is not None
    assert result.comparison.error_class == "exact"
    assert result.speedup == pytest.approx(2.0, rel=0.05)
    assert "times as fast" in result.sentence
    assert "outputs exact" in result.sentence
    assert from_json(to_json(result), EndToEnd) == result


def test_a_wrong_target_is_named_with_its_figures() -> None:
    result = check(tuned("scaled"), torch.randn(2, 4), meter=meter())
    assert result.within_budget is False
    assert "outputs out of tolerance: output" in result.sentence


def test_the_budget_is_the_callers() -> None:
    result = check(tuned("scaled"), torch.randn(2, 4), tolerance=Tolerance(max_relative_error=1.0), meter=meter())
    assert result.within_budget


def test_metrics_of_one_or_two_arguments() -> None:
    target, data = tuned("scaled"), [torch.randn(2, 4), torch.randn(2, 4)]
    one = check(target, data, metric=lambda outputs: sum(float(o.sum()) for o in outputs), meter=meter())
    assert one.metric is None
    assert one.metric_eager != one.metric_tuned
    two = check(target, data, metric=lambda eager, mine: len(eager) + len(mine), meter=meter())
    assert two.metric == 4.0
    assert "metric 4" in two.sentence


def test_structured_outputs_are_compared_by_leaf() -> None:
    target = Heads().eval()
    install_scripted(target, torch.randn(2, 4), error="scaled")
    result = check(target, torch.randn(2, 4), meter=meter())
    assert result.comparison is not None
    assert [leaf.path for leaf in result.comparison.leaves][:2] == ["output.hidden", "output.scores['a']"]


class Picture:
    """An 8-bit image as PIL gives it: an object with numpy's array interface."""

    def __init__(self, levels: np.ndarray) -> None:
        self.levels = levels
        self.__array_interface__ = levels.__array_interface__


class Painter:
    """A pipeline that returns an image, rounded to 8-bit levels."""

    def __init__(self) -> None:
        self.net = Mlp(width=64).eval()

    def __call__(self, x: torch.Tensor) -> Any:
        levels = (127.5 + 60 * self.net(x)).clamp(0, 255)
        return {"image": Picture(levels.round().to(torch.uint8).numpy()), "text": "done"}


@pytest.mark.parametrize(("factor", "fine"), [(1.0, True), (1.0005, True), (2.0, False)])
def test_images_are_compared_by_levels(factor: float, fine: bool) -> None:
    pipeline = Painter()
    original = pipeline.net.forward
    install_scripted(pipeline.net, torch.randn(8, 64), call=lambda x: [factor * original(x)])
    with torch.inference_mode():
        result = check(pipeline, torch.randn(8, 64), meter=meter())
    assert result.within_budget is fine, result.sentence


class Unseeded:
    """Draws from a generator of its own, which nobody can seed."""

    def __init__(self) -> None:
        self.net = Mlp().eval()
        self.own = np.random.default_rng()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.own.random()


def test_a_target_that_differs_from_itself_is_not_judged() -> None:
    result = check(Unseeded(), torch.randn(2, 4), meter=meter())
    assert result.comparison is None
    assert "gives other outputs for the same inputs and seeds" in result.sentence


def test_a_pass_that_takes_too_long_is_not_repeated() -> None:
    result = check(tuned(), torch.randn(2, 4), max_seconds=0.0, meter=meter())
    assert result.comparison is None
    assert result.tuned_seconds is None
    assert "one pass over the data takes" in result.skipped


def test_state_and_random_states_are_put_back() -> None:
    target = CountsCalls().eval()
    data, before = torch.randn(2, 4), torch.get_rng_state()
    check(target, data, meter=meter())
    assert target.seen == 0
    assert float(target.steps) == 0.0
    assert torch.equal(torch.get_rng_state(), before)


def tune(target: Any, **options: Any) -> TuneResult:
    plan = Plan(strategy=OneBackendStrategy("scripted").config())
    backends = (ScriptedBackend(latency_ms=options.pop("latency_ms", 0.5)),)
    return run(make_tuner(target, torch.randn(2, 4), plan, TuneOptions(meter=meter(), backends=backends, **options)))


def test_tuning_ends_with_the_check_which_does_not_count_as_calls_of_the_users() -> None:
    target = Pair().eval()
    result = tune(target, metric=lambda outputs: float(outputs[0].mean()))
    assert result.end_to_end is not None
    assert result.end_to_end.within_budget
    assert result.end_to_end.metric_eager == result.end_to_end.metric_tuned
    assert result.events[-1].data["end_to_end"]["comparison"]["error_class"] == "exact"
    assert any("end to end 2" in str(e.data.get("message")) for e in result.events)
    assert stats(target).dispatched == 0
    with torch.inference_mode():
        target(torch.randn(2, 4))
    assert stats(target).dispatched == 1


def test_the_check_can_be_left_out() -> None:
    assert tune(Pair().eval(), end_to_end=False).end_to_end is None


@pytest.mark.parametrize("error", [RuntimeError("no such word"), KeyboardInterrupt()])
def test_what_was_chosen_stays_when_the_check_fails(error: BaseException) -> None:
    def metric(outputs: Any) -> float:
        raise error

    target = Pair().eval()
    result = tune(target, metric=metric)
    assert result.end_to_end is not None
    assert result.end_to_end.skipped
    with torch.inference_mode():
        target(torch.randn(2, 4))
    assert stats(target).dispatched == 1
