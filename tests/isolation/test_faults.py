"""The table of faults: whatever a build does, this process answers, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from faults import CompilerBackend, faulty, job_for, load_case
from torch import nn

from aitune_lab import tune
from aitune_lab.errors import ChildFailed, Refused, TargetError
from aitune_lab.isolation import BuildLimits, Children
from aitune_lab.schema import Candidate, Event, Plan
from aitune_lab.testing import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

X = torch.linspace(-1, 1, 12).view(3, 4)
MIB = 1 << 20

# Fault, limits, what the error says, its cause, its exit code.
TABLE: list[tuple[str, BuildLimits | None, str, str, int | None]] = [
    ("abort", None, r"^the build aborted \(SIGABRT\) after [\d.]+ s", "ended", -6),
    ("segfault", None, r"^the build crashed \(SIGSEGV\) after [\d.]+ s", "ended", -11),
    ("exit", None, r"^the build ended its process with exit code 3 after", "ended", 3),
    ("sys.exit", None, "^failed to build: SystemExit: enough$", "raised", None),
    ("hang", BuildLimits(seconds=1.0), "^stopped: the build went over the time limit of 1 s$", "time", None),
    (
        "allocate",
        BuildLimits(memory_bytes=1200 * MIB),
        "^stopped: the build went over the memory limit of 1.2 GiB",
        "memory",
        None,
    ),
    ("fill", BuildLimits(disk_bytes=64 * MIB), "^stopped: the build went over the disk limit of 64 MiB", "disk", None),
    ("raise", None, "^failed to build: RuntimeError: no such operator$", "raised", None),
    ("garbage", None, r"^loading what was built aborted \(SIGABRT\)", "ended", -6),
    ("load", None, "^failed to load: RuntimeError: truncated$", "raised", None),
    ("call", None, r"^a first call aborted \(SIGABRT\)", "ended", -6),
]


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def helper_tree(children: Children) -> list[psutil.Process]:
    assert children._helper is not None
    return psutil.Process(children._helper.process.pid).children(recursive=True)


@pytest.mark.parametrize(("fault", "limits", "reason", "cause", "exit_code"), TABLE, ids=[row[0] for row in TABLE])
def test_fault(
    children: Children,
    net: nn.Module,
    empty: Path,
    fault: str,
    limits: BuildLimits | None,
    reason: str,
    cause: str,
    exit_code: int | None,
) -> None:
    with pytest.raises(ChildFailed, match=reason) as caught:
        children.build(job_for(net, empty, faulty(fault), X), limits=limits)
    assert caught.value.cause == cause
    assert caught.value.exit_code == exit_code
    assert not list(empty.iterdir())
    assert not list(children._folder.glob("build-*"))
    assert helper_tree(children) == []


def test_what_works_is_loaded_here(children: Children, net: nn.Module, empty: Path) -> None:
    phases: list[Any] = []
    made = children.build(job_for(net, empty, faulty(), X, progress=lambda *phase: phases.append(phase)))
    assert made.isolated
    assert made.executable.notes[0].startswith("built by ")
    assert f" {os.getpid()}" not in made.executable.notes[0]
    assert ("compiling", 0.5) in phases
    with torch.no_grad():
        torch.testing.assert_close(made.executable.call(X), net(X))
    assert (empty / "artifact").read_text() == "the original"
    assert helper_tree(children) == []


COMPILED_TWICE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from dataclasses import replace
from faults import job_for
from torch._dynamo.utils import counters
from aitune_lab.isolation import Children
from aitune_lab.schema import Candidate

folder = Path(sys.argv[2])
(folder / "artifact").mkdir()
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
children = Children(folder / "children")
job = job_for(net, folder / "artifact", Candidate("inductor"), torch.ones(3, 4))
made = children.build(replace(job, threads=torch.get_num_threads()))
# Torch keeps Inductor's graphs by themselves or within those of AOTAutograd, depending on its version.
found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
missed = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
children.close()
print("isolated" if made.isolated else "here", "found" if found else "not found", missed)
"""


def test_what_a_child_compiled_is_found_here(tmp_path: Path) -> None:
    # In a process of its own: what else ran in this one may have changed settings that torch's caches go by.
    command = [sys.executable, "-c", COMPILED_TWICE, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["isolated found 0"], done.stdout + done.stderr


def test_refusal_stays_one(children: Children, net: nn.Module, empty: Path) -> None:
    with pytest.raises(Refused, match=r"^it cannot be kept$"):
        children.build(job_for(net, empty, faulty("refuse"), X))
    assert not list(empty.iterdir())


def test_log_is_kept_to_its_last_lines(children: Children, net: nn.Module, empty: Path) -> None:
    log = children.build(job_for(net, empty, faulty("print"), X)).log
    assert log.endswith("the last line\n")
    assert len(log) == 8000


def test_log_of_a_crash_says_where(children: Children, net: nn.Module, empty: Path) -> None:
    with pytest.raises(ChildFailed) as caught:
        children.build(job_for(net, empty, faulty("segfault"), X))
    assert "Segmentation fault" in caught.value.log
    assert "faults.py" in caught.value.log


@pytest.mark.parametrize("fault", ["abort", "exit", ""])
def test_grandchildren_end_too(children: Children, net: nn.Module, empty: Path, tmp_path: Path, fault: str) -> None:
    pids = tmp_path / "pids"
    job = job_for(net, empty, faulty(fault, pids), X)
    if fault:
        with pytest.raises(ChildFailed):
            children.build(job)
    else:
        children.build(job)
    lines = pids.read_text().split()
    assert lines
    assert not any(psutil.pid_exists(int(line)) for line in lines)


class Stopped(BaseException):
    pass


def test_cancel_ends_the_child_at_once(net: nn.Module, empty: Path, tmp_path: Path) -> None:
    own = Children(tmp_path / "own")
    pids = tmp_path / "pids"

    def progress(phase: str, done: float | None) -> None:
        if phase == "compiling":
            raise Stopped

    with pytest.raises(Stopped):
        own.build(job_for(net, empty, faulty("hang", pids), X, progress=progress))
    assert not any(psutil.pid_exists(int(line)) for line in pids.read_text().split())
    assert own._helper is None
    assert not list(empty.iterdir())
    own.close()


def target_of(net: nn.Module) -> nn.Module:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) + 1

    return Target().eval()


