"""What a module would give in higher precision: the yardstick by which eager itself is off.

The module's copy runs under a dispatch mode that computes every operator in the higher precision: floating-point
operands are converted as they are used and results stay in it, so no second set of weights is needed. Three things
would make such a run silently wrong, and are treated so:

- a write in place into memory of lower precision (a buffer, an input, a view of one) is refused;
- a view of lower-precision memory stays what it is, so that a write through it is seen, and refused, too;
- an operator outside of torch's own (`aten`), or on a tensor subclass, is refused: what it does with another dtype
  is not known.

Where it can run, a converted copy of the module is the cross-check; if the two disagree there is no reference.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from ..capture.structure import flatten
from .figures import dense, relative_l2, shape_of

_LOWER: dict[torch.dtype, dict[torch.dtype, torch.dtype]] = {
    torch.float64: {
        torch.float32: torch.float64,
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.complex64: torch.complex128,
        torch.complex32: torch.complex128,
    },
    torch.float32: {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64},
}
"""For each reference precision: what each lower dtype becomes."""

_AGREEMENT = {torch.float64: 1e-5, torch.float32: 1e-3}
"""How far (relative L2) the converted copy may be off: its hard-coded casts round to the module's own precision."""

DEFAULT_MEMORY_LIMIT_BYTES = 8 << 30
CROSS_CHECK_LIMIT_BYTES = 1 << 30
"""A converted copy of more bytes than this is no cheap check."""


@dataclass(frozen=True)
class Reference:
    """The outputs in higher precision, or the reason in a sentence why there are none (then `outputs` is None).

    `cross_checked` says that a converted copy of the module gave the same.
    """

    outputs: Any
    yardstick: Literal["float64", "float32", "eager"]
    reason: str = ""
    cross_checked: bool = False


class _NoReference(Exception):
    """The run can't be trusted; the message says why."""


def reference_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """float64 for modules in float32, float32 for modules in half precision, None where there is nothing higher.

    The highest floating-point dtype among parameters and buffers counts; a module without any counts as float32.
    """
    dtypes = {t.dtype for t in [*module.parameters(), *module.buffers()]}
    if dtypes & {torch.float64, torch.complex128}:
        return None
    if not dtypes & {torch.float32, torch.complex64} and dtypes & {torch.float16, torch.bfloat16}:
        return torch.float32
    return torch.float64


def reference_outputs(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    *,
    method: str = "forward",
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
) -> Reference:
    """Run a copy of the module in higher precision.

    The copy shares the module's floating-point parameters and nothing else; module, arguments, random states,
    autocast and torch's precision settings are afterwards as they were.

    Args:
        module: the module in the dtypes in which it is used.
        args: positional arguments of a recorded call.
        kwargs: its keyword arguments.
        dtype: `torch.float64` or `torch.float32`; None takes `reference_dtype(module)`.
        method: the method that was recorded.
        memory_limit_bytes: no run if the parameters converted to `dtype` need more.

    Raises:
        ValueError: `dtype` is neither of the two.
    """
    if dtype is None:
        dtype = reference_dtype(module)
        if dtype is None:
            return Reference(None, "eager", "the module is in float64, there is no higher precision")
    if dtype not in _LOWER:
        raise ValueError(f"dtype must be torch.float64 or torch.float32, but got {dtype}")
    size = sum(p.numel() * _LOWER[dtype].get(p.dtype, p.dtype).itemsize for p in module.parameters())
    if size > memory_limit_bytes:
        return Reference(
            None, "eager", f"parameters in {_name(dtype)} need {size} bytes, more than the {memory_limit_bytes} allowed"
        )
    devices = _devices(module, args, kwargs)
    try:
        with _undisturbed(dtype, devices):
            outputs = _run_upcast(module, args, kwargs, dtype, method, devices)
    except Exception as error:
        return Reference(None, "eager", _reason(error))
    checked = False
    if size <= min(CROSS_CHECK_LIMIT_BYTES, memory_limit_bytes):
        try:
            with _undisturbed(dtype, devices):
                other = _run_converted(module, args, kwargs, dtype, method)
        except Exception:  # hard-coded dtypes fail in a converted copy: then there is nothing to check by
            other = None
        else:
            disagreement = _disagreement(outputs, other)
            if disagreement > _AGREEMENT[dtype]:
                return Reference(
                    None,
                    "eager",
                    f"two ways to run it in {_name(dtype)} are {disagreement:.3g} apart (relative L2): it depends on dtypes",
                )
            checked = True
    return Reference(outputs, "float64" if dtype == torch.float64 else "float32", cross_checked=checked)


