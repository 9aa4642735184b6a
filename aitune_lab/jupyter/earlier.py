"""The last run of a target in an earlier process, from its journal: its tables are there without building anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..capture.tree import find_modules
from ..errors import DataError
from ..store.store import Store
from ..tuning.session import SessionState, read_journal, replay

LOOKED_AT = 20
"""Journals that are looked into, the latest first."""


def earlier_run(target: Any, store: str | Path | None = "auto") -> SessionState | None:
    """What the last finished run of a target of this structure came to; None if there is none.

    A journal is the target's if it names the same modules with the same classes and sizes. `store` is where the run
    was kept, as `tune` takes it.
    """
    if store in (None, "off"):
        return None
    mine = _structure(target)
    for path in Store(None if store == "auto" else store).journals()[:LOOKED_AT]:
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
