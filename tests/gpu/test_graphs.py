"""A captured executable is like the executable: same values, outputs of the caller's own, any thread and stream."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from common import (
    CUDA,
    DIM,
    GRAPH,
    Chain,
    Function,
    Net,
    Noisy,
    graphed,
    job_of,
    on_gpu,
    pinned,
    quiet,
    random,
    used_mib,
)
from torch import nn

from aitune_lab import stats
from aitune_lab.backends.eager import TorchEagerBackend
from aitune_lab.errors import Refused
from aitune_lab.runtime.cuda_graph import MAX_GRAPHS, CudaGraphs, capturing, warmup, with_cuda_graph
from aitune_lab.runtime.graph_pool import pool_of
from aitune_lab.runtime.installed import installed_in
from aitune_lab.schema import Candidate, Plan, Rule
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.tuner import TuneOptions

pytestmark = pytest.mark.gpu


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fresh_inputs_give_what_eager_gives(dtype: torch.dtype, mode: Any) -> None:
    module = on_gpu(Chain(), dtype)
    executable = graphed(module, random(4, DIM, dtype=dtype))
    with mode():
        for _ in range(5):
            x = random(4, DIM, dtype=dtype)
            assert torch.equal(executable.call(x)[0], module(x))


def test_structure_and_values_beside_tensors() -> None:
    module = on_gpu(Net())
    pinned(module, [((random(2, 3, 8, 8),), {"scale": 2.0})])
    x = random(2, 3, 8, 8)
    with torch.no_grad():
        y = module(x, scale=2.0)
        want = Net.forward(module, x, 2.0)
    assert y["name"] == "net"
    close(y["logits"], want["logits"])
    close(y["parts"][1][0], want["parts"][1][0])
    assert stats(module).dispatched == 1


def test_outputs_stay_valid() -> None:
    module = on_gpu(Chain())
    executable = graphed(module, random(4, DIM))
    inputs = [random(4, DIM) for _ in range(4)]
    outputs = [executable.call(x)[0] for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        close(y, module(x))


def test_outputs_until_the_next_call() -> None:
    module = on_gpu(Chain())
    job = job_of(module, random(4, DIM))
    executable = with_cuda_graph(TorchEagerBackend().build(job), job, outputs="until next call")
    first = executable.call(x := random(4, DIM))[0]
    close(first, module(x))
    second = executable.call(x := random(4, DIM))[0]
    assert first.data_ptr() == second.data_ptr()
    close(second, module(x))


def test_strided_and_expanded_inputs() -> None:
    module = on_gpu(Chain())
    executable = graphed(module, random(4, DIM))
    for x in (random(DIM, 4).t(), random(1, DIM).expand(4, DIM), random(8, 2 * DIM)[::2, ::2]):
        close(executable.call(x)[0], module(x))


def test_an_input_that_is_returned_is_the_callers_own() -> None:
    module = on_gpu(Function(lambda self, x: (x, x @ self.weight)))
    pinned(module, [random(4, DIM)])
    x = random(4, DIM)
    same, product = quiet(module, x)
    assert same is x
    close(product, x @ module.weight)


def test_one_tensor_returned_twice() -> None:
    module = on_gpu(Function(lambda self, x: [y := x @ self.weight, y]))
    first, second = graphed(module, random(4, DIM)).call(x := random(4, DIM))
    assert first is second
    close(first, x @ module.weight)


REFUSED: dict[str, tuple[Any, str]] = {
    "item": (lambda self, x: x * x.sum().item(), "can't be captured"),
    "copy to the host": (lambda self, x: x + x.cpu().to(x.device), "can't be captured"),
    "nonzero": (lambda self, x: x[x[:, 0] > -9], "can't be captured"),
    "synchronize": (lambda self, x: (torch.cuda.synchronize(), x + 1)[1], "can't be captured"),
    "state": (lambda self, x: self.count.add_(1) + x, "changes the module's state"),
    "mutation": (lambda self, x: x.add_(1), "changes inputs in place"),
    "view of an input": (lambda self, x: x[1:], "returns views of inputs"),
    "a weight returned": (lambda self, x: (x + 1, self.weight), "weight of the module itself"),
    "output on the CPU": (lambda self, x: torch.ones(3), "on the cpu"),
}


@pytest.mark.parametrize("habit", REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(habit: str) -> None:
    function, reason = REFUSED[habit]
    module = on_gpu(Function(function))
    with pytest.raises(Refused, match=reason):
        graphed(module, random(4, DIM))
    # Torch is as it was: random numbers, allocation and further captures work.
    torch.rand(3, device=CUDA)
    close(graphed(on_gpu(Chain(2)), random(4, DIM)).call(x := random(4, DIM))[0].shape, x.shape)


@pytest.mark.alone
def test_failed_captures_leave_no_memory_behind() -> None:
    module, x = on_gpu(Function(lambda self, x: (y := x @ self.weight) * y.sum().item())), random(4096, DIM)
    side = torch.cuda.Stream()

    def exercise() -> None:
        for _ in range(3):
            with pytest.raises(Refused):
                graphed(module, x)
            for _ in range(20):  # blocks used on another stream are freed by events, which a capture suspends
                y = torch.empty(1 << 24, dtype=torch.uint8, device=CUDA)
                y.record_stream(side)
                del y
        gc.collect()
        torch.cuda.empty_cache()

    exercise()
    before = used_mib()
    exercise()
    assert used_mib() - before <= 16


def test_cpu_inputs_are_refused() -> None:
    with pytest.raises(Refused, match="on the cpu"):
        graphed(nn.Linear(3, 3).eval(), torch.ones(1, 3))


def test_random_numbers_are_those_of_eager() -> None:
    module = on_gpu(Noisy())
    pinned(module, [random(64, DIM)])
    x = random(64, DIM)
    torch.cuda.manual_seed(5)
    tuned = [quiet(module, x) for _ in range(3)]
    after = torch.rand(4, device=CUDA)
    torch.cuda.manual_seed(5)
    eager = [Noisy()(x) for _ in range(3)]
    assert all(map(torch.equal, tuned, eager))
    assert torch.equal(after, torch.rand(4, device=CUDA)), "the generator must have moved on as eager moves it"
    assert not torch.equal(tuned[0], tuned[1])
    assert stats(module).dispatched == 3


@pytest.mark.alone
def test_shapes_beyond_the_limit_run_uncaptured_in_bounded_memory() -> None:
    module = on_gpu(Chain(4))
    job = job_of(module, random(1, DIM), random(200, DIM))
    graphs = CudaGraphs(TorchEagerBackend().build(job), job, MAX_GRAPHS, True)
    graphs.capture_points()
    executable = graphs.executable()
    with capturing(), torch.no_grad():
        for rows in range(1, 20):
            executable.call(random(rows, DIM))
        before = used_mib()
        for rows in range(1, 201):
            x = random(rows, DIM)
            close(executable.call(x)[0], module(x))
    assert len(graphs.captured) == MAX_GRAPHS
    assert used_mib() - before <= 64
    executable.close()


def test_uncaptured_shapes_capture_only_when_asked() -> None:
    module = on_gpu(Chain(4))
    result = pinned(module, [random(2, DIM), random(9, DIM)])
    assert any("CUDA graphs at" in note for t in result.trials.values() for note in t.notes)
    executable = installed_in(module)[0].entries[0].executable
    held = executable.memory_bytes
    x = random(5, DIM)
    close(quiet(module, x), Chain.forward(module, x))
    assert executable.memory_bytes == held
    with torch.no_grad():
        close(warmup(module, x), Chain.forward(module, x))
    assert executable.memory_bytes > held
    close(quiet(module, x), Chain.forward(module, x))


def test_graphs_of_a_module_share_memory() -> None:
    # Activations of 64 MiB each: four graphs apart would hold four times as much.
    module = on_gpu(
        Function(lambda self, x: torch.relu(torch.relu(torch.relu(x @ self.weight) + 1) @ self.weight).mean(1))
    )
    sizes = [65536, 49152, 32768, 16384]
    alone = graphed(module, random(sizes[0], DIM))
    one = alone.memory_bytes - sizes[0] * DIM * 4
    alone.close()
    executable = graphed(module, *[random(n, DIM) for n in sizes])
    assert executable.memory_bytes - sum(sizes) * DIM * 4 <= 1.7 * one
    executable.close()


@pytest.mark.alone
def test_closing_frees_the_memory() -> None:
    module = on_gpu(Function(lambda self, x: torch.relu(x @ self.weight) @ self.weight))

    def once() -> None:
        executable = graphed(module, random(65536, DIM))
        assert executable.memory_bytes >= 64 << 20
        executable.call(random(65536, DIM))
        executable.close()

    once()
    gc.collect()
    torch.cuda.empty_cache()
    before = used_mib()
    once()
    gc.collect()
    torch.cuda.empty_cache()
    assert used_mib() - before <= 16


@pytest.mark.alone
def test_what_losers_held_is_free_once_they_are_closed() -> None:
    module, x = on_gpu(Function(lambda self, x: torch.relu(x @ self.weight) @ self.weight)), random(65536, DIM)
    loser = graphed(module, x, candidate=Candidate("eager", precision="tf32", cuda_graph=True))
    winner = graphed(module, x)
    assert winner.memory_bytes >= 64 << 20
    loser.close()
    close(winner.call(y := random(65536, DIM))[0], module(y))
    before = used_mib()
    winner.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert before - used_mib() >= 100


def test_calls_after_closing_run_the_executable_itself() -> None:
    module = on_gpu(Chain())
    executable = graphed(module, random(4, DIM))
    executable.close()
    close(executable.call(x := random(4, DIM))[0], module(x))


def test_a_users_own_capture_around_a_tuned_call() -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM)])
    static = random(4, DIM)
    quiet(module, static)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = module(static)
    static.copy_(x := random(4, DIM))
    graph.replay()
    close(y, Chain.forward(module, x))


# --- streams and threads


def test_called_on_a_side_stream_while_inputs_are_still_computed() -> None:
    module = on_gpu(Chain())
    executable = graphed(module, random(4, DIM))
    big = random(4096, 4096)
    side = torch.cuda.Stream()
    for _ in range(5):
        x = random(4, DIM)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late = x + 0 * (big @ big @ big).sum()
            y = executable.call(late)[0]
            del late
            scratch = torch.full((4, DIM), float("nan"), device=CUDA)  # takes the memory of `late`
        torch.cuda.current_stream().wait_stream(side)
        close(y, module(x))
        del scratch


def test_alternating_streams_without_synchronising() -> None:
    module = on_gpu(Chain())
    executable = graphed(module, random(4, DIM))
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [random(4, DIM) for _ in range(60)]
    torch.cuda.synchronize()
    outputs = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 3]):
            outputs.append(executable.call(x)[0])
    torch.cuda.synchronize()
    for x, y in zip(inputs, outputs, strict=True):
        close(y, module(x))


def test_eight_threads_on_two_streams_each() -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM), random(7, DIM)])
    wrong: list[str] = []

    def work(number: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(number)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for i in range(60):
            with torch.cuda.stream(streams[i % 2]), torch.inference_mode():
                x = torch.randn((4, 7, 5)[i % 3], DIM, device=CUDA, generator=generator)
                y, want = module(x), Chain.forward(module, x)
                if not torch.allclose(y, want, rtol=1e-3, atol=1e-4):
                    wrong.append(f"thread {number}, call {i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert stats(module).dispatched == 480


def test_graphs_of_two_modules_at_the_same_time() -> None:
    # Deep sums make cuBLAS split them and use its workspace, which the two must not share.
    modules = [on_gpu(Function(lambda self, x: (x.t() @ x) @ self.weight)) for _ in range(2)]
    x = random(1 << 16, DIM)
    executables = [graphed(m, x) for m in modules]
    inputs = [random(1 << 16, DIM) / 64 for _ in range(2)]
    wants = [m(i) for m, i in zip(modules, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for k in range(2):
            with torch.cuda.stream(streams[k]):
                outputs[k].append(executables[k].call(inputs[k])[0])
    torch.cuda.synchronize()
    for k in range(2):
        for y in outputs[k]:
            close(y, wants[k])


def test_pools_are_one_per_module_and_candidate() -> None:
    first, second = on_gpu(Chain(1)), on_gpu(Chain(1))
    assert pool_of(first, CUDA, "a") is pool_of(first, CUDA, "a")
    assert pool_of(first, CUDA, "a") is not pool_of(first, CUDA, "b")
    assert pool_of(first, CUDA, "a") is not pool_of(second, CUDA, "a")


def test_autocast_of_the_caller() -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.net = on_gpu(Chain())

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return self.net(x)

    pipeline = Pipeline()
    plan = Plan(rules=(Rule("net", "pin", candidate=GRAPH),))
    run(make_tuner(pipeline, [random(4, DIM)], plan, TuneOptions(meter=ScriptedMeter(), end_to_end=False)))
    x = random(4, DIM)
    with torch.no_grad():
        y = pipeline(x)
        with torch.autocast("cuda", dtype=torch.float16):
            want = Chain.forward(pipeline.net, x)
    assert torch.equal(y, want)
    assert stats(pipeline).dispatched == 1
