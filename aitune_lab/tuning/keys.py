"""Content keys: what an artifact, a trial, a second look and an end-to-end check depend on.

Equal keys mean that building or measuring again would give the same, up to noise. Calls and weights of points don't count:
they only say how figures are added up.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from .. import __version__
from ..backends import registry
from ..environment import fingerprint
from ..measure.conditions import conditions
from ..schema import Candidate, Point, Tolerance, Trial, to_json
from .bench import Bench
from .identity import Digest, leaves_into, module_digest
from .search import Rival

_DIGITS = 20


@dataclass(frozen=True)
class Keys:
    """The keys of the trials of one (module, signature).

    Args:
        bench: its recorded calls and limits.
        weights: gives the content digest of its weights.
    """

    bench: Bench
    weights: str

    @cached_property
    def _contract(self) -> str:
        """What an artifact depends on beside the candidate: the module, the contract, the machine."""
        recording, signature = self.bench.recording, self.bench.recorded.signature
        digest = Digest()
        digest.add(__version__, sys.version_info[:2], self.weights, to_json(signature), self.bench.threads)
        digest.add(module_digest(recording.module, recording.method, signature.facts.state))
        digest.add(_machine(self.bench.device))
        return digest.hex()

    @cached_property
    def _calls(self) -> str:
        """What figures depend on beside that: the samples, and how they are compared and measured."""
        bench, digest = self.bench, Digest()
        digest.add(bench.recording.path, to_json(bench.tolerance), sorted(asdict(bench.limits).items()))
        digest.add(sorted((k, v) for k, v in conditions(torch.device("cpu")).items()))
        for point in sorted(bench.recorded.samples, key=lambda p: p.sizes):
            digest.add(point.label)
            for sample in bench.recorded.samples[point]:
                digest.add(sample.node)
                readable = leaves_into(digest, sample.leaves)
                if sample.random_state is not None and bench.recorded.signature.facts.random:
                    digest.tensor(sample.random_state)
                if not readable:  # an object that nobody can compare with an earlier one
                    digest.add(secrets.token_hex())
        return digest.hex()

    def artifact(self, candidate: Candidate) -> str:
        """Of what a backend builds for the candidate, from whatever samples."""
        versions = sorted(registry.get(candidate.backend).available().versions.items())
        return _key(self._contract, candidate.key, str(versions))

    def trial(self, candidate: Candidate) -> str:
        """Of the candidate's comparison and measurement."""
        return _key(self.artifact(candidate), self._calls)

    def rough(self, candidate: Candidate, rival: Rival) -> str:
        """Of a trial that was stopped because the candidate had no chance against a rival."""
        over = sorted((point.label, value) for point, value in rival.over_eager.items())
        return _key(self.trial(candidate), rival.label, str(over))

    def look(self, trial: Trial, weights: Mapping[Point, float], contenders: int) -> str:
        """Of a second look at a trial: its points with their weights, and how many share the error rate."""
        return _key(trial.key, str(sorted((p.label, w) for p, w in weights.items())), str(contenders))


def check_key(
    installed: Sequence[str],
    tolerance: Tolerance,
    calls: str,
    parts: Sequence[torch.nn.Module],
    weights: Callable[..., str],
) -> str:
    """Of an end-to-end check.

    Args:
        installed: keys of the trials that are installed.
        tolerance: what outputs may be off.
        calls: digest of the data and of what is called with it.
        parts: the outermost modules of the target.
        weights: gives a module's content digest.
    """
    digest = Digest()
    digest.add(*installed)
    digest.add(to_json(tolerance), calls, _machine(torch.device("cpu")))
    for part in parts:
        digest.add(module_digest(part, "forward"), weights(part))
    return digest.hex()[:_DIGITS]


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]


def _machine(device: torch.device) -> str:
    """The hardware and the versions of torch that compiled code and figures depend on."""
    here: Any = fingerprint(packages=False, start_cuda=device.type == "cuda")
    if device.type != "cuda":
        here = replace(here, cuda=None, gpus=(), compute_capabilities=(), driver=None)
    return to_json(here)
