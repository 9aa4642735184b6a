"""Figures in a real JupyterLab: drawn offline, in the theme's colours, with zoom and legend kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser
SHOW = """
import plotly.graph_objects as go
from aitune_lab.jupyter import PlotView

def figure(scale):
    drawn = go.Figure()
    drawn.add_scatter(name="onnxruntime", x=[1, 2, 3, 4], y=[scale * v for v in (4, 3, 2, 1)], marker_color="#56B4E9")
    drawn.add_scatter(name="inductor", x=[1, 2, 3, 4], y=[scale * v for v in (1, 2, 3, 4)], marker_color="#E69F00")
    title = {"text": "Latency", "subtitle": {"text": "median of 60 blocks<br>95 % intervals"}}
    title |= {"x": 0, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8, "l": 8}}
    return drawn.update_layout(title=title, yaxis_title="latency (ms)", uirevision="latency")

plot, other = PlotView(figure(1)), PlotView(figure(2))
display(plot, other)
"""


def test_figures_follow_theme_and_updates_and_keep_zoom_and_legend(lab_page: Callable[..., Any]) -> None:
    lab = lab_page([SHOW, "plot.update(figure(3))"])
    page = lab.page
    before = len(lab.frames)
    lab.run(0)
    plots = page.locator(".ait-plot")
    for i in range(2):
        plots.nth(i).locator(".main-svg").first.wait_for()
    libraries = [frame for frame in lab.frames[before:] if len(frame) > 1_000_000]
    assert len(libraries) == 1, "plotly.js comes once, for however many plots"

    assert page.locator(".modebar-btn").count() > 0
    assert page.locator(".modebar-btn[data-title*='Share'], .modebar-btn[data-name*='Cloud']").count() == 0

    place = plots.first
    colour = "e => getComputedStyle(e.querySelector('.ytitle')).fill"
    light = place.evaluate(colour)
    lab.shot("plot-light")
    place.evaluate("e => e.querySelector('.legend .traces .legendtoggle').dispatchEvent(new MouseEvent('mousedown'))")
    place.evaluate("e => e.querySelector('.legend .traces .legendtoggle').dispatchEvent(new MouseEvent('mouseup'))")
    page.wait_for_function("document.querySelector('.ait-plot').data[0].visible === 'legendonly'")
    box = place.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.7 * box["height"], steps=5)
    page.mouse.up()
    page.wait_for_function("document.querySelector('.ait-plot').layout.xaxis.autorange === false")
    zoomed = place.evaluate("e => e.layout.xaxis.range")

    lab.run(1)
    page.wait_for_function("document.querySelector('.ait-plot').data[0].y[0] === 12")
    assert place.evaluate("e => e.layout.xaxis.range") == zoomed
    assert place.evaluate("e => e._fullData[0].visible") == "legendonly"

    lab.theme("dark")
    page.wait_for_function(f"({colour})(document.querySelector('.ait-plot')) !== {light!r}")
    assert place.evaluate("e => e.layout.xaxis.range") == zoomed
    lab.shot("plot-dark")

    tops = place.evaluate("e => [...e.querySelectorAll('.gtitle tspan.line')].map(l => l.getBoundingClientRect().top)")
    assert len(tops) == 3
    assert place.bounding_box()["y"] <= tops[0]
    assert tops == sorted(set(tops)), "no line of the title lies over another"

    width = place.evaluate("e => e._fullLayout.width")
    page.set_viewport_size({"width": 900, "height": 900})
    page.wait_for_function(f"document.querySelector('.ait-plot')._fullLayout.width < {width}")
    assert not lab.outside
