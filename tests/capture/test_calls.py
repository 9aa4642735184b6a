"""Positional, keyword and spelled-out default are one call, and a normalised call can be made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from aitune_lab.capture.calls import CallForm, is_default
from aitune_lab.capture.structure import value_text

small = st.one_of(st.integers(0, 3), st.sampled_from([None, "a", 1.0, True]))


def plain(x, y=1, z=None):  # type: ignore[no-untyped-def]
    return {"x": x, "y": y, "z": z}


def keywords(x, *, k, y=1):  # type: ignore[no-untyped-def]
    return {"x": x, "k": k, "y": y}


def starred(x, y=1, *rest, z=2, **more):  # type: ignore[no-untyped-def]
    return {"x": x, "y": y, "rest": rest, "z": z, "more": more}


def positional(x, y=1, z=2, /, w=3, *, v=4):  # type: ignore[no-untyped-def]
    return {"x": x, "y": y, "z": z, "w": w, "v": v}


def anything(*args, **kwargs):  # type: ignore[no-untyped-def]
    return {"args": args, "kwargs": kwargs}


calls = st.tuples(
    st.sampled_from([plain, keywords, starred, positional, anything]),
    st.lists(small, max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["x", "y", "z", "k", "w", "v", "more1"]), small, max_size=3),
)


@given(calls)
@settings(max_examples=400, deadline=None)
def test_normalised_call_is_the_call_and_stays_itself(call: Any) -> None:
    function, args, kwargs = call
    form = CallForm(function)
    try:
        want = function(*args, **kwargs)
    except TypeError:
        # Signature.bind of Python 3.13.0 lets keywords for positional-only parameters through.
        if function is not positional:
            with pytest.raises(TypeError):
                form.normalize(args, kwargs)
        return
    normalized = form.normalize(args, kwargs)
    again_args, again_kwargs = form.arguments(normalized)
    got = function(*again_args, **again_kwargs)
    assert text(got) == text(want)
    assert text(form.normalize(again_args, again_kwargs)) == text(normalized)


def text(value: Any) -> Any:
    """Equal for equal values of equal types: `1`, `1.0` and `True` differ."""
    if isinstance(value, dict):
        return {k: text(v) for k, v in sorted(value.items())}
    return [text(v) for v in value] if isinstance(value, tuple) else (type(value).__name__, value_text(value))


def test_spellings_are_one() -> None:
    form = CallForm(plain)
    spellings = [((5,), {}), ((), {"x": 5}), ((5, 1), {}), ((5,), {"z": None}), ((5, 1, None), {}), ((5,), {"y": 1})]
    assert [form.normalize(*s) for s in spellings] == [{"x": 5}] * len(spellings)
    assert form.normalize((5, True), {}) == {"x": 5, "y": True}
    assert form.normalize((5, 1.0), {}) == {"x": 5, "y": 1.0}


def test_keywords_are_sorted_and_names_starred() -> None:
    assert CallForm(starred).normalize((1, 2, 3), {"q": 4, "p": 5}) == {
        "x": 1,
        "y": 2,
        "*rest": (3,),
        "**more": {"p": 5, "q": 4},
    }


def test_parameters_with_a_default_go_by_keyword() -> None:
    assert CallForm(plain).arguments({"x": 1, "y": 2}) == ((1,), {"y": 2})
    assert CallForm(starred).arguments({"x": 1, "y": 2, "*rest": (3,)}) == ((1, 2, 3), {})


@pytest.mark.parametrize(("value", "default", "same"), [
    (1, 1, True), (True, 1, False), (1.0, 1, False), (None, None, True), (float("nan"), float("nan"), True),
    (-0.0, 0.0, False), ("a", "a", True), (torch.float16, torch.float16, True), ([], [], False),
])  # fmt: skip
def test_default(value: Any, default: Any, same: bool) -> None:
    assert is_default(value, default) is same


def test_tensors_equal_their_default_by_identity() -> None:
    tensor = torch.ones(1)
    assert is_default(tensor, tensor)
    assert not is_default(torch.ones(1), tensor)
