"""Figures of how far one tensor is from another: computed in float64, chunk by chunk, on the tensors' own device.

A chunk holds at most `CHUNK` elements, so that comparing two tensors of any size needs a bounded amount of memory
beside them. Complex tensors are taken as pairs of real numbers, sparse ones densified, quantised ones dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CHUNK = 1 << 20
_KEPT_FOR_PERCENTILE = 1 << 16


def as_tensor(value: Any) -> torch.Tensor | None:
    """The value as a tensor that can be compared number by number; None for what holds no numbers.

    numpy arrays share their memory where they can; Python floats and complex numbers become float64 and complex128.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (float, complex)) and not isinstance(value, np.generic):
        return torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        if array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1) > 8:
            array = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        # A copy where torch would warn (read-only memory) or could not share it (negative strides).
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()
        return torch.from_numpy(array)
    return None


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape; for a nested tensor the shapes of its parts."""
    if tensor.is_nested:
        return tuple(tuple(part.shape) for part in tensor.unbind())
    return tuple(tensor.shape)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A strided real tensor with the same numbers; complex ones get a last axis of size 2. Copies only if it must."""
    tensor = tensor.detach()
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        tensor = torch.cat(parts) if parts else torch.empty(0)
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def chunks(tensor: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Indices that cut a tensor into pieces of at most `CHUNK` elements, in C order, without copying it."""
    yield from _cuts(tuple(tensor.shape))


def _cuts(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    size = math.prod(shape)
    if size <= CHUNK:
        yield ()
        return
    row = size // shape[0]
    if row <= CHUNK:
        step = CHUNK // row
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)
        return
    for i in range(shape[0]):
        for rest in _cuts(shape[1:]):
            yield (i, *rest)


def float64_piece(tensor: torch.Tensor, cut: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    return tensor[cut].to(device=device, dtype=torch.float64).reshape(-1)


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(index, shape)) if shape else ()


@dataclass(frozen=True)
class Yardstick:
    """What the candidate is held against, and what eager itself is off from it (one leaf of one call).

    `norm` and `rms` are taken over the elements that are finite in eager, times `scale`, a power of two that keeps
    squares of float64 numbers within range. `eager_l2` and `eager_worst` are absolute errors, times `scale` too.
    """

    count: int
    norm: float
    rms: float
    scale: float
    eager_l2: float = 0.0
    eager_worst: float = 0.0

    @property
    def eager_relative_l2(self) -> float:
        return ratio(self.eager_l2, self.norm)


@dataclass(frozen=True)
class Figures:
    """The candidate's error in one leaf of one call. Absolute figures in the leaf's own unit; `worst` is flat (C order).

    `unequal_nonfinite` counts elements where NaN or Inf stand in one of the two only (or infinities of other sign);
    `out_of_tolerance` those too, and the elements whose error exceeds the bound handed in.
    """

    yardstick: Yardstick
    count: int
    max_absolute: float
    sum_absolute: float
    kept_absolute: torch.Tensor
    max_relative: float
    sum_relative: float
    nonzero: int
    l2: float
    cosine: float
    unequal_nonfinite: int
    out_of_tolerance: int
    worst: int

    @property
    def relative_l2(self) -> float:
        if self.unequal_nonfinite:
            return math.inf
        return ratio(self.l2, self.yardstick.norm)

    @property
    def worst_over_rms(self) -> float:
        """The worst element's error over the yardstick's root mean square."""
        if self.unequal_nonfinite:
            return math.inf
        return ratio(self.max_absolute * self.yardstick.scale, self.yardstick.rms)

    @property
    def snr_db(self) -> float:
        return snr_db(self.relative_l2)


def ratio(part: float, whole: float) -> float:
    """part / whole, where nothing over nothing is 0 and something over nothing is infinite; NaN counts as infinite."""
    if part == 0:
        return 0.0
    return part / whole if whole > 0 and not math.isnan(part) else math.inf


def snr_db(relative_l2: float) -> float:
    """Signal to noise ratio in decibels: -20 log10 of the relative L2 error."""
    if relative_l2 == 0:
        return math.inf
    return -math.inf if math.isinf(relative_l2) else -20 * math.log10(relative_l2)


def take_yardstick(eager: torch.Tensor, reference: torch.Tensor | None) -> Yardstick:
    """Norms of the yardstick (the reference, or eager if there is none) and eager's own error.

    `eager` and `reference` are dense and of one shape. Elements where eager is NaN or infinite don't count; where
    the reference is not finite although eager is, eager stands for it.
    """
    device = eager.device
    scale = _scale(eager) if eager.dtype == torch.float64 else 1.0
    count, squares, error_squares, worst = 0, 0.0, 0.0, 0.0
    for cut in chunks(eager):
        e = float64_piece(eager, cut, device)
        finite = e.isfinite()
        e = torch.where(finite, e, 0.0) * scale
        r = e if reference is None else _filled(float64_piece(reference, cut, device) * scale, e, finite)
        error = (e - r).abs()
        parts = [finite.sum(dtype=torch.float64), r.square().sum(), error.square().sum()]
        parts.append(error.max() if error.numel() else error.sum())
        n, square, error_square, largest = torch.stack(parts).tolist()
        count, squares, error_squares = count + int(n), squares + square, error_squares + error_square
        worst = max(worst, largest)
    rms = math.sqrt(squares / count) if count else 0.0
    return Yardstick(count, math.sqrt(squares), rms, scale, math.sqrt(error_squares), worst)


def take_figures(
    eager: torch.Tensor,
    actual: torch.Tensor,
    reference: torch.Tensor | None,
    yardstick: Yardstick,
    bound_over_rms: float,
) -> Figures:
    """The candidate's error against the yardstick; an element is out of tolerance beyond `bound_over_rms` × RMS.

    Relative errors are over each element's own magnitude; elements whose yardstick is 0 are left out of them.
    """
    device, scale = eager.device, yardstick.scale
    bound = bound_over_rms * yardstick.rms
    sums = torch.zeros(8, dtype=torch.float64, device="cpu")  # a default device may be set
    max_absolute = max_relative = 0.0
    worst, worst_error, offset = 0, -1.0, 0
    stride = (eager.numel() // _KEPT_FOR_PERCENTILE) | 1  # odd, so that it doesn't fall in step with channels
    kept: list[torch.Tensor] = []
    for cut in chunks(eager):
        e, a = float64_piece(eager, cut, device), float64_piece(actual, cut, device)
        if not e.numel():
            continue
        both = e.isfinite() & a.isfinite()
        unequal = ~both & ~((e == a) | (e.isnan() & a.isnan()))
        e, a = torch.where(both, e, 0.0) * scale, torch.where(both, a, 0.0) * scale
        r = e if reference is None else _filled(float64_piece(reference, cut, device) * scale, e, both)
        error = (a - r).abs()
        magnitude = r.abs()
        relative = torch.where(magnitude > 0, error / magnitude, 0.0)
        # An element without a number where there should be one (or the reverse) is worse than any error.
        ranked = torch.where(unequal, math.inf, error)
        at = ranked.argmax()
        kept.append(error[(-offset) % stride :: stride].cpu())
        pieces = [
            unequal.sum(dtype=torch.float64),
            (unequal | (error > bound)).sum(dtype=torch.float64),
            error.sum(),
            relative.sum(),
            (magnitude > 0).sum(dtype=torch.float64),
            error.square().sum(),
            (a * r).sum(),
            a.square().sum(),
        ]
        found = torch.stack([*pieces, error.max(), relative.max(), ranked[at], at.to(torch.float64)]).cpu()
        sums = sums + found[:8]
        largest, largest_relative, chunk_worst, position = found[8:].tolist()
        max_absolute, max_relative = max(max_absolute, largest), max(max_relative, largest_relative)
        if chunk_worst > worst_error:
            worst, worst_error = offset + int(position), chunk_worst
        offset += e.numel()
    unequal_count, out, sum_absolute, sum_relative, nonzero, error_squares, dot, square = sums.tolist()
    return Figures(
        yardstick=yardstick,
        count=eager.numel(),
        max_absolute=max_absolute / scale,
        sum_absolute=sum_absolute / scale,
        kept_absolute=torch.cat(kept) / scale if kept else torch.zeros(0, dtype=torch.float64, device="cpu"),
        max_relative=max_relative,
        sum_relative=sum_relative,
        nonzero=int(nonzero),
        l2=math.sqrt(error_squares),
        cosine=_cosine(dot, math.sqrt(square), yardstick.norm),
        unequal_nonfinite=int(unequal_count),
        out_of_tolerance=int(out),
        worst=worst,
    )


def _filled(reference: torch.Tensor, eager: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The reference, with eager's own number where the reference isn't finite, and 0 where nothing is counted."""
    return torch.where(counted, torch.where(reference.isfinite(), reference, eager), 0.0)


def _scale(tensor: torch.Tensor) -> float:
    """A power of two that brings the largest finite magnitude near 1."""
    largest = 0.0
    for cut in chunks(tensor):
        piece = torch.where(tensor[cut].isfinite(), tensor[cut], 0.0).abs()
        largest = max(largest, float(piece.max()) if piece.numel() else 0.0)
    return math.ldexp(1.0, min(1000, max(-1000, -math.frexp(largest)[1]))) if largest else 1.0


def _cosine(dot: float, norm: float, other: float) -> float:
    if norm == 0 or other == 0:
        return 1.0 if norm == other else 0.0
    return max(-1.0, min(1.0, dot / norm / other))


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference| over the elements finite in both; infinite where NaN or Inf differ."""
    value, reference = dense(value), dense(reference)
    yardstick = take_yardstick(reference, None)
    return take_figures(reference, value, None, yardstick, 0.0).relative_l2
