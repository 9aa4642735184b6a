"""TensorRT and TensorRT for RTX as backends."""

from __future__ import annotations

import copy
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...capture.swap import original_method
from ...errors import AituneError, BuildError, Refused
from ...schema import Candidate, Signature, TensorLeaf, dim_symbol
from ..base import Availability, Backend, BuildJob, Executable, Ties
from ..export import FlatModule, export_program, export_sample
from ..onnx_file import IMPORTS, write_onnx
from ..rewrites import rewrite
from ..settled import Settled
from ..traced import can_trace, write_traced
from .artifact import ENGINES, MODEL, Description, card_of, remove_model
from .builder import TensorRTConfig, build_plan, load_builder, release_builders, timing_cache_name
from .engine import Engine, Scratch
from .flavor import FLAVORS, Flavor, available, require
from .spec import EngineSpec, specs_of

if TYPE_CHECKING:
    from torch import nn

EXPORTED, TRACED = "torch.export", "torch.jit.trace"
"""Which of torch's exporters wrote an ONNX file: a refit needs one by the same."""
OLDEST_COMPATIBLE = "8.0"
"""Compute capability from which hardware-compatible engines run."""
TF32_ERROR = 3e-4
_DTYPES = frozenset(("float32", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "bool"))


class TensorRTBackend(Backend):
    """Builds engines from the module's ONNX export: static ones for recorded shapes, a dynamic one for the rest.

    The artifact is one `.plan` file for each engine and `engines.json`, which names their ranges and what they were built
    for; with `keep_onnx` also the ONNX file, from which they are built again where they don't hold.
    """

    name = "tensorrt"
    flavor: ClassVar[Flavor] = FLAVORS["tensorrt"]
    config_type = TensorRTConfig
    isolation = "file"
    runs_code = True
    capturable = True
    follows_torch = False
    imports = IMPORTS
    sources = (f"{MODEL}*", ENGINES)
    complexity = 3
    config: TensorRTConfig

    @classmethod
    def available(cls) -> Availability:
        return available(cls.flavor)

    @classmethod
    def release(cls) -> None:
        release_builders()

    def typical_error(self) -> float:
        return TF32_ERROR if self.config.tf32 else 0.0

    def ties(self) -> Ties:
        compatible = self.config.hardware_compatible
        return Ties(
            cpu=False,
            later_versions=self.config.version_compatible and self.config.host_code,
            oldest_gpu=OLDEST_COMPATIBLE if compatible or self.flavor.portable else None,
        )

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        devices = {leaf.device.partition(":")[0] for leaf in signature.tensor_leaves}
        if devices != {"cuda"}:
            return []
        found = [self.candidate()]
        if any(p.dtype == torch.float32 for p in module.parameters()) and not self.config.tf32:
            found.append(type(self)(replace(self.config, tf32=True)).candidate())
        return found

    def build(self, job: BuildJob) -> Executable:
        for leaf in (*job.signature.tensor_leaves, *job.signature.output_leaves):
            if isinstance(leaf, TensorLeaf) and leaf.dtype not in _DTYPES:
                raise Refused(f"{leaf.path} is {leaf.dtype}, which TensorRT does not exchange")
        device = _device(job.signature)
        trt = require(self.flavor)
        given = (job.folder / MODEL).exists()
        notes: tuple[str, ...] = ("built from the ONNX file that was kept",)
        try:
            if given:
                exporter = Description.read(job.folder).exporter
                took = self._plans(trt, job)
            else:
                exporter, notes, took = self._from_module(trt, job)
        except BaseException:
            if not given:  # or it would be taken for one to build from
                remove_model(job.folder)
            raise
        card, capability = card_of(device)
        Description(str(trt.__version__), card, capability, exporter, tuple(self._specs(job))).write(job.folder)
        if not self.config.keep_onnx:
            remove_model(job.folder)
        executable = self.load(job)
        executable.notes = (*notes, f"engines: {', '.join(took)}")
        return executable

    def _from_module(self, trt: Any, job: BuildJob) -> tuple[str, tuple[str, ...], list[str]]:
        """Export and build; gives the exporter used, notes, and what each engine took.

        What torch's exporter or TensorRT's parser can't take goes through torch's older exporter, which traces one call. Raises
        Refused with both reasons if that doesn't do either.
        """
        try:
            notes = self._export(job, job.folder / MODEL, EXPORTED)
        except (AituneError, ImportError, MemoryError, torch.OutOfMemoryError):
            raise  # what no graph keeps, or what is no matter of converting
        except Exception as error:
            first: Exception = error
        else:
            try:
                return EXPORTED, notes, self._plans(trt, job)
            except Refused as error:
                first = error
        if not can_trace():
            raise first
        remove_model(job.folder)
        try:
            self._export(job, job.folder / MODEL, TRACED)
            took = self._plans(trt, job)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as second:
            raise Refused(f"{_said(first)}; with torch's older exporter: {_said(second)}") from first
        return TRACED, (f"traced by torch's older exporter, because: {_said(first)}",), took

    def _specs(self, job: BuildJob) -> list[EngineSpec]:
        points = [sample.point for sample in job.samples]
        return specs_of(job.signature, points, static=self.config.static_engines, dynamic=self.config.dynamic_engine)

    def _plans(self, trt: Any, job: BuildJob) -> list[str]:
        """Build every engine from the ONNX file in the folder; gives their names with the seconds that each took.

        Loading the builder is none of them: it takes seconds, but once for all builds of a run.
        """
        specs = self._specs(job)
        cache = self._timing_cache(trt, job)
        job.progress("loading the builder", None)
        loading = load_builder(trt, job.signature)
        took = [f"the builder itself ({loading:.1f} s)"] if loading >= 0.1 else []
        for number, spec in enumerate(specs):
            start = time.perf_counter()
            which = f"engine {number + 1} of {len(specs)}"

            def progress(phase: str, fraction: float | None, which: str = which) -> None:
                job.progress(f"{which}: {phase}", fraction)

            plan = build_plan(
                trt,
                job.folder / MODEL,
                job.signature,
                spec,
                self.config,
                progress=progress,
                timing_cache=cache,
                values=lambda number: [s.tensors()[number].flatten().tolist() for s in job.samples],
            )
            (job.folder / f"{spec.name}.plan").write_bytes(plan)
            took.append(f"{spec.name} ({time.perf_counter() - start:.1f} s)")
        return took

    def _export(self, job: BuildJob, path: Path, exporter: str) -> tuple[str, ...]:
        """Write the module as an ONNX file; gives notes. Raises Refused for what a graph can't keep."""
        exported = _keeping_float32(job, self.config.keep_float32) if self.config.keep_float32 else job
        if exporter == TRACED:
            job.progress("tracing", None)
            write_traced(exported, path)
            return ()
        job.progress("exporting", None)
        program, notes = export_program(exported)
        rewrite(program)
        settled = Settled(program, job.signature)
        job.progress("converting to ONNX", None)
        write_onnx(program, path, fold_integers=True)
        settled.check()
        return notes

    def _refit(self, job: BuildJob, engines: Sequence[Engine], exporter: str) -> bool:
        """Bring the engines' weights up to the module's; False if that can't be."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / MODEL
            self._export(job, path, exporter)
            return all(engine.refit(path) for engine in engines)

    def _timing_cache(self, trt: Any, job: BuildJob) -> Path | None:
        """Shared by the builds of this machine where the job names a folder for that."""
        if job.shared is None or self.flavor.name != "tensorrt":
            return None
        device = _device(job.signature)
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return job.shared / timing_cache_name(trt, name, capability)

    def load(self, job: BuildJob) -> Executable:
        trt = require(self.flavor)
        job.progress("loading the engines", None)
        described = Description.read(job.folder)
        device = _device(job.signature)
        card, capability = card_of(device)
        foreign = described.foreign(self.flavor.title, str(trt.__version__), capability, self.ties())
        if foreign:
            raise BuildError(foreign)
        moved = bool(described.card) and described.card != card
        engines: list[Engine] = []
        scratch = Scratch(device)
        try:
            for spec in described.engines:
                plan = (job.folder / f"{Path(spec.name).name}.plan").read_bytes()
                host_code = self.config.version_compatible and self.config.host_code
                engines.append(Engine(trt, plan, spec, job.signature, device, scratch=scratch, host_code=host_code))
        except BaseException:
            for engine in engines:
                engine.close()
            raise
        runner = _Engines(engines, job)
        refittable = self.config.refittable and bool(job.samples)
        return Executable(
            runner.call,
            refresh=(lambda: runner.alone(lambda: self._refit(job, engines, described.exporter)))
            if refittable
            else None,
            flat=True,
            close=runner.close,
            notes=(f"built on {described.card}, here is {card}",) if moved else (),
            uncovered=runner.uncovered,
            memory_bytes=scratch.size_bytes + sum(engine.memory_bytes for engine in engines),
        )


class TensorRTRTXBackend(TensorRTBackend):
    """TensorRT for RTX: engines are built anywhere, also without a GPU, and finished on the user's RTX card."""

    name = "tensorrt_rtx"
    flavor = FLAVORS["rtx"]


