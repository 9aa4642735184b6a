"""The store as runs use it: records, artifacts, attempts, space; with other processes, live and dead."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aitune_lab.errors import StoreError
from aitune_lab.store.artifacts import MANIFEST
from aitune_lab.store.database import FILE, SCHEMA_VERSION
from aitune_lab.store.owner import Owner
from aitune_lab.store.store import LIMIT_VARIABLE, Store, limit_bytes


def fill(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def put(store: Store, key: str, size: int = 10) -> Path:
    """Keep an artifact of `size` bytes, from a work folder whose owner no longer needs it."""
    work = store.new_work()
    store.put(key, fill(work / key, model="x" * size), {"made": key}, work)
    return work


def done(work: Path) -> None:
    for path in sorted(work.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    work.rmdir()


@contextmanager
def other_process(store: Store, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has run code on the same store and waits; killed at the end."""
    program = "from aitune_lab.store.store import Store\nstore = Store({!r})\n{}\nprint('ready', flush=True)\ninput()\n"
    text = program.format(str(store.folder), textwrap.dedent(code))
    child = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_records_are_there_in_another_store_object_and_are_replaced(tmp_path: Path) -> None:
    Store(tmp_path).write("trial", "k", {"latency": [1.5, "inf"]})
    store = Store(tmp_path)
    assert store.read("trial", "k") == {"latency": [1.5, "inf"]}
    assert store.read("look", "k") is None
    store.write("trial", "k", 2)
    assert store.read("trial", "k") == 2
    assert store.usage().trials == 1


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_nobody_else_can_look_in(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    store = Store(folder)
    work = put(store, "a")
    for path in (folder, work, folder / "artifacts", folder / "work"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_an_artifact_comes_back_checked_with_its_facts(tmp_path: Path) -> None:
    store, into = Store(tmp_path / "cache"), tmp_path / "into"
    work, into = store.new_work(), fill(tmp_path / "into")
    into.mkdir()
    store.put("a", fill(work / "a", **{"model": "weights", "sub/code.so": "native"}), {"recompiles": False}, work)
    artifact = store.take("a", into)
    assert artifact is not None
    assert artifact.facts == {"recompiles": False}
    assert (into / "sub/code.so").read_text() == "native"
    assert sorted(p.name for p in into.iterdir()) == ["model", "sub"]
    assert store.take("b", into) is None


@pytest.mark.parametrize("damage", ["content", "missing", "manifest", "outside"])
def test_a_damaged_artifact_counts_as_none_and_is_removed(tmp_path: Path, damage: str) -> None:
    store, into = Store(tmp_path / "cache"), tmp_path / "into"
    into.mkdir()
    work = put(store, "a")
    done(work)
    (folder,) = (store.folder / "artifacts").iterdir()
    if damage == "content":
        (folder / "files/model").write_text("y" * 10)
    elif damage == "missing":
        (folder / "files/model").unlink()
    else:
        text = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(text.replace('"model"', '"../model"' if damage == "outside" else '"model2"'))
    assert store.take("a", into) is None
    assert list(into.iterdir()) == []
    assert store.database.artifacts() == []
    assert not folder.exists()
    put(store, "a")
    assert store.take("a", into) is not None


def test_the_first_to_keep_an_artifact_wins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, "a", 10)
    put(store, "a", 20)
    assert len(list((tmp_path / "artifacts").iterdir())) == 1
    (row,) = store.database.artifacts()
    assert (tmp_path / "artifacts" / row.folder / "files/model").stat().st_size == 10


def test_links_in_an_artifact_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    work = store.new_work()
    (work / "a").mkdir()
    (work / "a/link").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="links"):
        store.put("a", work / "a", {}, work)


def test_collecting_removes_what_was_unused_for_longest(tmp_path: Path) -> None:
    store, into = Store(tmp_path / "cache"), tmp_path / "into"
    into.mkdir()
    for key in "abc":
        done(put(store, key, 50_000))
    assert store.take("a", into) is not None  # so b is the oldest
    usage = store.usage()
    collected = store.collect(usage.bytes - 10_000)
    assert (collected.artifacts, collected.kept_in_use) == (1, 0)
    assert {row.key for row in store.database.artifacts()} == {"a", "c"}
    assert collected.freed_bytes >= 50_000
    assert store.usage().bytes < usage.bytes - 10_000


