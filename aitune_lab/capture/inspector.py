"""What a target consists of, and where its time goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .._display import Printed
from ..errors import DataError, TargetError, with_article
from ..schema import leaf_label
from .calls import CallForm
from .data import Understood, understand
from .interrupts import guarded
from .probe import why_not
from .recorder import Recording
from .state import preserved
from .structure import describe_leaf, flatten, flatten_call, is_tensor
from .swap import SwappedMethod, original_method, restore, swap
from .tree import Found, outermost, require_modules, tuned_methods, unit_path


@dataclass(frozen=True)
class ModuleRow:
    """What was seen of one module's method over the timed iterations.

    `total_seconds` includes the modules it calls, `self_seconds` does not; `share` is total time over the target's
    own end-to-end time. `inputs` and `outputs` describe the first call. `parameters` and `buffers` count
    elements, shared ones once.
    """

    path: str
    class_name: str
    method: str
    depth: int
    calls: int
    total_seconds: float
    self_seconds: float
    share: float
    parameters: int
    buffers: int
    parameter_bytes: int
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    tunable: bool = True
    reason: str = ""
    shared_with: tuple[str, ...] = ()

    @property
    def mean_ms(self) -> float:
        return 1000 * self.total_seconds / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class InspectedModule:
    """A module to tune, as `get_modules` proposes it."""

    path: str
    module: torch.nn.Module
    method: str
    row: ModuleRow


@dataclass
class Inspection(Printed):
    """The result of `inspect`: a table of modules, which of them to tune, and the target's own time."""

    target: Any
    rows: tuple[ModuleRow, ...]
    seconds_per_iteration: float
    understood: str
    iterations: int
    warnings: tuple[str, ...] = ()
    _modules: dict[str, torch.nn.Module] = field(default_factory=dict, repr=False)

    def get_modules(
        self,
        min_execution_ratio: float = 0.0,
        limit: int | None = None,
        min_depth: int = 0,
        max_depth: int | None = None,
    ) -> list[InspectedModule]:
        """The outermost modules that ran and can be tuned, the slowest first.

        Args:
            min_execution_ratio: leave out modules with a smaller share of the end-to-end time (0 to 1).
            limit: at most so many.
            min_depth: start below this depth (0 is the target itself or a module it holds directly).
            max_depth: don't go deeper than this.
        """
        chosen: list[ModuleRow] = []
        for row in sorted(self.rows, key=lambda r: r.depth):
            deep_enough = min_depth <= row.depth and (max_depth is None or row.depth <= max_depth)
            covered = any(_beneath(row, other) for other in chosen)
            if deep_enough and row.calls and row.tunable and not covered and row.share >= min_execution_ratio:
                chosen.append(row)
        chosen.sort(key=lambda r: -r.total_seconds)
        return [InspectedModule(r.path, self._modules[r.path], r.method, r) for r in chosen[:limit]]

    def describe(self) -> None:
        """Print the table."""
        print(self)

    def advice(self) -> list[Any]:
        """Findings with hazard, evidence and mitigation, the gravest first; see `aitune_lab.report.advice`."""
        from .._display import report

        return list(report().advice.inspection_advice(self))

    def to_dataframe(self) -> Any:
        """The rows as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().frames.modules_frame(self.rows)

    def __str__(self) -> str:
        from .._display import report

        return str(report().text.inspection_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().text.inspection_html(self))


def _beneath(row: ModuleRow, other: ModuleRow) -> bool:
    parent = other.path if other.method == "forward" else other.path.rpartition(".")[0]
    if other.method != "forward" and row.method != "forward":
        return False
    return parent == "" or row.path.startswith(parent + ".")


@dataclass
class _Timing:
    calls: int = 0
    total: float = 0.0
    own: float = 0.0
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    problem: str | None = None
    tensors: bool = False


def run_item(target: Any, function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run one item of the data. Raises DataError, with the cause, if the target rejects it."""
    call = function if function is not None else target
    if not callable(call):
        raise TargetError(
            f"{with_article(type(target).__name__)} cannot be called; pass inference_function=, the function that runs an item of the data"
        )
    try:
        return call(*args, **kwargs)
    except Exception as error:
        shown = ", ".join([*(leaf_label(describe_leaf(x, p)) for x, p in _leaves(args, kwargs))])
        raise DataError(
            f"the target rejected an item of the data ({shown}): {type(error).__name__}: {error}"
        ) from error


