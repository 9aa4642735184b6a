"""Runs the cases through a backend and says of each signature: right, refused with a reason, failed, or values off (which the
comparison of a tuning refuses)."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import CASES, check, jobs_of, load_case, split

from aitune_lab.backends.base import Backend
from aitune_lab.capture.probe import probe
from aitune_lab.capture.recorder import Recorder
from aitune_lab.capture.signature import signatures_of
from aitune_lab.errors import Refused

NAMES = sorted(p.stem for p in CASES.glob("[0-9]*.py"))
EXPORT_NAMES = sorted(p.stem for p in (CASES / "export").glob("g*.py"))

METHODS = {"46_non_forward_methods": ("encode", "decode")}
NOT_TUNED = {
    "17_train_mode_bn_dropout": "training mode",
    "34_generator_output": "forward is a generator",
}
"""What the tuner keeps on eager before it asks any backend."""


@dataclass
class Outcome:
    """What became of one signature."""

    case: str
    signature: str
    verdict: str
    reason: str = ""
    uncovered: int = 0


def resolve(target: Any, path: str) -> torch.nn.Module:
    for step in path.split(".") if path else ():
        if step.isdigit():
            target = target[int(step)]
        else:
            target = target[step] if isinstance(target, dict) else getattr(target, step)
    return target


def outcomes(case: str, backend: Backend) -> Iterator[Outcome]:
    """Record the case as a user's run, build for each signature, compare on all samples."""
    if case in NOT_TUNED:
        yield Outcome(case, "", "refused", NOT_TUNED[case])
        return
    target, items, notes = load_case(case)
    units = [(p, resolve(target, p), m) for p in notes.get("targets", [""]) for m in METHODS.get(case, ("forward",))]
    recorder = Recorder(units)
    with recorder.recording(), torch.no_grad():
        for item in items:
            args, kwargs = split(item)
            getattr(target, notes.get("call", "__call__"))(*args, **kwargs)
    for recording in recorder.recordings:
        signatures = [probe(recording, s) for s in signatures_of(recording)]
        with tempfile.TemporaryDirectory() as folder:
            for job in jobs_of(recording, signatures, backend, Path(folder)):
                yield _outcome(case, job, backend, notes)


def _outcome(case: str, job: Any, backend: Backend, notes: dict[str, Any]) -> Outcome:
    label = job.signature.label
    try:
        executable = backend.build(job)
    except Refused as error:
        return Outcome(case, label, "refused", str(error))
    except Exception as error:
        return Outcome(case, label, "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    try:
        check(executable, job, max(notes.get("rtol", 1e-4), 1e-4), max(notes.get("atol", 1e-5), 1e-5))
        uncovered = executable.uncovered() if executable.uncovered else 0
        return Outcome(case, label, "right", "; ".join(executable.notes), uncovered)
    except AssertionError as error:
        return Outcome(case, label, "values off", str(error).strip().replace("\n", " ")[:200])
    except Exception as error:
        return Outcome(case, label, "values off", f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        executable.close()


def table(backend: Backend, names: list[str]) -> list[Outcome]:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    return [outcome for name in names for outcome in outcomes(name, backend)]


if __name__ == "__main__":
    import sys
    import time

    from aitune_lab.backends import registry

    backend = registry.get(sys.argv[1])()
    for name in sys.argv[2:] or [*NAMES, *EXPORT_NAMES]:
        name = next(n for n in (*NAMES, *EXPORT_NAMES) if n.startswith(name))
        start = time.perf_counter()
        for o in outcomes(name, backend):
            print(f"{o.verdict:8} {o.case:28} {o.signature[:60]:60} uncovered={o.uncovered} {o.reason}", flush=True)
        print(f"   {time.perf_counter() - start:.1f} s", flush=True)
