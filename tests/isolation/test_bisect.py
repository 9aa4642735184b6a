"""Bisecting builds in children too."""

from __future__ import annotations

import pytest
import torch
from faults import CompilerBackend
from torch import nn

from aitune_lab import bisect

X = torch.linspace(-1, 1, 12).view(3, 4)


def test_bisecting_a_candidate_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITUNE_LAB_ISOLATION", "auto")
    net = nn.Sequential(nn.Linear(4, 4)).eval()
    found = bisect(net, CompilerBackend(case="41").candidate(), [X])
    assert "SIGABRT" in str(found)
