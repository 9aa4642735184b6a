"""Reports of runs, and what changed between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tuning.diff import ALPHA, FigureChange, Ratio, RunDiff
from ..tuning.run_report import RunReport
from ..tuning.strategies.words import counted, number, times
from .frames import frame_of
from .results import Block, blocks_html, blocks_text, result_blocks
from .text import NO_FIGURE, Column

_FIGURES = (
    "path signature candidate point before_ms after_ms ratio ratio_low ratio_high beside_eager beside_eager_low "
    "beside_eager_high p_value beyond_noise"
).split()

FIELD_COLUMNS = (
    Column("part", "of"),
    Column("name", "what"),
    Column("before", "before"),
    Column("after", "after"),
)
CHOICE_CHANGE_COLUMNS = (
    Column("path", "module"),
    Column("signature", "signature"),
    Column("before", "chosen before"),
    Column("after", "chosen after"),
    Column("reason", "why"),
)
TRIAL_CHANGE_COLUMNS = (
    Column("path", "module"),
    Column("candidate", "candidate"),
    Column("before", "before"),
    Column("after", "after"),
    Column("reason", "why"),
)
FIGURE_CHANGE_COLUMNS = (
    Column("path", "module"),
    Column("candidate", "candidate"),
    Column("point", "at"),
    Column("before", "before ms", right=True),
    Column("after", "after ms", right=True),
    Column("latency", "latency", right=True),
    Column("beside_eager", "beside eager", right=True),
    Column("verdict", "verdict"),
)


def report_blocks(report: RunReport) -> list[Block]:
    """Where and when, then what `TuneResult` shows."""
    lines = [
        f"{report.target or 'a run'}: {report.status}; report of {report.written} by aitune_lab {report.aitune_lab}"
    ]
    if report.environment is not None:
        here = report.environment
        where = ", ".join([*here.gpus, f"{here.cpu} ({counted(here.threads, 'thread')})"])
        lines.append(f"on {where}; torch {here.torch}, Python {here.python}")
    if report.error:
        lines.append(f"failed: {report.error}")
    return [Block("", lines=lines), *result_blocks(report.result)]


def report_text(report: RunReport) -> str:
    return blocks_text(report_blocks(report))


def report_html(report: RunReport) -> str:
    return blocks_html(report_blocks(report))


def figures_frame(figures: Sequence[FigureChange]) -> Any:
    """Compared latencies as a data frame, one row each. Raises MissingDependency without pandas."""
    rows = []
    for f in figures:
        beside = f.beside_eager
        rows.append(
            {
                "path": f.path,
                "signature": f.signature,
                "candidate": f.candidate.label,
                "point": f.point.label,
                "before_ms": f.before.median_ms,
                "after_ms": f.after.median_ms,
                "ratio": f.latency.value,
                "ratio_low": f.latency.low,
                "ratio_high": f.latency.high,
                "beside_eager": beside.value if beside else None,
                "beside_eager_low": beside.low if beside else None,
                "beside_eager_high": beside.high if beside else None,
                "p_value": f.p_value,
                "beyond_noise": f.beyond_noise,
            }
        )
    return frame_of(rows, _FIGURES)


def diff_blocks(diff: RunDiff) -> list[Block]:
    """Settings, choices, candidates, figures, end to end; only what changed."""
    blocks = []
    if diff.fields:
        fields = [{"part": f.part, "name": f.name, "before": f.before, "after": f.after} for f in diff.fields]
        blocks.append(Block("Settings that differ", FIELD_COLUMNS, fields))
    if diff.choices:
        rows = [
            {
                "path": c.path or "(model)",
                "signature": c.signature,
                "before": c.before or "not tuned",
                "after": c.after or "not tuned",
                "reason": c.reason,
            }
            for c in diff.choices
        ]
        blocks.append(Block("Choices that differ", CHOICE_CHANGE_COLUMNS, rows))
    if diff.trials:
        rows = [
            {
                "path": t.path or "(model)",
                "candidate": t.candidate.label,
                "before": t.before or "not tried",
                "after": t.after or "not tried",
                "reason": t.reason,
            }
            for t in diff.trials
        ]
        blocks.append(Block("Candidates that came to something else", TRIAL_CHANGE_COLUMNS, rows))
    blocks.append(_figures_block(diff))
    lines = [line for line in (_machine(diff), _whole(diff)) if line]
    if not diff:
        lines.insert(0, "Nothing changed beyond noise.")
    return [*blocks, Block("", lines=lines)] if lines else blocks


def diff_text(diff: RunDiff) -> str:
    return blocks_text(diff_blocks(diff))


def diff_html(diff: RunDiff) -> str:
    return blocks_html(diff_blocks(diff))


def _figures_block(diff: RunDiff) -> Block:
    shown = [*diff.changed, *(f for f in diff.figures if f.beyond_noise is None)]
    rows = [
        {
            "path": f.path or "(model)",
            "candidate": f.candidate.label,
            "point": f.point.label,
            "before": number(f.before.median_ms),
            "after": number(f.after.median_ms),
            "latency": _ratio(f.latency),
            "beside_eager": _ratio(f.beside_eager) if f.beside_eager else NO_FIGURE,
            "verdict": "disturbed, so it decides nothing"
            if f.beyond_noise is None
            else f"{'slower' if f.judged.value > 1 else 'faster'} (p {f.p_value:.1g})",
        }
        for f in shown
    ]
    rest = len(diff.figures) - len(rows)
    if not diff.figures:
        lines = ["no latency was measured in both runs"]
    else:
        lines = [f"{counted(rest, 'other latency').replace('latencys', 'latencies')} without a change beyond noise"]
        lines.append(f"ratios are after over before with 95 % bounds; Holm over all of them at α = {ALPHA}")
    return Block("Latencies that changed beyond noise, or were disturbed", FIGURE_CHANGE_COLUMNS, rows, lines)


def _machine(diff: RunDiff) -> str:
    if diff.machine is None:
        return ""
    if times(diff.machine) == "1":
        return "eager itself took as long in both runs (median over points)"
    return f"eager itself took {times(diff.machine)} times as long in the second run (median over points)"


def _whole(diff: RunDiff) -> str:
    whole = diff.end_to_end
    if whole is None:
        return ""
    judged = whole.beside_eager or whole.latency
    classes = (
        ""
        if whole.before_class == whole.after_class
        else f"; outputs {whole.before_class} before, {whole.after_class} after"
    )
    if judged is None:
        return f"end to end: not timed in both runs{classes}"
    noise = {True: "beyond noise", False: "within noise", None: "disturbed"}[whole.beyond_noise]
    return f"end to end, beside eager: {_ratio(judged)} times as long ({noise}){classes}"


def _ratio(ratio: Ratio) -> str:
    return f"×{times(ratio.value)} ({times(ratio.low)} to {times(ratio.high)})"
