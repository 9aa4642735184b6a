"""What the trials of one (module, signature) share: the recorded calls, and what eager gives for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..backends.base import BuildJob
from ..capture.probe import autocast_of, seeded
from ..capture.recorder import Recording, Sample, clone_leaves
from ..capture.signature import RecordedSignature
from ..capture.state import Snapshot
from ..capture.structure import Flat, flatten, flatten_call, is_tensor, unflatten_call
from ..capture.swap import original_method
from ..isolation import BuildSteps, steps_here
from ..measure.benchmark import Timing, measure
from ..measure.blocks import MeasureLimits
from ..measure.reference import reference_dtype, reference_outputs
from ..schema import Node, OpaqueLeaf, Point, Tolerance


class Cancelled(BaseException):
    """The user cancelled. Not an Exception: a backend that catches everything must not swallow it."""


@dataclass
class Expected:
    """What eager gives for one sample, and a higher-precision run if there is one."""

    sample: Sample
    outputs: Flat
    reference: Flat | None
    yardstick: str
    why_no_reference: str = ""


@dataclass
class Bench:
    """Everything that the trials of one (module, signature) share: the recorded calls and what eager gives for them."""

    recording: Recording
    recorded: RecordedSignature
    tolerance: Tolerance
    weights: dict[Point, float]
    folder: Path
    threads: int
    limits: MeasureLimits
    check_cancelled: Callable[[], None] = lambda: None
    meter: Callable[..., Timing] = measure
    build: Callable[[BuildJob], BuildSteps] = steps_here
    """Builds a candidate, in a child process, whose progress it gives, or in this one."""
    expected: dict[Point, list[Expected]] = field(default_factory=dict)

    def is_cancelled(self) -> bool:
        """False; raises Cancelled if the user cancelled."""
        self.check_cancelled()
        return False

    @property
    def device(self) -> torch.device:
        tensors = self.recorded.all_samples()[0].tensors()
        return tensors[0].device if tensors else torch.device("cpu")

    def expected_at(self, point: Point) -> list[Expected]:
        """Eager's outputs for every sample of a point, run once and kept."""
        if point not in self.expected:
            self.expected[point] = [self._expect(sample) for sample in self.recorded.samples[point]]
        return self.expected[point]

    def _expect(self, sample: Sample) -> Expected:
        module, method = self.recording.module, self.recording.method
        outputs = self.run(original_method(module, method), sample)
        facts = self.recorded.signature.facts
        higher = reference_dtype(module)
        opaque = any(isinstance(leaf, OpaqueLeaf) for leaf in self.recorded.signature.leaves)
        if higher is None or facts.random or facts.state or facts.mutated or opaque:
            return Expected(sample, outputs, None, "eager", "its calls have side effects")
        args, kwargs = self.recording.form.arguments(sample.call(fresh=True))
        with torch.no_grad():
            reference = reference_outputs(module, args, kwargs, higher, method=method)
        if reference.outputs is None:
            return Expected(sample, outputs, None, "eager", reference.reason)
        return Expected(sample, outputs, flatten(reference.outputs), reference.yardstick)

    def run(self, function: Callable[..., Any], sample: Sample) -> Flat:
        """One call on fresh copies with the sample's random state: outputs, then inputs that the call may change.

        The module's state is put back.
        """
        signature = self.recorded.signature
        leaves = clone_leaves(sample.leaves)
        args, kwargs = self.recording.form.arguments(unflatten_call(sample.node, leaves))
        snapshot = Snapshot(self.recording.module) if signature.facts.state else None
        try:
            seed = sample.random_state if sample.random_state is not None else 0
            with seeded(seed, self.device), torch.no_grad(), autocast_of(signature.autocast):
                output = function(*args, **kwargs)
        finally:
            if snapshot is not None:
                snapshot.restore()
        flat = flatten(output)
        _check_aliases(signature, flat, leaves)
        # The caller goes on using what it passed: outputs that alias inputs are copied before anything else runs.
        flat.leaves = [x.detach().clone() if is_tensor(x) else x for x in flat.leaves]
        for leaf, value in zip(signature.leaves, leaves, strict=True):
            changed = leaf.path in signature.facts.mutated
            after = {leaf.path: value} if changed else _opaque_tensors(leaf, value)
            if after:
                more = flatten_call(after)
                flat.node = Node("tuple", "builtins:tuple", (), (flat.node, more.node))
                flat.leaves += more.leaves
                flat.paths += [f"{p} after the call" for p in more.paths]
        return flat


def _opaque_tensors(leaf: Any, value: Any) -> dict[str, Any]:
    """The tensors in an object's attributes: a cache that a call fills must hold the same afterwards."""
    if not isinstance(leaf, OpaqueLeaf) or not hasattr(value, "__dict__"):
        return {}
    flat = flatten(dict(vars(value)), leaf.path)
    return {p: x for p, x in zip(flat.paths, flat.leaves, strict=True) if is_tensor(x)}


class LostAlias(Exception):
    """An output no longer shares memory with an input or another output, as it does in eager."""


def _check_aliases(signature: Any, flat: Flat, leaves: list[Any]) -> None:
    inputs = dict(zip([leaf.path for leaf in signature.leaves], leaves, strict=True))
    outputs = dict(zip(flat.paths, flat.leaves, strict=True))
    pairs = [(alias, inputs) for alias in signature.facts.aliases] + [(twin, outputs) for twin in signature.facts.twins]
    for alias, sources in pairs:
        output: Any = outputs.get(alias.output)
        source: Any = sources.get(alias.input)
        if not is_tensor(output) or not is_tensor(source):
            continue
        shared = output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        if not shared:
            raise LostAlias(f"{alias.output} shares memory with {alias.input} in eager, but is a copy here")
