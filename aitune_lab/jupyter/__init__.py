"""The notebook: widgets that show a session and send commands back. Nothing here is imported by other parts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency, install_command

if TYPE_CHECKING:
    from .lab import Lab
    from .plot import PlotView
    from .tree import TreeView

__all__ = ["Lab", "PlotView", "TreeView"]

_MODULE_OF = {"Lab": "lab", "PlotView": "plot", "TreeView": "tree"}
_NEEDED = ("IPython", "anywidget", "ipywidgets", "plotly", "traitlets")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_MODULE_OF[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        raise MissingDependency(error.name, "the notebook's workbench", install_command("notebook")) from None
    value = getattr(module, name)
    globals()[name] = value
    return value
