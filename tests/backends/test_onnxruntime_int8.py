"""ONNX Runtime's 8-bit products: right within their rounding at every size, from a file that loads as any other."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from harness import call, jobs
from torch import nn

from aitune_lab.backends.onnxruntime import ONNXRuntimeBackend
from aitune_lab.errors import PlanError, Refused

pytest.importorskip("onnxruntime")

SCHEMES = ("int8wo", "int8dyn")


class Encoder(nn.Module):
    """Linear layers over two and three dimensions (`Gemm` and `MatMul` of ONNX), a tied head, and products of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
        self.pool = nn.Linear(64, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.pool(self.layer(self.embedding(ids))[:, 0])))


def build(module: nn.Module, items: list, folder: Path, scheme: str):
    backend = ONNXRuntimeBackend(quantization=scheme)
    (job,) = jobs(module.eval(), items, backend, folder)
    return backend.build(job), job


def off(executable, job) -> float:
    worst = 0.0
    with torch.no_grad():
        for sample in job.samples:
            got, want = call(executable, job, list(sample.leaves)), job.original(*sample.leaves)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if want.numel():
                worst = max(worst, ((got - want).norm() / want.norm()).item())
    return worst


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
    assert 1e-4 < off(executable, job) < 5 * ONNXRuntimeBackend(quantization=scheme).typical_error()


def test_all_products_with_weights_are_in_eight_bits(built):
    executable, job, scheme = built
    import onnx

    kinds = [node.op_type for node in onnx.load(job.folder / "model.onnx").graph.node]
    assert kinds.count({"int8wo": "MatMulNBits", "int8dyn": "MatMulInteger"}[scheme]) == 6
    assert kinds.count("MatMul") == 2  # of attention, whose both sides are computed
    assert kinds.count("Gemm") == 0
    assert executable.notes[-1] == "6 products in 8 bits"


def test_the_file_is_smaller_and_loads_to_the_same(built, encoder):
    executable, job, scheme = built
    assert [f.name for f in job.folder.iterdir()] == ["model.onnx"]
    assert executable.memory_bytes < 0.6 * sum(p.numel() * 4 for p in encoder.parameters())
    again = ONNXRuntimeBackend(quantization=scheme).load(job)
    ids = torch.randint(0, 40, (2, 7))
    assert torch.equal(again.call(ids)[0], executable.call(ids)[0])
    assert not executable.live_weights


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_of_size_zero(scheme, tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    executable, job = build(module, [torch.randn(size, 32) for size in (3, 0, 1)], tmp_path, scheme)
    assert off(executable, job) < 0.05


def test_nothing_to_quantise_is_refused(tmp_path):
    class Product(nn.Module):
        def forward(self, x, y):
            return x @ y

    with pytest.raises(Refused, match="no product with constant weights"):
        build(Product(), [(torch.randn(2, 3), torch.randn(3, 4))], tmp_path, "int8dyn")


def test_logging_stays_as_it_was(tmp_path):
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.root.manager.disable
    build(nn.Linear(32, 8), [torch.randn(2, 32)], tmp_path, "int8wo")
    assert (root.handlers, root.level, logging.root.manager.disable) == before


def test_an_unknown_scheme_is_an_error():
    with pytest.raises(PlanError, match="quantization must be None or one of"):
        ONNXRuntimeBackend(quantization="int4")


def test_it_is_proposed_beside_the_exact_one(built):
    _, job, _ = built
    found = [c.label for c in ONNXRuntimeBackend().candidates(job.signature, job.module)]
    assert found == ["onnxruntime", "onnxruntime[quantization=int8wo]", "onnxruntime[quantization=int8dyn]"]
