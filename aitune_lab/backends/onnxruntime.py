"""ONNX Runtime on the CPU: the module is exported once to a file and runs without Python."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PlanError, Refused, install_command
from ..schema import Candidate, Signature, TensorLeaf
from .base import Availability, Backend, BackendConfig, BuildJob, Executable
from .export import export_program
from .finite import check_finite, finite_inputs
from .indices import check_indices, index_ranges, operator_name, ranges_as_text, ranges_from_text
from .onnx_file import IMPORTS, write_onnx
from .onnx_int8 import TYPICAL_ERROR, quantize_file
from .rewrites import rewrite
from .settled import Settled

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

_INDICES, _FINITE = "aitune_lab.indices", "aitune_lab.finite"
"""Where a file keeps the ranges of its indices, and which inputs must be finite."""
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_NUMPY_DTYPES = frozenset(
    ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
)


@dataclass(frozen=True)
class ONNXRuntimeConfig(BackendConfig):
    """Options of ONNX Runtime.

    Attributes:
        spinning: idle threads spin instead of sleeping: lower latency, and a core kept busy.
        graph_optimization: `"all"`, `"extended"`, `"basic"` or `"disabled"`.
        opset: ONNX opset to export to; None takes the exporter's default.
        quantization: products with constant weights in 8 bits: `"int8dyn"`, inputs too, with one scale for a whole tensor
            taken at each call; `"int8wo"`, the weights only, in small blocks. None leaves them as they are.
    """

    spinning: bool = False
    graph_optimization: str = "all"
    opset: int | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.quantization not in (None, *TYPICAL_ERROR):
            raise PlanError(
                f"quantization must be None or one of {sorted(TYPICAL_ERROR)}, but got {self.quantization!r}"
            )


class ONNXRuntimeBackend(Backend):
    """Exports the module to ONNX and runs it with ONNX Runtime's CPU provider.

    The artifact is `model.onnx` (weights beyond 1.5 GB stand beside it).
    """

    name = "onnxruntime"
    config_type = ONNXRuntimeConfig
    isolation = "file"
    imports = IMPORTS
    complexity = 2
    config: ONNXRuntimeConfig

    @classmethod
    def available(cls) -> Availability:
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            return Availability(False, f"{', '.join(missing)} not installed", install_command("onnxruntime"))
        return Availability(True, versions={name: _version(name) for name in _PACKAGES})

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        tensors = [*module.parameters(), *module.buffers()]
        devices = {t.device.type for t in tensors} | {leaf.device.partition(":")[0] for leaf in signature.tensor_leaves}
        if not devices <= {"cpu"}:
            return []
        return [self.candidate(), *(ONNXRuntimeBackend(quantization=scheme).candidate() for scheme in TYPICAL_ERROR)]

    def typical_error(self) -> float:
        return TYPICAL_ERROR[self.config.quantization] if self.config.quantization else 0.0

    def build(self, job: BuildJob) -> Executable:
        self._refuse_dtypes(job.signature)
        job.progress("exporting", None)
        program, notes = export_program(job)
        job.progress("converting to ONNX", None)
        path = job.folder / "model.onnx"
        _refuse_products(program)
        samples = [sample.tensors() for sample in job.samples]
        limits = {
            _INDICES: ranges_as_text(index_ranges(program, samples)),
            _FINITE: json.dumps(finite_inputs(program, samples)),
        }
        rewrite(program)
        settled = Settled(program, job.signature)
        write_onnx(program, path, opset=self.config.opset, metadata=limits)
        settled.check()
        if self.config.quantization:
            job.progress("quantising", None)
            count = quantize_file(path, self.config.quantization)
            notes = (*notes, f"{count} product{'s' if count != 1 else ''} in 8 bits")
        executable = self.load(job)
        executable.notes = notes
        return executable

    def load(self, job: BuildJob) -> Executable:
        job.progress("starting the session", None)
        path = job.folder / "model.onnx"
        session = _session(path, job.threads, self.config)
        count = sum(isinstance(leaf, TensorLeaf) for leaf in job.signature.output_leaves) + len(
            job.signature.facts.mutated
        )
        size = sum(f.stat().st_size for f in job.folder.iterdir())
        return Executable(_checked(_caller(session, count), session), flat=True, live_weights=False, memory_bytes=size)

    @staticmethod
    def _refuse_dtypes(signature: Signature) -> None:
        for leaf in (*signature.leaves, *signature.output_leaves):
            if isinstance(leaf, TensorLeaf) and leaf.dtype not in _NUMPY_DTYPES:
                raise Refused(f"{leaf.path} is {leaf.dtype}, which ONNX Runtime does not exchange on the CPU")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # onnxruntime has several distributions
        return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def _session(path: Path, threads: int, config: ONNXRuntimeConfig) -> Any:
    import onnxruntime as ort

    levels = {
        "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
        "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    }
    if config.graph_optimization not in levels:
        raise Refused(f"graph_optimization must be one of {sorted(levels)}, but got {config.graph_optimization!r}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = levels[config.graph_optimization]
    options.log_severity_level = 4  # what matters is raised
    spin = "1" if config.spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spin)
    options.add_session_config_entry("session.inter_op.allow_spinning", spin)
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except ort.capi.onnxruntime_pybind11_state.NotImplemented as error:
        raise Refused(
            f"ONNX Runtime has no CPU kernel for this module: {str(error).strip().splitlines()[0]}"
        ) from error


def _caller(session: Any, count: int) -> Callable[..., Sequence[torch.Tensor]]:
    """A call with flat tensors, by numpy views: faster than IO binding for any number of inputs.

    Inputs that the exporter dropped are not passed; outputs come in their order, whatever the session's.
    """
    names = [x.name for x in session.get_inputs()]
    index = [int(name.rpartition("_")[2]) for name in names]
    outputs = [f"output_{i}" for i in range(count)]
    # The bound method of the inner session: the Python one validates names again at each call.
    run, from_numpy, asarray = session._sess.run, torch.from_numpy, _as_array

    if len(names) == 1 and index == [0]:
        only = names[0]

        def call_one(tensor: torch.Tensor, *_: torch.Tensor) -> Sequence[torch.Tensor]:
            return [from_numpy(asarray(a)) for a in run(outputs, {only: tensor.numpy(force=True)}, None)]

        return call_one

    pairs = list(zip(names, index, strict=True))

    def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        feed = {name: tensors[i].numpy(force=True) for name, i in pairs}
        return [from_numpy(asarray(a)) for a in run(outputs, feed, None)]

    return call


def _checked(call: Callable[..., Sequence[torch.Tensor]], session: Any) -> Callable[..., Sequence[torch.Tensor]]:
    """The call, behind a look at what its inputs must keep to, as `build` found it.

    ONNX Runtime counts negative indices from the end, and picks among NaN as it likes.
    """
    kept = session.get_modelmeta().custom_metadata_map
    ranges, finite = ranges_from_text(kept.get(_INDICES, "")), tuple(json.loads(kept.get(_FINITE, "[]")))
    if not ranges and not finite:
        return call

    def checked(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        check_indices(ranges, tensors)
        check_finite(finite, tensors)
        return call(*tensors)

    return checked


def _refuse_products(program: ExportedProgram) -> None:
    """Raise Refused for the product of all integers along an axis, which ONNX Runtime takes in floating point."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.int64 and operator_name(node) == "prod":
            raise Refused("it multiplies all integers along an axis, which ONNX Runtime does in floating point")


def _as_array(value: Any) -> Any:
    import numpy as np

    return value if type(value) is np.ndarray else np.asarray(value)
