"""The original, as one more candidate: what every other one is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..schema import Candidate, Signature
from .base import Availability, Backend, BackendConfig, BuildJob, Executable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TorchEagerConfig(BackendConfig):
    """Eager has no options."""


class TorchEagerBackend(Backend):
    """Runs the module's own method as it is."""

    name = "eager"
    config_type = TorchEagerConfig
    isolation = "none"
    capturable = True
    complexity = 0

    @classmethod
    def available(cls) -> Availability:
        return Availability(True, versions={"torch": torch.__version__})

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def weight_copies(self) -> int:
        return 0

    def build(self, job: BuildJob) -> Executable:
        return Executable(job.original, flat=False, live_weights=True)
