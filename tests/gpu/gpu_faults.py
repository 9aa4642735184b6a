"""A backend that does on a GPU what native builds do there on bad days. Children import it by its name."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from aitune_lab.backends.base import Availability, Backend, BackendConfig, BuildJob, Executable
from aitune_lab.errors import Refused
from aitune_lab.schema import Candidate


@dataclass(frozen=True)
class GpuFaultsConfig(BackendConfig):
    """`fault` is what goes wrong: in the build, or in the calls of the process that built."""

    fault: str = ""


class GpuFaultsBackend(Backend):
    """Runs the original, from an artifact that names the process that built it."""

    name = "gpu-faults"
    config_type = GpuFaultsConfig
    imports = ("torch._inductor.compile_fx",)
    capturable = True
    config: GpuFaultsConfig

    @classmethod
    def available(cls) -> Availability:
        return Availability(True)

    def candidates(self, signature: Any, module: torch.nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def build(self, job: BuildJob) -> Executable:
        fault = self.config.fault
        if fault == "hang":
            threading.Event().wait()
        if fault == "abort":
            os.abort()
        if fault == "refuse":
            raise Refused("it cannot be kept")
        if fault == "spoil":
            _assert_on_the_device()
            raise Refused("it cannot be kept, and the GPU is lost")
        started = str(torch.cuda.is_initialized())
        if fault == "start CUDA":
            assert torch.ones(2, device="cuda").sum().item() == 2
        (job.folder / "built_by").write_text(str(os.getpid()))
        return replace(self._executable(job), notes=(f"built by {os.getpid()}", f"CUDA was started: {started}"))

    def load(self, job: BuildJob) -> Executable:
        return self._executable(job)

    def _executable(self, job: BuildJob) -> Executable:
        calls: list[int] = []
        here = (job.folder / "built_by").read_text() == str(os.getpid())

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if self.config.fault == "assert" and here and len(calls) == 3:
                _assert_on_the_device()
            return job.original(*args, **kwargs)

        return Executable(call, flat=False, live_weights=True)


def _assert_on_the_device() -> None:
    table = torch.zeros(10, 4, device="cuda")
    torch.nn.functional.embedding(torch.tensor([99], device="cuda"), table)


def faulty(fault: str = "", **variant: Any) -> Candidate:
    return replace(GpuFaultsBackend(fault=fault).candidate(), **variant)
