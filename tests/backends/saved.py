"""Saves a module that was tuned on one backend, and loads it in a process that knows nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.strategies import OneBackendStrategy

FRESH = """
import sys, torch
from torch import nn
import aitune_lab as ait
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
with torch.inference_mode():
    before = [net(torch.linspace(-1, 1, 6 * b).reshape(b, 6)) for b in (1, 3, 5)]
    print(ait.load(net, sys.argv[1], trust=sys.argv[2]))
    after = [net(torch.linspace(-1, 1, 6 * b).reshape(b, 6)) for b in (1, 3, 5)]
torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
assert ait.stats(net).dispatched == 3, ait.stats(net)
ait.unwrap(net)
"""


def loaded_in_a_fresh_process(backend: str, folder: Path, **options: object) -> str:
    """What a new process says when it loads and runs what was tuned and saved here; fails if it is wrong or on eager."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    plan = ait.Plan(strategy=OneBackendStrategy(backend, **options).config())
    data = [torch.randn(b, 6) for b in (1, 2, 5)]
    run(make_tuner(net, data, plan, TuneOptions(meter=ScriptedMeter(), end_to_end=False)))
    digest = ait.save(net, folder / "tuned.ait")
    command = [sys.executable, "-W", "error::UserWarning", "-c", FRESH, str(folder / "tuned.ait"), digest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
