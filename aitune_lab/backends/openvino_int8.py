"""Weights of an OpenVINO model in 8 bits: a quarter of its file, and of what matrix products read at each call.

A weight becomes 8-bit integers with a scale for each output channel, behind a conversion back to float32. OpenVINO's CPU
plugin makes that conversion a part of matrix products, which then read the integers themselves; the weights of convolutions
it unpacks when it compiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import Refused

TYPICAL_ERROR = {"int8wo": 5e-3, "int8dyn": 1e-2}
"""Relative L2 errors of a few products without outliers, by scheme."""
GROUP_SIZES = {"int8wo": 0, "int8dyn": 32}
"""Neighbouring inputs of a product that share a scale taken at each call, by scheme; 0 leaves them in float32."""
_LARGE = 4096
"""Elements from which on a weight may be worth it: smaller ones stay in a core's nearest cache as they are."""
_DOT_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni"})
"""Processors with either quantise inputs; on others OpenVINO quietly leaves them in float32."""
_OUTPUT_CHANNELS = {"Convolution": (0,), "GroupConvolution": (0, 1), "ConvolutionBackpropData": (1,)}
"""Axes of the weights that make up the output channels, by convolution."""


def schemes(flags: Collection[str]) -> tuple[str, ...]:
    """The schemes that a processor with these instruction sets can follow."""
    return tuple(name for name, size in GROUP_SIZES.items() if not size or not _DOT_PRODUCTS.isdisjoint(flags))


def has_large_weights(module: nn.Module) -> bool:
    """Whether it holds weights for which 8 bits may be worth it; tables that rows are picked from are none."""
    others = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase)
    return any(
        weight.dtype == torch.float32 and weight.ndim >= 2 and weight.numel() >= _LARGE
        for layer in module.modules()
        if not isinstance(layer, others)
        for weight in layer.parameters(recurse=False)
    )


def quantize_weights(model: Any) -> int:
    """Put the constant float32 weights of products and convolutions into 8 bits, in place; gives how many are.

    A weight that something else reads too (a table of embeddings that is also the head) stays there as it is. So do weights
    with NaN or infinity, and those that 8 bits and scales don't make smaller.

    Raises Refused if there are none.
    """
    from openvino.passes import ConstantFolding, Manager

    folding = Manager()
    folding.register_pass(ConstantFolding())  # transposed weights, where the model came by way of ONNX
    folding.run_passes(model)
    count = 0
    for constant in [node for node in model.get_ops() if node.get_type_name() == "Constant"]:
        for channels, readers in _readers(constant).items():
            lowered = _lowered(constant.get_data(), channels)
            if lowered is not None:
                count += 1
                for reader in readers:
                    reader.replace_source_output(lowered.output(0))
    if not count:
        raise Refused("no product or convolution with constant float32 weights was found that 8 bits make smaller")
    return count


def unpacked_bytes(model: Any) -> int:
    """By how much a model grows when its 8-bit weights of convolutions are unpacked, in bytes."""
    weights = [node.input_value(1).get_node() for node in model.get_ops() if node.get_type_name() in _OUTPUT_CHANNELS]
    integers = [_integers(weight) for weight in {weight.get_friendly_name(): weight for weight in weights}.values()]
    return sum(3 * each.get_byte_size() for each in integers if each is not None)


def _integers(weight: Any) -> Any:
    """The 8-bit constant that a weight is unpacked from, None if it isn't."""
    for kind in ("Multiply", "Convert"):
        if weight.get_type_name() != kind:
            return None
        weight = weight.input_value(0).get_node()
    constant = weight.get_type_name() == "Constant" and weight.get_element_type().get_type_name() == "i8"
    return weight if constant else None


def _readers(constant: Any) -> dict[tuple[int, ...], list[Any]]:
    """The inputs that take a constant as their weight, by its axes that are output channels."""
    found: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    if constant.get_element_type().get_type_name() == "f32":
        for reader in constant.output(0).get_target_inputs():
            channels = _output_channels(reader.get_node(), len(constant.get_output_shape(0)))
            if channels is not None and reader.get_index() == 1:
                found[channels].append(reader)
    return found


def _output_channels(node: Any, rank: int) -> tuple[int, ...] | None:
    kind: str = node.get_type_name()
    if kind != "MatMul":
        return _OUTPUT_CHANNELS.get(kind)
    if rank != 2:
        return None
    return (0,) if node.get_attributes()["transpose_b"] else (1,)


def _lowered(weights: Any, channels: tuple[int, ...]) -> Any:
    """Nodes that give the weights back from 8 bits; None where that takes no less, or the weights aren't finite."""
    from openvino import opset13 as ops

    others = tuple(axis for axis in range(weights.ndim) if axis not in channels)
    largest = np.abs(weights).max(axis=others, keepdims=True, initial=0)
    if weights.size + largest.nbytes >= weights.nbytes or not np.isfinite(largest).all():
        return None
    scales = largest / np.float32(127)
    scales[scales == 0] = 1
    integers = np.clip(np.rint(weights / scales), -127, 127).astype(np.int8)
    return ops.multiply(ops.convert(ops.constant(integers), "f32"), ops.constant(scales))
