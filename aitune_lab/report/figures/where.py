"""Where the time goes: the tree of modules by time, untuned above and tuned beneath on one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...schema import Candidate
from ...tuning.strategies.words import milliseconds, times
from ..theme import Theme, ThemeName, mixed, style_of, text_on
from .draw import figure, graph_objects, label, saying
from .source import EAGER, groups, state_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ...tuning.session import SessionState
    from .source import Source

SMALLEST_SHARE = 0.003
"""Regions of less than this share of the whole are left out: they would be thinner than their edge."""
LEVEL_PIXELS, GAP_PIXELS = 40, 22
MAX_LEVELS = 5
ROOT = ""


@dataclass(frozen=True)
class Region:
    """A module with the time spent in it and in what lies beneath it, in milliseconds over one pass of the data.

    `key` is its path (the target itself is the root, with an empty one), `parent` the path of the module that holds it.
    `candidate` and `backend` name what runs it if it is tuned.
    """

    key: str
    parent: str | None
    ms: float
    own_ms: float
    depth: int
    class_name: str = ""
    calls: int = 0
    candidate: str = ""
    backend: str = ""

    @property
    def name(self) -> str:
        """Its name in its parent; the root's class."""
        if self.parent is None:
            return self.class_name or "target"
        return self.key[len(self.parent) :].lstrip(".") or self.class_name or "(model)"


@dataclass(frozen=True)
class WhereInfo:
    """Regions before and after, parents before children.

    The tuned times are an estimate: eager's less calls × saving, as measured for each tuned module alone.
    """

    eager: tuple[Region, ...]
    tuned: tuple[Region, ...]
    left_out: int = 0

    @property
    def title(self) -> str:
        return "Where the time goes"

    @property
    def eager_ms(self) -> float:
        return self.eager[0].ms if self.eager else 0.0

    @property
    def tuned_ms(self) -> float:
        return self.tuned[0].ms if self.tuned else 0.0

    @property
    def caption(self) -> tuple[str, ...]:
        if not self.eager:
            return ("Nothing was inspected yet.",)
        said = [f"Untuned {milliseconds(self.eager_ms)} for one pass over the data, once, with the recorder on."]
        if self.tuned:
            gain = times(self.eager_ms / self.tuned_ms) if self.tuned_ms else "∞"
            said.append(
                f"Tuned {milliseconds(self.tuned_ms)}, {gain} times as fast: an estimate, the untuned time less what "
                "each tuned module saves by itself."
            )
        if self.left_out:
            few = f"{100 * SMALLEST_SHARE:.2g} %"
            said.append(f"{self.left_out} modules of less than {few} are not drawn.")
        return tuple(said)


def where_info(source: Source) -> WhereInfo:
    """The regions of a run's modules, as inspected, and as they are with the run's choices."""
    state = state_of(source)
    nodes = _nodes(state)
    if not nodes:
        return WhereInfo((), ())
    eager = _regions(nodes, {}, state.target)
    saved = _saved_ms(state)
    tuned = _regions(nodes, saved, state.target) if saved else []
    least = SMALLEST_SHARE * eager[0].ms
    kept = [region for region in eager if region.ms >= least]
    return WhereInfo(tuple(kept), tuple(r for r in tuned if r.ms >= least or r.candidate), len(eager) - len(kept))


def where(source: Source, *, theme: Theme | ThemeName = "neutral") -> go.Figure:
    """An icicle of the module tree by time, untuned above, tuned beneath on the same scale."""
    info = where_info(source)
    if not info.eager or info.eager_ms <= 0:
        return saying(info.title, info.caption[0], theme=theme, revision="where")
    levels = [levels_of(regions) for regions in (info.eager, info.tuned) if regions]
    height = LEVEL_PIXELS * sum(levels) + GAP_PIXELS * (len(levels) - 1)
    drawn = figure(info.title, info.caption, theme=theme, revision="where", height=height)
    spans = [(1 - LEVEL_PIXELS * levels[0] / height, 1.0), (0.0, LEVEL_PIXELS * levels[-1] / height)]
    icicle = graph_objects().Icicle
    for regions, span in zip(filter(None, (info.eager, info.tuned)), spans, strict=False):
        number = {region.key: str(i) for i, region in enumerate(regions)}
        width = min(1.0, regions[0].ms / info.eager_ms)
        fills = [fill_of(region) for region in regions]
        drawn.add_trace(
            icicle(
                ids=list(number.values()),
                parents=["" if region.parent is None else number[region.parent] for region in regions],
                labels=[label(_text(region)) for region in regions],
                values=[region.ms for region in regions],
                branchvalues="total",
                domain={"x": [0, max(width, 0.02)], "y": list(span)},
                tiling={"orientation": "v", "pad": 1},
                maxdepth=MAX_LEVELS,
                leaf={"opacity": 1},
                marker={"colors": fills, "line": {"width": 1, "color": [mixed(f, "#000000", 0.25) for f in fills]}},
                textfont={"color": [text_on(fill) for fill in fills], "size": 12},
                textinfo="label",
                hovertext=[_hover(region, info.eager_ms) for region in regions],
                hoverinfo="text",
                pathbar={"visible": False},
                root={"color": "rgba(0,0,0,0)"},
                sort=False,
            )
        )
    drawn.update_xaxes(visible=False)
    drawn.update_yaxes(visible=False)
    drawn.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return drawn


def levels_of(regions: Sequence[Region]) -> int:
    """How many levels of a tree are drawn."""
    return min(MAX_LEVELS, 1 + max((region.depth for region in regions), default=0))


