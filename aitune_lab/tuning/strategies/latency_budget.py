"""For services with a deadline: every point must stay within a latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import PlanError
from ...schema import Point, PointResult, Trial
from .base import ChoiceContext, Strategy
from .score import Contender, eager_at, preference, weighted_latency
from .words import milliseconds


@dataclass(frozen=True)
class LatencyBudgetStrategy(Strategy):
    """Keeps the median latency of every point within `budget_ms`; among those that do, the fastest overall wins.

    - Eager keeps to the budget: a candidate must too, and beat eager's weighted latency.
    - Eager doesn't: a candidate that does wins, even if its weighted latency is no better.
    - Nobody does: the fastest wins, as under `MinLatency`, and the reason says so.
    """

    name: ClassVar[str] = "LatencyBudget"

    budget_ms: float

    def __post_init__(self) -> None:
        value: object = self.budget_ms
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise PlanError(f"budget_ms must be a positive number of milliseconds, but got {value!r}")

    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        return weighted_latency(trial, eager)

    def order(
        self, contenders: Sequence[Contender], eager: Trial, context: ChoiceContext
    ) -> tuple[list[Contender], dict[str, str]]:
        complexity = dict(context.complexity)
        over = {c.label: excess for c in contenders if (excess := self._over(c.trial))}
        within = [c for c in contenders if c.label not in over]
        reasons = {
            label: f"over the budget of {milliseconds(self.budget_ms)}: {excess}" for label, excess in over.items()
        }
        # Eager is judged beside each contender, as both were measured in alternation.
        wanted = [c for c in within if c.cost < 1 or self._eager_over(c.trial, eager)]
        if within or not all(self._eager_over(c.trial, eager) for c in contenders):
            return preference(wanted, complexity), reasons
        return preference([c for c in contenders if c.cost < 1], complexity), {}

    def decisive_points(self, trial: Trial, eager: Trial, context: ChoiceContext) -> tuple[Point, ...]:
        late = self._eager_over(trial, eager)
        return late if late and not self._over(trial) else super().decisive_points(trial, eager, context)

    def why_won(self, winner: Contender) -> str:
        excess = self._over(winner.trial)
        budget = milliseconds(self.budget_ms)
        kept = (
            f"no candidate keeps to the budget of {budget} ({excess})" if excess else f"within the budget of {budget}"
        )
        return f"{super().why_won(winner)}; {kept}"

    def why_eager_lost(self, winner: Contender, eager: Trial) -> str:
        late = self._eager_over(winner.trial, eager)
        if late and not self._over(winner.trial):
            return f"over the budget of {milliseconds(self.budget_ms)} at {', '.join(point.label for point in late)}"
        return super().why_eager_lost(winner, eager)

    def _over(self, trial: Trial) -> str:
        """The point that is furthest over the budget, in words; empty if none is."""
        late = [r for r in trial.points if r.latency is not None and r.latency.median_ms > self.budget_ms]
        if not late:
            return ""
        worst = max(late, key=_median)
        return f"{milliseconds(_median(worst))} at {worst.point.label}"

    def _eager_over(self, trial: Trial, eager: Trial) -> tuple[Point, ...]:
        """The points at which eager, measured beside this trial, is over the budget."""
        measured = ((result.point, eager_at(result, eager)) for result in trial.points)
        return tuple(point for point, latency in measured if latency is not None and latency.median_ms > self.budget_ms)


def _median(result: PointResult) -> float:
    return result.latency.median_ms if result.latency is not None else 0.0