def _said(error: BaseException) -> str:
    """An error in one line; what led to it instead, if torch raised it, as that says more."""
    while not isinstance(error, AituneError) and error.__cause__ is not None:
        error = error.__cause__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:400]
    return text if isinstance(error, AituneError) else f"{type(error).__name__}: {text}"


class _Engines:
    """The engines of a signature as one callable; sizes that none serves run the original."""

    def __init__(self, engines: Sequence[Engine], job: BuildJob) -> None:
        self.engines, self.job = list(engines), job
        self._sources = _symbol_sources(job.signature)
        self._chosen: dict[tuple[int, ...], Engine | None] = {}
        self._original: Callable[..., Any] | None = None
        self._uncovered = 0
        self._turn = threading.RLock()

    def alone(self, work: Callable[[], bool]) -> bool:
        """Do something with the engines while no call runs them."""
        with self._turn:
            return work()

    def call(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        sizes = tuple([tensors[i].size(axis) // factor for i, axis, factor in self._sources.values()])
        try:
            engine = self._chosen[sizes]
        except KeyError:
            engine = self._choose(sizes)
        if engine is not None:
            with self._turn:  # only the launch; what was launched runs on
                return engine(tensors)
        self._uncovered += 1
        if self._original is None:
            self._original = FlatModule(self.job, export_sample(self.job)).forward
        result: Sequence[torch.Tensor] = self._original(*tensors)
        return result

    def _choose(self, sizes: tuple[int, ...]) -> Engine | None:
        named = dict(zip(self._sources, sizes, strict=True))
        found = next((e for e in self.engines if e.spec.serves(named)), None)
        if len(self._chosen) < 4096:
            self._chosen[sizes] = found
        return found

    def uncovered(self) -> int:
        return self._uncovered

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def _symbol_sources(signature: Signature) -> dict[str, tuple[int, int, int]]:
    """For each symbol an input, axis and factor to read its size from."""
    sources: dict[str, tuple[int, int, int]] = {}
    for i, leaf in enumerate(signature.tensor_leaves):
        for axis, dim in enumerate(leaf.dims):
            name = dim_symbol(dim)
            if name is not None:
                sources.setdefault(name, (i, axis, int(str(dim).rpartition("*")[0] or 1)))
    return sources


def _device(signature: Signature) -> torch.device:
    devices = {leaf.device for leaf in signature.tensor_leaves}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        raise Refused(f"an engine runs on one GPU, but the inputs are on {', '.join(sorted(devices))}")
    return torch.device(devices.pop())


def _keeping_float32(job: BuildJob, pattern: str) -> BuildJob:
    """The job on a copy whose matching submodules run in float32 under autocast.

    Raises Refused if the pattern is no regular expression or matches nothing.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise Refused(f"keep_float32 must be a regular expression, but got {pattern!r}: {error}") from None
    module = copy.deepcopy(job.module)
    matched = [child for path, child in module.named_modules() if path and wanted.fullmatch(path)]
    if not matched:
        raise Refused(f"keep_float32={pattern!r} matches no submodule of {job.path or 'the model'}")
    for child in matched:
        child.forward = _in_float32(child.forward)  # type: ignore[method-assign]
    return replace(job, module=module, original=original_method(module, job.signature.method))


def _in_float32(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return forward(*[_raised(a) for a in args], **{k: _raised(v) for k, v in kwargs.items()})

    return run


def _raised(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value
