"""Executables that read weights by address see in-place changes, and are left alone once a weight lies elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import AituneWarning, refresh, stats
from aitune_lab.runtime.installed import install_all
from aitune_lab.testing.models import Pair
from aitune_lab.testing.scripted import prepare_scripted

X = torch.linspace(-1, 1, 12).view(3, 4)


class ByAddress:
    """Stands for a captured graph: computes with the tensors that it held when it was made."""

    def __init__(self, pair: Pair, can_refresh: bool) -> None:
        self.pair, self.can_refresh, self.refreshed = pair, can_refresh, 0
        self.capture()
        installed = prepare_scripted(pair, X, weights="live", call=self.call)
        executable = installed.entries[0].executable
        executable.moved, executable.refresh = self.moved, self.refresh
        # The dispatch is made anew, so that it knows of `moved`.
        from aitune_lab.runtime.installed import prepare

        self.installed = prepare(pair, "forward", "", installed.entries, installed.plan)
        install_all([self.installed])

    def capture(self) -> None:
        self.held = [p.detach() for p in self.pair.parameters()]

    def call(self, x: torch.Tensor) -> list[torch.Tensor]:
        names = [name for name, _ in self.pair.named_parameters()]
        plain = Pair().eval()
        plain.load_state_dict(dict(zip(names, self.held, strict=True)))
        return [plain(x)]

    def moved(self) -> bool:
        return [p.data_ptr() for p in self.pair.parameters()] != [p.data_ptr() for p in self.held]

    def refresh(self) -> bool:
        self.refreshed += 1
        if self.can_refresh:
            self.capture()
        return self.can_refresh


@pytest.fixture
def pair() -> Pair:
    return Pair().eval().requires_grad_(False)


def expected(pair: Pair) -> torch.Tensor:
    plain = Pair().eval().to(pair.first.up.weight.dtype)
    plain.load_state_dict(pair.state_dict())
    return plain(X.to(pair.first.up.weight.dtype))


def quiet(pair: Pair, calls: int = 1) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        for _ in range(calls):
            y = pair(X)
    return y


IN_PLACE = {
    "in place": lambda p: p.first.up.weight.mul_(2),
    "data in place": lambda p: p.first.up.weight.data.add_(1),
    "load_state_dict": lambda p: p.load_state_dict({k: v + 1 for k, v in p.state_dict().items()}),
}
MOVES: dict[str, Any] = {
    "assign": lambda p: p.load_state_dict({k: v + 1 for k, v in p.state_dict().items()}, assign=True),
    "new parameter": lambda p: setattr(p.first.up, "weight", nn.Parameter(p.first.up.weight * 2, False)),
    "double and back": lambda p: p.double().float(),
    "of a submodule": lambda p: p.second.double().float(),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_values_changed_in_place_stay_dispatched(pair: Pair, change: str) -> None:
    ByAddress(pair, True)
    pair(X)
    IN_PLACE[change](pair)
    torch.testing.assert_close(pair(X), expected(pair))
    assert stats(pair).dispatched == 2


@pytest.mark.parametrize("change", MOVES)
def test_moved_weights_run_the_original_at_once(pair: Pair, change: str) -> None:
    graph = ByAddress(pair, True)
    pair(X)
    MOVES[change](pair)
    torch.testing.assert_close(quiet(pair), expected(pair))
    assert stats(pair).dispatched == 1
    assert graph.refreshed == 0, "a user's call must not capture"


def test_data_replaced_is_seen_within_100_calls(pair: Pair) -> None:
    ByAddress(pair, True)
    pair(X)
    pair.second.down.weight.data = torch.randn_like(pair.second.down.weight)
    quiet(pair, 100)
    torch.testing.assert_close(quiet(pair), expected(pair))


def test_weights_put_back_are_used_again(pair: Pair) -> None:
    ByAddress(pair, True)
    before = pair.first.up.weight
    pair.first.up.weight = nn.Parameter(before * 2, False)
    quiet(pair)
    pair.first.up.weight = before
    quiet(pair, 2)
    assert stats(pair).dispatched >= 1
    torch.testing.assert_close(quiet(pair), expected(pair))


@pytest.mark.parametrize("can_refresh", [True, False])
def test_refresh_captures_again_when_asked(pair: Pair, can_refresh: bool) -> None:
    graph = ByAddress(pair, can_refresh)
    MOVES["assign"](pair)
    quiet(pair)
    assert refresh(pair) is can_refresh
    assert graph.refreshed == 1
    torch.testing.assert_close(quiet(pair), expected(pair))
    assert stats(pair).dispatched == int(can_refresh)


def test_other_dtype_runs_the_original(pair: Pair) -> None:
    ByAddress(pair, True)
    pair.double()
    with pytest.raises(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        pair(X)  # as the original does: its weights are float64 now
    assert refresh(pair) is False


def test_weights_moved_before_the_dispatch_was_made(pair: Pair) -> None:
    graph = ByAddress(pair, True)
    MOVES["assign"](pair)
    from aitune_lab.runtime.installed import prepare

    install_all([prepare(pair, "forward", "", graph.installed.entries, graph.installed.plan)])
    torch.testing.assert_close(quiet(pair), expected(pair))
    assert stats(pair).dispatched == 0


def test_attribute_changed_after_capture_is_seen_because_a_graph_holds_it_as_a_constant() -> None:
    class Scaled(Pair):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    module = Scaled().eval().requires_grad_(False)
    module.scale = 1.0
    ByAddress(module, can_refresh=True)
    plain = module(X)
    module.scale = 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        for _ in range(101):
            y = module(X)
    torch.testing.assert_close(y, 5 * plain)
    assert refresh(module) is False
    module.scale = 1.0
    assert refresh(module) is True
    torch.testing.assert_close(module(X), plain)
