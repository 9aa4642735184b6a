"""Memory and streams of captured CUDA graphs, and the capture itself."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

RECOVERY_ATTEMPTS = 1000

_capture_lock = threading.RLock()
"""One capture at a time: they share a stream, and are short."""
_streams: dict[int, torch.cuda.Stream] = {}
_pools: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[torch.device, str], GraphPool]] = (
    weakref.WeakKeyDictionary()
)


class GraphPool:
    """The memory that all graphs of one module and candidate share (four graphs: 52 MiB instead of 408).

    Sharing means that a replay may overwrite what another graph left, so replays take turns: by a lock among threads and by
    an event among streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._handle: Any = None
        self._graphs: dict[Any, int] = {}
        self._event: torch.cuda.Event | None = None
        self._stream = 0
        self._index = device.index or 0

    def begin(self) -> None:
        """Start a turn, under the lock: what is queued on the current stream comes after all earlier turns."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if self._event is None:
            self._event = torch.cuda.Event()
        elif stream != self._stream:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        self._stream = stream

    def end(self) -> None:
        """End the turn that `begin` started on the same stream."""
        assert self._event is not None
        self._event.record()

    def wait(self) -> None:
        """Wait until all that was queued in turns is done; a lost device counts as done."""
        if self._event is not None:
            with suppress(RuntimeError):
                self._event.synchronize()

    def handle(self) -> Any:
        """The pool to capture into. Torch forgets a pool with its last graph, so then a new one begins."""
        with self.lock:
            if self._handle is None or not self._graphs.get(self._handle):
                self._handle = torch.cuda.graph_pool_handle()
            return self._handle

    def count(self, handle: Any) -> None:
        """A graph was captured into the pool."""
        with self.lock:
            self._graphs[handle] = self._graphs.get(handle, 0) + 1

    def release(self, handle: Any) -> None:
        """A graph of the pool is gone."""
        with self.lock:
            self._graphs[handle] -= 1
            if not self._graphs[handle]:
                del self._graphs[handle]

    def abandon(self, handle: Any) -> None:
        """A capture into the pool failed: the next one uses another."""
        with self.lock:
            if self._handle == handle:
                self._handle = None

    def size_bytes(self) -> int:
        """Device memory reserved for the graphs of this pool."""
        with self.lock:
            handles = {tuple(handle) for handle in self._graphs}
        segments = torch.cuda.memory_snapshot() if handles else []
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in handles)


def pool_of(module: torch.nn.Module, device: torch.device, candidate: str) -> GraphPool:
    """The pool of a module's graphs of one candidate on a device, made at the first call.

    Candidates that are compared with each other don't share: what the losers held is free once they are closed.
    """
    with _capture_lock:
        return _pools.setdefault(module, {}).setdefault((device, candidate), GraphPool(device))


def capture(pool: GraphPool, warm_up: Callable[[], None], run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T, Any]:
    """Capture `run` after `warm_up`, both on the capturing stream of the pool's device, which is the current one.

    Returns the graph, what `run` returned, and the memory pool to `release` with the graph. Raises what `run` raises, and
    what CUDA says of a capture that another thread spoiled; either leaves torch as it was.
    """
    with _capture_lock:
        stream = _stream(pool.device)
        outer = torch.cuda.current_stream(pool.device)
        stream.wait_stream(outer)
        try:
            with torch.cuda.stream(stream):
                warm_up()
                stream.synchronize()
                # cuBLAS's workspace must be the graph's own: graphs of other modules replay at the same time.
                torch._C._cuda_clearCublasWorkspaces()
                try:
                    return _captured(pool, run)
                finally:
                    torch._C._cuda_clearCublasWorkspaces()
        finally:
            outer.wait_stream(stream)


def _captured(pool: GraphPool, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T, Any]:
    handle = pool.handle()
    try:
        graph, result = _capture_into(handle, run)
    except BaseException:
        pool.abandon(handle)
        _recover(pool.device, handle)
        raise
    pool.count(handle)
    return graph, result, handle


def _capture_into(handle: Any, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=handle, capture_error_mode="thread_local")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # its outputs then say why
        try:
            result = run()
        except BaseException:
            with suppress(RuntimeError):  # what went wrong first is what counts
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result


def _recover(device: torch.device, handle: Any) -> None:
    """Take torch out of a capture that failed.

    Torch forgets two things then: its allocator goes on as if memory were captured (what was used on several streams is
    never freed), and its random generator refuses to draw. The first is told so, the second by a capture that succeeds.
    """
    _end_allocation(device, handle)
    scratch = torch.zeros(1, device=device)
    for _ in range(RECOVERY_ATTEMPTS):
        healthy = torch.cuda.graph_pool_handle()
        try:
            _capture_into(healthy, lambda: scratch.add_(1))
            return
        except RuntimeError:  # spoiled as well, by another thread that synchronises the device
            _end_allocation(device, healthy)
            time.sleep(0.001)
    raise RuntimeError(
        f"a CUDA graph capture failed, and so did {RECOVERY_ATTEMPTS} attempts to take torch's random generator out of it: "
        "another thread calls torch.cuda.synchronize() all the time"
    )


def _end_allocation(device: torch.device, handle: Any) -> None:
    index = device.index or 0
    with suppress(RuntimeError):  # raised if torch did it
        torch._C._cuda_endAllocateToPool(index, handle)
        torch._C._cuda_releasePool(index, handle)


def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for all captures: each stream that ran a matrix product keeps a workspace of 32 MiB."""
    index = device.index or 0
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device)
    return _streams[index]
