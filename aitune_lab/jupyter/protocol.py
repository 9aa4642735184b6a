"""What goes over the wire between the kernel and the notebook's page: typed, and the same for every front end.

The kernel sends a tree once, as one trait, and from then on patches. Each patch raises the revision by one; a page that
finds a gap says `hello` and gets the whole tree. The page sends commands with ids; each is answered by one `ack`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ..report.tree_candidates import CandidateFigures
from ..report.tree_rows import Changes, Columns

__all__ = ["Ack", "CandidateFigures", "Changes", "Columns", "Command", "Patch", "PlotlySource", "Tree"]

Op = Literal["hello", "select", "candidates", "pin", "unpin", "leave"]


class Tree(TypedDict):
    """The synced trait. `revision` comes first: a snapshot taken while a patch is being made is never newer than it."""

    revision: int
    columns: Columns


class _CommandBase(TypedDict):
    id: str
    op: Op
    path: str


class Command(_CommandBase, total=False):
    """What a page asks. `path` is a row's key: a module's path, or a fold's `re:` pattern.

    `select`: the row is now the one looked at; `candidates`: what it can be pinned to; `pin` (with `candidate`, a
    label, and `accept_error` after the second click), `unpin` (back to automatic), `leave` (leave the module alone).
    `hello` (with `revision`) is answered by the view itself.
    """

    candidate: str
    accept_error: bool
    revision: int


class Ack(TypedDict):
    """The answer to a command: `reply` if it was taken, else `error`, a sentence for people."""

    op: Literal["ack"]
    id: str
    ok: bool
    reply: Any
    error: str


class Patch(TypedDict):
    """New values by row number and column; `revision` is the tree's after it."""

    op: Literal["patch"]
    revision: int
    rows: Changes


class PlotlySource(TypedDict):
    """Goes with one buffer, the source of plotly.js."""

    op: Literal["plotly"]
