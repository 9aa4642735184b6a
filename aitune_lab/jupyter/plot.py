"""A Plotly figure as a small widget that keeps zoom and legend when the figure changes, and follows the theme."""

from __future__ import annotations

import json
from typing import Any

import anywidget
import traitlets

from ..report.theme import THEMES
from .bundle import STATIC, bundled
from .comm import answer_at_once
from .protocol import PlotlySource


class PlotView(anywidget.AnyWidget):
    """Draws a `plotly.graph_objects.Figure` by `static/plot.js`.

    Only the figure's JSON goes over the wire. The library comes from the installed package, as a message that the
    page asks for once, however many plots it shows; nothing is loaded from a network. Where the figure leaves colours
    of text, axes and background open, or has those of our neutral theme, they are the page's.

    `update` may be called from any thread.
    """

    _esm = bundled("plot.js")
    _css = STATIC / "plot.css"

    figure = traitlets.Dict().tag(sync=True)
    neutral = traitlets.Dict().tag(sync=True)

    def __init__(self, figure: Any) -> None:
        theme = THEMES["neutral"]
        neutral = {"ink": theme.ink, "muted": theme.muted, "line": theme.line, "grid": theme.grid}
        super().__init__(figure=_json(figure), neutral=neutral)
        answer_at_once(self)
        self.on_msg(self._received)

    def update(self, figure: Any) -> None:
        """Show another figure in place of this one. Zoom and legend stay if its `uirevision` is the same."""
        self.figure = _json(figure)

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        if isinstance(content, dict) and content.get("op") == "plotly":
            from plotly.offline import get_plotlyjs

            self.send(PlotlySource(op="plotly"), buffers=[get_plotlyjs().encode()])


def _json(figure: Any) -> dict[str, Any]:
    """The figure without its template: that alone would be ten times as large, and is white on a dark page."""
    data: dict[str, Any] = json.loads(figure.to_json())
    data.get("layout", {}).pop("template", None)
    return data
