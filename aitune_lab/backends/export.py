"""From a module to a graph of flat tensors: what all backends that work on an exported file share.

An exported graph computes outputs from inputs and nothing else. So what a module does beside that is refused here, with
the reason, before anything is traced; and what tracing silently fixed is read back and refused too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..capture.probe import autocast_of
from ..capture.recorder import Sample, clone_leaf
from ..capture.signature import resized
from ..capture.state import Snapshot
from ..capture.structure import flatten, is_tensor, is_value, type_key, unflatten_call, value_text
from ..errors import Refused
from ..schema import Dim, OpaqueLeaf, Point, Signature, TensorLeaf, ValueLeaf, dim_symbol, evaluate_dim

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from .base import BuildJob

IMPORTS = ("torch.export._trace", "torch._export.non_strict_utils")
"""Imported by every export, for `Backend.imports`."""


def refuse_impure(job: BuildJob) -> None:
    """Raise Refused, with the reason in a sentence, if the module does what no exported graph of tensors can keep.

    Inputs changed in place are fine (their new values become outputs), and so are outputs that are an input itself.
    """
    signature, facts = job.signature, job.signature.facts
    if job.module.training:
        raise Refused("the module is in training mode, which an exported graph does not keep")
    if facts.random:
        raise Refused("the outputs depend on torch's random numbers, which an exported graph would draw differently")
    if facts.state:
        raise Refused(
            f"a call changes the module's state ({_listed(facts.state)}), which an exported graph does not do"
        )
    if facts.varying_values:
        raise Refused(
            f"{_listed(facts.varying_values)} differs from call to call and is no tensor, so a graph cannot return it"
        )
    if facts.hooked:
        raise Refused(f"the user's hooks on {_listed(facts.hooked)} would not run inside an exported graph")
    for alias in facts.aliases:
        if alias.kind == "view":
            raise Refused(f"{alias.output} is a view of the input {alias.input}; a graph would return a copy")
    for twin in facts.twins:
        if twin.kind == "view":
            raise Refused(f"{twin.output} is a view of {twin.input}; a graph would return a copy")
    for leaf in (*signature.leaves, *signature.output_leaves):
        if isinstance(leaf, OpaqueLeaf):
            raise Refused(
                f"{leaf.path} is an object of class {leaf.opaque_type.rpartition(':')[2]}, not a tensor or a value"
            )
        if isinstance(leaf, TensorLeaf) and leaf.layout != "strided":
            raise Refused(f"{leaf.path} has the layout {leaf.layout}; only strided tensors can be exported")
    if not signature.tensor_leaves:
        raise Refused("the call has no tensor inputs, so its result would be a constant of the graph")
    if not any(isinstance(leaf, TensorLeaf) for leaf in signature.output_leaves) and not facts.mutated:
        raise Refused("the call returns no tensors")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class FlatModule(nn.Module):
    """The method over flat tensors: takes the signature's tensor leaves, returns the output's tensor leaves as a tuple,
    followed by the new values of the mutated input leaves (in the order of `facts.mutated`).

    Values that are no tensors are baked in from the sample. The inputs given are never written.
    """

    def __init__(self, job: BuildJob, sample: Sample) -> None:
        super().__init__()
        self.module = job.module  # registers the parameters
        self.training = job.module.training  # not train(): the submodules keep their own flags
        # A tuple hides the rest from nn.Module and from the exporter's look at attributes.
        self._held = (_Rebuild(job, sample),)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._held[0](self, tensors)


class _Rebuild:
    """Puts a call together from flat tensors and takes its result apart."""

    def __init__(self, job: BuildJob, sample: Sample) -> None:
        self.original, self.form, self.signature = job.original, job.form, job.signature
        self.sample = sample
        self.tensor_at = [i for i, leaf in enumerate(job.signature.leaves) if isinstance(leaf, TensorLeaf)]
        paths = [job.signature.leaves[i].path for i in self.tensor_at]
        self.mutated = [paths.index(path) for path in job.signature.facts.mutated]

    def __call__(self, owner: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = [t.clone() if i in self.mutated else t for i, t in enumerate(tensors)]
        leaves = list(self.sample.leaves)
        for at, tensor in zip(self.tensor_at, given, strict=True):
            leaves[at] = tensor
        args, kwargs = self.form.arguments(unflatten_call(self.sample.node, leaves))
        # Entered in here, because the graph doesn't keep an autocast context around it.
        with autocast_of(self.signature.autocast):
            flat = flatten(self.original(*args, **kwargs))
        if flat.node != self.signature.outputs:
            raise Refused("the structure of the output changed while it was exported")
        outputs = []
        # The graph returns each tensor once, and none of its inputs, parameters and buffers: runtimes drop such
        # outputs or alias them.
        seen = {id(t) for t in (*given, *owner.parameters(), *owner.buffers())}
        for leaf, described in zip(flat.leaves, self.signature.output_leaves, strict=True):
            if is_tensor(leaf) or isinstance(leaf, torch.Tensor):
                if not isinstance(described, TensorLeaf):
                    raise Refused(f"{described.path} became a tensor while it was exported")
                outputs.append(leaf.clone() if id(leaf) in seen else leaf)
                seen.add(id(leaf))
            else:
                _check_value(leaf, described)
        return (*outputs, *(given[i].clone() if id(given[i]) in seen else given[i] for i in self.mutated))


def _check_value(leaf: Any, described: Any) -> None:
    """A value that tracing computed must be the constant that was recorded, not a symbol that stands for many."""
    same = isinstance(described, ValueLeaf) and is_value(leaf) and type_key(type(leaf)) == described.type
    if not same or value_text(leaf) != described.text:
        raise Refused(f"{described.path} is no tensor and follows from the inputs, so a graph cannot return it")


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Inside, the logger of that name and those beneath it say nothing below errors."""

    def errors_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or not record.name.startswith(name)

    # Records pass the handlers of the loggers above, not their filters.
    handlers = [h for n in (name, name.partition(".")[0], "") for h in logging.getLogger(n or None).handlers]
    for handler in handlers:
        handler.addFilter(errors_only)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(errors_only)


