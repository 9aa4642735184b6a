"""Notices that a tuned module's weights, structure or attributes changed, at next to no cost per call.

Changes that go through `nn.Module` are seen at once, as events: `.to()`, `.half()` and the like (`_apply`),
`load_state_dict` (`assign=True` too), `train()`, a parameter, buffer or submodule registered or replaced, also by
`functional_call`, on any submodule, and forward hooks registered on one. What raises no event (`p.data = t`, in-place
edits, `child.training = True`, `del layers[-1]`, `bn.eps = 1.0`, `child.forward = f`) is found by a rotating check of
identity, address and version, of so many tensors and submodules per call, however many there are; writes that leave even
the version alone (`p.data.add_`, numpy) by comparing sampled elements. Both have gone over everything within about a
second of calls; the first within 100 calls for up to 400 tensors and submodules, whatever time these take.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from operator import is_, itemgetter
from typing import Any

import torch

from ..capture.state import version_of
from ..capture.swap import SwappedMethod, restore, swap
from .registrations import listen, unlisten
from .traits import around, assigned_forward, parts_of, plain_attributes

SAMPLED_ELEMENTS = 64
"""Of each tensor, compared by content."""
TENSORS_PER_SAMPLE = 32
"""Whose sampled elements are compared in one operation."""
SAMPLE_SECONDS = {"cpu": 0.02, "cuda": 0.25}
"""How often a share of the samples is compared; on CUDA each time waits for the device."""
_EVENTS = {
    "_apply": "its device or dtype was changed",
    "_load_from_state_dict": "load_state_dict was called",
    "train": "train() or eval() was called",
}
_SUBMODULE_EVENTS = {
    "register_forward_hook": "a forward hook was registered on a submodule",
    "register_forward_pre_hook": "a forward pre-hook was registered on a submodule",
}
"""Hooks of the watched module itself run around the tuned method; only those of its submodules are lost."""
LOOKS_PER_CALL = 4
"""Tensors and submodules that the rotating check looks at in each call: what a call costs doesn't grow with their number."""


def slots_of(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """(holder, name) of every parameter and buffer; script modules hold theirs in C++, for the digest to compare."""
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule):
            continue
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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bits of a few elements, evenly spaced, as a view of the tensor's memory; None where there can't be one.

    Bits, so that NaN equals NaN. Dense tensors of any stride order are read in the order of their memory, slices of
    something larger along their diagonal.
    """
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta or tensor.is_quantized:
        return None
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.view(_BITS[flat.element_size()])
    if flat.permute(sorted(range(flat.dim()), key=flat.stride, reverse=True)).is_contiguous():
        count, stride = flat.numel(), 1
    else:
        count, stride = min(flat.shape), sum(flat.stride())
    return flat.as_strided((count,), (stride,))[:: max(1, count // SAMPLED_ELEMENTS)]


class _Samples:
    """Sampled elements of some tensors of equal device and element size, and what they were."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._views: list[torch.Tensor] | None = None
        self.remembered = self._now()

    def _now(self) -> torch.Tensor:
        views = self._views
        if views is None:
            views = self._views = [view for view in map(_sampled, self.tensors) if view is not None]
        return torch.cat(views)

    def differ(self) -> bool:
        return not torch.equal(self._now(), self.remembered)

    def release(self) -> None:
        """Keep no memory alive that `.to()` is about to free."""
        self._views = None


def _samples_of(tensors: Sequence[torch.Tensor]) -> list[_Samples]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if _sampled(tensor) is not None:
            groups.setdefault((tensor.device, tensor.element_size()), []).append(tensor)
    size = TENSORS_PER_SAMPLE
    return [_Samples(group[i : i + size]) for group in groups.values() for i in range(0, len(group), size)]


def _children(modules: dict[str, torch.nn.Module | None]) -> tuple[torch.nn.Module | None, ...]:
    return tuple(modules.values())