class _Upcast(TorchDispatchMode):
    """Every aten operator in the higher precision, strictly (see the module's docstring)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.higher = _LOWER[dtype]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler (seconds) to keep it away from the method below.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prim", "prims"):
            raise _NoReference(f"the operator {func} is not torch's own, so its higher precision is not known")
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        tree_map(self._check_class, list(named.values()))
        if func is torch.ops.aten.view.dtype:
            self._refuse_reinterpretation(args[0])
            return func(*args, **kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map(lambda value: self._refuse_write(func, value), named.get(argument.name))
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if aliases and not func._schema.is_mutable:
            return func(*args, **kwargs)
        return tree_map(self.convert, func(*tree_map(self.convert, args), **tree_map(self.convert, kwargs)))

    def convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in self.higher:
            return torch.ops.aten._to_copy.default(value, dtype=self.higher[value.dtype])
        if isinstance(value, torch.dtype):
            return self.higher.get(value, value)
        return value

    def _check_class(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise _NoReference(f"it uses the tensor subclass {type(value).__name__}")

    def _refuse_write(self, func: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dtype in self.higher:
            raise _NoReference(f"{func} writes in place into a tensor of {_name(value.dtype)}")

    def _refuse_reinterpretation(self, tensor: torch.Tensor) -> None:
        if tensor.dtype in self.higher.values():
            raise _NoReference("it reads the bits of a tensor as another dtype")


class _PlainKernels(TorchFunctionMode):
    """No fused kernel is chosen by the dtype of operands that the dispatch mode converts only later.

    Attention runs by its formula, recurrent layers get their operands converted beforehand.
    """

    def __init__(self, upcast: _Upcast) -> None:
        super().__init__()
        self.upcast = upcast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if getattr(func, "__name__", "") in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return func(*tree_map(self.upcast.convert, args), **kwargs)
        return func(*args, **kwargs)


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention` by its formula. The operator adds its mask, so a mask of bools is spelled out."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math.default(query, key, value, attn_mask, *args, **kwargs)[0]


def _run_upcast(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    method: str,
    devices: Sequence[torch.device],
) -> Any:
    memo = {id(p): p for p in module.parameters() if p.dtype in _LOWER[dtype]}
    own, own_args, own_kwargs = copy.deepcopy((module, tuple(args), dict(kwargs)), memo)
    for layer in own.modules():
        if isinstance(layer, torch.nn.RNNBase):
            # It compares the input's dtype with that of the weights.
            layer.check_input = _unchecked  # type: ignore[method-assign,assignment]
    before = _random_states(devices)
    with _Upcast(dtype) as upcast, _PlainKernels(upcast):
        outputs = getattr(own, method)(*own_args, **own_kwargs)
    if not all(torch.equal(a, b) for a, b in zip(before, _random_states(devices), strict=True)):
        raise _NoReference("it draws random numbers, which differ from precision to precision")
    return outputs


def _unchecked(*args: Any) -> None:
    return None


def _run_converted(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype, method: str
) -> Any:
    higher = _LOWER[dtype]

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(higher.get(tensor.dtype, tensor.dtype))

    own, own_args, own_kwargs = copy.deepcopy((module, tuple(args), dict(kwargs)))
    own._apply(convert)
    own_args, own_kwargs = tree_map_only(torch.Tensor, convert, (own_args, own_kwargs))
    return getattr(own, method)(*own_args, **own_kwargs)


def _disagreement(one: Any, other: Any) -> float:
    """The largest relative L2 error among the tensors of two outputs; infinite if they don't match in structure."""
    first, second = flatten(one), flatten(other)
    if first.node != second.node:
        return float("inf")
    worst = 0.0
    for a, b in zip(first.leaves, second.leaves, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if shape_of(a) != shape_of(b):
                return float("inf")
            worst = max(worst, relative_l2(dense(a), dense(b)))
    return worst


def _devices(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.device]:
    """The CUDA devices in play."""
    tensors = [*module.parameters(), *module.buffers(), *flatten((tuple(args), dict(kwargs))).leaves]
    return sorted({t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda}, key=str)


def _random_states(devices: Sequence[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


@contextlib.contextmanager
def _undisturbed(dtype: torch.dtype, devices: Sequence[torch.device]) -> Iterator[None]:
    """No gradients, no autocast (nor entries in its cache), full precision; everything put back at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[d.index or 0 for d in devices]))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # eager has said what the model has to say
            stack.enter_context(torch.no_grad())
            for device_type in {"cpu", *(d.type for d in devices)}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            if dtype == torch.float32:
                stack.enter_context(_full_precision())
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """float32 without TF32 or bfloat16 shortcuts. torch keeps these settings for the whole process, not by thread."""
    changed: list[tuple[Any, str, Any]] = []
    for owner, name, full in _precision_settings():
        before = getattr(owner, name)
        if before not in (full, "none"):
            changed.append((owner, name, before))
            setattr(owner, name, full)
    try:
        yield
    finally:
        for owner, name, before in changed:
            setattr(owner, name, before)


def _precision_settings() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value of full precision), by torch's newer interface (2.9) or its older one; never by both."""
    backends: Any = torch.backends
    if hasattr(backends.cudnn, "conv"):
        owners = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
        return [(owner, "fp32_precision", "ieee") for owner in [*owners, backends.mkldnn.conv, backends.mkldnn.rnn]]
    return [(backends.cuda.matmul, "allow_tf32", False), (backends.cudnn, "allow_tf32", False)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: Exception) -> str:
    if isinstance(error, _NoReference):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    return f"the higher-precision run failed: {type(error).__name__}: {first[:200]}"
