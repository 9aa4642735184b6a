"""What is known of a (module, signature) before anything is tried, as far as it decides what is worth a trial."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..environment import cpu_flags
from ..measure.judge import default_budget
from ..schema import Signature, Tolerance, evaluate_dim

PYTHON_MS_PER_MODULE = 0.01
"""What Python and the dispatcher take on a laptop for a module's call with its few operators, at least."""


@dataclass(frozen=True)
class Seen:
    """Facts from inspection and recording.

    Attributes:
        device: `"cpu"` or `"cuda"`: where its inputs and weights are; `"mixed"`.
        dtypes: of its floating-point parameters, such as `"float32"`.
        autocast: whether its calls run under autocast.
        modules: how many modules it consists of.
        parameters: elements of its parameters.
        linear_parameters: how many of them are weights of Linear layers.
        convolutions: its 2-d convolutions.
        loose_convolutions: those whose weights are not in channels_last yet.
        rows: the most rows that a matrix product over the inputs has at its usual size: all dimensions but the last.
        eager_ms: mean latency of the original in milliseconds; None before it was inspected.
        python_share: about what share of that is Python between operators, from 0 to 1; None if unknown.
    """

    device: str
    dtypes: tuple[str, ...]
    autocast: bool
    modules: int
    parameters: int
    linear_parameters: int
    convolutions: int
    loose_convolutions: int
    rows: int
    eager_ms: float | None = None

    @property
    def python_share(self) -> float | None:
        if not self.eager_ms:
            return None
        return min(1.0, PYTHON_MS_PER_MODULE * self.modules / self.eager_ms)

    @property
    def linear_share(self) -> float:
        """Which share of the parameters are weights of Linear layers."""
        return self.linear_parameters / self.parameters if self.parameters else 0.0


def see(module: torch.nn.Module, signature: Signature, eager_ms: float | None = None) -> Seen:
    """Look at a module and the signature of its calls; nothing is run."""
    modules = list(module.modules())
    parameters = list(module.parameters())
    linears = {id(m.weight): m.weight for m in modules if isinstance(m, torch.nn.Linear)}
    convolutions = [m for m in modules if isinstance(m, (torch.nn.Conv2d, torch.nn.ConvTranspose2d))]
    loose = [m for m in convolutions if not m.weight.is_contiguous(memory_format=torch.channels_last)]
    kinds: set[str] = {t.device.type for t in (*parameters, *module.buffers())}
    kinds |= {leaf.device.partition(":")[0] for leaf in signature.tensor_leaves}
    usual = {symbol.name: symbol.opt for symbol in signature.symbols}
    sizes = [[evaluate_dim(dim, usual) for dim in leaf.dims] for leaf in signature.tensor_leaves]
    return Seen(
        kinds.pop() if len(kinds) == 1 else "mixed",
        tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()})),
        bool(signature.autocast),
        len(modules),
        sum(p.numel() for p in parameters),
        sum(w.numel() for w in linears.values()),
        len(convolutions),
        len(loose),
        max((math.prod(each[:-1]) for each in sizes), default=1),
        eager_ms or None,
    )


def error_budget(seen: Seen, tolerance: Tolerance) -> float:
    """The relative error that a plan admits for a module: what its dtype allows by default if the plan names none."""
    if tolerance.accuracy == "exact":
        return 0.0
    budget = tolerance.max_relative_error
    if budget is None:
        budget = default_budget(*(getattr(torch, name) for name in seen.dtypes[:1]))
    if tolerance.min_snr_db is not None:
        budget = min(budget, 10.0 ** (-tolerance.min_snr_db / 20))
    return budget


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself; emulated it is slower than float32."""
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(cpu_flags())
