"""The tuning process's side: sends a job to a child, waits, and loads what the child built."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from ..backends import registry
from ..backends.base import BuildJob, Executable
from ..errors import BackendUnavailable, ChildFailed, Refused
from ..runtime import variant
from .connection import Connection, Phase, Unreachable
from .helper import search_path
from .limits import BuildLimits
from .outcome import raise_failure, tail
from .parcel import Outbox, Unsendable, is_third_party
from .worker import scratch_environment

Isolation = Literal["auto", "all", "off"]
VARIABLE = "AITUNE_LAB_ISOLATION"


@dataclass(frozen=True)
class Build:
    """A built candidate.

    Attributes:
        executable: ready in this process.
        isolated: it was built and first called in a child.
        seconds: that the build took, without the calls and without sending it there.
        peak_bytes: resident memory of the build's processes at its highest, as far as seen; 0 if not isolated.
        log: the last lines that the child wrote.
    """

    executable: Executable
    isolated: bool
    seconds: float
    peak_bytes: int = 0
    log: str = ""


def default_isolation() -> Isolation:
    """What `AITUNE_LAB_ISOLATION` says; `"auto"` without it."""
    return cast("Isolation", os.environ.get(VARIABLE) or "auto")


def build_here(job: BuildJob) -> Build:
    """Build in this process. Raises what the backend raises."""
    start = time.perf_counter()
    executable = variant.build(job)
    return Build(executable, False, time.perf_counter() - start)


BuildSteps = Generator[Phase, None, Build]
"""A build under way, which gives its phase ten times a second at least, and stops where it is closed."""


def steps_here(job: BuildJob) -> BuildSteps:
    """`build_here` as steps; there are none, since this process is busy meanwhile."""
    yield from ()
    return build_here(job)


@contextmanager
def building(folder: Path, isolation: Isolation | None = None) -> Iterator[Callable[[BuildJob], BuildSteps]]:
    """What builds candidates, while entered: children with files in `folder`, or this process if isolation is off."""
    if (isolation or default_isolation()) == "off":
        yield steps_here
        return
    children = Children(folder, gpu=(isolation or default_isolation()) == "all")
    try:
        yield children.steps
    finally:
        children.close()


class Children:
    """Builds candidates in child processes, one at a time; a helper process for them starts with the first one.

    In the child a candidate is built, loaded as it will be here, and called twice on every recorded sample. Only then is
    it loaded here, or, if it recompiles, built here again from what the child left in the compile cache.

    Args:
        folder: where its temporary files go; made if missing.
        limits: of each build.
        entering: called before native code of a job's candidate runs in this process.
        gpu: jobs on a GPU too, in fresh processes that start CUDA anew; otherwise those are built in this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limits: BuildLimits | None = None,
        entering: Callable[[BuildJob], None] = lambda job: None,
        gpu: bool = False,
    ) -> None:
        self.limits = limits or BuildLimits()
        self._entering = entering
        self._gpu = gpu
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.Lock()
        self._helper: Connection | None = None
        self._outbox: Outbox | None = None

    def build(self, job: BuildJob, *, limits: BuildLimits | None = None) -> Build:
        """Build `job.candidate`; blocks, and calls `job.progress` at least ten times a second.

        Args:
            job: as a backend gets it; without a shared folder it gets one of this object.
            limits: in place of those given at the start.

        Raises:
            Refused: the backend refused; or it isn't of this package and the module can't be sent to a child.
            BackendUnavailable: it can't run in the child.
            ChildFailed: it raised, ended its process, or passed a limit.
            BaseException: what `job.progress` raises to cancel, or an interrupt; all children are ended then.
        """
        failure: BaseException | None = None
        with closing(self.steps(job, limits=limits)) as steps:
            while True:
                try:
                    phase = next(steps) if failure is None else steps.throw(failure)
                except StopIteration as stop:
                    made: Build = stop.value
                    return made
                try:
                    job.progress(*phase)
                except BaseException as error:
                    failure = error

    def steps(self, job: BuildJob, *, limits: BuildLimits | None = None) -> BuildSteps:
        """`build` in steps, none of which calls `job.progress`. Whoever leaves them before their end closes them.

        Until then nothing else can be built.
        """
        backend = registry.get(job.candidate.backend)
        if backend.isolation == "none":
            return build_here(job)
        if not self._gpu and _on_gpu(job):
            return self._build_here(job, "on a GPU; isolation='all' builds there too in a process of its own")
        if job.shared is None:
            job = replace(job, shared=self._folder / "shared")
        with self._lock:
            try:
                return (yield from self._build(job, backend.imports, limits or self.limits))
            except Unreachable as why:
                if is_third_party(backend):
                    raise Refused(
                        f"backend {job.candidate.backend!r} is not part of this package and may not build in this process, "
                        f"but {why}. isolation='off' allows it"
                    ) from why
                return self._build_here(job, str(why))
            except ChildFailed as error:
                _empty(job.folder)
                if error.cause == "disk":
                    _empty(self._folder / "shared")
                raise
            except (Refused, BackendUnavailable):
                _empty(job.folder)
                raise
            except BaseException:
                self._close()
                _empty(job.folder)
                raise

    def _build_here(self, job: BuildJob, why: str) -> Build:
        self._entering(job)
        made = build_here(job)
        made.executable.notes = (*made.executable.notes, f"not isolated: {why}")
        return made

    def _build(self, job: BuildJob, imports: tuple[str, ...], limits: BuildLimits) -> BuildSteps:
        helper = self._ready()
        scratch = Path(tempfile.mkdtemp(prefix="build-", dir=self._folder))
        try:
            log = scratch / "log"
            request = {
                **self._request(job, scratch, log),
                "imports": imports,
                "limits": asdict(limits.settled(scratch)),
            }
            answer = yield from helper.run(request)
            text = tail(log)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if answer["kind"] == "lost":
            self._close()
        if answer["kind"] != "done":
            raise_failure(answer, text)
        self._entering(job)
        if answer["recompiles"]:
            executable = variant.build(job)
        else:
            executable = variant.load(job)
            executable.notes = tuple(answer["notes"])
        return Build(executable, True, answer["seconds"], answer["peak_bytes"], text)

    def _request(self, job: BuildJob, scratch: Path, log: Path) -> dict[str, Any]:
        assert self._outbox is not None
        try:
            files = self._outbox.pack(job)
        except Unsendable as error:
            raise Unreachable(str(error)) from error
        assert job.shared is not None
        job.shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        folders = [job.folder, scratch, job.shared]
        return {
            "fresh": not _can_fork(job),
            "in_memory": str(self._outbox.in_memory) if self._outbox.in_memory is not None else None,
            "folders": [str(folder) for folder in folders],
            "job": {
                "files": files,
                "log": str(log),
                "environment": scratch_environment(scratch),
                "sys_path": search_path(),
                "cwd": _cwd(),
            },
        }

    def _ready(self) -> Connection:
        """The helper, started if it isn't running. Raises Unreachable if none can be started."""
        if os.name != "posix":
            raise Unreachable("child processes need a POSIX system")
        if not sys.executable:
            raise Unreachable("no Python interpreter is known that could run in a child process")
        if self._helper is None or not self._helper.alive():
            self._close()
            self._outbox = Outbox(self._folder)
            self._helper = Connection(self._folder, self._outbox)
        self._helper.wait_ready()
        return self._helper

    def close(self) -> None:
        """End the helper and its children, and remove the files that only they used. May be called again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()


def _can_fork(job: BuildJob) -> bool:
    """On Linux, and nothing of the job is on a GPU: CUDA doesn't survive a fork, nor do macOS's frameworks."""
    return sys.platform == "linux" and not _on_gpu(job)


def _on_gpu(job: BuildJob) -> bool:
    tensors = [*job.module.parameters(), *job.module.buffers(), *(t for s in job.samples for t in s.tensors())]
    return any(t.device.type not in ("cpu", "meta") for t in tensors)


def _empty(folder: Path) -> None:
    """Remove what a failed build left in its folder."""
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "/"
