"""The Lab's page without a browser: what goes over the wire, and what the page's commands do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.jupyter.lab import Lab
from aitune_lab.jupyter.page import Page, figure_of, sections_of
from aitune_lab.jupyter.views_compare import FIGURES

from .conftest import FAST, SLOW, WRONG, Gate, Pipe, WaitingBackend


@dataclass
class Wire:
    """What a Lab's widgets sent, and a page that asks."""

    lab: Lab
    page: Page
    sent: list[tuple[float, str, Any]] = field(default_factory=list)
    counter: int = 0

    def ask(self, op: str, **args: Any) -> Any:
        """Send a command as the page does; gives the acknowledgement, which must have come by then."""
        self.counter += 1
        ident = f"test-{self.counter}"
        self.page.view._received(None, {"id": ident, "op": op, "args": args}, [])
        return next(content for _, _, content in reversed(self.sent) if content.get("id") == ident)

    def section(self, name: str) -> str:
        return json.dumps(self.page.view.view["sections"][name], ensure_ascii=False)


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Lab], Wire]]:
    """`wired(lab)`: its page, with all messages of its widgets noted."""
    wires: list[Wire] = []

    def connect(lab: Lab) -> Wire:
        wire = Wire(lab, lab._make_page())
        for widget in (wire.page.view, wire.page.view.tree_view, wire.page.view.plot_view):

            def send(content: Any, buffers: Any = None, name: str = type(widget).__name__) -> None:
                wire.sent.append((time.monotonic(), name, content))

            def state(key: Any = None, name: str = type(widget).__name__, widget: Any = widget) -> None:
                wire.sent.append((time.monotonic(), name, {"op": "state", "key": key}))

            monkeypatch.setattr(widget, "send", send)
            monkeypatch.setattr(widget, "send_state", state)
        wires.append(wire)
        return wire

    yield connect
    for wire in wires:
        wire.page.leave()


def test_a_control_is_acknowledged_while_a_trial_waits_and_cancel_works(
    make_lab: Any, wired: Any, gate: Gate, pipe: Pipe
) -> None:
    lab = make_lab(WaitingBackend())
    wire = wired(lab)
    assert wire.ask("inspect")["ok"]
    assert wire.ask("tune")["reply"] == {"said": "Tuning"}
    assert gate.reached.wait(60)
    answer = wire.ask("set", name="accuracy", value="exact")
    assert answer["reply"] == {"said": "Accepted results: exact, from the next tune on"}
    assert not gate.go.is_set()
    assert lab.plan.tolerance.accuracy == "exact"
    assert wire.ask("pause")["ok"]
    assert wire.ask("resume")["ok"]
    assert wire.ask("cancel")["reply"]["said"].startswith("Cancelling")
    gate.go.set()
    lab._worker.join(60)
    assert lab.snapshot.phase == "cancelled"
    assert "forward" not in vars(pipe.encoder)
    assert wire.page.flush(30)
    assert "cancelled" in wire.section("head")


def test_few_messages_while_tuning(make_lab: Any, wired: Any) -> None:
    lab = make_lab(FAST, SLOW, WRONG)
    wire = wired(lab)
    lab.run()
    assert wire.page.flush(30)
    times = [at for at, _, _ in wire.sent]
    assert max(sum(start <= t < start + 1 for t in times) for start in times) <= 15
    assert {name for _, name, _ in wire.sent} >= {"LabView", "TreeView"}
    revisions = [c["revision"] for _, name, c in wire.sent if name == "LabView" and c.get("op") == "patch"]
    assert revisions == list(range(1, len(revisions) + 1))
    assert wire.page.view.view["sections"] == sections_of(lab)
    json.dumps(wire.page.view.view, allow_nan=False)


def test_a_page_that_arrives_late_gets_the_present_state(make_lab: Any, wired: Any) -> None:
    lab = make_lab()
    wire = wired(lab)
    lab.inspect()
    lab._worker.join(60)
    wire.page.flush(30)
    view = wire.ask("here", view="page-1")["reply"]["view"]
    assert view["sections"]["head"]["title"] == "Pipe"
    assert "4 trials over 2 modules" in json.dumps(view["sections"]["choose"])
    assert wire.page.view.pages == 1
    wire.page.view._received(None, {"id": "x", "op": "gone", "args": {"view": "page-1"}}, [])
    assert wire.page.view.wait_until_left(1)


def test_a_pin_in_the_tree_changes_plan_and_code(make_lab: Any, wired: Any) -> None:
    lab = make_lab(FAST, SLOW, WRONG)
    wire = wired(lab)
    lab.run()
    wire.page.flush(30)
    tree = wire.page.view.tree_view

    def command(**parts: Any) -> Any:
        tree._received(None, {"id": "tree-1", **parts}, [])
        return next(content for _, _, content in reversed(wire.sent) if content.get("id") == "tree-1")

    offered = command(op="candidates", path="encoder")["reply"]
    assert {c["label"]: c["pinnable"] for c in offered}[WRONG.label] == "accept"
    refused = command(op="pin", path="encoder", candidate=WRONG.label)
    assert not refused["ok"]
    assert "out of tolerance" in refused["error"]
    assert command(op="pin", path="encoder", candidate=WRONG.label, accept_error=True)["ok"]
    assert lab.plan.rules[0].accept_error
    wire.page.flush(30)
    assert "error accepted" in wire.section("choose")
    assert "accept_error" in wire.section("export")
    assert command(op="unpin", path="encoder")["ok"]
    assert command(op="leave", path="head")["ok"]
    assert [rule.action for rule in lab.plan.rules] == ["leave"]
    assert command(op="select", path="head")["ok"]
    assert lab.shown.module == "head"


