"""The module tree as columns: what a notebook's tree, or any other front end, draws of a session. Plain data.

A row is a module (or a method of one), a container that isn't called itself, or a fold: the repeated blocks of one
parent. A fold's key is the `re:` pattern of a rule that covers exactly its copies, so that one rule pins them all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from ..schema import Choice, ErrorClass, Plan
from ..tuning.session import SessionState
from .frames import as_mapping
from .text import is_disturbed
from .tree_layout import Layout, layout_of

RuleWord = Literal["auto", "pin", "strategy", "leave", "mixed"]
RowState = Literal[
    "", "not run", "untunable", "waiting", "pending", "running", "tried", "tuned", "kept", "left", "disturbed", "failed"
]
MIXED: Literal["mixed"] = "mixed"
"""In place of a candidate or a rule where signatures or copies differ."""

_ORDER: tuple[RowState, ...] = (
    "running",
    "failed",
    "disturbed",
    "pending",
    "waiting",
    "tuned",
    "tried",
    "kept",
    "left",
    "untunable",
    "not run",
    "",
)
_CLASSES: tuple[ErrorClass, ...] = ("refused", "within budget", "exact")


class Columns(TypedDict):
    """One list per column, all of one length, in display order; `depth` says what lies under what.

    `path` is a row's key: a module's path, a method's (`vae.encode`), or a fold's `re:` pattern. `share` is of the
    target's own time (0 to 1), `total_ms` the time of all calls that were inspected, `calls` 0 for a container.
    `copies` is 0 but for folds, whose figures are sums over the copies, `error` the worst, `speedup` weighted by
    time. `choice` is a candidate's label, `MIXED`, or None; `wanted` the label or strategy that a rule names;
    `activity` a few words beside `state`. Figures that aren't known, or not finite, are None.
    """

    path: list[str]
    name: list[str]
    class_name: list[str]
    kind: list[Literal["module", "method", "container", "fold"]]
    depth: list[int]
    copies: list[int]
    calls: list[int]
    parameters: list[int]
    share: list[float]
    total_ms: list[float]
    reason: list[str]
    rule: list[RuleWord]
    wanted: list[str]
    choice: list[str | None]
    speedup: list[float | None]
    error_class: list[ErrorClass | None]
    error: list[float | None]
    accepted: list[bool]
    state: list[RowState]
    activity: list[str]


Changes = dict[int, dict[str, Any]]
"""New values by row number and column."""


@dataclass(frozen=True)
class _Live:
    """The part of a row that changes while a session runs. Its fields are columns."""

    rule: RuleWord = "auto"
    wanted: str = ""
    choice: str | None = None
    speedup: float | None = None
    error_class: ErrorClass | None = None
    error: float | None = None
    accepted: bool = False
    state: RowState = ""
    activity: str = ""


_LIVE = tuple(field.name for field in fields(_Live))


def columns_of(state: SessionState, *, planned: Collection[str] = ()) -> Columns:
    """The whole tree of a session. To follow a session, keep a `TreeRows` instead: it lays the rows out once."""
    return TreeRows(state.rows).columns(state, planned=planned)


class TreeRows:
    """The laid-out rows of one inspection, and what sessions with these rows show in them.

    It holds no session: every method is a pure function of its arguments, and may be called from any thread.
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        """`rows` have `ModuleRow`'s fields, as objects or mappings (`SessionState.rows`)."""
        self.layout: Layout = layout_of([as_mapping(row) for row in rows])
        self._number = {row.path: i for i, row in enumerate(self.layout.rows) if row.unit is not None}
        self._copies = {i: row.copies for i, row in enumerate(self.layout.rows) if row.copies}
        self._folds = {path: i for i, copies in self._copies.items() for path in copies}

    def __len__(self) -> int:
        return len(self.layout.rows)

    def paths(self, key: str) -> tuple[str, ...]:
        """The modules that a row's key stands for: the copies of a fold, else the module itself; none if unknown."""
        if key in self._number:
            return (key,)
        return next((copies for i, copies in self._copies.items() if self.layout.rows[i].path == key), ())

    def columns(self, state: SessionState, *, planned: Collection[str] = ()) -> Columns:
        """The whole tree. Modules in `planned` that nothing is known of yet show as waiting."""
        rows = self.layout.rows
        live = self._live_rows(state, planned, range(len(rows)))
        columns: Any = {
            "path": [row.path for row in rows],
            "name": [row.name for row in rows],
            "class_name": [row.class_name for row in rows],
            "kind": [row.kind for row in rows],
            "depth": [row.depth for row in rows],
            "copies": [len(row.copies) for row in rows],
            "calls": [row.calls for row in rows],
            "parameters": [row.parameters for row in rows],
            "share": [round(row.share, 6) for row in rows],
            "total_ms": [float(f"{row.total_ms:.4g}") for row in rows],
            "reason": [row.reason for row in rows],
        }
        columns |= {name: [getattr(live[i], name) for i in range(len(rows))] for name in _LIVE}
        result: Columns = columns
        return result

    def changes(self, before: SessionState, after: SessionState, *, planned: Collection[str] = ()) -> Changes:
        """What differs between two states of one session with these rows. Looks only at rows that events touched."""
        numbers = self._touched(before, after)
        old, new = (self._live_rows(state, planned, numbers) for state in (before, after))
        found: Changes = {}
        for i in numbers:
            if old[i] != new[i]:
                found[i] = {n: getattr(new[i], n) for n in _LIVE if getattr(new[i], n) != getattr(old[i], n)}
        return found

    def _touched(self, before: SessionState, after: SessionState) -> list[int]:
        if before.plan != after.plan:
            return list(range(len(self.layout.rows)))
        paths = {before.progress.path, after.progress.path}
        if before.trials is not after.trials:
            paths |= {trial.path for key, trial in after.trials.items() if before.trials.get(key) is not trial}
            paths |= {trial.path for key, trial in before.trials.items() if key not in after.trials}
        if before.choices is not after.choices:
            keys = before.choices.keys() | after.choices.keys()
            paths |= {key[0] for key in keys if before.choices.get(key) != after.choices.get(key)}
        return sorted({i for path in paths if path is not None for i in self._rows_of(path)})

    def _rows_of(self, path: str) -> list[int]:
        return [i for i in (self._number.get(path), self._folds.get(path)) if i is not None]

    def _live_rows(self, state: SessionState, planned: Collection[str], numbers: Iterable[int]) -> dict[int, _Live]:
        """The live part of these rows; copies of folds among them are looked at too."""
        numbers = list(numbers)
        seen = _Seen(state, planned)
        live: dict[int, _Live] = {}
        for i in numbers:
            row = self.layout.rows[i]
            if row.unit is not None and row.kind != "container":
                live[i] = seen.live(row.path, row.unit)
        for i in numbers:
            if copies := self._copies.get(i):
                parts = []
                for path in copies:
                    number = self._number[path]
                    unit = self.layout.rows[number].unit
                    assert unit is not None
                    parts.append(live[number] if number in live else seen.live(path, unit))
                live[i] = _folded(parts, [self.layout.rows[self._number[path]].share for path in copies])
        return {i: live.get(i, _Live()) for i in numbers}


