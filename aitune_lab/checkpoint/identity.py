"""Whether the module at hand is the one that an artifact was made for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..errors import CheckpointError
from ..schema import ModuleIdentity
from .structure import class_name, same_class, structure_mismatch, structure_of

_CHUNK_BYTES = 64 << 20


def identity_of(path: str, module: torch.nn.Module) -> ModuleIdentity:
    """Class, parameters and buffers (name, shape, dtype), their content's digest, and the submodules' settings.

    Raises CheckpointError for tensors that hold no values (meta device) or can't be read as bytes.
    """
    try:
        digest = weights_digest(module)
    except CheckpointError as error:
        raise CheckpointError(f"the weights of module {path!r} cannot be identified: {error}") from None
    return ModuleIdentity(path, class_name(module), _described(module), digest, structure_of(module))


def mismatch(
    saved: ModuleIdentity, module: torch.nn.Module, *, weights: bool, state: Collection[str] = ()
) -> str | None:
    """Why a module is not the saved one, in words; None if it is.

    Args:
        weights: compare the weights' values too.
        state: attributes (with the submodule's path) that calls change, which therefore may differ.
    """
    own = class_name(module)
    if not same_class(saved.type, own):
        return f"its class is {own}, but was {saved.type}"
    there = {name: (shape, dtype) for name, shape, dtype in saved.parameters}
    here = {name: (shape, dtype) for name, shape, dtype in _described(module)}
    if missing := sorted(there.keys() - here.keys()):
        return f"it lacks {_some(missing)}"
    if extra := sorted(here.keys() - there.keys()):
        return f"it has {_some(extra)}, which the saved one had not"
    for name, (shape, dtype) in there.items():
        if here[name] != (shape, dtype):
            own_shape, own_dtype = here[name]
            return f"{name} is {own_dtype}{list(own_shape)}, but was {dtype}{list(shape)}"
    problem = structure_mismatch(saved.structure, module, state) if saved.structure else None
    if problem is not None:
        return problem
    if weights and weights_digest(module) != saved.weights_digest:
        return "its weights have other values: load the weights it was tuned with, or tune this one and save again"
    return None


def weights_digest(module: torch.nn.Module) -> str:
    """A digest of all parameters and buffers by name, dtype, shape and content: equal for equal weights anywhere.

    SHA-256 over the tensors' own SHA-256. A tensor under several names (tied weights) is read once; several are read
    at the same time. Device, strides and `requires_grad` don't count.
    """
    tensors = _tensors(module)
    # Views of one storage that look alike are one tensor, whatever object or name holds them.
    keys = {name: _memory_key(tensor) for name, tensor in tensors.items()}
    unique = {keys[name]: tensor for name, tensor in tensors.items()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = dict(zip(unique, pool.map(_content_digest, unique.values()), strict=True))
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        total.update(digests[keys[name]])
    return f"sha256:{total.hexdigest()}"


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _described(module: torch.nn.Module) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sorted(_tensors(module).items())
    )


def _memory_key(tensor: torch.Tensor) -> Any:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()


def _content_digest(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    with torch.no_grad():
        for part in _dense_parts(tensor.detach()):
            if part.device.type == "meta":
                raise CheckpointError("it holds tensors on the meta device, which have no values")
            flat = part.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            # Piece by piece, so that weights on a GPU are never on the host all at once.
            for piece in flat.split(_CHUNK_BYTES):
                digest.update(piece.cpu().numpy().data)
    return digest.digest()


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's content: itself, or what a subclass (quantised weights) wraps."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return [part for name in names for part in _dense_parts(getattr(tensor, name))]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a {tensor.dtype} tensor of layout {tensor.layout} cannot be read as bytes")
    return [tensor]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
