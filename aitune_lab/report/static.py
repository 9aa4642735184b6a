"""What stays of a run in a saved notebook: bare HTML that reads without any style, script or widget.

Notebooks that aren't trusted lose `<style>`, `style=`, `<svg>` and scripts, so this uses none of them: tables, lists and
pictures as `<img>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..tuning.planfile import plan_to_toml
from ..tuning.strategies.words import counted
from .figures.endtoend import end_info
from .figures.latency import latency_info
from .figures.pareto import pareto_info
from .figures.source import EAGER, Selected, eager_weight, groups, state_of
from .pictures import latency_picture, pareto_picture
from .results import CHOICE_COLUMNS, Block, blocks_html, candidates_block, choice_rows
from .svg import safe
from .text import CANDIDATE_COLUMNS, MODULE_COLUMNS, candidate_rows, html_table, module_rows

if TYPE_CHECKING:
    from ..tuning.session import SessionState
    from .figures.source import Source

MAX_BYTES = 200_000
"""What a saved notebook bears of one run."""
MODULES, DETAILS, PICTURES = 60, 24, 6
"""At most so many inspected modules, modules with their candidates, and modules with pictures are shown."""
_COLUMNS = tuple(
    c for c in MODULE_COLUMNS if c.key in "path class_name calls total_ms share parameters tunable".split()
)


def static_html(source: Source, *, title: str = "") -> str:
    """A run as bare HTML of at most 200 kB: inspected modules, choices with their reasons, candidates, end to end, plan.

    Pictures (latency, latency against error) are SVG inside `<img>`. Where there is too much, what weighs least is left
    out, and the page says how much.

    Args:
        source: a session's state, a `TuneResult`, or events, of a run at any stage.
        title: the heading; default: what was tuned.
    """
    state = state_of(source)
    ordered = sorted(groups(state), key=eager_weight, reverse=True)
    modules, details, pictures = MODULES, DETAILS, PICTURES
    while True:
        page = _page(state, ordered, title, modules, details, pictures)
        if len(page.encode()) <= MAX_BYTES or not (modules or details or pictures):
            return page
        # Pictures weigh most and repeat what tables say.
        if pictures:
            pictures //= 2
        elif details > 2:
            details //= 2
        else:
            modules, details = modules // 2, details // 2


def _page(
    state: SessionState, ordered: Sequence[Selected], title: str, modules: int, details: int, pictures: int
) -> str:
    choices = tuple(state.choices.values())
    parts = [f"<h3>{safe(title or state.target or 'Tuning')}</h3>", _lines(headlines(state))]
    if choices:
        rows = choice_rows(choices, state.trials)
        shown = rows[: max(details, 1) * 4]
        columns = [c for c in CHOICE_COLUMNS if any(row.get(c.key) for row in shown)]
        parts.append(html_table(columns, shown, "Chosen"))
        parts.append(_left_out(len(rows) - len(shown), "choice"))
    for group in ordered[:pictures]:
        parts.append(_pictures(state, group))
    parts += [group_html(group) for group in ordered[:details]]
    parts.append(_left_out(len(ordered) - details, "module with its candidates", "modules with their candidates"))
    if state.rows:
        heaviest = sorted(state.rows, key=lambda row: -float(row.get("total_seconds") or 0.0))[:modules]
        kept = [row for row in state.rows if row in heaviest]
        parts.append(html_table(_COLUMNS, module_rows(kept), "Inspected modules, times with the recorder on"))
        parts.append(_left_out(len(state.rows) - len(kept), "faster module", "faster modules"))
    parts.append(f"<p><b>Plan</b></p><pre>{_preformatted(plan_to_toml(state.plan))}</pre>")
    return f"<div>{''.join(filter(None, parts))}</div>"


def headlines(state: SessionState) -> list[str]:
    """How the run stands, in sentences: what the data was taken to be, the outcome, and what can't be told."""
    tried = sum(trial.candidate.label != EAGER for trial in state.trials.values())
    status = {
        "idle": "Nothing was tuned yet.",
        "running": f"The run has not ended yet: {state.progress.done} of {counted(state.progress.total, 'trial')} done.",
        "finished": f"{counted(tried, 'trial').capitalize()} in {state.elapsed:.1f} s.",
        "cancelled": f"The run was cancelled after {state.elapsed:.1f} s: the target is as it was.",
        "failed": f"The run failed: {state.error}",
    }[state.status]
    said = [f"Data: {state.understood}." if state.understood else "", status]
    if state.status == "finished":
        end = end_info(state)
        said += [end.title + "." if end.bars else "", *end.caption]
    return list(filter(None, said))


def group_html(group: Selected) -> str:
    """One module's candidates at every point, and why each was chosen or not."""
    if group.choice is not None:
        return blocks_html([candidates_block(group.choice, group.trials)])
    rows = candidate_rows(group.trials, eager=group.eager, every_point=True)
    return blocks_html([Block(f"Candidates for {group.name}, nothing chosen yet", CANDIDATE_COLUMNS, rows)])


def _pictures(state: SessionState, group: Selected) -> str:
    where = {"module": group.path, "signature": group.signature}
    latency, pareto = latency_info(state, **where), pareto_info(state, **where)
    parts = []
    if latency.timed:
        parts.append(_figure(latency.title, latency_picture(latency).image(), latency.caption))
    if len(pareto.points) > 1:
        parts.append(_figure(pareto.title, pareto_picture(pareto).image(), pareto.caption))
    return "".join(parts)


def _figure(title: str, image: str, caption: Iterable[str]) -> str:
    return f"<p><b>{safe(title)}</b><br>{image}<br>{safe(' '.join(caption))}</p>"


def _lines(texts: Sequence[str]) -> str:
    return "".join(f"<p>{safe(text)}</p>" for text in texts)


def _left_out(count: int, one: str, many: str = "") -> str:
    if count <= 0:
        return ""
    return f"<p>{count} {one if count == 1 else many or one + 's'} more, not shown here.</p>"


def _preformatted(text: str) -> str:
    return "\n".join(map(safe, text.strip().splitlines()))