class _Seen:
    """A state's choices and trials, by path."""

    def __init__(self, state: SessionState, planned: Collection[str]) -> None:
        self.state, self.planned = state, planned
        self.choices: dict[str, list[Choice]] = defaultdict(list)
        for choice in state.choices.values():
            self.choices[choice.path].append(choice)
        self.statuses: dict[str, list[str]] = defaultdict(list)
        for trial in state.trials.values():
            if trial.candidate.label != "eager":
                self.statuses[trial.path].append(trial.status)

    def live(self, path: str, unit: Mapping[str, Any]) -> _Live:
        rule, wanted = _rule(self.state.plan, path)
        choices = self.choices.get(path, [])
        labels = {choice.candidate.label for choice in choices}
        # The figures of a candidate that the plan has since pinned away would be read as the pinned one's.
        pending = rule == "pin" and bool(labels) and labels != {wanted}
        tuned = [choice for choice in choices if choice.candidate.label != "eager" and not pending]
        state, activity = self._state(path, unit, choices, rule)
        if pending and state != "running":
            state, activity = "pending", ""
        return _Live(
            rule=rule,
            wanted=wanted,
            choice=None if not labels else labels.pop() if len(labels) == 1 else MIXED,
            speedup=_rounded(self._speedup(choices)) if tuned else None,
            error_class=_worst_class(choice.error_class for choice in tuned),
            error=_rounded(max((c.relative_l2 for c in tuned if c.relative_l2 is not None), default=None)),
            accepted=any(choice.accepted_error for choice in tuned),
            state=state,
            activity=activity,
        )

    def _state(
        self, path: str, unit: Mapping[str, Any], choices: Sequence[Choice], rule: RuleWord
    ) -> tuple[RowState, str]:
        progress, statuses = self.state.progress, self.statuses.get(path, [])
        if self.state.status == "running" and progress.path == path:
            return "running", " ".join(filter(None, (progress.phase, progress.candidate)))
        if rule == "leave":
            return "left", ""
        if any(self._disturbed(choice) for choice in choices):
            return "disturbed", ""
        if any(choice.candidate.label != "eager" for choice in choices):
            return "tuned", "accepted" if any(choice.accepted_error for choice in choices) else ""
        if statuses and all(status in ("failed", "crashed", "timed out") for status in statuses):
            return "failed", ""
        if choices:
            return "kept", ""
        if statuses:
            return "tried", ""
        if not unit.get("calls"):
            return "not run", ""
        if not unit.get("tunable"):
            return "untunable", ""
        return ("waiting" if path in self.planned else ""), ""

    def _disturbed(self, choice: Choice) -> bool:
        trial = self.state.trials.get(choice.trial or "")
        return trial is not None and is_disturbed(trial)

    def _speedup(self, choices: Sequence[Choice]) -> float | None:
        """Over all signatures, each with eager's weighted time; None where one was disturbed or isn't known."""
        ratios = [1.0 if choice.candidate.label == "eager" else choice.speedup for choice in choices]
        if None in ratios or any(map(self._disturbed, choices)):
            return None
        return _together(ratios, [self._eager_ms(choice) for choice in choices])

    def _eager_ms(self, choice: Choice) -> float:
        trial = self.state.trials.get(choice.trial or "")
        timed = [(r.weight, r.eager or r.latency) for r in (trial.points if trial is not None else ())]
        return sum(weight * latency.median_ms for weight, latency in timed if latency is not None) or 1.0


