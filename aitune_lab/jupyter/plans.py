"""What the controls do to a plan: pure functions from a plan to the next one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import PlanError
from ..schema import Candidate, Plan, Rule, StrategyConfig, Trial
from ..tuning.candidates import as_candidate
from ..tuning.options import BackendLike
from ..tuning.strategies import Strategy, strategy_of
from ..tuning.strategies.words import out_of_tolerance

SETTINGS = ("accuracy", "max_relative_error", "search", "max_seconds", "max_trials", "strategy", "split_points")
"""Names that `with_settings` takes."""


def with_pin(plan: Plan, pattern: str, candidate: BackendLike, *, accept_error: bool = False) -> Plan:
    """The plan with a pin in place of what held the modules of this pattern so far. Raises PlanError for no candidate.

    The pattern is a path, or `re:` and an expression. Rules on paths come before those on expressions, so that a pin
    on one copy of a repeated block counts before one on all copies.
    """
    return _with(plan, Rule(pattern, "pin", candidate=as_candidate(candidate), accept_error=accept_error))


def with_left_alone(plan: Plan, pattern: str) -> Plan:
    """The plan with a rule that leaves the modules of the pattern as they are."""
    return _with(plan, Rule(pattern, "leave"))


def with_strategy(plan: Plan, pattern: str, strategy: Strategy | StrategyConfig | str) -> Plan:
    """The plan with a strategy of its own for the modules of a pattern."""
    return _with(plan, Rule(pattern, "strategy", strategy=strategy_of(strategy).config()))


def with_excluded(plan: Plan, excluded: str, pattern: str = "re:.*") -> Plan:
    """The plan that doesn't try a backend or candidate for the modules of the pattern (all, if none is given)."""
    rule = Rule(pattern, "exclude", excluded=excluded)
    return replace(plan, rules=(*(r for r in plan.rules if r != rule), rule))


def without_excluded(plan: Plan, excluded: str) -> Plan:
    """The plan without the exclusions of a backend or candidate."""
    return replace(plan, rules=tuple(r for r in plan.rules if r.action != "exclude" or r.excluded != excluded))


def without_rule(plan: Plan, pattern: str) -> Plan:
    """The plan without what holds the modules of a pattern: pins, strategies, leaving alone.

    Raises PlanError if there is no such rule.
    """
    rules = tuple(_without(plan.rules, pattern))
    if len(rules) == len(plan.rules):
        held = [rule.pattern for rule in plan.rules if rule.action != "exclude"]
        raise PlanError(f"no rule holds {pattern!r}; there are rules for {held or 'no modules'}")
    return replace(plan, rules=rules)


def with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with other settings, by the names in `SETTINGS`. Raises PlanError for other names and wrong values."""
    strategy, tolerance, limits, split = plan.strategy, {}, {}, plan.split_points
    for name, value in settings.items():
        if name == "strategy":
            strategy = strategy_of(value).config()
        elif name == "accuracy" and value in ("budget", "exact"):
            tolerance[name] = value
        elif name == "search" and value in ("quick", "normal", "exhaustive"):
            limits[name] = value
        elif name == "max_relative_error" and (value is None or _is_number(value)):
            tolerance[name] = None if value is None else float(value)
        elif name == "max_seconds" and _is_number(value):
            limits[name] = float(value)
        elif name == "max_trials" and _is_number(value):
            limits[name] = int(value)
        elif name == "split_points" and isinstance(value, bool):
            split = value
        elif name in SETTINGS:
            raise PlanError(f"{name} can't be {value!r}; see aitune_lab.Tolerance and aitune_lab.Limits")
        else:
            raise PlanError(f"settings must be among {list(SETTINGS)}, but got {name!r}")
    return replace(
        plan,
        strategy=strategy,
        tolerance=replace(plan.tolerance, **tolerance),
        limits=replace(plan.limits, **limits),
        split_points=split,
    )


def refusal(plan: Plan, pattern: str, candidate: Candidate, trials: Iterable[Trial]) -> str | None:
    """Why a pin would be refused: the figures of a trial that is out of tolerance. None if nothing is known against it."""
    rule = Rule(pattern, "leave")
    for trial in trials:
        if trial.candidate != candidate or not rule.matches(trial.path):
            continue
        beyond = trial.error_class == "refused" or (
            trial.error_class == "within budget" and plan.tolerance.accuracy == "exact"
        )
        if beyond:
            return f"{candidate.label} on {trial.path or '(model)'} is {out_of_tolerance(trial, plan.tolerance)}"
    return None


def rule_sentence(rule: Rule) -> str:
    """What a rule wants, in words: `encoder: use onnxruntime, error accepted`."""
    where = rule.pattern or "(model)"
    if rule.pattern.startswith("re:"):
        where = "every module" if rule.pattern == "re:.*" else f"every module like {rule.pattern[3:]}"
    if rule.action == "pin":
        label = rule.candidate.label if isinstance(rule.candidate, Candidate) else str(rule.candidate)
        return f"{where}: use {label}{', error accepted' if rule.accept_error else ''}"
    if rule.action == "strategy" and rule.strategy is not None:
        return f"{where}: choose by {rule.strategy.name}"
    if rule.action == "exclude":
        return f"{where}: don't try {rule.excluded}"
    return f"{where}: leave as it is"


def settings_of(plan: Plan) -> dict[str, Any]:
    """The settings by the names in `SETTINGS`."""
    tolerance, limits = plan.tolerance, plan.limits
    return {
        "accuracy": tolerance.accuracy,
        "max_relative_error": tolerance.max_relative_error,
        "search": limits.search,
        "max_seconds": limits.max_seconds,
        "max_trials": limits.max_trials,
        "strategy": plan.strategy.name,
        "split_points": plan.split_points,
    }


def matched(pattern: str, paths: Sequence[str]) -> list[str]:
    """The paths that a pattern matches. Raises PlanError for an expression that doesn't compile."""
    try:
        return [path for path in paths if Rule(pattern, "leave").matches(path)]
    except re.error as error:
        raise PlanError(f"{pattern!r} is no regular expression: {error}") from None


def _with(plan: Plan, rule: Rule) -> Plan:
    held = _without(plan.rules, rule.pattern)
    at = 0
    if rule.pattern.startswith("re:"):
        at = next((i for i, other in enumerate(held) if other.pattern.startswith("re:")), len(held))
    return replace(plan, rules=(*held[:at], rule, *held[at:]))


def _without(rules: Iterable[Rule], pattern: str) -> list[Rule]:
    return [rule for rule in rules if rule.action == "exclude" or rule.pattern != pattern]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
