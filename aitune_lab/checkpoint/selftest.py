"""Runs golden samples through executables: are the numbers right here, and is it still faster?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..backends.base import BuildJob, Executable
from ..capture.recorder import Sample
from ..capture.state import Snapshot
from ..capture.structure import Flat, flatten
from ..measure.benchmark import measure
from ..measure.blocks import Contender, MeasureLimits
from ..measure.numerics import Call, compare
from ..measure.reference import reference_outputs
from ..runtime.codegen import structured
from ..schema import Comparison, SavedChoice, Tolerance
from .golden import Golden, golden_context, run_original
from .report import PointTest


def numbers_of(
    executable: Executable, job: BuildJob, goldens: Sequence[Golden], saved: SavedChoice, tolerance: Tolerance
) -> list[PointTest]:
    """Compare an executable with eager, and eager with its answers when the file was saved, on every golden sample.

    The comparison is the one that tuning makes: against a higher-precision run of the module where there is one.
    """
    dtype = next((p.dtype for p in job.module.parameters() if p.is_floating_point()), None)
    trial = saved.trial
    by_point = {result.point: result for result in trial.points} if trial is not None else {}
    found = []
    for golden in goldens:
        eager = run_original(job, golden.sample)
        actual = run_executable(executable, job, golden.sample)
        args, kwargs = job.form.arguments(golden.sample.call(fresh=True))
        with golden_context(job.signature, golden.sample):
            reference = reference_outputs(job.module, args, kwargs, method=job.signature.method)
        higher = flatten(reference.outputs) if reference.outputs is not None else None
        result = by_point.get(golden.sample.point)
        then = result.comparison if result is not None else None
        found.append(
            PointTest(
                path=job.path,
                method=job.signature.method,
                candidate=job.candidate.label,
                point=golden.sample.point.label,
                numbers=compare([Call(eager, actual, higher)], tolerance, dtype, reference.yardstick),
                eager_then=compare([Call(golden.expected, eager)], Tolerance(), dtype),
                class_at_tuning=then.error_class if then is not None else saved.choice.error_class,
                latency_at_tuning=result.latency if result is not None else None,
                eager_at_tuning=result.eager if result is not None else None,
            )
        )
    return found


def measured(
    executable: Executable,
    job: BuildJob,
    goldens: Sequence[Golden],
    tests: Sequence[PointTest],
    limits: MeasureLimits | None = None,
) -> list[PointTest]:
    """The tests with latencies of executable and original, measured in alternation on each golden sample."""
    tuned = structured(executable, job.signature, job.form)
    found = []
    for golden, test in zip(goldens, tests, strict=True):
        sample = golden.sample
        tensors = sample.tensors()
        snapshot = Snapshot(job.module)
        try:
            with golden_context(job.signature, sample):
                timing = measure(
                    [_contender("tuned", tuned, job, sample), _contender("eager", job.original, job, sample)],
                    device=tensors[0].device if tensors else "cpu",
                    limits=limits,
                    threads=job.threads,
                )
        finally:
            snapshot.restore()
        found.append(replace(test, latency=timing.measurements["tuned"], eager=timing.measurements["eager"]))
    return found


def _contender(label: str, function: Callable[..., Any], job: BuildJob, sample: Sample) -> Contender:
    def prepared(fresh: bool) -> Callable[[], Any]:
        args, kwargs = job.form.arguments(sample.call(fresh=fresh))
        return partial(function, *args, **kwargs)

    if job.signature.facts.mutated:
        return Contender(label, prepare=lambda turn: prepared(fresh=True))
    return Contender(label, calls=[prepared(fresh=False)])


def run_executable(executable: Executable, job: BuildJob, sample: Sample) -> Flat:
    """An executable's outputs for a fresh copy of a sample. The module's state is put back afterwards."""
    args, kwargs = job.form.arguments(sample.call(fresh=True))
    snapshot = Snapshot(job.module)
    try:
        with golden_context(job.signature, sample):
            return flatten(structured(executable, job.signature, job.form)(*args, **kwargs))
    finally:
        snapshot.restore()


def numbers_problem(tests: Sequence[PointTest], saved: SavedChoice) -> str | None:
    """Why the numbers don't hold here, or None. Errors that the user accepted at tuning may be as large here."""
    for test in tests:
        numbers: Comparison = test.numbers
        if numbers.error_class != "refused":
            continue
        accepted = saved.choice.relative_l2
        if saved.choice.accepted_error and accepted is not None and numbers.relative_l2 <= 2 * accepted:
            continue
        return f"its numbers are wrong here at {test.point}: {numbers.problem}"
    return None
