"""Tuned modules on other devices, with other current devices, on side streams, and measured on the device they are on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from common import CUDA, DIM, GRAPH, INDUCTOR_GRAPH, Chain, Function, on_gpu, pinned, quiet, random, untouched
from torch import nn

from aitune_lab import inspect, refresh, stats, unwrap
from aitune_lab.errors import AituneError
from aitune_lab.schema import Candidate

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.two_gpus
SECOND = torch.device("cuda", 1)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def tuned(candidate: Candidate = GRAPH) -> Chain:
    module = on_gpu(Chain(4))
    pinned(module, [random(4, DIM)], candidate)
    return module


def test_from_the_cpu_and_back_runs_the_original_until_refreshed() -> None:
    module = tuned()
    module.cpu()
    x = torch.randn(4, DIM)
    close(quiet(module, x), Chain.forward(module, x))
    assert not refresh(module)
    module.cuda()
    x = random(4, DIM)
    close(quiet(module, x), Chain.forward(module, x))
    assert refresh(module)
    close(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 1


def test_a_cpu_module_tuned_again_on_the_gpu() -> None:
    module = tuned()
    module.cpu()
    unwrap(module)
    module.cuda()
    pinned(module, [random(4, DIM)])
    x = random(4, DIM)
    close(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 1


def test_inputs_on_the_wrong_device_fail_as_in_eager() -> None:
    module = tuned()
    with pytest.raises(RuntimeError, match="same device"):
        quiet(module, torch.randn(4, DIM))
    assert stats(module).dispatched == 0


@pytest.mark.parametrize("candidate", [GRAPH, INDUCTOR_GRAPH, Candidate("inductor")], ids=lambda c: c.label)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_late_inputs_on_a_side_stream(candidate: Candidate, mode: Any) -> None:
    module, big, side = tuned(candidate), random(4096, 4096), torch.cuda.Stream()
    plain = untouched(module)
    torch.cuda.synchronize()
    for _ in range(3):
        x = random(4, DIM)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), mode():
            late = x + 0 * (big @ big @ big).sum()
            y = module(late)
            del late
            scratch = torch.full((4, DIM), float("nan"), device=CUDA)
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        close(y, quiet(plain, x))
        del scratch
    assert stats(module).dispatched == 3


def test_offloaded_after_tuning_moves_weights_between_calls() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = on_gpu(nn.Sequential(Chain(2), Chain(2)))
    pinned(module, [random(4, DIM)])
    plain = untouched(module)
    accelerate.cpu_offload(module, execution_device=0)
    assert all(p.device.type == "meta" for p in module.parameters())
    for _ in range(3):
        x = random(4, DIM)
        close(quiet(module, x), quiet(plain, x))
    accelerate.hooks.remove_hook_from_module(module, recurse=True)


def test_a_dispatch_hook_that_moves_inputs_is_kept() -> None:
    accelerate = pytest.importorskip("accelerate")
    module = on_gpu(Chain(3))
    accelerate.hooks.add_hook_to_module(
        module, accelerate.hooks.AlignDevicesHook(execution_device=0, io_same_device=True)
    )
    x = torch.randn(4, DIM)
    want = quiet(module, x)
    assert want.device.type == "cpu"
    pinned(module, [x])
    close(quiet(module, x), want)
    assert stats(module).dispatched == 1
    accelerate.hooks.remove_hook_from_module(module, recurse=True)


def test_a_graph_of_a_module_on_two_devices_is_refused() -> None:
    module = on_gpu(Function(lambda self, x: x @ self.weight + self.count.to(x.device)))
    module.count = module.count.cpu()
    with pytest.raises(AituneError, match="cpu"):
        pinned(module, [random(4, DIM)])
    x = random(4, DIM)
    close(quiet(module, x), x @ module.weight)


# --- two GPUs


@two_gpus
@pytest.mark.parametrize("candidate", [GRAPH, INDUCTOR_GRAPH], ids=lambda c: c.label)
def test_moved_to_the_second_gpu(candidate: Candidate) -> None:
    module = tuned(candidate)
    module.to(SECOND)
    x = random(4, DIM).to(SECOND)
    y = quiet(module, x)
    assert y.device == SECOND
    close(y, Chain.forward(module, x))
    assert stats(module).dispatched == 0
    unwrap(module)
    pinned(module, [x], candidate)
    for current in (CUDA, SECOND):
        with torch.cuda.device(current):
            close(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 2


@two_gpus
@pytest.mark.parametrize("candidate", [GRAPH, INDUCTOR_GRAPH, Candidate("inductor")], ids=lambda c: c.label)
def test_another_current_device(candidate: Candidate) -> None:
    module = tuned(candidate)
    x = random(4, DIM)
    want = Chain.forward(module, x)
    torch.cuda.synchronize()
    with torch.cuda.device(SECOND):
        close(quiet(module, x), want)
        with torch.cuda.stream(torch.cuda.Stream(SECOND)):
            close(quiet(module, x), want)
        assert torch.cuda.current_device() == 1
    assert stats(module).dispatched == 2


@two_gpus
def test_tuned_with_another_current_device() -> None:
    module = on_gpu(Chain(4))
    x = random(4, DIM)
    with torch.cuda.device(SECOND):
        pinned(module, [x])
        close(quiet(module, x), Chain.forward(module, x))
        assert torch.cuda.current_device() == 1
    assert stats(module).dispatched == 1


@two_gpus
def test_one_module_on_each_gpu_called_from_threads() -> None:
    modules = []
    for device in (CUDA, SECOND):
        with torch.cuda.device(device):
            module = on_gpu(Chain(4)).to(device)
            pinned(module, [random(4, DIM).to(device)])
            modules.append(module)
    wrong: list[str] = []

    def work(number: int) -> None:
        device = (CUDA, SECOND)[number % 2]
        other = (CUDA, SECOND)[number // 2 % 2]
        with torch.cuda.device(other), torch.inference_mode():
            for _ in range(40):
                x = torch.randn(4, DIM, device=device)
                y = modules[number % 2](x)
                if not torch.allclose(y, Chain.forward(modules[number % 2], x), rtol=1e-3, atol=1e-4):
                    wrong.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [stats(module).dispatched for module in modules] == [160, 160]


@two_gpus
def test_a_model_split_over_two_gpus_is_tuned_by_its_parts() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = on_gpu(Chain(3)), on_gpu(Chain(3)).to(SECOND)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).to(SECOND))

    module = Split().eval()
    x = random(4, DIM)
    want = quiet(module, x)
    assert inspect(module, [x]) is not None
    with pytest.raises(AituneError, match="cuda:1"):
        pinned(module, [x])
    close(quiet(module, x), want)
    for part, device in ((module.first, CUDA), (module.second, SECOND)):
        pinned(part, [random(4, DIM).to(device)])
        assert stats(part).dispatched == 0
    close(quiet(module, x), want)
    assert [stats(module.first).dispatched, stats(module.second).dispatched] == [1, 1]
