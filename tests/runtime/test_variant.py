"""Memory formats, precisions and graphs around any backend: what can be seen without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.backends.base import BuildJob
from aitune_lab.capture.swap import original_method
from aitune_lab.errors import Refused
from aitune_lab.runtime.graph_check import nearly_equal, refuse_uncapturable
from aitune_lab.runtime.variant import build
from aitune_lab.schema import Candidate
from aitune_lab.testing.scripted import record_calls


def job_of(module: nn.Module, *calls: Any, folder: Path, **options: Any) -> BuildJob:
    recorder, signatures = record_calls(module, *calls)
    recording = recorder.recordings[0]
    signature = signatures[0].signature
    method = original_method(module, "forward")
    samples = signatures[0].all_samples()
    return BuildJob("", module, method, recording.form, signature, samples, Candidate("eager", **options), folder)


def test_channels_last_runs_a_copy(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    job = job_of(module, x, folder=tmp_path, memory_format="channels_last")
    executable = build(job)
    with torch.no_grad():
        y = executable.call(x)
        torch.testing.assert_close(y, module(x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert module[0].weight.is_contiguous()
    assert not executable.live_weights
    assert executable.memory_bytes == sum(p.numel() * 4 for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"precision": "float8"}, "precision must be one of"),
        ({"precision": "tf32"}, "while capturing a CUDA graph only"),
        ({"memory_format": "blocked"}, "memory_format must be"),
        ({"cuda_graph": True}, "x is on the cpu|input is on the cpu"),
    ],
)
def test_refusals_give_the_reason(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    job = job_of(nn.Linear(3, 3).eval(), torch.randn(2, 3), folder=tmp_path, **options)
    with pytest.raises(Refused, match=reason):
        build(job)


def test_backends_that_cannot_be_captured(tmp_path: Path) -> None:
    job = job_of(nn.Linear(3, 3).eval(), torch.randn(2, 3), folder=tmp_path)
    with pytest.raises(Refused, match="onnxruntime can't be captured"):
        build(replace(job, candidate=Candidate("onnxruntime", cuda_graph=True)))


FACTS = {
    "mutated": (("x",), "changes inputs in place"),
    "state": (("count",), "changes the module's state"),
    "varying_values": (("output[1]",), "returns values that differ"),
    "hooked": (("0",), "the user's hooks"),
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_no_graph_keeps(tmp_path: Path, fact: str) -> None:
    job = job_of(nn.Linear(3, 3).eval(), torch.randn(2, 3), folder=tmp_path)
    signature, (names, reason) = job.signature, FACTS[fact]

    def on_gpu(leaf: Any) -> Any:
        return replace(leaf, device="cuda:0")

    signature = replace(
        signature,
        leaves=tuple(map(on_gpu, signature.leaves)),
        output_leaves=tuple(map(on_gpu, signature.output_leaves)),
        facts=replace(signature.facts, **{fact: names}),
    )
    with pytest.raises(Refused, match=reason):
        refuse_uncapturable(replace(job, signature=signature))


def test_nearly_equal() -> None:
    x = torch.randn(100)
    nan = torch.where(torch.arange(100) == 3, float("nan"), x)
    assert nearly_equal(x, x.clone())
    assert nearly_equal(nan, nan.clone())
    assert nearly_equal(nan, nan * (1 + 1e-6))
    assert nearly_equal(x.half(), x.half() * (1 + 1e-3))
    assert not nearly_equal(x, nan)
    assert not nearly_equal(x, x + 1e-3)
    assert not nearly_equal(x, x.roll(1))
    assert not nearly_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not nearly_equal(torch.tensor([float("inf")]), torch.tensor([float("nan")]))


class Strided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 2))


def test_recorded_strides_that_matter_must_be_contiguous(tmp_path: Path) -> None:
    job = job_of(Strided(), torch.arange(12.0).view(4, 3).t(), folder=tmp_path)
    with pytest.raises(Refused, match=r"depends on the strides of x, which was recorded with \(1, 3\)"):
        build(job)
    contiguous = job_of(Strided(), torch.arange(12.0).view(4, 3), folder=tmp_path)
    assert not build(contiguous).flat
