"""Comms whose messages are answered while a cell runs, where the kernel can do that."""

from __future__ import annotations

from typing import Any


def answer_at_once(widget: Any) -> None:
    """Let a widget's messages be handled by the subshell that the page named, also while a cell runs.

    Newer kernels (ipykernel 7.4) hand a page's message to the shell that last sent on its comm; for a widget made in a
    cell that is the main shell, which answers when the cell ends. Does nothing for kernels without that habit, nor for
    a widget without a comm.
    """
    comm = getattr(widget, "comm", None)
    if comm is not None and hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default
