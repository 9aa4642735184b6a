"""One trial: build a candidate, compare it with eager at every point, measure it in alternation with eager."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..backends import registry
from ..backends.base import BuildJob, Executable
from ..capture.probe import autocast_of
from ..capture.recorder import Sample
from ..capture.state import Snapshot
from ..capture.swap import original_method
from ..errors import AituneError, BackendUnavailable, ChildFailed, DeviceLost, Refused
from ..measure.benchmark import Timing
from ..measure.blocks import Contender, MeasureLimits
from ..measure.numerics import Call, compare
from ..runtime.dispatch import MethodDispatch
from ..runtime.installed import InstalledExecutable
from ..schema import (
    Candidate,
    Choice,
    Comparison,
    Measurement,
    OpaqueLeaf,
    Point,
    PointResult,
    Tolerance,
    Trial,
    TrialStatus,
)
from .bench import Bench, LostAlias
from .making import Made, Steps, build_job, drop, make
from .recall import Known
from .search import Rival, rough_look

T = TypeVar("T")

LOG_CHARACTERS = 8000


@dataclass
class Built:
    """A candidate that was built: its trial so far, and what a choice installs."""

    trial: Trial
    installed: InstalledExecutable | None = None
    call: Callable[..., Any] | None = None
    reused: bool = False
    """The trial is an earlier run's."""


def attempt(
    bench: Bench, candidate: Candidate, known: Known, *, accept_error: bool = False, rival: Rival | None = None
) -> Steps[Built]:
    """The candidate's trial: an earlier run's if that says all, else a new one, which is kept for later runs.

    Raises what `trial_steps` raises. A candidate that an earlier process did not survive is not tried.
    """
    found = known.trial(bench, candidate, rival, wanted=accept_error)
    if found is not None:
        return Built(found, reused=True)
    key, artifact = known.keys.trial(candidate), known.keys.artifact(candidate)
    if why := known.recall.quarantined(artifact):
        return Built(Trial(key, bench.recording.path, bench.recorded.signature.key, candidate, "crashed", why))
    with known.recall.surviving(artifact):
        built = yield from trial_steps(bench, candidate, key, accept_error=accept_error, rival=rival, known=known)
        known.keep(built.trial, bench, rival)
    return built


def trial_steps(
    bench: Bench,
    candidate: Candidate,
    key: str,
    *,
    accept_error: bool = False,
    rival: Rival | None = None,
    timed: bool = True,
    known: Known | None = None,
) -> Steps[Built]:
    """Build (or load what the store holds), compare, measure.

    What went wrong is in the trial; raised are a cancel, an interrupt, and DeviceLost. A candidate out of tolerance is
    not timed, unless `accept_error`; nor, if a rival is named, one that a rough look shows to be hopeless against it; nor
    anything without `timed`. Without `known` nothing is looked up or kept.
    """
    trial = Trial(key, bench.recording.path, bench.recorded.signature.key, candidate, "failed")
    start = time.perf_counter()
    made: Made | None = None
    try:
        backend_class = registry.require(candidate.backend)
        trial = replace(trial, versions=dict(backend_class.available().versions))
        yield "build", None
        made = yield from make(bench, candidate, key, known)
        trial = replace(
            trial,
            build_seconds=made.build_seconds,
            artifact_bytes=made.artifact_bytes,
            memory_bytes=made.executable.memory_bytes,
            notes=made.notes,
            isolated=made.isolated,
            log=made.log,
        )
        built = _dispatched(bench, made.job, made.executable, trial)
        trial = yield from _compared(bench, built)
        if timed and (_admitted(trial, bench.tolerance) or (accept_error and trial.status == "ok")):
            trial = yield from _timed(bench, built, trial, rival)
    except Exception as error:
        _raise_if_lost(bench.device, trial, error)
        if made is not None:
            made.executable.close()
        seconds = made.build_seconds if made is not None else time.perf_counter() - start
        return Built(not_ok(trial, error, seconds, built=made is not None))
    except BaseException:
        if made is not None:
            made.executable.close()
        raise
    if trial.status != "ok":
        made.executable.close()
        return Built(trial)
    built.trial = trial
    assert built.installed is not None
    built.installed.trial = trial
    return built


def revived(bench: Bench, trial: Trial, known: Known) -> Built:
    """A candidate that was tried before, with an executable again, which is compared with eager once more.

    One that answers otherwise than it did is built anew. Raises Refused, with the figures, if that doesn't help, or
    whatever building raises.
    """
    with known.recall.surviving(known.keys.artifact(trial.candidate)):
        try:
            return _revived(bench, trial, known)
        except Exception:
            if not drop(bench, trial.candidate, known):
                raise
            return _revived(bench, trial, known)


