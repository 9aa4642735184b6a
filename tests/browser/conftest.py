"""Fixtures for tests in a real JupyterLab: `lab_page(cells)` shows a notebook and checks what the page did.

Screenshots go to the folder that AITUNE_LAB_SCREENSHOTS names, else to the test's own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from lab_driver import LabPage, Server
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def jupyter_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One JupyterLab for all tests of a run."""
    from lab_driver import BROWSERS, jupyterlab

    if not any(map(shutil.which, BROWSERS)):
        pytest.skip(f"needs one of {', '.join(BROWSERS)} on PATH")
    folder = tmp_path_factory.mktemp("jupyterlab")
    with jupyterlab(folder, environment={"AITUNE_LAB_CACHE_DIR": str(folder / "cache")}) as server:
        yield server


@pytest.fixture(scope="module")
def browser(jupyter_server: Server) -> Iterator[Browser]:
    """One Chromium per module: while Playwright runs no other test of this thread could run an event loop."""
    from lab_driver import chromium

    with chromium() as running:
        yield running


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """The folder for pictures."""
    folder = Path(os.environ.get("AITUNE_LAB_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def lab_page(jupyter_server: Server, browser: Browser, screenshots: Path) -> Iterator[Callable[..., LabPage]]:
    """`lab_page(cells_or_file, theme="light", kernel=True)` opens a notebook in JupyterLab.

    At the end of the test no page may have asked for anything beyond its server, nor may a widget have thrown an error.
    """
    from lab_driver import open_notebook

    pages: list[LabPage] = []

    def open_page(notebook: Sequence[str] | Path, **options: Any) -> LabPage:
        pages.append(open_notebook(jupyter_server, browser, notebook, shots=screenshots, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
    assert not [url for page in pages for url in page.outside], "the page asked for addresses outside its server"
    assert not [error for page in pages for error in page.own_errors], "a widget's module threw an error"
