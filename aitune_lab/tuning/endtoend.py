"""The tuned target as a whole against the untuned one, on the user's data: outputs, a metric of the user's, latency.

Modules that are each within their budget can still add up to something else end to end. So both run the same calls
from the same random state, one after the other, and what they return is compared leaf by leaf, as modules are.
"""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .._display import Printed
from ..capture.data import Understood, understand
from ..capture.inspector import run_item, takes
from ..capture.recorder import clone_leaf
from ..capture.state import preserved
from ..capture.structure import Flat, flatten, is_tensor
from ..capture.tree import find_modules, outermost
from ..measure.benchmark import Timing, measure
from ..measure.blocks import Contender, MeasureLimits
from ..measure.numerics import Call, compare
from ..runtime.installed import Bypass
from ..schema import Comparison, Measurement, Tolerance
from .strategies.words import counted, error, milliseconds, number, times

Metric = Callable[..., Any]

MEASURE_SECONDS = 5.0
"""Longer than this no alternating measurement goes on."""
_SEED = 0


@dataclass(frozen=True)
class EndToEnd(Printed):
    """What the tuned target is worth as a whole: measured, not estimated.

    Attributes:
        items: calls compared, one for each item of the data.
        comparison: outputs of the tuned target against those of the untuned one; None if skipped.
        eager: latency of one pass over all items, measured in alternation with `tuned`; None if a pass takes too
            long for that.
        tuned: see `eager`.
        eager_seconds: one pass over the data by the untuned target, wall time; None if it wasn't run.
        tuned_seconds: the same by the tuned one.
        metric: the user's metric on both (`metric(eager_outputs, tuned_outputs)`); None if it takes one argument.
        metric_eager: the user's metric on the untuned target's outputs; None if it takes two.
        metric_tuned: the same on the tuned one's.
        skipped: why the check was not made, or not finished; empty if it was.
        notes: what limits the figures.
    """

    items: int = 0
    comparison: Comparison | None = None
    eager: Measurement | None = None
    tuned: Measurement | None = None
    eager_seconds: float | None = None
    tuned_seconds: float | None = None
    metric: float | None = None
    metric_eager: float | None = None
    metric_tuned: float | None = None
    skipped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def within_budget(self) -> bool | None:
        """Whether the outputs are exact or within the error budget; None if they were not compared."""
        return None if self.comparison is None else self.comparison.error_class != "refused"

    @property
    def speedup(self) -> float | None:
        """Median eager latency over tuned; None where it was not measured in alternation or was disturbed."""
        if self.eager is None or self.tuned is None or self.tuned.median_ms <= 0:
            return None
        return None if self.eager.disturbed or self.tuned.disturbed else self.eager.median_ms / self.tuned.median_ms

    @property
    def sentence(self) -> str:
        """`end to end 1.8 times as fast (5.1 ms against 9.3 ms a pass), outputs exact (relative L2 2e-7)`."""
        if self.comparison is None:
            return f"end to end not checked: {self.skipped}"
        parts = []
        if self.eager is not None and self.tuned is not None:
            figures = f"{milliseconds(self.tuned.median_ms)} against {milliseconds(self.eager.median_ms)} a pass"
            ratio = f"{times(self.speedup)} times as fast" if self.speedup else "disturbed by other load"
            parts.append(f"{ratio} ({figures})")
        if self.comparison.error_class == "refused":
            parts.append(f"outputs out of tolerance: {self.comparison.problem}")
        else:
            off = error(self.comparison.relative_l2)
            parts.append(
                f"outputs {self.comparison.error_class} (relative L2 {off} over {counted(self.items, 'call')})"
            )
        if self.metric_eager is not None and self.metric_tuned is not None:
            parts.append(f"metric {number(self.metric_tuned)} against {number(self.metric_eager)}")
        if self.metric is not None:
            parts.append(f"metric {number(self.metric)}")
        return f"end to end {', '.join(parts)}"

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"note: {note}" for note in self.notes)])


def check(
    target: Any,
    data: Any,
    *,
    metric: Metric | None = None,
    inference_function: Callable[..., Any] | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_batches_per_batch_size: int = 2,
    tolerance: Tolerance | None = None,
    max_seconds: float = 60.0,
    meter: Callable[..., Timing] = measure,
) -> EndToEnd:
    """Run a tuned target and the same untuned over data, and say how they differ.

    One pass each for the outputs, then calls of both in alternation for latency, for at most `MEASURE_SECONDS`. The
    target's buffers and attributes and all random states are afterwards what they were. Images (PIL) are compared as
    arrays of 0 to 1, in float16, whose budget is the nearest to the rounding of 8-bit levels.

    Args:
        target: what `tune` or `load` has tuned.
        data: as `tune` takes it.
        metric: `metric(outputs)` or `metric(eager_outputs, tuned_outputs)`, which gives a number; outputs are a list
            with what the target returned for each item.
        inference_function: called with an item's arguments in place of the target.
        batch_sizes: as `tune` takes them.
        max_batches_per_batch_size: as `tune` takes it.
        tolerance: what outputs may be off; default: the budget of their dtype.
        max_seconds: no second pass if the first takes longer.
        meter: what times contenders; scripted in tests.

    Raises:
        DataError: the data is empty, or the target rejects it.
        Exception: whatever the metric raises.
    """
    understood = understand(
        data,
        takes=takes(target, inference_function),
        batch_sizes=batch_sizes,
        max_batches_per_batch_size=max_batches_per_batch_size,
    )
    bypass = Bypass(target)
    found = find_modules(target)
    runner = _Runner(target, inference_function, understood)
    with preserved(outermost(found)):
        try:
            bypass.on()
            eager, eager_seconds = runner.outputs()
            if eager_seconds > max_seconds:
                why = f"one pass over the data takes {eager_seconds:.0f} s, more than the {max_seconds:.0f} s allowed"
                return EndToEnd(len(eager), eager_seconds=eager_seconds, skipped=why)
            bypass.off()
            tuned, tuned_seconds = runner.outputs()
            result = EndToEnd(
                len(eager), _compared(eager, tuned, tolerance, found), None, None, eager_seconds, tuned_seconds
            )
            if result.within_budget is False:
                bypass.on()
                again, _ = runner.outputs()
                if _compared(eager, again, tolerance, found).error_class == "refused":
                    why = "the untuned target gives other outputs for the same inputs and seeds, so nothing can be compared"
                    return replace(result, comparison=None, skipped=why)
            result = _with_metric(result, metric, eager, tuned)
            return _timed(result, runner, bypass, meter)
        finally:
            bypass.off()


