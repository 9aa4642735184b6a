"""The class of one output leaf over all its calls, with its figures and, if it is refused, the sentence that says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..schema import ErrorClass, LeafDifference, Tolerance
from .figures import Figures, chunks, ratio, snr_db, take_figures, take_yardstick
from .leaves import Findings, LeafCall, Numbers, element_words, examine
from .ranking import Scores, tie_note

DEFAULT_BUDGETS: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The largest relative L2 error within budget, by dtype, unless the user says otherwise."""

ELEMENT_FACTOR = 30
"""No element may be off by more than this × the allowed relative error × the leaf's root mean square."""

REFERENCE_LIMIT = 0.1
"""A reference from which eager itself is off by more than this relative L2 error is no yardstick for that leaf."""

_WORST_FIRST: tuple[ErrorClass, ...] = ("refused", "within budget", "exact")


def default_budget(*dtypes: torch.dtype | None) -> float:
    """The coarsest default budget among the dtypes; for floating-point dtypes without an entry their eps counts."""
    budgets = [0.0]
    for dtype in dtypes:
        if dtype in DEFAULT_BUDGETS:
            budgets.append(DEFAULT_BUDGETS[dtype])
        elif dtype is not None and dtype.is_floating_point:
            budgets.append(max(5e-2, torch.finfo(dtype).eps))
    return max(budgets) or DEFAULT_BUDGETS[torch.float32]


def worst_class(classes: Sequence[ErrorClass]) -> ErrorClass:
    """The class that holds for all of them; nothing at all is exact."""
    return next((c for c in _WORST_FIRST if c in classes), "exact")


def judge_leaf(
    path: str,
    calls: Sequence[LeafCall],
    tolerance: Tolerance,
    dtype: torch.dtype | None,
    scores: Mapping[int, Sequence[Scores]],
) -> tuple[LeafDifference, dict[int, Scores]]:
    """The leaf's difference over all its calls and, if it was accepted and can rank picks, its scores by call number.

    Args:
        calls: the leaf in every call that has it.
        dtype: the module's own dtype, or None for the leaf's.
        scores: floating-point leaves already accepted, by call number, by which picks may be judged.
    """
    found = Findings(path, several=len(calls) > 1)
    for call in calls:
        examine(call, found)
    judged: list[LeafDifference] = []
    given: dict[int, Scores] = {}
    integers = [n for n in found.numbers if n.integral]
    others = [n for n in found.numbers if not n.integral]
    if integers:
        judged.append(_judge_integers(found, integers, tolerance, scores))
    if others:
        difference, given = _judge_numbers(found, others, tolerance, dtype)
        judged.append(difference)
    if not judged:
        judged.append(_difference(found, [], "exact"))
    # Mixed leaves (an integer in one call, a float in another) are rare: the worse half speaks for both.
    worst = min(judged, key=lambda d: _WORST_FIRST.index(d.error_class))
    if found.problems:
        incomparable = not found.numbers
        worst = replace(
            worst,
            error_class="refused",
            problem=found.problems[0],
            relative_l2=float("inf") if incomparable else worst.relative_l2,
            snr_db=float("-inf") if incomparable else worst.snr_db,
            cosine=0.0 if incomparable else worst.cosine,
            mismatch_share=1.0 if incomparable else worst.mismatch_share,
        )
        given = {}
    return replace(worst, notes=tuple(dict.fromkeys(found.notes))), given


def _judge_numbers(
    found: Findings, numbers: Sequence[Numbers], tolerance: Tolerance, dtype: torch.dtype | None
) -> tuple[LeafDifference, dict[int, Scores]]:
    known = all(n.reference is not None for n in numbers)
    references = [n.reference if known else None for n in numbers]
    yardsticks = [take_yardstick(n.eager, r) for n, r in zip(numbers, references, strict=True)]
    eager_error = max(y.eager_relative_l2 for y in yardsticks)
    if eager_error > REFERENCE_LIMIT:
        found.notes.append(f"eager is off by {eager_error:.3g} from the higher-precision run: compared with eager")
        references = [None] * len(numbers)
        yardsticks = [take_yardstick(n.eager, None) for n in numbers]
        eager_error = 0.0

    leaf_dtype = numbers[0].dtype
    # Of an 8-bit float 2 ulp are up to half of the number: the leaf's default budget caps them.
    exact = 2 * eager_error if eager_error else min(2 * _eps(leaf_dtype), default_budget(leaf_dtype))
    exact_element = max(ELEMENT_FACTOR * exact, *(2 * ratio(y.eager_worst, y.rms) for y in yardsticks))
    budget = tolerance.max_relative_error
    if budget is None:
        budget = default_budget(dtype, leaf_dtype)
    only_exact = tolerance.accuracy == "exact"
    allowed, allowed_element = (exact, exact_element) if only_exact else (budget, ELEMENT_FACTOR * budget)

    figures = [
        take_figures(n.eager, n.actual, r, y, allowed_element)
        for n, r, y in zip(numbers, references, yardsticks, strict=True)
    ]
    error, off = max(f.relative_l2 for f in figures), max(f.worst_over_rms for f in figures)
    error_class: ErrorClass = "refused"
    reason = ""
    if error <= exact and off <= exact_element:
        error_class, allowed = "exact", exact
    elif any(f.unequal_nonfinite for f in figures):
        reason = "NaN or Inf differ in {unequal} of {count} elements"
    elif not error <= allowed:  # written so that a NaN bound refuses
        own = f", twice eager's own {eager_error:.3g}" if eager_error else ", 2 ulp"
        reason = f"relative L2 error {error:.3g} > {allowed:.3g}" + (own if only_exact else "")
    elif not off <= allowed_element:
        reason = f"off by {off:.3g} > {allowed_element:.3g} times the leaf's root mean square"
    elif tolerance.min_snr_db is not None and not snr_db(error) >= tolerance.min_snr_db:
        reason = f"SNR {snr_db(error):.4g} dB < {tolerance.min_snr_db:.4g} dB"
    else:
        error_class = "within budget"

    at = max(range(len(figures)), key=lambda i: (figures[i].worst_over_rms, figures[i].relative_l2))
    index, expected, actual = ((), "", "") if off == 0 else numbers[at].element(figures[at].worst)
    if reason:
        reason = reason.format(unequal=figures[at].unequal_nonfinite, count=figures[at].count)
        found.refuse(numbers[at].call, f"{element_words(index)} is {actual} where eager gives {expected}; {reason}")
    difference = replace(
        _difference(found, figures, error_class),
        factor_over_eager=error / eager_error if eager_error else None,
        eager_relative_l2=eager_error,
        allowed_relative=allowed,
        worst_index=index,
        expected=expected,
        actual=actual,
    )
    return difference, {n.call: _scores(found.path, n, f) for n, f in zip(numbers, figures, strict=True)}


