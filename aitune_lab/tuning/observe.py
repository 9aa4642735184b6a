"""What can be observed of runs and tuned calls: NVTX ranges, host and GPU metrics, log records."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import torch

from ..errors import AituneError
from ..measure.monitor import Doing, Monitor, Sample, TrialMetrics
from ..runtime import ranges
from ..schema import Event
from .progress import line

logger = logging.getLogger("aitune_lab")
# Records go to the handlers of the application; where it has none, nowhere.
logger.addHandler(logging.NullHandler())

_LEVELS = {
    "trial_started": logging.DEBUG,
    "trial_progress": logging.DEBUG,
    "trial_failed": logging.INFO,
    "run_cancelled": logging.WARNING,
    "run_failed": logging.ERROR,
}
_ENDS = ("trial_finished", "trial_failed", "run_finished", "run_cancelled", "run_failed")
_BROKEN = ("crashed", "timed out")


class Observer:
    """The switches and what was seen. All observers of a process share both; `observe` gives one.

    As a context manager it puts the switches back to what they were before the `observe` that gave it.
    """

    def __init__(self, before: tuple[bool, bool]) -> None:
        self._before = before

    @property
    def nvtx(self) -> bool:
        """Whether tuned calls and the phases of trials stand in NVTX ranges; may be set at any time.

        Setting it raises AituneError where this build of torch has no NVTX.
        """
        return ranges.is_on()

    @nvtx.setter
    def nvtx(self, on: bool) -> None:
        ranges.switch(on)
        if not on:
            _trial_ranges.end()

    @property
    def metrics(self) -> bool:
        """Whether host and GPUs are sampled; may be set at any time. Samples taken before are kept."""
        return _monitor.running

    @metrics.setter
    def metrics(self, on: bool) -> None:
        if on:
            _monitor.start()
        else:
            _monitor.stop()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples so far, the oldest first."""
        return _monitor.samples

    def by_trial(self) -> tuple[TrialMetrics, ...]:
        """What each trial took: peak memory, mean load, highest temperature."""
        return _monitor.by_trial()

    def to_csv(self, path: str | Path) -> Path:
        """Write all samples as CSV, one row each; gives the path."""
        return _monitor.to_csv(path)

    def to_dataframe(self) -> Any:
        """All samples as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().observed.samples_frame(self.samples)

    def clear(self) -> None:
        """Forget the samples; sampling goes on if it was on."""
        _monitor.clear()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.nvtx, self.metrics = self._before

    def __str__(self) -> str:
        from .._display import report

        return str(report().observed.observer_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().observed.observer_html(self))


class _TrialRanges:
    """One range for the trial and one for its phase; they may end in another thread than they began in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trial: tuple[str, int] | None = None
        self._phase: tuple[str, int] | None = None

    def begin(self, doing: Doing) -> None:
        trial = f"aitune_lab trial: {doing.path} {doing.candidate}"
        with self._lock:
            if self._trial is None or self._trial[0] != trial:
                self._end()
                self._trial = trial, torch.cuda.nvtx.range_start(trial)
            if self._phase is None or self._phase[0] != doing.phase:
                self._end_phase()
                self._phase = doing.phase, torch.cuda.nvtx.range_start(f"aitune_lab {doing.phase}")

    def end(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._end_phase()
        if self._trial is not None:
            torch.cuda.nvtx.range_end(self._trial[1])
            self._trial = None

    def _end_phase(self) -> None:
        if self._phase is not None:
            torch.cuda.nvtx.range_end(self._phase[1])
            self._phase = None


_monitor = Monitor()
_trial_ranges = _TrialRanges()


def observe(
    *, nvtx: bool | None = None, metrics: bool | None = None, interval_seconds: float | None = None
) -> Observer:
    """Switch what is observed of runs and tuned calls in this process, at any time; give what was seen.

    `with observe(metrics=True) as seen: tune(...)` switches back at the end; without `with` it stays as switched.
    Log records go to the logger `aitune_lab` whatever is switched: runs and choices as INFO, what a run warns of as
    WARNING, failed runs as ERROR, phases as DEBUG.

    Args:
        nvtx: ranges around tuned calls and the phases of trials, for Nsight and the like; None leaves it as it is.
        metrics: sample memory, load and temperature of host and GPUs, by trial; None leaves it as it is.
        interval_seconds: between two samples; None leaves it as it is (0.5 at first).

    Raises:
        AituneError: `nvtx` on a build of torch without CUDA, or an interval that is not above 0.
    """
    if interval_seconds is not None and not interval_seconds > 0:
        raise AituneError(f"interval_seconds > 0 must hold, but got {interval_seconds}")
    observer = Observer((ranges.is_on(), _monitor.running))
    if nvtx is not None:
        observer.nvtx = nvtx
    if interval_seconds is not None:
        _monitor.interval_seconds = interval_seconds
    if metrics is not None:
        observer.metrics = metrics
    return observer


def notice(event: Event) -> None:
    """Take in an event of a run, as it happens, from the thread that runs it."""
    _log(event)
    if event.kind in ("trial_started", "trial_progress"):
        label = event.candidate.label if event.candidate is not None else ""
        doing = Doing(event.path or "(model)", event.signature or "", label, str(event.data.get("phase") or ""))
        _monitor.now(doing)
        if ranges.is_on():
            _trial_ranges.begin(doing)
    elif event.kind in _ENDS:
        _monitor.now(Doing())
        _trial_ranges.end()


def _log(event: Event) -> None:
    level = _level(event)
    if not logger.isEnabledFor(level):
        return
    if event.kind == "trial_started":
        text: str | None = f"{event.path or '(model)'}: trying {event.candidate.label if event.candidate else ''}"
    elif event.kind == "trial_progress":
        text = f"{event.path or '(model)'}: {event.data.get('doing') or event.data.get('phase')}"
    else:
        text = line(event)
    if text:
        logger.log(level, "%s", text)


def _level(event: Event) -> int:
    if event.kind == "log":
        return {"warning": logging.WARNING, "error": logging.ERROR}.get(str(event.data.get("level")), logging.INFO)
    if event.kind == "trial_failed" and event.data.get("trial", {}).get("status") in _BROKEN:
        return logging.WARNING
    return _LEVELS.get(event.kind, logging.INFO)
