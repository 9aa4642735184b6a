"""What a CUDA graph can't keep, and whether a replay gives what the executable gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..backends.base import BuildJob
from ..errors import Refused
from ..schema import OpaqueLeaf, TensorLeaf
from .weights import slots_of


def refuse_uncapturable(job: BuildJob) -> None:
    """Raise Refused, with the reason in a sentence, for what a graph cannot keep, whatever the executable."""
    signature, facts = job.signature, job.signature.facts
    for leaf in (*signature.leaves, *signature.output_leaves):
        if isinstance(leaf, OpaqueLeaf):
            raise Refused(f"{leaf.path} is an object ({leaf.opaque_type.rpartition(':')[2]}), which a graph can't take")
        if isinstance(leaf, TensorLeaf) and (leaf.holder != "torch" or not leaf.device.startswith("cuda")):
            raise Refused(f"{leaf.path} is on the {leaf.device}; a CUDA graph takes and gives tensors on the GPU only")
        if isinstance(leaf, TensorLeaf) and leaf.layout != "strided":
            raise Refused(f"{leaf.path} has the layout {leaf.layout}; a graph's static buffers are strided")
    reasons = {
        "changes inputs in place": facts.mutated,
        "changes the module's state": facts.state,
        "returns values that differ from call to call": facts.varying_values,
        "runs the user's hooks": facts.hooked,
        "returns views of inputs": tuple(alias.output for alias in facts.aliases if alias.kind == "view"),
        "returns views of other outputs": tuple(twin.output for twin in facts.twins if twin.kind == "view"),
    }
    for what, names in reasons.items():
        if names:
            raise Refused(f"a call {what} ({', '.join(names[:3])}), which a replayed graph does not do")
    if not signature.tensor_leaves:
        raise Refused("the call has no tensor inputs")
    if not any(isinstance(leaf, TensorLeaf) for leaf in signature.output_leaves):
        raise Refused("the call returns no tensors")
    devices = {leaf.device for leaf in signature.tensor_leaves}
    if len(devices) > 1:
        raise Refused(f"the inputs are on several devices ({', '.join(sorted(devices))}); a graph runs on one")
    elsewhere = {str(t.device) for t in weights_of(job.module)} - devices
    if elsewhere:
        raise Refused(f"weights are on {', '.join(sorted(elsewhere))}, inputs on {', '.join(devices)}")


def weights_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, in the order of their places; shared ones as often as they stand."""
    return [holder[name] for holder, name in slots_of(module)]


def output_places(
    leaves: Sequence[TensorLeaf],
    results: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """What a graph returned, each tensor once, and for each output leaf the number of its tensor.

    An output that is input `k` itself has the number `-1 - k`. Raises Refused for what is no tensor of the graph's own: one
    on another device, or a weight.
    """
    device = inputs[0].device
    storages = {t.untyped_storage().data_ptr() for t in weights if t.layout is torch.strided}
    unique: list[torch.Tensor] = []
    places: list[int] = []
    for leaf, result in zip(leaves, results, strict=True):
        if result.device != device:
            raise Refused(f"{leaf.path} is on the {result.device}; a CUDA graph gives tensors on {device} only")
        if result.untyped_storage().data_ptr() in storages:
            raise Refused(f"{leaf.path} is a weight of the module itself; a graph would return a copy")
        same_input = next((k for k, static in enumerate(inputs) if result is static), None)
        if same_input is not None:
            places.append(-1 - same_input)
            continue
        known = next((k for k, other in enumerate(unique) if other is result), None)
        if known is None:
            known = len(unique)
            unique.append(result)
        places.append(known)
    return unique, tuple(places)


def nearly_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, or as near as kernels that add in no fixed order come: relative L2 error of a few roundings."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not torch.equal(x[~finite].isnan(), y[~finite].isnan()):
        return False
    x, y = x[finite], y[finite]
    tolerance = max(1e-5, 4 * torch.finfo(a.dtype).eps) if a.dtype != torch.float64 else 1e-10
    return bool((x - y).norm() <= tolerance * x.norm())


def different_calls(calls: Sequence[Sequence[torch.Tensor]], count: int) -> list[Sequence[torch.Tensor]]:
    """At least `count` calls of one shape: recorded ones, then variations with plausible values."""
    result: list[Sequence[torch.Tensor]] = list(calls[:count])
    for step in range(1, 1 + count - len(result)):
        result.append([_varied(t, step) for t in calls[-1]])
    return result


def _varied(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Floats scaled and moved along; ids moved along, so that they stay ids. Masks and lists of lengths stay as they are."""
    if not tensor.numel() or tensor.dim() == 0:
        return tensor
    if tensor.is_floating_point():
        return torch.roll(tensor * (1 - 0.25 * step), step, -1)
    if tensor.dtype in (torch.int32, torch.int64) and tensor.dim() >= 2:
        return torch.roll(tensor, step, -1)
    return tensor
