"""Figures: the data they are drawn from, and that what is drawn is legible and safe."""

from __future__ import annotations

import builtins
import itertools
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sample_runs as runs

import aitune_lab as ait
from aitune_lab.report import figures
from aitune_lab.report.figures.difference import CEILING, FLOOR, on_axis
from aitune_lab.report.figures.pareto import label_sides
from aitune_lab.report.theme import (
    DARK_PAGE,
    LIGHT_PAGE,
    SHAPE_CONTRAST,
    STYLES,
    THEMES,
    contrast,
    patterns_of,
    style_of,
    text_on,
)
from aitune_lab.schema import Event, Point, Tolerance, to_data
from aitune_lab.tuning.endtoend import EndToEnd
from aitune_lab.tuning.mixes import Bounded, Estimate, Part
from aitune_lab.tuning.session import SessionState

DRAWN = ("latency", "difference", "pareto", "where", "timeline", "end_to_end")


def texts(drawn: Any) -> str:
    """The figure as Plotly gets it."""
    return str(drawn.to_json())


def subtitle(drawn: Any) -> str:
    return str(drawn.layout.title.subtitle.text).replace("<br>", " ")


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", STYLES)
def test_shapes_stand_out_on_light_and_dark(name: str) -> None:
    style = STYLES[name]
    assert contrast(style.edge, LIGHT_PAGE) >= SHAPE_CONTRAST
    assert contrast(style.edge, DARK_PAGE) >= SHAPE_CONTRAST
    assert contrast(text_on(style.fill), style.fill) >= 4.5
    assert contrast(style.hatch, style.fill) >= 1.2


def test_text_reads_on_its_page() -> None:
    for tone in ("ink", "muted"):
        assert contrast(getattr(THEMES["light"], tone), LIGHT_PAGE) >= 4.5
        assert contrast(getattr(THEMES["dark"], tone), DARK_PAGE) >= 4.5
        # One grey can't have 4.5 on both; this is the best there is.
        assert min(contrast(getattr(THEMES["neutral"], tone), page) for page in (LIGHT_PAGE, DARK_PAGE)) >= 4.1


def test_the_neutral_tones_can_be_told_apart_and_replaced() -> None:
    # The notebook's plot puts the page's colours in their place.
    theme = THEMES["neutral"]
    assert len({theme.ink, theme.muted, theme.line, theme.grid}) == 4
    drawn = figures.latency(runs.recorded("success"))
    assert f"<span style='color:{theme.muted};" in drawn.layout.yaxis.ticktext[0]


def test_backends_differ_in_more_than_colour() -> None:
    assert len({style.symbol for style in STYLES.values()}) == len(STYLES)
    assert style_of("from another package") == style_of("from another package")
    assert style_of("from another package") != style_of("eager")
    patterns = patterns_of(
        [("inductor", "inductor[freezing]"), ("inductor", "inductor"), ("onnxruntime", "onnxruntime")]
    )
    assert patterns["inductor"] == patterns["onnxruntime"] == ""
    assert patterns["inductor[freezing]"]


@pytest.mark.parametrize(("run", "name", "theme"), [*itertools.product(runs.NAMES, DRAWN, THEMES)])
def test_every_figure_of_every_run(run: str, name: str, theme: Any) -> None:
    drawn = getattr(figures, name)(runs.recorded(run), theme=theme)
    layout = drawn.layout
    assert not layout.template.to_plotly_json().get("layout")
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert layout.font.color == THEMES[theme].ink
    assert layout.uirevision
    assert "sendChartToCloud" in layout.modebar.remove
    assert subtitle(drawn)
    assert len(texts(drawn)) < 40_000


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_to_show_is_said(name: str) -> None:
    assert subtitle(getattr(figures, name)(SessionState()))
    assert subtitle(getattr(figures, name)([]))


@pytest.mark.parametrize("name", DRAWN)
def test_names_show_as_text(name: str) -> None:
    drawn = getattr(figures, name)(runs.hostile())
    written = texts(drawn)
    assert "<img" not in written
    assert "\\u003cimg" not in written
    assert "$" not in written
    assert "\\u001b" not in written
    if name != "end_to_end":
        assert "&lt;img src=x" in json.dumps(json.loads(written))


def test_latency_data() -> None:
    info = figures.latency_info(runs.recorded("success"), "encoder", point="b=8")
    assert [bar.label for bar in info.bars] == ["eager", "onnxruntime", "inductor[freezing]", "inductor"]
    eager, fastest, stopped, untried = info.bars
    assert eager.median_ms == pytest.approx(0.2399, abs=1e-3)
    assert info.eager_ms == eager.median_ms
    assert fastest.chosen
    assert fastest.speedup == pytest.approx(7.31, abs=0.01)
    assert fastest.low_ms < (fastest.median_ms or 0) < fastest.high_ms
    assert stopped.median_ms is None
    assert "rough look" in stopped.figures
    assert untried.problem.startswith("not tried")
    assert "Median of 60 blocks" in info.caption[0]
    assert "95 % confidence interval" in info.caption[0]


