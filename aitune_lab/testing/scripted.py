"""A backend that does what a test says, a meter that measures what a test says, and a short way to install both.

Nothing here is known to a run unless it is registered: `with scripted_backend(): tune(...)`.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..backends import registry
from ..backends.base import Availability, Backend, BackendConfig, BuildJob, Executable
from ..capture.data import as_call
from ..capture.probe import probe
from ..capture.recorder import Recorder
from ..capture.signature import DynamicShapes, RecordedSignature, signatures_of
from ..capture.structure import flatten, is_tensor, unflatten_call
from ..capture.swap import original_method
from ..errors import Refused
from ..measure.benchmark import Timing, measure
from ..measure.blocks import Contender, MeasureLimits
from ..runtime.installed import Installed, InstalledExecutable, install_all, prepare
from ..schema import Candidate, Choice, Plan, Signature, TensorLeaf
from .clock import ScriptedClock


@dataclass(frozen=True)
class ScriptedConfig(BackendConfig):
    """What the scripted executable does.

    Attributes:
        latency_ms: what `ScriptedMeter` measures for it.
        error: `"ok"`, or how outputs are wrong: `"scaled"` by 1.5, `"dtype"` float64, `"nan"` in the first element,
            `"structure"` one output too many.
        fails_at: `""`, `"build"`, `"refuse"` (a refusal with a reason), `"load"` or `"run"`.
        weights: `"live"`: reads the module's own; `"baked"`: a copy made at the build; `"refreshable"`: a copy that
            `refresh` brings up to date.
    """

    latency_ms: float = 0.5
    error: str = "ok"
    fails_at: str = ""
    weights: str = "live"


class ScriptedBackend(Backend):
    """Runs the original on flat tensors, right or wrong as its options say."""

    name = "scripted"
    config_type = ScriptedConfig
    isolation = "none"
    complexity = 1
    config: ScriptedConfig

    @classmethod
    def available(cls) -> Availability:
        return Availability(True, versions={"scripted": "1"})

    def candidates(self, signature: Signature, module: torch.nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def weight_copies(self) -> int:
        return 0 if self.config.weights == "live" else 1

    def build(self, job: BuildJob) -> Executable:
        if self.config.fails_at == "build":
            raise RuntimeError("scripted failure at build")
        if self.config.fails_at == "refuse":
            raise Refused("scripted refusal")
        (job.folder / "scripted.txt").write_text(self.config.error, encoding="utf-8")
        return self._executable(job)

    def load(self, job: BuildJob) -> Executable:
        if self.config.fails_at == "load":
            raise RuntimeError("scripted failure at load")
        return self._executable(job)

    def _executable(self, job: BuildJob) -> Executable:
        run = _Run(job, self.config)
        return Executable(
            run,
            flat=True,
            live_weights=self.config.weights == "live",
            refresh=run.refresh if self.config.weights == "refreshable" else None,
        )


class _Run:
    """The flat call of one job."""

    def __init__(self, job: BuildJob, config: ScriptedConfig) -> None:
        self.job, self.config = job, config
        self.calls = 0
        self.original = job.original
        if config.weights != "live":
            self.copy = copy.deepcopy(job.module)
            self.original = original_method(self.copy, job.signature.method)
        self.template = job.samples[0]
        self.tensor_at = [i for i, leaf in enumerate(job.signature.leaves) if isinstance(leaf, TensorLeaf)]
        self.mutated = [i for i in self.tensor_at if job.signature.leaves[i].path in job.signature.facts.mutated]

    def refresh(self) -> bool:
        self.copy.load_state_dict(self.job.module.state_dict())
        return True

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        self.calls += 1
        if self.config.fails_at == "run":
            raise RuntimeError("scripted failure at run")
        leaves = list(self.template.leaves)
        for at, tensor in zip(self.tensor_at, tensors, strict=True):
            leaf = self.job.signature.leaves[at]
            holder = leaf.holder if isinstance(leaf, TensorLeaf) else "torch"
            given = tensor.clone() if at in self.mutated else tensor
            leaves[at] = given.numpy() if holder == "numpy" else given
        args, kwargs = self.job.form.arguments(unflatten_call(self.template.node, leaves))
        outputs = [torch.as_tensor(x) for x in flatten(self.original(*args, **kwargs)).leaves if is_array(x)]
        return [*self._wrong(outputs), *(torch.as_tensor(leaves[i]) for i in self.mutated)]

    def _wrong(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        error = self.config.error
        if error == "scaled":
            return [x * 1.5 if x.is_floating_point() else x for x in outputs]
        if error == "dtype":
            return [x.double() if x.is_floating_point() else x for x in outputs]
        if error == "nan":
            outputs = [x.clone() for x in outputs]
            outputs[0].view(-1)[:1] = torch.nan
        if error == "structure":
            outputs = [x.unsqueeze(0) for x in outputs]
        return outputs


def is_array(value: Any) -> bool:
    """Whether a leaf is a tensor or a numpy array."""
    return is_tensor(value) or type(value).__name__ == "ndarray"


@contextmanager
def scripted_backend() -> Iterator[type[ScriptedBackend]]:
    """The backend `scripted` is known while entered."""
    registry.register(ScriptedBackend)
    try:
        yield ScriptedBackend
    finally:
        registry.unregister(ScriptedBackend.name)


class ScriptedMeter:
    """A meter for `TuneOptions.meter` that runs the real measuring on a scripted clock: no module is called.

    Args:
        latency_ms: median latency by contender's label. Others get the `latency_ms` in their label (as of
            `scripted[latency_ms=0.2]`), scripted ones without it 0.5, eager 1.0.
        noise: standard deviation of the logarithm of a call's latency.
        seed: of the noise.
    """

    def __init__(self, latency_ms: Mapping[str, float] | None = None, noise: float = 0.01, seed: int = 0) -> None:
        self.latency_ms = {"eager": 1.0, **(latency_ms or {})}
        self.noise, self.seed = noise, seed
        self.measured: list[tuple[str, ...]] = []
        """Labels of the contenders of every measurement so far."""

    def latency_of(self, label: str) -> float:
        if label in self.latency_ms:
            return self.latency_ms[label]
        said = re.search(r"latency_ms=([0-9.e-]+)", label)
        return float(said[1]) if said else ScriptedConfig.latency_ms

    def __call__(
        self,
        contenders: Sequence[Contender],
        *,
        device: torch.device | str = "cpu",
        limits: MeasureLimits | None = None,
        threads: int | None = None,
        seed: int = 0,
        cancelled: Callable[[], bool | None] = lambda: False,
    ) -> Timing:
        self.measured.append(tuple(c.label for c in contenders))
        clock = ScriptedClock(self.seed + seed + len(self.measured))
        calls = [Contender(c.label, [clock.call(self.latency_of(c.label), self.noise)]) for c in contenders]
        return measure(
            calls,
            limits=limits,
            threads=threads,
            clock=clock,
            seed=seed,
            load=lambda: lambda: None,
            cancelled=cancelled,
        )


def record_calls(
    module: torch.nn.Module,
    *calls: Any,
    method: str = "forward",
    declared: DynamicShapes | None = None,
    path: str = "",
) -> tuple[Recorder, list[RecordedSignature]]:
    """Run calls (items as `tune` takes them) through a method and infer their signatures, with facts."""
    recorder = Recorder([(path, module, method)])
    with torch.no_grad(), recorder.recording():
        for item in calls:
            args, kwargs = as_call(item)
            (module if method == "forward" else getattr(module, method))(*args, **kwargs)
    recording = recorder.recordings[0]
    return recorder, [probe(recording, recorded) for recorded in signatures_of(recording, declared)]


def prepare_scripted(
    module: torch.nn.Module,
    *calls: Any,
    method: str = "forward",
    declared: DynamicShapes | None = None,
    path: str = "",
    on_miss: Literal["original", "error"] = "original",
    watching: Literal["watched", "frozen"] = "watched",
    call: Callable[..., Sequence[torch.Tensor]] | None = None,
    **options: Any,
) -> Installed:
    """What `install_scripted` installs, before it is installed."""
    recorder, signatures = record_calls(module, *calls, method=method, declared=declared, path=path)
    recording = recorder.recordings[0]
    backend = ScriptedBackend(**options)
    entries = []
    for recorded in signatures:
        job = BuildJob(
            path,
            module,
            original_method(module, method),
            recording.form,
            recorded.signature,
            recorded.all_samples(),
            backend.candidate(),
            Path(tempfile.gettempdir()),
        )
        choice = Choice(path, method, recorded.signature.key, job.candidate, None, "installed by a test")
        executable = backend._executable(job)
        executable.call = call or executable.call
        entries.append(InstalledExecutable(choice, recorded.signature, None, executable, job))
    return prepare(module, method, path, entries, Plan(), on_miss=on_miss, weights=watching)


def install_scripted(module: torch.nn.Module, *calls: Any, **options: Any) -> Installed:
    """Install scripted executables for the signatures of some calls, without tuning.

    Args:
        module: the module; its method runs each call once to be recorded.
        calls: items as `tune` takes them: a tensor, a dict of keywords, a tuple of arguments, `(tuple, dict)`.
        options: `method`, `declared` (dynamic shapes), `path`, `on_miss`, `watching` (`"watched"`, `"frozen"`),
            `call` (flat tensors to flat tensors, in place of the scripted one), and the fields of `ScriptedConfig`.
    """
    made = prepare_scripted(module, *calls, **options)
    install_all([made])
    return made
