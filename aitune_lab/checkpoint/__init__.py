"""`.ait` files: save what was tuned, load it elsewhere, look into one.

Names are imported at their first use, so that looking into a file (`show`) needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .describe import Description, show
    from .read import check, load
    from .report import CheckReport, LoadReport
    from .write import save

__all__ = ["CheckReport", "Description", "LoadReport", "check", "load", "save", "show"]

_MODULE_OF = {
    "CheckReport": "report",
    "Description": "describe",
    "LoadReport": "report",
    "check": "read",
    "load": "read",
    "save": "write",
    "show": "describe",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value