def test_latency_takes_the_point_and_module_that_weigh_most() -> None:
    small, large = (
        runs.trial("onnxruntime", 1.0, 0.0, sizes=(1, 8)),
        runs.trial("onnxruntime", 3.0, 0.0, path="n", eager=90),
    )
    info = figures.latency_info(runs.state(small))
    assert info.point == Point((("b", 8),))
    assert figures.latency_info(runs.state(small, large)).path == "n"


def test_one_long_whisker_does_not_squeeze_the_bars() -> None:
    noisy = runs.trial("onnxruntime", 1.0, 0.0)
    point = replace(noisy.points[0], latency=runs.measured(1.0, high=500.0))
    info = figures.latency_info(runs.state(replace(noisy, points=(point,))))
    assert info.end_ms < 4
    assert any("longer than shown" in line for line in info.caption)


def test_disturbed_and_broken_figures() -> None:
    disturbed = runs.trial("onnxruntime", 1.0, 1e-8, disturbed="other load")
    wrong = runs.trial("openvino", 0.5, 0.3)
    broken = runs.trial("inductor", math.nan, math.nan)
    drawn = runs.state(disturbed, wrong, broken)
    bars = {bar.label: bar for bar in figures.latency_info(drawn).bars}
    assert bars["onnxruntime"].speedup is None
    assert "disturbed" in bars["onnxruntime"].figures
    assert bars["openvino"].wrong
    assert bars["inductor"].median_ms is None
    assert "Disturbed by other load" in " ".join(figures.latency_info(drawn).caption)
    for name in DRAWN:
        json.loads(texts(getattr(figures, name)(drawn)))


def test_an_unknown_module_is_an_error_that_helps() -> None:
    run = runs.recorded("success")
    with pytest.raises(ait.TargetError, match="Did you mean 'encoder'"):
        figures.latency(run, "encodr")
    with pytest.raises(ait.TargetError, match="b=1"):
        figures.latency(run, "encoder", point="b=3")
    with pytest.raises(ait.TargetError, match="signature must be one of"):
        figures.latency(run, "encoder", signature="none")
    assert "Nothing was tried" in subtitle(figures.latency(run, "encoder.0"))


def test_zoom_survives_an_update_of_the_same_thing_only() -> None:
    run = runs.recorded("success")
    first = figures.latency(run, "encoder")
    assert figures.latency(runs.finished("success"), "encoder").layout.uirevision == first.layout.uirevision
    assert figures.latency(run, "head").layout.uirevision != first.layout.uirevision
    assert figures.latency(run, "encoder", point="b=8").layout.uirevision != first.layout.uirevision


def test_difference_data() -> None:
    run = runs.state(
        runs.trial("onnxruntime", 1.0, 1e-7), runs.trial("openvino", 1.0, 0.0), runs.trial("inductor", 1.0, math.nan)
    )
    info = figures.difference_info(run)
    exact, zero, broken = info.rows
    assert (exact.error_class, exact.relative_l2, exact.allowed, exact.eager) == ("exact", 1e-7, 2e-7, 1e-7)
    assert on_axis(zero.relative_l2) == FLOOR
    assert on_axis(broken.relative_l2) == CEILING
    assert info.budget == 1e-4
    assert "against float64, worst over 2 calls at each point" in info.caption[0]
    wide = replace(run.plan, tolerance=Tolerance(max_relative_error=1e-2))
    assert figures.difference_info(replace(run, plan=wide)).budget == 1e-2
    assert figures.difference(run).layout.xaxis.type == "log"


def test_difference_takes_the_worst_point_of_each_output() -> None:
    trial = runs.trial("onnxruntime", 1.0, 1e-8, sizes=(1, 8))
    worse = replace(trial.points[1].comparison, leaves=(runs.leaf(1e-5), runs.leaf(1e-6, "z")))
    run = runs.state(replace(trial, points=(trial.points[0], replace(trial.points[1], comparison=worse))))
    rows = {row.leaf: row for row in figures.difference_info(run).rows}
    assert (rows["y"].relative_l2, rows["y"].point.label) == (1e-5, "b=8")
    assert {row.leaf for row in figures.difference_info(run, point="b=1").rows} == {"y"}
    assert figures.difference_info(run).name_of(rows["z"]) == "onnxruntime · z"


