"""What runs in a child: builds a candidate, loads it as the tuning process will, calls it on every recorded sample."""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..backends import registry
from ..backends.base import Backend, BuildJob, Executable
from ..capture.probe import autocast_of, seeded
from ..capture.state import Snapshot
from ..errors import BackendUnavailable, Refused
from ..runtime import variant
from ..runtime.codegen import structured
from . import parcel
from .processes import die_with_parent
from .wire import Channel

CALLS_PER_SAMPLE = 2
"""A second call meets what the first one left behind: reused buffers, counters."""


def main(fd: int, parent: int) -> None:
    """The start of a worker that is a fresh process: serves jobs on a socket that it inherited."""
    die_with_parent(parent)
    serve(Channel(socket.socket(fileno=fd)))


def serve(channel: Channel) -> None:
    """Do jobs until the other end closes or one fails; what is built for one is freed before the next.

    One that is refused is no failure, as long as the GPU still answers.
    """
    while True:
        try:
            request = channel.receive(timeout=3600.0)
        except EOFError:
            return
        if request is None:
            continue
        answer = _answer(request, channel)
        sys.stdout.flush()
        sys.stderr.flush()
        goes_on = answer["kind"] in ("done", "refused", "unavailable") and _freed()
        channel.send({**answer, "goes_on": goes_on})
        if not goes_on:
            return


def _freed() -> bool:
    """Give back what a job left on the GPU. False if the GPU doesn't answer this process any more."""
    gc.collect()
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


def _answer(request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The result of a job as a message."""
    _take_over(request)
    stage = "build"

    def enter(name: str) -> None:
        nonlocal stage
        stage = name
        channel.send({"kind": "stage", "stage": name})

    def progress(phase: str, fraction: float | None) -> None:
        channel.send({"kind": "progress", "phase": phase, "fraction": fraction})

    try:
        return {"kind": "done", **_run(parcel.unpack(request["files"]), enter, progress)}
    except BaseException as error:  # also SystemExit: a backend that ends its process must not end it silently
        traceback.print_exc()
        known = {Refused: "refused", BackendUnavailable: "unavailable"}
        kind = next((k for cls, k in known.items() if isinstance(error, cls)), "raised")
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        text = str(error) if kind != "raised" else f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        return {"kind": kind, "stage": stage, "text": text}


def _take_over(request: dict[str, Any]) -> None:
    """The environment of the tuning process, with output and temporary files going to places of the job's own."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # asks TMPDIR again
    sys.path[:] = request["sys_path"]
    with suppress(OSError):  # the folder is gone, or was never readable
        os.chdir(request["cwd"])


def _run(job: BuildJob, enter: Any, progress: Any) -> dict[str, Any]:
    job = BuildJob(**{**vars(job), "progress": progress})
    start = time.perf_counter()
    enter("build")
    executable = variant.build(job)
    seconds = time.perf_counter() - start
    notes, recompiles = executable.notes, executable.recompiles
    if not recompiles and type(registry.of(job.candidate)).load is not Backend.load:
        executable.close()
        enter("load")
        executable = variant.load(job)
    try:
        enter("call")
        _exercise(job, executable)
    finally:
        executable.close()
    return {"seconds": seconds, "notes": list(notes), "recompiles": recompiles}


def _exercise(job: BuildJob, executable: Executable) -> None:
    """Call on every sample, each time as the sample was recorded. What comes out is compared elsewhere."""
    call = structured(executable, job.signature, job.form)
    for sample in job.samples:
        tensors = sample.tensors()
        device = tensors[0].device if tensors else None
        for _ in range(CALLS_PER_SAMPLE):
            args, kwargs = job.form.arguments(sample.call(fresh=True))
            snapshot = Snapshot(job.module) if job.signature.facts.state else None
            seed = sample.random_state if sample.random_state is not None else 0
            with seeded(seed, device), torch.no_grad(), autocast_of(job.signature.autocast):
                call(*args, **kwargs)
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
            if snapshot is not None:
                snapshot.restore()


def scratch_environment(scratch: Path) -> dict[str, str]:
    """The tuning process's environment, with temporary files and compilers' caches in a folder that goes with the job."""
    return {
        **os.environ,
        "TMPDIR": str(scratch),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
