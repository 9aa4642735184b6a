"""Understands what people pass as data: which items there are, and how each becomes a call."""

from __future__ import annotations

import collections
import copy
import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import DataError, with_article
from .recorder import clone_leaf
from .structure import flatten

MAX_ITEMS = 1000


@dataclass(frozen=True)
class Item:
    """One call of the target. `batch` is the batch size it was collated to, None for calls as they stand."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: int | None = None


@dataclass(frozen=True)
class Understood:
    """The calls that the data means, and the sentence that says so."""

    items: tuple[Item, ...]
    sentence: str

    def fresh_items(self) -> tuple[Item, ...]:
        """Copies of the items, so that a target that changes its inputs changes nothing of the user's.

        What items share (one cache passed to every call) their copies share too. Modules are passed as they are.
        """
        memo: dict[int, Any] = {}
        for item in self.items:
            for leaf in flatten([item.args, dict(item.kwargs)]).leaves:
                if isinstance(leaf, torch.nn.Module):
                    memo[id(leaf)] = leaf
                elif isinstance(leaf, (torch.Tensor, torch.Generator)) and id(leaf) not in memo:
                    memo[id(leaf)] = clone_leaf(leaf)
        try:
            return copy.deepcopy(self.items, memo)
        except Exception as error:
            raise DataError(
                f"the data holds something that can't be copied, so it can't be run more than once: {error}"
            ) from error


def as_call(item: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A tensor or string is one argument, a dict keywords, a tuple positional, `(tuple, dict)` both."""
    if isinstance(item, (dict, collections.UserDict)):
        return (), {str(k): v for k, v in item.items()}
    if isinstance(item, tuple) and not hasattr(item, "_fields"):
        if len(item) == 2 and isinstance(item[0], tuple) and isinstance(item[1], dict):
            return item[0], item[1]
        return item, {}
    return (item,), {}