@contextmanager
def untouched(module: nn.Module, signature: Signature) -> Iterator[None]:
    """Whatever runs inside, the module's state and torch's random state are as before afterwards."""
    devices = sorted(
        {int(leaf.device.partition(":")[2] or 0) for leaf in signature.tensor_leaves if "cuda" in leaf.device}
    )
    snapshot = Snapshot(module)
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            if snapshot.changes():
                snapshot.restore()


def export_sample(job: BuildJob) -> Sample:
    """The sample to export from: every symbol's size is at least 2, because tracing takes sizes 0 and 1 as fixed.

    A recorded one where there is one, else the first one brought to such sizes. Raises Refused without samples.
    """
    if not job.samples:
        raise Refused("no call was recorded at which the module could be exported")
    names = [s.name for s in job.signature.symbols]
    fitting = [s for s in job.samples if all(s.point.as_dict()[n] >= 2 for n in names)]
    if fitting:
        # Sizes that differ from one another are the least likely to be taken for the same dimension.
        return max(fitting, key=lambda s: len(set(s.point.as_dict().values())))
    sizes = {s.name: max(2, s.opt) for s in job.signature.symbols}
    base = max(job.samples, key=lambda s: s.size_bytes)
    if not all(t.numel() for t in base.tensors()):
        raise Refused("all recorded calls have inputs of size 0, from which nothing can be exported")
    return resized(base, job.signature, Point(tuple(sizes.items())))


