"""The Lab in a real kernel, without a page: outputs stay where they belong, and the notebook keeps a static copy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]

CELLS = [
    """
import torch, aitune_lab as ait
from torch import nn
from aitune_lab.backends import registry
from aitune_lab.testing import ScriptedBackend, ScriptedMeter

registry.register(ScriptedBackend)

class Pipe:
    def __init__(self):
        self.encoder, self.head = nn.Linear(8, 8).eval(), nn.Linear(8, 4).eval()
    def __call__(self, x):
        print("the target prints")
        return self.head(self.encoder(x))

pipe, data = Pipe(), [torch.randn(2, 8)]
lab = ait.Lab(pipe, data, backends=["scripted"], meter=ScriptedMeter(), store=None)
lab
""",
    "lab.tune()",
    "print('another cell')\nresult = lab.wait()",
    "print(sorted({choice.candidate.backend for choice in result.choices}), 'the target prints' in lab.snapshot.output)",
    "%load_ext aitune_lab\n%aitune plan pipe",
    "lab.close()",
]


def text_of(cell: Any) -> str:
    parts = [o.get("text") or "".join(map(str, o.get("data", {}).values())) for o in cell.outputs]
    return "\n".join(parts)


def test_a_notebook_without_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown, started, waited, said, planned, closed = notebook.cells
    (output,) = shown.outputs
    # The widget has gone; tables that need no kernel stand in its place.
    assert set(output.data) == {"text/plain", "text/html"}
    assert "encoder" in output.data["text/html"]
    assert "<script" not in output.data["text/html"]
    assert len(nbformat.writes(notebook)) < 1_000_000
    assert started.outputs == []
    assert text_of(waited).startswith("another cell")
    assert "2 choices" in text_of(waited)
    assert text_of(said).strip() == "['scripted'] True"
    assert "no rules" in text_of(planned)
    assert closed.outputs == []
    assert not [cell for cell in notebook.cells if "the target prints\n" in text_of(cell)]
