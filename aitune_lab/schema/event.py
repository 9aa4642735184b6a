"""What happens in a run, as frozen data. Everything that shows or stores a run is a fold over these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .trial import Candidate

EventKind = Literal[
    "run_started",
    "inspected",
    "trial_started",
    "trial_progress",
    "trial_finished",
    "trial_failed",
    "choice_made",
    "plan_changed",
    "log",
    "run_finished",
    "run_cancelled",
    "run_failed",
]


@dataclass(frozen=True)
class Event:
    """One step. `t` is in seconds since the run's start; `data` holds JSON values only.

    `data` by kind: `run_started` {target, modules, trials, estimated_seconds, estimated_bytes, understood, planned,
    limits, environment}; `inspected` {rows, eager_seconds}; `trial_started` {index, total, phase}; `trial_progress`
    {phase, fraction, and `doing` while a child builds}; `trial_finished` and `trial_failed` {trial}; `choice_made`
    {choice, eager}; `plan_changed` {plan}; `log` {level, message}; `run_finished` {seconds, choices, estimate,
    end_to_end}; `run_cancelled` {seconds}; `run_failed` {error}.
    """

    seq: int
    t: float
    kind: EventKind
    path: str | None = None
    signature: str | None = None
    candidate: Candidate | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
