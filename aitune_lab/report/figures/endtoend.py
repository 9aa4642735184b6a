"""The target as a whole, before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schema import Measurement
from ...tuning.strategies.words import error, milliseconds, times
from ..theme import STYLES, Theme, ThemeName, theme_of
from .draw import figure, label, row_axis, saying
from .source import EAGER, counted_blocks, end_to_end_of, state_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from .source import Source

BEFORE, AFTER = STYLES[EAGER], STYLES["tensorrt"]


@dataclass(frozen=True)
class EndBar:
    """The target's time in milliseconds, before or after; hatched if `estimated`. None bounds: not known."""

    name: str
    ms: float
    low_ms: float | None = None
    high_ms: float | None = None
    estimated: bool = False
    tuned: bool = False
    measured: Measurement | None = None


@dataclass(frozen=True)
class EndInfo:
    """Before and after: measured in alternation if the run did that, else one pass each, else an estimate."""

    bars: tuple[EndBar, ...]
    sentence: str
    caption: tuple[str, ...]
    speedup: float | None = None

    @property
    def title(self) -> str:
        if self.speedup is None or not self.bars:
            return "End to end"
        kind = ", an estimate" if any(bar.estimated for bar in self.bars) else ""
        return f"End to end {times(self.speedup)} times as fast{kind}"


def end_info(source: Source) -> EndInfo:
    """The figures of the whole target."""
    state = state_of(source)
    end = end_to_end_of(state)
    estimate = state.estimate or {}
    before, after = estimate.get("eager_seconds"), estimate.get("tuned_seconds")
    guess = EndBar("tuned, estimate", 1000 * after, estimated=True, tuned=True) if after is not None else None
    if end is not None and end.eager is not None and end.tuned is not None:
        said = [
            f"Median of {counted_blocks((end.eager, end.tuned))}, both in alternation; whiskers: 95 % confidence interval.",
            _outputs(end),
            *end.notes,
        ]
        if end.eager.disturbed or end.tuned.disturbed:
            said.append("Disturbed by other load, so it decides nothing.")
        bars = (_bar("untuned", end.eager), _bar("tuned", end.tuned, tuned=True))
        return EndInfo(bars, end.sentence, tuple(filter(None, said)), end.speedup)
    if end is not None and end.eager_seconds is not None and end.tuned_seconds is not None:
        said = ["One pass over the data each, once: no spread is known.", _outputs(end), *end.notes]
        bars = (EndBar("untuned", 1000 * end.eager_seconds), EndBar("tuned", 1000 * end.tuned_seconds, tuned=True))
        ratio = end.eager_seconds / end.tuned_seconds if end.tuned_seconds > 0 else None
        return EndInfo(bars, end.sentence, tuple(filter(None, said)), ratio)
    skipped = f"Not measured: {end.skipped}." if end is not None and end.skipped else ""
    tuned = any(choice.candidate.label != EAGER for choice in state.choices.values())
    if not before or guess is None or not tuned:
        why = {
            "running": "The run has not come to its end yet.",
            "cancelled": "The run was cancelled: the target is as it was.",
            "failed": f"The run failed: {state.error}",
        }.get(state.status, "Every module stays eager, so nothing changed.")
        return EndInfo((), why, (skipped or why,))
    said = ["An estimate: eager's time less what each tuned module saves; unknown until measured.", skipped]
    bars = (EndBar("untuned", 1000 * before), guess)
    return EndInfo(bars, said[0], tuple(filter(None, said)), before / after if after else None)


def end_to_end(source: Source, *, theme: Theme | ThemeName = "neutral") -> go.Figure:
    """The whole target before and after tuning, measured where it was."""
    info = end_info(source)
    if not info.bars:
        return saying(info.title, info.caption[0], theme=theme, revision="end_to_end")
    colours = theme_of(theme)
    drawn = figure(info.title, info.caption, theme=theme, revision="end_to_end", height=44 * len(info.bars))
    names = [label(bar.name) for bar in info.bars]
    styles = [AFTER if bar.tuned else BEFORE for bar in info.bars]
    drawn.add_bar(
        orientation="h",
        y=names,
        x=[bar.ms for bar in info.bars],
        width=0.56,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [(bar.high_ms or bar.ms) - bar.ms for bar in info.bars],
            "arrayminus": [bar.ms - (bar.low_ms or bar.ms) for bar in info.bars],
            "color": colours.line,
            "thickness": 1.4,
            "width": 4,
        },
        marker={
            "color": [style.fill for style in styles],
            "line": {"color": [style.edge for style in styles], "width": 1.2},
            "pattern": {
                "shape": ["/" if bar.estimated else "" for bar in info.bars],
                "fgcolor": [style.edge for style in styles],
                "bgcolor": "rgba(0,0,0,0)",
                "size": 7,
            },
        },
        hovertext=[str(bar.measured) if bar.measured is not None else milliseconds(bar.ms) for bar in info.bars],
        hoverinfo="text",
    )
    row_axis(drawn, names, [(bar.name, milliseconds(bar.ms), False) for bar in info.bars], colours)
    drawn.update_xaxes(range=[0, end_ms(info)], title={"text": "milliseconds a pass over the data"})
    return drawn


def end_ms(info: EndInfo) -> float:
    """Where the axis ends: whiskers far longer than the bars are cut."""
    longest = max((bar.ms for bar in info.bars), default=0.0)
    whiskers = max((bar.high_ms or bar.ms for bar in info.bars), default=0.0)
    return 1.05 * max(longest, min(whiskers, 1.6 * longest)) or 1.0


def _bar(name: str, measured: Measurement, tuned: bool = False) -> EndBar:
    middle = measured.median_ms
    low, high = (b if math.isfinite(b) else middle for b in (measured.ci_low_ms, measured.ci_high_ms))
    return EndBar(name, middle, low, high, tuned=tuned, measured=measured)


def _outputs(end: object) -> str:
    comparison = getattr(end, "comparison", None)
    if comparison is None:
        return ""
    if comparison.error_class == "refused":
        return f"Outputs out of tolerance: {comparison.problem}."
    return f"Outputs {comparison.error_class}, relative L2 {error(comparison.relative_l2)}."
