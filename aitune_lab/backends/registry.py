"""Finds backends by name: the built-in ones, those registered here, and those of installed packages."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection
from importlib.metadata import entry_points

from ..errors import BackendUnavailable, PlanError
from ..schema import Candidate
from .base import Availability, Backend

_BUILTIN = {
    "eager": "eager:TorchEagerBackend",
    "onnxruntime": "onnxruntime:ONNXRuntimeBackend",
    "openvino": "openvino:OpenVINOBackend",
    "inductor": "inductor_jit:TorchInductorJitBackend",
    "torchao": "torchao:TorchAOBackend",
    "inductor_aot": "inductor_aot:TorchInductorAotBackend",
    "tensorrt": "tensorrt:TensorRTBackend",
    "tensorrt_rtx": "tensorrt:TensorRTRTXBackend",
}
_registered: dict[str, type[Backend]] = {}
_used: dict[str, type[Backend]] = {}
"""Those that may have built something since the last `release`."""


def register(backend: type[Backend]) -> type[Backend]:
    """Make a backend known by its name in this process; usable as a decorator."""
    _registered[backend.name] = backend
    return backend


def unregister(name: str) -> None:
    """Forget a backend registered in this process; unknown names are ignored."""
    _registered.pop(name, None)


def names() -> list[str]:
    """All known backend names, built-in ones first."""
    external = [e.name for e in entry_points(group="aitune_lab.backends")]
    return list(dict.fromkeys([*_BUILTIN, *_registered, *external]))


def is_imported(name: str) -> bool:
    """Whether `get(name)` imports nothing but parts of aitune_lab: built-in backends and those registered here."""
    return name in _BUILTIN or name in _registered


def get(name: str) -> type[Backend]:
    """The backend class of that name. Raises PlanError that lists the known names."""
    if name in _registered:
        return _registered[name]
    if name in _BUILTIN:
        module, _, cls = _BUILTIN[name].partition(":")
        found: type[Backend] = getattr(importlib.import_module(f"{__package__}.{module}"), cls)
        return found
    for entry in entry_points(group="aitune_lab.backends"):
        if entry.name == name:
            loaded: type[Backend] = entry.load()
            return loaded
    raise PlanError(unknown(name, names()))


def unknown(name: str, known: Collection[str]) -> str:
    """What to say about a name that is none of the known ones: those, and the closest."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    guess = f". Did you mean {close[0]!r}?" if close else ""
    return f"backend must be one of {list(known)}, but got {name!r}{guess}"


def of(candidate: Candidate) -> Backend:
    """The backend instance that builds a candidate. Raises PlanError for unknown names and options."""
    backend = get(candidate.backend)
    _used[backend.name] = backend
    return backend.of(candidate)


def release() -> None:
    """Free what the builds of this process keep for the next one."""
    used = list(_used.values())
    _used.clear()
    for backend in used:
        backend.release()


def availability() -> dict[str, Availability]:
    """For every known backend, whether it can run here, why not, and the cure."""
    result = {}
    for name in names():
        try:
            result[name] = get(name).available()
        except Exception as error:  # a third-party backend must not break the list
            result[name] = Availability(False, f"its package fails to load: {error}")
    return result


def require(name: str) -> type[Backend]:
    """The backend class, if it can run here. Raises BackendUnavailable with reason and cure."""
    backend = get(name)
    state = backend.available()
    if not state.ok:
        raise BackendUnavailable(f"backend {name!r} cannot run here: {state.reason}. {state.cure}".rstrip())
    return backend
