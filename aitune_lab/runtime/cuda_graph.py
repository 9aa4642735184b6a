"""CUDA graphs around any executable: captured for each concrete shape, replayed from whichever thread calls.

Our own capture, not Inductor's `reduce-overhead`, which is bound to a thread. Inputs are copied into static buffers and
outputs out of them, so that a graph behaves like the executable it was captured from. What can't be captured is refused
with the reason; shapes without a graph run the executable itself.

A capture never happens inside a user's call, unless asked for (`warmup`). While one runs, CUDA random numbers and
device-wide synchronisation raise in *other* threads, and the latter spoils the capture; it is then repeated.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..backends.base import BuildJob, Executable
from ..backends.captured import keeping
from ..capture.probe import autocast_of, seeded
from ..capture.structure import flatten, is_tensor, unflatten_call
from ..errors import Refused
from ..schema import Point, Signature, TensorLeaf, dim_symbol
from .graph_check import different_calls, nearly_equal, output_places, refuse_uncapturable, weights_of
from .graph_pool import GraphPool, capture, pool_of

MAX_GRAPHS = 16
"""Graphs that one executable holds; a further one, when asked for, takes the place of the least used."""
WARM_UP_CALLS = 3
CAPTURE_ATTEMPTS = 4
CHECKED_SAMPLES = 3
"""Replays on as many different inputs must equal the uncaptured executable before a graph counts."""

_asked = threading.local()


@contextmanager
def capturing() -> Iterator[None]:
    """While entered, tuned calls from this thread capture a graph for each shape that has none yet."""
    before = getattr(_asked, "on", False)
    _asked.on = True
    try:
        yield
    finally:
        _asked.on = before


def warmup(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a tuned target once, capturing a CUDA graph for each shape that this call meets and that has none yet.

    Returns what the call returns. Where a capture fails, the call runs uncaptured.
    """
    with capturing():
        return target(*args, **kwargs)


@dataclass
class _Captured:
    """A graph with its static tensors. `places` gives for each output the tensor to copy, or the input that it is."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    places: tuple[int, ...]
    pool: Any
    kept: list[Any]
    """What the executable needs as long as the graph."""
    uses: int = 0
    alive: bool = True
    """False once its memory may be used for something else; read and written under the pool's lock."""


def with_cuda_graph(
    inner: Executable,
    job: BuildJob,
    *,
    limit: int = MAX_GRAPHS,
    outputs: Literal["copied", "until next call"] = "copied",
) -> Executable:
    """The executable behind CUDA graphs, captured at the points of `job.samples` (the first `limit` of them).

    Args:
        inner: the executable to capture; it belongs to the result from now on, but is not closed if this raises.
        job: what it was built from.
        limit: graphs held at most.
        outputs: `"copied"` gives tensors of the caller's own; `"until next call"` gives the graph's own memory, which the
            next call of any tuned method of the module overwrites: it saves a copy where the caller takes care.

    Raises:
        Refused: it can't be captured (inputs or weights on the CPU, a host synchronisation inside, state, inputs changed
            in place, objects), or replays differ from the executable.
    """
    refuse_uncapturable(job)
    graphs = CudaGraphs(inner, job, limit, outputs == "copied")
    try:
        graphs.capture_points()
    except BaseException:
        graphs.drop()
        raise
    return graphs.executable()


