"""What a build must leave as it was: the module, and the settings of the process around it."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def surroundings(module: nn.Module) -> dict[str, Any]:
    """Everything that a build must leave as it was, by what to call it."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        "the module's tensors": [(name, id(t), t.detach().clone()) for name, t in tensors],
        "the module's attributes": [(p, type(m), sorted(map(str, vars(m)))) for p, m in module.named_modules()],
        "its training flags": [m.training for m in module.modules()],
        "torch's random state": torch.get_rng_state(),
        "Python's random state": random.getstate(),
        "numpy's random state": np.random.get_state(legacy=False)["state"]["key"].copy(),  # type: ignore[call-overload, index]
        "torch's threads": torch.get_num_threads(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's precision": torch.get_float32_matmul_precision(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's default device": torch.get_default_device(),
        # Inductor itself notes its cache folder and an address there when it is first used.
        "the environment": {k: v for k, v in os.environ.items() if "TORCHINDUCTOR" not in k},
        "the working folder": Path.cwd(),
        "the root logger": (logging.getLogger().handlers[:], logging.getLogger().level),
    }


def changed_keys(a: Any, b: Any) -> str:
    return f" ({', '.join(sorted(k for k in {**a, **b} if a.get(k) != b.get(k)))})" if isinstance(a, dict) else ""


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if type(a).__module__ == "numpy":
        return bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