def understand(
    data: Any,
    *,
    takes: Callable[[Any], bool] | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_batches_per_batch_size: int = 2,
) -> Understood:
    """The calls that data means.

    Without `batch_sizes` each item is one call as it stands. With them each item is one sample without batch axis, and
    items are collated to every batch size (strings become lists, equal other values stay as they are); a `DataLoader`'s
    batches are cut into samples first; a single tensor is a batch to cut if `takes(tensor)` says that the target
    takes it as it stands, else one sample.

    Args:
        data: a tensor, string, dict or tuple (one item); a list, Dataset, DataLoader or other iterable of items; or a
            function without arguments that returns one of these.
        takes: whether the target accepts an item as it stands; asked only where it decides the meaning.
        batch_sizes: positive batch sizes.
        max_batches_per_batch_size: at most so many different batches for each size.

    Raises:
        DataError: the data is empty or not understood, a batch size is not positive, or samples can't be collated.
    """
    source = data
    if callable(data) and not isinstance(data, (torch.Tensor, Dataset, DataLoader, Mapping)):
        source = data()
    if batch_sizes is None:
        items = tuple(Item(*as_call(item)) for item in itertools.islice(_items(source), MAX_ITEMS))
        if not items:
            raise _empty(data)
        return Understood(
            items, f"{len(items)} item{'s' if len(items) > 1 else ''} of {_said(source)}, each one call as it stands"
        )
    if not batch_sizes or any(not isinstance(b, numbers.Integral) or b < 1 for b in batch_sizes):
        raise DataError(f"batch_sizes must be positive whole numbers, but got {list(batch_sizes)!r}")
    if max_batches_per_batch_size < 1:
        raise DataError(f"max_batches_per_batch_size must be at least 1, but got {max_batches_per_batch_size}")
    samples, meaning = _samples(source, takes)
    if not samples:
        raise _empty(data)
    batched: list[Item] = []
    for size in batch_sizes:
        count = min(max_batches_per_batch_size, max(1, len(samples) // size))
        for number in range(count):
            chosen = [samples[(number * size + i) % len(samples)] for i in range(size)]
            args, kwargs = as_call(collate(chosen))
            batched.append(Item(args, kwargs, size))
    return Understood(tuple(batched), f"{meaning}, collated to batch sizes {', '.join(map(str, batch_sizes))}")


def refuse_empty(data: Any) -> None:
    """Raise DataError for what shows by its length that it holds no item; what must be run to know passes."""
    if isinstance(data, (list, Dataset, DataLoader)) and hasattr(data, "__len__") and len(data) == 0:
        raise _empty(data)


def _empty(data: Any) -> DataError:
    return DataError(f"data must hold at least one item, but got {_said(data)}. Pass inputs that the target takes")


def _said(data: Any) -> str:
    if isinstance(data, torch.Tensor):
        return f"a tensor of shape {tuple(data.shape)}"
    size = f" of {len(data)}" if hasattr(data, "__len__") else ""
    return f"{with_article(type(data).__name__)}{size}"


def _items(data: Any) -> Iterator[Any]:
    if isinstance(data, (torch.Tensor, np.ndarray, str, dict, collections.UserDict, tuple)):
        yield data
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not hasattr(data, "__iter__"):
        for i in range(len(data)):  # type: ignore[arg-type]
            yield data[i]
    elif isinstance(data, Iterable):
        yield from data
    else:
        raise DataError(
            "data must be a tensor, string, dict, tuple, list, Dataset, DataLoader or a function that returns one, "
            f"but got {type(data).__name__}"
        )


def _samples(data: Any, takes: Callable[[Any], bool] | None) -> tuple[list[Any], str]:
    if isinstance(data, torch.Tensor):
        if data.dim() and takes is not None and takes(data):
            return list(data.unbind(0)), f"a tensor taken as a batch of {data.shape[0]} samples"
        return [data], "a tensor taken as one sample"
    items = list(itertools.islice(_items(data), MAX_ITEMS))
    if isinstance(data, DataLoader) and data.batch_size is not None:
        samples = [sample for batch in items for sample in _cut(batch)]
        return samples, f"a DataLoader's {len(items)} batches cut into {len(samples)} samples"
    return items, f"{len(items)} samples of {_said(data)}"


def _length(value: Any) -> int | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else None
    if isinstance(value, list):
        return len(value)
    parts = (
        value.values() if isinstance(value, (dict, collections.UserDict)) else value if isinstance(value, tuple) else ()
    )
    return next((n for n in map(_length, parts) if n is not None), None)


def _cut(batch: Any) -> list[Any]:
    return [_at(batch, i) for i in range(_length(batch) or 0)]


def _at(value: Any, i: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value[i] if value.ndim else value
    if isinstance(value, list):
        return value[i]
    if isinstance(value, (dict, collections.UserDict)):
        return {k: _at(v, i) for k, v in value.items()}
    return tuple(_at(v, i) for v in value) if isinstance(value, tuple) else value


def collate(samples: Sequence[Any]) -> Any:
    """Join samples along a new first axis: tensors and arrays are stacked, strings listed, containers joined inside.

    Other values must be equal in all samples and stay as they are. Raises DataError that names what differs.
    """
    first = samples[0]
    if isinstance(first, torch.Tensor):
        shapes = {tuple(s.shape) for s in samples}
        if len(shapes) > 1:
            raise DataError(
                f"samples of one batch must have equal shapes, but got {sorted(shapes)}. Pad them, or pass batches and no batch_sizes"
            )
        return torch.stack(list(samples))
    if isinstance(first, np.ndarray):
        return np.stack(list(samples))
    if isinstance(first, str):
        return list(samples)
    if isinstance(first, (dict, collections.UserDict)):
        return {k: collate([s[k] for s in samples]) for k in first}
    if isinstance(first, tuple):
        return tuple(collate([s[i] for s in samples]) for i in range(len(first)))
    if isinstance(first, list):
        return [collate([s[i] for s in samples]) for i in range(len(first))]
    if any(type(s) is not type(first) or s != first for s in samples):
        raise DataError(
            f"values that are no tensors or strings must be equal within a batch, but got {samples[0]!r} and others"
        )
    return first
