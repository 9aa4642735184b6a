"""How a run goes about its work, beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..backends.base import Backend
from ..capture.signature import DynamicShapes
from ..errors import PlanError
from ..isolation import BuildLimits, Isolation, default_isolation
from ..measure.benchmark import Timing, measure
from ..measure.blocks import MeasureLimits
from ..runtime.originals import Originals
from ..schema import Candidate
from .candidates import as_candidate
from .endtoend import Metric
from .recall import StoreLike

BackendLike = str | Candidate | Backend | type[Backend]


def backends_of(named: Sequence[BackendLike] | str | None) -> tuple[BackendLike, ...] | None:
    """What a user named to be tried: one name, or several. None is everything there is; raises PlanError for nothing."""
    if named is None:
        return None
    if not named:
        raise PlanError(f"backends must name at least one to try, but got {named!r}. Leave it out to try all")
    return (named,) if isinstance(named, str) else tuple(named)


@dataclass(frozen=True)
class TuneOptions:
    """How a run goes about it, beside the plan."""

    inference_function: Callable[..., Any] | None = None
    batch_sizes: tuple[int, ...] | None = None
    max_batches_per_batch_size: int = 2
    backends: tuple[BackendLike, ...] | None = None
    dynamic_shapes: Mapping[str, DynamicShapes] = field(default_factory=dict)
    on_module_failure: Literal["eager", "raise"] = "eager"
    on_miss: Literal["original", "error"] = "original"
    weights: Literal["watched", "frozen"] = "watched"
    originals: Originals = "device"
    """Where the weights of tuned modules are afterwards."""
    dry_run: bool = False
    measure_limits: MeasureLimits = field(default_factory=MeasureLimits)
    end_to_end: bool = True
    """Whether the tuned target is compared and timed as a whole."""
    metric: Metric | None = None
    """The user's metric on the outputs, for that check."""
    meter: Callable[..., Timing] = measure
    """What times contenders; scripted in tests."""
    store: StoreLike = "auto"
    """Where earlier trials are looked up and new ones kept: `"auto"`, a folder, or None for nowhere."""
    retry: bool = False
    """Try again what failed in earlier runs, or never finished."""
    isolation: Isolation = field(default_factory=default_isolation)
    """`"auto"`: candidates are built and first called in child processes, but on a GPU; `"all"`: there too; `"off"`: here."""
    build_limits: BuildLimits = field(default_factory=BuildLimits)
    """Of each build in a child process."""

    def __post_init__(self) -> None:
        known = {
            "on_module_failure": ("eager", "raise"),
            "on_miss": ("original", "error"),
            "weights": ("watched", "frozen"),
            "originals": ("device", "cpu", "drop"),
            "isolation": ("auto", "all", "off"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise PlanError(f"{name} must be one of {list(values)}, but got {getattr(self, name)!r}")
        backends: Any = self.backends or ()
        if isinstance(backends, str) or not all(isinstance(b, (str, Candidate, Backend, type)) for b in backends):
            raise PlanError(f"backends must be a list of names, Backends or candidates, but got {backends!r}")
        for item in backends:
            as_candidate(item)
