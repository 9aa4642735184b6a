"""Checks the tensors of a call against a signature, fast."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..schema import Signature, dim_symbol

MEMO_LIMIT = 512
"""Concrete shapes for which a C++ check is kept; further shapes are checked in Python at each call."""


class TensorCheck:
    """Decides whether tensors have the dtypes, ranks, devices and sizes of a signature.

    `memo` maps (symbol sizes…, inference mode) to a C++ check of exactly those sizes. `learn` fills it, and answers for
    shapes that have none. A tensor that C++ refuses for a reason that doesn't matter here (it requires grad under
    `no_grad`, or was made in inference mode) is asked about again in Python.
    """

    def __init__(self, signature: Signature) -> None:
        self.leaves = signature.tensor_leaves
        self.ranges = {s.name: (s.min, s.max) for s in signature.symbols}
        self.memo: dict[Any, Callable[..., bool]] = {}
        self._dtypes = [getattr(torch, leaf.dtype) for leaf in self.leaves]
        self._devices = [torch.device(leaf.device) for leaf in self.leaves]
        self._layouts = [getattr(torch, leaf.layout) for leaf in self.leaves]
        self._contiguous = [leaf.path in signature.facts.strided for leaf in self.leaves]

    def problem(self, tensors: tuple[Any, ...]) -> str | None:
        """Why the tensors don't fit, in words; None if they do."""
        sizes: dict[str, int] = {}
        for leaf, tensor, dtype, device, layout, contiguous in zip(
            self.leaves, tensors, self._dtypes, self._devices, self._layouts, self._contiguous, strict=True
        ):
            if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
                return f"{leaf.path} is a {type(tensor).__name__}, not a plain tensor"
            if tensor.dtype is not dtype:
                return f"{leaf.path} is {str(tensor.dtype).removeprefix('torch.')}, tuned for {leaf.dtype}"
            if tensor.device != device:
                return f"{leaf.path} is on {tensor.device}, tuned for {leaf.device}"
            if tensor.dim() != len(leaf.dims) or tensor.layout is not layout:
                return f"{leaf.path} has {tensor.dim()} dimensions ({tensor.layout}), tuned for {len(leaf.dims)} ({layout})"
            if contiguous and not tensor.is_contiguous():
                return f"{leaf.path} is not contiguous, and the result depends on its strides {tuple(tensor.stride())}"
            for axis, (size, dim) in enumerate(zip(tensor.shape, leaf.dims, strict=True)):
                if isinstance(dim, int):
                    if size != dim:
                        return f"{leaf.path} has size {size} in dimension {axis}, tuned for {dim}"
                    continue
                factor, _, name = dim.rpartition("*")
                quotient, rest = divmod(size, int(factor or 1))
                low, high = self.ranges[name]
                if rest or sizes.setdefault(name, quotient) != quotient:
                    return f"{leaf.path} has size {size} in dimension {axis}, where {dim} is {sizes[name] * int(factor or 1)}"
                if not low <= quotient <= high:
                    return (
                        f"{leaf.path} has size {size} in dimension {axis}: {name}={quotient} is outside {low} to {high}"
                    )
        return None

    def learn(self, key: Any, *tensors: Any) -> bool:
        """Check in Python, and keep a C++ check for this key if the tensors fit."""
        if self.problem(tensors) is not None:
            return False
        if key is not None and key not in self.memo and len(self.memo) < MEMO_LIMIT:
            check = compiled_check(tensors, self._contiguous)
            if check is not None and check(*tensors):
                self.memo[key] = check
        return True

    def key_of(self, names: list[str]) -> list[str]:
        """Expressions for the symbols' sizes, given the variables that hold the tensors."""
        return [f"{name}.size({axis})" for name, _, axis in self._sources(names)]

    def sized(self, names: list[str]) -> list[tuple[str, int]]:
        """Variables that `key_of` reads, each with the rank that its tensor must have for that."""
        return list({name: (name, rank) for name, rank, _ in self._sources(names)}.values())

    def _sources(self, names: list[str]) -> list[tuple[str, int, int]]:
        """(variable, rank, axis) from which each symbol's size is read."""
        sources: dict[str, tuple[str, int, int]] = {}
        for name, leaf in zip(names, self.leaves, strict=True):
            for axis, dim in enumerate(leaf.dims):
                symbol = dim_symbol(dim)
                if symbol is not None:
                    sources.setdefault(symbol, (name, len(leaf.dims), axis))
        return list(sources.values())


def compiled_check(tensors: tuple[Any, ...], strided: Sequence[bool] = ()) -> Callable[..., bool] | None:
    """A C++ check of dtype, device, rank and these very sizes; None where torch's guards don't behave as expected.

    `strided` says of which tensors these very strides are checked too.
    """
    if not tensors or not guards_work():
        return None
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(t.shape) for t in tensors]
    kept = list(strided) or [False] * len(tensors)
    strides: Any = [list(t.stride()) if keep else [None] * t.dim() for t, keep in zip(tensors, kept, strict=True)]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@lru_cache(maxsize=1)
def guards_work() -> bool:
    """Whether torch's private `TensorGuards` accepts and refuses what we rely on; if not, Python checks everything."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.zeros(2, 3)
            sizes: Any = [[2, 3]]
            strides: Any = [[None, None]]
            guards: Any = TensorGuards
            check = guards(tensor, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
            fits = [check(torch.ones(2, 3)), check(torch.ones(3, 2).t())]
            misfits = [torch.ones(2, 4), torch.ones(2, 3, 1), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 3)]
            misfits += [None, "text", torch.nn.Parameter(torch.ones(2, 3))]  # type: ignore[list-item]
            return all(fits) and not any(map(operator.truth, map(check, misfits)))
    except Exception:
        return False
