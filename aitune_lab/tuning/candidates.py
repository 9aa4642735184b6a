"""Which candidates to try for a signature, in which order."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..backends import registry
from ..backends.base import Backend
from ..errors import PlanError
from ..schema import Candidate, Option, Plan, Signature

TYPICAL_SECONDS = {"eager": 1.0, "onnxruntime": 8.0, "inductor": 30.0}
"""What a trial of a backend takes on a laptop, for the estimate before a run; measured ones replace it as it goes."""

EAGER = Candidate("eager")


@dataclass
class Shortlist:
    """Candidates to try in order, and those that are not, each with its reason, by label."""

    candidates: list[Candidate] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    variant_of: dict[Candidate, Candidate] = field(default_factory=dict)
    """The backend's first proposal for each further one of it; what the user named is no variant."""


def as_candidate(value: str | Candidate | Backend | type[Backend]) -> Candidate:
    """A candidate from a backend's name, class or instance. Raises PlanError for unknown names and other things."""
    if isinstance(value, Candidate):
        return value
    if isinstance(value, Backend):
        return value.candidate()
    if isinstance(value, type) and issubclass(value, Backend):
        return Candidate(value.name)
    if isinstance(value, str):
        registry.get(value)
        return Candidate(value)
    raise PlanError(f"a backend must be a name, a Backend or a Candidate, but got {value!r}")


def candidate_of_label(label: str) -> Candidate:
    """The candidate that a label stands for: `onnxruntime`, `inductor[freezing]`, `onnxruntime[opset=18]`.

    Raises PlanError for an unknown backend, an option that it doesn't have, or a bracket that isn't closed.
    """
    name, bracket, rest = label.strip().partition("[")
    if bracket and not rest.endswith("]"):
        raise PlanError(f"a candidate is written like 'inductor[freezing]', but got {label!r}")
    backend = registry.get(name)
    options: dict[str, Option] = {}
    for part in filter(None, (part.strip() for part in rest.rstrip("]").split(","))):
        option, given, text = part.partition("=")
        options[option] = _option(text) if given else True
    return backend.of(Candidate(name, tuple(sorted(options.items())))).candidate()


def _option(text: str) -> Option:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (bool, int, float)) or value is None else text


def shortlist(
    path: str,
    module: torch.nn.Module,
    signature: Signature,
    plan: Plan,
    backends: Sequence[str | Candidate | Backend | type[Backend]] | None = None,
) -> Shortlist:
    """What to try for (module, signature): the backends' own proposals, or exactly what the user named.

    Eager is always first and not part of the list. Excluded and unavailable candidates are kept with their reason.
    """
    result = Shortlist()
    if backends is None:
        named: list[str | Candidate | Backend | type[Backend]] = [n for n in registry.names() if n != "eager"]
    else:
        named = list(backends)
    for item in named:
        backend = registry.get(item) if isinstance(item, str) else None
        own = registry.get(as_candidate(item).backend)
        state = own.available()
        if not state.ok:
            result.not_tried[as_candidate(item).label] = f"unavailable: {state.reason}. {state.cure}".rstrip(". ")
            continue
        proposed = own().candidates(signature, module) if backend is not None else [as_candidate(item)]
        result.variant_of.update(dict.fromkeys(proposed[1:], proposed[0]))
        for candidate in proposed:
            rule = plan.excludes(path, candidate)
            if rule is not None:
                result.not_tried[candidate.label] = f"excluded by the rule for {rule.pattern!r}"
            elif candidate not in result.candidates and candidate != EAGER:
                result.candidates.append(candidate)
    named_so = [as_candidate(item) for item in named if not isinstance(item, str)]
    result.variant_of = {c: first for c, first in result.variant_of.items() if c not in named_so}
    # The promising ones first: every backend's first proposal before variants, quick ones before slow ones.
    result.candidates.sort(key=lambda c: (c in result.variant_of, TYPICAL_SECONDS.get(c.backend, 20.0)))
    return result


def estimated_seconds(candidates: Sequence[Candidate], seen: Mapping[str, float]) -> float:
    """Seconds that trying these takes, from what their backends took so far, else from what is typical."""
    return sum(seen.get(c.backend, TYPICAL_SECONDS.get(c.backend, 20.0)) for c in candidates)
