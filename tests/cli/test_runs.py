"""`aitune-lab runs`: what is listed of earlier runs, in which state, and the report of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from aitune_lab.cli import main
from aitune_lab.schema import Plan
from aitune_lab.store.store import Store
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.runs import earlier_runs


def tune() -> None:
    with scripted_backend():
        options = TuneOptions(backends=(ScriptedBackend(latency_ms=0.5).candidate(),), meter=ScriptedMeter())
        run(make_tuner(nn.Linear(4, 4).eval(), [torch.ones(2, 4)], Plan(), options))


def test_none_yet(fresh_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == f"no runs are known in {fresh_cache}\n"
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


def test_the_latest_first_with_what_was_chosen_and_the_report_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    tune()
    tune()
    assert main(["runs"]) == 0
    heads, _, *lines = capsys.readouterr().out.splitlines()
    assert heads.split()[0] == "started"
    assert len(lines) == 2
    assert all("finished" in line and "Linear" in line and "(model): scripted" in line for line in lines)
    assert main(["runs", "--last", "1", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["journal"] == str(Store().journals()[0])
    assert told["started"].endswith("+00:00")
    assert told["trials"] == 2
    assert main(["runs", told["journal"]]) == 0
    assert "finished; report of" in capsys.readouterr().out.splitlines()[0]
    assert main(["runs", told["journal"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"


def test_runs_that_said_nothing_of_their_end_or_cannot_be_read() -> None:
    tune()
    (journal,) = Store().journals()
    whole = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(whole[:2]))
    assert [r.status for r in earlier_runs()] == ["running"]  # this process might still write it
    stamp, _, number = journal.name.split("-")
    journal = journal.rename(journal.with_name(f"{stamp}-{2**22 + 1}-{number}"))
    assert [r.status for r in earlier_runs()] == ["broken off"]
    journal.write_text("garbage\n" + whole[0])
    (damaged,) = earlier_runs()
    assert damaged.status == "damaged"
    assert "line 1" in damaged.error
    journal.rename(journal.with_name("mine.jsonl")).write_text("".join(whole))
    assert [(r.started, r.status) for r in earlier_runs()] == [("", "finished")]


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--last", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    assert main(["runs", str(tmp_path / "empty")]) == 2
    assert "holds no event" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
