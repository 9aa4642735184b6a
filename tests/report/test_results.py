"""How a tuning's result shows itself: everything that was tried is there, and nothing in it is trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from aitune_lab.report import result_blocks, result_html, result_text
from aitune_lab.report.results import result_data
from aitune_lab.schema import Plan, Rule
from aitune_lab.testing.models import Mlp, Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.tuner import Tuner

EVIL = "<script>alert(1)</script>\x1b[31m"


def tuned(*, plan: Plan | None = None, dry_run: bool = False, cancel: bool = False) -> TuneResult:
    """A pair tuned with candidates that are fast, slow, wrong, failing and excluded."""
    with scripted_backend():
        candidates = [
            ScriptedBackend(**options).candidate()
            for options in ({}, {"latency_ms": 0.9}, {"error": "scaled"}, {"fails_at": "build"}, {"fails_at": "refuse"})
        ]
        options = TuneOptions(backends=candidates, meter=ScriptedMeter(), dry_run=dry_run)
        tuner = Tuner(Pair(Mlp(), Mlp()).eval(), [torch.randn(2, 4), torch.randn(3, 4)], plan=plan, options=options)

        def follow(event: Any) -> None:
            if cancel and event.kind == "trial_finished":
                tuner.cancel()

        return run(tuner, follow)


@pytest.fixture(scope="module")
def result() -> TuneResult:
    return tuned(plan=Plan(rules=(Rule("", "exclude", excluded="scripted[latency_ms=0.9]"),)))


def test_text_holds_everything(result: TuneResult) -> None:
    text = str(result)
    assert text == result_text(result)
    assert "data: 2 items" in text.splitlines()[0]
    assert "* scripted" in text
    assert "chosen: scripted is 2" in text
    assert "scripted[error=scaled] lost: out of tolerance" in text
    assert "scripted[fails_at=build] lost: failed" in text
    assert "scripted[fails_at=refuse] lost: refused: scripted refusal" in text
    assert "scripted[latency_ms=0.9]: excluded by the rule for the model itself" in text
    assert "±" in text
    assert "exact: off by at most twice what eager itself is off" in text
    assert "end to end 2 times as fast" in text
    for point in ("b=2", "b=3"):
        assert text.count(point) >= 3  # eager, the winner and the wrong one


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)


def test_a_terminal_shows_what_print_does(result: TuneResult) -> None:
    from IPython.lib.pretty import pretty

    assert pretty(result) == str(result)


def test_html_is_bare_and_escaped(result: TuneResult) -> None:
    evil = TuneResult(
        result.choices, result.trials, {EVIL: EVIL}, result.plan, result.events, understood=EVIL, seconds=1.0
    )
    page = evil._repr_html_()
    parser = Tags()
    parser.feed(page)
    assert parser.tags <= {"div", "p", "b", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li"}
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert "\x1b" not in str(evil)
    assert "scripted refusal" in result_html(result)


def test_without_an_end_to_end_check_there_is_an_estimate(result: TuneResult) -> None:
    text = str(replace(result, end_to_end=None))
    assert "estimate: " in text
    assert "unknown until measured" in text


def test_disturbed_figures_are_no_headline(result: TuneResult) -> None:
    def disturb(measured: Any) -> Any:
        return replace(measured, disturbed="other load") if measured is not None else None

    trials = {
        key: replace(trial, points=tuple(replace(p, latency=disturb(p.latency)) for p in trial.points))
        for key, trial in result.trials.items()
    }
    text = str(replace(result, trials=trials))
    table = text.partition("Candidates for")[0]
    assert "— (disturbed)" in table
    assert "×2" not in "".join(line for line in text.splitlines() if line.startswith(("* ", "(model)  ")))


def test_dry_run() -> None:
    text = str(tuned(dry_run=True))
    assert "Would be tried" in text
    assert "scripted, scripted[latency_ms=0.9]" in text
    assert "5 trials" in text


def test_cancelled() -> None:
    result = tuned(cancel=True)
    assert "Cancelled: the target is as it was" in str(result)
    assert result_data(result)["status"] == "cancelled"


def test_json(result: TuneResult) -> None:
    data = json.loads(json.dumps(result_data(result), allow_nan=False))
    assert data["choices"][0]["candidate"]["backend"] == "scripted"
    assert len(data["trials"]) == len(result.trials)
    assert data["planned"][0]["not_tried"]


def test_failures_are_listed(result: TuneResult) -> None:
    failed = TuneResult((), {}, {"encoder": "it takes no tensors"}, Plan(), ())
    assert result_blocks(failed)[-1].lines == ["encoder: it takes no tensors"]
