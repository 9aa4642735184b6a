"""Which candidates to try for a signature, in which order."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from ..backends import registry
from ..backends.base import Backend
from ..errors import PlanError
from ..runtime.variant import AUTOCAST, PRECISIONS
from ..schema import Candidate, Option, Plan, Signature, Tolerance
from .seen import Seen, error_budget, multiplies_bfloat16, see
from .strategies.words import error

TYPICAL_SECONDS = {
    "eager": (0.0, 0.0),
    "openvino": (3.5, 0.05),
    "onnxruntime": (4.0, 0.05),
    "inductor": (12.0, 0.2),
    "inductor_aot": (18.0, 0.2),
    "torchao": (1.0, 0.01),
    "tensorrt": (20.0, 0.2),
    "tensorrt_rtx": (10.0, 0.1),
}
"""What a build takes on a laptop: seconds, and seconds for each submodule; for the order and the estimate."""
WORTH_WAITING = {"tensorrt": 4.0, "tensorrt_rtx": 4.0}
"""Backends whose builds may take so many times longer than another's and still come before it."""
UNKNOWN_SECONDS = (15.0, 0.1)
POINT_SECONDS = 2.0
"""What comparing and measuring take at a point at least."""

EAGER = Candidate("eager")
CHANNELS_LAST = "channels_last"
REDUCED = {"tf32": 3e-4, "float16": 1e-3, "bfloat16": 1e-2}
"""Relative errors that lower precisions on a float32 module come to: with a narrower budget they are not worth a trial."""
FEW_LINEAR = 0.1
"""Below this share of parameters in Linear layers, computing those in 8 bits changes little."""
MUCH_PYTHON = 0.5
"""From this share of Python time on, what adds Python to each layer is not worth a trial."""

Named = str | Candidate | Backend | type[Backend]
"""What users write for a candidate: a backend's name, class or instance, a label, a candidate."""


@dataclass
class Shortlist:
    """Candidates to try in order, and those that are not, with what speaks for and against each.

    Attributes:
        candidates: what to try, the cheapest and most promising first.
        not_tried: candidates that were asked for and can't be, by label, with the reason.
        left_out: what backends propose and is not worth a trial here, by label (or backend, if it is all of it).
        variant_of: the backend's first proposal for each further one of it, and that of the backend whose kin it is; what
            the user named is no variant.
        why: what speaks for each of `candidates`, in a few words, by label.
        seconds: what building each takes on a laptop, by label.
    """

    candidates: list[Candidate] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    variant_of: dict[Candidate, Candidate] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def keep(self, admits: Callable[[Candidate], bool]) -> None:
        """Drop the candidates that aren't admitted. Where none is left, what was left out is said to be not tried."""
        self.candidates = [c for c in self.candidates if admits(c)]
        if not self.candidates:
            self.not_tried = {**self.left_out, **self.not_tried}


