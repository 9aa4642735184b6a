"""One call traced by torch's older exporter into an ONNX file, for what the exporter of graphs can't convert.

A trace holds what one call did. Whatever Python computed on the way from sizes or values is a constant in it, and nothing
in the file tells. So a trace is used only where that would have been seen: torch names no such place while tracing, the
trace answers other calls as the module does, and every size that varies was recorded at two values at least. Operators that
this exporter is known to write wrongly are refused too.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..capture.recorder import Sample, clone_leaf
from ..errors import Refused
from ..schema import Dim, Signature, TensorLeaf
from .base import BuildJob
from .export import FlatModule, export_sample, quiet, refuse_impure, untouched

OPSET = 18
_MAX_BYTES = 1_500_000_000
"""Weights beyond this don't fit into one file, and this exporter would scatter them over many."""
_CLOSE = 0.01
"""How far a trace may be off on another call, relative to the largest value: a size or value held fast is off by far more."""
_CHECKED = 4
"""Recorded calls that a trace is run on."""


def can_trace() -> bool:
    """Whether this torch still has the older exporter."""
    return importlib.util.find_spec("torch.onnx._internal.torchscript_exporter") is not None


def write_traced(job: BuildJob, path: Path) -> None:
    """Write a call as ONNX, with the names that `write_onnx` gives to inputs and outputs.

    Raises Refused where a trace might not hold for other calls, and whatever tracing and converting raise.
    """
    refuse_impure(job)
    _refuse_unseen_sizes(job)
    size = sum(t.numel() * t.element_size() for t in (*job.module.parameters(), *job.module.buffers()))
    if size > _MAX_BYTES:
        raise Refused(f"a trace is written for weights of {_MAX_BYTES} bytes at most, and these have {size}")
    sample = export_sample(job)
    tensors = tuple(clone_leaf(t) for t in sample.tensors())
    with untouched(job.module, job.signature), torch.no_grad(), quiet("torch"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            traced = torch.jit.trace(FlatModule(job, sample), tensors, check_trace=False)
        _refuse_constants(said)
        _refuse_lost(traced.inlined_graph)
        with warnings.catch_warnings(), _without_log():
            warnings.simplefilter("ignore")
            _refuse_other_answers(traced, job)
            torch.onnx.export(
                traced,
                tensors,
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=[f"input_{i}" for i in range(len(tensors))],
                output_names=[f"output_{i}" for i in range(len(_outputs(job.signature)))],
                dynamic_axes=_dynamic_axes(job.signature),
            )


@contextmanager
def _without_log() -> Iterator[None]:
    """The exporter switches its log on for good, and prints whole graphs when it fails."""
    enabled, log = torch._C._jit_is_onnx_log_enabled(), torch._C._jit_onnx_log
    torch._C._jit_onnx_log = lambda *_: None
    try:
        yield
    finally:
        torch._C._jit_onnx_log = log
        torch._C._jit_set_onnx_log_enabled(enabled)


def _refuse_unseen_sizes(job: BuildJob) -> None:
    for symbol in job.signature.symbols:
        sizes = sorted({sample.point.as_dict()[symbol.name] for sample in job.samples})
        if len(sizes) < 2:
            raise Refused(
                f"a trace holds for the size {symbol.name} it was made at unless a call of another shows more, and "
                f"{symbol.name} was recorded at {', '.join(map(str, sizes)) or 'none'} only"
            )


def _refuse_constants(said: Sequence[warnings.WarningMessage]) -> None:
    """Refuse what torch itself names while tracing: Python took a number out of a tensor, and it became a constant."""
    for warning in said:
        if issubclass(warning.category, torch.jit.TracerWarning):  # type: ignore[attr-defined]
            what = " ".join(str(warning.message).split()).partition(". ")[0][:160]
            raise Refused(
                f"a trace would hold fast what each call decides, at {Path(warning.filename).name}:{warning.lineno}: {what}"
            )


def _refuse_lost(graph: Any) -> None:
    for node in _nodes(graph):
        kind = node.kind()
        if kind == "aten::floor_divide" and not all(map(_from_sizes, node.inputs())):
            raise Refused("a trace would round quotients below 0 upwards (floor_divide)")
        if kind == "aten::log_sigmoid":
            raise Refused("a trace would take the logarithm of a sigmoid that has become 0 (log_sigmoid)")
        if kind == "aten::scaled_dot_product_attention" and not _is_none(list(node.inputs())[3]):
            raise Refused("a trace would give NaN in rows that a mask hides (scaled_dot_product_attention)")
        if kind == "aten::index" and _several(list(node.inputs())[1]):
            raise Refused("a trace would not count indices below 0 from the end (several index tensors at once)")


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_none(value: Any) -> bool:
    return value.node().kind() == "prim::Constant" and value.toIValue() is None


def _several(value: Any) -> bool:
    """Whether a list, as far as it is known, holds more than one tensor."""
    node = value.node()
    return node.kind() != "prim::ListConstruct" or sum(not _is_none(item) for item in node.inputs()) > 1


_OF_SIZES = frozenset(("aten::Int", "aten::add", "aten::floor_divide", "aten::mul", "prim::NumToTensor"))


def _from_sizes(value: Any) -> bool:
    """Whether a number follows from sizes and constants, by what doesn't make it negative."""
    node = value.node()
    if node.kind() in ("aten::size", "prim::Constant"):
        return True
    return node.kind() in _OF_SIZES and all(map(_from_sizes, node.inputs()))


def _refuse_other_answers(traced: Any, job: BuildJob) -> None:
    """Refuse unless the trace answers recorded calls of all kinds as the module does, and one that wasn't recorded."""
    by_point = {sample.point: sample for sample in job.samples}
    rest = [s for s in job.samples if all(s is not first for first in by_point.values())]
    for sample in [*by_point.values(), *rest][:_CHECKED]:
        _check(traced, job, sample)
    try:
        _check(traced, job, _turned(job.samples[0]))
    except _NotTaken as error:
        if len(job.samples) < 2:
            raise Refused(f"one call was recorded, and none could be made to check a trace by: {error}") from error


class _NotTaken(Exception):
    """The module itself fails on a call."""


def _turned(sample: Sample) -> Sample:
    """The same values in another order: what may stand in a call mostly may stand elsewhere in it."""
    leaves = [x.flip(tuple(range(x.dim()))) if isinstance(x, torch.Tensor) else x for x in sample.leaves]
    return replace(sample, leaves=leaves)


def _check(traced: Any, job: BuildJob, sample: Sample) -> None:
    tensors = sample.tensors()
    try:
        want = FlatModule(job, sample)(*[clone_leaf(t) for t in tensors])
    except Exception as error:
        raise _NotTaken(str(error)) from error
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        got = traced(*[clone_leaf(t) for t in tensors])
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        largest = theirs[theirs.isfinite()].abs().max() if theirs.is_floating_point() and theirs.isfinite().any() else 0
        try:
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=_CLOSE * float(largest), equal_nan=True)
        except AssertionError as error:
            first = str(error).strip().splitlines()[0]
            raise Refused(
                f"a trace answers another call otherwise than the module (output {number}: {first})"
            ) from None


def _outputs(signature: Signature) -> list[TensorLeaf]:
    """What `FlatModule` returns: output tensors, then the new values of mutated inputs."""
    by_path = {leaf.path: leaf for leaf in signature.tensor_leaves}
    mutated = [by_path[path] for path in signature.facts.mutated]
    return [*(leaf for leaf in signature.output_leaves if isinstance(leaf, TensorLeaf)), *mutated]


def _dynamic_axes(signature: Signature) -> dict[str, dict[int, str]]:
    leaves = {f"input_{i}": leaf for i, leaf in enumerate(signature.tensor_leaves)}
    leaves |= {f"output_{i}": leaf for i, leaf in enumerate(_outputs(signature))}
    axes = {
        name: {axis: _label(name, axis, dim) for axis, dim in enumerate(leaf.dims) if not isinstance(dim, int)}
        for name, leaf in leaves.items()
    }
    return {name: found for name, found in axes.items() if found}


def _label(name: str, axis: int, dim: Dim) -> str:
    """Equal labels say that sizes are equal: each symbol has one, each multiple of it another."""
    return f"{name}_{axis}" if dim == "?" else str(dim).replace("*", "_times_")
