"""TensorRT's engines on a card: what they take and give, on which streams, from how many threads, and what is kept."""

from __future__ import annotations

import copy
import functools
import gc
import os
import random as shuffling
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from common import CUDA, DIM, Chain, Function, Net, job_of, on_gpu, quiet, random, untouched, used_mib
from torch import nn

import aitune_lab as ait
from aitune_lab.backends.base import Executable
from aitune_lab.backends.tensorrt import TensorRTBackend, TensorRTConfig, backend as backend_module
from aitune_lab.backends.tensorrt.builder import build_plan
from aitune_lab.backends.tensorrt.engine import MAX_CONTEXTS, Engine, _Context as Context
from aitune_lab.backends.tensorrt.flavor import FLAVORS, require
from aitune_lab.backends.tensorrt.spec import EngineSpec
from aitune_lab.capture.structure import flatten, is_tensor
from aitune_lab.errors import Refused
from aitune_lab.runtime.cuda_graph import MAX_GRAPHS, capturing, with_cuda_graph
from aitune_lab.runtime.variant import build, load
from aitune_lab.schema import Candidate, Node, Plan, Rule, Signature, TensorLeaf
from aitune_lab.testing import BackendContract
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.tuner import TuneOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TensorRTBackend.available().ok, reason=TensorRTBackend.available().reason or "available"),
]
TRT = Candidate("tensorrt")
GRAPH = Candidate("tensorrt", cuda_graph=True)
THREADS, CALLS = 8, 500
MIB = 2**20


