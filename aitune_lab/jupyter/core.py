"""The engine behind a Lab: target, data, plan and what a run told, with one worker; nothing of widgets here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..backends import registry as backends
from ..capture.inspector import Inspection, inspect
from ..errors import AituneError, PlanError, TargetError
from ..schema import Event, EventKind, Plan, StrategyConfig, to_data
from ..tuning.api import make_tuner, run
from ..tuning.candidates import with_candidates
from ..tuning.options import TuneOptions, backends_of
from ..tuning.planfile import check_backends, check_plan, read_plan
from ..tuning.result import TuneResult
from ..tuning.session import Session, SessionState
from ..tuning.strategies import Strategy, strategy_of
from ..tuning.trial import as_error
from ..tuning.tuner import Tuner
from . import registry
from .runner import Job, Modes, Worker
from .snapshot import Notice, Phase, Preview, Snapshot

T = TypeVar("T")

_OPTIONS = tuple(f.name for f in fields(TuneOptions) if f.name != "dry_run")


KEPT_LINES = 500


def options_of(plan: Plan | str | Path | None, options: Mapping[str, Any]) -> tuple[Plan, TuneOptions]:
    """The plan and options of a run from the keywords that `tune` takes.

    Raises PlanError for keywords that there aren't, and what a plan may raise.
    """
    held = plan if isinstance(plan, Plan) else read_plan(plan) if plan is not None else Plan()
    given = dict(options)
    strategy: Strategy | StrategyConfig | str | None = given.pop("strategy", None)
    if strategy is not None:
        held = replace(held, strategy=strategy_of(strategy).config())
    for name in given:
        if name not in _OPTIONS:
            raise PlanError(f"options must be among {['plan', 'strategy', *_OPTIONS]}, but got {name!r}")
    given["backends"] = backends_of(given.get("backends"))
    if given.get("batch_sizes") is not None:
        given["batch_sizes"] = tuple(given["batch_sizes"])
    held = with_candidates(held)
    check_backends(held, backends.names())
    return held, TuneOptions(**given)


class LabCore:
    """A target on its way from inspection to result. Its methods may be called from any thread; none of those that
    the page calls waits for anything.

    One worker does all that touches the target, one job after another. After every change the listeners are called,
    on whichever thread it happened; they must return at once.
    """

    def __init__(self, target: Any, data: Any, plan: Plan, options: TuneOptions) -> None:
        self.target, self.data, self.options = target, data, options
        self.inspection: Inspection | None = None
        self.modes = Modes.here()
        self.listeners: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._session = Session(SessionState(target=type(target).__name__, plan=plan))
        self._snapshot = Snapshot(plan=plan, state=self._session.state)
        self._worker = Worker(f"aitune-lab-{type(target).__name__}", self._printed)
        self._tuner: Tuner | None = None
        self._stopped: Tuner | None = None
        """What a run that was cancelled has found is in here, until the next one begins."""
        self._tune_job: Job[TuneResult] | None = None
        self._inspect_job: Job[Inspection] | None = None
        self._cancelled = False
        registry.remember(self)

    # --- what is known -----------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The present state, frozen."""
        return self._snapshot

    @property
    def plan(self) -> Plan:
        return self._snapshot.plan

    @property
    def paths(self) -> list[str]:
        """The module paths that inspection found."""
        return [str(row["path"]) for row in self._snapshot.state.rows]

    @property
    def running(self) -> bool:
        """Whether a tune runs, or waits to run."""
        return self._tune_job is not None and not self._tune_job.done

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._snapshot = replace(self._snapshot, **changes)
        self._changed()

    def _changed(self) -> None:
        for listener in tuple(self.listeners):
            listener()

    def _emit(self, kind: EventKind, data: Mapping[str, Any]) -> None:
        """An event of our own, beside those of the engine."""
        with self._lock:
            state = self._session.state
            self._set(state=self._session.apply(Event(state.seq + 1, state.elapsed, kind, data=dict(data))))

    def _printed(self, line: str) -> None:
        self._set(output=(*self._snapshot.output, line)[-KEPT_LINES:])

    def say(self, text: str, tone: Any = "info", *actions: tuple[str, str]) -> None:
        """Put a notice above everything else; an empty text takes it away."""
        self._set(notice=Notice(text, tone, actions) if text else None)

    # --- inspection and preview --------------------------------------------------------------------------------

    def begin_inspection(self, *, again: bool = False) -> Job[Inspection]:
        """Inspect on the worker, unless that is going on, or done and not wanted `again`."""
        with self._lock:
            job = self._inspect_job
            if job is None or (job.done and (again or job.error() is not None)):
                job = self._inspect_job = self._worker.submit("inspect", self._inspect)
                self._set(phase="inspecting", notice=self._offer_of_earlier())
        return job

    def _offer_of_earlier(self) -> Notice | None:
        """The notice if it offers an earlier run: that stays until it is taken or dismissed, or a tune starts."""
        notice = self._snapshot.notice
        return notice if notice is not None and any(name == "adopt" for name, _ in notice.actions) else None

    def _inspect(self) -> Inspection:
        try:
            self.inspection = found = inspect(
                self.target,
                self.data,
                inference_function=self.options.inference_function,
                iterations=1,
                batch_sizes=self.options.batch_sizes,
                max_batches_per_batch_size=self.options.max_batches_per_batch_size,
            )
        except Exception as error:
            self._set(phase="failed", notice=Notice(as_error(error), "error", (("inspect", "Inspect again"),)))
            raise
        rows = [to_data(row) for row in found.rows]
        self._emit("inspected", {"rows": rows, "eager_seconds": found.seconds_per_iteration})
        with self._lock:
            tuned: Phase = "tuned" if self._snapshot.result is not None else "ready"
            self._set(phase="tuning" if self.running else tuned)
        if not self.running:
            self._preview()
        return found

    def begin_preview(self) -> None:
        """Find out on the worker what the present plan would do."""
        with self._lock:
            self._set(preview=None)
            self._worker.submit("preview", self._preview)

    def _preview(self) -> None:
        plan = self.plan
        started: Mapping[str, Any] = {}
        try:
            tuner = self._make_tuner(plan, dry_run=True)
            for event in tuner.steps():
                if self.plan is not plan or self._cancelled:
                    return
                if event.kind == "run_started":
                    started = event.data
        except Exception as error:
            preview = Preview(problem=as_error(error))
        else:
            preview = Preview(
                int(started.get("trials") or 0),
                float(started.get("estimated_seconds") or 0.0),
                int(started.get("estimated_bytes") or 0),
                tuple(started.get("planned") or ()),
            )
        if self.plan is plan:
            self._set(preview=preview)

    def _make_tuner(self, plan: Plan, *, dry_run: bool = False) -> Tuner:
        tuner = make_tuner(self.target, self.data, plan, replace(self.options, dry_run=dry_run))
        if tuner.inspection is None:
            tuner.inspection = self.inspection
        return tuner

    def change_plan(self, plan: Plan) -> None:
        """Follow this plan from the next run on.

        Raises PlanError if it doesn't fit the target; the plan then stays as it was.
        """
        plan = with_candidates(plan)
        if self._snapshot.state.rows:
            check_plan(plan, self.paths, backends.names())
        with self._lock:
            if plan == self.plan:
                return
            self._set(plan=plan, stale=self._snapshot.result is not None or self.running, preview=None)
            self._emit("plan_changed", {"plan": to_data(plan)})
            if self.inspection is not None and not self.running:
                self.begin_preview()

    # --- the run -----------------------------------------------------------------------------------------------

    def begin_tune(self) -> Job[TuneResult]:
        """Tune on the worker; gives the job that is going on if there is one.

        Raises TargetError if another Lab tunes the target, or a part of it, just now.
        """
        with self._lock:
            if self._tune_job is not None and not self._tune_job.done:
                return self._tune_job
            registry.claim(self)
            self._cancelled, self._stopped = False, None
            self._tune_job = self._worker.submit("tune", self._tune)
            self._set(phase="tuning", notice=None, stale=False, paused=False)
            return self._tune_job

    def _tune(self) -> TuneResult:
        try:
            tuner = self._tuner = self._make_tuner(self.plan)
            if self._cancelled:
                tuner.cancel()
            elif self._snapshot.paused:
                tuner.pause()
            result = run(tuner, self._take)
            self.inspection = tuner.inspection
        except BaseException as error:
            self._set(phase="failed", notice=Notice(as_error(error), "error"), paused=False, cancelling=False)
            raise
        finally:
            registry.release(self)
            self._tuner = None
        if result.events[-1].kind == "run_cancelled" and not result.choices:
            self._stopped = tuner
            self._set(phase="cancelled", paused=False, cancelling=False)
        else:
            # Also one that was cancelled after its best so far was installed: that stays.
            self._set(phase="tuned", result=result, paused=False, cancelling=False)
        if self._snapshot.stale:
            self._emit("plan_changed", {"plan": to_data(self.plan)})
            self._preview()
        return result

    def _take(self, event: Event) -> None:
        """Take in an event of the engine, on the worker."""
        with self._lock:
            self._set(state=self._session.apply(event))

    def cancel(self) -> bool:
        """End the run at its next step; the target stays as it is. Tells whether there was one. Returns at once."""
        with self._lock:
            if not self.running:
                return False
            self._cancelled = True
            tuner, job = self._tuner, self._tune_job
        if tuner is None and job is not None and job.withdraw():
            registry.release(self)
            self._set(phase="ready" if self.inspection is not None else "new")
            return True
        self._set(cancelling=True)
        if tuner is not None:
            tuner.cancel()
        return True

    def pause(self) -> bool:
        """Hold the run at its next step, its clock too; tells whether there is one."""
        with self._lock:
            if not self.running:
                return False
            self._set(paused=True)
            if self._tuner is not None:
                self._tuner.pause()
        return True

    def resume(self) -> None:
        """Let a paused run go on."""
        with self._lock:
            self._set(paused=False)
            if self._tuner is not None:
                self._tuner.resume()

    # --- other work --------------------------------------------------------------------------------------------

    def begin(self, name: str, work: Callable[[], T]) -> Job[T]:
        """Do other work that touches the target on the worker, after what is going on."""
        return self._worker.submit(name, work)

    def would_do(self) -> TuneResult:
        """A dry run of the present plan, on this thread: what would be tried. Raises what a run raises."""
        return run(self._make_tuner(self.plan, dry_run=True))

    def last_run(self) -> TuneResult | None:
        """What the last run came to, also if it was cancelled; None if there was none or it failed."""
        job = self._tune_job
        return job.result() if job is not None and job.done and job.error() is None else None

    def ended(self, what: str) -> TuneResult:
        """The result of the last run.

        Raises TargetError, saying what to do first, if there is none yet.
        """
        result = self._snapshot.result
        if self.running:
            progress = self._snapshot.state.progress
            raise TargetError(
                f"{what} needs the tune to end first: it is at trial {progress.done} of {progress.total}. "
                "Wait for it with lab.wait(), or end it with lab.cancel()"
            )
        if result is None:
            raise TargetError(f"{what} needs a tuned target: call lab.run(), or lab.tune() and lab.wait(), first")
        return result

    def settle(self, job: Job[T], *, tick: Callable[[], None] | None = None) -> T:
        """Wait for a job, interruptibly; `tick` is called a few times a second meanwhile."""
        while not job.done:
            started = time.monotonic()
            try:
                return job.result(timeout=0.2)
            except TimeoutError:
                # The job's own TimeoutError comes at once and ends the loop; ours came after the wait.
                if job.done and time.monotonic() - started < 0.1:
                    break
                if tick is not None:
                    tick()
        return job.result()


def friendly(error: BaseException) -> str:
    """An error in one paragraph: our own speak for themselves, others are named."""
    return str(error) if isinstance(error, AituneError) else as_error(error)
