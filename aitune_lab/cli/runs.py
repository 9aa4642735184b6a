"""The command `runs`: earlier runs on this machine, and the report of one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ..errors import DataError, PlanError
from ..schema import to_data
from ..store.home import cache_dir
from .output import say

if TYPE_CHECKING:
    from ..tuning.runs import RunSummary

_SHOWN_CHOICES = 2


def list_runs(options: argparse.Namespace) -> int:
    """Print the runs that the store knows, the latest first, or what one of them came to."""
    from ..tuning.run_report import load_report
    from ..tuning.runs import earlier_runs

    if options.journal is not None:
        try:
            report = load_report(options.journal)
        except OSError as error:
            raise DataError(f"the run {options.journal!r} can't be read: {error.strerror or error}") from None
        return say(options, to_data(report), report)
    if options.last < 1:
        raise PlanError(f"--last must be at least 1, but got {options.last}")
    runs = list(islice(earlier_runs(options.store), options.last))
    return say(options, {"runs": [to_data(run) for run in runs]}, _table(runs, options.store))


def _table(runs: Sequence[RunSummary], store: str | None) -> str:
    from ..report.text import Column, render_table

    if not runs:
        return f"no runs are known in {store or cache_dir()}"
    columns = (
        Column("started", "started (UTC)"),
        Column("status", "status"),
        Column("target", "target"),
        Column("seconds", "s", right=True),
        Column("trials", "trials", right=True),
        Column("speedup", "end to end", right=True),
        Column("chosen", "chosen"),
        Column("journal", "journal"),
    )
    return render_table(columns, [_row(run) for run in runs])


def _row(run: RunSummary) -> dict[str, str]:
    from ..report.text import clean
    from ..tuning.strategies.words import counted, times

    more = len(run.chosen) - _SHOWN_CHOICES
    chosen = ", ".join(run.chosen[:_SHOWN_CHOICES]) + (f" and {counted(more, 'other')}" if more > 0 else "")
    return {
        "started": run.started.partition("+")[0].replace("T", " "),
        "status": run.status,
        "target": clean(run.target),
        "seconds": f"{run.seconds:.0f}",
        "trials": str(run.trials),
        "speedup": f"{times(run.speedup)}×" if run.speedup is not None else "",
        "chosen": clean(chosen or run.error.partition("\n")[0][:60]),
        "journal": run.journal,
    }
