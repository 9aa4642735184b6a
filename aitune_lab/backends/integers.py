"""Integers in a runtime that holds those of 64 bits in 32: what of a graph that leaves right, and for which inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Refused
from .indices import operator_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_NARROW = {torch.int8, torch.int16, torch.uint8}
_ARITHMETIC = {"add", "sub", "rsub", "mul", "neg", "pow", "bitwise_left_shift", "__lshift__"}
_GROWING = {"mul", "pow", "square", "bitwise_left_shift", "__lshift__", "prod", "cumprod"}
_ADDING = {"add", "sub", "rsub"}
_SUMMING = {"sum", "cumsum"}
_WIDE = (torch.int32, torch.int64)
_BITS = 31


@dataclass(frozen=True)
class Growth:
    """An input of integers, and by how much they can grow inside: doubled `additions` times, summed up `sums` times."""

    input: int
    additions: int = 0
    sums: int = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether 32 bits hold the integers of the input, and all that is made of them."""
        if not tensor.numel():
            return True
        low, high = (int(x) for x in torch.aminmax(tensor))
        largest = max(-1 - low, high) << self.additions
        factor: int = tensor.numel() ** self.sums
        return largest * factor < 1 << _BITS


def growths_as_text(growths: Sequence[Growth]) -> str:
    return json.dumps([[g.input, g.additions, g.sums] for g in growths])


def growths_from_text(text: str) -> tuple[Growth, ...]:
    """What `growths_as_text` wrote."""
    return tuple(Growth(*numbers) for numbers in json.loads(text))


def growths(program: ExportedProgram) -> tuple[Growth, ...]:
    """How integers that a caller gives grow, for each input that must be looked at.

    Integers that follow from sizes, comparisons or positions are small. Those that a caller gives are checked at each
    call, and only what makes them grow fast is refused.

    Raises:
        Refused: for arithmetic that 32 bits may not hold whatever is given (a product, a power, a shift, a constant), or
            that wraps around in 8 or 16 bits.
    """
    _refuse_constants(program)
    user = {name: i for i, name in enumerate(program.graph_signature.user_inputs)}
    given: dict[Any, set[int]] = {}
    found: dict[int, Growth] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if node.op == "placeholder":
            if node.name in user and value.dtype in _WIDE:
                given[node] = {user[node.name]}
                if value.dtype == torch.int64:
                    found[user[node.name]] = Growth(user[node.name])
            continue
        name = operator_name(node)
        if value.dtype in _NARROW and name in _ARITHMETIC:
            raise Refused(f"it computes {name} in {str(value.dtype)[6:]}, which wraps around in torch only")
        sources = set().union(*(given.get(n, ()) for n in node.all_input_nodes))
        if value.dtype not in _WIDE or not sources:
            continue
        given[node] = sources
        if value.dtype == torch.int32:  # wraps around in torch too
            continue
        if name in _GROWING:
            raise Refused(f"it computes {name} of given integers in int64, which the runtime holds in 32 bits")
        for number in sources:
            before = found.get(number, Growth(number))
            found[number] = Growth(number, before.additions + (name in _ADDING), before.sums + (name in _SUMMING))
    return tuple(found.values())


def _refuse_constants(program: ExportedProgram) -> None:
    """Raise Refused for a number or a weight that 32 bits don't hold."""
    tensors = {**program.state_dict, **program.constants}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64 and not Growth(0).fits(tensor):
            raise Refused(f"{name} holds integers beyond 32 bits, which the runtime does not hold")
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64 or node.op != "call_function":
            continue
        if operator_name(node) in _ARITHMETIC:
            numbers = [x for x in node.args if type(x) is int and not -(1 << _BITS) <= x < 1 << _BITS]
            if numbers:
                raise Refused(f"it computes {operator_name(node)} with {numbers[0]}, which 32 bits do not hold")
