"""From an ONNX file to engines: a strongly typed network, profiles, options, progress, and a timing cache.

Networks are strongly typed: the dtypes in the file are those that run, in all versions of TensorRT (from 11 on there is
nothing else). So lower precision is asked for before the export, never from the builder; but TensorFloat-32, which
the builder uses for float32 unless told otherwise.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import BuildError, Refused
from ...schema import Signature
from ..base import BackendConfig
from .spec import EngineSpec

PROGRESS_SECONDS = 0.1
"""The builder calls back a million times in one build; more often than this nothing leaves the callback."""

Progress = Callable[[str, float | None], None]
Values = Callable[[int], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class TensorRTConfig(BackendConfig):
    """Options of TensorRT. Defaults are right unless a comment in a trial says otherwise.

    Attributes:
        tf32: allow TensorFloat-32 in float32 products and convolutions (relative errors near 3e-4). Off by default, so
            that float32 stays float32.
        optimization_level: 0 to 5, how long the builder looks for kernels; None takes TensorRT's default (3).
        workspace_bytes: scratch memory that a kernel may take; None allows what the card has.
        static_engines: engines for single recorded shapes, which run up to 20 % faster than a dynamic one, at most.
        dynamic_engine: one more engine for the rest of the recorded or declared range.
        hardware_compatible: engines that also run on other cards (of Ampere or newer), slower.
        version_compatible: engines that later versions of TensorRT load as well, slower. They need TensorRT's lean
            runtime of the version that built them: see `host_code`.
        host_code: bring that runtime along in version-compatible engines. It is a library, and loading the engine runs it.
        refittable: weights can be changed without building again.
        keep_float32: regular expression of submodule paths that stay in float32 when the candidate's precision is lower.
        keep_onnx: keep the exported ONNX file beside the engines, also in a `.ait`.
    """

    tf32: bool = False
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    static_engines: int = 4
    dynamic_engine: bool = True
    hardware_compatible: bool = False
    version_compatible: bool = False
    host_code: bool = False
    refittable: bool = False
    keep_float32: str | None = None
    keep_onnx: bool = False


class Log:
    """What TensorRT says while it works: errors and warnings, the last ones kept."""

    KEPT = 200

    def __init__(self, trt: ModuleType) -> None:
        self.lines: list[str] = []
        lines, kept = self.lines, self.KEPT
        severities = {
            trt.ILogger.INTERNAL_ERROR: "internal error",
            trt.ILogger.ERROR: "error",
            trt.ILogger.WARNING: "warning",
        }

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in severities:
                    lines.append(f"{severities[severity]}: {message}")
                    del lines[:-kept]

        self.logger = Logger()

    def errors(self) -> list[str]:
        return [line.partition(": ")[2] for line in self.lines if "error: " in line[:18]]

    def reason(self, otherwise: str) -> str:
        """The last error as one line, or `otherwise`."""
        errors = self.errors()
        return errors[-1].strip().splitlines()[0][:300] if errors else otherwise


@dataclass
class _Kept:
    """A builder that waits for the next build, and what it says."""

    builder: Any
    log: Log


_kept: dict[tuple[str, int], _Kept] = {}
_turn = threading.RLock()


@contextmanager
def _the_builder(trt: ModuleType) -> Iterator[_Kept]:
    """The builder of the current device, for one build at a time.

    It is kept from one build to the next: a new one loads its kernels for the card again, 1.4 GB, which takes longer than
    most builds. One whose build went wrong or was cancelled is not.
    """
    key = (str(trt.__name__), torch.cuda.current_device() if torch.cuda.is_available() else -1)
    with _turn:
        kept = _kept.pop(key, None)
        if kept is None:
            log = Log(trt)
            try:
                kept = _Kept(trt.Builder(log.logger), log)
            except Exception as error:
                raise BuildError(f"TensorRT can't start its builder: {log.reason(str(error))}") from error
        kept.log.lines.clear()
        try:
            yield kept
        except Refused:
            _kept[key] = kept
            raise
        _kept[key] = kept


def load_builder(trt: ModuleType, signature: Signature) -> float:
    """Have a builder ready for a signature's builds; gives the seconds that took: next to none where one was kept.

    Raises BuildError if TensorRT can't start it.
    """
    start = time.perf_counter()
    with _on_device(signature), _the_builder(trt):
        return time.perf_counter() - start


@contextmanager
def _on_device(signature: Signature) -> Iterator[None]:
    """The device of the inputs is the current one: a builder times kernels there."""
    device = next((leaf.device for leaf in signature.tensor_leaves if leaf.device.startswith("cuda")), None)
    with torch.cuda.device(device) if device is not None and torch.cuda.is_available() else nullcontext():
        yield


def release_builders() -> None:
    """Free the builders that wait for a next build, and the memory of their kernels; one at work is left alone."""
    _kept.clear()


def parse(trt: ModuleType, log: Log, builder: Any, path: Path) -> Any:
    """The network of an ONNX file, strongly typed. Raises Refused that names the node TensorRT can't take."""
    flags = 0
    for name in ("STRONGLY_TYPED", "EXPLICIT_BATCH"):  # the second one only where the first doesn't imply it
        flag = getattr(trt.NetworkDefinitionCreationFlag, name, None)
        if flag is not None and not flags:
            flags |= 1 << int(flag)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        what = (
            f"{errors[0].node_name() or 'the graph'}: {errors[0].desc()}" if errors else log.reason("no reason given")
        )
        raise Refused(f"TensorRT's ONNX parser can't take {' '.join(what.split())[:400]}")
    return network


