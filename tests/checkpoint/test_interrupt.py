"""A real Ctrl-C while loading leaves the target as it was, and a second load works."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import aitune_lab as ait
from aitune_lab.capture.swap import swapped
from aitune_lab.capture.tree import modules_of
from aitune_lab.schema import Plan
from aitune_lab.testing.models import Mlp
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

MOMENTS = (*range(5, 1380, 95), *range(1380, 1470, 10))
"""Over all of a load, closer at its end, where things are installed."""


@pytest.fixture
def saved(tmp_path: Path):
    with scripted_backend():
        model = Mlp().eval()
        options = TuneOptions(backends=(ScriptedBackend().candidate(),), meter=ScriptedMeter(), end_to_end=False)
        run(make_tuner(model, [torch.randn(2, 4)], Plan(), options))
        path = tmp_path / "tuned.ait"
        ait.save(model, path)
        yield ait.unwrap(model), path


# An interrupt that Python delivers inside a destructor (of a generator, say) is dropped: then nobody was interrupted.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_loading_leaves_the_target_as_it_was(saved, moment: int) -> None:
    model, path = saved
    x = torch.randn(2, 4)
    expected = model(x).detach()
    calls = 0

    def profiler(frame, event, arg) -> None:
        # The signal is sent at the n-th Python call inside the package, so every run interrupts at the same places.
        nonlocal calls
        if event == "call" and "aitune_lab" in frame.f_code.co_filename and "tests" not in frame.f_code.co_filename:
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGINT)

    sys.setprofile(profiler)
    try:
        ait.load(model, path)
    except KeyboardInterrupt:
        assert not any(swapped(m) for m in modules_of(model).values())
    finally:
        sys.setprofile(None)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    ait.unwrap(model)
    assert ait.load(model, path).loaded
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert ait.stats(model).dispatched == 1
