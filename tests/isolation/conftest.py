"""One set of children for all tests here: starting the helper takes some seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aitune_lab.backends import registry
from aitune_lab.isolation import BuildLimits, Children

sys.path.insert(0, str(Path(__file__).parent))  # `faults`, here and in children


@pytest.fixture(autouse=True)
def faulty_backends() -> Iterator[None]:
    from faults import BACKENDS

    for backend in BACKENDS:
        registry.register(backend)
    yield
    for backend in BACKENDS:
        registry.unregister(backend.name)


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    made = Children(tmp_path_factory.mktemp("children"), limits=BuildLimits(seconds=120.0))
    yield made
    made.close()


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An empty folder for an artifact."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    return folder
