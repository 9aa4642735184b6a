"""Matrix products of an ONNX file in 8 bits, by ONNX Runtime's own quantisers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..environment import cpu_flags
from ..errors import Refused

TYPICAL_ERROR = {"int8wo": 5e-3, "int8dyn": 1e-2}
"""Relative L2 errors of a few products without outliers, by scheme."""
_BLOCK = 32
"""Weights of one input dimension that share a scale in `int8wo`."""
_ADDS_IN_32_BITS = {"avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp"}
"""On other processors pairs of products are added up in 16 bits, which full 8-bit ranges overflow."""


def quantize_file(path: Path, scheme: str) -> int:
    """Rewrite an ONNX file so that its products with constant weights run in 8 bits; gives how many do.

    `int8dyn` scales the inputs at each call, one scale for all of a tensor; `int8wo` keeps the weights in 8 bits, in blocks
    with a scale each, and computes in float32.

    Raises Refused if there are none, or the weights don't fit into one file.
    """
    if [f for f in path.parent.iterdir() if f != path]:
        raise Refused("the weights don't fit into one ONNX file, which its quantisers need")
    with _undisturbed():
        model = _prepared(path)
        if scheme == "int8dyn":
            model, kind = _dynamic(model, path), "MatMulInteger"
        else:
            model, kind = _weights_only(model), "MatMulNBits"
        count: int = sum(node.op_type == kind for node in model.graph.node)
        if not count:
            raise Refused("no product with constant weights was found that can run in 8 bits")
        path.write_bytes(model.SerializeToString())
    return count


def _prepared(path: Path) -> Any:
    """The model with its constants computed (transposed weights) and linear layers as plain products."""
    import onnx
    import onnxruntime as ort

    folded = path.with_name("folded.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = onnx.load(folded)
    finally:
        folded.unlink(missing_ok=True)
    _as_products(model)
    # What the quantiser asks for has just been done; else it warns on the root logger.
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    return model


def _as_products(model: Any) -> None:
    """Write `Gemm(x, w, b)` with constant weights as `MatMul` and `Add`: only products are quantised by weight."""
    from onnx import helper, numpy_helper

    constants = {each.name: each for each in model.graph.initializer}
    nodes, turned = [], {}
    for node in model.graph.node:
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        plain = settings.get("alpha", 1.0) == settings.get("beta", 1.0) == 1.0 and not settings.get("transA", 0)
        if node.op_type != "Gemm" or not plain or node.input[1] not in constants:
            nodes.append(node)
            continue
        weight = node.input[1]
        if settings.get("transB", 0):
            if weight not in turned:
                turned[weight] = f"{weight}_turned"
                values = numpy_helper.to_array(constants[weight]).T.copy()
                model.graph.initializer.append(numpy_helper.from_array(values, turned[weight]))
            weight = turned[weight]
        bias = [name for name in node.input[2:] if name]
        product = f"{node.output[0]}_product" if bias else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], f"{node.name}_product"))
        if bias:
            nodes.append(helper.make_node("Add", [product, *bias], [node.output[0]], f"{node.name}_bias"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input} | {output.name for output in model.graph.output}
    kept = [each for each in model.graph.initializer if each.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _dynamic(model: Any, path: Path) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    flags = cpu_flags()
    made = path.with_name("int8.onnx")
    try:
        quantize_dynamic(
            model,
            made,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=_ADDS_IN_32_BITS.isdisjoint(flags),
        )
        return onnx.load(made)
    finally:
        made.unlink(missing_ok=True)


def _weights_only(model: Any) -> Any:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    # Level 1: products are computed in float32.
    quantizer = MatMulNBitsQuantizer(model, bits=8, block_size=_BLOCK, is_symmetric=False, accuracy_level=1)
    quantizer.process()
    return quantizer.model.model


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The quantisers configure the root logger and report each node: inside this they say nothing and change nothing."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers
