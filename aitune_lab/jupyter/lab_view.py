"""The Lab's page as one widget: sections of blocks, drawn by `static/lab.js`, with the tree and a plot in their places."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from ..errors import AituneError
from .bundle import STATIC, bundled
from .comm import answer_at_once
from .plot import PlotView
from .protocol import Ack
from .tree import TreeView

Sections = Mapping[str, Any]
"""What the page shows, by name: `head`, `notice`, and a list of blocks for each step."""

_log = logging.getLogger("aitune_lab")


class LabView(anywidget.AnyWidget):
    """Shows sections and passes the page's commands on.

    Sections are changed in place, under a lock, and only those that differ go out, all in one message. So a page that
    loads or reloads at any time gets the present state.

    Attributes:
        tree, plot: the widgets that stand in the slots of these names.
        pages: how many views show this widget now, as far as the pages have told.
    """

    _esm = bundled("lab.js")
    _css = STATIC / "lab.css"

    view = traitlets.Dict().tag(sync=True)
    step = traitlets.Unicode("inspect").tag(sync=True, echo_update=False)
    tree = traitlets.Unicode().tag(sync=True)
    plot = traitlets.Unicode().tag(sync=True)

    def __init__(self, sections: Sections, tree: TreeView, plot: PlotView) -> None:
        self._lock = threading.RLock()
        self._on_command: Callable[[str, Mapping[str, Any]], Any] | None = None
        self._pages: set[str] = set()
        self._left = threading.Event()
        self._when_left: Callable[[], None] = lambda: None
        self.tree_view, self.plot_view = tree, plot
        super().__init__(
            view={"revision": 0, "sections": dict(sections)},
            tree=f"anywidget:{tree.model_id}",
            plot=f"anywidget:{plot.model_id}",
        )
        answer_at_once(self)
        self.on_msg(self._received)

    @property
    def pages(self) -> int:
        return len(self._pages)

    def show(self, sections: Sections) -> bool:
        """Bring the page up to date with at most one message; tells whether one was sent."""
        with self._lock:
            held = self.view["sections"]
            changed = {name: value for name, value in sections.items() if held.get(name) != value}
            if not changed:
                return False
            held.update(changed)
            self.view["revision"] += 1
            self.send({"op": "patch", "revision": self.view["revision"], "sections": changed})
            return True

    def on_command(self, callback: Callable[[str, Mapping[str, Any]], Any] | None) -> None:
        """Set what answers a command (operation, arguments); its result goes back with the acknowledgement.

        It may run on any thread and must return at once. An AituneError goes back as its message, any other with its
        type as well.
        """
        self._on_command = callback

    def on_left(self, callback: Callable[[], None]) -> None:
        """Set what is called when the last page has said that it shows this widget no more; it must return at once."""
        self._when_left = callback

    def wait_until_left(self, timeout: float) -> bool:
        """Wait until no page shows this widget any more (seconds); tells whether that came to be."""
        return not self._pages or self._left.wait(timeout)

    def close(self) -> None:
        """Close this widget and those in its slots. What they hold is let go first: a closed widget's state is saved too."""
        with self._lock:
            self._on_command = None
            self.view = {}
        self.tree_view.tree = {}
        self.plot_view.figure = {}
        for widget in (self.tree_view, self.plot_view):
            widget.close()
        super().close()

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("id"), str):
            return
        ident, op, args = content["id"], str(content.get("op", "")), content.get("args") or {}
        try:
            reply = self._answer(op, args)
        except AituneError as error:
            self.send(Ack(op="ack", id=ident, ok=False, reply=None, error=str(error)))
        except Exception as error:
            _log.exception("the command %s of the workbench failed", op)
            self.send(Ack(op="ack", id=ident, ok=False, reply=None, error=f"{type(error).__name__}: {error}"))
        else:
            if op != "gone":
                self.send(Ack(op="ack", id=ident, ok=True, reply=reply, error=""))

    def _answer(self, op: str, args: Mapping[str, Any]) -> Any:
        if op == "here":
            with self._lock:
                self._pages.add(str(args.get("view")))
                self._left.clear()
                return {"view": self.view}
        if op == "gone":
            with self._lock:
                self._pages.discard(str(args.get("view")))
                if self._pages:
                    return None
                self._left.set()
            self._when_left()
            return None
        return self._on_command(op, args) if self._on_command is not None else None
