"""The worker: order, torch's modes, output that stays with it, and the coalescer's promise."""

from __future__ import annotations

import copy
import sys
import threading
import time

import pytest
import torch

from aitune_lab.jupyter.coalesce import Coalescer
from aitune_lab.jupyter.output import captured
from aitune_lab.jupyter.runner import Modes, Worker


def test_jobs_run_in_order_on_one_thread_and_keep_what_they_raise() -> None:
    worker = Worker("test", lambda line: None)
    seen: list[tuple[int, str]] = []

    def work(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number

    def fails() -> int:
        raise ValueError("no")

    first = worker.submit("first", lambda: work(1))
    broken = worker.submit("broken", fails)
    last = worker.submit("last", lambda: work(2))
    assert last.result(10) == 2
    assert first.result(0) == 1
    assert [number for number, _ in seen] == [1, 2]
    assert {name for _, name in seen} == {"test"}
    with pytest.raises(ValueError, match="no"):
        broken.result(10)
    assert worker.join(10)
    assert not worker.busy


def test_submit_returns_at_once_and_a_job_that_waits_can_be_withdrawn() -> None:
    worker = Worker("test", lambda line: None)
    go = threading.Event()
    running = worker.submit("running", lambda: go.wait(10))
    waiting = worker.submit("waiting", lambda: pytest.fail("it was withdrawn"))
    assert waiting.withdraw()
    assert not running.done
    go.set()
    assert running.result(10) is True
    assert worker.join(10)


def test_a_job_runs_in_the_modes_of_who_submitted_it() -> None:
    worker = Worker("test", lambda line: None)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        job = worker.submit("modes", Modes.here)
        here = Modes.here()
    assert job.result(10) == here
    assert (here.grad, here.inference, here.autocast) == (False, False, (("cpu", torch.bfloat16),))
    with torch.inference_mode():
        job = worker.submit("modes", Modes.here)
    assert job.result(10).inference
    with torch.device("meta"):
        made = worker.submit("device", lambda: torch.zeros(2).device.type)
    assert made.result(10) == "meta"
    plain = worker.submit("modes", Modes.here).result(10)
    assert (plain.grad, plain.inference, plain.autocast) == (True, False, ())


def test_what_a_job_prints_goes_to_the_worker_and_to_nobody_elses_output(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    worker = Worker("test", lines.append)
    printed, go = threading.Event(), threading.Event()

    def work() -> None:
        print("from the job")
        print("10 %\r20 %\r100 %", file=sys.stderr)
        printed.set()
        go.wait(10)
        print("no newline at the end", end="")

    job = worker.submit("prints", work)
    assert printed.wait(10)
    print("from the cell")
    go.set()
    job.result(10)
    worker.join(10)
    assert lines == ["from the job", "100 %", "no newline at the end"]
    assert capsys.readouterr().out == "from the cell\n"


def test_streams_are_as_before_afterwards_also_if_somebody_swapped_them_meanwhile() -> None:
    before = sys.stdout
    with captured(lambda line: None):
        assert sys.stdout is not before
        assert copy.deepcopy(sys.stdout) is sys.stdout
    assert sys.stdout is before
    mine = sys.__stdout__
    with captured(lambda line: None):
        sys.stdout = mine
    assert sys.stdout is mine
    sys.stdout = before


def test_the_coalescer_sends_the_last_of_a_kind_and_few_in_any_second() -> None:
    sent: list[tuple[float, str]] = []
    coalescer = Coalescer(per_second=20)
    posts = 0
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        posts += 1
        for key in ("page", "tree"):
            coalescer.post(key, lambda key=key, at=posts: sent.append((time.monotonic(), f"{key} {at}")))
    assert coalescer.flush(10)
    times = [at for at, _ in sent]
    assert max(sum(start <= t < start + 1 for t in times) for start in times) <= 21
    assert {text for _, text in sent[-2:]} == {f"page {posts}", f"tree {posts}"}
    assert len(sent) < posts


def test_the_coalescer_goes_on_after_a_message_that_could_not_be_made(caplog: pytest.LogCaptureFixture) -> None:
    coalescer = Coalescer(per_second=1000)
    sent: list[str] = []

    def broken() -> None:
        raise RuntimeError("no page")

    coalescer.post("broken", broken)
    coalescer.post("nothing to say", lambda: False)
    coalescer.post("good", lambda: sent.append("good"))
    assert coalescer.flush(10)
    assert sent == ["good"]
    assert "broken" in caplog.text
