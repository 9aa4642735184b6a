"""Which layers a lower precision hurts: one layer at a time is replaced, and the whole module's outputs are compared.

A replacement is any module that takes a layer's place, whoever made it: a backend that lowers layers one by one (TorchAO), or
the user (rounded, pruned). The user's module is not changed: while a measurement runs, the layer's `forward` is swapped for
the replacement's, and put back.

The proposal is found by dropping the layers that cost the most error for the time they save until the rest, all replaced
together, meets the budget: errors of layers don't simply add up, so the set itself is measured. Where a backend made the
replacements, the proposal is one more candidate to tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace as with_changes
from typing import Any

import torch

from .._display import Printed
from ..backends import registry
from ..backends.base import Backend
from ..capture.data import understand
from ..capture.inspector import run_item, takes
from ..capture.recorder import Recorder, clone_leaf
from ..capture.state import preserved
from ..capture.structure import Flat, flatten, is_tensor
from ..capture.swap import restore, swap
from ..errors import PlanError, TargetError
from ..measure.benchmark import Timing, measure
from ..measure.blocks import Contender, MeasureLimits
from ..measure.numerics import Call, compare
from ..schema import Candidate, Comparison, Tolerance
from .candidates import as_candidate
from .strategies.words import error, milliseconds, times

Replace = Callable[[str, torch.nn.Module], torch.nn.Module | None]
"""`replace(path, layer)` gives what takes a layer's place, or None for a layer to leave alone. It must not change it."""


@dataclass(frozen=True)
class LayerSensitivity:
    """What replacing one layer alone does.

    Attributes:
        path: the layer's path.
        class_name: its class.
        relative_l2: relative L2 error of the whole module's worst output.
        within_budget: whether that alone meets the budget.
        eager_ms: the layer's own time, median of a call, on its recorded inputs; None if it wasn't timed.
        replaced_ms: the replacement's.
        problem: why it is refused or could not run, in a sentence.
    """

    path: str
    class_name: str
    relative_l2: float
    within_budget: bool
    eager_ms: float | None = None
    replaced_ms: float | None = None
    problem: str = ""

    @property
    def saved_ms(self) -> float:
        """Time that a call saves; 0 if it wasn't timed or got slower."""
        return max(0.0, self.eager_ms - self.replaced_ms) if self.eager_ms and self.replaced_ms else 0.0


@dataclass(frozen=True)
class Sensitivity(Printed):
    """Error and time by layer, the most harmful first, and which layers may be replaced together within the budget.

    `replaced` and `left` are paths; `comparison` is of the module with all of `replaced` replaced, None if that is none;
    `lowered_by` is the candidate whose backend made the replacements, None if the user did.
    """

    layers: tuple[LayerSensitivity, ...]
    replaced: tuple[str, ...]
    left: tuple[str, ...]
    comparison: Comparison | None
    lowered_by: Candidate | None = None

    def candidate(self) -> Candidate:
        """The proposal as a candidate: `ait.tune(model, data, backends=[result.candidate()])`.

        Raises PlanError if no backend made the replacements, or none of them is within the budget.
        """
        if self.lowered_by is None:
            raise PlanError(
                "these replacements were made by a function, and no backend can build them; "
                "name a backend in its place, such as 'torchao[scheme=int8dyn]'"
            )
        if not self.replaced:
            raise PlanError(f"none of the {len(self.layers)} layers may be replaced within the budget")
        backend = registry.of(self.lowered_by)
        skipped = str(self.lowered_by.option("skip", ""))
        patterns = [*filter(None, skipped.split("|")), *_folded(self.left, self.replaced)]
        config: Any = backend.config
        return type(backend)(with_changes(config, skip="|".join(patterns))).candidate()

    @property
    def sentence(self) -> str:
        """`9 of 12 layers may be replaced (relative L2 3e-3); left: head (0.2 alone), …`."""
        total = len(self.layers)
        off = "" if self.comparison is None else f" (relative L2 {error(self.comparison.relative_l2)} together)"
        alone = {layer.path: layer.relative_l2 for layer in self.layers}
        left = ", ".join(f"{path} ({error(alone[path])} alone)" for path in self.left[:5])
        more = f" and {len(self.left) - 5} more" if len(self.left) > 5 else ""
        return f"{len(self.replaced)} of {total} layers may be replaced{off}" + (
            f"; left: {left}{more}" if left else ""
        )

    def table(self) -> list[dict[str, str]]:
        """The layers as formatted cells: layer, class, rel. L2 alone, own time before and after, in the proposal."""
        return [
            {
                "layer": layer.path,
                "class": layer.class_name,
                "rel. L2": error(layer.relative_l2),
                "eager ms": milliseconds(layer.eager_ms) if layer.eager_ms else "",
                "replaced ms": milliseconds(layer.replaced_ms) if layer.replaced_ms else "",
                "speed-up": times(layer.eager_ms / layer.replaced_ms) if layer.eager_ms and layer.replaced_ms else "",
                "proposal": "replaced" if layer.path in self.replaced else "left",
                "why": layer.problem,
            }
            for layer in self.layers
        ]

    def __str__(self) -> str:
        from .._display import report

        text, rows = report().text, self.table()
        columns = [text.Column(name, name) for name in (rows[0] if rows else {})]
        return f"{text.clean(self.sentence)}\n\n{text.render_table(columns, rows)}"


