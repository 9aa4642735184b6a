"""AOTInductor gives what eager gives at every size in range, takes any strides, and checks what it gets."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from harness import check, jobs
from saved import loaded_in_a_fresh_process
from torch import nn

from aitune_lab.backends.export import export_program
from aitune_lab.backends.inductor_aot import TorchInductorAotBackend
from aitune_lab.backends.settled import Settled, led_by_odd_sizes
from aitune_lab.errors import BackendUnavailable, Refused
from aitune_lab.schema import Candidate


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """The code around the kernels is compiled without optimisation: that takes half as long."""
    import torch._inductor.config as settings

    if not hasattr(settings.aot_inductor, "compile_wrapper_opt_level"):
        yield
        return
    with settings.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


class Mlp(nn.Module):
    """A buffer as wide as a batch is long: what a compiler may take for one size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        self.register_buffer("bias", torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x) + self.bias, self.bias * 2


def job_of(module: nn.Module, items: list, folder: Path, **options: object):
    (job,) = jobs(module.eval(), items, TorchInductorAotBackend(**options), folder)
    return job


def build(module: nn.Module, items: list, folder: Path, **options: object):
    job = job_of(module, items, folder, **options)
    return TorchInductorAotBackend(**options).build(job), job


def sizes(*batches: int) -> list[torch.Tensor]:
    return [torch.randn(b, 4) for b in batches]


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    torch.manual_seed(0)
    return build(Mlp(), sizes(2, 1, 0, 5), tmp_path_factory.mktemp("mlp"))


def test_every_size_is_right_also_one_and_zero(mlp):
    executable, job = mlp
    check(executable, job)
    check(executable, job, mode=torch.inference_mode)
    for x in sizes(3, 4):  # that nobody recorded
        torch.testing.assert_close(executable.call(x)[0], job.original(x)[0].detach())


def test_strides_are_brought_to_those_it_was_compiled_for(mlp):
    executable, job = mlp
    for x in (torch.randn(4, 3).t(), torch.randn(4, 1).t(), torch.randn(3, 8)[:, ::2], torch.randn(4).expand(3, 4)):
        torch.testing.assert_close(executable.call(x)[0], job.original(x)[0].detach())


def test_inputs_are_checked_and_the_environment_is_as_before(mlp):
    executable, _ = mlp
    assert "AOTI_RUNTIME_CHECK_INPUTS" not in os.environ
    for x in (torch.randn(2, 4).double(), torch.randn(2, 5), torch.randn(6, 4)):
        with pytest.raises(RuntimeError, match=r"unmatched|too large"):
            executable.call(x)


def test_nothing_is_left_in_the_temporary_folder_while_it_is_loaded(mlp, tmp_path, monkeypatch):
    _, job = mlp
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.environ.get("TMPDIR")
    executable = TorchInductorAotBackend().load(job)
    assert list(tmp_path.iterdir()) == []
    assert os.environ.get("TMPDIR") == before
    check(executable, job)


def test_outputs_are_fresh_each_call(mlp):
    executable, _ = mlp
    first, twice = executable.call(torch.ones(2, 4))
    kept = first.clone()
    first.add_(1)
    twice.add_(1)
    again, twice_again = executable.call(torch.ones(2, 4))
    assert torch.equal(again, kept)
    assert torch.equal(twice_again, torch.full((2,), 2.0))


def test_threads_share_one_package(mlp):
    executable, job = mlp
    xs = sizes(2, 2, 3, 4)
    wants = [job.original(x)[0].detach() for x in xs]
    start, wrong = threading.Barrier(len(xs)), []

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        start.wait()
        wrong.extend(1 for _ in range(50) if not torch.allclose(executable.call(x)[0], want, atol=1e-5))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_files_alone_give_the_same_executable_also_without_a_compiler(mlp, monkeypatch):
    executable, job = mlp
    assert sorted(f.name for f in job.folder.iterdir()) == ["inputs.json", "model.pt2"]
    monkeypatch.setattr("aitune_lab.backends.inductor_jit._compiler", lambda: None)
    again = TorchInductorAotBackend().load(job)
    x = torch.randn(3, 4)
    assert torch.equal(again.call(x)[0], executable.call(x)[0])
    assert not executable.live_weights
    with pytest.raises(BackendUnavailable, match=r"no C\+\+ compiler"):
        TorchInductorAotBackend().build(job)


