"""What an artifact of engines says about itself: what built them, for which card, and which sizes each serves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import BuildError
from ..base import Ties
from .spec import EngineSpec

MODEL = "model.onnx"
ENGINES = "engines.json"


@dataclass(frozen=True)
class Description:
    """`engines.json`.

    Attributes:
        version: of TensorRT that built the engines.
        card: name of the GPU that they were built on; empty if there was none.
        capability: its compute capability, `"9.0"`.
        exporter: by which of torch's exporters the network was written; a refit needs the same.
        engines: those tried first at a call first.
    """

    version: str
    card: str
    capability: str
    exporter: str
    engines: tuple[EngineSpec, ...]

    def write(self, folder: Path) -> None:
        content = {
            "version": self.version,
            "card": self.card,
            "capability": self.capability,
            "exporter": self.exporter,
            "engines": [{"name": spec.name, "ranges": spec.ranges} for spec in self.engines],
        }
        (folder / ENGINES).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Raises BuildError for a file that is missing or damaged."""
        path = folder / ENGINES
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            specs = tuple(
                EngineSpec(str(e["name"]), {str(k): tuple(v) for k, v in e["ranges"].items()})  # type: ignore[misc]
                for e in found["engines"]
            )
            version, card, capability, exporter = (
                str(found[key]) for key in ("version", "card", "capability", "exporter")
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BuildError(f"{path.name} of the engines is damaged: {error}") from error
        return cls(version, card, capability, exporter, specs)

    def foreign(self, title: str, version: str, capability: str, ties: Ties) -> str:
        """Why the engines can't be used by a version of TensorRT on a card, in a sentence; empty if nothing says so."""
        if not ties.version_holds(self.version, version):
            return f"the engines were built by {title} {self.version}, and {version} is here, which doesn't load them"
        if capability and not ties.gpu_holds(self.capability, capability):
            wanted = f"{ties.oldest_gpu} or newer" if ties.oldest_gpu else self.capability or "none"
            return f"the engines were built for compute capability {wanted}, and this card has {capability}"
        return ""


def card_of(device: torch.device) -> tuple[str, str]:
    """Name and compute capability (`"9.0"`) of a GPU; both empty where torch has none."""
    if not torch.cuda.is_available():
        return "", ""
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"{major}.{minor}"


def remove_model(folder: Path) -> None:
    """Remove the ONNX file and its weights, if they are there."""
    for file in folder.glob(f"{MODEL}*"):
        file.unlink()
