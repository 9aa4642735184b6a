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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = [item for item in items if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.fixture(autouse=True)
def quiet_gpu() -> Iterator[None]:
    """Each test finds the GPU idle, and leaves no memory behind for the next."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
