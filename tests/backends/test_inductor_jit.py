"""Inductor gives what eager gives, compiles nothing inside a user's call, and leaves the module as it was."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from harness import check, jobs
from torch import nn

from aitune_lab.backends import inductor_jit
from aitune_lab.backends.inductor_jit import TorchInductorJitBackend
from aitune_lab.errors import Refused
from aitune_lab.schema import Candidate

pytestmark = pytest.mark.skipif(not TorchInductorJitBackend.available().ok, reason="needs a C++ compiler")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict:
        self.calls += 1
        return {"y": self.b(self.a(x).relu()) * scale}


def build(module: nn.Module, items: list, folder: Path, facts=None, **options: object):
    backend = TorchInductorJitBackend(**options)
    (job,) = jobs(module.eval(), items, backend, folder, facts=facts)
    return backend.build(job), job


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    module = Mlp()
    items = [torch.randn(b, 4) for b in (1, 3, 5)]
    before = torch.get_rng_state()
    executable, job = build(module, items, tmp_path_factory.mktemp("plain"))
    assert module.calls == len(items), "the build changed the module's counter"
    assert torch.equal(torch.get_rng_state(), before)
    return executable, job


def test_right_and_covered_in_every_grad_mode(plain):
    executable, job = plain
    before = executable.uncovered()
    check(executable, job)
    check(executable, job, mode=torch.inference_mode)
    with torch.inference_mode():
        made_inside = torch.randn(3, 4)
        assert executable.call(made_inside)["y"].is_inference()
    with torch.no_grad():
        executable.call(made_inside)
        assert not executable.call(torch.randn(5, 4))["y"].is_inference()
    assert executable.uncovered() == before


def test_sizes_between_the_recorded_ones_are_covered(plain):
    executable, job = plain
    before = executable.uncovered()
    with torch.no_grad():
        x = torch.randn(4, 4)
        torch.testing.assert_close(executable.call(x)["y"], job.original(x)["y"])
    assert executable.uncovered() == before


def test_other_ways_to_pass_the_arguments_are_covered(plain):
    executable, _ = plain
    before = executable.uncovered()
    with torch.no_grad():
        x = torch.randn(3, 4)
        assert torch.equal(executable.call(x=x)["y"], executable.call(x, 1.0)["y"])
    assert executable.uncovered() == before


def test_what_would_recompile_runs_the_original_and_is_counted(plain):
    executable, job = plain
    before = executable.uncovered()
    with torch.no_grad():
        x = torch.randn(4, 3).t()
        torch.testing.assert_close(executable.call(x)["y"], job.original(x)["y"])
    assert executable.uncovered() == before + 1


def test_any_thread_runs_the_compiled_code(plain):
    executable, job = plain
    before = executable.uncovered()
    with torch.no_grad():
        xs = [torch.randn(3, 4) for _ in range(4)]
        wants = [job.original(x)["y"] for x in xs]
    wrong = []

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(50) if not torch.allclose(executable.call(x)["y"], want, atol=1e-5))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert executable.uncovered() == before


def test_weights_are_read_live(plain):
    executable, job = plain
    assert executable.live_weights
    assert executable.recompiles
    module, x = job.module, torch.randn(3, 4)
    before = executable.uncovered()
    with torch.no_grad():
        module.a.weight.add_(1)
        torch.testing.assert_close(executable.call(x), job.original(x))
        module.a.weight = nn.Parameter(torch.randn(8, 4))
        torch.testing.assert_close(executable.call(x), job.original(x))
        module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()}, assign=True)
        torch.testing.assert_close(executable.call(x), job.original(x))
    assert executable.uncovered() == before


def test_nothing_holds_the_module_of_a_closed_candidate(tmp_path):
    module = nn.Linear(4, 4)
    executable, job = build(module, [torch.randn(2, 4)], tmp_path)
    held = weakref.ref(module)
    executable.close()
    del module, executable, job
    gc.collect()
    assert held() is None


def test_freezing_bakes_the_weights_of_its_own_candidate(tmp_path):
    module = Mlp()
    items = [torch.randn(3, 4)]
    live, _ = build(module, items, tmp_path / "live")
    frozen, job = build(module, items, tmp_path / "frozen", freezing=True)
    assert not frozen.live_weights
    check(frozen, job)
    x = torch.randn(3, 4)
    with torch.no_grad():
        old = job.original(x)["y"]
        module.a.weight.add_(1)
        torch.testing.assert_close(frozen.call(x)["y"], old)
        torch.testing.assert_close(live.call(x)["y"], job.original(x)["y"])
        frozen.close()
        torch.testing.assert_close(frozen.call(x)["y"], job.original(x)["y"])
    assert frozen.uncovered() == 1


def test_random_numbers_follow_the_seed_like_eager(tmp_path):
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn(x.shape), torch.nn.functional.dropout(x, 0.5, training=True)

    executable, job = build(Noise(), [torch.ones(6, 4)], tmp_path, {"random": True})
    check(executable, job)
    assert not torch.equal(executable.call(torch.ones(6, 4))[0], executable.call(torch.ones(6, 4))[0])


def test_mutation_aliases_and_python_values(tmp_path):
    class Habits(nn.Module):
        def forward(self, x, table):
            table[0] += 1
            return x, x[:1], float(x.max()), x.shape[0]

    executable, job = build(Habits(), [(torch.randn(3, 4), torch.zeros(2))], tmp_path)
    check(executable, job)
    x = torch.randn(3, 4)
    with torch.no_grad():
        same, view, peak, size = executable.call(x, torch.zeros(2))
    assert same is x or same.data_ptr() == x.data_ptr()
    assert view.data_ptr() == x.data_ptr()
    assert (peak, size) == (float(x.max()), 3)
    assert any("graph breaks" in note for note in executable.notes)


def test_what_recompiles_at_every_call_is_refused(tmp_path):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def forward(self, x):
            self.seen.append(x.shape)
            return x * len(self.seen)

    with pytest.raises(Refused, match="compiled again"):
        build(Growing(), [torch.ones(2)], tmp_path)


def test_freezing_comes_first_on_the_cpu(tmp_path):
    (job,) = jobs(Mlp().eval(), [torch.randn(2, 4)], TorchInductorJitBackend(), tmp_path)
    found = TorchInductorJitBackend().candidates(job.signature, job.module)
    assert found == [Candidate("inductor", (("freezing", True),)), Candidate("inductor")]


def test_without_a_compiler_it_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(inductor_jit.shutil, "which", lambda name: None)
    state = TorchInductorJitBackend.available()
    assert not state.ok
    assert "C++ compiler" in state.reason
    assert "g++" in state.cure
