"""What a strategy is: a frozen config and a pure function from trials to a decision."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, cast

from ...errors import PlanError
from ...schema import Candidate, Option, Point, StrategyConfig, Tolerance, Trial
from .score import Contender, is_tie, points_of, preference, what_became, why_wrong
from .words import accuracy, tally, times


@dataclass(frozen=True)
class ChoiceContext:
    """What a decision rests on beside the trials.

    Attributes:
        tolerance: what candidates may be off.
        confirmed: the result of the second look by candidate label: it won again, it didn't, or (None or
            absent) it hasn't been looked at.
        p_values: of the second look's paired test, by label, for the sentences; NaN where other load disturbed it.
        complexity: by label; ties go to the lower one (absent counts as 1).
        not_tried: candidates without a trial and why, by label; they join the losers.
        memory_limit_bytes: points above it don't count where a strategy weighs memory.
        batch_symbol: which symbol counts the items of a call.
    """

    tolerance: Tolerance = field(default_factory=Tolerance)
    confirmed: Mapping[str, bool | None] = field(default_factory=dict)
    p_values: Mapping[str, float] = field(default_factory=dict)
    complexity: Mapping[str, int] = field(default_factory=dict)
    not_tried: Mapping[str, str] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    batch_symbol: str = "b"


@dataclass(frozen=True)
class Decision:
    """Who wins and why, why each other lost, and who must be measured again before the decision stands.

    While `second_look` isn't empty the winner is provisional: measure those candidates against eager again, in
    that order, on fresh blocks, and choose again with their results in `ChoiceContext.confirmed`.
    """

    winner: Trial
    reason: str
    losers: dict[str, str]
    second_look: tuple[Trial, ...] = ()
    accepted_error: bool = False
    """The winner is pinned although it is out of tolerance, as the user accepted."""


class Strategy(ABC):
    """A way to choose among right candidates. Subclasses are frozen dataclasses whose fields are their options.

    Contract: `choose` is a pure function of its arguments. A candidate that isn't right, or whose measurements
    decide nothing, never wins; eager stays unless a candidate beats it in two looks.
    """

    name: ClassVar[str]
    """Stable name in plans and files."""
    needs_second_look: ClassVar[bool] = True
    """A contender wins only if it beats eager in a second look."""
    fastest_wins: ClassVar[bool] = False
    """Nothing but speed tells right candidates apart, so one much slower than another can't be chosen."""

    def config(self) -> StrategyConfig:
        """This strategy as data: its name and the options that differ from their defaults."""
        described = fields(cast("Any", self))
        options = [(f.name, getattr(self, f.name)) for f in described]
        defaults = {f.name: f.default for f in described if f.default is not MISSING}
        kept = ((name, value) for name, value in options if name not in defaults or defaults[name] != value)
        return StrategyConfig(self.name, tuple(sorted(kept)))

    @classmethod
    def of_options(cls, options: Mapping[str, Option]) -> Strategy:
        """The strategy with these options. Raises PlanError for unknown, missing or impossible ones."""
        described = fields(cast("Any", cls))
        known = [f.name for f in described]
        required = [f.name for f in described if f.default is MISSING]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise PlanError(f"options of strategy {cls.name!r} must be among {known}, but got {unknown}")
        if missing := [name for name in required if name not in options]:
            raise PlanError(f"strategy {cls.name!r} needs the option {missing[0]!r}: give it a value")
        return cls(**options)

    def admits(self, candidate: Candidate) -> bool:
        """Whether a trial of this candidate can matter to the choice; others need not be tried."""
        return True

    def extra_candidates(self) -> tuple[Candidate, ...]:
        """Candidates that the user's options name and that must be tried though no backend proposes them."""
        return ()

    def enough(self, decision: Decision) -> bool:
        """Whether further trials can't change the decision, so that the run may go on to the next module."""
        return False

    def decisive_points(self, trial: Trial, eager: Trial, context: ChoiceContext) -> tuple[Point, ...]:
        """The points whose weighted latencies the second look's paired test is about."""
        return points_of(trial, eager)

    @abstractmethod
    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        """The figure by which a right candidate is compared, or the reason why the trial decides nothing."""

    def order(
        self, contenders: Sequence[Contender], eager: Trial, context: ChoiceContext
    ) -> tuple[list[Contender], dict[str, str]]:
        """The contenders that would replace eager, most wanted first; and special reasons of others.

        Contenders that are merely slower need no reason here.
        """
        return preference([c for c in contenders if c.cost < 1], dict(context.complexity)), {}

    def choose(self, trials: Sequence[Trial], eager: Trial, context: ChoiceContext) -> Decision:
        """Decide by what was measured. `eager` is the trial of the module as it is; it may stand among `trials`."""
        losers = dict(context.not_tried)
        contenders: list[Contender] = []
        for trial in trials:
            if trial.candidate == eager.candidate:
                continue
            judged = why_wrong(trial, self.compared_points(trial, eager), context.tolerance) or self.judge(
                trial, eager, context
            )
            if isinstance(judged, Contender):
                contenders.append(judged)
            else:
                losers[trial.candidate.label] = judged
        order, special = self.order(contenders, eager, context)
        winner, pending = None, []
        for contender in order:
            verdict = context.confirmed.get(contender.label) if self.needs_second_look else True
            if verdict:
                winner = contender
                break
            if verdict is None:
                pending.append(contender)
        for contender in contenders:
            if contender in pending:
                losers[contender.label] = f"not confirmed: {speed(contender)}, but it was not measured a second time"
            elif winner is None or contender.label != winner.label:
                losers[contender.label] = special.get(contender.label) or self.why_lost(contender, winner, context)
        looks = tuple(contender.trial for contender in pending)
        if winner is None:
            reason = self.why_eager(
                [t for t in trials if t.candidate != eager.candidate], contenders, order, pending, losers, context
            )
            return Decision(eager, reason, losers, looks)
        losers[eager.candidate.label] = self.why_eager_lost(winner, eager)
        return Decision(winner.trial, self.why_won(winner), losers, looks)

    def compared_points(self, trial: Trial, eager: Trial) -> tuple[Point, ...]:
        """The points at which the candidate must have been compared with eager."""
        return points_of(trial, eager)

    def why_won(self, winner: Contender) -> str:
        """The winner's sentence."""
        return f"{speed(winner)}, {accuracy(winner.trial)}"

    def why_eager_lost(self, winner: Contender, eager: Trial) -> str:
        """The sentence of eager, which lost."""
        return f"{winner.label} is {times(winner.speedup)} times as fast ({winner.figures})"

    def why_lost(self, contender: Contender, winner: Contender | None, context: ChoiceContext) -> str:
        """The sentence of a right candidate that was timed and lost."""
        label = contender.label
        measured = f"{times(contender.speedup)} times as fast as eager ({contender.figures})"
        if contender.cost >= 1:
            return f"not faster than eager: {measured}"
        if self.needs_second_look and context.confirmed.get(label) is False:
            return _not_again(contender, context)
        assert winner is not None  # else it is pending, failed its second look or has a special reason
        if is_tie(contender, winner):
            return f"as fast as {winner.label} within noise, which is simpler or more exact: {measured}"
        return f"slower than {winner.label}: {measured} against {times(winner.speedup)} times"

    def why_eager(
        self,
        trials: Sequence[Trial],
        contenders: Sequence[Contender],
        order: Sequence[Contender],
        pending: Sequence[Contender],
        losers: Mapping[str, str],
        context: ChoiceContext,
    ) -> str:
        """The sentence if eager stays."""
        if pending:
            return f"eager stays for now: {speed(pending[0])}, but that was not measured a second time"
        if not contenders:
            return f"eager stays: {_what_became(trials, losers, context)}"
        best = order[0] if order else min(contenders, key=lambda c: (c.cost, c.label))
        if best.cost < 1 and not order:
            return f"eager stays: the best right candidate, {best.label}, was not chosen: {losers[best.label]}"
        if best.cost < 1:
            return f"eager stays: the best right candidate, {best.label}, {_not_again(best, context)}"
        return (
            f"eager stays: the best right candidate, {best.label}, was only {times(best.speedup)} times as fast "
            f"({best.figures})"
        )


