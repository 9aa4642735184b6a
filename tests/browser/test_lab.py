"""The Lab in a real JupyterLab: clicked through, reloaded, finished, opened again. Nothing may leave the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SETUP = """
import threading, torch, aitune_lab as ait
from torch import nn
from aitune_lab.backends import registry
from aitune_lab.testing import ScriptedBackend, ScriptedMeter

registry.register(ScriptedBackend)

class Waiting(ScriptedBackend):
    name = "waiting"
    reached, go = threading.Event(), threading.Event()
    def build(self, job):
        self.reached.set()
        self.go.wait(120)
        return super().build(job)

registry.register(Waiting)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Pipeline:
    def __init__(self):
        torch.manual_seed(0)
        self.encoder = nn.Sequential(*[Block() for _ in range(4)]).eval()
        self.head = nn.Linear(32, 8).eval()
    def __call__(self, x):
        return self.head(self.encoder(x))

pipe, data = Pipeline(), [torch.randn(4, 32) for _ in range(3)]
fast, slow = ScriptedBackend(latency_ms=0.25), ScriptedBackend(latency_ms=0.5)
wrong, broken = ScriptedBackend(error="scaled", latency_ms=0.1), ScriptedBackend(fails_at="build")
options = dict(meter=ScriptedMeter(), store=None)
"""
SHOW = "lab = ait.Lab(pipe, data, backends=[fast, slow, wrong, broken], **options)\nlab"
FAST = "scripted[latency_ms=0.25]"
SLOW = "scripted"
LONG = 60_000


class Journey:
    """A notebook with a Lab in its second cell."""

    def __init__(self, lab_page: Callable[..., Any], *cells: str, **options: Any) -> None:
        self.lab = lab_page([SETUP, *(cells or (SHOW,))], **options)
        self.page = self.lab.page
        self.lab.run(0, timeout_s=120)
        self.lab.run(1)
        self.root.wait_for(timeout=LONG)

    @property
    def root(self) -> Any:
        return self.lab.output(1).locator(".aitl")

    def step(self, name: str) -> None:
        self.root.locator(f".aitl-stepper-item[data-step={name}]").click()
        self.root.locator(f".aitl-step[data-step={name}]").wait_for()

    def press(self, op: str, at: int = 0) -> None:
        self.root.locator(f"[data-op={op}]").nth(at).click()

    def says(self, text: str, timeout: float = LONG) -> None:
        """Wait until the page shows a text."""
        self.root.get_by_text(text).first.wait_for(timeout=timeout)

    def shot(self, name: str) -> None:
        self.lab.shot(f"lab-{name}", self.root)


def test_the_five_steps(lab_page: Callable[..., Any], tmp_path: Path) -> None:
    """One journey for every run of the tests: all steps clicked, exported, and finished as a static copy."""
    ait_file = tmp_path / "tuned.ait"
    journey = Journey(lab_page)
    root = journey.root
    root.get_by_text("encoder").first.wait_for(timeout=LONG)
    journey.shot("inspect")
    journey.step("choose")
    journey.says("8 trials over 2 modules")
    journey.press("tune")
    root.locator('.aitl-status[data-tone="good"]').wait_for(timeout=LONG)
    journey.says("Tuned in")
    # An error is a row that one can open.
    failed = root.locator("tr", has_text="failed").first
    failed.click()
    journey.says("scripted failure at build")
    journey.shot("tune")
    journey.step("compare")
    root.locator(".aitl-slot-plot .js-plotly-plot, .aitl-slot-plot svg.main-svg").first.wait_for(timeout=LONG)
    journey.press("whatif_new")
    root.locator(".aitl-panel select").first.select_option("eager")
    journey.says("mix 1: encoder with eager")
    journey.says("unknown until measured")
    journey.press("whatif_measure")
    # On a very busy machine passes may be too slow to be timed; outputs are compared in any case.
    measured = root.locator("tr", has_text="mix 1").locator("[data-column=error]", has_text="relative L2")
    measured.first.wait_for(timeout=LONG)
    journey.shot("compare")
    journey.step("export")
    root.locator("[data-field=path]").first.fill(str(ait_file))
    journey.press("export")
    journey.says("Digest: sha256:")
    assert ait_file.exists()
    assert (
        FAST in root.locator(".aitl-code pre").text_content() or "0.25" in root.locator(".aitl-code pre").text_content()
    )
    journey.shot("export")
    journey.press("finish")
    root.wait_for(state="detached", timeout=LONG)
    output = journey.lab.output(1)
    output.locator("table").first.wait_for()
    assert "encoder" in output.text_content()
    journey.lab.save()
    notebook = json.loads(journey.lab.path.read_text(encoding="utf-8"))
    kinds = {kind for cell in notebook["cells"] for out in cell["outputs"] for kind in out.get("data", {})}
    assert kinds == {"text/html", "text/plain"}
    assert journey.lab.path.stat().st_size < 1_000_000


@pytest.mark.browser
def test_a_control_is_acknowledged_while_a_trial_waits(lab_page: Callable[..., Any]) -> None:
    journey = Journey(
        lab_page,
        "lab = ait.Lab(pipe, data, backends=[Waiting()], **options)\nlab",
        "Waiting.go.set(); lab._worker.join(60); print(lab.snapshot.phase, 'forward' in vars(pipe.encoder))",
    )
    journey.step("choose")
    journey.says("2 trials over 2 modules")
    journey.press("tune")
    journey.says("waiting on encoder: building")
    journey.step("choose")
    journey.root.locator("select[data-field=accuracy]").select_option("exact")
    journey.says("Accepted results: exact, from the next tune on")
    journey.step("tune")
    journey.press("cancel")
    journey.says("Cancelling; the target stays as it is")
    journey.lab.run(2)
    assert "cancelled False" in journey.lab.output(2).text_content()
    journey.says("cancelled; the target is as it was before")


@pytest.mark.browser
def test_a_choice_stands_while_the_kernel_has_not_answered(lab_page: Callable[..., Any]) -> None:
    journey = Journey(
        lab_page,
        SHOW,
        "view, go = lab._page.view, threading.Event()\nanswer = view._on_command\n"
        "view.on_command(lambda op, args: answer(op, args) if go.wait(60) else None)",
        "go.set()",
    )
    journey.step("choose")
    journey.says("8 trials over 2 modules")
    journey.lab.run(2)
    field = journey.root.locator("select[data-field=accuracy]")
    field.select_option("exact")
    journey.says("Queued until the running cell ends")
    assert field.input_value() == "exact"
    journey.shot("queued")
    journey.lab.run(3)
    journey.says("Accepted results: exact")
    journey.page.wait_for_function("!document.querySelector('.aitl select[aria-busy]')")
    assert field.input_value() == "exact"


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_pin_changes_plan_and_code(lab_page: Callable[..., Any], theme: str) -> None:
    journey = Journey(lab_page, SHOW, "print(lab.plan.rules)", theme=theme)
    journey.step("choose")
    journey.says("8 trials over 2 modules")
    tree = journey.root.locator("[role=treegrid]").first
    tree.locator("[role=row]", has_text="head").first.click(position={"x": 60, "y": 12})
    journey.page.keyboard.press("Enter")
    item = journey.page.locator(".ait-menu .ait-item", has_text=FAST)
    item.wait_for(timeout=LONG)
    journey.lab.shot(f"lab-menu-{theme}")
    item.click()
    journey.says("head: use scripted[latency_ms=0.25]")
    journey.shot(f"choose-{theme}")
    journey.step("export")
    assert "head" in journey.root.locator(".aitl-code pre").text_content()
    journey.lab.run(2)
    assert "pattern='head', action='pin'" in journey.lab.output(2).text_content()
    for step in ("inspect", "tune", "compare", "export"):
        journey.step(step)
        journey.shot(f"{step}-{theme}")


@pytest.mark.browser
def test_a_reload_while_tuning_shows_the_present_state_and_nothing_is_lost(lab_page: Callable[..., Any]) -> None:
    journey = Journey(
        lab_page,
        "lab = ait.Lab(pipe, data, backends=[Waiting(), fast], **options)\nlab",
        "Waiting.go.set(); lab.wait()",
    )
    journey.step("choose")
    journey.says("4 trials over 2 modules")
    journey.press("tune")
    journey.says("waiting on encoder: building")
    journey.lab.save()
    journey.lab.reload()
    journey.root.wait_for(timeout=LONG)
    journey.says("waiting on encoder: building")
    journey.lab.run(2)
    journey.root.locator('.aitl-status[data-tone="good"]').wait_for(timeout=LONG)
    journey.step("compare")
    journey.root.locator(".aitl-slot-plot svg").first.wait_for(timeout=LONG)
    assert "Chosen" in journey.lab.output(2).text_content()


@pytest.mark.browser
def test_a_refreshed_copy_takes_nothing_from_who_types(lab_page: Callable[..., Any]) -> None:
    """When a step ends the output is drawn anew for its static copy; the page that was in it goes on."""
    journey = Journey(lab_page, SHOW)
    journey.step("choose")
    journey.says("8 trials over 2 modules")
    journey.root.locator(".ait-grid").evaluate("e => { e.style.maxHeight = '90px'; e.scrollTop = 20; }")
    journey.step("export")
    path = journey.root.locator("[data-field=path]").first
    path.fill("of-my-own.ait")
    journey.page.evaluate(
        """() => {
            window.page = document.querySelector('.aitl');
            window.place = window.page.parentElement;
            window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code: 'lab._refresh()'});
        }"""
    )
    journey.page.wait_for_function("document.querySelector('.aitl')?.parentElement !== window.place")
    assert journey.page.evaluate("document.querySelector('.aitl') === window.page")
    assert path.input_value() == "of-my-own.ait"
    assert path.evaluate("e => document.activeElement === e")
    journey.page.keyboard.type("s")
    assert path.input_value() == "of-my-own.aits"
    journey.step("choose")
    assert journey.root.locator(".ait-grid").evaluate("e => e.scrollTop") == 20


@pytest.mark.browser
def test_a_live_lab_saved_and_opened_elsewhere_shows_tables(lab_page: Callable[..., Any]) -> None:
    """The notebook is opened without a kernel, in a place that doesn't trust it: tables and charts are there."""
    journey = Journey(lab_page, SHOW, "lab.run();", "lab.close()")
    journey.lab.run(2)
    journey.lab.run(3)
    journey.root.wait_for(state="detached", timeout=LONG)
    journey.lab.save()
    again = lab_page(journey.lab.path, kernel=False)
    output = again.output(1)
    output.locator("table").first.wait_for(timeout=LONG)
    output.locator("img").first.wait_for()
    assert "encoder" in output.text_content()
    again.shot("lab-reopened", output)


@pytest.mark.browser
def test_restart_and_run_all(lab_page: Callable[..., Any]) -> None:
    journey = Journey(lab_page, SHOW, "result = lab.run()\nresult", "print(len(result.choices), 'choices')")
    journey.lab.command("notebook:restart-run-all")
    accept = journey.page.locator(".jp-Dialog .jp-mod-accept")
    accept.wait_for()
    accept.click()
    journey.lab.output(3).get_by_text("2 choices").wait_for(timeout=2 * LONG)
    journey.root.wait_for(timeout=LONG)
    journey.root.locator('.aitl-status[data-tone="good"]').wait_for(timeout=LONG)


@pytest.mark.browser
def test_the_magics(lab_page: Callable[..., Any]) -> None:
    lab = lab_page(
        [SETUP, "%load_ext aitune_lab\n%aitune inspect pipe data", "%%aitune\npipe(data[0])", "%aitune tune -h"]
    )
    lab.run(0, timeout_s=120)
    for cell in (1, 2, 3):
        lab.run(cell)
    assert "encoder" in lab.output(1).locator("table").first.text_content()
    assert "%aitune tune pipe.encoder" in lab.output(2).text_content()
    assert "--accept-error" in lab.output(3).text_content()


@pytest.mark.browser
def test_the_copy_stays_when_the_kernel_is_shut_down_with_a_live_lab(lab_page: Callable[..., Any]) -> None:
    """Nobody closed the Lab: when the kernel ends, tables and pictures take the place of its page."""
    journey = Journey(lab_page, SHOW, "lab.run();")
    journey.lab.run(2)
    journey.root.locator('.aitl-status[data-tone="good"]').wait_for(timeout=LONG)
    journey.lab.command("kernelmenu:shutdown")
    journey.root.wait_for(state="detached", timeout=LONG)
    output = journey.lab.output(1)
    output.locator("table").first.wait_for()
    journey.lab.save()
    again = lab_page(journey.lab.path, kernel=False)
    output = again.output(1)
    output.locator("table").first.wait_for(timeout=LONG)
    assert "encoder" in output.text_content()
    assert "model not found" not in output.text_content()
