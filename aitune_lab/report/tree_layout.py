"""How inspected modules lie in a tree: what lies under what, which siblings repeat, what a container adds up to."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..capture.tree import module_path

Kind = Literal["module", "method", "container", "fold"]


@dataclass(frozen=True)
class LaidOut:
    """One row of the tree in display order.

    `unit` is the inspected row it shows, None for a fold or a container that was not inspected; `copies` are the
    paths that a fold stands for. `share` is of the target's time (0 to 1), `total_ms` over all inspected calls.
    """

    path: str
    name: str
    class_name: str
    kind: Kind
    depth: int
    calls: int
    parameters: int
    share: float
    total_ms: float
    reason: str = ""
    unit: Mapping[str, Any] | None = None
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """All rows, parents before what lies under them."""

    rows: tuple[LaidOut, ...]


@dataclass
class _Node:
    row: LaidOut
    place: str
    """The path of the module: what lies under it has this path before its own."""
    children: list[_Node] = field(default_factory=list)
    shape: int = 0
    """Equal for nodes of one class and one structure."""


def layout_of(rows: Sequence[Mapping[str, Any]]) -> Layout:
    """Lay out inspected rows (mappings with `ModuleRow`'s fields), in the order in which they come."""
    roots = _tree(rows)
    nodes = _parents_first(roots)
    shapes: dict[Any, int] = {}
    for node in reversed(nodes):
        if node.row.kind != "method" and not node.row.calls and node.children:
            node.row = _container(node)
        inner = tuple((_under(child, node), child.shape) for child in node.children)
        dtypes = tuple((node.row.unit or {}).get("dtypes") or ())
        key = (node.row.class_name, node.row.kind, node.row.parameters, dtypes, inner)
        node.shape = shapes.setdefault(key, len(shapes))
    return Layout(tuple(_emitted(roots)))


def _tree(rows: Sequence[Mapping[str, Any]]) -> list[_Node]:
    """Nodes by the paths' dots. A module that has other methods than `forward` gets a row of its own above them."""
    nodes: dict[str, _Node] = {}
    ordered: list[_Node] = []
    for unit in rows:
        path, method = str(unit.get("path", "")), str(unit.get("method") or "forward")
        place = module_path(path, method)
        if method == "forward":
            node = _Node(_row(unit, path, "module"), place)
            nodes[place] = node
        else:
            if place not in nodes:
                holder = LaidOut(place, "", str(unit.get("class_name", "")), "container", 0, 0, 0, 0.0, 0.0)
                nodes[place] = _Node(replace(holder, parameters=int(unit.get("parameters") or 0)), place)
                ordered.append(nodes[place])
            node = _Node(_row(unit, path, "method"), path)
        ordered.append(node)
    roots: list[_Node] = []
    for node in ordered:
        parent = nodes.get(node.row.path.rpartition(".")[0]) if node.row.kind == "method" else _above(node, nodes)
        (parent.children if parent is not None and parent is not node else roots).append(node)
    return roots


def _above(node: _Node, nodes: Mapping[str, _Node]) -> _Node | None:
    """The nearest inspected module that a path lies under."""
    place = node.place
    while place:
        place = place.rpartition(".")[0]
        if place in nodes:
            return nodes[place]
    return None


def _row(unit: Mapping[str, Any], path: str, kind: Kind) -> LaidOut:
    return LaidOut(
        path=path,
        name="",
        class_name=str(unit.get("class_name", "")),
        kind=kind,
        depth=0,
        calls=int(unit.get("calls") or 0),
        parameters=int(unit.get("parameters") or 0),
        share=float(unit.get("share") or 0.0),
        total_ms=1000 * float(unit.get("total_seconds") or 0.0),
        reason="" if unit.get("tunable") else str(unit.get("reason") or ""),
        unit=unit,
    )


def _container(node: _Node) -> LaidOut:
    """A module that isn't called itself takes the time of what lies under it; if nothing ran it stays as it is."""
    ran = [child.row for child in node.children if child.row.total_ms or child.row.calls]
    if not ran:
        return node.row
    share, total = sum(row.share for row in ran), sum(row.total_ms for row in ran)
    return replace(node.row, kind="container", share=share, total_ms=total, reason="")


def _parents_first(roots: Sequence[_Node]) -> list[_Node]:
    order, stack = [], list(reversed(roots))
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(node.children))
    return order


