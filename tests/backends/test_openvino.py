"""OpenVINO gives what eager gives, whatever the dtypes and layouts, and says what it can't hold."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from harness import check, jobs
from saved import loaded_in_a_fresh_process
from torch import nn

from aitune_lab.backends.openvino import OpenVINOBackend
from aitune_lab.errors import Refused, install_command
from aitune_lab.schema import Candidate

pytest.importorskip("openvino")


def build(module: nn.Module, items: list, folder: Path, facts=None, **options: object):
    backend = OpenVINOBackend(**options)
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


def test_without_its_package_it_says_how_to_get_it(monkeypatch):
    assert OpenVINOBackend.available().ok
    assert set(OpenVINOBackend.available().versions) == {"openvino"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    state = OpenVINOBackend.available()
    assert not state.ok
    assert state.cure == install_command("openvino")


def test_every_size_is_right_also_one_and_zero(mlp):
    check(*mlp)
    check(*mlp, mode=torch.inference_mode)


def test_sizes_that_nobody_recorded_are_right(mlp):
    executable, job = mlp
    for size in (3, 4):
        x = torch.randn(size, 4)
        torch.testing.assert_close(executable.call(x)[0], job.original(x).detach())


def test_strided_inputs_and_inputs_that_require_grad(mlp):
    executable, job = mlp
    for x in (torch.randn(4, 3).t(), torch.randn(4, 1).t(), torch.randn(3, 8)[:, ::2], torch.randn(4).expand(3, 4)):
        torch.testing.assert_close(executable.call(x)[0], job.original(x).detach())
    with torch.no_grad():
        executable.call(torch.randn(2, 4, requires_grad=True))


def test_outputs_are_fresh_each_call(mlp):
    executable, _ = mlp
    first = executable.call(torch.ones(2, 4))[0]
    kept = first.clone()
    executable.call(torch.zeros(2, 4))
    assert torch.equal(first, kept)
    first.add_(1)
    assert torch.equal(executable.call(torch.ones(2, 4))[0], kept)


def test_threads_take_requests_of_their_own(mlp):
    executable, job = mlp
    xs = [torch.randn(2, 4) for _ in range(4)]
    wants = [job.original(x).detach() for x in xs]
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


def test_the_files_alone_give_the_same_executable(mlp):
    executable, job = mlp
    assert sorted(f.name for f in job.folder.iterdir()) == ["model.bin", "model.xml"]
    again = OpenVINOBackend().load(job)
    x = torch.randn(3, 4)
    assert torch.equal(again.call(x)[0], executable.call(x)[0])
    assert executable.memory_bytes > 0
    assert not executable.live_weights
    again.close()
    with pytest.raises(RuntimeError, match="closed"):
        again.call(x)


def test_inputs_of_all_kinds_and_unused_and_passed_through_ones(tmp_path):
    class Mixed(nn.Module):
        def forward(self, x, unused, flag, index, scalar, half, number):
            return torch.where(flag, x, -x)[index], x.sum() * scalar, index + 1, half * 2, number + 1, x.clone()

    item = (
        torch.randn(4, 3), torch.ones(2), torch.rand(4, 3) > 0.5, torch.tensor([2, 0]), torch.tensor(2.0),
        torch.randn(3).half(), torch.arange(3, dtype=torch.int32),
    )  # fmt: skip
    check(*build(Mixed(), [item], tmp_path))


def test_mutated_inputs_come_back_as_new_values(tmp_path):
    class Scratch(nn.Module):
        def forward(self, x, table, idx):
            x.mul_(0.5)
            table[idx] = x
            return table.sum()

    check(*build(Scratch(), [(torch.randn(2, 4), torch.zeros(5, 4), torch.tensor([0, 3]))], tmp_path))


def test_small_constants_survive(tmp_path):
    class Tiny(nn.Module):
        def forward(self, p):
            return torch.log(p + 1e-9), p / (p.norm(dim=-1, keepdim=True) + 1e-8), p * (1 + 1e-6)

    executable, job = build(Tiny(), [torch.zeros(2, 3)], tmp_path)
    check(executable, job)
    assert torch.isfinite(executable.call(torch.zeros(2, 3))[0]).all()


def test_bfloat16_modules_keep_their_dtype(tmp_path):
    executable, job = build(Mlp().to(torch.bfloat16), [torch.randn(b, 4).bfloat16() for b in (2, 3)], tmp_path)
    check(executable, job, rtol=5e-2, atol=5e-2)
    assert executable.call(torch.randn(2, 4).bfloat16())[0].dtype == torch.bfloat16


def test_float32_is_computed_in_float32_and_bfloat16_only_when_asked(tmp_path, monkeypatch):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x = torch.randn(8, 256)
    exact, job = build(wide, [x], tmp_path / "f32")
    want = job.original(x).detach()
    torch.testing.assert_close(exact.call(x)[0], want, rtol=1e-5, atol=1e-5)
    low, _ = build(wide, [x], tmp_path / "bf16", precision="bf16")
    torch.testing.assert_close(low.call(x)[0], want, rtol=5e-2, atol=5e-2)
    assert OpenVINOBackend().typical_error() == 0
    assert OpenVINOBackend(precision="bf16").typical_error() > 1e-3


def test_integers_that_32_bits_cannot_hold_run_the_original(tmp_path):
    class Days(nn.Module):
        def forward(self, seconds):
            return seconds // 86_400, (seconds % 86_400).float()

    executable, job = build(Days(), [torch.tensor([1, 100_000, 2_000_000_000])], tmp_path)
    check(executable, job)
    later = torch.tensor([4_000_000_000, 2**40, -5])
    before = executable.uncovered()
    got = executable.call(later)
    assert executable.uncovered() == before + 1
    for ours, theirs in zip(got, job.original(later), strict=True):
        assert torch.equal(ours, theirs)


class Hash(nn.Module):
    def forward(self, ids):
        return (ids * 1_000_003) % 97


class Guarded(nn.Module):
    def forward(self, p):
        return 1 / ((1 - p) + 1e-12)


class Wrap(nn.Module):
    def forward(self, image):
        return image + image


@pytest.mark.parametrize(
    ("module", "item", "reason"),
    [
        (Hash(), torch.arange(5), "mul of given integers"),
        (Wrap(), torch.full((3,), 200, dtype=torch.uint8), "add in uint8"),
        (Guarded(), torch.rand(3), "adds 1e-12 to a sum with 1"),
        (Mlp().double(), torch.randn(2, 4).double(), "float64"),
    ],
)
def test_what_it_cannot_hold_is_refused(module, item, reason, tmp_path):
    with pytest.raises(Refused, match=reason):
        build(module, [item], tmp_path)


def test_unknown_precisions_are_refused(tmp_path):
    with pytest.raises(Refused, match="precision must be one of"):
        build(Mlp(), [torch.randn(2, 4)], tmp_path, precision="int4")


def test_candidates_are_for_the_cpu_and_its_instructions(tmp_path, monkeypatch):
    (job,) = jobs(Mlp().eval(), [torch.randn(2, 4)], OpenVINOBackend(), tmp_path)
    exact, low = Candidate("openvino"), Candidate("openvino", (("precision", "bf16"),))
    monkeypatch.setattr("aitune_lab.backends.openvino.cpu_flags", lambda: ("avx2",))
    assert OpenVINOBackend().candidates(job.signature, job.module) == [exact]
    monkeypatch.setattr("aitune_lab.backends.openvino.cpu_flags", lambda: ("amx_bf16", "avx2"))
    assert OpenVINOBackend().candidates(job.signature, job.module) == [exact, low]
    assert OpenVINOBackend().candidates(job.signature, Mlp().to(torch.bfloat16)) == [low, exact]
    assert OpenVINOBackend().candidates(job.signature, Mlp().to("meta")) == []


def test_its_import_reports_nothing_over_the_network():
    code = (
        "import sys, threading; from aitune_lab.backends.openvino import _openvino; _openvino();"
        "assert 'openvino_telemetry' not in sys.modules; assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_saved_and_loaded_in_a_fresh_process(tmp_path):
    assert "openvino loaded" in loaded_in_a_fresh_process("openvino", tmp_path)
