"""Pause, resume, cancel, install the best so far; and how long a run says that it still takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import Plan
from aitune_lab.errors import TargetError
from aitune_lab.runtime.installed import installed_in, stats
from aitune_lab.schema import Candidate, Event
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner
from aitune_lab.tuning.control import PRIOR_SECONDS, Control, Remaining
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.session import Session, replay
from aitune_lab.tuning.tuner import Tuner

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


GOOD, BETTER = scripted(latency_ms=0.6), scripted(latency_ms=0.4)


def tuner_of(target: Any, *candidates: Candidate, **options: Any) -> Tuner:
    made = TuneOptions(backends=candidates or (GOOD, BETTER), meter=ScriptedMeter(), **options)
    return make_tuner(target, [X], Plan(), made)


def until(steps: Iterator[Event], kind: str) -> list[Event]:
    """The events up to the first of a kind."""
    seen = []
    for event in steps:
        seen.append(event)
        if event.kind == kind:
            return seen
    raise AssertionError(f"no {kind} came")


class Driver:
    """Drives a tuner in a thread, as a notebook does; `reached(...)` waits for an event."""

    def __init__(self, tuner: Tuner) -> None:
        self.session, self._changed, self.error = Session(), threading.Condition(), None
        self.thread = threading.Thread(target=self._drive, args=(tuner,))
        self.thread.start()

    def _drive(self, tuner: Tuner) -> None:
        for event in tuner.steps():
            with self._changed:
                self.session.apply(event)
                self._changed.notify_all()

    def reached(self, what: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what(self.session.state), timeout=60)


def test_a_paused_run_waits_and_goes_on_as_if_nothing_had_been() -> None:
    model = mlp()
    tuner = tuner_of(model)
    tuner.pause()
    driver = Driver(tuner)
    driver.reached(lambda state: state.paused)
    assert driver.session.state.status == "running"
    assert not installed_in(model)
    tuner.resume()
    driver.thread.join(60)
    state = driver.session.state
    assert (state.status, state.paused) == ("finished", False)
    assert tuner.choices[0].candidate == BETTER


def test_a_paused_run_can_be_cancelled() -> None:
    model = mlp()
    tuner = tuner_of(model)
    tuner.pause()
    driver = Driver(tuner)
    driver.reached(lambda state: state.paused)
    tuner.cancel()
    driver.thread.join(60)
    assert driver.session.state.status == "cancelled"
    assert not installed_in(model)


def test_pauses_do_not_count_as_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    control = Control()
    control.pause()

    def come_back() -> None:
        now[0] += 100.0
        control.resume()

    with control.running():
        threading.Timer(0.01, come_back).start()
        control.wait()
    now[0] += 1.0
    assert control.seconds() == 1.0


def test_the_best_so_far_is_installed_while_paused_and_replaced_at_the_end() -> None:
    model = mlp()
    expected = model(X).detach()
    tuner = tuner_of(model)
    steps = tuner.steps()
    until(steps, "trial_finished")
    tuner.pause()
    (choice,) = tuner.apply_best()
    assert choice.candidate == GOOD
    with torch.inference_mode():
        assert torch.equal(model(X), expected)
    assert stats(model).dispatched == 1
    tuner.resume()
    assert list(steps)[-1].kind == "run_finished"
    assert tuner.choices[0].candidate == BETTER
    with torch.inference_mode():
        assert torch.equal(model(X), expected)
    assert [s.candidate for s in stats(model).signatures] == [BETTER.label]


def test_the_best_so_far_is_installed_after_a_cancel() -> None:
    model = mlp()
    tuner = tuner_of(model)
    steps = tuner.steps()
    until(steps, "trial_finished")
    tuner.cancel()
    assert list(steps)[-1].kind == "run_cancelled"
    assert not installed_in(model)
    events = list(tuner.applying())
    assert [e.kind for e in events][-1] == "choice_made"
    assert tuner.choices[0].candidate == GOOD
    with torch.inference_mode():
        model(X)
    assert stats(model).dispatched == 1


def test_there_is_nothing_to_install_before_the_first_trial() -> None:
    tuner = tuner_of(mlp())
    with pytest.raises(TargetError, match="nothing was tried"):
        tuner.apply_best()


def test_a_run_at_work_is_not_interfered_with() -> None:
    refused: list[str] = []

    class Meter(ScriptedMeter):
        def __call__(self, *args: Any, **options: Any) -> Any:
            with pytest.raises(TargetError) as raised:
                tuner.apply_best()
            refused.append(str(raised.value))
            return super().__call__(*args, **options)

    made = TuneOptions(backends=(GOOD,), meter=Meter(), end_to_end=False)
    tuner = make_tuner(mlp(), [X], Plan(), made)
    assert list(tuner.steps())[-1].kind == "run_finished"
    assert refused
    assert all("pause() or cancel()" in text for text in refused)


def test_a_run_says_how_long_it_still_takes() -> None:
    seen = []
    session = Session()
    for event in tuner_of(mlp()).steps():
        state = session.apply(event)
        seen.append(state.remaining_seconds)
    told = [seconds for seconds in seen if seconds is not None]
    assert told[0] > 0
    assert told == sorted(told, reverse=True)
    assert seen[-1] is None


def test_the_estimate_learns_from_what_finished() -> None:
    remaining = Remaining()
    whats = [("m", "slow", str(i)) for i in range(3)] + [("m", "other", "0")]
    for what in whats:
        remaining.plan(what, 10.0)
    assert remaining.seconds() == pytest.approx(40.0)
    remaining.finish(whats[0], 30.0)
    factor = (30 + PRIOR_SECONDS) / (10 + PRIOR_SECONDS)
    own = (30 + PRIOR_SECONDS * factor) / (10 + PRIOR_SECONDS)
    assert remaining.seconds() == pytest.approx(20 * own + 10 * factor)
    assert remaining.seconds(whats[1], spent=5.0) == pytest.approx(20 * own - 5.0 + 10 * factor)
    remaining.finish(whats[1], 0.0, counts=False)  # an earlier run's trial tells nothing
    remaining.skip(whats[3])
    assert remaining.seconds() == pytest.approx(10 * own)


def test_a_run_resumes_from_what_a_cancelled_one_has_kept() -> None:
    tuner = tuner_of(mlp())
    steps = tuner.steps()
    until(steps, "trial_finished")
    tuner.cancel()
    list(steps)
    again = tuner_of(mlp())
    events = list(again.steps())
    assert again.counts.builds == 1
    assert again.counts.reused == 1
    assert replay(events).choices
