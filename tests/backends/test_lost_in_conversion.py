"""What readers of exported graphs lose without a word is mended, checked at each call, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import jobs
from torch import nn

from aitune_lab.backends.inductor_aot import TorchInductorAotBackend
from aitune_lab.backends.inductor_jit import TorchInductorJitBackend
from aitune_lab.backends.integers import Growth
from aitune_lab.backends.onnxruntime import ONNXRuntimeBackend
from aitune_lab.backends.openvino import OpenVINOBackend
from aitune_lab.errors import Refused

BACKENDS = [ONNXRuntimeBackend, OpenVINOBackend]
both = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
INF = float("inf")


def build(backend: Any, module: nn.Module, items: list[Any], folder: Path) -> Any:
    (job,) = jobs(module.eval(), items, backend(), folder)
    return backend().build(job)


class Look(nn.Module):
    """Picks rows of a table, along a fixed axis and along one whose size varies."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, at: torch.Tensor, which: torch.Tensor) -> Any:
        return self.table(ids.unsqueeze(1)), F.one_hot(ids, 10), x[:, at], x.gather(1, which)


@both
def test_indices_outside_of_their_table_raise_as_in_torch(backend, tmp_path):
    def item(columns: int, ids: Any = (0, 9), at: Any = (0, -1), which: Any = (0, 1)) -> Any:
        return torch.randn(2, columns), torch.tensor(ids), torch.tensor(at), torch.tensor([which] * 2)

    module = Look()
    executable = build(backend, module, [item(5), item(7)], tmp_path)
    for fits in (item(6), item(6, at=(-6, 5), which=(5, 5))):
        with torch.no_grad():
            for ours, theirs in zip(executable.call(*fits), module(*fits), strict=True):
                torch.testing.assert_close(ours, theirs)
    for outside in (
        {"ids": (-1, 2)},
        {"ids": (2, 10)},
        {"at": (0, 6)},
        {"at": (-7, 0)},
        {"which": (-1, 0)},
        {"which": (6, 0)},
    ):
        with pytest.raises(IndexError, match="indices and must lie in"):
            executable.call(*item(6, **outside))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.table(ids.long()).sum(1) + x[at] + x.index_select(0, ids[:, 0].clamp(0, 2))


@pytest.mark.parametrize("backend", [TorchInductorJitBackend, TorchInductorAotBackend], ids=lambda each: each.name)
def test_indices_outside_of_their_table_do_not_end_the_process(backend, tmp_path):
    module, x, at = Tokens(), torch.randn(3, 4), torch.tensor([0, -3])
    executable = build(backend, module, [(torch.randint(0, 10, (2, 4000), dtype=torch.int32), x, at)], tmp_path)
    ids = torch.randint(0, 10, (2, 4000), dtype=torch.int32)
    with torch.inference_mode():
        results = executable.call(ids, x, at)
        torch.testing.assert_close(results[0] if executable.flat else results, module(ids, x, at), rtol=1e-4, atol=1e-4)
        for outside in ((ids - 1, x, at), (ids + 1, x, at), (ids, x, at + 3), (ids, x, at - 1)):
            with pytest.raises(IndexError, match="indices and must lie in"):
                executable.call(*outside)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@both
def test_rows_that_a_mask_of_floats_hides_altogether_are_zero(backend, tmp_path):
    torch.manual_seed(0)
    items = [(torch.randn(b, 1, n, 8), torch.zeros(b, 1, 1, n)) for b, n in ((2, 5), (3, 6))]
    executable = build(backend, Attention(), items, tmp_path)
    q, mask = torch.randn(2, 1, 5, 8), torch.zeros(2, 1, 1, 5)
    mask[0], mask[1, ..., 3:] = -INF, -INF
    (ours,) = executable.call(q, mask)
    assert not ours[0].any()
    torch.testing.assert_close(ours, Attention()(q, mask), rtol=1e-4, atol=1e-5)


