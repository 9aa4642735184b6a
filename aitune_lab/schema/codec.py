"""The JSON form of everything in `schema`: strict JSON, also for NaN and infinities; only known types come back."""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import cattrs
from cattrs.preconf.json import make_converter

from .signature import Leaf, OpaqueLeaf, TensorLeaf, ValueLeaf

T = TypeVar("T")


def _float_out(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _float_in(value: Any, _: type) -> float:
    if isinstance(value, str) and value not in ("inf", "-inf", "nan"):
        raise ValueError(f"a number, or 'inf', '-inf', 'nan' must stand here, but got {value!r}")
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        raise ValueError(f"a number must stand here, but got {value!r}")
    return float(value)


def _make() -> cattrs.Converter:
    # Unknown keys are let through: a newer writer may add a field within one format version.
    converter = make_converter()
    converter.register_unstructure_hook(float, _float_out)
    converter.register_structure_hook(float, _float_in)
    cattrs.strategies.configure_tagged_union(
        Leaf,
        converter,
        tag_name="leaf",
        tag_generator=lambda cls: {TensorLeaf: "tensor", ValueLeaf: "value", OpaqueLeaf: "opaque"}[cls],
    )
    return converter


_converter = _make()


def to_data(value: Any) -> Any:
    """Plain dicts, lists, numbers and strings, ready for strict JSON (non-finite floats become strings)."""
    return _converter.unstructure(value)


def from_data(data: Any, cls: type[T]) -> T:
    """The inverse of `to_data`. Raises ValueError that names the type and the first fault."""
    try:
        return _converter.structure(data, cls)
    except Exception as error:
        faults = cattrs.transform_error(error, path=cls.__name__)
        raise ValueError(f"not a valid {cls.__name__}: {faults[0]}") from None


def to_json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(to_data(value), indent=indent, allow_nan=False, ensure_ascii=False)


def from_json(text: str | bytes, cls: type[T]) -> T:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not a valid {cls.__name__}: no JSON ({error})") from None
    return from_data(data, cls)
