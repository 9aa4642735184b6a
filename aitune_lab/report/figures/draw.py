"""What all Plotly figures share: the frame, the captions, text that is safe in them."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependency, install_command
from ..text import clean
from ..theme import FONT, Theme, ThemeName, theme_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

CAPTION_CHARACTERS = 96
TITLE_PIXELS, LINE_PIXELS = 34, 17


def graph_objects() -> Any:
    """`plotly.graph_objects`. Raises MissingDependency with the install command without Plotly."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingDependency("plotly", "a figure", install_command("notebook")) from None
    return go


def label(text: str, longest: int = 0) -> str:
    """Untrusted text as Plotly shows it letter by letter: it takes labels for HTML, and `$…$` for formulas.

    With `longest`, the middle of a longer text is left out: both ends of a module's path tell it from its siblings.
    """
    shown = clean(text)
    if longest and len(shown) > longest:
        shown = f"{shown[: longest // 2]}…{shown[len(shown) - (longest - longest // 2 - 1) :]}"
    return html.escape(shown, quote=False).replace("$", "&#36;")


def short(text: str, longest: int) -> str:
    """Untrusted text with its end left out where it is longer, as Plotly shows it letter by letter."""
    shown = clean(text)
    return label(shown if len(shown) <= longest else f"{shown[: longest - 1].rstrip()}…")


def lines(texts: Iterable[str], width: int = CAPTION_CHARACTERS) -> list[str]:
    """Untrusted sentences, wrapped, as Plotly shows them letter by letter."""
    return [label(part) for text in texts if text for part in textwrap.wrap(clean(text), width)]


def figure(
    title: str,
    caption: Iterable[str] = (),
    *,
    theme: Theme | ThemeName,
    revision: str,
    height: int,
    legend: bool = False,
) -> go.Figure:
    """An empty figure in the project's look. `title` and `caption` are untrusted.

    Args:
        title: what is shown, of what.
        caption: sentences beneath the title: what n is, and how it was measured.
        theme: colours of everything but the data.
        revision: zoom, hidden traces and the like survive an update while this stays the same.
        height: of the plotting area, in pixels; title and caption come on top.
        legend: whether traces are listed above the plotting area.
    """
    colours = theme_of(theme)
    below = lines(caption)
    top = TITLE_PIXELS + LINE_PIXELS * len(below) + (34 if legend else 10)
    axis = {
        "gridcolor": colours.grid,
        "linecolor": colours.line,
        "zerolinecolor": colours.line,
        "tickfont": {"color": colours.muted},
        "title": {"font": {"color": colours.muted, "size": 12}, "standoff": 8},
        "automargin": True,
    }
    drawn: go.Figure = graph_objects().Figure()
    drawn.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": colours.ink},
        title={
            "text": label(title),
            "subtitle": {"text": "<br>".join(below), "font": {"size": 12, "color": colours.muted}},
            "font": {"size": 15, "color": colours.ink},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 8, "l": 8},
        },
        margin={"t": top, "r": 24, "b": 48, "l": 16},
        height=top + height + 48,
        # Figures are for this machine: no button that uploads them, whichever renderer draws them.
        modebar={"remove": ["sendChartToCloud"]},
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
        uirevision=label(revision),
        showlegend=legend,
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "font": {"color": colours.muted},
        },
        xaxis=axis,
        yaxis=axis,
    )
    return drawn


def row_axis(
    drawn: go.Figure, keys: Sequence[str], rows: Sequence[tuple[str, str, bool]], theme: Theme, *, grid: bool = False
) -> None:
    """Rows from the top down, each named with its figures beneath.

    Args:
        drawn: the figure.
        keys: the rows' values on the y axis.
        rows: for each its name and figures, both untrusted, and whether it is the chosen one.
        theme: the figure's.
        grid: whether rows have lines.
    """
    texts = []
    for name, figures, chosen in rows:
        shown = label(name, 44)
        head = f"<b>{shown}</b> ✓" if chosen else shown
        # The opacity undoes that of the line above, where a page's colours aren't solid.
        style = f"color:{theme.muted};fill-opacity:1;font-size:11px"
        texts.append(f"{head} <br><span style='{style}'>{label(figures)}</span> " if figures else f"{head} ")
    drawn.update_yaxes(
        type="category",
        autorange="reversed",
        tickmode="array",
        tickvals=list(keys),
        ticktext=texts,
        tickfont={"color": theme.ink},
        showgrid=grid,
    )


def note(drawn: go.Figure, text: str, *, x: Any, y: Any, theme: Theme, hover: str = "", **options: Any) -> None:
    """An annotation without arrow; `text` and `hover` must be safe already (`label`)."""
    settings = {"showarrow": False, "xanchor": "left", "font": {"color": theme.muted, "size": 11}, **options}
    drawn.add_annotation(text=text, x=x, y=y, hovertext=hover or None, **settings)


def saying(title: str, why: str, *, theme: Theme | ThemeName, revision: str) -> go.Figure:
    """A figure that has nothing to show, and says why; both texts are untrusted."""
    drawn = figure(title, [why], theme=theme, revision=revision, height=8)
    drawn.update_xaxes(visible=False)
    drawn.update_yaxes(visible=False)
    return drawn
