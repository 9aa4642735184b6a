"""The user's wishes and what was settled on, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import PlanError
from .trial import Candidate, ErrorClass, Option

Action = Literal["pin", "strategy", "exclude", "leave"]

_ONE_OF = {"accuracy": ("budget", "exact"), "search": ("quick", "normal", "exhaustive")}
_WHOLE = ("max_trials", "max_samples_per_point", "max_sample_bytes", "memory_bytes")
_MAY_BE_NONE = ("max_relative_error", "min_snr_db", "memory_bytes")


@dataclass(frozen=True)
class StrategyConfig:
    """A strategy by its registered name with its options."""

    name: str = "MinLatency"
    options: tuple[tuple[str, Option], ...] = ()


@dataclass(frozen=True)
class Rule:
    """`pattern → action`: a module path, or `re:` and a regular expression that must match the whole path.

    - `pin`: use `candidate`, whatever is faster. Out of tolerance it is refused unless `accept_error`.
    - `strategy`: choose among candidates by `strategy`.
    - `exclude`: don't try candidates whose label or backend name equals, or matches `re:`, `excluded`.
    - `leave`: don't touch the module.
    """

    pattern: str
    action: Action
    candidate: Candidate | None = None
    strategy: StrategyConfig | None = None
    excluded: str = ""
    accept_error: bool = False

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise PlanError(
                f"the action of the rule for {self.pattern!r} must be one of {list(get_args(Action))}, but got {self.action!r}"
            )
        if not isinstance(self.pattern, str):
            raise PlanError(f"a rule's pattern must be a module path or 're:…', but got {self.pattern!r}")

    def matches(self, path: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], path) is not None
        return self.pattern == path


@dataclass(frozen=True)
class Tolerance:
    """What a candidate may be off. `max_relative_error` None takes the default of the module's own dtype.

    Raises PlanError for values that can't be.
    """

    accuracy: Literal["budget", "exact"] = "budget"
    max_relative_error: float | None = None
    min_snr_db: float | None = None
    min_agreement: float = 1.0
    """Share of integer and bool elements that must agree exactly."""

    def __post_init__(self) -> None:
        for name in ("accuracy", "max_relative_error", "min_snr_db", "min_agreement"):
            check_setting(name, getattr(self, name))


@dataclass(frozen=True)
class Limits:
    """Bounds of a run, on by default and said before it starts.

    Raises PlanError for values that can't be.
    """

    max_seconds: float = 600.0
    max_trials: int = 200
    max_samples_per_point: int = 2
    max_sample_bytes: int = 1 << 30
    memory_bytes: int | None = None
    search: Literal["quick", "normal", "exhaustive"] = "normal"

    def __post_init__(self) -> None:
        for name in ("max_seconds", *_WHOLE, "search"):
            check_setting(name, getattr(self, name))


def check_setting(name: str, value: Any, place: str = "") -> None:
    """Refuse a value that a tolerance or limit of this name can't have.

    Raises PlanError that says what may stand there; `place` goes before the name.
    """
    if value is None and name in _MAY_BE_NONE:
        return
    if name in _ONE_OF:
        if value not in _ONE_OF[name]:
            raise PlanError(f"{place}{name} must be one of {list(_ONE_OF[name])}, but got {value!r}")
        return
    kind = int if name in _WHOLE else (int, float)
    least = -math.inf if name == "min_snr_db" else 0
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:  # also NaN
        what = "whole number" if name in _WHOLE else "number"
        bound = "" if name == "min_snr_db" else " of at least 0"
        raise PlanError(f"{place}{name} must be a {what}{bound}, but got {value!r}")
    if name == "min_agreement" and value > 1:
        raise PlanError(f"{place}{name} must be a share of at most 1, but got {value!r}")


@dataclass(frozen=True)
class Plan:
    """Ordered rules (the first that matches a path wins, exclusions add up), a default strategy, tolerances, limits."""

    rules: tuple[Rule, ...] = ()
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    tolerance: Tolerance = field(default_factory=Tolerance)
    limits: Limits = field(default_factory=Limits)
    split_points: bool = False

    def rule_for(self, path: str) -> Rule | None:
        """The first rule other than an exclusion that matches the path."""
        return next((r for r in self.rules if r.action != "exclude" and r.matches(path)), None)

    def excludes(self, path: str, candidate: Candidate) -> Rule | None:
        """The exclusion that keeps the candidate from being tried at the path, or None."""
        for rule in self.rules:
            if rule.action == "exclude" and rule.matches(path):
                names = (candidate.label, candidate.backend)
                pattern = rule.excluded
                if pattern.startswith("re:"):
                    if any(re.fullmatch(pattern[3:], name) for name in names):
                        return rule
                elif pattern in names:
                    return rule
        return None


def is_beneath(path: str, other: str) -> bool:
    """Whether a module path lies under another one; everything lies under the target itself, `""`."""
    return path != other and (other == "" or path.startswith((f"{other}.", f"{other}[")))


@dataclass(frozen=True)
class Choice:
    """The candidate settled on for (module, signature), with its reason in a sentence."""

    path: str
    method: str
    signature: str
    candidate: Candidate
    trial: str | None
    reason: str
    speedup: float | None = None
    error_class: ErrorClass | None = None
    relative_l2: float | None = None
    factor_over_eager: float | None = None
    pinned: bool = False
    accepted_error: bool = False
    losers: Mapping[str, str] = field(default_factory=dict)
    """Why each other candidate lost, by its label."""