def _revived(bench: Bench, trial: Trial, known: Known) -> Built:
    made = finished(make(bench, trial.candidate, trial.key, known))
    try:
        built = _dispatched(bench, made.job, made.executable, trial)
        again = finished(_compared(bench, built))
        if again.status != "ok" or (again.error_class == "refused" and trial.error_class != "refused"):
            raise Refused(f"loaded again, it answers otherwise than when it was tried: {again.reason}")
    except BaseException:
        made.executable.close()
        raise
    return Built(trial, built.installed, built.call)


def finished(steps: Steps[T]) -> T:
    """What steps come to."""
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result


def _raise_if_lost(device: torch.device, trial: Trial, error: Exception) -> None:
    """Raise DeviceLost if nothing can run on the GPU any more, so that no further candidate is blamed for it."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        reason = next(iter(str(lost).strip().splitlines()), "")
        raise DeviceLost(
            f"{trial.candidate.label} on {trial.path or 'the model'} failed on the GPU ({reason}), and after such a failure "
            "this process can't use it any more. Nothing further was tried and the target is as it was. Start a new "
            f"process, and leave this candidate out: Rule({trial.path!r}, 'exclude', excluded={trial.candidate.label!r})"
        ) from error


def eager_built(bench: Bench, trial: Trial) -> Built:
    """Eager as something to install: where other signatures of a method are tuned, its calls count as tuned too."""
    job = build_job(bench, trial.candidate, bench.folder)
    return _dispatched(bench, job, registry.of(trial.candidate).build(job), trial)


def not_ok(trial: Trial, error: Exception, seconds: float, *, built: bool) -> Trial:
    """The trial of a candidate that didn't get through, with what happened in a sentence."""
    if isinstance(error, Refused):
        return replace(trial, status="refused", reason=str(error), build_seconds=seconds)
    if isinstance(error, BackendUnavailable):
        return replace(trial, status="unavailable", reason=str(error))
    if isinstance(error, ChildFailed):
        ends: dict[str, TrialStatus] = {"ended": "crashed", "time": "timed out"}
        status, seconds = ends.get(error.cause, "failed"), error.seconds
        return replace(
            trial,
            status=status,
            reason=str(error),
            build_seconds=seconds,
            isolated=True,
            log=error.log[-LOG_CHARACTERS:],
        )
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    what = "failed to run" if built else "failed to build"
    reason = f"{what}: {type(error).__name__}: {lines[0][:300] if lines else ''}"
    log = "".join(traceback.format_exception(error))[-LOG_CHARACTERS:]
    return replace(trial, status="failed", reason=reason, build_seconds=seconds, log=log)


def _dispatched(bench: Bench, job: BuildJob, executable: Executable, trial: Trial) -> Built:
    """The executable behind the very guard that a tuned call goes through: that is what is compared and timed."""
    recording = bench.recording
    choice = Choice(recording.path, recording.method, trial.signature, trial.candidate, trial.key, "")
    installed = InstalledExecutable(choice, bench.recorded.signature, trial, executable, job)
    dispatch = MethodDispatch(recording.module, recording.method, recording.path, [installed])
    return Built(trial, installed, dispatch.call)


def _compared(bench: Bench, built: Built) -> Steps[Trial]:
    """The trial with a comparison at every point. Out of tolerance its status is `ok` and its class `refused`."""
    assert built.call is not None
    assert built.installed is not None
    trial, reason = built.trial, ""
    results: list[PointResult] = []
    dtypes = [p.dtype for p in bench.recording.module.parameters() if p.is_floating_point()]
    dtype = dtypes[0] if dtypes else None
    first_ms: float | None = None
    points = sorted(bench.recorded.samples, key=lambda p: p.sizes)
    for number, point in enumerate(points):
        yield "compare", number / len(points)
        bench.check_cancelled()
        calls, expected = [], bench.expected_at(point)
        samples = expected if len(expected) > 1 else expected * 2
        for item in samples:
            start = time.perf_counter()
            try:
                actual = bench.run(built.call, item.sample)
            except LostAlias as error:
                return replace(trial, status="refused", reason=str(error), points=tuple(results))
            first_ms = first_ms if first_ms is not None else 1000 * (time.perf_counter() - start)
            calls.append(Call(item.outputs, actual, item.reference))
        yardstick: Any = expected[0].yardstick
        comparison = compare(calls, bench.tolerance, dtype, yardstick)
        results.append(PointResult(point, bench.recorded.calls[point], bench.weights.get(point, 1.0), comparison))
        if comparison.error_class == "refused" and not reason:
            reason = f"out of tolerance at {point.label}: {comparison.problem}"
    executable = built.installed.executable
    notes = trial.notes
    if executable.uncovered is not None and (missed := executable.uncovered()):
        total = sum(max(2, len(s)) for s in bench.recorded.samples.values())
        if missed >= total:
            return replace(
                trial, status="refused", reason="every call needed a recompilation, so the original answered"
            )
        notes = (*notes, f"{missed} of {total} recorded calls ran the original (they would have recompiled)")
    return replace(trial, status="ok", reason=reason, points=tuple(results), first_call_ms=first_ms, notes=notes)


