"""How far each candidate's outputs are from the reference, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...measure.judge import default_budget
from ...schema import ErrorClass, Point
from ...tuning.strategies.words import error, times
from ..theme import Theme, ThemeName, style_of, theme_of
from .draw import figure, graph_objects, label, row_axis, saying, short
from .source import EAGER, Selected, point_of, select, state_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ...tuning.session import SessionState
    from .source import Source

ROW_PIXELS = 36
MAX_ROWS = 40
FLOOR = 1e-10
"""Errors of 0, and smaller ones than this, stand here on the log axis."""
CEILING = 1e2
"""Larger errors, and those that are no number, stand here."""


@dataclass(frozen=True)
class Difference:
    """One output leaf of one candidate, at the point where it is worst (or the one asked for).

    `relative_l2` is |a − r| / |r| and may be NaN; `allowed` bounds it in the class that it was judged by, `eager` is
    what eager itself is off from the same reference.
    """

    label: str
    backend: str
    leaf: str
    point: Point
    relative_l2: float
    allowed: float
    eager: float
    error_class: ErrorClass
    max_absolute: float
    snr_db: float
    factor_over_eager: float | None = None
    problem: str = ""
    chosen: bool = False

    @property
    def figures(self) -> str:
        """`exact, 5.3e-07 (1.7× eager's)`."""
        factor = f" ({times(self.factor_over_eager)}× eager's)" if self.factor_over_eager is not None else ""
        return f"{self.error_class}, {error(self.relative_l2)}{factor}"


@dataclass(frozen=True)
class DifferenceInfo:
    """Differences by candidate and leaf; the worst leaves first where there are too many."""

    path: str
    signature: str
    rows: tuple[Difference, ...]
    budget: float
    yardsticks: tuple[str, ...]
    calls: tuple[int, ...] = ()
    """How many calls were compared at a point: the fewest and the most."""
    left_out: int = 0

    @property
    def several_leaves(self) -> bool:
        return len({row.leaf for row in self.rows}) > 1

    def name_of(self, row: Difference) -> str:
        return f"{row.label} · {row.leaf or 'output'}" if self.several_leaves else row.label

    @property
    def title(self) -> str:
        return f"Numeric difference of {self.path or '(model)'}"

    @property
    def caption(self) -> tuple[str, ...]:
        if not self.rows:
            return ("No candidate's outputs were compared with eager's.",)
        over = " to ".join(map(str, dict.fromkeys(self.calls))) + (" call" if self.calls[-1:] == (1,) else " calls")
        said = [
            (
                f"Relative L2 error per output against {' or '.join(self.yardsticks)}, worst over {over} at each point. "
                f"Dashed: the error budget, {error(self.budget)}. Tick: what its class allows. Ring: eager's own error."
            )
        ]
        if any(not row.relative_l2 > FLOOR for row in self.rows):
            said.append("Errors of 0 stand at the left edge.")
        if self.left_out:
            said.append(f"{self.left_out} outputs with smaller errors are not shown.")
        return tuple(said)


def difference_info(
    source: Source, module: str | None = None, *, signature: str | None = None, point: Point | str | None = None
) -> DifferenceInfo:
    """Differences of a module's candidates; without `point` each output at the point where it is worst.

    Raises TargetError for a module, signature or point that the run doesn't know.
    """
    state = state_of(source)
    group = select(state, module, signature)
    at = point_of(group, point) if point is not None else None
    worst: dict[tuple[str, str], Difference] = {}
    yardsticks: dict[str, None] = {}
    calls: list[int] = []
    for trial in group.trials:
        for result in trial.points if trial.candidate.label != EAGER else ():
            if result.comparison is None or (at is not None and result.point != at):
                continue
            yardsticks[result.comparison.yardstick] = None
            calls.append(result.comparison.calls)
            for leaf in result.comparison.leaves:
                row = Difference(
                    trial.candidate.label,
                    trial.candidate.backend,
                    leaf.path,
                    result.point,
                    leaf.relative_l2,
                    leaf.allowed_relative,
                    leaf.eager_relative_l2,
                    leaf.error_class,
                    leaf.max_absolute,
                    leaf.snr_db,
                    leaf.factor_over_eager,
                    leaf.problem or "",
                    group.choice is not None and group.choice.candidate == trial.candidate,
                )
                key = (row.label, row.leaf)
                if key not in worst or size_of(row.relative_l2) > size_of(worst[key].relative_l2):
                    worst[key] = row
    rows = list(worst.values())
    kept = sorted(rows, key=lambda row: -size_of(row.relative_l2))[:MAX_ROWS]
    shown = [row for row in rows if row in kept]
    left_out = len(rows) - len(shown)
    return DifferenceInfo(
        group.path,
        group.signature,
        tuple(shown),
        budget_of(state, group),
        tuple(yardsticks),
        (min(calls), max(calls)) if calls else (),
        left_out,
    )


def budget_of(state: SessionState, group: Selected) -> float:
    """The relative L2 error that the plan allows for a module: its tolerance, else the default of the module's dtypes."""
    if state.plan.tolerance.max_relative_error is not None:
        return state.plan.tolerance.max_relative_error
    import torch

    row: Mapping[str, Any] = next((row for row in state.rows if row.get("path") == group.path), {})
    return default_budget(*(getattr(torch, str(name), None) for name in row.get("dtypes") or ()))


