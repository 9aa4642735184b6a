"""Captures beside other threads that use the GPU, and failures on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from common import CUDA, DIM, Chain, graphed, on_gpu, random

from aitune_lab.errors import Refused

pytestmark = pytest.mark.gpu
ROUNDS = 10


@contextmanager
def busy(work: Callable[[Any, torch.Tensor], None]) -> Iterator[tuple[list[int], list[str]]]:
    """Another thread that computes, checks its results, and does `work` in between; gives its rounds and errors."""
    module, x = on_gpu(Chain(8)), random(8, DIM)
    want = module(x)
    torch.cuda.synchronize()
    stop, rounds, errors = threading.Event(), [0], []

    def run() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            while not stop.is_set():
                try:
                    y = module(x)
                    work(stream, y)
                    stream.synchronize()
                    if not torch.allclose(y, want, rtol=1e-3, atol=1e-4):
                        errors.append("WRONG")
                    rounds[0] += 1
                except Exception as error:
                    errors.append(str(error).partition("\n")[0])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield rounds, errors
    finally:
        stop.set()
        thread.join()


FINE: dict[str, Any] = {
    "stream": lambda s, y: s.synchronize(),
    "item": lambda s, y: y.sum().item(),
    "allocation": lambda s, y: torch.empty(64 << 20, dtype=torch.uint8, device=CUDA).fill_(1),
    "event": lambda s, y: s.record_event().synchronize(),
}
SPOILING: dict[str, Any] = {
    "device synchronisation": lambda s, y: torch.cuda.synchronize(),
    "random numbers": lambda s, y: torch.rand(8, device=CUDA),
}


@pytest.mark.parametrize("work", FINE)
def test_capture_beside_work_that_agrees_with_it(work: str) -> None:
    module = on_gpu(Chain())
    with busy(FINE[work]) as (rounds, errors):
        for _ in range(ROUNDS):
            executable = graphed(module, random(4, DIM))
            x = random(4, DIM)
            torch.testing.assert_close(executable.call(x)[0], module(x))
            executable.close()
    assert errors == []
    assert rounds[0] > 0


@pytest.mark.parametrize("work", SPOILING)
def test_spoiled_captures_are_repeated_or_given_up_never_wrong(work: str) -> None:
    module, done = on_gpu(Chain()), 0
    with busy(SPOILING[work]) as (rounds, errors):
        for _ in range(ROUNDS):
            try:
                executable = graphed(module, x := random(4, DIM))
            except Refused as error:
                said = str(error)
                assert "can't be captured" in said
                continue
            done += 1
            torch.testing.assert_close(executable.call(x)[0], module(x))
            executable.close()
    assert "WRONG" not in errors
    assert rounds[0] > 0
    # Everything works again once both are done.
    torch.rand(3, device=CUDA)
    torch.cuda.synchronize()
    executable = graphed(module, x := random(4, DIM))
    torch.testing.assert_close(executable.call(x)[0], module(x))


SCRIPT = """
import sys
import torch
from torch import nn
from aitune_lab.schema import Candidate
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.schema import Plan
from aitune_lab.tuning.tuner import TuneOptions
from aitune_lab.backends import registry
from aitune_lab.backends.base import Availability, Backend, Executable

class AssertsAtTheThirdCall(Backend):
    name = "asserts"
    @classmethod
    def available(cls):
        return Availability(True)
    def candidates(self, signature, module):
        return [Candidate("asserts")]
    def build(self, job):
        calls = []
        table = torch.zeros(10, 4, device="cuda")
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                nn.functional.embedding(torch.tensor([99], device="cuda"), table)
            return job.original(*args, **kwargs)
        return Executable(call, flat=False, live_weights=True)

registry.register(AssertsAtTheThirdCall)
module = nn.Linear(8, 8).eval().cuda()
data = [torch.randn(2, 8, device="cuda"), torch.randn(2, 8, device="cuda"), torch.randn(3, 8, device="cuda")]
tuner = make_tuner(module, data, Plan(), TuneOptions(backends=("asserts", Candidate("inductor"))))
try:
    run(tuner, journal=sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
    print("forward swapped:", "forward" in module.__dict__)
"""


def test_a_device_assert_is_said_clearly_and_nothing_more_is_tried(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(journal)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
        check=False,
    )
    assert "DeviceLost asserts on" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "Start a new process" in done.stdout
    assert "forward swapped: False" in done.stdout
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    kinds = [event["kind"] for event in events if "kind" in event]
    assert kinds[-1] == "run_failed"
    started = [event for event in events if event.get("kind") == "trial_started"]
    assert "asserts" in json.dumps(started[-1])
