"""What the tests on a GPU share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tuning"))


@pytest.fixture(autouse=True)
def quiet_gpu() -> Iterator[None]:
    """Each test finds the GPU idle, and leaves no memory behind for the next."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
