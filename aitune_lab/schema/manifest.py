"""What a `.ait` file says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .plan import Choice, Plan
from .signature import Leaf, Node, Point, Signature
from .trial import Trial

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Fingerprint:
    """The hardware and software at hand: where figures were measured and artifacts hold."""

    python: str
    platform: str
    machine: str
    cpu: str
    cpu_flags: tuple[str, ...]
    threads: int
    torch: str
    packages: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    compute_capabilities: tuple[str, ...] = ()
    driver: str | None = None


@dataclass(frozen=True)
class Entry:
    """One file of the archive. `code` entries can run code when loaded and need trust."""

    name: str
    size_bytes: int
    sha256: str
    code: bool = False


@dataclass(frozen=True)
class Submodule:
    """One submodule's class and settings.

    `settings` is a digest of its `extra_repr()`, `numbers` are its plain attributes that are numbers, None or tuples of
    those, as text.
    """

    path: str
    type: str
    settings: str
    numbers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ModuleIdentity:
    """Which module an artifact belongs to: class, parameter names with shapes and dtypes, and a digest of the values.

    `live_weights` says that the executables read the weights of the module they are loaded onto; otherwise
    loading checks `weights_digest`. `structure` holds the module itself (path `""`) and all its submodules; it is empty
    in files that were written before it was kept.
    """

    path: str
    type: str
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    weights_digest: str
    structure: tuple[Submodule, ...] = ()


@dataclass(frozen=True)
class GoldenSample:
    """The structure of one call kept for the self-test: inputs, and the outputs that eager gave when saved.

    Leaves have concrete dimensions. Tensors stand in the choice's golden file under `<index>.in.<leaf>` and
    `<index>.out.<leaf>`, counted over samples and leaves; other leaves stand here by value.
    """

    point: Point
    inputs: Node
    leaves: tuple[Leaf, ...]
    outputs: Node
    output_leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class SavedChoice:
    """One (module, signature) of the archive with everything needed to load, explain and check it.

    `artifact` and `golden` name entries: the backend's files below `folder`, and the tensors of `samples`.
    """

    choice: Choice
    signature: Signature
    trial: Trial | None
    artifact: tuple[str, ...] = ()
    golden: tuple[str, ...] = ()
    live_weights: bool = False
    recompiles: bool = False
    folder: str = ""
    samples: tuple[GoldenSample, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`. `kind` tells recorded golden samples from synthetic ones."""

    format_version: int
    created: str
    aitune_lab: str
    target: str
    fingerprint: Fingerprint
    plan: Plan
    modules: tuple[ModuleIdentity, ...]
    choices: tuple[SavedChoice, ...]
    entries: tuple[Entry, ...]
    golden_samples: Literal["synthetic", "recorded", "none"] = "synthetic"
    notes: tuple[str, ...] = ()
