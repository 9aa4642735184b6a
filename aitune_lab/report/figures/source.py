"""What figures are drawn from: any record of a run as a session's state, and one module's trials in it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from ...errors import TargetError
from ...schema import Choice, Event, Measurement, Point, PointResult, Trial, from_data, to_data
from ...tuning.session import SessionState, replay
from ...tuning.strategies.score import eager_at

if TYPE_CHECKING:
    from ...tuning.endtoend import EndToEnd
    from ...tuning.result import TuneResult
    from ...tuning.run_report import RunReport

    Source: TypeAlias = "SessionState | TuneResult | RunReport | Sequence[Event]"
    """A session's state, what `tune` gave, a loaded report, or the events of a journal."""

EAGER = "eager"


def state_of(source: Source) -> SessionState:
    """The session's state that a source stands for; also of anything that holds one as its `state`."""
    if isinstance(source, SessionState):
        return source
    if isinstance(source, Sequence):
        return replay(source)
    if isinstance(held := getattr(source, "state", None), SessionState):
        return held
    from ...tuning.run_report import RunReport

    if isinstance(source, RunReport):
        return _of_report(source)
    state = replay(source.events)
    choices = {(c.path, c.method, c.signature): c for c in source.choices}
    end = to_data(source.end_to_end) if source.end_to_end is not None else state.end_to_end
    # What the result says itself counts: it may have been taken over from the store, without events.
    return replace(
        state,
        trials={**state.trials, **source.trials},
        choices={**state.choices, **choices},
        plan=source.plan,
        estimate=dict(source.estimate) or state.estimate,
        end_to_end=end,
        understood=source.understood or state.understood,
        elapsed=source.seconds or state.elapsed,
        status=state.status if source.events else "finished",
    )


def _of_report(report: RunReport) -> SessionState:
    return SessionState(
        status=report.status,
        target=report.target,
        rows=report.rows,
        trials={trial.key: trial for trial in report.trials},
        choices={(c.path, c.method, c.signature): c for c in report.choices},
        plan=report.plan,
        log=report.log,
        elapsed=report.seconds,
        estimate=dict(report.estimate) or None,
        end_to_end=to_data(report.end_to_end) if report.end_to_end is not None else None,
        understood=report.understood,
        error=report.error,
        environment=report.environment,
        eager_seconds=report.eager_seconds,
    )


def events_of(source: Source) -> tuple[Event, ...]:
    """The events of a source; none of a state or a report, which are what they added up to."""
    if isinstance(source, Sequence):
        return tuple(source)
    return tuple(getattr(source, "events", ()))


def end_to_end_of(state: SessionState) -> EndToEnd | None:
    """The check of the tuned target as a whole; None if there was none."""
    if state.end_to_end is None:
        return None
    from ...tuning.endtoend import EndToEnd

    return from_data(state.end_to_end, EndToEnd)


@dataclass(frozen=True)
class Selected:
    """The trials of one (module, signature), eager's own among them if it was recorded.

    `path` is as given where nothing was tried for it; then there are no trials.
    """

    path: str
    signature: str
    trials: tuple[Trial, ...]
    choice: Choice | None

    @property
    def name(self) -> str:
        return self.path or "(model)"

    @property
    def eager(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.candidate.label == EAGER), None)

    @property
    def points(self) -> tuple[Point, ...]:
        """Every point at which anything was tried, in order."""
        return tuple(dict.fromkeys(result.point for trial in self.trials for result in trial.points))

    def eager_at(self, point: Point) -> Measurement | None:
        """Eager's latency at a point: its own, else as measured beside the chosen candidate or the first other one."""
        own = self.result(self.eager, point)
        if own is not None and own.latency is not None:
            return own.latency
        chosen = self.choice.candidate if self.choice is not None else None
        ordered = sorted(self.trials, key=lambda trial: trial.candidate != chosen)
        beside = (result.eager for trial in ordered if (result := self.result(trial, point)) is not None)
        return next((measured for measured in beside if measured is not None), None)

    def beside(self, trial: Trial, point: Point) -> Measurement | None:
        """Eager's latency measured in alternation with a candidate; where there is none, eager's own."""
        result = self.result(trial, point)
        if result is None:
            return None
        return eager_at(result, self.eager) if self.eager is not None else result.eager

    @staticmethod
    def result(trial: Trial | None, point: Point) -> PointResult | None:
        return next((r for r in trial.points if r.point == point), None) if trial is not None else None

    def why_not(self, label: str) -> str:
        """Why a candidate isn't the chosen one; empty for the chosen one and where no choice was made."""
        return self.choice.losers.get(label, "") if self.choice is not None else ""

    @property
    def not_tried(self) -> Mapping[str, str]:
        """Candidates without a trial, with the reason."""
        labels = {trial.candidate.label for trial in self.trials} | {EAGER}
        losers = self.choice.losers if self.choice is not None else {}
        return {label: why for label, why in losers.items() if label not in labels}


