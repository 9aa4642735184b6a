"""What tests of tuned calls share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Tests run as inference does; those about gradients say so."""
    with torch.no_grad():
        yield
