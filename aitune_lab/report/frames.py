"""Results as pandas data frames: numbers as numbers, one fact a column, units in the names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency, install_command
from ..schema import Choice, Event, PointResult, Trial

if TYPE_CHECKING:
    import pandas as pd

_MODULE = (
    "path class_name method calls total_seconds self_seconds mean_ms share parameters buffers parameter_bytes dtypes "
    "devices inputs outputs tunable reason depth shared_with"
).split()
_TRIAL = (
    "path signature candidate backend precision status reason point calls weight latency_ms latency_p90_ms "
    "latency_spread ci_low_ms ci_high_ms eager_ms speedup error_class relative_l2 factor_over_eager max_absolute "
    "cosine snr_db disturbed peak_memory_bytes build_seconds measure_seconds artifact_bytes memory_bytes isolated key"
).split()
_CHOICE = (
    "path method signature candidate speedup error_class relative_l2 factor_over_eager pinned accepted_error reason "
    "trial"
).split()
_EVENT = "seq t kind path signature candidate data".split()


def modules_frame(rows: Iterable[Any]) -> pd.DataFrame:
    """Inspected modules, one row each; `rows` are objects or mappings with `ModuleRow`'s fields."""
    return frame_of([{name: _cell(row.get(name)) for name in _MODULE} for row in map(as_mapping, rows)], _MODULE)


def trials_frame(trials: Iterable[Trial]) -> pd.DataFrame:
    """Trials, one row for each point; a trial that was measured nowhere has one row without point."""
    rows = [_trial_row(trial, result) for trial in trials for result in (trial.points or (None,))]
    return frame_of(rows, _TRIAL)


def choices_frame(choices: Iterable[Choice]) -> pd.DataFrame:
    """Choices, one row each, with the candidate's label."""
    rows = [
        {name: getattr(choice, name) for name in _CHOICE} | {"candidate": choice.candidate.label} for choice in choices
    ]
    return frame_of(rows, _CHOICE)


def events_frame(events: Iterable[Event]) -> pd.DataFrame:
    """Events, one row each; `t` in seconds since the run's start, `data` as JSON text."""
    rows = [
        {name: getattr(event, name) for name in _EVENT}
        | {
            "candidate": event.candidate.label if event.candidate else None,
            "data": json.dumps(dict(event.data), ensure_ascii=False),
        }
        for event in events
    ]
    return frame_of(rows, _EVENT)


def as_mapping(row: Any) -> Mapping[str, Any]:
    """A module's row as a mapping, whether it is a mapping already or an object with these attributes."""
    return row if isinstance(row, Mapping) else {name: getattr(row, name, None) for name in _MODULE}


def _trial_row(trial: Trial, result: PointResult | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "path": trial.path,
        "signature": trial.signature,
        "candidate": trial.candidate.label,
        "backend": trial.candidate.backend,
        "precision": trial.candidate.precision,
        "status": trial.status,
        "reason": trial.reason,
        "build_seconds": trial.build_seconds,
        "measure_seconds": trial.measure_seconds,
        "artifact_bytes": trial.artifact_bytes,
        "memory_bytes": trial.memory_bytes,
        "isolated": trial.isolated,
        "key": trial.key,
    }
    if result is None:
        return row
    row |= {"point": result.point.label, "calls": result.calls, "weight": result.weight, "speedup": result.speedup}
    row["peak_memory_bytes"] = result.peak_memory_bytes
    if (latency := result.latency) is not None:
        row |= {
            "latency_ms": latency.median_ms,
            "latency_p90_ms": latency.p90_ms,
            "latency_spread": latency.spread,
            "ci_low_ms": latency.ci_low_ms,
            "ci_high_ms": latency.ci_high_ms,
        }
    if result.eager is not None:
        row["eager_ms"] = result.eager.median_ms
    disturbed = [m.disturbed for m in (result.latency, result.eager) if m is not None and m.disturbed]
    row["disturbed"] = disturbed[0] if disturbed else None
    if (comparison := result.comparison) is not None:
        row |= {
            "error_class": comparison.error_class,
            "relative_l2": comparison.relative_l2,
            "factor_over_eager": comparison.factor_over_eager,
            "max_absolute": max((leaf.max_absolute for leaf in comparison.leaves), default=None),
            "cosine": min((leaf.cosine for leaf in comparison.leaves), default=None),
            "snr_db": min((leaf.snr_db for leaf in comparison.leaves), default=None),
        }
    return row


def _cell(value: Any) -> Any:
    """Sequences of labels read as one text."""
    return "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Rows as a frame with these columns. Raises MissingDependency without pandas."""
    try:
        import pandas as pd
    except ImportError:
        raise MissingDependency("pandas", "a data frame", install_command("report")) from None
    frame: pd.DataFrame = pd.DataFrame([[row.get(name) for name in columns] for row in rows], columns=list(columns))
    return frame
