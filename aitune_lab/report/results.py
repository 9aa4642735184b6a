"""What a tuning came to, as blocks of plain data, drawn as text and as bare HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..schema import Choice, Trial, to_data
from ..tuning.strategies.words import counted, error, size, times
from .text import (
    CANDIDATE_COLUMNS,
    NO_FIGURE,
    Column,
    candidate_rows,
    clean,
    escaped,
    html_table,
    is_disturbed,
    render_table,
)

if TYPE_CHECKING:
    from ..tuning.result import TuneResult

CHOICE_COLUMNS = (
    Column("path", "module"),
    Column("signature", "signature"),
    Column("candidate", "chosen"),
    Column("speedup", "times as fast", right=True),
    Column("error_class", "error"),
    Column("relative_l2", "rel. L2", right=True),
)
_FIGURES = tuple(column for column in CANDIDATE_COLUMNS if column.key not in ("status", "chosen"))


@dataclass(frozen=True)
class Block:
    """A titled table with lines of text beneath it; either may be empty. Every text in it is untrusted."""

    title: str
    columns: Sequence[Column] = ()
    rows: Sequence[Mapping[str, str]] = ()
    lines: Sequence[str] = ()


def result_blocks(result: TuneResult) -> list[Block]:
    """The chosen candidates, then each (module, signature)'s candidates with why they lost, failures, the estimate."""
    blocks = [Block("", lines=[f"data: {result.understood}"])] if result.understood else []
    if result.dry_run:
        blocks.append(Block("Would be tried", lines=_planned(result)))
    elif result.events and result.events[-1].kind == "run_cancelled":
        blocks.append(Block("Cancelled: the target is as it was"))
    else:
        rows = choice_rows(result.choices, result.trials)
        blocks.append(Block("Chosen", CHOICE_COLUMNS, rows, [f"{row['path']}: {row['why']}" for row in rows]))
    blocks += [candidates_block(choice, result.trials_of(choice)) for choice in result.choices]
    if legend := _legend(result.trials.values()):
        blocks.append(Block("", lines=legend))
    if result.failures:
        lines = [f"{path or '(model)'}: {reason}" for path, reason in result.failures.items()]
        blocks.append(Block("Could not be tuned, so they stay as they are", lines=lines))
    measured = result.end_to_end.sentence if result.end_to_end is not None else ""
    if ending := [line for line in (measured or _estimate(result), _took(result)) if line]:
        blocks.append(Block("", lines=ending))
    return blocks


def choice_rows(choices: Sequence[Choice], trials: Mapping[str, Trial] | None = None) -> list[dict[str, str]]:
    """Choices as formatted cells of `CHOICE_COLUMNS`, with the reason as `why`.

    Signatures are named where a module has several. Where other load disturbed the chosen one's trial no speed-up is
    given; `trials` by key tell that.
    """
    methods = [(choice.path, choice.method) for choice in choices]
    noisy = {key for key, trial in (trials or {}).items() if is_disturbed(trial)}
    return [
        {
            "path": choice.path or "(model)",
            "signature": choice.signature if methods.count((choice.path, choice.method)) > 1 else "",
            "candidate": choice.candidate.label + "".join(f", {mark}" for mark in _marks(choice)),
            "speedup": f"{NO_FIGURE} (disturbed)"
            if choice.trial in noisy
            else NO_FIGURE
            if choice.speedup is None
            else f"×{times(choice.speedup)}",
            "error_class": "" if choice.candidate.label == "eager" else _error_class(choice),
            "relative_l2": ""
            if choice.relative_l2 is None or choice.candidate.label == "eager"
            else error(choice.relative_l2),
            "why": choice.reason,
        }
        for choice in choices
    ]


def candidates_block(choice: Choice, trials: Sequence[Trial]) -> Block:
    """Every candidate of one (module, signature) at every point, eager first, and why each won or lost.

    Candidates that were not tried or are not available stand in the lines beneath, with the reason.
    """
    ordered = sorted(trials, key=lambda trial: trial.candidate.label != "eager")
    eager = next((trial for trial in ordered if trial.candidate.label == "eager"), None)
    rows = candidate_rows(ordered, choice, eager=eager, every_point=True)
    labels = [trial.candidate.label for trial in ordered]
    lines = [f"chosen: {choice.reason}"]
    for trial in ordered:
        label = trial.candidate.label
        if label != choice.candidate.label and label != "eager":
            lines.append(f"{label} lost: {choice.losers.get(label) or trial.reason or 'another one is faster'}")
        if trial.notes:
            lines.append(f"{label}: {'; '.join(trial.notes)}")
    lines += [f"{label}: {why}" for label, why in choice.losers.items() if label not in labels]
    where = f", signature {choice.signature}"
    return Block(f"Candidates for {choice.path or '(model)'}{where}", _FIGURES, _starred(rows), lines)