def _leaves(args: tuple[Any, ...], kwargs: Any) -> list[tuple[Any, str]]:
    flat = flatten_call({**{f"argument {i}": a for i, a in enumerate(args)}, **dict(kwargs)})
    return list(zip(flat.leaves, flat.paths, strict=True))


def takes(target: Any, function: Callable[..., Any] | None) -> Callable[[Any], bool]:
    """Whether the target accepts an item as it stands, by trying."""

    def ask(item: Any) -> bool:
        try:
            with torch.no_grad():
                (function if function is not None else target)(item)
        except Exception:
            return False
        return True

    return ask


class _Timer:
    """Times every module's method while the target runs; nested calls count for the parent's total, not its own."""

    def __init__(self, found: Sequence[Found]) -> None:
        self.found = found
        self.timings: dict[tuple[int, str], _Timing] = {}
        self._thread = threading.get_ident()
        self._stack: list[float] = []
        self._running: set[int] = set()

    @contextmanager
    def running(self, methods: Callable[[torch.nn.Module], list[str]]) -> Iterator[None]:
        entries: list[SwappedMethod] = []
        with guarded() as self._guard:
            try:
                for item in self.found:
                    if isinstance(item.module, torch.jit.ScriptModule):
                        continue
                    for method in methods(item.module):
                        entries.append(self._install(item.module, method))
                self._guard.allowed = True
                yield
            finally:
                self._guard.allowed = False
                for entry in reversed(entries):
                    restore(entry)

    def _install(self, module: torch.nn.Module, method: str) -> SwappedMethod:
        timing = self.timings.setdefault((id(module), method), _Timing())
        original = original_method(module, method)
        key = id(module)
        on_cuda = any(p.is_cuda for p in module.parameters(recurse=False))

        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or key in self._running or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            self._guard.check()
            self._running.add(key)
            self._stack.append(0.0)
            if on_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            try:
                result = original(*args, **kwargs)
                if on_cuda:
                    torch.cuda.synchronize()
            finally:
                seconds = time.perf_counter() - start
                inner = self._stack.pop()
                self._running.discard(key)
                if self._stack:
                    self._stack[-1] += seconds
            timing.calls += 1
            timing.total += seconds
            timing.own += seconds - inner
            if not timing.inputs:
                self._describe(timing, original, args, kwargs, result)
            return result

        return swap(module, method, timed)

    @staticmethod
    def _describe(timing: _Timing, original: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            flat = flatten_call(CallForm(original).normalize(args, kwargs))
            out = flatten(result)
        except Exception as error:
            timing.problem = f"its calls can't be described: {error}"
            return
        timing.inputs = tuple(leaf_label(describe_leaf(x, p)) for x, p in zip(flat.leaves, flat.paths, strict=True))
        timing.outputs = tuple(leaf_label(describe_leaf(x, p)) for x, p in zip(out.leaves, out.paths, strict=True))
        timing.tensors = any(map(is_tensor, flat.leaves)) and any(map(is_tensor, out.leaves))

    def reset(self) -> None:
        for timing in self.timings.values():
            timing.calls, timing.total, timing.own = 0, 0.0, 0.0


def inspect(
    target: Any,
    data: Any,
    *,
    inference_function: Callable[..., Any] | None = None,
    iterations: int = 3,
    warmup: int = 1,
    batch_sizes: Sequence[int] | None = None,
    max_batches_per_batch_size: int = 2,
) -> Inspection:
    """Run data through a target and say which modules ran, how long each took, and which can be tuned.

    Args:
        target: a module, or any object or function that holds modules.
        data: see `understand`; each item is one call of the target (or of `inference_function`).
        inference_function: called with an item's arguments in place of the target (`pipe.generate`).
        iterations: passes over the data that are timed.
        warmup: passes before that.
        batch_sizes: collate the items to these sizes; without, items are calls as they stand.

    Raises:
        TargetError: the target holds no modules, or can't be called.
        DataError: the data is empty, or the target rejects it.
    """
    found = require_modules(target)
    if iterations < 1 or warmup < 0:
        raise DataError(
            f"iterations >= 1 and warmup >= 0 must hold, but got (iterations={iterations}, warmup={warmup})"
        )
    understood = understand(
        data,
        takes=takes(target, inference_function),
        batch_sizes=batch_sizes,
        max_batches_per_batch_size=max_batches_per_batch_size,
    )
    timer = _Timer(found)
    with preserved(outermost(found)):
        called, seconds = _timed_passes(found, timer, target, inference_function, understood, warmup, iterations)
    rows, modules = _rows(found, timer, called, seconds)
    return Inspection(target, tuple(rows), seconds / iterations, understood.sentence, iterations, _modules=modules)


def _timed_passes(
    found: Sequence[Found],
    timer: _Timer,
    target: Any,
    function: Callable[..., Any] | None,
    understood: Understood,
    warmup: int,
    iterations: int,
) -> tuple[dict[int, list[str]], float]:
    with torch.no_grad(), timer.running(lambda module: ["forward", *tuned_methods(type(module))]):
        for _ in range(max(1, warmup)):
            _pass(target, function, understood)
    called = _entry_methods(found, timer)
    timer.reset()
    with torch.no_grad(), timer.running(lambda module: called[id(module)]):
        seconds = sum(_pass(target, function, understood) for _ in range(iterations))
    return called, seconds


def _pass(target: Any, function: Callable[..., Any] | None, understood: Understood) -> float:
    """One pass over copies of the data; gives the seconds spent in the target."""
    seconds = 0.0
    for item in understood.fresh_items():
        start = time.perf_counter()
        run_item(target, function, item.args, item.kwargs)
        seconds += time.perf_counter() - start
    return seconds


def _entry_methods(found: Sequence[Found], timer: _Timer) -> dict[int, list[str]]:
    """`forward` where it ran; where it never did, the methods that took and gave tensors."""
    timings: dict[int, dict[str, _Timing]] = {}
    for (key, method), timing in timer.timings.items():
        if timing.calls:
            timings.setdefault(key, {})[method] = timing
    result = {}
    for item in found:
        key = id(item.module)
        ran = timings.get(key, {})
        methods = [m for m, t in ran.items() if m != "forward" and t.tensors]
        result[key] = methods if methods and "forward" not in ran else ["forward"]
    return result


def _rows(
    found: Sequence[Found], timer: _Timer, called: dict[int, list[str]], seconds: float
) -> tuple[list[ModuleRow], dict[str, torch.nn.Module]]:
    rows, modules = [], {}
    held = {path for item in found for path in item.paths}
    for item in found:
        module, path = item.module, item.paths[0]
        above = [path[:i] for i, letter in enumerate(path) if letter == "."]
        depth = sum(other in held for other in above) + ("" in held and path != "")
        parameters, buffers = list(module.parameters()), list(module.buffers())
        base = ModuleRow(
            path=path,
            class_name=type(module).__name__,
            method="forward",
            depth=depth,
            calls=0,
            total_seconds=0.0,
            self_seconds=0.0,
            share=0.0,
            parameters=sum(p.numel() for p in parameters),
            buffers=sum(b.numel() for b in buffers),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            devices=tuple(sorted({str(t.device) for t in (*parameters, *buffers)})),
            shared_with=tuple(item.paths[1:]),
        )
        for method in called[id(module)]:
            timing = timer.timings.get((id(module), method), _Timing())
            unit = unit_path(path, method)
            reason = why_not(Recording(unit, module, method, None, problem=timing.problem)) if timing.calls else None  # type: ignore[arg-type]
            if not timing.calls:
                reason = "it did not run"
            elif reason is None and not timing.tensors:
                reason = "it takes or returns no tensors"
            rows.append(
                replace(
                    base,
                    path=unit,
                    method=method,
                    calls=timing.calls,
                    total_seconds=timing.total,
                    self_seconds=timing.own,
                    share=timing.total / seconds if seconds else 0.0,
                    inputs=timing.inputs,
                    outputs=timing.outputs,
                    tunable=reason is None,
                    reason=reason or "",
                )
            )
            modules[unit] = module
    return rows, modules
