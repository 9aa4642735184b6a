"""`aitune-lab cache`: what is listed, what is removed; and `tune --retry`, `--store`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitune_lab.cli import main, make_parser
from aitune_lab.store.store import Store


def artifact(store: Store, key: str, label: str) -> None:
    work = store.new_work()
    (work / key).mkdir()
    (work / key / "model").write_bytes(bytes(2000))
    store.put(key, work / key, {"label": label}, work)
    (work / key / "model").unlink()
    (work / key).rmdir()
    work.rmdir()


def test_path_is_the_cache_folder_and_makes_nothing(fresh_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{fresh_cache}\n"
    assert main(["cache", "path", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(fresh_cache)}
    assert not fresh_cache.exists()


def test_ls_lists_artifacts_the_last_used_first(fresh_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    artifact(store, "a", "onnxruntime")
    artifact(store, "b", "inductor[freezing]")
    assert main(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"of at most 9.3 GiB in {fresh_cache}")
    assert [line.split()[0] for line in lines[-2:]] == ["inductor[freezing]", "onnxruntime"]
    assert main(["cache", "ls", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [item["label"] for item in told["items"]] == ["inductor[freezing]", "onnxruntime"]
    assert told["artifacts"] == 2


def test_gc_makes_room(capsys: pytest.CaptureFixture[str]) -> None:
    artifact(Store(), "a", "onnxruntime")
    assert main(["cache", "gc"]) == 0
    assert capsys.readouterr().out.startswith("removed nothing")
    assert main(["cache", "gc", "--limit", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["artifacts"] == 1
    assert told["freed_bytes"] >= 2000
    assert main(["cache", "gc", "--limit", "-1"]) == 2
    assert "at least 0" in capsys.readouterr().err


def test_tune_takes_a_store_and_retry() -> None:
    options = make_parser().parse_args(["tune", "x:y", "--store", "off", "--retry", "--memory-limit", "2"])
    assert (options.store, options.retry, options.memory_limit) == ("off", True, 2.0)
    assert make_parser().parse_args(["tune", "x:y"]).store == "auto"
