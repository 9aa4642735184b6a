"""Modules with habits people's modules have, on the GPU: right in a graph, or on eager with a reason, as the table says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from case_table import ALL, NAMES, run_on_gpu

from aitune_lab.schema import Candidate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = tomllib.loads(Path(__file__).with_name("outcomes.toml").read_text(encoding="utf-8"))
QUICK = ("01_dict_output", "07_dynamic_batch_seq", "14_tied_weights", "25_functional_dropout_eval", "29_hooks")


def _rows() -> list[object]:
    rows = []
    for backend in ("eager", "inductor"):
        for name in ALL:
            quick = backend == "eager" or name in QUICK
            slow = (pytest.mark.full, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
            rows.append(pytest.param(name, backend, marks=pytest.mark.gpu if quick else slow, id=f"{name}-{backend}"))
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), _rows())
def test_a_case_in_a_graph_is_right_or_stays_on_eager_as_the_table_says(name: str, backend: str) -> None:
    verdict, reasons = run_on_gpu(name, Candidate(backend, cuda_graph=True))
    assert verdict == TABLE[name][backend], reasons
    assert verdict != "eager" or reasons, "eager needs a reason"


def test_refusing_is_the_exception() -> None:
    for backend in ("eager", "inductor"):
        assert sum(TABLE[name][backend] == "right" for name in NAMES) >= 22
        assert all(row[backend] != "WRONG" for row in TABLE.values())
