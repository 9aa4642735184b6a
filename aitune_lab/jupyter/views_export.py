"""The step Export: the file, the plan, the code, the report, and the end of the Lab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import blocks as b
from .blocks import Block
from .snapshot import Snapshot


@dataclass(frozen=True)
class Exports:
    """What was exported so far: by kind whether it went well, and what to say. `code` is the script to copy."""

    said: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    code: str = ""
    name: str = "tuned"


def export_step(snap: Snapshot, exports: Exports) -> list[Block]:
    """Four things to take away, and *finish*."""
    blocks: list[Block] = []
    if snap.result is None:
        running = snap.phase == "tuning"
        why = "The tune has not ended yet" if running else "Nothing was tuned yet"
        blocks.append(b.text(f"{why}. The plan and the code can be taken away already.", "muted"))
    elif snap.stale:
        blocks.append(
            b.text(
                "The plan has changed since the tune: a .ait holds what was tuned, the plan what you want now.",
                "warning",
            )
        )
    tuned = snap.result is not None and any(c.candidate.label != "eager" for c in snap.result.choices)
    why_not = "" if tuned else "Nothing is tuned, so there is nothing to save"
    name = exports.name
    blocks += [
        _card(
            exports,
            "ait",
            "Tuned model",
            "Production loads it in one line, without Jupyter, and can prove there that it still holds.",
            f"{name}.ait",
            "Save",
            why_not,
        ),
        _card(exports, "plan", "Plan", "Your rules and limits as TOML, for the next tune.", f"{name}.toml", "Write"),
        _card(
            exports,
            "report",
            "Report",
            "One HTML file with everything seen here; it needs no network.",
            f"{name}.html",
            "Write",
            "" if snap.state.trials else "There is nothing to report before a tune",
        ),
        b.panel("Code", b.code(exports.code, "Copy as code"), note="A script with the same result."),
        b.panel(
            "Finish",
            b.actions(b.action("finish", "Finish and keep a static copy")),
            note="The notebook keeps tables and figures that need no kernel; the controls go.",
        ),
    ]
    return blocks


def _card(exports: Exports, kind: str, title: str, note: str, path: str, label: str, disabled: str = "") -> Block:
    inner = [
        b.form(
            b.field("", "path", "File", path),
            actions=[b.action("export", label, {"what": kind}, primary=kind == "ait", disabled=disabled)],
        )
    ]
    if kind in exports.said:
        good, words = exports.said[kind]
        inner.append(b.text(words, "good" if good else "error"))
    return b.panel(title, *inner, note=note)
