"""Takes the units of a run through their trials and decisions; every step is an event."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from ..backends import registry
from ..schema import Candidate, Event, EventKind, Plan, Rule, Trial, to_data
from .candidates import EAGER, Shortlist
from .control import Control, Remaining
from .making import BUILDING, Steps
from .observe import notice
from .race import Race
from .recall import Recall
from .strategies import Decision, Strategy
from .strategies.words import size
from .trial import Built, attempt
from .units import Unit, strategy_for


class Events:
    """Numbers a run's events and tells their time."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._seq = 0

    def event(self, kind: EventKind, **parts: Any) -> Event:
        data = parts.pop("data", {})
        self._seq += 1
        event = Event(self._seq - 1, self._control.seconds(), kind, data=data, **parts)
        notice(event)
        return event

    def log(self, message: str, level: str = "info", **more: Any) -> Event:
        return self.event("log", data={"level": level, "message": message, **more})


class Racing:
    """The trials of a run. `trials` holds those that have ended, by key; `total` counts those planned.

    While `applying` a paused run isn't waited in: what was found so far is being installed.
    """

    def __init__(self, plan: Plan, recall: Recall, control: Control, events: Events) -> None:
        self._plan, self._recall, self._control, self._events = plan, recall, control, events
        self.remaining = Remaining()
        self.trials: dict[str, Trial] = {}
        self.total = 0
        self.applying = False
        self.races: list[Race] = []
        """Those of the run so far."""
        self.target_bytes = 0
        """What the target's weights take."""
        self._said_problem = False

    def wish(self, unit: Unit) -> tuple[Strategy, Rule | None]:
        """Who decides for a unit, and the plan's rule for it."""
        rule = self._plan.rule_for(unit.path)
        return strategy_for(self._plan, rule), rule

    def plan_trials(self, race: Race) -> int:
        """Add a race to what remains to be done; gives how many of its trials the store knows."""
        known = 0
        self.races.append(race)
        for candidate in race.listed.candidates:
            is_known = race.known.is_known(race.bench, candidate)
            known += is_known
            self.remaining.plan(_what(race, candidate), 0.0 if is_known else race.estimated_seconds(candidate))
        return known

    def tune_unit(self, unit: Unit) -> Iterator[Event]:
        """All candidates over all signatures of a unit, the cheapest candidates first, then the choices."""
        strategy, rule = self.wish(unit)
        pinned = rule is not None and rule.action == "pin"
        order = sorted(
            {c for race in unit.races for c in race.listed.candidates},
            key=lambda c: min(_position(race.listed, c) for race in unit.races),
        )
        stops_early = type(strategy).enough is not Strategy.enough and not pinned
        settled: list[Race] = []
        for candidate in order:
            for race in unit.races:
                if candidate not in race.listed.candidates:
                    continue
                if skipped := race.why_skipped(candidate, strategy):
                    race.listed.not_tried[candidate.label] = skipped
                elif race in settled:
                    why = "not tried: the first right and faster one was taken"
                    race.listed.not_tried[candidate.label] = why
                else:
                    yield from self._one_trial(race, candidate, rule, strategy)
                    if stops_early and strategy.enough((yield from self._decide(race, strategy))):
                        settled.append(race)
                self.remaining.skip(_what(race, candidate))
        for race in unit.races:
            yield from self.choose(race, strategy, rule)

    def _one_trial(self, race: Race, candidate: Candidate, rule: Rule | None, strategy: Strategy) -> Iterator[Event]:
        yield from self.between_steps()
        place = {"path": race.path, "signature": race.bench.recorded.signature.key, "candidate": candidate}
        spent, limits = self._control.seconds(), self._plan.limits
        if spent > limits.max_seconds or len(self.trials) >= limits.max_trials:
            what = f"{limits.max_seconds:.0f} s" if spent > limits.max_seconds else f"{limits.max_trials} trials"
            race.listed.not_tried[candidate.label] = f"not tried: the run's limit of {what} was reached"
            yield self._events.log(
                f"{race.name}: {candidate.label} {race.listed.not_tried[candidate.label]}", "warning"
            )
            return
        started = {"index": len(self.trials), "total": self.total, "phase": "build"}
        yield self._events.event(
            "trial_started", **place, data=started | {"remaining_seconds": self.remaining.seconds()}
        )
        pinned = rule is not None and rule.action == "pin"
        accept = rule is not None and pinned and rule.accept_error
        rival = race.rival(strategy, pinned=pinned)
        too_big = self._too_big(race, candidate)
        built = (
            Built(too_big)
            if too_big is not None
            else (
                yield from self._progress(
                    attempt(race.bench, candidate, race.known, accept_error=accept, rival=rival),
                    place,
                    _what(race, candidate),
                )
            )
        )
        trial = race.add(built)
        race.release(strategy if not pinned else None)
        self.trials[trial.key] = trial
        self.remaining.finish(_what(race, candidate), self._control.seconds() - spent, counts=not built.reused)
        failed = trial.status != "ok" or trial.error_class == "refused"
        data = {"trial": to_data(trial), "reused": built.reused, "remaining_seconds": self.remaining.seconds()}
        yield self._events.event("trial_failed" if failed else "trial_finished", **place, data=data)
        if self._recall.problem and not self._said_problem:
            self._said_problem = True
            yield self._events.log(self._recall.problem, "warning")

    def _too_big(self, race: Race, candidate: Candidate) -> Trial | None:
        """The trial of a candidate that would need more memory than the limit, with the figures; None if it fits."""
        limit = self._plan.limits.memory_bytes
        if limit is None:
            return None
        copies = registry.of(candidate).weight_copies() + (candidate.memory_format is not None)
        own = copies * race.module.row.parameter_bytes
        held = sum(other.held_bytes() for other in self.races)
        if own == 0 or self.target_bytes + held + own <= limit:
            return None
        reason = (
            f"it would need about {size(own)} for its own copy of the weights, beside {size(self.target_bytes)} of the "
            f"target and {size(held)} of the best so far: more than the memory limit of {size(limit)}"
        )
        bench = race.bench
        key = race.known.keys.trial(candidate)
        return Trial(key, bench.recording.path, bench.recorded.signature.key, candidate, "refused", reason)

    def between_steps(self) -> Iterator[Event]:
        """Ends a run that was cancelled, waits in one that was paused."""
        self._control.check()
        if self._control.pausing and not self.applying:
            yield self._events.log("paused", paused=True)
            self._control.wait()
            yield self._events.log("going on", paused=False)

    def _progress(
        self, steps: Steps[Built], place: Mapping[str, Any], what: tuple[str, str, str]
    ) -> Generator[Event, None, Built]:
        """A trial's phases as events."""
        start = self._control.seconds()
        doing = ""
        with closing(steps):
            while True:
                if doing:  # nothing else can be built while a build is under way, so a pause waits for its end
                    self._control.check()
                else:
                    yield from self.between_steps()
                try:
                    phase, fraction = next(steps)
                except StopIteration as stop:
                    result: Built = stop.value
                    return result
                left = self.remaining.seconds(what, self._control.seconds() - start)
                data = {"phase": phase, "fraction": fraction, "remaining_seconds": left}
                doing = phase.removeprefix(BUILDING) if phase.startswith(BUILDING) else ""
                if doing:
                    # A fraction of one step of many says nothing of the trial's.
                    told = doing if fraction is None else f"{doing} {fraction:.0%}"
                    data |= {"phase": "build", "fraction": None, "doing": told}
                yield self._events.event("trial_progress", **place, data=data)

    def _decide(self, race: Race, strategy: Strategy) -> Generator[Event, None, Decision]:
        """A race's decision, with what it does as events."""
        deciding = race.decide(strategy)
        while True:
            yield from self.between_steps()
            try:
                doing = next(deciding)
            except StopIteration as stop:
                decision: Decision = stop.value
                return decision
            yield self._events.log(f"{race.name}: {doing}")

    def choose(self, race: Race, strategy: Strategy, rule: Rule | None) -> Iterator[Event]:
        pinned = rule is not None and rule.action == "pin"
        while True:
            if rule is not None and pinned:
                decision = race.decide_pin(rule)
            else:
                decision = yield from self._decide(race, strategy)
            label = decision.winner.candidate.label
            if decision.winner.candidate == EAGER:
                break
            if not race.is_live(label):
                yield self._events.log(f"{race.name}: loading {label}")
            if race.make_live(label):
                break
        eager = race.eager()
        self.trials |= {trial.key: trial for trial in (*race.trials, eager)}
        choice = race.settle(decision, pinned=pinned)
        yield self._events.event(
            "choice_made",
            path=race.path,
            signature=choice.signature,
            candidate=choice.candidate,
            data={"choice": to_data(choice), "eager": to_data(eager)},
        )


def _position(listed: Shortlist, candidate: Candidate) -> int:
    return listed.candidates.index(candidate) if candidate in listed.candidates else len(listed.candidates)


def _what(race: Race, candidate: Candidate) -> tuple[str, str, str]:
    """How the estimate of what remains names a trial."""
    return f"{race.path} {race.bench.recorded.signature.key}", candidate.backend, candidate.label
