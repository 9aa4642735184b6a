"""The store: what earlier runs learnt and built on this machine, for any number of processes at once.

In its folder (`AITUNE_LAB_CACHE_DIR`, access for the owner only):

- `store.sqlite3`: records by content key (trials, second looks, end-to-end checks), the artifacts that are there, and
  what was started by which process;
- `artifacts/`: what backends built;
- `shared/`: caches of compilers, which find in it what they compiled before;
- `work/<process>-<random>/`: files of one running tuner, removed with it, or after its process died;
- `runs/`: the journal of every run.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .artifacts import Artifact, Artifacts
from .database import Attempt, Database
from .home import home, private
from .owner import Owner
from .runs import journals, new_journal

LIMIT_VARIABLE = "AITUNE_LAB_CACHE_SIZE_GB"
DEFAULT_LIMIT_GB = 10.0
_GRACE_SECONDS = 3600.0
"""What looks forgotten may just be in the making for this long."""


@dataclass(frozen=True)
class Usage:
    """What the store holds, in bytes and counts. `bytes` is everything together."""

    folder: str
    bytes: int
    limit_bytes: int
    artifacts: int
    artifact_bytes: int
    trials: int
    database_bytes: int
    runs: int
    run_bytes: int
    shared_bytes: int
    work_bytes: int


@dataclass(frozen=True)
class Item:
    """An artifact: of which candidate, its size, when it was last used (seconds since the epoch), whether it is just now."""

    key: str
    label: str
    bytes: int
    used: float
    in_use: bool


@dataclass(frozen=True)
class Collected:
    """What a collection removed. `kept_in_use` counts artifacts that were due, but are used by a live process."""

    artifacts: int
    cache_files: int
    runs: int
    records: int
    leftovers: int
    freed_bytes: int
    kept_in_use: int


def limit_bytes() -> int:
    """The size limit: `AITUNE_LAB_CACHE_SIZE_GB`, by default 10. Raises StoreError if it is no number of at least 0."""
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        size = float(text) if text else DEFAULT_LIMIT_GB
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise StoreError(f"{LIMIT_VARIABLE} must be a number of gigabytes of at least 0, but is {text!r}")
    return round(size * 1e9)


class Store:
    """The store in a folder; None takes the cache folder. Cheap to make; holds nothing open.

    Methods raise StoreError for what the disk can't do. Any thread and any process may call them.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = home() if folder is None else private(Path(folder).expanduser().absolute())
        self.database = Database(self.folder)
        self.artifacts = Artifacts(self.folder / "artifacts", self.database)

    # What was learnt

    def read(self, kind: str, key: str) -> Any:
        """What was learnt under a content key, as JSON data; None if nothing was."""
        return self.database.read(kind, key)

    def write(self, kind: str, key: str, data: Any) -> None:
        """Keep what was learnt; it is on disk when this returns."""
        self.database.write(kind, key, data)

    # What was started

    def begin(self, key: str, label: str) -> None:
        """Note that this process starts something that it might not survive."""
        self.database.begin(key, Owner.here(), label)

    def end(self, key: str) -> None:
        """Note that it did."""
        self.database.end(key, Owner.here())

    def abandoned(self, key: str) -> Attempt | None:
        """What a process that has died since had started under this key and never finished."""
        return self.database.abandoned(key)

    def forgive(self, key: str) -> None:
        """Forget that."""
        self.database.forgive(key)

    # What was built

    def new_work(self) -> Path:
        """A folder for the files of one running tuner. Others leave it alone while this process lives.

        Those of processes that died are removed.
        """
        self._sweep_work()
        folder = self.folder / "work" / f"{Owner.here()}-{secrets.token_hex(4)}"
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise StoreError(f"no folder can be made in {folder.parent}: {error.strerror or error}") from error
        return folder

    def put(self, key: str, source: Path, facts: Mapping[str, Any], work: Path) -> None:
        """Keep a folder's files as an artifact (see `Artifacts.put`), and hold the size limit."""
        self.artifacts.put(key, source, facts, work)
        if sum(row.bytes for row in self.database.artifacts()) + _size(self.folder / "shared") > limit_bytes():
            self.collect()

    def take(self, key: str, into: Path) -> Artifact | None:
        """Link an artifact's files, checked, into an empty folder of the caller's; None if there is none."""
        return self.artifacts.take(key, into)

    def drop(self, key: str) -> None:
        """Remove an artifact; processes that took it out keep theirs."""
        row = self.database.artifact(key)
        if row is not None:
            self.artifacts.remove(row)

    def shared(self) -> Path:
        """A folder for what builds share, such as compilers' caches. It counts, and goes when room is needed."""
        return private(self.folder / "shared")

    # The journals

    def new_journal(self) -> Path:
        """Where the journal of a run that starts now goes."""
        return new_journal(self.folder / "runs")

    def journals(self) -> list[Path]:
        """The journals of earlier runs, the latest first."""
        return journals(self.folder / "runs")

    # Space

    def usage(self) -> Usage:
        """What the store holds now."""
        rows, runs = self.database.artifacts(), self.journals()
        artifact_bytes, run_bytes = sum(row.bytes for row in rows), sum(map(_size, runs))
        database_bytes = self.database.size_bytes()
        shared_bytes, work_bytes = _size(self.folder / "shared"), _size(self.folder / "work")
        total = artifact_bytes + run_bytes + database_bytes + shared_bytes + work_bytes
        trials = self.database.count("trial")
        return Usage(
            str(self.folder),
            total,
            limit_bytes(),
            len(rows),
            artifact_bytes,
            trials,
            database_bytes,
            len(runs),
            run_bytes,
            shared_bytes,
            work_bytes,
        )

    def items(self) -> list[Item]:
        """The artifacts, the one used last first."""
        used = self._in_use()
        return [
            Item(row.key, str(self.artifacts.facts(row).get("label", "")), row.bytes, row.used, row.key in used)
            for row in reversed(self.database.artifacts())
        ]

    def collect(self, limit: int | None = None) -> Collected:
        """Remove what processes that died left behind, then what was unused for longest, until the limit holds.

        An artifact that a live process uses is never removed. Records go last: they are small, and save the most time.

        Args:
            limit: in bytes; None takes `limit_bytes()`.
        """
        limit = limit_bytes() if limit is None else limit
        before = self.usage().bytes
        leftovers = self._sweep()
        used = self._in_use()
        artifacts = runs = caches = kept = 0
        usage = self.usage()
        # Work folders hold links to artifacts: their own space can't be freed here.
        excess = usage.bytes - usage.work_bytes - limit
        for row in self.database.artifacts():
            if excess <= 0:
                break
            if row.key in used:
                kept += 1
            elif self.artifacts.remove(row, unless_used_since=row.used):
                artifacts += 1
                excess -= row.bytes
        if excess > 0 and not self._live():
            for file in _by_age(self.folder / "shared"):
                if excess <= 0:
                    break
                excess -= _size(file)
                file.unlink(missing_ok=True)
                caches += 1
        for journal in reversed(self.journals()):
            if excess <= 0:
                break
            size = _size(journal)
            if time.time() - journal.stat().st_mtime > _GRACE_SECONDS or limit == 0:
                journal.unlink(missing_ok=True)
                runs += 1
                excess -= size
        records = self.database.shrink(self.database.size_bytes() - excess) if excess > 0 else 0
        after = self.usage().bytes
        return Collected(artifacts, caches, runs, records, leftovers, max(0, before - after), kept)

    def _sweep(self) -> int:
        """Remove work folders of dead processes, and artifacts that were never made known."""
        count = self._sweep_work()
        for folder in list(self.artifacts.orphans(_GRACE_SECONDS)):
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
        return count

    def _sweep_work(self) -> int:
        count = 0
        with suppress(FileNotFoundError):
            for folder in (self.folder / "work").iterdir():
                owner = Owner.parse(folder.name)
                if owner is None or not owner.alive(folder.stat().st_mtime):
                    shutil.rmtree(folder, ignore_errors=True)
                    count += 1
        return count

    def _live(self) -> list[Path]:
        """The work folders of live processes (those of dead ones were swept)."""
        with suppress(FileNotFoundError):
            return [folder for folder in (self.folder / "work").iterdir() if folder.is_dir()]
        return []

    def _in_use(self) -> set[str]:
        """Keys of the artifacts that live processes have taken out or just built: their work folders hold folders of that
        name.
        """
        return {item.name for folder in self._live() for item in folder.iterdir()}


def _by_age(folder: Path) -> list[Path]:
    """All files in a folder, the oldest first."""
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return sorted(files, key=lambda file: file.stat().st_mtime)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what vanishes meanwhile counts nothing."""
    total = 0
    with suppress(FileNotFoundError):
        for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
            with suppress(FileNotFoundError):
                total += file.lstat().st_size if not file.is_dir() else 0
    return total