def test_what_a_live_process_uses_is_never_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    done(put(store, "a", 1000))
    taken = "work = store.new_work(); (work / 'a').mkdir(); assert store.take('a', work / 'a')"
    with other_process(store, taken):
        assert store.collect(0).kept_in_use == 1
        assert [row.key for row in store.database.artifacts()] == ["a"]
    assert store.collect(0).artifacts == 1
    assert store.database.artifacts() == []
    assert list((tmp_path / "work").iterdir()) == []


def test_putting_holds_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.0002")
    store = Store(tmp_path)
    for key in "abcde":
        done(put(store, key, 60_000))
    kept = {row.key for row in store.database.artifacts()}
    assert "e" in kept
    assert "a" not in kept


@pytest.mark.parametrize("text", ["ten", "-1", "inf", "nan"])
def test_a_limit_must_be_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(StoreError, match=LIMIT_VARIABLE):
        limit_bytes()


def test_collecting_with_no_room_drops_records_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(200):
        store.write("trial", str(number), "x" * 2000)
    assert store.collect(100_000).records > 0
    assert store.usage().bytes <= 100_000
    assert store.read("trial", "199") is not None


def test_what_a_dead_process_started_is_known_and_can_be_forgiven(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin("mine", "inductor")
    with other_process(store, "store.begin('k', 'onnxruntime')") as child:
        assert store.abandoned("k") is None
        child.send_signal(signal.SIGKILL)
        child.wait()
        attempt = store.abandoned("k")
        assert attempt is not None
        assert attempt.owner.pid == child.pid
        assert attempt.label == "onnxruntime"
    store.forgive("k")
    assert store.abandoned("k") is None
    assert store.abandoned("mine") is None
    with other_process(store, "store.begin('k', 'onnxruntime'); store.end('k')"):
        pass
    assert store.abandoned("k") is None


def test_an_owner_is_told_from_a_later_process_of_its_id() -> None:
    here = Owner.here()
    assert here.alive(0.0)
    assert Owner.parse(f"{here}-1a2b") == here
    assert not Owner(here.node, here.pid, here.started - 60_000).alive(0.0)
    assert not Owner("elsewhere", 1, 1).alive(0.0)
    assert Owner.parse("artifacts") is None


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    half = "work = store.new_work(); (work / 'a').mkdir(); (work / 'a/model').write_text('half')"
    with other_process(store, half):
        assert store.collect().leftovers == 0
    assert store.collect().leftovers == 1
    orphan = fill(tmp_path / "artifacts" / "b-12345678", model="x")
    assert store.collect().leftovers == 0  # it may be in the making
    os.utime(orphan, (1, 1))
    assert store.collect().leftovers == 1
    assert not orphan.exists()


def test_processes_write_at_the_same_time(tmp_path: Path) -> None:
    code = f"""
    from pathlib import Path
    from aitune_lab.store.store import Store
    import sys
    store = Store({str(tmp_path)!r})
    for number in range(20):
        store.write("trial", f"{{sys.argv[1]}}-{{number}}", number)
        work = store.new_work()
        (work / "k").mkdir()
        (work / "k/model").write_text("same")
        store.put(f"k{{number}}", work / "k", {{}}, work)
    """
    commands = [[sys.executable, "-c", textwrap.dedent(code), str(i)] for i in range(3)]
    children = [subprocess.Popen(command) for command in commands]
    assert [child.wait() for child in children] == [0, 0, 0]
    store = Store(tmp_path)
    assert store.usage().trials == 60
    rows = store.database.artifacts()
    assert len(rows) == 20
    assert {row.folder for row in rows} == {folder.name for folder in (tmp_path / "artifacts").iterdir()}


def test_a_newer_store_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path)
    db = sqlite3.connect(tmp_path / FILE)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(StoreError, match="newer aitune_lab"):
        Store(tmp_path)


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"store\.sqlite3.*remove it"):
        Store(tmp_path)


def test_journals_are_listed_latest_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = store.new_journal(), store.new_journal()
    assert first != second
    for path in (first, second):
        path.write_text("{}\n")
    assert store.journals() == [second, first]
    assert store.usage().runs == 2
    assert store.collect(0).runs == 2
