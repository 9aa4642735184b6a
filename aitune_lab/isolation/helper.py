"""The helper process: has imported torch and run nothing, forks or starts a worker for each job, watches and ends it.

It is started by `Children` as a fresh interpreter, never forked from the user's process, and never imports the user's
`__main__`. It has one thread and runs no operation of torch, so that what it forks starts clean, in 0.02 s instead of
the seconds that importing takes. When the process that started it closes the socket or ends, it kills all and ends.
"""

from __future__ import annotations

import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import worker
from .limits import BuildLimits, Watch
from .processes import Reaper, adopt_orphans, descendants, die_with_parent, end_descendants
from .wire import Channel

_TICK_SECONDS = 0.05
"""Between two looks at a running job."""
_IDLE_SECONDS = 1.0
"""Between two looks at whether the tuning process still lives, beside noticing that its socket closed."""


def main(fd: int, parent: int) -> None:
    """Serve jobs until the process `parent` closes its end of the socket or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this decides what an interrupt means
    adopt_orphans()
    control = Channel(socket.socket(fileno=fd))
    helper = _Helper(control, parent)
    try:
        control.send({"kind": "ready"})
        helper.serve()
    except (EOFError, OSError):
        pass
    finally:
        end_descendants(helper.reaper, helper.groups)
        if helper.in_memory is not None:  # who was killed could not remove it
            shutil.rmtree(helper.in_memory, ignore_errors=True)


@dataclass
class _Worker:
    """A child and the socket to it. Its process id names its session and process group too."""

    pid: int
    channel: Channel


class _Helper:
    def __init__(self, control: Channel, parent: int) -> None:
        self.control, self.parent = control, parent
        self.reaper = Reaper()
        self.kept: _Worker | None = None
        self.groups: set[int] = set()
        self.in_memory: str | None = None

    def serve(self) -> None:
        while True:
            request = self.control.receive(_IDLE_SECONDS)
            self._check_parent()
            self.reaper.reap()
            if request is not None:
                self.control.send(self._job(request))

    def _check_parent(self) -> None:
        if os.getppid() != self.parent:
            raise EOFError("the tuning process ended")

    def _job(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a job in a worker to its end; afterwards nothing that it started is left."""
        self.in_memory = request["in_memory"]
        fresh: bool = request["fresh"]
        for name in (
            () if fresh else request["imports"]
        ):  # what is forked finds them imported; a new interpreter doesn't
            with suppress(Exception):  # the job meets the error where it belongs
                importlib.import_module(name)
        doing = self.kept if fresh else None
        if doing is None or self.reaper.exit_code(doing.pid) is not None:
            doing = self._start(fresh)
        if fresh:
            self.kept = None
        self.groups.add(doing.pid)
        answer = self._watched(doing, request, self._left_alone())
        if fresh and answer.get("goes_on"):
            self.kept = doing
            end_descendants(self.reaper, but=self._left_alone())
        else:
            doing.channel.close()
            end_descendants(self.reaper, [doing.pid], but=self._left_alone())
            self.groups.discard(doing.pid)
        answer["pid"] = doing.pid
        return answer

    def _left_alone(self) -> list[int]:
        return [self.kept.pid] if self.kept is not None else []

    def _watched(self, doing: _Worker, request: dict[str, Any], left_alone: list[int]) -> dict[str, Any]:
        """The worker's answer, or what became of it."""
        watch = Watch(BuildLimits(**request["limits"]), [Path(folder) for folder in request["folders"]])
        stage, gone = "build", False
        with suppress(OSError):  # a kept worker that ended meanwhile shows below
            doing.channel.send(request["job"])
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(doing.channel, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(_TICK_SECONDS)}
                if self.control in ready:
                    self.control.receive(0.0)  # nothing is sent during a job: this raises that the socket is closed
                self._check_parent()
                code = self.reaper.exit_code(doing.pid)
                while not gone:
                    try:
                        message = doing.channel.receive(0.0)
                    except EOFError:
                        gone = True
                        selector.unregister(doing.channel)
                        break
                    if message is None:
                        break
                    if message["kind"] == "stage":
                        stage = message["stage"]
                    elif message["kind"] == "progress":
                        self.control.send(message)
                    else:
                        return {**message, "peak_bytes": watch.peak_bytes, "total_seconds": watch.seconds}
                facts = {"stage": stage, "peak_bytes": watch.peak_bytes, "total_seconds": watch.seconds}
                if code is not None:
                    return {"kind": "ended", "exit_code": code, **facts}
                excess = watch.excess(descendants(but=left_alone))
                if excess is not None:
                    return {"kind": "excess", **asdict(excess), **facts}

    def _start(self, fresh: bool) -> _Worker:
        """Fork a worker: a copy of this process, or, if `fresh`, a new interpreter (CUDA does not survive a fork)."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(pid, Channel(ours))
        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ours.close()
            self.control.socket.close()
            if self.kept is not None:
                self.kept.channel.socket.close()
            if fresh:
                theirs.set_inheritable(True)
                os.execv(sys.executable, interpreter("worker", theirs.fileno(), parent))  # noqa: S606
            die_with_parent(parent)
            worker.serve(Channel(theirs))
            code = 0
        finally:
            os._exit(code)


def interpreter(module: str, fd: int, parent: int) -> list[str]:
    """The command that starts a module of this package in a fresh interpreter with this one's `sys.path`.

    Not by `-m`, which would put the current folder first, where a file of the user's may have the name of a library's.
    """
    code = f"import sys; sys.path[:] = {search_path()!r}; from {__package__}.{module} import main; main({fd}, {parent})"
    return [sys.executable, "-c", code]


def search_path() -> list[str]:
    """Where modules are imported from; objects in `sys.path` that are no strings mean nothing to another process."""
    entries: list[object] = list(sys.path)
    return [entry for entry in entries if isinstance(entry, str)]
