"""How commands print, and where they may write."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import StoreError


def check_writable(path: str, what: str) -> None:
    """Raise StoreError, before anything takes time, if a file can't be written there."""
    folder = Path(path).absolute().parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(
            f"{what} {path!r} can't be written: {error.strerror or error} ({folder}). Name a file in another folder"
        ) from None
    if Path(path).is_dir():
        raise StoreError(f"{what} {path!r} is a folder: name a file")


def say(options: argparse.Namespace, data: Any, text: object) -> int:
    print_json(data) if options.json else print(text)
    return 0


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


def stdout_for(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """With `--json` everything else that is printed, by the user's code too, goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
