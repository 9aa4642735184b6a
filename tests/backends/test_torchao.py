"""TorchAO: 8-bit layers on a copy, right within their rounding, saved as plain tensors; what a copy can't keep is refused."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import call, jobs
from torch import nn

from aitune_lab.backends.torchao import TorchAOBackend, quantizable
from aitune_lab.errors import BuildError, PlanError, Refused, install_command
from aitune_lab.schema import Candidate

pytest.importorskip("torchao")

SCHEMES = ("int8wo", "int8dyn")


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and one layer that stands at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.again = self.up
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.twin = nn.Linear(32, 64, bias=False)
        self.twin.weight = self.up.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.down(torch.relu(self.up(x)) + self.twin(x))
        return self.head(self.down(self.again(x)))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 8)).eval()


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().eval()


def build(module: nn.Module, items: list, folder: Path, **options: object):
    backend = TorchAOBackend(**options)
    (job,) = jobs(module, items, backend, folder)
    with torch.no_grad():
        return backend.build(job), job


def off(executable, job) -> float:
    """Relative L2 error over all samples."""
    worst = 0.0
    with torch.no_grad():
        for sample in job.samples:
            got, want = call(executable, job, list(sample.leaves)), job.original(*sample.leaves)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if want.numel():
                worst = max(worst, ((got - want).norm() / want.norm()).item())
    return worst


def batches(*sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, 32) for size in sizes]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_size_is_right_within_eight_bits_also_one_and_zero(scheme, tmp_path):
    executable, job = build(mlp(), batches(4, 1, 0, 7), tmp_path, scheme=scheme)
    error = off(executable, job)
    assert 1e-4 < error < 5 * TorchAOBackend(scheme=scheme).typical_error()
    assert not executable.live_weights
    assert not executable.recompiles
    assert executable.notes == ("3 Linear layers in 8 bits",)


def test_the_users_module_stays_as_it_is(tmp_path):
    module = tied()
    before = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
    classes = [type(m) for m in module.modules()]
    kept = {name: set(vars(m)) for name, m in module.named_modules()}
    build(module, [torch.randint(0, 48, (2, 5))], tmp_path, scheme="int8dyn")
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert [type(m) for m in module.modules()] == classes
    assert {name: set(vars(m)) for name, m in module.named_modules()} == kept
    assert module.head.weight is module.embedding.weight


def test_shared_weights_are_quantised_once_and_an_embedding_keeps_its_own(tmp_path):
    from safetensors.torch import load_file

    module = tied()
    executable, job = build(module, [torch.randint(0, 48, (2, 5)), torch.randint(0, 48, (3, 5))], tmp_path)
    assert off(executable, job) < 0.03
    saved = load_file(job.folder / "weights.safetensors")
    assert {name.partition(":")[0] for name in saved} == {"up", "down", "head"}
    made = executable.call.__self__
    assert torch.equal(made.embedding.weight, module.embedding.weight)
    assert made.again is made.up
    assert made.twin.weight is made.up.weight


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_file_holds_plain_tensors_and_gives_the_same_executable(scheme, tmp_path):
    from safetensors.torch import load_file

    module = mlp()
    executable, job = build(module, batches(4, 2), tmp_path, scheme=scheme)
    assert [f.name for f in job.folder.iterdir()] == ["weights.safetensors"]
    saved = load_file(job.folder / "weights.safetensors")
    assert {t.dtype for name, t in saved.items() if name.endswith("qdata")} == {torch.int8}
    assert (job.folder / "weights.safetensors").stat().st_size < 4 * sum(p.numel() for p in module.parameters()) / 2
    again = TorchAOBackend(scheme=scheme).load(job)
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert torch.equal(again.call(x), executable.call(x))


def test_what_is_loaded_comes_from_the_file(tmp_path):
    module = mlp()
    executable, job = build(module, batches(4), tmp_path)
    x, want = torch.randn(4, 32), None
    with torch.no_grad():
        want = executable.call(x)
        module[2].weight.mul_(3.0)  # what the file holds counts, not what could be quantised anew
        assert torch.equal(TorchAOBackend().load(job).call(x), want)


def test_a_file_of_another_module_is_refused(tmp_path):
    _, job = build(mlp(), batches(4), tmp_path / "a")
    _, skipped = build(mlp(), batches(4), tmp_path / "b", skip="0")
    with pytest.raises(BuildError, match="other quantised weights than this module has: 0:"):
        TorchAOBackend(skip="0").load(SimpleNamespace(**{**vars(skipped), "folder": job.folder}))
    wider = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 56), nn.Tanh(), nn.Linear(56, 8)).eval()
    (other,) = jobs(wider, batches(4), TorchAOBackend(), tmp_path / "c")
    with pytest.raises(
        BuildError, match=r"2:qdata as torch.int8 \(48, 64\), but this module's is torch.int8 \(56, 64\)"
    ):
        TorchAOBackend().load(SimpleNamespace(**{**vars(other), "folder": job.folder}))


def test_new_weights_are_quantised_in_place(tmp_path):
    module = mlp()
    executable, job = build(module, batches(4), tmp_path, scheme="int8dyn")
    with torch.no_grad():
        module[0].weight.mul_(2.0)
        module[4].bias.add_(1.0)
    assert off(executable, job) > 0.1
    assert executable.refresh()
    assert off(executable, job) < 0.05
    module[2] = nn.Linear(64, 48).double()
    assert not executable.refresh()


def test_layers_can_be_left_alone(tmp_path):
    module = mlp()
    assert list(quantizable(module)) == ["0", "2", "4"]
    assert list(quantizable(module, "2|4")) == ["0"]
    nested = nn.ModuleDict({"body": mlp(), "head": nn.Linear(8, 2)})
    assert list(quantizable(nested, "body")) == ["head"]
    assert list(quantizable(nested, "*.4|head")) == ["body.0", "body.2"]
    executable, job = build(module, batches(4), tmp_path, skip="0|2")
    assert executable.notes == ("1 Linear layer in 8 bits, 2 left",)
    made = executable.call.__self__
    assert type(made[0]) is nn.Linear
    assert off(executable, job) < 0.01


def test_an_outlier_channel_spoils_scaled_inputs_and_not_weights_alone(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)).eval()
    with torch.no_grad():
        module[0].bias[3] = 4000.0
        module[2].weight[:, 3] = 0.0
    items = [torch.randn(8, 64)]
    scaled, job = build(module, items, tmp_path / "a", scheme="int8dyn")
    weights, same = build(module, items, tmp_path / "b", scheme="int8wo")
    assert off(scaled, job) > 0.3
    assert off(weights, same) < 0.03
    spared, left = build(module, items, tmp_path / "c", scheme="int8dyn", skip="2")
    assert off(spared, left) < 0.03


def test_layers_that_compute_otherwise_are_left(tmp_path):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.own = nn.Linear(32, 32), Scaled(32, 32)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.double = nn.Linear(4, 4).double()

        def forward(self, x):
            y = self.normed(self.own(self.plain(x)))
            return self.attention(y, y, y, need_weights=False)[0]

    torch.manual_seed(0)
    module = Model().eval()
    assert list(quantizable(module)) == ["plain"]
    executable, job = build(module, [torch.randn(2, 5, 32)], tmp_path)
    assert executable.notes == ("1 Linear layer in 8 bits, 4 left",)
    assert off(executable, job) < 0.03


def test_encoder_layers_of_torch_run_in_eight_bits(tmp_path):
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    executable, job = build(module, [torch.randn(2, 5, 32)], tmp_path, scheme="int8dyn")
    assert off(executable, job) < 0.03


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"state": ("steps",)}, r"changes the module's state \(steps\)"),
        ({"hooked": ("0",)}, "hooks on 0 would run on the layers of a copy"),
    ],
)
def test_what_a_copy_cannot_keep_is_refused(facts, reason, tmp_path):
    backend = TorchAOBackend()
    (job,) = jobs(mlp(), batches(2), backend, tmp_path, facts=facts)
    with pytest.raises(Refused, match=reason):
        backend.build(job)


def test_autocast_training_and_modules_without_layers_are_refused(tmp_path):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (job,) = jobs(mlp(), batches(2), TorchAOBackend(), tmp_path / "a")
    with pytest.raises(Refused, match="autocast"):
        TorchAOBackend().build(job)
    (job,) = jobs(mlp().train(), batches(2), TorchAOBackend(), tmp_path / "b")
    with pytest.raises(Refused, match="training mode"):
        TorchAOBackend().build(job)
    with pytest.raises(Refused, match="no Linear layer whose weights can be quantised"):
        build(nn.Sequential(nn.GELU(), nn.Conv1d(32, 2, 1)).eval(), [torch.randn(1, 32, 4)], tmp_path / "c")
    with pytest.raises(Refused, match="that can be quantised and is not skipped"):
        build(mlp(), batches(2), tmp_path / "d", skip="*")


def test_a_module_that_cannot_be_copied_is_refused(tmp_path):
    import threading

    module = mlp()
    module.lock = threading.Lock()
    with pytest.raises(Refused, match="can't be copied"):
        build(module, batches(2), tmp_path)


def test_half_modules_keep_their_dtype(tmp_path):
    for dtype in (torch.bfloat16, torch.float16):
        executable, job = build(
            copy.deepcopy(mlp()).to(dtype), [x.to(dtype) for x in batches(4)], tmp_path / str(dtype), scheme="int8dyn"
        )
        assert off(executable, job) < 0.05


def test_compiled_it_is_right_and_leaves_inductors_settings(tmp_path):
    import torch._inductor.config as inductor

    before = inductor.freezing, inductor.force_fuse_int_mm_with_mul, inductor.use_mixed_mm
    executable, job = build(mlp(), batches(4), tmp_path, scheme="int8dyn", compile=True)
    assert off(executable, job) < 0.05
    assert executable.recompiles
    assert executable.refresh is None
    assert executable.notes[0] == "3 Linear layers in 8 bits"
    assert (inductor.freezing, inductor.force_fuse_int_mm_with_mul, inductor.use_mixed_mm) == before
    executable.close()


def test_candidates_are_for_linear_layers_on_the_cpu(tmp_path):
    module = mlp()
    (job,) = jobs(module, batches(2), TorchAOBackend(), tmp_path)
    found = [c.label for c in TorchAOBackend().candidates(job.signature, module)]
    assert found == ["torchao[compile, scheme=int8dyn]", "torchao[compile]", "torchao[scheme=int8dyn]", "torchao"]
    assert TorchAOBackend().candidates(job.signature, nn.Conv1d(2, 2, 1)) == []
    assert TorchAOBackend().candidates(job.signature, mlp().to("meta")) == []


def test_options_are_checked():
    with pytest.raises(PlanError, match="scheme must be one of"):
        TorchAOBackend(scheme="int4")
    with pytest.raises(PlanError, match="must be among"):
        TorchAOBackend.of(Candidate("torchao", (("bits", 8),)))


def test_without_torchao_it_says_how_to_get_it(monkeypatch):
    assert TorchAOBackend.available().ok
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    assert "torchao 0.9.0 is older than 0.18" in TorchAOBackend.available().reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    state = TorchAOBackend.available()
    assert not state.ok
    assert state.cure == install_command("torchao")


def test_it_is_quiet_when_torchao_is_first_imported(tmp_path):
    code = (
        "import torch; from aitune_lab.backends.torchao import TorchAOBackend; "
        "b = TorchAOBackend(); print(type(b.replacement('a', torch.nn.Linear(4, 4)).weight).__name__)"
    )
    ran = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "Int8Tensor", ran.stderr
    assert ran.stderr == ""
    assert not logging.getLogger("torchao").filters


def test_a_saved_file_gives_another_model_the_same_results(tmp_path):
    import aitune_lab as ait
    from aitune_lab.schema import Plan, Tolerance
    from aitune_lab.testing import ScriptedMeter
    from aitune_lab.tuning.api import make_tuner, run
    from aitune_lab.tuning.options import TuneOptions

    module, fresh, (x,) = mlp(), mlp(), batches(4)
    options = TuneOptions(backends=("torchao[scheme=int8dyn, skip=4]",), meter=ScriptedMeter(), end_to_end=False)
    run(make_tuner(module, [x], Plan(tolerance=Tolerance(max_relative_error=0.05)), options))
    with torch.inference_mode():
        want, exact = module(x), fresh(x)
        ait.save(module, tmp_path / "tuned.ait")
        ait.load(fresh, tmp_path / "tuned.ait")
        got = fresh(x)
    assert torch.equal(got, want)
    assert not torch.equal(got, exact)
    assert ait.stats(fresh).dispatched == 1
    ait.unwrap(fresh), ait.unwrap(module)
