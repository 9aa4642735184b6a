"""The report of a run as JSON and back, and what changed between two runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aitune_lab as ait
from aitune_lab.errors import DataError
from aitune_lab.schema import (
    Candidate,
    Event,
    Fingerprint,
    Limits,
    Measurement,
    Plan,
    Point,
    PointResult,
    Rule,
    Trial,
    from_data,
)
from aitune_lab.testing.models import Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.diff import diff
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.run_report import RunReport, load_report, report_of, save_report
from aitune_lab.tuning.session import replay, write_journal

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(autouse=True)
def _scripted():
    with scripted_backend():
        yield


def tuned(*candidates: Candidate, plan: Plan | None = None, meter: Any = None, **options: Any) -> TuneResult:
    torch.manual_seed(0)
    made = TuneOptions(backends=candidates, meter=meter or ScriptedMeter(), store="off", **options)
    return run(make_tuner(Pair().eval(), [torch.randn(2, 4)], plan or Plan(), made))


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


def events(name: str) -> list[Event]:
    return [from_data(item, Event) for item in json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))]


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    result = tuned(scripted(latency_ms=0.5), scripted(fails_at="build"))
    report = result.report()
    assert report.status == "finished"
    assert report.target == "Pair"
    assert report.environment is not None
    assert report.environment.torch == torch.__version__
    assert report.end_to_end is not None
    assert {t.status for t in report.trials} == {"ok", "failed"}
    path = save_report(result, tmp_path / "run.json")
    assert load_report(path) == replace(report, written=load_report(path).written)
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    assert "Pair: finished" in str(report)
    assert "scripted" in report._repr_html_()
    assert len(report.to_dataframe()) == len(result.to_dataframe())
    assert ait.load_report(path).result.choices == result.choices


def test_a_report_serves_what_if_as_the_run_does() -> None:
    result = tuned(scripted(latency_ms=0.5))
    mix = ait.whatif.chosen(result)
    assert ait.whatif.estimate(result.report(), mix) == ait.whatif.estimate(result, mix)


@pytest.mark.parametrize("name", ["success", "failures", "cancelled"])
def test_a_journal_makes_a_report(name: str, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    write_journal(events(name), journal)
    report = load_report(journal)
    state = replay(events(name))
    assert report.status == state.status
    assert report.trials == tuple(state.trials.values())
    assert report_of(state).choices == report.choices == tuple(state.choices.values())
    save_report(journal, tmp_path / "run.json")
    assert replace(load_report(tmp_path / "run.json"), written="") == replace(report, written="")
    assert str(report)


def test_files_that_are_no_report(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="neither a report of a run nor its journal"):
        load_report(path)
    path.write_text('{"a": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1 of the journal"):
        load_report(path)
    save_report(tuned(scripted()), path)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(data | {"report_version": 99}), encoding="utf-8")
    with pytest.raises(DataError, match="version 99"):
        load_report(path)
    path.write_text(json.dumps(data | {"trials": 3}), encoding="utf-8")
    with pytest.raises(DataError, match="damaged"):
        load_report(path)
    with pytest.raises(DataError, match="got a int"):
        report_of(3)  # type: ignore[arg-type]


def test_the_same_run_twice_differs_in_nothing() -> None:
    one, two = (
        tuned(scripted(latency_ms=0.5), scripted(latency_ms=0.8)),
        tuned(scripted(latency_ms=0.5), scripted(latency_ms=0.8)),
    )
    change = diff(one, two)
    assert not change
    assert change.figures
    assert "Nothing changed beyond noise." in str(change)


def test_what_changed_is_named() -> None:
    thorough = Plan(limits=Limits(search="exhaustive"))
    before = tuned(scripted(latency_ms=0.5), scripted(latency_ms=0.8), scripted(error="scaled"), plan=thorough)
    slower = ScriptedMeter({"scripted": 1.2})
    plan = replace(thorough, rules=(Rule("first", "leave"),))
    after = tuned(scripted(latency_ms=0.5), scripted(latency_ms=0.8), plan=plan, meter=slower)
    there = report_of(after)
    assert there.environment is not None
    later = replace(there, environment=replace(there.environment, torch="9.9", packages={"onnx": "9"}))
    change = ait.diff(before, later)
    assert change
    fields = {(f.part, f.name): (f.before, f.after) for f in change.fields}
    assert fields["environment", "torch"] == (torch.__version__, "9.9")
    assert fields["environment", "packages.onnx"][1] == "9"
    assert any(part == "plan" and "first" in name for part, name in fields)
    assert [(c.before, c.after) for c in change.choices] == [("scripted", "scripted[latency_ms=0.8]")]
    assert [(t.candidate.label, t.before, t.after) for t in change.trials] == [
        ("scripted[error=scaled]", "refused", None)
    ]
    assert [f.candidate.label for f in change.changed] == ["scripted"]
    assert change.changed[0].latency.value == pytest.approx(1.2 / 0.5, rel=0.05)
    for shown in (str(change), change._repr_html_()):
        assert "9.9" in shown
        assert "slower" in shown
    assert list(change.to_dataframe()["candidate"]) == ["scripted", "scripted[latency_ms=0.8]"]


def measured(median: float, half: float, disturbed: str | None = None) -> Measurement:
    return Measurement(median, median, median, median - half, median + half, 0.0, 10, 1, "scripted", 1, disturbed)


def report(latency: float, eager: float, *, half: float = 0.01, disturbed: str | None = None) -> RunReport:
    point = PointResult(Point(), 1, 1.0, None, measured(latency, half, disturbed), measured(eager, half))
    own = PointResult(Point(), 1, 1.0, None, measured(eager, half), measured(eager, half))
    trials = (
        Trial("a", "m", "s", Candidate("fast"), "ok", points=(point,)),
        Trial("b", "m", "s", Candidate("eager"), "ok", points=(own,)),
    )
    return RunReport("", "", "finished", trials=trials)


def test_a_machine_that_got_slower_changes_no_figure_beside_eager() -> None:
    change = diff(report(1.0, 2.0), report(1.5, 3.0))
    assert change.machine == pytest.approx(1.5)
    assert change.figures[0].latency.value == pytest.approx(1.5)
    assert change.figures[0].beside_eager is not None
    assert change.figures[0].beside_eager.value == pytest.approx(1.0)
    assert change.figures[0].beyond_noise is False
    assert "1.5 times as long" in str(change)


def test_bounds_and_disturbance_decide() -> None:
    assert diff(report(1.0, 2.0), report(1.1, 2.0)).figures[0].beyond_noise is True
    wide = diff(report(1.0, 2.0, half=0.3), report(1.1, 2.0, half=0.3))
    assert wide.figures[0].beyond_noise is False
    noisy = diff(report(1.0, 2.0), report(9.0, 2.0, disturbed="a neighbour"))
    assert noisy.figures[0].beyond_noise is None
    assert not noisy.changed
    assert "disturbed, so it decides nothing" in str(noisy)


def test_an_environment_that_only_one_run_tells_is_no_change() -> None:
    here = Fingerprint("3.11", "linux", "x86", "cpu", ("avx2", "fma"), 2, "2.13")
    one, two = report(1.0, 2.0), report(1.0, 2.0)
    assert not diff(one, replace(two, environment=here))
    change = diff(replace(one, environment=here), replace(two, environment=replace(here, cpu_flags=("avx2",))))
    assert [(f.name, f.before, f.after) for f in change.fields] == [("cpu_flags: fma", "yes", "")]
