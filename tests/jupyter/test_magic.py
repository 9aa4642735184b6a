"""The magics in a real IPython shell."""

from __future__ import annotations

import _thread
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import aitune_lab as ait
from aitune_lab.capture.inspector import Inspection
from aitune_lab.jupyter import core, registry
from aitune_lab.jupyter.magic import CellExecuted, PlanShown
from aitune_lab.jupyter.magic_parser import WORDS, Help
from aitune_lab.testing import ScriptedMeter
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult

from .conftest import Gate, Pipe


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell with the extension loaded, `pipe` and `data` in it, scripted latencies, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr(core, "TuneOptions", functools.partial(TuneOptions, meter=ScriptedMeter()))
    made = InteractiveShell.instance()
    made.reset(new_session=False)
    ait.load_ipython_extension(made)
    made.push({"pipe": Pipe(), "data": [torch.randn(2, 8) for _ in range(2)], "torch": torch})
    yield made
    for value in list(made.user_ns.values()):
        if isinstance(value, (Pipe, torch.nn.Module)):
            ait.unwrap(value)
    made.reset(new_session=False)
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, line: str) -> Any:
    return shell.run_line_magic("aitune", line)


def test_inspect_tune_compare_export_load(shell: InteractiveShell, tmp_path: Path) -> None:
    info = run(shell, "inspect pipe data -o info")
    assert isinstance(info, Inspection)
    assert shell.user_ns["info"] is info
    result = run(shell, "tune pipe --backend 'scripted[latency_ms=0.25]' -o result")
    assert isinstance(result, TuneResult)
    assert shell.user_ns["result"] is result
    assert {c.candidate.label for c in result.choices} == {"scripted[latency_ms=0.25]"}
    assert run(shell, "compare pipe") is result
    estimate = run(shell, "whatif pipe encoder=eager --name half")
    assert estimate.name == "half"
    said = run(shell, "export pipe tuned.ait")
    assert str(said).startswith("saved to tuned.ait; digest: sha256:")
    shell.push({"fresh": Pipe()})
    assert run(shell, f"load fresh tuned.ait --trust {said.value}")
    run(shell, "report pipe report.html")
    assert "encoder" in (tmp_path / "report.html").read_text()


def test_pins_and_plan(shell: InteractiveShell, tmp_path: Path) -> None:
    run(shell, "inspect pipe data")
    shown = run(shell, "pin pipe encoder 'scripted[latency_ms=0.4]'")
    assert isinstance(shown, PlanShown)
    assert "encoder: use scripted[latency_ms=0.4]" in str(shown)
    run(shell, "plan pipe --write plan.toml")
    run(shell, "unpin pipe encoder")
    assert run(shell, "plan pipe").plan.rules == ()
    assert run(shell, "plan pipe --read plan.toml").plan == shown.plan
    dry = run(shell, "tune pipe --dry-run --exclude inductor --max-seconds 30")
    assert dry.dry_run
    assert registry.lab_of(shell.user_ns["pipe"]).plan.limits.max_seconds == 30


def test_a_cell_is_run_inspected_and_offered(shell: InteractiveShell) -> None:
    shell.push({"model": Pipe().encoder})
    result = shell.run_cell_magic("aitune", "-o ran", "y = model(torch.randn(2, 8))\nz = pipe(torch.randn(3, 8))")
    assert isinstance(result, CellExecuted)
    assert shell.user_ns["ran"] is result
    assert shell.user_ns["y"].shape == (2, 16)
    assert set(result.executed) == {"model", "pipe.encoder", "pipe.head"}
    assert "%aitune tune model" in str(result)
    assert "<table>" in result._repr_html_()
    # Its calls are the data from now on.
    assert run(shell, "inspect model").rows
    assert "no torch module" in str(shell.run_cell_magic("aitune", "", "1 + 1"))
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


def test_a_cell_that_fails_gives_nothing(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell_magic("aitune", "", "1 / 0") is None
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


def test_an_interrupt_ends_a_tune_cleanly(shell: InteractiveShell, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    run(shell, "inspect pipe data")
    gate.reached.set = _thread.interrupt_main  # type: ignore[method-assign]
    from aitune_lab.jupyter.lab import Lab

    cancel = Lab.cancel
    monkeypatch.setattr(Lab, "cancel", lambda lab: (cancel(lab), gate.go.set())[0])
    result = run(shell, "tune pipe --backend waiting")
    assert result.events[-1].kind == "run_cancelled"
    assert "forward" not in vars(shell.user_ns["pipe"].encoder)


def test_help_is_real(shell: InteractiveShell) -> None:
    whole = run(shell, "")
    assert isinstance(whole, Help)
    assert all(name in str(whole) for name in WORDS)
    assert "--max-relative-error" in str(run(shell, "tune -h"))
    found = shell.object_inspect("%aitune")
    assert "--accept-error" in found["docstring"]
    assert "example: %aitune pin model encoder onnxruntime" in found["docstring"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inspect pip data", "no variable 'pip'. Did you mean pipe"),
        ("inspect pipe.unet data", "a Pipe has no attribute 'unet'"),
        ("tune pipe", "no data is known for pipe"),
        ("compare pipe", "was not inspected yet"),
        ("tune pipe data --accuracy some", "invalid choice"),
        ("explode", "invalid choice: 'explode'"),
        ("pin pipe", "the following arguments are required"),
        ("tune pipe data --pin encoder", "--pin must look like path=candidate"),
        ("tune 'pipe", "No closing quotation"),
        ("report pipe report.docx", "a report is an .html file"),
    ],
)
def test_wrong_usage_is_said_in_a_line(shell: InteractiveShell, line: str, said: str) -> None:
    with pytest.raises(UsageError, match=".*" + said.replace("(", r"\(").replace(".", r"\.")):
        run(shell, line)


def test_completions(shell: InteractiveShell) -> None:
    def complete(line: str) -> set[str]:
        with provisionalcompleter():
            return {found.text for found in shell.Completer.completions(line, len(line))}

    run(shell, "inspect pipe data")
    run(shell, "pin pipe head eager")
    magics = next(m for m in shell.magics_manager.registry.values() if type(m).__name__ == "AituneMagics")

    def offered(line: str) -> list[str]:
        symbol = "" if line.endswith(" ") else line.rsplit(maxsplit=1)[-1]
        return magics._complete(shell, SimpleNamespace(line=line, symbol=symbol))

    assert set(offered("%aitune ")) == set(WORDS)
    assert "pipe" in offered("%aitune inspect ")
    assert "--plan" in offered("%aitune tune pipe --")
    assert "encoder" in offered("%aitune pin pipe ")
    assert "eager" in offered("%aitune pin pipe encoder ")
    assert offered("%aitune unpin pipe ") == ["head"]
    assert offered("%aitune unpin nothing ") == []
    assert offered("%aitune bogus ") == []
    assert "inspect" in complete("%aitune ins")
