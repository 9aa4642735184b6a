"""Modules with habits people's modules have, tuned as a user would: right and dispatched, or on eager with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from case_run import EXPORT_NAMES, NAMES, expected_outcomes, run_case

BACKENDS = ("eager", "onnxruntime", "onnxruntime_int8", "openvino", "inductor", "inductor_aot", "torchao")
QUICK_EXPORT = (
    "g01_fp16_norm_eps_vanishes",
    "g06_sdpa_bool_rows_off",
    "g13_duplicate_and_unused",
    "g29_tiny_constants_dropped",
)
QUICK_OPENVINO = ("07_dynamic_batch_seq", "g29_tiny_constants_dropped")
QUICK_INT8 = ("01_dict_output", "40_int8_outlier_channels")
QUICK_TORCHAO = ("01_dict_output", "09_zero_size_batch", "14_tied_weights", "40_int8_outlier_channels")
QUICK_INDUCTOR = ("10_inplace_input_mutation", "28_output_aliases_input")
ON_EAGER_BY_RULE = {"17_train_mode_bn_dropout", "34_generator_output"}


def _rows() -> list[object]:
    rows = []
    for name in (*NAMES, *EXPORT_NAMES):
        for backend in BACKENDS:
            quick = {
                "eager": name in NAMES,
                "onnxruntime": name in NAMES or name in QUICK_EXPORT,
                "onnxruntime_int8": name in QUICK_INT8,
                "openvino": name in QUICK_OPENVINO,
                "inductor": name in QUICK_INDUCTOR,
                "torchao": name in QUICK_TORCHAO,
                "inductor_aot": False,  # each compiles for half a minute
            }[backend]
            marks = () if quick else (pytest.mark.full,)
            rows.append(pytest.param(name, backend, marks=marks, id=f"{name}-{backend}"))
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), _rows())
def test_a_case_is_right_or_stays_on_eager_as_the_table_says(name: str, backend: str) -> None:
    outcome = run_case(name, backend)
    assert outcome.verdict != "WRONG", outcome.reasons
    row = expected_outcomes()[name].get(backend)
    if row is not None:
        # Whether children of a refused module are worth a trial is a matter of time, so only the module itself counts.
        expected = row.partition(":")[0]
        dispatched = ("right", "partly")
        assert (outcome.verdict in dispatched) == (expected in dispatched), outcome.reasons


def test_refusing_is_the_exception() -> None:
    table = expected_outcomes()
    right = {b: sum(table[n].get(b, "").startswith(("right", "partly")) for n in NAMES) for b in BACKENDS[1:]}
    assert right["onnxruntime"] >= 20
    assert right["openvino"] >= 20
    assert right["inductor"] >= 27
    assert right["inductor_aot"] >= 20
    used = ("right", "partly", "children")
    assert sum(table[name]["inductor_aot"].startswith(used) for name in NAMES) >= 24
    assert not any(row.startswith("WRONG") for rows in table.values() for row in rows.values())
