"""Error and time by layer, and a proposal that meets the budget."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from aitune_lab.capture.swap import swapped
from aitune_lab.errors import PlanError, TargetError
from aitune_lab.schema import Candidate, Plan, Tolerance
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run, unwrap
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.sensitivity import _folded, sensitivity


def rounded(path: str, layer: nn.Module) -> nn.Module | None:
    """A Linear layer with weights rounded to eight bits, one scale for all: bad where one weight is large."""
    if not isinstance(layer, nn.Linear):
        return None
    made = copy.deepcopy(layer)
    with torch.no_grad():
        scale = made.weight.abs().max() / 127
        made.weight.copy_((made.weight / scale).round() * scale)
    return made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    with torch.no_grad():
        net[2].weight[0, 0] = 50.0  # all other weights of this layer round to a few levels
    return net


def data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 32)]


BUDGET = Tolerance(max_relative_error=0.05)


def test_the_layer_that_suffers_is_left_and_the_rest_replaced() -> None:
    result = sensitivity(model(), rounded, data(), tolerance=BUDGET, timed=False)
    assert result.left == ("2",)
    assert result.replaced == ("0", "4")
    assert result.layers[0].path == "2"
    assert not result.layers[0].within_budget
    assert all(layer.within_budget for layer in result.layers[1:])
    assert result.comparison is not None
    assert result.comparison.relative_l2 <= 0.05
    assert result.sentence.startswith("2 of 3 layers may be replaced (relative L2 ")
    assert "left: 2 (" in result.sentence
    assert "replaced" in str(result)


def test_a_wide_budget_takes_all_and_a_narrow_one_none() -> None:
    assert sensitivity(model(), rounded, data(), tolerance=Tolerance(max_relative_error=100.0), timed=False).left == ()
    none = sensitivity(model(), rounded, data(), tolerance=Tolerance(max_relative_error=1e-9), timed=False)
    assert none.replaced == ()
    assert none.comparison is None


def test_time_by_layer_comes_beside_the_error() -> None:
    meter = ScriptedMeter({"eager": 2.0, "replaced": 1.0})
    result = sensitivity(model(), rounded, data(), tolerance=BUDGET, meter=meter)
    assert all(layer.saved_ms == pytest.approx(1.0, rel=0.1) for layer in result.layers)
    assert result.table()[0]["speed-up"].startswith(("2", "1.9"))


def test_a_replacement_that_cannot_run_is_left_with_the_reason() -> None:
    def broken(path: str, layer: nn.Module) -> nn.Module | None:
        return nn.Linear(3, 3) if path == "4" else rounded(path, layer)

    result = sensitivity(model(), broken, data(), tolerance=BUDGET)
    assert set(result.left) == {"2", "4"}
    assert "RuntimeError" in next(layer for layer in result.layers if layer.path == "4").problem


def test_the_module_is_not_changed() -> None:
    net, items = model(), data()
    before = copy.deepcopy(net.state_dict())
    keys = {name: set(vars(m)) for name, m in net.named_modules()}
    sensitivity(net, rounded, items, tolerance=BUDGET, timed=False)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert {name: set(vars(m)) for name, m in net.named_modules()} == keys
    assert not any(swapped(m) for m in net.modules())


def test_no_replacement_is_an_error() -> None:
    with pytest.raises(TargetError, match="none of the 6 layers"):
        sensitivity(model(), lambda path, layer: None, data())


class Outlier(nn.Module):
    """One channel between its middle layers is a thousand times as large as the others, and the last of them ignores it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act = nn.Linear(32, 64), nn.GELU()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 8)
        with torch.no_grad():
            self.block[0].bias[3] = 5000.0
            self.block[2].weight[:, 3] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.act(self.first(x))))


def test_the_proposal_is_a_candidate_that_builds_and_is_right() -> None:
    pytest.importorskip("torchao")
    net, items = Outlier().eval(), [torch.randn(16, 32), torch.randn(16, 32)]
    result = sensitivity(net, "torchao[scheme=int8dyn]", items, tolerance=BUDGET, timed=False)
    assert result.left == ("block.2",)
    found = result.candidate()
    assert found == Candidate("torchao", (("scheme", "int8dyn"), ("skip", "block.2")))
    whole = Candidate("torchao", (("scheme", "int8dyn"),))
    options = TuneOptions(backends=(whole, found), meter=ScriptedMeter(), end_to_end=False)
    tuned = run(make_tuner(net, items, Plan(tolerance=BUDGET), options))
    trials = {trial.candidate: trial for trial in tuned.trials.values()}
    assert trials[whole].error_class == "refused"
    assert "out of tolerance" in trials[whole].reason
    assert trials[found].error_class == "within budget"
    assert trials[found].notes == ("3 Linear layers in 8 bits, 1 left",)
    assert result.comparison is not None
    assert trials[found].relative_l2 == pytest.approx(result.comparison.relative_l2, rel=0.2)
    (choice,) = tuned.choices
    assert choice.candidate == found
    unwrap(net)


def test_layers_are_left_by_the_fewest_paths() -> None:
    assert _folded(["a.0.up", "a.0.down", "b"], ["a.1.up", "c"]) == ["a.0", "b"]
    assert _folded(["a.0.up"], ["a.0.down"]) == ["a.0.up"]
    assert _folded(["a.1"], ["a.10"]) == ["a.1"]


def test_what_the_candidate_skips_already_stays_skipped() -> None:
    pytest.importorskip("torchao")
    net, items = Outlier().eval(), [torch.randn(16, 32)]
    result = sensitivity(net, "torchao[scheme=int8dyn, skip=head]", items, tolerance=BUDGET, timed=False)
    assert {layer.path for layer in result.layers} == {"first", "block.0", "block.2"}
    assert result.candidate().option("skip") == "head|block.2"


def test_only_backends_that_lower_layers_make_candidates() -> None:
    pytest.importorskip("torchao")
    by_hand = sensitivity(model(), rounded, data(), tolerance=BUDGET, timed=False)
    with pytest.raises(PlanError, match="made by a function"):
        by_hand.candidate()
    with pytest.raises(PlanError, match="lowers whole modules only"):
        sensitivity(model(), "eager", data())
    narrow = sensitivity(model(), "torchao", data(), tolerance=Tolerance(max_relative_error=1e-9), timed=False)
    with pytest.raises(PlanError, match="none of the 3 layers"):
        narrow.candidate()
