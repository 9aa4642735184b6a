"""The report as one file: nothing in it runs, nothing in it is fetched."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sample_runs as runs

import aitune_lab as ait
from aitune_lab.report import report_page
from aitune_lab.report.html import MAX_DETAILS
from aitune_lab.tuning.session import SessionState


def well_formed(page: str) -> ET.Element:
    """The page as XML: closes what HTML leaves open."""
    body = page.partition("<body>")[2].partition("</body>")[0]
    body = re.sub(r"<(img [^>]*|br)>", r"<\1/>", body).replace("<details open>", "<details>")
    return ET.fromstring(f"<body>{body}</body>")


@pytest.mark.parametrize("name", runs.NAMES)
def test_every_run_has_a_page(name: str) -> None:
    page = report_page(runs.recorded(name))
    tree = well_formed(page)
    assert tree.find(".//h1") is not None
    titles = {"".join(heading.itertext()) for heading in tree.iter("h2")}
    assert {"Where the time goes", "Candidates by module", "Timeline of the run", "Plan", "Environment"} <= titles
    assert len(page) < 200_000


def test_nothing_runs_and_nothing_is_fetched() -> None:
    page = report_page(runs.recorded("success"))
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.search(r"<(script|link|iframe|object|embed|img|form|base)\b", page)
    assert not re.search(r"\s(on\w+|style|src|href)=", page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#hatch-)", page)
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_light_and_dark() -> None:
    page = report_page(runs.recorded("success"))
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="color-scheme" content="light dark">' in page
    assert 'class="muted"' in page


def test_it_tells_the_whole_run() -> None:
    page = report_page(runs.recorded("success"), title="My model")
    for said in (
        "<h1>My model</h1>",
        "×4.79",
        "within budget",
        "Latency of encoder at b=1",
        "Numeric difference of encoder",
        "Latency against error of encoder at b=1",
        "onnxruntime is 8.67 times as fast as eager",
        "ait.Rule(&quot;encoder&quot;, &quot;pin&quot;",
        "measuring onnxruntime a second time",
        "onnxscript",
    ):
        assert said in page
    assert "could not extract" in report_page(runs.recorded("failures")).lower()


def test_names_show_as_text(tmp_path: Path) -> None:
    path = ait.html_report(runs.hostile(), tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    well_formed(page)
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "\x1b" not in page
    assert "<title>&lt;img" in page


def test_empty_and_large_runs() -> None:
    well_formed(report_page(SessionState()))
    trials = [runs.trial("onnxruntime", 1.0, 1e-8, path=f"layers.{i}") for i in range(MAX_DETAILS + 5)]
    page = report_page(runs.state(*trials, choices=tuple(map(runs.chosen, trials))))
    assert "5 modules more, not shown here." in page


@pytest.mark.browser
def test_a_browser_shows_it_without_complaint(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    path = ait.html_report(runs.hostile(), tmp_path / "report.html")
    said: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(executable_path=chromium)
        for scheme, background in (("light", "rgb(251, 251, 250)"), ("dark", "rgb(18, 19, 20)")):
            tab = browser.new_page(color_scheme=scheme)
            tab.on("console", lambda message: said.append(message.text))
            tab.on("pageerror", lambda error: said.append(str(error)))
            tab.on("request", lambda request: asked.append(request.url))
            tab.goto(path.as_uri())
            assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == background
            assert tab.locator("svg").count() > 5
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            tab.close()
        browser.close()
    assert said == []
    assert set(asked) == {path.as_uri()}


def test_a_file_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ait.DataError, match=r"the report can't be written to '.*report\.html': No such file or directory"
    ):
        ait.html_report(runs.recorded("success"), tmp_path / "nowhere" / "report.html")