def _rule(plan: Plan, path: str) -> tuple[RuleWord, str]:
    rule = plan.rule_for(path)
    if rule is None or rule.action == "exclude":
        return "auto", ""
    if rule.action == "pin":
        return "pin", rule.candidate.label if rule.candidate else ""
    if rule.action == "strategy":
        return "strategy", rule.strategy.name if rule.strategy else ""
    return "leave", ""


def _folded(parts: Sequence[_Live], shares: Sequence[float]) -> _Live:
    """The copies' live parts as one: what they agree on, the worst error, the speed-up weighted by time."""
    rules, wanted, choices = ({getattr(p, name) for p in parts} for name in ("rule", "wanted", "choice"))
    state = min((part.state for part in parts), key=_ORDER.index)
    count = sum(part.state == state for part in parts)
    running = next((part.activity for part in parts if part.state == "running"), "")
    ratios = [1.0 if part.choice == "eager" else part.speedup for part in parts]
    tuned = any(part.speedup is not None for part in parts)
    same_rule = len(rules) == len(wanted) == 1
    return _Live(
        rule=rules.pop() if same_rule else MIXED,
        wanted=wanted.pop() if same_rule else "",
        choice=choices.pop() if len(choices) == 1 else MIXED,
        speedup=_rounded(_together(ratios, shares)) if tuned else None,
        error_class=_worst_class(part.error_class for part in parts),
        error=max((part.error for part in parts if part.error is not None), default=None),
        accepted=any(part.accepted for part in parts),
        state=state,
        activity=running or (f"{count} of {len(parts)}" if count < len(parts) else ""),
    )


def _together(speedups: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The speed-up of several parts run one after the other; `weights` are their times before."""
    pairs = [(ratio, weight) for ratio, weight in zip(speedups, weights, strict=True) if ratio]
    if not pairs:
        return None
    if not any(weight for _, weight in pairs):
        pairs = [(ratio, 1.0) for ratio, _ in pairs]
    return sum(weight for _, weight in pairs) / sum(weight / ratio for ratio, weight in pairs)


def _worst_class(classes: Iterable[ErrorClass | None]) -> ErrorClass | None:
    found = set(classes)
    return next((c for c in _CLASSES if c in found), None)


def _rounded(value: float | None) -> float | None:
    """Four digits are more than any front end shows; JSON has no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
