"""Inputs of a graph by whose values it picks rows: what torch looks at in each call, and other runtimes don't.

Torch raises IndexError for a token that the table doesn't hold. A runtime may count from the end instead, give what lies
beside the table, write there, or end the process. So the ranges are found in the graph, kept with the artifact, and
checked at each call. Indices that the graph itself computes are not looked at.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_PICKING = {  # operator: (argument that is picked from, argument that is the axis, argument that holds the indices)
    "embedding": (0, None, 1),
    "embedding_bag": (0, None, 1),
    "_embedding_bag": (0, None, 1),
    "_embedding_bag_forward_only": (0, None, 1),
    "index_select": (0, 1, 2),
    "index_add": (0, 1, 2),
    "index_copy": (0, 1, 2),
    "index_fill": (0, 1, 2),
    "gather": (0, 1, 2),
    "scatter": (0, 1, 2),
    "scatter_add": (0, 1, 2),
    "scatter_reduce": (0, 1, 2),
}
_FROM_THE_END = {"index", "index_put", "_unsafe_index", "_unsafe_index_put"}
_PASSING = {
    "_to_copy", "alias", "chunk", "clone", "contiguous", "detach", "expand", "expand_as", "flatten", "getitem", "int",
    "lift_fresh", "lift_fresh_copy", "long", "narrow", "permute", "repeat", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "to", "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
"""Operators whose results hold no numbers that their first argument doesn't hold."""
_NARROWING = {"chunk", "getitem", "narrow", "select", "slice", "split", "split_with_sizes", "unbind"}
"""Those whose results may leave some out."""