def test_changed_weights_come_in_by_a_refresh_and_not_before(mlp):
    executable, job = mlp
    x = torch.randn(3, 4)
    before = executable.call(x)[0]
    with torch.no_grad():
        for tensor in (*job.module.parameters(), *job.module.buffers()):
            tensor.add_(0.5)
    assert torch.equal(executable.call(x)[0], before)
    assert executable.refresh is not None
    assert executable.refresh()
    check(executable, job)
    job.module.bias = torch.ones(1)
    assert not executable.refresh()
    job.module.bias = torch.full((2,), 1.5)
    assert executable.refresh()
    check(executable, job)


def test_saved_and_loaded_in_a_fresh_process(tmp_path):
    assert "inductor_aot[freezing] loaded" in loaded_in_a_fresh_process("inductor_aot[freezing]", tmp_path)


def test_conditions_on_sizes_that_compiling_adds_must_hold_for_all(tmp_path):
    job = job_of(Mlp(), sizes(1, 3, 7), tmp_path)
    program, _ = export_program(job)
    size = next(n.meta["val"].shape[0] for n in program.graph.nodes if n.name in program.graph_signature.user_inputs)
    settled = Settled(program, job.signature)
    assert bool(size < 100)
    assert bool(size != 5)
    settled.check()
    assert not bool(size > 6)  # it was exported at 3
    with pytest.raises(Refused, match=r"holds only for .*b.* which breaks at b=7"):
        settled.check()


def test_it_is_exported_at_sizes_that_are_not_those_of_weights(tmp_path):
    job = job_of(Mlp(), sizes(1, 2, 8), tmp_path)
    first, *recorded = led_by_odd_sizes(job, list(job.samples))
    assert first.point.as_dict()["b"] not in {2, 4, 8}
    assert recorded == list(job.samples)
    odd = job_of(Mlp(), sizes(1, 3), tmp_path / "odd")
    assert led_by_odd_sizes(odd, list(odd.samples)) == list(odd.samples)


def test_candidates_by_device(tmp_path):
    job = job_of(Mlp(), sizes(2), tmp_path)
    frozen = Candidate("inductor_aot", (("freezing", True),))
    assert TorchInductorAotBackend().candidates(job.signature, job.module) == [frozen, Candidate("inductor_aot")]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor, unused: torch.Tensor, index: torch.Tensor, scalar: torch.Tensor):
        y = self.norm(self.conv(x)).relu()
        return y.mean((2, 3))[index] * scalar, index + 1, y > 0


@pytest.mark.full
@pytest.mark.parametrize("freezing", [False, True])
def test_frozen_convolutions_in_channels_last_and_inputs_of_all_kinds(freezing, tmp_path):
    def item(batch: int):
        x = torch.randn(batch, 3, 8, 8).to(memory_format=torch.channels_last)
        return x, torch.ones(2), torch.tensor([1, 0]), torch.tensor(2.0)

    executable, job = build(Images(), [item(b) for b in (2, 4, 6)], tmp_path, freezing=freezing)
    check(executable, job)
    x, *rest = item(3)
    for given in (x, x.contiguous(), x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)):
        got, want = executable.call(given, *rest), job.original(given, *rest)
        torch.testing.assert_close([*got], [w.detach() for w in want], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_the_casts_of_autocast_are_part_of_the_graph(tmp_path):
    class Cast(Mlp):
        def forward(self, x):
            return self.net(x).float()

    with torch.autocast("cpu", torch.bfloat16):
        job = job_of(Cast(), sizes(3, 5), tmp_path, freezing=True)
    executable = TorchInductorAotBackend(freezing=True).build(job)
    check(executable, job, rtol=2e-2, atol=2e-2)
    assert executable.refresh is None


@pytest.mark.full
def test_tied_weights_are_never_refreshed(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).relu())

    executable, job = build(Tied(), sizes(3, 5), tmp_path)
    check(executable, job)
    assert executable.refresh is None
