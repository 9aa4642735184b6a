"""Saves a module that was tuned on one backend, and loads it in a process that knows nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.isolation import Isolation
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.candidates import candidate_of_label
from aitune_lab.tuning.options import TuneOptions

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
for want, got in zip(before, after):
    assert (got - want).norm() <= float(sys.argv[3]) * want.norm(), (want, got)
assert ait.stats(net).dispatched == 3, ait.stats(net)
ait.unwrap(net)
"""


def loaded_in_a_fresh_process(
    label: str, folder: Path, *, isolation: Isolation = "off", max_relative_error: float = 1e-4
) -> str:
    """What a new process says when it loads and runs what was tuned and saved here; fails if it is wrong or on eager.

    With `isolation="all"` it also fails if the candidate wasn't built in a child process.
    """
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    candidate = candidate_of_label(label)
    plan = ait.Plan(
        rules=(ait.Rule("", "pin", candidate),), tolerance=ait.Tolerance(max_relative_error=max_relative_error)
    )
    data = [torch.randn(b, 6) for b in (1, 2, 5)]
    with torch.inference_mode():
        expected = [net(x) for x in data]
    result = run(make_tuner(net, data, plan, TuneOptions(meter=ScriptedMeter(), end_to_end=False, isolation=isolation)))
    (trial,) = (t for t in result.trials.values() if t.candidate == candidate)
    assert trial.isolated is (isolation == "all"), trial.notes
    with torch.inference_mode():
        for x, want in zip(data, expected, strict=True):
            assert (net(x) - want).norm() <= max_relative_error * want.norm()
    assert ait.stats(net).dispatched == len(data), ait.stats(net)
    digest = ait.save(net, folder / "tuned.ait")
    command = [sys.executable, "-W", "error::UserWarning", "-c", FRESH]
    command += [str(folder / "tuned.ait"), digest, str(max_relative_error)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
