"""OpenVINO on the CPU: the exported module becomes an IR file, in float32 unless asked otherwise.

Left alone, OpenVINO computes float32 modules in bfloat16 on CPUs that can, pins threads to cores, and holds 64-bit integers
in 32 bits. Here the precision is part of the candidate, threads are as many as torch's, and integers that 32 bits can't hold
are refused or handed back to the original.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..environment import cpu_flags
from ..errors import PlanError, Refused, install_command
from ..schema import Candidate, Dim, Signature, TensorLeaf, evaluate_dim
from .base import Availability, Backend, BackendConfig, BuildJob, Executable
from .export import FlatModule, export_program, quiet
from .finite import check_finite, finite_inputs
from .indices import IndexRange, check_indices, index_ranges, operator_name, ranges_as_text, ranges_from_text
from .integers import Growth, growths, growths_as_text, growths_from_text
from .onnx_file import IMPORTS, write_onnx
from .openvino_int8 import GROUP_SIZES, TYPICAL_ERROR, has_large_weights, quantize_weights, schemes, unpacked_bytes
from .rewrites import rewrite
from .settled import Settled

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

PRECISIONS = {"f32": 0.0, "bf16": 1e-2}
"""Precisions to compute in, and the relative error to which they come on float32 modules."""

_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
_DTYPES = {
    "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool",
}  # fmt: skip
_GROWTHS, _RANGES, _FINITE = (("aitune_lab", name) for name in ("growths", "indices", "finite"))
"""Where the model keeps what the inputs of a call must keep to."""
_LOST = 1e-4
"""A constant so much smaller than the one that it is added to loses digits that may be all that counts near zero."""


@dataclass(frozen=True)
class OpenVINOConfig(BackendConfig):
    """Options of OpenVINO.

    Attributes:
        precision: what it computes in: `"f32"`, or `"bf16"` where the CPU can.
        quantization: weights of products and convolutions in 8 bits, with a scale for each output channel: `"int8wo"`, the
            weights only; `"int8dyn"`, the inputs of products too, 32 neighbours with one scale taken at each call. None
            leaves them as they are.
    """

    precision: str = "f32"
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.quantization not in (None, *TYPICAL_ERROR):
            raise PlanError(
                f"quantization must be None or one of {sorted(TYPICAL_ERROR)}, but got {self.quantization!r}"
            )


class OpenVINOBackend(Backend):
    """Converts the exported module to OpenVINO's IR and runs it on the CPU. The artifact is `model.xml` and `model.bin`."""

    name = "openvino"
    config_type = OpenVINOConfig
    isolation = "file"
    imports = IMPORTS
    complexity = 2
    config: OpenVINOConfig

    @classmethod
    def available(cls) -> Availability:
        if importlib.util.find_spec("openvino") is None:
            return Availability(False, "openvino not installed", install_command("openvino"))
        try:
            version = importlib.metadata.version("openvino")
        except importlib.metadata.PackageNotFoundError:  # built from source
            version = "unknown"
        return Availability(True, versions={"openvino": version})

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        tensors = [*module.parameters(), *module.buffers()]
        devices = {t.device.type for t in tensors} | {leaf.device.partition(":")[0] for leaf in signature.tensor_leaves}
        if not devices <= {"cpu"}:
            return []
        exact, low = type(self)().candidate(), type(self)(precision="bf16").candidate()
        eight = schemes(cpu_flags()) if has_large_weights(module) else ()
        lower = [type(self)(quantization=scheme).candidate() for scheme in eight]
        if not _BFLOAT16_FLAGS & {*cpu_flags()}:
            return [exact, *lower]
        half = any(t.dtype == torch.bfloat16 for t in tensors)
        return [low, exact, *lower] if half else [exact, low, *lower]

    def typical_error(self) -> float:
        return max(PRECISIONS.get(self.config.precision, 0.0), TYPICAL_ERROR.get(self.config.quantization or "", 0.0))

    def build(self, job: BuildJob) -> Executable:
        if self.config.precision not in PRECISIONS:
            raise Refused(f"precision must be one of {sorted(PRECISIONS)}, but got {self.config.precision!r}")
        if self.config.quantization and self.config.quantization not in schemes(cpu_flags()):
            raise Refused("int8dyn needs 8-bit dot products (VNNI), which this processor lacks; int8wo does without")
        for leaf in (*job.signature.tensor_leaves, *job.signature.output_leaves):
            if isinstance(leaf, TensorLeaf) and leaf.dtype not in _DTYPES:
                raise Refused(f"{leaf.path} is {leaf.dtype}, which OpenVINO does not compute in on the CPU")
        job.progress("exporting", None)
        program, notes = export_program(job)
        _refuse_unsafe(program)
        samples = [sample.tensors() for sample in job.samples]
        ranges, finite = index_ranges(program, samples), finite_inputs(program, samples)
        rewrite(program, floors=False)
        grown = growths(program)
        _refuse_folded_constants(program)
        job.progress("converting", None)
        settled = Settled(program, job.signature)
        model, way = _converted(program, job)
        settled.check()
        _name_and_bound(model, job.signature)
        if self.config.quantization:
            job.progress("quantising", None)
            count = quantize_weights(model)
            way = (*way, f"{count} weight{'s' if count != 1 else ''} in 8 bits")
        model.set_rt_info(growths_as_text(grown), [*_GROWTHS])
        model.set_rt_info(ranges_as_text(ranges), [*_RANGES])
        model.set_rt_info(json.dumps(finite), [*_FINITE])
        _openvino().save_model(model, job.folder / "model.xml", compress_to_fp16=False)
        del model
        executable = self.load(job)
        executable.notes = (*notes, *way)
        return executable

    def load(self, job: BuildJob) -> Executable:
        job.progress("compiling", None)
        model = _core().read_model(job.folder / "model.xml")
        run = _Run(_compiled(model, job.threads, self.config), job, _limits(model))
        size = sum(f.stat().st_size for f in job.folder.iterdir()) + unpacked_bytes(model)
        return Executable(run, flat=True, uncovered=run.uncovered, close=run.close, memory_bytes=size)


