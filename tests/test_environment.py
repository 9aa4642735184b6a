from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from aitune_lab import environment
from aitune_lab.schema import Fingerprint, from_json, to_json

RECORDED = Fingerprint(
    python="3.11.7",
    platform="Linux, glibc 2.36",
    machine="x86_64",
    cpu="Some CPU",
    cpu_flags=("amx_bf16", "avx2"),
    threads=8,
    torch="2.13.0",
    packages={"onnx": "1.23.2", "openvino": "2026.4.1"},
    cuda="13.0",
    gpus=("NVIDIA H200",),
    compute_capabilities=("9.0",),
    driver="580.1",
)


def test_fingerprint_describes_this_process_and_survives_json() -> None:
    found = environment.fingerprint()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.threads == torch.get_num_threads()
    assert found.torch == torch.__version__
    assert found.cuda == torch.version.cuda
    assert found.cpu
    assert found.cpu_flags == tuple(sorted(found.cpu_flags)) != ()
    assert len(found.gpus) == len(found.compute_capabilities)
    assert from_json(to_json(found), Fingerprint) == found == environment.fingerprint()


def test_packages_are_those_installed_and_can_be_left_out() -> None:
    assert environment.package_versions()["numpy"]
    assert environment.fingerprint(packages=False).packages == {}


def test_fingerprint_starts_no_cuda_and_imports_no_backend() -> None:
    code = (
        "import sys, torch; from aitune_lab import environment; environment.fingerprint();"
        "assert not torch.cuda.is_initialized();"
        "bad = {'onnx', 'onnxruntime', 'openvino', 'tensorrt', 'torchao', 'transformers'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_equal_environments_differ_in_nothing() -> None:
    assert environment.differences(RECORDED, dataclasses.replace(RECORDED)) == ()


def test_every_difference_is_named_with_both_values() -> None:
    here = dataclasses.replace(
        RECORDED,
        torch="2.14.0",
        threads=2,
        cpu_flags=("avx2", "avx512f"),
        packages={"onnx": "1.24.0", "torchao": "0.18.0"},
        cuda=None,
        driver=None,
        gpus=(),
        compute_capabilities=(),
    )
    assert environment.differences(RECORDED, here) == (
        "threads: 8 there, 2 here",
        "torch: 2.13.0 there, 2.14.0 here",
        "cuda: 13.0 there, none here",
        "driver: 580.1 there, none here",
        "gpus: NVIDIA H200 (9.0) there, none here",
        "cpu lacks here: amx_bf16",
        "cpu has only here: avx512f",
        "onnx: 1.23.2 there, 1.24.0 here",
        "openvino: 2026.4.1 there, not installed here",
        "torchao: not installed there, 0.18.0 here",
    )


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Fingerprint)])
def test_no_field_is_forgotten(field: str) -> None:
    changed = {"threads": 1, "packages": {}, "cpu_flags": (), "gpus": ("other",), "compute_capabilities": ("8.0",)}
    here = dataclasses.replace(RECORDED, **{field: changed.get(field, "other")})
    assert environment.differences(RECORDED, here) != ()


UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("0,7,1", [0]),
        ("GPU-bb", [2]),
        ("GPU-aa", []),
        ("GPU-aa22,GPU-aa11", [1, 0]),
        ("MIG-cc", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(setting: str | None, expected: list[int]) -> None:
    assert environment.visible_devices(setting, UUIDS) == expected


@pytest.mark.gpu
def test_the_driver_and_torch_tell_the_same_gpus() -> None:
    code = (
        "import torch; from aitune_lab import environment as e; before = e.gpus();"
        "assert before and not torch.cuda.is_initialized(), before;"
        "torch.zeros(1, device='cuda'); after = e.gpus();"
        "assert [(g.name, g.compute_capability) for g in before] == [(g.name, g.compute_capability) for g in after]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
