"""What a call changes in a module beside its outputs, and how to put it back."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_TORCH_ATTRIBUTES = set(vars(torch.nn.Module())) | {"_hf_hook", "_old_forward"}


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def _summary(value: Any) -> Any:
    """Enough of an attribute to see that it changed."""
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, (list, dict, set, tuple)):
        try:
            return type(value), len(value), repr(value) if len(value) <= 16 else None
        except Exception:
            return type(value), len(value)
    return value if type(value) in (int, float, bool, str, type(None)) else id(value)


class Snapshot:
    """The state of a module and its submodules: buffers by value, plain attributes, versions of parameters.

    `changes()` names what has changed since, `restore()` puts back buffers and attributes. Containers in
    attributes are copied one level deep.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.versions = {n: (id(t), version_of(t)) for n, t in _named_tensors(module).items()}
        self.buffers = {n: (b, b.detach().clone()) for n, b in module.named_buffers()}
        self.attributes: dict[str, tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = {}
        for name, child in module.named_modules():
            own = {k: v for k, v in vars(child).items() if k not in _TORCH_ATTRIBUTES}
            kept = {k: copy.copy(v) if type(v) in (list, dict, set) else v for k, v in own.items()}
            self.attributes[name] = (child, kept, {k: _summary(v) for k, v in own.items()})

    def changes(self) -> tuple[str, ...]:
        """Names of parameters, buffers and attributes that differ from the snapshot."""
        changed = [n for n, t in _named_tensors(self.module).items() if self.versions.get(n) != (id(t), version_of(t))]
        for name, (child, _, summaries) in self.attributes.items():
            prefix = f"{name}." if name else ""
            for key, value in vars(child).items():
                if key not in _TORCH_ATTRIBUTES and _summary(value) != summaries.get(key, ...):
                    changed.append(prefix + key)
        return tuple(sorted(set(changed)))

    def restore(self) -> None:
        """Put buffers and attributes back. Parameters are never written."""
        with torch.no_grad():
            for name, (buffer, value) in self.buffers.items():
                owner, _, key = name.rpartition(".")
                holder = self.module.get_submodule(owner)
                if holder._buffers.get(key) is not buffer:
                    holder._buffers[key] = buffer
                if version_of(buffer) != self.versions[name][1] or buffer.is_inference():
                    if buffer.is_inference() and not torch.is_inference_mode_enabled():
                        with torch.inference_mode():
                            buffer.copy_(value)
                    else:
                        buffer.copy_(value)
                    self.versions[name] = (id(buffer), version_of(buffer))
        for child, kept, summaries in self.attributes.values():
            for key, value in list(vars(child).items()):
                if key in _TORCH_ATTRIBUTES:
                    continue
                if key not in kept:
                    del child.__dict__[key]
                elif _summary(value) != summaries[key]:
                    original = kept[key]
                    if type(original) in (list, dict, set) and type(value) is type(original):
                        value.clear()
                        value.extend(original) if isinstance(value, list) else value.update(original)
                    else:
                        child.__dict__[key] = original


@contextmanager
def preserved(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run something for our own ends and leave no trace: buffers, attributes and random states are put back.

    Random states are torch's (also of CUDA devices in use), Python's and NumPy's.
    """
    snapshots = [Snapshot(module) for module in modules]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for snapshot in snapshots:
            snapshot.restore()