def _openvino() -> Any:
    """The package, imported without the part that reports every import over the network, from a thread of its own."""
    if "openvino" not in sys.modules and "openvino_telemetry" not in sys.modules:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        try:
            import openvino
        finally:
            del sys.modules["openvino_telemetry"]
    import openvino

    return openvino


@functools.lru_cache(maxsize=1)
def _core() -> Any:
    return _openvino().Core()


# --- building -------------------------------------------------------------------------------------------------------


def _refuse_unsafe(program: ExportedProgram) -> None:
    """Raise Refused for operators that answer wrongly, or write beside their memory, for what torch answers or refuses."""
    for node in program.graph.nodes:
        name = operator_name(node)
        if "embedding_bag" in name:
            raise Refused("it has embedding bags, which OpenVINO gets wrong where one is empty")
        if name == "bincount":
            raise Refused(
                "it counts integers by bincount, for which OpenVINO writes outside of its memory if one is negative"
            )


def _refuse_folded_constants(program: ExportedProgram) -> None:
    """Raise Refused for `(1 - p) + 1e-12`: OpenVINO adds both constants up first, and the small one is gone."""
    for node in program.graph.nodes:
        outer = _added_number(node)
        inner = _added_number(node.args[0]) if outer else None
        if outer and inner and outer < inner * _LOST:
            raise Refused(
                f"it adds {outer:g} to a sum with {inner:g}, which OpenVINO makes one constant: {outer:g} is lost"
            )


def _added_number(node: Any) -> float | None:
    """The magnitude of the number that a node adds to a tensor or subtracts; None if it does no such thing."""
    args: tuple[Any, ...] = getattr(node, "args", ())
    if len(args) < 2 or getattr(node, "op", "") != "call_function" or operator_name(node) not in ("add", "sub", "rsub"):
        return None
    number = args[1]
    return abs(float(number)) if isinstance(number, (int, float)) else None


