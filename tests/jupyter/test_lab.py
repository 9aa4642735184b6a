"""The Lab without a page: its steps as methods, what it refuses, and how it stands to other runs of its target."""

from __future__ import annotations

import _thread
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import aitune_lab as ait
from aitune_lab.errors import DataError, PlanError, TargetError
from aitune_lab.jupyter.earlier import earlier_run
from aitune_lab.jupyter.lab import Lab
from aitune_lab.jupyter.views import preview_sentence, seconds_words
from aitune_lab.schema import Plan, Rule
from aitune_lab.tuning.planfile import read_plan

from .conftest import FAST, SLOW, WRONG, Gate, Pipe, WaitingBackend


def is_plain(pipe: Pipe) -> bool:
    return all("forward" not in vars(module) for module in (pipe.encoder, pipe.head))


def test_a_script_runs_all_steps(make_lab: Any, pipe: Pipe, tmp_path: Path) -> None:
    lab = make_lab(FAST, SLOW, WRONG)
    assert "not inspected" in str(lab)
    info = lab.inspect()
    assert {row.path for row in info.rows} >= {"encoder", "head"}
    result = lab.run()
    assert {choice.path: choice.candidate for choice in result.choices} == {"encoder": FAST, "head": FAST}
    assert lab.compare() is result
    digest = lab.export(tmp_path / "tuned.ait")
    fresh = Pipe()
    assert ait.load(fresh, tmp_path / "tuned.ait", trust=digest)
    assert "scripted" in str(lab)
    assert "as it was" not in str(lab)


def test_trials_time_and_disk_are_said_before_the_start(make_lab: Any, pipe: Pipe) -> None:
    lab = make_lab(FAST, WRONG)
    lab.inspect()
    lab._worker.join(60)
    preview = lab.snapshot.preview
    assert preview is not None
    assert preview.trials == 4
    assert preview.seconds > 0
    said = preview_sentence(preview, 600)
    assert said.startswith("4 trials over 2 modules: about ")
    assert "of disk. The run stops after 10 min" in said
    assert is_plain(pipe)
    lab.leave("head")
    lab._worker.join(60)
    assert lab.snapshot.preview.trials == 2


def test_a_tune_returns_at_once_and_cancel_leaves_the_target_as_it_was(make_lab: Any, pipe: Pipe, gate: Gate) -> None:
    lab = make_lab(WaitingBackend())
    lab.tune()
    assert gate.reached.wait(60)
    assert lab.running
    with pytest.raises(TargetError, match=r"lab\.export\(\)|saving needs the tune to end first: it is at trial 0 of 2"):
        lab.ended("saving")
    assert lab.cancel()
    gate.go.set()
    result = lab.wait()
    assert result.events[-1].kind == "run_cancelled"
    assert lab.snapshot.phase == "cancelled"
    assert is_plain(pipe)
    assert not lab.cancel()


def test_a_paused_run_waits_between_steps(make_lab: Any, gate: Gate) -> None:
    lab = make_lab(WaitingBackend())
    lab.tune()
    assert gate.reached.wait(60)
    assert lab.pause()
    gate.go.set()
    assert lab.snapshot.paused
    assert lab.running
    lab.resume()
    assert lab.wait().choices
    assert not lab.pause()


