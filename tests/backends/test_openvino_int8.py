"""OpenVINO's 8-bit weights: right within their rounding, really smaller, and what else reads a weight keeps its own."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from harness import call, jobs
from saved import loaded_in_a_fresh_process
from torch import nn
from torch.nn.functional import linear

from aitune_lab.backends.openvino import OpenVINOBackend
from aitune_lab.backends.openvino_int8 import has_large_weights, schemes
from aitune_lab.environment import cpu_flags
from aitune_lab.errors import PlanError, Refused
from aitune_lab.schema import Plan, Tolerance
from aitune_lab.tuning.candidates import shortlist

pytest.importorskip("openvino")

SCHEMES = schemes(cpu_flags())
"""What this processor can follow; `int8dyn` is refused on the others."""


class Encoder(nn.Module):
    """Linear layers, attention whose both sides are computed, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.pool = nn.Linear(64, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.pool(self.layer(self.embedding(ids))[:, 0])))


class Square(nn.Module):
    """One weight behind a product and, turned, behind another; its rows differ in size, and so do its columns."""

    def __init__(self) -> None:
        super().__init__()
        sizes = torch.logspace(-2, 2, 32)
        self.weight = nn.Parameter(torch.randn(32, 32) * sizes * sizes[:, None])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.weight, linear(y, self.weight)


def build(module: nn.Module, items: list, folder: Path, scheme: str | None = "int8wo"):
    backend = OpenVINOBackend(quantization=scheme)
    (job,) = jobs(module.eval(), items, backend, folder)
    return backend.build(job), job


def off(executable, job) -> float:
    """The largest relative L2 error of the recorded calls."""
    worst = 0.0
    with torch.no_grad():
        for sample in job.samples:
            got, want = call(executable, job, list(sample.leaves)), job.original(*sample.leaves)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if want.numel():
                worst = max(worst, ((got - want).norm() / want.norm()).item())
    return worst


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The weight as 8 bits with a scale for each row hold it."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


