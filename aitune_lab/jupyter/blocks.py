"""What the page draws, as plain JSON: a few kinds of blocks. The kernel says what stands there, `lab.js` how it looks.

Every text is untrusted and drawn as text. An operation is a name and arguments that come back in a command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ..report.text import Column

Block = dict[str, Any]
Tone = Literal["", "muted", "good", "warning", "error", "lead"]


def text(value: str, tone: Tone = "") -> Block:
    """A paragraph. The tone also shows as a mark, never as colour alone."""
    return {"kind": "text", "text": value, "tone": tone}


def heading(value: str) -> Block:
    return {"kind": "heading", "text": value}


def facts(items: Iterable[tuple[str, str]]) -> Block:
    """Figures that count, each a value over its label."""
    return {"kind": "facts", "items": [{"label": label, "value": value} for label, value in items]}


def table(
    columns: Sequence[Column],
    rows: Iterable[Mapping[str, Any]],
    *,
    caption: str = "",
    empty: str = "",
) -> Block:
    """A table; `empty` stands there if there are no rows.

    A row holds its cells by column; `key` tells it from others, `detail` is a text that opens beneath it, `tone` marks
    it, `action` is a button at its end.
    """
    shown = [dict(row) for row in rows]
    return {
        "kind": "table",
        "columns": [{"key": c.key, "title": c.title, "right": c.right} for c in columns],
        "rows": shown,
        "caption": caption,
        "empty": empty,
    }


def progress(fraction: float | None, label: str, note: str = "") -> Block:
    """A bar, from 0 to 1; None moves without saying how far."""
    return {"kind": "progress", "fraction": fraction, "label": label, "note": note}


def action(
    op: str, label: str, args: Mapping[str, Any] | None = None, *, primary: bool = False, disabled: str = ""
) -> Block:
    """A button. `disabled` is the reason why it can't be pressed now."""
    return {"op": op, "label": label, "args": dict(args or {}), "primary": primary, "disabled": disabled}


def actions(*items: Block) -> Block:
    return {"kind": "actions", "items": list(items)}


def goto(step: str, label: str, *, primary: bool = True) -> Block:
    """A button that shows another step; the page does that by itself."""
    return {"goto": step, "label": label, "primary": primary, "op": "", "args": {}, "disabled": ""}


def select(op: str, name: str, label: str, value: str, options: Sequence[tuple[str, str]], help: str = "") -> Block:
    """A menu of (value, label)."""
    listed = [{"value": v, "label": shown} for v, shown in options]
    return {"type": "select", "op": op, "name": name, "label": label, "value": value, "options": listed, "help": help}


def field(
    op: str,
    name: str,
    label: str,
    value: str,
    *,
    type: Literal["text", "number"] = "text",
    placeholder: str = "",
    help: str = "",
) -> Block:
    """A line to type in. With an empty `op` nothing is sent until a button of the same form is pressed."""
    return {
        "type": type,
        "op": op,
        "name": name,
        "label": label,
        "value": value,
        "placeholder": placeholder,
        "help": help,
    }


def check(op: str, name: str, label: str, value: bool, *, help: str = "", disabled: str = "") -> Block:
    """A box to tick."""
    return {
        "type": "check",
        "op": op,
        "name": name,
        "label": label,
        "value": value,
        "help": help,
        "disabled": disabled,
    }


def form(*fields: Block, actions: Sequence[Block] = (), label: str = "") -> Block:
    """Fields side by side, with buttons that send what stands in them."""
    return {"kind": "form", "fields": list(fields), "actions": list(actions), "label": label}


def details(summary: str, *inner: Block, open: bool = False, key: str = "") -> Block:
    """Blocks that show on demand."""
    return {"kind": "details", "summary": summary, "blocks": list(inner), "open": open, "key": key or summary}


def code(value: str, label: str, copied: str = "Copied") -> Block:
    """Text as it is, with a button that copies it."""
    return {"kind": "code", "text": value, "label": label, "copied": copied}


def lines(values: Iterable[str], *, empty: str = "") -> Block:
    """Lines of a log, the last one in sight."""
    return {"kind": "lines", "lines": list(values), "empty": empty}


def tabs(op: str, name: str, value: str, options: Sequence[tuple[str, str]], label: str) -> Block:
    """One of a few, side by side."""
    listed = [{"value": v, "label": shown} for v, shown in options]
    return {"kind": "tabs", "op": op, "name": name, "value": value, "options": listed, "label": label}


def slot(name: str) -> Block:
    """The place of a widget of its own: the tree, a plot."""
    return {"kind": "slot", "name": name}


def panel(title: str, *inner: Block, note: str = "") -> Block:
    """Blocks that belong together, under a title."""
    return {"kind": "panel", "title": title, "note": note, "blocks": list(inner)}
