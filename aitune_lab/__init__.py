"""Find which inference backend is really fastest for each part of a PyTorch model, and prove that it is still right.

Every public name is imported at its first use, so that `import aitune_lab` is cheap and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.eager import TorchEagerBackend, TorchEagerConfig
    from .backends.inductor_aot import TorchInductorAotBackend, TorchInductorAotConfig
    from .backends.inductor_jit import TorchInductorJitBackend, TorchInductorJitConfig
    from .backends.onnxruntime import ONNXRuntimeBackend, ONNXRuntimeConfig
    from .backends.openvino import OpenVINOBackend, OpenVINOConfig
    from .backends.tensorrt import TensorRTBackend, TensorRTConfig, TensorRTRTXBackend
    from .backends.torchao import TorchAOBackend, TorchAOConfig
    from .capture.inspector import inspect
    from .capture.signature import BatchDim, DynamicDim
    from .checkpoint import check, load, save, show
    from .errors import (
        AituneError,
        AituneWarning,
        BackendUnavailable,
        BuildError,
        CheckpointError,
        ChildFailed,
        DataError,
        DeviceLost,
        MissingDependency,
        PlanError,
        Refused,
        SignatureMiss,
        StoreError,
        TargetError,
    )
    from .jupyter import Lab
    from .report import as_code, figures, html_report
    from .runtime.cuda_graph import warmup
    from .runtime.installed import refresh, stats
    from .schema import Candidate, Limits, Plan, Rule, Tolerance
    from .tuning import whatif
    from .tuning.api import Module, tune, unwrap, wrap
    from .tuning.bisect import bisect
    from .tuning.diff import diff
    from .tuning.observe import observe
    from .tuning.profile import profile
    from .tuning.run_report import load_report, save_report
    from .tuning.sensitivity import sensitivity
    from .tuning.strategies import (
        FirstWinsStrategy,
        HighestThroughputStrategy,
        LatencyBudgetStrategy,
        MaxThroughputStrategy,
        MinLatencyStrategy,
        OneBackendStrategy,
        ParetoStrategy,
    )

__version__ = "0.1.0"

__all__ = [
    "AituneError",
    "AituneWarning",
    "BackendUnavailable",
    "BatchDim",
    "BuildError",
    "Candidate",
    "CheckpointError",
    "DataError",
    "ChildFailed",
    "DeviceLost",
    "DynamicDim",
    "FirstWinsStrategy",
    "HighestThroughputStrategy",
    "Lab",
    "LatencyBudgetStrategy",
    "Limits",
    "MaxThroughputStrategy",
    "MinLatencyStrategy",
    "MissingDependency",
    "Module",
    "ONNXRuntimeBackend",
    "ONNXRuntimeConfig",
    "OpenVINOBackend",
    "OpenVINOConfig",
    "OneBackendStrategy",
    "ParetoStrategy",
    "Plan",
    "PlanError",
    "Refused",
    "Rule",
    "SignatureMiss",
    "StoreError",
    "TargetError",
    "TensorRTBackend",
    "TensorRTConfig",
    "TensorRTRTXBackend",
    "Tolerance",
    "TorchAOBackend",
    "TorchAOConfig",
    "TorchEagerBackend",
    "TorchEagerConfig",
    "TorchInductorAotBackend",
    "TorchInductorAotConfig",
    "TorchInductorJitBackend",
    "TorchInductorJitConfig",
    "__version__",
    "as_code",
    "bisect",
    "check",
    "diff",
    "figures",
    "html_report",
    "inspect",
    "load",
    "load_report",
    "observe",
    "profile",
    "refresh",
    "save",
    "sensitivity",
    "save_report",
    "show",
    "stats",
    "tune",
    "unwrap",
    "warmup",
    "whatif",
    "wrap",
]

_NAMES_OF = {
    "backends.eager": "TorchEagerBackend TorchEagerConfig",
    "backends.inductor_aot": "TorchInductorAotBackend TorchInductorAotConfig",
    "backends.inductor_jit": "TorchInductorJitBackend TorchInductorJitConfig",
    "backends.onnxruntime": "ONNXRuntimeBackend ONNXRuntimeConfig",
    "backends.openvino": "OpenVINOBackend OpenVINOConfig",
    "backends.tensorrt": "TensorRTBackend TensorRTConfig TensorRTRTXBackend",
    "backends.torchao": "TorchAOBackend TorchAOConfig",
    "capture.inspector": "inspect",
    "capture.signature": "BatchDim DynamicDim",
    "checkpoint": "check load save show",
    "errors": (
        "AituneError AituneWarning BackendUnavailable BuildError CheckpointError ChildFailed DataError DeviceLost MissingDependency PlanError "
        "Refused SignatureMiss StoreError TargetError"
    ),
    "jupyter": "Lab",
    "report": "as_code figures html_report",
    "runtime.cuda_graph": "warmup",
    "runtime.installed": "refresh stats",
    "schema": "Candidate Limits Plan Rule Tolerance",
    "tuning": "whatif",
    "tuning.api": "Module tune unwrap wrap",
    "tuning.bisect": "bisect",
    "tuning.sensitivity": "sensitivity",
    "tuning.diff": "diff",
    "tuning.observe": "observe",
    "tuning.profile": "profile",
    "tuning.run_report": "load_report save_report",
    "tuning.strategies": (
        "FirstWinsStrategy HighestThroughputStrategy LatencyBudgetStrategy MaxThroughputStrategy MinLatencyStrategy "
        "OneBackendStrategy ParetoStrategy"
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    holder = importlib.import_module(f".{module}", __name__)
    # A name may be a module of its own.
    value = getattr(holder, name) if hasattr(holder, name) else importlib.import_module(f".{module}.{name}", __name__)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext aitune_lab`: adds the magics `%aitune` and `%%aitune`."""
    from .jupyter.magic import AituneMagics

    shell.register_magics(AituneMagics)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
