"""Is a candidate right? Its outputs against eager's, leaf by leaf, over all recorded calls at one point.

**Yardstick.** A higher-precision reference where there is one (`reference.py`), else eager itself. Where eager is off
from the reference by more than 10 % in a leaf, the two don't tell the same thing (a branch went the other way, a
result is nothing but rounding), and eager is the yardstick of that leaf.

**Classes**, of which the first that holds in every call is given:

- *exact*: the relative L2 error is at most twice what eager itself is off. Where eager is off by 0, or is the
  yardstick itself, it may be 2 ulp of the leaf's dtype (relative L2 error at most 2 eps).
- *within budget*: the relative L2 error is at most `Tolerance.max_relative_error`, by default that of the module's
  dtype or of the leaf's own, whichever is coarser (`judge.DEFAULT_BUDGETS`); and the SNR is at least `min_snr_db`.
- *refused*.

In both no element may be off by more than 30 × the allowed relative error × the leaf's root mean square (for *exact*:
or by twice eager's own worst element, if that is more). Errors are taken call by call and the worst call decides, so
that a call with large numbers hides no other. NaN and Inf must stand where they stand in eager. Integers and bools
must agree (or a share of them, `min_agreement`), unless they are picks that differ only where scores tie
(`ranking.py`). Python floats and complex numbers are judged like tensors of one element; other values by type and
equality. An object known only by its class is compared by its class and its attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ..capture.structure import Flat, flatten, is_tensor, is_value
from ..schema import Comparison, LeafDifference, Node, Tolerance
from .judge import judge_leaf, worst_class
from .leaves import LeafCall, is_integral
from .ranking import Scores


@dataclass(frozen=True)
class Call:
    """The outputs of one recorded call: eager's, the candidate's, and those of a higher-precision run if there are."""

    expected: Flat
    actual: Flat
    reference: Flat | None = None


def compare(
    calls: Sequence[Call],
    tolerance: Tolerance,
    dtype: torch.dtype | None = None,
    yardstick: Literal["float64", "float32", "eager"] = "eager",
) -> Comparison:
    """Compare a candidate's outputs with eager's over all calls.

    Args:
        calls: at least one recorded call.
        tolerance: the user's bounds.
        dtype: the module's own dtype (of its parameters), which sets the default budget; None: the leaves' own.
        yardstick: the precision of the calls' references; ignored unless every call has one.

    Returns:
        A `Comparison` with one `LeafDifference` for each leaf that eager returned, in eager's order. If structures
        differ, it is refused with the first difference named and holds no leaves.

    Raises:
        ValueError: there is no call.
    """
    if not calls:
        raise ValueError("at least one call must be compared, but got none: record samples first")
    notes: list[str] = []
    by_path: dict[str, list[LeafCall]] = {}
    for number, call in enumerate(calls):
        problem = structure_difference(call.expected.node, call.actual.node)
        if problem is None:
            notes += _lost_sharing(call)
            try:
                for path, leaf in _leaf_calls(number, call, set()):
                    by_path.setdefault(path, []).append(leaf)
            except _StructureDiffers as difference:
                problem = str(difference)
        if problem is not None:
            where = f" (call {number})" if len(calls) > 1 else ""
            return Comparison("refused", "eager", (), len(calls), problem + where)

    differences: dict[str, LeafDifference] = {}
    scores: dict[int, list[Scores]] = {}
    # Integers come last: picks are judged by the scores that were accepted.
    for path in sorted(by_path, key=lambda path: is_integral(by_path[path][0].expected)):
        differences[path], given = judge_leaf(path, by_path[path], tolerance, dtype, scores)
        for number, score in given.items():
            scores.setdefault(number, []).append(score)

    leaves = tuple(differences[path] for path in by_path)
    problems = [leaf.problem for leaf in leaves if leaf.problem is not None]
    more = f" (and {len(problems) - 1} more leaves differ)" if len(problems) > 1 else ""
    referenced = all(call.reference is not None for call in calls)
    return Comparison(
        worst_class([leaf.error_class for leaf in leaves]),
        yardstick if referenced else "eager",
        leaves,
        len(calls),
        problems[0] + more if problems else None,
        tuple(dict.fromkeys(notes)),
    )


def structure_difference(expected: Node, actual: Node, path: str = "output") -> str | None:
    """The first difference between two structures as a sentence: kind, class, keys, length. None if they are equal."""
    if expected.kind != actual.kind or expected.type != actual.type:
        return f"{path}: is {_node_words(actual)} where eager gives {_node_words(expected)}"
    if len(expected.children) != len(actual.children) or set(expected.keys) != set(actual.keys):
        missing = [key for key in expected.keys if key not in actual.keys]
        added = [key for key in actual.keys if key not in expected.keys]
        if missing or added:
            return f"{path}: keys {missing} are missing and {added} added, where eager gives {list(expected.keys)}"
        return f"{path}: has {len(actual.children)} items where eager gives {len(expected.children)}"
    if expected.keys != actual.keys:
        return f"{path}: has its keys in the order {list(actual.keys)} where eager gives {list(expected.keys)}"
    for i, (one, other) in enumerate(zip(expected.children, actual.children, strict=True)):
        step = f"[{i}]"
        if expected.keys and expected.kind in ("dict", "mapping"):
            step = f"[{expected.keys[i]!r}]"
        elif expected.keys and expected.kind in ("namedtuple", "dataclass"):
            step = f".{expected.keys[i]}"
        problem = structure_difference(one, other, path + step)
        if problem is not None:
            return problem
    return None


def _node_words(node: Node) -> str:
    if node.kind == "leaf":
        return "a single value"
    name = node.type.rpartition(":")[2]
    return f"a {node.kind}" if name == node.kind else f"a {node.kind} of class {node.type}"


class _StructureDiffers(Exception):
    """Two objects, known by class only, hold different attributes."""


def _leaf_calls(number: int, call: Call, opened: set[int]) -> Iterator[tuple[str, LeafCall]]:
    """The call's leaves by path; an object known only by its class is followed by its own attributes, once."""
    reference = call.reference
    if reference is not None and structure_difference(call.expected.node, reference.node) is not None:
        reference = None
    for i, (path, expected, actual) in enumerate(
        zip(call.expected.paths, call.expected.leaves, call.actual.leaves, strict=True)
    ):
        high = reference.leaves[i] if reference is not None else None
        yield path, LeafCall(number, expected, actual, high)
        inside = _attributes(expected)
        if inside and type(expected) is type(actual) and id(expected) not in opened:
            opened.add(id(expected))
            mine, theirs = flatten(inside, path), flatten(_attributes(actual), path)
            problem = structure_difference(mine.node, theirs.node, path)
            if problem is not None:
                raise _StructureDiffers(problem)
            precise = flatten(_attributes(high), path) if type(high) is type(expected) else None
            yield from _leaf_calls(number, Call(mine, theirs, precise), opened)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object of a class unknown to us holds: its attributes, or the items of a mapping with unusual keys."""
    if isinstance(value, (torch.Tensor, np.ndarray, torch.nn.Module, type)) or is_value(value) or callable(value):
        return {}
    if isinstance(value, Mapping):
        return {repr(key): item for key, item in value.items()}
    return dict(getattr(value, "__dict__", {}))


def _lost_sharing(call: Call) -> list[str]:
    """Notes on outputs that share memory in eager and don't in the candidate."""
    mine, theirs = _storages(call.expected), _storages(call.actual)
    groups: dict[int, list[str]] = {}
    for path, storage in mine.items():
        groups.setdefault(storage, []).append(path)
    return [
        f"{', '.join(paths)} share memory in eager, not in the candidate"
        for paths in groups.values()
        if len({theirs.get(path) for path in paths}) > 1
    ]


def _storages(flat: Flat) -> dict[str, int]:
    return {
        path: leaf.untyped_storage().data_ptr()
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_tensor(leaf) and leaf.layout == torch.strided and not leaf.is_nested and not leaf.is_meta and leaf.numel()
    }
