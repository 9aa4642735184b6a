"""The user has decided on a backend; the module runs on it wherever it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...backends import registry
from ...backends.base import Backend
from ...errors import PlanError
from ...schema import Candidate, Option, StrategyConfig, Trial
from .base import ChoiceContext, Decision, Strategy, speed
from .score import Contender, points_of, preference, weighted_latency, why_wrong
from .words import accuracy, times


@dataclass(frozen=True, init=False)
class OneBackendStrategy(Strategy):
    """Takes the named backend where it is right, however fast it is; the best of its candidates if it has several.

    Args:
        backend: its name, its class, or an instance, whose options then must hold.
        options: options that a candidate must have, e.g. `OneBackendStrategy("inductor", freezing=True)`.

    Raises:
        PlanError: the backend doesn't have such an option, or isn't known although options are given.
    """

    name: ClassVar[str] = "OneBackend"
    needs_second_look: ClassVar[bool] = False

    backend: str
    options: tuple[tuple[str, Option], ...]

    def __init__(self, backend: str | type[Backend] | Backend, **options: Any) -> None:
        if isinstance(backend, Backend):
            candidate = backend.candidate()
            backend, options = candidate.backend, {**dict(candidate.options), **options}
        elif isinstance(backend, type) and issubclass(backend, Backend):
            backend = backend.name
        if not isinstance(backend, str):
            raise PlanError(f"backend must be a name, a Backend class or an instance of one, but got {backend!r}")
        if options:
            # Options equal to their defaults are dropped, as in candidates.
            wanted = Candidate(backend, tuple(sorted(options.items())))
            options = dict(registry.of(wanted).candidate().options)
        object.__setattr__(self, "backend", backend)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def config(self) -> StrategyConfig:
        return StrategyConfig(self.name, tuple(sorted([("backend", self.backend), *self.options])))

    @classmethod
    def of_options(cls, options: Mapping[str, Option]) -> OneBackendStrategy:
        backend = options.get("backend")
        if not isinstance(backend, str):
            raise PlanError(
                f"strategy 'OneBackend' needs the option 'backend', the name of a backend, but got {backend!r}"
            )
        return cls(backend, **{name: value for name, value in options.items() if name != "backend"})

    def admits(self, candidate: Candidate) -> bool:
        return candidate.backend == self.backend and set(self.options) <= set(candidate.options)

    def extra_candidates(self) -> tuple[Candidate, ...]:
        return (Candidate(self.backend, self.options),) if self.options else ()

    def judge(self, trial: Trial, eager: Trial, context: ChoiceContext) -> Contender | str:
        return weighted_latency(trial, eager)

    def choose(self, trials: Sequence[Trial], eager: Trial, context: ChoiceContext) -> Decision:
        losers = dict(context.not_tried)
        if self.admits(eager.candidate):
            for trial in trials:
                if trial.candidate != eager.candidate:
                    losers[trial.candidate.label] = "eager was asked for"
            return Decision(eager, "eager was asked for", losers)
        timed: list[Contender] = []
        untimed: list[tuple[Trial, str]] = []
        wrong: list[tuple[str, str]] = []
        for trial in trials:
            label = trial.candidate.label
            if trial.candidate == eager.candidate:
                continue
            if not self.admits(trial.candidate):
                losers[label] = f"{self._wanted} was asked for"
            elif reason := why_wrong(trial, points_of(trial, eager), context.tolerance):
                losers[label] = reason
                wrong.append((label, reason))
            elif isinstance(judged := self.judge(trial, eager, context), str):
                losers[label] = judged
                untimed.append((trial, judged))
            else:
                timed.append(judged)
        if timed:
            best, *others = preference(timed, dict(context.complexity))
            for other in others:
                losers[other.label] = self.why_lost(other, best, context)
            losers[eager.candidate.label] = f"{self._wanted} was asked for"
            return Decision(best.trial, f"{speed(best)}, {accuracy(best.trial)}; asked for", losers)
        if untimed:
            trial, why = min(
                untimed, key=lambda pair: (context.complexity.get(pair[0].candidate.label, 1), pair[0].candidate.label)
            )
            label = trial.candidate.label
            del losers[label]
            losers[eager.candidate.label] = f"{self._wanted} was asked for"
            return Decision(trial, f"{label} was asked for and is right, {accuracy(trial)}; {why}", losers)
        if not wrong:
            known = "; ".join(
                f"{label}: {why}" for label, why in sorted(context.not_tried.items()) if self._names(label)
            )
            return Decision(eager, f"eager stays: {self._wanted} was not tried{f' ({known})' if known else ''}", losers)
        label, reason = min(wrong)
        return Decision(eager, f"eager stays: {label} was asked for but can't be used: {reason}", losers)

    def why_lost(self, contender: Contender, winner: Contender | None, context: ChoiceContext) -> str:
        assert winner is not None
        return (
            f"{winner.label} was preferred: {times(contender.speedup)} times as fast as eager ({contender.figures}) "
            f"against {times(winner.speedup)} times"
        )

    @property
    def _wanted(self) -> str:
        return Candidate(self.backend, self.options).label

    def _names(self, label: str) -> bool:
        return label.partition("[")[0] == self.backend
