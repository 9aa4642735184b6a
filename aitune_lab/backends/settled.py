"""What a compiler took for true about sizes while it compiled an exported graph: read back, and refused where it can break.

An exported program carries symbols for the sizes that vary. A compiler that asks "is the batch 2?" gets the answer for the
sizes at which the program was exported, and the symbol remembers it as a condition. What is made by it doesn't check
those, so it is done here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..capture.recorder import Sample
from ..capture.signature import resized
from ..errors import Refused
from ..schema import Dim, Point, Signature, dim_symbol, evaluate_dim
from .base import BuildJob
from .export import export_sample, sizes_in_range

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_TRIED = 4096
"""Sizes looked at when one is sought."""


def led_by_odd_sizes(job: BuildJob, samples: list[Sample]) -> list[Sample]:
    """The samples, led by one of other sizes if the usual ones happen to be those of weights or fixed dimensions.

    A compiler that meets the batch 64 beside 64 features may take them for one.
    """
    if not samples or not job.signature.symbols:
        return samples
    fixed = {size for p in (*job.module.parameters(), *job.module.buffers()) for size in p.shape}
    fixed |= {dim for leaf in job.signature.tensor_leaves for dim in leaf.dims if isinstance(dim, int)}
    sample = export_sample(replace(job, samples=samples))
    sizes = dict(sample.point.as_dict())
    taken = set(fixed)
    for symbol in job.signature.symbols:
        low, high = max(2, symbol.min), max(2, symbol.max)
        if sizes[symbol.name] in taken:
            free = (size for size in range(low, min(high, low + _TRIED) + 1) if size not in taken)
            sizes[symbol.name] = min(free, key=lambda size: abs(size - symbol.opt), default=sizes[symbol.name])
        taken.add(sizes[symbol.name])
    point = Point(tuple(sizes.items()))
    if point == sample.point:
        return samples
    return [resized(sample, job.signature, point), *samples]


class Settled:
    """Watches the conditions on sizes that are added to a program's symbols from now on."""

    def __init__(self, program: ExportedProgram, signature: Signature) -> None:
        self.signature = signature
        self.symbols = _symbols_of(program, signature)
        self.environment = next((size.node.shape_env for size in _dynamic_sizes(program)), None)
        self.before = len(self.environment.guards) if self.environment is not None else 0

    def check(self) -> None:
        """Raise Refused if a condition was added that some size in range breaks.

        That sizes differ is what code for all sizes takes for granted, so `!=` is no such condition.
        """
        import sympy

        if self.environment is None:
            return
        added = [guard.expr for guard in self.environment.guards[self.before :]]
        for condition in dict.fromkeys(added):
            # Sizes that follow from values are none of the signature's.
            if not isinstance(condition, sympy.Ne) and condition.free_symbols <= self.symbols.keys():
                self._check(condition)

    def _check(self, condition: Any) -> None:
        import sympy

        symbols = self.symbols
        computed = sympy.lambdify([*symbols], condition, modules=["math"]) if _plain(condition) else None
        # Tracing itself takes sizes 0 and 1 as fixed, so only an equation tells anything about them.
        small = _small_sizes(self.signature) if isinstance(condition, sympy.Eq) else ()
        for sizes in itertools.chain(sizes_in_range(self.signature), small):
            values = {s: evaluate_dim(dim, sizes) // factor for s, (dim, factor) in symbols.items()}
            holds = computed(*values.values()) if computed is not None else condition.subs(values)
            if holds in (False, sympy.false):
                at = ", ".join(f"{name}={size}" for name, size in sizes.items())
                names = {s: sympy.Symbol(_label(dim, factor)) for s, (dim, factor) in symbols.items()}
                raise Refused(
                    f"compiling settled on code that holds only for {condition.xreplace(names)}, which breaks at {at}"
                )


def _dynamic_sizes(program: ExportedProgram) -> Iterator[Any]:
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            yield from (size for size in node.meta["val"].shape if isinstance(size, torch.SymInt))


def _symbols_of(program: ExportedProgram, signature: Signature) -> dict[Any, tuple[Dim, int]]:
    """The graph's own symbols: which dimension of the signature each stands for, and by what that is divided."""
    user = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in user]
    found: dict[Any, tuple[Dim, int]] = {}
    for leaf, node in zip(signature.tensor_leaves, nodes, strict=True):
        for dim, size in zip(leaf.dims, node.meta["val"].shape, strict=True):
            if dim_symbol(dim) is None or not isinstance(size, torch.SymInt):
                continue
            expression = size.node.expr
            (symbol, *more) = expression.free_symbols
            factor = expression.coeff(symbol)
            if not more and factor.is_Integer and expression == factor * symbol:
                found.setdefault(symbol, (dim, int(factor)))
    return found


def _small_sizes(signature: Signature) -> Iterator[dict[str, int]]:
    """Each symbol at 0 and 1, where its range holds them, while the others are at their usual size."""
    usual = {s.name: max(2, s.opt) for s in signature.symbols}
    for symbol in signature.symbols:
        for size in range(symbol.min, min(symbol.max, 1) + 1):
            yield {**usual, symbol.name: size}


def _plain(condition: Any) -> bool:
    """Whether it is arithmetic that plain Python computes, much faster than symbolic substitution."""
    import sympy

    kinds = (sympy.Symbol, sympy.Number, sympy.Add, sympy.Mul, sympy.core.relational.Relational)
    return all(isinstance(part, kinds) for part in sympy.preorder_traversal(condition))


def _label(dim: Dim, factor: int) -> str:
    return str(dim) if factor == 1 else f"({dim})/{factor}"
