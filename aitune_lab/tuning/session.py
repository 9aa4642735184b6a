"""The session: everything that a run has told, as the fold of its events; and its journal. No torch here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from ..errors import DataError
from ..schema import Choice, Event, Fingerprint, Plan, Trial, from_data, from_json, to_json

Status = Literal["idle", "running", "finished", "cancelled", "failed"]

LOG_TAIL = 200
"""Log lines that a state keeps; the journal has them all."""


@dataclass(frozen=True)
class Progress:
    """Where a run is. `done` of `total` trials have ended; `fraction` is of the current step, None if unknown."""

    done: int = 0
    total: int = 0
    phase: str = ""
    path: str | None = None
    candidate: str | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class SessionState:
    """A snapshot of a session. Treat its mappings as read-only: snapshots share them.

    Attributes:
        rows: inspected modules, outermost first, as plain data.
        trials: by key, in the order in which they ended.
        choices: by (path, method, signature); the last one counts.
        log: the last lines as (seconds, level, message).
        elapsed: seconds since the start of the run.
        estimated_seconds, estimated_bytes: what the run announced before it started.
        estimate: what it predicts for the whole target at its end.
        understood: what it took the data to mean.
        environment: where it runs; None for journals that don't say.
        eager_seconds: one pass of the untuned target over the data, as inspected.
        end_to_end: the check of the tuned target as a whole, as plain data; None if there was none.
    """

    status: Status = "idle"
    target: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()
    trials: Mapping[str, Trial] = field(default_factory=dict)
    choices: Mapping[tuple[str, str, str], Choice] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    progress: Progress = field(default_factory=Progress)
    log: tuple[tuple[float, str, str], ...] = ()
    elapsed: float = 0.0
    estimated_seconds: float | None = None
    estimated_bytes: int | None = None
    estimate: Any = None
    understood: str = ""
    error: str | None = None
    remaining_seconds: float | None = None
    """What a running run still needs, by what its trials took so far; None if unknown."""
    paused: bool = False
    seq: int = -1
    environment: Fingerprint | None = None
    eager_seconds: float | None = None
    end_to_end: Mapping[str, Any] | None = None


def reduce(state: SessionState, event: Event) -> SessionState:
    """The state after an event. Pure; an event of a kind it doesn't know moves only the clock."""
    data = event.data
    state = replace(state, seq=event.seq, elapsed=max(state.elapsed, event.t))
    if event.kind == "run_started":
        return replace(
            state,
            status="running",
            target=str(data.get("target", state.target)),
            progress=Progress(total=int(data.get("trials") or 0)),
            elapsed=event.t,
            estimated_seconds=data.get("estimated_seconds"),
            estimated_bytes=data.get("estimated_bytes"),
            remaining_seconds=data.get("estimated_seconds"),
            paused=False,
            estimate=None,
            understood=str(data.get("understood") or ""),
            error=None,
            environment=from_data(data["environment"], Fingerprint) if data.get("environment") else None,
            end_to_end=None,
        )
    if event.kind == "inspected":
        return replace(state, rows=tuple(data.get("rows", ())), eager_seconds=data.get("eager_seconds"))
    if "remaining_seconds" in data:
        state = replace(state, remaining_seconds=data["remaining_seconds"])
    if event.kind == "trial_started":
        progress = replace(
            state.progress,
            total=int(data.get("total") or state.progress.total),
            phase=str(data.get("phase") or ""),
            path=event.path,
            candidate=event.candidate.label if event.candidate else None,
            fraction=None,
        )
        return replace(state, progress=progress)
    if event.kind == "trial_progress":
        phase = str(data.get("doing") or data.get("phase") or state.progress.phase)
        return replace(state, progress=replace(state.progress, phase=phase, fraction=data.get("fraction")))
    if event.kind in ("trial_finished", "trial_failed"):
        trial = from_data(data["trial"], Trial)
        done = state.progress.done + 1
        progress = Progress(done=done, total=max(state.progress.total, done))
        return replace(state, trials={**state.trials, trial.key: trial}, progress=progress)
    if event.kind == "choice_made":
        choice = from_data(data["choice"], Choice)
        choices = {**state.choices, (choice.path, choice.method, choice.signature): choice}
        if "eager" not in data:
            return replace(state, choices=choices)
        eager = from_data(data["eager"], Trial)
        return replace(state, choices=choices, trials={**state.trials, eager.key: eager})
    if event.kind == "plan_changed":
        return replace(state, plan=from_data(data["plan"], Plan))
    if event.kind == "log":
        state = replace(state, paused=bool(data.get("paused", state.paused)))
        line = (event.t, str(data.get("level", "info")), str(data.get("message", "")))
        return replace(state, log=(*state.log, line)[-LOG_TAIL:])
    if event.kind == "run_finished":
        elapsed = float(data.get("seconds") or state.elapsed)
        return replace(
            _stopped(state, "finished"),
            elapsed=elapsed,
            estimate=data.get("estimate"),
            end_to_end=data.get("end_to_end"),
        )
    if event.kind == "run_cancelled":
        return _stopped(state, "cancelled")
    if event.kind == "run_failed":
        return replace(_stopped(state, "failed"), error=str(data.get("error", "")))
    return state


def _stopped(state: SessionState, status: Status) -> SessionState:
    progress = Progress(done=state.progress.done, total=state.progress.total)
    return replace(state, status=status, progress=progress, remaining_seconds=None, paused=False)


class Session:
    """Holds the state that the events so far add up to. `apply` gives out frozen snapshots."""

    def __init__(self, state: SessionState | None = None) -> None:
        self.state = state if state is not None else SessionState()

    def apply(self, event: Event) -> SessionState:
        """Take in one event and return the new state."""
        self.state = reduce(self.state, event)
        return self.state


def replay(events: Iterable[Event]) -> SessionState:
    """The state that a run's events add up to."""
    session = Session()
    for event in events:
        session.apply(event)
    return session.state


def journaled(events: Iterable[Event], path: str | Path, *, strict: bool = True) -> Iterator[Event]:
    """Pass events on, each written to the journal (one line of JSON each) before it is passed on.

    Unless `strict`, a journal that can't be written (any more) stops no event.
    """
    forgiving = contextlib.nullcontext() if strict else contextlib.suppress(OSError)
    with contextlib.ExitStack() as stack:
        file: TextIO | None = None
        with forgiving:
            file = stack.enter_context(Path(path).open("w", encoding="utf-8", newline="\n"))
        for event in events:
            with forgiving:
                if file is not None:
                    file.write(to_json(event) + "\n")
                    file.flush()
            yield event


def write_journal(events: Iterable[Event], path: str | Path) -> None:
    """Write events as JSON lines."""
    for _ in journaled(events, path):
        pass


def read_journal(path: str | Path) -> list[Event]:
    """The events of a journal. A last line that a crash tore off is left out.

    Raises DataError that names the line if any other line is damaged.
    """
    lines = Path(path).read_bytes().split(b"\n")
    events = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(from_json(line, Event))
        except ValueError as error:
            if number == len(lines) and not _is_json(line):
                break
            raise DataError(f"line {number} of the journal {str(path)!r} is damaged: {error}") from None
    return events


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
