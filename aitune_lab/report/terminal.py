"""What a terminal shows, drawn by rich: result blocks as tables, and a run as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..schema import Event
from ..tuning.progress import line
from ..tuning.strategies.words import counted
from .results import Block, blocks_text
from .text import MODULE_COLUMNS, Column, clean, inspection_head, module_rows

if TYPE_CHECKING:
    from rich.console import Console

    from ..capture.inspector import Inspection

NARROW = 110
"""Characters of a terminal below which tables leave out what other rows tell too."""
_SAID_BY_THE_CALLER = ("run_failed", "run_cancelled")
_REPEATED = ("eager", "dtypes", "build", "relative_l2", "parameters", "inputs", "outputs")


def print_blocks(console: Console, blocks: Sequence[Block]) -> None:
    """Print blocks: as tables that fit a terminal, as plain aligned text where the output is no terminal."""
    if not console.is_terminal:
        console.file.write(blocks_text(blocks) + "\n")
        return
    from rich.padding import Padding
    from rich.text import Text

    for block in blocks:
        if block.title:
            console.print(Text(clean(block.title), style="bold"))
        if block.rows:
            wide = console.width >= NARROW
            console.print(_table([c for c in block.columns if wide or c.key not in _REPEATED], block.rows))
        for text in block.lines:
            console.print(Padding(Text(clean(text)), (0, 0, 0, 2 if block.title else 0)))
        console.print()


def inspection_blocks(inspection: Inspection, max_depth: int | None = None) -> list[Block]:
    """An inspection as blocks, with the columns that a terminal has room for.

    Rows deeper than `max_depth` levels are counted, not shown.
    """
    rows = [row for row in inspection.rows if max_depth is None or row.depth < max_depth]
    shown = ("path", "class_name", "calls", "mean_ms", "share", "parameters", "dtypes", "inputs", "tunable")
    columns = [column for column in MODULE_COLUMNS if column.key in shown]
    lines = inspection_head(inspection)
    if hidden := len(inspection.rows) - len(rows):
        lines.append(f"{counted(hidden, 'row')} deeper than {counted(max_depth or 0, 'level')} not shown")
    lines += [f"warning: {warning}" for warning in inspection.warnings]
    return [Block("", columns, module_rows(rows)), Block("", lines=lines)]


def _table(columns: Sequence[Column], rows: Sequence[Any]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = [c for c in columns if any(row.get(c.key) for row in rows)] or list(columns)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in shown:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=column.right or column.key == "point",
            overflow="fold",
        )
    for row in rows:
        chosen = str(row.get("candidate", "")).startswith("* ")
        table.add_row(
            *(Text(clean(row.get(c.key, "")), style="bold green" if chosen else "") for c in shown),
        )
    return table


@contextmanager
def progress_of(console: Console) -> Iterator[Callable[[Event], None]]:
    """Shows a run: give each event to the function that this yields.

    On a terminal one live line says what runs now, in which phase, for how long, and how much is left; finished steps
    stay above it. Elsewhere only those are written, a line each. That the run failed or was cancelled is left to the
    caller, who gets the error.
    """
    if not console.is_terminal:

        def write(event: Event) -> None:
            if (text := line(event)) and event.kind not in _SAID_BY_THE_CALLER:
                console.file.write("\n".join(map(clean, text.splitlines())) + "\n")
                console.file.flush()

        yield write
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TimeElapsedColumn
    from rich.text import Text

    running = {"what": "", "phase": "", "estimate": ""}

    class Now(ProgressColumn):
        """What runs now."""

        def render(self, task: Any) -> Text:
            return Text(clean(": ".join(filter(None, (running["what"], running["phase"])))))

    class Estimate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(str(running["estimate"]), style="dim")

    columns = (SpinnerColumn(), Now(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), Estimate())
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("", total=None)

        def show(event: Event) -> None:
            data = event.data
            if event.kind == "run_started":
                live.update(task, total=int(data.get("trials") or 0))
                running["estimate"] = f"of about {float(data.get('estimated_seconds') or 0):.0f} s"
            elif event.kind == "trial_started":
                label = event.candidate.label if event.candidate else ""
                running.update(what=f"{event.path or '(model)'}: {label}", phase=str(data.get("phase") or ""))
                live.update(task, total=int(data.get("total") or 0))
            elif event.kind == "trial_progress":
                running["phase"] = str(data.get("doing") or data.get("phase") or "")
            elif event.kind in ("trial_finished", "trial_failed"):
                running.update(what="", phase="")
                live.advance(task)
            elif event.kind == "log":
                running["what"] = str(data.get("message", ""))
                if data.get("level") == "info":
                    return
            if (text := line(event)) and event.kind not in _SAID_BY_THE_CALLER:
                live.console.print(Text("\n".join(map(clean, text.splitlines()))))

        yield show
