"""Records the calls that modules get while the user's data runs through the target, and leaves nothing behind."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import DataError
from ..schema import Node, Point
from .calls import CallForm
from .interrupts import guarded
from .state import version_of
from .structure import Flat, describe_leaf, flatten, flatten_call, is_tensor, is_value, unflatten_call
from .swap import SwappedMethod, original_method, restore, swap


@dataclass
class Sample:
    """One recorded call: inputs cloned apart from the user's and from each other.

    `leaves` are tensors (detached clones, on their device), numpy arrays, values and copies of opaque objects, in
    the order of `node`. `random_state` is torch's CPU random state before the call.
    """

    node: Node
    leaves: list[Any]
    point: Point = Point()
    random_state: torch.Tensor | None = None
    synthetic: bool = False

    def call(self, *, fresh: bool = False) -> dict[str, Any]:
        """The normalised call; `fresh` clones everything that a call might change."""
        return unflatten_call(self.node, clone_leaves(self.leaves) if fresh else self.leaves)

    def tensors(self) -> list[torch.Tensor]:
        """The tensor leaves in the signature's order, numpy arrays as tensors."""
        return [as_tensor(x) for x in self.leaves if is_tensor(x) or isinstance(x, np.ndarray)]

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


def as_tensor(leaf: Any) -> torch.Tensor:
    """A tensor leaf as it is, a numpy array as a tensor on the same memory."""
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def clone_leaf(leaf: Any) -> Any:
    """A copy that shares nothing with the leaf. Raises DataError for an object that can't be copied."""
    if is_tensor(leaf):
        # A plain tensor even when recorded in inference mode, so that it can be used in every mode.
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(leaf).copy_(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, torch.Generator):
        made = torch.Generator(leaf.device)
        made.set_state(leaf.get_state())
        return made
    try:
        with torch.inference_mode(False), torch.no_grad():
            return copy.deepcopy(leaf)
    except Exception as error:
        raise DataError(
            f"an argument of class {type(leaf).__name__} cannot be copied for recording: {error}"
        ) from error


@dataclass
class CallShape:
    """All calls of one concrete shape: how many, the samples kept, what was seen around them."""

    node: Node
    calls: int = 0
    seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    outputs: list[Flat] = field(default_factory=list)
    """Structure and leaves of outputs; tensor leaves are empty tensors of the same shape and dtype."""
    mutated: set[str] = field(default_factory=set)
    rebuilt: set[str] = field(default_factory=set)
    """Arguments that hold other things after the call than before (a list that was appended to)."""
    random: bool = False
    """Whether a call drew random numbers of torch, Python or NumPy."""
    batch: int | None = None
    grad_modes: set[str] = field(default_factory=set)


@dataclass
class Recording:
    """The calls of one method of one module, by concrete shape."""

    path: str
    module: torch.nn.Module
    method: str
    form: CallForm
    shapes: dict[Any, CallShape] = field(default_factory=dict)
    problem: str | None = None
    """Why calls of this method can't be recorded (so the method can't be tuned)."""
    place: int | None = None
    """Its place among the recorded methods in the order of their first calls; None if it wasn't called."""

    @property
    def calls(self) -> int:
        return sum(shape.calls for shape in self.shapes.values())


def random_states() -> tuple[Any, ...]:
    """The states of torch's CPU, Python's and NumPy's random numbers, to see whether something drew from them."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    words = numpy_state["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), words["key"].tobytes(), words.get("pos")


def autocast_state() -> tuple[tuple[str, str], ...]:
    """Device types with autocast on, each with its dtype."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    devices = ["cpu", "cuda"]
    return tuple(
        (d, str(torch.get_autocast_dtype(d)).removeprefix("torch.")) for d in devices if torch.is_autocast_enabled(d)
    )


def grad_mode() -> str:
    if torch.is_inference_mode_enabled():
        return "inference"
    return "grad" if torch.is_grad_enabled() else "no_grad"


def _leaf_key(leaf: Any) -> Any:
    if is_tensor(leaf):
        return leaf.dtype, leaf.shape, leaf.device, leaf.layout
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.str, leaf.shape, "numpy"
    from .structure import is_value, type_key, value_text

    return (type_key(type(leaf)), value_text(leaf)) if is_value(leaf) else type_key(type(leaf))


