"""Nothing is computed twice: what later runs take from the store, and what they must not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import Plan, Rule, Tolerance
from aitune_lab.backends import registry
from aitune_lab.backends.base import Availability, BuildJob, Executable
from aitune_lab.errors import PlanError
from aitune_lab.measure.benchmark import Timing
from aitune_lab.runtime.installed import stats
from aitune_lab.schema import Candidate, Limits
from aitune_lab.store.store import Store
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.recall import Counts
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.session import read_journal, replay
from aitune_lab.tuning.tuner import Tuner

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


QUICK, SLOW, WRONG = scripted(latency_ms=0.5), scripted(latency_ms=0.6), scripted(latency_ms=0.1, error="scaled")
HOPELESS, REFUSED, FAILING = scripted(latency_ms=5.0), scripted(fails_at="refuse"), scripted(fails_at="build")
ALL = (QUICK, SLOW, WRONG, HOPELESS, REFUSED, FAILING)


def tuner_of(target: Any, *candidates: Candidate, data: Any = None, plan: Plan | None = None, **options: Any) -> Tuner:
    made = TuneOptions(backends=candidates or ALL, **{"meter": ScriptedMeter(), **options})
    return make_tuner(target, data if data is not None else [X, X[:2]], plan or Plan(), made)


def tune(target: Any, *candidates: Candidate, **options: Any) -> TuneResult:
    return run(tuner_of(target, *candidates, **options))


def story(result: TuneResult) -> Any:
    """Everything that a repeat must tell in the same words and figures."""
    return result.choices, {k: replace(t, build_seconds=0.0) for k, t in result.trials.items()}, result.end_to_end


def test_a_repeat_builds_and_measures_nothing_and_comes_to_the_same() -> None:
    first = tune(mlp())
    assert first.counts.builds == len(ALL)
    assert first.counts.measurements > 0
    assert first.counts.reused == 0
    model = mlp()
    second = tune(model)
    assert second.counts == Counts(builds=0, loads=1, measurements=0, reused=len(ALL) + 2)
    assert story(second) == story(first)
    assert second.choices[0].candidate == QUICK
    with torch.inference_mode():
        assert torch.equal(model(X), mlp()(X))
    assert stats(model).dispatched == 1


def test_a_run_says_beforehand_what_is_known() -> None:
    first, second = tune(mlp(), QUICK, SLOW), tune(mlp(), QUICK, SLOW)
    told = [next(e.data for e in result.events if e.kind == "run_started") for result in (first, second)]
    assert [data["known"] for data in told] == [0, 2]
    assert told[0]["estimated_seconds"] > told[1]["estimated_seconds"] == 0
    finished = [e.data["reused"] for e in second.events if e.kind == "trial_finished"]
    assert finished == [True, True]


def test_without_a_store_everything_is_done_again_and_nothing_is_kept(fresh_cache: Path) -> None:
    counts = [tune(mlp(), QUICK, store=None).counts for _ in range(2)]
    assert [c.builds for c in counts] == [1, 1]
    assert counts[1].measurements > 0
    assert not fresh_cache.exists()


def test_a_folder_of_ones_own_is_the_store(tmp_path: Path, fresh_cache: Path) -> None:
    tune(mlp(), QUICK, store=tmp_path / "mine")
    assert not fresh_cache.exists()
    assert tune(mlp(), QUICK, store=str(tmp_path / "mine")).counts.builds == 0


def test_an_unusable_cache_folder_is_said_and_costs_only_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AITUNE_LAB_CACHE_DIR", str(tmp_path / "file"))
    result = tune(mlp(), QUICK)
    assert result.choices[0].candidate == QUICK
    logs = [e.data["message"] for e in result.events if e.kind == "log"]
    assert any("nothing is kept for later runs" in message for message in logs)


def test_other_data_means_the_same_artifact_compared_and_measured_again() -> None:
    tune(mlp(), QUICK)
    other = tune(mlp(), QUICK, data=[X + 1, X[:2] + 1])
    assert (other.counts.builds, other.counts.loads) == (0, 1)
    assert other.counts.measurements > 0


def test_other_weights_mean_another_artifact() -> None:
    tune(mlp(), QUICK)
    assert tune(mlp(seed=1), QUICK).counts.builds == 1


class Doubling(nn.Module):
    def __init__(self, factor: float = 2.0, mode: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.factor, self.mode = factor, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.factor * self.linear(x)
        return y.tanh() if self.mode == "tanh" else y


def same_named(forward: Any) -> nn.Module:
    """Another class of the same name with another forward, as after editing a cell of a notebook."""
    cls = type("Doubling", (Doubling,), {"forward": forward, "__module__": __name__, "__qualname__": "Doubling"})
    module: nn.Module = cls().eval()
    return module


def squared(self: Any, x: torch.Tensor) -> torch.Tensor:
    return helper(self.linear(x))


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * x


@pytest.mark.parametrize(
    "change",
    [
        lambda: Doubling(factor=3.0).eval(),
        lambda: Doubling(mode="tanh").eval(),
        lambda: same_named(squared),
        lambda: same_named(lambda self, x: self.linear(x) + 1),
        lambda: Doubling().eval().requires_grad_(False).train(False).to(memory_format=torch.contiguous_format).double(),
    ],
    ids=["number", "string", "code", "lambda", "dtype"],
)
def test_a_module_that_computes_otherwise_is_built_anew(change: Any) -> None:
    dtype = next(change().parameters()).dtype
    tune(Doubling().eval(), QUICK, data=[X.to(dtype)] if dtype == torch.float32 else [X])
    again = tune(Doubling().eval(), QUICK, data=[X])
    assert again.counts.builds == 0
    changed = tune(change(), QUICK, data=[X.to(dtype)])
    assert changed.counts.builds == 1
    assert changed.choices[0].error_class == "exact"


def test_code_that_forward_calls_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(same_named(squared), QUICK, data=[X])
    assert tune(same_named(squared), QUICK, data=[X]).counts.builds == 0
    monkeypatch.setitem(globals(), "helper", lambda x: x * x + 1)
    assert tune(same_named(squared), QUICK, data=[X]).counts.builds == 1


class Counting(nn.Module):
    """Counts its calls, which is nothing that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.linear(x)
        return y


