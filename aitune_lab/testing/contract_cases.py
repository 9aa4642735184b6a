"""The small modules on which the contract of backends is tested, each a reason for which real ones went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .models import CountsCalls, Heads, Mlp, Noisy, ReturnsInput, WritesInput


class Attention(nn.Module):
    """Token ids (batch, length), both of which vary, to scores (batch, length, 24)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.layer(self.embedding(ids)))
        return y


def _convolution() -> nn.Module:
    parts = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(32, 8))


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


CASES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "layers": (_layers, lambda: [torch.randn(size, 32) for size in (2, 1, 5)]),
    "convolution": (_convolution, lambda: [torch.randn(size, 3, 8, 8) for size in (2, 3)]),
    "attention": (Attention, lambda: [torch.randint(0, 24, size) for size in ((2, 5), (3, 7))]),
    "keywords": (
        lambda: Mlp(32, 32),
        lambda: [((torch.randn(n, 32),), {"scale": 0.5, "mode": "tanh"}) for n in (2, 3)],
    ),
    "structures": (lambda: Heads(32), lambda: [torch.randn(size, 32) for size in (2, 3)]),
    "writes_input": (WritesInput, lambda: [torch.randn(size, 4) for size in (2, 3)]),
    "returns_input": (ReturnsInput, lambda: [torch.randn(size, 4) for size in (2, 3)]),
    "counts_calls": (CountsCalls, lambda: [torch.randn(size, 4) for size in (2, 3)]),
    "random": (Noisy, lambda: [torch.randn(size, 4) for size in (2, 3)]),
}
"""Name → (makes the module, makes the calls that are recorded)."""
