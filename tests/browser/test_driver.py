"""The driver itself: what the other browser tests rest on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser


def test_runs_cells_switches_themes_and_reloads(lab_page: Callable[..., Any]) -> None:
    lab = lab_page(["print('first')", "import time\nprint('second')"])
    lab.run(0)
    lab.run(1)
    assert "first" in lab.output(0).text_content()
    assert "second" in lab.output(1).text_content()
    lab.theme("dark")
    background = lab.page.evaluate("getComputedStyle(document.body).getPropertyValue('--jp-layout-color1')")
    assert background.strip() not in ("", "white", "#fff", "#ffffff")
    lab.theme("light")
    lab.save()
    assert "second" in lab.path.read_text(encoding="utf-8")
    lab.reload()
    assert "second" in lab.output(1).text_content()
    assert lab.shot("driver").stat().st_size > 1000
    assert not lab.outside
