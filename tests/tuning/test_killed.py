"""kill -9 at random moments, and two processes at once: the store opens, what finished is reused, the choice is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aitune_lab.store.artifacts import MANIFEST, sha256_of
from aitune_lab.store.store import Store

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")


def go(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("killed_run.py")), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def check_whole(store: Store) -> None:
    """Every artifact that the store names is whole."""
    for row in store.database.artifacts():
        folder = store.folder / "artifacts" / row.folder
        assert sha256_of(folder / MANIFEST) == row.manifest
        for item in json.loads((folder / MANIFEST).read_text())["files"]:
            assert sha256_of(folder / "files" / item["name"]) == item["sha256"]


def outcome(told: dict[str, Any]) -> Any:
    return told["choice"], told["losers"], round(told["speedup"], 1)


def try_kills(tmp_path: Path, kills: int) -> None:
    told = go("kill", tmp_path, kills)
    undisturbed = told["undisturbed"]
    assert len(told["killed"]) == kills
    for run in told["killed"]:
        again = run["again"]
        assert run["told"] is None
        assert outcome(again) == outcome(undisturbed), run
        assert again["reused"] >= run["known"], run
        assert again["builds"] <= undisturbed["builds"] - run["known"], run
        store = Store(run["cache"])
        check_whole(store)
        store.collect()
        assert list((store.folder / "work").iterdir()) == []  # what the killed process left is swept
    assert any(run["known"] for run in told["killed"])


def test_killed_at_random_moments(tmp_path: Path) -> None:
    try_kills(tmp_path, 5)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    try_kills(tmp_path, 50)


def test_two_processes_tune_the_same_model_at_once(tmp_path: Path) -> None:
    told = go("both", tmp_path)
    first, second = told["told"]
    assert outcome(first) == outcome(second) == outcome(told["repeat"])
    assert (told["repeat"]["builds"], told["repeat"]["measurements"]) == (0, 0)
    store = Store(tmp_path)
    check_whole(store)
    assert len(list((store.folder / "artifacts").iterdir())) == len(store.database.artifacts()) == 3
