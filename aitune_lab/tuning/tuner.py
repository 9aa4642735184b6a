"""The run: records, tries candidates, chooses, installs; every step is an event."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..backends import registry
from ..backends.base import BuildJob
from ..capture.inspector import InspectedModule, Inspection, inspect
from ..capture.tree import find_modules, outermost
from ..environment import fingerprint
from ..errors import AituneWarning, TargetError
from ..isolation import Children
from ..runtime.installed import Installed, install_all, release_originals, take_back
from ..runtime.originals import bytes_of, is_dropped
from ..runtime.weights import content_digest
from ..schema import Choice, Event, Plan, to_data
from .bench import Cancelled
from .candidates import EAGER, with_candidates
from .control import Control, alternating
from .cut import Cut
from .endtoend import EndToEnd
from .finish import check_end_to_end, estimate, prepared
from .options import TuneOptions
from .planfile import check_plan
from .racing import Events, Racing
from .recall import Counts, Recall, remove_folder
from .session import journaled
from .trial import as_error
from .units import Preparation, Unit, weights_digests

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
        self.choices: list[Choice] = []
        self.failures: dict[str, str] = {}
        self.end_to_end: EndToEnd | None = None
        self.estimated: dict[str, Any] = {}
        self.understood = ""
        self.recall = Recall(self.options.store, retry=self.options.retry)
        self.control = Control()
        self.journal: Path | None = None
        """Where the events of this run are kept, one JSON line each; None without a store, or before the start."""
        self._events = Events(self.control)
        self._racing = Racing(self.plan, self.recall, self.control, self._events)
        self.trials = self._racing.trials
        self._units: list[Unit] = []
        self._installed: list[Installed] = []
        # Artifacts live as long as what is installed from them: the jobs hold the control, and that this.
        self.keep = weakref.finalize(self, remove_folder, self.recall.folder, os.getpid())
        self._digests = weights_digests(content_digest)
        isolation = self.options.isolation
        builds = self.recall.folder / "builds"
        recall = self.recall  # held by the children; the tuner itself must not be

        def entering(job: BuildJob) -> None:
            recall.begin(job.folder.name, job.candidate)

        limits = self.options.build_limits
        gpu = isolation == "all"
        self._builds = Children(builds, limits=limits, entering=entering, gpu=gpu) if isolation != "off" else None
        self._prepare_units = Preparation(
            target,
            data,
            self.plan,
            self.options,
            self.recall,
            self._check_cancelled,
            self._digests,
            self.failures,
            self._builds,
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

    def steps(self) -> Iterator[Event]:
        """Run, an event at a time. Errors of the user's input are raised after a `run_failed` event.

        With a store every event is in the run's journal before it is given out.
        """
        if self.recall.store is not None and not self.options.dry_run:
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
            yield self._events.event("run_cancelled", data={"seconds": self.control.seconds()})
        except Exception as error:
            _close(units)
            yield self._events.event("run_failed", data={"error": as_error(error)})
            raise
        except KeyboardInterrupt:
            _close(units)
            self.take_back()
            yield self._events.event("run_cancelled", data={"seconds": self.control.seconds()})
            raise
        except BaseException:
            _close(units)
            raise
        finally:
            if self._builds is not None:
                self._builds.close()
            registry.release()
            _free_cached_memory()

    def take_back(self) -> None:
        """Uninstall what the run has installed at its end: an interrupt since then leaves the target untuned."""
        installed, self._installed = self._installed, []
        take_back(self.target, installed)

    def apply_best(self) -> tuple[Choice, ...]:
        """Install the best found so far, in a run that is paused or was cancelled; gives its choices.

        Provisional winners are measured a second time first, as at the end of a run. A paused run goes on afterwards
        as if nothing had happened, and installs what it comes to at its end.

        Raises TargetError if the run is at work, or nothing was tried yet.
        """
        for _ in self.applying():
            pass
        return tuple(self.choices)

    def applying(self, *, wait: bool = False) -> Iterator[Event]:
        """`apply_best`, an event at a time; the choices are installed when it ends.

        With `wait` a run that is still at work on the step before its pause is waited for.
        """
        with self.control.running(wait=wait):
            self.control.renew()
            tried = [unit for unit in self._units if any(race.trials for race in unit.races)]
            if not tried:
                raise TargetError("nothing was tried in this run yet, so there is nothing to install")
            self._racing.applying = True
            try:
                for unit in tried:
                    for race in unit.races:
                        yield from self._racing.choose(race, *self._racing.wish(unit))
            finally:
                self._racing.applying = False
            install_all(prepared(tried, self.plan, self.options))
            self.choices = [choice for unit in tried for choice in unit.choices]
            assert self.inspection is not None
            self.estimated = estimate(self.inspection, tried)
            for unit in tried:
                for race in unit.races:
                    race.hand_over()

    def _run(self, units: list[Unit]) -> Iterator[Event]:
        parts = outermost(find_modules(self.target))
        if any(map(is_dropped, parts)):
            raise TargetError(
                "weights of this target were dropped after tuning (originals='drop'): make it anew to tune it"
            )
        if self.inspection is None:
            yield self._events.log("inspecting the target")
            self.inspection = self._inspect()
        self.understood = self.inspection.understood
        rows = [to_data(row) for row in self.inspection.rows]
        yield self._events.event(
            "inspected", data={"rows": rows, "eager_seconds": self.inspection.seconds_per_iteration}
        )
        paths = [row.path for row in self.inspection.rows]
        for warning in check_plan(self.plan, paths, registry.names()):
            yield self._events.log(warning, "warning")
        cut = Cut(self.inspection, self.plan, self.modules, self.options.on_module_failure, self.failures)
        chosen = cut.outermost()
        if not chosen:
            raise TargetError(cut.nothing_to_tune(self.target))
        for note in cut.notes:
            yield self._events.log(note)
        yield self._events.log(f"recording {len(chosen)} module{'s' if len(chosen) > 1 else ''}")
        self._racing.target_bytes = bytes_of(parts)
        units.extend(self._prepare_units.units(chosen))
        races = [race for unit in units for race in unit.races]
        planned = [candidate for race in races for candidate in race.listed.candidates]
        known = sum(self._racing.plan_trials(race) for race in races)
        yield self._events.event(
            "run_started",
            data={
                "target": type(self.target).__name__,
                "modules": [unit.path for unit in units],
                "trials": len(planned),
                "known": known,
                "estimated_seconds": self._racing.remaining.seconds(),
                "estimated_bytes": sum(r.module.row.parameter_bytes * len(r.listed.candidates) for r in races),
                "understood": self.understood,
                "planned": [race.planned() for race in races],
                "limits": to_data(self.plan.limits),
                "environment": to_data(fingerprint()),
            },
        )
        yield self._events.event("plan_changed", data={"plan": to_data(self.plan)})
        for unit in units:
            for note in unit.notes:
                yield self._events.log(f"{unit.name}: {note}", "warning")
        if self.options.dry_run:
            yield self._events.event(
                "run_finished", data={"seconds": self.control.seconds(), "choices": 0, "dry_run": True}
            )
            return
        done = 0
        self._racing.total = len(planned)
        while done < len(units):
            unit = units[done]
            yield from self._racing.tune_unit(unit)
            children = self._children(cut, unit, units)
            if children:
                yield self._events.log(f"{unit.name} stays eager, so its {len(children)} children are tried")
                added = self._prepare_units.units(children)
                for child in added:
                    child.depth = unit.depth + 1
                units.extend(added)
                added_races = [race for child in added for race in child.races]
                self._racing.total += sum(len(race.listed.candidates) for race in added_races)
                for race in added_races:
                    self._racing.plan_trials(race)
            done += 1
        made = prepared(units, self.plan, self.options)
        yield from self._racing.between_steps()
        self._installed = made
        install_all(made)
        self.choices = [choice for unit in units for choice in unit.choices]
        self.estimated = estimate(self.inspection, units)
        self._racing.races.clear()
        units.clear()  # what is installed belongs to the target now, whatever happens from here on
        if made and self.options.end_to_end:
            yield self._events.log("checking the tuned target end to end")
            seconds = self.inspection.seconds_per_iteration
            self.end_to_end = check_end_to_end(
                self.target, self.data, seconds, made, self.plan, self.options, self.recall, self._digests
            )
            yield self._events.log(self.end_to_end.sentence, "info" if self.end_to_end.within_budget else "warning")
            if self.end_to_end.within_budget is False and not any(choice.accepted_error for choice in self.choices):
                advice = "aitune_lab.unwrap(target) takes the choices back"
                warnings.warn(f"{self.end_to_end.sentence}; {advice}", AituneWarning, stacklevel=3)
        if self.options.originals != "device":
            self._installed = []
            for path, why in release_originals(self.target, made, self.options.originals).items():
                yield self._events.log(f"the weights of {path or '(model)'} stay where they are: {why}", "warning")
        yield self._events.event(
            "run_finished",
            data={
                "seconds": self.control.seconds(),
                "choices": len(self.choices),
                "estimate": self.estimated,
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
