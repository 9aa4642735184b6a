"""Which modules a run tunes: a set in which none lies under another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..capture.inspector import InspectedModule, Inspection
from ..capture.tree import module_path, modules_of
from ..errors import PlanError, TargetError
from ..schema import Plan, Rule, is_beneath
from .planfile import outermost_pins


@dataclass
class Cut:
    """Proposes what to tune from what inspection saw, the user's wishes and the plan.

    `modules` are those that the user named, or None for the outermost ones. `failures` collects those that can't be
    tuned, with the reason.
    """

    inspection: Inspection
    plan: Plan
    modules: Sequence[InspectedModule] | None
    on_module_failure: Literal["eager", "raise"]
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the user should know about how pins changed the cut."""

    def outermost(self) -> list[InspectedModule]:
        """What to tune: the user's modules or the outermost ones, less what the plan leaves, with pins instead of parents."""
        by_path = {row.path: row for row in self.inspection.rows}
        pinned = [p for p in outermost_pins(self.plan, list(by_path)) if by_path[p].tunable and by_path[p].calls]
        for path, rule in outermost_pins(self.plan, list(by_path)).items():
            if path not in pinned and not rule.pattern.startswith("re:"):
                raise PlanError(f"the pin on {path!r} can't be kept: the module can't be tuned: {by_path[path].reason}")
        chosen = list(self.modules) if self.modules is not None else self.inspection.get_modules()
        for item in chosen:
            row = by_path.get(item.path)
            if self.modules is not None and row is not None and not row.tunable and self.on_module_failure == "raise":
                raise TargetError(f"module {item.path!r} can't be tuned: {row.reason}")
        kept = []
        for item in chosen:
            row = by_path.get(item.path, item.row)
            if not row.tunable:
                self.failures[item.path] = row.reason
                continue
            kept.extend(self._around(item, pinned))
        kept.extend(self.handle(p) for p in pinned if not any((p == k.path or is_beneath(p, k.path)) for k in kept))
        unique = {item.path: item for item in kept}
        return [item for path, item in unique.items() if not self.left_alone(path)]

    def _around(self, item: InspectedModule, pinned: Sequence[str]) -> list[InspectedModule]:
        """The module, or, if the user pinned something beneath it, its children with the pinned ones among them."""
        base = module_path(item.path, item.method)
        inner = [p for p in pinned if is_beneath(p, base) and p != item.path]
        if not inner or self.rule(item.path) is not None:
            return [item]
        result = []
        for child in self.children(base):
            result.extend(self._around(child, pinned))
        self.notes.append(f"{item.path or '(model)'} is tuned in parts, because {', '.join(inner)} in it is pinned")
        return result or [item]

    def rule(self, path: str) -> Rule | None:
        """The plan's rule for a path."""
        return self.plan.rule_for(path)

    def left_alone(self, path: str) -> bool:
        """Whether the plan says not to touch it."""
        rule = self.rule(path)
        return rule is not None and rule.action == "leave"

    def handle(self, path: str) -> InspectedModule:
        """The module at a path, as `get_modules` would give it."""
        row = next(r for r in self.inspection.rows if r.path == path)
        return InspectedModule(path, self.inspection._modules[path], row.method, row)

    def children(self, path: str) -> list[InspectedModule]:
        """The outermost tunable modules beneath a path that ran."""
        found: list[str] = []
        for row in sorted(self.inspection.rows, key=lambda r: r.depth):
            module = module_path(row.path, row.method)
            covered = any(is_beneath(row.path, p) for p in found)
            if is_beneath(module, path) and row.calls and row.tunable and not covered:
                found.append(row.path)
        return [self.handle(p) for p in found]

    def nothing_to_tune(self, target: Any) -> str:
        """Why there is nothing, in a sentence."""
        reasons = sorted(
            {f"{r.path or '(model)'}: {r.reason}" for r in self.inspection.rows if r.reason and r.depth <= 1}
        )
        left = [r.path for r in self.inspection.rows if self.left_alone(r.path)]
        why = "; ".join(reasons[:5]) or (f"the plan leaves {left} alone" if left else "none ran")
        return f"no module of this {type(target).__name__} can be tuned ({why})"


def checked_modules(target: Any, modules: Sequence[Any], inspection: Inspection) -> list[InspectedModule]:
    """Modules given as such, by path or as `InspectedModule`. Raises TargetError for one that the target doesn't hold."""
    by_module = {id(m): p for p, m in modules_of(target).items()}
    rows = {row.path: row for row in inspection.rows}
    result = []
    for item in modules:
        path = item if isinstance(item, str) else getattr(item, "path", None)
        if isinstance(item, torch.nn.Module):
            path = by_module.get(id(item))
            path = path if path in rows else next((p for p, m in inspection._modules.items() if m is item), None)
        if path not in rows:
            raise TargetError(f"modules must be among those of the target, {sorted(rows)[:20]}, but got {item!r}")
        row = rows[path]
        result.append(InspectedModule(path, inspection._modules[path], row.method, row))
    return result