def shared_tensors(leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Groups of tensor leaves, numbered among the tensors, that are one and the same object."""
    groups: dict[int, list[int]] = {}
    for number, leaf in enumerate(x for x in leaves if is_tensor(x) or isinstance(x, np.ndarray)):
        groups.setdefault(id(leaf), []).append(number)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def clone_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Copies that share nothing with the leaves; what was one object among them is one object among the copies."""
    made: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in made:
            made[id(leaf)] = clone_leaf(leaf)
    return [made[id(leaf)] for leaf in leaves]


def shape_key(method: str, node: Node, leaves: Sequence[Any], autocast: Any) -> Any:
    """What calls of one concrete shape have in common."""
    return method, node, (*(_leaf_key(x) for x in leaves), shared_tensors(leaves)), autocast


class Recorder:
    """Records calls of given methods while the target runs.

    Samples are bounded by number (per concrete shape) and by bytes (in all); beyond that calls are only counted.
    Nested calls of another recorded method are recorded too; a method that calls itself is recorded once.
    """

    def __init__(
        self, units: Iterable[tuple[str, torch.nn.Module, str]], *, samples: int = 2, max_bytes: int = 1 << 30
    ):
        self.recordings = [
            Recording(path, module, method, CallForm(original_method(module, method))) for path, module, method in units
        ]
        self.samples = samples
        self.bytes_left = max_bytes
        self.batch: int | None = None
        self._lock = threading.Lock()
        self._places = itertools.count()

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record calls from this thread while entered; other threads run the original. Whatever happens inside, the modules are as before afterwards."""
        entries: list[SwappedMethod] = []
        self._thread = threading.get_ident()
        with guarded() as self._guard:
            try:
                for recording in self.recordings:
                    entries.append(self._install(recording))
                self._guard.allowed = True
                yield self
            finally:
                self._guard.allowed = False
                for entry in reversed(entries):
                    restore(entry)

    def _install(self, recording: Recording) -> SwappedMethod:
        # What lies beneath a dispatch already installed: a second tuning records the original, not the first one.
        original = original_method(recording.module, recording.method)
        inside = False

        def record(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if threading.get_ident() != self._thread or inside or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            inside = True
            try:
                return self._record(recording, original, args, kwargs)
            finally:
                inside = False

        return swap(recording.module, recording.method, record)

    def _record(self, recording: Recording, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if recording.place is None:
            recording.place = next(self._places)
        try:
            call = recording.form.normalize(args, kwargs)
            flat = flatten_call(call)
            key = shape_key(recording.method, flat.node, flat.leaves, autocast_state())
        except Exception as error:
            # The user's own call decides whether this is an error.
            result = original(*args, **kwargs)
            recording.problem = recording.problem or f"a call could not be recorded: {error}"
            return result
        with self._lock:
            shape = recording.shapes.setdefault(key, CallShape(flat.node))
            room = len(shape.samples) < self.samples
        sample = self._sample(recording, flat) if room else None
        versions = [version_of(x) if is_tensor(x) else None for x in flat.leaves]
        drawn = random_states() if sample is not None else None
        start = time.perf_counter()
        self._guard.check()
        result = original(*args, **kwargs)
        seconds = time.perf_counter() - start
        with self._lock:
            shape.calls += 1
            shape.seconds += seconds
            shape.batch = self.batch
            shape.grad_modes.add(grad_mode())
            if sample is not None and len(shape.samples) < self.samples:
                shape.samples.append(sample)
                shape.outputs.append(emptied(flatten(result)))
                for path, leaf, before, version in zip(flat.paths, flat.leaves, sample.leaves, versions, strict=True):
                    if _changed(leaf, before, version):
                        shape.mutated.add(path)
                shape.rebuilt |= _rebuilt(call, flat)
                shape.random = shape.random or random_states() != drawn
        return result

    def _sample(self, recording: Recording, flat: Flat) -> Sample | None:
        size = sum(x.numel() * x.element_size() for x in flat.leaves if is_tensor(x))
        first = not any(shape.samples for shape in recording.shapes.values())
        if size > self.bytes_left and not first:
            return None
        try:
            leaves = clone_leaves(flat.leaves)
        except DataError as error:
            recording.problem = str(error)
            return None
        self.bytes_left -= size
        return Sample(flat.node, leaves, random_state=torch.get_rng_state())


def _changed(leaf: Any, before: Any, version: int | None) -> bool:
    if isinstance(leaf, np.ndarray):
        return bool(leaf.tobytes() != before.tobytes())
    if version is None:
        return False
    # A write that happened to change nothing here may change something at another call. Inference tensors have no
    # version, so only their values tell.
    return bool(leaf._version != version) if version != -1 else not same_values(leaf, before)


def _rebuilt(call: dict[str, Any], before: Flat) -> set[str]:
    """Arguments in whose containers the call replaced, added or removed something."""
    after = flatten_call(call)
    nodes = zip(before.node.keys, before.node.children, after.node.children, strict=True)
    changed = {str(name) for name, old, new in nodes if old != new}
    if not changed:
        pairs = zip(before.paths, before.leaves, after.leaves, strict=True)
        changed = {
            path.partition("[")[0].partition(".")[0]
            for path, old, new in pairs
            if (is_tensor(old) and old is not new)
            or (is_value(old) and describe_leaf(old, "") != describe_leaf(new, ""))
        }
    return {f"the argument {name}" for name in changed}


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal element by element, NaN equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def emptied(flat: Flat) -> Flat:
    """An output without its memory: tensors become meta tensors."""
    leaves = [
        torch.empty_like(x, device="meta") if is_tensor(x) and x.layout is torch.strided else x for x in flat.leaves
    ]
    return Flat(flat.node, leaves, flat.paths)


def samples_of(recordings: Sequence[Recording]) -> list[Sample]:
    return [s for r in recordings for shape in r.shapes.values() for s in shape.samples]
