"""An exported program as an ONNX file: what all backends that read such files share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .export import IMPORTS as EXPORT_IMPORTS, quiet

if TYPE_CHECKING:
    from torch.export import ExportedProgram

IMPORTS = (
    *EXPORT_IMPORTS,
    "torch.onnx._internal.exporter._core",
    "onnxscript.optimizer",
    "onnxscript.function_libs.torch_lib.ops",
    "onnxscript.rewriter.onnx_fusions",
)
"""Imported by every export to ONNX, for `Backend.imports`."""
_SINGLE_FILE_BYTES = 1_500_000_000
"""Weights beyond this stand in a file of their own: protobuf ends at 2 GB."""


def write_onnx(
    program: ExportedProgram,
    path: Path,
    *,
    opset: int | None = None,
    fold_integers: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write an exported program as ONNX, each weight once.

    Inputs are called `input_<number of the tensor leaf>`, outputs `output_<number>`; the exporter drops inputs that nothing
    reads.

    Args:
        program: of flat tensors, by `export_program`.
        path: the file; weights beyond 1.5 GB stand beside it.
        opset: ONNX opset to export to; None takes the exporter's default.
        fold_integers: compute what follows from integer constants alone (axes, shapes), as some parsers want to see
            such numbers in the file. Of floating-point constants only what is cast or laid out anew is computed: a
            convolution's absent bias, written as zeros that are cast and expanded, keeps builders from fusing it.
        metadata: texts that the file keeps, by name.
    """
    import warnings

    inputs = [f"input_{i}" for i in range(len(program.graph_signature.user_inputs))]
    outputs = [f"output_{i}" for i in range(len(program.graph_signature.user_outputs))]
    with torch.no_grad(), quiet("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The exporter's optimiser drops small constants (`+ 1e-9`); the runtime fuses on its own.
        made = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=opset,
            input_names=inputs,
            output_names=outputs,
            custom_translation_table=_translations(),
        )
        assert made is not None
        _share_weights(made.model.graph)
        if fold_integers:
            _fold_integers(made.model)
        made.model.metadata_props.update(metadata or {})
        size = sum(_initializer_bytes(v) for v in made.model.graph.initializers.values())
        made.save(str(path), external_data=size > _SINGLE_FILE_BYTES)


def _translations() -> dict[Any, Any]:
    """Operators that the exporter would write wrongly."""
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops import core

    def div_mode(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
        """Integers are divided as such: the exporter's own code divides in float32, which does not hold large ones."""
        if rounding_mode == "trunc" and self.dtype.is_integer():
            return op.Div(self, other)
        return core.aten_div_mode(self, other, rounding_mode)

    return {torch.ops.aten.div.Tensor_mode: div_mode}


_EXACT = frozenset({"Cast", "Constant", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that give the same floating-point numbers wherever they are computed."""


def _fold_integers(model: Any) -> None:
    import onnxscript.optimizer

    def of_integers(node: Any) -> bool | None:
        """None leaves it to the default rules; False keeps the node."""
        values = [*node.inputs, *node.outputs]
        floating = any(v is not None and v.dtype is not None and v.dtype.is_floating_point() for v in values)
        return False if floating and node.op_type not in _EXACT else None

    onnxscript.optimizer.fold_constants(model, should_fold=of_integers)
    onnxscript.optimizer.remove_unused_nodes(model)


def _initializer_bytes(value: Any) -> int:
    return int(value.const_value.nbytes) if value.const_value is not None else 0


def _share_weights(graph: Any) -> None:
    """Let initializers that hold the same tensor (tied or shared weights) be one."""
    first: dict[Any, Any] = {}
    for name, value in list(graph.initializers.items()):
        tensor = getattr(value.const_value, "raw", None)
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        kept = first.setdefault(key, value)
        if kept is not value and not value.is_graph_output():
            value.replace_all_uses_with(kept)
            del graph.initializers[name]
