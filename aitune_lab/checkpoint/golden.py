"""Golden samples: calls with eager's answers that travel with the file, so that it can be tested where it is loaded.

By default they are synthetic: drawn anew in the recorded shapes and ranges, so that no user's data leaves the machine.
Tensors are kept in safetensors, everything else as data in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..backends.base import BuildJob
from ..capture.probe import autocast_of, seeded
from ..capture.recorder import Sample, as_tensor
from ..capture.state import Snapshot
from ..capture.structure import Flat, describe_leaf, flatten, flatten_call, is_tensor, value_from_text
from ..errors import CheckpointError
from ..schema import GoldenSample, Leaf, OpaqueLeaf, Point, Signature, TensorLeaf, evaluate_dim
from .validate import sample_problem

MAX_GOLDEN_BYTES = 256 << 20
"""Per choice; points beyond, the largest first, are left out and said so."""

SEED = 20240229
"""Of synthetic values, and of torch's random state when a golden call is run."""


@dataclass(frozen=True)
class Golden:
    """A call with the outputs that eager gave where the file was saved."""

    sample: Sample
    expected: Flat


class Unstorable(Exception):
    """A call that can't be kept in a file, with the reason."""


def run_original(job: BuildJob, sample: Sample) -> Flat:
    """The original's outputs for a fresh copy of a sample, in its signature's autocast, without gradients.

    The module's state and torch's random state are put back afterwards.
    """
    args, kwargs = job.form.arguments(sample.call(fresh=True))
    snapshot = Snapshot(job.module)
    try:
        with golden_context(job.signature, sample):
            return flatten(job.original(*args, **kwargs))
    finally:
        snapshot.restore()


@contextmanager
def golden_context(signature: Signature, sample: Sample) -> Iterator[None]:
    """No gradients, and the random state and autocast in which golden calls run, so that they give the same everywhere."""
    tensors = sample.tensors()
    with torch.no_grad(), seeded(SEED, tensors[0].device if tensors else None), autocast_of(signature.autocast):
        yield


def collect(job: BuildJob, *, synthetic: bool) -> tuple[list[Golden], list[str]]:
    """One golden sample for each point that was recorded, with notes on those left out and why."""
    by_point: dict[Point, Sample] = {}
    for sample in job.samples:
        by_point.setdefault(sample.point, sample)
    found: list[Golden] = []
    notes: list[str] = []
    size = 0
    if not by_point:
        notes.append(f"no golden samples for {job.path or 'the module'}: no recorded calls are at hand")
    for point, sample in sorted(by_point.items(), key=lambda item: item[1].size_bytes):
        where = f"{job.path or 'the module'} at {point.label}"
        made = synthetic_sample(sample) if synthetic else sample
        size += made.size_bytes
        if size > MAX_GOLDEN_BYTES:
            notes.append(f"no golden sample for {where}: larger than {MAX_GOLDEN_BYTES >> 20} MiB together")
            continue
        try:
            golden = Golden(made, run_original(job, made))
            described(golden)
            pack([golden])
        except Unstorable as error:
            notes.append(f"no golden sample for {where}: {error}")
        except Exception as error:
            kind = "synthetic" if synthetic else "recorded"
            notes.append(f"no golden sample for {where}: the original fails on {kind} inputs: {error}")
        else:
            found.append(golden)
    return found, notes


# --- synthetic values ---------------------------------------------------------------------------------------------


def synthetic_sample(sample: Sample) -> Sample:
    """A sample of the same structure, shapes, dtypes and devices, with values drawn anew (the same in every run).

    Floats are normal with the recorded mean and deviation, kept within the recorded range; integers uniform within
    the recorded range; bools, and integers that are only 0 and 1, true as often as recorded. What isn't finite, and
    whether a row of a mask is all false, is kept as recorded: a mask that shows nothing makes no sense to any model.
    """
    generator = torch.Generator().manual_seed(SEED)
    leaves: list[Any] = []
    for leaf in sample.leaves:
        if is_tensor(leaf) or isinstance(leaf, np.ndarray):
            tensor = as_tensor(leaf)
            drawn = _drawn(tensor.cpu(), generator).to(tensor.device)
            leaves.append(drawn.numpy() if isinstance(leaf, np.ndarray) else drawn)
        else:
            leaves.append(leaf)
    return Sample(sample.node, leaves, sample.point, synthetic=True)


