"""Running an engine: contexts, streams, addresses, outputs.

What an engine asks for, and how it is kept:

- It reads and writes by address, aligned to 256 bytes and contiguous: other inputs are copied first.
- It synchronises on the default stream, so it runs on a stream of its own where the caller's is that one; events order both.
- A context belongs to one call at a time, and to the work that the call has queued: the next one waits for its event. One
  that was captured in a CUDA graph belongs to that graph for good.
- Outputs are fresh tensors of torch's allocator. Where their shapes depend on values, the engine asks for memory while
  it runs, which synchronises with the host; such a call can't be captured.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import BuildError, Refused
from ...schema import Signature
from .builder import Log
from .spec import EngineSpec

ALIGNMENT_BYTES = 256
MAX_CONTEXTS = 8
"""Contexts that wait for calls; each holds scratch memory on the GPU."""


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


@dataclass
class _Context:
    """An execution context with what its last call left: shapes, the event after its work, tensors it reads."""

    context: Any
    event: torch.cuda.Event
    shapes: tuple[tuple[int, ...], ...] | None = None
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)
    stream: int = 0
    held: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """A deserialised engine; may be called from any thread.

    `host_code` lets it load the library that a plan brings along, if it does. Raises BuildError if the plan can't be loaded
    here (another version, another kind of card), with TensorRT's reason.
    """

    def __init__(
        self,
        trt: ModuleType,
        plan: bytes,
        spec: EngineSpec,
        signature: Signature,
        device: torch.device,
        *,
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
        mode = trt.TensorIOMode.INPUT
        self.inputs = [
            (name, int(name.rpartition("_")[2]), self.engine.get_tensor_location(name) == trt.TensorLocation.HOST)
            for name in names
            if self.engine.get_tensor_mode(name) == mode
        ]
        outputs = [name for name in names if self.engine.get_tensor_mode(name) != mode]
        self.outputs = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
        self.dtypes = {name: dtypes[self.engine.get_tensor_dtype(name)] for name in names}
        self.plan_bytes = len(plan)
        self.on_host = any(host for _, _, host in self.inputs)
        self._stream = torch.cuda.Stream(device)
        self._nothing = torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        self._free: list[_Context] = [self._new_context()]
        self._captured: list[_Context] = []
        self._lock = threading.Lock()

    @property
    def scratch_bytes(self) -> int:
        """Device memory of one context."""
        size = getattr(self.engine, "device_memory_size_v2", None)
        return int(size if size is not None else self.engine.device_memory_size)

    @property
    def memory_bytes(self) -> int:
        """Weights and scratch memory on the GPU, about."""
        return self.plan_bytes + self.scratch_bytes * (len(self._free) + len(self._captured))

    def _new_context(self) -> _Context:
        with torch.cuda.device(self.device):
            context = self.engine.create_execution_context()
            if context is None:
                raise BuildError(f"no context for the engine {self.spec.name}: {self.log.reason('out of memory')}")
            return _Context(context, torch.cuda.Event())

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensor leaves in, output tensors in order, on the caller's stream."""
        caller = torch.cuda.current_stream(self.device)
        capturing = torch.cuda.is_current_stream_capturing()
        inputs = [self._input(name, tensors[i], host) for name, i, host in self.inputs]
        own = caller == torch.cuda.default_stream(self.device)
        stream = self._stream if own else caller
        shapes = tuple(tuple(tensors[i].shape) for _, i, _ in self.inputs)
        taken = self._take(shapes, stream.cuda_stream, capturing=capturing)
        try:
            if own:
                stream.wait_stream(caller)
            if not capturing and taken.stream not in (0, stream.cuda_stream):
                stream.wait_event(taken.event)
            results = self._enqueue(taken, inputs, shapes, stream)
            if not capturing:
                taken.event.record(stream)
                taken.stream = stream.cuda_stream
            if own:
                caller.wait_stream(stream)
        finally:
            self._give_back(taken, capturing=capturing)
        return results

    def _input(self, name: str, tensor: torch.Tensor, host: bool) -> torch.Tensor:
        """The tensor as the engine reads it: contiguous, aligned, shape values on the host."""
        tensor = tensor.detach()
        if tensor.dtype != self.dtypes[name]:
            tensor = tensor.to(self.dtypes[name])
        if host:
            return tensor.to("cpu").contiguous()
        if not tensor.is_cuda:
            tensor = tensor.to(self.device)
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()

    def _take(self, shapes: tuple[tuple[int, ...], ...], stream: int, *, capturing: bool) -> _Context:
        """A context for one call; the one that ran these shapes on this stream last, if it is free."""
        with self._lock:
            self._free.sort(key=lambda c: (c.shapes == shapes, c.stream == stream))
            if capturing:
                if not self._free or self._free[-1].shapes != shapes:
                    raise BuildError("an engine must have run these shapes before it is captured in a CUDA graph")
                return self._free.pop()
            if self._free:
                return self._free.pop()
        return self._new_context()

    def _give_back(self, taken: _Context, *, capturing: bool) -> None:
        with self._lock:
            if capturing:
                self._captured.append(taken)  # the graph reads its scratch memory at every replay
            elif len(self._free) < MAX_CONTEXTS:
                self._free.append(taken)
            else:
                # Its queued work still needs its memory.
                taken.event.synchronize()

    def _enqueue(
        self,
        taken: _Context,
        inputs: list[torch.Tensor],
        shapes: tuple[tuple[int, ...], ...],
        stream: torch.cuda.Stream,
    ) -> list[torch.Tensor]:
        context = taken.context
        if taken.shapes != shapes or self.on_host:
            for (name, _, host), tensor, shape in zip(self.inputs, inputs, shapes, strict=True):
                if not context.set_input_shape(name, shape):
                    raise BuildError(
                        f"the engine {self.spec.name} doesn't take {name} of shape {shape}: {self.log.reason('')}"
                    )
                if host:
                    context.set_tensor_address(name, tensor.data_ptr())
            taken.output_shapes = [tuple(context.get_tensor_shape(name)) for name in self.outputs]
            taken.shapes = shapes
        for (name, _, _), tensor in zip(self.inputs, inputs, strict=True):
            context.set_tensor_address(name, tensor.data_ptr() or self._nothing.data_ptr())
        results: list[torch.Tensor | None] = []
        asked: dict[str, Any] = {}
        for name, shape in zip(self.outputs, taken.output_shapes, strict=True):
            if -1 in shape:
                if torch.cuda.is_current_stream_capturing():
                    raise Refused("the shape of an output depends on values, which a CUDA graph does not wait for")
                asked[name] = _allocator(self.trt, self.device)
                context.set_output_allocator(name, asked[name])
                results.append(None)
                continue
            result = torch.empty(shape, dtype=self.dtypes[name], device=self.device)
            context.set_tensor_address(name, result.data_ptr() or self._nothing.data_ptr())
            results.append(result)
        taken.held = inputs
        if not context.execute_async_v3(stream.cuda_stream):
            taken.shapes = None
            raise BuildError(f"the engine {self.spec.name} failed to run: {self.log.reason('no reason given')}")
        if asked:
            stream.synchronize()
        return [
            result if result is not None else asked[name].tensor(self.dtypes[name])
            for name, result in zip(self.outputs, results, strict=True)
        ]

    def refit(self, path: Path) -> bool:
        """Take the weights of an ONNX file of the same graph; the caller sees to it that no call runs meanwhile."""
        trt = self.trt
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            refitter = trt.Refitter(self.engine, self.log.logger)
            parser = trt.OnnxParserRefitter(refitter, self.log.logger)
            return bool(parser.refit_from_file(str(path)) and refitter.refit_cuda_engine())

    def close(self) -> None:
        """Free contexts and engine, after the work that they were given."""
        with self._lock:
            contexts = [*self._free, *self._captured]
            self._free, self._captured = [], []
        for taken in contexts:
            taken.event.synchronize()
            taken.held = []
            del taken.context


def _allocator(trt: ModuleType, device: torch.device) -> Any:
    """Gives an engine memory for an output whose shape it finds while it runs."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory = torch.empty(0, dtype=torch.uint8, device=device)
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            self.memory = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            return self.memory.data_ptr()

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Sequence[int]) -> None:
            self.shape = tuple(shape)

        def tensor(self, dtype: torch.dtype) -> torch.Tensor:
            count = 1
            for size in self.shape:
                count *= size
            return self.memory[: count * dtype.itemsize].view(dtype).reshape(self.shape)

    return Allocator()
