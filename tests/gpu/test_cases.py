"""Modules with habits people's modules have, on the GPU: right in a graph, or on eager with a reason, as the table says."""

from __future__ import annotations

import pytest
import torch
from case_table import ALL, NAMES, WRONG, as_expected, outcomes, run_on_gpu

from aitune_lab.backends.tensorrt import TensorRTBackend
from aitune_lab.schema import Candidate

TABLE = outcomes()
CANDIDATES = {
    "eager": Candidate("eager", cuda_graph=True),
    "inductor": Candidate("inductor", cuda_graph=True),
    "tensorrt": Candidate("tensorrt", (("optimization_level", 0),), cuda_graph=True),  # as right, and built in seconds
}
LEAST_RIGHT = {"eager": 22, "inductor": 22, "tensorrt": 18}
QUICK = ("01_dict_output", "07_dynamic_batch_seq", "14_tied_weights", "25_functional_dropout_eval", "29_hooks")


def _rows() -> list[object]:
    engines = TensorRTBackend.available()
    lacking = pytest.mark.skipif(not engines.ok, reason=engines.reason or "available")
    slow = (pytest.mark.full, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
    rows = []
    for backend in CANDIDATES:
        for name in ALL:
            if backend in TABLE[name]:
                quick = backend == "eager" or name in QUICK
                marks = [pytest.mark.gpu] if quick else [*slow]
                marks += [lacking] if backend == "tensorrt" else []
                rows.append(pytest.param(name, backend, marks=marks, id=f"{name}-{backend}"))
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), _rows())
def test_a_case_in_a_graph_is_right_or_stays_on_eager_as_the_table_says(name: str, backend: str) -> None:
    verdict, reasons = run_on_gpu(name, CANDIDATES[backend])
    assert as_expected(verdict, TABLE[name][backend]), (verdict, reasons)
    assert verdict != "eager" or reasons, "eager needs a reason"


@pytest.mark.parametrize("backend", CANDIDATES)
def test_refusing_is_the_exception(backend: str) -> None:
    column = {name: row[backend] for name, row in TABLE.items() if backend in row}
    assert not any(verdict in outcome for outcome in column.values() for verdict in WRONG)
    if column:
        assert set(column) == set(ALL)
        assert sum(column[name] == "right" for name in NAMES) >= LEAST_RIGHT[backend]
