"""Latency against numeric error: which candidates are worth considering."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...schema import ErrorClass, Measurement, Point
from ...tuning.strategies.words import error, milliseconds
from ..theme import Theme, ThemeName, style_of, theme_of
from .difference import FLOOR, budget_of, on_axis
from .draw import figure, graph_objects, label, saying
from .source import EAGER, Selected, counted_blocks, point_of, select, state_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from .source import Source

Box = tuple[float, float, float, float]
SIDES = {"bottom right": (1, 17), "top right": (1, -9), "bottom left": (-1, 17), "top left": (-1, -9)}
"""Where a label may stand beside its point: to the right (1) or left, and its baseline in pixels beneath the point."""


@dataclass(frozen=True)
class ParetoPoint:
    """A candidate with its latency (ms) and error (relative L2 of the worst output) at the point.

    `front`: none of the right ones is faster and at least as exact, or as fast and more exact.
    """

    label: str
    backend: str
    median_ms: float
    low_ms: float
    high_ms: float
    relative_l2: float
    error_class: ErrorClass
    measured: Measurement
    chosen: bool = False
    front: bool = False

    @property
    def right(self) -> bool:
        return self.error_class != "refused" and not self.measured.disturbed

    @property
    def figures(self) -> str:
        return f"{milliseconds(self.median_ms)}, {self.error_class} ({error(self.relative_l2)})"


@dataclass(frozen=True)
class ParetoInfo:
    """All candidates with both figures, the fastest first; eager's error is its own against the reference."""

    path: str
    signature: str
    point: Point | None
    points: tuple[ParetoPoint, ...]
    budget: float
    without: tuple[str, ...] = ()
    """Labels of candidates that have no latency or no comparison here."""

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        return tuple(point for point in self.points if point.front)

    @property
    def title(self) -> str:
        where = f" at {self.point.label}" if self.point is not None and self.point.sizes else ""
        return f"Latency against error of {self.path or '(model)'}{where}"

    @property
    def caption(self) -> tuple[str, ...]:
        if not self.points:
            return ("No candidate has both a latency and a comparison here.",)
        said = [
            (
                f"Median of {counted_blocks(p.measured for p in self.points)}, bars: its 95 % confidence interval; "
                f"error: relative L2 of the worst output. Line: the Pareto front. Dashed: the error budget, {error(self.budget)}."
            )
        ]
        if any(not point.relative_l2 > FLOOR for point in self.points):
            said.append("Errors of 0 stand at the bottom.")
        if self.without:
            said.append(f"Without both figures: {', '.join(self.without)}.")
        return tuple(said)


def pareto_info(
    source: Source, module: str | None = None, *, signature: str | None = None, point: Point | str | None = None
) -> ParetoInfo:
    """Latency and error of a module's candidates at a point; arguments and errors as for `latency_info`."""
    state = state_of(source)
    group = select(state, module, signature)
    at = point_of(group, point)
    found: list[ParetoPoint] = []
    without = []
    for trial in group.trials if at is not None else ():
        result = group.result(trial, at) if at is not None else None
        if trial.candidate.label == EAGER:
            continue
        timed = result is not None and result.latency is not None and math.isfinite(result.latency.median_ms)
        if not timed or result is None or result.latency is None or result.comparison is None:
            without.append(trial.candidate.label)
            continue
        chosen = group.choice is not None and group.choice.candidate == trial.candidate
        off, kind = result.comparison.relative_l2, result.comparison.error_class
        found.append(_point(trial.candidate.label, trial.candidate.backend, result.latency, off, kind, chosen))
    if found and at is not None and (eager := group.eager_at(at)) is not None:
        chosen = group.choice is not None and group.choice.candidate.label == EAGER
        found.append(_point(EAGER, EAGER, eager, _eager_error(group, at), "exact", chosen))
    found.sort(key=lambda p: (p.median_ms, p.label))
    right = [point for point in found if point.right]
    shown = [replace(p, front=p.right and not any(_beats(other, p) for other in right)) for p in found]
    return ParetoInfo(group.path, group.signature, at, tuple(shown), budget_of(state, group), tuple(without))


