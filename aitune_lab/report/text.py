"""Tables as plain data, plain text and bare HTML. Every name in them is untrusted."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..schema import Choice, Measurement, PointResult, Trial
from ..tuning.strategies.score import Contender, eager_at, weighted_latency
from ..tuning.strategies.words import counted, error, milliseconds, number, size, times
from .frames import as_mapping

NO_FIGURE = "—"
"""In place of a speed-up that a disturbed measurement would give."""
LONGEST_CELL = 60
"""Characters of a cell in plain text before it is cut."""


@dataclass(frozen=True)
class Column:
    """A table's column: the key of its cells, its title, and whether it reads right-aligned."""

    key: str
    title: str
    right: bool = False


MODULE_COLUMNS = (
    Column("path", "module"),
    Column("class_name", "class"),
    Column("calls", "calls", right=True),
    Column("total_ms", "total ms", right=True),
    Column("self_ms", "self ms", right=True),
    Column("mean_ms", "mean ms", right=True),
    Column("share", "share", right=True),
    Column("parameters", "parameters", right=True),
    Column("dtypes", "dtypes"),
    Column("devices", "devices"),
    Column("inputs", "inputs"),
    Column("outputs", "outputs"),
    Column("tunable", "tunable"),
)

CANDIDATE_COLUMNS = (
    Column("chosen", ""),
    Column("candidate", "candidate"),
    Column("point", "at"),
    Column("latency", "latency ms", right=True),
    Column("eager", "eager ms", right=True),
    Column("speedup", "speed-up", right=True),
    Column("error_class", "error"),
    Column("relative_l2", "rel. L2", right=True),
    Column("build", "build s", right=True),
    Column("status", "status"),
)


def module_rows(rows: Iterable[Any]) -> list[dict[str, str]]:
    """Inspected modules as formatted cells of `MODULE_COLUMNS`; `rows` have `ModuleRow`'s fields.

    Paths are indented by depth; the target itself is `(model)`.
    """
    return [_module_row(as_mapping(row)) for row in rows]


def candidate_rows(
    trials: Sequence[Trial], choice: Choice | None = None, *, eager: Trial | None = None, every_point: bool = False
) -> list[dict[str, str]]:
    """The trials of one (module, signature), with what was chosen, as formatted cells of `CANDIDATE_COLUMNS`.

    One row a candidate with its figures at the point that weighs most, and the speed-up over all points; with
    `every_point` one row a point with the speed-up there. `latency` is the median ± half the interquartile
    range. `status` holds the choice's reason for the winner and the loser's reason for others.

    `eager` is eager's own trial, for points at which it wasn't measured beside the candidate; by default the one
    among `trials` that is labelled so.
    """
    if eager is None:
        eager = next((trial for trial in trials if trial.candidate.label == "eager"), None)
    rows = []
    for trial in trials:
        if every_point and trial.points:
            for i, result in enumerate(trial.points):
                row = _candidate_row(trial, result, result.point.label, _speedup(result, eager), choice, eager)
                # The candidate is named, and its status told, once.
                rows.append(row if i == 0 else row | {"chosen": "", "candidate": "", "build": "", "status": ""})
            continue
        heaviest = max(trial.points, key=lambda r: _share(r, eager), default=None)
        more = f" (of {len(trial.points)})" if len(trial.points) > 1 else ""
        where = f"{heaviest.point.label}{more}" if heaviest else ""
        rows.append(_candidate_row(trial, heaviest, where, _overall(trial, eager), choice, eager))
    return rows


def is_disturbed(trial: Trial) -> bool:
    """Whether other load spoilt a measurement of this trial, so that its speed-up means nothing."""
    return any(m is not None and m.disturbed for result in trial.points for m in (result.latency, result.eager))


