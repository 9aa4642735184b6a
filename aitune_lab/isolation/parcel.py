"""Sends a module and its recorded calls to another process by files: what is big once, not once for each candidate.

The files are torch's own format with cloudpickle for what isn't a tensor, so that classes and functions of a script or a
notebook come along by value. Tensors are mapped from the file, not copied.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
import tempfile
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch

from ..backends import registry
from ..backends.base import BuildJob
from ..capture.calls import CallForm
from ..capture.state import version_of
from ..capture.structure import adopt_classes, classes_of, is_tensor
from ..capture.swap import original_method
from ..schema import Node, OpaqueLeaf, Signature, ValueLeaf

_PROTOCOL = 5
_TMPFS = Path("/dev/shm")  # noqa: S108 - a private folder is made in it
_APART = ("module", "original", "form", "signature", "samples", "progress")
"""Fields of a job that are sent once for several candidates, made anew, or mean nothing elsewhere."""
_OWN = __name__.partition(".")[0]


class Unsendable(Exception):
    """Something of a job can't be sent to another process; the message says what and why."""


def is_third_party(backend: type) -> bool:
    """Whether a backend's class belongs to another package or to the user."""
    return backend.__module__.partition(".")[0] != _OWN


class Outbox:
    """Writes the files of jobs. The module and the calls sent last are kept, because the next candidate needs them too.

    Args:
        folder: private to its owner; files stand here, or in a folder in memory where there is room.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.in_memory: Path | None = None
        if _TMPFS.is_dir():
            self.in_memory = Path(tempfile.mkdtemp(prefix=f"aitune-lab-{os.getpid()}-", dir=_TMPFS))
        self._module: _Sent | None = None
        self._calls: _Sent | None = None
        self._number = 0

    def pack(self, job: BuildJob) -> list[str]:
        """Paths of the files that hold a job. Raises Unsendable."""
        self._module = self._sent(self._module, _weights_key(job.module), [job.module], "the module", job.module)
        called = [job.signature, *job.samples]
        self._calls = self._sent(
            self._calls,
            (job.signature.key,),
            called,
            "the recorded calls",
            (job.signature, list(job.samples), _classes(job)),
        )
        backend = registry.get(job.candidate.backend)
        rest = {
            "fields": {f.name: getattr(job, f.name) for f in fields(BuildJob) if f.name not in _APART},
            "backend": backend if is_third_party(backend) else None,
            "dtype": torch.get_default_dtype(),
            "matmul": torch.get_float32_matmul_precision(),
            "cuda_matmul": {name: getattr(torch.backends.cuda.matmul, name) for name in _cuda_matmul_settings()},
            "deterministic": (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
        }
        path = self.folder / "job"
        _save(rest, path, f"backend {job.candidate.backend!r}")
        return [str(self._module.path), str(self._calls.path), str(path)]

    def _sent(self, last: _Sent | None, key: tuple[Any, ...], objects: Sequence[Any], what: str, value: Any) -> _Sent:
        if last is not None and last.holds(key, objects):
            return last
        if last is not None:
            last.path.unlink(missing_ok=True)
        self._number += 1
        path = self._place(value) / f"{self._number}"
        _save(value, path, what)
        return _Sent(key, [weakref.ref(x) for x in objects], path)

    def _place(self, value: Any) -> Path:
        """In memory if that leaves most of it to others."""
        modules = [value] if isinstance(value, torch.nn.Module) else []
        size = sum(t.numel() * t.element_size() for m in modules for t in _tensors(m))
        if not modules:
            size = sum(sample.size_bytes for sample in value[1])
        if self.in_memory is None or 4 * size > psutil.virtual_memory().available:
            return self.folder
        return self.in_memory if 2 * size < shutil.disk_usage(self.in_memory).free else self.folder

    def close(self) -> None:
        """Remove the files in memory; those in the folder are its owner's."""
        if self.in_memory is not None:
            shutil.rmtree(self.in_memory, ignore_errors=True)


@dataclass
class _Sent:
    """A file and what it was made from."""

    key: tuple[Any, ...]
    objects: list[weakref.ref[Any]]
    path: Path

    def holds(self, key: tuple[Any, ...], objects: Sequence[Any]) -> bool:
        if key != self.key or len(objects) != len(self.objects):
            return False
        return all(ref() is x for ref, x in zip(self.objects, objects, strict=True))


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())


def _weights_key(module: torch.nn.Module) -> tuple[Any, ...]:
    """Differs after weights were replaced or written."""
    return tuple((id(t), t.data_ptr() if is_tensor(t) else 0, version_of(t)) for t in _tensors(module))


def _classes(job: BuildJob) -> dict[str, Any]:
    """The classes that structure and values of the calls name, so that the other process knows them."""
    signature = job.signature
    keys = {leaf.type for leaf in (*signature.leaves, *signature.output_leaves) if isinstance(leaf, ValueLeaf)}
    keys |= {x.opaque_type for x in (*signature.leaves, *signature.output_leaves) if isinstance(x, OpaqueLeaf)}
    for node in (signature.inputs, signature.outputs, *(sample.node for sample in job.samples)):
        keys |= set(_node_types(node))
    return classes_of(key for key in keys if not key.startswith("builtins:"))