class Pair(nn.Module):
    """A module around a function of two inputs and a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 16, requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(self, x, y)


@functools.cache
def shared() -> Path:
    """Timings of kernels for all builds of these tests."""
    return Path(tempfile.mkdtemp(prefix="aitune-lab-timings-"))


def made(module: nn.Module, *calls: Any, graph: bool = False, declared: Any = None, **options: Any) -> Executable:
    quick = {"optimization_level": 0, **options}  # builds in a few seconds, and is as right
    candidate = replace(TensorRTBackend(**quick).candidate(), cuda_graph=graph)
    return build(replace(job_of(module, *calls, candidate=candidate, declared=declared), shared=shared()))


def leaves(value: Any) -> list[torch.Tensor]:
    return [x for x in flatten(value).leaves if is_tensor(x)]


def check(executable: Executable, module: nn.Module, *tensors: torch.Tensor) -> None:
    with torch.no_grad():
        want, got = leaves(module(*[t.clone() for t in tensors])), executable.call(*tensors)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def integers(*shape: int, high: int = DIM) -> torch.Tensor:
    return torch.randint(0, high, shape, device=CUDA)


def pinned(module: nn.Module, data: Any, candidate: Candidate, **options: Any) -> Any:
    plan = Plan(rules=(Rule("", "pin", candidate=candidate),))
    return run(make_tuner(module, data, plan, TuneOptions(meter=ScriptedMeter(), end_to_end=False, **options)))


# --- what goes in and comes out

SHAPES: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "floats": (lambda m, x, y: (x @ m.weight + y).relu(), lambda: [random(4, DIM), random(4, DIM)]),
    "int64 indices": (lambda m, x, y: m.weight[x] + y, lambda: [integers(4), random(4, DIM)]),
    "int64 out": (lambda m, x, y: (x * 3 + y, x.argmax(-1)), lambda: [integers(4, 8), integers(4, 8)]),
    "large int64": (lambda m, x, y: (x + y, x - y), lambda: [integers(4, high=1 << 40), integers(4, high=1 << 40)]),
    "int32": (lambda m, x, y: x + y, lambda: [integers(4).int(), integers(4).int()]),
    "bool": (lambda m, x, y: (m.weight[:4].where(x > 0, y), x > y), lambda: [random(4, DIM), random(4, DIM)]),
    "bool in": (lambda m, x, y: y.masked_fill(x, 0.0) @ m.weight, lambda: [random(4, DIM) > 0, random(4, DIM)]),
    "scalar": (lambda m, x, y: (x @ m.weight * y, y + 1), lambda: [random(4, DIM), torch.tensor(0.5, device=CUDA)]),
    "unused": (lambda m, x, y: x @ m.weight, lambda: [random(4, DIM), random(3)]),
    "passed through": (lambda m, x, y: (x, x @ m.weight, y), lambda: [random(4, DIM), random(3)]),
    "twice the same": (
        lambda m, x, y: [z := (x @ m.weight).tanh() + y, z, z * 2],
        lambda: [random(4, DIM), random(DIM)],
    ),
    "empty in": (lambda m, x, y: torch.cat([x, y]) @ m.weight, lambda: [random(0, DIM), random(4, DIM)]),
    "empty out": (lambda m, x, y: (x @ m.weight, y[:0] * 2), lambda: [random(4, DIM), random(4, DIM)]),
    "half": (lambda m, x, y: (x @ m.weight.half()).float() + y, lambda: [random(4, DIM).half(), random(4, DIM)]),
    "bfloat16": (lambda m, x, y: x * 2 + y, lambda: [random(4, DIM).bfloat16(), random(4, DIM).bfloat16()]),
    "a constant": (lambda m, x, y: (m.weight.clone(), x + y), lambda: [random(4, DIM), random(4, DIM)]),
}


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_goes_in_and_comes_out(name: str, graph: bool) -> None:
    function, inputs = SHAPES[name]
    module = on_gpu(Pair(function))
    executable = made(module, tuple(inputs()), graph=graph)
    side = torch.cuda.Stream()
    for _ in range(2):
        check(executable, module, *inputs())
        with torch.cuda.stream(side):
            check(executable, module, *inputs())
    executable.close()


def test_views_that_are_not_aligned_or_not_contiguous() -> None:
    module = on_gpu(Chain(2))
    executable = made(module, random(4, DIM))
    for x in (
        random(4 * DIM + 1)[1:].view(4, DIM),
        random(DIM, 4).t(),
        random(8, DIM)[::2],
        random(1, DIM).expand(4, DIM),
    ):
        check(executable, module, x)


def test_outputs_are_the_callers_and_inputs_may_go_at_once() -> None:
    module = on_gpu(Chain(4))
    executable = made(module, random(64, DIM))
    inputs = [random(64, DIM) for _ in range(20)]
    want = [module(x) for x in inputs]
    got = [executable.call(x.clone())[0] for x in inputs]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_work_queued_before_and_after_is_in_order() -> None:
    module = on_gpu(Chain(4))
    executable = made(module, random(256, DIM))
    big = random(4096, 4096)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream), torch.no_grad():
            x = random(256, DIM)
            want = module(x * 2).sum()
            stream.synchronize()
            for _ in range(10):
                late = x * 1
                for _ in range(5):
                    big @ big  # so that what comes next is still to be done when the engine is called
                late.mul_(2)
                got = executable.call(late)[0].sum()
                late.zero_()
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-2)


def test_shapes_that_depend_on_values_are_right_or_refused() -> None:
    module = on_gpu(Function(lambda self, x: x[x > 0] * 2))
    options = TuneOptions(meter=ScriptedMeter(), backends=(TRT,), end_to_end=False)
    run(make_tuner(module, [random(4, DIM), random(4, DIM)], Plan(), options))
    for _ in range(3):
        x = random(4, DIM)
        assert torch.equal(quiet(module, x), x[x > 0] * 2)


def onnx_engine(tmp_path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], values: Any = None) -> Engine:
    """An engine of a small ONNX graph."""
    from onnx import TensorProto, helper, save

    kinds = {torch.float32: TensorProto.FLOAT, torch.int64: TensorProto.INT64}
    ends = [[helper.make_tensor_value_info(name, kinds[d], list(s)) for name, d, s in of] for of in (inputs, outputs)]
    graph = helper.make_graph(nodes, "graph", *ends)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "model.onnx")
    found = tuple(TensorLeaf(name, str(d).removeprefix("torch."), tuple(s), "cuda:0") for name, d, s in inputs)
    signature, spec = Signature("forward", Node("leaf"), found), EngineSpec("static")
    trt = require(FLAVORS["tensorrt"])
    plan = build_plan(
        trt, tmp_path / "model.onnx", signature, spec, TensorRTConfig(), progress=lambda p, f: None, values=values
    )
    return Engine(trt, plan, spec, signature, CUDA)


def test_an_output_whose_shape_depends_on_values_is_allocated_while_it_runs(tmp_path: Path) -> None:
    from onnx import helper

    nodes = [helper.make_node("NonZero", ["input_0"], ["output_0"])]
    engine = onnx_engine(tmp_path, nodes, [("input_0", torch.float32, (4, 8))], [("output_0", torch.int64, (2, "n"))])
    for _ in range(3):
        x = random(4, 8).relu()
        assert torch.equal(engine([x])[0], x.nonzero().t())
        with torch.cuda.stream(torch.cuda.Stream()):
            assert engine([torch.zeros_like(x)])[0].shape == (2, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="graph is empty|Graph is empty"), torch.cuda.graph(graph):
        with pytest.raises(Refused, match="depends on values"):
            engine([x])


def test_an_input_that_decides_over_a_shape_is_read_on_the_host(tmp_path: Path) -> None:
    from onnx import helper

    nodes = [helper.make_node("Reshape", ["input_0", "input_1"], ["output_0"])]
    inputs = [("input_0", torch.float32, (4, 8)), ("input_1", torch.int64, (2,))]
    outputs = [("output_0", torch.float32, ("a", "b"))]
    engine = onnx_engine(tmp_path, nodes, inputs, outputs, lambda number: [[2, 2], [4, 8], [16, 16]])
    x = random(4, 8)
    for shape in ((4, 8), (8, 4), (2, 16), (4, 8)):
        assert torch.equal(engine([x, torch.tensor(shape, device=CUDA)])[0], x.reshape(shape))


# --- threads, shapes, memory


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "graph"])
def test_threads_on_two_streams_get_what_each_gets_alone(graph: bool) -> None:
    module = on_gpu(Chain(4))
    executable = made(module, *[random(n, DIM) for n in (1, 4, 8)], graph=graph, static_engines=1)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [random(1 + i % 4, DIM) for i in range(THREADS)]
    want = [executable.call(x)[0].clone() for x in inputs]
    for x, y in zip(inputs, want, strict=True):
        torch.testing.assert_close(y, module(x), rtol=1e-3, atol=1e-3)
    torch.cuda.synchronize()
    wrong, start = [0] * THREADS, threading.Barrier(THREADS)

    def work(i: int) -> None:
        start.wait()
        with torch.cuda.stream(streams[i % 2]), torch.no_grad():
            for _ in range(CALLS):
                got = executable.call(inputs[i])[0]
                wrong[i] += not torch.allclose(got, want[i], rtol=1e-3, atol=1e-3)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * THREADS
    executable.close()


@pytest.mark.alone
def test_two_hundred_shapes_in_bounded_memory() -> None:
    module = on_gpu(Chain(4))
    executable = made(module, random(1, DIM), random(64, DIM), random(200, DIM), static_engines=1)
    inputs = [random(size, DIM) for size in range(1, 201)]
    want = [module(x) for x in inputs]  # for which cuBLAS loads kernels: before anything is measured
    for x in (inputs[0], inputs[-1]):
        check(executable, module, x)
    torch.cuda.empty_cache()
    before = used_mib()
    for x, y in zip(inputs, want, strict=True):
        torch.testing.assert_close(executable.call(x)[0], y, rtol=1e-3, atol=1e-3)
    torch.cuda.empty_cache()
    assert used_mib() - before <= 64
    assert executable.uncovered is not None
    assert executable.uncovered() == 0
    executable.close()


def test_sizes_outside_the_range_run_the_original() -> None:
    module = on_gpu(Chain(2))
    executable = made(module, random(2, DIM), random(8, DIM), static_engines=1, dynamic_engine=False)
    check(executable, module, random(5, DIM))
    assert executable.uncovered is not None
    assert executable.uncovered() == 1


def test_contexts_are_bounded() -> None:
    module = on_gpu(Chain(2))
    executable = made(module, random(4, DIM))
    streams = [torch.cuda.Stream() for _ in range(4 * MAX_CONTEXTS)]
    x, results = random(4, DIM), []
    torch.cuda.synchronize()
    for stream in [*streams, *streams]:
        with torch.cuda.stream(stream):
            results.append(executable.call(x)[0])
    torch.cuda.synchronize()
    for y in results:
        torch.testing.assert_close(y, module(x), rtol=1e-3, atol=1e-3)
    (engine,) = engines_of(executable)
    assert len(engine._contexts) == MAX_CONTEXTS


def engines_of(executable: Executable) -> list[Engine]:
    engines: list[Engine] = executable.call.__self__.engines  # type: ignore[attr-defined]
    return engines


class Wide(nn.Module):
    """Small inputs and outputs, large values between them: nearly all of its memory is scratch memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(image))
        return self.head(torch.relu(self.second(y) + y).amax((2, 3)))


