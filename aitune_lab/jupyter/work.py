"""What a Lab begins on its worker beside the tune, and how it stands to other runs of its target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import registry as backends
from ..errors import DataError, TargetError
from ..schema import Choice, Event, Plan
from ..tuning import whatif
from ..tuning.api import result_of
from ..tuning.candidates import as_candidate
from ..tuning.options import BackendLike, TuneOptions
from ..tuning.result import TuneResult
from ..tuning.strategies.words import counted
from . import registry
from .core import LabCore, friendly
from .earlier import earlier_run
from .exports import write_export
from .runner import Job, Worker
from .snapshot import Notice
from .views_compare import Shown
from .views_export import Exports

if TYPE_CHECKING:
    from ..tuning.whatif_measure import Measured

_log = logging.getLogger("aitune_lab")


class LabWork(LabCore):
    """A core with what its page shows: a module, a figure, mixes, exports; and the work that these need.

    `backends` are (name, available, why not) of those that may be tried.
    """

    def __init__(self, target: Any, data: Any, plan: Plan, options: TuneOptions) -> None:
        before = registry.lab_of(target)
        super().__init__(target, data, plan, options)
        self.shown = Shown()
        self.exports = Exports()
        self.backends = known_backends(options.backends)
        self._offered: tuple[Any, Plan, TuneOptions] | None = None
        self._earlier = before.snapshot.state if before is not None and before.snapshot.state.trials else None
        self._look_for_earlier(before)

    def _refresh(self) -> None:
        """A step has ended: whoever keeps a copy brings it up to date."""

    def look(self, **changes: Any) -> None:
        """Show another module, figure or mix in the step Compare: `module=`, `figure=`, `mixes=`."""
        with self._lock:
            self.shown = replace(self.shown, **changes)
        self._changed()

    def begin_measure(self, name: str) -> Job[Measured]:
        """Measure the mix of a name on the worker."""
        held = self.shown.mixes.named(name)
        state = self.snapshot.state
        self.look(mixes=self.shown.mixes.updated(name, doing=True, problem=""))

        def work() -> Measured:
            registry.claim(self)
            try:
                measured = whatif.measure(
                    self.target,
                    self.data,
                    held.mix,
                    source=state,
                    name=name,
                    plan=self.plan,
                    inference_function=self.options.inference_function,
                    batch_sizes=self.options.batch_sizes,
                    max_batches_per_batch_size=self.options.max_batches_per_batch_size,
                    metric=self.options.metric,
                    options=self.options,
                    meter=self.options.meter,
                )
            except Exception as error:
                self.look(mixes=self.shown.mixes.updated(name, doing=False, problem=friendly(error)))
                raise
            finally:
                registry.release(self)
            self.look(mixes=self.shown.mixes.updated(name, doing=False, measured=measured))
            self._refresh()
            return measured

        return self.begin("measure", work)

    def begin_tune(self) -> Job[TuneResult]:
        """Also what was said of exports is of the run before."""
        if not self.running:
            self.exports = replace(self.exports, said={})
        return super().begin_tune()

    def begin_apply(self) -> Job[tuple[Choice, ...]]:
        """Install the best found so far, in a run that is paused or was cancelled. A paused run may go on afterwards.

        Raises TargetError if there is no such run, or nothing was tried in it.
        """
        with self._lock:
            paused = self._tuner if self._snapshot.paused else None
            tuner = paused or self._stopped
            if tuner is None:
                raise TargetError("there is no run that is paused or was cancelled: pause or cancel it first")
            if not any(t.candidate.label != "eager" for t in self._snapshot.state.trials.values()):
                raise TargetError("nothing was tried in this run yet, so there is nothing to install")

        def work() -> tuple[Choice, ...]:
            registry.claim(self)
            try:
                for event in tuner.applying(wait=True):
                    self._take(event)
            except Exception as error:
                self.say(friendly(error), "error")
                raise
            finally:
                if paused is None:
                    registry.release(self)
            if paused is None:
                events = (Event(self._snapshot.state.seq, self._snapshot.state.elapsed, "run_cancelled"),)
                self._stopped = None
                self._set(phase="tuned", result=result_of(tuner, events))
                self._refresh()
            else:
                self.say(
                    "The best so far is installed. When the run goes on, its end puts the final choices in its place."
                )
            return tuple(tuner.choices)

        # The worker itself waits in a paused run.
        worker = self._worker if paused is None else Worker("aitune-lab-apply", self._printed)
        return worker.submit("apply", work)

    def apply_best(self) -> tuple[Choice, ...]:
        """Install the best found so far, in a run that is paused or was cancelled; waits, and gives its choices.

        Raises TargetError if there is no such run, or nothing was tried in it.
        """
        return self.settle(self.begin_apply())

    def begin_export(self, what: str, path: str) -> Job[str]:
        """Write a file on the worker; what came of it is said on the page."""
        ending = {"ait": ".ait", "plan": ".toml", "report": ".html"}[what]
        if not path:
            raise DataError(f"name a file, such as tuned{ending}")
        if Path(path).suffix != ending:
            raise DataError(f"the file's name must end in {ending}, but got {path!r}")
        if what == "ait":
            self.ended("saving")

        with self._lock:
            self.exports = replace(self.exports, said={k: v for k, v in self.exports.said.items() if k != what})
        self._changed()

        def work() -> str:
            try:
                said = write_export(self, Path(path), kind=what)
            except Exception as error:
                self._said(what, False, friendly(error))
                raise
            words = {
                "ait": f"Saved to {path}. Digest: {said}",
                "plan": f"Written to {path}",
                "report": f"Written to {path}",
            }
            self._said(what, True, words[what])
            return said

        return self.begin("export", work)

    def _said(self, what: str, good: bool, words: str) -> None:
        with self._lock:
            self.exports = replace(self.exports, said={**self.exports.said, what: (good, words)})
        self._changed()

    # --- other runs of the same target -------------------------------------------------------------------------

    def _offer(self, data: Any, plan: Plan, options: Any) -> None:
        """The cell ran again while the tune runs: it goes on, and what was asked for now is offered."""
        self._offered = (data, plan, options)
        self.say(
            "This target is being tuned; this is that run, with the data and options that it was started with.",
            "info",
            ("restart", "Cancel it and start over with the new ones"),
        )

    def start_over(self) -> None:
        """Cancel the run, and begin anew with the data and options that a second `Lab(target, …)` named."""
        offered, self._offered = self._offered, None
        if offered is None:
            raise TargetError("there is nothing to start over with: make a Lab of the target anew")
        self.cancel()
        data, plan, options = offered

        def work() -> None:
            self.data, self.options = data, options
            self.change_plan(plan)
            self.begin_inspection(again=True)

        self.begin("start over", work)
        self.say("")

    def _look_for_earlier(self, before: LabCore | None) -> None:
        if self._earlier is None and before is None:
            try:
                self._earlier = earlier_run(self.target, self.options.store)
            except Exception:
                _log.exception("earlier runs of the target could not be looked up")
        if self._earlier is None:
            return
        if before is not None and before.snapshot.result is not None:
            self._carry(self._earlier, before.snapshot.result)
            self.say("These are the results of the tune before. Tune again to bring them up to date.")
            return
        tried = sum(t.candidate.label != "eager" for t in self._earlier.trials.values())
        self.say(
            f"There is an earlier run of this target, with {counted(tried, 'trial')}.",
            "info",
            ("adopt", "Show its results"),
        )

    def adopt_earlier(self) -> None:
        """Show what an earlier run of this target came to. Nothing is built or installed: tuning again does that, from
        what is stored.
        """
        if self._earlier is None:
            raise TargetError("there is no earlier run of this target")
        self._carry(self._earlier, None)
        self._set(
            notice=Notice(
                "These are the results of the earlier run; they are not installed in this target. Tuning again takes "
                "what it can from the store.",
                actions=(("tune", "Tune again"),),
            )
        )

    def _carry(self, state: Any, result: TuneResult | None) -> None:
        """Start from a state, with this Lab's own plan."""
        with self._lock:
            self._session.state = replace(state, plan=self.plan)
            self._set(state=self._session.state, result=result, phase="tuned" if result is not None else "ready")


def known_backends(named: Sequence[BackendLike] | None) -> tuple[tuple[str, bool, str], ...]:
    """The backends that may be tried, with why one can't run here: those that the user named, or all."""
    names = backends.names() if named is None else list(dict.fromkeys(as_candidate(item).backend for item in named))
    found = []
    for name in names:
        if name == "eager":
            continue
        state = backends.get(name).available()
        found.append((name, state.ok, "" if state.ok else f"{state.reason}. {state.cure}".rstrip(". ")))
    return tuple(found)
