"""One output leaf in one call: what can be said without arithmetic, and the tensors that arithmetic needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..capture.structure import is_value, value_text
from .figures import as_tensor, dense, shape_of, unravel


@dataclass(frozen=True)
class LeafCall:
    """One leaf in call `number`. `reference` is None where there is no higher-precision run."""

    number: int
    expected: Any
    actual: Any
    reference: Any = None


@dataclass(frozen=True)
class Numbers:
    """The dense tensors of one call; `dtype` is the leaf's own, `integral` says that it must agree exactly."""

    call: int
    eager: torch.Tensor
    actual: torch.Tensor
    reference: torch.Tensor | None
    dtype: torch.dtype
    integral: bool

    def element(self, flat_index: int) -> tuple[tuple[int, ...], str, str]:
        """An element's index, and its value in eager and in the candidate, with as many digits as tell them apart."""
        index = unravel(flat_index, tuple(self.eager.shape))
        if self.dtype.is_complex:
            index = index[:-1]
        values: list[Any] = [tensor[index].tolist() for tensor in (self.eager, self.actual)]
        if self.dtype.is_complex:
            values = [complex(*value) for value in values]
        texts = list(map(str, values))
        if not self.integral:
            for digits in (6, 9, 17):
                texts = [f"{value:.{digits}g}" for value in values]
                if texts[0] != texts[1]:
                    break
        return index, texts[0], texts[1]


@dataclass
class Findings:
    """What was found in the calls of a leaf. `several` says that a call must be named in messages."""

    path: str
    several: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)

    def refuse(self, call: int, text: str) -> None:
        where = f"in call {call} " if self.several else ""
        self.problems.append(f"{self.path}: {where}{text}")


def is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds numbers that rounding may change (quantised ones stand for such)."""
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


def is_integral(value: Any) -> bool:
    """Whether a leaf is an array of integers or bools."""
    tensor = as_tensor(value)
    return tensor is not None and not is_inexact(tensor)


def examine(call: LeafCall, found: Findings) -> None:
    """Compare class, dtype, shape, device, layout and plain values; hand on the numbers if the shapes agree."""
    expected, actual = call.expected, call.actual
    if type(expected) is not type(actual):
        classes = f"class {type(actual).__name__} where eager gives {type(expected).__name__}"
        if not (isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor)):
            found.refuse(call.number, f"is of {classes}: {_short(actual)} instead of {_short(expected)}")
            return
        found.notes.append(classes)
    eager, candidate = as_tensor(expected), as_tensor(actual)
    if eager is None or candidate is None:
        _compare_values(call, found)
        return
    facts = {
        "dtype": (eager.dtype, candidate.dtype),
        "shape": (shape_of(eager), shape_of(candidate)),
        "device": (eager.device, candidate.device),
        "layout": (eager.layout, candidate.layout),
    }
    differing = [f"{name} {_fact(a)} where eager gives {_fact(e)}" for name, (e, a) in facts.items() if e != a]
    if differing:
        found.refuse(call.number, "has " + ", ".join(differing))
    if facts["shape"][0] != facts["shape"][1]:
        return
    if eager.is_meta or candidate.is_meta:
        found.notes.append("a tensor on the meta device: only its shape and dtype were compared")
        return
    strides = _strides(eager), _strides(candidate)
    if strides[0] != strides[1] and eager.layout == candidate.layout:
        found.notes.append(f"strides {strides[1]} where eager gives {strides[0]}")
    found.numbers.append(
        Numbers(
            call.number,
            dense(eager),
            dense(candidate),
            _reference(call.reference, eager),
            eager.dtype,
            not is_inexact(eager),
        )
    )


def _reference(value: Any, eager: torch.Tensor) -> torch.Tensor | None:
    """The reference's numbers if they can stand beside eager's, else None."""
    reference = as_tensor(value)
    if reference is None or not is_inexact(reference) or not is_inexact(eager):
        return None
    if shape_of(reference) != shape_of(eager) or reference.is_complex() != eager.is_complex():
        return None
    return dense(reference)


def _compare_values(call: LeafCall, found: Findings) -> None:
    expected, actual = call.expected, call.actual
    if isinstance(expected, np.ndarray):
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            found.refuse(
                call.number,
                f"has dtype {actual.dtype} and shape {actual.shape} where eager gives {expected.dtype} "
                f"and {expected.shape}",
            )
        elif not np.array_equal(expected, actual):
            index = tuple(int(i) for i in np.argwhere(np.asarray(expected != actual))[0])
            found.refuse(
                call.number,
                f"{element_words(index)} is {_short(actual[index])} where eager gives {_short(expected[index])}",
            )
    elif is_value(expected):
        if expected != actual and value_text(expected) != value_text(actual):
            found.refuse(call.number, f"is {_short(actual)} where eager gives {_short(expected)}")
    else:
        found.notes.append(f"an object of class {type(expected).__name__}: of itself only the class was compared")


def element_words(index: tuple[int, ...]) -> str:
    return f"element {list(index)}" if index else "the value"


def _fact(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the axes that have more than one element: the others say nothing."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
