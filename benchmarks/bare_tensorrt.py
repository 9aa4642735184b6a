"""TensorRT by hand, with nothing of aitune_lab: what one would write for one model at one shape.

    python benchmarks/bare_tensorrt.py resnet50 resnet50.plan timings   # builds an engine, in a process of its own

The engine is strongly typed, with TensorFloat-32 off and strict about NaN, as those of aitune_lab are; weights and inputs
are those of `gpu.py`. It runs in one captured CUDA graph.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

SECONDS = 240.0


class Plain(nn.Module):
    """Gives a tuple of tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.module(*args)
        return tuple(output.to_tuple() if hasattr(output, "to_tuple") else output)


def build(name: str, plan: Path, timings: Path) -> None:
    """Export a model of `gpu.py` and build its engine; timings of kernels are read from a file, if there, and kept."""
    import tensorrt as trt
    from gpu import MODELS

    torch.manual_seed(0)
    model = MODELS[name](False).on("cuda")
    names = [f"in{i}" for i in range(len(model.args))]
    onnx = plan.with_suffix(".onnx")
    start = time.perf_counter()
    with torch.no_grad():
        torch.onnx.export(Plain(model.module), model.args, onnx, dynamo=True, verbose=False, input_names=names)
    exported = time.perf_counter() - start
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        sys.exit(f"the parser failed: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.set_flag(trt.BuilderFlag.STRICT_NANS)
    cache = config.create_timing_cache(timings.read_bytes() if timings.exists() else b"")
    config.set_timing_cache(cache, False)
    start = time.perf_counter()
    made = builder.build_serialized_network(network, config)
    if made is None:
        sys.exit("the builder failed")
    plan.write_bytes(bytes(made))
    timings.write_bytes(bytes(config.get_timing_cache().serialize()))
    print(f"exported in {exported:.1f} s, built in {time.perf_counter() - start:.1f} s")


def build_aside(name: str, folder: Path, timings: Path) -> tuple[Path, str]:
    """The plan of a model, built in a child process, and what it said. Raises RuntimeError with the reason."""
    plan = folder / f"{name}.plan"
    command = [sys.executable, __file__, name, str(plan), str(timings)]
    try:
        ran = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=SECONDS, cwd=Path(__file__).parent
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {SECONDS:.0f} s") from None
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or [f"ended with {ran.returncode}"])[-1])
    return plan, ran.stdout.strip().splitlines()[-1]


def graph(plan: Path, args: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call that copies the arguments into a captured graph of the engine and replays it.

    The engine's inputs are called by the number of the argument: `in0`, or `input_0` as in engines of aitune_lab.
    """
    import tensorrt as trt

    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    given = {name: args[int(re.sub(r"\D", "", name))] for name in inputs}
    statics = {name: tensor.clone() for name, tensor in given.items()}
    dtypes = {
        trt.float16: torch.float16,
        trt.float32: torch.float32,
        trt.bfloat16: torch.bfloat16,
        trt.int64: torch.int64,
    }
    outputs = []
    for name in names:
        tensor = statics.get(name)
        if tensor is None:
            tensor = torch.empty(
                tuple(engine.get_tensor_shape(name)), dtype=dtypes[engine.get_tensor_dtype(name)], device="cuda"
            )
            outputs.append(tensor)
        context.set_tensor_address(name, tensor.data_ptr())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        context.execute_async_v3(side.cuda_stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    kept = (runtime, engine, context)  # the graph needs what they hold

    def call() -> Any:
        assert kept
        for name, static in statics.items():
            static.copy_(given[name])
        captured.replay()
        return outputs

    return call


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
