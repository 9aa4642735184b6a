"""Notices that a tuned module's weights changed, at next to no cost per call.

Changes that go through `nn.Module` are seen at once, as events: `.to()`, `.half()` and the like (`_apply`),
`load_state_dict` (`assign=True` too), a parameter, buffer or submodule registered or replaced, on any submodule. What raises
no event (`p.data = t`, in-place edits) is found by a rotating check of identity, address and version, a few tensors
per call; writes that leave even the version alone (`p.data.add_`, numpy) by a fingerprint of sampled elements. Both
have gone over every tensor within about a second of calls; the first within 100 calls for up to 1000 tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch

from ..capture.state import version_of
from ..capture.swap import SwappedMethod, restore, swap

SAMPLED_ELEMENTS = 64
_EVENTS = {
    "_apply": "its device or dtype was changed",
    "_load_from_state_dict": "load_state_dict was called",
    "train": "train() or eval() was called",
}
CALLS_PER_ROUND = 100
TENSORS_PER_CALL = 10


def slots_of(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """(holder, name) of every parameter and buffer of a module and its submodules."""
    for child in module.modules():
        for holder in (child._parameters, child._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield holder, name


def content_digest(module: torch.nn.Module) -> str:
    """Digest of names, shapes, dtypes and values of all parameters and buffers; shared tensors count once."""
    digest = hashlib.blake2b(digest_size=16)
    seen: dict[int, str] = {}
    tensors = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    for name, tensor in tensors:
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{seen.get(id(tensor), '')}".encode())
        if id(tensor) not in seen and tensor.numel() and not tensor.is_meta:
            seen[id(tensor)] = name
            dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
            flat = dense.cpu().contiguous().flatten()
            for start in range(0, flat.numel(), 1 << 24):
                part = flat[start : start + (1 << 24)]
                digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sampled(tensor: torch.Tensor) -> list[Any]:
    """A few elements, evenly spaced; compared by their text, so that NaN equals NaN."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return []
    flat = tensor.detach()
    step = max(1, tensor.numel() // SAMPLED_ELEMENTS)
    if flat.is_contiguous():
        return flat.view(-1)[::step].tolist()
    return flat.reshape(-1)[::step].tolist()


class WeightWatch:
    """Watches one module's weights. `tick()` is called at every tuned call and says whether all is as it was.

    `dirty` is set by an event or a finding and stays until the owner has looked what changed. One watch serves all
    executables of a module, from any thread.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.dirty = False
        self.suspect = False
        self.found = ""
        self._swaps: list[SwappedMethod] = []
        self._calls = itertools.count()
        self._take(module)

    def _take(self, module: torch.nn.Module) -> None:
        """Remember the weights as they are now."""
        with torch.no_grad():
            slots = list(slots_of(module))
            self._slots = slots
            self._tensors: list[Any] = [holder[name] for holder, name in slots]
            self._pointers = [t.data_ptr() if t.layout is torch.strided else 0 for t in self._tensors]
            self._versions = [version_of(t) for t in self._tensors]
            self._samples = [repr(_sampled(t)) for t in self._tensors]
            self._metadata = [(t.shape, t.dtype, t.device) for t in self._tensors]
            self._training = [child.training for child in module.modules()]
        count = len(slots)
        size = min(TENSORS_PER_CALL, -(-count // CALLS_PER_ROUND)) or 1
        self._chunks = [range(i, min(i + size, count)) for i in range(0, count, size)] or [range(0)]
        self._next_sample = time.monotonic()
        self._sample_at = 0

    def start(self) -> None:
        """Listen to events on the module and its submodules."""
        module = self.module()
        assert module is not None
        listen(module, self)
        for child in module.modules():
            for method in _EVENTS:
                if not isinstance(child, torch.jit.ScriptModule):
                    self._swaps.append(self._event(child, method))

    def stop(self) -> None:
        module = self.module()
        if module is not None:
            unlisten(module, self)
        for entry in reversed(self._swaps):
            restore(entry)
        self._swaps.clear()

    def _event(self, child: torch.nn.Module, method: str) -> SwappedMethod:
        holder: list[SwappedMethod] = []
        words = _EVENTS[method]
        watch = weakref.ref(self)

        def changed(*args: Any, **kwargs: Any) -> Any:
            owner = watch()
            if owner is not None:
                owner.mark(words)
            return holder[0].original()(*args, **kwargs)

        holder.append(swap(child, method, changed))
        return holder[0]

    def mark(self, found: str) -> None:
        """Weights may have changed: `tick` is False until the owner has looked (`changes`) and said what holds."""
        self.found = found
        self.dirty = self.suspect = True

    def tick(self) -> bool:
        """True if nothing is known to have changed. Costs one or two microseconds, however many weights."""
        return not self.suspect and self.look()

    def look(self) -> bool:
        """The share of the rotating check that is due at this call."""
        chunks = self._chunks
        for i in chunks[next(self._calls) % len(chunks)]:
            tensor = self._tensors[i]
            if self._replaced(i) or tensor.data_ptr() != self._pointers[i] or self._changed_version(i):
                self.mark("a weight was replaced or written in place")
                return False
        now = time.monotonic()
        if now - self._next_sample > 0.02:
            return self._check_samples(now)
        return True

    def _replaced(self, i: int) -> bool:
        holder, name = self._slots[i]
        return holder.get(name) is not self._tensors[i]

    def _changed_version(self, i: int) -> bool:
        version = self._versions[i]
        return version != -1 and self._tensors[i]._version != version

    def _check_samples(self, now: float) -> bool:
        """The share of all tensors that is due: every one within a second, by address and by content."""
        elapsed, self._next_sample = now - self._next_sample, now
        count = len(self._tensors)
        due = min(count, int(count * min(elapsed, 1.0)) + 1)
        for i in range(self._sample_at, self._sample_at + due):
            at = i % count if count else 0
            if not count:
                break
            tensor = self._tensors[at]
            if (
                self._replaced(at)
                or (tensor.layout is torch.strided and tensor.data_ptr() != self._pointers[at])
                or self._changed_version(at)
                or repr(_sampled(tensor)) != self._samples[at]
            ):
                self.mark("a weight was written in place")
                return False
        self._sample_at = (self._sample_at + due) % max(count, 1)
        return True

    def untouched(self) -> bool:
        """Whether every weight and training flag is the very one remembered, by identity, address, version, sample."""
        module = self.module()
        if module is None:
            return False
        slots = list(slots_of(module))
        tensors = [holder[name] for holder, name in slots]
        return (
            len(slots) == len(self._slots)
            and all(map(is_, tensors, self._tensors))
            and [child.training for child in module.modules()] == self._training
            and all(
                t.layout is not torch.strided or t.data_ptr() == p for t, p in zip(tensors, self._pointers, strict=True)
            )
            and not any(self._changed_version(i) for i in range(len(tensors)))
            and all(repr(_sampled(t)) == s for t, s in zip(tensors, self._samples, strict=True))
        )

    def same_kind(self) -> bool:
        """Whether shapes, dtypes, devices and training flags are those remembered, whatever the values."""
        module = self.module()
        if module is None:
            return False
        tensors = [holder[name] for holder, name in slots_of(module)]
        kinds = [(t.shape, t.dtype, t.device) for t in tensors]
        return kinds == self._metadata and [child.training for child in module.modules()] == self._training

    def accept(self) -> None:
        """Watch the weights as they stand now. Shapes, dtypes and devices stay those of the first look."""
        module = self.module()
        if module is not None:
            metadata, training = self._metadata, self._training
            self._take(module)
            self._metadata, self._training = metadata, training


_listeners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[WeightWatch]] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def listen(module: torch.nn.Module, watch: WeightWatch) -> None:
    """Tell the watch of parameters, buffers and submodules registered on the module or any submodule."""
    if not _hooks:
        hooks = torch.nn.modules.module
        register: list[Callable[..., Any]] = [
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        ]
        _hooks.extend(add(_registered) for add in register)
    for child in module.modules():
        _listeners.setdefault(child, weakref.WeakSet()).add(watch)


def unlisten(module: torch.nn.Module, watch: WeightWatch) -> None:
    for child in module.modules():
        watches = _listeners.get(child)
        if watches is not None:
            watches.discard(watch)
            if not watches:
                del _listeners[child]
    if not _listeners:
        while _hooks:
            _hooks.pop().remove()


def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    for watch in _listeners.get(module, ()):
        watch.mark(f"{name!r} was registered or replaced")
