from __future__ import annotations

from collections.abc import Callable

import pytest

from aitune_lab.errors import PlanError
from aitune_lab.schema import Candidate, Rule, Tolerance, Trial
from aitune_lab.tuning.strategies import decide_pin

Make = Callable[..., Trial]


def pin(backend: str, accept_error: bool = False) -> Rule:
    return Rule("encoder", "pin", Candidate(backend), accept_error=accept_error)


def test_a_right_pin_wins_however_slow(make: Make) -> None:
    eager, slow, fast = make("eager", {1: 1.0}), make("slow", {1: 2.0}), make("fast", {1: 0.5})
    decision = decide_pin(pin("slow", accept_error=True), [slow, fast], eager, Tolerance())
    assert decision.winner is slow
    assert decision.reason == "slow is pinned: 0.5 times as fast as eager (2.00 ms against 1.00 ms at b=1); exact"
    assert decision.losers == {"eager": "slow is pinned", "fast": "slow is pinned"}
    assert not decision.accepted_error
    assert decision.second_look == ()


def test_a_pin_out_of_tolerance_is_refused_with_its_figures(make: Make) -> None:
    eager, wrong = make("eager", {1: 1.0}), make("wrong", {1: 0.5}, error_class="refused", relative_l2=3.2)
    with pytest.raises(
        PlanError,
        match=r"pin of wrong on 'encoder'.*relative L2 error 3.2, allowed 0.0001.*got 1252.0.*accept_error=True",
    ):
        decide_pin(pin("wrong"), [wrong], eager, Tolerance())
    decision = decide_pin(pin("wrong", accept_error=True), [wrong], eager, Tolerance())
    assert decision.winner is wrong
    assert decision.accepted_error
    assert "error was accepted by the user: out of tolerance at b=1" in decision.reason


def test_exact_holds_for_pins_too(make: Make) -> None:
    eager, near = make("eager", {1: 1.0}), make("near", {1: 0.5}, error_class="within budget")
    assert decide_pin(pin("near"), [near], eager, Tolerance()).winner is near
    with pytest.raises(PlanError, match="the plan asks for exact"):
        decide_pin(pin("near"), [near], eager, Tolerance(accuracy="exact"))


def test_a_pin_that_was_not_built_or_tried(make: Make) -> None:
    eager, broken = make("eager", {1: 1.0}), make("broken", {}, status="failed", reason="no operator")
    with pytest.raises(PlanError, match="can't be kept: failed: no operator"):
        decide_pin(pin("broken", accept_error=True), [broken], eager, Tolerance())
    with pytest.raises(PlanError, match="it was not tried"):
        decide_pin(pin("other"), [broken], eager, Tolerance())
    with pytest.raises(PlanError, match="must name a candidate"):
        decide_pin(Rule("encoder", "pin"), [broken], eager, Tolerance())


def test_eager_can_be_pinned_and_disturbed_timing_does_not_matter(make: Make) -> None:
    eager, trial = make("eager", {1: 1.0}), make("slow", {1: 2.0}, disturbed="load")
    assert decide_pin(pin("eager"), [eager, trial], eager, Tolerance()).winner is eager
    assert "was disturbed (load)" in decide_pin(pin("slow"), [trial], eager, Tolerance()).reason
