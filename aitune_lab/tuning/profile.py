"""Where a target's time goes: tuned and untuned regions and the code around them, eager against tuned, with their kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .._display import Printed
from ..capture.data import understand
from ..capture.inspector import takes
from ..capture.state import preserved
from ..capture.tree import find_modules, outermost, unit_path
from ..errors import DataError, TargetError
from ..measure.significance import median_interval
from ..runtime.installed import unparked
from .mixes import Bounded
from .regions import OUTSIDE, Clock, Kernel, Kind, Run, Runner, Spent, watched_in
from .strategies.words import counted

__all__ = ["Kernel", "Profile", "Region", "profile"]


@dataclass(frozen=True)
class Region:
    """A part of the target's time, in one pass over the data.

    Attributes:
        path: the module's, with the method's name where it isn't `forward`.
        kind: `"tuned"`: a module with something installed; `"untuned"`: a module without, with all beneath it;
            `"around"`: a module's own code around regions in it; `"outside"`: what runs in no module (Python, I/O).
        candidates: what its tuned calls run on; empty for other kinds.
        calls: in one pass.
        eager: median over passes in which nothing was tuned.
        tuned: likewise as installed; None where nothing is.
        eager_share: of the whole eager pass, by medians.
        tuned_share: of the whole tuned pass.
    """

    path: str
    kind: Kind
    candidates: tuple[str, ...]
    calls: int
    eager: Bounded
    tuned: Bounded | None
    eager_share: float
    tuned_share: float | None

    @property
    def speedup(self) -> float | None:
        return self.eager.ms / self.tuned.ms if self.tuned is not None and self.tuned.ms > 0 else None


@dataclass(frozen=True)
class Profile(Printed):
    """Where a target's time goes. Shows itself as tables; `to_dataframe()` gives the regions.

    Attributes:
        regions: the largest in eager first.
        kernels: by region and run, the longest first; taken in one further pass under torch's profiler, which slows
            small operations down.
        eager: one pass over the data with nothing tuned.
        tuned: the same as installed; None where nothing is.
        passes: of each, in alternation.
        notes: what limits the figures.
    """

    regions: tuple[Region, ...]
    kernels: tuple[Kernel, ...]
    eager: Bounded
    tuned: Bounded | None
    passes: int
    understood: str = ""
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        return self.eager.ms / self.tuned.ms if self.tuned is not None and self.tuned.ms > 0 else None

    def kernels_of(self, region: Region, run: Run = "eager") -> tuple[Kernel, ...]:
        """A region's kernels, the longest first."""
        return tuple(k for k in self.kernels if k.region == region.path and k.run == run)

    def to_dataframe(self) -> Any:
        """The regions as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().profiles.regions_frame(self.regions)

    def kernels_frame(self) -> Any:
        """The kernels as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().profiles.kernels_frame(self.kernels)

    def __str__(self) -> str:
        from .._display import report

        return str(report().profiles.profile_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().profiles.profile_html(self))


def profile(
    target: Any,
    data: Any,
    *,
    inference_function: Callable[..., Any] | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_batches_per_batch_size: int = 2,
    modules: Sequence[str] = (),
    passes: int = 5,
    kernels: bool = True,
) -> Profile:
    """Say where a target's time goes, in tuned and untuned modules and around them, eager against tuned.

    Eager and tuned passes over the data alternate. On a GPU each region waits for the device at its ends, so what
    would overlap doesn't. Calls count in `stats`; the target's state and torch's random state are put back.

    Args:
        target: a module, or any object that holds modules; tuned or not.
        data: as `tune` takes it.
        inference_function: called with an item's arguments in place of the target.
        batch_sizes: as `tune` takes them.
        max_batches_per_batch_size: as `tune` takes it.
        modules: paths to show apart, beside the tuned ones; a tuned module is not looked into.
        passes: of each over the data, after one that warms up.
        kernels: run one further pass of each under torch's profiler.

    Raises:
        TargetError: the target holds no modules, can't be called, or doesn't hold one of `modules`; or weights were
            dropped after tuning, so that it can't run untuned.
        DataError: the data is empty, or the target rejects it; or passes isn't at least 1.
    """
    if passes < 1:
        raise DataError(f"passes >= 1 must hold, but got {passes}")
    found = find_modules(target)
    if not found:
        raise TargetError(f"no torch.nn.Module was found in this {type(target).__name__}")
    understood = understand(
        data,
        takes=takes(target, inference_function),
        batch_sizes=batch_sizes,
        max_batches_per_batch_size=max_batches_per_batch_size,
    )
    clock = Clock(watched_in(target, found, modules))
    rng = torch.random.fork_rng(devices=_cuda_devices())
    with unparked(target), preserved(outermost(found)), rng, torch.no_grad(), clock.watching():
        runner = Runner(target, inference_function, understood, clock)
        measured, missed = runner.measure(passes)
        seen = runner.kernels(tuple(measured)) if kernels else ()
    return _assembled(clock, measured, seen, passes, understood.sentence, missed)


def _assembled(
    clock: Clock,
    measured: Mapping[Run, list[Spent]],
    kernels: tuple[Kernel, ...],
    passes: int,
    understood: str,
    missed: Mapping[str, int],
) -> Profile:
    eager, tuned = measured["eager"], measured.get("tuned")
    whole, whole_tuned = _bounded([s.whole for s in eager]), None
    if tuned is not None:
        whole_tuned = _bounded([s.whole for s in tuned])
    regions = []
    kinds = {unit_path(item.path, item.method): item for item in clock.watched}
    ran = [path for path in kinds if any(s.calls.get(path) for s in (*eager, *(tuned or ())))]
    for path in (*ran, OUTSIDE):
        item = kinds.get(path)
        one = _bounded([_seconds(s, path) for s in eager])
        other = _bounded([_seconds(s, path) for s in tuned]) if tuned is not None else None
        regions.append(
            Region(
                path,
                item.kind if item is not None else "outside",
                item.candidates if item is not None else (),
                max((s.calls.get(path, 0) for s in (*eager, *(tuned or ()))), default=0),
                one,
                other,
                one.ms / whole.ms if whole.ms else 0.0,
                other.ms / whole_tuned.ms if other is not None and whole_tuned is not None and whole_tuned.ms else None,
            )
        )
    notes = [
        f"{path or '(model)'}: {counted(count, 'call')} a pass ran the original; aitune_lab.stats(target) says why"
        for path, count in missed.items()
        if count > 0
    ]
    regions.sort(key=lambda region: -region.eager.ms)
    return Profile(tuple(regions), kernels, whole, whole_tuned, passes, understood, tuple(notes))


def _seconds(spent: Spent, path: str) -> float:
    if path == OUTSIDE:
        return max(spent.whole - sum(spent.seconds.values()), 0.0)
    return spent.seconds.get(path, 0.0)


def _bounded(seconds: Sequence[float]) -> Bounded:
    values = [1000 * value for value in seconds]
    return Bounded(median(values), *median_interval(values))


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
