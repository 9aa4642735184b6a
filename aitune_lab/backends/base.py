"""What a backend is: the one class to subclass, the job it gets, the executable it gives back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..schema import Candidate, Signature

if TYPE_CHECKING:
    import torch

    from ..capture.calls import CallForm
    from ..capture.recorder import Sample

Isolation = Literal["none", "process", "file"]


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here; if not, why, and the command or step that cures it."""

    ok: bool
    reason: str = ""
    cure: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BackendConfig:
    """Base of the backends' frozen configs. Fields are plain values (bool, int, float, str, None)."""


@dataclass(frozen=True)
class Ties:
    """What a built artifact that holds native code is tied to, beside the kind of machine and the system it was built on.

    Attributes:
        cpu: the CPU's instruction sets and the C library.
        later_versions: whether later versions (of the same major one) of the backend's packages load it too.
        oldest_gpu: the lowest compute capability of the GPUs that run it, `"8.0"`; None for that of the one it was built on.
    """

    cpu: bool = True
    later_versions: bool = False
    oldest_gpu: str | None = None

    def version_holds(self, there: str, here: str) -> bool:
        """Whether what one version of a package built can be used with another."""
        old, new = _numbers(there), _numbers(here)
        return there == here or (self.later_versions and new[:1] == old[:1] and new > old)

    def gpu_holds(self, there: str, here: str) -> bool:
        """Whether what was built for a compute capability runs on another; a GPU whose capability isn't known never does."""
        return there == here if self.oldest_gpu is None else _numbers(here) >= _numbers(self.oldest_gpu)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _no_progress(phase: str, fraction: float | None) -> None:
    return None


@dataclass(frozen=True)
class BuildJob:
    """Everything a backend needs to build one candidate for one (module, signature).

    Attributes:
        module: the user's module, unchanged; a backend must not modify it.
        original: the module's own method (`forward` or another), as it was before any swap.
        form: binds a call by parameter name to positional and keyword arguments.
        signature: the contract; `signature.symbols` are the dimensions that must stay dynamic.
        samples: recorded calls, at least one for each point.
        candidate: backend name, options, precision, memory format.
        folder: an empty folder for the artifact's files; what is left there is the artifact. Where an artifact of
            another place is built again, the backend's `sources` of it are there.
        threads: intra-op threads to use, the same as torch's.
        progress: `progress(phase, fraction or None)`; raises if the user cancelled.
        shared: a private folder for what builds on this machine share (timings of kernels, compilers' caches); None
            without one.
    """

    path: str
    module: torch.nn.Module
    original: Callable[..., Any]
    form: CallForm
    signature: Signature
    samples: Sequence[Sample]
    candidate: Candidate
    folder: Path
    threads: int = 1
    progress: Callable[[str, float | None], None] = _no_progress
    shared: Path | None = None


@dataclass
class Executable:
    """A built candidate, ready to be called, from any thread.

    Attributes:
        call: if `flat`, takes the signature's tensor leaves in order (numpy leaves as tensors) and returns a
            sequence of the output's tensor leaves in order, followed by the new values of the mutated
            input leaves; otherwise takes the module's own arguments (as the original does) and returns its
            own output structure.
        live_weights: it reads the module's parameters at each call; otherwise it has baked their values.
        recompiles: `.ait` keeps its configuration only and builds it again at load.
        refresh: brings baked weights up to date in place and says whether that worked; None if it can't.
        close: frees what it holds; called once.
        notes: facts worth showing with the trial (graphs, breaks, what stayed dynamic).
        uncovered: counts calls inside the signature that this executable handed back to the original
            (a recompilation would have been needed); None if that cannot happen.
        memory_bytes: device memory that it holds beside the module's own.
        moved: says whether a weight lies elsewhere than when it was built; given by executables that read the live
            weights by address (CUDA graphs): they see in-place changes, but no tensor put in a weight's place. After
            a move their `refresh`, which may be slow, is called when the user asks for it only.
    """

    call: Callable[..., Any]
    flat: bool
    live_weights: bool = False
    recompiles: bool = False
    refresh: Callable[[], bool] | None = None
    close: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()
    uncovered: Callable[[], int] | None = None
    memory_bytes: int = 0
    moved: Callable[[], bool] | None = None


