"""Which TensorRT is here and whether it can work: package, libraries, driver, the builder's kernels, the card.

There are two: TensorRT, whose engines are made for one kind of card, and TensorRT for RTX, whose engines are finished on
the user's card. Their Python packages share one interface.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from ...environment import driver_version, gpus
from ..base import Availability

FlavorName = Literal["tensorrt", "rtx"]

OLDEST = (10, 3)
"""Before it, strongly typed networks lack what exported graphs need."""
_NEWEST_CARDS = (((10, 8), (9, 0)),)
"""Versions before which cards beyond a compute capability aren't known to TensorRT."""


@dataclass(frozen=True)
class Flavor:
    """A TensorRT package.

    Attributes:
        module: what is imported.
        bindings: the package that holds the bindings without the libraries.
        library: stem of the main library's file name.
        install: the command that installs it.
        capabilities: compute capabilities of the cards on which its engines run; None: from `oldest` on.
        oldest: the lowest compute capability.
        portable: its engines run on all those cards, whichever they were built on.
    """

    name: FlavorName
    title: str
    module: str
    bindings: str
    library: str
    install: str
    oldest: tuple[int, int] = (7, 5)
    capabilities: frozenset[tuple[int, int]] | None = None
    portable: bool = False


FLAVORS: Mapping[FlavorName, Flavor] = {
    "tensorrt": Flavor("tensorrt", "TensorRT", "tensorrt", "tensorrt_bindings", "libnvinfer", "pip install tensorrt"),
    "rtx": Flavor(
        "rtx",
        "TensorRT for RTX",
        "tensorrt_rtx",
        "tensorrt_rtx_bindings",
        "libtensorrt_rtx",
        "pip install tensorrt-rtx",
        oldest=(8, 0),  # engines for Turing would have to be built for it alone
        capabilities=frozenset(((8, 0), (8, 6), (8, 9), (12, 0), (12, 1))),
        portable=True,
    ),
}


@dataclass(frozen=True)
class Loaded:
    """An attempt to import a flavor's package: the module, or why not."""

    module: ModuleType | None
    reason: str = ""
    cure: str = ""


@functools.cache
def load(flavor: Flavor) -> Loaded:
    """Import the package. Starts no CUDA; says apart what is missing."""
    if importlib.util.find_spec(flavor.module) is None:
        if importlib.util.find_spec(flavor.bindings) is not None:
            why = f"only the bindings of {flavor.title} are installed ({flavor.bindings}), not its libraries"
            return Loaded(None, why, flavor.install)
        return Loaded(None, f"{flavor.module} is not installed", flavor.install)
    try:
        module = importlib.import_module(flavor.module)
    except (ImportError, OSError) as error:
        why = f"a library of {flavor.title} can't be loaded: {str(error).strip().splitlines()[0]}"
        return Loaded(None, why, f"put the folder of {flavor.library}.so in LD_LIBRARY_PATH, or {flavor.install}")
    except Exception as error:  # placeholder packages raise what they like
        return Loaded(None, f"{flavor.module} fails to import: {type(error).__name__}: {error}", flavor.install)
    if not hasattr(module, "Builder"):
        return Loaded(None, f"the package {flavor.module} is a placeholder without {flavor.title}", flavor.install)
    return Loaded(module)


def require(flavor: Flavor) -> ModuleType:
    """The imported package. Raises BackendUnavailable with reason and cure."""
    from ...errors import BackendUnavailable

    found = load(flavor)
    if found.module is None:
        raise BackendUnavailable(f"{flavor.title} cannot be used: {found.reason}. {found.cure}")
    return found.module


def version(module: ModuleType) -> tuple[int, ...]:
    """`(10, 6, 0)` of a package's version."""
    return tuple(int(part) for part in re.findall(r"\d+", str(module.__version__))[:3])


