"""Declared ranges are exercised, not believed: the original runs at both ends of each before anything is built for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..schema import Point
from .probe import autocast_of
from .recorder import CallShape, Recording, emptied, shape_key
from .signature import DynamicDim, DynamicShapes, RecordedSignature, resized, signatures_of
from .state import Snapshot
from .structure import flatten
from .swap import original_method


def declared_signatures(
    recording: Recording, declared: DynamicShapes | None = None, *, split_points: bool = False
) -> list[RecordedSignature]:
    """`signatures_of`, after synthetic calls at the least and greatest declared sizes were added to the recording.

    Synthetic calls count as no calls of the user's. An end that the module itself rejects is cut back to what was
    recorded, with a note that says so. Raises DataError as `signatures_of` does.
    """
    found = signatures_of(recording, declared, split_points=split_points)
    if not declared or split_points:
        return found
    dims = {dim.name: dim for axes in declared.values() for dim in axes.values()}
    notes: list[str] = []
    for recorded in found:
        for end in ("min", "max"):
            if _exercise(recording, recorded, _end(recorded, dims, end)) is None:
                continue
            # Which of them is it? Each alone, the others as recorded; if it is none, all of them together.
            alone = {name: _exercise(recording, recorded, _end(recorded, {name: dims[name]}, end)) for name in dims}
            rejected = {name: reason for name, reason in alone.items() if reason is not None}
            together = _exercise(
                recording, recorded, _end(recorded, {n: d for n, d in dims.items() if n not in rejected}, end)
            )
            if together is not None:
                rejected = dict.fromkeys(dims, together)
            for name, reason in rejected.items():
                seen = [point.as_dict()[name] for point in recorded.samples if name in point.as_dict()]
                notes.append(f"the declared {end} of {name!r}, {getattr(dims[name], end)}, is not used: {reason}")
                dims[name] = _cut(dims[name], end, seen)
    kept = {path: {axis: dims[dim.name] for axis, dim in axes.items()} for path, axes in declared.items()}
    return [replace(r, notes=(*r.notes, *notes)) for r in signatures_of(recording, kept)]


def _end(recorded: RecordedSignature, dims: Mapping[str, DynamicDim], end: str) -> Point:
    """The point at one end of every declared range; symbols that weren't declared keep a recorded size."""
    recorded_sizes = next(iter(recorded.samples)).as_dict()
    sizes = {**recorded_sizes, **{name: getattr(dims[name], end) for name in recorded_sizes if name in dims}}
    return Point(tuple(sizes.items()))


def _cut(dim: DynamicDim, end: str, seen: list[int]) -> DynamicDim:
    if not seen:
        return dim
    if end == "min":
        return replace(dim, min=min(seen), opt=max(dim.opt, min(seen)))
    return replace(dim, max=max(seen), opt=min(dim.opt, max(seen)))


def _exercise(recording: Recording, recorded: RecordedSignature, point: Point) -> str | None:
    """Run the original at a point and record the call; why it can't be, or None."""
    if point in recorded.samples:
        return None
    template = next(iter(recorded.samples.values()))[0]
    snapshot = Snapshot(recording.module)
    try:
        sample = resized(template, recorded.signature, point)
        args, kwargs = recording.form.arguments(sample.call(fresh=True))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), autocast_of(recorded.signature.autocast):
            output = flatten(original_method(recording.module, recording.method)(*args, **kwargs))
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return f"the module rejects {point.label}: {type(error).__name__}: {text}"
    finally:
        snapshot.restore()
    held = next(shape for shape in recording.shapes.values() if any(s is template for s in shape.samples))
    batch = point.as_dict().get("b", held.batch) if held.batch is not None else None
    shape = CallShape(sample.node, samples=[sample], outputs=[emptied(output)], batch=batch)
    shape.mutated, shape.grad_modes = set(held.mutated), set(held.grad_modes)
    recording.shapes[shape_key(recording.method, sample.node, sample.leaves, recorded.signature.autocast)] = shape
    return None
