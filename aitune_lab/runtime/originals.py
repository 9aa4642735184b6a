"""What becomes of the weights of tuned modules: they stay, wait on the host, or are freed.

Only executables that hold weights of their own allow anything but staying.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ..capture.swap import refuse_copies
from ..errors import SignatureMiss, TargetError
from ..schema import Signature

Originals = Literal["device", "cpu", "drop"]


def weights_of(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Its parameters and buffers, each once."""
    return {id(t): t for t in (*module.parameters(), *module.buffers())}


def bytes_of(modules: Sequence[torch.nn.Module]) -> int:
    """What the weights of modules take together; those on the meta device take nothing."""
    tensors = {key: t for module in modules for key, t in weights_of(module).items()}
    return sum(t.numel() * t.element_size() for t in tensors.values() if not t.is_meta)


def why_needed(executable: Any) -> str | None:
    """Why an executable needs the module's weights where they are; None if it doesn't."""
    if executable.live_weights:
        return "it reads the module's own weights at each call"
    if executable.uncovered is not None:
        return "it leaves some calls to the original"
    if executable.moved is not None:
        return "it reads weights by address"
    return None


class Parked:
    """Stands for a method whose module's weights are on the host: moves them to their devices for each call."""

    def __init__(self, module: torch.nn.Module, original: Callable[..., Any]) -> None:
        self._original = original
        self._homes = [(t, t.device) for t in weights_of(module).values()]
        self._lock = threading.RLock()

    def park(self) -> None:
        """Move the weights to the host."""
        for tensor, _ in self._homes:
            tensor.data = tensor.data.cpu()

    def bring_back(self) -> None:
        """Move them to where they were."""
        for tensor, device in self._homes:
            tensor.data = tensor.data.to(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.bring_back()
            try:
                return self._original(*args, **kwargs)
            finally:
                self.park()


class Dropped:
    """Stands for a method whose module's weights are gone: a call says which calls can be answered."""

    def __init__(self, name: str, signatures: Sequence[Signature]) -> None:
        self._name = name
        self._signatures = "; ".join(signature.label for signature in signatures)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SignatureMiss(
            f"{self._name}: this call needs the original, whose weights were dropped after tuning (originals='drop'). "
            f"Tuned: {self._signatures}. Tune with data of this kind too, or with originals='cpu'"
        )


def drop_weights(module: torch.nn.Module, name: str) -> None:
    """Free the weights of a module. Copies of it, and its `state_dict`, are refused from then on."""
    why = f"{name}: its weights were dropped after tuning (originals='drop'), so they can't be"

    def refuse(*_: Any) -> None:
        raise TargetError(f"{why} read: make the model anew for that")

    for child in module.modules():
        holders: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                empty = torch.empty_like(tensor, device="meta")
                # Not assigned to the attribute: a watched module would take that for new weights.
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                holder[key] = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        child.register_state_dict_pre_hook(refuse)
        refuse_copies(child, f"{why} copied: make the model anew for that")


def is_dropped(module: torch.nn.Module) -> bool:
    """Whether the module's weights were dropped."""
    return any(t.is_meta for t in weights_of(module).values())
