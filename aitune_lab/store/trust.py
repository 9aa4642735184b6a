"""The `.ait` files that this machine saved itself, by digest: those are trusted when loaded here again."""

from __future__ import annotations

import os
import re
import stat

from ..errors import StoreError
from .home import cache_dir, home

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = "trusted-digests.txt"
# Windows has no symbolic links to follow by accident here, and no such flag.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def check_digest(text: str) -> str:
    """The digest as it stands in the store. Raises ValueError for anything but `sha256:` and 64 hex digits."""
    digest = text.strip().lower()
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"a digest must read 'sha256:' and 64 hex digits, but got {text!r}")
    return digest


def add(digest: str) -> None:
    """Trust files of this digest on this machine from now on.

    Safe with several processes: each appends its line by a single write. Raises StoreError if the store can't be
    written, ValueError for a malformed digest.
    """
    line = check_digest(digest)
    path = home() / _NAME
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o600)
        try:
            # The newline before parts it from a line that a crashed process left unfinished.
            os.write(file, f"\n{line}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(f"cannot note a trusted digest in {path}: {error.strerror or error}") from None


def trusted() -> frozenset[str]:
    """All digests noted. A store that others could have written to counts as empty; nothing is created."""
    path = cache_dir() / _NAME
    try:
        file = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return frozenset()
    with os.fdopen(file, "rb") as stream:
        if not _private(path.parent.stat()) or not _private(os.fstat(stream.fileno())):
            return frozenset()
        lines = stream.read().decode("ascii", "replace").split("\n")
    return frozenset(line for line in lines if _DIGEST.fullmatch(line))


def is_trusted(digest: str) -> bool:
    """Whether this machine saved the file of this digest."""
    return digest in trusted()


def _private(found: os.stat_result) -> bool:
    return os.name != "posix" or (found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022)
