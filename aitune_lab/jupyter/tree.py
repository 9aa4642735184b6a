"""The module tree as one widget: it shows columns, follows patches, and passes the page's commands on."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from ..errors import AituneError
from .bundle import bundled, styles
from .comm import answer_at_once
from .protocol import Ack, Changes, Columns, Command, Patch, Tree

_log = logging.getLogger("aitune_lab")


class TreeView(anywidget.AnyWidget):
    """A virtual tree of modules, drawn by `static/tree.js`.

    The trait is sent once. Later values are changed in place, under a lock, and go out as patches, so that a page that
    loads or reloads at any time shows the present state, and a live one gets only what changed.

    Every method may be called from any thread. The callback of `on_command` runs on whichever thread the kernel
    handles the page's message and must return at once.
    """

    _esm = bundled("tree_widget.js")
    _css = styles("tree.css", "cells.css", "menu.css")

    tree = traitlets.Dict().tag(sync=True)
    height = traitlets.Int(420).tag(sync=True)

    def __init__(self, columns: Columns, *, height: int = 420) -> None:
        """Show `columns` (`report.tree_rows.columns_of`); `height` bounds the rows' area, in CSS pixels."""
        self._lock = threading.RLock()
        self._on_command: Callable[[Command], Any] | None = None
        super().__init__(tree=Tree(revision=0, columns=copy.deepcopy(columns)), height=height)
        answer_at_once(self)
        self.on_msg(self._received)

    @property
    def columns(self) -> Columns:
        """A copy of what is shown now."""
        with self._lock:
            columns: Columns = copy.deepcopy(self.tree["columns"])
            return columns

    def patch(self, changes: Changes) -> None:
        """Change values in place and send them, as one message; nothing is sent for no changes.

        Raises KeyError for a column, IndexError for a row that doesn't exist; then nothing is changed.
        """
        if not changes:
            return
        with self._lock:
            columns = self.tree["columns"]
            for row, values in changes.items():
                for column in values:
                    if not 0 <= row < len(columns[column]):
                        raise IndexError(f"row {row} of column {column!r}: the tree has {len(columns[column])} rows")
            for row, values in changes.items():
                for column, value in values.items():
                    columns[column][row] = value
            self.tree["revision"] += 1
            self.send(Patch(op="patch", revision=self.tree["revision"], rows=changes))

    def show(self, columns: Columns) -> None:
        """Show another tree, or the same with other rows: after a new inspection."""
        with self._lock:
            self.tree = dict(Tree(revision=self.tree["revision"] + 1, columns=copy.deepcopy(columns)))

    def on_command(self, callback: Callable[[Command], Any] | None) -> None:
        """Set what answers the page's commands; its result (JSON values) goes back with the acknowledgement.

        An AituneError goes back as its message, which the page shows; so does any other, with its type.
        """
        self._on_command = callback

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("id"), str):
            return
        command: Command = content  # type: ignore[assignment]
        try:
            self.send(Ack(op="ack", id=command["id"], ok=True, reply=self._answer(command), error=""))
        except AituneError as error:
            self._refuse(command, str(error))
        except Exception as error:
            _log.exception("the command %s of the module tree failed", command.get("op"))
            self._refuse(command, f"{type(error).__name__}: {error}")

    def _answer(self, command: Command) -> Any:
        if command["op"] == "hello":
            with self._lock:
                return None if command.get("revision") == self.tree["revision"] else self.tree
        return self._on_command(command) if self._on_command is not None else None

    def _refuse(self, command: Command, reason: str) -> None:
        self.send(Ack(op="ack", id=command["id"], ok=False, reply=None, error=reason))
