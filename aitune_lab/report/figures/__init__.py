"""Figures of a run as Plotly `go.Figure`s, each drawn from data that can be had without Plotly.

Every `…_info` function gives plain frozen data, every other one draws it: `latency(result, module="encoder")`. Sources are
a session's state, what `tune` gave, or the events of a journal. What is missing or failed is said in the figure.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from .difference import DifferenceInfo, difference, difference_info
from .endtoend import EndInfo, end_info, end_to_end
from .latency import LatencyInfo, latency, latency_info
from .mixes import MixesInfo, mixes, mixes_info
from .pareto import ParetoInfo, pareto, pareto_info
from .source import state_of
from .timeline import TimelineInfo, timeline, timeline_info
from .where import WhereInfo, where, where_info

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ...tuning.session import SessionState
    from .source import Source

__all__ = [
    "DifferenceInfo",
    "EndInfo",
    "Figures",
    "LatencyInfo",
    "MixesInfo",
    "ParetoInfo",
    "TimelineInfo",
    "WhereInfo",
    "difference",
    "difference_info",
    "end_info",
    "end_to_end",
    "latency",
    "latency_info",
    "mixes",
    "mixes_info",
    "pareto",
    "pareto_info",
    "state_of",
    "timeline",
    "timeline_info",
    "where",
    "where_info",
]


class Figures:
    """The figures of one source: `result.figures.latency("encoder")` is `figures.latency(result, "encoder")`."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @cached_property
    def _state(self) -> SessionState:
        return state_of(self._source)

    def latency(self, module: str | None = None, **options: Any) -> go.Figure:
        """Latency per candidate for a module at a point; see `figures.latency`."""
        return latency(self._state, module, **options)

    def difference(self, module: str | None = None, **options: Any) -> go.Figure:
        """Numeric difference per candidate and output; see `figures.difference`."""
        return difference(self._state, module, **options)

    def pareto(self, module: str | None = None, **options: Any) -> go.Figure:
        """Latency against error; see `figures.pareto`."""
        return pareto(self._state, module, **options)

    def where(self, **options: Any) -> go.Figure:
        """Where the time goes, before and after; see `figures.where`."""
        return where(self._state, **options)

    def timeline(self, **options: Any) -> go.Figure:
        """When each trial ran; see `figures.timeline`."""
        return timeline(self._source, **options)

    def end_to_end(self, **options: Any) -> go.Figure:
        """The whole target before and after; see `figures.end_to_end`."""
        return end_to_end(self._state, **options)

    def __dir__(self) -> list[str]:
        return ["difference", "end_to_end", "latency", "pareto", "timeline", "where"]
