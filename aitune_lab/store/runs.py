"""The journals of runs: where a new one goes, and which there are."""

from __future__ import annotations

import itertools
import os
from datetime import datetime, timezone
from pathlib import Path

_numbers = itertools.count()


def new_journal(folder: Path) -> Path:
    """A path for the journal of a run that starts now; names sort by time. The folder is made if missing."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    return folder / f"{stamp}-{os.getpid()}-{next(_numbers)}.jsonl"


def journals(folder: Path) -> list[Path]:
    """All journals, the latest first."""
    return sorted(folder.glob("*.jsonl"), reverse=True) if folder.is_dir() else []
