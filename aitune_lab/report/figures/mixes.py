"""Mixes of backends side by side: what each is estimated to give, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...tuning.endtoend import EndToEnd
from ...tuning.mixes import Estimate
from ...tuning.strategies.words import milliseconds, times
from ..theme import STYLES, Style, Theme, ThemeName, theme_of
from .draw import figure, label, note, row_axis, saying, short
from .endtoend import AFTER, BEFORE
from .source import counted_blocks

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROW_PIXELS = 40
ESTIMATE = STYLES["openvino"]


@dataclass(frozen=True)
class MixBar:
    """One mix's time for a pass over the data, in milliseconds, with its bounds at 95 %; None: `problem` says why."""

    name: str
    ms: float | None
    low_ms: float = 0.0
    high_ms: float = 0.0
    estimated: bool = True
    untuned: bool = False
    problem: str = ""
    speedup: float | None = None

    @property
    def style(self) -> Style:
        return BEFORE if self.untuned else ESTIMATE if self.estimated else AFTER

    @property
    def figures(self) -> str:
        """`estimate 3.10 ms (2.98 to 3.22 ms), ×2.1`."""
        if self.ms is None:
            return f"no estimate: {self.problem}"
        kind = "estimate" if self.estimated else "measured"
        bounds = f" ({milliseconds(self.low_ms)} to {milliseconds(self.high_ms)})" if self.high_ms > self.low_ms else ""
        gain = f", ×{times(self.speedup)}" if self.speedup is not None else ""
        return f"{kind} {milliseconds(self.ms)}{bounds}{gain}"


@dataclass(frozen=True)
class MixesInfo:
    """The untuned target first, then each mix: its estimate, and beneath it what was measured."""

    bars: tuple[MixBar, ...]
    notes: tuple[str, ...] = ()

    title = "Mixes side by side"

    @property
    def caption(self) -> tuple[str, ...]:
        if not self.bars:
            return ("No mix was put together yet.",)
        said = (
            "Hatched: an estimate, the untuned time less calls × saving of each module. Solid: measured. Whiskers: 95 % "
            "confidence. The end-to-end error of an estimate is unknown until measured."
        )
        return (said, *self.notes)

    @property
    def end_ms(self) -> float:
        longest = max((bar.ms or 0.0 for bar in self.bars), default=0.0)
        whiskers = max((bar.high_ms for bar in self.bars), default=0.0)
        return 1.05 * max(longest, min(whiskers, 1.6 * longest)) or 1.0


def mixes_info(estimates: Iterable[Estimate], measured: Mapping[str, EndToEnd] | None = None) -> MixesInfo:
    """Bars of mixes; `measured` holds, by the mix's name, the check of the whole target with that mix installed."""
    bars: list[MixBar] = []
    notes: dict[str, None] = {}
    for number, mix in enumerate(estimates, 1):
        name = mix.name or f"mix {number}"
        if not bars and mix.eager is not None:
            estimated = mix.eager_source != "measured"
            low, high = mix.eager.low_ms, mix.eager.high_ms
            bars.append(MixBar("untuned", mix.eager.ms, low, high, estimated=False, untuned=True))
            if estimated:
                notes["The untuned time is that of a single pass, whose scatter is not known."] = None
        if mix.latency is None:
            why = "; ".join(mix.problems) or "the untuned target's time is not known"
            bars.append(MixBar(name, None, problem=why))
        else:
            low, high = mix.latency.low_ms, mix.latency.high_ms
            bars.append(MixBar(name, mix.latency.ms, low, high, speedup=mix.speedup))
        end = (measured or {}).get(mix.name)
        if end is not None and end.tuned is not None:
            m = end.tuned
            bars.append(MixBar(name, m.median_ms, m.ci_low_ms, m.ci_high_ms, estimated=False, speedup=end.speedup))
            outputs = f"; {end.sentence}" if end.comparison is not None else ""
            notes[f"{name}, measured: median of {counted_blocks([m])}{outputs}."] = None
    return MixesInfo(tuple(bars), tuple(notes))


def mixes(
    estimates: Iterable[Estimate],
    *,
    measured: Mapping[str, EndToEnd] | None = None,
    theme: Theme | ThemeName = "neutral",
) -> go.Figure:
    """Mixes side by side: estimates hatched, measured ones solid, with their uncertainty.

    Args:
        estimates: as `aitune_lab.tuning.whatif.estimate` and `compare` give them.
        measured: by name of the mix, what `whatif.measure` found for the whole target.
        theme: `"neutral"` reads on light and on dark pages.
    """
    info = mixes_info(estimates, measured)
    if not info.bars:
        return saying(info.title, info.caption[0], theme=theme, revision="mixes")
    colours = theme_of(theme)
    height = ROW_PIXELS * len(info.bars)
    drawn = figure(info.title, info.caption, theme=theme, revision="mixes", height=height)
    rows = [str(number) for number in range(len(info.bars))]
    drawn.add_bar(
        orientation="h",
        y=rows,
        x=[bar.ms for bar in info.bars],
        width=0.56,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [bar.high_ms - bar.ms if bar.ms is not None else 0 for bar in info.bars],
            "arrayminus": [bar.ms - bar.low_ms if bar.ms is not None else 0 for bar in info.bars],
            "color": colours.line,
            "thickness": 1.4,
            "width": 4,
        },
        marker={
            "color": [bar.style.fill for bar in info.bars],
            "line": {"color": [bar.style.edge for bar in info.bars], "width": 1.2},
            "pattern": {
                "shape": ["/" if bar.estimated else "" for bar in info.bars],
                "fgcolor": [bar.style.edge for bar in info.bars],
                "bgcolor": "rgba(0,0,0,0)",
                "size": 7,
            },
        },
        hovertext=[f"<b>{label(bar.name)}</b><br>{label(bar.figures)}" for bar in info.bars],
        hoverinfo="text",
    )
    for bar, row in zip(info.bars, rows, strict=True):
        if bar.ms is None:
            note(drawn, short(bar.figures, 96), x=0, y=row, theme=colours, hover=label(bar.problem), xshift=4)
    named = [(bar.name, bar.figures if bar.ms is not None else "", False) for bar in info.bars]
    row_axis(drawn, rows, named, colours)
    drawn.update_xaxes(range=[0, info.end_ms], title={"text": "milliseconds a pass over the data"})
    return drawn
