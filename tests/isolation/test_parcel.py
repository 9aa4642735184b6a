"""What is sent to a child is what comes out there."""

from __future__ import annotations

import dataclasses
import sys
import threading
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from faults import faulty, job_for
from torch import nn

from aitune_lab.capture.structure import flatten, unflatten_call
from aitune_lab.isolation.parcel import Outbox, Unsendable, _can_be_imported, unpack
from aitune_lab.schema import Candidate
from aitune_lab.testing import install_scripted

X = torch.linspace(-1, 1, 12).view(3, 4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("view", self.first.weight.detach()[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Both(NamedTuple):
    tensor: torch.Tensor
    array: np.ndarray


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    kind: str = "sum"


class Structured(nn.Module):
    def forward(self, both: Both, flags: dict[str, Any], dtype: torch.dtype = torch.float32) -> Answer:
        return Answer(both.tensor.to(dtype) + torch.from_numpy(both.array) * flags["scale"])


@pytest.fixture
def outbox(tmp_path: Path) -> Any:
    made = Outbox(tmp_path)
    yield made
    made.close()


def test_tied_and_viewed_weights_stay_so(outbox: Outbox, empty: Path) -> None:
    job = job_for(Tied().eval(), empty, Candidate("onnxruntime"), X)
    got = unpack(outbox.pack(job)).module
    assert got.first.weight is got.second.weight
    assert got.view.data_ptr() == got.first.weight.data_ptr()
    assert torch.equal(got(X), job.module(X))


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_settings_of_matrix_products_are_the_same_there(outbox: Outbox, empty: Path, precision: str) -> None:
    matmul = torch.backends.cuda.matmul

    def settings() -> tuple[Any, ...]:
        sums = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
        return torch.get_float32_matmul_precision(), getattr(matmul, "fp32_precision", None), *sums

    untouched = settings()
    packed = outbox.pack(job_for(Tied(), empty, faulty(), X))
    try:
        torch.set_float32_matmul_precision(precision)  # what an earlier job left in a process that is used again
        matmul.allow_bf16_reduced_precision_reduction = False
        unpack(packed)
        assert settings() == untouched
    finally:
        matmul.allow_bf16_reduced_precision_reduction = untouched[3]
        torch.set_float32_matmul_precision(untouched[0])
        if hasattr(matmul, "fp32_precision"):
            matmul.fp32_precision = untouched[1]


def test_written_once_for_all_candidates(outbox: Outbox, empty: Path) -> None:
    net = Tied().eval()
    job = job_for(net, empty, Candidate("onnxruntime"), X)
    first = outbox.pack(job)
    second = outbox.pack(dataclasses.replace(job, candidate=Candidate("inductor")))
    assert first[:2] == second[:2]
    assert unpack(second).candidate == Candidate("inductor")
    with torch.no_grad():
        net.first.bias.add_(1)
    third = outbox.pack(job)
    assert third[0] != first[0]
    assert third[1] == first[1]
    assert not Path(first[0]).exists()
    assert torch.equal(unpack(third).module(X), net(X))


def test_calls_keep_their_classes_and_values(outbox: Outbox, empty: Path) -> None:
    both = Both(X, np.ones((3, 4), dtype=np.float32))
    job = job_for(Structured().eval(), empty, Candidate("onnxruntime"), ((both, {"scale": 2.5}), {}))
    got = unpack(outbox.pack(job))
    assert got.signature == job.signature
    call = unflatten_call(got.samples[0].node, got.samples[0].leaves)
    assert type(call["both"]) is Both
    args, kwargs = got.form.arguments(call)
    assert flatten(got.original(*args, **kwargs)).node == got.signature.outputs
    assert (got.path, got.folder, got.threads) == (job.path, job.folder, job.threads)


def test_module_from_a_file_that_cannot_be_imported(outbox: Outbox, empty: Path) -> None:
    source = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return helper(x)\n\ndef helper(x):\n    return 2 * x\n"
    made = types.ModuleType("made_by_hand")
    sys.modules["made_by_hand"] = made
    try:
        exec(source, vars(made))
        files = outbox.pack(job_for(made.Net().eval(), empty, Candidate("onnxruntime"), X))
        del sys.modules["made_by_hand"]
        got = unpack(files).module
        assert torch.equal(got(X), 2 * X)
        assert sys.modules["made_by_hand"].helper(3) == 6  # compilers look globals up there
    finally:
        sys.modules.pop("made_by_hand", None)


def test_tuned_module_is_sent_as_the_original(outbox: Outbox, empty: Path) -> None:
    net = Tied().eval()
    with torch.no_grad():
        want = net(X)
    install_scripted(net, X, error="scaled")
    got = unpack(outbox.pack(job_for(net, empty, Candidate("onnxruntime"), X)))
    with torch.no_grad():
        assert torch.equal(got.module(X), want)


def test_what_cannot_be_sent_is_named(outbox: Outbox, empty: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    net[1].guard = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(Unsendable, match=r"^attribute '1\.guard' can't be sent to another process \(cannot pickle"):
        outbox.pack(job_for(net, empty, faulty(), X))
    assert not list(outbox.folder.glob("[0-9]*"))


def test_only_what_cannot_be_imported_is_sent_by_value() -> None:
    for name in ("abc", "sys", "collections.abc", "torch.nn.modules.linear", "aitune_lab.schema", "faults", "numpy"):
        assert _can_be_imported(name), name
    sys.modules["made_by_hand"] = made = types.ModuleType("made_by_hand")
    made.__file__ = "somewhere.py"
    try:
        assert not _can_be_imported("made_by_hand")
    finally:
        del sys.modules["made_by_hand"]