class CudaGraphs:
    """The graphs of one executable. See `with_cuda_graph`."""

    def __init__(self, inner: Executable, job: BuildJob, limit: int, copied: bool) -> None:
        self.inner, self.job, self.limit, self.copied = inner, job, limit, copied
        self.signature = job.signature
        self.device = torch.device(job.signature.tensor_leaves[0].device)
        self.pool: GraphPool = pool_of(job.module, self.device, job.candidate.key)
        self.captured: dict[tuple[int, ...], _Captured] = {}
        self.notes: list[str] = []
        self.bytes = 0
        self._channels_last = job.candidate.memory_format == "channels_last"
        self._sources = _sources(job.signature)
        self._at = [i for i, leaf in enumerate(job.signature.leaves) if isinstance(leaf, TensorLeaf)]
        self._values = list(job.samples[0].leaves) if job.samples else []
        self._closed = False
        self._asking = threading.Lock()
        self._uncovered = 0
        self._made: Executable | None = None
        self._remember_weights()

    def executable(self) -> Executable:
        live, inner = self.inner.live_weights, self.inner
        files = any(self.job.folder.iterdir()) if self.job.folder.is_dir() else False
        self._made = Executable(
            self.call,
            flat=True,
            live_weights=live,
            recompiles=inner.recompiles or not files,
            refresh=self.refresh if live else None,
            close=self.close,
            notes=(*inner.notes, *self.notes),
            uncovered=self.uncovered if inner.uncovered is not None else None,
            memory_bytes=inner.memory_bytes + self.bytes,
            moved=self.moved if live else None,
        )
        return self._made

    def _remember_weights(self) -> None:
        """Where the weights lie that graphs read. Aliases keep that memory alive: nothing freed is ever read."""
        self._held = [t.detach() for t in weights_of(self.job.module)] if self.inner.live_weights else []
        self._addresses = [_address(t) for t in self._held]

    def moved(self) -> bool:
        """Whether a weight lies elsewhere than when the graphs were captured. In-place changes don't count."""
        return [_address(t) for t in weights_of(self.job.module)] != self._addresses

    # --- calls

    def call(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tensor leaves of a call in, tensor leaves of the output out. From any thread, on the caller's stream."""
        if torch.cuda.current_device() == self.device.index:
            return self._call(tensors)
        with torch.cuda.device(self.device):
            return self._call(tensors)

    def _call(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        key = tuple([tensors[i].size(axis) for i, axis in self._sources])
        found = self.captured.get(key)
        if found is None and getattr(_asked, "on", False):
            found = self._capture_asked(key, tensors)
        results = None
        if found is not None and not torch.cuda.is_current_stream_capturing():
            results = self._replay(found, tensors)
        return self._run(tensors) if results is None else results

    def _replay(self, found: _Captured, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The outputs of a replay; None if the graph was dropped meanwhile."""
        # Graphs of a module share memory, so their replays take turns, on whatever streams. Everything happens on the
        # caller's stream: its inputs are ready there, and the copies of the outputs are ordinary tensors of that stream.
        pool = self.pool
        with pool.lock:
            if not found.alive:
                return None
            pool.begin()
            try:
                if len(tensors) == 1:
                    found.inputs[0].copy_(tensors[0])
                else:
                    torch._foreach_copy_(found.inputs, tuple(tensors))
                found.graph.replay()
                results = [y.clone() for y in found.outputs] if self.copied else found.outputs
            finally:
                pool.end()
            found.uses += 1
        return [results[place] if place >= 0 else tensors[-1 - place] for place in found.places]

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The executable itself, as flat as a graph, on inputs laid out as in its static buffers."""
        if self._channels_last:
            tensors = [t.contiguous(memory_format=_format_of(t)) if t.dim() == 4 else t for t in tensors]
        if self.inner.flat:
            return list(self.inner.call(*tensors))
        leaves = list(self._values)
        for i, tensor in zip(self._at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = self.job.form.arguments(unflatten_call(self.signature.inputs, leaves))
        flat = flatten(self.inner.call(*args, **kwargs))
        kinds = [isinstance(leaf, TensorLeaf) for leaf in self.signature.output_leaves]
        if flat.node != self.signature.outputs or [is_tensor(x) for x in flat.leaves] != kinds:
            raise Refused("the output has another structure than the one recorded")
        return [x for x in flat.leaves if is_tensor(x)]

    def uncovered(self) -> int:
        assert self.inner.uncovered is not None
        return self.inner.uncovered() - self._uncovered

    # --- captures

    def capture_points(self) -> None:
        """Capture at every point of the samples. Raises Refused if none can be captured, or a replay is wrong."""
        gc.collect()
        torch.cuda.empty_cache()  # a graph's pool can't use what is cached outside of it
        by_point: dict[Point, list[list[torch.Tensor]]] = {}
        for sample in self.job.samples:
            by_point.setdefault(sample.point, []).append(sample.tensors())
        if not by_point:
            raise Refused("no call was recorded at which a graph could be captured")
        before, failed = self.pool.size_bytes(), {}
        labels = []
        # The largest first: smaller ones then find room in the memory that it left in the pool.
        points = sorted(list(by_point)[: self.limit], key=lambda p: -sum(t.numel() for t in by_point[p][0]))
        for point in points:
            try:
                self._add(by_point[point])
                labels.append(point.label)
            except Refused as error:
                failed[point.label] = str(error)
        if not labels:
            raise Refused(next(iter(failed.values())))
        statics = sum(t.numel() * t.element_size() for c in self.captured.values() for t in c.inputs)
        self.bytes = max(0, self.pool.size_bytes() - before) + statics
        self.notes.append(f"CUDA graphs at {', '.join(labels)}, {self.bytes / 2**20:.0f} MiB")
        self.notes += [f"no graph at {label}: {reason}" for label, reason in failed.items()]
        if self.inner.uncovered is not None:
            self._uncovered = self.inner.uncovered()

    def _add(self, calls: Sequence[Sequence[torch.Tensor]]) -> _Captured:
        """Capture at the shape of these calls, check it, and hold it."""
        made = self._capture(calls[0])
        try:
            self._check(made, calls)
        except BaseException:
            self._forget(made)
            raise
        if len(self.captured) >= self.limit:
            least = min(self.captured, key=lambda key: self.captured[key].uses)
            self._forget(self.captured.pop(least))
        key = tuple([calls[0][i].size(axis) for i, axis in self._sources])
        self.captured[key] = made
        return made

    def _capture_asked(self, key: tuple[int, ...], tensors: Sequence[torch.Tensor]) -> _Captured | None:
        if self._closed or self.moved() or torch.cuda.is_current_stream_capturing():
            return None
        with self._asking:
            if key in self.captured:
                return self.captured[key]
            before = self.pool.size_bytes()
            try:
                made = self._add([[t.detach() for t in tensors]])
            except Refused:
                return None
        self.bytes += max(0, self.pool.size_bytes() - before) + sum(t.numel() * t.element_size() for t in made.inputs)
        if self._made is not None:
            self._made.memory_bytes = self.inner.memory_bytes + self.bytes
        return made

    def _capture(self, tensors: Sequence[torch.Tensor]) -> _Captured:
        reason = ""
        for attempt in range(CAPTURE_ATTEMPTS):
            try:
                return self._capture_once(tensors)
            except Refused:
                raise
            except Exception as error:
                torch.cuda.synchronize(self.device)  # if the device is lost, that is what must be said
                reason = _first_line(error)
                if _ours(reason):
                    break
                time.sleep(0.01 * 4**attempt)
        raise Refused(f"it can't be captured in a CUDA graph: {reason}")

    def _capture_once(self, tensors: Sequence[torch.Tensor]) -> _Captured:
        with (
            torch.cuda.device(self.device),
            torch.inference_mode(False),
            torch.no_grad(),
            autocast_of(self.signature.autocast),
        ):
            inputs = [self._static(t) for t in tensors]
            covered = self.inner.uncovered() if self.inner.uncovered is not None else 0

            def warm_up() -> None:
                for _ in range(WARM_UP_CALLS):
                    self._run(inputs)
                if self.inner.uncovered is not None and self.inner.uncovered() != covered:
                    raise Refused("calls of this shape would be compiled again and run the original")

            kept: list[Any] = []

            def run() -> list[torch.Tensor]:
                with keeping(kept):
                    return self._run(inputs)

            graph, results, token = capture(self.pool, warm_up, run)
        try:
            outputs, places = output_places(self._tensor_outputs(), results, inputs, weights_of(self.job.module))
        except BaseException:
            self.pool.release(token)
            raise
        return _Captured(graph, inputs, outputs, places, token, kept)

    def _static(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = _format_of(tensor) if self._channels_last else torch.preserve_format
        return torch.empty_like(tensor, memory_format=layout, requires_grad=False).copy_(tensor)

    def _tensor_outputs(self) -> list[TensorLeaf]:
        return [leaf for leaf in self.signature.output_leaves if isinstance(leaf, TensorLeaf)]

    def _check(self, made: _Captured, calls: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raise Refused unless replays on three different inputs equal the executable, random numbers included."""
        random = self.signature.facts.random
        repeats = 2 if random else 1  # a second call shows whether the generator moved on as it should
        with torch.cuda.device(self.device), torch.no_grad(), autocast_of(self.signature.autocast):
            for number, tensors in enumerate(different_calls(calls, CHECKED_SAMPLES)):
                given = [t.clone() for t in tensors]
                with seeded(number, self.device):
                    expected = [y.clone() for _ in range(repeats) for y in self._run(given)]
                with seeded(number, self.device):
                    actual = [y.clone() for _ in range(repeats) for y in self._replay(made, given) or ()]
                for i, (leaf, x, y) in enumerate(zip(self._tensor_outputs() * repeats, expected, actual, strict=True)):
                    if not nearly_equal(x, y):
                        what = "draws other random numbers than" if random else "differs from"
                        again = " at a second call" if i >= len(self._tensor_outputs()) else ""
                        raise Refused(f"a replay of its CUDA graph {what} the executable{again}, in {leaf.path}")

    # --- the end

    def refresh(self) -> bool:
        """Capture again with the weights where they are now; False if that fails (then nothing is captured)."""
        shapes = [c.inputs for c in self.captured.values()]
        self.drop()
        self._remember_weights()
        try:
            refuse_uncapturable(self.job)
            for inputs in shapes:
                self._add([inputs])
        except Exception:
            self.drop()
            return False
        return True

    def _forget(self, made: _Captured) -> None:
        """Let go of a graph, once what was launched of it is done."""
        with self.pool.lock:
            made.alive = False
            self.pool.wait()
            self.pool.release(made.pool)

    def drop(self) -> None:
        """Free all graphs."""
        captured, self.captured = self.captured, {}
        for made in captured.values():
            self._forget(made)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.drop()
        self._held = []
        self.inner.close()


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    """The layout that a tensor has in channels_last executables: images only have another one."""
    return torch.channels_last if tensor.dim() == 4 else torch.preserve_format


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _sources(signature: Signature) -> tuple[tuple[int, int], ...]:
    """(tensor, axis) at which each symbol's size is read: that is what shapes inside a signature differ in."""
    found: dict[str, tuple[int, int]] = {}
    for i, leaf in enumerate(signature.tensor_leaves):
        for axis, dim in enumerate(leaf.dims):
            symbol = dim_symbol(dim)
            if symbol is not None:
                found.setdefault(symbol, (i, axis))
    return tuple(found.values())


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _ours(reason: str) -> bool:
    """Whether the capture failed by what it ran itself (a copy to the host, a synchronisation): it will again."""
    return "not permitted when stream is capturing" in reason or "Cannot copy between CPU and CUDA" in reason
