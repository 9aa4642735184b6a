"""For batch work: the most items per second at whichever batch size gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...schema import Point, Trial
from .base import ChoiceContext, Strategy
from .score import Contender, best_throughput


@dataclass(frozen=True)
class MaxThroughputStrategy(Strategy):
    """Maximises items per second at the best point under the memory limit, against eager at its best point.

    Items of a call are the size of the batch symbol there (1 without one). Points that weren't timed, or
    whose peak memory is above `ChoiceContext.memory_limit_bytes`, don't count.
    """

    name: ClassVar[str] = "MaxThroughput"
    fastest_wins: ClassVar[bool] = True

    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        found = best_throughput(trial, eager, context.batch_symbol, context.memory_limit_bytes)
        return found if isinstance(found, str) else found[0]

    def compared_points(self, trial: Trial, eager: Trial) -> tuple[Point, ...]:
        return tuple(result.point for result in trial.points if result.latency is not None)

    def decisive_points(self, trial: Trial, eager: Trial, context: ChoiceContext) -> tuple[Point, ...]:
        found = best_throughput(trial, eager, context.batch_symbol, context.memory_limit_bytes)
        return () if isinstance(found, str) else (found[1],)