def add_profile(
    builder: Any, config: Any, network: Any, signature: Signature, spec: EngineSpec, values: Values | None
) -> None:
    """The shapes of an engine's inputs, and the values of those that decide over shapes.

    Raises Refused for ranges that TensorRT doesn't accept.
    """
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    if not signature.symbols and not any(tensor.is_shape_tensor for tensor in inputs):
        return
    profile = builder.create_optimization_profile()
    for tensor in inputs:
        number = int(tensor.name.rpartition("_")[2])
        if -1 in tuple(tensor.shape):
            profile.set_shape(tensor.name, *spec.shapes(signature.tensor_leaves[number]))
        if tensor.is_shape_tensor:
            if values is None:
                raise Refused(f"the input {number} decides over a shape by its values, and none were recorded")
            recorded = values(number)
            places = [sorted(place) for place in zip(*recorded, strict=True)]
            low, usual, high = ([place[at] for place in places] for at in (0, len(recorded) // 2, -1))
            profile.set_shape_input(tensor.name, low, usual, high)
    if config.add_optimization_profile(profile) < 0:
        raise Refused(f"TensorRT doesn't accept the shapes of the engine {spec.name}: {dict(spec.ranges)}")


def build_plan(
    trt: ModuleType,
    path: Path,
    signature: Signature,
    spec: EngineSpec,
    config: TensorRTConfig,
    *,
    progress: Progress,
    timing_cache: Path | None = None,
    values: Values | None = None,
) -> bytes:
    """Build one engine and return it serialised.

    Args:
        trt: the imported package.
        path: the ONNX file, whose inputs are called `input_<number of the tensor leaf>`.
        signature: gives the inputs' dimensions.
        spec: the engine's ranges.
        config: options.
        progress: called with a phase and the fraction done, ten times a second at most; what it raises cancels the build
            (TensorRT may take some seconds to heed that) and is raised here.
        timing_cache: file that remembers how fast kernels are on this card, so that they aren't timed again. It may be
            shared by processes; None does without.
        values: gives, by the number of an input that decides over shapes, its values in each recorded call, as flat lists.

    Raises:
        Refused: the parser can't take the file, or the builder finds no implementation.
        BuildError: the builder failed.
    """
    with _on_device(signature), _the_builder(trt) as kept:
        network = parse(trt, kept.log, kept.builder, path)
        settings = kept.builder.create_builder_config()
        _configure(trt, settings, config)
        add_profile(kept.builder, settings, network, signature, spec, values)
        monitor = _monitor(trt, progress)
        settings.progress_monitor = monitor
        with _timing_cache(trt, settings, timing_cache):
            plan = kept.builder.build_serialized_network(network, settings)
        if monitor.raised is not None:
            raise monitor.raised
        if plan is None:
            reason = kept.log.reason("no reason given")
            if "could not find any implementation" in reason.lower():
                raise Refused(f"TensorRT has no implementation: {reason}")
            raise BuildError(f"TensorRT could not build the engine {spec.name}: {reason}")
        return bytes(plan)


def _configure(trt: ModuleType, settings: Any, config: TensorRTConfig) -> None:
    flags = trt.BuilderFlag
    if hasattr(flags, "TF32"):
        (settings.set_flag if config.tf32 else settings.clear_flag)(flags.TF32)
    if hasattr(flags, "STRICT_NANS"):
        settings.set_flag(flags.STRICT_NANS)  # `x - x` and `0 * x` stay NaN where x is
    if config.refittable:
        settings.set_flag(flags.REFIT)
    if config.version_compatible and hasattr(flags, "VERSION_COMPATIBLE"):
        settings.set_flag(flags.VERSION_COMPATIBLE)
        if not config.host_code:  # a plan that brings host code would run it when loaded from a file
            settings.set_flag(flags.EXCLUDE_LEAN_RUNTIME)
    if config.hardware_compatible:
        settings.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if config.optimization_level is not None:
        settings.builder_optimization_level = config.optimization_level
    if config.workspace_bytes is not None:
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, config.workspace_bytes)


def _monitor(trt: ModuleType, progress: Progress) -> Any:
    """Passes the builder's progress on, and a cancel back."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.raised: BaseException | None = None
            self._steps: dict[str, int] = {}
            self._last = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if self.raised is None and time.monotonic() - self._last >= PROGRESS_SECONDS:
                self._last = time.monotonic()
                total = self._steps.get(phase_name) or 0
                try:
                    progress(phase_name, min(1.0, (step + 1) / total) if total else None)
                except BaseException as error:  # raised where the build was asked for, not through TensorRT's own code
                    self.raised = error
            return self.raised is None

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()


@contextmanager
def _timing_cache(trt: ModuleType, settings: Any, path: Path | None) -> Iterator[None]:
    """Builds with what the file knows, and adds what was learnt, together with what other processes added meanwhile."""
    if path is None or not hasattr(settings, "create_timing_cache"):
        yield
        return
    cache = settings.create_timing_cache(_read(path))
    if cache is None or not settings.set_timing_cache(cache, ignore_mismatch=False):  # damaged, or another card's
        cache = settings.create_timing_cache(b"")
        settings.set_timing_cache(cache, ignore_mismatch=False)
    yield
    learnt = settings.get_timing_cache()
    if learnt is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        merged = settings.create_timing_cache(_read(path))
        if merged is None or not merged.combine(learnt, ignore_mismatch=False):
            merged = learnt
        _replace(path, bytes(merged.serialize()))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, where the system can say so."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_suffix(path.suffix + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timing_cache_name(trt: ModuleType, card: str, capability: Sequence[int]) -> str:
    """File name of the timing cache for a card and a version: others' timings would be refused or misleading."""
    kept = "".join(c if c.isalnum() else "-" for c in card.lower())
    return f"{trt.__name__}-{trt.__version__}-sm{''.join(map(str, capability))}-{kept}.timing"
