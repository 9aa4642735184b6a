"""Bare HTML for saved notebooks: small, safe, and readable with nothing but a browser's own style."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sample_runs as runs

from aitune_lab.report import static_html
from aitune_lab.report.static import MAX_BYTES
from aitune_lab.tuning.session import SessionState

BARE = set("div h3 p b br img table caption thead tbody tr th td ul li pre".split())


class Page(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.images: list[dict[str, Any]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag == "img":
            self.images.append(dict(attrs))


def pictures(page: Page) -> list[str]:
    return [base64.b64decode(image["src"].partition("base64,")[2]).decode() for image in page.images]


@pytest.mark.parametrize("name", runs.NAMES)
def test_bare_html_of_every_run(name: str) -> None:
    text = static_html(runs.recorded(name))
    page = Page(text)
    assert page.tags <= BARE
    assert page.attributes <= {"align", "src", "alt", "width", "height"}
    assert len(text.encode()) < 60_000
    assert "Inspected modules" in text
    assert "MinLatency" in text


def test_it_says_what_was_chosen_and_why() -> None:
    text = static_html(runs.recorded("success"), title="My target")
    assert "<h3>My target</h3>" in text
    for said in (
        "16 samples of a list of 16",
        "End to end 4.79 times as fast",
        "onnxruntime is 8.67 times as fast as eager",
        "stopped after a rough look",
        "Outputs within budget",
        "Median of 60 blocks",
    ):
        assert said in text
    assert "The run was cancelled after 13.9 s: the target is as it was." in static_html(runs.recorded("cancelled"))
    assert "1 of 1 trial" not in static_html(SessionState())
    assert "Nothing was tuned yet." in static_html(SessionState())
    half = static_html(runs.recorded("success")[:14])
    assert "has not ended yet: 1 of 6 trials done" in half


def test_pictures_are_svg_of_their_own() -> None:
    page = Page(static_html(runs.recorded("success")))
    assert len(page.images) == 4
    for image, svg in zip(page.images, pictures(page), strict=True):
        assert image["src"].startswith("data:image/svg+xml;base64,")
        root = ET.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"<(script|style|image|use|foreignObject)|href|\bon\w+=", svg)
        assert "onnxruntime" in image["alt"]
    assert "0.0247 ms, ×10.6" in page.images[0]["alt"]


def test_names_show_as_text() -> None:
    text = static_html(runs.hostile())
    page = Page(text)
    assert page.tags <= BARE
    assert all(image["src"].startswith("data:") for image in page.images)
    assert "&lt;img src=x" in text
    assert "\x1b" not in text
    for svg in pictures(page):
        assert {element.tag.rpartition("}")[2] for element in ET.fromstring(svg).iter()} <= set(
            "svg defs pattern rect path text title line polyline circle polygon".split()
        )


def test_a_large_run_stays_small_and_says_what_is_missing() -> None:
    why = "a long reason " * 12
    trials, choices = [], []
    for number in range(200):
        tried = [runs.trial(f"backend{i}", 1.0 + i, 1e-6, path=f"layers.{number}", sizes=(1, 8)) for i in range(8)]
        trials += tried
        choices.append(runs.chosen(tried[0], {t.candidate.label: why for t in tried[1:]}))
    rows = tuple(runs.row(f"layers.{number // 10}.{number}", 1, 1) for number in range(2000))
    text = static_html(runs.state(*trials, choices=tuple(choices), rows=rows))
    assert len(text.encode()) <= MAX_BYTES
    assert "more, not shown here" in text
    assert "faster modules more" in text
    assert Page(text).images
