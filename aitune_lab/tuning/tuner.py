"""The run: records, tries candidates, chooses, installs; every step is an event."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..backends import registry
from ..capture.inspector import InspectedModule, Inspection, inspect
from ..environment import fingerprint
from ..errors import AituneWarning, TargetError
from ..isolation import Children
from ..runtime.installed import install_all
from ..runtime.weights import content_digest
from ..schema import Candidate, Choice, Event, EventKind, Plan, Rule, Trial, to_data
from .bench import Cancelled
from .candidates import EAGER, Shortlist, with_candidates
from .control import Control, Remaining, alternating
from .cut import Cut
from .endtoend import EndToEnd
from .finish import check_end_to_end, estimate, prepared
from .options import TuneOptions
from .planfile import check_plan
from .race import Race
from .recall import Counts, Recall, remove_folder
from .session import journaled
from .strategies import Decision, Strategy
from .trial import Built, Steps, as_error, attempt
from .units import Preparation, Unit, strategy_for, weights_digests

MAX_CUT_DEPTH = 2
"""How far a module that stays eager passes to its children."""
MIN_CHILD_SHARE = 0.05
"""Children with a smaller share of the end-to-end time are not worth a trial."""


class Tuner:
    """Tunes a target. `steps()` is the one generator that the command line, tests and notebooks drive.

    Nothing of the target changes before the last step, in which all choices are installed at once; a failure, an
    interrupt or `cancel()` before leaves it as it was. After the generator has ended, `choices`, `trials` and
    `inspection` hold the result.
    """

    def __init__(
        self,
        target: Any,
        data: Any,
        *,
        plan: Plan | None = None,
        modules: Sequence[InspectedModule] | None = None,
        inspection: Inspection | None = None,
        options: TuneOptions | None = None,
    ) -> None:
        self.target, self.data = target, data
        self.plan = with_candidates(plan or Plan())
        self.options = options or TuneOptions()
        self.modules = modules
        self.inspection = inspection
        self.trials: dict[str, Trial] = {}
        self.choices: list[Choice] = []
        self.failures: dict[str, str] = {}
        self.end_to_end: EndToEnd | None = None
        self.understood = ""
        self.phase = ""
        """What the running trial does just now (`"compiling"`, `"measure"`); may be read from any thread."""
        self.recall = Recall(self.options.store, retry=self.options.retry)
        self.control = Control()
        self.remaining = Remaining()
        self.journal: Path | None = None
        """Where the events of this run are kept, one JSON line each; None without a store, or before the start."""
        self._seq = 0
        self._total = 0
        self._applying = self._said_problem = False
        self._units: list[Unit] = []
        # Artifacts live as long as what is installed from them: the jobs hold the control, and that this.
        self.keep = weakref.finalize(self, remove_folder, self.recall.folder, os.getpid())
        self._digests = weights_digests(content_digest)
        isolated = self.options.isolation == "auto"
        self._children = Children(self.recall.folder / "children", limits=self.options.build_limits) if isolated else None
        self._prepare_units = Preparation(
            target,
            data,
            self.plan,
            self.options,
            self.recall,
            self._check_cancelled,
            self._digests,
            self.failures,
            self._children,
        )

    @property
    def counts(self) -> Counts:
        """What was really built and measured so far, and what was taken from earlier runs."""
        return self.recall.counts

    def cancel(self) -> None:
        """Stop at the next step; may be called from any thread."""
        self.control.cancel()

    def pause(self) -> None:
        """Wait before the next step until `resume()` or `cancel()`; may be called from any thread."""
        self.control.pause()

    def resume(self) -> None:
        """Go on after `pause()`; may be called from any thread."""
        self.control.resume()

    def _check_cancelled(self) -> None:
        self.control.check()

    def _event(self, kind: EventKind, **parts: Any) -> Event:
        data = parts.pop("data", {})
        self._seq += 1
        return Event(self._seq - 1, self.control.seconds(), kind, data=data, **parts)

    def _log(self, message: str, level: str = "info", **more: Any) -> Event:
        return self._event("log", data={"level": level, "message": message, **more})

    def steps(self) -> Iterator[Event]:
        """Run, an event at a time. Errors of the user's input are raised after a `run_failed` event.

        With a store every event is in the run's journal before it is given out.
        """
        if self.recall.store is not None:
            self.journal = self.recall.new_journal()
        steps = self._guarded_steps()
        events = journaled(steps, self.journal, strict=False) if self.journal is not None else steps
        yield from alternating(events, self.control)

    def _guarded_steps(self) -> Iterator[Event]:
        units = self._units
        try:
            yield from self._run(units)
        except Cancelled:
            _close(units)
            yield self._event("run_cancelled", data={"seconds": self.control.seconds()})
        except Exception as error:
            _close(units)
            yield self._event("run_failed", data={"error": as_error(error)})
            raise
        except KeyboardInterrupt:
            _close(units)
            yield self._event("run_cancelled", data={"seconds": self.control.seconds()})
            raise
        except BaseException:
            _close(units)
            raise
        finally:
            if self._children is not None:
                self._children.close()
            _free_cached_memory()

    def apply_best(self) -> tuple[Choice, ...]:
        """Install the best found so far, in a run that is paused or was cancelled; gives its choices.

        Provisional winners are measured a second time first, as at the end of a run. A paused run goes on afterwards
        as if nothing had happened, and installs what it comes to at its end.

        Raises TargetError if the run is at work, or nothing was tried yet.
        """
        for _ in self.applying():
            pass
        return tuple(self.choices)

    def applying(self) -> Iterator[Event]:
        """`apply_best`, an event at a time; the choices are installed when it ends."""
        with self.control.running():
            self.control.renew()
            tried = [unit for unit in self._units if any(race.trials for race in unit.races)]
            if not tried:
                raise TargetError("nothing was tried in this run yet, so there is nothing to install")
            self._applying = True
            try:
                for unit in tried:
                    for race in unit.races:
                        yield from self._choose(race, *self._wish(unit))
            finally:
                self._applying = False
            install_all(prepared(tried, self.plan, self.options))
            self.choices = [choice for unit in tried for choice in unit.choices]
            for unit in tried:
                for race in unit.races:
                    race.hand_over()

    def _wish(self, unit: Unit) -> tuple[Strategy, Rule | None]:
        rule = self.plan.rule_for(unit.path)
        return strategy_for(self.plan, rule), rule

    def _run(self, units: list[Unit]) -> Iterator[Event]:
        yield self._log("inspecting the target")
        if self.inspection is None:
            self.inspection = self._inspect()
        self.understood = self.inspection.understood
        rows = [to_data(row) for row in self.inspection.rows]
        yield self._event("inspected", data={"rows": rows, "eager_seconds": self.inspection.seconds_per_iteration})
        paths = [row.path for row in self.inspection.rows]
        for warning in check_plan(self.plan, paths, registry.names()):
            yield self._log(warning, "warning")
        cut = Cut(self.inspection, self.plan, self.modules, self.options.on_module_failure, self.failures)
        chosen = cut.outermost()
        if not chosen:
            raise TargetError(cut.nothing_to_tune(self.target))
        for note in cut.notes:
            yield self._log(note)
        yield self._log(f"recording {len(chosen)} module{'s' if len(chosen) > 1 else ''}")
        units.extend(self._prepare_units.units(chosen))
        races = [race for unit in units for race in unit.races]
        planned = [candidate for race in races for candidate in race.listed.candidates]
        known = sum(self._plan_trials(race) for race in races)
        yield self._event(
            "run_started",
            data={
                "target": type(self.target).__name__,
                "modules": [unit.path for unit in units],
                "trials": len(planned),
                "known": known,
                "estimated_seconds": self.remaining.seconds(),
                "estimated_bytes": sum(r.module.row.parameter_bytes * len(r.listed.candidates) for r in races),
                "understood": self.understood,
                "planned": [race.planned() for race in races],
                "limits": to_data(self.plan.limits),
                "environment": to_data(fingerprint()),
            },
        )
        yield self._event("plan_changed", data={"plan": to_data(self.plan)})
        for unit in units:
            for note in unit.notes:
                yield self._log(f"{unit.name}: {note}", "warning")
        if self.options.dry_run:
            yield self._event("run_finished", data={"seconds": self.control.seconds(), "choices": 0, "dry_run": True})
            return
        done = 0
        self._total = len(planned)
        while done < len(units):
            unit = units[done]
            yield from self._tune_unit(unit)
            children = self._children(cut, unit, units)
            if children:
                yield self._log(f"{unit.name} stays eager, so its {len(children)} children are tried")
                added = self._prepare_units.units(children)
                for child in added:
                    child.depth = unit.depth + 1
                units.extend(added)
                added_races = [race for child in added for race in child.races]
                self._total += sum(len(race.listed.candidates) for race in added_races)
                for race in added_races:
                    self._plan_trials(race)
            done += 1
        made = prepared(units, self.plan, self.options)
        yield from self._between_steps()
        install_all(made)
        self.choices = [choice for unit in units for choice in unit.choices]
        estimated = estimate(self.inspection, units)
        units.clear()  # what is installed belongs to the target now, whatever happens from here on
        if made and self.options.end_to_end:
            yield self._log("checking the tuned target end to end")
            seconds = self.inspection.seconds_per_iteration
            self.end_to_end = check_end_to_end(
                self.target, self.data, seconds, made, self.plan, self.options, self.recall, self._digests
            )
            yield self._log(self.end_to_end.sentence, "info" if self.end_to_end.within_budget else "warning")
            if self.end_to_end.within_budget is False and not any(choice.accepted_error for choice in self.choices):
                advice = "aitune_lab.unwrap(target) takes the choices back"
                warnings.warn(f"{self.end_to_end.sentence}; {advice}", AituneWarning, stacklevel=3)
        yield self._event(
            "run_finished",
            data={
                "seconds": self.control.seconds(),
                "choices": len(self.choices),
                "estimate": estimated,
                "counts": asdict(self.counts),
                "end_to_end": to_data(self.end_to_end) if self.end_to_end is not None else None,
            },
        )

    def _inspect(self) -> Inspection:
        return inspect(
            self.target,
            self.data,
            inference_function=self.options.inference_function,
            iterations=1,
            batch_sizes=self.options.batch_sizes,
            max_batches_per_batch_size=self.options.max_batches_per_batch_size,
        )

    def _plan_trials(self, race: Race) -> int:
        """Add a race to what remains to be done; gives how many of its trials the store knows."""
        known = 0
        for candidate in race.listed.candidates:
            is_known = race.known.is_known(race.bench, candidate)
            known += is_known
            self.remaining.plan(_what(race, candidate), 0.0 if is_known else race.estimated_seconds(candidate))
        return known

    def _tune_unit(self, unit: Unit) -> Iterator[Event]:
        """All candidates over all signatures of a unit, the cheapest candidates first, then the choices."""
        strategy, rule = self._wish(unit)
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
            yield from self._choose(race, strategy, rule)

    def _one_trial(self, race: Race, candidate: Candidate, rule: Rule | None, strategy: Strategy) -> Iterator[Event]:
        yield from self._between_steps()
        place = {"path": race.path, "signature": race.bench.recorded.signature.key, "candidate": candidate}
        spent, limits = self.control.seconds(), self.plan.limits
        if spent > limits.max_seconds or len(self.trials) >= limits.max_trials:
            what = f"{limits.max_seconds:.0f} s" if spent > limits.max_seconds else f"{limits.max_trials} trials"
            race.listed.not_tried[candidate.label] = f"not tried: the run's limit of {what} was reached"
            yield self._log(f"{race.name}: {candidate.label} {race.listed.not_tried[candidate.label]}", "warning")
            return
        started = {"index": len(self.trials), "total": self._total, "phase": "build"}
        yield self._event("trial_started", **place, data=started | {"remaining_seconds": self.remaining.seconds()})
        pinned = rule is not None and rule.action == "pin"
        accept = rule is not None and pinned and rule.accept_error
        rival = race.rival(strategy, pinned=pinned)
        built = yield from self._progress(
            attempt(race.bench, candidate, race.known, accept_error=accept, rival=rival), place, _what(race, candidate)
        )
        trial = race.add(built)
        race.release(strategy if not pinned else None)
        self.trials[trial.key] = trial
        self.remaining.finish(_what(race, candidate), self.control.seconds() - spent, counts=not built.reused)
        failed = trial.status != "ok" or trial.error_class == "refused"
        data = {"trial": to_data(trial), "reused": built.reused, "remaining_seconds": self.remaining.seconds()}
        yield self._event("trial_failed" if failed else "trial_finished", **place, data=data)
        if self.recall.problem and not self._said_problem:
            self._said_problem = True
            yield self._log(self.recall.problem, "warning")

    def _between_steps(self) -> Iterator[Event]:
        """Ends a run that was cancelled, waits in one that was paused."""
        self.control.check()
        if self.control.pausing and not self._applying:
            yield self._log("paused", paused=True)
            self.control.wait()
            yield self._log("going on", paused=False)

    def _progress(
        self, steps: Steps[Built], place: Mapping[str, Any], what: tuple[str, str, str]
    ) -> Generator[Event, None, Built]:
        """A trial's phases as events."""
        start = self.control.seconds()
        while True:
            yield from self._between_steps()
            try:
                phase, fraction = next(steps)
            except StopIteration as stop:
                result: Built = stop.value
                return result
            left = self.remaining.seconds(what, self.control.seconds() - start)
            data = {"phase": phase, "fraction": fraction, "remaining_seconds": left}
            yield self._event("trial_progress", **place, data=data)

    def _decide(self, race: Race, strategy: Strategy) -> Generator[Event, None, Decision]:
        """A race's decision, with what it does as events."""
        deciding = race.decide(strategy)
        while True:
            yield from self._between_steps()
            try:
                doing = next(deciding)
            except StopIteration as stop:
                decision: Decision = stop.value
                return decision
            yield self._log(f"{race.name}: {doing}")

    def _choose(self, race: Race, strategy: Strategy, rule: Rule | None) -> Iterator[Event]:
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
                yield self._log(f"{race.name}: loading {label}")
            if race.make_live(label):
                break
        eager = race.eager()
        self.trials |= {trial.key: trial for trial in (*race.trials, eager)}
        choice = race.settle(decision, pinned=pinned)
        yield self._event(
            "choice_made",
            path=race.path,
            signature=choice.signature,
            candidate=choice.candidate,
            data={"choice": to_data(choice), "eager": to_data(eager)},
        )

    def _children(self, cut: Cut, unit: Unit, units: Sequence[Unit]) -> list[InspectedModule]:
        """The children of a unit that stays eager everywhere: the next cut to try."""
        if unit.depth >= MAX_CUT_DEPTH or any(c.candidate != EAGER or c.pinned for c in unit.choices):
            return []
        # Other load spoilt the measurements, or time is up: that says nothing against the module as a whole.
        spent = self.control.seconds()
        late = spent > self.plan.limits.max_seconds
        if late or unit.module.method != "forward" or any(race.disturbed() for race in unit.races):
            return []
        known = {other.path for other in units}
        children = [c for c in cut.children(unit.path) if c.row.share >= MIN_CHILD_SHARE]
        return [c for c in children if c.path not in known and not cut.left_alone(c.path)]


def _close(units: Sequence[Unit]) -> None:
    for unit in units:
        for race in unit.races:
            race.close()


def _free_cached_memory() -> None:
    """Give memory of the GPU that the run used back to the device: the user's process goes on with what it had."""
    if torch.cuda.is_initialized():
        gc.collect()
        with suppress(RuntimeError):  # a lost device keeps it
            torch.cuda.empty_cache()


def _position(listed: Shortlist, candidate: Candidate) -> int:
    return listed.candidates.index(candidate) if candidate in listed.candidates else len(listed.candidates)


def _what(race: Race, candidate: Candidate) -> tuple[str, str, str]:
    """How the estimate of what remains names a trial."""
    return f"{race.path} {race.bench.recorded.signature.key}", candidate.backend, candidate.label