def speed(contender: Contender) -> str:
    """`onnxruntime is 2.1 times as fast as eager (3.10 ms against 6.52 ms at b=8)`."""
    return f"{contender.label} is {times(contender.speedup)} times as fast as eager ({contender.figures})"


def _not_again(contender: Contender, context: ChoiceContext) -> str:
    p_value = context.p_values.get(contender.label)
    at_first = f"{times(contender.speedup)} times as fast at first ({contender.figures})"
    if p_value is not None and math.isnan(p_value):
        return f"could not be confirmed: {at_first}, and other load disturbed the second look; tune again on a quieter machine"
    p = f" (p={p_value:.2g})" if p_value is not None else ""
    return f"could not be told from eager beyond noise: {at_first}, not again in the second look{p}"


def _what_became(trials: Sequence[Trial], losers: Mapping[str, str], context: ChoiceContext) -> str:
    """Why no candidate could be compared: what became of them, counted by kind, and what to do about it."""
    if not losers:
        return "no candidate was tried"
    kinds = [what_became(trial, context.tolerance) for trial in trials]
    for why in context.not_tried.values():
        head, _, rest = why.partition(":")
        kinds.append(
            "was excluded"
            if head.startswith("excluded")
            else "was unavailable"
            if head == "unavailable"
            else f"was not tried ({rest.strip() or why})"
        )
    cure = "; measure again on a quieter machine" if any("disturbed" in kind for kind in kinds) else ""
    if len(kinds) == 1:
        return f"the only candidate, {next(iter(losers))}, {kinds[0]}{cure}"
    counts = tally(kinds)
    if len(set(kinds)) == 1:
        return f"all {len(kinds)} candidates {counts.partition(' ')[2]}{cure}"
    return f"of {len(kinds)} candidates {counts}{cure}"