def blocks_text(blocks: Sequence[Block]) -> str:
    """Blocks as aligned plain text."""
    parts = []
    for block in blocks:
        lines = [clean(block.title)] if block.title else []
        if block.rows:
            lines.append(render_table(block.columns, block.rows))
        parts.append("\n".join([*lines, *(f"  {clean(line)}" if block.title else clean(line) for line in block.lines)]))
    return "\n\n".join(parts)


def blocks_html(blocks: Sequence[Block]) -> str:
    """Blocks as bare HTML, readable without any CSS; every text in it is escaped."""
    parts = []
    for block in blocks:
        if block.rows:
            parts.append(html_table(block.columns, block.rows, block.title))
        elif block.title:
            parts.append(f"<p><b>{escaped(block.title)}</b></p>")
        if block.lines:
            parts.append("<ul>" + "".join(f"<li>{escaped(line)}</li>" for line in block.lines) + "</ul>")
    return f"<div>{''.join(parts)}</div>"


def result_text(result: TuneResult) -> str:
    """A `TuneResult` as plain text."""
    return blocks_text(result_blocks(result))


def result_html(result: TuneResult) -> str:
    """A `TuneResult` as bare HTML with the same content as `result_text`."""
    return blocks_html(result_blocks(result))


def result_data(result: TuneResult) -> dict[str, Any]:
    """A `TuneResult` as JSON values, without its events."""
    started = next((event.data for event in result.events if event.kind == "run_started"), {})
    return {
        "status": result.events[-1].kind.removeprefix("run_") if result.events else "finished",
        "dry_run": result.dry_run,
        "understood": result.understood,
        "seconds": result.seconds,
        "choices": to_data(result.choices),
        "trials": [to_data(trial) for trial in result.trials.values()],
        "failures": dict(result.failures),
        "estimate": dict(result.estimate),
        "end_to_end": to_data(result.end_to_end) if result.end_to_end is not None else None,
        "planned": started.get("planned", []),
        "plan": to_data(result.plan),
    }


def _starred(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The winner is marked in its name; eager's own rows say nothing about errors, as it is what others are held to."""
    shown = []
    for row in rows:
        cells = dict(row)
        if cells["chosen"]:
            cells["candidate"] = f"* {cells['candidate']}"
        shown.append(cells)
    return shown


def _planned(result: TuneResult) -> list[str]:
    started = next((event.data for event in result.events if event.kind == "run_started"), {})
    lines = []
    for unit in started.get("planned", []):
        lines.append(f"{unit['path'] or '(model)'} {unit['signature']}: {', '.join(unit['candidates']) or 'nothing'}")
        lines += [f"  {label}: {why}" for label, why in {**unit["not_tried"], **unit.get("left_out", {})}.items()]
    seconds, bytes_ = started.get("estimated_seconds") or 0, started.get("estimated_bytes") or 0
    lines.append(
        f"{counted(started.get('trials', 0), 'trial')}, about {seconds:.0f} s and {size(bytes_)} of disk (estimate). "
        "Nothing was built or changed."
    )
    return lines


def _estimate(result: TuneResult) -> str:
    before, after = result.estimate.get("eager_seconds"), result.estimate.get("tuned_seconds")
    if not before or after is None or all(choice.candidate.label == "eager" for choice in result.choices):
        return ""
    gain = f", {times(before / after)} times as fast" if after else ""
    return (
        f"estimate: {1000 * before:.3g} ms end to end becomes {1000 * after:.3g} ms{gain}; "
        "end-to-end time and error are unknown until measured"
    )


def _took(result: TuneResult) -> str:
    if result.dry_run or not result.seconds:
        return ""
    tried = sum(trial.candidate.label != "eager" for trial in result.trials.values())
    return f"{counted(tried, 'trial')} in {result.seconds:.1f} s"


def _legend(trials: Iterable[Trial]) -> list[str]:
    """What the error classes mean, with the bounds that were used."""
    judged = [
        (comparison.yardstick, leaf)
        for trial in trials
        for point in trial.points
        if (comparison := point.comparison) is not None
        for leaf in comparison.leaves
    ]
    if not judged:
        return []
    references = " or ".join(sorted({yardstick for yardstick, _ in judged}))
    lines = [f"error: against a run in {references}. exact: off by at most twice what eager itself is off"]
    bounds = sorted({leaf.allowed_relative for _, leaf in judged if leaf.error_class == "within budget"})
    if bounds:
        allowed = " or ".join(map(error, bounds))
        lines.append(
            f"within budget: more than that, but relative L2 (rel. L2) at most {allowed}, which counts as right"
        )
    return lines


def _marks(choice: Choice) -> list[str]:
    return [text for text, on in (("pinned", choice.pinned), ("error accepted", choice.accepted_error)) if on]


def _error_class(choice: Choice) -> str:
    factor = choice.factor_over_eager
    return (choice.error_class or "") + (f" ({times(factor)}× eager's)" if factor is not None else "")