def as_candidate(value: Named) -> Candidate:
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

    Raises PlanError for a pin without candidate, or an unknown backend.
    """
    rules = []
    for rule in plan.rules:
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
            is_text = any(f.name == option and isinstance(f.default, str) for f in fields(backend.config_type))
            options[option] = (text if is_text else _option(text)) if given else True
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
    backends: Sequence[Named] | None = None,
    *,
    eager_ms: float | None = None,
) -> Shortlist:
    """What to try for (module, signature): the backends' own proposals, or exactly what the user named.

    Plain eager is always measured and not part of the list. What the user named as a candidate is tried whatever speaks
    against it; of a backend named alone, at least the first proposal is.

    Args:
        path: the module's path, for the plan's rules.
        module: the module; it is looked at and not run.
        signature: of its calls.
        plan: exclusions, tolerance and search level.
        backends: what the user named, None for everything there is.
        eager_ms: mean latency of the original, if known: tells how much of it is Python.
    """
    result, seen = Shortlist(), see(module, signature, eager_ms)
    for item in backends if backends is not None else registry.names():
        backend = registry.get(item if isinstance(item, str) and "[" not in item else as_candidate(item).backend)
        by_name = isinstance(item, str) and "[" not in item
        state = backend.available()
        if not state.ok:
            label = backend.name if by_name else as_candidate(item).label
            result.not_tried[label] = f"unavailable: {state.reason}. {state.cure}".rstrip(". ")
        elif by_name:
            proposed = _proposed(backend, module, signature, plan, seen)
            out = {c: why for c in proposed if (why := why_not_worth(c, seen, plan.tolerance))}
            if backends is not None and proposed and len(out) == len(proposed):
                del out[proposed[0]]
            _leave_out(result, backend, proposed, out, seen)
            _take(result, path, plan, [c for c in proposed if c not in out])
        else:
            _take(result, path, plan, [as_candidate(item)])
    for candidate in result.candidates if backends is None else ():
        kin = registry.get(candidate.backend).kin
        relative = next((c for c in result.candidates if c.backend == kin and c not in result.variant_of), None)
        if relative is not None:
            result.variant_of[candidate] = relative
    named = {as_candidate(item) for item in backends or () if not isinstance(item, str) or "[" in item}
    result.variant_of = {c: first for c, first in result.variant_of.items() if c not in named}
    size = sum(1 for _ in module.modules())
    result.seconds = {c.label: build_seconds(c, size) for c in result.candidates}
    # The promising ones first: every backend's first proposal before variants, quick ones before slow ones.
    result.candidates.sort(
        key=lambda c: (c in result.variant_of, result.seconds[c.label] / WORTH_WAITING.get(c.backend, 1.0))
    )
    for candidate in result.candidates:
        result.why[candidate.label] = _why_worth(candidate, result.variant_of.get(candidate), named, seen)
    return result


def _proposed(
    backend: type[Backend], module: torch.nn.Module, signature: Signature, plan: Plan, seen: Seen
) -> list[Candidate]:
    proposed = backend().candidates(signature, module)
    if backend.capturable and proposed:
        if _on_cuda(signature):
            return cuda_variants(proposed, signature, module, plan)
        proposed = [*proposed, *cpu_variants(proposed[0], seen)]
    return [candidate for candidate in proposed if candidate != EAGER]


def _leave_out(
    result: Shortlist, backend: type[Backend], proposed: Sequence[Candidate], out: dict[Candidate, str], seen: Seen
) -> None:
    if not proposed and backend.name != EAGER.backend:
        result.left_out[backend.name] = f"left out: it proposes nothing for this module and its inputs ({seen.device})"
    elif len(out) == len(proposed) > 1 and len({why.partition(":")[0] for why in out.values()}) == 1:
        result.left_out[backend.name] = out[min(out, key=typical_error)]
    else:
        result.left_out.update({candidate.label: why for candidate, why in out.items()})


def _take(result: Shortlist, path: str, plan: Plan, proposed: Sequence[Candidate]) -> None:
    """Add proposals of one backend but those that the plan excludes; those after the first are its variants."""
    result.variant_of.update((candidate, proposed[0]) for candidate in proposed[1:])
    for candidate in proposed:
        rule = plan.excludes(path, candidate)
        if rule is not None:
            result.not_tried[candidate.label] = f"excluded by the rule for {_in_words(rule.pattern)}"
        elif candidate not in result.candidates and candidate != EAGER:
            result.candidates.append(candidate)


def _in_words(pattern: str) -> str:
    if pattern == "re:.*":
        return "every module"
    if pattern.startswith("re:"):
        return f"paths that match {pattern[3:]!r}"
    return repr(pattern) if pattern else "the model itself"


def why_not_worth(candidate: Candidate, seen: Seen, tolerance: Tolerance) -> str | None:
    """Why a proposal is not worth a trial, in a sentence; None if it is."""
    typical, budget = typical_error(candidate), error_budget(seen, tolerance)
    if typical > budget:
        allowed = "accuracy='exact' admits none" if not budget else f"the budget is {error(budget)}"
        return f"beyond the budget: typically off by {error(typical)} or more, and {allowed}"
    if not _eight_bits(candidate):
        return None
    if seen.linear_share < FEW_LINEAR:
        return (
            f"few Linear layers: they hold {100 * seen.linear_share:.0f} % of its parameters, and only they are computed in "
            "8 bits"
        )
    python = seen.python_share or 0.0
    if candidate.backend == "torchao" and not candidate.option("compile") and python > MUCH_PYTHON:
        return (
            f"much Python: about {100 * python:.0f} % of its time goes to Python between operators, and 8 bits without "
            "compiling add to it"
        )
    return None


def typical_error(candidate: Candidate) -> float:
    """The relative error that a candidate's lower precision typically comes to; 0 for the module's own precision."""
    return max(registry.of(candidate).typical_error(), REDUCED.get(candidate.precision, 0.0))


def _eight_bits(candidate: Candidate) -> bool:
    return any(isinstance(value, str) and value.startswith("int8") for _, value in candidate.options) or (
        candidate.backend == "torchao"
    )


def _why_worth(candidate: Candidate, first: Candidate | None, named: Collection[Candidate], seen: Seen) -> str:
    """What speaks for a candidate, in a few words."""
    reasons = ["named by the user"] if candidate in named else []
    if candidate.memory_format == CHANNELS_LAST:
        reasons.append(f"{seen.loose_convolutions} convolutions in the default layout")
    if candidate.precision == "bfloat16" and seen.device == "cpu":
        reasons.append("this processor multiplies bfloat16 itself")
    if candidate.cuda_graph:
        reasons.append("launches bound small batches")
    if _eight_bits(candidate):
        reasons.append(
            f"{100 * seen.linear_share:.0f} % of the parameters are in Linear layers; {seen.rows} rows a product"
        )
    if off := typical_error(candidate):
        reasons.append(f"the budget admits its typical error of {error(off)}")
    if not reasons:
        reasons = ["first proposal of its backend" if first is None else f"another form of {first.label}"]
    return "; ".join(reasons)


def _on_cuda(signature: Signature) -> bool:
    return any(leaf.device.startswith("cuda") for leaf in signature.tensor_leaves)


def cuda_variants(
    proposed: Sequence[Candidate], signature: Signature, module: torch.nn.Module, plan: Plan
) -> list[Candidate]:
    """A backend's first proposal on CUDA, in a CUDA graph and without: the graph first, as launches bound small batches.

    Convolutions are tried in channels_last, float32 modules in the lower precisions that the plan's budget has room for.
    An exhaustive search tries the backend's further proposals (Inductor's max-autotune) and all precisions; those of a
    backend that settles precision and layout itself are always looked at.
    """
    exhaustive = plan.limits.search == "exhaustive"
    first, follows = proposed[:1], registry.get(proposed[0].backend).follows_torch
    bases = [*proposed] if exhaustive or not follows else [*first]
    if follows and see(module, signature).loose_convolutions:
        bases += [replace(c, memory_format=CHANNELS_LAST) for c in first]
    for precision in _precisions(signature, module, plan.tolerance, everything=exhaustive):
        if follows or precision in AUTOCAST:
            bases += [replace(c, precision=precision) for c in first]
    variants = []
    for base in bases:
        variants.append(replace(base, cuda_graph=True))
        if base.precision != "tf32":
            variants.append(base)
    return [c for c in variants if c != EAGER]


def cpu_variants(first: Candidate, seen: Seen) -> list[Candidate]:
    """What a backend that runs torch's own operators may gain beside its first proposal on the CPU.

    Inductor chooses the layout of convolutions itself, so that only eager is tried in channels_last.
    """
    variants = []
    if seen.loose_convolutions and first == EAGER:
        variants.append(replace(first, memory_format=CHANNELS_LAST))
    if seen.dtypes == ("float32",) and not seen.autocast and multiplies_bfloat16():
        variants.append(replace(first, precision="bfloat16"))
    return variants


def _precisions(signature: Signature, module: torch.nn.Module, tolerance: Tolerance, *, everything: bool) -> list[str]:
    seen = see(module, signature)
    if seen.dtypes != ("float32",):
        return []
    wide = [precision for precision, off in REDUCED.items() if off <= error_budget(seen, tolerance)]
    return [p for p in (REDUCED if everything else wide) if p not in AUTOCAST or not signature.autocast]


def complexity_of(candidate: Candidate) -> int:
    """Who wins a tie: the backend's complexity, plus one for each thing done to it."""
    changed = (candidate.precision != "as is", candidate.memory_format is not None, candidate.cuda_graph)
    return registry.get(candidate.backend).complexity + sum(changed)


def build_seconds(candidate: Candidate, modules: int) -> float:
    """What building a candidate of a module that consists of so many takes on a laptop, in seconds."""
    base, each = TYPICAL_SECONDS.get(candidate.backend, UNKNOWN_SECONDS)
    if candidate.backend == "torchao" and candidate.option("compile"):
        more, more_each = TYPICAL_SECONDS["inductor"]
        base, each = base + more, each + more_each
    return base + each * modules


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
        # A variant finds much of what the first one needed in caches.
        base = build_seconds(candidate, 0 if candidate in listed.variant_of else modules)
        build = base / 3 if candidate in listed.variant_of else base
        # Two dozen blocks of each contender, of at least a call and 20 ms.
        total += build + points * max(POINT_SECONDS, 0.1 * eager_ms)
    return total
