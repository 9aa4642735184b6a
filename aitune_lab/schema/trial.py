"""Candidates, and what was measured for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .signature import Point

Option = bool | int | float | str | None
ErrorClass = Literal["exact", "within budget", "refused"]
TrialStatus = Literal["ok", "refused", "failed", "unavailable", "timed out", "crashed", "cancelled"]


@dataclass(frozen=True)
class Candidate:
    """One concrete way to run a module: a backend's name, its options, and what holds for any backend.

    `options` are the fields of the backend's config that differ from their defaults, sorted by name, so that
    equal candidates compare equal. `precision` is `"as is"` or the lower dtype that the module is run in.
    """

    backend: str
    options: tuple[tuple[str, Option], ...] = ()
    precision: str = "as is"
    memory_format: str | None = None
    cuda_graph: bool = False

    @property
    def label(self) -> str:
        """`inductor[freezing]`, `onnxruntime`, `tensorrt[float16, cuda graph]`."""
        parts = [name if value is True else f"{name}={value}" for name, value in self.options]
        if self.precision != "as is":
            parts.append(self.precision)
        if self.memory_format:
            parts.append(self.memory_format)
        if self.cuda_graph:
            parts.append("cuda graph")
        return self.backend + (f"[{', '.join(parts)}]" if parts else "")

    @property
    def key(self) -> str:
        text = json.dumps([self.backend, self.options, self.precision, self.memory_format, self.cuda_graph])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def option(self, name: str, default: Option = None) -> Option:
        return dict(self.options).get(name, default)


@dataclass(frozen=True)
class Measurement:
    """A latency with its spread, in milliseconds, and how it was measured.

    `ci_low_ms`/`ci_high_ms` bound the median at 95 % confidence; `spread` is the interquartile range over the
    median; `n` counts timed blocks of `calls_per_block` calls. `disturbed` says why it decides nothing.
    """

    median_ms: float
    p90_ms: float
    min_ms: float
    ci_low_ms: float
    ci_high_ms: float
    spread: float
    n: int
    calls_per_block: int
    method: str
    threads: int
    disturbed: str | None = None
    device_ms: float | None = None
    """Median device time per call, beside the host's wall time; None on the CPU."""
    conditions: Mapping[str, Option] = field(default_factory=dict)
    """What the figure rests on: clocks, temperature, reduced-precision settings (`tf32`), warm-up calls."""

    def __str__(self) -> str:
        marks = f"; disturbed, so it decides nothing: {self.disturbed}" if self.disturbed else ""
        bounds = f"{self.ci_low_ms:.3g} to {self.ci_high_ms:.3g} ms at 95 %"
        return f"{self.median_ms:.3g} ms (median of {self.n} blocks, {bounds}{marks})"


@dataclass(frozen=True)
class LeafDifference:
    """How one output leaf differs from the reference, at one point, over all samples compared.

    Relative figures are against the reference leaf: `relative_l2` is |a - r| / |r| (L2 norms), `max_relative`
    the worst element's error over its own magnitude. `worst_index`, `expected` and `actual` name the worst
    element. `allowed_relative` is the bound of the class it was judged by; `eager_relative_l2` is what eager
    itself is off from the higher-precision reference. `problem` says in a sentence why the leaf is refused.
    """

    path: str
    error_class: ErrorClass
    max_absolute: float
    mean_absolute: float
    p99_absolute: float
    max_relative: float
    mean_relative: float
    relative_l2: float
    cosine: float
    snr_db: float
    mismatch_share: float
    factor_over_eager: float | None
    eager_relative_l2: float
    allowed_relative: float
    worst_index: tuple[int, ...] = ()
    expected: str = ""
    actual: str = ""
    problem: str | None = None
    notes: tuple[str, ...] = ()
    """Differences that don't refuse: strides, a lost view, an agreement share."""


@dataclass(frozen=True)
class Comparison:
    """All leaves of all samples at one point, with the class that holds for every one of them."""

    error_class: ErrorClass
    yardstick: Literal["float64", "float32", "eager"]
    leaves: tuple[LeafDifference, ...]
    calls: int
    problem: str | None = None
    notes: tuple[str, ...] = ()
    """Differences of the whole call that don't refuse, and why there was no higher-precision reference."""

    @property
    def relative_l2(self) -> float:
        return max((leaf.relative_l2 for leaf in self.leaves), default=0.0)

    @property
    def factor_over_eager(self) -> float | None:
        return max((f for f in (leaf.factor_over_eager for leaf in self.leaves) if f is not None), default=None)


@dataclass(frozen=True)
class PointResult:
    """What was measured for a candidate at one point. `eager` was measured in alternation with `latency`.

    Where a rough look stopped the trial, `rough` and `rough_eager` are its figures. They serve estimates and decide nothing.
    """

    point: Point
    calls: int
    weight: float
    comparison: Comparison | None = None
    latency: Measurement | None = None
    eager: Measurement | None = None
    peak_memory_bytes: int | None = None
    rough: Measurement | None = None
    rough_eager: Measurement | None = None

    @property
    def speedup(self) -> float | None:
        if self.latency is None or self.eager is None or self.latency.median_ms <= 0:
            return None
        return self.eager.median_ms / self.latency.median_ms


@dataclass(frozen=True)
class Trial:
    """What was learnt about (module, signature, candidate). The store alone owns trials.

    `versions` are those of torch and of the backend's own packages; `notes` are facts worth showing
    (graphs and graph breaks, threads, what stayed dynamic).
    """

    key: str
    path: str
    signature: str
    candidate: Candidate
    status: TrialStatus
    reason: str = ""
    build_seconds: float = 0.0
    first_call_ms: float | None = None
    measure_seconds: float = 0.0
    points: tuple[PointResult, ...] = ()
    artifact_bytes: int = 0
    memory_bytes: int = 0
    """What its executable holds in memory beside the module's own weights."""
    isolated: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    log: str = ""

    @property
    def error_class(self) -> ErrorClass | None:
        classes = [p.comparison.error_class for p in self.points if p.comparison is not None]
        order: tuple[ErrorClass, ...] = ("refused", "within budget", "exact")
        return next((c for c in order if c in classes), None)

    @property
    def relative_l2(self) -> float | None:
        return max((p.comparison.relative_l2 for p in self.points if p.comparison is not None), default=None)

    @property
    def factor_over_eager(self) -> float | None:
        factors = [p.comparison.factor_over_eager for p in self.points if p.comparison is not None]
        return max((f for f in factors if f is not None), default=None)