def size_of(value: float) -> float:
    """An error for comparing: NaN is the worst."""
    return math.inf if math.isnan(value) else value


def on_axis(value: float) -> float:
    """Where an error stands on the log axis."""
    return min(max(size_of(value), FLOOR), CEILING)


def difference(
    source: Source,
    module: str | None = None,
    *,
    signature: str | None = None,
    point: Point | str | None = None,
    theme: Theme | ThemeName = "neutral",
) -> go.Figure:
    """Numeric difference per candidate and output on a log scale, with the tolerance. Arguments as for `latency`."""
    info = difference_info(source, module, signature=signature, point=point)
    revision = f"difference:{info.path}:{info.signature}"
    if not info.rows:
        return saying(info.title, info.caption[0], theme=theme, revision=revision)
    colours = theme_of(theme)
    drawn = figure(info.title, info.caption, theme=theme, revision=revision, height=ROW_PIXELS * len(info.rows))
    names = [label(info.name_of(row)) for row in info.rows]
    scatter = graph_objects().Scatter
    drawn.add_trace(
        scatter(
            x=[on_axis(row.allowed) if row.allowed > 0 else None for row in info.rows],
            y=names,
            mode="markers",
            marker={"symbol": "line-ns", "size": 16, "line": {"color": colours.line, "width": 1.6}},
            hovertext=[f"allowed in its class: {error(row.allowed)}" for row in info.rows],
            hoverinfo="text",
        )
    )
    drawn.add_trace(
        scatter(
            x=[on_axis(row.eager) if row.eager > 0 else None for row in info.rows],
            y=names,
            mode="markers",
            marker={"symbol": "circle-open", "size": 9, "color": colours.line, "line": {"width": 1.4}},
            hovertext=[f"eager itself: {error(row.eager)}" for row in info.rows],
            hoverinfo="text",
        )
    )
    styles = [style_of(row.backend) for row in info.rows]
    drawn.add_trace(
        scatter(
            x=[on_axis(row.relative_l2) for row in info.rows],
            y=names,
            mode="markers",
            marker={
                "symbol": [
                    "x" if row.error_class == "refused" else s.symbol for row, s in zip(info.rows, styles, strict=True)
                ],
                "size": 12,
                "color": [style.fill for style in styles],
                "line": {"color": [style.edge for style in styles], "width": 1.4},
            },
            hovertext=[_hover(row) for row in info.rows],
            hoverinfo="text",
        )
    )
    if info.budget > 0:
        drawn.add_vline(x=on_axis(info.budget), line={"color": colours.ink, "width": 1.4, "dash": "dash"})
    row_axis(drawn, names, [(info.name_of(row), row.figures, row.chosen) for row in info.rows], colours, grid=True)
    drawn.update_xaxes(
        type="log",
        range=[math.log10(bound) for bound in axis_range(info)],
        exponentformat="e",
        dtick=1 if len(info.rows) else None,
        title={"text": "relative L2 error"},
    )
    return drawn


def axis_range(info: DifferenceInfo) -> tuple[float, float]:
    """The ends of the log axis, half a decade beyond all that is drawn."""
    values = [on_axis(v) for row in info.rows for v in (row.relative_l2, row.allowed, row.eager) if not v <= 0]
    if any(not row.relative_l2 > 0 for row in info.rows):
        values.append(FLOOR)
    if info.budget > 0:
        values.append(on_axis(info.budget))
    low, high = (min(values, default=1e-8), max(values, default=1e-3))
    return 10 ** (math.floor(math.log10(low)) - 0.5), 10 ** (math.ceil(math.log10(high)) + 0.5)


def _hover(row: Difference) -> str:
    said = [
        f"<b>{label(row.label)}</b> {label(row.leaf or 'output')} at {label(row.point.label)}",
        label(row.figures),
        f"largest absolute error {error(row.max_absolute)}, SNR {row.snr_db:.0f} dB",
    ]
    if row.problem:
        said.append(short(row.problem, 160))
    return "<br>".join(said)
