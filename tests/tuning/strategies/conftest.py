"""Scripted trials: what strategies see, without building or timing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aitune_lab.schema import (
    Candidate,
    Comparison,
    LeafDifference,
    Measurement,
    Point,
    PointResult,
    Trial,
)


def measurement(ms: float, noise: float = 0.01, disturbed: str | None = None) -> Measurement:
    return Measurement(
        ms, ms * 1.1, ms * 0.9, ms * (1 - noise), ms * (1 + noise), 2 * noise, 20, 5, "perf_counter", 2, disturbed
    )


def leaf(error_class: Any, relative_l2: float, path: str = "logits", problem: str | None = None) -> LeafDifference:
    return LeafDifference(
        path,
        error_class,
        0.5,
        0.1,
        0.4,
        0.2,
        0.1,
        relative_l2,
        0.99,
        60.0,
        0.0,
        1.5,
        1e-7,
        1e-4,
        (0, 3),
        "1.25",
        "1252.0",
        problem,
    )


def point_of(size: int) -> Point:
    return Point((("b", size),))


def script(
    backend: str,
    latencies: Mapping[int, float],
    *,
    eager: Mapping[int, float] | None = None,
    error_class: Any = "exact",
    relative_l2: float = 1e-7,
    status: Any = "ok",
    reason: str = "",
    noise: float = 0.01,
    disturbed: str | None = None,
    memory: int | None = None,
    weights: Mapping[int, float] | None = None,
    options: tuple[tuple[str, Any], ...] = (),
    problem: str | None = None,
) -> Trial:
    """A trial with these median latencies (ms) by batch size, beside eager's."""
    points = tuple(
        PointResult(
            point_of(size),
            calls=1,
            weight=(weights or {}).get(size, 1.0),
            comparison=Comparison(error_class, "float64", (leaf(error_class, relative_l2),), 2, problem),
            latency=measurement(ms, noise, disturbed),
            eager=None if eager is None else measurement(eager[size], noise),
            peak_memory_bytes=memory,
        )
        for size, ms in latencies.items()
    )
    candidate = Candidate(backend, options)
    return Trial(candidate.label, "encoder", "sig", candidate, status, reason, points=points)


@pytest.fixture
def make() -> Callable[..., Trial]:
    return script
