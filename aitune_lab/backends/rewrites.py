"""Operators that readers of exported programs get wrong, put in terms of others that they get right."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten


def rewrite(program: ExportedProgram, *, floors: bool = True) -> None:
    """Rewrite a program in place; what it computes stays the same.

    - Attention under a mask of floats gives 0 in rows that are hidden altogether; readers give NaN.
    - The logarithm of a sigmoid stays finite; readers take the logarithm of what has become 0.
    - Integers divided and rounded down: readers divide in float32, or round towards 0.

    Args:
        program: of flat tensors, by `export_program`.
        floors: whether the reader has an integer division that rounds down.
    """
    for node in list(program.graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            _hide_rows(program, node)
        elif node.target is aten.log_sigmoid.default:
            negative = _after(node.prev, aten.neg.default, node.args[0])
            node.target, node.args = aten.neg.default, (_after(negative, aten.softplus.default, negative),)
        elif _divides_integers(node):
            node.target, node.kwargs = aten.floor_divide.default, {}
            if not floors:
                _round_down(node)
    program.graph_module.recompile()


def _divides_integers(node: Any) -> bool:
    """Whether it divides integers and rounds down."""
    if node.target not in (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode):
        return False
    floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    return floor and node.meta["val"].dtype in (torch.int32, torch.int64)


def _hide_rows(program: ExportedProgram, attention: Any) -> None:
    mask = attention.args[3] if len(attention.args) > 3 else attention.kwargs.get("attn_mask")
    if mask is None or not mask.meta["val"].is_floating_point():
        return
    users = list(attention.users)
    # Not by the largest: a reader may not start that from -inf.
    each = _after(attention, aten.eq.Scalar, mask, -math.inf)
    hidden = _after(each, aten.all.dim, each, -1, True)
    filled = _after(hidden, aten.masked_fill.Scalar, attention, hidden, 0.0)
    for user in users:
        user.replace_input_with(attention, filled)
    program.graph_signature.replace_all_uses(attention.name, filled.name)


def _round_down(node: Any) -> None:
    """`a // b` as `(a - a % b) / b`, which leaves nothing to round."""
    a, b = node.args
    tensor = isinstance(b, torch.fx.Node)
    rest = _after(node.prev, aten.remainder.Tensor if tensor else aten.remainder.Scalar, a, b)
    node.args = (_after(rest, aten.sub.Tensor, a, rest), b)
    node.target, node.kwargs = aten.div.Tensor_mode if tensor else aten.div.Scalar_mode, {"rounding_mode": "trunc"}


def _after(node: Any, operator: Any, *args: Any) -> Any:
    """A new node behind another, with the tensor that it would give."""
    graph = node.graph
    with graph.inserting_after(node):
        made = graph.call_function(operator, args)
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
    with values[0].fake_mode, torch.no_grad():
        made.meta["val"] = operator(*values)
    return made
