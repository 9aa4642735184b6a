"""Runs the cases moved to CUDA. `python tests/gpu/case_table.py LABEL 0 1` prints what becomes of each."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tuning"))

from case_run import EXPORT_NAMES, NAMES, call, close, load

from aitune_lab.capture.structure import flatten, is_tensor, unflatten
from aitune_lab.capture.tree import modules_of
from aitune_lab.errors import AituneError
from aitune_lab.runtime.installed import stats
from aitune_lab.schema import Candidate, Plan
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run, unwrap
from aitune_lab.tuning.candidates import candidate_of_label
from aitune_lab.tuning.tuner import TuneOptions

ALL = [*NAMES, *EXPORT_NAMES]


def moved(value: Any) -> Any:
    """Tensors on the GPU, whatever holds them."""
    flat = flatten(value)
    return unflatten(flat.node, [x.cuda() if is_tensor(x) else x for x in flat.leaves])


def made(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    torch.manual_seed(1)
    target, inputs, notes = load(name)()
    for module in modules_of(target).values():
        module.cuda()
    return target, [moved(item) for item in inputs], notes


def outputs(target: Any, inputs: list[Any], drain: bool) -> list[Any]:
    torch.manual_seed(7)
    with torch.no_grad():
        return [call(target, item, drain) for item in inputs]


def run_on_gpu(name: str, candidate: Candidate) -> tuple[str, list[str]]:
    """(`right`, `eager`, `not for CUDA` or `WRONG`, reasons): tuned with one candidate, compared with an untouched copy."""
    drain = bool(load(name)()[2].get("drain"))
    plain, plain_inputs, notes = made(name)
    try:
        expected = outputs(plain, plain_inputs, drain)
    except Exception as error:
        return "not for CUDA", [str(error).partition("\n")[0]]
    target, inputs, _ = made(name)
    reasons: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # On the scripted clock everything is faster than eager: what is tested here is rightness.
            options = TuneOptions(meter=ScriptedMeter(), backends=(candidate,), end_to_end=False)
            result = run(make_tuner(target, inputs, Plan(), options))
            reasons += [t.reason for t in result.trials.values() if t.reason]
            reasons += list(result.failures.values())
        except AituneError as error:
            reasons.append(str(error))
        fresh = made(name)[1]
        actual = outputs(target, fresh, drain)
    rtol, atol = max(notes.get("rtol", 1e-4), 1e-3), max(notes.get("atol", 1e-5), 1e-4)
    differences = [close(e, a, rtol, atol) for e, a in zip(expected, actual, strict=True)]
    wrong = [d for d in differences if d is not None]
    dispatched = stats(target).dispatched
    unwrap(target)
    if wrong and notes.get("compare") != "check":
        return "WRONG", wrong + reasons
    return ("right" if dispatched else "eager"), reasons


def main(label: str, part: int, parts: int) -> None:
    """Run every `parts`-th case from `part` on, and print a line for each."""
    candidate = candidate_of_label(label)
    for name in ALL[part::parts]:
        try:
            verdict, reasons = run_on_gpu(name, candidate)
        except Exception as error:
            verdict, reasons = "ERROR", [f"{type(error).__name__}: {error}"]
        print(f"{label} | {name} | {verdict} | {'; '.join(reasons)[:160]}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
