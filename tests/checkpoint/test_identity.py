from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.checkpoint.identity import identity_of, mismatch, weights_digest
from aitune_lab.errors import CheckpointError


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_weights_have_equal_digests(dtype: torch.dtype) -> None:
    module = net(dtype)
    other = copy.deepcopy(module)
    other[0].weight = nn.Parameter(module[0].weight.detach().t().contiguous().t(), requires_grad=False)
    assert weights_digest(module) == weights_digest(other)
    assert mismatch(identity_of("", module), other, weights=True) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].weight.data[0, 0].add_(1e-6),
        lambda m: m[0].bias.data.neg_(),
        lambda m: m[1].running_mean.add_(1),
        lambda m: m[1].num_batches_tracked.add_(1),
        lambda m: m.half(),
        lambda m: m.append(nn.Linear(4, 4)),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.data.reshape(3, 4))),
    ],
)
def test_any_change_shows(change: Any) -> None:
    module = net()
    before = weights_digest(module)
    change(module)
    assert weights_digest(module) != before


def test_tied_weights_are_read_once_and_equal_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from aitune_lab.checkpoint import identity

    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    untied = copy.deepcopy(tied)
    untied[1].weight = nn.Parameter(tied[0].weight.detach().clone())
    read = []
    content = identity._content_digest
    monkeypatch.setattr(identity, "_content_digest", lambda t: read.append(t) or content(t))
    assert weights_digest(tied) == weights_digest(untied)
    assert len(read) == 1 + 2


def test_views_that_only_begin_alike_differ() -> None:
    base = torch.arange(8.0)
    module = nn.Module()
    module.register_buffer("a", base[:4])
    module.register_buffer("b", base[::2])
    other = nn.Module()
    other.register_buffer("a", base[:4].clone())
    other.register_buffer("b", base[:4].clone())
    assert weights_digest(module) != weights_digest(other)


def test_weights_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    whole = weights_digest(module)
    monkeypatch.setattr("aitune_lab.checkpoint.identity._CHUNK_BYTES", 7)
    assert weights_digest(module) == whole


def test_weights_without_values() -> None:
    with pytest.raises(CheckpointError, match=r"'body' cannot be identified: .* meta device"):
        identity_of("body", nn.Linear(2, 2, device="meta"))


def test_submodules_that_come_and_go() -> None:
    saved = identity_of("", net())
    more = net()
    more.append(nn.ReLU())
    assert mismatch(saved, more, weights=True) == "it has submodule '3', which the saved one had not"
    assert mismatch(identity_of("", more), net(), weights=True) == "it lacks submodule '3'"


def test_settings_that_only_the_representation_shows() -> None:
    class Shown(nn.Module):
        def __init__(self, mode: str) -> None:
            super().__init__()
            self.mode, self.function = mode, lambda x: x

        def extra_repr(self) -> str:
            return f"mode={self.mode}, function={self.function}"

    module = nn.Sequential(Shown("linear"))
    saved = identity_of("", module)
    assert mismatch(saved, nn.Sequential(Shown("linear")), weights=True) is None
    problem = mismatch(saved, nn.Sequential(Shown("cubic")), weights=True)
    assert "submodule '0' is set up otherwise than the saved one; here it is Shown(mode=cubic" in str(problem)


def test_a_file_without_structure_is_compared_by_weights() -> None:
    from dataclasses import replace

    saved = replace(identity_of("", nn.Sequential(nn.ReLU())), structure=())
    assert mismatch(saved, nn.Sequential(nn.GELU()), weights=True) is None


def test_module_without_weights() -> None:
    assert weights_digest(nn.ReLU()) == weights_digest(nn.GELU())


def test_a_scripts_class_may_come_from_a_module_of_its_own() -> None:
    from dataclasses import replace

    module = net()
    saved = identity_of("", module)
    assert mismatch(replace(saved, type="__main__:Sequential"), module, weights=True) is None
    assert "its class is" in str(mismatch(replace(saved, type="elsewhere:Sequential"), module, weights=True))
