"""How results show themselves: the hook through which parts below the report reach it, and what IPython prints."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def report() -> ModuleType:
    """The package `aitune_lab.report`, imported at its first use."""
    return importlib.import_module(".report", __package__)


class Printed:
    """A result that IPython shows as `print` does, where it can't show HTML, and not as the fields of a dataclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # In the class itself, since IPython prefers a class's own `__repr__` to what it inherits.
        cls._repr_pretty_ = _print  # type: ignore[attr-defined]


def _print(shown: Any, printer: Any, cycle: bool) -> None:
    for number, line in enumerate(str(shown).splitlines()):
        if number:
            printer.break_()
        printer.text(line)
