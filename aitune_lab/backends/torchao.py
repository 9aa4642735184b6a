"""TorchAO: Linear layers computed from weights of eight bits, in eager or compiled.

What differs from calling `torchao.quantization.quantize_(module)`:

- it quantises a copy; the user's module, and weights that its layers share, stay as they are;
- a weight that several layers hold is quantised once, and one that is also read in another way (an embedding) stays there;
- inputs of size 0 work; autocast, state, hooks and training mode, which the copy would not keep, are refused;
- what is saved are plain tensors (8-bit values, scales) in safetensors, without a pickle of torchao's classes: a file
  then needs no allow-list of classes, and any version of torchao that still has these components can use it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..capture.swap import original_method
from ..errors import BuildError, PlanError, Refused, install_command
from ..schema import Candidate, Signature
from .base import Availability, Backend, BackendConfig, BuildJob, Executable
from .inductor_jit import TorchInductorJitBackend

TYPICAL_ERROR = {"int8wo": 5e-3, "int8dyn": 1e-2}
"""Relative L2 errors of a few Linear layers without outliers, by scheme."""
_MIN_VERSION = (0, 18)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FILE = "weights.safetensors"


@dataclass(frozen=True)
class TorchAOConfig(BackendConfig):
    """Options of TorchAO.

    Attributes:
        scheme: `"int8wo"`: weights in 8 bits, computed in the module's dtype: half to a quarter of the memory, and bears
            outliers. `"int8dyn"`: inputs too, scaled row by row at each call: fast 8-bit products, but large values in a
            few channels of the inputs cost the others their precision.
        compile: compile the quantised module with Inductor (frozen), which fuses the scaling into the products.
        skip: layers that stay as they are, as paths or wildcards separated by `|`: `"head|layers.0.*"`. A path stands for
            everything beneath it.
    """

    scheme: str = "int8wo"
    compile: bool = False
    skip: str = ""

    def __post_init__(self) -> None:
        if self.scheme not in TYPICAL_ERROR:
            raise PlanError(f"scheme must be one of {sorted(TYPICAL_ERROR)}, but got {self.scheme!r}")


class TorchAOBackend(Backend):
    """Runs a copy of the module whose Linear layers hold 8-bit weights.

    The artifact is `weights.safetensors`, the quantised weights' components by layer; compiled candidates are built again
    where they are loaded.
    """

    name = "torchao"
    config_type = TorchAOConfig
    isolation = "process"
    complexity = 3
    config: TorchAOConfig

    @classmethod
    def available(cls) -> Availability:
        needed = ".".join(map(str, _MIN_VERSION))
        if importlib.util.find_spec("torchao") is None:
            return Availability(False, "torchao not installed", install_command("torchao"))
        version = importlib.metadata.version("torchao")
        versions = {"torchao": version, "torch": torch.__version__}
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _MIN_VERSION:
            return Availability(
                False, f"torchao {version} is older than {needed}", install_command("torchao"), versions
            )
        return Availability(True, versions=versions)

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        layers = quantizable(module)
        devices = {layer.weight.device.type for layer in layers.values()}
        if devices != {"cpu"} or {leaf.device for leaf in signature.tensor_leaves} != {"cpu"} or signature.autocast:
            return []
        options = [(scheme, compiled) for compiled in (True, False) for scheme in ("int8dyn", "int8wo")]
        if not TorchInductorJitBackend.available().ok:
            options = options[2:]
        return [TorchAOBackend(scheme=scheme, compile=compiled).candidate() for scheme, compiled in options]

    def typical_error(self) -> float:
        return TYPICAL_ERROR[self.config.scheme]

    def build(self, job: BuildJob) -> Executable:
        quantized = self._quantized(job)
        quantized.save(job.folder / _FILE)
        return self._executable(job, quantized)

    def load(self, job: BuildJob) -> Executable:
        quantized = self._quantized(job)
        quantized.restore(job.folder / _FILE)
        return self._executable(job, quantized)

    def replacement(self, path: str, layer: nn.Module) -> nn.Module | None:
        """The layer with 8-bit weights, or None if it has none that can be quantised or `skip` names it."""
        if not isinstance(layer, nn.Linear) or not _fits(layer) or _skipped(path, self.config.skip):
            return None
        made = copy.copy(layer)
        made._parameters = dict(layer._parameters)
        _lower(made, _quantize(layer.weight, self.config.scheme))
        return made

    def _quantized(self, job: BuildJob) -> _Quantized:
        _refuse(job)
        layers = quantizable(job.module, self.config.skip)
        if not layers:
            what = (
                " that can be quantised and is not skipped" if self.config.skip else " whose weights can be quantised"
            )
            raise Refused(f"it holds no Linear layer{what}")
        job.progress("quantising", None)
        try:
            return _Quantized(job.module, layers, self.config.scheme)
        except (TypeError, NotImplementedError, AttributeError) as error:
            raise Refused(f"the module can't be copied, and is not quantised in place: {error}") from error

    def _executable(self, job: BuildJob, quantized: _Quantized) -> Executable:
        method = original_method(quantized.module, job.signature.method)
        count, skipped = len(quantized.layers), len(_linears(job.module)) - len(quantized.layers)
        note = f"{count} Linear layer{'s' if count != 1 else ''} in 8 bits" + (f", {skipped} left" if skipped else "")
        if not self.config.compile:
            # New values of the weights are quantised in place; a compiled copy has folded the old ones.
            return Executable(
                method,
                flat=False,
                refresh=lambda: quantized.refresh(job.module),
                notes=(note,),
                memory_bytes=quantized.size_bytes(),
            )
        own = replace(job, module=quantized.module, original=method)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*_stable_hash_for_caching")
            executable = TorchInductorJitBackend(freezing=True).build(own)
        executable.live_weights = False
        executable.notes = (note, *executable.notes)
        executable.memory_bytes += quantized.size_bytes()
        return executable


def quantizable(module: nn.Module, skip: str = "") -> dict[str, nn.Linear]:
    """The Linear layers of a module that can be quantised, by path, without those that `skip` names."""
    found = {path: layer for path, layer in _linears(module).items() if _fits(layer)}
    return {path: layer for path, layer in found.items() if not _skipped(path, skip)}


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def _fits(layer: nn.Linear) -> bool:
    """A plain layer: it computes as Linear does, from a dense weight that is a parameter of its own.

    Weights that are computed (parametrisations, weight norm) or read past `forward` (attention's output projection) are not.
    """
    weight = layer._parameters.get("weight")
    return (
        type(layer).forward in (nn.Linear.forward, _Lowered.forward)
        and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
        and type(weight) in (nn.Parameter, torch.Tensor)
        and weight is not None
        and weight.dtype in _DTYPES
        and weight.device.type != "meta"
        and weight.numel() > 0
    )


def _skipped(path: str, skip: str) -> bool:
    patterns = [pattern.strip() for pattern in skip.split("|") if pattern.strip()]
    return any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*") for pattern in patterns)


def _refuse(job: BuildJob) -> None:
    """Raise Refused, with the reason in a sentence, for what a quantised copy doesn't keep."""
    signature, facts = job.signature, job.signature.facts
    if job.module.training:
        raise Refused("the module is in training mode, and 8-bit weights are for inference")
    if signature.autocast:
        raise Refused("the calls run under autocast, which 8-bit weights do not heed")
    if facts.state:
        raise Refused(
            f"a call changes the module's state ({', '.join(facts.state[:3])}), but a copy would change its own"
        )
    if facts.hooked:
        raise Refused(f"the user's hooks on {', '.join(facts.hooked[:3])} would run on the layers of a copy")


class _Lowered(nn.Linear):
    """A Linear layer with a quantised weight. torchao's products fail on inputs of size 0."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() == 0:
            return input.new_empty((*input.shape[:-1], self.out_features))
        return linear(input, self.weight, self.bias)


def _lower(layer: nn.Linear, weight: nn.Parameter) -> None:
    layer.__class__ = _Lowered
    layer.weight = weight


class _Quantized:
    """A copy of a module with quantised layers, whose weights can be saved, restored and brought up to date.

    `layers` are the copy's, by path; `weights` the distinct quantised weights by the path of the first layer that has it.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Linear], scheme: str) -> None:
        self.scheme = scheme
        held = {id(layer.weight): layer.weight for layer in layers.values()}
        chosen = {id(layer) for layer in layers.values()}
        elsewhere = {id(p) for m in module.modules() if id(m) not in chosen for p in m._parameters.values()}
        # Weights that quantised layers alone hold need no copy: the layers get others at once.
        self.module = copy.deepcopy(module, {key: weight for key, weight in held.items() if key not in elsewhere})
        self.layers = {path: self.module.get_submodule(path) for path in layers}
        self.weights: dict[str, nn.Parameter] = {}
        made: dict[int, nn.Parameter] = {}
        for path, layer in layers.items():
            key = id(layer.weight)
            if key not in made:
                made[key] = self.weights[path] = _quantize(layer.weight, scheme)
            own = self.layers[path]
            assert isinstance(own, nn.Linear)
            _lower(own, made[key])
        for part in self.module.modules():
            if isinstance(part, nn.TransformerEncoderLayer):
                # Its fused operator reads plain weights. Eager sees that these are none, a compiler doesn't; so it is told.
                part.activation_relu_or_gelu = 0

    def components(self) -> dict[str, torch.Tensor]:
        """The plain tensors that the quantised weights consist of, by layer and component."""
        return {
            f"{path}:{name}": getattr(weight, name)
            for path, weight in self.weights.items()
            for name in type(weight).__tensor_flatten__(weight)[0]  # type: ignore[attr-defined]
        }

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.components().items()}
        save_file(tensors, path, metadata={"format": "1", "scheme": self.scheme})

    def restore(self, path: Path) -> None:
        """Take the saved components. Raises BuildError for a file that doesn't fit this module."""
        from safetensors.torch import load_file

        held, saved = self.components(), load_file(path)
        if held.keys() != saved.keys():
            odd = sorted(held.keys() ^ saved.keys())[:3]
            raise BuildError(f"{path.name} holds other quantised weights than this module has: {', '.join(odd)}")
        for name, tensor in held.items():
            if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
                has, got = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, saved[name]))
                raise BuildError(f"{path.name} holds {name} as {got}, but this module's is {has}")
            tensor.copy_(saved[name])

    @torch.no_grad()
    def refresh(self, module: nn.Module) -> bool:
        """Take the module's present weights, in place. False if they no longer fit."""
        try:
            theirs = dict(module.named_parameters()) | dict(module.named_buffers())
            own = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
            fresh = {path: module.get_submodule(path).weight for path in self.layers}
            quantized = {id(layer.weight) for layer in self.layers.values()}
            if any(not isinstance(w, torch.Tensor) or w.dtype not in _DTYPES for w in fresh.values()):
                return False
            for path, weight in self.weights.items():
                renewed = _quantize(fresh[path], self.scheme)  # type: ignore[arg-type]
                for name in type(weight).__tensor_flatten__(weight)[0]:  # type: ignore[attr-defined]
                    _copy_like(getattr(weight, name), getattr(renewed, name))
            for name, tensor in own.items():
                if id(tensor) not in quantized:
                    _copy_like(tensor, theirs[name])
        except (AttributeError, KeyError, ValueError):
            return False
        return True

    def size_bytes(self) -> int:
        """Bytes that the copy holds beside the user's module."""
        quantized = {id(layer.weight) for layer in self.layers.values()}
        tensors = {id(t): t for t in (*self.module.parameters(), *self.module.buffers()) if id(t) not in quantized}
        return sum(t.numel() * t.element_size() for t in (*tensors.values(), *self.components().values()))


