"""Every backend of this package holds the contract that it asks of others."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from aitune_lab.backends.base import Backend, BuildJob, Executable
from aitune_lab.backends.eager import TorchEagerBackend
from aitune_lab.backends.inductor_aot import TorchInductorAotBackend
from aitune_lab.backends.inductor_jit import TorchInductorJitBackend
from aitune_lab.backends.onnxruntime import ONNXRuntimeBackend
from aitune_lab.backends.openvino import OpenVINOBackend
from aitune_lab.backends.torchao import TorchAOBackend
from aitune_lab.testing import BackendContract
from aitune_lab.testing.scripted import ScriptedBackend


class TestEager(BackendContract):
    backend = TorchEagerBackend()


class TestONNXRuntime(BackendContract):
    backend = ONNXRuntimeBackend()


@pytest.mark.full
class TestONNXRuntimeInt8(BackendContract):
    backend = ONNXRuntimeBackend(quantization="int8dyn")
    relative_error = 0.1


@pytest.mark.full
class TestOpenVINO(BackendContract):
    backend = OpenVINOBackend()


@pytest.mark.full
class TestOpenVINOInt8(BackendContract):
    backend = OpenVINOBackend(quantization="int8wo")
    relative_error = 0.1


@pytest.mark.full
class TestInductorAot(BackendContract):
    backend = TorchInductorAotBackend(freezing=True)


class TestTorchAO(BackendContract):
    backend = TorchAOBackend(scheme="int8dyn")
    relative_error = 0.1


@pytest.mark.full
class TestTorchAOCompiled(BackendContract):
    backend = TorchAOBackend(scheme="int8wo", compile=True)
    relative_error = 0.1


@pytest.mark.full
class TestInductor(BackendContract):
    backend = TorchInductorJitBackend()


@pytest.mark.full
class TestInductorFrozen(BackendContract):
    backend = TorchInductorJitBackend(freezing=True)


class Faulty(ScriptedBackend):
    """Does, at a build or a call, what `fault` says."""

    fault: ClassVar[str] = ""

    def build(self, job: BuildJob) -> Executable:
        if self.fault == "random state":
            torch.rand(1)
        if self.fault == "weights":
            job.module.register_buffer("mine", torch.zeros(1))
        executable = super().build(job)
        if self.fault == "one buffer":
            executable.call = _OneBuffer(executable.call)
        if self.fault == "lies about weights":
            executable.live_weights = True
        return executable


class _OneBuffer:
    """Gives the same memory at each call."""

    def __init__(self, call: Any) -> None:
        self.call, self.held = call, {}

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        made = self.call(*tensors)
        shapes = tuple(x.shape for x in made)
        held = self.held.setdefault(shapes, [x.clone() for x in made])
        for buffer, x in zip(held, made, strict=True):
            buffer.copy_(x)
        return held


@pytest.mark.parametrize(
    ("fault", "test", "said"),
    [
        ("random state", "test_layers", "building layers changed torch's random state"),
        ("weights", "test_layers", "building layers changed the module's"),
        ("one buffer", "test_outputs_are_the_callers", "a later call changed an earlier result"),
        ("lies about weights", "test_weights_that_change", "says that it reads the live weights"),
    ],
)
def test_a_backend_that_breaks_it_is_found(fault: str, test: str, said: str) -> None:
    backend: Backend = type("Broken", (Faulty,), {"fault": fault})(weights="baked")
    contract = type("Contract", (BackendContract,), {"backend": backend})
    contract.setup_class()
    try:
        with pytest.raises(AssertionError, match=said):
            getattr(contract(), test)()
    finally:
        contract.teardown_class()


def test_a_wrong_result_and_a_needless_refusal_are_found() -> None:
    for options, said in (({"error": "scaled"}, "relative L2 error"), ({"fails_at": "refuse"}, "layers was refused")):
        contract = type("Contract", (BackendContract,), {"backend": ScriptedBackend(**options)})
        contract.setup_class()
        try:
            with pytest.raises(AssertionError, match=said):
                contract().test_layers()
        finally:
            contract.teardown_class()