def images(count: int) -> torch.Tensor:
    """Images of different brightness, so that no two calls have similar outputs."""
    return random(count, 3, 128, 128) * (4 * torch.rand(count, 1, 1, 1, device=CUDA))


@pytest.mark.alone
def test_graphs_share_the_scratch_memory_of_their_pool() -> None:
    module = on_gpu(Wide())
    calls = [images(n + 1) for n in range(MAX_GRAPHS)]
    candidate = TensorRTBackend(static_engines=1, optimization_level=0).candidate()
    job = replace(job_of(module, *calls, candidate=candidate), shared=shared())
    plain, exact = build(job), copy.deepcopy(module).double()  # torch's own convolutions may use TensorFloat-32
    for x in calls:
        torch.testing.assert_close(plain.call(x)[0], exact(x.double()).float(), rtol=1e-3, atol=1e-3)
    engines = engines_of(plain)
    assert len(engines) == 2
    scratch = max(engine.scratch_bytes for engine in engines)
    assert scratch >= 64 * MIB  # or nothing below would show whether it is shared
    assert plain.memory_bytes == scratch + sum(engine.plan_bytes for engine in engines)

    # What a context holds beside scratch memory can't be shared.
    before, context_mib = used_mib(), 0.0
    for engine in engines:
        spare = [engine._new_context() for _ in range(4)]
        context_mib = max(context_mib, (used_mib() - before) / 4)
        del spare
    torch.cuda.empty_cache()
    before = used_mib()
    graphs = with_cuda_graph(plain, job)
    torch.cuda.empty_cache()
    grown = used_mib() - before
    inputs_mib = sum(x.numel() * x.element_size() for x in calls) / MIB
    print(
        f"\n{MAX_GRAPHS} graphs took {grown:.0f} MiB: scratch {scratch / MIB:.0f}, static inputs {inputs_mib:.0f}, "
        f"a context {context_mib:.0f} MiB; counted {(graphs.memory_bytes - plain.memory_bytes) / MIB:.0f} MiB"
    )
    assert len(graphs.call.__self__.captured) == MAX_GRAPHS, graphs.notes  # type: ignore[attr-defined]
    assert graphs.memory_bytes - plain.memory_bytes <= 2 * scratch + 2 * inputs_mib * MIB
    assert grown <= 2 * scratch / MIB + 2 * inputs_mib + MAX_GRAPHS * context_mib + 64

    want = [plain.call(x)[0] for x in calls]
    torch.cuda.synchronize()
    streams, start = [torch.cuda.Stream(), torch.cuda.Stream()], threading.Barrier(4)
    wrong: list[tuple[int, int]] = []

    def work(number: int) -> None:
        order = shuffling.Random(number)
        start.wait()
        with torch.cuda.stream(streams[number % 2]), torch.no_grad():
            for turn in range(6):
                shapes = order.sample(range(MAX_GRAPHS), MAX_GRAPHS)
                call = plain.call if turn % 3 == 2 else graphs.call  # uncaptured calls have scratch memory of their own
                results = [(n, call(calls[n])[0]) for n in shapes]
                wrong.extend((number, n) for n, y in results if not torch.allclose(y, want[n], rtol=1e-3, atol=1e-3))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    graphs.close()