def _copy_like(target: torch.Tensor, source: torch.Tensor) -> None:
    if (target.shape, target.dtype, target.device) != (source.shape, source.dtype, source.device):
        raise ValueError("the tensor is of another kind now")
    target.copy_(source)


@torch.no_grad()
def _quantize(weight: torch.Tensor, scheme: str) -> nn.Parameter:
    """A weight of a Linear layer in 8 bits, one scale for each output."""
    with _quiet_import():
        import torchao.quantization as ao
        from torchao.utils import should_reduce_range
    options: dict[str, Any] = {"set_inductor_config": False}  # that would change Inductor's settings for good
    if scheme == "int8dyn":
        # CPUs without VNNI add up pairs of products in 16 bits, which full ranges overflow.
        options["reduce_range"] = should_reduce_range(weight.device)
    config = ao.Int8DynamicActivationInt8WeightConfig if scheme == "int8dyn" else ao.Int8WeightOnlyConfig
    holder = nn.Linear(1, 1, bias=False, device="meta")
    holder.weight = nn.Parameter(weight.detach(), requires_grad=False)
    ao.quantize_(holder, config(**options))
    made: nn.Parameter = holder.weight
    return made


@contextmanager
def _quiet_import() -> Iterator[None]:
    """torchao says at import which of its extensions a CPU build of torch lacks; that is no fault."""

    def fine(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not ("Failed to load" in text or "register_constant()" in text or "Skipping import of cpp" in text)

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(fine)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(fine)
