"""What the backends' tests share: from a module and inputs to build jobs, and from executables to comparable calls."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aitune_lab.backends.base import Backend, BuildJob, Executable
from aitune_lab.capture.probe import autocast_of
from aitune_lab.capture.recorder import Recorder, Recording, Sample, as_tensor, clone_leaf, is_tensor
from aitune_lab.capture.signature import RecordedSignature, signatures_of
from aitune_lab.capture.state import Snapshot
from aitune_lab.capture.structure import flatten, unflatten, unflatten_call
from aitune_lab.capture.swap import original_method
from aitune_lab.schema import Facts, TensorLeaf, ValueLeaf

CASES = Path(__file__).parent.parent / "cases"


def load_case(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """`make()` of a file under tests/cases."""
    import sys

    path = next(CASES.rglob(f"{name}*.py"))
    module_name = f"case_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module.make()


def split(item: Any) -> tuple[tuple, dict]:
    """Arguments of a call from an item of a case's inputs."""
    if isinstance(item, dict):
        return (), item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple) and isinstance(item[1], dict):
        return item
    return (item if isinstance(item, tuple) else (item,)), {}


def record(module: torch.nn.Module, items: Sequence[Any], method: str = "forward") -> Recording:
    recorder = Recorder([("", module, method)])
    with recorder.recording(), torch.no_grad():
        for item in items:
            args, kwargs = split(item)
            (module if method == "forward" else getattr(module, method))(*args, **kwargs)
    return recorder.recordings[0]


def jobs(
    module: torch.nn.Module,
    items: Sequence[Any],
    backend: Backend,
    folder: Path,
    method: str = "forward",
    facts: dict[str, Any] | None = None,
    declared: Any = None,
) -> list[BuildJob]:
    """A build job for each signature of the recorded calls."""
    recording = record(module, items, method)
    return jobs_of(recording, signatures_of(recording, declared), backend, folder, facts)


def jobs_of(
    recording: Recording,
    signatures: Sequence[RecordedSignature],
    backend: Backend,
    folder: Path,
    facts: dict[str, Any] | None = None,
) -> list[BuildJob]:
    made = []
    for i, recorded in enumerate(signatures):
        signature = recorded.signature
        if facts:
            signature = dataclasses.replace(signature, facts=dataclasses.replace(signature.facts, **facts))
        own = folder / str(i)
        own.mkdir(parents=True)
        module, name = recording.module, recording.method
        made.append(
            BuildJob(
                path="",
                module=module,
                original=original_method(module, name),
                form=recording.form,
                signature=signature,
                samples=recorded.all_samples(),
                candidate=backend.candidate(),
                folder=own,
                threads=torch.get_num_threads(),
            )
        )
    return made


def call(executable: Executable, job: BuildJob, leaves: list[Any]) -> Any:
    """Call an executable the way the dispatch does; mutated leaves are written back into `leaves`."""
    signature = job.signature
    if not executable.flat:
        args, kwargs = job.form.arguments(unflatten_call(job.signature.inputs, leaves))
        return executable.call(*args, **kwargs)
    at = [i for i, leaf in enumerate(signature.leaves) if isinstance(leaf, TensorLeaf)]
    results = list(executable.call(*(as_tensor(leaves[i]) for i in at)))
    same = {alias.output: alias.input for alias in signature.facts.aliases if alias.kind == "same"}
    by_path = {signature.leaves[i].path: as_tensor(leaves[i]) for i in at}
    count = sum(isinstance(leaf, TensorLeaf) for leaf in signature.output_leaves)
    assert len(results) == count + len(signature.facts.mutated)
    for path, value in zip(signature.facts.mutated, results[count:], strict=True):
        by_path[path].copy_(value)
    # Values that are no tensors come from any recorded output: they are equal in all.
    tensors = iter(results[:count])
    outputs = []
    for leaf in signature.output_leaves:
        if isinstance(leaf, TensorLeaf):
            value = next(tensors)
            outputs.append(by_path[same[leaf.path]] if leaf.path in same else value)
        else:
            outputs.append(_constant(job, leaf))
    return unflatten(signature.outputs, outputs)


def _constant(job: BuildJob, leaf: ValueLeaf) -> Any:
    sample = job.samples[0]
    args, kwargs = job.form.arguments(sample.call(fresh=True))
    with torch.no_grad():
        flat = flatten(job.original(*args, **kwargs))
    return flat.leaves[flat.paths.index(leaf.path)]


def check(
    executable: Executable, job: BuildJob, rtol: float = 1e-4, atol: float = 1e-5, mode: Any = torch.no_grad
) -> None:
    """The executable gives what the original gives on all samples: structure, values, dtypes, mutated inputs."""
    for sample in job.samples:
        ours, theirs = ([clone_leaf(x) for x in sample.leaves] for _ in range(2))
        args, kwargs = job.form.arguments(unflatten_call(sample.node, theirs))
        state = Snapshot(job.module)
        with mode(), autocast_of(job.signature.autocast):
            torch.manual_seed(1)
            want = flatten(job.original(*args, **kwargs))
            state.restore()
            torch.manual_seed(1)
            got = flatten(call(executable, job, ours))
        assert_same(got, want, rtol, atol)
        for leaf, ours_after, theirs_after in zip(job.signature.leaves, ours, theirs, strict=True):
            if isinstance(leaf, TensorLeaf):
                torch.testing.assert_close(ours_after, theirs_after, rtol=rtol, atol=atol, equal_nan=True)


def assert_same(got: Any, want: Any, rtol: float, atol: float) -> None:
    assert got.node == want.node
    for path, ours, theirs in zip(want.paths, got.leaves, want.leaves, strict=True):
        if is_tensor(theirs):
            torch.testing.assert_close(
                ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, p=path: f"{p}: {m}"
            )
        elif type(theirs).__name__ not in ("Cache", "Generator"):
            assert type(ours) is type(theirs), path
            assert ours == theirs or ours != ours, path


__all__ = ["Facts", "Sample", "call", "check", "copy", "jobs", "jobs_of", "load_case", "record", "split"]
