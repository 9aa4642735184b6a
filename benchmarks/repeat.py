"""What does a second tune of the same model cost, in a new process?

Tunes a trained sentence encoder twice, each time in a process of its own, with one store. The second must build nothing,
measure nothing, choose the same, and take at most 2 seconds beyond imports and loading the winners. What other load
disturbed is not kept, so the next tune measures it again: a first tune that was disturbed is repeated, up to 3 times.

Run it with `python benchmarks/repeat.py` (the first tune takes minutes); `--backend NAME`, repeatable, tries only those.
It exits with 1 if the second tune did more than that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

MOST_SECONDS = 2.0
FIRST_TUNES = 3
RUNTIMES = {"onnxruntime": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",), "inductor": ()}


def tune_once(store: str, backends: list[str]) -> dict[str, Any]:
    """One tune in this process: what was chosen, what was done, and how long it took beside imports and loading."""
    from aitune_lab import demo
    from aitune_lab.schema import Plan
    from aitune_lab.tuning.api import make_tuner, run
    from aitune_lab.tuning.options import TuneOptions

    for name in backends:
        for package in RUNTIMES.get(name, ()):
            importlib.import_module(package)
    encoder, data = demo.load_encoder(), list(demo.calls().values())
    start = time.perf_counter()
    options = TuneOptions(backends=tuple(backends), store=store)
    result = run(make_tuner(encoder, data, Plan(), options))
    seconds = time.perf_counter() - start
    return {
        "choices": [[choice.path, choice.candidate.label, choice.speedup] for choice in result.choices],
        "counts": asdict(result.counts),
        "seconds": seconds,
        "seconds_beyond_loading": seconds - result.counts.load_seconds,
        "end_to_end": result.end_to_end.sentence if result.end_to_end is not None else "",
    }


def in_a_process(store: str, backends: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--store", store, *(f"--backend={name}" for name in backends)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def summary(name: str, told: dict[str, Any]) -> str:
    """One tune in two lines: what it did and took, and what it chose."""
    counts = told["counts"]
    picks = ", ".join(f"{path or '(model)'}: {label}" for path, label, _ in told["choices"])
    return (
        f"{name} tune: {counts['builds']} builds, {counts['measurements']} measurements, {counts['loads']} loads; "
        f"{told['seconds']:.1f} s, {told['seconds_beyond_loading']:.2f} s of it beside {counts['load_seconds']:.1f} s of "
        f"loading winners\n  {picks}; {told['end_to_end']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="try only this backend (default: onnxruntime, inductor)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    backends = options.backend or ["onnxruntime", "inductor"]
    if options.store:
        print(json.dumps(tune_once(options.store, backends)))
        return 0
    with tempfile.TemporaryDirectory() as store:
        for _ in range(FIRST_TUNES):
            first = in_a_process(store, backends)
            print(summary("first", first), flush=True)
            if not first["disturbed"]:
                break
            print(f"  not all of it is kept: {first['disturbed']}", flush=True)
        second = in_a_process(store, backends)
        print(summary("second", second), flush=True)
    counts = second["counts"]
    good = (
        counts["builds"] == counts["measurements"] == 0
        and second["choices"] == first["choices"]
        and second["seconds_beyond_loading"] <= MOST_SECONDS
    )
    if options.json:
        options.json.write_text(json.dumps({"first": first, "second": second}, indent=2), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
