"""Which candidates to try for a signature, in which order."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..backends import registry
from ..backends.base import Backend
from ..errors import PlanError
from ..runtime.variant import AUTOCAST, PRECISIONS
from ..schema import Candidate, Option, Plan, Signature, Tolerance

TYPICAL_SECONDS = {"eager": (0.0, 0.0), "onnxruntime": (4.0, 0.05), "inductor": (12.0, 0.2)}
"""What a build takes on a laptop: seconds, and seconds for each submodule; for the order and the estimate."""
UNKNOWN_SECONDS = (15.0, 0.1)
POINT_SECONDS = 2.0
"""What comparing and measuring take at a point at least."""
ACTIONS = ("pin", "strategy", "exclude", "leave")

EAGER = Candidate("eager")
CHANNELS_LAST = "channels_last"
REDUCED = {"tf32": 3e-4, "float16": 1e-3, "bfloat16": 1e-2}
"""Relative errors that lower precisions on a float32 module come to: with a narrower budget they are not worth a trial."""


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
        return candidate_of_label(value)
    raise PlanError(f"a backend must be a name, a label, a Backend or a Candidate, but got {value!r}")


def with_candidates(plan: Plan) -> Plan:
    """The plan with the candidates of its pins as such: in Python a pin may name a label, a backend class or instance.

    Raises PlanError for a pin without candidate, an unknown backend, or an unknown action.
    """
    rules = []
    for rule in plan.rules:
        if rule.action not in ACTIONS:
            raise PlanError(
                f"the action of the rule for {rule.pattern!r} must be one of {list(ACTIONS)}, but got {rule.action!r}"
            )
        if rule.action == "pin":
            if rule.candidate is None:
                raise PlanError(f"the pin on {rule.pattern!r} must name a candidate, such as 'onnxruntime'")
            rule = replace(rule, candidate=as_candidate(rule.candidate))
        rules.append(rule)
    return replace(plan, rules=tuple(rules))


def candidate_of_label(label: str) -> Candidate:
    """The candidate that a label stands for: `onnxruntime`, `inductor[freezing]`, `eager[float16, cuda graph]`.

    Raises PlanError for an unknown backend, an option that it doesn't have, or a bracket that isn't closed.
    """
    name, bracket, rest = label.strip().partition("[")
    if bracket and not rest.endswith("]"):
        raise PlanError(f"a candidate is written like 'inductor[freezing]', but got {label!r}")
    backend = registry.get(name)
    options: dict[str, Option] = {}
    variant: dict[str, str | bool] = {}
    for part in filter(None, (part.strip() for part in rest.rstrip("]").split(","))):
        option, given, text = part.partition("=")
        if part == "cuda graph":
            variant["cuda_graph"] = True
        elif part == CHANNELS_LAST:
            variant["memory_format"] = part
        elif part in PRECISIONS:
            variant["precision"] = part
        else:
            options[option] = _option(text) if given else True
    plain = backend.of(Candidate(name, tuple(sorted(options.items())))).candidate()
    return replace(plain, **variant)  # type: ignore[arg-type]


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

    Plain eager is always measured and not part of the list. Excluded and unavailable candidates are kept with their reason.
    """
    result = Shortlist()
    if backends is None:
        named: list[str | Candidate | Backend | type[Backend]] = [
            name for name in registry.names() if name != "eager" or _on_cuda(signature)
        ]
    else:
        named = list(backends)
    for item in named:
        backend = registry.get(item) if isinstance(item, str) and "[" not in item else None
        own = registry.get(as_candidate(item).backend)
        state = own.available()
        if not state.ok:
            result.not_tried[as_candidate(item).label] = f"unavailable: {state.reason}. {state.cure}".rstrip(". ")
            continue
        proposed = [as_candidate(item)]
        if backend is not None:
            proposed = own().candidates(signature, module)
            if own.capturable and _on_cuda(signature):
                proposed = cuda_variants(proposed, signature, module, plan)
        result.variant_of.update((candidate, proposed[0]) for candidate in proposed[1:])
        for candidate in proposed:
            rule = plan.excludes(path, candidate)
            if rule is not None:
                result.not_tried[candidate.label] = f"excluded by the rule for {rule.pattern!r}"
            elif candidate not in result.candidates and candidate != EAGER:
                result.candidates.append(candidate)
    named_so = [as_candidate(item) for item in named if not isinstance(item, str)]
    result.variant_of = {c: first for c, first in result.variant_of.items() if c not in named_so}
    # The promising ones first: every backend's first proposal before variants, quick ones before slow ones.
    result.candidates.sort(key=lambda c: (c in result.variant_of, TYPICAL_SECONDS.get(c.backend, UNKNOWN_SECONDS)))
    return result


