"""Calls traced by torch's older exporter: right for other calls, or refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import jobs
from torch import nn

from aitune_lab.backends import traced
from aitune_lab.backends.eager import TorchEagerBackend
from aitune_lab.backends.traced import can_trace, write_traced
from aitune_lab.capture.signature import DynamicDim
from aitune_lab.errors import Refused


class Function(nn.Module):
    """A module around a function of itself and its inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.conv = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(False)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def ready(function: Any, *items: Any, folder: Path) -> Any:
    (job,) = jobs(Function(function).eval(), list(items), TorchEagerBackend(), folder)
    return job


def rows(*sizes: int) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 8 * b).reshape(b, 8) for b in sizes]


RIGHT = {
    "one call": (lambda m, x: (x @ m.weight).relu(), rows(3)),
    "sizes": (lambda m, x: (x @ m.weight).reshape(x.shape[0], 2, 4).flip(0), rows(1, 3, 5)),
    "halves of sizes": (lambda m, x: x.cumsum(0)[: x.shape[0] // 2], rows(2, 4, 6)),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x[None], x[None] @ m.weight, x[None]), rows(4)),
    "distances": (lambda m, x: torch.cdist(x, m.weight), rows(2, 3)),
    "convolution": (lambda m, x: m.conv(x).mean((2, 3)), [torch.rand(2, 3, 8, 8)]),
    "rows by index": (lambda m, x, i: m.weight[i] + x[:1, i].sum(), [(rows(1)[0], torch.tensor([0, -1, -8]))]),
    "input passed on": (lambda m, x: (x, x + 1), rows(2)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_trace_is_right_at_every_recorded_size(name: str, tmp_path: Path) -> None:
    import onnxruntime

    function, items = RIGHT[name]
    job = ready(function, *items, folder=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_traced(job, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for sample in job.samples:
        tensors = sample.tensors()
        got = session.run(None, {f"input_{i}": x.numpy() for i, x in enumerate(tensors)})
        want = job.original(*tensors)
        for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            torch.testing.assert_close(torch.from_numpy(a), b)


WRONG = {
    "a branch": (
        lambda m, x: x * 2 if x.sum() > 0 else x,
        rows(2),
        r"hold fast .*test_traced.py:\d+: Converting a tensor",
    ),
    "a number": (lambda m, x: x * x.max().item(), rows(2), "hold fast what each call decides"),
    "a count": (lambda m, x: x + torch.arange(int(x.shape[0]))[:, None], rows(2, 3), "to a Python integer"),
    "one size": (lambda m, x: x @ m.weight, rows(2), "was recorded at 2 only"),
    "quotients": (lambda m, x, i: (x, i // 2), [(rows(2)[0], torch.arange(4))], "floor_divide"),
    "log of sigmoid": (lambda m, x: F.logsigmoid(x), rows(2), "log_sigmoid"),
    "a mask": (
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=x[:, :2] @ x[:, :2].t()),
        rows(2),
        "rows that a mask hides",
    ),
    "indices": (lambda m, x, i: (x[i], x[:, None][i, :, i]), [(rows(3)[0], torch.arange(3))], "count indices below 0"),
    "numbers of torch": (lambda m, x: x + torch.rand(8), rows(2), "random numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_trace_would_not_keep_is_refused(name: str, tmp_path: Path) -> None:
    function, items, reason = WRONG[name]
    job = ready(function, *items, folder=tmp_path)
    if name == "one size":
        (job,) = jobs(
            job.module,
            items,
            TorchEagerBackend(),
            tmp_path / "dynamic",
            declared={"*inputs[0]": {0: DynamicDim("b", 1, 2, 4)}},
        )
    if name == "numbers of torch":
        job = replace(job, signature=replace(job.signature, facts=replace(job.signature.facts, random=True)))
    with pytest.raises(Refused, match=reason):
        write_traced(job, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def held_fast(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Hides from torch that it takes a number out of a tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x * float(x[0, 0])


def test_what_torch_does_not_name_shows_on_other_calls(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"answers another call otherwise than the module \(output 0: .*not close"):
        write_traced(ready(held_fast, *rows(2), folder=tmp_path), tmp_path / "model.onnx")


def test_a_call_that_can_not_be_varied_is_not_enough(tmp_path: Path) -> None:
    def sorted_only(module: Any, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_tracing() and not bool((x.diff(dim=-1) >= 0).all()):
            raise ValueError("not sorted")
        return x * 2

    with pytest.raises(Refused, match="one call was recorded, and none could be made to check a trace by: not sorted"):
        write_traced(ready(sorted_only, *rows(2), folder=tmp_path / "one"), tmp_path / "model.onnx")
    write_traced(ready(sorted_only, *rows(2), rows(2)[0] * 3, folder=tmp_path / "two"), tmp_path / "model.onnx")


def test_weights_that_need_files_of_their_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "_MAX_BYTES", 100)
    with pytest.raises(Refused, match="100 bytes at most, and these have"):
        write_traced(ready(lambda m, x: x, *rows(2), folder=tmp_path), tmp_path / "model.onnx")


def test_nothing_of_it_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert can_trace()
    enabled = torch._C._jit_is_onnx_log_enabled()
    job = ready(lambda m, x: x.median(-1).values, *rows(2), folder=tmp_path)
    random = torch.get_rng_state()
    with pytest.raises(Exception, match="aten::median"):
        write_traced(job, tmp_path / "model.onnx")
    assert torch._C._jit_is_onnx_log_enabled() == enabled
    assert torch.equal(torch.get_rng_state(), random)
    assert capfd.readouterr() == ("", "")
