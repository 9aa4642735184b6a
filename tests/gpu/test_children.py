"""Candidates built in child processes that start CUDA themselves: reused, ended when something goes wrong, loaded here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from common import CUDA, DIM, GRAPH, INDUCTOR_GRAPH, Chain, job_of, on_gpu, pinned, quiet, random
from gpu_faults import GpuFaultsBackend, faulty
from torch import nn

from aitune_lab import stats, unwrap
from aitune_lab.backends import registry
from aitune_lab.backends.tensorrt import TensorRTBackend
from aitune_lab.errors import ChildFailed, Refused
from aitune_lab.isolation import BuildLimits, Children
from aitune_lab.schema import Candidate, Event, Plan, Rule
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.tuner import TuneOptions

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    registry.register(GpuFaultsBackend)
    yield
    registry.unregister(GpuFaultsBackend.name)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    made = Children(tmp_path_factory.mktemp("children"), limits=BuildLimits(seconds=180.0), gpu=True)
    yield made
    made.close()


def running(children: Children) -> list[psutil.Process]:
    assert children._helper is not None
    return psutil.Process(children._helper.process.pid).children(recursive=True)


def works(children: Children, module: nn.Module) -> str:
    """Build something sound and call it here; gives its notes, which name the child."""
    made = children.build(job_of(module, random(4, DIM), candidate=faulty()))
    x = random(4, DIM)
    torch.testing.assert_close(made.executable.call(x), module(x))
    assert made.isolated
    return made.executable.notes[0]


def test_what_a_child_built_is_loaded_here_and_dispatched() -> None:
    module = on_gpu(Chain(4))
    result = pinned(module, [random(4, DIM), random(9, DIM)], faulty(), isolation="all")
    (trial,) = [t for t in result.trials.values() if t.candidate == faulty()]
    assert trial.isolated
    assert f"built by {os.getpid()}" not in trial.notes
    x = random(4, DIM)
    assert torch.equal(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 1


def test_a_graph_is_captured_and_replayed_in_the_child_first(children: Children) -> None:
    module = on_gpu(Chain(4))
    made = children.build(job_of(module, random(4, DIM), candidate=faulty(cuda_graph=True)))
    assert made.isolated
    assert any("CUDA graphs at" in note for note in made.executable.notes)
    x = random(4, DIM)
    torch.testing.assert_close(made.executable.call(x)[0], module(x))
    made.executable.close()


COMPILED_TWICE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from common import DIM, Chain, job_of, on_gpu, random
from torch._dynamo.utils import counters
from aitune_lab.isolation import BuildLimits, Children
from aitune_lab.tuning.candidates import candidate_of_label

module, x = on_gpu(Chain(4)), random(4, DIM)
children = Children(Path(sys.argv[2]), limits=BuildLimits(seconds=180.0), gpu=True)
made = children.build(job_of(module, x, candidate=candidate_of_label(sys.argv[3])))
torch.testing.assert_close(made.executable.call(x)[0], module(x), rtol=2e-2, atol=2e-2)
made.executable.close()
children.close()
# Torch keeps Inductor's graphs by themselves or within those of AOTAutograd, depending on its version.
found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
missed = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
print("isolated" if made.isolated else "here", "found" if found else "not found", missed)
"""


@pytest.mark.parametrize("label", ["inductor[cuda graph]", "inductor[float16, cuda graph]"])
def test_inductor_compiles_in_the_child_and_finds_it_here(label: str, tmp_path: Path) -> None:
    # In a process of its own: what else ran in this one may have changed settings that torch's caches go by.
    command = [sys.executable, "-c", COMPILED_TWICE, str(Path(__file__).parent), str(tmp_path), label]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["isolated found 0"], done.stdout + done.stderr


def test_a_child_serves_builds_and_refusals_in_turn(children: Children) -> None:
    module = on_gpu(Chain(2))
    first = works(children, module)
    with pytest.raises(Refused, match=r"^it cannot be kept$"):
        children.build(job_of(module, random(4, DIM), candidate=faulty("refuse")))
    with pytest.raises(Refused, match="changes inputs in place"):
        children.build(job_of(_InPlace(), random(4, DIM), candidate=faulty(cuda_graph=True)))
    assert works(children, module) == first


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


