"""Makes the executable of one saved choice: from its files, or anew from its configuration."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..backends import registry
from ..backends.base import BuildJob, Executable
from ..capture.calls import CallForm
from ..capture.recorder import Sample
from ..capture.signature import resized
from ..capture.swap import original_method
from ..runtime.codegen import structured
from ..runtime.variant import build, load
from ..schema import Point, SavedChoice, Signature, TensorLeaf
from .archive import Archive
from .golden import Golden, placeholder, unpack
from .validate import sample_problem

Progress = Callable[[str, float | None], None]


@dataclass
class Made:
    """An executable with the job that it came from and the golden samples that stand in the file for it."""

    executable: Executable
    job: BuildJob
    goldens: list[Golden]


def make(
    archive: Archive,
    saved: SavedChoice,
    module: torch.nn.Module,
    devices: dict[str, str],
    progress: Progress,
    *,
    anew: bool,
    defer: bool,
) -> Made:
    """Load or build the executable of a choice whose trust and fitness have been decided.

    Args:
        devices: where to run what was tuned on another device, by its name there.
        anew: build it from its configuration, and from those of its files that its backend names as sources, instead of
            loading its files.
        defer: build it at its first call.

    Raises CheckpointError for damaged entries, and whatever the backend raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="aitune-lab-"))
    try:
        goldens = _goldens(archive, saved, devices)
        signature = on_devices(saved.signature, devices)
        original = original_method(module, signature.method)
        samples = _samples(saved, signature, goldens) if anew else [golden.sample for golden in goldens]
        sources = registry.get(saved.choice.candidate.backend).sources
        for name in saved.artifact:
            inside = PurePosixPath(name).relative_to(saved.folder)
            if not anew or any(fnmatchcase(inside.as_posix(), source) for source in sources):
                archive.extract(name, folder / inside)
        job = BuildJob(
            path=saved.choice.path,
            module=module,
            original=original,
            form=CallForm(original),
            signature=signature,
            samples=samples,
            candidate=saved.choice.candidate,
            folder=folder,
            threads=torch.get_num_threads(),
            progress=progress,
        )
        if defer:
            executable = _deferred(lambda: build(job), job, saved.live_weights)
        else:
            executable = build(job) if anew else load(job)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _remove_at_end(executable, folder)
    return Made(executable, job, goldens)


def on_devices(signature: Signature, devices: dict[str, str]) -> Signature:
    """The signature with other devices, by their names in it."""

    def moved(leaf: Any) -> Any:
        return replace(leaf, device=devices.get(leaf.device, leaf.device)) if isinstance(leaf, TensorLeaf) else leaf

    if not devices:
        return signature
    return replace(
        signature,
        leaves=tuple(map(moved, signature.leaves)),
        output_leaves=tuple(map(moved, signature.output_leaves)),
    )


def _goldens(archive: Archive, saved: SavedChoice, devices: dict[str, str]) -> list[Golden]:
    """The golden samples that can be rebuilt in this process."""
    if not saved.golden or any(sample_problem(sample) for sample in saved.samples):
        return []
    return unpack(archive.read(saved.golden[0]), saved.samples, devices)


def _samples(saved: SavedChoice, signature: Signature, goldens: Sequence[Golden]) -> list[Sample]:
    """A sample for each point at which the choice was measured: golden, resized from a golden one, or by shape alone."""
    found = {golden.sample.point: golden.sample for golden in goldens}
    points = [result.point for result in saved.trial.points] if saved.trial is not None else []
    if not points and not found:
        points = [
            Point(tuple((s.name, size) for s, size in zip(signature.symbols, sizes, strict=True)))
            for sizes in _ranges(signature)
        ]
    nearest = next(iter(found.values()), None)
    for point in points:
        if point not in found:
            found[point] = resized(nearest, signature, point) if nearest is not None else placeholder(signature, point)
    return list(found.values())


def _ranges(signature: Signature) -> list[tuple[int, ...]]:
    ends = (tuple(s.max for s in signature.symbols), tuple(s.min for s in signature.symbols))
    return list(dict.fromkeys(ends))


def _deferred(build: Callable[[], Executable], job: BuildJob, live_weights: bool) -> Executable:
    """An executable that is built by its first call. If that fails, the original answers from then on."""
    lock = threading.Lock()
    made: list[Executable] = []
    run: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not run:
            with lock:
                if not run:
                    try:
                        made.append(build())
                        run.append(structured(made[0], job.signature, job.form))
                    except Exception as error:
                        _warn_failed(job, error)
                        run.append(job.original)
        return run[0](*args, **kwargs)

    def close() -> None:
        for executable in made:
            executable.close()

    def moved() -> bool:
        return any(executable.moved is not None and executable.moved() for executable in made)

    by_address = job.candidate.cuda_graph and live_weights
    return Executable(
        call,
        flat=False,
        live_weights=live_weights,
        recompiles=True,
        close=close,
        moved=moved if by_address else None,
    )


def _warn_failed(job: BuildJob, error: Exception) -> None:
    import warnings

    from ..errors import AituneWarning

    warnings.warn(
        f"{job.candidate.label} for {job.path or 'the module'} cannot be built here, the original runs: {error}",
        AituneWarning,
        stacklevel=3,
    )


def _remove_at_end(executable: Executable, folder: Path) -> None:
    """Remove the folder when the executable is closed, forgotten, or the process ends. Closing twice does nothing."""
    finalizer = weakref.finalize(executable, _remove, folder, os.getpid())
    closing = [executable.close]

    def close_and_remove() -> None:
        if closing:
            closing.pop()()
            finalizer()

    executable.close = close_and_remove


def _remove(folder: Path, owner: int) -> None:
    # A forked child must not take the files from its parent.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
