"""A run as one HTML file: no script, no address outside the file, light and dark by the reader's preference."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import DataError
from ..tuning.planfile import plan_to_toml
from ..tuning.strategies.words import counted, times
from .code import as_code
from .figures.difference import difference_info
from .figures.endtoend import end_info
from .figures.latency import latency_info
from .figures.pareto import pareto_info
from .figures.source import EAGER, Selected, eager_weight, end_to_end_of, groups, state_of
from .figures.timeline import timeline_info
from .figures.where import where_info
from .pictures import (
    difference_picture,
    end_picture,
    latency_picture,
    pareto_picture,
    timeline_picture,
    where_picture,
)
from .results import CHOICE_COLUMNS, choice_rows
from .static import group_html, headlines
from .svg import Picture, safe
from .text import MODULE_COLUMNS, Column, html_table, module_rows

if TYPE_CHECKING:
    from ..tuning.session import SessionState
    from .figures.source import Source

MAX_DETAILS = 60
"""At most so many modules are shown with pictures and all their candidates, those first on which eager spends most."""
MAX_ROWS = 2000
_MODULES = tuple(
    c for c in MODULE_COLUMNS if c.key in "path class_name calls total_ms self_ms share parameters dtypes".split()
)
_FACTS = (Column("name", "what"), Column("value", "value"))


def html_report(source: Source, path: str | Path, *, title: str = "") -> Path:
    """Write a run as one HTML file that shows everything offline: what was tried, chosen and why, with pictures.

    Args:
        source: a session's state, a `TuneResult` or events, of a run at any stage. With a state alone the timeline shows
            how long trials took, not when they ran.
        path: the file; one that is there is replaced.
        title: the heading; default: what was tuned.

    Returns:
        The path.

    Raises:
        DataError: the file can't be written.
    """
    written, page = Path(path), report_page(source, title=title)
    try:
        written.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise DataError(f"the report can't be written to {str(path)!r}: {error.strerror or error}") from error
    return written


def report_page(source: Source, *, title: str = "") -> str:
    """The text of the file that `html_report` writes."""
    state = state_of(source)
    heading = title or state.target or "Tuning"
    ordered = sorted(groups(state), key=eager_weight, reverse=True)
    parts = [
        f'<header><p class="kicker">aitune_lab, tuning report</p><h1>{safe(heading)}</h1>{_lead(state)}</header>',
        _tiles(state),
        _end_to_end(state),
        _where(state),
        _chosen(state),
        _modules(state, ordered),
        _timeline(source),
        _inspected(state),
        f"<h2>Plan</h2>{_preformatted(plan_to_toml(state.plan))}",
        _as_code(state),
        _environment(state),
        _log(state),
        f"<footer>Written by aitune_lab {safe(__version__)}. Figures hold for the machine and data named here.</footer>",
    ]
    style = stylesheet()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{safe(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{safe(heading)}</title><style>{style}</style></head>\n"
        f"<body><main>\n{chr(10).join(filter(None, parts))}\n</main></body></html>\n"
    )


@cache
def stylesheet() -> str:
    """The page's style."""
    return files(__package__).joinpath("assets/report.css").read_text(encoding="utf-8")


def _lead(state: SessionState) -> str:
    said = [line for line in headlines(state) if not line.startswith(("End to end", "Median of"))]
    return "".join(f'<p class="lead">{safe(line)}</p>' for line in said[:2])


