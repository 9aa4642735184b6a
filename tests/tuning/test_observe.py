"""NVTX ranges, metrics by trial and log records: what is seen of a run, and that nothing stays when switched off."""

from __future__ import annotations

import csv
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import aitune_lab as ait
from aitune_lab.errors import AituneError
from aitune_lab.measure.monitor import Doing, GpuSample, Monitor, Sample
from aitune_lab.runtime.installed import installed_in
from aitune_lab.schema import Candidate, Plan
from aitune_lab.testing.models import Mlp
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, install_scripted, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    with ait.observe():
        yield
    assert "aitune-lab-metrics" not in {t.name for t in threading.enumerate() if not t.daemon}


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was marked, `+` at the begin and `-` at the end."""
    seen: list[str] = []
    names: dict[int, str] = {}
    stack: list[str] = []

    def start(text: str) -> int:
        names[len(seen)] = text
        seen.append(f"+{text}")
        return len(seen) - 1

    def push(text: str) -> None:
        stack.append(text)
        seen.append(f"+{text}")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda text: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda number: seen.append(f"-{names[number]}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append(f"-{stack.pop()}"))
    return seen


def tuned(*candidates: Candidate, **options: Any) -> TuneResult:
    made = TuneOptions(backends=candidates, meter=ScriptedMeter(), **options)
    return run(make_tuner(Mlp().eval(), [torch.randn(2, 4)], Plan(), made))


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


def test_tuned_calls_stand_in_ranges_only_while_switched_on(nvtx: list[str]) -> None:
    model, x = Mlp().eval(), torch.randn(2, 4)
    install_scripted(model, x)
    dispatch = installed_in(model)[0].dispatch
    plain = dict(dispatch.call.__globals__)
    with torch.inference_mode():
        model(x)
        assert not nvtx
        with ait.observe(nvtx=True) as seen:
            assert seen.nvtx
            expected = model(x)
        assert nvtx == ["+aitune_lab Mlp: scripted", "-aitune_lab Mlp: scripted"]
        assert torch.equal(model(x), expected)
    assert len(nvtx) == 2
    # Nothing of it is left in the code that a call runs.
    assert dispatch.call.__globals__ == plain


def test_ranges_reach_targets_that_are_tuned_later_and_end_with_unwrap(nvtx: list[str]) -> None:
    model, x = Mlp().eval(), torch.randn(2, 4)
    with ait.observe(nvtx=True), torch.inference_mode():
        install_scripted(model, x)
        model(x)
        assert len(nvtx) == 2
        ait.unwrap(model)
        model(x)
    assert len(nvtx) == 2


def test_a_failing_executable_ends_its_range(nvtx: list[str]) -> None:
    model, x = Mlp().eval(), torch.randn(2, 4)
    install_scripted(model, x, fails_at="run")
    with ait.observe(nvtx=True), torch.inference_mode(), pytest.warns(ait.AituneWarning, match="scripted failure"):
        assert torch.equal(model(x), Mlp.forward(model, x))
    assert [text[0] for text in nvtx] == ["+", "-"]


def test_trials_and_their_phases_are_ranges(nvtx: list[str]) -> None:
    with ait.observe(nvtx=True):
        tuned(scripted(), scripted(fails_at="build"), end_to_end=False)
    trials = [text for text in nvtx if "trial" in text]
    assert trials == [
        "+aitune_lab trial: (model) scripted",
        "-aitune_lab trial: (model) scripted",
        "+aitune_lab trial: (model) scripted[fails_at=build]",
        "-aitune_lab trial: (model) scripted[fails_at=build]",
    ]
    assert {"+aitune_lab build", "+aitune_lab compare", "+aitune_lab measure"} <= set(nvtx)
    assert sum(text[0] == "+" for text in nvtx) == sum(text[0] == "-" for text in nvtx)


def test_nvtx_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(text: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", missing)
    with pytest.raises(AituneError, match="need a build of torch with CUDA"):
        ait.observe(nvtx=True)
    assert not ait.observe().nvtx


def test_metrics_are_sampled_by_trial(tmp_path: Path) -> None:
    ait.observe().clear()
    with ait.observe(metrics=True, interval_seconds=60.0) as seen:
        tuned(scripted(latency_ms=0.5), scripted(latency_ms=0.8), end_to_end=False)
    assert not seen.metrics
    trials = seen.by_trial()
    assert [t.candidate for t in trials] == ["scripted", "scripted[latency_ms=0.8]"]
    assert all(t.peak_rss_bytes > 0 and t.samples >= 2 and t.seconds >= 0 for t in trials)
    assert {s.doing.phase for s in seen.samples} >= {"", "build", "compare", "measure"}
    with seen.to_csv(tmp_path / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(seen.samples)
    assert rows[-1]["candidate"] == ""
    assert int(rows[0]["rss_bytes"]) > 0
    assert len(seen.to_dataframe()) == len(rows)
    assert "scripted[latency_ms=0.8]" in str(seen)
    assert "metrics off" in seen._repr_html_()
    seen.clear()
    assert not seen.samples


def test_metrics_can_be_switched_while_a_run_goes_on() -> None:
    seen = ait.observe(metrics=False)
    seen.clear()
    tuner = make_tuner(
        Mlp().eval(), [torch.randn(2, 4)], Plan(), TuneOptions(backends=(scripted(),), meter=ScriptedMeter())
    )
    for event in tuner.steps():
        if event.kind in ("trial_started", "trial_finished"):
            seen.metrics = event.kind == "trial_started"
    assert [t.candidate for t in seen.by_trial()] == ["scripted"]
    assert "end to end" not in {s.doing.phase for s in seen.samples}


def test_the_sampling_thread_samples_until_stopped() -> None:
    taken, enough = [], threading.Event()

    def read(t: float, doing: Doing) -> Sample:
        taken.append(doing)
        if len(taken) == 3:
            enough.set()
        return Sample(t, doing, rss_bytes=len(taken))

    monitor = Monitor(interval_seconds=0.001, read=read)
    monitor.now(Doing("a", "s", "fast", "build"))
    monitor.start()
    assert enough.wait(60)
    monitor.stop()
    assert not monitor.running
    assert monitor.by_trial()[0].peak_rss_bytes >= 3


def test_a_system_that_does_not_tell_ends_no_run() -> None:
    def read(t: float, doing: Doing) -> Sample:
        raise psutil.AccessDenied

    monitor = Monitor(read=read)
    monitor.start()
    monitor.now(Doing("a", "s", "fast", "build"))
    monitor.stop()
    assert not monitor.samples


def test_figures_of_gpus_are_columns_and_the_worst_is_told(tmp_path: Path) -> None:
    samples = iter(
        [
            Sample(0.0, gpus=(GpuSample(100, 10.0, 50.0, 70.0), GpuSample(300, None, 61.0))),
            Sample(2.0, gpus=(GpuSample(200, 30.0, 55.0, 90.0), GpuSample())),
        ]
    )

    def read(t: float, doing: Doing) -> Sample:
        held = next(samples)
        return Sample(held.t, doing, gpus=held.gpus)

    monitor = Monitor(read=read)
    monitor.now(Doing("a", "s", "fast", "build"))
    monitor.sample()
    monitor.sample()
    (trial,) = monitor.by_trial()
    assert (trial.seconds, trial.gpu_peak_memory_bytes, trial.gpu_max_temperature_c) == (2.0, 300, 61.0)
    assert trial.gpu_mean_utilisation_percent == 20.0
    rows = list(csv.DictReader(monitor.to_csv(tmp_path / "m.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0]["gpu1_memory_used_bytes"] == "300"
    assert rows[1]["gpu1_temperature_c"] == ""


def test_an_interval_must_be_positive() -> None:
    with pytest.raises(AituneError, match=r"interval_seconds > 0 must hold, but got 0"):
        ait.observe(interval_seconds=0)


def test_log_records_have_useful_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="aitune_lab")
    tuned(scripted(), scripted(fails_at="build"), end_to_end=False)
    by_level = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (10, 20, 30)}
    assert any("trying scripted" in text for text in by_level[logging.DEBUG])
    assert any("scripted failure at build" in text for text in by_level[logging.INFO])
    assert any(text.startswith("finished in") for text in by_level[logging.INFO])
    caplog.clear()
    with pytest.raises(ait.PlanError):
        run(make_tuner(Mlp().eval(), [torch.randn(2, 4)], Plan(rules=(ait.Rule("nowhere", "leave"),)), TuneOptions()))
    assert [r.levelname for r in caplog.records if "failed" in r.getMessage()] == ["ERROR"]


def test_without_a_handler_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    tuned(scripted(fails_at="build"), end_to_end=False)
    assert "scripted failure" not in capfd.readouterr().err
