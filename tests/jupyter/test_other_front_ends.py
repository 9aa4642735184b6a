"""The Lab where no JupyterLab draws it: what VS Code and Colab get from the kernel, as far as that shows without them."""

from __future__ import annotations

import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from aitune_lab.jupyter.display import WIDGET

ROOT = Path(__file__).parents[2]
CHOSEN = "scripted[latency_ms=0.25]"

SETUP = """
import os, sys, types, torch, aitune_lab as ait
from torch import nn
from aitune_lab.backends import registry
from aitune_lab.testing import ScriptedBackend, ScriptedMeter

registry.register(ScriptedBackend)
options = dict(backends=[ScriptedBackend(latency_ms=0.25)], meter=ScriptedMeter(), store=None)

class Pipe:
    def __init__(self):
        self.encoder, self.head = nn.Linear(8, 8).eval(), nn.Linear(8, 4).eval()
    def __call__(self, x):
        return self.head(self.encoder(x))

pipe, data = Pipe(), [torch.randn(2, 8)]
assert "VSCODE_PID" in os.environ
"""
COLAB = """
for name in ("google", "google.colab"):
    sys.modules[name] = types.ModuleType(name)
other = Pipe()
"""
CELLS = {
    "setup": SETUP,
    "lab": "lab = ait.Lab(pipe, data, **options)\nlab",
    "run": "result = lab.run()",
    "result": "result",
    "magic": "%load_ext aitune_lab\n%aitune inspect pipe data",
    "colab": COLAB,
    "colab lab": "colab = ait.Lab(other, data, **options)\ncolab",
    "colab run": "colab.run();",
    "colab again": "colab",
    "colab magic": "%aitune compare other",
    "close": "colab.close()",
}


class _Text(HTMLParser):
    """The text of a piece of HTML, and whether every element in it is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in ("img", "br", "meta", "hr", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The MIME bundles of each cell, run in a kernel whose front end has no widget manager."""
    folder = tmp_path_factory.mktemp("front-end")
    changed = {
        name: str(folder / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    changed["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    changed["VSCODE_PID"] = "1"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS.values()])
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value)
        client.execute()
    shown = {
        name: [dict(o.data) for o in cell.outputs if "data" in o]
        for name, cell in zip(CELLS, notebook.cells, strict=True)
    }
    shown["errors"] = [dict(o) for cell in notebook.cells for o in cell.outputs if o.output_type == "error"]
    return shown


def complete(bundle: dict[str, Any], *words: str) -> None:
    """The bundle needs no script to be read: its HTML is whole, and HTML and text say the words."""
    html = _Text(bundle["text/html"])
    assert html.open == []
    assert not html.tags & {"script", "iframe", "link"}
    for word in words:
        assert word in html.text
        assert word in bundle["text/plain"]


def test_nothing_fails(outputs: dict[str, list[dict[str, Any]]]) -> None:
    assert outputs["errors"] == []


def test_in_vs_code_the_widget_stands_beside_a_complete_copy(outputs: dict[str, list[dict[str, Any]]]) -> None:
    (bundle,) = outputs["lab"]
    assert set(bundle) == {WIDGET, "text/html", "text/plain"}
    complete(bundle, "encoder", "head", CHOSEN)
    assert "table" in _Text(bundle["text/html"]).tags
    (result,) = outputs["result"]
    complete(result, "encoder", CHOSEN)
    for shown in outputs["magic"]:
        complete(shown, "encoder")


def test_in_colab_there_is_the_copy_alone(outputs: dict[str, list[dict[str, Any]]]) -> None:
    (first,) = outputs["colab lab"]
    assert set(first) == {"text/html", "text/plain"}
    complete(first, "lab.run()")
    (again,) = outputs["colab again"]
    assert set(again) == {"text/html", "text/plain"}
    complete(again, "encoder", "head", CHOSEN)
    for shown in outputs["colab magic"]:
        complete(shown, "encoder", CHOSEN)