def _judge_integers(
    found: Findings, integers: Sequence[Numbers], tolerance: Tolerance, scores: Mapping[int, Sequence[Scores]]
) -> LeafDifference:
    figures: list[Figures] = []
    error_class: ErrorClass = "exact"
    worst: tuple[float, tuple[int, ...], str, str] = (0.0, (), "", "")
    for numbers in integers:
        figures.append(take_figures(numbers.eager, numbers.actual, None, take_yardstick(numbers.eager, None), 0.0))
        unequal, first = _unequal(numbers.eager, numbers.actual)
        if not unequal:
            continue
        count = numbers.eager.numel()
        agreement = 1 - unequal / count
        index, expected, actual = numbers.element(first)
        worst = max(worst, (1 - agreement, index, expected, actual))
        tie = tie_note(numbers.eager, numbers.actual, scores.get(numbers.call, ()))
        if tie is not None:
            found.notes.append(tie)
        elif tolerance.accuracy != "exact" and agreement >= tolerance.min_agreement:
            found.notes.append(f"{agreement:.4%} of the elements agree, at least {tolerance.min_agreement:.4%} must")
            error_class = "within budget"
        else:
            found.refuse(
                numbers.call,
                f"{element_words(index)} is {actual} where eager gives {expected}; "
                f"{unequal} of {count} elements differ",
            )
    return replace(
        _difference(found, figures, error_class),
        mismatch_share=worst[0],
        worst_index=worst[1],
        expected=worst[2],
        actual=worst[3],
    )


def _difference(found: Findings, figures: Sequence[Figures], error_class: ErrorClass) -> LeafDifference:
    """The figures of all calls together: means and shares over all elements, everything else of the worst call."""
    elements = max(1, sum(f.count for f in figures))
    kept = torch.cat([f.kept_absolute for f in figures]) if figures else torch.zeros(0, device="cpu")
    return LeafDifference(
        path=found.path,
        error_class=error_class,
        max_absolute=max((f.max_absolute for f in figures), default=0.0),
        mean_absolute=sum(f.sum_absolute for f in figures) / elements,
        p99_absolute=float(kept.kthvalue(-(-kept.numel() * 99 // 100)).values) if kept.numel() else 0.0,
        max_relative=max((f.max_relative for f in figures), default=0.0),
        mean_relative=sum(f.sum_relative for f in figures) / max(1, sum(f.nonzero for f in figures)),
        relative_l2=max((f.relative_l2 for f in figures), default=0.0),
        cosine=min((f.cosine for f in figures), default=1.0),
        snr_db=min((f.snr_db for f in figures), default=float("inf")),
        mismatch_share=sum(f.out_of_tolerance for f in figures) / elements,
        factor_over_eager=None,
        eager_relative_l2=0.0,
        allowed_relative=0.0,
    )


def _scores(path: str, numbers: Numbers, figures: Figures) -> Scores:
    # Against a reference the error splits in two parts; against eager the second is 0.
    eager_worst = figures.yardstick.eager_worst / figures.yardstick.scale
    return Scores(path, numbers.eager, figures.max_absolute + eager_worst)


def _unequal(eager: torch.Tensor, actual: torch.Tensor) -> tuple[int, int]:
    """How many elements differ, exactly, and the first one's index in C order."""
    count, first, offset = 0, 0, 0
    for cut in chunks(eager):
        differ = (_signed(eager[cut]) != _signed(actual[cut]).to(eager.device)).reshape(-1)
        number = int(differ.sum())
        if number and not count:
            first = offset + int(differ.to(torch.uint8).argmax())
        count, offset = count + number, offset + differ.numel()
    return count, first


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as signed integers: torch compares few of the unsigned ones."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(signed[tensor.dtype]) if tensor.dtype in signed else tensor


def _eps(dtype: torch.dtype) -> float:
    """One unit in the last place of a number near 1; of quantised tensors that of the float32 they stand for."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).eps
    return torch.finfo(torch.float32).eps