class Backend(ABC):
    """A way to run modules. Subclass it, set the class attributes, register it: that is all of a new backend.

    Contract:
    - An instance holds its frozen config and nothing else; instances are cheap and may be shared by threads.
    - `build` may be slow and may fail: it raises `Refused` for what it cannot keep (with the reason in one
      sentence) and lets any other error through. It never changes the user's module, torch's global state or
      the random state, and leaves nothing behind but the files in `job.folder`.
    - `load` gives the same executable from those files in another process, on a module with the same weights.
      It is not called for executables that recompile: those are built again.
    - The executable owns its resources until `close()`.
    """

    name: ClassVar[str]
    """Stable name in candidates, plans and files."""
    config_type: ClassVar[type[BackendConfig]] = BackendConfig
    isolation: ClassVar[Isolation] = "process"
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules whose import takes long, needed by a build: imported once, in the process that builds are forked from.
    Importing them must start no thread and run nothing."""
    runs_code: ClassVar[bool] = False
    """Its artifacts can run code when loaded, so loading one from a file needs trust."""
    capturable: ClassVar[bool] = False
    """Its executables launch all their work on the current CUDA stream, so that a CUDA graph may be tried around them."""
    kin: ClassVar[str | None] = None
    """Another backend that makes nearly the same kernels, so that what is known of one tells about the other."""
    further: ClassVar[Literal["options", "fallbacks"]] = "options"
    """What its proposals after the first are: ways that may be faster, or what to try where the first can't be used."""
    follows_torch: ClassVar[bool] = True
    """Torch's memory formats and its switch for TensorFloat-32 change what it makes; one that settles these itself proposes
    them as options of its own."""
    sources: ClassVar[tuple[str, ...]] = ()
    """Names of the artifact's files (with wildcards) from which `build` builds again where the others don't hold, without
    exporting the module once more."""
    complexity: ClassVar[int] = 1
    """Ties in latency and accuracy go to the lower one (eager is 0)."""

    def __init__(self, config: BackendConfig | None = None, **options: Any) -> None:
        self.config = config if config is not None else self.config_type(**options)

    @classmethod
    @abstractmethod
    def available(cls) -> Availability:
        """Whether it can run here. Imports nothing heavy that isn't installed, never raises, never starts CUDA."""

    def candidate(self) -> Candidate:
        """This backend with its config as a candidate: the fields that differ from their defaults, by name."""
        options = tuple(
            sorted(
                (f.name, getattr(self.config, f.name))
                for f in fields(self.config)
                if getattr(self.config, f.name) != f.default
            )
        )
        return Candidate(self.name, options)

    @classmethod
    def of(cls, candidate: Candidate) -> Backend:
        """The backend instance for a candidate of this backend. Raises PlanError for an option it doesn't have."""
        from ..errors import PlanError

        known = {f.name for f in fields(cls.config_type)}
        unknown = [name for name, _ in candidate.options if name not in known]
        if unknown:
            raise PlanError(
                f"options of backend {cls.name!r} must be among {sorted(known)}, but the candidate has {unknown}"
            )
        return cls(cls.config_type(**dict(candidate.options)))

    @abstractmethod
    def candidates(self, signature: Signature, module: torch.nn.Module) -> list[Candidate]:
        """What is worth trying for this module on this machine, cheapest and most promising first.

        Lower precisions may be among them whatever the budget: those that it can't admit are left out by `typical_error`.
        """

    def typical_error(self) -> float:
        """The relative error that this config typically comes to by computing below the module's dtype; 0 if it doesn't."""
        return 0.0

    def ties(self) -> Ties:
        """What binds an artifact of this config to the place where it was built; asked only if it `runs_code`."""
        return Ties()

    def weight_copies(self) -> int:
        """How many copies of the module's weights its executables hold: 0 for those that read the live ones."""
        return 1

    @abstractmethod
    def build(self, job: BuildJob) -> Executable:
        """Build the candidate. Raises Refused with a sentence, or any error of the backend."""

    def load(self, job: BuildJob) -> Executable:
        """Load what `build` left in `job.folder`; `job.samples` may be empty."""
        return self.build(job)

    @classmethod  # noqa: B027 - most keep nothing
    def release(cls) -> None:
        """Free what builds of a process keep for the next one; called when a run ends."""
