"""One (module, signature) on its way through a run: its candidates, their trials, the decision."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..capture.inspector import InspectedModule
from ..errors import PlanError
from ..measure.benchmark import Timing
from ..measure.verdict import Verdict, faster
from ..runtime.installed import InstalledExecutable
from ..schema import Candidate, Choice, Plan, Point, PointResult, Rule, Trial
from .bench import Bench
from .candidates import EAGER, Shortlist, estimated_seconds
from .recall import CountingMeter, Known, is_disturbed
from .search import Rival, best_so_far, looks_first, rival_of, why_skipped
from .strategies import ChoiceContext, Decision, Strategy, decide_pin
from .strategies.score import Contender
from .trial import Built, eager_built, eager_trial, not_ok, revived as revived_trial, time_point

ALPHA = 0.01
"""Of the second look's paired test, shared among the candidates looked at (Holm's step-down)."""
LOOK_BLOCKS = 24
"""Of a second look at a large gain; a smaller one gets as many as the limits allow."""
LARGE_GAIN = 1.15
MORE_ROUNDS = 3
"""How many times as many rounds a second look adds if it is left in doubt."""
FUTILE_P_VALUE = 0.25
"""A second look that comes to more than this is over: more rounds would not make a gain of it."""


@dataclass
class Race:
    """The candidates of one (module, signature).

    `equal_points` says that each point weighs the same, relative to eager there (`batch_sizes`); otherwise a point
    weighs the calls that were seen of it. Executables of candidates that can't win any more are freed, and made again
    should they be needed.
    """

    module: InspectedModule
    bench: Bench
    listed: Shortlist
    plan: Plan
    known: Known
    context: ChoiceContext
    equal_points: bool = False
    trials: list[Trial] = field(default_factory=list)
    built: dict[str, Built] = field(default_factory=dict)
    choice: Choice | None = None

    @property
    def path(self) -> str:
        return self.module.path

    @property
    def name(self) -> str:
        """How logs call the module."""
        return self.path or "(model)"

    def add(self, built: Built) -> Trial:
        """Take a trial in, with its points weighted."""
        trial = built.trial = self.weighted(built.trial)
        if built.installed is not None:
            built.installed.trial = trial
        self.trials.append(trial)
        self.built[trial.candidate.label] = built
        return trial

    def weighted(self, trial: Trial) -> Trial:
        """The trial with what each of its points counts."""
        if not self.equal_points:
            return replace(trial, points=tuple(replace(p, weight=float(p.calls)) for p in trial.points))

        def weight(result: PointResult) -> float:
            if not result.calls:  # an end of a declared range, which no batch size asked for
                return 0.0
            return 1.0 / result.eager.median_ms if result.eager is not None and result.eager.median_ms > 0 else 1.0

        return replace(trial, points=tuple(replace(p, weight=weight(p)) for p in trial.points))

    def eager(self) -> Trial:
        """Eager's trial, from what was measured beside the candidates so far."""
        return self.weighted(eager_trial(self.bench, self.known.keys.trial(EAGER), self.trials))

    def best(self) -> Contender | None:
        """The best right candidate so far."""
        return best_so_far(self.trials, self.eager(), self.plan.tolerance)

    def rival(self, strategy: Strategy, *, pinned: bool) -> Rival | None:
        """Who a rough look compares the next candidate with; None if it is measured in full whatever it takes."""
        if not looks_first(self.plan.limits.search, strategy, pinned=pinned):
            return None
        return rival_of(self.best(), strategy)

    def why_skipped(self, candidate: Any, strategy: Strategy) -> str | None:
        """Why the search level leaves a candidate out after what its simpler form came to."""
        first = self.listed.variant_of.get(candidate)
        if first is None:
            return None
        return why_skipped(self.plan.limits.search, candidate, first, self.trials, self.best(), strategy)

    def decide(self, strategy: Strategy) -> Generator[str, None, Decision]:
        """The strategy's decision, with second looks at provisional winners until it stands; yields what it does."""
        eager = self.eager()
        decision = strategy.choose(self.trials, eager, self.context)
        while decision.second_look:
            trial = decision.second_look[0]
            label = trial.candidate.label
            found = self._known_look(trial, strategy, eager)
            if found is None:
                yield f"measuring {label} a second time"
                if not self.make_live(label):
                    eager = self.eager()
                    decision = strategy.choose(self.trials, eager, self.context)
                    continue
                found = self._looked(trial, strategy, eager)
            confirmed, p_value = found
            self.context = replace(
                self.context,
                confirmed={**self.context.confirmed, label: confirmed},
                p_values={**self.context.p_values, label: p_value},
            )
            decision = strategy.choose(self.trials, eager, self.context)
        return decision

    def _look_key(self, trial: Trial, strategy: Strategy, eager: Trial) -> tuple[dict[Point, float], int]:
        """What the outcome of a second look depends on beside the trial."""
        points = strategy.decisive_points(trial, eager, self.context)
        weights = {p.point: p.weight if len(points) > 1 else 1.0 for p in trial.points if p.point in points}
        return weights, len(self.listed.candidates) - len(self.context.confirmed)

    def _known_look(self, trial: Trial, strategy: Strategy, eager: Trial) -> tuple[bool, float] | None:
        return self.known.look(trial, *self._look_key(trial, strategy, eager))

    def _looked(self, trial: Trial, strategy: Strategy, eager: Trial) -> tuple[bool, float]:
        """A second look, kept for later runs unless other load disturbed it."""
        meter = self.bench.meter
        if isinstance(meter, CountingMeter):
            meter.watch()
        confirmed, p_value = self._second_look(trial, strategy, eager)
        if not (isinstance(meter, CountingMeter) and meter.disturbed):
            self.known.keep_look(trial, *self._look_key(trial, strategy, eager), confirmed, p_value)
        return confirmed, p_value

    def make_live(self, label: str) -> bool:
        """Make sure that a candidate's executable can be called. If that fails its trial becomes one that failed."""
        built = self.built[label]
        if built.installed is not None:
            return True
        try:
            revived = revived_trial(self.bench, built.trial, self.known)
        except Exception as error:
            failed = not_ok(built.trial, error, built.trial.build_seconds, built=True)
            self.trials = [failed if t.candidate.label == label else t for t in self.trials]
            self.built[label] = Built(failed)
            return False
        self.built[label] = revived
        return True

    def is_live(self, label: str) -> bool:
        """Whether a candidate's executable can be called as it is."""
        return self.built[label].installed is not None

    def release(self, strategy: Strategy | None) -> None:
        """Free the executables of all candidates but the one that would win now (None: a pin decides)."""
        if strategy is None:
            return
        decision = strategy.choose(self.trials, self.eager(), self.context)
        best = decision.second_look[0] if decision.second_look else decision.winner
        self.close(but=best.candidate.label)

    def _second_look(self, trial: Trial, strategy: Strategy, eager: Trial) -> tuple[bool, float]:
        """Fresh blocks at the points that decide: the candidate must be faster again, weighted as the first time.

        Gives whether it was, and the test's p-value: NaN if other load disturbed the look. A look left in doubt goes on
        once: each of the two tests, the second over all rounds, gets half of α, so that going on finds no gains in noise
        (Bonferroni; giving up early only lowers the error rate).
        """
        label = trial.candidate.label
        points = strategy.decisive_points(trial, eager, self.context)
        weights = {p.point: p.weight if len(points) > 1 else 1.0 for p in trial.points}
        # More rounds than the first look stops at: with a dozen, one noisy round hides a gain of 15 %.
        limits = self.bench.limits
        gains = [p.speedup for p in trial.points if p.point in points and p.speedup is not None]
        enough = LOOK_BLOCKS if gains and min(gains) >= LARGE_GAIN else limits.max_blocks
        rounds = min(max(enough, limits.min_blocks), limits.max_blocks)
        alpha = ALPHA / max(1, len(self.listed.candidates) - len(self.context.confirmed)) / 2
        timings = self._fresh(label, points, rounds, seed=1)
        verdict = self._verdict(label, timings, weights, alpha)
        if verdict is not None and not verdict.is_faster and verdict.p_value <= FUTILE_P_VALUE:
            more = self._fresh(label, points, MORE_ROUNDS * rounds, seed=2)
            timings = {point: timing.joined(more[point]) for point, timing in timings.items()}
            verdict = self._verdict(label, timings, weights, alpha)
        return (False, math.nan) if verdict is None else (verdict.is_faster, verdict.p_value)

    def _fresh(self, label: str, points: Iterable[Point], rounds: int, *, seed: int) -> dict[Point, Timing]:
        """A candidate and eager timed anew at points, with that many rounds as far as the time limit allows."""
        limits = replace(self.bench.limits, min_blocks=rounds, max_blocks=rounds)
        return {point: time_point(self.bench, self.built[label], point, seed=seed, limits=limits) for point in points}

    @staticmethod
    def _verdict(
        label: str, timings: Mapping[Point, Timing], weights: Mapping[Point, float], alpha: float
    ) -> Verdict | None:
        """Whether a candidate is faster than eager over these points; None if other load disturbed it."""
        if any(m.disturbed for timing in timings.values() for m in timing.measurements.values()):
            return None
        return faster(weighted_sum(timings, weights, (label, "eager")), label, "eager", alpha=alpha)

    def decide_pin(self, rule: Rule) -> Decision:
        """The pinned candidate. Raises PlanError, with figures, if it can't be kept."""
        if self.listed.not_tried and rule.candidate is not None and rule.candidate != EAGER:
            reason = next(iter(self.listed.not_tried.values()))
            raise PlanError(f"the pin of {rule.candidate.label} on {rule.pattern!r} can't be kept: {reason}")
        return decide_pin(rule, self.trials, self.eager(), self.plan.tolerance)

    def settle(self, decision: Decision, *, pinned: bool) -> Choice:
        """Turn a decision into the choice; the losers' executables are closed."""
        trial = decision.winner
        costs = [
            (p.weight * p.latency.median_ms, p.weight * p.eager.median_ms)
            for p in trial.points
            if p.latency is not None and p.eager is not None
        ]
        figures = [m for p in trial.points if p.weight for m in (p.latency, p.eager) if m is not None]
        disturbed = any(m.disturbed for m in figures)
        spent = 0.0 if disturbed else sum(cost for cost, _ in costs)
        self.choice = Choice(
            self.path,
            self.module.method,
            self.bench.recorded.signature.key,
            trial.candidate,
            trial.key,
            decision.reason,
            sum(eager for _, eager in costs) / spent if spent > 0 else None,
            trial.error_class,
            trial.relative_l2,
            trial.factor_over_eager,
            pinned,
            decision.accepted_error,
            decision.losers,
        )
        self.close(but=trial.candidate.label)
        return self.choice

    def installed(self) -> InstalledExecutable:
        """What the choice installs. Its executable is live, or it is eager."""
        assert self.choice is not None
        built = self.built.get(self.choice.candidate.label)
        if built is None:
            built = eager_built(self.bench, self.eager())
        assert built.installed is not None
        built.installed.choice = self.choice
        return built.installed

    def close(self, but: str | None = None) -> None:
        """Free the executables, but for one."""
        for label, built in self.built.items():
            if label != but and built.installed is not None:
                built.installed.executable.close()
                built.installed = built.call = None

    def held_bytes(self) -> int:
        """What its live executables hold beside the module's own weights."""
        live = [built.installed for built in self.built.values() if built.installed is not None]
        return sum(installed.executable.memory_bytes for installed in live)

    def hand_over(self) -> None:
        """What is installed belongs to the target from now on."""
        for built in self.built.values():
            built.installed = built.call = None

    def disturbed(self) -> bool:
        """Whether other load spoilt a measurement."""
        return any(map(is_disturbed, self.trials))

    def saved_seconds(self) -> float:
        """What the choice saves over the calls that were recorded."""
        trial = next((t for t in self.trials if self.choice is not None and t.key == self.choice.trial), None)
        if trial is None or trial.candidate == EAGER:
            return 0.0
        pairs = [(p.calls, p.eager, p.latency) for p in trial.points]
        return sum(n * (e.median_ms - c.median_ms) / 1000 for n, e, c in pairs if e is not None and c is not None)

    def estimated_seconds(self, candidate: Candidate) -> float:
        """What trying a candidate will take, by what is typical."""
        points = len(self.bench.recorded.samples)
        alone = replace(self.listed, candidates=[candidate])
        return estimated_seconds(alone, self.module.module, points, self.module.row.mean_ms)

    def planned(self) -> dict[str, Any]:
        """What will be tried, as data, for those who want to know before the start."""
        signature = self.bench.recorded.signature
        return {
            "path": self.path,
            "method": self.module.method,
            "signature": signature.key,
            "label": signature.label,
            "candidates": [candidate.label for candidate in self.listed.candidates],
            "not_tried": dict(self.listed.not_tried),
            "left_out": dict(self.listed.left_out),
            "why": dict(self.listed.why),
            "seconds": dict(self.listed.seconds),
        }


def weighted_sum(timings: Mapping[Point, Timing], weights: Mapping[Point, float], labels: Sequence[str]) -> Timing:
    """Timings of several points as one: round by round the weighted sum of latencies; disturbed if any one is."""
    rounds = min(len(t.blocks_ms[label]) for t in timings.values() for label in labels)
    blocks = {
        label: tuple(sum(weights[p] * t.blocks_ms[label][i] for p, t in timings.items()) for i in range(rounds))
        for label in labels
    }
    measurements = {}
    for label in labels:
        held = [t.measurements[label] for t in timings.values()]
        measurements[label] = next((m for m in held if m.disturbed), held[0])
    return Timing(measurements, blocks)
