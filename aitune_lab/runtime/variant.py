"""Builds a candidate: its backend's executable, in the candidate's memory format and precision, in CUDA graphs if it says so.

What holds for any backend is done here, so that backends know nothing of it:

- `channels_last` builds on a converted copy of the module, because the user's own is never changed. Such an executable has
  weights of its own, whose bytes are accounted for.
- `float16` and `bfloat16` run a float32 module under autocast (without its cache) and give outputs in the dtypes of eager.
- `tf32` allows TensorFloat-32 in matrix products and convolutions while a graph is captured. Torch's switch belongs to the
  whole process, so it is never touched at a call, and this precision exists in CUDA graphs only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..backends import registry
from ..backends.base import Backend, BuildJob, Executable
from ..capture.probe import autocast_of
from ..capture.recorder import Sample
from ..capture.structure import flatten, is_tensor, unflatten
from ..capture.swap import original_method
from ..errors import Refused
from ..schema import Signature, TensorLeaf
from .cuda_graph import with_cuda_graph
from .graph_check import refuse_uncapturable

AUTOCAST = ("float16", "bfloat16")
PRECISIONS = ("as is", *AUTOCAST, "tf32")


def build(job: BuildJob) -> Executable:
    """Build `job.candidate`. Raises Refused for what the candidate can't keep, or any error of its backend."""
    return _made(job, lambda backend, own: backend.build(own))


def load(job: BuildJob) -> Executable:
    """The same from the files in `job.folder`."""
    return _made(job, lambda backend, own: backend.load(own))


def _made(job: BuildJob, make: Callable[[Backend, BuildJob], Executable]) -> Executable:
    candidate = job.candidate
    backend = registry.of(candidate)
    _refuse_strides(job)
    if candidate.precision not in PRECISIONS:
        raise Refused(f"precision must be one of {PRECISIONS}, but got {candidate.precision!r}")
    if candidate.precision == "tf32" and not candidate.cuda_graph:
        raise Refused("tf32 is a switch of the whole process, so it is used while capturing a CUDA graph only")
    if candidate.cuda_graph:
        if not backend.capturable:
            raise Refused(f"executables of {backend.name} can't be captured in a CUDA graph")
        refuse_uncapturable(job)
    own = _converted(job) if candidate.memory_format else job
    if candidate.precision in AUTOCAST:
        own = replace(own, signature=_under_autocast(own.signature, candidate.precision))
    with _tf32() if candidate.precision == "tf32" else _as_is():
        executable = make(backend, own)
        try:
            if own.module is not job.module:
                _owns_weights(executable, own.module)
            if candidate.precision in AUTOCAST:
                _run_under_autocast(executable, own.signature)
            if candidate.cuda_graph:
                # Samples, structure and weights are those of the job that the executable was built from.
                executable = with_cuda_graph(executable, replace(own, signature=job.signature))
        except BaseException:
            executable.close()
            raise
    return executable


def _refuse_strides(job: BuildJob) -> None:
    """Raise Refused if the result depends on strides and the recorded ones are not those that tuned calls may have."""
    strided = job.signature.facts.strided
    for sample in job.samples if strided else ():
        for leaf, value in zip(job.signature.leaves, sample.leaves, strict=True):
            if leaf.path in strided and is_tensor(value) and not value.is_contiguous():
                raise Refused(
                    f"the result depends on the strides of {leaf.path}, which was recorded with {tuple(value.stride())}; "
                    "call it with contiguous tensors"
                )


def _converted(job: BuildJob) -> BuildJob:
    """The job on a copy of the module in another memory format."""
    if job.candidate.memory_format != "channels_last":
        raise Refused(f"memory_format must be None or 'channels_last', but got {job.candidate.memory_format!r}")
    try:
        module = copy.deepcopy(job.module)
    except Exception as error:
        raise Refused(f"the module can't be copied, and is not converted in place: {error}") from error
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # A graph's static buffers are laid out like the weights, so what compiles must expect that; without a graph the
    # executable meets the caller's own layout.
    samples = [_in_channels_last(sample) for sample in job.samples] if job.candidate.cuda_graph else job.samples
    return replace(job, module=module, original=original_method(module, job.signature.method), samples=samples)


def _in_channels_last(sample: Sample) -> Sample:
    images = [is_tensor(x) and x.dim() == 4 for x in sample.leaves]
    leaves = [
        x.contiguous(memory_format=torch.channels_last) if image else x
        for x, image in zip(sample.leaves, images, strict=True)
    ]
    return replace(sample, leaves=leaves)


def _owns_weights(executable: Executable, module: torch.nn.Module) -> None:
    """The executable reads a copy: for the user's module its weights are baked."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    executable.live_weights = False
    executable.refresh = None
    executable.memory_bytes += sum(t.numel() * t.element_size() for t in tensors)


def _under_autocast(signature: Signature, dtype: str) -> Signature:
    if signature.autocast:
        raise Refused(f"the calls run under autocast already ({dict(signature.autocast)})")
    device = next((leaf.device.partition(":")[0] for leaf in signature.tensor_leaves), "cpu")
    return replace(signature, autocast=((device, dtype),))


def _run_under_autocast(executable: Executable, signature: Signature) -> None:
    """Enter autocast at each call, and give outputs in the dtypes of eager."""
    inner, flat = executable.call, executable.flat
    tensors = [leaf for leaf in signature.output_leaves if isinstance(leaf, TensorLeaf)]
    dtypes = [getattr(torch, leaf.dtype) for leaf in tensors]

    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast_of(signature.autocast):
            result = inner(*args, **kwargs)
        if flat:
            return [y.to(dtype) for y, dtype in zip(result, dtypes, strict=False)] + list(result[len(dtypes) :])
        taken = flatten(result)
        leaves = iter(dtypes)
        return unflatten(taken.node, [x.to(next(leaves, x.dtype)) if is_tensor(x) else x for x in taken.leaves])

    executable.call = call


@contextmanager
def _as_is() -> Iterator[None]:
    yield


@contextmanager
def _tf32() -> Iterator[None]:
    """TensorFloat-32 in matrix products and convolutions, put back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError as error:  # the user set precisions by torch's newer interface, which excludes this one
        raise Refused(f"torch's float32 precision can't be switched: {error}") from error
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
