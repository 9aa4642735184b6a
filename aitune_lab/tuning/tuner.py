"""The run: records, tries candidates, chooses, installs; every step is an event."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..backends import registry
from ..capture.inspector import InspectedModule, Inspection, inspect
from ..environment import fingerprint
from ..errors import AituneWarning, TargetError
from ..runtime.installed import Installed, install_all, prepare
from ..runtime.weights import content_digest
from ..schema import Candidate, Choice, Event, EventKind, Plan, Rule, Trial, to_data
from .bench import Cancelled
from .candidates import EAGER, Shortlist, with_candidates
from .cut import Cut
from .endtoend import EndToEnd, check
from .options import TuneOptions
from .planfile import check_plan
from .race import Race
from .strategies import Decision, Strategy
from .trial import Built, Steps, as_error, trial_steps
from .units import Preparation, Unit, strategy_for, weights_digests

MAX_CUT_DEPTH = 2
"""How far a module that stays eager passes to its children."""
MIN_CHILD_SHARE = 0.05
"""Children with a smaller share of the end-to-end time are not worth a trial."""
MAX_PASS_SECONDS = 30.0
"""Targets that take longer for one pass over the data are not checked end to end."""


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
        self._seq = 0
        self._start = time.perf_counter()
        self._cancelled = False
        self._folder = Path(tempfile.mkdtemp(prefix="aitune-lab-"))
        self._folder.chmod(0o700)
        # Artifacts live as long as what is installed from them (the jobs hold the tuner's finaliser through `keep`).
        self.keep = weakref.finalize(self, shutil.rmtree, str(self._folder), True)
        self._prepare_units = Preparation(
            target,
            data,
            self.plan,
            self.options,
            self._folder,
            self._check_cancelled,
            weights_digests(content_digest),
            self.failures,
        )

    def cancel(self) -> None:
        """Stop at the next step; may be called from any thread."""
        self._cancelled = True

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise Cancelled

    def _event(self, kind: EventKind, **parts: Any) -> Event:
        data = parts.pop("data", {})
        self._seq += 1
        return Event(self._seq - 1, time.perf_counter() - self._start, kind, data=data, **parts)

    def _log(self, message: str, level: str = "info") -> Event:
        return self._event("log", data={"level": level, "message": message})

    def steps(self) -> Iterator[Event]:
        """Run, an event at a time. Errors of the user's input are raised after a `run_failed` event."""
        units: list[Unit] = []
        try:
            yield from self._run(units)
        except Cancelled:
            _close(units)
            yield self._event("run_cancelled", data={"seconds": time.perf_counter() - self._start})
        except Exception as error:
            _close(units)
            yield self._event("run_failed", data={"error": as_error(error)})
            raise
        except KeyboardInterrupt:
            _close(units)
            yield self._event("run_cancelled", data={"seconds": time.perf_counter() - self._start})
            raise
        except BaseException:
            _close(units)
            raise
        finally:
            _free_cached_memory()

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
        yield self._event(
            "run_started",
            data={
                "target": type(self.target).__name__,
                "modules": [unit.path for unit in units],
                "trials": len(planned),
                "estimated_seconds": sum(race.estimated_seconds() for race in races),
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
            yield self._event(
                "run_finished", data={"seconds": time.perf_counter() - self._start, "choices": 0, "dry_run": True}
            )
            return
        done = 0
        total = len(planned)
        while done < len(units):
            unit = units[done]
            yield from self._tune_unit(unit, total)
            children = self._children(cut, unit, units)
            if children:
                yield self._log(f"{unit.name} stays eager, so its {len(children)} children are tried")
                added = self._prepare_units.units(children)
                for child in added:
                    child.depth = unit.depth + 1
                units.extend(added)
                total += sum(len(race.listed.candidates) for child in added for race in child.races)
            done += 1
        prepared = self._prepare(units)
        self._check_cancelled()
        install_all(prepared)
        self.choices = [choice for unit in units for choice in unit.choices]
        estimate = self._estimate(units)
        units.clear()  # what is installed belongs to the target now, whatever happens from here on
        if prepared and self.options.end_to_end:
            yield self._log("checking the tuned target end to end")
            self.end_to_end = self._check_end_to_end(prepared)
            yield self._log(self.end_to_end.sentence, "info" if self.end_to_end.within_budget else "warning")
            if self.end_to_end.within_budget is False and not any(choice.accepted_error for choice in self.choices):
                advice = "aitune_lab.unwrap(target) takes the choices back"
                warnings.warn(f"{self.end_to_end.sentence}; {advice}", AituneWarning, stacklevel=3)
        yield self._event(
            "run_finished",
            data={
                "seconds": time.perf_counter() - self._start,
                "choices": len(self.choices),
                "estimate": estimate,
                "end_to_end": to_data(self.end_to_end) if self.end_to_end is not None else None,
            },
        )

    def _check_end_to_end(self, prepared: Sequence[Installed]) -> EndToEnd:
        """What is installed is left as it is, whatever comes out, also if the check fails or is interrupted."""
        options = self.options
        assert self.inspection is not None
        seconds = self.inspection.seconds_per_iteration
        if seconds > MAX_PASS_SECONDS:
            why = (
                f"one pass over the data takes {seconds:.0f} s; aitune_lab.tuning.endtoend.check(target, data) does it"
            )
            return EndToEnd(skipped=why)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AituneWarning)
                return check(
                    self.target,
                    self.data,
                    metric=options.metric,
                    inference_function=options.inference_function,
                    batch_sizes=options.batch_sizes,
                    max_batches_per_batch_size=options.max_batches_per_batch_size,
                    tolerance=self.plan.tolerance,
                    max_seconds=MAX_PASS_SECONDS,
                    meter=options.meter,
                )
        except KeyboardInterrupt:
            return EndToEnd(skipped="interrupted; what was chosen is in use")
        except Exception as error:
            return EndToEnd(skipped=f"it failed: {as_error(error)}")
        finally:
            for item in prepared:
                item.dispatch.reset_counts()

    def _inspect(self) -> Inspection:
        return inspect(
            self.target,
            self.data,
            inference_function=self.options.inference_function,
            iterations=1,
            batch_sizes=self.options.batch_sizes,
            max_batches_per_batch_size=self.options.max_batches_per_batch_size,
        )

    def _tune_unit(self, unit: Unit, total: int) -> Iterator[Event]:
        """All candidates over all signatures of a unit, the cheapest candidates first, then the choices."""
        rule = self.plan.rule_for(unit.path)
        strategy, pinned = strategy_for(self.plan, rule), rule is not None and rule.action == "pin"
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
                    yield from self._one_trial(race, candidate, total, rule, strategy)
                    if stops_early and strategy.enough((yield from self._decide(race, strategy))):
                        settled.append(race)
        for race in unit.races:
            yield from self._choose(race, strategy, rule)

    def _one_trial(
        self, race: Race, candidate: Candidate, total: int, rule: Rule | None, strategy: Strategy
    ) -> Iterator[Event]:
        self._check_cancelled()
        place = {"path": race.path, "signature": race.bench.recorded.signature.key, "candidate": candidate}
        spent, limits = time.perf_counter() - self._start, self.plan.limits
        if spent > limits.max_seconds or len(self.trials) >= limits.max_trials:
            what = f"{limits.max_seconds:.0f} s" if spent > limits.max_seconds else f"{limits.max_trials} trials"
            race.listed.not_tried[candidate.label] = f"not tried: the run's limit of {what} was reached"
            yield self._log(f"{race.name}: {candidate.label} {race.listed.not_tried[candidate.label]}", "warning")
            return
        yield self._event("trial_started", **place, data={"index": len(self.trials), "total": total, "phase": "build"})
        pinned = rule is not None and rule.action == "pin"
        accept = rule is not None and pinned and rule.accept_error
        rival = race.rival(strategy, pinned=pinned)
        steps = trial_steps(race.bench, candidate, race.digest, accept_error=accept, rival=rival)
        trial = race.add((yield from self._progress(steps, place)))
        self.trials[trial.key] = trial
        failed = trial.status != "ok" or trial.error_class == "refused"
        yield self._event("trial_failed" if failed else "trial_finished", **place, data={"trial": to_data(trial)})

    def _progress(self, steps: Steps[Built], place: Mapping[str, Any]) -> Generator[Event, None, Built]:
        """A trial's phases as events."""
        while True:
            self._check_cancelled()
            try:
                phase, fraction = next(steps)
            except StopIteration as stop:
                result: Built = stop.value
                return result
            yield self._event("trial_progress", **place, data={"phase": phase, "fraction": fraction})

    def _decide(self, race: Race, strategy: Strategy) -> Generator[Event, None, Decision]:
        """A race's decision, with what it does as events."""
        deciding = race.decide(strategy)
        while True:
            self._check_cancelled()
            try:
                doing = next(deciding)
            except StopIteration as stop:
                decision: Decision = stop.value
                return decision
            yield self._log(f"{race.name}: {doing}")

    def _choose(self, race: Race, strategy: Strategy, rule: Rule | None) -> Iterator[Event]:
        pinned = rule is not None and rule.action == "pin"
        if rule is not None and pinned:
            decision = race.decide_pin(rule)
        else:
            decision = yield from self._decide(race, strategy)
        eager = race.eager()
        self.trials[eager.key] = eager
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
        spent = time.perf_counter() - self._start
        late = spent > self.plan.limits.max_seconds
        if late or unit.module.method != "forward" or any(race.disturbed() for race in unit.races):
            return []
        known = {other.path for other in units}
        children = [c for c in cut.children(unit.path) if c.row.share >= MIN_CHILD_SHARE]
        return [c for c in children if c.path not in known and not cut.left_alone(c.path)]

    def _prepare(self, units: Sequence[Unit]) -> list[Installed]:
        """The dispatch of every method with a choice other than eager."""
        options = self.options
        return [
            prepare(
                unit.module.module,
                unit.module.method,
                unit.path,
                [race.installed() for race in unit.races],
                self.plan,
                on_miss=options.on_miss,
                weights=options.weights,
            )
            for unit in units
            if any(choice.candidate != EAGER for choice in unit.choices)
        ]

    def _estimate(self, units: Sequence[Unit]) -> dict[str, Any]:
        """The target's time with these choices: eager end to end minus calls × saving. An estimate until measured."""
        assert self.inspection is not None
        before = self.inspection.seconds_per_iteration
        saving = sum(race.saved_seconds() for unit in units for race in unit.races)
        return {
            "eager_seconds": before,
            "tuned_seconds": max(before - saving, 0.0),
            "kind": "estimate",
            "error": "unknown until measured",
        }


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
