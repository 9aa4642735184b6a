"""What a Lab hands over: the `.ait`, the plan, the script, the report, and the static copy in the notebook."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import DataError
from ..tuning.options import TuneOptions
from ..tuning.planfile import write_plan
from .display import shell

if TYPE_CHECKING:
    from .core import LabCore

Kind = Literal["ait", "plan", "code", "report"]

_KINDS: dict[str, Kind] = {".ait": "ait", ".toml": "plan", ".py": "code", ".html": "report"}
_NOT_OF_A_SCRIPT = ("dry_run", "measure_limits", "meter", "dynamic_shapes", "build_limits")
"""Options that `tune` has no keyword for."""


def write_export(lab: LabCore, path: Path, *, kind: str | None = None) -> str:
    """Write a file of a kind, by default what its ending says. Gives the digest of a `.ait`, else the path.

    Raises DataError for an ending that says nothing, TargetError where there is nothing to write yet.
    """
    what = kind or _KINDS.get(path.suffix)
    if what is None:
        raise DataError(
            f"what to export is said by the file's ending, one of {list(_KINDS)} (tuned model, plan, script, report), but got "
            f"{path.name!r}"
        )
    if what == "ait":
        from ..checkpoint import save

        lab.ended("saving")
        return save(lab.target, path)
    if what == "plan":
        write_plan(lab.plan, path)
    elif what == "code":
        path.write_text(as_script(lab), encoding="utf-8", newline="\n")
    else:
        from ..report.html import html_report

        html_report(lab.snapshot.result or lab.snapshot.state, path)
    return str(path)


def as_script(lab: LabCore) -> str:
    """The script that comes to the same result, with the names that target and data have in the notebook."""
    from ..report.code import as_code

    return as_code(
        lab.snapshot.state,
        target_name=name_of(lab.target) or "model",
        data_name=name_of(lab.data) or "data",
        options=given_options(lab.options),
    )


def given_options(options: TuneOptions) -> dict[str, Any]:
    """What differs from the defaults, as `tune` takes it."""
    plain = TuneOptions()
    found = {}
    for field in fields(TuneOptions):
        value = getattr(options, field.name)
        if field.name not in _NOT_OF_A_SCRIPT and value != getattr(plain, field.name):
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def name_of(value: object) -> str | None:
    """The name that the user's notebook has for an object; None if it has none."""
    running = shell()
    if running is None:
        return None
    names = [name for name, held in running.user_ns.items() if held is value and not name.startswith("_")]
    return names[0] if names else None


def static_html(lab: LabCore) -> str:
    """The Lab as HTML that needs neither kernel nor script, readable without any CSS."""
    from ..report.static import static_html as draw

    return draw(lab.snapshot.state)
