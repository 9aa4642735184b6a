"""NaN and infinity in the inputs of a graph: where they matter, runtimes treat them otherwise than torch.

A comparison, an arg-max, a largest value, a conversion to integers: what these make of NaN (and some of infinity) differs
between runtimes, and hides that it was there. So such a call is left to the original, unless recorded calls held NaN or
infinity in that input too: those were compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .indices import operator_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_PICKING = {
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "aminmax", "clamp_max",
    "clamp_min", "cummax", "cummin", "fmax", "fmin", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "hardsigmoid",
    "hardswish", "kthvalue", "linalg_vector_norm", "max", "max_pool1d", "max_pool2d", "max_pool3d",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "nan_to_num", "nanmean",
    "nansum", "rnn_relu", "sgn", "sign", "sort", "topk",
}  # fmt: skip
"""Operators that give floats, and pick among those given or cut them off."""


def finite_inputs(program: ExportedProgram, samples: Sequence[Sequence[torch.Tensor]]) -> tuple[int, ...]:
    """Numbers of the inputs that must be finite: they were in all samples, and what the graph makes of others may differ.

    Args:
        program: of flat tensors, by `export_program`.
        samples: recorded inputs, tensors in their order.
    """
    user = {name: i for i, name in enumerate(program.graph_signature.user_inputs)}
    sources: dict[Any, set[int]] = {}
    found: set[int] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in user and _floating(node):
                sources[node] = {user[node.name]}
            continue
        floats = [n for n in node.all_input_nodes if _floating(n)]
        own = set().union(*(sources.get(n, ()) for n in floats))
        value = node.meta.get("val")
        if operator_name(node) in _PICKING or (isinstance(value, torch.Tensor) and not _floating(node)):
            found |= own
        sources[node] = own
    return tuple(i for i in sorted(found) if all(_is_finite(tensors[i]) for tensors in samples))


def check_finite(inputs: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if one of the inputs holds NaN or infinity."""
    for i in inputs:
        if not _is_finite(tensors[i]):
            raise ValueError(f"input {i} holds NaN or infinity (or sums up to it), which no recorded call did")


def _floating(node: Any) -> bool:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in value)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_finite(tensor: torch.Tensor) -> bool:
    # A sum is the quickest look at all elements. In 16 bits it would overflow.
    wide = torch.float32 if tensor.dtype.itemsize < 4 else None
    return math.isfinite(tensor.sum(dtype=wide).item())