def _converted(program: ExportedProgram, job: BuildJob) -> tuple[Any, tuple[str, ...]]:
    """OpenVINO's model of the program: read directly or, where that fails, by way of ONNX if that is installed."""
    openvino = _openvino()
    with torch.no_grad(), quiet("torch"), quiet("openvino"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return openvino.convert_model(program), ()
        except Exception as error:
            reason = _in_a_line(error)
            if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
                raise Refused(f"OpenVINO can't convert it: {reason}") from error
        path = job.folder / "model.onnx"
        try:
            write_onnx(program, path)
            model = _core().read_model(path)
        except Exception as error:
            raise Refused(f"OpenVINO can't convert it: {reason}; nor by way of ONNX: {_in_a_line(error)}") from error
        finally:
            for file in job.folder.iterdir():
                file.unlink()
        return model, ("converted by way of ONNX",)


def _in_a_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Exception from", "Check '")) and not line.endswith(":")]
    return f"{type(error).__name__}: {(told or lines or [''])[0][:200]}"


def _name_and_bound(model: Any, signature: Signature) -> None:
    """Give each input its number as name, fixed dimensions their size, and the others their range."""
    openvino = _openvino()
    leaves = signature.tensor_leaves
    by_name = {f"input_{i}": leaf for i, leaf in enumerate(leaves)}
    known = [by_name.get(port.any_name) for port in model.inputs if port.names]
    if len(known) != len(model.inputs) or None in known:  # not by way of ONNX, which drops inputs: all, in order
        if len(model.inputs) != len(leaves):
            raise Refused(f"OpenVINO's model takes {len(model.inputs)} of the {len(leaves)} input tensors")
        for i, port in enumerate(model.inputs):
            port.get_tensor().set_names({f"input_{i}"})
    lowest = {s.name: s.min for s in signature.symbols}
    highest = {s.name: s.max for s in signature.symbols}

    def bounded(dim: Dim) -> Any:
        return openvino.Dimension(evaluate_dim(dim, lowest), evaluate_dim(dim, highest))

    model.reshape(
        {port: openvino.PartialShape([bounded(dim) for dim in by_name[port.any_name].dims]) for port in model.inputs}
    )


@dataclass(frozen=True)
class _Limits:
    """What the inputs of a call must keep to, as `build` found it."""

    growths: tuple[Growth, ...]
    ranges: tuple[IndexRange, ...]
    finite: tuple[int, ...]


def _limits(model: Any) -> _Limits:
    grown, ranges, finite = (model.get_rt_info([*keys]).astype(str) for keys in (_GROWTHS, _RANGES, _FINITE))
    return _Limits(growths_from_text(grown), ranges_from_text(ranges), tuple(json.loads(finite)))


def _compiled(model: Any, threads: int, config: OpenVINOConfig) -> Any:
    core = _core()
    wanted = {
        "INFERENCE_PRECISION_HINT": config.precision,
        "EXECUTION_MODE_HINT": "PERFORMANCE",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        # Threads stay where the system puts them, torch's own among them, and each counts.
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": True,
        # Left alone, products whose weights are in 8 bits take their inputs in 8 bits too.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP_SIZES.get(config.quantization or "", 0),
    }
    supported = core.get_property("CPU", "SUPPORTED_PROPERTIES")
    settings = {name: value for name, value in wanted.items() if name in supported}
    return core.compile_model(model, "CPU", settings)


# --- calling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """How an output comes: OpenVINO's element type, and the dtype that it has in torch."""

    kind: str
    dtype: torch.dtype


class _Run:
    """Calls a compiled model with flat tensors, from any thread: each call takes an idle request, or makes one.

    Inputs are read where they lie (contiguous ones); outputs are copied out of the request, which the next call writes.
    """

    def __init__(self, compiled: Any, job: BuildJob, limits: _Limits) -> None:
        openvino = _openvino()
        self.tensor_type, self.shape_type, self.bfloat16 = openvino.Tensor, openvino.Shape, openvino.Type.bf16
        self.new_request: Callable[[], Any] | None = compiled.create_infer_request
        self.idle: list[Any] = []
        signature = job.signature
        self.inputs = [_number(port) for port in compiled.inputs]
        self.outputs = [
            _Output(port.element_type.get_type_name(), dtype)
            for port, dtype in zip(compiled.outputs, _output_dtypes(signature), strict=True)
        ]
        self.limits = limits
        self.beyond = itertools.count()
        self.beyond_reads = 0
        self.original = FlatModule(job, job.samples[0]) if job.samples else None

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        for growth in self.limits.growths:
            if not growth.fits(tensors[growth.input]):
                return self._by_original(growth.input, tensors)
        # Beyond them OpenVINO reads and writes what lies beside.
        check_indices(self.limits.ranges, tensors)
        check_finite(self.limits.finite, tensors)
        request = self._request()
        try:
            # Each array lives until the request has run; the request itself keeps none alive.
            held = [self._given(tensors[i]) for i in self.inputs]
            for at, tensor in enumerate(held):
                request.set_input_tensor(at, tensor)
            request.infer()
            return [self._taken(request.get_output_tensor(at), output) for at, output in enumerate(self.outputs)]
        finally:
            self.idle.append(request)

    def _request(self) -> Any:
        try:
            return self.idle.pop()
        except IndexError:
            if self.new_request is None:
                raise RuntimeError("this executable is closed") from None
            return self.new_request()

    def _given(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.contiguous()
        if tensor.dtype == torch.bfloat16:
            bits = tensor.view(torch.int16).numpy(force=True)
            return self.tensor_type(bits, self.shape_type(list(tensor.shape)), self.bfloat16)
        return self.tensor_type(tensor.numpy(force=True), shared_memory=True)

    def _taken(self, result: Any, output: _Output) -> torch.Tensor:
        if output.kind == "bf16":
            bits = torch.empty(list(result.shape), dtype=torch.int16)
            result.copy_to(self.tensor_type(bits.numpy(), result.shape, self.bfloat16))
            taken = bits.view(torch.bfloat16)
        else:
            taken = torch.from_numpy(result.data.copy())
        return taken if taken.dtype == output.dtype else taken.to(output.dtype)

    def _by_original(self, at: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.original is None:
            raise ValueError(f"tensor {at} of the call holds integers that OpenVINO can't hold in 32 bits")
        next(self.beyond)
        result: Sequence[torch.Tensor] = self.original(*tensors)
        return result

    def uncovered(self) -> int:
        """Calls so far that ran the original because of integers that 32 bits may not hold."""
        count = next(self.beyond) - self.beyond_reads
        self.beyond_reads += 1
        return count

    def close(self) -> None:
        """Free the model and its requests."""
        self.new_request = None
        self.idle.clear()


def _number(port: Any) -> int:
    return next(int(name.rpartition("_")[2]) for name in port.names if name.startswith("input_"))


def _output_dtypes(signature: Signature) -> list[torch.dtype]:
    by_path = {leaf.path: leaf for leaf in signature.tensor_leaves}
    leaves = [leaf for leaf in signature.output_leaves if isinstance(leaf, TensorLeaf)]
    leaves += [by_path[path] for path in signature.facts.mutated]
    return [getattr(torch, leaf.dtype) for leaf in leaves]
