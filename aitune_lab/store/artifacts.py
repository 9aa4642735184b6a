"""Artifacts on disk: written under a name that nobody knows, made known when whole, checked each time they are used.

An artifact is a folder `artifacts/<key>-<random>` with `files/` and `manifest.json`, which names each file with its size
and SHA-256. It counts only once the database names it with its manifest's digest, so no half artifact is ever seen.
Who uses one gets links to its files in a folder of its own: nothing that happens to the store can take them away.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import StoreError
from .database import ArtifactRow, Database

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """An artifact that was taken out: what was noted when it was put in (JSON values), and its size."""

    facts: Mapping[str, Any]
    bytes: int


class Artifacts:
    """The artifacts under one folder. Safe for any number of processes."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self._database = database

    def put(self, key: str, source: Path, facts: Mapping[str, Any], work: Path) -> None:
        """Keep the files in a folder as the artifact of a key; the first to come stays.

        Args:
            key: content key, of letters, digits and dashes.
            source: holds the files; they stay where they are, and must not be changed in place afterwards.
            facts: JSON values to be had back with the artifact.
            work: a folder on the store's own file system to gather them in.

        Raises:
            StoreError: links among the files, or what the file system can't do.
        """
        name = f"{key}-{secrets.token_hex(4)}"
        gathered, final = work / name, self.folder / name
        try:
            total, described = 0, []
            (gathered / "files").mkdir(parents=True)
            for file in _files(source):
                relative = file.relative_to(source).as_posix()
                copy = gathered / "files" / relative
                copy.parent.mkdir(parents=True, exist_ok=True)
                _link(file, copy)
                size, digest = copy.stat().st_size, sha256_of(copy)
                described.append({"name": relative, "bytes": size, "sha256": digest})
                total += size
            manifest = json.dumps({"files": described, "facts": dict(facts)}, allow_nan=False).encode()
            (gathered / MANIFEST).write_bytes(manifest)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            gathered.replace(final)
            row = ArtifactRow(key, name, hashlib.sha256(manifest).hexdigest(), total + len(manifest), time.time())
            if not self._database.add_artifact(row):
                shutil.rmtree(final, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(gathered, ignore_errors=True)
            raise StoreError(
                f"the artifact {key} can't be kept in {self.folder}: {error.strerror or error}. Free disk space, or set "
                "AITUNE_LAB_CACHE_DIR to another folder"
            ) from error

    def take(self, key: str, into: Path) -> Artifact | None:
        """Link an artifact's files into an empty folder of the caller's, each checked against its digest.

        None if there is none. One that is damaged is removed and counts as none.
        """
        row = self._database.artifact(key)
        if row is None:
            return None
        try:
            artifact = self._checked(row, into)
        except (OSError, ValueError, KeyError, TypeError):
            artifact = None
        if artifact is None:
            for item in into.iterdir():
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
            self.remove(row)
        return artifact

    def _checked(self, row: ArtifactRow, into: Path) -> Artifact | None:
        source = self.folder / row.folder
        manifest = (source / MANIFEST).read_bytes()
        if hashlib.sha256(manifest).hexdigest() != row.manifest:
            return None
        described = json.loads(manifest)
        for item in described["files"]:
            name = PurePosixPath(item["name"])
            if name.is_absolute() or ".." in name.parts:
                return None
            copy = into / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link(source / "files" / name, copy)
            if copy.is_symlink() or copy.stat().st_size != item["bytes"] or sha256_of(copy) != item["sha256"]:
                return None
        return Artifact(described["facts"], row.bytes)

    def facts(self, row: ArtifactRow) -> Mapping[str, Any]:
        """What was noted with an artifact; nothing if it is damaged."""
        try:
            facts: Mapping[str, Any] = json.loads((self.folder / row.folder / MANIFEST).read_bytes())["facts"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return facts

    def remove(self, row: ArtifactRow, *, unless_used_since: float | None = None) -> bool:
        """Forget an artifact, then delete its files; processes that took it out keep theirs. False if it was kept."""
        if not self._database.remove_artifact(row, unless_used_since=unless_used_since):
            return False
        shutil.rmtree(self.folder / row.folder, ignore_errors=True)
        return True

    def orphans(self, older_than_seconds: float) -> Iterator[Path]:
        """Folders that the database doesn't name: of a process that died while putting or removing one."""
        known = {row.folder for row in self._database.artifacts()}
        with suppress(FileNotFoundError):
            for folder in self.folder.iterdir():
                with suppress(FileNotFoundError):
                    if folder.name not in known and time.time() - folder.stat().st_mtime > older_than_seconds:
                        yield folder


def sha256_of(file: Path) -> str:
    """Digest of a file's content, in hex."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise StoreError(f"an artifact must not hold links, but {path} is one")
        if path.is_file():
            yield path


def _link(source: Path, copy: Path) -> None:
    """A second name for a file, which takes no space; a copy where the file system has no such names."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copyfile(source, copy, follow_symlinks=False)