def select(state: SessionState, module: str | None = None, signature: str | None = None) -> Selected:
    """The trials of a module's signature; by default of the module and signature on which eager spends most.

    Raises TargetError, with close matches, for a module that the run doesn't know, or a signature that it doesn't have.
    """
    found = groups(state)
    if module is not None:
        known = {str(row.get("path", "")) for row in state.rows} | {group.path for group in found}
        if module not in known and known:
            close = difflib.get_close_matches(module, sorted(known), n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise TargetError(f"module must be a path that the run has seen, but got {module!r}.{hint}")
        found = [group for group in found if group.path == module]
    if signature is not None:
        keys = [group.signature for group in found]
        found = [group for group in found if group.signature == signature]
        if not found and keys:
            raise TargetError(f"signature must be one of {keys}, but got {signature!r}")
    if not found:
        return Selected(module or "", signature or "", (), None)
    return max(found, key=eager_weight)


def groups(state: SessionState) -> list[Selected]:
    """All (module, signature) pairs with trials or a choice, in the order in which they came up."""
    trials: dict[tuple[str, str], list[Trial]] = {}
    for trial in state.trials.values():
        trials.setdefault((trial.path, trial.signature), []).append(trial)
    choices = {(choice.path, choice.signature): choice for choice in state.choices.values()}
    keys = dict.fromkeys([*trials, *choices])
    return [Selected(*key, tuple(trials.get(key, ())), choices.get(key)) for key in keys]


def eager_weight(group: Selected) -> float:
    """What eager spends on a module, as calls weigh it: weight × median latency over all points, in milliseconds."""
    return sum(point_weight(group, point) for point in group.points)


def point_weight(group: Selected, point: Point) -> float:
    """What eager spends at one point; 0 where it wasn't measured."""
    measured = group.eager_at(point)
    weights = [r.weight for trial in group.trials if (r := group.result(trial, point)) is not None]
    share = max(weights, default=0.0) * (measured.median_ms if measured is not None else 0.0)
    return share if math.isfinite(share) else 0.0


def point_of(group: Selected, point: Point | str | None) -> Point | None:
    """A point by itself or its label (`"b=8"`); by default the one that weighs most. None if there are no points.

    Raises TargetError for a label that the module wasn't tried at.
    """
    points = group.points
    if not points:
        return None
    if point is None:
        return max(points, key=lambda p: point_weight(group, p))
    found = next((p for p in points if point in (p, p.label)), None)
    if found is None:
        labels = [p.label for p in points]
        raise TargetError(f"point must be one of {labels} for {group.name}, but got {str(point)!r}")
    return found


def counted_blocks(measurements: Iterable[Measurement | None]) -> str:
    """`60 blocks`, `24 to 60 blocks`: over how many timed blocks medians were taken."""
    counts = sorted({m.n for m in measurements if m is not None})
    if not counts:
        return "no blocks"
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{span} block{'' if counts == [1] else 's'}"
