"""Joins a widget's modules, and its style sheets: each goes to the page as a single text."""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)


def bundled(name: str) -> str:
    """The module `static/<name>` with all it imports put before it, each once.

    Its modules import names from each other in `import { … } from "./other.js"` only, and share one scope here, so
    no two may have a top-level name in common.
    """
    seen: dict[str, str] = {}
    _collect(name, seen)
    return "\n".join(seen.values())


def styles(*names: str) -> str:
    """Style sheets `static/<name>` as one, in this order."""
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


def _collect(name: str, seen: dict[str, str]) -> None:
    source = (STATIC / name).read_text(encoding="utf-8")
    for other in _IMPORT.findall(source):
        if other not in seen:
            _collect(other, seen)
    seen[name] = _EXPORT.sub("", _IMPORT.sub("", source))