def export_program(job: BuildJob, strict: bool = False) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Export `FlatModule` with the signature's symbols dynamic.

    Raises Refused for what an exported graph can't keep, and where tracing fixed a dimension that varies.

    Returns:
        The program and notes (which dimensions stayed dynamic).
    """
    refuse_impure(job)
    sample = export_sample(job)
    # Cloned apart: one tensor given twice would become one input of the graph.
    tensors = tuple(clone_leaf(t) for t in sample.tensors())
    flat = FlatModule(job, sample)
    with untouched(job.module, job.signature), _tracing():
        try:
            program = _export(flat, tensors, _dims(job.signature, auto=False), strict)
        except Refused:
            raise
        except Exception:
            if not job.signature.symbols:
                raise
            # Named dimensions fail also for harmless reasons (a derived relation): look at what tracing would settle on.
            program = _export(flat, tensors, _dims(job.signature, auto=True), strict)
    _read_back(program, job)
    _check_guards(program, job.signature)
    names = [s.name for s in job.signature.symbols]
    return program, ((f"dynamic: {', '.join(names)}",) if names else ())


@contextmanager
def _tracing() -> Iterator[None]:
    with torch.no_grad(), quiet("torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _export(flat: FlatModule, tensors: tuple[torch.Tensor, ...], dims: Any, strict: bool) -> ExportedProgram:
    return torch.export.export(flat, tensors, dynamic_shapes={"tensors": dims}, strict=strict)


def _dims(signature: Signature, *, auto: bool) -> tuple[dict[int, Any], ...]:
    """For each tensor leaf the dynamic axes, as torch.export wants them."""
    named = {
        s.name: torch.export.Dim(f"dim_{s.name}", min=min(s.min, 2) if s.min < 2 else s.min, max=max(s.max, 3))
        for s in signature.symbols
    }

    def of(dim: Dim) -> Any:
        if auto:
            return torch.export.Dim.AUTO
        factor = int(str(dim).rpartition("*")[0] or 1)
        symbol = named[str(dim_symbol(dim))]
        return symbol if factor == 1 else factor * symbol

    return tuple({i: of(d) for i, d in enumerate(leaf.dims) if dim_symbol(d)} for leaf in signature.tensor_leaves)


class _Sized:
    """Stands for an input in the conditions that tracing met: it has a size and nothing else."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def size(self) -> tuple[int, ...]:
        return self.sizes


def _check_guards(program: ExportedProgram, signature: Signature) -> None:
    """Refuse if the graph holds only under a condition on sizes (`if x.shape[0] == 5`) that some size in range breaks.

    Exporting keeps such conditions as code on the program, and the graph's own files know nothing of them. Sizes 0 and
    1 are left to the comparison: tracing takes them as fixed in any case.
    """
    guards: list[str] = getattr(program, "_guards_code", None) or []
    for code in guards:
        for sizes in sizes_in_range(signature):
            inputs = [_Sized(tuple(evaluate_dim(dim, sizes) for dim in leaf.dims)) for leaf in signature.tensor_leaves]
            try:
                holds = eval(code, {"__builtins__": {}}, {"L": {"tensors": inputs}})  # noqa: S307 - torch's own code
            except Exception:  # a condition on something else than sizes
                break
            if not holds:
                at = ", ".join(f"{name}={size}" for name, size in sizes.items())
                readable = code.replace("L['tensors']", "inputs").replace(".size()", ".shape")
                raise Refused(
                    f"the code depends on the size of its inputs: the graph needs {readable}, which breaks at {at}"
                )


def sizes_in_range(signature: Signature) -> Iterator[dict[str, int]]:
    """Each symbol over its range while the others are at their usual size; at most a few thousand in all."""
    usual = {s.name: max(2, s.opt) for s in signature.symbols}
    for symbol in signature.symbols:
        for size in range(max(2, symbol.min), min(symbol.max, symbol.min + 4096) + 1):
            yield {**usual, symbol.name: size}


def _read_back(program: ExportedProgram, job: BuildJob) -> None:
    """Refuse if a dimension of a symbol became a number, or a relation that the points don't keep."""
    user = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in user]
    sizes = [tuple(node.meta["val"].shape) for node in nodes]
    if len(sizes) != len(job.signature.tensor_leaves):
        raise Refused(f"the graph takes {len(sizes)} of the {len(job.signature.tensor_leaves)} input tensors")
    points = {s.point for s in job.samples}
    values: dict[Point, dict[Any, int]] = {point: {} for point in points}
    checks = []
    for leaf, shape in zip(job.signature.tensor_leaves, sizes, strict=True):
        for axis, dim in enumerate(leaf.dims):
            name = dim_symbol(dim)
            if name is None:
                continue
            if isinstance(shape[axis], int):
                raise Refused(
                    f"dimension {name} (axis {axis} of {leaf.path}) varies, but exporting fixed it at {shape[axis]}: "
                    f"the code depends on its number"
                )
            checks.append((leaf.path, axis, dim, shape[axis].node.expr))
    for path, axis, dim, expr in checks:
        for point in points:
            size = evaluate_dim(dim, point.as_dict())
            if expr.is_Symbol:
                found = values[point].setdefault(expr, size)
            else:
                found = expr.subs(values[point])
                if found.free_symbols:
                    continue
            if found != size:
                raise Refused(
                    f"axis {axis} of {path} is {size} at {point.label}, but the exported graph holds only for {found}"
                )
