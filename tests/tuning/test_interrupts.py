"""Ctrl-C at any moment of inspect and tune: the target answers as before, hooks are intact, a second tune works."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import inspect, stats, unwrap
from aitune_lab.capture.interrupts import guarded
from aitune_lab.runtime.installed import install_all
from aitune_lab.schema import Plan
from aitune_lab.testing import ScriptedMeter, install_scripted, prepare_scripted, scripted_backend
from aitune_lab.testing.models import Pair
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

X = torch.linspace(-1, 1, 12).view(3, 4)

# In a namespace of its own: it takes on the name of the module that it interrupts, as a signal handler would see it.
_PROFILE = """
def profile(frame, event, argument):
    global __name__
    name = frame.f_globals.get("__name__") or ""
    if name == "contextlib" or name.startswith("aitune_lab") or frame.f_code.co_name == "forward":
        state.count += 1
        if state.count == state.at:
            setprofile(None)
            __name__ = name
            kill(getpid(), 2)
"""


class _State:
    def __init__(self, at: int) -> None:
        self.count, self.at = 0, at


def interrupted(action: Callable[[], Any], at: int) -> tuple[bool, int]:
    """Run with a real SIGINT at the n-th call or return in this package or a forward: (raised, events seen)."""
    state = _State(at)
    namespace = {"state": state, "setprofile": sys.setprofile, "kill": os.kill, "getpid": os.getpid}
    exec(_PROFILE, namespace)
    sys.setprofile(namespace["profile"])  # type: ignore[arg-type]
    try:
        action()
        return False, state.count
    except KeyboardInterrupt:
        return True, state.count
    finally:
        sys.setprofile(None)


def entries(module: nn.Module) -> list[tuple[str, str, int]]:
    return [(n, k, id(v)) for n, child in module.named_modules() for k, v in vars(child).items() if k != "training"]


def hooked_pair(seen: list[str]) -> Pair:
    pair = Pair().eval()
    pair.first.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    pair.first.register_forward_hook(lambda m, a, y: seen.append("post"))
    return pair


def tune(target: Any) -> Any:
    with scripted_backend():
        # The check at the end is another matter: by then the choices are in use, and an interrupt ends the check only.
        options = TuneOptions(backends=("scripted",), meter=ScriptedMeter(), end_to_end=False, store=None)
        return run(make_tuner(target, [X, X[:2]], Plan(), options))


ACTIONS: dict[str, Callable[[Any], Any]] = {
    "inspect": lambda target: inspect(target, [X], iterations=1),
    "tune": tune,
}


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def try_moments(name: str, moments: int) -> None:
    seen: list[str] = []
    pair = hooked_pair(seen)
    with torch.no_grad():
        want = pair(X)
    before = entries(pair)
    raised, total = interrupted(lambda: ACTIONS[name](pair), at=-1)
    assert not raised
    unwrap(pair)
    reached = raised_at = 0
    for at in sorted({1 + i * total // moments for i in range(moments)}):
        raised, count = interrupted(lambda: ACTIONS[name](pair), at)
        reached += count >= at  # the first run has more to do than later ones
        raised_at += raised
        seen.clear()
        if not raised and name == "tune":
            unwrap(pair)
        with torch.no_grad():
            assert torch.equal(pair(X), want), at
        assert seen == ["pre", "post"]
        assert entries(pair) == before, at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
    assert reached > 0.6 * moments
    assert raised_at >= 0.95 * reached  # Python swallows what falls into a finalizer
    tune(pair)
    with torch.no_grad():
        pair(X)
    assert stats(pair).dispatched > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ACTIONS)
def test_interrupt_at_many_moments(name: str) -> None:
    try_moments(name, 25)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ACTIONS)
def test_interrupt_at_very_many_moments(name: str) -> None:
    try_moments(name, 200)


# An interrupt that falls into a finalizer is swallowed there by Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ACTIONS)
def test_signals_from_outside_at_many_moments(name: str) -> None:
    seen: list[str] = []
    pair = hooked_pair(seen)
    with torch.no_grad():
        want = pair(X)
    before = entries(pair)
    start = time.perf_counter()
    ACTIONS[name](pair)
    seconds = time.perf_counter() - start
    unwrap(pair)
    for i in range(15):
        sent = threading.Timer(seconds * i / 15, os.kill, (os.getpid(), signal.SIGINT))
        try:
            sent.start()
            ACTIONS[name](pair)
            sent.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        finally:
            sent.join()
        unwrap(pair)  # it was done before the signal came, on a quick machine
        with torch.no_grad():
            assert torch.equal(pair(X), want)
        assert entries(pair) == before
    tune(pair)
    assert stats(pair).signatures


def test_interrupt_while_installing_undoes_the_step() -> None:
    pair = Pair().eval()
    first = install_scripted(pair.first, X, error="scaled")
    before = entries(pair)
    again, other = prepare_scripted(pair.first, X), prepare_scripted(pair.second, X)
    attach = other.dispatch.install

    def interrupting() -> None:
        attach()
        os.kill(os.getpid(), signal.SIGINT)

    other.dispatch.install = interrupting  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        install_all([again, other])
    assert sorted((n, k) for n, k, _ in entries(pair)) == sorted((n, k) for n, k, _ in before)
    with torch.no_grad():
        torch.testing.assert_close(pair.first(X), 1.5 * type(pair.first).forward(pair.first, X))
    assert first.dispatch.entries[0].hits.value() == 1
    unwrap(pair)


def test_error_while_installing_undoes_the_step() -> None:
    pair = Pair().eval()
    before = entries(pair)
    one, two = prepare_scripted(pair.first, X), prepare_scripted(pair.second, X)

    def fails() -> None:
        raise RuntimeError("no")

    two.dispatch.install = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        install_all([one, two])
    assert entries(pair) == before


def test_handler_of_the_user_stays() -> None:
    got: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with guarded():
            os.kill(os.getpid(), signal.SIGINT)
        assert got == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_guard_waits_until_allowed_or_the_end() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), guarded():
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("went on")
    assert steps == ["went on"]
    with pytest.raises(KeyboardInterrupt), guarded() as guard:
        guard.allowed = True
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("never")
    assert steps == ["went on"]


def test_guard_off_the_main_thread_changes_nothing() -> None:
    handlers: list[Any] = []

    def work() -> None:
        with guarded() as guard:
            handlers.append((signal.getsignal(signal.SIGINT), guard.allowed))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [(signal.default_int_handler, True)]
