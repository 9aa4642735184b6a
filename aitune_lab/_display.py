"""The one hook through which parts below the report reach it, for rich displays and `to_dataframe()`."""

from __future__ import annotations

import importlib
from types import ModuleType


def report() -> ModuleType:
    """The package `aitune_lab.report`, imported at its first use."""
    return importlib.import_module(".report", __package__)
