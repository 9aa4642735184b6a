"""The hardware and software at hand, read without importing a backend and without starting CUDA."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .schema import Fingerprint

_PACKAGES = (
    "accelerate",
    "diffusers",
    "numpy",
    "nvidia-modelopt",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxscript",
    "openvino",
    "tensorrt",
    "tensorrt-cu12",
    "tensorrt-cu13",
    "tensorrt-rtx",
    "torch-tensorrt",
    "torchao",
    "transformers",
    "triton",
)
"""Distributions whose version can change an artifact, a figure or a result."""

_CPU_FLAGS = frozenset(
    "avx avx2 avx_vnni avx512f avx512_bf16 avx512_fp16 avx512_vnni amx_bf16 amx_fp16 amx_int8 amx_tile f16c fma sse4_2 "
    "asimd asimddp asimdhp bf16 i8mm sve sve2".split()
)
"""Instruction sets that kernels are chosen by, as Linux spells them (`asimd` is ARM's NEON)."""

_MACOS_FLAGS = {
    "AdvSIMD": "asimd",
    "FEAT_BF16": "bf16",
    "FEAT_DotProd": "asimddp",
    "FEAT_FP16": "asimdhp",
    "FEAT_I8MM": "i8mm",
}


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU: its name, compute capability (`"9.0"`) and total memory in bytes."""

    name: str
    compute_capability: str
    memory_bytes: int


def fingerprint(*, packages: bool = True, start_cuda: bool = False) -> Fingerprint:
    """The machine and the versions that figures and artifacts depend on.

    CUDA is not started (`torch.cuda.is_initialized()` stays as it is) unless `start_cuda` says so: GPUs are read
    from the driver by NVML. `packages=False` leaves out the versions of optional packages.
    """
    import torch

    found = gpus(start_cuda=start_cuda)
    return Fingerprint(
        python=platform.python_version(),
        platform=_platform(),
        machine=platform.machine(),
        cpu=cpu_name(),
        cpu_flags=cpu_flags(),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        packages=package_versions() if packages else {},
        cuda=torch.version.cuda,
        gpus=tuple(gpu.name for gpu in found),
        compute_capabilities=tuple(gpu.compute_capability for gpu in found),
        driver=driver_version(),
    )


def differences(recorded: Fingerprint, here: Fingerprint) -> tuple[str, ...]:
    """What differs between a recorded environment and this one, in words; empty if nothing does.

    For example `("torch: 2.13.0 there, 2.14.0 here", "cpu lacks here: amx_bf16")`.
    """
    found = []
    for name in ("python", "platform", "machine", "cpu", "threads", "torch", "cuda", "driver"):
        there, now = getattr(recorded, name), getattr(here, name)
        if there != now:
            found.append(f"{name}: {there or 'none'} there, {now or 'none'} here")
    if recorded.gpus != here.gpus or recorded.compute_capabilities != here.compute_capabilities:
        found.append(f"gpus: {_gpu_text(recorded)} there, {_gpu_text(here)} here")
    lost = sorted({*recorded.cpu_flags} - {*here.cpu_flags})
    gained = sorted({*here.cpu_flags} - {*recorded.cpu_flags})
    if lost:
        found.append(f"cpu lacks here: {', '.join(lost)}")
    if gained:
        found.append(f"cpu has only here: {', '.join(gained)}")
    for name in sorted({*recorded.packages, *here.packages}):
        there, now = recorded.packages.get(name), here.packages.get(name)
        if there != now:
            found.append(f"{name}: {there or 'not installed'} there, {now or 'not installed'} here")
    return tuple(found)


def package_versions() -> Mapping[str, str]:
    """Versions of the optional packages that are installed, by distribution name; imports none of them."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def cpu_name() -> str:
    """The CPU's model name, or at least its architecture."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    info = _cpuinfo()
    # ARM kernels name no model, but give numbers that tell models apart.
    arm = (
        f"ARM implementer {info['CPU implementer']} part {info.get('CPU part', '?')}"
        if "CPU implementer" in info
        else ""
    )
    return info.get("model name") or info.get("Model") or arm or platform.processor() or platform.machine()


@functools.cache
def cpu_flags() -> tuple[str, ...]:
    """Instruction sets of this CPU that kernels are chosen by, sorted; `avx512f`, `amx_bf16`, `asimd`, …"""
    if sys.platform == "darwin":
        found = {flag for key, flag in _MACOS_FLAGS.items() if _sysctl_optional(key)}
        intel = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}"
        found |= {flag.lower().replace("avx1.0", "avx").replace(".", "_") for flag in intel.split()} & _CPU_FLAGS
    else:
        info = _cpuinfo()
        found = {*(info.get("flags") or info.get("Features") or "").split()} & _CPU_FLAGS
    return tuple(sorted(found)) or (_torch_capability(),)


def gpus(*, start_cuda: bool = False) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that this process may use.

    Where CUDA runs already, or `start_cuda` is set, torch tells. Otherwise the driver does (by NVML), narrowed by
    `CUDA_VISIBLE_DEVICES`, in the order of the PCI bus; without NVML there are none.
    """
    import torch

    if torch.cuda.is_initialized() or (start_cuda and torch.cuda.is_available()):
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return tuple(Gpu(p.name, f"{p.major}.{p.minor}", p.total_memory) for p in properties)
    return _with_nvml(_nvml_gpus) or ()


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    found: str | None = _with_nvml(lambda nvml: nvml.nvmlSystemGetDriverVersion())
    return found


def _with_nvml(read: Any) -> Any:
    """What `read(pynvml)` gives, or None where there is no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return read(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpus(nvml: Any) -> tuple[Gpu, ...]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    found = []
    for index in visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids):
        handle = handles[index]
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(Gpu(nvml.nvmlDeviceGetName(handle), f"{major}.{minor}", int(memory.total)))
    return tuple(found)


def visible_devices(setting: str | None, uuids: list[str]) -> list[int]:
    """Indices of the devices that `CUDA_VISIBLE_DEVICES` lets through: numbers or the beginnings of UUIDs.

    As CUDA does, everything from the first entry on that names no device is left out; None lets all through.
    """
    if setting is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [
            i
            for i, uuid in enumerate(uuids)
            if entry == str(i) or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if len(named) != 1:
            break
        found += named
    return found


def _gpu_text(value: Fingerprint) -> str:
    named = [f"{name} ({capability})" for name, capability in zip(value.gpus, value.compute_capabilities, strict=False)]
    return ", ".join(named) or "none"


def _platform() -> str:
    """System and C library: what native artifacts depend on. The kernel's version is left out."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    if sys.platform == "win32":
        return f"Windows {platform.release()}"
    name, number = platform.libc_ver()
    return f"{platform.system()}, {name} {number}" if name else platform.system()


@functools.cache
def _cpuinfo() -> Mapping[str, str]:
    """The first processor's fields of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(":")
        if found:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _sysctl_optional(flag: str) -> bool:
    return "1" in (_sysctl(f"hw.optional.{flag}"), _sysctl(f"hw.optional.arm.{flag}"))


def _torch_capability() -> str:
    """The vector level that torch's own kernels run at, where the system tells no flags (`avx2`, `default`)."""
    import torch

    return torch.backends.cpu.get_cpu_capability().lower()