def sensitivity(
    module: torch.nn.Module,
    replace: Replace | Candidate | Backend | str,
    data: Any,
    *,
    tolerance: Tolerance | None = None,
    timed: bool = True,
    meter: Callable[..., Timing] = measure,
) -> Sensitivity:
    """Measure what replacing each layer alone does to a module's outputs, and propose a set that meets the budget.

    Takes one run over the data for each layer, and a few more for the proposal (a bisection over how many of the most
    harmful layers are left alone).

    Args:
        module: the whole module, in eval mode.
        replace: what makes the replacements: a candidate or its label (`"torchao[scheme=int8dyn]"`) whose backend lowers
            layers, or a function that gives the replacement of each layer that has one.
        data: as `tune` takes it.
        tolerance: the budget that the whole module's outputs must meet.
        timed: also time each layer and its replacement on the layer's own inputs, by a rough look.
        meter: what times them; scripted in tests.

    Raises:
        TargetError: no layer has a replacement.
        PlanError: the candidate's backend does not lower layers one by one.
        DataError: the data is empty, or the module rejects it.
    """
    lowered_by = None if _is_function(replace) else as_candidate(replace)  # type: ignore[arg-type]
    if lowered_by is not None:
        replace = _by_backend(lowered_by)
    assert callable(replace)
    layers = dict(module.named_modules())
    held = {p: r for p, m in layers.items() if p and (r := replace(p, m)) is not None}
    if not held:
        raise TargetError(f"none of the {len(layers)} layers of this {type(module).__name__} has a replacement")
    runner = _Runner(module, layers, held, data, tolerance or Tolerance())
    with preserved([module]):
        timings = runner.timings(meter) if timed else {}
        judged = [runner.alone(path, timings.get(path)) for path in held]
        order = sorted(judged, key=_harm, reverse=True)
        left, comparison = runner.fewest_left([layer.path for layer in order])
    replaced = tuple(path for path in held if path not in left)
    in_order = tuple(layer.path for layer in order if layer.path in left)
    return Sensitivity(tuple(order), replaced, in_order, comparison, lowered_by)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, (Backend, type))


def _by_backend(candidate: Candidate) -> Replace:
    """Replacements by a candidate's backend. Raises PlanError if it gives none, BackendUnavailable if it can't run here."""
    registry.require(candidate.backend)
    made = getattr(registry.of(candidate), "replacement", None)
    if made is None:
        raise PlanError(
            f"backend {candidate.backend!r} lowers whole modules only; name one that lowers layers: 'torchao'"
        )
    found: Replace = made
    return found


def _folded(left: Sequence[str], replaced: Sequence[str]) -> list[str]:
    """The fewest paths that stand for all of `left` and what is beneath them, and for none of `replaced`."""
    found: list[str] = []
    for path in left:
        parts = path.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        found.append(next(p for p in prefixes if not any(r == p or r.startswith(f"{p}.") for r in replaced)))
    return list(dict.fromkeys(found))


