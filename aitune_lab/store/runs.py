"""The journals of runs: where a new one goes, which there are, and what their names say."""

from __future__ import annotations

import itertools
import os
from datetime import datetime, timezone
from pathlib import Path

import psutil

_numbers = itertools.count()
_STAMP = "%Y%m%dT%H%M%S.%fZ"


def new_journal(folder: Path) -> Path:
    """A path for the journal of a run that starts now; names sort by time. The folder is made if missing."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime(_STAMP)
    return folder / f"{stamp}-{os.getpid()}-{next(_numbers)}.jsonl"


def journals(folder: Path) -> list[Path]:
    """All journals, the latest first."""
    return sorted(folder.glob("*.jsonl"), reverse=True) if folder.is_dir() else []


def started_at(journal: Path) -> datetime | None:
    """When a journal's run started, UTC; None if its name doesn't say."""
    try:
        return datetime.strptime(journal.stem.partition("-")[0], _STAMP).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def process_lives(journal: Path) -> bool:
    """Whether the process that wrote a journal still runs. One of the same id that started later is another."""
    started, pid = started_at(journal), journal.stem.split("-")[1:2]
    if started is None or not pid or not pid[0].isdigit():
        return False
    try:
        process = psutil.Process(int(pid[0]))
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= started.timestamp() + 2
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
