"""What a timing rests on: torch's precision settings, the GPU's clocks and throttling, and other load meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from ..schema import Option

Watch = Callable[[], Callable[[], str | None]]
"""Starts watching for other load; what it returns ends the watch and says in a sentence what disturbed, or None."""

_BUSY_TIMES = ("user", "nice", "system", "irq", "softirq", "steal")
_CLOCK_TICK_SECONDS = 0.01

# Bits of NVML's clock event reasons. A power cap is how a card runs at full load, so it is named and no disturbance.
_POWER_CAP = 0x4
_SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def cpu_watch(threads: int) -> Watch:
    """A watch for heavy other load on the CPUs this process may use.

    Load is other if it comes from other processes, or from more threads of this process than the `threads` that a
    timed call uses. It is heavy if it takes more than a quarter of those threads' worth of CPU beside half of the
    CPUs that they leave free. Counters of the system go in steps of 10 ms per CPU, which are allowed for.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    used = min(threads, len(cpus))
    allowed = 0.25 * used + 0.5 * (len(cpus) - used)

    def start() -> Callable[[], str | None]:
        wall, own, system = time.perf_counter(), time.process_time(), _busy_seconds(cpus)

        def end() -> str | None:
            seconds = time.perf_counter() - wall
            own_seconds = time.process_time() - own
            slack = _CLOCK_TICK_SECONDS * len(cpus)
            others = _busy_seconds(cpus) - system - own_seconds - slack
            if others > allowed * seconds:
                return f"other processes used {others / seconds:.1f} of {len(cpus)} CPUs"
            excess = own_seconds - used * seconds - slack
            if excess > 0.25 * seconds:
                return f"other threads of this process used {excess / seconds:.1f} CPUs"
            return None

        return end

    return start


def gpu_watch(device: torch.device) -> Watch:
    """A watch for slowdowns of a GPU (heat, power brake), by NVML; without NVML nothing is seen."""

    def start() -> Callable[[], str | None]:
        def end() -> str | None:
            reasons = _throttle_reasons(device)
            names = _slowdowns(reasons)
            return f"the GPU throttled: {', '.join(names)}" if names else None

        return end

    return start


def both(*watches: Watch) -> Watch:
    """All watches as one; the first that has something to say is heard."""

    def start() -> Callable[[], str | None]:
        ends = [watch() for watch in watches]
        return lambda: next((said for said in [end() for end in ends] if said is not None), None)

    return start


def conditions(device: torch.device) -> dict[str, Option]:
    """torch's settings that change speed or precision and, for a GPU, clocks (MHz), temperature (°C), power cap, throttling."""
    found: dict[str, Option] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    with contextlib.suppress(RuntimeError):  # set by torch's newer and older interface at once
        found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    if device.type != "cuda":
        return found
    with contextlib.suppress(RuntimeError):
        found["tf32_matmul"] = torch.backends.cuda.matmul.allow_tf32
    with contextlib.suppress(RuntimeError):
        found["tf32_cudnn"] = torch.backends.cudnn.allow_tf32
    matmul = torch.backends.cuda.matmul
    found["float16_reduced_sums"] = bool(matmul.allow_fp16_reduced_precision_reduction)
    found["bfloat16_reduced_sums"] = bool(matmul.allow_bf16_reduced_precision_reduction)
    found["cudnn_benchmark"] = torch.backends.cudnn.benchmark
    nvml, handle = _nvml(device)
    if nvml is not None:
        with contextlib.suppress(nvml.NVMLError):
            found["gpu_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            found["memory_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            found["temperature_c"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            reasons = _throttle_reasons(device)
            found["power_capped"] = bool(reasons & _POWER_CAP)
            found["throttled"] = ", ".join(_slowdowns(reasons))
    return found


def _busy_seconds(cpus: list[int]) -> float:
    times = psutil.cpu_times(percpu=True)
    return sum(getattr(times[cpu], name, 0.0) for cpu in cpus if cpu < len(times) for name in _BUSY_TIMES)


def _throttle_reasons(device: torch.device) -> int:
    nvml, handle = _nvml(device)
    if nvml is None:
        return 0
    with contextlib.suppress(nvml.NVMLError):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return 0


def _slowdowns(reasons: int) -> list[str]:
    return [name for bit, name in _SLOWDOWNS.items() if reasons & bit]


def _nvml(device: torch.device) -> tuple[Any, Any]:
    """(NVML's module, the device's handle), or (None, None). Devices are found by UUID: torch may number them anew."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None, None
