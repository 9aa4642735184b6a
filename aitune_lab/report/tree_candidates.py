"""What a row of the module tree can be pinned to: every candidate with its figures, for one module or all copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

from ..schema import Choice, Tolerance, Trial
from ..tuning.session import SessionState
from ..tuning.strategies.score import admitted, eager_at
from ..tuning.strategies.words import error, number, times, why_not_ok
from .text import NO_FIGURE, candidate_rows, is_disturbed, latency_text

Pinnable = Literal["yes", "accept", "no"]


class CandidateFigures(TypedDict):
    """One candidate as text that people read; empty where nothing is known.

    `latency` is in ms, at the point named by `at` (a mean where several modules or signatures are meant). `pinnable`
    is `accept` for one that is out of tolerance: pinning it takes a second, explicit click.
    """

    label: str
    latency: str
    at: str
    speedup: str
    error_class: str
    error: str
    status: str
    chosen: bool
    pinned: bool
    pinnable: Pinnable


def candidates_of(state: SessionState, paths: Sequence[str], *, offered: Iterable[str] = ()) -> list[CandidateFigures]:
    """The candidates of one module, or of all copies of a fold together, eager first, then in the order they ended.

    Args:
        state: where the trials and choices are.
        paths: the modules (`TreeRows.paths(key)`).
        offered: labels that may be pinned though nothing is known of them yet.
    """
    wanted = set(paths)
    choices = [choice for choice in state.choices.values() if choice.path in wanted]
    by_label: dict[str, list[Trial]] = {}
    for trial in state.trials.values():
        if trial.path in wanted:
            by_label.setdefault(trial.candidate.label, []).append(trial)
    rules = [state.plan.rule_for(path) for path in paths]
    pinned = {rule.candidate.label for rule in rules if rule is not None and rule.action == "pin" and rule.candidate}
    labels = sorted(by_label, key=lambda label: label != "eager")
    eagers = {(t.path, t.signature): t for t in by_label.get("eager", [])}
    shown = [_tried(by_label[label], choices, eagers, state.plan.tolerance, pinned) for label in labels]
    if "eager" not in by_label and (beside := _beside(by_label.values())) is not None:
        shown.insert(0, beside)
    losers = {label: why for choice in choices for label, why in choice.losers.items() if label not in by_label}
    losers.pop("eager", None)  # what it lost to is the chosen one
    shown += [_untried(label, why, "no", pinned) for label, why in losers.items()]
    known = {*by_label, *losers, "eager"}
    return shown + [
        _untried(label, "not tried yet", "yes", pinned) for label in dict.fromkeys(offered) if label not in known
    ]


def _tried(
    trials: Sequence[Trial],
    choices: Sequence[Choice],
    eagers: dict[tuple[str, str], Trial],
    tolerance: Tolerance,
    pinned: set[str],
) -> CandidateFigures:
    label = trials[0].candidate.label
    chosen = [choice for choice in choices if choice.candidate.label == label]
    status, pinnable = _status(trials, choices, tolerance)
    if len(trials) == 1:
        (trial,) = trials
        choice = next((c for c in choices if (c.path, c.signature) == (trial.path, trial.signature)), None)
        (row,) = candidate_rows(trials, choice, eager=eagers.get((trial.path, trial.signature)))
        latency, at, speedup = row["latency"], row["point"], row["speedup"]
    else:
        latency, at, speedup = _together(trials, eagers)
    off = [trial.relative_l2 for trial in trials if trial.relative_l2 is not None and label != "eager"]
    classes = {trial.error_class for trial in trials if trial.error_class is not None and label != "eager"}
    worst = next((c for c in ("refused", "within budget", "exact") if c in classes), "")
    return CandidateFigures(
        label=label,
        latency=latency,
        at=at,
        speedup="" if label == "eager" else speedup,
        error_class="out of tolerance" if worst == "refused" else worst,
        error=error(max(off)) if off else "",
        status=status,
        chosen=bool(chosen),
        pinned=label in pinned,
        pinnable=pinnable,
    )


def _status(trials: Sequence[Trial], choices: Sequence[Choice], tolerance: Tolerance) -> tuple[str, Pinnable]:
    label = trials[0].candidate.label
    broken = [trial for trial in trials if trial.status not in ("ok", "cancelled")]
    where = f" for {len(broken)} of {len(trials)}" if len(trials) > 1 else ""
    if broken:
        return f"{broken[0].status}{where}: {broken[0].reason or 'no reason was given'}", "no"
    if skipped := [trial for trial in trials if trial.status == "cancelled"]:
        return why_not_ok(skipped[0]), "yes"
    losers = [choice.losers[label] for choice in choices if label in choice.losers]
    if label != "eager" and any(not admitted(trial.error_class, tolerance) for trial in trials):
        return (losers[0] if losers else "out of tolerance"), "accept"
    reasons = [*losers, *(trial.reason for trial in trials if trial.reason)]
    return (reasons[0] if reasons else ""), "yes"


def _together(trials: Sequence[Trial], eagers: dict[tuple[str, str], Trial]) -> tuple[str, str, str]:
    """Mean latency over several modules or signatures, each at its heaviest point, and the speed-up of their sum."""
    mine, theirs = [], []
    for trial in trials:
        timed = [result for result in trial.points if result.latency is not None]
        if not timed:
            continue
        result = max(timed, key=lambda r: r.weight)
        assert result.latency is not None
        mine.append(result.latency.median_ms)
        eager = eagers.get((trial.path, trial.signature))
        beside = eager_at(result, eager) if eager is not None else result.eager
        if beside is not None:
            theirs.append(beside.median_ms)
    if not mine:
        return "", "", ""
    comparable = len(theirs) == len(mine) and sum(mine) > 0
    speedup = f"×{times(sum(theirs) / sum(mine))}" if comparable else ""
    if any(map(is_disturbed, trials)):
        speedup = NO_FIGURE
    return number(sum(mine) / len(mine)), f"mean of {len(mine)}", speedup


def _beside(trials: Iterable[Sequence[Trial]]) -> CandidateFigures | None:
    """Eager as it was measured beside the candidate that was measured most closely."""
    timed = [
        r for same in trials for trial in same for r in trial.points if r.eager is not None and r.latency is not None
    ]
    if not timed:
        return None
    result = max(timed, key=lambda r: (r.weight, r.eager.n if r.eager is not None else 0))
    assert result.eager is not None
    row = _untried("eager", "", "no", set())
    row["latency"], row["at"] = latency_text(result.eager.median_ms, result.eager.spread), result.point.label
    return row


def _untried(label: str, status: str, pinnable: Pinnable, pinned: set[str]) -> CandidateFigures:
    return CandidateFigures(
        label=label,
        latency="",
        at="",
        speedup="",
        error_class="",
        error="",
        status=status,
        chosen=False,
        pinned=label in pinned,
        pinnable=pinnable,
    )
