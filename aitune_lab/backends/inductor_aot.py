"""Inductor ahead of time: the module is compiled once into a package that runs without Python's compiler.

What Inductor's own package leaves to its caller is done here. It takes its inputs at the strides for which it was
compiled, so they are brought to those. It checks no input unless told so, so it is. And compiling settles questions about
sizes ("is the batch 2?") for the sizes at hand without saying so, so the answers are read back and must hold for all sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..capture.recorder import Sample, as_tensor
from ..capture.structure import is_tensor
from ..errors import BackendUnavailable, Refused
from ..schema import Candidate, Signature
from .base import Availability, Backend, BackendConfig, BuildJob, Executable
from .export import IMPORTS, export_program, quiet
from .indices import checking, index_ranges, ranges_as_text, ranges_from_text
from .inductor_jit import TorchInductorJitBackend
from .settled import Settled, led_by_odd_sizes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.export import ExportedProgram

_PACKAGE, _FACTS = "model.pt2", "inputs.json"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CHECK = "AOTI_RUNTIME_CHECK_INPUTS"
_KNOWN_SHAPES = 1024
"""Shapes of an input whose strides are remembered."""


@dataclass(frozen=True)
class TorchInductorAotConfig(BackendConfig):
    """Options of AOTInductor.

    Attributes:
        freezing: bake the weights in and fold and pack them: the option that matters on the CPU.
        max_autotune: time several kernels for each matrix product and convolution while compiling.
    """

    freezing: bool = False
    max_autotune: bool = False


class TorchInductorAotBackend(Backend):
    """Compiles the exported module into `model.pt2`, which loads in a moment and needs no compiler.

    Beside it stands `inputs.json`: the layout of each input, the ranges of indices among them, and the weights that can
    be brought up to date in place.
    """

    name = "inductor_aot"
    config_type = TorchInductorAotConfig
    isolation = "file"
    imports = (*IMPORTS, "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")
    runs_code = True
    kin = "inductor"
    further = "fallbacks"
    complexity = 2
    config: TorchInductorAotConfig

    @classmethod
    def available(cls) -> Availability:
        # Packages run anywhere; only building one needs a compiler.
        return Availability(True, versions={"torch": torch.__version__})

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        plain, frozen = type(self)().candidate(), type(self)(freezing=True).candidate()
        if any(leaf.device.startswith("cuda") for leaf in signature.tensor_leaves):
            compiles = bool(TorchInductorJitBackend().candidates(signature, module))
            return [plain, frozen, type(self)(max_autotune=True).candidate()] if compiles else []
        return [frozen, plain]

    def build(self, job: BuildJob) -> Executable:
        compiler = TorchInductorJitBackend.available()
        if not compiler.ok:
            raise BackendUnavailable(f"backend {self.name!r} cannot build here: {compiler.reason}. {compiler.cure}")
        job.progress("exporting", None)
        formats = _formats(job)
        samples = [_laid_out_sample(sample, formats) for sample in job.samples]
        program, notes = export_program(replace(job, samples=led_by_odd_sizes(job, samples)))
        settled = Settled(program, job.signature)
        refreshable = {} if self.config.freezing else _refreshable(program, job.module)
        job.progress("compiling", None)
        _compile(program, job, self.config)
        settled.check()
        facts = {
            "inputs": [str(f).removeprefix("torch.") for f in formats],
            "weights": refreshable,
            "indices": ranges_as_text(index_ranges(program, [sample.tensors() for sample in job.samples])),
        }
        (job.folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        executable = self.load(job)
        executable.notes = notes
        return executable

    def load(self, job: BuildJob) -> Executable:
        job.progress("loading the package", None)
        facts = json.loads((job.folder / _FACTS).read_text(encoding="utf-8"))
        formats = [getattr(torch, name) for name in facts["inputs"]]
        package = _loaded(job.folder / _PACKAGE, _device_index(job.signature))
        ranges = ranges_from_text(facts["indices"])
        on_cpu = not any(leaf.device.startswith("cuda") for leaf in job.signature.tensor_leaves)
        call = _caller(_checking(package.loader.run), formats, job.signature)
        if ranges and on_cpu:
            call = checking(call, ranges)
        if job.samples:
            with torch.no_grad():
                call(*job.samples[0].tensors())
        return Executable(
            call,
            flat=True,
            live_weights=False,
            refresh=_refresher(package, facts["weights"], job.module),
            memory_bytes=(job.folder / _PACKAGE).stat().st_size,
        )


# --- what goes in ---------------------------------------------------------------------------------------------------


def _formats(job: BuildJob) -> list[torch.memory_format]:
    """The memory format in which each input is taken: the usual one, or channels_last where recorded calls came so."""

    def of(tensors: Sequence[torch.Tensor]) -> torch.memory_format:
        last = _FORMATS.get(tensors[0].dim())
        if last is not None and all(
            not t.is_contiguous() and t.is_contiguous(memory_format=last) for t in tensors if t.numel()
        ):
            return last
        return torch.contiguous_format

    return [of(column) for column in zip(*(sample.tensors() for sample in job.samples), strict=True)]


def _strides(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _laid_out(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """The tensor at the strides of the format, also where axes of size 1 would allow others."""
    strides = _strides(tensor.shape, memory_format)
    if tensor.stride() == strides:
        return tensor
    tensor = tensor.contiguous(memory_format=memory_format)
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def _laid_out_sample(sample: Sample, formats: Sequence[torch.memory_format]) -> Sample:
    waiting = iter(formats)
    leaves = list(sample.leaves)
    for i, leaf in enumerate(leaves):
        if is_tensor(leaf):
            leaves[i] = _laid_out(leaf, next(waiting))
        elif isinstance(leaf, np.ndarray):
            leaves[i] = _laid_out(as_tensor(leaf), next(waiting)).numpy()
    return replace(sample, leaves=leaves)


# --- compiling ------------------------------------------------------------------------------------------------------


def _compile(program: ExportedProgram, job: BuildJob, config: TorchInductorAotConfig) -> None:
    import torch._inductor.config as settings
    from torch._inductor import aoti_compile_and_package

    wanted = {
        "freezing": config.freezing,
        "max_autotune": config.max_autotune,
        "cpp.threads": job.threads,
        # Otherwise small weights become numbers in the code, out of reach for a refresh.
        "always_keep_tensor_constants": not config.freezing,
        # Sizes 0 and 1 are compared like all others.
        "aot_inductor.check_lowerbound": False,
    }
    # Some of them came with later versions of torch.
    known = {name: value for name, value in wanted.items() if _has(settings, name)}
    with torch.no_grad(), quiet("torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aoti_compile_and_package(program, package_path=str(job.folder / _PACKAGE), inductor_configs=known)


def _has(settings: Any, name: str) -> bool:
    try:
        attrgetter(name)(settings)
    except AttributeError:
        return False
    return True


_environment = threading.Lock()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set while entered; hold the lock around it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# --- loading --------------------------------------------------------------------------------------------------------


def _loaded(path: Path, device_index: int) -> Any:
    """The package, loaded. Torch unpacks it into a temporary folder, which nothing would remove after a kill.

    On the CPU all of it is mapped into memory once it is loaded. GPU kernels are read when they are first needed, so there
    the folder goes with the package, or at exit.
    """
    from torch._inductor import aoti_load_package

    folder = tempfile.mkdtemp(prefix="aitune-lab-aot-")
    keep = False
    try:
        with _environment, _variable("TMPDIR", folder), quiet("torch"):
            package = aoti_load_package(str(path), device_index=device_index)
        keep = device_index >= 0
        if keep:
            weakref.finalize(package.loader, shutil.rmtree, folder, ignore_errors=True)
        return package
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


# --- calling --------------------------------------------------------------------------------------------------------


def _device_index(signature: Signature) -> int:
    """The index of the GPU on which it runs; -1 on the CPU. Raises Refused for several."""
    devices = {leaf.device for leaf in signature.tensor_leaves if leaf.device != "cpu"}
    if len(devices) > 1:
        raise Refused(f"a package runs on one device, but the inputs lie on {', '.join(sorted(devices))}")
    return max((int(device.partition(":")[2] or 0) for device in devices), default=-1)


def _checking(run: Callable[[list[torch.Tensor]], Any]) -> Callable[[list[torch.Tensor]], Any]:
    """The package's run, with its checks of inputs switched on.

    A package asks the environment at its first run and never again, so the variable is there for that run alone.
    """
    asked = False

    def first(inputs: list[torch.Tensor]) -> Any:
        nonlocal asked
        with _environment, _variable(_CHECK, "1"):
            result = run(inputs)
            asked = True
        return result

    def checked(inputs: list[torch.Tensor]) -> Any:
        return run(inputs) if asked else first(inputs)

    return checked


def _caller(
    run: Callable[[list[torch.Tensor]], Any], formats: Sequence[torch.memory_format], signature: Signature
) -> Callable[..., Sequence[torch.Tensor]]:
    """A call with flat tensors, each brought to the strides for which the package was compiled."""
    slots: list[tuple[torch.memory_format, dict[Any, tuple[int, ...]]]] = [(f, {}) for f in formats]

    def fitted(tensor: torch.Tensor, memory_format: torch.memory_format, known: dict[Any, tuple[int, ...]]) -> Any:
        shape = tensor.shape
        strides = known.get(shape)
        if strides is None:
            if len(known) >= _KNOWN_SHAPES:
                known.clear()
            strides = known[shape] = _strides(shape, memory_format)
        return tensor if tensor.stride() == strides else _laid_out(tensor, memory_format)

    def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        result: Sequence[torch.Tensor] = run([fitted(x, f, k) for x, (f, k) in zip(tensors, slots, strict=True)])
        return result

    if not signature.autocast:
        return call
    kinds = sorted({leaf.device.partition(":")[0] for leaf in signature.tensor_leaves} | {"cpu"})

    def outside_autocast(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        # The casts are part of the graph; autocast would add its own to the operators that the package calls.
        with torch.autocast(kinds[0], enabled=False), torch.autocast(kinds[-1], enabled=False):
            return call(*tensors)

    return outside_autocast


# --- weights --------------------------------------------------------------------------------------------------------


def _refreshable(program: ExportedProgram, module: nn.Module) -> dict[str, list[int]]:
    """Names in the graph of the tensors of the module that it reads, with their strides; empty if one can't be told.

    Tied weights are one constant there, which would answer for two once they are untied, so with them nothing is told.
    """
    names = [n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.numel()]
    if len(names) != len([*module.parameters(), *module.buffers()]) or len({t.data_ptr() for t in tensors}) != len(
        tensors
    ):
        return {}
    signature = program.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    read = [lifted[n.name] for n in program.graph.nodes if n.op == "placeholder" and n.name in lifted and n.users]
    found = {}
    for name in read:
        tensor = _held(module, name)
        if tensor is not None:
            found[name] = list(tensor.stride())
            dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
            if dense.stride() != tensor.stride():
                return {}
    return found


def _held(module: nn.Module, name: str) -> torch.Tensor | None:
    """The module's tensor of that name in the graph; None for a constant of the code."""
    try:
        value = attrgetter(name.removeprefix("module."))(module)
    except AttributeError:
        return None
    return value.detach() if isinstance(value, torch.Tensor) else None


def _refresher(package: Any, weights: Mapping[str, Sequence[int]], module: nn.Module) -> Callable[[], bool] | None:
    """Copies the module's present weights into the package; None if it doesn't hold each of them under its name."""
    if not weights or not weights.keys() <= set(package.get_constant_fqns()):
        return None
    shapes = {}
    for name in weights:
        tensor = _held(module, name)
        if tensor is None:
            return None
        shapes[name] = (tensor.shape, tensor.dtype, tensor.device)

    def refresh() -> bool:
        now = {}
        for name, strides in weights.items():
            tensor = _held(module, name)
            if tensor is None or (tensor.shape, tensor.dtype, tensor.device) != shapes[name]:
                return False
            if list(tensor.stride()) != list(strides):
                tensor = torch.empty_strided(
                    tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
            now[name] = tensor
        package.load_constants(now, check_full_update=False)
        return True

    return refresh
