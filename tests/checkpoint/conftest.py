"""Targets tuned with small backends of our own, and files rewritten as an attacker would."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from aitune_lab.backends import registry
from aitune_lab.backends.base import Availability, Backend, BackendConfig, BuildJob, Executable
from aitune_lab.capture.calls import CallForm
from aitune_lab.capture.probe import probe
from aitune_lab.capture.recorder import Recorder
from aitune_lab.capture.signature import signatures_of
from aitune_lab.capture.swap import original_method
from aitune_lab.capture.tree import modules_of
from aitune_lab.runtime.installed import InstalledExecutable, install_all, prepare, uninstall_all
from aitune_lab.schema import Candidate, Choice, Plan, PointResult, Trial


@dataclass(frozen=True)
class Options(BackendConfig):
    offset: float = 0.0
    """What the executable's outputs are off: a backend that is wrong."""


@dataclass
class Log:
    built: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    points: list[Any] = field(default_factory=list)


log = Log()


class DataBackend(Backend):
    """Keeps the weights of an `nn.Linear` in its artifact, as data."""

    name = "data"
    config_type = Options
    version = "1.0"
    fails = False

    @classmethod
    def available(cls) -> Availability:
        return Availability(True, versions={cls.name: cls.version})

    def candidates(self, signature: Any, module: nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def build(self, job: BuildJob) -> Executable:
        log.built.append(job.path)
        log.points.append([sample.point.label for sample in job.samples])
        (job.folder / "parts").mkdir()
        state = {name: tensor.detach().clone() for name, tensor in job.module.state_dict().items()}
        save_file(state, job.folder / "parts" / "weights.safetensors")
        (job.folder / "note.txt").write_text("made by the data backend")
        return self._executable(job)

    def load(self, job: BuildJob) -> Executable:
        log.loaded.append(job.path)
        if self.fails:
            raise RuntimeError("no such kernel")
        return self._executable(job)

    def _executable(self, job: BuildJob) -> Executable:
        state = load_file(job.folder / "parts" / "weights.safetensors")
        offset = self.config.offset  # type: ignore[attr-defined]

        def call(x: torch.Tensor) -> list[torch.Tensor]:
            return [nn.functional.linear(x, state["weight"], state["bias"]) + offset]

        return Executable(call, flat=True, close=lambda: log.closed.append(job.path))


class CodeBackend(DataBackend):
    """The same, but its artifact counts as code."""

    name = "code"
    runs_code = True


class RebuiltBackend(DataBackend):
    """Has no artifact; reads the live weights."""

    name = "rebuilt"

    def build(self, job: BuildJob) -> Executable:
        log.built.append(job.path)
        log.points.append([sample.point.label for sample in job.samples])
        offset = self.config.offset  # type: ignore[attr-defined]
        return Executable(
            lambda *args: job.original(*args) + offset,
            flat=False,
            live_weights=True,
            recompiles=True,
            close=lambda: log.closed.append(job.path),
        )


BACKENDS = (DataBackend, CodeBackend, RebuiltBackend)


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).relu())


def make(cls: Callable[..., nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(7)
    return cls(**options).eval()


def tune(target: Any, choices: dict[str, Candidate], calls: Callable[[], Any], plan: Plan | None = None) -> None:
    """Install a candidate on each path, recorded while `calls` runs."""
    modules = modules_of(target)
    recorder = Recorder([(path, modules[path], "forward") for path in choices])
    with recorder.recording(), torch.no_grad():
        calls()
    prepared = []
    for recording in recorder.recordings:
        candidate = choices[recording.path]
        entries = []
        for recorded in map(lambda r: probe(recording, r), signatures_of(recording)):  # noqa: C417
            original = original_method(recording.module, "forward")
            job = BuildJob(
                recording.path,
                recording.module,
                original,
                CallForm(original),
                recorded.signature,
                recorded.all_samples(),
                candidate,
                Path(tempfile.mkdtemp()),
            )
            backend = registry.of(candidate)
            executable = backend.build(job)
            points = tuple(PointResult(point, calls, 1.0) for point, calls in recorded.calls.items())
            key = recorded.signature.key
            versions = dict(backend.available().versions)
            trial = Trial(
                "t", recording.path, key, candidate, "ok", points=points, versions=versions, log="/secret/path"
            )
            choice = Choice(recording.path, "forward", key, candidate, "t", "it is the fastest", error_class="exact")
            entries.append(InstalledExecutable(choice, recorded.signature, trial, executable, job))
        prepared.append(prepare(recording.module, "forward", recording.path, entries, plan or Plan()))
    install_all(prepared)


def inputs(batch: int) -> torch.Tensor:
    return torch.linspace(-1, 1, batch * 3).reshape(batch, 3)


def tuned_net(encoder: Candidate | str = "data", head: Candidate | str = "data") -> nn.Module:
    """A `Net` with a tuned encoder and head, recorded at batch 1 and 4."""
    net = make()
    named = {"encoder": encoder, "head": head}
    choices = {path: Candidate(c) if isinstance(c, str) else c for path, c in named.items()}
    tune(net, choices, lambda: [net(inputs(1)), net(inputs(4))])
    return net


def rewrite(
    source: Path,
    target: Path,
    manifest: Callable[[dict[str, Any]], Any] = lambda data: None,
    content: dict[str, bytes] | None = None,
    rename: dict[str, str] | None = None,
    extra: Callable[[zipfile.ZipFile], Any] = lambda archive: None,
) -> Path:
    """A copy of a file with right checksums of the zip, but changed as given."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = (content or {}).get(name, old.read(name))
            if name == "manifest.json":
                parsed = json.loads(data)
                manifest(parsed)
                data = json.dumps(parsed).encode()
            new.writestr((rename or {}).get(name, name), data)
        extra(new)
    return target


def rehash(data: dict[str, Any], name: str, content: bytes) -> None:
    """Let a manifest say that an entry has this content."""
    entry = next(e for e in data["entries"] if e["name"] == name)
    entry |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture(autouse=True)
def backends() -> Iterator[Log]:
    log.__init__()  # type: ignore[misc]
    for backend in BACKENDS:
        registry.register(backend)
    yield log
    for backend in BACKENDS:
        registry.unregister(backend.name)


@pytest.fixture
def lab(backends: Log) -> SimpleNamespace:
    """Everything above, for test modules (which can't import a conftest)."""
    return SimpleNamespace(
        CodeBackend=CodeBackend,
        DataBackend=DataBackend,
        Net=Net,
        inputs=inputs,
        log=backends,
        make=make,
        rehash=rehash,
        rewrite=rewrite,
        tune=tune,
        tuned_net=tuned_net,
        untune=uninstall_all,
    )
