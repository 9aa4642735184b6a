"""The command line, in this process: what each command prints, writes and returns, and how it refuses bad input."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from aitune_lab import cli
from aitune_lab.capture.inspector import inspect
from aitune_lab.cli import EXIT_CODES, main, make_parser
from aitune_lab.cli.targets import load_target
from aitune_lab.cli.tune import plan_of
from aitune_lab.errors import PlanError, TargetError
from aitune_lab.report.terminal import inspection_blocks, print_blocks, progress_of
from aitune_lab.schema import Candidate, Rule, StrategyConfig
from aitune_lab.testing.models import Mlp, Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning import api
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.session import read_journal, replay
from aitune_lab.tuning.tuner import Tuner

ROOT = Path(__file__).parents[2]
TARGETS = """
import torch
from torch import nn
import helper

class Pipe:
    def __init__(self):
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
        self.head = nn.Linear(16, 4).eval()
    def __call__(self, x):
        return self.head(self.encoder(x))

def make():
    print("made by the user's code")
    return Pipe(), [torch.randn(2, 8), torch.randn(4, 8)]

def samples(): return Pipe(), [torch.randn(8) for _ in range(8)]
def no_pair(): return Pipe()
def number(): return 3
def no_modules(): return object(), [1]
def no_data(): return Pipe(), []
def wrong_data(): return Pipe(), [torch.randn(2, 9)]
def broken(): raise RuntimeError("out of\\nluck")
not_callable = 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with targets to tune, as the current one; nothing of it stays imported."""
    (tmp_path / "targets.py").write_text(TARGETS)
    (tmp_path / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("targets", "helper"):
        sys.modules.pop(name, None)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """The scripted backend is known, and latencies are what `meter(...)` says: no test depends on this machine."""
    real = api.make_tuner

    def use(meter: Any) -> None:
        def make_tuner(target: Any, data: Any, plan: Any, options: TuneOptions) -> Tuner:
            return real(target, data, plan, replace(options, meter=meter))

        monkeypatch.setattr(api, "make_tuner", make_tuner)

    use(ScriptedMeter())
    with scripted_backend():
        yield use


def tune(*arguments: str) -> int:
    return main(["tune", "targets:make", "--backend", "scripted", *arguments])


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "{demo,inspect,tune,bisect,show,runs,cache,doctor}" in text
    assert EXIT_CODES.split(";")[0] in text
    for name in ("demo", "inspect", "tune", "show", "doctor"):
        with pytest.raises(SystemExit):
            main([name, "-h"])
        assert "--json" in capsys.readouterr().out


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "targets:make"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^encoder +Sequential", text, flags=re.MULTILINE)
    assert "to tune: " in text
    assert main(["inspect", "targets.py:make", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [row["path"] for row in found["modules"]][:2] == ["encoder", "head"] or "encoder" in found["proposed"]
    assert sorted(found["proposed"]) == ["encoder", "head"]
    assert "made by the user's code" in captured.err


def test_bisect(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_backend():
        assert main(["bisect", "targets:make", "scripted[error=scaled]"]) == 0
        assert "Linear 'encoder.0' is the first on which scripted[error=scaled] diverges" in capsys.readouterr().out
        assert main(["bisect", "targets:make", "scripted", "--module", "head", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert found["culprit"] is None
    assert [row["path"] for row in found["rows"]] == ["head"]


@pytest.mark.usefixtures("meter")
def test_tune_show_and_the_journal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tune("--output", "out.ait", "--report", "run.json") == 0
    captured = capsys.readouterr()
    assert "Candidates for encoder" in captured.out
    assert "chosen: scripted is 2" in captured.out
    assert "saved out.ait: sha256:" in captured.out
    assert re.search(r"2 modules, \d+ trials?, about \d+ s", captured.err)
    state = replay(read_journal("run.json"))
    assert state.status == "finished"
    assert {choice.path: choice.candidate.label for choice in state.choices.values()} == {
        "encoder": "scripted",
        "head": "scripted",
    }
    assert main(["show", "out.ait"]) == 0
    assert "encoder" in capsys.readouterr().out
    assert main(["show", "out.ait", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["target"].endswith("Pipe")
    program = (
        "import sys; from aitune_lab.cli import main; code = main(['show', sys.argv[1]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out.ait")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "scripted" in done.stdout


@pytest.mark.usefixtures("meter")
def test_tune_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--json", "--batch-sizes", "1,4", "--output", "out.ait") == 2  # these items are batches already
    capsys.readouterr()
    assert main(["tune", "targets:samples", "--backend", "scripted", "--batch-sizes", "1,4", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["status"], found["file"]) == ("finished", "tuned.ait")
    assert found["digest"].startswith("sha256:")
    assert {p["point"]["sizes"][0][1] for t in found["trials"] for p in t["points"]} == {1, 4}
    assert "made by" not in captured.out


@pytest.mark.usefixtures("meter")
def test_dry_run_says_what_would_be_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tune("--dry-run", "--backend", "onnxruntime", "--exclude", "head=onnxruntime") == 0
    text = capsys.readouterr().out
    assert "Would be tried" in text
    assert re.search(r"encoder \w+: .*scripted", text)
    assert "onnxruntime: excluded by the rule for 'head'" in text
    assert "Nothing was built" in text
    assert not list(tmp_path.glob("*.ait"))


def test_where_nothing_is_faster_no_file_is_written(
    meter: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    meter(ScriptedMeter({"scripted": 2.0}))
    assert tune("--output", "out.ait") == 3
    captured = capsys.readouterr()
    assert "eager stays" in captured.out
    assert "out.ait was not written" in captured.err
    assert not (tmp_path / "out.ait").exists()


def test_an_interrupt_cancels(meter: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    meter(interrupted)
    assert tune("--output", "out.ait", "--report", "run.json") == 130
    assert capsys.readouterr().err.count("cancelled; the target is as it was") == 1
    assert replay(read_journal("run.json")).status == "cancelled"
    assert not (tmp_path / "out.ait").exists()


@pytest.mark.usefixtures("meter")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tune", "targets"], "must look like module:function"),
        (["tune", "nowhere:make"], "no module 'nowhere'"),
        (["tune", "nowhere.py:make"], "no file 'nowhere.py'"),
        (["tune", "targets:mak"], "no function 'mak'; it has make"),
        (["tune", "targets:not_callable"], "no function 'not_callable'"),
        (["tune", "targets:no_pair"], "must return the pair .target, data., but returned a Pipe"),
        (["tune", "targets:no_modules"], "no torch.nn.Module was found"),
        (["tune", "targets:no_data"], "at least one item"),
        (["tune", "targets:wrong_data"], "rejected an item"),
        (["tune", "targets:broken"], "RuntimeError: out of luck"),
        (["inspect", "targets:no_data"], "at least one item"),
        (["tune", "targets:make", "--backend", "quick"], "must be one of .*but got 'quick'"),
        (["tune", "targets:make", "--pin", "encodr=scripted"], "encodr.*Did you mean 'encoder'"),
        (["tune", "targets:make", "--pin", "encoder"], "must look like path=candidate"),
        (["tune", "targets:make", "--pin", "encoder=scripted[latency=1]"], "must be among"),
        (["tune", "targets:make", "--pin", "encoder=scripted", "--pin", "encoder.0=scripted"], "encoder.*encoder.0"),
        (["tune", "targets:make", "--pin", "encoder=scripted[error=scaled]"], "out of tolerance"),
        (["tune", "targets:make", "--strategy", "Luck"], "Luck"),
        (["tune", "targets:make", "--plan", "none.toml"], "none.toml"),
        (["tune", "targets:make", "--max-seconds", "-1"], "at least 0"),
        (["tune", "targets:make", "--output", "no/folder/x.ait"], "can't be written"),
        (["tune", "targets:make", "--output", "."], "is a folder"),
        (["tune", "targets:make", "--report", "x", "--output", "x"], "must be two files"),
        (["tune", "targets:make", "--dry-run", "--output", "no/folder/x.ait"], "can't be written"),
        (["tune", "targets:make", "--exclude", "foo"], "--exclude foo: backend must be one of .*got 'foo'"),
        (["tune", "targets:number"], "but returned an int"),
        (["show", "none.ait"], "none.ait"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[0] == "tune" and "--backend" not in arguments:
        arguments = [*arguments, "--backend", "scripted"]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    last = err.strip().splitlines()[-1]
    assert "Errno" not in last
    assert err.count(last.removeprefix("error: ")) == 1  # progress doesn't say it too
    assert last.startswith("error: ")
    assert re.search(said, last)
    assert "Traceback" not in last


@pytest.mark.parametrize("sizes", ["0", "1,x", ""])
def test_batch_sizes_are_positive_whole_numbers(sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "targets:make", "--batch-sizes", sizes])
    assert ended.value.code == 2
    assert "positive whole numbers" in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "targets:broken", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err

    def fail(name: str) -> Any:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(cli.tune, "load_target", fail)
    assert main(["inspect", "targets:make"]) == 1
    assert capsys.readouterr().err == "unexpected error: ZeroDivisionError: surprise; --debug shows where\n"


def test_options_become_a_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('accuracy = "exact"\n[[rule]]\npattern = "head"\nleave = true\n')
    options = make_parser().parse_args(
        ["tune", "x:y", "--plan", "plan.toml", "--pin", "=inductor[freezing, mode=quick]", "--accept-error"]
        + ["--exclude", "onnxruntime", "--exclude", "head=inductor[freezing]", "--strategy", "OneBackend"]
        + ["--max-seconds", "5", "--max-relative-error", "0.5"]
    )
    with pytest.raises(PlanError, match="OneBackend"):
        plan_of(options)
    options.strategy = "MinLatency"
    plan = plan_of(options)
    pinned = Candidate("inductor", (("freezing", True), ("mode", "quick")))
    assert plan.rules == (
        Rule("", "pin", candidate=pinned, accept_error=True),
        Rule("re:.*", "exclude", excluded="onnxruntime"),
        Rule("head", "exclude", excluded="inductor[freezing]"),
        Rule("head", "leave"),
    )
    assert plan.strategy == StrategyConfig("MinLatency")
    assert (plan.limits.max_seconds, plan.tolerance.accuracy, plan.tolerance.max_relative_error) == (5, "exact", 0.5)


@pytest.mark.usefixtures("meter")
def test_another_suffix_is_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("--dry-run", "--output", "out.pt") == 0
    assert "note: out.pt will be a .ait file" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 130])
def test_tables_fit_the_terminal(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=width)
    with scripted_backend():
        options = TuneOptions(backends=("scripted", ScriptedBackend(latency_ms=0.9)), meter=ScriptedMeter())
        target, data = Pair(Mlp(), Mlp()).eval(), [torch.randn(2, 4), torch.randn(3, 4)]
        result = api.run(Tuner(target, data, options=options))
        inspection = inspect(Pair(Mlp(), Mlp()).eval(), data)
    from aitune_lab.report.results import result_blocks

    print_blocks(console, [*inspection_blocks(inspection, max_depth=1), *result_blocks(result)])
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "deeper than 1 level not shown" in text
    assert ("eager ms" in text) == (width > 110)


def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    target, data = load_target("../targets.py:make")
    assert type(target).__name__ == "Pipe"
    assert len(data) == 2
    (elsewhere / "bad.py").write_text("import no_such_package")
    with pytest.raises(TargetError, match="no_such_package"):
        load_target("bad:make")


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fingerprint"]["torch"] == torch.__version__
    assert found["backends"]["eager"]["ok"]
    assert found["cache"]["folder"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "onnxruntime" in text
    assert found["cache"]["folder"] in text


def test_live_progress_and_tables_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with scripted_backend():
        options = TuneOptions(backends=("scripted",), meter=ScriptedMeter())
        tuner = Tuner(Pair(Mlp(), Mlp()).eval(), [torch.randn(2, 4)], options=options)
        with progress_of(console) as show:
            result = api.run(tuner, show)
    from aitune_lab.report.results import result_blocks

    print_blocks(console, result_blocks(result))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "of about" in text
    assert "finished in" in text
    assert "* scripted" in text


def test_untrusted_names_do_not_steer_the_terminal() -> None:
    file = io.StringIO()
    from aitune_lab.report.results import Block

    print_blocks(
        Console(file=file, force_terminal=True, color_system=None), [Block("a\x1b[31mb", lines=["[bold]\x07"])]
    )
    assert "a\\x1b[31mb" in file.getvalue()
    assert "[bold]\\x07" in file.getvalue()


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "aitune_lab", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tune" in done.stdout
