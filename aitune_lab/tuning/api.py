"""`wrap`, `Module`, `tune`, `unwrap`: the verbs that people type."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..backends import registry
from ..capture.inspector import InspectedModule, inspect
from ..capture.signature import DynamicShapes
from ..capture.tree import modules_of, require_modules, tuned_methods
from ..errors import TargetError
from ..isolation import Isolation, default_isolation
from ..runtime.installed import installed_in, uninstall_all
from ..runtime.originals import Originals
from ..schema import Event, Plan, Rule, StrategyConfig
from .candidates import with_candidates
from .cut import checked_modules
from .options import BackendLike, TuneOptions, backends_of
from .planfile import check_backends, read_plan
from .progress import line
from .recall import StoreLike
from .result import TuneResult
from .session import journaled
from .strategies import Strategy, strategy_of
from .tuner import Tuner

T = TypeVar("T")

_FAILED = "failed; the target is as it was"
"""The error itself is raised right after this line."""


@dataclass(frozen=True)
class _Wish:
    """What `wrap` or `Module` noted for a module; nothing runs differently until `tune`."""

    method: str | None = None
    strategy: StrategyConfig | None = None
    dynamic_shapes: DynamicShapes = field(default_factory=dict)


_wishes: weakref.WeakKeyDictionary[torch.nn.Module, dict[str | None, _Wish]] = weakref.WeakKeyDictionary()


def wrap(
    target: T,
    modules: Sequence[InspectedModule | torch.nn.Module | str] | None = None,
    *,
    strategy: Strategy | StrategyConfig | str | None = None,
    dynamic_shapes: DynamicShapes | None = None,
) -> T:
    """Note which modules of a target to tune; gives the target itself. Nothing runs differently until `tune`.

    Args:
        target: a module or any object that holds modules.
        modules: as `Inspection.get_modules()` gives them, modules, or paths; None means the target itself.
        strategy: how to choose among candidates for these modules (default: the plan's).
        dynamic_shapes: declared ranges, leaf path to axis to `BatchDim` or `DynamicDim`.

    Raises:
        TargetError: a module does not belong to the target, or the target holds none.
        PlanError: the strategy isn't known.
    """
    config = strategy_of(strategy).config() if strategy is not None else None
    by_path = {p: item.module for item in require_modules(target) for p in item.paths}
    held = {id(m) for m in by_path.values()}
    chosen: Sequence[Any] = modules if modules is not None else [target]
    notes: list[tuple[torch.nn.Module, str | None]] = []
    for item in chosen:
        method = item.method if isinstance(item, InspectedModule) else None
        module = item.module if isinstance(item, InspectedModule) else item
        if isinstance(item, str):
            module = by_path.get(item)
            parent, _, name = item.rpartition(".")
            if module is None and parent in by_path and name in tuned_methods(type(by_path[parent])):
                module, method = by_path[parent], name
        if not isinstance(module, torch.nn.Module) or id(module) not in held:
            raise TargetError(f"modules must be among those of the target, {sorted(by_path)[:20]}, but got {item!r}")
        notes.append((module, method))
    for module, method in notes:
        _wishes.setdefault(module, {})[method] = _Wish(method, config, dynamic_shapes or {})
    return target


def Module(
    module: T,
    *,
    strategy: Strategy | StrategyConfig | str | None = None,
    dynamic_shapes: DynamicShapes | None = None,
) -> T:
    """Note that a module is to be tuned as a whole; gives the module itself, of the same class and identity."""
    return wrap(module, None, strategy=strategy, dynamic_shapes=dynamic_shapes)


def unwrap(target: T) -> T:
    """Take everything back: tuned methods, watches, wishes. The target is exactly as it was before."""
    uninstall_all(target)
    for module in modules_of(target).values():
        _wishes.pop(module, None)
    return target


def tune(
    target: Any,
    data: Any,
    *,
    plan: Plan | str | Path | None = None,
    strategy: Strategy | StrategyConfig | str | None = None,
    backends: Sequence[BackendLike] | str | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_batches_per_batch_size: int = 2,
    inference_function: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    on_module_failure: Literal["eager", "raise"] = "eager",
    on_miss: Literal["original", "error"] = "original",
    weights: Literal["watched", "frozen"] = "watched",
    metric: Callable[..., Any] | None = None,
    end_to_end: bool = True,
    memory_limit: int | None = None,
    originals: Originals = "device",
    store: StoreLike = "auto",
    retry: bool = False,
    isolation: Isolation | None = None,
    dry_run: bool = False,
    progress: bool | Callable[[Event], None] = True,
) -> TuneResult:
    """Find the fastest right backend for the wrapped modules (or those that `inspect` proposes) and install it.

    After this, calls of the target that fit what was recorded run the chosen executables; all others run the
    original. A failure, an interrupt or a cancel leaves the target as it was.

    Args:
        target: a module or any object that holds modules.
        data: a tensor, a list of tensors, tuples, dicts or strings, a Dataset, a DataLoader, or a function that
            returns one. Without `batch_sizes` each item is one call as it stands.
        plan: pins, exclusions, tolerances, limits: a `Plan` or the path of its TOML file.
        strategy: the default strategy, in place of the plan's.
        backends: what to try, by name, class, instance or candidate; default: all that can run here.
        batch_sizes: collate the items, each one sample without batch axis, to these sizes.
        max_batches_per_batch_size: different batches for each size.
        inference_function: called with an item's arguments in place of the target.
        device: move target and data there first (`target.to(device)`).
        on_module_failure: a module that can't be tuned stays eager, or raises.
        on_miss: a call that no executable may answer (outside the tuned signatures, with gradients wanted, in training
            mode, after weights changed) runs the original, or raises SignatureMiss.
        weights: `"frozen"` is the promise that weights won't change, and saves watching them.
        metric: `metric(outputs)` or `metric(eager_outputs, tuned_outputs)`, which gives a number; shown beside the
            comparison of the whole target. Outputs are a list with what the target returned for each item.
        end_to_end: compare and time the tuned target as a whole (at most two passes over the data and a few seconds).
        memory_limit: bytes that the target's weights and executables may take together; a candidate that would need
            more is refused with its figures.
        originals: where the weights of tuned modules are afterwards. `"cpu"` moves them to the host and back for each
            call that no executable answers; `"drop"` frees them, and such a call raises SignatureMiss.
        store: where trials are kept and looked up, so that nothing is computed twice: `"auto"` is the cache folder,
            None is nowhere.
        retry: try again what failed in earlier runs, or never finished.
        isolation: `"auto"` builds candidates and first calls them in child processes, which may crash and hang, but for
            those on a GPU; `"all"` those too; `"off"` builds in this process. Default: what `AITUNE_LAB_ISOLATION` says, else `"auto"`.
        dry_run: say what would be tried, and try nothing.
        progress: print lines to stderr as things happen, or a function that gets every event.

    Raises:
        TargetError: no modules, or none that can be tuned.
        DataError: empty data, or data that the target rejects.
        PlanError: unknown paths, backends or strategies; pins that can't be kept.
    """
    held = plan if isinstance(plan, Plan) else read_plan(plan) if plan is not None else Plan()
    if strategy is not None:
        held = replace(held, strategy=strategy_of(strategy).config())
    if memory_limit is not None:
        held = replace(held, limits=replace(held.limits, memory_bytes=memory_limit))
    if device is not None:
        target, data = moved(target, data, torch.device(device))
    options = TuneOptions(
        inference_function=inference_function,
        batch_sizes=tuple(batch_sizes) if batch_sizes is not None else None,
        max_batches_per_batch_size=max_batches_per_batch_size,
        backends=backends_of(backends),
        on_module_failure=on_module_failure,
        on_miss=on_miss,
        weights=weights,
        metric=metric,
        end_to_end=end_to_end,
        originals=originals,
        store=store,
        retry=retry,
        isolation=isolation or default_isolation(),
        dry_run=dry_run,
    )
    tuner = make_tuner(target, data, held, options)
    return run(tuner, progress)


def make_tuner(target: Any, data: Any, plan: Plan, options: TuneOptions) -> Tuner:
    """A tuner that heeds what `wrap` noted. Raises what `inspect` raises, and before it PlanError for unknown backends."""
    check_backends(with_candidates(plan), registry.names())
    wishes = [(m, wish) for m in modules_of(target).values() for wish in _wishes.get(m, {}).values()]
    if not wishes:
        return Tuner(target, data, plan=plan, options=options)
    inspection = inspect(
        target,
        data,
        inference_function=options.inference_function,
        iterations=1,
        batch_sizes=options.batch_sizes,
        max_batches_per_batch_size=options.max_batches_per_batch_size,
    )
    modules: list[InspectedModule] = []
    rules: list[Rule] = []
    shapes: dict[str, Mapping[str, Any]] = {}
    for module, wish in wishes:
        paths = [p for p, m in inspection._modules.items() if m is module]
        for item in checked_modules(target, paths, inspection):
            if wish.method in (None, item.method):
                modules.append(item)
                shapes[item.path] = wish.dynamic_shapes
                if wish.strategy is not None:
                    rules.append(Rule(item.path, "strategy", strategy=wish.strategy))
    plan = replace(plan, rules=(*plan.rules, *rules))
    return Tuner(
        target, data, plan=plan, modules=modules, inspection=inspection, options=replace(options, dynamic_shapes=shapes)
    )


def run(
    tuner: Tuner, progress: bool | Callable[[Event], None] = False, *, journal: str | Path | None = None
) -> TuneResult:
    """Drive a tuner to its end. With `progress=True` a line for each notable event goes to stderr.

    Each event is written to the journal, if a file is named, before anything else learns of it. An interrupt leaves
    the target untuned, whenever it comes.
    """
    try:
        return _driven(tuner, progress, journal)
    except KeyboardInterrupt:
        tuner.take_back()
        raise


def _driven(tuner: Tuner, progress: bool | Callable[[Event], None], journal: str | Path | None) -> TuneResult:
    events = []
    for event in journaled(tuner.steps(), journal) if journal is not None else tuner.steps():
        events.append(event)
        if callable(progress):
            progress(event)
        elif progress and (text := _FAILED if event.kind == "run_failed" else line(event)):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
    return result_of(tuner, events)


def result_of(tuner: Tuner, events: Sequence[Event]) -> TuneResult:
    """What a run that has ended came to, also after `apply_best`. `events` are those that it gave."""
    last = events[-1]
    return TuneResult(
        tuple(tuner.choices),
        dict(tuner.trials),
        dict(tuner.failures),
        tuner.plan,
        tuple(events),
        tuner.understood,
        float(last.data.get("seconds", last.t)),
        dict(tuner.estimated),
        tuner.options.dry_run,
        tuner.end_to_end,
        {entry.signature.key: entry.signature for item in installed_in(tuner.target) for entry in item.entries},
        replace(tuner.counts),
    )


def moved(target: Any, data: Any, device: torch.device) -> tuple[Any, Any]:
    """Target and data on a device. Raises TargetError for a target that has no `.to()`."""
    if not hasattr(target, "to"):
        raise TargetError(f"a {type(target).__name__} has no .to(); move its modules to {device} and leave device out")
    target.to(device)
    return target, _to(data, device)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_to(v, device) for v in value)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    return value