def _node_types(node: Node) -> Iterator[str]:
    if node.type:
        yield node.type
    for child in node.children:
        yield from _node_types(child)


def _save(value: Any, path: Path, what: str) -> None:
    """Write one file. Raises Unsendable."""
    by_value: set[str] = set()
    try:
        while True:
            met = _write(value, path, by_value)
            missing = {name for name in met - by_value if not _can_be_imported(name)}
            if not missing:
                return
            by_value |= missing
    except Exception as error:
        path.unlink(missing_ok=True)
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Unsendable(f"{_blocking(value) or what} can't be sent to another process ({first})") from error


def _write(value: Any, path: Path, by_value: set[str]) -> set[str]:
    """Write a value with the classes and functions of some modules by value; gives the modules of those met."""
    import cloudpickle

    met: set[str] = set()

    class Noting(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, (type, types.FunctionType)) and isinstance(item.__module__, str):
                met.add(item.__module__)
            return super().reducer_override(item)

    pickling = types.SimpleNamespace(__name__="cloudpickle", Pickler=Noting)
    with _sent_by_value(by_value), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, str(path), pickle_module=pickling, pickle_protocol=_PROTOCOL)
    return met


@contextmanager
def _sent_by_value(names: set[str]) -> Iterator[None]:
    """Cloudpickle's list of modules to send by value belongs to the whole process: put back afterwards."""
    import cloudpickle

    with ExitStack() as stack:
        for module in [sys.modules[name] for name in names if name in sys.modules]:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _can_be_imported(name: str) -> bool:
    """Whether another process with the same `sys.path` would import this very module by its name."""
    module = sys.modules.get(name)
    if module is None or name in ("__main__", "builtins"):  # cloudpickle sends what is defined there by value anyhow
        return True
    file = getattr(module, "__file__", None)
    parts = name.split(".")
    path: Any = None
    origin: str | None = None  # stays so for what is built or frozen into the interpreter
    for count in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:count]), path)
        if spec is None:  # a submodule without a file is made by its package
            return count > 1 and file is None
        path, origin = spec.submodule_search_locations, spec.origin if spec.has_location else None
    return file is None or origin in (None, file)


def _spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except Exception:  # somebody's own finder
            spec = None
        if spec is not None:
            return spec
    return None


def _blocking(value: Any) -> str:
    """The attribute of a module that can't be pickled, by its name; empty if none is found."""
    if not isinstance(value, torch.nn.Module):
        return ""
    import cloudpickle

    for path, child in value.named_modules():
        for name, attribute in vars(child).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                cloudpickle.dumps(attribute)
            except Exception:
                return f"attribute {f'{path}.{name}'.lstrip('.')!r}"
    return ""


def unpack(paths: Sequence[str]) -> BuildJob:
    """The job of `Outbox.pack`, in the process that it was sent to; its backend is known there afterwards."""
    rest = _load(paths[2])
    torch.set_default_dtype(rest["dtype"])
    # Compilers' caches go by these, and setting even what is set turns "none" into "ieee": nothing would be found again.
    if torch.get_float32_matmul_precision() != rest["matmul"]:
        torch.set_float32_matmul_precision(rest["matmul"])
    for name, value in rest["cuda_matmul"].items():
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)
    if rest["deterministic"][0]:  # asking for less would import the compiler
        torch.use_deterministic_algorithms(True, warn_only=rest["deterministic"][1])
    torch.set_num_threads(rest["fields"]["threads"])
    if rest["backend"] is not None:
        registry.register(rest["backend"])
    module = _load(paths[0])
    signature: Signature
    signature, samples, classes = _load(paths[1])
    adopt_classes(classes)
    _stand_in_for_modules(module)
    original = original_method(module, signature.method)
    form = CallForm(original)
    return BuildJob(module=module, original=original, form=form, signature=signature, samples=samples, **rest["fields"])


def _cuda_matmul_settings() -> list[str]:
    """Names of torch's settings of matrix products on CUDA, the same in every process; `fp32_precision` is from 2.9 on."""
    names = "fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"
    return [name for name in names if hasattr(torch.backends.cuda.matmul, name)]


def _stand_in_for_modules(module: torch.nn.Module) -> None:
    """Let modules whose classes came by value be found by name: Dynamo looks up the globals of what it inlines there."""
    functions = [f for child in module.modules() for cls in type(child).__mro__ for f in vars(cls).values()]
    for function in functions:
        names = function.__globals__ if isinstance(function, types.FunctionType) else {}
        name = names.get("__name__")
        if name is None:
            continue
        held = vars(sys.modules.setdefault(name, types.ModuleType(name)))
        if held is not names:
            held.update({key: value for key, value in names.items() if not key.startswith("__")})


def _load(path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False, mmap=True)