def _on_cuda(signature: Signature) -> bool:
    return any(leaf.device.startswith("cuda") for leaf in signature.tensor_leaves)


def cuda_variants(
    proposed: Sequence[Candidate], signature: Signature, module: torch.nn.Module, plan: Plan
) -> list[Candidate]:
    """A backend's first proposal on CUDA, in a CUDA graph and without: the graph first, as launches bound small batches.

    Convolutions are tried in channels_last, float32 modules in the lower precisions that the plan's budget has room for.
    An exhaustive search tries the backend's further proposals (Inductor's max-autotune) and all precisions.
    """
    exhaustive = plan.limits.search == "exhaustive"
    first = proposed[:1]
    bases = [*proposed] if exhaustive else [*first]
    if _gains_from_channels_last(module):
        bases += [replace(c, memory_format=CHANNELS_LAST) for c in first]
    for precision in _precisions(signature, module, plan.tolerance, everything=exhaustive):
        bases += [replace(c, precision=precision) for c in first]
    variants = []
    for base in bases:
        variants.append(replace(base, cuda_graph=True))
        if base.precision != "tf32":
            variants.append(base)
    return [c for c in variants if c != EAGER]


def _gains_from_channels_last(module: torch.nn.Module) -> bool:
    """Whether it holds 2-d convolutions whose weights are not channels_last yet."""
    convolutions = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    weights = [m.weight for m in module.modules() if isinstance(m, convolutions) and m.weight.dim() == 4]
    return any(not w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def _precisions(signature: Signature, module: torch.nn.Module, tolerance: Tolerance, *, everything: bool) -> list[str]:
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes != {torch.float32}:
        return []
    budget = tolerance.max_relative_error or 0.0
    wide = [p for p, error in REDUCED.items() if tolerance.accuracy == "budget" and error <= budget]
    return [p for p in (REDUCED if everything else wide) if p not in AUTOCAST or not signature.autocast]


def complexity_of(candidate: Candidate) -> int:
    """Who wins a tie: the backend's complexity, plus one for each thing done to it."""
    changed = (candidate.precision != "as is", candidate.memory_format is not None, candidate.cuda_graph)
    return registry.get(candidate.backend).complexity + sum(changed)


def estimated_seconds(listed: Shortlist, module: torch.nn.Module, points: int, eager_ms: float) -> float:
    """Seconds that trying a shortlist takes on a laptop: a build by the module's size, then measuring at each point.

    Args:
        listed: what will be tried.
        module: what is built.
        points: at how many shapes it is compared and measured.
        eager_ms: mean latency of the original, in milliseconds.
    """
    modules = sum(1 for _ in module.modules())
    total = 0.0
    for candidate in listed.candidates:
        base, each = TYPICAL_SECONDS.get(candidate.backend, UNKNOWN_SECONDS)
        build = base / 3 if candidate in listed.variant_of else base + each * modules
        # Two dozen blocks of each contender, of at least a call and 20 ms.
        total += build + points * max(POINT_SECONDS, 0.1 * eager_ms)
    return total
