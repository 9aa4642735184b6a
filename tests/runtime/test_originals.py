"""Memory: what is refused under a limit, who holds what, and what becomes of the weights of tuned modules."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab import Plan
from aitune_lab.errors import SignatureMiss, TargetError
from aitune_lab.runtime.installed import installed_in, release_originals, stats
from aitune_lab.runtime.originals import Parked, bytes_of
from aitune_lab.schema import Candidate, Limits
from aitune_lab.testing.models import Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, install_scripted, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


WEIGHTS_BYTES = bytes_of([mlp()])


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


BAKED, LIVE = scripted(weights="baked"), scripted(latency_ms=0.6)


def tune(target: Any, *candidates: Candidate, plan: Plan | None = None, **options: Any) -> TuneResult:
    made = TuneOptions(backends=candidates, meter=ScriptedMeter(), store=None, **options)
    return run(make_tuner(target, [X], plan or Plan(), made))


def test_a_candidate_that_would_not_fit_is_refused_with_figures() -> None:
    limit = Plan(limits=Limits(memory_bytes=2 * WEIGHTS_BYTES - 1))
    result = tune(mlp(), BAKED, LIVE, plan=limit)
    assert result.choices[0].candidate == LIVE
    lost = result.choices[0].losers[BAKED.label]
    assert "more than the memory limit of" in lost
    assert "848 B for its own copy of the weights" in lost
    roomy = Plan(limits=Limits(memory_bytes=2 * WEIGHTS_BYTES))
    assert tune(mlp(), BAKED, LIVE, plan=roomy).choices[0].candidate == BAKED


def test_stats_tell_who_holds_memory() -> None:
    model = mlp()
    assert stats(model).memory_bytes == {}
    tune(model, BAKED)
    assert stats(model).memory_bytes["originals"] == WEIGHTS_BYTES
    installed_in(model)[0].entries[0].executable.memory_bytes = 5_000_000
    assert stats(model).memory_bytes == {"originals": WEIGHTS_BYTES, BAKED.label: 5_000_000}
    assert "memory: originals 0.0 MB, scripted[weights=baked] 5.0 MB" in str(stats(model))


def test_dropped_weights_are_freed_and_tuned_calls_go_on() -> None:
    model = mlp()
    expected = model(X).detach()
    weights = [weakref.ref(t) for t in model.parameters()]
    tune(model, BAKED, originals="drop")
    gc.collect()
    assert [ref() for ref in weights] == [None] * len(weights)
    with torch.inference_mode():
        assert torch.equal(model(X), expected)
    assert stats(model).memory_bytes["originals"] == 0
    assert stats(model).dispatched == 1


def test_what_needs_dropped_weights_says_why_it_cannot_be_done() -> None:
    model = mlp()
    parent = Pair(model, nn.Identity())
    tune(model, BAKED, originals="drop")
    with torch.inference_mode():
        with pytest.raises(SignatureMiss, match=r"Tuned: \(input: float32\[4, 8\]\).*originals='cpu'"):
            model(X[:3])
        model.train()
        with pytest.raises(SignatureMiss, match="training mode"):
            model(X)
        model.eval()
        model(X)
    actions = (
        lambda: ait.unwrap(model),
        lambda: model.state_dict(),
        lambda: parent.state_dict(),
        lambda: model[0].state_dict(),
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(parent),
        lambda: pickle.dumps(parent),
        lambda: tune(model, BAKED),
    )
    for action in actions:
        with pytest.raises(TargetError, match="were dropped after tuning"):
            action()
    with torch.inference_mode():
        model(X)


@pytest.mark.parametrize("originals", ["cpu", "drop"])
def test_executables_that_read_the_live_weights_keep_them(originals: Any) -> None:
    model = mlp()
    result = tune(model, LIVE, originals=originals)
    said = [e.data["message"] for e in result.events if e.kind == "log"]
    assert any("stay where they are" in m and "reads the module's own weights" in m for m in said)
    assert not any(t.is_meta for t in model.parameters())
    ait.unwrap(model)


def test_a_parked_module_answers_misses_and_is_unwrapped_exactly() -> None:
    model = mlp()
    before = [(id(t), t.data_ptr()) for t in model.parameters()]
    expected = model(X[:3]).detach()
    tune(model, BAKED, originals="cpu")
    (item,) = installed_in(model)
    assert isinstance(item.dispatch.original, Parked)
    with torch.inference_mode(), pytest.warns(ait.AituneWarning, match="fits no tuned signature"):
        assert torch.equal(model(X[:3]), expected)
    ait.unwrap(model)
    assert [(id(t), t.data_ptr()) for t in model.parameters()] == before
    assert copy.deepcopy(model) is not model


def test_weights_that_other_modules_use_are_not_parked() -> None:
    pair = Pair(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    pair.second.weight = pair.first.weight
    item = install_scripted(pair.first, X, weights="baked", path="first")
    refused = release_originals(pair, [item], "cpu")
    assert refused == {"first": "second uses some of them too"}


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ait.PlanError, match="originals must be one of"):
        TuneOptions(originals="gone")  # type: ignore[arg-type]