def test_whatif_on_the_page(make_lab: Any, wired: Any) -> None:
    lab = make_lab(FAST, SLOW)
    wire = wired(lab)
    assert "nothing to compare" in json.dumps(sections_of(lab)["compare"])
    lab.run()
    assert wire.ask("whatif_new")["reply"]["said"].startswith("mix 1")
    assert wire.ask("whatif_set", name="0", value=SLOW.label)["ok"]
    assert not wire.ask("whatif_set", name="0", value="onnxruntime")["ok"]
    wire.page.flush(30)
    assert "unknown until measured" in wire.section("compare")
    assert wire.ask("whatif_measure", name="mix 1")["ok"]
    lab._worker.join(60)
    assert lab.shown.mixes.named("mix 1").measured is not None
    wire.page.flush(30)
    assert wire.section("compare").count("exact, relative L2") >= 1
    assert wire.ask("whatif_pin", name="mix 1")["ok"]
    assert {rule.candidate for rule in lab.plan.rules} == {FAST, SLOW}
    assert wire.ask("whatif_remove", name="mix 1")["ok"]
    assert lab.shown.mixes.current is None


def test_every_figure_can_be_drawn_at_every_stage(make_lab: Any) -> None:
    lab = make_lab(FAST, WRONG)
    for ready in (lambda: None, lab.inspect, lab.run, lambda: lab.whatif({"encoder": "eager"})):
        ready()
        for kind, _ in FIGURES:
            lab.look(figure=kind)
            assert figure_of(lab.snapshot, lab.shown) is not None


def test_exports_on_the_page(make_lab: Any, wired: Any, tmp_path: Any) -> None:
    lab = make_lab()
    wire = wired(lab)
    assert not wire.ask("export", what="ait", path=str(tmp_path / "a.ait"))["ok"]
    lab.run()
    assert wire.ask("export", what="ait", path=str(tmp_path / "a.ait"))["ok"]
    assert wire.ask("export", what="plan", path=str(tmp_path / "missing" / "a.toml"))["ok"]
    assert not wire.ask("export", what="report", path="")["ok"]
    lab._worker.join(60)
    wire.page.flush(30)
    assert "Digest: sha256:" in wire.section("export")
    good, why = lab.exports.said["plan"]
    assert not good
    assert "missing" in why


def test_unknown_commands_and_backends(make_lab: Any, wired: Any) -> None:
    lab = make_lab()
    wire = wired(lab)
    assert "reload the page" in wire.ask("explode")["error"]
    assert wire.ask("backend", name="scripted", value=False)["reply"]["said"] == "scripted will not be tried"
    assert lab.plan.rules[0].excluded == "scripted"
    assert wire.ask("backend", name="scripted", value=True)["ok"]
    assert lab.plan.rules == ()
    assert not wire.ask("set", name="max_seconds", value="soon")["ok"]
    assert wire.ask("set", name="max_relative_error", value="")["ok"]


def test_names_are_text(make_lab: Any, wired: Any) -> None:
    evil = "<img src=x onerror=alert(1)>"

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(evil, nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules[evil](x)

    lab = make_lab(target=Odd().eval())
    wire = wired(lab)
    lab.run()
    wire.page.flush(30)
    html = lab.static()
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror" in html


def test_a_closed_lab_lets_go_of_what_it_holds(make_lab: Any, wired: Any) -> None:
    lab = make_lab()
    wire = wired(lab)
    lab.run()
    wire.page.flush(30)
    view = wire.page.view
    lab.close()
    assert lab._page is None
    assert view.view == {}
    assert view.tree_view.tree == {}
    assert view.comm is None
    assert len(lab.static().encode()) < 1_000_000
    lab.close()


def test_a_page_that_does_not_go_keeps_its_widgets(make_lab: Any, wired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitune_lab.jupyter.lab.LEAVE_SECONDS", 0.01)
    lab = make_lab()
    wire = wired(lab)
    lab.inspect()
    wire.ask("here", view="reloaded")
    lab.close()
    assert wire.page.view.comm is not None
    assert "lab.static()" in wire.section("notice")


def test_a_lab_that_was_replaced_closes_when_its_page_has_gone(make_lab: Any, wired: Any) -> None:
    lab = make_lab()
    wire = wired(lab)
    lab.run()
    wire.page.flush(30)
    view = wire.page.view
    wire.ask("here", view="page-1")
    fork = lab.fork()
    assert not lab._replaced
    assert fork.snapshot.result is lab.snapshot.result
    make_lab()
    assert view.comm is not None
    view._received(None, {"id": "x", "op": "gone", "args": {"view": "page-1"}}, [])
    end = time.monotonic() + 30
    while view.comm is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert view.comm is None


def test_the_page_says_what_a_cancel_waits_for_and_offers_the_best_so_far(
    make_lab: Any, wired: Any, gate: Gate
) -> None:
    lab = make_lab(FAST, WaitingBackend())
    lab.leave("head")  # or it may come first
    wire = wired(lab)
    lab.tune()
    assert gate.reached.wait(60)
    assert wire.ask("cancel")["ok"]
    wire.page.flush(30)
    assert "cancelling, which waits for: waiting on encoder: building" in wire.section("tune")
    assert '"cancelling"' in wire.section("head")
    gate.go.set()
    lab._worker.join(60)
    wire.page.flush(30)
    assert "Use the best so far" in wire.section("tune")
    assert wire.ask("apply")["ok"]
    lab._worker.join(60)
    wire.page.flush(30)
    assert "cancelled; the best so far is installed" in wire.section("head")
    assert "Cancelled, with the best so far installed: encoder runs faster" in wire.section("tune")
