"""The quickest tuning: stop at the first candidate that is right and faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...schema import Trial
from .base import ChoiceContext, Decision, Strategy
from .score import Contender, weighted_latency
from .words import times


@dataclass(frozen=True)
class FirstWinsStrategy(Strategy):
    """Takes the first candidate, in the order of the trials, that is right and beats eager beyond noise."""

    name: ClassVar[str] = "FirstWins"

    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        return weighted_latency(trial, eager)

    def order(
        self, contenders: Sequence[Contender], eager: Trial, context: ChoiceContext
    ) -> tuple[list[Contender], dict[str, str]]:
        return [c for c in contenders if c.cost < 1], {}

    def enough(self, decision: Decision) -> bool:
        return decision.winner.candidate.label != "eager" and not decision.second_look

    def why_lost(self, contender: Contender, winner: Contender | None, context: ChoiceContext) -> str:
        if winner is not None and contender.cost < 1 and context.confirmed.get(contender.label) is None:
            measured = f"{times(contender.speedup)} times as fast as eager ({contender.figures})"
            return f"{winner.label} came first: {measured}"
        return super().why_lost(contender, winner, context)
