"""Latency of every candidate for one module at one point, beside eager's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...schema import Measurement, Point, Trial
from ...tuning.strategies.words import milliseconds, times
from ..theme import Theme, ThemeName, patterns_of, style_of, theme_of
from .draw import figure, label, note, row_axis, saying, short
from .source import EAGER, Selected, counted_blocks, point_of, select, state_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from .source import Source

ROW_PIXELS = 40
LONGEST_WHISKER = 1.6
"""The axis ends at so many times the longest bar: one whisker of a noisy measurement must not squeeze all bars."""


@dataclass(frozen=True)
class LatencyBar:
    """One candidate's latency in milliseconds at the point; `median_ms` None if it has none.

    `eager_ms` was measured in alternation with it. `problem` says why there is no figure, or why it may not win;
    `disturbed` why the figure decides nothing.
    """

    label: str
    backend: str
    median_ms: float | None = None
    low_ms: float = 0.0
    high_ms: float = 0.0
    p90_ms: float | None = None
    eager_ms: float | None = None
    measured: Measurement | None = None
    chosen: bool = False
    wrong: bool = False
    disturbed: str = ""
    problem: str = ""

    @property
    def speedup(self) -> float | None:
        """Eager over this one, at the point; None for eager itself and where either is missing or disturbed."""
        if self.label == EAGER or self.disturbed or not self.median_ms or self.eager_ms is None:
            return None
        return self.eager_ms / self.median_ms

    @property
    def figures(self) -> str:
        """`0.0247 ms, ×10.6`, with what marks it."""
        if self.median_ms is None:
            return self.problem or "not measured"
        parts = [milliseconds(self.median_ms)]
        if self.speedup is not None:
            parts.append(f"×{times(self.speedup)}")
        parts += [word for word, on in (("disturbed", self.disturbed), ("out of tolerance", self.wrong)) if on]
        return ", ".join(parts)


@dataclass(frozen=True)
class LatencyInfo:
    """Latencies at one point: eager first, then the fastest first, those without a figure last."""

    path: str
    signature: str
    point: Point | None
    bars: tuple[LatencyBar, ...]
    eager_ms: float | None

    @property
    def title(self) -> str:
        where = f" at {self.point.label}" if self.point is not None and self.point.sizes else ""
        return f"Latency of {self.path or '(model)'}{where}"

    @property
    def timed(self) -> tuple[LatencyBar, ...]:
        return tuple(bar for bar in self.bars if bar.median_ms is not None)

    @property
    def end_ms(self) -> float:
        """Where the axis ends, so that every bar fits and whiskers do unless they are far longer."""
        longest = max((bar.median_ms or 0.0 for bar in self.bars), default=0.0)
        whiskers = max((bar.high_ms for bar in self.timed), default=0.0)
        return 1.04 * max(longest, min(whiskers, LONGEST_WHISKER * longest)) or 1.0

    @property
    def caption(self) -> tuple[str, ...]:
        if not self.timed:
            return ("No candidate was measured here." if self.bars else "Nothing was tried for this module yet.",)
        measured = [bar.measured for bar in self.timed]
        threads = sorted({m.threads for m in measured if m is not None})
        on = f", {threads[0]} thread{'' if threads[0] == 1 else 's'}" if len(threads) == 1 else ""
        said = [
            f"Median of {counted_blocks(measured)}, in alternation with eager{on}; whiskers: 95 % confidence interval of the median."
        ]
        if any(bar.high_ms > self.end_ms for bar in self.timed):
            said.append("A whisker that meets the edge is longer than shown.")
        if any(bar.disturbed for bar in self.timed):
            said.append("Disturbed by other load: such a figure decides nothing.")
        return tuple(said)


def latency_info(
    source: Source, module: str | None = None, *, signature: str | None = None, point: Point | str | None = None
) -> LatencyInfo:
    """Latencies of a module's candidates; by default of the module and the point on which eager spends most.

    Raises TargetError for a module, signature or point that the run doesn't know.
    """
    group = select(state_of(source), module, signature)
    at = point_of(group, point)
    eager = group.eager_at(at) if at is not None else None
    bars = [_bar(group, trial, at) for trial in group.trials if trial.candidate.label != EAGER]
    bars.sort(key=lambda bar: (bar.median_ms is None, bar.median_ms or 0.0))
    bars += [LatencyBar(name, name.partition("[")[0], problem=why) for name, why in group.not_tried.items()]
    if eager is not None:
        chosen = group.choice is not None and group.choice.candidate.label == EAGER
        bars.insert(0, _timed(LatencyBar(EAGER, EAGER, chosen=chosen), eager))
    usable = eager.median_ms if eager is not None and math.isfinite(eager.median_ms) else None
    return LatencyInfo(group.path, group.signature, at, tuple(bars), usable)


def latency(
    source: Source,
    module: str | None = None,
    *,
    signature: str | None = None,
    point: Point | str | None = None,
    theme: Theme | ThemeName = "neutral",
) -> go.Figure:
    """Latency per candidate with its spread for a module at a point, and eager's line.

    Args:
        source: a session's state, a `TuneResult`, or events.
        module: its path; default: the one on which eager spends most.
        signature: its key, where a module has several.
        point: itself or its label (`"b=8"`); default: the one that weighs most.
        theme: `"neutral"` reads on light and on dark pages.
    """
    info = latency_info(source, module, signature=signature, point=point)
    revision = f"latency:{info.path}:{info.signature}:{info.point.label if info.point else ''}"
    if not info.bars:
        return saying(info.title, info.caption[0], theme=theme, revision=revision)
    colours = theme_of(theme)
    drawn = figure(info.title, info.caption, theme=theme, revision=revision, height=ROW_PIXELS * len(info.bars))
    patterns = patterns_of((bar.backend, bar.label) for bar in info.timed)
    names = [label(bar.label) for bar in info.bars]
    styles = [style_of(bar.backend) for bar in info.bars]
    drawn.add_bar(
        orientation="h",
        y=names,
        x=[bar.median_ms for bar in info.bars],
        width=0.56,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [bar.high_ms - bar.median_ms if bar.median_ms is not None else 0 for bar in info.bars],
            "arrayminus": [bar.median_ms - bar.low_ms if bar.median_ms is not None else 0 for bar in info.bars],
            "color": colours.line,
            "thickness": 1.4,
            "width": 4,
        },
        marker={
            "color": [style.fill for style in styles],
            "opacity": [0.45 if bar.wrong or bar.disturbed else 1.0 for bar in info.bars],
            "line": {"color": [style.edge for style in styles], "width": 1.2},
            "pattern": {
                "shape": [patterns.get(bar.label, "") for bar in info.bars],
                "fillmode": "overlay",
                "fgopacity": 0.5,
                "size": 7,
            },
        },
        hovertext=[_hover(bar) for bar in info.bars],
        hoverinfo="text",
    )
    if info.eager_ms is not None:
        drawn.add_shape(  # only along the bars: it must not strike through the sentences beneath them
            type="line",
            x0=info.eager_ms,
            x1=info.eager_ms,
            y0=-0.5,
            y1=len(info.timed) - 0.5,
            line={"color": colours.line, "width": 1.4, "dash": "dash"},
        )
    for bar, name in zip(info.bars, names, strict=True):
        if bar.median_ms is None:
            note(drawn, short(bar.figures, 96), x=0, y=name, theme=colours, hover=label(bar.problem), xshift=4)
    rows = [(bar.label, bar.figures if bar.median_ms is not None else "", bar.chosen) for bar in info.bars]
    row_axis(drawn, names, rows, colours)
    drawn.update_xaxes(range=[0, info.end_ms], title={"text": "milliseconds a call"}, zeroline=True)
    return drawn


def _bar(group: Selected, trial: Trial, point: Point | None) -> LatencyBar:
    name = trial.candidate.label
    chosen = group.choice is not None and group.choice.candidate == trial.candidate
    why = "" if chosen else group.why_not(name) or (trial.reason if trial.status != "ok" else "")
    if not why and trial.status != "ok":
        why = trial.status
    bar = LatencyBar(
        name,
        trial.candidate.backend,
        chosen=chosen,
        wrong=trial.error_class == "refused",
        problem=why or trial.reason,
    )
    result = group.result(trial, point) if point is not None else None
    if result is None or result.latency is None or not math.isfinite(result.latency.median_ms):
        return bar
    beside = group.beside(trial, result.point)
    return _timed(bar, result.latency, beside)


def _timed(bar: LatencyBar, measured: Measurement, beside: Measurement | None = None) -> LatencyBar:
    middle = measured.median_ms
    disturbed = measured.disturbed or (beside.disturbed if beside is not None else None) or ""
    return replace(
        bar,
        median_ms=middle,
        low_ms=measured.ci_low_ms if math.isfinite(measured.ci_low_ms) else middle,
        high_ms=measured.ci_high_ms if math.isfinite(measured.ci_high_ms) else middle,
        p90_ms=measured.p90_ms,
        eager_ms=beside.median_ms if beside is not None else None,
        measured=measured,
        disturbed=disturbed,
    )


def _hover(bar: LatencyBar) -> str:
    said = [f"<b>{label(bar.label)}</b>", label(bar.figures)]
    if bar.measured is not None:
        said += [label(str(bar.measured)), f"p90 {milliseconds(bar.measured.p90_ms)}"]
        if bar.measured.device_ms is not None:
            said.append(f"on the device {milliseconds(bar.measured.device_ms)}")
    if bar.eager_ms is not None:
        said.append(f"eager beside it {milliseconds(bar.eager_ms)}")
    if bar.problem and bar.median_ms is not None:
        said.append(short(bar.problem, 160))
    return "<br>".join(said)
