"""Runs to draw: recorded ones, one with a hostile name, and hand-made trials with fixed figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from aitune_lab.schema import (
    Candidate,
    Choice,
    Comparison,
    Event,
    LeafDifference,
    Measurement,
    Point,
    PointResult,
    Trial,
    from_data,
)
from aitune_lab.tuning.session import SessionState, replay

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("success", "failures", "cancelled")
EVIL = "<img src=x onerror=alert(1)><b>$x^2$</b>&amp;\x1b[31m"


def recorded(name: str) -> list[Event]:
    return [from_data(item, Event) for item in json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))]


def hostile() -> list[Event]:
    """The successful run of a target whose encoder has a hostile name, which its reasons and log repeat."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return value.replace("encoder", EVIL).replace("TwoParts", EVIL) if isinstance(value, str) else value

    items = json.loads((FIXTURES / "success.json").read_text(encoding="utf-8"))
    return [from_data(renamed(item), Event) for item in items]


def measured(ms: float, *, n: int = 20, disturbed: str | None = None, high: float | None = None) -> Measurement:
    return Measurement(ms, 1.2 * ms, 0.9 * ms, 0.95 * ms, high or 1.05 * ms, 0.04, n, 5, "wall time", 1, disturbed)


def leaf(error: float, path: str = "y") -> LeafDifference:
    kind = "refused" if math.isnan(error) or error > 1e-4 else "within budget" if error > 2e-7 else "exact"
    allowed = 2e-7 if kind == "exact" else 1e-4
    problem = f"{path} is off by {error}" if kind == "refused" else None
    return LeafDifference(path, kind, error, 0, 0, 0, 0, error, 1.0, 80.0, 0, 1.5, 1e-7, allowed, problem=problem)


def trial(
    label: str,
    ms: float | None = None,
    error: float | None = None,
    *,
    path: str = "m",
    eager: float = 2.0,
    sizes: tuple[int, ...] = (1,),
    disturbed: str | None = None,
    signature: str = "s",
    **changes: Any,
) -> Trial:
    """A trial at points b=size; each takes `ms` × size, eager `eager` × size."""
    points = []
    for size in sizes if ms is not None or error is not None else ():
        item = leaf(error) if error is not None else None
        compared = Comparison(item.error_class, "float64", (item,), 2, item.problem) if item is not None else None
        timed = measured(ms * size, disturbed=disturbed) if ms is not None else None
        beside = measured(eager * size) if ms is not None else None
        points.append(PointResult(Point((("b", size),)), 2, 1.0, compared, timed, beside))
    backend, _, option = label.rstrip("]").partition("[")
    candidate = Candidate(backend, ((option, True),) if option else ())
    changes.setdefault("status", "ok")
    return Trial(f"{path}-{signature}-{label}", path, signature, candidate, points=tuple(points), **changes)


def chosen(winner: Trial, losers: dict[str, str] | None = None, **changes: Any) -> Choice:
    changes.setdefault("speedup", 2.0)
    return Choice(
        winner.path,
        "forward",
        winner.signature,
        winner.candidate,
        winner.key,
        "it is faster",
        losers=losers or {},
        **changes,
    )


def state(*trials: Trial, choices: tuple[Choice, ...] = (), **changes: Any) -> SessionState:
    changes.setdefault("status", "finished")
    by_key = {(c.path, c.method, c.signature): c for c in choices}
    return SessionState(target="Target", trials={t.key: t for t in trials}, choices=by_key, **changes)


def row(
    path: str, total_ms: float, self_ms: float, *, calls: int = 1, whole_ms: float = 10.0, **more: Any
) -> dict[str, Any]:
    return {
        "path": path,
        "class_name": "Linear",
        "method": "forward",
        "depth": path.count("."),
        "calls": calls,
        "total_seconds": total_ms / 1000,
        "self_seconds": self_ms / 1000,
        "share": total_ms / whole_ms,
        "parameters": 10,
        "dtypes": ["float32"],
        "tunable": True,
        **more,
    }


def finished(name: str) -> SessionState:
    return replay(recorded(name))
