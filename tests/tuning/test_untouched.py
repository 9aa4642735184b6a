"""Tuning changes nothing of the user's but what it installs, and keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import stats, unwrap
from aitune_lab.backends.base import Backend
from aitune_lab.schema import Plan
from aitune_lab.testing import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.testing.models import CountsCalls, Mlp, Pair, WritesInput
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

X = torch.linspace(-1, 1, 12).view(3, 4)


def tune(target: Any, data: Any, *backends: Backend) -> Any:
    with scripted_backend():
        options = TuneOptions(backends=backends or (ScriptedBackend(),), meter=ScriptedMeter())
        return run(make_tuner(target, data, Plan(), options))


def entries(module: nn.Module) -> list[tuple[str, str, int]]:
    return [(n, k, id(v)) for n, child in module.named_modules() for k, v in vars(child).items()]


def test_data_is_as_it_was_though_the_target_writes_its_inputs() -> None:
    x = X.clone()
    module = WritesInput().eval()
    result = tune(module, [x])
    assert torch.equal(x, X)
    assert result.choices[0].candidate.backend == "scripted"
    with torch.no_grad():
        assert torch.equal(module(x), 2 * (X + 1))
    assert torch.equal(x, X + 1)
    assert stats(module).dispatched == 1


@pytest.mark.parametrize(
    "options", [{"fails_at": "build"}, {"fails_at": "refuse"}, {"fails_at": "run"}, {"error": "scaled"}, {"error": "nan"},
                {"error": "dtype"}, {"error": "structure"}, {"latency_ms": 2.0}],
    ids=str,
)  # fmt: skip
def test_candidates_that_fail_are_wrong_or_slow_leave_the_target_alone(options: dict[str, Any]) -> None:
    pair = Pair().eval()
    handle = pair.first.register_forward_hook(lambda m, a, y: None)
    before = entries(pair)
    result = tune(pair, [X], ScriptedBackend(**options))
    assert {c.candidate.backend for c in result.choices} == {"eager"}
    assert entries(pair) == before
    assert list(pair.first._forward_hooks) == [handle.id]


def test_state_is_as_it_was() -> None:
    module = CountsCalls().eval()
    tune(module, [X])
    unwrap(module)
    assert (module.seen, float(module.steps)) == (0, 0.0)


def test_tuned_module_goes_with_its_last_reference() -> None:
    module = Mlp().eval()
    result = tune(module, [X])
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    assert result.choices


def test_tuning_twice_measures_the_original_again() -> None:
    module = Mlp().eval()
    tune(module, [X], ScriptedBackend(weights="baked"))
    second = tune(module, [X], ScriptedBackend(weights="baked"))
    assert second.choices[0].candidate.backend == "scripted"
    with torch.no_grad():
        assert torch.equal(module(X), Mlp.forward(module, X))
    assert stats(module).signatures[0].calls == 1
    unwrap(module)
    assert "forward" not in vars(module)