def test_the_context_of_a_graph_goes_with_it() -> None:
    module = on_gpu(Chain(4))
    calls = [random(n + 1, DIM) for n in range(12)]
    candidate = TensorRTBackend(static_engines=0, optimization_level=0).candidate()
    job = replace(job_of(module, *calls, candidate=candidate), shared=shared())
    before = contexts()
    graphs = with_cuda_graph(build(job), job, limit=2)
    with capturing():
        for x in calls:  # each takes another one's place
            check(graphs, module, x)
    assert len(graphs.call.__self__.captured) == 2  # type: ignore[attr-defined]
    assert contexts() - before <= 2 + MAX_CONTEXTS
    for x in calls:
        check(graphs, module, x)
    graphs.close()
    del graphs
    assert contexts() == before


def contexts() -> int:
    gc.collect()
    return sum(type(x) is Context for x in gc.get_objects())  # proxies among them warn when asked for their class


# --- precisions, options, weights


def test_float32_stays_float32_and_tf32_is_asked_for() -> None:
    module = on_gpu(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))
    x = random(64, 1024)
    want = copy.deepcopy(module).double()(x.double())

    def off(**options: Any) -> float:
        got = made(module, x, **options).call(x)[0]
        return float((got - want).norm() / want.norm())

    assert off() < 2e-6
    assert 1e-5 < off(tf32=True) < 2e-3


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_lower_precisions_of_a_float32_module(precision: str) -> None:
    module = on_gpu(Net())
    x = random(2, 3, 32, 32)
    for options in ({}, {"keep_float32": "head"}):
        base = TensorRTBackend(**options).candidate()
        executable = build(replace(job_of(module, x, candidate=replace(base, precision=precision)), shared=shared()))
        got, want = executable.call(x), leaves(module(x))
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"optimization_level": 1},
        {"workspace_bytes": 1 << 26},
        {"hardware_compatible": True},
        {"version_compatible": True},
        {"keep_onnx": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options: dict[str, Any]) -> None:
    module = on_gpu(Net())
    check(made(module, random(2, 3, 16, 16), **options), module, random(2, 3, 16, 16))


