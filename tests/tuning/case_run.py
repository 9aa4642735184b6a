"""Runs a case as a user would: tune on its inputs, call with fresh ones, compare with an untouched copy."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

from aitune_lab.capture.data import as_call
from aitune_lab.capture.structure import flatten, is_tensor
from aitune_lab.errors import AituneError, AituneWarning, TargetError
from aitune_lab.measure.benchmark import Timing
from aitune_lab.runtime.installed import stats
from aitune_lab.schema import Measurement, Plan, Tolerance
from aitune_lab.tuning.api import make_tuner, run, unwrap
from aitune_lab.tuning.candidates import candidate_of_label
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.strategies import OneBackendStrategy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = Path(__file__).parent.parent / "cases"
NAMES = sorted(p.stem for p in CASES.glob("[0-9]*.py"))
EXPORT_NAMES = sorted(p.stem for p in (CASES / "export").glob("g*.py"))
EIGHT_BIT_ERRORS = {"torchao": 0.05, "onnxruntime_int8": 0.05}
"""Relative L2 errors allowed to each module that computes in 8 bits."""
WHOLE = 2.0
"""How many times that a target of several such modules may be off: what stands after them, such as rounding, adds to it."""
LABELS = {"onnxruntime_int8": "onnxruntime[quantization=int8dyn]"}
"""Candidates that have a row of their own, beside their backend's plain one."""


@dataclass
class Outcome:
    """What became of a case.

    `verdict` is `right` (the backend answered every call of what was to be tuned), `partly` (calls of some signatures),
    `children` (only calls of modules beneath), `eager` or `WRONG`; `dispatched` counts calls that it answered.
    """

    case: str
    verdict: str
    dispatched: int = 0
    calls: int = 0
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load(name: str) -> Any:
    """The case's `make`."""
    path = next(CASES.rglob(f"{name}.py"))
    known = sys.modules.get(f"case_{path.stem}")
    if known is None:
        spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        known = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = known
        spec.loader.exec_module(known)
    return known.make


def instant(contenders: Any, **_: Any) -> Timing:
    """Every contender takes 1 ms: what is tested here is rightness."""
    figures = Measurement(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 12, 1, "scripted", 1)
    return Timing({c.label: figures for c in contenders}, {c.label: (1.0,) * 12 for c in contenders})


def call(target: Any, item: Any, drain: bool) -> Any:
    args, kwargs = as_call(item)
    result = target(*args, **kwargs)
    return list(result) if drain else result


def close(expected: Any, actual: Any, rtol: float, atol: float, relative_l2: float | None = None) -> str | None:
    """How two outputs differ; None if they don't. With `relative_l2` floating-point tensors may be off by so much."""
    a, b = flatten(expected), flatten(actual)
    if a.node != b.node:
        return f"structure: {a.node} and {b.node}"
    for path, x, y in zip(a.paths, a.leaves, b.leaves, strict=True):
        if is_tensor(x):
            if not is_tensor(y) or x.dtype != y.dtype or x.shape != y.shape:
                return f"{path}: {x.dtype} {tuple(x.shape)} became {getattr(y, 'dtype', type(y))}"
            if relative_l2 is not None and x.is_floating_point():
                if not (y - x).nan_to_num().double().norm() <= relative_l2 * x.nan_to_num().double().norm():
                    return f"{path}: relative L2 error above {relative_l2}"
            elif not torch.allclose(x.double(), y.double(), rtol=rtol, atol=atol, equal_nan=True):
                return f"{path}: off by {(x.double() - y.double()).abs().nan_to_num().max().item():.3g}"
        elif isinstance(x, float) and isinstance(y, float):
            if abs(x - y) > atol + (relative_l2 or rtol) * abs(x):
                return f"{path}: {x!r} became {y!r}"
        elif type(x) is not type(y) or (isinstance(x, (int, str, bool, type(None))) and x != y):
            return f"{path}: {x!r} became {y!r}"
    return None


