"""Each backend from a build in a child process to a file that another process loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from saved import loaded_in_a_fresh_process

EIGHT_BITS = 0.05
"""Relative error of two layers in 8 bits."""
CANDIDATES = {
    "onnxruntime": 1e-4,
    "onnxruntime[quantization=int8dyn]": EIGHT_BITS,
    "onnxruntime[quantization=int8wo]": EIGHT_BITS,
    "openvino": 1e-4,
    "openvino[precision=bf16]": EIGHT_BITS,
    "openvino[quantization=int8wo]": EIGHT_BITS,
    "inductor": 1e-4,
    "inductor[freezing]": 1e-4,
    "inductor_aot": 1e-4,
    "inductor_aot[freezing]": 1e-4,
    "torchao": EIGHT_BITS,
    "torchao[scheme=int8dyn]": EIGHT_BITS,
    "torchao[compile, scheme=int8dyn]": EIGHT_BITS,
}
QUICK = {"onnxruntime"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "label",
    [pytest.param(label, marks=() if label in QUICK else pytest.mark.full) for label in CANDIDATES],
)
def test_built_apart_then_called_saved_and_loaded(label: str, tmp_path: Path) -> None:
    said = loaded_in_a_fresh_process(label, tmp_path, isolation="all", max_relative_error=CANDIDATES[label])
    assert label in said
