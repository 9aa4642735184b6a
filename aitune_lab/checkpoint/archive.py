"""The container of a `.ait` file: one zip, entries stored as they are, each named, sized and hashed by the manifest.

The file's digest is the SHA-256 of `manifest.json`. The manifest holds the SHA-256 of every entry, and nothing that it
doesn't name is ever read, so the digest covers everything that can have an effect.

Reading trusts nothing: names, counts and sizes are bounded before anything is read, and bytes are handed out only after
their hash was checked on the very bytes read. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..errors import CheckpointError
from ..schema import FORMAT_VERSION, Entry, Manifest, from_data, to_json

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
"""A detached Ed25519 signature of the manifest's bytes; the one entry that the manifest doesn't name."""

ALIGNMENT_BYTES = 64
MAX_ENTRIES = 10_000
MAX_MANIFEST_BYTES = 32 << 20
MAX_NAME_LENGTH = 400
_CHUNK_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_ID = 0xD935
"""The id of the extra field that Android's zipalign pads with; readers skip it."""

_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)

Source = Path | bytes


def name_problem(name: str) -> str | None:
    """Why a name can't be an entry's, or None: only relative paths that mean the same file on every system."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        return f"its length must be from 1 to {MAX_NAME_LENGTH}"
    if not name.isprintable() or any(c in '\\:*?"<>|' for c in name):
        return "it holds a character that file names can't hold everywhere"
    if name.startswith("/"):
        return "it is absolute"
    for part in name.split("/"):
        if part in ("", ".", "..") or part[-1] in " .":
            return "it holds an empty or relative step"
        if _RESERVED.fullmatch(part) or len(part.encode()) > 240:
            return "a step of it can't be a file name everywhere"
    return None


def hash_of(source: Source) -> tuple[int, str]:
    """Size in bytes and SHA-256 (hex) of a file or of bytes."""
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(source):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def _chunks(source: Source) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


# --- writing ------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, *, overwrite: bool = True) -> Iterator[IO[bytes]]:
    """A stream whose content takes the path's place when the block ends well, flushed to the disk, in one step.

    Whatever goes wrong, the path is as it was and no other file is left. The temporary file is made at once, in the
    same folder, so that a folder that can't be written shows before any work is done.

    Raises CheckpointError if the folder is missing or not writable, or the path exists and `overwrite` is off.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} must be a file, but a folder is there")
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists already: choose another name, or pass overwrite=True")
    scratch = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        # Opened this way the file gets the permissions that the user's umask gives any new file.
        stream = scratch.open("xb")
    except OSError as error:
        raise CheckpointError(f"cannot write into folder {path.parent}: {error.strerror or error}") from None
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Make the renaming itself survive a power cut, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems can't
        pass
    finally:
        os.close(handle)


def write_archive(
    stream: IO[bytes], manifest: Manifest, sources: Mapping[str, Source], signature: bytes | None = None
) -> str:
    """Write the whole archive and give its digest, `sha256:…`.

    Args:
        stream: seekable, empty.
        manifest: its `entries` name every source with size and hash; `signature` signs `manifest_bytes(manifest)`.
        sources: the content of each entry.

    Raises CheckpointError if a source is no longer what its entry says.
    """
    text = manifest_bytes(manifest)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, MANIFEST, text, len(text), None)
        if signature is not None:
            _add(archive, SIGNATURE, signature, len(signature), None)
        for entry in manifest.entries:
            _add(archive, entry.name, sources[entry.name], entry.size_bytes, entry.sha256)
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def manifest_bytes(manifest: Manifest) -> bytes:
    return to_json(manifest, indent=1).encode()


def _add(archive: zipfile.ZipFile, name: str, source: Source, size: int, expected: str | None) -> None:
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.file_size = size
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    large = size * 1.05 > zipfile.ZIP64_LIMIT
    assert archive.fp is not None
    header = _LOCAL_HEADER_BYTES + len(name.encode()) + (_ZIP64_EXTRA_BYTES if large else 0)
    padding = -(archive.fp.tell() + header + 4) % ALIGNMENT_BYTES
    info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    digest, written = hashlib.sha256(), 0
    with archive.open(info, "w", force_zip64=large) as target:
        for chunk in _chunks(source):
            target.write(chunk)
            digest.update(chunk)
            written += len(chunk)
    if written != size or (expected is not None and digest.hexdigest() != expected):
        raise CheckpointError(f"the content of {name} changed while it was being saved: save again")


# --- reading ------------------------------------------------------------------------------------------------------


