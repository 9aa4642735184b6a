"""Runs the cases moved to CUDA, and prints what becomes of each.

    python tests/gpu/case_table.py --backend tensorrt                    # in a CUDA graph and without
    python tests/gpu/case_table.py "tensorrt[float16, cuda graph]" --cases g01_fp16_norm_eps_vanishes
    python tests/gpu/case_table.py "inductor[cuda graph]" --workers 6 --seconds 90
    python tests/gpu/case_table.py "tensorrt[optimization_level=0, cuda graph]" --column tensorrt --keep

With `--column` the outcomes are compared with those in outcomes.toml, which the tests expect; with `--keep` they replace them.
Every worker is a process of its own, started anew after a crash or a case that took too long.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tuning"))

from case_run import EXPORT_NAMES, NAMES, call, close, load

from aitune_lab.capture.structure import flatten, is_tensor, unflatten
from aitune_lab.capture.tree import modules_of
from aitune_lab.errors import AituneError
from aitune_lab.runtime.installed import stats
from aitune_lab.runtime.variant import AUTOCAST
from aitune_lab.schema import Candidate, Plan, Tolerance
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run, unwrap
from aitune_lab.tuning.candidates import candidate_of_label
from aitune_lab.tuning.tuner import TuneOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALL = [*NAMES, *EXPORT_NAMES]
LOWER_BUDGET = 0.05
"""Relative error allowed to a lower precision."""
WRONG = ("WRONG", "CRASH")
OUTCOMES = Path(__file__).with_name("outcomes.toml")


def outcomes() -> dict[str, dict[str, str]]:
    """For each case what becomes of it with each column's candidate, as the tests expect it.

    `right or eager` stands where that depends on times: whether a part of a module that stays on eager is tried by itself is
    decided by its share of the module's time.
    """
    return tomllib.loads(OUTCOMES.read_text(encoding="utf-8"))


def as_expected(verdict: str, expected: str) -> bool:
    return verdict in expected.split(" or ")


def keep(column: str, verdicts: Mapping[str, str]) -> None:
    """Write a column of outcomes.toml anew where there are verdicts that it doesn't hold."""
    table = outcomes()
    for name, verdict in verdicts.items():
        row = table.setdefault(name, {})
        if not as_expected(verdict, row.get(column, "")):
            row[column] = verdict
    parts = [
        f"[{name}]\n" + "".join(f'{key} = "{value}"\n' for key, value in row.items()) for name, row in table.items()
    ]
    OUTCOMES.write_text("\n".join(parts), encoding="utf-8")


def compare(column: str, verdicts: Mapping[str, str]) -> int:
    """Print where verdicts differ from the table; gives how many do."""
    table = outcomes()
    others = {name: found for name, found in verdicts.items() if not as_expected(found, table[name].get(column, ""))}
    for name, found in others.items():
        print(f"{name}: {found}, but {column} in {OUTCOMES.name} says {table[name].get(column, 'nothing')}")
    return len(others)


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
    """(`right`, `eager`, `not for CUDA` or `WRONG`, reasons): tuned with one candidate, compared with an untouched copy.

    Of a candidate in a lower precision what counts is its relative error, and the own check of cases that are about float16:
    those of others allow for roundings of the module's own dtype only.
    """
    drain = bool(load(name)()[2].get("drain"))
    plain, plain_inputs, notes = made(name)
    try:
        expected = outputs(plain, plain_inputs, drain)
    except Exception as error:
        return "not for CUDA", [str(error).partition("\n")[0]]
    target, inputs, _ = made(name)
    lower = LOWER_BUDGET if candidate.precision in AUTOCAST else None
    reasons: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # On the scripted clock everything is faster than eager: what is tested here is rightness.
            options = TuneOptions(meter=ScriptedMeter(), backends=(candidate,), end_to_end=False)
            result = run(make_tuner(target, inputs, Plan(tolerance=Tolerance(max_relative_error=lower)), options))
            reasons += [t.reason for t in result.trials.values() if t.reason]
            reasons += list(result.failures.values())
        except AituneError as error:
            reasons.append(str(error))
        fresh = made(name)[1]
        actual = outputs(target, fresh, drain)
    rtol, atol = max(notes.get("rtol", 1e-4), 1e-3), max(notes.get("atol", 1e-5), 1e-4)
    differences = [close(e, a, rtol, atol, lower) for e, a in zip(expected, actual, strict=True)]
    wrong = [d for d in differences if d is not None]
    dispatched = stats(target).dispatched
    unwrap(target)
    if dispatched and lower and "check" in notes and str(notes["kind"]).startswith("fp16"):
        try:
            notes["check"](load(name)()[0], on_cpu(fresh), on_cpu(actual))
        except AssertionError as error:
            wrong.append(f"its own check: {error}")
    if wrong and (lower or notes.get("compare") != "check"):
        return "WRONG", wrong + reasons
    return ("right" if dispatched else "eager"), reasons