def test_pareto_front() -> None:
    info = figures.pareto_info(
        runs.state(
            runs.trial("openvino", 0.5, 5e-5),
            runs.trial("onnxruntime", 1.0, 1.5e-7),
            runs.trial("inductor", 1.2, 1e-6),
            runs.trial("torchao", 0.1, 0.4),
            runs.trial("tensorrt", 0.2, 1e-8, disturbed="other load"),
            runs.trial("inductor_aot", status="failed", reason="no compiler"),
        )
    )
    # Eager is off by 1e-7 itself. The wrong one and the disturbed one are no part of the front, and beat nobody.
    assert [point.label for point in info.front] == ["openvino", "onnxruntime", "eager"]
    assert info.without == ("inductor_aot",)
    assert [point.label for point in info.points][:2] == ["torchao", "tensorrt"]


def test_labels_of_near_points_stand_apart() -> None:
    near = [runs.trial(f"backend{i}", 1.0 + 0.002 * i, 1e-6) for i in range(7)]
    far = runs.trial("openvino", 0.2, 5e-5)
    run = runs.state(*near, far, choices=(runs.chosen(near[3]),))
    sides = label_sides(figures.pareto_info(run), 640, 300)
    # The chosen one has its label; each further one takes a free side, and the rest tell their names on hovering.
    assert sides["backend3"]
    assert sides["openvino"] == "bottom right"
    used = [side for name, side in sides.items() if name.startswith("backend") and side]
    assert len(used) == len(set(used)) <= 4
    drawn = figures.pareto(run)
    shown = {trace.name for trace in drawn.data if trace.text and trace.text[0]}
    assert shown == {name for name, side in sides.items() if side}
    assert all(trace.hovertext for trace in drawn.data if trace.name)


def test_where_adds_up() -> None:
    rows = (runs.row("a", 6, 1), runs.row("a.x", 4, 4), runs.row("a.y", 1, 1), runs.row("b", 3, 3))
    fast = runs.trial("onnxruntime", 0.5, 1e-8, path="a", eager=2.5)
    run = runs.state(fast, choices=(runs.chosen(fast),), rows=rows)
    info = figures.where_info(run)
    before = {region.key: region for region in info.eager}
    assert info.eager_ms == pytest.approx(10)
    assert before["a"].ms == pytest.approx(6)
    assert before[""].own_ms == pytest.approx(1)
    after = {region.key: region for region in info.tuned}
    # Two calls save 2 ms each; what lay in the tuned module is part of it now.
    assert after["a"].ms == pytest.approx(2)
    assert info.tuned_ms == pytest.approx(6)
    assert after.keys() == {"", "a", "b"}
    assert after["a"].candidate == "onnxruntime"
    assert "estimate" in " ".join(info.caption)


def test_where_with_a_tuned_method_and_the_target_itself() -> None:
    rows = (
        runs.row("vae.encode", 4, 0, method="encode"),
        runs.row("vae.encoder", 4, 4),
        runs.row("vae", 0, 0, calls=0),
    )
    fast = runs.trial("onnxruntime", 1.0, 1e-8, path="vae.encode", eager=2.0)
    run = runs.state(fast, choices=(runs.chosen(fast),), rows=rows)
    info = figures.where_info(run)
    assert info.eager_ms == pytest.approx(10)
    assert info.tuned_ms == pytest.approx(8)
    whole = runs.trial("onnxruntime", 1.0, 1e-8, path="", eager=2.0)
    rows = (runs.row("", 10, 2), runs.row("a", 8, 8))
    info = figures.where_info(runs.state(whole, choices=(runs.chosen(whole),), rows=rows))
    assert [region.key for region in info.tuned] == [""]
    assert info.tuned_ms == pytest.approx(8)


def test_where_leaves_out_what_is_too_small_and_says_so() -> None:
    rows = (runs.row("a", 9, 8.99), *(runs.row(f"a.{i}", 0.00001, 0.00001) for i in range(2000)))
    info = figures.where_info(runs.state(rows=rows))
    assert info.left_out == 2000
    assert "2000 modules" in " ".join(info.caption)
    assert len(texts(figures.where(runs.state(rows=rows)))) < 20_000


def test_timeline_from_events_and_from_a_state() -> None:
    events = runs.recorded("success")
    exact = figures.timeline_info(events)
    assert exact.exact
    assert [span.name for span in exact.spans][:2] == ["encoder · onnxruntime", "encoder · inductor[freezing]"]
    first = exact.spans[0]
    assert [phase.name for phase in first.phases] == ["build", "compare", "measure"]
    assert first.start == pytest.approx(23.06, abs=0.01)
    assert first.phases[-1].end == first.end
    durations = figures.timeline_info(figures.state_of(events))
    assert not durations.exact
    assert "Put end to end" in " ".join(durations.caption)
    assert len(durations.spans) == len(exact.spans)