def _emitted(roots: Sequence[_Node]) -> list[LaidOut]:
    """Rows in display order, with repeated siblings folded."""
    rows: list[LaidOut] = []
    stack: list[tuple[list[_Node], int, _Node | None]] = [(g, 0, None) for g in reversed(_groups(roots))]
    while stack:
        group, depth, parent = stack.pop()
        if len(group) == 1:
            (node,) = group
            groups = _groups(node.children)
            if node.row.kind == "container" and len(groups) == 1 and len(groups[0]) > 1:
                # Nothing but copies in it: the container's own row would say the same once more.
                rows.append(_fold(groups[0], node.children, _under(node, parent), depth))
                stack.extend(([child], depth + 1, node) for child in reversed(groups[0]))
                continue
            rows.append(replace(node.row, name=_under(node, parent), depth=depth))
            stack.extend((inner, depth + 1, node) for inner in reversed(groups))
            continue
        names = [_under(node, parent) for node in group]
        siblings = parent.children if parent is not None else list(roots)
        rows.append(_fold(group, siblings, f"{names[0]} … {names[-1]}", depth))
        stack.extend(([node], depth + 1, parent) for node in reversed(group))
    return rows


def _groups(siblings: Sequence[_Node]) -> list[list[_Node]]:
    """Siblings that repeat, together: blocks wherever they stand, single layers only in a numbered run."""
    groups: list[list[_Node]] = []
    blocks: dict[int, list[_Node]] = {}
    for node in siblings:
        repeatable = node.row.kind == "module"
        if repeatable and node.children and node.shape in blocks:
            blocks[node.shape].append(node)
            continue
        last = groups[-1][-1] if groups else None
        run = (
            last is not None and not node.children and last.shape == node.shape and _numbered(node) and _numbered(last)
        )
        if repeatable and run:
            groups[-1].append(node)
            continue
        groups.append([node])
        if repeatable and node.children:
            blocks[node.shape] = groups[-1]
    return groups


def _numbered(node: _Node) -> bool:
    return node.row.path.rpartition(".")[2].isdecimal()


def _fold(group: Sequence[_Node], siblings: Sequence[_Node], name: str, depth: int) -> LaidOut:
    rows = [node.row for node in group]
    reasons = Counter(row.reason for row in rows)
    return LaidOut(
        path=_pattern([row.path for row in rows], [node.row.path for node in siblings]),
        name=name,
        class_name=rows[0].class_name,
        kind="fold",
        depth=depth,
        calls=sum(row.calls for row in rows),
        parameters=sum(row.parameters for row in rows),
        share=sum(row.share for row in rows),
        total_ms=sum(row.total_ms for row in rows),
        reason=reasons.most_common(1)[0][0] if len(reasons) == 1 else "",
        copies=tuple(row.path for row in rows),
    )


def _pattern(paths: Sequence[str], siblings: Sequence[str]) -> str:
    r"""The pattern of a rule that matches exactly these of the siblings: `re:layers\.\d+` if that is all numbered."""
    heads: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        head, dot, last = path.rpartition(".")
        heads[head + dot].append(last)
    parts = []
    for head, lasts in heads.items():
        general = re.escape(head) + r"\d+"
        if all(last.isdecimal() for last in lasts):
            matched = {path for path in siblings if re.fullmatch(general, path)}
            if matched == {head + last for last in lasts}:
                parts.append(general)
                continue
        parts.append(re.escape(head) + "(?:" + "|".join(map(re.escape, lasts)) + ")")
    return "re:" + "|".join(parts)


def _under(node: _Node, parent: _Node | None) -> str:
    """A node's path as seen from its parent."""
    path = node.row.path
    if not path:
        return "(model)"
    return path.removeprefix(f"{parent.place}.") if parent is not None and parent.place else path
