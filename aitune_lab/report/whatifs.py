"""Estimates for mixes of backends, alone and side by side, and what became of one that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..tuning.mixes import Bounded, Estimate, MixDifference, Part, SideBySide
from ..tuning.strategies.words import error, number, size, times
from .frames import frame_of
from .results import Block, blocks_html, blocks_text
from .text import NO_FIGURE, Column

if TYPE_CHECKING:
    from ..tuning.whatif_measure import Measured

PART_COLUMNS = (
    Column("path", "module"),
    Column("signature", "signature"),
    Column("candidate", "runs on"),
    Column("calls", "calls a pass", right=True),
    Column("eager", "eager ms", right=True),
    Column("tuned", "with it ms", right=True),
    Column("saving", "saves ms", right=True),
    Column("error_class", "module's error"),
    Column("relative_l2", "rel. L2", right=True),
    Column("memory", "more memory", right=True),
    Column("problem", "remark"),
)

MIX_COLUMNS = (
    Column("name", "mix"),
    Column("latency", "latency ms a pass (estimate)", right=True),
    Column("bounds", "95 % bounds ms", right=True),
    Column("speedup", "speed-up", right=True),
    Column("memory", "more memory", right=True),
    Column("error_class", "worst module's error"),
    Column("relative_l2", "rel. L2", right=True),
    Column("end_to_end", "end-to-end error"),
    Column("problem", "remark"),
)

_PARTS = (
    "path method signature candidate calls eager_ms tuned_ms saving_ms saving_low_ms saving_high_ms memory_bytes "
    "error_class relative_l2 factor_over_eager problem note trial"
).split()
_ESTIMATES = (
    "name latency_ms low_ms high_ms eager_ms eager_source speedup weights_bytes added_bytes error_class relative_l2 "
    "end_to_end_error problem"
).split()


def parts_frame(parts: Sequence[Part]) -> Any:
    """The parts of a mix as a data frame, one row each. Raises MissingDependency without pandas."""
    rows = [
        {name: getattr(part, name, None) for name in _PARTS}
        | {
            "candidate": part.candidate.label,
            "eager_ms": part.eager.ms if part.eager else None,
            "tuned_ms": part.tuned.ms if part.tuned else None,
            "saving_ms": part.saving.ms if part.saving else None,
            "saving_low_ms": part.saving.low_ms if part.saving else None,
            "saving_high_ms": part.saving.high_ms if part.saving else None,
        }
        for part in parts
    ]
    return frame_of(rows, _PARTS)


def estimates_frame(estimates: Sequence[Estimate]) -> Any:
    """Mixes as a data frame, one row each. Raises MissingDependency without pandas."""
    rows = []
    for estimate in estimates:
        worst = worst_part(estimate)
        latency = estimate.latency
        rows.append(
            {name: getattr(estimate, name, None) for name in _ESTIMATES}
            | {
                "latency_ms": latency.ms if latency else None,
                "low_ms": latency.low_ms if latency else None,
                "high_ms": latency.high_ms if latency else None,
                "eager_ms": estimate.eager.ms if estimate.eager else None,
                "error_class": worst.error_class if worst else None,
                "relative_l2": worst.relative_l2 if worst else None,
                "problem": "; ".join(estimate.problems),
            }
        )
    return frame_of(rows, _ESTIMATES)


def worst_part(estimate: Estimate) -> Part | None:
    """The part of a mix whose module is off the furthest; None if nothing but eager runs."""
    order = (None, "exact", "within budget", "refused")
    return max(estimate.errors, key=lambda part: (order.index(part.error_class), part.relative_l2 or 0.0), default=None)


def part_rows(parts: Sequence[Part]) -> list[dict[str, str]]:
    """Parts as formatted cells of `PART_COLUMNS`; signatures are named where a module has several."""
    paths = [part.path for part in parts]
    return [
        {
            "path": part.path or "(model)",
            "signature": part.signature if paths.count(part.path) > 1 else "",
            "candidate": part.candidate.label,
            "calls": f"{part.calls:,}",
            "eager": _ms(part.eager),
            "tuned": _ms(part.tuned),
            "saving": "" if part.is_eager else _ms(part.saving) or NO_FIGURE,
            "error_class": "" if part.is_eager else part.error_class or "not compared",
            "relative_l2": "" if part.is_eager or part.relative_l2 is None else error(part.relative_l2),
            "memory": size(part.memory_bytes) if part.memory_bytes else "",
            "problem": part.problem or part.note,
        }
        for part in parts
    ]


def mix_rows(estimates: Sequence[Estimate]) -> list[dict[str, str]]:
    """Mixes as formatted cells of `MIX_COLUMNS`."""
    rows = []
    for estimate in estimates:
        worst, latency = worst_part(estimate), estimate.latency
        rows.append(
            {
                "name": estimate.name,
                "latency": number(latency.ms) if latency else NO_FIGURE,
                "bounds": f"{number(latency.low_ms)} to {number(latency.high_ms)}" if latency else "",
                "speedup": f"×{times(estimate.speedup)}" if estimate.speedup else "",
                "memory": size(estimate.added_bytes),
                "error_class": (worst.error_class or "not compared") if worst else "",
                "relative_l2": error(worst.relative_l2) if worst and worst.relative_l2 is not None else "",
                "end_to_end": estimate.end_to_end_error if worst else "none: all eager",
                "problem": "; ".join((*estimate.problems, *estimate.notes)),
            }
        )
    return rows


def estimate_blocks(estimate: Estimate) -> list[Block]:
    """The sentence, the parts, what limits the figures."""
    title = f"What if: {estimate.name}" if estimate.name else "What if"
    return [
        Block(title, PART_COLUMNS, part_rows(estimate.parts)),
        Block("", lines=[estimate.sentence, *(f"note: {note}" for note in estimate.notes)]),
    ]


def side_by_side_blocks(held: SideBySide) -> list[Block]:
    """One row a mix, with the untuned target beneath."""
    lines = ["Latencies are estimates: the untuned target's pass minus calls × saving, from the modules' own trials."]
    first = next((estimate for estimate in held.estimates if estimate.eager is not None), None)
    if first is not None and first.eager is not None:
        how = "measured in repeated passes" if first.eager_source == "measured" else "one inspected pass"
        lines.append(f"Untuned: {number(first.eager.ms)} ms a pass ({how}).")
    return [Block("What if, side by side", MIX_COLUMNS, mix_rows(held.estimates), lines)]


def difference_blocks(difference: MixDifference) -> list[Block]:
    """The modules that the second mix runs otherwise."""
    columns = (
        Column("path", "module"),
        Column("before", difference.first),
        Column("after", difference.second),
        Column("saving", "saves ms", right=True),
    )
    rows = [
        {
            "path": change.after.path or "(model)",
            "before": change.before.candidate.label,
            "after": change.after.candidate.label,
            "saving": _ms(change.saving) or NO_FIGURE,
        }
        for change in difference.changes
    ]
    memory = f"memory: {'+' if difference.added_bytes >= 0 else '-'}{size(abs(difference.added_bytes))}"
    lines = [difference.sentence, memory] if difference.changes else [difference.sentence]
    return [Block(f"{difference.second} against {difference.first}", columns, rows, lines)]


def measured_blocks(measured: Measured) -> list[Block]:
    """Estimate against measurement, then the whole target's check."""
    rows = [{"path": path or "(model)", "candidate": label} for path, label in measured.ran]
    columns = (Column("path", "module"), Column("candidate", "ran on"))
    title = f"Measured: {measured.name}" if measured.name else "Measured"
    lines = [measured.sentence, *(f"note: {note}" for note in measured.end_to_end.notes)]
    return [Block(title, columns, rows, lines)]


def estimate_text(estimate: Estimate) -> str:
    return blocks_text(estimate_blocks(estimate))


def estimate_html(estimate: Estimate) -> str:
    return blocks_html(estimate_blocks(estimate))


def side_by_side_text(held: SideBySide) -> str:
    return blocks_text(side_by_side_blocks(held))


def side_by_side_html(held: SideBySide) -> str:
    return blocks_html(side_by_side_blocks(held))


def difference_text(difference: MixDifference) -> str:
    return blocks_text(difference_blocks(difference))


def difference_html(difference: MixDifference) -> str:
    return blocks_html(difference_blocks(difference))


def measured_text(measured: Measured) -> str:
    return blocks_text(measured_blocks(measured))


def measured_html(measured: Measured) -> str:
    return blocks_html(measured_blocks(measured))


def _ms(figure: Bounded | None) -> str:
    """`3.10 ± 0.062`: half of the 95 % interval after the figure."""
    if figure is None:
        return ""
    half = (figure.high_ms - figure.low_ms) / 2
    return number(figure.ms) if not half else f"{number(figure.ms)} ± {half:.2g}"
