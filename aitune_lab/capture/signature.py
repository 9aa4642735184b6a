"""From recorded calls to signatures: what stays, what varies, and with what it varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import DataError
from ..schema import LEAF, Dim, Facts, Leaf, OpaqueLeaf, Point, Signature, Symbol, TensorLeaf, dim_symbol, evaluate_dim
from .recorder import CallShape, Recording, Sample, shared_tensors
from .structure import Flat, describe_leaf

UNKNOWN_DIM = "?"
"""A dimension of an output that follows from no input dimension (it depends on the data)."""


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that the user declares to vary from `min` to `max`; dims of equal `name` are equal at every call."""

    name: str
    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.opt <= self.max:
            raise DataError(
                f"0 <= min <= opt <= max must hold for dimension {self.name!r}, "
                f"but got (min={self.min}, opt={self.opt}, max={self.max})"
            )


def BatchDim(min: int, opt: int, max: int) -> DynamicDim:
    """The batch dimension `b`, from `min` to `max`."""
    return DynamicDim("b", min, opt, max)


DynamicShapes = Mapping[str, Mapping[int, DynamicDim]]
"""Leaf path (`"x"`, `"batch['ids']"`) to axis to dimension."""


@dataclass
class RecordedSignature:
    """A signature with what was recorded for it: samples and calls by point."""

    signature: Signature
    samples: dict[Point, list[Sample]] = field(default_factory=dict)
    calls: dict[Point, int] = field(default_factory=dict)
    seconds: dict[Point, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def all_samples(self) -> list[Sample]:
        return [sample for samples in self.samples.values() for sample in samples]


def signatures_of(
    recording: Recording, declared: DynamicShapes | None = None, *, split_points: bool = False
) -> list[RecordedSignature]:
    """Group a recording's calls by contract and infer symbols for the dimensions that vary.

    Calls that differ in structure, dtype, rank, device, a value or autocast are different signatures. Within one, a
    dimension that was the same at every call is static; dimensions that varied together share a symbol, also as a
    whole multiple. The symbol that follows the batch is `b`.

    With an object among the arguments that is known only by its class (a cache), one step and many are different
    signatures. With `split_points` every concrete shape is a signature of its own.

    Raises DataError if a declared dimension names no leaf or axis of the recorded calls.
    """
    groups: dict[Any, list[CallShape]] = {}
    for key, shape in recording.shapes.items():
        if shape.samples:
            groups.setdefault(_contract(key, shape, split_points), []).append(shape)
    _check_declared(recording, groups.values(), declared or {})
    return [_infer(recording.method, key[-1], shapes, declared or {}) for key, shapes in groups.items()]


def _contract(key: Any, shape: CallShape, split_points: bool) -> Any:
    method, node, _, autocast = key
    described = [describe_leaf(x, "") for x in shape.samples[0].leaves]
    leaves = tuple(described if split_points else map(_static, described))
    steps: tuple[Any, ...] = ()
    if any(isinstance(leaf, OpaqueLeaf) for leaf in described):
        # A cache makes a call of one step (decode) another kind of call than one of many (prefill).
        steps = tuple(tuple(n == 1 for n in leaf.dims[1:]) for leaf in described if isinstance(leaf, TensorLeaf))
    return method, node, leaves, steps, shared_tensors(shape.samples[0].leaves), autocast


def _static(leaf: Leaf) -> Leaf:
    """A leaf without its sizes."""
    return replace(leaf, dims=(0,) * len(leaf.dims)) if isinstance(leaf, TensorLeaf) else leaf


def _check_declared(recording: Recording, groups: Any, declared: DynamicShapes) -> None:
    leaves = {
        leaf.path: len(leaf.dims)
        for shapes in groups
        for leaf in _described(shapes[0].samples[0])
        if isinstance(leaf, TensorLeaf)
    }
    for path, axes in declared.items():
        if path not in leaves:
            raise DataError(
                f"dynamic_shapes of {recording.path or 'the module'!r} must name tensors among {sorted(leaves)}, but got {path!r}"
            )
        for axis in axes:
            if not 0 <= axis < leaves[path]:
                raise DataError(f"axis of {path!r} must be from 0 to {leaves[path] - 1}, but got {axis}")


def _described(sample: Sample) -> list[Leaf]:
    from .structure import flatten_call

    paths = flatten_call(sample.call()).paths
    return [describe_leaf(x, path) for x, path in zip(sample.leaves, paths, strict=True)]


def _infer(method: str, autocast: Any, shapes: list[CallShape], declared: DynamicShapes) -> RecordedSignature:
    described = [_described(shape.samples[0]) for shape in shapes]
    batches = tuple(shape.batch for shape in shapes)
    names = _Names(batches)
    for leaf in described[0]:
        for axis, dim in declared.get(leaf.path, {}).items():
            names.declare(_sizes(described, leaf.path, axis), dim)
    tensors = [leaf for leaf in described[0] if isinstance(leaf, TensorLeaf)]
    sizes = (_sizes(described, leaf.path, axis) for leaf in tensors for axis in range(len(leaf.dims)))
    names.seen = [vector for vector in sizes if len(set(vector)) > 1]
    leaves = tuple(_symbolic(described, i, names, declared) for i in range(len(described[0])))
    symbols = tuple(names.symbol(name) for name in names.vectors)
    outputs, output_leaves, varying = _outputs(shapes, names)
    facts = Facts(
        mutated=tuple(sorted(set().union(*(shape.mutated for shape in shapes)))),
        state=tuple(sorted(set().union(*(shape.rebuilt for shape in shapes)))),
        varying_values=varying,
        random=any(shape.random for shape in shapes),
        grad_modes=tuple(sorted(set().union(*(shape.grad_modes for shape in shapes)))),
    )
    signature = Signature(
        method,
        shapes[0].node,
        leaves,
        symbols,
        outputs,
        output_leaves,
        autocast=tuple(autocast),
        shared=shared_tensors(shapes[0].samples[0].leaves),
        facts=facts,
    )
    recorded = RecordedSignature(signature)
    for i, shape in enumerate(shapes):
        point = Point(tuple((name, vector[i]) for name, vector in names.vectors.items()))
        for sample in shape.samples:
            sample.point = point
        recorded.samples.setdefault(point, []).extend(shape.samples)
        recorded.calls[point] = recorded.calls.get(point, 0) + shape.calls
        recorded.seconds[point] = recorded.seconds.get(point, 0.0) + shape.seconds
    return recorded


def _sizes(described: list[list[Leaf]], path: str, axis: int) -> tuple[int, ...]:
    found = []
    for leaves in described:
        leaf = next(x for x in leaves if x.path == path)
        assert isinstance(leaf, TensorLeaf)
        found.append(int(leaf.dims[axis]))
    return tuple(found)


class _Names:
    """Symbols by the sizes that they took over the recorded shapes."""

    def __init__(self, batches: tuple[int | None, ...]) -> None:
        self.vectors: dict[str, tuple[int, ...]] = {}
        self.declared: dict[str, DynamicDim] = {}
        known = all(b is not None for b in batches) and len(set(batches)) > 1
        self.batches: tuple[int, ...] | None = tuple(b or 0 for b in batches) if known else None
        self.seen: list[tuple[int, ...]] = []
        """Sizes of every dimension that varied, so that a multiple met first takes its name from the smaller one."""

    def declare(self, sizes: tuple[int, ...], dim: DynamicDim) -> None:
        if not all(dim.min <= size <= dim.max for size in sizes):
            raise DataError(
                f"sizes of dimension {dim.name!r} must be from {dim.min} to {dim.max}, but the data has {sizes}"
            )
        if self.vectors.setdefault(dim.name, sizes) != sizes:
            raise DataError(
                f"dimensions named {dim.name!r} must be equal at every call, but the data has {self.vectors[dim.name]} and {sizes}"
            )
        self.declared[dim.name] = dim

    def dim(self, sizes: tuple[int, ...], first_axis: bool) -> Dim:
        """The symbol, multiple or number for a dimension that took these sizes."""
        for name, vector in self.vectors.items():
            if name in self.declared and vector == sizes and len(set(sizes)) > 1:
                return name
        if len(set(sizes)) == 1:
            return sizes[0]
        for name, vector in self.vectors.items():
            factor = _factor(sizes, vector)
            if factor:
                return name if factor == 1 else f"{factor}*{name}"
        if self.batches is not None and "b" not in self.vectors and (factor := _factor(sizes, self.batches)):
            self.vectors["b"] = self.batches
            return "b" if factor == 1 else f"{factor}*b"
        name = "b" if first_axis and "b" not in self.vectors and self.batches is None else self._next()
        factor, base = max((_factor(sizes, vector) or 0, vector) for vector in (*self.seen, sizes))
        self.vectors[name] = base
        return name if factor == 1 else f"{factor}*{name}"

    def _next(self) -> str:
        number = 0
        while f"s{number}" in self.vectors:
            number += 1
        return f"s{number}"

    def symbol(self, name: str) -> Symbol:
        if name in self.declared:
            dim = self.declared[name]
            return Symbol(name, dim.min, dim.opt, dim.max, declared=True)
        sizes = self.vectors[name]
        return Symbol(name, min(sizes), max(sizes), max(sizes))


def _factor(sizes: Sequence[int], base: Sequence[int]) -> int | None:
    """k if every size is k times its base, for a whole k of at least 1."""
    factors = {
        (s // b if s and s % b == 0 else -1) if b else (-1 if s else 0) for s, b in zip(sizes, base, strict=True)
    } - {0}
    return factors.pop() if len(factors) == 1 and min(factors) > 0 else None


def _symbolic(described: list[list[Leaf]], index: int, names: _Names, declared: DynamicShapes) -> Leaf:
    leaf = described[0][index]
    if not isinstance(leaf, TensorLeaf):
        return leaf
    dims: list[Dim] = []
    for axis in range(len(leaf.dims)):
        own = declared.get(leaf.path, {}).get(axis)
        sizes = tuple(int(leaves[index].dims[axis]) for leaves in described)  # type: ignore[union-attr]
        dims.append(own.name if own else names.dim(sizes, axis == 0))
    return replace(leaf, dims=tuple(dims))


def _outputs(shapes: list[CallShape], names: _Names) -> tuple[Any, tuple[Leaf, ...], tuple[str, ...]]:
    """Structure and leaves of the outputs, and the paths of values that differ between calls."""
    flats: list[tuple[int, Flat]] = [(i, flat) for i, shape in enumerate(shapes) for flat in shape.outputs]
    first = flats[0][1]
    if any(flat.node != first.node for _, flat in flats):
        return LEAF, (), ("output",)
    leaves: list[Leaf] = []
    varying = []
    for index, path in enumerate(first.paths):
        seen = [describe_leaf(flat.leaves[index], path) for _, flat in flats]
        leaf = seen[0]
        if len({_static(x) for x in seen}) > 1:
            varying.append(path)
        elif isinstance(leaf, TensorLeaf):
            device = str(shapes[0].samples[0].tensors()[0].device) if shapes[0].samples[0].tensors() else "cpu"
            dims: list[Dim] = []
            for axis in range(len(leaf.dims)):
                sizes: dict[int, int] = {}
                unknown = False
                for (i, _), x in zip(flats, seen, strict=True):
                    size = int(x.dims[axis])  # type: ignore[union-attr]
                    unknown = unknown or sizes.setdefault(i, size) != size
                dims.append(UNKNOWN_DIM if unknown else _known_dim(tuple(sizes[i] for i in range(len(shapes))), names))
            leaf = replace(leaf, dims=tuple(dims), device=device if leaf.device == "meta" else leaf.device)
        leaves.append(leaf)
    return first.node, tuple(leaves), tuple(varying)


def _known_dim(sizes: tuple[int, ...], names: _Names) -> Dim:
    if len(set(sizes)) == 1:
        return sizes[0]
    for name, vector in names.vectors.items():
        factor = _factor(sizes, vector)
        if factor:
            return name if factor == 1 else f"{factor}*{name}"
    return UNKNOWN_DIM


def resized(sample: Sample, signature: Signature, point: Point) -> Sample:
    """A synthetic sample at another point: axes are cut, or filled by repeating what was recorded.

    Used to exercise declared ranges; values stay plausible (token ids stay ids, masks stay masks).
    """
    sizes = point.as_dict()
    leaves = list(sample.leaves)
    for i, leaf in enumerate(signature.leaves):
        if not isinstance(leaf, TensorLeaf):
            continue
        tensor = torch.as_tensor(leaves[i])
        for axis, dim in enumerate(leaf.dims):
            if dim_symbol(dim) is not None:
                size = evaluate_dim(dim, sizes)
                index = torch.arange(size, device=tensor.device) % max(tensor.shape[axis], 1)
                tensor = tensor.index_select(axis, index)
        leaves[i] = tensor.numpy() if leaf.holder == "numpy" else tensor
    return Sample(sample.node, leaves, point, sample.random_state, synthetic=True)
