"""Figures as widgets: what goes over the wire, and where the library comes from."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go

from aitune_lab.jupyter import PlotView


def figure(height: float = 1.0) -> go.Figure:
    drawn = go.Figure(go.Bar(x=["eager", "onnxruntime"], y=[height, 2.0]))
    return drawn.update_layout(title="Latency", uirevision="latency")


def test_only_the_figure_goes_over_the_wire() -> None:
    view = PlotView(figure())
    assert view.figure["data"][0]["x"] == ["eager", "onnxruntime"]
    assert "template" not in view.figure["layout"]
    assert len(json.dumps(view.figure)) < 1000


def test_an_update_replaces_the_figure() -> None:
    view = PlotView(figure())
    view.update(figure(5.0))
    assert view.figure["data"][0]["y"] == [5.0, 2.0]
    assert view.figure["layout"]["uirevision"] == "latency"


def test_the_library_comes_from_the_installed_package_when_the_page_asks() -> None:
    view = PlotView(figure())
    sent: list[tuple[Any, Any]] = []
    view.send = lambda content, buffers=None: sent.append((content, buffers))  # type: ignore[method-assign]
    view._handle_custom_msg({"op": "something else"}, [])
    assert not sent
    view._handle_custom_msg({"op": "plotly"}, [])
    ((content, (source,)),) = sent
    assert content == {"op": "plotly"}
    assert b"plotly.js v" in source[:200]


def test_no_trait_holds_the_library() -> None:
    state = PlotView(figure()).get_state()
    assert max(len(str(value)) for value in state.values()) < 20_000


def test_the_page_learns_which_colours_are_neutral() -> None:
    view = PlotView(figure())
    assert set(view.neutral) == {"ink", "muted", "line", "grid"}
    assert len(set(view.neutral.values())) == 4
