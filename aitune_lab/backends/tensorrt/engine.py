"""Running an engine: contexts, streams, addresses, scratch memory, outputs.

What an engine asks for, and how it is kept:

- It reads and writes by address, aligned to 256 bytes and contiguous: other inputs are copied first.
- It synchronises on the default stream, so it runs on a stream of its own where the caller's is that one; events order both.
- It works in scratch memory, which all engines of an executable share: their calls take turns, by a lock among threads
  and an event among streams. So a context is never used by two calls at once either.
- A context that was captured in a CUDA graph belongs to that graph and goes with it. Its scratch memory comes from the graph's own
  pool, like everything else that is allocated during a capture: graphs that share a pool, and therefore take turns, share it.
- Outputs are fresh tensors of torch's allocator. Where their shapes depend on values, the engine asks for memory while
  it runs, which synchronises with the host; such a call can't be captured.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import BuildError, Refused
from ...schema import Signature
from ..captured import keep
from .builder import Log
from .spec import EngineSpec

ALIGNMENT_BYTES = 256
MAX_CONTEXTS = 4
"""Contexts of an engine beside the captured ones, each for the calls of one stream: it need not be told their shapes again."""

Shapes = tuple[tuple[int, ...], ...]


def torch_dtypes(trt: ModuleType) -> Mapping[Any, torch.dtype]:
    """TensorRT's dtypes as torch's."""
    pairs = {
        "FLOAT": torch.float32,
        "HALF": torch.float16,
        "BF16": torch.bfloat16,
        "INT8": torch.int8,
        "INT32": torch.int32,
        "INT64": torch.int64,
        "UINT8": torch.uint8,
        "BOOL": torch.bool,
        "FP8": torch.float8_e4m3fn,
    }
    return {getattr(trt.DataType, name): dtype for name, dtype in pairs.items() if hasattr(trt.DataType, name)}


class Scratch:
    """The memory that the engines of one executable work in, and the order of their calls, which take turns in it.

    Every method but `reserve` and `free` is called with `lock` held.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.size_bytes = 0
        """What the most demanding engine needs."""
        self.own = torch.cuda.Stream(device)
        """Where engines run that are called on the default stream."""
        self._caller = torch.cuda.default_stream(device)
        self._index = self._caller.device_index
        self._block: torch.Tensor | None = None
        self._last = 0
        self._arrived, self._done = torch.cuda.Event(), torch.cuda.Event()

    def reserve(self, size_bytes: int) -> None:
        """Have room for an engine that needs so much."""
        with self.lock:
            if size_bytes > self.size_bytes:
                self.free()
                self.size_bytes = size_bytes

    def block(self) -> torch.Tensor:
        """The memory, allocated when it is needed first."""
        if self._block is None:
            self._block = new_block(self.size_bytes, self.device)
        return self._block

    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The caller's stream, and the one for the engine: the same, unless that is the default stream."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle != self._caller.cuda_stream:
            self._caller = torch.cuda.current_stream(self.device)
        return self._caller, (self._caller if handle else self.own)

    def begin(self, caller: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Start a turn: what is queued on `stream` from here on comes after what the caller queued and all earlier turns.

        Called when everything that the turn uses is allocated: torch reuses memory in the order of the caller's stream.
        """
        if stream is not caller:
            self._arrived.record(caller)
            stream.wait_event(self._arrived)
        if stream.cuda_stream != self._last:
            stream.wait_event(self._done)
            self._last = stream.cuda_stream

    def end(self, caller: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """End the turn that began on these streams: what the caller queues from here on comes after it."""
        self._done.record(stream)
        if stream is not caller:
            caller.wait_event(self._done)

    def free(self) -> None:
        """Give the memory back, after the work that uses it."""
        with self.lock:
            self._done.synchronize()
            self._block = None


def new_block(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of torch's allocator; never empty, so that it has an address."""
    return torch.empty(max(size_bytes, ALIGNMENT_BYTES), dtype=torch.uint8, device=device)


@dataclass(eq=False)
class _Context:
    """An execution context with what it was told last: shapes, address and size of its scratch memory, host values it reads."""

    context: Any
    shared: bool
    """Whether it works in memory that it is given; otherwise it has its own."""
    shapes: Shapes | None = None
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)
    scratch: tuple[int, int] = (0, 0)
    held: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """A deserialised engine; may be called from any thread.

    `scratch` is shared with the other engines of an executable; without it the engine has its own. `host_code` lets it load
    the library that a plan brings along, if it does. Raises BuildError if the plan can't be loaded here (another version,
    another kind of card), with TensorRT's reason.
    """

    def __init__(
        self,
        trt: ModuleType,
        plan: bytes,
        spec: EngineSpec,
        signature: Signature,
        device: torch.device,
        *,
        scratch: Scratch | None = None,
        host_code: bool = False,
    ) -> None:
        self.trt, self.spec, self.device = trt, spec, device
        self.log = Log(trt)
        with torch.cuda.device(device):
            self.runtime = trt.Runtime(self.log.logger)
            self.runtime.engine_host_code_allowed = host_code
            self.engine = self.runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise BuildError(f"the engine {spec.name} can't be loaded here: {self.log.reason('no reason given')}")
        dtypes = torch_dtypes(trt)
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.dtypes = {name: dtypes[self.engine.get_tensor_dtype(name)] for name in names}
        mode = trt.TensorIOMode.INPUT
        self.inputs = [
            (
                name,
                int(name.rpartition("_")[2]),
                self.engine.get_tensor_location(name) == trt.TensorLocation.HOST,
                self.dtypes[name],
            )
            for name in names
            if self.engine.get_tensor_mode(name) == mode
        ]
        outputs = [name for name in names if self.engine.get_tensor_mode(name) != mode]
        self.outputs = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
        self.plan_bytes = len(plan)
        self.on_host = any(host for _, _, host, _ in self.inputs)
        self.scratch = scratch if scratch is not None else Scratch(device)
        self._index = torch.cuda.default_stream(device).device_index
        self._nothing = new_block(0, device)
        strategies = getattr(trt, "ExecutionContextAllocationStrategy", None)
        self._shared = getattr(strategies, "USER_MANAGED", None)
        """How contexts without scratch memory are made; None where each has to have its own."""
        if self._shared is not None:
            self.scratch.reserve(self.scratch_bytes)
        self._contexts = {self.scratch.own.cuda_stream: self._new_context()}
        self._captured: list[_Context] = []
        """Those in graphs of the user's, whose end isn't known here."""

    @property
    def scratch_bytes(self) -> int:
        """Device memory that one context works in."""
        size = getattr(self.engine, "device_memory_size_v2", None)
        return int(size if size is not None else self.engine.device_memory_size)

    @property
    def memory_bytes(self) -> int:
        """Weights and the scratch memory of contexts that have their own, on the GPU, about."""
        own = sum(not made.shared for made in self._contexts.values())
        return self.plan_bytes + self.scratch_bytes * own

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensor leaves in, output tensors in order, on the caller's stream."""
        if torch.cuda.current_device() == self._index:
            return self._call(tensors)
        with torch.cuda.device(self.device):
            return self._call(tensors)

    def _call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs = []
        for _, i, host, dtype in self.inputs:
            tensor = tensors[i]
            if (
                host
                or tensor.dtype is not dtype
                or not tensor.is_cuda
                or not tensor.is_contiguous()
                or tensor.data_ptr() % ALIGNMENT_BYTES
            ):
                tensor = self._laid_out(tensor, host, dtype)
            inputs.append(tensor)
        shapes = tuple([tensors[i].shape for _, i, _, _ in self.inputs])
        with self.scratch.lock:
            caller, stream = self.scratch.streams()
            if stream is caller and torch.cuda.is_current_stream_capturing():
                return self._capture(inputs, shapes, stream)
            return self._run(inputs, shapes, caller, stream)

    def _laid_out(self, tensor: torch.Tensor, host: bool, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as the engine reads it: contiguous, aligned, shape values on the host."""
        tensor = tensor.detach().to("cpu" if host else self.device, dtype).contiguous()
        return tensor if host or tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()

    def _run(
        self,
        inputs: list[torch.Tensor],
        shapes: Shapes,
        caller: torch.cuda.Stream,
        stream: torch.cuda.Stream,
    ) -> list[torch.Tensor]:
        taken = self._context(stream.cuda_stream)
        if taken.shared:
            _work_in(taken, self.scratch.block())
        results = self._bind(taken, inputs, shapes, stream)
        self.scratch.begin(caller, stream)
        try:
            ran = taken.context.execute_async_v3(stream.cuda_stream)
        finally:
            self.scratch.end(caller, stream)
        if not ran:
            taken.shapes = None
            raise BuildError(f"the engine {self.spec.name} failed to run: {self.log.reason('no reason given')}")
        if any(not isinstance(x, torch.Tensor) for x in results):
            stream.synchronize()
        return [x if isinstance(x, torch.Tensor) else x.take(caller) for x in results]

    def _capture(self, inputs: list[torch.Tensor], shapes: Shapes, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """The call as part of the CUDA graph that is being captured."""
        known = [self._contexts.get(stream.cuda_stream), *self._contexts.values()]
        taken = next((made for made in known if made is not None and made.shapes == shapes), None)
        if taken is None:
            raise BuildError("an engine must have run these shapes before it is captured in a CUDA graph")
        if any(-1 in shape for shape in taken.output_shapes):
            raise Refused("the shape of an output depends on values, which a CUDA graph does not wait for")
        self._contexts = {key: made for key, made in self._contexts.items() if made is not taken}
        if not keep(taken):
            self._captured.append(taken)
        block = new_block(self.scratch_bytes, self.device) if taken.shared else None
        if block is not None:
            _work_in(taken, block)
        results = self._bind(taken, inputs, shapes, stream)
        if not taken.context.execute_async_v3(stream.cuda_stream):
            if taken.shared:  # the next one has been warmed up with the very memory that is captured
                self._shared = None
                raise BuildError(
                    f"the engine {self.spec.name} can't be captured with memory that it has not used before"
                )
            raise BuildError(f"the engine {self.spec.name} failed to run: {self.log.reason('no reason given')}")
        return results

    def _context(self, stream: int) -> _Context:
        """The context for calls on a stream. One that served another stream may be told anew: its turns are over before."""
        taken = self._contexts.pop(stream, None)
        if taken is None:
            room = len(self._contexts) < MAX_CONTEXTS
            taken = self._new_context() if room else self._contexts.pop(next(iter(self._contexts)))
        self._contexts[stream] = taken  # the one that was not used for longest comes first
        return taken

    def _new_context(self) -> _Context:
        shared = self._shared is not None
        with torch.cuda.device(self.device):
            create = self.engine.create_execution_context
            made = create(self._shared) if shared else create()
        if made is None:
            raise BuildError(f"no context for the engine {self.spec.name}: {self.log.reason('out of memory')}")
        return _Context(made, shared)

    def _bind(
        self, taken: _Context, inputs: list[torch.Tensor], shapes: Shapes, stream: torch.cuda.Stream
    ) -> list[Any]:
        """Tell a context where its inputs and outputs are; gives the outputs, or what allocates them while it runs."""
        context = taken.context
        if taken.shapes != shapes or self.on_host:
            taken.shapes = None
            taken.held = [tensor for (_, _, host, _), tensor in zip(self.inputs, inputs, strict=True) if host]
            for (name, _, host, _), tensor, shape in zip(self.inputs, inputs, shapes, strict=True):
                if not context.set_input_shape(name, tuple(shape)):
                    what = f"the engine {self.spec.name} doesn't take {name} of shape {tuple(shape)}"
                    raise BuildError(f"{what}: {self.log.reason('no reason given')}")
                if host:
                    context.set_tensor_address(name, tensor.data_ptr())
            taken.output_shapes = [tuple(context.get_tensor_shape(name)) for name in self.outputs]
            taken.shapes = shapes
        for (name, _, _, _), tensor in zip(self.inputs, inputs, strict=True):
            context.set_tensor_address(name, tensor.data_ptr() or self._nothing.data_ptr())
        results: list[Any] = []
        for name, shape in zip(self.outputs, taken.output_shapes, strict=True):
            if -1 in shape:
                result = _allocator_type(self.trt)(self.dtypes[name], stream)
                context.set_output_allocator(name, result)
            else:
                result = torch.empty(shape, dtype=self.dtypes[name], device=self.device)
                context.set_tensor_address(name, result.data_ptr() or self._nothing.data_ptr())
            results.append(result)
        return results

    def refit(self, path: Path) -> bool:
        """Take the weights of an ONNX file of the same graph; the caller sees to it that no call runs meanwhile."""
        trt = self.trt
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            refitter = trt.Refitter(self.engine, self.log.logger)
            parser = trt.OnnxParserRefitter(refitter, self.log.logger)
            return bool(parser.refit_from_file(str(path)) and refitter.refit_cuda_engine())

    def close(self) -> None:
        """Free contexts and scratch memory, after the work that they were given. Graphs that captured it are gone before."""
        with self.scratch.lock:
            self.scratch.free()
            self._contexts, self._captured = {}, []


def _work_in(taken: _Context, block: torch.Tensor) -> None:
    """Give a context its scratch memory."""
    place = block.data_ptr(), block.numel()
    if taken.scratch != place:
        taken.context.set_device_memory(*place)
        taken.scratch = place


@functools.cache
def _allocator_type(trt: ModuleType) -> Any:
    """What gives an engine memory for an output whose shape it finds while it runs, for one call."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined]
        def __init__(self, dtype: torch.dtype, stream: torch.cuda.Stream) -> None:
            trt.IOutputAllocator.__init__(self)
            self.dtype, self.stream = dtype, stream
            self.memory = torch.empty(0, dtype=torch.uint8, device=stream.device)
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            with torch.cuda.stream(self.stream):  # whatever used this memory before did so on the engine's stream
                self.memory = new_block(size, self.stream.device)
            return self.memory.data_ptr()

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

        def take(self, reader: torch.cuda.Stream) -> torch.Tensor:
            """The output, which is read on the caller's stream from here on."""
            memory = self.memory
            del self.memory  # the context may keep this object for longer
            memory.record_stream(reader)
            return memory[: math.prod(self.shape) * self.dtype.itemsize].view(self.dtype).reshape(self.shape)

    return Allocator
