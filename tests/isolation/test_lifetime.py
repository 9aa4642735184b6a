"""Helper and children live as long as they should, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from faults import faulty, job_for
from torch import nn

from aitune_lab.errors import ChildFailed, Refused
from aitune_lab.isolation import Children, children as children_module
from aitune_lab.schema import Candidate

X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def all_end(pids: Sequence[int]) -> bool:
    """Whether processes end, within what a busy machine may need."""
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_script_without_main_guard_that_is_interrupted_and_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("script.py")), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    with script:
        assert script.stdout is not None
        try:
            assert script.stdout.readline() == "built True True saw 2 tensors\n"
            word, *pids = script.stdout.readline().split()
            assert word == "hanging"
            os.killpg(script.pid, signal.SIGINT)  # as a terminal does: everybody in the group gets it
            assert script.stdout.readline() == "interrupted None 0\n"
            assert all_end(list(map(int, pids)))
            word, *pids = script.stdout.readline().split()
            assert word == "hanging"
            assert all(map(psutil.pid_exists, map(int, pids)))
        finally:
            script.kill()
        assert len(pids) == 2
        assert all_end(list(map(int, pids)))
    assert not list(Path("/dev/shm").glob(f"aitune-lab-{script.pid}-*"))


def test_sudden_end_of_the_helper(net: nn.Module, empty: Path, tmp_path: Path) -> None:
    children = Children(tmp_path / "own")
    pids = tmp_path / "pids"

    def kill_it(phase: str, done: float | None) -> None:
        if phase == "compiling" and children._helper is not None:
            children._helper.process.kill()

    with pytest.raises(ChildFailed, match=r"^the process that starts children ended"):
        children.build(job_for(net, empty, faulty("hang", pids), X, progress=kill_it))
    assert all_end([int(line) for line in pids.read_text().split()])
    made = children.build(job_for(net, empty, faulty(), X))  # by a new one
    assert made.isolated
    assert children._helper is not None
    helper = children._helper.process
    children.close()
    children.close()
    assert helper.returncode == 0
    assert not list((tmp_path / "own").glob("build-*"))


def test_fresh_process_serves_until_a_build_fails(
    children: Children, net: nn.Module, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = children.build(job_for(net, empty, faulty(), X)).executable.notes
    monkeypatch.setattr(children_module, "_can_fork", lambda job: False)
    fresh = [children.build(job_for(net, empty, faulty(), X)).executable.notes for _ in range(2)]
    assert fresh[0] == fresh[1] != forked
    with pytest.raises(ChildFailed, match="SIGABRT"):
        children.build(job_for(net, empty, faulty("abort"), X))
    monkeypatch.setattr(children_module, "_can_fork", lambda job: True)
    assert children._helper is not None
    assert psutil.Process(children._helper.process.pid).children(recursive=True) == []


def test_without_a_helper_builds_are_made_here(
    net: nn.Module, empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    children = Children(tmp_path / "own")
    made = children.build(job_for(net, empty, Candidate("onnxruntime"), X))
    assert not made.isolated
    assert made.executable.notes[-1] == ("not isolated: no process to start children from could be started (no output)")
    made.executable.close()
    with pytest.raises(Refused, match=r"isolation='off' allows it$"):
        children.build(job_for(net, empty, faulty(), X))
    children.close()


def test_gpu_jobs_stay_here_unless_asked_for(net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "_on_gpu", lambda job: True)
    children = Children(tmp_path / "builds")
    try:
        folder = tmp_path / "artifact"
        folder.mkdir()
        made = children.build(job_for(net, folder, Candidate("onnxruntime"), X))
        assert not made.isolated
        assert (
            made.executable.notes[-1]
            == "not isolated: on a GPU; isolation='all' builds there too in a process of its own"
        )
    finally:
        children.close()
