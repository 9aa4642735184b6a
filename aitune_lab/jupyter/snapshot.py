"""What a Lab's views draw: one frozen piece of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..schema import Plan
from ..tuning.result import TuneResult
from ..tuning.session import SessionState

Phase = Literal["new", "inspecting", "ready", "tuning", "tuned", "cancelled", "failed"]


@dataclass(frozen=True)
class Preview:
    """What a run with the present plan would do, told before its start.

    Attributes:
        trials: how many candidates would be tried.
        seconds: what that takes, estimated.
        bytes: what it may need on disk, estimated.
        planned: for each (module, signature) its candidates, and those not tried with the reason.
        problem: why no run is possible, if so.
    """

    trials: int = 0
    seconds: float = 0.0
    bytes: int = 0
    planned: tuple[Mapping[str, Any], ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Notice:
    """Something to say above everything else, with what one may do about it (operation, label)."""

    text: str
    tone: Literal["info", "good", "warning", "error"] = "info"
    actions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """All that a view draws, frozen.

    Attributes:
        phase: where the Lab is.
        state: what the run told so far.
        plan: the plan that the next run follows.
        preview: what that run would do; None while that is not known.
        result: of the last run that ended; None before.
        notice: something to say.
        output: lines that the target or backends printed meanwhile.
        stale: the plan has changed since the last run ended.
        cancelling: the run was cancelled, and has not ended yet.
    """

    phase: Phase = "new"
    state: SessionState = field(default_factory=SessionState)
    plan: Plan = field(default_factory=Plan)
    preview: Preview | None = None
    result: TuneResult | None = None
    notice: Notice | None = None
    output: tuple[str, ...] = ()
    paused: bool = False
    stale: bool = False
    cancelling: bool = False

    @property
    def was_cancelled(self) -> bool:
        """Whether the result is what was installed of a run that did not go to its end."""
        return self.result is not None and self.result.events[-1].kind == "run_cancelled"
