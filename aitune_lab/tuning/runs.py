"""Earlier runs on this machine, one line each, from their journals in the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..schema import Choice
from ..store.runs import process_lives, started_at
from ..store.store import Store
from .run_report import report_of


@dataclass(frozen=True)
class RunSummary:
    """What an earlier run came to.

    Attributes:
        journal: path of its journal, which `load_report` and `diff` take.
        started: when, UTC, ISO 8601; empty if the journal's name doesn't say.
        status: `finished`, `cancelled`, `failed`, `running`; `broken off` if its process is gone and said nothing; `damaged`
            if the journal can't be read.
        target: the class of what was tuned.
        seconds: how long it took, or until its last event.
        trials: how many have ended.
        chosen: `path: candidate` of each module and signature that doesn't stay on eager.
        speedup: of the whole target, eager over tuned, measured in alternation; None if it was not measured or disturbed.
        error: what it failed with.
    """

    journal: str
    started: str
    status: str
    target: str = ""
    seconds: float = 0.0
    trials: int = 0
    chosen: tuple[str, ...] = ()
    speedup: float | None = None
    error: str = ""


def earlier_runs(store: str | Path | None = None) -> Iterator[RunSummary]:
    """The runs whose journals a store holds, the latest first. `store` is its folder; None is the cache folder."""
    for journal in Store(store).journals():
        started = started_at(journal)
        when = started.isoformat(timespec="seconds") if started is not None else ""
        try:
            report = report_of(journal)
        except FileNotFoundError:
            continue  # removed meanwhile
        except (DataError, OSError, ValueError) as error:
            yield RunSummary(str(journal), when, "damaged", error=str(error))
            continue
        status: Any = report.status
        if status in ("idle", "running"):
            status = "running" if process_lives(journal) else "broken off"
        yield RunSummary(
            str(journal),
            when,
            status,
            report.target,
            report.seconds,
            len(report.trials),
            tuple(_chosen(choice) for choice in report.choices if choice.candidate.backend != "eager"),
            report.end_to_end.speedup if report.end_to_end is not None else None,
            report.error or "",
        )


def _chosen(choice: Choice) -> str:
    return f"{choice.path or '(model)'}: {choice.candidate.label}"