def test_state_that_calls_change_does_not_count() -> None:
    tune(Counting().eval(), QUICK)
    model = Counting().eval()
    for _ in range(3):
        model(X)
    assert tune(model, QUICK).counts.builds == 0


def test_the_same_module_can_be_tuned_again_while_it_is_tuned() -> None:
    model = mlp()
    first = tune(model)
    second = tune(model)
    assert second.counts.builds == second.counts.measurements == 0
    assert story(second) == story(first)


def test_a_pin_wants_a_full_measurement_of_what_was_stopped_after_a_rough_look() -> None:
    first = tune(mlp(), QUICK, HOPELESS)
    hopeless = next(t for t in first.trials.values() if t.candidate == HOPELESS)
    assert "rough look" in hopeless.reason
    pinned = tune(mlp(), plan=Plan((Rule("", "pin", HOPELESS),)))
    assert pinned.counts.builds == 0
    assert pinned.counts.measurements > 0
    assert pinned.choices[0].speedup == pytest.approx(0.2, rel=0.1)


def test_a_pin_that_accepts_errors_wants_latencies_of_what_was_refused() -> None:
    tune(mlp(), WRONG)
    with pytest.raises(PlanError):
        tune(mlp(), plan=Plan((Rule("", "pin", WRONG),)))
    accepted = tune(mlp(), plan=Plan((Rule("", "pin", WRONG, accept_error=True),)))
    assert accepted.choices[0].speedup == pytest.approx(10, rel=0.1)


def test_another_tolerance_is_judged_anew_from_the_same_artifact() -> None:
    tune(mlp(), WRONG)
    wide = tune(mlp(), WRONG, plan=Plan(tolerance=Tolerance(max_relative_error=1.0)))
    assert wide.choices[0].error_class == "within budget"
    assert wide.counts.builds == 0


def test_quick_figures_do_not_stand_for_full_ones() -> None:
    tune(mlp(), QUICK, plan=Plan(limits=Limits(search="quick")))
    assert tune(mlp(), QUICK).counts.measurements > 0


class Disturbed(ScriptedMeter):
    def __call__(self, contenders: Any, **options: Any) -> Timing:
        timing = super().__call__(contenders, **options)
        spoilt = {k: replace(m, disturbed="other load") for k, m in timing.measurements.items()}
        return Timing(spoilt, timing.blocks_ms)


def test_disturbed_measurements_are_not_reused() -> None:
    assert tune(mlp(), QUICK, meter=Disturbed()).choices[0].candidate.backend == "eager"
    calm = tune(mlp(), QUICK)
    assert calm.counts.builds == 0
    assert calm.counts.measurements > 0
    assert calm.choices[0].candidate == QUICK


def test_failures_are_remembered_until_a_retry() -> None:
    def layer() -> nn.Linear:
        """Without children: whether those are worth a trial is a matter of their share of the time."""
        torch.manual_seed(0)
        return nn.Linear(8, 4).eval()

    tune(layer(), REFUSED, FAILING)
    again = tune(layer(), REFUSED, FAILING)
    assert again.counts.builds == 0
    assert {t.status for t in again.trials.values()} >= {"refused", "failed"}
    # What refused is refused again, what failed is tried again.
    assert tune(layer(), REFUSED, FAILING, retry=True).counts == Counts(builds=1, reused=1)


def test_another_version_of_this_package_or_of_the_backends_library_builds_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tune(mlp(), QUICK).counts.builds == 1
    with monkeypatch.context() as patched:
        patched.setattr("aitune_lab.tuning.keys.__version__", "999.0")
        assert tune(mlp(), QUICK).counts.builds == 1
    with monkeypatch.context() as patched:
        newer = Availability(True, versions={"scripted": "999.0"})
        patched.setattr(ScriptedBackend, "available", classmethod(lambda cls: newer))
        assert tune(mlp(), QUICK).counts.builds == 1
    assert tune(mlp(), QUICK).counts.builds == 0


