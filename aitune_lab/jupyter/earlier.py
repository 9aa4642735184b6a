"""The last run of a target in an earlier process, from its journal: its tables are there without building anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..capture.tree import find_modules
from ..errors import DataError
from ..store.home import home
from ..store.runs import journals
from ..tuning.session import SessionState, read_journal, replay

LOOKED_AT = 20
"""Journals that are looked into, the latest first."""


def earlier_run(target: Any, folder: Path | None = None) -> SessionState | None:
    """What the last finished run of a target of this structure came to; None if there is none.

    A journal is the target's if it names the same modules with the same classes and sizes. `folder` holds the
    journals; by default that of the store.
    """
    place = folder if folder is not None else home() / "runs"
    mine = _structure(target)
    for path in journals(place)[:LOOKED_AT]:
        try:
            state = replay(read_journal(path))
        except (DataError, OSError, ValueError):
            continue  # damaged, or gone meanwhile
        if state.status == "finished" and state.trials and _structure_of(state.rows) == mine:
            return state
    return None


def _structure(target: Any) -> set[tuple[str, str, int]]:
    return {
        (item.paths[0], type(item.module).__name__, sum(p.numel() for p in item.module.parameters()))
        for item in find_modules(target)
    }


def _structure_of(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, int]]:
    found = set()
    for row in rows:
        path, method = str(row.get("path", "")), str(row.get("method", "forward"))
        module = path if method == "forward" else path.removesuffix(method).rstrip(".")
        found.add((module, str(row.get("class_name", "")), int(row.get("parameters") or 0)))
    return found
