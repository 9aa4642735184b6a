"""The end of a run: what its choices install, what they should come to, and the check of the target as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.data import understand
from ..capture.inspector import Inspection, takes
from ..capture.structure import flatten
from ..capture.tree import find_modules, outermost
from ..errors import AituneWarning
from ..runtime.installed import Installed, prepare
from ..schema import Plan
from .candidates import EAGER
from .endtoend import EndToEnd, check
from .identity import flat_digest, function_digest
from .keys import check_key
from .options import TuneOptions
from .recall import CountingMeter, Recall
from .trial import as_error
from .units import Unit

MAX_PASS_SECONDS = 30.0
"""Targets that take longer for one pass over the data are not checked end to end."""


def prepared(units: Sequence[Unit], plan: Plan, options: TuneOptions) -> list[Installed]:
    """The dispatch of every method with a choice other than eager."""
    return [
        prepare(
            unit.module.module,
            unit.module.method,
            unit.path,
            [race.installed() for race in unit.races],
            plan,
            on_miss=options.on_miss,
            weights=options.weights,
        )
        for unit in units
        if any(choice.candidate != EAGER for choice in unit.choices)
    ]


def estimate(inspection: Inspection, units: Sequence[Unit]) -> dict[str, Any]:
    """The target's time with these choices: eager end to end minus calls × saving. An estimate until measured."""
    before = inspection.seconds_per_iteration
    saving = sum(race.saved_seconds() for unit in units for race in unit.races)
    return {
        "eager_seconds": before,
        "tuned_seconds": max(before - saving, 0.0),
        "kind": "estimate",
        "error": "unknown until measured",
    }


def check_end_to_end(
    target: Any,
    data: Any,
    seconds_per_pass: float,
    installed: Sequence[Installed],
    plan: Plan,
    options: TuneOptions,
    recall: Recall,
    weights: Callable[[torch.nn.Module], str],
) -> EndToEnd:
    """The check, or what the store has of it. What is installed is left as it is, also if it fails or is interrupted."""
    if seconds_per_pass > MAX_PASS_SECONDS:
        why = f"one pass over the data takes {seconds_per_pass:.0f} s"
        return EndToEnd(skipped=f"{why}; aitune_lab.tuning.endtoend.check(target, data) does it")
    meter = CountingMeter(options.meter, recall.counts)
    try:
        key = _key(target, data, installed, plan, options, weights) if recall.store is not None else None
        found = recall.read("check", key, EndToEnd) if key is not None else None
        if found is not None:
            recall.counts.reused += 1
            return found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AituneWarning)
            made = check(
                target,
                data,
                metric=options.metric,
                inference_function=options.inference_function,
                batch_sizes=options.batch_sizes,
                max_batches_per_batch_size=options.max_batches_per_batch_size,
                tolerance=plan.tolerance,
                max_seconds=MAX_PASS_SECONDS,
                meter=meter,
            )
        if key is not None and not meter.disturbed:
            recall.write("check", key, made)
        return made
    except KeyboardInterrupt:
        return EndToEnd(skipped="interrupted; what was chosen is in use")
    except Exception as error:
        return EndToEnd(skipped=f"it failed: {as_error(error)}")
    finally:
        for item in installed:
            item.dispatch.reset_counts()


def _key(
    target: Any,
    data: Any,
    installed: Sequence[Installed],
    plan: Plan,
    options: TuneOptions,
    weights: Callable[[torch.nn.Module], str],
) -> str | None:
    """Of the check with this data; None if the data, or what is called with it, can't be read."""
    understood = understand(
        data,
        takes=takes(target, options.inference_function),
        batch_sizes=options.batch_sizes,
        max_batches_per_batch_size=options.max_batches_per_batch_size,
    )
    calls = flat_digest([flatten((item.args, item.kwargs)) for item in understood.fresh_items()])
    if calls is None:
        return None
    pipeline = type(target).__call__ if callable(target) and not isinstance(target, torch.nn.Module) else None
    functions = (pipeline, options.inference_function, options.metric)
    calls += "".join(function_digest(f) for f in functions if f is not None)
    trials = [entry.choice.trial or entry.choice.candidate.key for item in installed for entry in item.entries]
    parts = outermost(find_modules(target))
    return check_key(trials, plan.tolerance, calls, parts, weights)
