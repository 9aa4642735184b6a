"""One worker thread that runs jobs one after another, in the modes of torch that their callers were in."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from .output import Sink, captured

T = TypeVar("T")

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Modes:
    """What torch keeps for each thread of its own, so that a new thread starts without it.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether inference mode is on.
        autocast: (device type, dtype) for each device type on which autocast is on.
        autocast_cache: whether autocast keeps the weights that it cast.
        default_device: where factories such as `torch.zeros` put tensors.
        cuda_device: the current CUDA device; None while CUDA was not started.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    cuda_device: int | None

    @classmethod
    def here(cls) -> Modes:
        """The modes of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is in these modes while entered."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self.autocast_cache))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            if self.cuda_device is not None:
                stack.enter_context(torch.cuda.device(self.cuda_device))
            yield


class Job(Generic[T]):
    """Work handed to a `Worker`; may be waited for from any thread.

    Attributes:
        name: what it does, for people: `"tune"`.
    """

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self.name = name
        self._work = work
        self._modes = Modes.here()
        # The cell that asked owns what is displayed or logged, not the one that runs by then.
        self._context = contextvars.copy_context()
        self._future: Future[T] = Future()

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> T:
        """What the work returned, or raises what it raised. Waits at most `timeout` seconds (TimeoutError)."""
        return self._future.result(timeout)

    def error(self) -> BaseException | None:
        """What the work raised, if it has ended so."""
        return self._future.exception() if self._future.done() and not self._future.cancelled() else None

    def withdraw(self) -> bool:
        """Take the job back if it has not begun; tells whether it could be."""
        return self._future.cancel()

    def run(self, sink: Sink) -> None:
        """Do the work on the calling thread. What it raises is kept in the job."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            value = self._context.run(self._in_modes, sink)
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(value)

    def _in_modes(self, sink: Sink) -> T:
        with captured(sink), self._modes.entered():
            return self._work()


class Worker:
    """Runs jobs in order on one thread, which lives only while there is work. `submit` returns at once.

    Args:
        name: of the thread.
        sink: takes the lines that jobs print, on the worker's thread.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self._sink = name, sink
        self._lock = threading.Lock()
        self._waiting: deque[Job[Any]] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, name: str, work: Callable[[], T]) -> Job[T]:
        """Hand over work; it runs after what was handed over before."""
        job = Job(name, work)
        with self._lock:
            self._waiting.append(job)
            if self._thread is None:
                # A daemon: a kernel that shuts down doesn't wait for a trial to end.
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
        return job

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def on_this_thread(self) -> bool:
        """Whether the caller is the worker itself, which must not wait for its own jobs."""
        return threading.current_thread() is self._thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; tells whether that came to be in time (seconds)."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return self._thread is None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
            job.run(self._sink)