def available(flavor: Flavor) -> Availability:
    """Whether engines of this flavor can be built and run on this machine's first GPU."""
    installed = importlib.util.find_spec(flavor.module) is not None
    cards = gpus()
    if installed and not cards:
        # Its libraries are large, and of no use without a card: nothing is imported.
        return Availability(False, *_why_no_card())
    found = load(flavor)
    if found.module is None:
        return Availability(False, found.reason, found.cure)
    module = found.module
    versions = {flavor.module: str(module.__version__)}

    def lacking(reason: str, cure: str) -> Availability:
        return Availability(False, reason, cure, versions)

    if flavor.name == "tensorrt" and version(module) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return lacking(f"TensorRT must be at least {oldest}, but {module.__version__} is installed", _upgrade(flavor))
    if torch.version.cuda is None:
        return lacking(
            f"torch {torch.__version__} is built without CUDA, which engines take their tensors from",
            "install a build of torch for CUDA",
        )
    capability = capability_of(cards[0].compute_capability)
    unfit = why_unfit(flavor, capability, cards[0].name)
    if unfit:
        other = FLAVORS["rtx" if flavor.name == "tensorrt" else "tensorrt"]
        return lacking(unfit, f"use another backend, or {other.title} ({other.install})")
    too_new = why_too_new(flavor, version(module), capability, cards[0].name)
    if too_new:
        return lacking(too_new, _upgrade(flavor))
    missing = lacking_kernels(flavor, capability, library_folder(flavor))
    if missing:
        return lacking(missing, "install a full build of TensorRT (its wheel or archive for this card)")
    return Availability(True, versions=versions)


def _upgrade(flavor: Flavor) -> str:
    return flavor.install.replace("pip install", "pip install --upgrade")


def _why_no_card() -> tuple[str, str]:
    """Why there is no GPU, and what cures it."""
    if driver_version() is None:
        return "no NVIDIA driver or GPU was found", "install the NVIDIA driver"
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        return f"CUDA_VISIBLE_DEVICES={setting!r} hides every GPU from this process", "unset CUDA_VISIBLE_DEVICES"
    return "the NVIDIA driver finds no GPU", "see what nvidia-smi says"


def capability_of(text: str) -> tuple[int, int] | None:
    """`(9, 0)` of `"9.0"`; None if it isn't known."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def why_unfit(flavor: Flavor, capability: tuple[int, int] | None, card: str) -> str:
    """Why engines don't run on a card, empty if they do or it can't be told."""
    if capability is None:
        return ""
    shown = f"{card} (compute capability {capability[0]}.{capability[1]})"
    if capability < flavor.oldest:
        return f"{shown} is too old for {flavor.title}, which needs {flavor.oldest[0]}.{flavor.oldest[1]} or newer"
    if flavor.capabilities is not None and capability not in flavor.capabilities:
        known = ", ".join(f"{a}.{b}" for a, b in sorted(flavor.capabilities))
        return f"{flavor.title} runs on compute capabilities {known}, and {shown} is none of them"
    return ""


def why_too_new(flavor: Flavor, version: tuple[int, ...], capability: tuple[int, int] | None, card: str) -> str:
    """Why a card is beyond what an installed version builds for, empty if it isn't or it can't be told."""
    if flavor.name != "tensorrt" or capability is None:
        return ""
    for since, newest in _NEWEST_CARDS:
        if version < since and capability > newest:
            here, wanted = ".".join(map(str, version)), ".".join(map(str, since))
            return (
                f"{card} (compute capability {capability[0]}.{capability[1]}) is too new for TensorRT {here}: "
                f"it takes {wanted} or newer"
            )
    return ""


def library_folder(flavor: Flavor) -> Path | None:
    """The folder that the main library was loaded from, by this process's own memory map; None if not known."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(f"{flavor.library}.so"):
            return Path(path).parent
    return None


def lacking_kernels(flavor: Flavor, capability: tuple[int, int] | None, folder: Path | None) -> str:
    """Why the builder can't build for a card: its kernels come in files of their own, one for each kind of card.

    Some distributions hold the part for future cards only (`ptx`); the builder would then fail at once.
    """
    if flavor.name != "tensorrt" or capability is None or folder is None:
        return ""
    parts = sorted(f.name for f in folder.glob("libnvinfer_builder_resource*.so*"))
    if not parts:
        return ""  # linked in, or a lean runtime that says so itself
    whole = any(re.match(r"libnvinfer_builder_resource\.so", name) for name in parts)
    wanted = f"libnvinfer_builder_resource_sm{capability[0]}{capability[1]}"
    if whole or any(name.startswith(wanted) for name in parts):
        return ""
    kinds = sorted({m[1] for name in parts if (m := re.match(r"libnvinfer_builder_resource_(\w+?)\.so", name))})
    return f"the builder's kernels for this card ({wanted}.so) are missing in {folder}, which holds those for {', '.join(kinds)}"
