"""Tiny modules, each with one habit that tuning has to keep or refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Mlp(nn.Module):
    """Two layers: `x` (batch, width) to (batch, width), with options that are no tensors."""

    def __init__(self, width: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(
        self, x: torch.Tensor, scale: float = 1.0, bias: torch.Tensor | None = None, *, mode: str = "plain"
    ) -> torch.Tensor:
        y: torch.Tensor = scale * self.down(torch.relu(self.up(x)))
        y = y if bias is None else y + bias
        return torch.tanh(y) if mode == "tanh" else y


class Pair(nn.Module):
    """A parent of two children, of which one can be tuned."""

    def __init__(self, first: nn.Module | None = None, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first if first is not None else Mlp()
        self.second = second if second is not None else Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


class Nested(nn.Module):
    """Adds up tensors of equal shape, however they are nested in dicts, lists and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.weight * sum(_tensors(batch))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@dataclass
class Output:
    """What `Heads` returns."""

    hidden: torch.Tensor
    scores: dict[str, torch.Tensor]
    names: tuple[str, ...] = ("a", "b")


class Heads(nn.Module):
    """Returns a dataclass that holds tensors, a dict and strings."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(width, 2)
        self.b = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(x + 1, {"a": self.a(x), "b": self.b(x)})


class AutoEncoder(nn.Module):
    """Has no `forward` that is used: people call `encode` and `decode`."""

    def __init__(self, width: int = 4, code: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, code)
        self.decoder = nn.Linear(code, width)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.encoder(x)
        return y

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.decoder(z)
        return y


class WritesInput(nn.Module):
    """Adds one to its input in place, and returns twice the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return 2 * x


class ReturnsInput(nn.Module):
    """Returns its input itself, and a view of it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, x[0], x + 1


class CountsCalls(nn.Module):
    """Keeps a buffer and an attribute that every call changes."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.seen += 1
        return x + self.steps


class Noisy(nn.Module):
    """Adds noise from torch's random state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)