def test_timeline_tells_what_failed_and_what_runs() -> None:
    spans = figures.timeline_info(runs.recorded("failures")).spans
    outcomes = {span.status for span in spans}
    assert {"failed", "out of tolerance", "ok"} <= outcomes
    open_run = runs.recorded("success")[:8]
    assert figures.timeline_info(open_run).spans[-1].status == "running"
    stopped = [*open_run, Event(99, 30.0, "run_cancelled")]
    assert figures.timeline_info(stopped).spans[-1].status == "not finished"


def test_end_to_end_measured_estimated_or_not_at_all() -> None:
    measured = figures.end_info(runs.recorded("success"))
    assert measured.speedup == pytest.approx(4.785, abs=0.01)
    assert not any(bar.estimated for bar in measured.bars)
    assert "Median of 30 blocks" in measured.caption[0]
    fast = runs.trial("onnxruntime", 1.0, 1e-8)
    estimate = {"eager_seconds": 0.010, "tuned_seconds": 0.005}
    run = runs.state(fast, choices=(runs.chosen(fast),), estimate=estimate)
    guessed = figures.end_info(run)
    assert [bar.estimated for bar in guessed.bars] == [False, True]
    assert "unknown until measured" in guessed.caption[0]
    assert figures.end_to_end(run).data[0].marker.pattern.shape == ("", "/")
    once = EndToEnd(items=1, eager_seconds=0.010, tuned_seconds=0.004)
    assert figures.end_info(replace(run, end_to_end=to_data(once))).speedup == pytest.approx(2.5)
    skipped = EndToEnd(skipped="one pass takes 90 s")
    assert "Not measured: one pass takes 90 s." in figures.end_info(replace(run, end_to_end=to_data(skipped))).caption
    assert "cancelled" in figures.end_info(runs.recorded("cancelled")).sentence
    assert "stays eager" in figures.end_info(runs.recorded("failures")).sentence


def test_mixes_side_by_side() -> None:
    untuned = Bounded(10.0, 9.5, 10.5)
    part = Part("m", "forward", "s", runs.trial("onnxruntime").candidate, problem="failed: no compiler")
    mixes = [
        Estimate("all onnx", (), untuned, "measured", Bounded(5.0, 4.0, 6.0), 0, 0),
        Estimate(runs.EVIL, (part,), untuned, "measured", None, 0, 0),
    ]
    confirmed = {"all onnx": EndToEnd(items=1, eager=runs.measured(10.0), tuned=runs.measured(5.5))}
    info = figures.mixes_info(mixes, confirmed)
    assert [(bar.name, bar.estimated) for bar in info.bars[:3]] == [
        ("untuned", False),
        ("all onnx", True),
        ("all onnx", False),
    ]
    assert "no compiler" in info.bars[3].figures
    drawn = figures.mixes(mixes, measured=confirmed)
    assert drawn.data[0].marker.pattern.shape == ("", "/", "", "/")
    assert "<img" not in texts(drawn)
    assert subtitle(figures.mixes([]))


def test_results_and_reports_are_sources_too(tmp_path: Path) -> None:
    from test_results import tuned

    result = tuned()
    drawn = result.figures.latency("")
    assert drawn.to_json() == ait.figures.latency(result, "").to_json()
    assert figures.timeline_info(result).exact
    ait.save_report(result, tmp_path / "run.json")
    report = ait.load_report(tmp_path / "run.json")
    assert ait.figures.latency(report, "").to_json() == drawn.to_json()
    assert set(dir(result.figures)) == set(DRAWN)
    for name in DRAWN:
        assert texts(getattr(result.figures, name)())


def test_without_plotly_the_install_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert figures.latency_info(runs.recorded("success")).bars
    with pytest.raises(ait.MissingDependency, match=r"pip install .*notebook"):
        figures.latency(runs.recorded("success"))


@pytest.mark.browser
def test_plotly_shows_names_letter_by_letter(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    drawn = [getattr(figures, name)(runs.hostile()) for name in ("latency", "where", "timeline")]
    divs = "".join(f'<div id="d{i}"></div>' for i in range(len(drawn)))
    calls = "".join(f"Plotly.newPlot('d{i}',{d.to_json()});" for i, d in enumerate(drawn))
    page = f"<!doctype html><meta charset=utf-8><script>{get_plotlyjs()}</script>{divs}<script>{calls}</script>"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with sync_playwright() as playwright:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(executable_path=chromium)
        tab = browser.new_page()
        tab.goto((tmp_path / "page.html").as_uri())
        tab.wait_for_selector(".plot-container")
        assert tab.locator("img, b").count() == 0
        assert "<img src=x onerror=alert(1)>" in tab.locator("#d0").text_content()
        browser.close()