FAULTS: list[tuple[str, str, str]] = [
    ("assert", "^failed to run: .*CUDA error", "raised"),
    ("abort", r"^the build aborted \(SIGABRT\)", "ended"),
    ("hang", "^stopped: the build went over the time limit of 3 s$", "time"),
]


@pytest.mark.parametrize(("fault", "reason", "cause"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_ends_the_child_and_nothing_else(children: Children, fault: str, reason: str, cause: str) -> None:
    module = on_gpu(Chain(2))
    before = works(children, module)  # also: the child has started, so that the time limit counts the build alone
    limits = BuildLimits(seconds=3.0) if fault == "hang" else None
    with pytest.raises(ChildFailed, match=reason) as caught:
        children.build(job_of(module, random(4, DIM), random(4, DIM), candidate=faulty(fault)), limits=limits)
    assert caught.value.cause == cause
    assert running(children) == []
    assert works(children, module) != before
    x = random(4, DIM)
    torch.testing.assert_close(module(x), Chain.forward(module, x))


def test_a_child_that_lost_the_gpu_is_not_kept(children: Children) -> None:
    module = on_gpu(Chain(2))
    before = works(children, module)
    with pytest.raises(Refused, match="the GPU is lost"):
        children.build(job_of(module, random(4, DIM), candidate=faulty("spoil")))
    assert works(children, module) != before


def test_after_a_device_assert_in_a_child_the_run_goes_on() -> None:
    module = on_gpu(Chain(4))
    options = TuneOptions(meter=ScriptedMeter(), end_to_end=False, backends=(faulty("assert"), GRAPH), isolation="all")
    result = run(make_tuner(module, [random(4, DIM), random(4, DIM)], Plan(), options))
    by_candidate = {trial.candidate: trial for trial in result.trials.values()}
    assert by_candidate[faulty("assert")].status == "failed"
    assert "CUDA error" in by_candidate[faulty("assert")].reason
    assert by_candidate[GRAPH].status == "ok"
    x = random(4, DIM)
    torch.testing.assert_close(quiet(module, x), Chain.forward(module, x), rtol=1e-3, atol=1e-4)


def test_what_is_forked_can_start_cuda(tmp_path: Path) -> None:
    # The helper has imported the compiler by then. Had that started CUDA, no fork of it could use the GPU.
    made = Children(tmp_path / "own", limits=BuildLimits(seconds=180.0))
    try:
        module = nn.Linear(4, 4).eval()
        job = job_of(module, torch.ones(2, 4), candidate=faulty("start CUDA"))
        built = made.build(job)
        assert built.isolated
        assert "CUDA was started: False" in built.executable.notes
    finally:
        made.close()


def test_weights_and_samples_arrive_on_their_device(children: Children) -> None:
    module = on_gpu(Chain(2), torch.bfloat16)
    module.register_buffer("table", torch.arange(6, device=CUDA).view(2, 3).t())
    built = children.build(job_of(module, random(4, DIM, dtype=torch.bfloat16), candidate=faulty()))
    assert built.isolated
    x = random(4, DIM, dtype=torch.bfloat16)
    torch.testing.assert_close(built.executable.call(x), module(x))


def test_a_changed_weight_is_sent_again(children: Children) -> None:
    module = on_gpu(Chain(2))
    works(children, module)
    with torch.no_grad():
        module.layers[0].weight.mul_(1.5)
    works(children, module)
    job = job_of(module, random(4, DIM), candidate=INDUCTOR_GRAPH)
    made = children.build(replace(job, candidate=Candidate("inductor", (("freezing", True),), cuda_graph=True)))
    x = random(4, DIM)
    torch.testing.assert_close(made.executable.call(x)[0], module(x), rtol=1e-3, atol=1e-3)
    made.executable.close()


HYGIENE = """
import gc, sys, warnings
import torch
from torch import nn
import aitune_lab as ait
from aitune_lab.schema import Candidate, Event, Plan, Rule
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.tuner import TuneOptions

warnings.simplefilter("ignore")


def used():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def held():  # memory that torch has reserved, by pool and stream: what to look at if it grows
    found = {}
    for segment in torch.cuda.memory_snapshot():
        place = tuple(segment.get("segment_pool_id", ())), segment["stream"]
        reserved, active = found.get(place, (0, 0))
        found[place] = reserved + (segment["total_size"] >> 10), active + (segment["active_size"] >> 10)
    tensors = sum(isinstance(x, torch.Tensor) and x.is_cuda for x in gc.get_objects())
    return tensors, [f"pool {p} stream {s}: {r} KiB, {a} in use" for (p, s), (r, a) in found.items()]


def once(isolation):
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).eval().cuda()
    data = [torch.randn(4096, 512, device="cuda") for _ in range(2)]
    wanted = (Candidate("inductor"), Candidate("inductor", cuda_graph=True), Candidate("eager", cuda_graph=True))
    options = TuneOptions(meter=ScriptedMeter(), end_to_end=False, isolation=isolation, backends=wanted, store=None)
    result = run(make_tuner(module, data, Plan(), options))
    said = [(t.candidate.label, t.status, t.isolated, t.reason) for t in result.trials.values()]
    with torch.no_grad():
        module(data[0])
    ait.unwrap(module)
    return said


for number in range(3):
    said = once(sys.argv[1])
    print("used", used(), said, flush=True)
    print("held", *held(), flush=True)
"""


@pytest.mark.alone
@pytest.mark.parametrize("isolation", ["all", "off"])
def test_tuning_again_takes_no_more_gpu_memory(isolation: str) -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", HYGIENE, isolation],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("used ")]
    figures = [int(line.split()[1]) for line in lines]
    assert len(figures) == 3, done.stdout + done.stderr[-3000:]
    assert figures[-1] - figures[0] <= 16, done.stdout
    assert ("'inductor', 'ok', True" in done.stdout) == (isolation == "all"), done.stdout


# --- TensorRT

TENSORRT = TensorRTBackend.available()
needs_tensorrt = pytest.mark.skipif(not TENSORRT.ok, reason=TENSORRT.reason or "available")


def engine_candidate() -> Candidate:
    return TensorRTBackend(optimization_level=0, static_engines=1).candidate()


def builds_an_engine(event: Event) -> bool:
    return event.kind == "trial_progress" and "engine 1 of" in str(event.data.get("doing"))


@needs_tensorrt
def test_tensorrt_builds_in_a_child_once_and_says_what_it_does(tmp_path: Path) -> None:
    module, x = on_gpu(Chain(4)), random(4, DIM)
    result = pinned(module, [x], engine_candidate(), isolation="all", store=tmp_path)
    (trial,) = [t for t in result.trials.values() if t.candidate == engine_candidate()]
    assert trial.status == "ok", trial.reason
    assert trial.isolated
    assert result.counts.builds >= 1
    assert any(map(builds_an_engine, result.events)), [e.data for e in result.events if e.kind == "trial_progress"]
    for _ in range(2):
        torch.testing.assert_close(quiet(module, x), Chain.forward(module, x), rtol=1e-3, atol=1e-3)
        assert stats(module).dispatched == 1
        unwrap(module)
        again = pinned(module, [x], engine_candidate(), isolation="all", store=tmp_path)
        assert again.counts.builds == 0
        assert again.choices[0].candidate == engine_candidate()


@needs_tensorrt
def test_a_cancel_while_tensorrt_builds_in_a_child_leaves_nothing_behind() -> None:
    module, x = on_gpu(Chain(8)), random(4, DIM)
    plan = Plan(rules=(Rule("", "pin", candidate=engine_candidate()),))
    options = TuneOptions(meter=ScriptedMeter(), end_to_end=False, isolation="all", store=None)
    tuner = make_tuner(module, [x], plan, options)
    building, own = threading.Event(), psutil.Process()
    known = {process.pid for process in own.children(recursive=True)}
    started: list[psutil.Process] = []

    def cancel() -> None:
        building.wait()
        tuner.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    kinds = []
    for event in tuner.steps():
        kinds.append(event.kind)
        if builds_an_engine(event) and not started:
            started = [process for process in own.children(recursive=True) if process.pid not in known]
            building.set()
            canceller.join()
    building.set()
    canceller.join()
    assert started, "no progress of a build was seen"
    assert kinds[-1] == "run_cancelled"
    assert not {"trial_finished", "trial_failed"} & set(kinds)
    psutil.wait_procs(started, timeout=60)
    assert all(map(has_ended, started))
    assert "forward" not in vars(module)
    assert torch.equal(module(x), Chain.forward(module, x))


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
