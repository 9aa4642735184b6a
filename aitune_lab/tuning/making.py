"""Makes a candidate's executable: from what the store holds, else anew."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..backends.base import BuildJob, Executable
from ..capture.swap import original_method
from ..isolation import Build, BuildSteps, steps_here
from ..runtime import variant
from ..schema import Candidate
from .bench import Bench
from .recall import Known

T = TypeVar("T")
Steps = Generator[tuple[str, float | None], None, T]
"""Phases with the fraction done (None if unknown) while something runs, then its result."""

BUILDING = "build: "
"""Begins the phase of a build that goes on meanwhile, in a child process."""
REPEAT_SECONDS = 0.5
"""Between two words on one phase of a build."""


@dataclass(frozen=True)
class Made:
    """An executable, built or loaded, with what is known of its build."""

    executable: Executable
    job: BuildJob
    build_seconds: float
    notes: tuple[str, ...]
    artifact_bytes: int
    isolated: bool = False
    log: str = ""


def make(bench: Bench, candidate: Candidate, key: str, known: Known | None) -> Steps[Made]:
    """The candidate's executable: loaded from the artifact of this run or of the store, else built and kept."""
    if known is None:
        folder = bench.folder / key
        folder.mkdir(parents=True, exist_ok=True)
        return (yield from _built(bench, build_job(bench, candidate, folder)))
    artifact_key = known.keys.artifact(candidate)
    folder = bench.folder / artifact_key
    facts: Mapping[str, Any] | None = known.recall.kept.get(artifact_key)
    if facts is None:
        shutil.rmtree(folder, ignore_errors=True)  # what a failed build has left
        folder.mkdir(parents=True)
        found = known.recall.take(artifact_key, folder)
        facts = found.facts if found is not None else None
    job = build_job(bench, candidate, folder, shared=known.recall.shared)
    if facts is not None or bench.build is steps_here:
        known.recall.begin(artifact_key, candidate)
    if facts is not None:
        start = time.perf_counter()
        loaded = _loaded(job, facts)
        known.recall.counts.load_seconds += time.perf_counter() - start
        if loaded is not None:
            known.recall.counts.loads += 1
            known.recall.kept[artifact_key] = facts
            return loaded
        shutil.rmtree(folder)
        folder.mkdir()
    known.recall.counts.builds += 1
    made = yield from _built(bench, job)
    known.recall.begin(artifact_key, candidate)
    facts = {
        "label": candidate.label,
        "build_seconds": made.build_seconds,
        "notes": list(made.notes),
        "recompiles": made.executable.recompiles,
    }
    known.recall.kept[artifact_key] = facts
    known.recall.own.add(artifact_key)
    known.recall.put(artifact_key, folder, facts)
    return made


def _built(bench: Bench, job: BuildJob) -> Steps[Made]:
    build = yield from _worth_saying(bench, bench.build(job))
    notes = build.executable.notes
    return Made(build.executable, job, build.seconds, notes, _size(job.folder), build.isolated, build.log)


def _worth_saying(bench: Bench, steps: BuildSteps) -> Steps[Build]:
    """A build's phases: each when it is new, and from time to time how far one is."""
    said: set[str] = set()
    last = 0.0
    with closing(steps):
        while True:
            try:
                phase, fraction = next(steps)
            except StopIteration as stop:
                build: Build = stop.value
                return build
            if phase not in said or (fraction is not None and time.monotonic() - last >= REPEAT_SECONDS):
                said.add(phase)
                last = time.monotonic()
                yield BUILDING + phase, fraction
            bench.check_cancelled()


def _loaded(job: BuildJob, facts: Mapping[str, Any]) -> Made | None:
    """What an earlier build left, ready to be called; None if that can't be loaded any more."""
    try:
        executable = (variant.build if facts["recompiles"] else variant.load)(job)
    except Exception:
        return None
    return Made(executable, job, float(facts["build_seconds"]), tuple(facts["notes"]), _size(job.folder))


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def drop(bench: Bench, candidate: Candidate, known: Known) -> bool:
    """Forget the candidate's artifact, so that it is built anew. False if this run has built it itself."""
    key = known.keys.artifact(candidate)
    if key not in known.recall.kept or key in known.recall.own:
        return False
    del known.recall.kept[key]
    known.recall.drop(key)
    return True


def build_job(bench: Bench, candidate: Candidate, folder: Path, *, shared: Path | None = None) -> BuildJob:
    recording = bench.recording
    return BuildJob(
        recording.path,
        recording.module,
        original_method(recording.module, recording.method),
        recording.form,
        bench.recorded.signature,
        bench.recorded.all_samples(),
        candidate,
        folder,
        bench.threads,
        lambda phase, fraction: bench.check_cancelled(),
        shared,
    )