@dataclass(frozen=True)
class IndexRange:
    """An input whose values lie in [0, size), or [-size, size) where they may count from the end.

    Attributes:
        input: number of the tensor.
        size: a number, or (number of a tensor, axis) whose size it is.
        from_end: whether negative ones count from the end.
    """

    input: int
    size: int | tuple[int, int]
    from_end: bool

    def problem(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """What lies outside, in words; None if nothing does."""
        tensor = tensors[self.input]
        if not tensor.numel():
            return None
        size = self.size if isinstance(self.size, int) else tensors[self.size[0]].shape[self.size[1]]
        low, high = (int(x) for x in torch.aminmax(tensor))
        least = -size if self.from_end else 0
        if least <= low and high < size:
            return None
        return f"input {self.input} holds {low} to {high}, which are indices and must lie in {least} to {size - 1}"


def index_ranges(program: ExportedProgram, samples: Sequence[Sequence[torch.Tensor]]) -> tuple[IndexRange, ...]:
    """The ranges that inputs must keep, without those that a sample breaks (so that only a part of it is an index).

    Args:
        program: of flat tensors, by `export_program`.
        samples: recorded inputs, tensors in their order.
    """
    user = {name: i for i, name in enumerate(program.graph_signature.user_inputs)}
    inputs = {n: user[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in user}
    found: dict[IndexRange, None] = {}
    for node in program.graph.nodes:
        for index, size, from_end in _picks(node):
            source = _source(index)
            given = source.meta.get("val") if source in inputs else None
            if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
                continue
            known = size if isinstance(size, int) else _axis_of(size, inputs)
            if known is not None:
                found[IndexRange(inputs[source], known, from_end)] = None
    return tuple(r for r in found if not any(r.problem(tensors) for tensors in samples))


def index_ranges_of_torch(graph: torch.fx.Graph) -> tuple[IndexRange, ...]:
    """The same of a graph in torch's own functions, as Dynamo makes it; numbers are those of its placeholders.

    Only inputs whose every value is an index are found, so that an error is raised only where torch raises one.
    """
    inputs = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found: dict[IndexRange, None] = {}
    for node in graph.nodes:
        for index, size, from_end in _picks_of_torch(node):
            source = _source(index, _PASSING - _NARROWING)
            given = _value(source) if source in inputs else None
            if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
                continue
            known = size if isinstance(size, int) else _axis_of(size, inputs)
            if known is not None and not given.is_cuda:
                found[IndexRange(inputs[source], known, from_end)] = None
    return tuple(found)


def check_indices(ranges: Sequence[IndexRange], tensors: Sequence[torch.Tensor]) -> None:
    """Raise IndexError if an input holds an index that its table doesn't have."""
    for r in ranges:
        problem = r.problem(tensors)
        if problem is not None:
            raise IndexError(problem)


def checking(call: Callable[..., Any], ranges: Sequence[IndexRange]) -> Callable[..., Any]:
    """The call of a compiled graph behind a look at its indices.

    Compiled code finds one that lies outside too, but inside of its threads, where an error ends the process.
    """

    def checked(*inputs: Any) -> Any:
        check_indices(ranges, inputs)
        return call(*inputs)

    return checked


def ranges_as_text(ranges: Sequence[IndexRange]) -> str:
    return json.dumps([[r.input, r.size, r.from_end] for r in ranges])


def ranges_from_text(text: str) -> tuple[IndexRange, ...]:
    """What `ranges_as_text` wrote; nothing for an empty text."""
    return tuple(
        IndexRange(number, size if isinstance(size, int) else (size[0], size[1]), from_end)
        for number, size, from_end in json.loads(text or "[]")
    )


def _picks(node: Any) -> Iterator[tuple[Any, Any, bool]]:
    """(node of the indices, size of what is picked from, whether negative ones count from the end) of a node."""
    if node.op != "call_function":
        return
    name, args = operator_name(node), node.args
    if name in _PICKING:
        source, axis, index = _PICKING[name]
        if len(args) > index:
            yield from _pick(args[index], args[source], 0 if axis is None else args[axis], from_end=False)
    elif name in _FROM_THE_END:
        for axis, index in enumerate(args[1]):
            yield from _pick(index, args[0], axis, from_end=True)
    elif name == "one_hot" and len(args) > 1 and isinstance(args[1], int) and args[1] > 0:
        yield args[0], args[1], False


def _picks_of_torch(node: Any) -> Iterator[tuple[Any, Any, bool]]:
    if node.op not in ("call_function", "call_method"):
        return
    name, args = operator_name(node), node.args
    if node.target is torch.nn.functional.embedding and len(args) > 1:
        yield from _pick(args[0], args[1], 0, from_end=False)
    elif name in ("index_select", "gather") and len(args) > 2:
        yield from _pick(args[2], args[0], args[1], from_end=False)
    elif node.target is operator.getitem and hasattr(args[1], "op"):
        yield from _pick(args[1], args[0], 0, from_end=True)


def _pick(index: Any, source: Any, axis: Any, *, from_end: bool) -> Iterator[tuple[Any, Any, bool]]:
    value = _value(source)
    if hasattr(index, "op") and isinstance(value, torch.Tensor) and isinstance(axis, int) and value.dim():
        yield index, value.shape[axis], from_end


def _value(node: Any) -> Any:
    """What tracing knows of a node's result."""
    meta = getattr(node, "meta", {})
    return meta.get("val", meta.get("example_value"))


def operator_name(node: Any) -> str:
    """The operator of a node without namespace, overload and the mark of writing in place."""
    if isinstance(node.target, str):
        return node.target
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    name = str(schema.name).rpartition("::")[2] if schema is not None else getattr(node.target, "__name__", "")
    return name if name.startswith("__") else name.removesuffix("_")


def _source(node: Any, passing: AbstractSet[str] = _PASSING) -> Any:
    """The node whose numbers a node holds, seen through what only arranges them."""
    calls = ("call_function", "call_method")
    while node.op in calls and operator_name(node) in passing and hasattr(node.args[0], "op"):
        node = node.args[0]
    return node


def _axis_of(size: Any, inputs: dict[Any, int]) -> tuple[int, int] | None:
    """The input and its axis that have this size at every call, or None."""
    for node, number in inputs.items():
        value = _value(node)
        if not isinstance(value, torch.Tensor):
            continue
        for axis, own in enumerate(value.shape):
            if not isinstance(own, int) and own.node.expr == size.node.expr:
                return number, axis
    return None