def _harm(layer: LayerSensitivity) -> tuple[bool, float]:
    """Layers that fail alone come first, then those with the most error for the time they save."""
    off = layer.relative_l2 if layer.relative_l2 == layer.relative_l2 else float("inf")
    gain = layer.saved_ms / layer.eager_ms if layer.eager_ms else 1.0
    return not layer.within_budget, off / max(gain, 1e-3)


class _Runner:
    """Runs the module with some layers replaced, always from copies of the same items."""

    def __init__(
        self,
        module: torch.nn.Module,
        layers: Mapping[str, torch.nn.Module],
        held: Mapping[str, torch.nn.Module],
        data: Any,
        tolerance: Tolerance,
    ) -> None:
        self.module, self.layers, self.held, self.tolerance = module, layers, held, tolerance
        self.understood = understand(data, takes=takes(module, None))
        dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
        self.dtype = dtypes[0] if dtypes else None
        self.expected = self._outputs(())

    def _outputs(self, paths: Sequence[str]) -> list[Flat]:
        results = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._replaced(paths):
            torch.manual_seed(0)
            for item in self.understood.fresh_items():
                flat = flatten(run_item(self.module, None, item.args, item.kwargs))
                flat.leaves = [clone_leaf(x) if is_tensor(x) else x for x in flat.leaves]
                results.append(flat)
        return results

    @contextmanager
    def _replaced(self, paths: Sequence[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for path in paths:
                stack.callback(restore, swap(self.layers[path], "forward", self.held[path].forward))
            yield

    def compared(self, paths: Sequence[str]) -> Comparison:
        actual = self._outputs(paths)
        return compare([Call(e, a) for e, a in zip(self.expected, actual, strict=True)], self.tolerance, self.dtype)

    def alone(self, path: str, timing: tuple[float, float] | None) -> LayerSensitivity:
        before, after = timing or (None, None)
        name = type(self.layers[path]).__name__
        try:
            found = self.compared([path])
        except Exception as failure:
            why = f"{type(failure).__name__}: {failure}"
            return LayerSensitivity(path, name, float("inf"), False, before, after, why)
        fine = found.error_class != "refused"
        return LayerSensitivity(path, name, found.relative_l2, fine, before, after, found.problem or "")

    def fewest_left(self, order: Sequence[str]) -> tuple[set[str], Comparison | None]:
        """The fewest of the most harmful layers to leave alone so that the rest, replaced together, meets the budget."""
        low, high, best = 0, len(order), None
        while low < high:
            middle = (low + high) // 2
            try:
                found = self.compared(order[middle:])
                fine = found.error_class != "refused"
            except Exception:
                fine = False
            if fine:
                high, best = middle, found
            else:
                low = middle + 1
        return set(order[:low]), best

    def timings(self, meter: Callable[..., Timing]) -> dict[str, tuple[float, float]]:
        """(layer's, replacement's) median ms on one recorded input of the layer; without those that can't be timed."""
        units = [(path, self.layers[path], "forward") for path in self.held]
        recorder = Recorder(units, samples=1)
        with torch.no_grad(), recorder.recording():
            for item in self.understood.fresh_items():
                run_item(self.module, None, item.args, item.kwargs)
        result = {}
        for recording in recorder.recordings:
            sample = next((s for shape in recording.shapes.values() for s in shape.samples), None)
            if sample is None:
                continue
            args, kwargs = recording.form.arguments(sample.call(fresh=True))
            forwards = {"eager": self.layers[recording.path].forward, "replaced": self.held[recording.path].forward}
            contenders = [Contender(label, [_call(f, args, kwargs)]) for label, f in forwards.items()]
            # A replacement that can't run is named by its comparison.
            with suppress(Exception), torch.inference_mode():
                measured = meter(contenders, limits=MeasureLimits.rough()).measurements
                result[recording.path] = (measured["eager"].median_ms, measured["replaced"].median_ms)
        return result


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Any]:
    return lambda: function(*args, **kwargs)
