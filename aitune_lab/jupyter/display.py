"""How a Lab stands in a notebook: live beside a static copy from the first display on, the copy alone at the end."""

from __future__ import annotations

import sys
from typing import Any

WIDGET = "application/vnd.jupyter.widget-view+json"

HINT = "<p>No workbench can be drawn here. lab.run() inspects and tunes; showing the Lab again then shows what came of it.</p>"
"""Stands beneath the static copy where no page draws widgets, before there are results."""

Bundle = dict[str, Any]
"""A MIME bundle: what to show by MIME type."""


def shell() -> Any:
    """The running IPython shell, or None. IPython is not imported for it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def can_show_widgets() -> bool:
    """Whether a page may draw widgets: a kernel runs, and the page gets a widget's code from it.

    Colab's page does not, unless it is told to; there the static copy is shown.
    """
    return getattr(shell(), "kernel", None) is not None and "google.colab" not in sys.modules


class Display:
    """One output of a notebook that is replaced as the Lab goes on.

    After a page was reloaded its replacement may be dropped, so nothing live depends on it.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def shown(self) -> bool:
        return self._handle is not None

    def show(self, bundle: Bundle) -> None:
        """Put the bundle into the output of the cell that runs."""
        from IPython.display import display

        self._handle = display(bundle, raw=True, display_id=True)

    def replace(self, bundle: Bundle) -> None:
        """Put the bundle in place of what was shown; nothing happens before the first display."""
        if self._handle is not None:
            self._handle.update(bundle, raw=True)


def bundle_of(text: str, html: str, model_id: str | None = None) -> Bundle:
    """Text and HTML, and the widget where there is one."""
    bundle: Bundle = {"text/plain": text, "text/html": html}
    if model_id is not None:
        bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": model_id}
    return bundle


class ProgressLine:
    """One line that is rewritten in place: in the cell's output, or on stderr where there is no notebook."""

    def __init__(self) -> None:
        self._display = Display() if shell() is not None else None
        self._last = ""

    def say(self, line: str) -> None:
        """Show this line from now on; nothing happens if it is shown already."""
        if line == self._last:
            return
        self._last = line
        if self._display is None:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        elif self._display.shown:
            self._display.replace({"text/plain": line})
        else:
            self._display.show({"text/plain": line})