@pytest.mark.parametrize(
    ("name", "libraries"),
    [
        ("openvino", {"openvino"}),
        ("inductor_aot", {"torch"}),
        ("inductor", {"torch"}),
        ("onnxruntime", {"onnxruntime", "onnx", "onnxscript"}),
        ("torchao", {"torchao", "torch"}),
    ],
)
def test_backends_name_the_versions_that_their_artifacts_depend_on(name: str, libraries: set[str]) -> None:
    assert set(registry.get(name).available().versions) >= libraries


def test_a_damaged_artifact_is_built_again(fresh_cache: Path) -> None:
    tune(mlp(), QUICK)
    (file,) = (fresh_cache / "artifacts").glob("*/files/scripted.txt")
    file.write_text("garbage")
    result = tune(mlp(), QUICK)
    assert (result.counts.builds, result.counts.measurements) == (1, 0)
    assert result.choices[0].candidate == QUICK


class Moody(ScriptedBackend):
    """Answers as it was told last, whatever was built."""

    name = "moody"
    answer = "ok"
    builds_right = True

    def _executable(self, job: BuildJob) -> Executable:
        self.config = replace(self.config, error=type(self).answer)
        return super()._executable(job)

    def build(self, job: BuildJob) -> Executable:
        if type(self).builds_right:
            type(self).answer = "ok"
        return super().build(job)


@pytest.fixture
def moody() -> Iterator[Candidate]:
    registry.register(Moody)
    Moody.answer, Moody.builds_right = "ok", True
    yield Moody(latency_ms=0.5).candidate()
    registry.unregister("moody")


def test_what_is_loaded_is_compared_again_and_built_anew_if_it_answers_otherwise(moody: Candidate) -> None:
    tune(mlp(), moody)
    Moody.answer = "scaled"
    model = mlp()
    result = tune(model, moody)
    assert (result.counts.builds, result.counts.loads) == (1, 1)
    assert result.choices[0].candidate == moody
    with torch.inference_mode():
        assert torch.equal(model(X), mlp()(X))


def test_what_answers_otherwise_even_if_built_anew_does_not_win(moody: Candidate) -> None:
    tune(mlp(), moody, SLOW)
    Moody.answer, Moody.builds_right = "scaled", False
    result = tune(mlp(), moody, SLOW)
    assert result.choices[0].candidate == SLOW
    assert "answers otherwise" in result.choices[0].losers[moody.label]


class Twice:
    """Two modules of one content, one after the other."""

    def __init__(self) -> None:
        self.first, self.second = mlp()[0], mlp()[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x)[:, :8])
        return y


def test_two_modules_of_one_content_share_an_artifact() -> None:
    result = tune(Twice(), QUICK)
    assert [choice.candidate for choice in result.choices] == [QUICK, QUICK]
    assert (result.counts.builds, result.counts.loads) == (1, 1)


def test_the_journal_of_a_run_is_kept_and_replays_into_its_state() -> None:
    tuner = tuner_of(mlp())
    events = list(tuner.steps())
    (path,) = Store().journals()
    assert path == tuner.journal
    assert replay(read_journal(path)) == replay(events)
    assert replay(events).status == "finished"


def test_only_losers_are_freed_during_a_run() -> None:
    closed: list[str] = []

    class Watched(ScriptedBackend):
        name = "scripted"

        def _executable(self, job: BuildJob) -> Executable:
            executable = super()._executable(job)
            executable.close = lambda: closed.append(job.candidate.label)
            return executable

    from aitune_lab.backends import registry

    registry.register(Watched)
    tuner = tuner_of(mlp(), SLOW, QUICK, scripted(latency_ms=0.55))
    for event in tuner.steps():
        if event.kind == "trial_finished":
            racing = [b for u in tuner._units for r in u.races for b in r.built.values() if b.installed is not None]
            assert len(racing) == 1
    assert QUICK.label not in closed
    assert sorted(closed) == sorted([SLOW.label, scripted(latency_ms=0.55).label])


_KILLED_IN_A_TRIAL = """
import os, signal, sys
import torch
from aitune_lab.backends import registry
from aitune_lab.schema import Plan
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

class Native(ScriptedBackend):
    name, isolation = "native", "process"
    def build(self, job):
        if sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(job)

registry.register(Native)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).eval()
options = TuneOptions(
    backends=(Native(latency_ms=0.5).candidate(),), meter=ScriptedMeter(), isolation="off", retry=sys.argv[1] == "retry"
)
result = run(make_tuner(model, [torch.ones(2, 8)], Plan(), options))
trial = next(t for t in result.trials.values() if t.candidate.backend == "native")
print(trial.status, "|", trial.reason)
"""


def test_a_candidate_that_a_process_did_not_survive_is_not_tried_again_until_a_retry() -> None:
    def go(how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _KILLED_IN_A_TRIAL, how], capture_output=True, text=True, check=False
        )

    assert go("die").returncode == -9
    skipped = go("live").stdout
    assert skipped.startswith("crashed | not tried: its earlier trial never finished, as the process ")
    assert "retry=True" in skipped
    assert go("retry").stdout.startswith("ok |")
    assert go("live").stdout.startswith("ok |")
