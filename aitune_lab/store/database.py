"""The store's database: what was learnt, by content key; which artifacts are there; what was started and by whom."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .owner import Owner

FILE = "store.sqlite3"
SCHEMA_VERSION = 1
BUSY_SECONDS = 60.0
"""How long a transaction waits for those of other processes, which take milliseconds."""
TOUCH_SECONDS = 3600.0
"""Reading a record notes its use only if the last note is older than this."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, key TEXT NOT NULL, data TEXT NOT NULL, used REAL NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS artifacts (
    key TEXT PRIMARY KEY, folder TEXT NOT NULL, manifest TEXT NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS attempts (
    key TEXT NOT NULL, owner TEXT NOT NULL, label TEXT NOT NULL, since REAL NOT NULL, PRIMARY KEY (key, owner)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class ArtifactRow:
    """Where an artifact lies: a folder's name, the digest of its manifest, its size, when it was last used."""

    key: str
    folder: str
    manifest: str
    bytes: int
    used: float


@dataclass(frozen=True)
class Attempt:
    """Something that was started and not finished: what, by which process, when (seconds since the epoch)."""

    key: str
    owner: Owner
    label: str
    since: float


class Database:
    """One SQLite file. Safe for any number of threads and processes, also across a fork.

    Every method is one short transaction on a connection of its own, so nothing is held in between; what a method
    wrote is on disk when it returns. Raises StoreError, which names the file, for whatever SQLite can't do.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        with self._transaction() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"the store {self.path} has version {version}, and only {SCHEMA_VERSION} is known here: install a newer "
                    "aitune_lab, or set AITUNE_LAB_CACHE_DIR to another folder"
                )
            if version < SCHEMA_VERSION:
                for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self, *, reading: bool = False) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                # Where the file system can't share memory between processes, SQLite keeps its older journal: slower, as safe.
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                # A write lock is taken at once: one taken at the first write could fail without waiting.
                db.execute("BEGIN" if reading else "BEGIN IMMEDIATE")
                try:
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
            finally:
                db.close()
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"the store {self.path} can't be used: {error}. Free disk space if there is none left; if the file is "
                "damaged, remove it (only time is lost), or set AITUNE_LAB_CACHE_DIR to another folder"
            ) from error

    def read(self, kind: str, key: str) -> Any:
        """The data of a record, None if there is none."""
        with self._transaction(reading=True) as db:
            row = db.execute("SELECT data, used FROM records WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        if row is None:
            return None
        if time.time() - row[1] > TOUCH_SECONDS:
            with self._transaction() as db:
                db.execute("UPDATE records SET used = ? WHERE kind = ? AND key = ?", (time.time(), kind, key))
        return json.loads(row[0])

    def write(self, kind: str, key: str, data: Any) -> None:
        """Keep JSON data as a record, in place of an earlier one."""
        text = json.dumps(data, allow_nan=False, ensure_ascii=False)
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", (kind, key, text, time.time()))

    def count(self, kind: str) -> int:
        """How many records of a kind there are."""
        with self._transaction(reading=True) as db:
            return int(db.execute("SELECT count(*) FROM records WHERE kind = ?", (kind,)).fetchone()[0])

    def shrink(self, limit_bytes: int) -> int:
        """Drop the records that were not used for longest until the file fits; gives how many were dropped."""
        dropped = 0
        while self.size_bytes() > limit_bytes:
            with self._transaction() as db:
                total = int(db.execute("SELECT count(*) FROM records").fetchone()[0])
                if not total:
                    break
                oldest = "SELECT used FROM records ORDER BY used LIMIT 1 OFFSET ?"
                (until,) = db.execute(oldest, ((total - 1) // 2,)).fetchone()
                dropped += db.execute("DELETE FROM records WHERE used <= ?", (until,)).rowcount
            self._vacuum()
        return dropped

    def _vacuum(self) -> None:
        try:
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                db.execute("VACUUM")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                db.close()
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the store {self.path} can't be made smaller: {error}") from error

    def size_bytes(self) -> int:
        """Size of the file with what SQLite keeps beside it."""
        files = (self.path.with_name(self.path.name + end) for end in ("", "-wal", "-shm"))
        return sum(file.stat().st_size for file in files if file.exists())

    def artifact(self, key: str) -> ArtifactRow | None:
        """The artifact of a key, marked as used now; None if there is none."""
        with self._transaction() as db:
            db.execute("UPDATE artifacts SET used = ? WHERE key = ?", (time.time(), key))
            row = db.execute("SELECT * FROM artifacts WHERE key = ?", (key,)).fetchone()
        return ArtifactRow(*row) if row is not None else None

    def artifacts(self) -> list[ArtifactRow]:
        """All artifacts, those unused for longest first."""
        with self._transaction(reading=True) as db:
            return [ArtifactRow(*row) for row in db.execute("SELECT * FROM artifacts ORDER BY used")]

    def add_artifact(self, row: ArtifactRow) -> bool:
        """Make an artifact known. False if another process was quicker: then that one's counts."""
        with self._transaction() as db:
            values = (row.key, row.folder, row.manifest, row.bytes, row.used)
            return db.execute("INSERT OR IGNORE INTO artifacts VALUES (?, ?, ?, ?, ?)", values).rowcount == 1

    def remove_artifact(self, row: ArtifactRow, *, unless_used_since: float | None = None) -> bool:
        """Forget an artifact. False if it is gone already, or was used after the given time."""
        with self._transaction() as db:
            statement, values = "DELETE FROM artifacts WHERE key = ? AND folder = ?", [row.key, row.folder]
            if unless_used_since is None:
                return db.execute(statement, values).rowcount == 1
            return db.execute(f"{statement} AND used <= ?", [*values, unless_used_since]).rowcount == 1

    def begin(self, key: str, owner: Owner, label: str) -> None:
        """Note that a process has started something that it might not survive."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?)", (key, str(owner), label, time.time()))

    def end(self, key: str, owner: Owner) -> None:
        """Note that the process has survived it."""
        with self._transaction() as db:
            db.execute("DELETE FROM attempts WHERE key = ? AND owner = ?", (key, str(owner)))

    def abandoned(self, key: str) -> Attempt | None:
        """The latest attempt whose process died before its end, None if there is none."""
        with self._transaction(reading=True) as db:
            rows = db.execute("SELECT * FROM attempts WHERE key = ? ORDER BY since DESC", (key,)).fetchall()
        return next((a for a in map(_attempt, rows) if a is not None and not a.owner.alive(a.since)), None)

    def forgive(self, key: str) -> None:
        """Forget the attempts of processes that died."""
        with self._transaction() as db:
            for row in db.execute("SELECT * FROM attempts WHERE key = ?", (key,)).fetchall():
                attempt = _attempt(row)
                if attempt is None or not attempt.owner.alive(attempt.since):
                    db.execute("DELETE FROM attempts WHERE key = ? AND owner = ?", (key, row[1]))


def _attempt(row: tuple[str, str, str, float]) -> Attempt | None:
    owner = Owner.parse(row[1])
    return Attempt(row[0], owner, row[2], row[3]) if owner is not None else None
