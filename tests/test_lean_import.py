"""`import aitune_lab` is cheap: it loads nothing optional, not even torch, and starts no CUDA."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aitune_lab
from aitune_lab import errors

HEAVY = (
    "IPython anywidget cattrs diffusers ipykernel ipywidgets numpy onnx onnxruntime onnxscript openvino pandas plotly "
    "rich safetensors tensorrt torch torchao transformers"
).split()


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(statement: str) -> set[str]:
    listing = run(f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))")
    return {name.partition(".")[0] for name in listing.split()}


def test_import_loads_nothing_heavy() -> None:
    assert loaded_after("import aitune_lab").isdisjoint(HEAVY)


def test_data_types_and_errors_need_no_torch() -> None:
    loaded = loaded_after("import aitune_lab.schema, aitune_lab.errors, aitune_lab.environment")
    assert "cattrs" in loaded
    assert "torch" not in loaded


def test_using_every_public_name_loads_no_optional_package_and_starts_no_cuda() -> None:
    optional = set(HEAVY) - {"cattrs", "numpy", "rich", "safetensors", "torch"}
    statement = "import aitune_lab, torch\nfor name in aitune_lab.__all__: getattr(aitune_lab, name)"
    assert loaded_after(f"{statement}\nassert not torch.cuda.is_initialized()").isdisjoint(optional)


@pytest.mark.parametrize("name", aitune_lab.__all__)
def test_public_name_is_there_and_kept(name: str) -> None:
    assert getattr(aitune_lab, name) is vars(aitune_lab)[name]
    assert name in dir(aitune_lab)


def test_type_checkers_see_the_names_that_exist() -> None:
    tree = ast.parse(Path(aitune_lab.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {a.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert seen == aitune_lab._MODULE_OF
    assert {*seen, "__version__"} == set(aitune_lab.__all__)


def test_every_error_and_warning_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(aitune_lab.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tuned'"):
        aitune_lab.tuned