class Archive:
    """An open `.ait` file whose manifest has been read and whose layout has been checked. Use as a context manager.

    Attributes:
        manifest: what the file says about itself; not trusted beyond its form.
        digest: `sha256:…` of the manifest's bytes, so of everything.
        signature: the signature entry's bytes, if there is one.

    Raises CheckpointError for a file that is missing, damaged, of a newer format, or not as this library writes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._stream = self.path.open("rb")
        except OSError as error:
            raise CheckpointError(f"cannot open {self.path}: {error.strerror or error}") from None
        try:
            self.size_bytes = os.fstat(self._stream.fileno()).st_size
            self._infos = self._checked_layout()
            self.manifest_bytes = self._read(MANIFEST, MAX_MANIFEST_BYTES)
            self.digest = f"sha256:{hashlib.sha256(self.manifest_bytes).hexdigest()}"
            self.signature = self._read(SIGNATURE, 64) if SIGNATURE in self._infos else None
            self.manifest = self._parsed()
            self.entries = {entry.name: entry for entry in self.manifest.entries}
            self._check_entries()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, name: str) -> bytes:
        """An entry's bytes, after their hash was checked."""
        return b"".join(self._verified(name))

    def extract(self, name: str, target: Path) -> None:
        """Write an entry to a new file. On a wrong hash it raises and the file must not be used."""
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with target.open("xb") as stream:
            for chunk in self._verified(name):
                stream.write(chunk)

    def verify(self, name: str) -> None:
        """Read an entry through. Raises CheckpointError if it is damaged."""
        for _ in self._verified(name):
            pass

    def _verified(self, name: str) -> Iterator[bytes]:
        entry = self.entries[name]
        digest = hashlib.sha256()
        for chunk in self._stored(name):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != entry.sha256:
            raise self._damaged(f"the content of {name} does not have the hash that the manifest gives")

    def _stored(self, name: str) -> Iterator[bytes]:
        try:
            with self._zip.open(self._infos[name]) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    yield chunk
        except Exception as error:  # zipfile raises many kinds for a damaged file
            raise self._damaged(f"{name} cannot be read ({error})") from None

    def _read(self, name: str, limit: int) -> bytes:
        if name not in self._infos:
            raise self._damaged(f"it holds no {name}; not a file saved by aitune_lab?")
        if self._infos[name].file_size > limit:
            raise self._damaged(f"{name} must be at most {limit} bytes, but has {self._infos[name].file_size}")
        return b"".join(self._stored(name))

    def _checked_layout(self) -> dict[str, zipfile.ZipInfo]:
        """Entries by name, none of which is compressed, overlaps another, or has a dangerous name."""
        try:
            self._zip = zipfile.ZipFile(self._stream)
        except Exception as error:
            raise self._damaged(f"it is no complete zip file ({error})") from None
        infos = self._zip.infolist()
        if len(infos) > MAX_ENTRIES:
            raise self._damaged(f"it must hold at most {MAX_ENTRIES} entries, but has {len(infos)}")
        end = 0
        known: set[str] = set()
        for info in sorted(infos, key=lambda i: i.header_offset):
            problem = name_problem(info.filename) or _info_problem(info)
            if problem is None and info.filename.casefold() in known:
                problem = "it stands there twice"
            if problem is None and info.header_offset < end:
                problem = "it overlaps another entry"
            if problem is not None:
                raise self._damaged(f"entry {info.filename[:MAX_NAME_LENGTH]!r} is not allowed: {problem}")
            known.add(info.filename.casefold())
            end = info.header_offset + _LOCAL_HEADER_BYTES + len(info.filename) + info.file_size
        if end > self._zip.start_dir:
            raise self._damaged("its entries are larger than the file")
        return {info.filename: info for info in infos}

    def _parsed(self) -> Manifest:
        try:
            data: Any = json.loads(self.manifest_bytes)
            version = data.get("format_version") if isinstance(data, dict) else None
            if type(version) is int and version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{self.path} has format version {version}, written by aitune_lab {data.get('aitune_lab')!r}; "
                    f"this aitune_lab reads up to {FORMAT_VERSION}. Upgrade it: pip install --upgrade aitune-lab"
                )
            return from_data(data, Manifest)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"{MANIFEST}: {error}") from None

    def _check_entries(self) -> None:
        """The manifest's entries and the archive's are the same, and choices name none but those."""
        entries = self.manifest.entries
        if len(self.entries) != len(entries):
            raise self._damaged("the manifest names an entry twice")
        present = self._infos.keys() - {MANIFEST, SIGNATURE}
        if present != self.entries.keys():
            names = sorted(present ^ self.entries.keys())
            raise self._damaged(f"manifest and archive must hold the same entries, but differ in {names[:5]}")
        for entry in entries:
            if entry.size_bytes != self._infos[entry.name].file_size:
                raise self._damaged(
                    f"{entry.name} must have {entry.size_bytes} bytes, but has {self._infos[entry.name].file_size}"
                )
        for saved in self.manifest.choices:
            unknown = {*saved.artifact, *saved.golden} - self.entries.keys()
            if unknown:
                raise self._damaged(
                    f"choice for {saved.choice.path!r} names entries that aren't there: {sorted(unknown)[:5]}"
                )
            stray = [name for name in saved.artifact if not PurePosixPath(name).is_relative_to(saved.folder or ".")]
            if stray:
                raise self._damaged(f"choice for {saved.choice.path!r} has files outside its folder: {stray[:5]}")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or was not written by aitune_lab: {what}")


def _info_problem(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if info.is_dir() or kind not in (0, stat.S_IFREG):
        return "it is not a plain file"
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        return "it is compressed"
    return "it is encrypted" if info.flag_bits & 0x1 else None


def entries_of(sources: Mapping[str, Source], code: Sequence[str]) -> tuple[Entry, ...]:
    """The manifest's entries for the sources, hashed. Raises CheckpointError for a name that couldn't be read back."""
    found = []
    for name, source in sources.items():
        problem = name_problem(name)
        if problem is not None:
            raise CheckpointError(f"the artifact's file {name!r} cannot be saved under that name: {problem}")
        size, sha256 = hash_of(source)
        found.append(Entry(name, size, sha256, name in code))
    return tuple(found)
