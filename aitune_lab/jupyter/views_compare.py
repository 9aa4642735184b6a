"""The step Compare: what was chosen and why, figures, and other mixes side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..report.results import choice_rows
from ..report.text import Column
from ..schema import Choice
from ..tuning import whatif
from ..tuning.endtoend import EndToEnd
from ..tuning.mixes import EAGER
from ..tuning.session import SessionState
from ..tuning.strategies.words import error, milliseconds, size, times
from . import blocks as b
from .blocks import Block
from .snapshot import Snapshot
from .views import candidate_table, module_name
from .whatifs import CHOSEN, Mixes, NamedMix

FIGURES = (
    ("latency", "Latency"),
    ("difference", "Accuracy"),
    ("pareto", "Latency against error"),
    ("where", "Where the time goes"),
    ("end_to_end", "End to end"),
    ("timeline", "Timeline"),
    ("mixes", "Mixes"),
)
OF_A_MODULE = ("latency", "difference", "pareto")
"""Figures of one module; the others are of the whole run."""

_CHOICES = (
    Column("path", "module"),
    Column("candidate", "runs with"),
    Column("speedup", "speed-up", right=True),
    Column("error_class", "error"),
)
_EACH_ON_ITS_OWN = (
    "Each mix was measured on its own, in alternation with the untuned target. The machine may have been faster for one "
    "than for the other: compare speed-ups, not milliseconds."
)
_MIXES = (
    Column("name", "mix"),
    Column("estimate", "estimate (ms a pass)", right=True),
    Column("measured", "measured (ms a pass)", right=True),
    Column("speedup", "speed-up", right=True),
    Column("memory", "more memory", right=True),
    Column("error", "end-to-end error"),
)


@dataclass(frozen=True)
class Shown:
    """What the user looks at in this step."""

    module: str | None = None
    figure: str = "latency"
    mixes: Mixes = field(default_factory=Mixes)


def tried_modules(state: SessionState) -> list[str]:
    """The modules with trials, those with the largest share of time first."""
    shares = {str(row["path"]): float(row.get("share") or 0.0) for row in state.rows}
    paths = dict.fromkeys(trial.path for trial in state.trials.values())
    return sorted(paths, key=lambda path: -shares.get(path, 0.0))


def compare_step(snap: Snapshot, shown: Shown) -> list[Block]:
    """Headline, choices, a figure, the candidates behind it, and what-if."""
    state = snap.state
    modules = tried_modules(state)
    if not modules:
        return [
            b.text("There is nothing to compare before a tune.", "muted"),
            b.actions(b.goto("tune" if state.rows else "inspect", "Go to Tune" if state.rows else "Go to Inspect")),
        ]
    module = shown.module if shown.module in modules else modules[0]
    blocks = [*_headline(snap), _choices(snap)]
    offered = [item for item in FIGURES if item[0] != "mixes" or shown.mixes.held]
    blocks.append(b.tabs("figure", "figure", shown.figure, offered, "Figure"))
    if shown.figure in OF_A_MODULE and len(modules) > 1:
        options = [(path, module_name(path)) for path in modules]
        blocks.append(b.form(b.select("module", "module", "Module", module, options)))
    blocks.append(b.slot("plot"))
    if shown.figure in OF_A_MODULE:
        blocks.append(candidate_table(state, module))
    blocks.append(
        b.panel("What if?", *_what_if(state, shown.mixes), note="Other mixes of what was tried, side by side")
    )
    blocks.append(b.actions(b.goto("export", "Export")))
    return blocks


def _headline(snap: Snapshot) -> list[Block]:
    result = snap.result
    if result is None:
        words = {"tuning": "The tune is still going on; figures come in as trials end."}
        return [b.text(words.get(snap.phase, "The tune did not end, so nothing was installed."), "muted")]
    end = result.end_to_end
    if end is None or end.eager is None or end.tuned is None:
        reason = "; ".join(part for part in (end.skipped, *end.notes) if part) if end is not None else ""
        why = f": {reason}" if reason else ""
        before, after = result.estimate.get("eager_seconds"), result.estimate.get("tuned_seconds")
        if all(c.candidate.label == "eager" for c in result.choices):
            return [b.text(f"The target stays as it is{why}.", "lead")]
        if snap.was_cancelled:
            why = ": the run was cancelled before"
        if not before or not after:
            return [b.text(f"End to end was not measured{why}.", "muted")]
        return [
            b.facts(
                [
                    ("times as fast (estimate)", times(before / after)),
                    ("a pass before", milliseconds(1000 * before)),
                    ("a pass now (estimate)", milliseconds(1000 * after)),
                ]
            ),
            b.text(f"End to end was not measured{why}.", "muted"),
            *(_beyond(end) if end is not None else []),
        ]
    figures = [
        ("times as fast, measured end to end", times(end.speedup) if end.speedup else "disturbed"),
        ("a pass before", milliseconds(end.eager.median_ms)),
        ("a pass now", milliseconds(end.tuned.median_ms)),
    ]
    if end.comparison is not None:
        kept = "out of tolerance" if end.comparison.error_class == "refused" else end.comparison.error_class
        figures.append((f"outputs, relative L2 {error(end.comparison.relative_l2)}", kept))
    return [b.facts(figures), *_beyond(end)]


def _beyond(end: EndToEnd) -> list[Block]:
    if end.within_budget is False and end.comparison is not None:
        return [b.text(f"The outputs are out of tolerance: {end.comparison.problem}", "error")]
    return []


def _choices(snap: Snapshot) -> Block:
    choices: list[Choice] = list(snap.state.choices.values())
    rows = [
        row | {"key": f"{choice.path}|{choice.signature}", "detail": row["why"], "tone": _tone(choice)}
        for choice, row in zip(choices, choice_rows(choices, snap.state.trials), strict=True)
    ]
    return b.table(_CHOICES, rows, empty="Nothing was chosen yet.")


def _tone(choice: Choice) -> str:
    if choice.accepted_error:
        return "warning"
    return "good" if choice.candidate.label != "eager" else ""


def _what_if(state: SessionState, mixes: Mixes) -> list[Block]:
    current = mixes.current
    if current is None:
        return [
            b.text("Try another mix of backends: its estimate is there at once, measuring confirms it.", "muted"),
            b.actions(b.action("whatif_new", "New mix")),
        ]
    blocks: list[Block] = []
    if len(mixes.held) > 1:
        options = [(mix.name, mix.name) for mix in mixes.held]
        blocks.append(b.tabs("whatif_show", "name", current.name, options, "Mix"))
    blocks.append(_menu(state, current))
    if problem := current.problem or current.problem_in(state):
        blocks.append(b.text(problem, "error"))
    everyone = mixes.all_of(state)
    rows = [_mix_row(state, mix) for mix in everyone]
    blocks.append(b.table(_MIXES, rows))
    if sum("measured" in row for row in rows) > 1:
        blocks.append(b.text(_EACH_ON_ITS_OWN, "muted"))
    blocks += _difference(state, everyone[0], current)
    blocks.append(
        b.actions(
            b.action(
                "whatif_measure",
                "Measuring …" if current.doing else "Measure",
                {"name": current.name},
                disabled="It is being measured" if current.doing else "",
            ),
            b.action("whatif_pin", "Make this the plan", {"name": current.name}),
            b.action("whatif_new", "New mix"),
            b.action("whatif_remove", "Remove", {"name": current.name}),
        )
    )
    return blocks


def _menu(state: SessionState, current: NamedMix) -> Block:
    fields = []
    for number, (key, parts) in enumerate(whatif.options(state).items()):
        several = sum(other[0] == key[0] for other in whatif.options(state)) > 1
        label = module_name(key[0]) + (f" ({key[2]})" if several else "")
        listed = [
            (part.candidate.label, part.candidate.label + (" (no figures)" if part.problem else "")) for part in parts
        ]
        now = current.mix.get(key, EAGER).label
        fields.append(b.select("whatif_set", str(number), label, now, listed))
    return b.form(*fields)


def _mix_row(state: SessionState, mix: NamedMix) -> dict[str, str]:
    row = {"key": mix.name, "name": mix.name, "error": "unknown until measured"}
    estimate = mix.estimate(state)
    if estimate is not None:
        latency = estimate.latency
        row["estimate"] = "" if latency is None else f"{latency.ms:.3g} ({latency.low_ms:.3g} to {latency.high_ms:.3g})"
        row["speedup"] = f"×{times(estimate.speedup)}" if estimate.speedup else ""
        row["memory"] = size(estimate.added_bytes)
        own = [
            f"{module_name(p.path)} with {p.candidate.label}: {p.error_class or 'not compared'}"
            + (f", relative L2 {error(p.relative_l2)}" if p.relative_l2 is not None else "")
            for p in estimate.errors
        ]
        row["detail"] = "\n".join([estimate.sentence, *own, *estimate.notes])
    end = mix.measured.end_to_end if mix.measured is not None else None
    if end is None and mix.name == CHOSEN and state.end_to_end is not None:
        from ..report.figures.source import end_to_end_of

        end = end_to_end_of(state)
    if end is not None:
        if end.tuned is not None:
            row["measured"] = f"{end.tuned.median_ms:.3g} ({end.tuned.ci_low_ms:.3g} to {end.tuned.ci_high_ms:.3g})"
            if end.eager is not None:
                row["measured"] += f", untuned {end.eager.median_ms:.3g}"
            row["speedup"] = f"×{times(end.speedup)}" if end.speedup else row.get("speedup", "")
        if end.comparison is not None:
            kept = "out of tolerance" if end.comparison.error_class == "refused" else end.comparison.error_class
            row["error"] = f"{kept}, relative L2 {error(end.comparison.relative_l2)}"
    return row


def _difference(state: SessionState, chosen: NamedMix, current: NamedMix) -> list[Block]:
    mine, theirs = chosen.estimate(state), current.estimate(state)
    if mine is None or theirs is None:
        return []
    return [b.text(f"{whatif.diff(mine, theirs).sentence}.", "muted")]