def run_case(name: str, backend: str) -> Outcome:
    """Tune a case on one backend and call the tuned target with the inputs of a fresh copy."""
    make = load(name)
    torch.manual_seed(1)
    target, inputs, notes = make()
    outcome = Outcome(name, "eager")
    lossy = EIGHT_BIT_ERRORS.get(backend)
    candidate = candidate_of_label(LABELS.get(backend, backend))
    strategy = OneBackendStrategy(candidate.backend, **(dict(candidate.options) if backend in LABELS else {}))
    plan = Plan(strategy=strategy.config(), tolerance=Tolerance(max_relative_error=lossy))
    # Of a backend whose forms are all in 8 bits the plain one is tried, by name.
    options = TuneOptions(meter=instant, backends=(candidate,) if lossy else None)
    tuner = make_tuner(target, inputs, plan, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        try:
            result = run(tuner)
        except TargetError as error:
            outcome.reasons.append(str(error))
            result = None
        except AituneError as error:
            outcome.reasons.append(f"{type(error).__name__}: {error}")
            result = None
        if result is not None:
            outcome.reasons += [f"{c.path}: {c.reason}" for c in result.choices if c.candidate.backend == "eager"]
            outcome.reasons += [f"{p}: {r}" for p, r in result.failures.items()]
            outcome.notes += [n for t in result.trials.values() for n in t.notes]
        plain, plain_inputs, _ = make()
        _, fresh_inputs, fresh_notes = make()
        drain = bool(notes.get("drain"))
        with torch.no_grad():
            torch.manual_seed(7)
            expected = [call(plain, item, drain) for item in plain_inputs]
            torch.manual_seed(7)
            actual = [call(target, item, drain) for item in fresh_inputs]
        problems = []
        if notes.get("compare") != "check" or lossy:
            rtol, atol = notes.get("rtol", 1e-4), notes.get("atol", 1e-5)
            allowed = WHOLE * lossy if lossy else None
            differences = [close(e, a, rtol, atol, allowed) for e, a in zip(expected, actual, strict=True)]
            problems += [d for d in differences if d is not None]
        # The cases' own checks ask for more than 8 bits give.
        if fresh_notes.get("check") is not None and not lossy:
            try:
                with torch.no_grad():
                    fresh_notes["check"](target, fresh_inputs, actual)
            except AssertionError as error:
                problems.append(f"check: {error}")
        counted = stats(target)
    outcome.dispatched = counted.dispatched
    outcome.calls = sum(s.calls for s in counted.signatures) + counted.misses
    outcome.reasons += [
        f"{m.path}: {n} by the original: {r}" for m in counted.methods for r, n in m.to_original.items()
    ]
    if problems:
        outcome.verdict = "WRONG"
        outcome.reasons = problems + outcome.reasons
    elif outcome.dispatched > 0:
        own = {m.path for m in tuner.inspection.get_modules()} if tuner.inspection is not None else set()
        mine = [s for s in counted.signatures if s.path in own]
        answered = sum(s.dispatched for s in mine if s.candidate != "eager")
        whole = answered == outcome.calls
        outcome.verdict = "right" if whole else "partly" if answered > 0 else "children"
    elif not outcome.reasons:
        outcome.reasons = [f"chosen, but every call ran the original: {'; '.join(outcome.notes)}"]
    unwrap(target)
    return outcome


OUTCOMES = CASES / "outcomes.toml"


def expected_outcomes() -> dict[str, dict[str, str]]:
    """The table under version control: case → backend → `right`, or `eager: reason`."""
    return tomllib.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}


def in_words(outcome: Outcome) -> str:
    """A row of the table. Measured figures and addresses are left out: they differ from run to run."""
    if outcome.verdict == "right":
        return "right"
    reason = outcome.reasons[0].partition("can't be used: ")[2] or outcome.reasons[0] if outcome.reasons else ""
    reason = re.sub(r"(\d+\.\d+(e-?\d+)?)", "#", reason.partition("\n")[0])[:160]
    return f"{outcome.verdict}: {reason}"


def main(backend: str, names: list[str]) -> None:
    """Run cases (with no names all of them), print a line for each, and write it into the table."""
    logging.disable(logging.WARNING)
    table = expected_outcomes()
    total: dict[str, int] = {}
    for case in names or [*NAMES, *EXPORT_NAMES]:
        start = time.perf_counter()
        outcome = run_case(case, backend)
        total[outcome.verdict] = total.get(outcome.verdict, 0) + 1
        table.setdefault(case, {})[backend] = in_words(outcome)
        seconds = time.perf_counter() - start
        print(f"{case:32s} {outcome.dispatched}/{outcome.calls} {seconds:.0f}s {in_words(outcome)}", flush=True)
        OUTCOMES.write_text(tomli_w.dumps(dict(sorted(table.items()))), encoding="utf-8")
    print(total)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
