"""A target of two modules, scripted candidates for it, and a candidate whose build waits until a test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.backends import registry
from aitune_lab.backends.base import BuildJob, Executable
from aitune_lab.jupyter.lab import Lab
from aitune_lab.schema import Candidate
from aitune_lab.testing import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import unwrap


class Pipe:
    """Two modules that nobody registered."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
        self.head = nn.Linear(16, 4).eval()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Gate:
    """`reached` is set when a build begins; the build goes on when `go` is set."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()


class WaitingBackend(ScriptedBackend):
    """Builds when its gate is open."""

    name = "waiting"
    gate: Gate

    def build(self, job: BuildJob) -> Executable:
        self.gate.reached.set()
        assert self.gate.go.wait(60), "the test did not open the gate"
        return super().build(job)


def scripted(**options: Any) -> Candidate:
    return ScriptedBackend(**options).candidate()


FAST, SLOW, WRONG = scripted(latency_ms=0.25), scripted(latency_ms=0.5), scripted(error="scaled", latency_ms=0.1)


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with scripted_backend():
        yield


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The backend `waiting` is known, and its gate is open at the end."""
    WaitingBackend.gate = Gate()
    registry.register(WaitingBackend)
    try:
        yield WaitingBackend.gate
    finally:
        WaitingBackend.gate.go.set()
        registry.unregister("waiting")


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def make_lab(pipe: Pipe) -> Iterator[Callable[..., Lab]]:
    """`make_lab(*candidates, **options)`: a Lab of `pipe` (or of `target=`) with scripted latencies."""
    labs: list[Lab] = []

    def make(*candidates: Any, target: Any = pipe, data: Any = None, **options: Any) -> Lab:
        items = data if data is not None else [torch.randn(2, 8) for _ in range(2)]
        options = {"meter": ScriptedMeter(), "store": None, **options}
        labs.append(Lab(target, items, backends=candidates or (FAST, SLOW), **options))
        return labs[-1]

    yield make
    for lab in labs:
        lab.cancel()
        lab._worker.join(60)
        lab.close()
        unwrap(lab.target)
