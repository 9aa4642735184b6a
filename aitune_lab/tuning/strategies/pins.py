"""Pins: the user names the candidate, and only its rightness is judged."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import PlanError
from ...schema import Rule, Tolerance, Trial
from .base import Decision
from .score import Contender, points_of, weighted_latency, why_wrong
from .words import accuracy, times


def decide_pin(rule: Rule, trials: Sequence[Trial], eager: Trial, tolerance: Tolerance) -> Decision:
    """The pinned candidate, however fast it is.

    Raises:
        PlanError: it was not tried, could not be built, or is out of tolerance (with its figures) and the rule
            doesn't say `accept_error`.
    """
    if rule.candidate is None:
        raise PlanError(f"the pin on {rule.pattern!r} must name a candidate: give it a backend")
    label = rule.candidate.label
    losers = {t.candidate.label: f"{label} is pinned" for t in [eager, *trials] if t.candidate != rule.candidate}
    if rule.candidate == eager.candidate:
        return Decision(eager, "eager is pinned", losers)
    trial = next((t for t in trials if t.candidate == rule.candidate), None)
    if trial is None:
        raise PlanError(f"the pin of {label} on {rule.pattern!r} can't be kept: it was not tried")
    wrong = why_wrong(trial, points_of(trial, eager), tolerance)
    if wrong and (trial.status != "ok" or not rule.accept_error):
        cure = (
            "Pin another candidate or remove the pin."
            if trial.status != "ok"
            else "Say accept_error=True to take it all the same, widen max_relative_error, or pin another candidate."
        )
        raise PlanError(f"the pin of {label} on {rule.pattern!r} can't be kept: {wrong}. {cure}")
    timed = weighted_latency(trial, eager)
    fast = f"{times(timed.speedup)} times as fast as eager ({timed.figures})" if isinstance(timed, Contender) else timed
    right = f"its error was accepted by the user: {wrong}" if wrong else accuracy(trial)
    return Decision(trial, f"{label} is pinned: {fast}; {right}", losers, accepted_error=bool(wrong))