def pareto(
    source: Source,
    module: str | None = None,
    *,
    signature: str | None = None,
    point: Point | str | None = None,
    theme: Theme | ThemeName = "neutral",
) -> go.Figure:
    """Latency against numeric error with the Pareto front. Arguments as for `latency`."""
    info = pareto_info(source, module, signature=signature, point=point)
    revision = f"pareto:{info.path}:{info.signature}:{info.point.label if info.point else ''}"
    if not info.points:
        return saying(info.title, info.caption[0], theme=theme, revision=revision)
    colours = theme_of(theme)
    drawn = figure(info.title, info.caption, theme=theme, revision=revision, height=300)
    scatter = graph_objects().Scatter
    drawn.add_trace(
        scatter(
            x=[p.median_ms for p in info.front],
            y=[on_axis(p.relative_l2) for p in info.front],
            mode="lines",
            line={"color": colours.line, "width": 1.6, "shape": "hv"},
            hoverinfo="skip",
        )
    )
    sides = label_sides(info, 640, 300)
    for p in info.points:
        style = style_of(p.backend)
        drawn.add_trace(
            scatter(
                x=[p.median_ms],
                y=[on_axis(p.relative_l2)],
                name=label(p.label),
                mode="markers+text",
                text=[("<b>{}</b> ✓" if p.chosen else "{}").format(label(p.label, 36)) if sides[p.label] else ""],
                textposition=sides[p.label] or "bottom right",
                textfont={"size": 11, "color": colours.ink if p.front else colours.muted},
                marker={
                    "symbol": style.symbol if p.right else "x",
                    "size": 13,
                    "color": style.fill,
                    "opacity": 1.0 if p.right else 0.6,
                    "line": {"color": style.edge, "width": 1.6},
                },
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [p.high_ms - p.median_ms],
                    "arrayminus": [p.median_ms - p.low_ms],
                    "color": style.edge,
                    "thickness": 1.2,
                    "width": 3,
                },
                hovertext=[f"<b>{label(p.label)}</b><br>{label(p.figures)}<br>{label(str(p.measured))}"],
                hoverinfo="text",
            )
        )
    if info.budget > 0:
        drawn.add_hline(y=on_axis(info.budget), line={"color": colours.ink, "width": 1.4, "dash": "dash"})
    low, high = error_range(info)
    drawn.update_yaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        dtick=max(1, round(math.log10(high / low) / 6)),
        exponentformat="e",
        title={"text": "relative L2 error"},
    )
    drawn.update_xaxes(range=[0, end_ms(info)], title={"text": "milliseconds a call"})
    return drawn


def end_ms(info: ParetoInfo) -> float:
    """Where the latency axis ends: room for labels to the right of the slowest; longer whiskers are cut."""
    return 1.25 * max((p.median_ms for p in info.points), default=1.0)


def error_range(info: ParetoInfo) -> tuple[float, float]:
    """The ends of the error axis, a decade beyond all points and the budget."""
    values = [on_axis(p.relative_l2) for p in info.points] + ([on_axis(info.budget)] if info.budget > 0 else [])
    low, high = min(values, default=1e-8), max(values, default=1e-3)
    return 10 ** (math.floor(math.log10(low)) - 0.5), 10 ** (math.ceil(math.log10(high)) + 0.7)


def label_sides(info: ParetoInfo, width: float, height: float) -> dict[str, str]:
    """On which side of its point each label stands so that none covers another or a point; empty where there is no room.

    The front's labels are placed first. `width` and `height` are of the plotting area, in pixels.
    """
    end, (low, high) = end_ms(info), error_range(info)
    at = {
        p.label: (p.median_ms / end * width, math.log(high / on_axis(p.relative_l2)) / math.log(high / low) * height)
        for p in info.points
    }
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in at.values()]
    placed: dict[str, str] = {}
    for p in sorted(info.points, key=lambda p: (not p.chosen, not p.front)):
        x, y = at[p.label]
        long = 6.4 * min(len(p.label) + 2 * p.chosen, 36)
        placed[p.label] = ""
        for side, (right, down) in SIDES.items():
            left = x + 9 if right > 0 else x - 9 - long
            box = (left, y + down - 10, left + long, y + down + 3)
            if left >= 0 and box[2] <= width and not any(_overlap(box, other) for other in taken):
                placed[p.label] = side
                taken.append(box)
                break
    return placed


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _point(
    label: str, backend: str, measured: Measurement, relative_l2: float, error_class: ErrorClass, chosen: bool
) -> ParetoPoint:
    middle = measured.median_ms
    low, high = (b if math.isfinite(b) else middle for b in (measured.ci_low_ms, measured.ci_high_ms))
    return ParetoPoint(label, backend, middle, low, high, relative_l2, error_class, measured, chosen)


def _eager_error(group: Selected, point: Point) -> float:
    """What eager is off from the reference that candidates were compared with; 0 where eager is the reference."""
    results = [group.result(trial, point) for trial in group.trials]
    compared = [result.comparison for result in results if result is not None and result.comparison is not None]
    own = [leaf.eager_relative_l2 for comparison in compared for leaf in comparison.leaves]
    return max((value for value in own if math.isfinite(value)), default=0.0)


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    """Whether one is at least as good on both axes as drawn, and better on one; the first by name among equals."""
    mine, theirs = (one.median_ms, on_axis(one.relative_l2)), (other.median_ms, on_axis(other.relative_l2))
    if one is other or mine[0] > theirs[0] or mine[1] > theirs[1]:
        return False
    return mine != theirs or one.label < other.label