def test_tuning_goes_on_after_every_fault(net: nn.Module, tmp_path: Path) -> None:
    target = target_of(net)
    with torch.no_grad():
        want = target(X)
    state = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    faults = ["abort", "segfault", "sys.exit", "raise", "refuse", "garbage", "load", "call", "wrong"]
    good = faulty(pids=tmp_path / "pids")
    crashing = CompilerBackend(case="41").candidate()
    with scripted_backend():
        candidates = [*map(faulty, faults), crashing, good, ScriptedBackend(latency_ms=0.9).candidate()]
        meter = ScriptedMeter({good.label: 0.3})
        options = TuneOptions(backends=tuple(candidates), meter=meter, isolation="auto", end_to_end=False, store=None)
        result = run(make_tuner(target, [X], Plan(), options))
    found = {t.candidate.label: t for t in result.trials.values()}
    status = {fault: found[faulty(fault).label].status for fault in faults}
    assert status == {
        "abort": "crashed",
        "segfault": "crashed",
        "sys.exit": "failed",
        "raise": "failed",
        "refuse": "refused",
        "garbage": "crashed",
        "load": "failed",
        "call": "crashed",
        "wrong": "ok",
    }
    assert found[faulty("wrong").label].reason.startswith("out of tolerance")
    assert all(found[faulty(fault).label].reason for fault in faults)
    assert found[crashing.label].status == "crashed"
    assert "SIGABRT" in found[crashing.label].reason
    assert found[good.label].isolated
    assert [c.candidate for c in result.choices] == [good]
    with torch.no_grad():
        torch.testing.assert_close(target(X), want)
    assert all(torch.equal(tensor, state[name]) for name, tensor in target.state_dict().items())
    assert not any(psutil.pid_exists(int(line)) for line in (tmp_path / "pids").read_text().split())


def test_tuning_goes_on_after_a_hang(net: nn.Module) -> None:
    hanging = CompilerBackend(case="42").candidate()
    with scripted_backend():
        options = TuneOptions(
            backends=(hanging, ScriptedBackend(latency_ms=0.3).candidate()),
            meter=ScriptedMeter(),
            isolation="auto",
            build_limits=BuildLimits(seconds=1.0),
            end_to_end=False,
            store=None,
        )
        result = run(make_tuner(net, [X], Plan(), options))
    found = {t.candidate.label: t for t in result.trials.values()}
    assert found[hanging.label].status == "timed out"
    assert found[hanging.label].reason == "stopped: the build went over the time limit of 1 s"
    assert [c.candidate.backend for c in result.choices] == ["scripted"]


def test_module_that_cannot_be_sent_is_built_here(children: Children, empty: Path) -> None:
    module, inputs, _ = load_case("48")()
    job = job_for(module, empty, Candidate("onnxruntime"), *inputs)
    made = children.build(job)
    assert not made.isolated
    assert "not isolated: attribute 'lock' can't be sent to another process" in made.executable.notes[-1]
    with pytest.raises(
        Refused, match=r"is not part of this package and may not build in this process, but attribute 'lock'"
    ):
        children.build(job_for(module, empty, faulty(), *inputs))


def test_isolation_off_builds_here(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITUNE_LAB_ISOLATION", "off")
    result = tune(net, [X], backends=[faulty("raise")], progress=False, end_to_end=False)
    trial = next(t for t in result.trials.values() if t.candidate.backend == "faulty")
    assert not trial.isolated
    assert trial.reason == "failed to build: RuntimeError: no such operator"


def doing(event: Event) -> str:
    return str(event.data.get("doing", "")) if event.kind == "trial_progress" else ""


def test_a_run_tells_what_its_child_does_and_ends_it_when_cancelled(net: nn.Module, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    candidates = (faulty(pids=tmp_path / "others"), faulty("hang", pids))
    options = TuneOptions(backends=candidates, meter=ScriptedMeter(), isolation="auto", end_to_end=False, store=None)
    tuner = make_tuner(net, [X], Plan(), options)
    cancelled, events = threading.Event(), []

    def cancel() -> None:
        tuner.pause()  # which a build under way does not heed
        tuner.cancel()
        cancelled.set()

    for event in tuner.steps():
        events.append(event)
        if doing(event) == "compiling 50%" and event.candidate == faulty("hang", pids) and not cancelled.is_set():
            with pytest.raises(TargetError, match="the run is at work"):
                tuner.apply_best()
            threading.Thread(target=cancel).start()
            assert cancelled.wait(60)
    kinds = [event.kind for event in events]
    assert kinds[-1] == "run_cancelled"
    assert kinds.count("trial_finished") + kinds.count("trial_failed") == 1
    assert {doing(event) for event in events if event.candidate == candidates[0]} >= {
        "starting a child",
        "compiling 50%",
    }
    assert {event.data["phase"] for event in events if doing(event)} == {"build"}
    assert not any(psutil.pid_exists(int(line)) for line in pids.read_text().split())
    assert "forward" not in vars(net)