def render_table(columns: Sequence[Column], rows: Sequence[Mapping[str, str]]) -> str:
    """An aligned plain-text table. Empty columns are left out, long cells cut but for the last column's."""
    shown = [c for c in columns if any(row.get(c.key) for row in rows)] or list(columns)
    cells = [[_cut(clean(row.get(c.key, "")), c is not shown[-1]) for c in shown] for row in rows]
    widths = [max([len(c.title), *(len(line[i]) for line in cells)]) for i, c in enumerate(shown)]
    lines = [[c.title for c in shown], ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if c.right else cell.ljust(width)
            for c, cell, width in zip(shown, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def html_table(columns: Sequence[Column], rows: Sequence[Mapping[str, str]], caption: str = "") -> str:
    """A bare HTML table, readable without any CSS; every text in it is escaped."""
    head = "".join(f'<th align="{_align(c)}">{escaped(c.title)}</th>' for c in columns)
    body = "".join(
        "<tr>" + "".join(f'<td align="{_align(c)}">{escaped(row.get(c.key, ""))}</td>' for c in columns) + "</tr>"
        for row in rows
    )
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def inspection_text(inspection: Any) -> str:
    """An `Inspection` as plain text: what the data was taken to be, the target's time, the modules, warnings."""
    table = render_table(MODULE_COLUMNS, module_rows(inspection.rows))
    return "\n".join([*map(clean, inspection_head(inspection)), "", table, *map(clean, _warnings(inspection))])


def inspection_html(inspection: Any) -> str:
    """An `Inspection` as bare HTML with the same content as `inspection_text`."""
    head = "".join(f"<p>{escaped(line)}</p>" for line in inspection_head(inspection))
    tail = "".join(f"<p>{escaped(line)}</p>" for line in _warnings(inspection))
    return f"<div>{head}{html_table(MODULE_COLUMNS, module_rows(inspection.rows))}{tail}</div>"


def latency_text(median_ms: float, spread: float) -> str:
    """A median with half the interquartile range, both in ms: `3.10 ± 0.062`. `spread` is that range over the median."""
    half = spread * median_ms / 2
    return f"{number(median_ms)} ± {half:.0f}" if half >= 10 else f"{number(median_ms)} ± {half:.2g}"


def clean(text: str) -> str:
    """Text that is safe in a terminal: control and direction-changing characters stand as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def inspection_head(inspection: Any) -> list[str]:
    """What the data was taken to be, and the target's own time."""
    over = counted(inspection.iterations, "iteration")
    time = f"{milliseconds(1000 * inspection.seconds_per_iteration)} end to end, over {over}"
    return [line for line in (inspection.understood, time) if line]


def _warnings(inspection: Any) -> list[str]:
    return [f"warning: {warning}" for warning in inspection.warnings]


def _cut(text: str, cut: bool) -> str:
    return f"{text[: LONGEST_CELL - 1]}…" if cut and len(text) > LONGEST_CELL else text


def _module_row(row: Mapping[str, Any]) -> dict[str, str]:
    path = str(row.get("path", ""))
    depth = int(row.get("depth") or 0)
    reason, shared = str(row.get("reason") or ""), row.get("shared_with") or ()
    if isinstance(shared, str):
        shared = [shared]
    also = f"; same module as {', '.join(map(str, shared))}" if shared else ""
    return {
        "path": "  " * depth + (path or "(model)"),
        "class_name": str(row.get("class_name", "")),
        "calls": _int(row.get("calls")),
        "total_ms": _number(row.get("total_seconds"), 1000.0),
        "self_ms": _number(row.get("self_seconds"), 1000.0),
        "mean_ms": _number(row.get("mean_ms")),
        "share": "" if row.get("share") is None else f"{100 * row['share']:.1f} %",
        "parameters": _int(row.get("parameters")),
        "parameter_bytes": "" if row.get("parameter_bytes") is None else size(row["parameter_bytes"]),
        "buffers": _int(row.get("buffers")),
        "dtypes": _labels(row.get("dtypes")),
        "devices": _labels(row.get("devices")),
        "inputs": _labels(row.get("inputs")),
        "outputs": _labels(row.get("outputs")),
        "tunable": ("yes" if row.get("tunable") else f"no: {reason}" if reason else "no") + also,
    }


def _candidate_row(
    trial: Trial, result: PointResult | None, where: str, speedup: str, choice: Choice | None, eager: Trial | None
) -> dict[str, str]:
    label = trial.candidate.label
    chosen = choice is not None and choice.candidate == trial.candidate
    comparison = result.comparison if result is not None else None
    latency = result.latency if result is not None else None
    beside = eager_at(result, eager) if result is not None and eager is not None else result.eager if result else None
    if comparison is not None and not comparison.leaves:
        comparison = None  # eager's own trial: it is what the others are compared with
    error_class, factor = (trial.error_class, trial.factor_over_eager) if comparison is not None else (None, None)
    return {
        "chosen": "*" if chosen else "",
        "candidate": label,
        "point": where,
        "latency": _latency(latency),
        "eager": _latency(beside),
        "speedup": speedup,
        "error_class": (error_class or "")
        + (f" ({times(factor)}× eager's)" if error_class and error_class != "refused" and factor is not None else ""),
        "relative_l2": error(comparison.relative_l2) if comparison is not None else "",
        "build": number(trial.build_seconds) if trial.build_seconds else "",
        "status": _status(trial, choice if chosen else None, choice),
    }


def _status(trial: Trial, own: Choice | None, choice: Choice | None) -> str:
    if own is not None:
        marks = ", error accepted" if own.accepted_error else ""
        return f"{'pinned' if own.pinned else 'chosen'}{marks}: {own.reason}"
    if choice is not None and (why := choice.losers.get(trial.candidate.label)):
        return why
    return trial.status if trial.status == "ok" or not trial.reason else f"{trial.status}: {trial.reason}"


def _latency(measurement: Measurement | None) -> str:
    if measurement is None:
        return ""
    text = latency_text(measurement.median_ms, measurement.spread)
    return f"{text} (disturbed)" if measurement.disturbed else text


def _speedup(result: PointResult, eager: Trial | None) -> str:
    beside = eager_at(result, eager) if eager is not None else result.eager
    if result.latency is None or beside is None or result.latency.median_ms <= 0:
        return ""
    if result.latency.disturbed or beside.disturbed:
        return NO_FIGURE
    return _times(beside.median_ms / result.latency.median_ms)


def _overall(trial: Trial, eager: Trial | None) -> str:
    judged = weighted_latency(trial, eager if eager is not None else trial)
    if isinstance(judged, Contender):
        return _times(judged.speedup)
    return NO_FIGURE if is_disturbed(trial) else ""


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"×{times(ratio)}"


def _share(result: PointResult, eager: Trial | None) -> float:
    beside = eager_at(result, eager) if eager is not None else result.eager
    share = result.weight * (beside.median_ms if beside is not None else 0.0)
    return share if share == share else 0.0  # a NaN would make the order depend on chance


def _align(column: Column) -> str:
    return "right" if column.right else "left"


def escaped(text: str) -> str:
    """Text that is safe in HTML, and shows control characters."""
    return html.escape(clean(text))


def _int(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def _number(value: Any, scale: float = 1.0) -> str:
    return "" if value is None else number(value * scale)


def _labels(value: Any) -> str:
    if value is None:
        return ""
    return (
        value
        if isinstance(value, str)
        else ", ".join(map(str, value))
        if isinstance(value, (list, tuple))
        else str(value)
    )
