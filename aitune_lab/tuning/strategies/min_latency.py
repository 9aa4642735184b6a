"""The default: the least time over the calls that were seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...schema import Trial
from .base import ChoiceContext, Strategy
from .score import Contender, weighted_latency


@dataclass(frozen=True)
class MinLatencyStrategy(Strategy):
    """Minimises, over the points, the sum of weight x median latency.

    A recorded point weighs its calls; each of `batch_sizes` weighs the same, relative to eager there
    (`PointResult.weight`). The winner beats eager beyond noise; ties go to the simpler, more exact candidate.
    """

    name: ClassVar[str] = "MinLatency"
    fastest_wins: ClassVar[bool] = True

    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        return weighted_latency(trial, eager)