def test_an_interrupt_of_run_cancels_it(make_lab: Any, pipe: Pipe, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = make_lab(WaitingBackend())
    gate.reached.set = _thread.interrupt_main  # type: ignore[method-assign]
    cancel = lab.cancel

    def cancelled() -> bool:
        done = cancel()
        gate.go.set()
        return done

    monkeypatch.setattr(lab, "cancel", cancelled)
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert lab.snapshot.phase == "cancelled"
    assert is_plain(pipe)


def test_the_same_target_again_while_tuning_is_the_same_lab(make_lab: Any, pipe: Pipe, gate: Gate) -> None:
    lab = make_lab(WaitingBackend())
    lab.tune()
    assert gate.reached.wait(60)
    other_data = [torch.randn(3, 8)]
    again = make_lab(FAST, data=other_data)
    assert again is lab
    assert lab.data is not other_data
    assert lab.snapshot.notice is not None
    assert [op for op, _ in lab.snapshot.notice.actions] == ["restart"]
    part = make_lab(FAST, target=pipe.encoder)
    with pytest.raises(TargetError, match="another tune of this Pipe is running"):
        part.tune()
    lab.start_over()
    gate.go.set()
    lab._worker.join(60)
    assert lab.data is other_data
    assert lab.run().choices[0].candidate == FAST


def test_the_same_target_after_a_tune_shows_its_results(make_lab: Any) -> None:
    lab = make_lab()
    result = lab.run()
    again = make_lab()
    assert again is not lab
    assert again.snapshot.result is result
    assert "tune before" in again.snapshot.notice.text
    forked = again.fork()
    assert forked.target is lab.target
    forked.pin("head", SLOW)
    assert forked.plan != again.plan
    assert forked.snapshot.stale
    assert not again.snapshot.stale


def test_after_a_restart_the_earlier_run_is_offered_and_nothing_is_built(make_lab: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    made = make_lab(store=store)
    made.run()
    (store / "runs" / "99999999T000000.000000Z-1-0.jsonl").write_text("damaged\n{}\n")
    assert earlier_run(torch.nn.Linear(2, 2), store) is None
    assert earlier_run(Pipe(), None) is None

    # Another object, as in another process: nothing but the store knows of the run.
    fresh = make_lab(target=Pipe(), store=store)
    assert "earlier run of this target, with 4 trials" in fresh.snapshot.notice.text
    fresh.adopt_earlier()
    assert [choice.candidate for choice in fresh.snapshot.state.choices.values()] == [FAST, FAST]
    assert fresh.snapshot.result is None
    assert is_plain(fresh.target)
    result = fresh.run()
    assert result.counts.builds == 0
    assert [choice.candidate for choice in result.choices] == [FAST, FAST]


def test_pins_change_plan_and_code_and_out_of_tolerance_needs_accept_error(make_lab: Any) -> None:
    lab = make_lab(FAST, SLOW, WRONG)
    lab.run()
    lab.pin("encoder", SLOW)
    assert lab.plan.rules == (Rule("encoder", "pin", candidate=SLOW),)
    assert lab.snapshot.stale
    assert "latency_ms" in lab.code()
    with pytest.raises(PlanError, match=r"out of tolerance at .*relative L2.*accept_error=True"):
        lab.pin("encoder", WRONG)
    with pytest.raises(PlanError, match="no module has this path"):
        lab.pin("encodr", SLOW)
    assert lab.plan.rules == (Rule("encoder", "pin", candidate=SLOW),)
    lab.pin("encoder", WRONG, accept_error=True)
    choices = {choice.path: choice for choice in lab.run().choices}
    assert choices["encoder"].candidate == WRONG
    assert choices["encoder"].accepted_error
    lab.unpin("encoder")
    assert lab.plan == Plan()
    with pytest.raises(PlanError, match="no rule holds 'encoder'"):
        lab.unpin("encoder")


def test_a_pin_on_one_copy_counts_before_one_on_all(make_lab: Any) -> None:
    lab = make_lab()
    lab.pin("encoder", FAST)
    lab.pin("re:.*", SLOW)
    lab.prefer("re:h.*", "MaxThroughput")
    lab.exclude("inductor")
    lab.leave("head")
    assert [(rule.pattern, rule.action) for rule in lab.plan.rules] == [
        ("head", "leave"),
        ("encoder", "pin"),
        ("re:h.*", "strategy"),
        ("re:.*", "pin"),
        ("re:.*", "exclude"),
    ]
    lab.include("inductor")
    assert len(lab.plan.rules) == 4


def test_settings(make_lab: Any) -> None:
    lab = make_lab()
    plan = lab.choose(
        accuracy="exact", max_relative_error=1e-3, search="quick", max_seconds=30, strategy="MaxThroughput"
    )
    assert (plan.tolerance.accuracy, plan.tolerance.max_relative_error) == ("exact", 1e-3)
    assert (plan.limits.search, plan.limits.max_seconds, plan.strategy.name) == ("quick", 30.0, "MaxThroughput")
    for wrong in ({"accuracy": "some"}, {"max_seconds": "soon"}, {"speed": 1}):
        with pytest.raises(PlanError):
            lab.choose(**wrong)
    with pytest.raises(PlanError, match="options must be among"):
        Lab(Pipe(), [torch.randn(2, 8)], speed=1)


def test_whatif_and_measure(make_lab: Any, pipe: Pipe) -> None:
    lab = make_lab(FAST, SLOW)
    lab.run()
    estimate = lab.whatif({"encoder": SLOW.label}, name="careful")
    assert estimate.mix[estimate.parts[0].key] == SLOW
    with pytest.raises(PlanError, match="onnxruntime"):
        lab.whatif({"encoder": "onnxruntime"})
    measured = lab.measure("careful")
    assert measured.end_to_end.comparison.error_class == "exact"
    mix = lab.shown.mixes.named("careful")
    assert mix.measured is measured
    assert not mix.doing
    both = lab.compare("as tuned", "careful")
    assert [e.name for e in both.estimates] == ["as tuned", "careful"]
    with pytest.raises(PlanError, match="mixes are"):
        lab.compare("other")


def test_exports_by_ending(make_lab: Any, tmp_path: Path) -> None:
    lab = make_lab()
    with pytest.raises(TargetError, match=r"needs a tuned target: call lab\.run\(\)"):
        lab.export(tmp_path / "tuned.ait")
    with pytest.raises(DataError, match="ending"):
        lab.export(tmp_path / "tuned.docx")
    lab.pin("encoder", SLOW)
    lab.export(tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == lab.plan
    lab.run()
    lab.export(tmp_path / "tuned.py")
    compile((tmp_path / "tuned.py").read_text(), "tuned.py", "exec")
    lab.export(tmp_path / "tuned.html")
    assert "encoder" in (tmp_path / "tuned.html").read_text()


def test_data_that_the_target_rejects_is_said_and_can_be_tried_again(make_lab: Any) -> None:
    lab = make_lab(data=[torch.randn(2, 3)])
    with pytest.raises(DataError, match="rejected"):
        lab.inspect()
    assert lab.snapshot.phase == "failed"
    assert lab.snapshot.notice.tone == "error"
    lab.data = [torch.randn(2, 8)]
    assert lab.inspect().rows


def test_a_lab_nobody_holds_is_forgotten(make_lab: Any) -> None:
    from aitune_lab.jupyter import registry

    pipe = Pipe()
    lab = Lab(pipe, [torch.randn(2, 8)], store=None)
    assert registry.lab_of(pipe) is lab
    del lab
    gc.collect()
    assert registry.lab_of(pipe) is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59, "59 s"), (125, "2 min 5 s"), (1200, "20 min"), (3840, "1 h 4 min")]
)
def test_seconds_as_people_say_them(seconds: float, words: str) -> None:
    assert seconds_words(seconds) == words