def test_a_refittable_engine_takes_changed_weights() -> None:
    module = on_gpu(Net())
    executable = made(module, random(2, 3, 16, 16), refittable=True)
    check(executable, module, random(2, 3, 16, 16))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.7)
        module.norm.running_mean.add_(0.3)
    assert executable.refresh is not None
    assert executable.refresh()
    check(executable, module, random(2, 3, 16, 16))


def test_changed_weights_run_the_original() -> None:
    module = on_gpu(Chain(4))
    plain = untouched(module)
    pinned(module, [random(4, DIM)], GRAPH)
    x = random(4, DIM)
    torch.testing.assert_close(quiet(module, x), plain(x), rtol=1e-3, atol=1e-3)
    assert ait.stats(module).dispatched == 1
    for m in (module, plain):
        m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()})
    torch.testing.assert_close(quiet(module, x), plain(x), rtol=1e-3, atol=1e-3)
    assert ait.stats(module).dispatched == 1


# --- what is kept


def test_a_timing_cache_makes_the_next_build_cheaper(tmp_path: Path) -> None:
    module, x, seconds = on_gpu(Net()), random(8, 3, 64, 64), []
    for _ in range(2):
        start = time.perf_counter()
        build(replace(job_of(module, x, candidate=TRT), shared=tmp_path)).close()
        seconds.append(time.perf_counter() - start)
        (cache,) = tmp_path.glob("*.timing")
        assert cache.stat().st_size > 100
    print(f"\nfirst build {seconds[0]:.1f} s, with timing cache {seconds[1]:.1f} s, {cache.stat().st_size} bytes")
    content = cache.read_bytes()
    cache.write_bytes(b"damaged" * 10)
    check(build(replace(job_of(module, x, candidate=TRT), shared=tmp_path)), module, x)
    assert len(cache.read_bytes()) >= len(content) // 2


