"""Estimates for mixes of backends: the arithmetic, what is refused, and a measurement that leaves the target as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.errors import AituneError
from aitune_lab.runtime.installed import installed_in
from aitune_lab.schema import Candidate, Measurement, Plan, Point, PointResult, Trial, to_data
from aitune_lab.testing.models import AutoEncoder, Mlp, Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning import whatif
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.session import SessionState

FAST = Candidate("fast")
SLOW = Candidate("slow")


@pytest.fixture(autouse=True)
def _scripted():
    with scripted_backend():
        yield


def measured(median: float, half: float = 0.0, disturbed: str | None = None) -> Measurement:
    return Measurement(median, median, median, median - half, median + half, 0.0, 10, 1, "scripted", 1, disturbed)


def trial(path: str, candidate: Candidate, *points: PointResult, **changes: Any) -> Trial:
    return Trial(f"{path}/{candidate.label}", path, "sig", candidate, "ok", points=points, **changes)


def point(calls: int, latency: float, eager: float, half: float = 0.0, b: int = 1) -> PointResult:
    return PointResult(Point((("b", b),)), calls, calls, None, measured(latency, half), measured(eager, half))


def row(path: str, bytes_: int = 100, method: str = "forward", share: float = 0.0) -> dict[str, Any]:
    return {"path": path, "method": method, "parameter_bytes": bytes_, "share": share}


def state(*trials: Trial, eager: Measurement | None = None, rows: tuple[Any, ...] = ()) -> SessionState:
    return SessionState(
        rows=rows or (row("a"), row("a.inner", 40), row("b", 200)),
        trials={t.key: t for t in trials},
        eager_seconds=0.020,
        end_to_end={"eager": to_data(eager)} if eager is not None else None,
    )


def test_the_latency_is_the_untuned_pass_minus_calls_times_saving() -> None:
    held = state(
        trial("a", FAST, point(3, 1.0, 2.0), point(1, 2.0, 4.0, b=8), memory_bytes=7),
        trial("b", SLOW, point(2, 1.5, 1.0)),
    )
    guess = whatif.estimate(held, {"a": "fast", "b": "slow"}, name="both")
    assert guess.latency is not None
    assert guess.latency.ms == pytest.approx(20 - (3 * 1.0 + 1 * 2.0) + 2 * 0.5)
    assert guess.speedup == pytest.approx(20 / 16)
    assert [(p.path, p.calls, p.saving and p.saving.ms) for p in guess.parts] == [("a", 4, 5.0), ("b", 2, -1.0)]
    assert (guess.weights_bytes, guess.added_bytes) == (300, 7)
    assert guess.eager_source == "inspected"
    assert "single pass" in guess.notes[0]
    assert guess.end_to_end_error == "unknown until measured"
    assert guess.sentence.startswith("both: estimate 16.0 ms a pass against 20.0 ms, 1.25 times as fast")


def test_uncertainties_add_in_quadrature_with_calls() -> None:
    held = state(trial("a", FAST, point(3, 1.0, 2.0, half=0.1)), eager=measured(30.0, 0.4))
    guess = whatif.estimate(held, {"a": FAST})
    assert guess.eager_source == "measured"
    assert guess.latency is not None
    half = math.sqrt(0.4**2 + 2 * 0.3**2)
    assert guess.latency.ms == pytest.approx(27.0)
    assert guess.latency.low_ms == pytest.approx(27.0 - half)
    assert guess.latency.high_ms == pytest.approx(27.0 + half)
    disturbed = state(trial("a", FAST, point(3, 1.0, 2.0)), eager=measured(30.0, 0.4, "other load"))
    guess = whatif.estimate(disturbed, {"a": FAST})
    assert guess.eager_source == "measured"  # still better than the single pass of an inspection
    assert guess.eager is not None
    assert guess.eager.ms == 30.0
    assert any("disturbed the passes of the untuned target" in note for note in guess.notes)


def test_what_has_no_figures_gives_no_latency_but_says_why() -> None:
    failed = replace(trial("a", FAST), status="failed", reason="it broke")
    untimed = trial("b", SLOW, PointResult(Point(), 2, 1.0), reason="stopped after a rough look")
    guess = whatif.estimate(state(failed, untimed), {"a": "fast", "b": "slow"})
    assert guess.latency is None
    assert guess.speedup is None
    assert guess.problems == ("a, fast: failed: it broke", "b, slow: stopped after a rough look")
    assert guess.sentence.startswith("no estimate: a, fast: failed: it broke")


def test_figures_of_a_rough_look_serve_and_are_marked() -> None:
    looked = PointResult(Point(), 2, 1.0, rough=measured(3.0, 0.5), rough_eager=measured(1.0, 0.5))
    guess = whatif.estimate(state(trial("a", SLOW, looked, reason="stopped after a rough look")), {"a": "slow"})
    assert guess.latency is not None
    assert guess.latency.ms == pytest.approx(24.0)
    assert guess.notes[0] == "a, slow: from a rough look, not measured in full"


def test_a_run_keeps_what_a_rough_look_saw() -> None:
    result = tuned(Mlp().eval(), [torch.randn(2, 4)], scripted(latency_ms=0.5), scripted(latency_ms=5.0))
    hopeless = next(t for t in result.trials.values() if t.candidate == scripted(latency_ms=5.0))
    assert hopeless.points[0].latency is None
    guess = whatif.estimate(result, {"": scripted(latency_ms=5.0)})
    assert guess.parts[0].saving is not None
    assert guess.parts[0].saving.ms == pytest.approx(-4.0, rel=0.1)
    assert "rough look" in guess.notes[0]


def test_figures_taken_under_other_load_are_marked() -> None:
    noisy = PointResult(Point(), 2, 1.0, None, measured(1.0, disturbed="a neighbour"), measured(2.0))
    guess = whatif.estimate(state(trial("a", FAST, noisy)), {"a": "fast"})
    assert guess.latency is not None
    assert guess.notes[0] == "a, fast: other load disturbed a measurement"


def test_a_pass_takes_at_least_what_its_modules_take() -> None:
    held = state(trial("a", FAST, point(4, 1.0, 9.0)))
    guess = whatif.estimate(held, {"a": "fast"})
    assert guess.latency is not None
    assert guess.latency.ms == pytest.approx(4.0)
    assert any("other conditions" in note for note in guess.notes)


def test_load_that_changed_between_the_whole_and_its_modules_widens_the_bounds() -> None:
    # The whole pass took 20 ms, of which the module 90 %; in its trial that was 4.5 ms instead of 18.
    rows = (row("a", share=0.9),)
    busy = state(trial("a", FAST, point(1, 1.5, 4.5, half=0.1)), eager=measured(20.0, 0.5), rows=rows)
    guess = whatif.estimate(busy, {"a": "fast"})
    assert guess.latency is not None
    assert guess.latency.ms == pytest.approx(17.0)
    assert guess.latency.low_ms == pytest.approx(20 * (1 - 0.9 * 2 / 3))
    assert "different load" in guess.notes[0]
    calm = state(trial("a", FAST, point(1, 6.0, 18.0, half=0.1)), eager=measured(20.0, 0.5), rows=rows)
    assert not whatif.estimate(calm, {"a": "fast"}).notes


def test_eagers_own_trial_stands_in_where_eager_was_not_measured_beside() -> None:
    alone = PointResult(Point(), 2, 1.0, None, measured(1.0), None)
    eager = trial("a", Candidate("eager"), PointResult(Point(), 2, 1.0, None, measured(3.0), measured(3.0)))
    guess = whatif.estimate(state(eager, trial("a", FAST, alone)), {"a": "fast"})
    assert guess.parts[0].saving is not None
    assert guess.parts[0].saving.ms == pytest.approx(4.0)


def test_mixes_side_by_side_and_their_difference() -> None:
    held = state(
        trial("a", FAST, point(2, 1.0, 2.0, half=0.01)),
        trial("a", SLOW, point(2, 1.9, 2.0, half=0.5)),
        trial("b", FAST, point(1, 1.0, 2.0, half=9.0)),
        eager=measured(30.0, 5.0),
    )
    side = whatif.compare(
        held, {"one": {"a": "fast", "b": "fast"}, "two": {"b": "fast"}, "three": {"a": "slow", "b": "fast"}}
    )
    assert [e.name for e in side.estimates] == ["one", "two", "three"]
    change = whatif.diff(side["one"], side["two"])
    # What both share, the untuned pass and b, is known badly; it cancels.
    assert [c.after.path for c in change.changes] == ["a"]
    assert change.latency is not None
    assert change.latency.ms == pytest.approx(2.0)
    assert change.beyond_noise is True
    assert change.sentence.startswith("two is slower than one by 2.00 ms")
    assert whatif.diff(side["two"], side["three"]).beyond_noise is False
    assert "no difference beyond noise" in whatif.diff(side["two"], side["three"]).sentence
    assert "same mix" in whatif.diff(side["one"], side["one"]).sentence
    with pytest.raises(KeyError, match="four"):
        side["four"]


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ({"c": "fast"}, "but got 'c'"),
        ({"a": "quick"}, r"\['eager', 'fast'\], but got 'quick'"),
        ({"a": "fast", "a.inner": "fast"}, "a.inner lies in a"),
        ({("a", "forward", "other"): "fast"}, "but got"),
    ],
)
def test_what_a_mix_may_not_say(mix: Any, words: str) -> None:
    held = state(trial("a", FAST, point(1, 1, 2)), trial("a.inner", FAST, point(1, 1, 2)))
    with pytest.raises(AituneError, match=words):
        whatif.estimate(held, mix)


def test_keys_of_signatures_win_over_paths_and_methods_stand_side_by_side() -> None:
    rows = (row("vae", 50), row("vae.encode", 50, "encode"), row("vae.decode", 50, "decode"), row("vae.net", 10))
    trials = [trial(path, FAST, point(1, 1, 2)) for path in ("vae.encode", "vae.decode", "vae.net")]
    held = state(*trials, rows=rows)
    guess = whatif.estimate(held, {"vae.encode": "fast", "vae.decode": "fast"})
    assert [p.method for p in guess.parts] == ["encode", "decode"]
    assert guess.weights_bytes == 50
    with pytest.raises(AituneError, match=r"vae\.net lies in vae\.encode"):
        whatif.estimate(held, {"vae.encode": "fast", "vae.net": "fast"})
    back = whatif.estimate(held, {"vae.encode": "fast", ("vae.encode", "encode", "sig"): "eager", "vae.net": "fast"})
    assert [(p.path, p.candidate.label) for p in back.parts] == [("vae.encode", "eager"), ("vae.net", "fast")]
    assert whatif.estimate(held, guess.mix).parts == guess.parts


# --- on a real run ------------------------------------------------------------------------------------------------


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


def tuned(target: Any, data: Any, *candidates: Candidate, plan: Plan | None = None) -> TuneResult:
    options = TuneOptions(backends=candidates, meter=ScriptedMeter())
    return run(make_tuner(target, data, plan or Plan(), options))


def test_estimates_from_a_result_and_its_choices() -> None:
    torch.manual_seed(0)
    model = Pair().eval()
    result = tuned(model, [torch.randn(2, 4)], scripted(latency_ms=0.5), scripted(latency_ms=0.8))
    guess = whatif.estimate(result, whatif.chosen(result), name="chosen")
    assert [p.candidate.label for p in guess.parts] == ["scripted"]
    assert guess.errors[0].error_class == "exact"
    parts = whatif.options(result)
    assert [p.candidate.label for p in next(iter(parts.values()))] == ["eager", "scripted", "scripted[latency_ms=0.8]"]
    assert guess.to_dataframe()["saving_ms"][0] > 0
    text, page = str(guess), guess._repr_html_()
    assert "What if: chosen" in text
    assert "estimate" in page
    side = whatif.compare(result, {"<b>x": {"": "scripted"}, "none": {}})
    assert "&lt;b&gt;x" in side._repr_html_()
    assert "<b>x" not in side._repr_html_()
    assert "all eager" in str(side)
    assert list(side.to_dataframe()["name"]) == ["<b>x", "none"]
    assert "none" in whatif.diff(*side.estimates)._repr_html_()


def test_a_measured_mix_is_taken_off_again() -> None:
    model, x = Pair().eval(), torch.randn(2, 4)
    result = tuned(model, [x], scripted(latency_ms=0.5), plan=None)
    before = installed_in(model)
    assert [item.path for item in before] == [""]
    steps: list[str] = []
    done = whatif.measure(
        model,
        [x],
        {"first": scripted(latency_ms=0.8), "second": "scripted[latency_ms=0.8]"},
        meter=ScriptedMeter({"tuned": 0.7}),
        progress=steps.append,
    )
    assert done.ran == (("first", "scripted[latency_ms=0.8]"), ("second", "scripted[latency_ms=0.8]"))
    assert done.end_to_end.within_budget
    assert done.latency is not None
    assert done.latency.ms == pytest.approx(0.7, rel=0.05)
    assert done.estimate is None
    assert any("building scripted" in step for step in steps)
    assert installed_in(model) == before
    with torch.inference_mode():
        model(x)
    assert ait.stats(model).dispatched == 1
    again = whatif.measure(model, [x], whatif.chosen(result), source=result, name="chosen", meter=ScriptedMeter())
    assert again.estimate is not None
    assert again.as_estimated is not None
    assert "estimated" in str(again)
    assert "Measured: chosen" in again._repr_html_()


def test_a_mix_out_of_tolerance_is_measured_and_its_error_seen() -> None:
    model = Mlp().eval()
    wrong = scripted(error="scaled")
    result = tuned(model, [torch.randn(2, 4)], wrong)
    assert not installed_in(model)
    done = whatif.measure(model, [torch.randn(2, 4)], {"": wrong}, source=result, meter=ScriptedMeter())
    assert done.end_to_end.within_budget is False
    assert done.estimate is not None
    assert done.estimate.latency is None
    assert not installed_in(model)


def test_signatures_of_one_module_can_differ() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x) + self.mlp(x, mode="tanh")

    model, x = Twice().eval(), torch.randn(2, 4)
    plan = Plan(rules=(ait.Rule("mlp", "pin", candidate=scripted()),))
    result = tuned(model, [x], plan=plan)
    first, second = whatif.options(result)
    mix = {first: scripted(), second: "eager"}
    done = whatif.measure(model, [x], mix, source=result, meter=ScriptedMeter())
    assert sorted(label for _, label in done.ran) == ["eager", "scripted"]
    assert [item.path for item in installed_in(model)] == ["mlp"]


def test_what_cannot_be_measured_leaves_the_target_as_it_was() -> None:
    model, x = AutoEncoder().eval(), torch.randn(2, 4)

    def both(x: torch.Tensor) -> torch.Tensor:
        return model.decode(model.encode(x))

    with pytest.raises(AituneError, match="scripted failure at build"):
        whatif.measure(model, [x], {"encode": scripted(fails_at="build")}, inference_function=both)
    with pytest.raises(AituneError, match="nothing to measure"):
        whatif.measure(model, [x], {"encode": "eager"}, inference_function=both)
    with pytest.raises(AituneError, match="but the mix names"):
        whatif.measure(model, [x], {("encode", "encode", "other"): scripted()}, inference_function=both)
    with pytest.raises(AituneError, match="must be among those of the target"):
        whatif.measure(model, [x], {"nowhere": scripted()}, inference_function=both)
    assert not installed_in(model)
    done = whatif.measure(model, [x], {"encode": scripted()}, inference_function=both, meter=ScriptedMeter())
    assert done.ran == (("encode", "scripted"),)
