"""The notebooks: what is kept in them, and that they still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_the_readme_names_every_notebook() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 5
    assert not [path.name for path in NOTEBOOKS if f"({path.name})" not in text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_can_be_read_anywhere(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 1_000_000
    assert "widgets" not in notebook.metadata
    text = json.dumps(notebook)
    assert "/tmp/" not in text
    assert "/home/" not in text
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        # A widget needs a kernel; its static copy stands in its place.
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


QUICK = ("1-quick-start", "5-in-production")
"""Run with every test run; the others under `-m full`."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.full) for p in NOTEBOOKS],
)
def test_it_runs_and_says_the_same(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-cell-timeout=600"]
    command += ["--nbval-sanitize-with", str(FOLDER / "sanitize.cfg"), str(copy)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
