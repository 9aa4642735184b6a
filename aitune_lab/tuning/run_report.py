"""The report of a run as one JSON file: environment, plan, trials, choices, end to end; and read back."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__
from .._display import Printed
from ..errors import DataError
from ..schema import Choice, Event, Fingerprint, Plan, Trial, from_data, to_data, to_json
from .endtoend import EndToEnd
from .result import TuneResult
from .session import SessionState, Status, read_journal, replay

KIND = "aitune_lab run report"
REPORT_VERSION = 1


@dataclass(frozen=True)
class RunReport(Printed):
    """Everything that a run came to, without its single events.

    Attributes:
        written: when this report was made, UTC.
        aitune_lab: the version that made it.
        rows: inspected modules, outermost first, as plain data.
        eager_seconds: one pass of the untuned target over the data, as inspected.
        failures: modules that could not be tuned, with the reason; not known of a journal.
        planned: what a dry run would try.
        log: (seconds, level, message).
    """

    written: str
    aitune_lab: str
    status: Status
    target: str = ""
    understood: str = ""
    environment: Fingerprint | None = None
    plan: Plan = field(default_factory=Plan)
    choices: tuple[Choice, ...] = ()
    trials: tuple[Trial, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()
    eager_seconds: float | None = None
    estimate: Mapping[str, Any] = field(default_factory=dict)
    end_to_end: EndToEnd | None = None
    seconds: float = 0.0
    error: str | None = None
    dry_run: bool = False
    planned: tuple[Mapping[str, Any], ...] = ()
    log: tuple[tuple[float, str, str], ...] = ()
    kind: str = KIND
    report_version: int = REPORT_VERSION

    @property
    def state(self) -> SessionState:
        """The report as the session's state, which tables, figures and what-if take."""
        return SessionState(
            status=self.status,
            target=self.target,
            rows=self.rows,
            trials={trial.key: trial for trial in self.trials},
            choices={(c.path, c.method, c.signature): c for c in self.choices},
            plan=self.plan,
            log=self.log,
            elapsed=self.seconds,
            estimate=dict(self.estimate) or None,
            understood=self.understood,
            error=self.error,
            environment=self.environment,
            eager_seconds=self.eager_seconds,
            end_to_end=to_data(self.end_to_end) if self.end_to_end is not None else None,
        )

    @property
    def result(self) -> TuneResult:
        """The report as a `TuneResult` without events."""
        return TuneResult(
            self.choices,
            {trial.key: trial for trial in self.trials},
            self.failures,
            self.plan,
            (),
            self.understood,
            self.seconds,
            self.estimate,
            self.dry_run,
            self.end_to_end,
        )

    def to_dataframe(self) -> Any:
        """The trials as a pandas DataFrame. Raises MissingDependency without pandas."""
        return self.result.to_dataframe()

    def __str__(self) -> str:
        from .._display import report

        return str(report().runs.report_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().runs.report_html(self))


Run = RunReport | TuneResult | SessionState | Iterable[Event] | str | Path
"""A run in any of its forms; a path is that of a report or of a journal."""


def report_of(run: Run) -> RunReport:
    """The report of a run in any of its forms.

    Raises DataError for a file that is neither a report nor a journal.
    """
    if isinstance(run, RunReport):
        return run
    if isinstance(run, (str, Path)):
        return load_report(run)
    if isinstance(run, TuneResult):
        return _of(replay(run.events), run.events, run)
    if isinstance(run, SessionState):
        return _of(run)
    if not isinstance(run, Iterable):
        raise DataError(
            f"a run must be a TuneResult, a RunReport, a state, events or a path, but got a {type(run).__name__}"
        )
    events = tuple(run)
    return _of(replay(events), events)


def save_report(run: Run, path: str | Path) -> Path:
    """Write the report of a run as JSON, in one step: the file is whole or not there. Gives its path."""
    text = to_json(report_of(run), indent=1) + "\n"
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    return path


def load_report(path: str | Path) -> RunReport:
    """Read a report that `save_report` wrote, or make one of a journal.

    Raises:
        DataError: the file is neither, is damaged, or is of a later version than this package knows.
        OSError: it can't be read.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        data = None  # a journal has several lines of JSON
    if not isinstance(data, dict) or data.get("kind") != KIND:
        events = read_journal(path)
        if not events:
            raise DataError(f"{str(path)!r} is neither a report of a run nor its journal: it holds no event")
        return _of(replay(events), events)
    version = data.get("report_version")
    if version != REPORT_VERSION:
        raise DataError(
            f"{str(path)!r} is a report of version {version!r}, and this aitune_lab ({__version__}) reads version "
            f"{REPORT_VERSION}. Read it with the version that wrote it, {data.get('aitune_lab')!r}, or a later one"
        )
    try:
        return from_data(data, RunReport)
    except ValueError as error:
        raise DataError(f"the report {str(path)!r} is damaged: {error}") from None


def _of(state: SessionState, events: Iterable[Event] = (), result: TuneResult | None = None) -> RunReport:
    started = next((event.data for event in events if event.kind == "run_started"), {})
    checked = state.end_to_end
    end_to_end = from_data(checked, EndToEnd) if checked is not None else None
    choices, trials = tuple(state.choices.values()), tuple(state.trials.values())
    return RunReport(
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        aitune_lab=__version__,
        status=state.status,
        target=state.target,
        understood=result.understood if result is not None else state.understood,
        environment=state.environment,
        plan=result.plan if result is not None else state.plan,
        choices=result.choices if result is not None else choices,
        trials=tuple(result.trials.values()) if result is not None else trials,
        failures=dict(result.failures) if result is not None else {},
        rows=state.rows,
        eager_seconds=state.eager_seconds,
        estimate=dict(state.estimate or {}),
        end_to_end=result.end_to_end if result is not None else end_to_end,
        seconds=result.seconds if result is not None else state.elapsed,
        error=state.error,
        dry_run=result.dry_run if result is not None else False,
        planned=tuple(started.get("planned", ())),
        log=state.log,
    )
