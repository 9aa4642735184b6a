"""The figures and sentences of choices: how numbers read, and why a trial is out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...schema import LeafDifference, Point, Tolerance, Trial


def number(value: float) -> str:
    """Three significant digits, never in scientific notation: `0.0123`, `3.10`, `12.3`, `2580`."""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):.{max(digits, 0)}f}"


def times(value: float) -> str:
    """A ratio: `2.1`, `1.01`, `12.3`."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def milliseconds(value: float) -> str:
    """A latency with its unit: `3.10 ms`, `0.0123 ms`."""
    return f"{number(value)} ms"


def error(value: float) -> str:
    """A relative error: `3.2e-05`, `0`."""
    return "0" if value == 0 else f"{value:.2g}"


def size(bytes_: float) -> str:
    """Bytes in binary units: `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(bytes_) < 1024:
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """`1 call`, `2 calls`, `no candidates`."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def accuracy(trial: Trial) -> str:
    """`exact`, or the class with its figure: `within budget (relative L2 3.2e-05)`."""
    if trial.error_class == "within budget":
        return f"within budget (relative L2 {error(trial.relative_l2 or 0.0)})"
    return trial.error_class or "not compared"


def tally(kinds: Sequence[str]) -> str:
    """How often each kind occurs, in order of frequency: `2 failed, 1 was out of tolerance`.

    A kind reads `was out of tolerance` or `failed`; `was` becomes `were` where there are several.
    """
    counts = sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(
        f"{count} {f'were{kind[3:]}' if count > 1 and kind.startswith('was ') else kind}" for kind, count in counts
    )


def why_not_ok(trial: Trial) -> str:
    """Why a trial that didn't finish is out: `failed: …`, `unavailable: …`, `not tried: …`."""
    head = "not finished" if trial.status == "cancelled" else trial.status
    return f"{head}: {trial.reason or 'no reason was given'}"


def out_of_tolerance(trial: Trial, tolerance: Tolerance) -> str:
    """The worst leaf of a trial out of tolerance: path, point, error against what is allowed, both values."""
    if trial.error_class is None:
        return "not compared with eager, so it may not win"
    if trial.error_class == "within budget" and tolerance.accuracy == "exact":
        _, leaf = _worst(trial, "within budget")
        factor = f", {times(leaf.factor_over_eager)} times eager's own" if leaf and leaf.factor_over_eager else ""
        off = f" ({leaf.path or 'the output'} is off by relative L2 {error(leaf.relative_l2)}{factor})" if leaf else ""
        return f"within budget only, and the plan asks for exact{off}"
    for result in trial.points:
        if result.comparison is not None and result.comparison.problem:
            return f"out of tolerance at {result.point.label}: {result.comparison.problem}"
    point, leaf = _worst(trial, "refused")
    if point is None or leaf is None:
        return "out of tolerance"
    where = f" at index {list(leaf.worst_index)}" if leaf.worst_index else ""
    values = f"; worst{where}: expected {leaf.expected}, got {leaf.actual}" if leaf.expected or leaf.actual else ""
    return (
        f"out of tolerance at {point.label}: {leaf.path or 'the output'}"
        + (f": {leaf.problem};" if leaf.problem else "")
        + f" relative L2 error {error(leaf.relative_l2)}, allowed {error(leaf.allowed_relative)}{values}"
    )


def _worst(trial: Trial, error_class: str) -> tuple[Point, LeafDifference] | tuple[None, None]:
    found = [
        (result.point, leaf)
        for result in trial.points
        if result.comparison is not None
        for leaf in result.comparison.leaves
        if leaf.error_class == error_class
    ]
    # NaN sorts as the worst.
    return max(
        found,
        key=lambda pair: math.inf if math.isnan(pair[1].relative_l2) else pair[1].relative_l2,
        default=(None, None),
    )
