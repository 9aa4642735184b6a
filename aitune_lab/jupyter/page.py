"""A Lab's page: its widgets, what they show, and the commands that come from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..report import figures
from ..report.tree_candidates import candidates_of
from ..report.tree_rows import TreeRows
from . import views, views_compare, views_export, views_tune
from .coalesce import Coalescer
from .commands import answer
from .lab_view import LabView
from .plot import PlotView
from .protocol import Command
from .tree import TreeView

if TYPE_CHECKING:
    from .lab import Lab
    from .snapshot import Snapshot


def sections_of(lab: Lab) -> dict[str, Any]:
    """What the page shows of a Lab now."""
    snap = lab.snapshot
    exports = replace(lab.exports, code=lab.code())
    return {
        "head": views.head(snap),
        "notice": views.notice(snap.notice),
        "inspect": views.inspect_step(snap),
        "choose": views.choose_step(snap, lab.backends),
        "tune": views_tune.tune_step(snap),
        "compare": views_compare.compare_step(snap, lab.shown),
        "export": views_export.export_step(snap, exports),
    }


def figure_of(snap: Snapshot, shown: views_compare.Shown) -> Any:
    """The figure that the step Compare shows: of a module, of the whole run, or of the mixes."""
    state, kind = snap.state, shown.figure
    # Events tell when trials ran; a result has them, a state only what they added up to.
    ended = snap.result is not None and state.status in ("finished", "cancelled")
    source = snap.result if kind == "timeline" and ended and snap.result is not None else state
    if kind == "mixes":
        estimates = [e for mix in shown.mixes.all_of(state) if (e := mix.estimate(state)) is not None]
        measured = {m.name: m.measured.end_to_end for m in shown.mixes.held if m.measured is not None}
        return figures.mixes(estimates, measured=measured)
    if kind in views_compare.OF_A_MODULE:
        modules = views_compare.tried_modules(state)
        module = shown.module if shown.module in modules else modules[0] if modules else None
        draw: Callable[..., Any] = getattr(figures, kind)
        return draw(state, module)
    return getattr(figures, kind)(source)


class Page:
    """Keeps the widgets of a Lab up to date, with few messages. Its methods may be called from any thread."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._coalescer = Coalescer()
        snap = lab.snapshot
        self._drawn = snap
        self._rows = TreeRows(snap.state.rows)
        self._tree = TreeView(self._rows.columns(snap.state))
        self._tree.on_command(self._from_tree)
        self._figure_for = self._figure_key(snap)
        self._plot = PlotView(figure_of(snap, lab.shown))
        self.view = LabView(sections_of(lab), self._tree, self._plot)
        self.view.on_command(lambda op, args: answer(lab, op, args))
        lab.listeners.append(self.changed)

    def changed(self) -> None:
        """Something is to be shown; returns at once."""
        self._coalescer.post("page", self._show_page)
        self._coalescer.post("tree", self._show_tree)
        self._coalescer.post("plot", self._show_plot)

    def go(self, step: str) -> None:
        """Show a step."""
        if self.view.step != step:
            self.view.step = step

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is to be shown was sent (seconds)."""
        return self._coalescer.flush(timeout)

    def leave(self) -> None:
        """Show nothing new from now on."""
        if self.changed in self._lab.listeners:
            self._lab.listeners.remove(self.changed)
        self._coalescer.drop()
        self._coalescer.flush(5.0)

    def _show_page(self) -> bool:
        return self.view.show(sections_of(self._lab))

    def _show_tree(self) -> bool:
        snap, before = self._lab.snapshot, self._drawn
        self._drawn = snap
        planned, was = _planned(snap), _planned(before)
        if snap.state.rows is not before.state.rows:
            self._rows = TreeRows(snap.state.rows)
            self._tree.show(self._rows.columns(snap.state, planned=planned))
            return True
        changes = self._rows.changes(before.state, snap.state, planned=planned)
        if planned != was:
            now, shown = self._rows.columns(snap.state, planned=planned), self._tree.columns
            changes = {
                row: values
                for row in range(len(self._rows))
                if (values := {c: v[row] for c, v in now.items() if v[row] != shown[c][row]})  # type: ignore[literal-required, index]
            }
        self._tree.patch(changes)
        return bool(changes)

    def _show_plot(self) -> bool:
        snap = self._lab.snapshot
        key = self._figure_key(snap)
        if key == self._figure_for:
            return False
        self._figure_for = key
        self._plot.update(figure_of(snap, self._lab.shown))
        return True

    def _figure_key(self, snap: Snapshot) -> tuple[object, ...]:
        shown = self._lab.shown
        mixes = shown.mixes if shown.figure == "mixes" else None
        state = snap.state
        return (
            shown.figure,
            shown.module,
            mixes,
            tuple(state.trials),
            tuple(state.choices.values()),
            len(state.rows),
            snap.result is not None,
            state.status,
        )

    def _from_tree(self, command: Command) -> Any:
        lab, path = self._lab, command["path"]
        if command["op"] == "candidates":
            paths = self._rows.paths(path)
            return candidates_of(lab.snapshot.state, paths, offered=views.planned_labels(lab.snapshot, paths))
        if command["op"] == "select":
            return answer(lab, "module", {"value": path})
        if command["op"] == "pin":
            args: Mapping[str, Any] = {
                "path": path,
                "candidate": command["candidate"],
                "accept_error": bool(command.get("accept_error")),
            }
            return answer(lab, "pin", args)
        if command["op"] == "leave":
            return answer(lab, "leave", {"path": path})
        return answer(lab, "unpin", {"pattern": path})


def _planned(snap: Snapshot) -> frozenset[str]:
    if snap.preview is None or snap.phase == "tuned":
        return frozenset()
    return frozenset(str(unit["path"]) for unit in snap.preview.planned)
