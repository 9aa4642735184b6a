"""ONNX Runtime gives what eager gives, for the ways in which modules are called and weights are held."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from harness import check, jobs, load_case
from torch import nn

from aitune_lab.backends.onnxruntime import ONNXRuntimeBackend
from aitune_lab.errors import PlanError, Refused, install_command
from aitune_lab.schema import Candidate

pytest.importorskip("onnxruntime")


def build(module: nn.Module, items: list, folder: Path, facts=None, **options: object):
    backend = ONNXRuntimeBackend(**options)
    (job,) = jobs(module.eval(), items, backend, folder, facts=facts)
    return backend.build(job), job


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    torch.manual_seed(0)
    return build(Mlp(), [torch.randn(b, 4) for b in (2, 1, 0, 5)], tmp_path_factory.mktemp("mlp"))


def test_it_can_run_here():
    state = ONNXRuntimeBackend.available()
    assert state.ok
    assert set(state.versions) == {"onnx", "onnxscript", "onnxruntime"}


def test_without_its_packages_it_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    state = ONNXRuntimeBackend.available()
    assert not state.ok
    assert "onnxscript" in state.reason
    assert state.cure == install_command("onnxruntime")


def test_every_size_is_right_also_one_and_zero(mlp):
    check(*mlp)


def test_strided_inputs_and_inputs_that_require_grad(mlp):
    executable, job = mlp
    x = torch.randn(4, 3).t()
    torch.testing.assert_close(executable.call(x)[0], job.original(x).detach())
    with torch.no_grad():
        executable.call(torch.randn(2, 4, requires_grad=True))
    with torch.inference_mode():
        executable.call(torch.randn(2, 4))


def test_outputs_are_fresh_each_call(mlp):
    executable, _ = mlp
    first = executable.call(torch.ones(2, 4))[0]
    kept = first.clone()
    executable.call(torch.zeros(2, 4))
    assert torch.equal(first, kept)
    first.add_(1)


def test_threads_share_one_session(mlp):
    executable, job = mlp
    xs = [torch.randn(2, 4) for _ in range(4)]
    wrong = []

    def work(x: torch.Tensor) -> None:
        want = job.original(x).detach()
        wrong.extend(1 for _ in range(50) if not torch.allclose(executable.call(x)[0], want, atol=1e-5))

    threads = [threading.Thread(target=work, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_file_alone_gives_the_same_executable(mlp):
    executable, job = mlp
    assert [f.name for f in job.folder.iterdir()] == ["model.onnx"]
    again = ONNXRuntimeBackend().load(job)
    x = torch.randn(3, 4)
    assert torch.equal(again.call(x)[0], executable.call(x)[0])
    assert executable.memory_bytes > 0
    assert not executable.live_weights


def test_tied_and_shared_weights_are_stored_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(500, 64)
            self.shared = nn.Linear(64, 64)
            self.layers = nn.ModuleList([self.shared] * 6)
            self.head = nn.Linear(64, 500, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            x = self.emb(ids)
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(x)

    executable, job = build(Tied(), [torch.randint(0, 500, (2, 5))], tmp_path)
    check(executable, job)
    assert executable.memory_bytes < 4 * (500 * 64 + 64 * 65) + 60_000


def test_inputs_of_all_kinds_and_unused_ones(tmp_path):
    class Mixed(nn.Module):
        def forward(self, x, unused, flag, index, scalar):
            return torch.where(flag, x, -x)[index], x.sum() * scalar, index + 1

    item = (torch.randn(4, 3), torch.ones(2), torch.rand(4, 3) > 0.5, torch.tensor([2, 0]), torch.tensor(2.0))
    check(*build(Mixed(), [item], tmp_path))


def test_repeated_constant_and_passed_through_outputs(tmp_path):
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x, y):
            h = x * 2
            return h, (h, y), {"w": self.weight, "c": torch.tensor(1.0)}

    from aitune_lab.schema import Alias

    facts = {"aliases": (Alias("output[1][1]", "y", "same"),)}
    executable, job = build(Repeats(), [(torch.randn(2), torch.randn(3))], tmp_path, facts)
    check(executable, job)


def test_mutated_inputs_come_back_as_new_values(tmp_path):
    class Scratch(nn.Module):
        def forward(self, x, table, idx):
            x.mul_(0.5)
            table[idx] = x
            return table.sum()

    item = (torch.randn(2, 4), torch.zeros(5, 4), torch.tensor([0, 3]))
    check(*build(Scratch(), [item], tmp_path))


def test_small_constants_survive(tmp_path):
    class Tiny(nn.Module):
        def forward(self, p):
            return torch.log(p + 1e-9), p / (p.norm(dim=-1, keepdim=True) + 1e-8), p * (1 + 1e-6)

    executable, job = build(Tiny(), [torch.zeros(2, 3)], tmp_path)
    check(executable, job)
    assert torch.isfinite(executable.call(torch.zeros(2, 3))[0]).all()


def test_values_are_baked_for_their_own_signature_only(tmp_path):
    class Scaled(nn.Module):
        def forward(self, x, times=1, mode="sum"):
            return (x * times).sum(-1) if mode == "sum" else x * times

    backend = ONNXRuntimeBackend()
    made = jobs(
        Scaled().eval(), [torch.ones(2, 3), (torch.ones(2, 3), 4), (torch.ones(2, 3), 4, "all")], backend, tmp_path
    )
    assert len(made) == 3
    for job in made:
        check(backend.build(job), job)


def test_bfloat16_and_unknown_options_are_refused(tmp_path):
    with pytest.raises(Refused, match="x is bfloat16"):
        build(Mlp().to(torch.bfloat16), [torch.randn(2, 4).bfloat16()], tmp_path / "a")
    with pytest.raises(Refused, match="graph_optimization must be one of"):
        build(Mlp(), [torch.randn(2, 4)], tmp_path / "b", graph_optimization="most")
    with pytest.raises(PlanError, match="must be among"):
        ONNXRuntimeBackend.of(Candidate("onnxruntime", (("fast", True),)))


def test_candidates_are_for_the_cpu_only(tmp_path):
    (job,) = jobs(Mlp().eval(), [torch.randn(2, 4)], ONNXRuntimeBackend(), tmp_path)
    assert ONNXRuntimeBackend().candidates(job.signature, job.module)[0] == Candidate("onnxruntime")
    assert ONNXRuntimeBackend().candidates(job.signature, Mlp().to("meta")) == []


def test_a_big_shared_layer_makes_a_small_file(tmp_path):
    module, items, notes = load_case("39_big_shared_weights")
    executable, _ = build(module, items, tmp_path)
    assert executable.memory_bytes <= notes["max_artifact_mb"] * 2**20