@dataclass(frozen=True)
class _Runner:
    """Runs the data's items; every run starts from copies of the user's items and from the same random states."""

    target: Any
    function: Callable[..., Any] | None
    understood: Understood

    def outputs(self) -> tuple[list[Any], float]:
        """What the target returns for every item, and the seconds spent in it."""
        results, seconds = [], 0.0
        with _seeded(), torch.no_grad():
            for item in self.understood.fresh_items():
                start = time.perf_counter()
                output = run_item(self.target, self.function, item.args, item.kwargs)
                _synchronize()
                seconds += time.perf_counter() - start
                results.append(_kept(output))
        return results, seconds

    def one_pass(self) -> Callable[[], Any]:
        """A pass over fresh copies of all items: items differ in cost, so single calls of them can't be compared."""
        items = self.understood.fresh_items()

        def run() -> None:
            for item in items:
                run_item(self.target, self.function, item.args, item.kwargs)

        return run


def _compared(
    eager: Sequence[Any], tuned: Sequence[Any], tolerance: Tolerance | None, found: Sequence[Any]
) -> Comparison:
    calls = [Call(_flat(one), _flat(other)) for one, other in zip(eager, tuned, strict=True)]
    dtypes = {p.dtype for item in found for p in item.module.parameters(recurse=False) if p.is_floating_point()}
    # The coarsest of the modules' dtypes sets the default budget.
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return compare(calls, tolerance or Tolerance(), coarsest)


def _with_metric(result: EndToEnd, metric: Metric | None, eager: list[Any], tuned: list[Any]) -> EndToEnd:
    if metric is None:
        return result
    if _takes_two(metric):
        return replace(result, metric=float(metric(eager, tuned)))
    return replace(result, metric_eager=float(metric(eager)), metric_tuned=float(metric(tuned)))


def _takes_two(metric: Metric) -> bool:
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is inspect.Parameter.empty
    ]
    return len(needed) >= 2


def _timed(result: EndToEnd, runner: _Runner, bypass: Bypass, meter: Callable[..., Timing]) -> EndToEnd:
    """Latencies of both in alternation. Copying an item and going round the dispatch lie outside of what is timed."""
    slowest = max(result.eager_seconds or 0.0, result.tuned_seconds or 0.0)
    if 16 * slowest > MEASURE_SECONDS:
        note = f"a pass over the data takes {slowest:.1f} s, so it was not timed in alternation"
        return replace(result, notes=(*result.notes, note))

    def eager(number: int) -> Callable[[], Any]:
        bypass.on()
        return runner.one_pass()

    def tuned(number: int) -> Callable[[], Any]:
        bypass.off()
        return runner.one_pass()

    limits = MeasureLimits(min_blocks=7, max_blocks=30, max_seconds=MEASURE_SECONDS - 1.0, warmup_seconds=0.5)
    with _seeded(), torch.no_grad():
        device = _device(runner.target)
        timing = meter(
            [Contender("eager", prepare=eager), Contender("tuned", prepare=tuned)], device=device, limits=limits
        )
    measured = timing.measurements
    return replace(result, eager=measured["eager"], tuned=measured["tuned"])


def _device(target: Any) -> torch.device:
    devices = [p.device for item in find_modules(target) for p in item.module.parameters()]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _seeded() -> Iterator[None]:
    """The random states of Python, numpy and torch set to one seed, and put back at the end."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            random.seed(_SEED)
            np.random.seed(_SEED)
            torch.manual_seed(_SEED)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def _kept(output: Any) -> Any:
    """The output, safe from later calls that reuse its memory."""
    flat = flatten(output)
    if not any(is_tensor(leaf) for leaf in flat.leaves):
        return output
    memo = {id(leaf): clone_leaf(leaf) for leaf in flat.leaves if is_tensor(leaf)}
    try:
        return copy.deepcopy(output, memo)
    except Exception:
        return output  # it holds something that can't be copied; its tensors are then compared as they are


def _flat(output: Any) -> Flat:
    flat = flatten(output)
    flat.leaves = [_image(leaf) for leaf in flat.leaves]
    return flat


def _image(leaf: Any) -> Any:
    """An image object (anything with numpy's array interface) as levels from 0 to 1; other leaves as they are."""
    if isinstance(leaf, (torch.Tensor, np.ndarray, np.generic)) or not hasattr(leaf, "__array_interface__"):
        return leaf
    array = np.asarray(leaf)
    return torch.from_numpy(array / 255.0).half() if array.dtype == np.uint8 else array