def _admitted(trial: Trial, tolerance: Tolerance) -> bool:
    classes = ("exact",) if tolerance.accuracy == "exact" else ("exact", "within budget")
    return trial.status == "ok" and trial.error_class in classes


def contenders_at(bench: Bench, built: Built, point: Point) -> list[Contender]:
    """Eager and the candidate, on the same recorded calls."""
    assert built.call is not None
    original = original_method(bench.recording.module, bench.recording.method)
    return [
        _contender(bench, "eager", original, point),
        _contender(bench, built.trial.candidate.label, built.call, point),
    ]


def _contender(bench: Bench, label: str, function: Callable[..., Any], point: Point) -> Contender:
    samples = bench.recorded.samples[point]
    signature, form = bench.recorded.signature, bench.recording.form

    def thunk(sample: Sample, fresh: bool) -> Callable[[], Any]:
        args, kwargs = form.arguments(sample.call(fresh=fresh))
        return lambda: function(*args, **kwargs)

    changes = signature.facts.mutated or any(isinstance(leaf, OpaqueLeaf) for leaf in signature.leaves)
    if changes:
        # Each call needs inputs as they were recorded; copying them is not part of its time.
        return Contender(label, prepare=lambda i: thunk(samples[i % len(samples)], True))
    return Contender(label, [thunk(sample, False) for sample in samples])


def _timed(bench: Bench, built: Built, trial: Trial, rival: Rival | None) -> Steps[Trial]:
    """The trial with latencies at every point, eager's taken in alternation."""
    start = time.perf_counter()
    results = []
    label = trial.candidate.label
    if rival is not None:
        yield "rough look", None
        points = sorted((r.point for r in trial.points), key=lambda p: -bench.recorded.seconds[p])
        looks: dict[Point, Mapping[str, Measurement]] = {}

        def look(point: Point, limits: MeasureLimits) -> Timing:
            timing = time_point(bench, built, point, limits=limits)
            looks[point] = timing.measurements
            return timing

        stopped = rough_look(label, points, rival, look)
        if stopped is not None:
            rough = tuple(
                replace(r, rough=looks[r.point].get(label), rough_eager=looks[r.point].get("eager"))
                if r.point in looks
                else r
                for r in trial.points
            )
            spent = time.perf_counter() - start
            return replace(trial, points=rough, reason=stopped, measure_seconds=spent)
    for number, result in enumerate(trial.points):
        yield "measure", number / len(trial.points)
        measured = time_point(bench, built, result.point).measurements
        results.append(replace(result, latency=measured[label], eager=measured["eager"]))
    return replace(trial, points=tuple(results), measure_seconds=time.perf_counter() - start)


def time_point(
    bench: Bench, built: Built, point: Point, *, seed: int = 0, limits: MeasureLimits | None = None
) -> Timing:
    """Latencies of eager and the candidate at one point, under the contexts that a tuned call sees."""
    signature = bench.recorded.signature
    snapshot = Snapshot(bench.recording.module) if signature.facts.state else None
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), autocast_of(signature.autocast):
            return bench.meter(
                contenders_at(bench, built, point),
                device=bench.device,
                limits=limits or bench.limits,
                threads=bench.threads,
                seed=seed,
                cancelled=bench.is_cancelled,
            )
    finally:
        if snapshot is not None:
            snapshot.restore()


def eager_trial(bench: Bench, key: str, timings: Sequence[Trial]) -> Trial:
    """Eager as a trial: its latencies are those measured beside the candidates (or none, if nothing was timed)."""
    results = []
    for point in sorted(bench.recorded.samples, key=lambda p: p.sizes):
        measured = [r.eager for t in timings for r in t.points if r.point == point and r.eager is not None]
        settled = [m for m in measured if m.disturbed is None] or measured
        best = min(settled, key=lambda m: m.median_ms) if settled else None
        comparison = Comparison("exact", "eager", (), 0)
        results.append(
            PointResult(point, bench.recorded.calls[point], bench.weights.get(point, 1.0), comparison, best, best)
        )
    status: TrialStatus = "ok"
    return Trial(
        key, bench.recording.path, bench.recorded.signature.key, Candidate("eager"), status, points=tuple(results)
    )


def as_error(error: BaseException) -> str:
    """One line for events and logs."""
    return str(error) if isinstance(error, AituneError) else f"{type(error).__name__}: {error}"