def test_a_second_tune_builds_nothing(tmp_path: Path) -> None:
    module = on_gpu(Chain(4))
    data = [random(4, DIM)]
    assert pinned(module, data, GRAPH, store=tmp_path).counts.builds >= 1
    ait.unwrap(module)
    again = pinned(module, data, GRAPH, store=tmp_path)
    assert again.counts.builds == 0
    assert again.choices[0].candidate == GRAPH
    check_module(module, data[0])


def check_module(module: nn.Module, x: torch.Tensor) -> None:
    before = ait.stats(module).dispatched
    want = type(module).forward(module, x)
    torch.testing.assert_close(quiet(module, x), want, rtol=1e-3, atol=1e-3)
    assert ait.stats(module).dispatched == before + 1


def test_its_files_load_again() -> None:
    module = on_gpu(Chain(4))
    job = replace(job_of(module, random(4, DIM), random(8, DIM), candidate=GRAPH), shared=shared())
    build(job).close()
    check(load(job), module, random(4, DIM))


def test_a_cancel_in_the_middle_of_a_build_leaves_the_target_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_gpu(Chain(8))
    plan = Plan(rules=(Rule("", "pin", candidate=TRT),))
    tuner = make_tuner(module, [random(4, DIM)], plan, TuneOptions(meter=ScriptedMeter(), end_to_end=False))
    original = backend_module.build_plan

    def cancelling(*args: Any, progress: Any, **kwargs: Any) -> bytes:
        def step(phase: str, fraction: float | None) -> None:
            tuner.cancel()
            progress(phase, fraction)

        return original(*args, progress=step, **kwargs)

    monkeypatch.setattr(backend_module, "build_plan", cancelling)
    assert [event.kind for event in tuner.steps()][-1] == "run_cancelled"
    assert "forward" not in vars(module)
    x = random(4, DIM)
    assert torch.equal(module(x), Chain.forward(module, x))


LOADING = """
import sys
import torch
sys.path.insert(0, {folder!r})
import aitune_lab as ait
from common import DIM, Chain, on_gpu
torch.manual_seed(0)
module = on_gpu(Chain(4))
x = torch.randn(4, DIM, device="cuda")
with torch.no_grad():
    want = module(x)
    report = ait.load(module, {file!r}, trust={digest!r})
    torch.testing.assert_close(module(x), want, rtol=1e-3, atol=1e-3)
print("loaded", len(report.loaded), report)
"""


def test_a_saved_file_runs_in_a_new_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = on_gpu(Chain(4))
    pinned(module, [random(4, DIM)], GRAPH)
    digest = ait.save(module, tmp_path / "tuned.ait")
    for trust, loaded in ((str(digest), "loaded 1"), (None, "loaded 0")):
        code = LOADING.format(folder=str(Path(__file__).parent), file=str(tmp_path / "tuned.ait"), digest=trust)
        environment = {**os.environ, "AITUNE_LAB_CACHE_DIR": str(tmp_path / "store")}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200)
        assert loaded in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]


# --- the contract of all backends


@pytest.fixture(scope="class")
def on_the_card() -> Any:
    """What the contract makes is made on the GPU."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("on_the_card")
class TestContract(BackendContract):
    backend = TensorRTBackend(static_engines=1, optimization_level=0)


@pytest.mark.usefixtures("on_the_card")
class TestRefittable(BackendContract):
    backend = TensorRTBackend(static_engines=0, refittable=True, optimization_level=0)