def test_running_the_cell_again_keeps_pins(make_lab: Any, pipe: Pipe) -> None:
    lab = make_lab()
    lab.run()
    lab.pin("encoder", SLOW)
    again = make_lab()
    assert again is not lab
    assert again.plan == lab.plan
    assert make_lab(plan=Plan()).plan == Plan()


def test_an_export_is_named_by_its_kind(make_lab: Any, tmp_path: Path) -> None:
    lab = make_lab()
    lab.run()
    for what, ending in {"ait": ".ait", "plan": ".toml", "report": ".html"}.items():
        with pytest.raises(DataError, match=rf"must end in \{ending}, but got"):
            lab.begin_export(what, str(tmp_path / "script.py"))
    assert not list(tmp_path.iterdir())


def test_a_target_without_modules_and_empty_data_are_refused_at_once() -> None:
    with pytest.raises(TargetError, match=r"no torch.nn.Module was found in this int"):
        Lab(5, [torch.zeros(2, 8)])
    with pytest.raises(DataError, match=r"at least one item, but got a list of 0"):
        Lab(Pipe(), [])
    with pytest.raises(PlanError, match="Did you mean 'onnxruntime'"):
        Lab(Pipe(), [torch.zeros(2, 8)], backends=["onnx"])


def test_the_best_so_far_is_used_while_paused_and_after_a_cancel(make_lab: Any, pipe: Pipe, gate: Gate) -> None:
    lab = make_lab(FAST, WaitingBackend(), SLOW)
    with pytest.raises(TargetError, match="paused or was cancelled"):
        lab.apply_best()
    lab.leave("head")  # or it comes first when its few microseconds are more than those of the encoder
    lab.tune()
    assert gate.reached.wait(60)
    lab.pause()
    gate.go.set()
    choices = lab.apply_best()
    assert {choice.path: choice.candidate for choice in choices} == {"encoder": FAST}
    assert not is_plain(pipe)
    assert lab.running
    lab.cancel()
    lab._worker.join(60)
    assert lab.snapshot.phase == "tuned"
    assert "the best so far is installed: 1 choice" in str(lab)
    assert not is_plain(pipe)


def test_what_a_cancelled_run_found_can_be_used_and_exported(
    make_lab: Any, pipe: Pipe, gate: Gate, tmp_path: Path
) -> None:
    lab = make_lab(FAST, WaitingBackend(), SLOW)
    lab.leave("head")
    lab.tune()
    assert gate.reached.wait(60)
    lab.cancel()
    assert lab.snapshot.cancelling
    gate.go.set()
    lab._worker.join(60)
    assert lab.snapshot.phase == "cancelled"
    assert is_plain(pipe)
    assert [choice.candidate for choice in lab.apply_best()] == [FAST]
    assert not is_plain(pipe)
    assert lab.export(tmp_path / "tuned.ait").startswith("sha256:")
    with pytest.raises(TargetError, match="paused or was cancelled"):
        lab.apply_best()
