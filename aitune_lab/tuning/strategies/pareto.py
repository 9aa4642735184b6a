"""For trade-offs: latency against numeric error and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import PlanError
from ...schema import Trial
from .base import ChoiceContext, Strategy
from .score import Contender, points_of, preference, weighted_latency, why_wrong
from .words import error, size, times

_SMALLEST_ERROR = 1e-9
"""Relative errors below this are equally good: it is under float32's own rounding."""


@dataclass(frozen=True)
class ParetoStrategy(Strategy):
    """Weighs latency, relative L2 error and peak memory of the right candidates that are faster than eager.

    With a budget: the fastest candidate within it. Without: the knee of the front, the candidate nearest to the
    ideal corner when each axis runs from 0 (best on the front, eager included) to 1 (worst), error on a log axis.

    Args:
        max_relative_error: relative L2 error of the worst leaf at the worst point.
        max_memory_bytes: peak memory at the worst point.
    """

    name: ClassVar[str] = "Pareto"

    max_relative_error: float | None = None
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_relative_error", "max_memory_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
                raise PlanError(f"{name} must be a number of at least 0, but got {value!r}")

    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        return weighted_latency(trial, eager)

    def front(self, trials: Sequence[Trial], eager: Trial, context: ChoiceContext) -> tuple[Trial, ...]:
        """The right trials and eager, without those that another beats in latency, error or memory and equals else.

        Fastest first.
        """
        judged = []
        for trial in trials:
            right = trial.candidate != eager.candidate and not why_wrong(
                trial, points_of(trial, eager), context.tolerance
            )
            if right and isinstance(contender := self.judge(trial, eager, context), Contender):
                judged.append(contender)
        axes = {eager.candidate.label: _axes(eager, 1.0), **{c.label: _axes(c.trial, c.cost) for c in judged}}
        ranks = {c.label: context.complexity.get(c.label, 1) for c in judged}
        kept = [(c.cost, c.label, c.trial) for c in judged] + [(1.0, eager.candidate.label, eager)]
        kept.sort(key=lambda item: item[:2])
        return tuple(trial for _, label, trial in kept if _dominating(label, axes, ranks) is None)

    def order(
        self, contenders: Sequence[Contender], eager: Trial, context: ChoiceContext
    ) -> tuple[list[Contender], dict[str, str]]:
        faster = [c for c in contenders if c.cost < 1]
        reasons = {c.label: why for c in faster if (why := self._over_budget(c.trial))}
        within = [c for c in faster if c.label not in reasons]
        if self.max_relative_error is not None or self.max_memory_bytes is not None:
            return preference(within, dict(context.complexity)), reasons
        axes = {eager.candidate.label: _axes(eager, 1.0), **{c.label: _axes(c.trial, c.cost) for c in within}}
        ranks = {c.label: context.complexity.get(c.label, 1) for c in within}
        dominators = {c.label: _dominating(c.label, axes, ranks) for c in within}
        front = [c for c in within if dominators[c.label] is None]
        reasons |= {
            label: f"{other} is no worse in latency, error and memory" for label, other in dominators.items() if other
        }
        distances = _distances({label: axes[label] for label in [eager.candidate.label, *(c.label for c in front)]})
        # Eager may itself be the knee; then the candidates farther out stay behind it.
        limit = distances[eager.candidate.label]
        reasons |= {
            c.label: f"farther from the knee of the front than eager: {self._tradeoff(c)}"
            for c in front
            if distances[c.label] > limit
        }
        near = [c for c in front if distances[c.label] <= limit]
        return sorted(near, key=lambda c: (distances[c.label], ranks[c.label], c.label)), reasons

    def why_lost(self, contender: Contender, winner: Contender | None, context: ChoiceContext) -> str:
        budgeted = self.max_relative_error is not None or self.max_memory_bytes is not None
        failed = context.confirmed.get(contender.label) is False
        if winner is None or budgeted or failed or contender.cost >= 1:
            return super().why_lost(contender, winner, context)
        return f"farther from the knee of the front than {winner.label}: {self._tradeoff(contender)}"

    @staticmethod
    def _tradeoff(contender: Contender) -> str:
        fast = f"{times(contender.speedup)} times as fast as eager ({contender.figures})"
        return f"{fast}, {_rest(contender.trial)}"

    def why_won(self, winner: Contender) -> str:
        budgets = []
        if self.max_relative_error is not None:
            budgets.append(f"relative L2 error of at most {error(self.max_relative_error)}")
        if self.max_memory_bytes is not None:
            budgets.append(f"peak memory of at most {size(self.max_memory_bytes)}")
        role = f"the fastest with {' and '.join(budgets)}" if budgets else "the knee of the front"
        return f"{super().why_won(winner)}; {role} ({_rest(winner.trial)})"

    def _over_budget(self, trial: Trial) -> str:
        off, memory = trial.relative_l2 or 0.0, _memory(trial)
        if self.max_relative_error is not None and not off <= self.max_relative_error:
            return f"over the error budget: relative L2 {error(off)}, allowed {error(self.max_relative_error)}"
        if self.max_memory_bytes is None:
            return ""
        if memory is None:
            return "its peak memory was not measured, so it can't be held under the budget"
        if memory > self.max_memory_bytes:
            return f"over the memory budget: peak {size(memory)}, allowed {size(self.max_memory_bytes)}"
        return ""


def _memory(trial: Trial) -> int | None:
    peaks = [result.peak_memory_bytes for result in trial.points]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known and len(known) == len(peaks) else None


def _rest(trial: Trial) -> str:
    memory = _memory(trial)
    peak = "" if memory is None else f", peak {size(memory)}"
    return f"relative L2 {error(trial.relative_l2 or 0.0)}{peak}"


def _axes(trial: Trial, cost: float) -> tuple[float, float, float]:
    memory = _memory(trial)
    off = math.log10(max(trial.relative_l2 or 0.0, _SMALLEST_ERROR))
    return cost, off, math.inf if memory is None else float(memory)


def _dominating(label: str, axes: dict[str, tuple[float, float, float]], ranks: dict[str, int]) -> str | None:
    """The best other that is nowhere worse and somewhere better; among equals the simpler, then the first by name."""
    mine = axes[label]
    place = (mine, ranks.get(label, 0), label)
    for other, theirs in sorted(axes.items(), key=lambda item: (item[1], ranks.get(item[0], 0), item[0])):
        if all(a <= b for a, b in zip(theirs, mine, strict=True)) and (theirs, ranks.get(other, 0), other) < place:
            return other
    return None


def _distances(axes: dict[str, tuple[float, float, float]]) -> dict[str, float]:
    """Distance of each to the ideal corner, every axis scaled to 0..1 over these."""
    squares = dict.fromkeys(axes, 0.0)
    for axis in range(3):
        finite = [values[axis] for values in axes.values() if math.isfinite(values[axis])]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        for label, values in axes.items():
            value = values[axis]
            if math.isfinite(value) and high > low:
                squares[label] += ((value - low) / (high - low)) ** 2
            elif not math.isfinite(value) and finite:
                squares[label] += 1.0
    return {label: math.sqrt(square) for label, square in squares.items()}
