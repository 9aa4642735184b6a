"""What people pass as data, and which calls it means."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from aitune_lab import DataError
from aitune_lab.capture.data import as_call, collate, understand
from aitune_lab.testing.models import Mlp

X = torch.arange(24.0).view(6, 4)


class Mapped(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": X[i], "name": f"n{i}"}


class Streamed(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(X)


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("item", "args", "kwargs"),
    [
        (X, (X,), {}),
        ("text", ("text",), {}),
        ({"x": 1}, (), {"x": 1}),
        (collections.UserDict(x=1), (), {"x": 1}),
        ((1, 2), (1, 2), {}),
        (((1,), {"y": 2}), (1,), {"y": 2}),
        ([1, 2], ([1, 2],), {}),
        (Pair(1, 2), (Pair(1, 2),), {}),
    ],
    ids=["tensor", "string", "dict", "UserDict", "tuple", "tuple and dict", "list", "named tuple"],
)
def test_an_item_as_a_call(item: Any, args: Any, kwargs: Any) -> None:
    got = as_call(item)
    assert got[0] is args or got[0] == args or got[0][0] is args[0]
    assert got[1] == kwargs


@pytest.mark.parametrize(
    ("data", "count", "said"),
    [
        (X, 1, "1 item of a tensor of shape (6, 4), each one call as it stands"),
        ("text", 1, "1 item of a str of 4, each"),
        ({"x": X}, 1, "1 item of a dict"),
        ((X, X), 1, "1 item of a tuple"),
        ([X, X], 2, "2 items of a list of 2, each"),
        ([{"prompt": "a"}, {"prompt": "b"}], 2, "2 items"),
        (Mapped(), 3, "3 items of a Mapped of 3"),
        (Streamed(), 6, "6 items of a Streamed"),
        (DataLoader(X, batch_size=2), 3, "3 items of a DataLoader of 3"),
        (lambda: [X], 1, "1 item"),
        (lambda: DataLoader(X, batch_size=4), 2, "2 items"),
        (iter([X, X]), 2, "2 items"),
        (np.ones(3), 1, "1 item"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, (int, str)) else None,
)
def test_items_as_they_stand(data: Any, count: int, said: str) -> None:
    understood = understand(data)
    assert len(understood.items) == count
    assert understood.sentence.startswith(said)
    assert all(item.batch is None for item in understood.items)


@pytest.mark.parametrize("data", [[], (), iter([]), Mapped.__new__(type("Empty", (Mapped,), {"__len__": lambda s: 0}))])
def test_empty_data_is_refused(data: Any) -> None:
    if data == ():
        assert understand(data).items[0].args == ()  # a call without arguments
        return
    with pytest.raises(DataError, match="at least one item"):
        understand(data)


@pytest.mark.parametrize("data", [3, None, object()])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(DataError, match="must be a tensor, string, dict"):
        understand(data)


@pytest.mark.parametrize("sizes", [[], [0], [-1], [1.5], ["2"]])
def test_batch_sizes_must_be_positive_whole_numbers(sizes: Any) -> None:
    with pytest.raises(DataError, match="batch_sizes must be positive whole numbers"):
        understand([X], batch_sizes=sizes)


def test_samples_are_collated_to_every_size() -> None:
    understood = understand([{"x": X[i], "name": f"n{i}", "scale": 2} for i in range(6)], batch_sizes=[1, 4])
    assert [item.batch for item in understood.items] == [1, 1, 4]
    last = understood.items[-1].kwargs
    assert torch.equal(last["x"], X[:4])
    assert last["name"] == ["n0", "n1", "n2", "n3"]
    assert last["scale"] == 2
    assert understood.sentence == "6 samples of a list of 6, collated to batch sizes 1, 4"


def test_fewer_samples_than_a_batch_are_repeated() -> None:
    (item,) = understand([X[0], X[1]], batch_sizes=[5]).items
    assert torch.equal(item.args[0], X[[0, 1, 0, 1, 0]])


def test_batches_of_one_size_differ_up_to_the_limit() -> None:
    items = understand(list(X), batch_sizes=[1], max_batches_per_batch_size=3).items
    assert [item.args[0][0, 0].item() for item in items] == [0, 4, 8]
    with pytest.raises(DataError, match="at least 1, but got 0"):
        understand(list(X), batch_sizes=[1], max_batches_per_batch_size=0)


def test_a_tensor_is_a_batch_if_the_target_takes_it_else_a_sample() -> None:
    cut = understand(X, takes=lambda item: True, batch_sizes=[2])
    assert cut.items[0].args[0].shape == (2, 4)
    assert "taken as a batch of 6 samples" in cut.sentence
    whole = understand(X, takes=lambda item: False, batch_sizes=[2])
    assert whole.items[0].args[0].shape == (2, 6, 4)
    assert "taken as one sample" in whole.sentence


@pytest.mark.parametrize("batch", [2, 4])
def test_batches_of_a_data_loader_are_cut_and_joined(batch: int) -> None:
    understood = understand(DataLoader(Mapped(), batch_size=batch), batch_sizes=[3])
    (item,) = understood.items
    assert torch.equal(item.kwargs["x"], X[:3])
    assert item.kwargs["name"] == ["n0", "n1", "n2"]
    assert "cut into 3 samples" in understood.sentence


def test_a_data_loader_without_batches_gives_samples() -> None:
    item, *_ = understand(DataLoader(list(X), batch_size=None), batch_sizes=[2]).items
    assert torch.equal(item.args[0], X[:2])


def test_collating_says_what_differs() -> None:
    with pytest.raises(DataError, match=r"equal shapes, but got \[\(1,\), \(2,\)\]. Pad them"):
        collate([torch.ones(1), torch.ones(2)])
    with pytest.raises(DataError, match="must be equal within a batch, but got 1 and others"):
        collate([{"k": 1}, {"k": 2}])
    assert collate([(torch.zeros(2), "a", [np.zeros(1)])] * 2)[1] == ["a", "a"]
    assert collate([(np.zeros(3), None)] * 2)[0].shape == (2, 3)


def test_fresh_items_share_nothing_with_the_users_data_but_what_items_share() -> None:
    shared = torch.zeros(2)
    module = Mlp()
    data = [{"a": shared, "m": module}, {"a": shared, "m": module}]
    understood = understand(data)
    one, two = understood.fresh_items()
    assert one.kwargs["a"] is two.kwargs["a"]
    assert one.kwargs["a"] is not shared
    assert one.kwargs["m"] is module
    one.kwargs["a"].add_(1)
    assert shared.sum() == 0
    assert understood.fresh_items()[0].kwargs["a"].sum() == 0


def test_data_that_cannot_be_copied_is_refused() -> None:
    class Locked:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    with pytest.raises(DataError, match="can't be copied"):
        understand([{"x": Locked()}]).fresh_items()
