"""The user's wishes and what was settled on, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .trial import Candidate, ErrorClass, Option

Action = Literal["pin", "strategy", "exclude", "leave"]


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

    def matches(self, path: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], path) is not None
        return self.pattern == path


@dataclass(frozen=True)
class Tolerance:
    """What a candidate may be off. `max_relative_error` None takes the default of the module's own dtype."""

    accuracy: Literal["budget", "exact"] = "budget"
    max_relative_error: float | None = None
    min_snr_db: float | None = None
    min_agreement: float = 1.0
    """Share of integer and bool elements that must agree exactly."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a run, on by default and said before it starts."""

    max_seconds: float = 600.0
    max_trials: int = 200
    max_samples_per_point: int = 2
    max_sample_bytes: int = 1 << 30
    memory_bytes: int | None = None
    search: Literal["quick", "normal", "exhaustive"] = "normal"


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
