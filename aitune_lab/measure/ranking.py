"""Indices that differ from eager's only where scores tie: top-k, argmax, sort.

Two kernels that round differently may rank two nearly equal scores the other way round. That is right, but no
element-by-element comparison of the indices can tell. Where the scores are among the outputs, they can: if no score
is off by more than m, two picks can only trade places when eager's scores of them are at most 2 m apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LARGEST_PAIRING = 1 << 24


@dataclass(frozen=True)
class Scores:
    """A floating-point output of the same call that was accepted, by which indices may be judged.

    `largest_error` is the candidate's largest absolute error in it, against eager, over finite elements.
    """

    path: str
    eager: torch.Tensor
    largest_error: float


def tie_note(eager: torch.Tensor, actual: torch.Tensor, scores: Sequence[Scores]) -> str | None:
    """A sentence if every index that differs from eager's is a tie by one of the scores, else None.

    Two cases are known, both checked on eager's own outputs before they are believed:

    - `scores` holds all scores, and the indices are its argmax or top-k along one axis (that axis has size k in
      the indices, or is missing);
    - `scores` has the indices' shape: the values that go with them along the last axis (`torch.topk`, `torch.sort`).
      Only picks that trade places can be judged then: an index that eager didn't pick has no known score.

    In both no index may come twice in a row of picks.
    """
    if actual.dtype == torch.bool or actual.numel() == 0:
        return None
    eager, actual = eager.detach().to(torch.int64), actual.detach().to(device=eager.device, dtype=torch.int64)
    for score in scores:
        values = score.eager.detach()
        if values.dim() == 0 or values.layout != torch.strided or values.is_quantized or values.is_complex():
            continue
        values = values.to(device=eager.device, dtype=torch.float64)
        gap = _gap_of_values(eager, actual, values) if values.shape == eager.shape else None
        axis = 0
        while gap is None and axis < values.dim():
            gap = _gap_of_all_scores(eager, actual, values, axis)
            axis += 1
        if gap is not None and gap <= 2 * score.largest_error:
            count = int((eager != actual).sum())
            return f"{count} of {eager.numel()} indices differ where {score.path} ties within {gap:.3g}"
    return None


def _gap_of_all_scores(eager: torch.Tensor, actual: torch.Tensor, scores: torch.Tensor, axis: int) -> float | None:
    """The largest difference of eager's scores between the two picks; None if these are no picks along the axis."""
    if eager.dim() == scores.dim() - 1:
        eager, actual = eager.unsqueeze(axis), actual.unsqueeze(axis)
    if eager.dim() != scores.dim() or not 0 < eager.shape[axis] <= scores.shape[axis]:
        return None
    if any(eager.shape[i] != scores.shape[i] for i in range(scores.dim()) if i != axis):
        return None
    for picks in (eager, actual):
        if bool((picks < 0).any()) or bool((picks >= scores.shape[axis]).any()) or _repeats(picks, axis):
            return None
    theirs = scores.gather(axis, eager)
    k = eager.shape[axis]
    if not any(torch.equal(theirs, scores.topk(k, dim=axis, largest=most).values) for most in (True, False)):
        return None
    return float((theirs - scores.gather(axis, actual)).abs().max())


def _gap_of_values(eager: torch.Tensor, actual: torch.Tensor, values: torch.Tensor) -> float | None:
    """The largest difference of eager's values between picks that traded places; None if others came in."""
    if eager.dim() == 0 or eager.numel() * eager.shape[-1] > _LARGEST_PAIRING:
        return None
    if _repeats(eager, -1) or _repeats(actual, -1):
        return None
    same = actual.unsqueeze(-1) == eager.unsqueeze(-2)
    if not bool(same.any(-1).all()):
        return None
    came_from = same.to(torch.uint8).argmax(-1)
    return float((values - values.gather(-1, came_from)).abs().max())


def _repeats(picks: torch.Tensor, axis: int) -> bool:
    ordered = picks.sort(dim=axis).values
    return bool((ordered.diff(dim=axis) == 0).any())
