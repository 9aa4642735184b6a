"""Runs a recorded call again, to find what a module does beside computing outputs from inputs.

The module's state and torch's random state are put back afterwards.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..schema import Alias, Facts, ValueLeaf
from .recorder import Recording, Sample, clone_leaf, same_values
from .signature import RecordedSignature
from .state import Snapshot
from .structure import Flat, describe_leaf, flatten, flatten_call, is_tensor
from .swap import original_method


@contextmanager
def seeded(seed: int | torch.Tensor, device: torch.device | None = None) -> Iterator[None]:
    """Random states set to a seed, torch's also to a recorded CPU state, and put back at the end; Python's and NumPy's too."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda):
            if isinstance(seed, int):
                torch.manual_seed(seed)
            else:
                torch.set_rng_state(seed)
            random.seed(seed if isinstance(seed, int) else 0)
            np.random.seed(seed if isinstance(seed, int) else 0)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def autocast_of(autocast: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """The autocast context of a signature; its weight cache is off, for captures and repeated runs."""
    if not autocast:
        yield
        return
    device, dtype = autocast[0]
    with torch.autocast(device, dtype=getattr(torch, dtype), cache_enabled=False), autocast_of(autocast[1:]):
        yield


def run_original(recording: Recording, recorded: RecordedSignature, sample: Sample) -> tuple[Flat, Flat]:
    """One call of the original on a fresh copy of a sample, without gradients: (inputs after it, outputs)."""
    call = sample.call(fresh=True)
    args, kwargs = recording.form.arguments(call)
    with torch.no_grad(), autocast_of(recorded.signature.autocast):
        output = original_method(recording.module, recording.method)(*args, **kwargs)
    return flatten_call(call), flatten(output)


def why_not(recording: Recording) -> str | None:
    """Why a method can't be tuned at all, or None."""
    method = original_method(recording.module, recording.method)
    function = inspect.unwrap(method)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f"{recording.method} is a generator: its work happens while the caller iterates"
    if inspect.iscoroutinefunction(function):
        return f"{recording.method} is a coroutine"
    if recording.module.training:
        return "the module is in training mode; call .eval() on it first"
    if isinstance(recording.module, torch.jit.ScriptModule):
        return "a torch.jit script module is compiled already; its forward cannot be replaced"
    return recording.problem


def probe(recording: Recording, recorded: RecordedSignature) -> RecordedSignature:
    """Fill in the facts of a signature by running its smallest sample a few times.

    Randomness shows as outputs that differ between seeds and agree for equal ones; state as buffers or attributes that
    a second call changes; aliases as storage shared by outputs and inputs; Python values that depend on the data as
    values that change when the floating-point inputs do.
    """
    sample = min(recorded.all_samples(), key=lambda s: s.size_bytes)
    tensors = sample.tensors()
    device = tensors[0].device if tensors else None
    snapshot = Snapshot(recording.module)
    try:
        with seeded(1, device):
            run_original(recording, recorded, sample)
        # What the first call builds for good (a lazily filled table) is no state; what every call changes is.
        between = Snapshot(recording.module)
        with seeded(1, device):
            before, first = run_original(recording, recorded, sample)
        state = between.changes()
        between.restore()
        with seeded(2, device):
            _, second = run_original(recording, recorded, sample)
        between.restore()
        drawn = not _same(first, second)
        varying = set(recorded.signature.facts.varying_values)
        if not drawn:
            varying |= _differing_values(first, second)
            with seeded(1, device):
                varying |= _differing_values(first, _run_perturbed(recording, recorded, sample))
        between.restore()
        strided = () if drawn else _strided(recording, recorded, sample, first, between, device)
    finally:
        snapshot.restore()
    facts = replace(
        recorded.signature.facts,
        random=drawn or recorded.signature.facts.random,
        state=tuple(sorted({*recorded.signature.facts.state, *state})),
        aliases=_aliases(before, first),
        varying_values=tuple(sorted(varying)),
        hooked=_hooked(recording.module),
        strided=strided,
        twins=_twins(first),
    )
    return _with_facts(recorded, facts)


def _with_facts(recorded: RecordedSignature, facts: Facts) -> RecordedSignature:
    return replace(recorded, signature=replace(recorded.signature, facts=facts))


def _run_perturbed(recording: Recording, recorded: RecordedSignature, sample: Sample) -> Flat | None:
    """Outputs for floating-point inputs of other values; None if the module doesn't take them."""
    leaves = [clone_leaf(x) for x in sample.leaves]
    for i, leaf in enumerate(leaves):
        if is_tensor(leaf) and leaf.is_floating_point():
            leaves[i] = -0.5 * leaf.flip(0) if leaf.dim() else -0.5 * leaf
    try:
        return run_original(recording, recorded, Sample(sample.node, leaves, sample.point))[1]
    except Exception:
        return None


def _strided(
    recording: Recording,
    recorded: RecordedSignature,
    sample: Sample,
    expected: Flat,
    before: Snapshot,
    device: torch.device | None,
) -> tuple[str, ...]:
    """Paths of the inputs on whose strides the result depends: other strides give another one, or an error."""
    leaves = recorded.signature.leaves
    laid_out = [i for i, x in enumerate(sample.leaves) if is_tensor(x) and _other_strides(x) is not None]

    def depends_on(which: list[int]) -> bool:
        changed = [clone_leaf(x) for x in sample.leaves]
        for i in which:
            changed[i] = _other_strides(changed[i])
        try:
            with seeded(1, device):
                _, found = run_original(recording, recorded, Sample(sample.node, changed, sample.point))
        except Exception:
            return True
        finally:
            before.restore()
        return not _same(expected, found) or bool(_differing_values(expected, found))

    if not laid_out or not depends_on(laid_out):
        return ()
    alone = [i for i in laid_out if depends_on([i])] if len(laid_out) > 1 else laid_out
    return tuple(leaves[i].path for i in alone or laid_out)


def _other_strides(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same values with dimensions in the reverse order in memory, or contiguous; None if there is no other order."""
    if tensor.layout is not torch.strided or sum(size > 1 for size in tensor.shape) < 2:
        return None
    turned = tuple(reversed(range(tensor.dim())))
    others = (tensor.permute(turned).contiguous().permute(turned), tensor.contiguous())
    return next((other for other in others if other.stride() != tensor.stride()), None)


def _same(a: Flat, b: Flat) -> bool:
    """Whether tensor outputs agree, up to what kernels that sum in varying order differ by."""
    if a.node != b.node:
        return False
    for x, y in zip(a.leaves, b.leaves, strict=True):
        if is_tensor(x) and is_tensor(y) and not same_values(x, y):
            if x.shape != y.shape or not x.is_floating_point():
                return False
            difference, scale = (x - y).double().norm(), x.double().norm()
            if not difference <= 1e-3 * scale:
                return False
        elif isinstance(x, np.ndarray) and not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
            return False
    return True


def _differing_values(a: Flat, b: Flat | None) -> set[str]:
    if b is None:
        return set()
    if a.node != b.node:
        return {"output"}
    pairs = zip(a.paths, a.leaves, b.leaves, strict=True)
    described = [(path, describe_leaf(x, path), describe_leaf(y, path)) for path, x, y in pairs]
    return {path for path, x, y in described if isinstance(x, ValueLeaf) and x != y}


def _aliases(inputs: Flat, outputs: Flat) -> tuple[Alias, ...]:
    found = []
    for path, leaf in zip(outputs.paths, outputs.leaves, strict=True):
        for source, value in zip(inputs.paths, inputs.leaves, strict=True):
            if leaf is value and is_tensor(leaf):
                found.append(Alias(path, source, "same"))
            elif _shares_storage(leaf, value):
                found.append(Alias(path, source, "view"))
    return tuple(found)


def _twins(outputs: Flat) -> tuple[Alias, ...]:
    """Outputs that share elements with an earlier one; of several the first counts."""
    found, seen = [], list[tuple[str, torch.Tensor]]()
    for path, leaf in zip(outputs.paths, outputs.leaves, strict=True):
        if not is_tensor(leaf):
            continue
        other = next(((p, x) for p, x in seen if x is leaf or _overlap(x, leaf)), None)
        if other is not None:
            found.append(Alias(path, other[0], "same" if other[1] is leaf else "view"))
        seen.append((path, leaf))
    return tuple(found)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold an element in common; parts of one tensor, as `chunk` gives them, may lie side by side."""
    if not _shares_storage(a, b) or not (a.numel() and b.numel()):
        return False
    if a.dtype != b.dtype:
        return True
    length = a.untyped_storage().nbytes() // a.element_size()
    held = torch.zeros(length, dtype=torch.bool, device=a.device)
    # Along an expanded dimension one element stands for all, and can be written once only.
    shape = [1 if stride == 0 else size for size, stride in zip(a.shape, a.stride(), strict=True)]
    held.as_strided(shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(held.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _shares_storage(a: Any, b: Any) -> bool:
    if not (is_tensor(a) and is_tensor(b) and a.layout is torch.strided and b.layout is torch.strided):
        return False
    pointer: int = a.untyped_storage().data_ptr()
    return pointer != 0 and pointer == b.untyped_storage().data_ptr()


def _hooked(module: torch.nn.Module) -> tuple[str, ...]:
    """Submodules with forward hooks: their side effects would be lost in a graph of the whole module."""
    return tuple(
        name for name, child in module.named_modules() if name and (child._forward_hooks or child._forward_pre_hooks)
    )
