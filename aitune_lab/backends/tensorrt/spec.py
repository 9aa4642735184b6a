"""Which engines a signature gets: static ones for recorded points, and one dynamic engine for the rest of its range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...schema import Dim, Point, Signature, TensorLeaf, evaluate_dim

Range = tuple[int, int, int]
"""Smallest, usual and largest size."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine: the sizes of the signature's symbols that it serves, each as (min, opt, max).

    An engine whose ranges are single sizes is static: TensorRT then knows every shape and picks faster kernels.
    """

    name: str
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @property
    def static(self) -> bool:
        return all(low == high for low, _, high in self.ranges.values())

    def serves(self, sizes: Mapping[str, int]) -> bool:
        return all(low <= sizes[name] <= high for name, (low, _, high) in self.ranges.items())

    def shapes(self, leaf: TensorLeaf) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """An input's smallest, usual and largest shape."""
        low, usual, high = ({name: sizes[i] for name, sizes in self.ranges.items()} for i in range(3))
        return _shape(leaf.dims, low), _shape(leaf.dims, usual), _shape(leaf.dims, high)


def _shape(dims: Sequence[Dim], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate_dim(dim, sizes) for dim in dims)


def specs_of(signature: Signature, points: Sequence[Point], *, static: int, dynamic: bool) -> list[EngineSpec]:
    """The engines for a signature, those tried first at a call first.

    Args:
        signature: without symbols it gets one static engine.
        points: recorded ones, those that count most first.
        static: static engines at most.
        dynamic: whether the rest of the range gets an engine; without it other sizes run the original.
    """
    if not signature.symbols:
        return [EngineSpec("static")]
    specs = []
    for point in list(dict.fromkeys(points))[:static]:
        sizes = point.as_dict()
        ranges = {s.name: (sizes[s.name],) * 3 for s in signature.symbols}
        specs.append(EngineSpec("static-" + "-".join(f"{name}{size[0]}" for name, size in ranges.items()), ranges))
    # A size of 0 stays with the original: optimisation profiles begin at 1.
    whole = {s.name: (max(1, s.min), min(max(s.opt, 1, s.min), s.max), max(1, s.max)) for s in signature.symbols}
    alone = len(specs) == 1 and specs[0].ranges == whole
    if dynamic and not alone:
        specs.append(EngineSpec("dynamic", whole))
    return specs