def on_cpu(value: Any) -> Any:
    flat = flatten(value)
    return unflatten(flat.node, [x.cpu() if is_tensor(x) else x for x in flat.leaves])


def serve(label: str) -> None:
    """A worker: names of cases on its input, a line of JSON for each on its output."""
    candidate = candidate_of_label(label)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what cases and libraries print goes to the log
    for line in sys.stdin:
        try:
            verdict, reasons = run_on_gpu(line.strip(), candidate)
        except Exception as error:
            verdict, reasons = "ERROR", [f"{type(error).__name__}: {error}"]
        print(json.dumps([verdict, reasons]), file=answers, flush=True)


class Worker:
    """A child process that runs cases, and is started anew when it has ended or was ended."""

    def __init__(self, label: str, seconds: float, log: Path) -> None:
        self.label, self.seconds, self.log = label, seconds, log
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def run(self, name: str) -> tuple[str, list[str]]:
        if self._child is None:
            self._start()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        child.stdin.write(name + "\n")
        child.stdin.flush()
        try:
            answer = self._answers.get(timeout=self.seconds)
        except queue.Empty:
            child.kill()
            answer = "timeout"
        if answer.startswith("["):
            verdict, reasons = json.loads(answer)
            if any("CUDA error" in reason for reason in reasons):  # nothing after it would work in that process
                self.close()
            return verdict, reasons
        code = child.wait()
        self._child = None
        if answer == "timeout":
            return "TIMEOUT", [f"more than {self.seconds:.0f} s"]
        return "CRASH", [f"the process ended with {code}"]

    def _start(self) -> None:
        command = [sys.executable, __file__, self.label, "--serve"]
        with self.log.open("a", encoding="utf-8") as log:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        answers: queue.Queue[str] = queue.Queue()
        self._child, self._answers = child, answers

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                answers.put(line)
            answers.put("ended")

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def table(labels: Sequence[str], names: Sequence[str], workers: int, seconds: float, logs: Path) -> list[list[str]]:
    """(label, case, verdict, reasons) of every case, as they come."""
    jobs: queue.Queue[tuple[str, str]] = queue.Queue()
    for label in labels:
        for name in names:
            jobs.put((label, name))
    rows: list[list[str]] = []

    def work(number: int) -> None:
        worker: Worker | None = None
        while True:
            try:
                label, name = jobs.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.label != label:
                if worker is not None:
                    worker.close()
                worker = Worker(label, seconds, logs / f"worker-{number}.log")
            began = time.monotonic()
            verdict, reasons = worker.run(name)
            shown = "; ".join(reasons)[:160].replace("\n", " ")
            rows.append([label, name, verdict, "; ".join(reasons)])
            print(f"{label} | {name} | {verdict} | {time.monotonic() - began:.0f} s | {shown}", flush=True)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("labels", nargs="*", help="candidates, such as 'inductor[cuda graph]'")
    parser.add_argument("--backend", help="the same as this backend's name, and its name with [cuda graph]")
    parser.add_argument("--cases", nargs="+", default=ALL, choices=ALL, metavar="CASE")
    parser.add_argument("--workers", type=int, default=4, help="processes at once")
    parser.add_argument("--seconds", type=float, default=120.0, help="for a case")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--column", help="of outcomes.toml, to compare the (one) label's outcomes with")
    parser.add_argument("--keep", action="store_true", help="write them there instead")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.labels[0])
        return 0
    labels = [*options.labels, *([options.backend, f"{options.backend}[cuda graph]"] if options.backend else [])]
    if (options.keep and not options.column) or (options.column and len(labels) != 1):
        parser.error("--keep needs --column, and --column needs one label")
    logs = Path(tempfile.mkdtemp(prefix="aitune-lab-cases-"))
    rows = table(labels, options.cases, options.workers, options.seconds, logs)
    for label in labels:
        for title, names in (("cases", NAMES), ("export", EXPORT_NAMES)):
            found = Counter(row[2] for row in rows if row[0] == label and row[1] in names)
            print(f"{label}, {title}: " + ", ".join(f"{count} {verdict}" for verdict, count in found.most_common()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"logs in {logs}")
    wrong = sum(row[2] in WRONG for row in rows)
    if options.column:
        verdicts = {name: verdict for _, name, verdict, _ in rows}
        if options.keep:
            keep(options.column, verdicts)
        else:
            wrong += compare(options.column, verdicts)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
