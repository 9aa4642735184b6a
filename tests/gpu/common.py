"""Modules, jobs and pinned tuning for the tests on a GPU."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_lab import AituneWarning
from aitune_lab.backends.base import BuildJob, Executable
from aitune_lab.capture.swap import original_method
from aitune_lab.runtime.variant import build
from aitune_lab.schema import Candidate, Plan, Rule, Tolerance
from aitune_lab.testing.scripted import ScriptedMeter, record_calls
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.result import TuneResult
from aitune_lab.tuning.tuner import TuneOptions

CUDA = torch.device("cuda", 0)
GRAPH = Candidate("eager", cuda_graph=True)
INDUCTOR_GRAPH = Candidate("inductor", cuda_graph=True)
DIM = 256


class Chain(nn.Module):
    """Many small layers: bound by launches."""

    def __init__(self, layers: int = 20, dim: int = DIM) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


class Net(nn.Module):
    """Convolutions, normalisation, attention; several outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = torch.relu(self.norm(self.conv(image))).flatten(2).transpose(1, 2) * scale
        y, weights = self.attention(y, y, y)
        return {"logits": self.head(y.mean(1)), "parts": (y, [weights]), "name": "net"}


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True) + torch.randn_like(x)


class Function(nn.Module):
    """A module around a function of its input and a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 16, requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def on_gpu(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    return module.eval().requires_grad_(False).to(CUDA, dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def job_of(module: nn.Module, *calls: Any, candidate: Candidate = GRAPH, declared: Any = None) -> BuildJob:
    recorder, signatures = record_calls(module, *calls, declared=declared)
    recorded, recording = signatures[0], recorder.recordings[0]
    folder = Path(tempfile.mkdtemp())
    original = original_method(module, "forward")
    samples = recorded.all_samples()
    return BuildJob("", module, original, recording.form, recorded.signature, samples, candidate, folder)


def graphed(module: nn.Module, *calls: Any, candidate: Candidate = GRAPH, declared: Any = None) -> Executable:
    return build(job_of(module, *calls, candidate=candidate, declared=declared))


def pinned(
    target: Any, data: Any, candidate: Candidate = GRAPH, *, budget: float | None = None, **options: Any
) -> TuneResult:
    """Tune with a pin: what is tested is rightness, not speed."""
    plan = Plan(rules=(Rule("", "pin", candidate=candidate),), tolerance=Tolerance(max_relative_error=budget))
    return run(make_tuner(target, data, plan, TuneOptions(meter=ScriptedMeter(), end_to_end=False, **options)))


def quiet(module: Any, *args: Any, calls: int = 1) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", AituneWarning)
        for _ in range(calls):
            y = module(*args)
    return y


def untouched(module: nn.Module) -> Any:
    """A plain copy with the same weights."""
    return copy.deepcopy(module)


def used_mib() -> float:
    """Device memory in use, by the driver."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20