class Quotients(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return [torch.div(a, b, rounding_mode=mode) for mode in ("floor", "trunc")]


@both
def test_integers_are_divided_as_integers(backend, tmp_path):
    executable = build(backend, Quotients(), [(torch.tensor([7, 8]), torch.tensor([2, 3]))], tmp_path)
    for a in (torch.tensor([2**30 + 1, -7]), torch.tensor([2**53 + 1, -(2**40) - 1])):
        given = a, torch.tensor([1, 2])
        for ours, theirs in zip(executable.call(*given), Quotients()(*given), strict=True):
            assert torch.equal(ours, theirs)


class Picks(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        return x.argmax(-1), x.amax(-1) + y.sum(-1), x + mask


@both
def test_nan_is_left_to_the_original_where_something_picks_by_it(backend, tmp_path):
    hidden = torch.tensor([0.0, -INF, 0.0])
    executable = build(backend, Picks(), [(torch.randn(b, 3), torch.randn(b, 3), hidden) for b in (2, 4)], tmp_path)
    x, y, nan = torch.randn(2, 3), torch.randn(2, 3), torch.full((2, 3), float("nan"))
    for given in ((x, y, hidden), (x, nan, hidden), (1e30 * x, y, hidden)):
        for ours, theirs in zip(executable.call(*given), Picks()(*given), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
    for given in ((nan, y, hidden), (x / 0, y, hidden)):
        with pytest.raises(ValueError, match="input 0 holds NaN or infinity"):
            executable.call(*given)


@both
def test_the_logarithm_of_a_sigmoid_stays_finite(backend, tmp_path):
    executable = build(backend, nn.LogSigmoid(), [torch.randn(2, 3), torch.randn(4, 3)], tmp_path)
    x = torch.tensor([[-1e4, -100.0, 0.0], [100.0, 1e4, -1.0]])
    torch.testing.assert_close(executable.call(x)[0], F.logsigmoid(x), rtol=1e-5, atol=1e-6)


class Halve(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return F.interpolate(image, scale_factor=0.5, mode="area")


@pytest.mark.parametrize("sizes", [(8, 12), (8, 9)])
def test_sizes_that_converting_takes_for_even_are_refused(sizes, tmp_path):
    with pytest.raises(Refused, match="settled on code that holds only for"):
        build(ONNXRuntimeBackend, Halve(), [torch.randn(2, 3, n, n) for n in sizes], tmp_path)


class Sums(nn.Module):
    def forward(self, counts: torch.Tensor, mask: torch.Tensor) -> Any:
        return counts.sum(-1), mask.sum(-1), mask + mask


def test_sums_that_32_bits_may_not_hold_run_the_original(tmp_path):
    counts, mask = torch.arange(4, dtype=torch.int32), torch.ones(4, dtype=torch.int64)
    executable = build(OpenVINOBackend, Sums(), [(counts, mask)], tmp_path)
    executable.call(counts, mask)
    assert executable.uncovered() == 0
    for given in ((torch.full((4,), 2**31 - 1, dtype=torch.int32), mask), (counts, torch.full((4,), 2**30))):
        for ours, theirs in zip(executable.call(*given), Sums()(*given), strict=True):
            assert torch.equal(ours, theirs)
    assert executable.uncovered() == 2


def test_what_an_input_may_hold_shrinks_with_what_is_made_of_it():
    edge = torch.tensor([2**31 - 1, -(2**31)])
    assert Growth(0).fits(edge)
    assert not Growth(0).fits(edge + 1)
    assert not Growth(0, additions=1).fits(edge)
    assert not Growth(0, sums=1).fits(torch.full((4,), 2**29))
    assert Growth(0, sums=1).fits(torch.full((4,), 2**29 - 1))
    assert Growth(0, additions=3, sums=3).fits(torch.zeros(0, dtype=torch.int64))


class Product(nn.Module):
    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.prod(-1)


class Counts(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.bincount(ids, minlength=8)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(ids, offsets)


class Later(nn.Module):
    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        return seconds + 2**40


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hashes", torch.tensor([2**40, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.hashes


@pytest.mark.parametrize(
    ("backend", "module", "item", "reason"),
    [
        (ONNXRuntimeBackend, Product(), torch.arange(4), "in floating point"),
        (OpenVINOBackend, Product(), torch.arange(4, dtype=torch.int32), "prod of given integers"),
        (OpenVINOBackend, Counts(), torch.arange(4), "writes outside of its memory"),
        (OpenVINOBackend, Bags(), (torch.arange(4), torch.tensor([0, 2])), "where one is empty"),
        (OpenVINOBackend, Later(), torch.arange(4), "add with 1099511627776"),
        (OpenVINOBackend, Table(), torch.randn(2), "holds integers beyond 32 bits"),
    ],
)
def test_integers_that_it_cannot_hold_are_refused(backend, module, item, reason, tmp_path):
    with pytest.raises(Refused, match=reason):
        build(backend, module, [item], tmp_path)
