"""Tuning does not fall for noise and sees 5 %: the whole way through the tuner, on scripted latencies.

`benchmarks/placebo.py` shows the same on real arithmetic.
"""

from __future__ import annotations

import torch
from torch import nn

from aitune_lab.schema import Limits, Option, Plan
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

MODULES = 30
PLACEBOS = 10


def winners(noise: float, *, faster_ms: float | None) -> list[Option]:
    """For each module the scripted latency of the candidate that was chosen; None for eager, which takes 1 ms."""
    torch.manual_seed(0)
    target = nn.ModuleList([nn.Linear(2, 2) for _ in range(MODULES)]).eval()
    # Options must differ for candidates to differ: by a nanosecond's millionth.
    candidates = [ScriptedBackend(latency_ms=1.0 + 1e-9 * (i + 1)) for i in range(PLACEBOS)]
    if faster_ms is not None:
        candidates.insert(PLACEBOS // 2, ScriptedBackend(latency_ms=faster_ms))

    def call_each(x: torch.Tensor) -> list[torch.Tensor]:
        return [module(x) for module in target]

    options = TuneOptions(
        inference_function=call_each,
        backends=tuple(candidates),
        meter=ScriptedMeter(noise=noise, seed=7),
        end_to_end=False,
    )
    plan = Plan(limits=Limits(max_trials=10_000))
    with scripted_backend():
        result = run(make_tuner(target, torch.randn(2, 2), plan, options))
    assert len(result.choices) == MODULES
    return [c.candidate.option("latency_ms") if c.candidate.backend == "scripted" else None for c in result.choices]


def test_placebos_do_not_win() -> None:
    chosen = winners(0.03, faster_ms=None)
    assert sum(latency is not None for latency in chosen) <= 1


def test_a_candidate_that_is_five_percent_faster_is_found_among_placebos() -> None:
    chosen = winners(0.03, faster_ms=0.95)
    assert sum(latency == 0.95 for latency in chosen) >= 27
    assert sum(latency not in (None, 0.95) for latency in chosen) <= 1
