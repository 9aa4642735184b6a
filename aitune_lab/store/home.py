"""Where aitune_lab keeps things on this machine: one folder, private to its owner."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from ..errors import StoreError

VARIABLE = "AITUNE_LAB_CACHE_DIR"


def cache_dir() -> Path:
    """The cache folder's path, whether it exists or not.

    `AITUNE_LAB_CACHE_DIR` if set; else `aitune-lab` in the user's cache folder: `$XDG_CACHE_HOME` or `~/.cache`,
    on macOS `~/Library/Caches`, on Windows `%LOCALAPPDATA%`.

    Raises StoreError if neither the variable nor a home folder is there.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    try:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise StoreError(f"no home folder to keep the cache in ({error}): set {VARIABLE} to a folder") from None
    return base / "aitune-lab"


def home() -> Path:
    """The cache folder, made if missing, with access for its owner only (0700).

    Raises StoreError if it can't be made, isn't writable, or belongs to another user.
    """
    return private(cache_dir())


def private(folder: Path) -> Path:
    """The folder, made if missing, with access for its owner only. Raises StoreError as `home` does."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(folder)
        # Only writing shows whether one can write: modes say nothing on read-only mounts, or for root.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(
            f"cache folder {folder} is not usable: {reason}. Set {VARIABLE} to a writable folder"
        ) from None
    return folder


def _make_private(folder: Path) -> None:
    if os.name != "posix":
        return
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise StoreError(
            f"cache folder {folder} must belong to the user {os.getuid()}, but belongs to {found.st_uid}. "
            f"Set {VARIABLE} to a folder of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
