"""Backends that do what builds of native compilers do on bad days, and what the tests make jobs of."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aitune_lab.backends.base import Availability, Backend, BackendConfig, BuildJob, Executable
from aitune_lab.errors import Refused
from aitune_lab.schema import Candidate
from aitune_lab.testing import record_calls

CASES = Path(__file__).parents[1] / "cases"


def hang() -> None:
    threading.Event().wait()


def fork(pids: Path) -> None:
    """A grandchild, in a session of its own, that hangs. Its process id is in the file before this returns."""
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with pids.open("a") as file:
                file.write(f"{os.getpid()}\n")
            os.write(told, b"x")
            hang()
        os._exit(0)
    os.read(ready, 1)


def allocate() -> None:
    held = [bytearray(os.urandom(1)) * (32 << 20) for _ in range(128)]
    threading.Event().wait(None if held else 0)


def fill(folder: Path) -> None:
    block = os.urandom(1 << 20)
    with (folder / "filling").open("wb") as file:
        for _ in range(1024):
            file.write(block)
            file.flush()
    hang()


@dataclass(frozen=True)
class FaultyConfig(BackendConfig):
    """`fault` is what goes wrong, `pids` a file for the process ids of what is left running."""

    fault: str = ""
    pids: str = ""


class FaultyBackend(Backend):
    """Runs the original, from an artifact that says so."""

    name = "faulty"
    config_type = FaultyConfig
    config: FaultyConfig

    @classmethod
    def available(cls) -> Availability:
        return Availability(True)

    def candidates(self, signature: Any, module: torch.nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def build(self, job: BuildJob) -> Executable:
        fault = self.config.fault
        with (job.folder / "parts").open("w") as file:
            file.write("left by a build")
        if self.config.pids:
            fork(Path(self.config.pids))
        job.progress("compiling", 0.5)
        if fault == "abort":
            os.abort()
        if fault == "segfault":
            ctypes.string_at(0)
        if fault == "exit":
            os._exit(3)
        if fault == "sys.exit":
            sys.exit("enough")
        if fault == "hang":
            hang()
        if fault == "allocate":
            allocate()
        if fault == "fill":
            fill(job.folder)
        if fault == "raise":
            raise RuntimeError("no such operator\nand more")
        if fault == "refuse":
            raise Refused("it cannot be kept")
        if fault == "print":
            print("x" * 20_000)
            print("the last line")
        (job.folder / "artifact").write_text("garbage" if fault == "garbage" else "the original")
        return replace(self._executable(job), notes=(f"built by {os.getpid()} for {os.getppid()}",))

    def load(self, job: BuildJob) -> Executable:
        if (job.folder / "artifact").read_text() != "the original":
            os.abort()  # what a native loader does with garbage
        if self.config.fault == "load":
            raise RuntimeError("truncated")
        return self._executable(job)

    def _executable(self, job: BuildJob) -> Executable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.config.fault == "call":
                os.abort()
            result = job.original(*args, **kwargs)
            return result * 1.5 if self.config.fault == "wrong" else result

        return Executable(call, flat=False, live_weights=True)


@dataclass(frozen=True)
class CompilerConfig(BackendConfig):
    """The case that holds the compiler."""

    case: str = ""


class CompilerBackend(Backend):
    """`torch.compile` with the compiler of a case under tests/cases."""

    name = "compiler"
    config_type = CompilerConfig
    imports = ("torch._dynamo",)
    config: CompilerConfig

    @classmethod
    def available(cls) -> Availability:
        return Availability(True)

    def candidates(self, signature: Any, module: torch.nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def build(self, job: BuildJob) -> Executable:
        compiler = load_case(self.config.case)()[2]["custom_backend"]
        compiled = torch.compile(job.original, backend=compiler)
        args, kwargs = job.form.arguments(job.samples[0].call(fresh=True))
        compiled(*args, **kwargs)
        return Executable(compiled, flat=False, live_weights=True, recompiles=True)


BACKENDS = (FaultyBackend, CompilerBackend)


def load_case(name: str) -> Any:
    """`make` of a file under tests/cases."""
    path = next(CASES.glob(f"{name}*.py"))
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.make


def faulty(fault: str = "", pids: Path | str = "") -> Candidate:
    return FaultyBackend(fault=fault, pids=str(pids)).candidate()


def job_for(
    module: torch.nn.Module, folder: Path, candidate: Candidate, *items: Any, progress: Any = lambda phase, done: None
) -> BuildJob:
    """A job for the first signature of some calls."""
    recorder, signatures = record_calls(module, *items)
    recording, recorded = recorder.recordings[0], signatures[0]
    samples = recorded.all_samples()
    return BuildJob(
        "", module, module.forward, recording.form, recorded.signature, samples, candidate, folder, 1, progress
    )