def _drawn(recorded: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if recorded.layout is not torch.strided or recorded.numel() == 0:
        return recorded.clone()
    if recorded.is_complex():
        parts = torch.view_as_real(recorded.resolve_conj())
        return torch.view_as_complex(_drawn(parts, generator))
    if recorded.is_floating_point():
        return _drawn_floats(recorded, generator)
    # Ranges of int64 don't fit float64 exactly; torch compares few of the unsigned types.
    values = recorded.to(torch.int64)
    low, high = int(values.min()), int(values.max())
    if recorded.dtype is torch.bool or (low, high) == (0, 1):
        return _drawn_mask(values != 0, generator).to(recorded.dtype)
    span = min(high - low, 2**62)
    drawn = torch.randint(0, span + 1, values.shape, generator=generator)
    return (drawn + low).to(recorded.dtype)


def _drawn_floats(recorded: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    values = recorded.to(torch.float64)
    finite = torch.isfinite(values)
    known = values[finite]
    if known.numel() == 0:
        return recorded.clone()
    drawn = torch.randn(values.shape, dtype=torch.float64, generator=generator)
    drawn = drawn * known.std(correction=0) + known.mean()
    drawn = drawn.clamp(known.min(), known.max())
    return torch.where(finite, drawn, values).to(recorded.dtype)


def _drawn_mask(recorded: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    share = recorded.double().mean()
    drawn = torch.rand(recorded.shape, generator=generator) < share
    if recorded.dim():
        row = recorded.any(-1)
        drawn = drawn & row[..., None]
        drawn[..., 0] |= row
    return drawn


# --- storing ------------------------------------------------------------------------------------------------------


def described(golden: Golden) -> GoldenSample:
    """A golden sample without its tensors. Raises Unstorable for what no file can bring back."""
    inputs, outputs = flatten_call(golden.sample.call()), golden.expected
    found = GoldenSample(
        golden.sample.point,
        inputs.node,
        tuple(map(describe_leaf, inputs.leaves, inputs.paths)),
        outputs.node,
        tuple(map(describe_leaf, outputs.leaves, outputs.paths)),
    )
    for leaf in (*found.leaves, *found.output_leaves):
        if isinstance(leaf, OpaqueLeaf):
            raise Unstorable(f"{leaf.path} is an object that only its own process knows")
        if isinstance(leaf, TensorLeaf) and leaf.layout != "strided":
            raise Unstorable(f"{leaf.path} is a tensor of layout {leaf.layout}")
    problem = sample_problem(found)
    if problem is not None:
        raise Unstorable(problem)
    return found


def pack(samples: Sequence[Golden]) -> bytes:
    """All tensors of the samples as one safetensors file."""
    from safetensors.torch import save

    tensors = {}
    for index, golden in enumerate(samples):
        for side, leaves in (("in", golden.sample.leaves), ("out", golden.expected.leaves)):
            for number, leaf in enumerate(leaves):
                if is_tensor(leaf) or isinstance(leaf, np.ndarray):
                    tensors[f"{index}.{side}.{number}"] = _storable(as_tensor(leaf))
    packed: bytes = save(tensors)
    return packed


def unpack(data: bytes, samples: Sequence[GoldenSample], devices: dict[str, str] | None = None) -> list[Golden]:
    """The inverse of `pack`, on the recorded devices, or others by `devices`. Raises CheckpointError for what doesn't fit."""
    from safetensors.torch import load

    try:
        tensors = load(data)
    except Exception as error:
        raise CheckpointError(f"the golden samples cannot be read: {error}") from None
    found = []
    for index, sample in enumerate(samples):
        inputs = _leaves(sample.leaves, f"{index}.in", tensors, devices or {})
        outputs = _leaves(sample.output_leaves, f"{index}.out", tensors, devices or {})
        expected = Flat(sample.outputs, outputs, [leaf.path for leaf in sample.output_leaves])
        found.append(Golden(Sample(sample.inputs, inputs, sample.point, synthetic=True), expected))
    return found


def _leaves(
    leaves: Sequence[Leaf], prefix: str, tensors: dict[str, torch.Tensor], devices: dict[str, str]
) -> list[Any]:
    found: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, TensorLeaf):
            tensor = tensors.get(f"{prefix}.{number}")
            if tensor is not None and leaf.dtype.startswith("complex"):
                tensor = torch.view_as_complex(tensor)
            if tensor is None or (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{leaf.dtype}", leaf.dims):
                raise CheckpointError(f"the golden samples hold no {leaf.dtype}{list(leaf.dims)} for {leaf.path}")
            on_device = tensor.to(devices.get(leaf.device, leaf.device))
            found.append(on_device.numpy() if leaf.holder == "numpy" else on_device)
        elif isinstance(leaf, OpaqueLeaf):
            found.append(leaf)
        else:
            found.append(value_from_text(leaf.type, leaf.text))
    return found


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


# --- samples for building -----------------------------------------------------------------------------------------


def placeholder(signature: Signature, point: Point) -> Sample:
    """A sample at a point from the signature alone, for files without golden samples: only shapes are meant.

    Floats are normal, integers 0 (valid as an index anywhere), bools true.
    """
    generator = torch.Generator().manual_seed(SEED)
    leaves: list[Any] = []
    for leaf in signature.leaves:
        if isinstance(leaf, TensorLeaf):
            shape = [evaluate_dim(dim, point.as_dict()) for dim in leaf.dims]
            dtype: torch.dtype = getattr(torch, leaf.dtype)
            if dtype.is_floating_point or dtype.is_complex:
                tensor = torch.randn(shape, generator=generator).to(leaf.device, dtype)
            else:
                tensor = torch.full(shape, dtype is torch.bool, dtype=dtype, device=leaf.device)
            leaves.append(tensor.numpy() if leaf.holder == "numpy" else tensor)
        elif isinstance(leaf, OpaqueLeaf):
            raise Unstorable(f"{leaf.path} is an object that only its own process knows")
        else:
            leaves.append(value_from_text(leaf.type, leaf.text))
    return Sample(signature.inputs, leaves, point, synthetic=True)