class WeightWatch:
    """Watches one module's weights. `tick()` is called at every tuned call and says whether all is as it was.

    `dirty` is set by an event or a finding and stays until the owner has looked what changed. One watch serves all
    executables of a module, from any thread.

    Args:
        module: the module; the watch holds it weakly.
        values: whether values matter; without, only what events tell (kinds, training) is watched.
        addresses: whether it matters where the weights lie, whatever their values.
        state: names of attributes (with the submodule's path) that calls change themselves. All other numbers, strings
            and tuples in attributes are watched where values or addresses matter: what was traced holds them as constants.
    """

    def __init__(
        self, module: torch.nn.Module, *, values: bool = True, addresses: bool = False, state: Collection[str] = ()
    ) -> None:
        self.module = weakref.ref(module)
        self.values, self.addresses, self._state = values, addresses, frozenset(state)
        self.dirty = False
        self.suspect = False
        self.found = ""
        self._swaps: list[SwappedMethod] = []
        self._attributes = plain_attributes(module, self._state) if values or addresses else {}
        self._kind = self._kind_of(module)
        self._parts = [weakref.ref(part) for part in parts_of(module)]
        self._take(module)

    @staticmethod
    def _kind_of(module: torch.nn.Module) -> tuple[Any, ...]:
        """What must be the same whatever the values."""
        tensors = [(t.shape, t.dtype, t.device) for t in (holder[name] for holder, name in slots_of(module))]
        return tensors, [child.training for child in module.modules()], around(module)

    def _take(self, module: torch.nn.Module) -> None:
        """Remember the weights as they are now."""
        with torch.no_grad():
            slots = list(slots_of(module))
            self._slots = slots
            self.tensors = [holder[name] for holder, name in slots]
            self._pointers = [t.data_ptr() if t.layout is torch.strided else 0 for t in self.tensors]
            self._versions = [version_of(t) for t in self.tensors]
            self._samples = _samples_of(self.tensors if self.values else [])
        shares = self._shares(module)
        self._shares_due, self._calls_per_round = itertools.cycle(shares), len(shares)
        self._on_cuda = any(t.is_cuda for t in self.tensors)
        self._interval = SAMPLE_SECONDS["cuda" if self._on_cuda else "cpu"]
        self._next_sample = time.monotonic() + self._interval
        self._sample_at = 0

    def _shares(self, module: torch.nn.Module) -> list[tuple[list[Any], ...]]:
        """What to look at in each call of a round: tensors, tensors that have no version, attributes and children."""
        rows: list[tuple[int, Any]] = []
        for (holder, name), tensor, address, version in zip(
            self._slots, self.tensors, self._pointers, self._versions, strict=True
        ):
            # `int()` is 0, as is the address of what has none.
            address_of = tensor.data_ptr if tensor.layout is torch.strided else int
            row = (holder.get, name, tensor, address_of, address)
            if self.values and version != -1:
                rows.append((0, (*row, version)))
            elif self.values or self.addresses:
                rows.append((1, row))
        for path, child in module.named_modules():
            if isinstance(child, torch.jit.ScriptModule):
                continue
            entries = vars(child)
            # All of a submodule's in one operation; no name stands for the forward of the module itself, which is ours.
            pick = itemgetter(*(key for key in entries if key == "training" or (path, key) in self._attributes))
            forward = "" if child is module else "forward"
            rows.append((2, (pick, entries, pick(entries), forward, entries.get(forward))))
            if child._modules:
                rows.append((2, (_children, child._modules, _children(child._modules), "", None)))
        calls = max(1, -(-len(rows) // LOOKS_PER_CALL))
        return [tuple([row for k, row in rows[i::calls] if k == kind] for kind in range(3)) for i in range(calls)]

    def start(self) -> None:
        """Listen to events on the module and its submodules."""
        module = self.module()
        assert module is not None
        listen(module, self)
        for child in module.modules():
            if not isinstance(child, torch.jit.ScriptModule):
                events = _EVENTS if child is module else {**_EVENTS, **_SUBMODULE_EVENTS}
                self._swaps += [self._event(child, method, words) for method, words in events.items()]

    def stop(self) -> None:
        unlisten(self)
        for entry in reversed(self._swaps):
            restore(entry)
        self._swaps.clear()

    def _event(self, child: torch.nn.Module, method: str, words: str) -> SwappedMethod:
        holder: list[SwappedMethod] = []
        watch = weakref.ref(self)

        def changed(*args: Any, **kwargs: Any) -> Any:
            owner = watch()
            if owner is not None:
                owner.mark(words)
            return holder[0].original()(*args, **kwargs)

        holder.append(swap(child, method, changed))
        return holder[0]

    def mark(self, found: str) -> None:
        """Weights may have changed: `tick` is False until the owner has looked and said what holds (`accept`)."""
        self.found = found
        self.dirty = self.suspect = True
        for sample in self._samples:
            sample.release()

    def tick(self) -> bool:
        """True if nothing is known to have changed. Costs one or two microseconds, however many weights."""
        # As `look`, without a second function call.
        return (
            not self.suspect
            and self._look_at(*next(self._shares_due))
            and (time.monotonic() < self._next_sample or self._catch_up())
        )

    def look(self) -> bool:
        """The share of the rotating check that is due at this call, and what is due by time."""
        return self._look_at(*next(self._shares_due)) and (time.monotonic() < self._next_sample or self._catch_up())

    def _look_at(self, versioned: list[Any], unversioned: list[Any], entered: list[Any]) -> bool:
        for get, name, tensor, address_of, address, version in versioned:
            if get(name) is not tensor or address_of() != address or tensor._version != version:
                return self._found("a weight was replaced or written in place")
        for get, name, tensor, address_of, address in unversioned:
            if get(name) is not tensor or address_of() != address:
                return self._found("a weight was replaced")
        try:
            for pick, entries, values, forward, function in entered:
                if pick(entries) != values:
                    return self._found(
                        "a submodule was added, removed or replaced"
                        if pick is _children
                        else "the training mode or an attribute of a submodule changed"
                    )
                if entries.get(forward) is not function and self._forward_changed(entries, function):
                    return self._found("the forward of a submodule was replaced")
        except Exception:  # an attribute was deleted, or holds what can't be compared
            return self._found("an attribute of a submodule changed")
        return True

    @staticmethod
    def _forward_changed(entries: dict[str, Any], function: Any) -> bool:
        """Whether it is the user who put another `forward` there, or took it away, and not we."""
        while isinstance(function, SwappedMethod):
            function = function.previous
        return assigned_forward(entries) is not function

    def _found(self, what: str) -> bool:
        self.mark(what)
        return False

    def _catch_up(self) -> bool:
        """The part of both checks that the time since the last one asks for: all of both within a second."""
        now = time.monotonic()
        elapsed = min(1.0, now - self._next_sample + self._interval)
        self._next_sample = now + self._interval
        for share in itertools.islice(self._shares_due, int(self._calls_per_round * elapsed)):
            if not self._look_at(*share):
                return False
        samples, start = self._samples, self._sample_at
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            return True
        due = min(len(samples), int(len(samples) * elapsed) + 1)
        for i in range(start, start + due):
            if samples[i % len(samples)].differ():
                return self._found("a weight was written in place")
        self._sample_at = (start + due) % max(len(samples), 1)
        return True

    def untouched(self) -> bool:
        """Whether all is as remembered, and every weight the very one, by identity, address, version and sample."""
        module = self.module()
        if module is None:
            return False
        slots = list(slots_of(module))
        return (
            len(slots) == len(self._slots)
            and all(map(is_, [holder[name] for holder, name in slots], self.tensors))
            and self.same_kind()
            and not self.changed_attributes()
            and self._pointers == [t.data_ptr() if t.layout is torch.strided else 0 for t in self.tensors]
            and self._versions == [version_of(t) for t in self.tensors]
            and not any(sample.differ() for sample in self._samples)
        )

    def same_kind(self) -> bool:
        """Whether submodules, their hooks, training flags, shapes, dtypes and devices are those of the first look."""
        module = self.module()
        if module is None:
            return False
        parts = parts_of(module)
        same_parts = len(parts) == len(self._parts) and all(r() is p for r, p in zip(self._parts, parts, strict=True))
        return same_parts and self._kind == self._kind_of(module)

    def changed_attributes(self) -> list[str]:
        """Names of the attributes watched whose values are not those of the first look."""
        module = self.module()
        if module is None or not self._attributes:
            return []
        now = plain_attributes(module, self._state)
        return [".".join(filter(None, name)) for name, text in self._attributes.items() if now.get(name) != text]

    def accept(self) -> None:
        """Watch the weights as they stand now. Kinds, submodules and attributes stay those of the first look."""
        module = self.module()
        if module is not None:
            self._take(module)