def _tiles(state: SessionState) -> str:
    """The figures that one looks for first."""
    end, choices = end_to_end_of(state), tuple(state.choices.values())
    tiles: list[tuple[str, str, str]] = []
    info = end_info(state)
    if info.speedup is not None:
        kind = "estimate, end to end" if any(bar.estimated for bar in info.bars) else "as fast, end to end"
        tiles.append(("good" if info.speedup > 1 else "", f"×{times(info.speedup)}", kind))
    if end is not None and end.comparison is not None:
        refused = end.comparison.error_class == "refused"
        words = "out of tolerance" if refused else end.comparison.error_class
        tiles.append(("bad" if refused else "good", words, "outputs of the whole target"))
    if choices:
        tuned = sum(choice.candidate.label != EAGER for choice in choices)
        tiles.append(("", f"{tuned} of {len(choices)}", "signatures tuned"))
    tried = [trial for trial in state.trials.values() if trial.candidate.label != EAGER]
    if tried:
        right = sum(trial.status == "ok" and trial.error_class != "refused" for trial in tried)
        tiles.append(("", f"{right} of {len(tried)}", "trials ran and were right"))
    cells = (
        f'<p class="tile {kind}"><b>{safe(figure)}</b><span>{safe(what)}</span></p>' for kind, figure, what in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if tiles else ""


def _end_to_end(state: SessionState) -> str:
    info = end_info(state)
    picture = end_picture(info) if info.bars else None
    return _section("End to end", picture, info.caption, heading=info.title)


def _where(state: SessionState) -> str:
    info = where_info(state)
    picture = where_picture(info) if info.eager_ms > 0 else None
    return _section(info.title, picture, info.caption)


def _chosen(state: SessionState) -> str:
    choices = tuple(state.choices.values())
    if not choices:
        return ""
    rows = choice_rows(choices, state.trials)
    columns = [c for c in CHOICE_COLUMNS if any(row.get(c.key) for row in rows)]
    return f"<h2>Chosen</h2>{_table(columns, rows[:MAX_ROWS])}{_left_out(len(rows) - MAX_ROWS, 'choice')}"


def _modules(state: SessionState, ordered: Sequence[Selected]) -> str:
    if not ordered:
        return ""
    shown = ordered[:MAX_DETAILS]
    details = "".join(_module(state, group, number == 0) for number, group in enumerate(shown))
    said = '<p class="caption">Those on which eager spends most come first.</p>'
    return f"<h2>Candidates by module</h2>{said}{details}{_left_out(len(ordered) - len(shown), 'module')}"


def _module(state: SessionState, group: Selected, opened: bool) -> str:
    where = {"module": group.path, "signature": group.signature}
    latency, difference, pareto = (
        latency_info(state, **where),
        difference_info(state, **where),
        pareto_info(state, **where),
    )
    drawn = [
        _figure(latency.title, latency_picture(latency) if latency.bars else None, latency.caption),
        _figure(difference.title, difference_picture(difference) if difference.rows else None, difference.caption),
    ]
    if len(pareto.points) > 1:
        drawn.append(_figure(pareto.title, pareto_picture(pareto), pareto.caption))
    choice = group.choice
    outcome = "nothing chosen yet"
    if choice is not None:
        gain = f", {times(choice.speedup)} times as fast" if choice.speedup and choice.candidate.label != EAGER else ""
        outcome = f"{choice.candidate.label}{gain}"
    table = group_html(group).replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    head = f"<summary>{safe(group.name)} <span>{safe(outcome)}</span></summary>"
    return f'<details{" open" if opened else ""}>{head}<div class="inside">{"".join(drawn)}{table}</div></details>'


def _timeline(source: Source) -> str:
    info = timeline_info(source)
    return _section(info.title, timeline_picture(info) if info.spans else None, info.caption)


def _inspected(state: SessionState) -> str:
    if not state.rows:
        return ""
    table = _table(_MODULES, module_rows(state.rows[:MAX_ROWS]))
    said = f"{counted(len(state.rows), 'module')}, times of one pass with the recorder on"
    left = _left_out(len(state.rows) - MAX_ROWS, "module")
    return f'<h2>Inspected</h2><details><summary>{said}</summary><div class="inside">{table}{left}</div></details>'


def _as_code(state: SessionState) -> str:
    if not state.choices:
        return ""
    said = '<p class="caption">A script with the same choices, pinned.</p>'
    return f"<h2>As code</h2>{said}{_preformatted(as_code(state))}"


def _environment(state: SessionState) -> str:
    facts: dict[str, str] = {}
    if (found := state.environment) is not None:
        facts |= {"Python": found.python, "platform": found.platform, "CPU": found.cpu, "threads": str(found.threads)}
        facts["torch"] = found.torch
        facts |= {f"GPU {number}": name for number, name in enumerate(found.gpus)}
        facts |= {"CUDA": found.cuda or "", "driver": found.driver or ""}
        facts |= {name: version for name, version in found.packages.items() if name != "torch"}
    for trial in state.trials.values():
        facts = {**dict(trial.versions), **facts}
    for name, value in _conditions(state).items():
        facts.setdefault(name, value)
    rows = [{"name": name, "value": value} for name, value in facts.items() if value]
    return f"<h2>Environment</h2>{_table(_FACTS, rows)}" if rows else ""


def _conditions(state: SessionState) -> Mapping[str, str]:
    """What the latencies rest on, where all of them agree."""
    found: dict[str, set[str]] = {}
    for trial in state.trials.values():
        for point in trial.points:
            if point.latency is not None:
                for name, value in point.latency.conditions.items():
                    found.setdefault(name.replace("_", " "), set()).add(str(value))
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1}


def _log(state: SessionState) -> str:
    if not state.log:
        return ""
    items = "".join(
        f"<li>{seconds:.1f} s, {safe(level)}: {safe(message)}</li>" for seconds, level, message in state.log
    )
    said = f"the last {counted(len(state.log), 'line')}"
    return f'<h2>Log</h2><details><summary>{said}</summary><div class="inside"><ul>{items}</ul></div></details>'


def _section(title: str, picture: Picture | None, caption: Iterable[str], *, heading: str = "") -> str:
    return f"<h2>{safe(heading or title)}</h2>{_drawn(picture, caption)}"


def _figure(title: str, picture: Picture | None, caption: Iterable[str]) -> str:
    return f"<h3>{safe(title)}</h3>{_drawn(picture, caption)}"


def _drawn(picture: Picture | None, caption: Iterable[str]) -> str:
    svg = f'<div class="scroll">{picture.svg()}</div>' if picture is not None else ""
    return f'{svg}<p class="caption">{safe(" ".join(caption))}</p>'


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, str]]) -> str:
    return f'<div class="scroll">{html_table(columns, rows)}</div>'


def _left_out(count: int, noun: str) -> str:
    return f'<p class="small">{counted(count, noun)} more, not shown here.</p>' if count > 0 else ""


def _preformatted(text: str) -> str:
    lines = (safe(line) for line in text.strip().splitlines())
    return f"<pre>{chr(10).join(lines)}</pre>"