def constants(job) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the constants in the file that have two dimensions and more, by element type."""
    import openvino

    found: dict[str, list[tuple[int, ...]]] = {}
    for node in openvino.Core().read_model(job.folder / "model.xml").get_ops():
        shape = tuple(node.get_output_shape(0)) if node.get_type_name() == "Constant" else ()
        if len(shape) > 1 and max(shape) > 1:
            found.setdefault(node.get_element_type().get_type_name(), []).append(shape)
    return found


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module", params=SCHEMES)
def built(request, encoder, tmp_path_factory):
    items = [torch.randint(0, 40, (batch, length)) for batch, length in ((2, 5), (1, 3), (3, 9))]
    return *build(encoder, items, tmp_path_factory.mktemp(request.param), request.param), request.param


def test_it_is_right_within_eight_bits_at_every_size(built):
    executable, job, scheme = built
    assert 1e-4 < off(executable, job) < 5 * OpenVINOBackend(quantization=scheme).typical_error()


def test_weights_of_products_are_in_eight_bits_and_the_embedding_is_not(built):
    executable, job, _ = built
    found = constants(job)
    assert sorted(found["i8"]) == [(40, 64), (64, 64), (64, 64), (64, 256), (192, 64), (256, 64)]
    wide = [shape for shape in found["f32"] if min(shape[-2:]) > 1]
    assert wide == [(40, 64)]
    assert executable.notes[-1] == "6 weights in 8 bits"


def test_the_file_is_smaller_and_loads_to_the_same(built, encoder):
    executable, job, scheme = built
    floats = sum(p.numel() * 4 for p in encoder.parameters())
    assert (job.folder / "model.bin").stat().st_size < 0.4 * floats
    again = OpenVINOBackend(quantization=scheme).load(job)
    ids = torch.randint(0, 40, (2, 7))
    assert torch.equal(again.call(ids)[0], executable.call(ids)[0])
    assert not executable.live_weights


def test_only_the_weights_are_rounded_unless_inputs_are_asked_for(tmp_path):
    torch.manual_seed(0)
    layer, x = nn.Linear(256, 64), torch.randn(8, 256)
    want = linear(x, rounded(layer.weight), layer.bias).detach()
    got = {name: build(layer, [x], tmp_path / name, name)[0].call(x)[0] for name in SCHEMES}
    torch.testing.assert_close(got["int8wo"], want, rtol=1e-4, atol=1e-5)
    for other in SCHEMES[1:]:
        assert 1e-4 < (got[other] - want).norm() / want.norm() < 2e-2


def test_processors_without_8_bit_dot_products_keep_inputs_as_they_are(tmp_path, monkeypatch):
    assert schemes(["avx2"]) == ("int8wo",)
    assert schemes(["avx2", "avx_vnni"]) == schemes(["avx512_vnni"]) == ("int8wo", "int8dyn")
    monkeypatch.setattr("aitune_lab.backends.openvino.cpu_flags", lambda: ("avx2",))
    with pytest.raises(Refused, match="which this processor lacks"):
        build(nn.Linear(32, 8), [torch.randn(2, 32)], tmp_path, "int8dyn")


def test_by_way_of_onnx_too(tmp_path, monkeypatch):
    def fails(program):
        raise RuntimeError("no such operator")

    monkeypatch.setattr("openvino.convert_model", fails)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    # Over three dimensions of fixed size the file holds weights that are turned at each call.
    executable, job = build(module, [torch.randn(2, 5, 32)], tmp_path)
    assert off(executable, job) < 0.05
    assert executable.notes[-2:] == ("converted by way of ONNX", "2 weights in 8 bits")
    assert sorted(min(shape) for shape in constants(job)["i8"]) == [8, 32]


@pytest.mark.parametrize(
    ("layer", "axis"),
    [
        (nn.Conv1d(32, 64, 3, bias=False), 0),
        (nn.Conv2d(32, 64, 3, bias=False), 0),
        (nn.Conv2d(64, 64, 3, groups=2, bias=False), 0),
        (nn.ConvTranspose2d(32, 64, 3, bias=False), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_convolutions_have_a_scale_for_each_output_channel(layer, axis, tmp_path):
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.normal_().transpose(0, axis).mul_(
            torch.logspace(-3, 3, 64).view(-1, *[1] * (layer.weight.ndim - 1))
        )
    x = torch.randn(2, layer.in_channels, *[8] * (layer.weight.ndim - 2))
    executable, job = build(layer, [x], tmp_path)
    want = layer(x).detach().transpose(0, 1).flatten(1)
    got = executable.call(x)[0].transpose(0, 1).flatten(1)
    assert ((got - want).norm(dim=1) < 0.02 * want.norm(dim=1)).all()
    assert executable.notes[-1] == "1 weight in 8 bits"
    assert (job.folder / "model.bin").stat().st_size < 0.3 * layer.weight.numel() * 4
    assert executable.memory_bytes > layer.weight.numel() * 4  # they are unpacked to compute with


def test_a_weight_that_is_read_both_ways_has_scales_for_each(tmp_path):
    torch.manual_seed(0)
    module, x, y = Square(), torch.randn(2, 32), torch.randn(2, 32)
    executable, _ = build(module, [(x, y)], tmp_path)
    weight, (by_columns, by_rows) = module.weight.detach(), executable.call(x, y)
    torch.testing.assert_close(by_columns, linear(x, rounded(weight.t())), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(by_rows, linear(y, rounded(weight)), rtol=1e-4, atol=1e-3)
    assert executable.notes[-1] == "2 weights in 8 bits"


def test_a_weight_that_layers_share_is_kept_once(tmp_path):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 64), nn.Linear(64, 64)
    last.weight = first.weight
    executable, job = build(nn.Sequential(first, nn.GELU(), last, nn.GELU(), first), [torch.randn(2, 64)], tmp_path)
    assert constants(job)["i8"] == [(64, 64)]
    assert executable.notes[-1] == "1 weight in 8 bits"
    assert off(executable, job) < 0.05


def test_channels_of_zeros_and_inputs_of_size_zero(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    with torch.no_grad():
        module[2].weight[3] = 0
    executable, job = build(module, [torch.randn(size, 32) for size in (3, 0, 1)], tmp_path)
    assert off(executable, job) < 0.05
    assert torch.equal(executable.call(torch.randn(2, 32))[0][:, 3], module[2].bias[3].detach().expand(2))


def test_what_8_bits_cannot_hold_or_make_smaller_is_refused(tmp_path):
    class Product(nn.Module):
        def forward(self, x, y):
            return x @ y

    infinite = nn.Linear(32, 8)
    with torch.no_grad():
        infinite.weight[0, 0] = torch.inf
    pair = torch.randn(2, 3), torch.randn(3, 4)
    for name, module, item in (
        ("computed", Product(), pair),
        ("infinite", infinite, torch.randn(2, 32)),
        ("narrow", nn.Linear(1, 8), torch.randn(2, 1)),
        ("half", nn.Linear(32, 8).half(), torch.randn(2, 32).half()),
    ):
        with pytest.raises(Refused, match="with constant float32 weights"):
            build(module, [item], tmp_path / name)


def test_an_unknown_scheme_is_an_error():
    with pytest.raises(PlanError, match="quantization must be None or one of"):
        OpenVINOBackend(quantization="int4")


def test_it_is_tried_where_the_budget_admits_it_and_weights_are_large(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("aitune_lab.backends.openvino.cpu_flags", lambda: ("avx512_vnni",))
    (job,) = jobs(encoder, [torch.randint(0, 40, (2, 5))], OpenVINOBackend(), tmp_path / "large")
    eight = {"openvino[quantization=int8wo]", "openvino[quantization=int8dyn]"}

    def tried(tolerance: Tolerance) -> list[str]:
        return [
            c.label for c in shortlist("", encoder, job.signature, Plan(tolerance=tolerance), ["openvino"]).candidates
        ]

    assert tried(Tolerance()) == ["openvino"]
    assert tried(Tolerance(max_relative_error=5e-3)) == ["openvino", "openvino[quantization=int8wo]"]
    assert {*tried(Tolerance(max_relative_error=0.05))} == {"openvino", *eight}
    assert tried(Tolerance(accuracy="exact", max_relative_error=0.05)) == ["openvino"]
    small = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 16)).eval()
    (job,) = jobs(small, [torch.randint(0, 500, (2,))], OpenVINOBackend(), tmp_path / "small")
    assert [c.label for c in OpenVINOBackend().candidates(job.signature, small)] == ["openvino"]


def test_tables_and_recurrent_weights_and_lower_precisions_are_not_worth_it():
    assert has_large_weights(nn.Conv2d(64, 64, 3))
    assert has_large_weights(nn.MultiheadAttention(64, 4))
    for module in (nn.Embedding(500, 64), nn.LSTM(64, 64), nn.Linear(64, 64).bfloat16(), nn.Linear(64, 63)):
        assert not has_large_weights(module)


def test_saved_in_eight_bits_and_loaded_in_a_fresh_process(tmp_path):
    said = loaded_in_a_fresh_process("openvino[quantization=int8wo]", tmp_path, max_relative_error=0.05)
    assert "openvino[quantization=int8wo] loaded" in said
    with zipfile.ZipFile(tmp_path / "tuned.ait") as file:
        (name,) = (name for name in file.namelist() if name.endswith("model.xml"))
        assert file.read(name).count(b'element_type="i8"') == 2
