"""Weights changed after a graph was captured: every way of changing them gives what eager gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import DIM, INDUCTOR_GRAPH, Chain, on_gpu, pinned, quiet, random
from torch import nn

from aitune_lab import refresh, stats

pytestmark = pytest.mark.gpu


def other_state(m: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v * 1.5 for k, v in m.state_dict().items()}


IN_PLACE: dict[str, Any] = {
    "in place": lambda m: m.layers[3].weight.mul_(1.5),
    "data in place": lambda m: m.layers[3].weight.data.add_(0.1),
    "load_state_dict": lambda m: m.load_state_dict(other_state(m)),
    "load_state_dict of a child": lambda m: m.layers[19].load_state_dict(other_state(m.layers[19])),
}
MOVED: dict[str, Any] = {
    "assign": lambda m: m.load_state_dict(other_state(m), assign=True),
    "new parameter": lambda m: setattr(m.layers[3], "weight", nn.Parameter(m.layers[3].weight * 1.5, False)),
    "new submodule": lambda m: m.layers.__setitem__(3, on_gpu(nn.Linear(DIM, DIM))),
    "double and back": lambda m: m.double().float(),
    "to the CPU and back": lambda m: m.cpu().cuda(),
    "a submodule, double and back": lambda m: m.layers[3].double().float(),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_changes_are_replayed(change: str) -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM)])
    quiet(module, random(4, DIM))
    with torch.no_grad():
        IN_PLACE[change](module)
    x = random(4, DIM)
    assert torch.equal(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 2


@pytest.mark.parametrize("change", MOVED)
def test_moved_weights_run_the_original_at_the_next_call(change: str) -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM)])
    quiet(module, random(4, DIM))
    with torch.no_grad():
        MOVED[change](module)
    x = random(4, DIM)
    assert torch.equal(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 1
    again = change != "new submodule"  # what was put in may compute anything: only tuning again looks at it
    assert refresh(module) is again
    assert torch.equal(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == (2 if again else 1)


@pytest.mark.parametrize("which", ["module", "submodule"])
def test_half(which: str) -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM)])
    quiet(module, random(4, DIM))
    if which == "module":
        module.half()
        x = random(4, DIM, dtype=torch.float16)
        assert torch.equal(quiet(module, x), Chain.forward(module, x))
    else:
        module.layers[0].half()
        with pytest.raises(RuntimeError, match="dtype"):  # as the original does
            quiet(module, random(4, DIM))
    assert stats(module).dispatched == 1
    assert not refresh(module)


def test_replaced_data_is_seen_within_100_calls() -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM)])
    quiet(module, random(4, DIM))
    with torch.no_grad():
        module.layers[7].weight.data = module.layers[7].weight * 1.5
    x = random(4, DIM)
    quiet(module, x, calls=100)
    assert torch.equal(quiet(module, x), Chain.forward(module, x))


def test_on_the_cpu_the_original_runs() -> None:
    module = on_gpu(Chain())
    pinned(module, [random(4, DIM)])
    module.cpu()
    x = torch.randn(4, DIM)
    torch.testing.assert_close(quiet(module, x), Chain.forward(module, x))
    assert stats(module).dispatched == 0


def test_inductor_in_a_graph_reads_live_weights() -> None:
    module = on_gpu(Chain(4))
    result = pinned(module, [random(4, DIM)], INDUCTOR_GRAPH)
    x = random(4, DIM)
    for change in (IN_PLACE["load_state_dict"], lambda m: m.load_state_dict(other_state(m), assign=True)):
        with torch.no_grad():
            change(module)
        torch.testing.assert_close(quiet(module, x), Chain.forward(module, x), rtol=1e-3, atol=1e-3)
    assert refresh(module), result.trials
    torch.testing.assert_close(quiet(module, x), Chain.forward(module, x), rtol=1e-3, atol=1e-3)