def fill_of(region: Region) -> str:
    """Greys by depth for what runs as it was, the backend's colour for what is tuned."""
    if region.backend:
        return style_of(region.backend).fill
    return mixed("#8f969e", "#ffffff", min(region.depth, 5) * 0.13)


@dataclass
class _Node:
    key: str
    parent: str | None
    own: float
    calls: int
    class_name: str
    method: str


def _nodes(state: SessionState) -> dict[str, _Node]:
    """The inspected modules by path, parents first, with their own time; the target is the root."""
    rows = [row for row in state.rows if row.get("total_seconds") is not None]
    if not rows:
        return {}
    paths = {str(row.get("path", "")) for row in rows}
    nodes = {}
    for row in sorted(rows, key=lambda row: str(row.get("path", "")).count(".")):
        path = str(row.get("path", ""))
        parent = next((p for p in _ancestors(path) if p in paths), ROOT) if path else None
        own = max(float(row.get("self_seconds") or 0.0), 0.0) * 1000
        if not math.isfinite(own):
            own = 0.0
        name, method = str(row.get("class_name", "")), str(row.get("method", "forward"))
        nodes[path] = _Node(path, parent, own, int(row.get("calls") or 0), name, method)
    if ROOT not in nodes:
        outside = max(_end_to_end_ms(rows, state) - sum(node.own for node in nodes.values()), 0.0)
        nodes = {ROOT: _Node(ROOT, None, outside, 0, state.target, "")} | nodes
    return nodes


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _end_to_end_ms(rows: Sequence[Mapping[str, Any]], state: SessionState) -> float:
    """The target's own time: what was inspected says, or a module's time over its share of it."""
    if state.eager_seconds:
        return 1000 * state.eager_seconds
    row = max(rows, key=lambda row: float(row.get("share") or 0.0))
    share = float(row.get("share") or 0.0)
    return 1000 * float(row.get("total_seconds") or 0.0) / share if share > 0 else 0.0


def _saved_ms(state: SessionState) -> dict[str, tuple[Candidate, float]]:
    """By the path of each tuned module: its candidate, and what it saves over one pass, calls × saving at each point."""
    saved: dict[str, tuple[Candidate, float]] = {}
    for group in groups(state):
        choice = group.choice
        trial = next((t for t in group.trials if choice is not None and t.candidate == choice.candidate), None)
        if choice is None or trial is None or choice.candidate.label == EAGER:
            continue
        ms = 0.0
        for result in trial.points:
            beside = group.beside(trial, result.point)
            if result.latency is not None and beside is not None:
                ms += result.calls * (beside.median_ms - result.latency.median_ms)
        before = saved[choice.path][1] if choice.path in saved else 0.0
        saved[choice.path] = (choice.candidate, before + (ms if math.isfinite(ms) else 0.0))
    return saved


def _regions(nodes: Mapping[str, _Node], tuned: Mapping[str, tuple[Candidate, float]], target: str) -> list[Region]:
    """Regions with times summed up from the leaves. What a tuned module held is part of it.

    What lies beneath a tuned method, other than forward, can't be told from what other methods of the module call: the
    saving is taken off all of it in proportion.
    """
    own = {key: node.own for key, node in nodes.items()}
    hidden: set[str] = set()
    for path, (_, saved_ms) in tuned.items():
        if path not in nodes:
            continue
        method = nodes[path].method
        if method in ("forward", ""):
            beneath = [key for key in nodes if key != path and (path == ROOT or path in _ancestors(key))]
            hidden.update(beneath)
            own[path] = max(own[path] + sum(own[key] for key in beneath) - saved_ms, 0.0)
        else:
            holder = path[: -len(method)].rstrip(".")
            within = [key for key in nodes if key == path or (key and key != holder and holder in _ancestors(key))]
            whole = sum(own[key] for key in within)
            for key in within:
                own[key] *= max(1 - saved_ms / whole, 0.0) if whole > 0 else 1.0
    total = dict(own)
    kept = [node for key, node in nodes.items() if key not in hidden]
    for node in sorted(kept, key=lambda node: -_depth(node.key, nodes)):
        if node.parent is not None:
            total[node.parent] += total[node.key]
    return [
        Region(
            node.key,
            node.parent,
            total[node.key],
            own[node.key],
            _depth(node.key, nodes),
            node.class_name or (target if node.parent is None else ""),
            node.calls,
            tuned[node.key][0].label if node.key in tuned else "",
            tuned[node.key][0].backend if node.key in tuned else "",
        )
        for node in kept
    ]


def _depth(key: str, nodes: Mapping[str, _Node]) -> int:
    depth, parent = 0, nodes[key].parent
    while parent is not None:
        depth, parent = depth + 1, nodes[parent].parent
    return depth


def _text(region: Region) -> str:
    if region.parent is None:
        return f"{region.name} · {milliseconds(region.ms)}"
    return f"{region.name} · {region.candidate}" if region.candidate else region.name


def _hover(region: Region, whole_ms: float) -> str:
    said = [f"<b>{label(region.key or region.name)}</b> {label(region.class_name)}".rstrip()]
    said.append(f"{milliseconds(region.ms)}, {100 * region.ms / whole_ms:.1f} % of the untuned whole")
    if region.parent is not None and region.calls:
        said.append(f"{region.calls} calls, of its own {milliseconds(region.own_ms)}")
    if region.candidate:
        said.append(f"tuned: {label(region.candidate)}")
    return "<br>".join(said)
