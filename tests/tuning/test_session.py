from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from aitune_lab.errors import DataError
from aitune_lab.schema import Candidate, Choice, Event, Limits, Plan, Point, PointResult, Trial, to_data
from aitune_lab.tuning.session import LOG_TAIL, Session, journaled, read_journal, replay, write_journal

ORT = Candidate("onnxruntime")
TRIAL = Trial("k1", "encoder", "sig", ORT, "ok", points=(PointResult(Point((("b", 8),)), 3, float("nan")),))
FAILED = Trial("k2", "encoder", "sig", Candidate("inductor"), "failed", reason="no compiler")
CHOICE = Choice("encoder", "forward", "sig", ORT, "k1", "onnxruntime is faster", 2.0, losers={"inductor": "failed"})


def events(*, end: str = "run_finished", end_data: dict[str, Any] | None = None) -> list[Event]:
    steps: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (
            "run_started",
            {
                "target": "Encoder",
                "modules": 1,
                "trials": 2,
                "estimated_seconds": 20.0,
                "estimated_bytes": 1 << 20,
                "understood": "2 samples, collated",
            },
            {},
        ),
        ("inspected", {"rows": [{"path": "encoder", "calls": 3}]}, {}),
        ("plan_changed", {"plan": to_data(Plan(limits=Limits(max_seconds=9.0)))}, {}),
        ("trial_started", {"index": 1, "total": 2, "phase": "build"}, {"path": "encoder", "candidate": ORT}),
        ("trial_progress", {"phase": "measure", "fraction": 0.5}, {"path": "encoder", "candidate": ORT}),
        ("trial_finished", {"trial": to_data(TRIAL)}, {"path": "encoder", "candidate": ORT}),
        ("trial_failed", {"trial": to_data(FAILED)}, {"path": "encoder", "candidate": FAILED.candidate}),
        ("log", {"level": "warning", "message": "few samples"}, {}),
        ("choice_made", {"choice": to_data(CHOICE)}, {"path": "encoder"}),
        (end, end_data or {"seconds": 7.5, "choices": 1, "estimate": {"speedup": 1.5}}, {}),
    ]
    return [Event(i, i * 0.5, kind, data=data, **rest) for i, (kind, data, rest) in enumerate(steps)]


def test_a_whole_run() -> None:
    state = replay(events())
    assert (state.status, state.target, state.understood) == ("finished", "Encoder", "2 samples, collated")
    assert state.rows == ({"path": "encoder", "calls": 3},)
    assert list(state.trials) == ["k1", "k2"]
    assert state.trials["k2"] == FAILED
    assert state.choices == {("encoder", "forward", "sig"): CHOICE}
    assert state.plan.limits.max_seconds == 9.0
    assert (state.progress.done, state.progress.total, state.progress.candidate) == (2, 2, None)
    assert state.log == ((3.5, "warning", "few samples"),)
    assert (state.elapsed, state.estimated_seconds, state.estimated_bytes) == (7.5, 20.0, 1 << 20)
    assert state.estimate == {"speedup": 1.5}
    assert state.error is None
    assert state.seq == 9


def test_progress_within_a_trial() -> None:
    progress = replay(events()[:5]).progress
    assert (progress.done, progress.total, progress.phase, progress.fraction) == (0, 2, "measure", 0.5)
    assert (progress.path, progress.candidate) == ("encoder", "onnxruntime")
    building = {"phase": "build", "fraction": None, "doing": "compiling 50%"}
    event = replace(events()[4], data=building)
    assert replay([*events()[:4], event]).progress.phase == "compiling 50%"


@pytest.mark.parametrize(("end", "status"), [("run_cancelled", "cancelled"), ("run_failed", "failed")])
def test_other_ends(end: str, status: str) -> None:
    state = replay(events(end=end, end_data={"seconds": 1.0, "error": "out of memory"}))
    assert state.status == status
    assert state.error == ("out of memory" if status == "failed" else None)
    assert len(state.trials) == 2


def test_snapshots_are_frozen_and_apart() -> None:
    session = Session()
    snapshots = [session.apply(event) for event in events()]
    assert snapshots[0].trials == {}
    assert len(snapshots[-1].trials) == 2
    assert session.state is snapshots[-1]
    with pytest.raises(FrozenInstanceError):
        snapshots[0].status = "failed"  # type: ignore[misc]


def test_a_second_run_keeps_what_is_known() -> None:
    state = replay([*events(end="run_failed", end_data={"error": "x"}), events()[0]])
    assert (state.status, state.error, state.progress.done, state.elapsed) == ("running", None, 0, 0.0)
    assert len(state.trials) == 2


def test_the_log_keeps_its_tail() -> None:
    state = replay(Event(i, float(i), "log", data={"message": str(i)}) for i in range(LOG_TAIL + 5))
    assert len(state.log) == LOG_TAIL
    assert state.log[-1][2] == str(LOG_TAIL + 4)


def test_journal_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_journal(events(), path)
    assert "NaN" not in path.read_text()
    back = read_journal(path)
    assert [to_data(event) for event in back] == [to_data(event) for event in events()]
    assert replay(back).choices == replay(events()).choices


def test_each_event_is_in_the_journal_before_it_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for count, _ in enumerate(journaled(events(), path), 1):
        assert len(read_journal(path)) == count


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_journal(events(), path)
    whole = path.read_bytes()
    for cut in (1, 5, 30):
        path.write_bytes(whole[:-cut])
        assert len(read_journal(path)) == (10 if cut == 1 else 9)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_journal(events(), path)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(DataError, match="line 2 of the journal"):
        read_journal(path)
