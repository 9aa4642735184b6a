"""Where a candidate goes wrong: the first submodule whose outputs diverge, found by walking down the module tree.

Every submodule is judged on its own: the candidate is built for it alone and compared with eager on the inputs it got
while the untouched target ran. So an error that comes in with the inputs doesn't count against it. One level is looked
at at a time, in the order of execution and up to the first that diverges, and only that level's calls are recorded,
which bounds memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .._display import Printed
from ..backends.base import Backend, BuildJob
from ..capture.data import Understood, understand
from ..capture.inspector import Inspection, ModuleRow, inspect, run_item, takes
from ..capture.probe import probe, why_not
from ..capture.recorder import Recorder, Recording
from ..capture.signature import signatures_of
from ..capture.state import preserved
from ..capture.tree import find_modules, outermost
from ..errors import TargetError
from ..isolation import BuildSteps, building
from ..measure.blocks import MeasureLimits
from ..schema import Candidate, ErrorClass, LeafDifference, Tolerance, Trial, TrialStatus
from .bench import Bench
from .candidates import as_candidate, candidate_of_label
from .strategies.words import error
from .trial import as_error, finished, trial_steps

Kind = Literal["right", "wrong", "fails"]


@dataclass(frozen=True)
class BisectRow:
    """What the candidate does to one module alone, on the inputs that it got in the untouched target.

    Attributes:
        depth: levels below where the search began.
        path: the module's path; empty for the target itself.
        class_name: its class.
        status: of the trial; `"ok"` means that it was compared.
        error_class: of the worst output over all calls; None if it was not compared.
        relative_l2: of the worst output.
        allowed: the relative L2 error allowed there.
        problem: what is wrong, in a sentence with index and values; empty if it is right.
    """

    depth: int
    path: str
    class_name: str
    status: TrialStatus
    error_class: ErrorClass | None = None
    relative_l2: float | None = None
    allowed: float | None = None
    problem: str = ""

    @property
    def kind(self) -> Kind:
        """`"wrong"` is out of tolerance; `"fails"` means that it could not be built or run."""
        if self.status != "ok":
            return "fails"
        return "wrong" if self.error_class == "refused" else "right"


@dataclass(frozen=True)
class Bisection(Printed):
    """What `bisect` found. Shows itself as the sentence and a table.

    Attributes:
        candidate: whose errors were looked for.
        rows: every module tried, in the order in which they were.
        culprit: the innermost module that diverges, None if nothing does.
        own: none of the culprit's submodules diverges alone: the error is in what it does between them.
        sentence: the finding with its figures.
        seconds: how long it took.
    """

    candidate: Candidate
    rows: tuple[BisectRow, ...]
    culprit: BisectRow | None
    own: bool
    sentence: str
    seconds: float

    @property
    def error_by_depth(self) -> tuple[tuple[int, str, float], ...]:
        """(depth, path, relative L2) of the diverging module at each depth, outermost first."""
        return tuple(
            (r.depth, r.path, r.relative_l2)
            for r in self.rows
            if self.culprit is not None and r.kind == self.culprit.kind and r.relative_l2 is not None
        )

    def table(self) -> list[dict[str, str]]:
        """The rows as formatted cells: module, class, verdict, rel. L2, allowed, what."""
        return [
            {
                "module": "  " * row.depth + (row.path or "(model)"),
                "class": row.class_name,
                "verdict": row.error_class if row.status == "ok" and row.error_class else row.status,
                "rel. L2": "" if row.relative_l2 is None else error(row.relative_l2),
                "allowed": "" if row.allowed is None else error(row.allowed),
                "what": row.problem,
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        from .._display import report

        text, rows = report().text, self.table()
        columns = [text.Column(name, name) for name in (rows[0] if rows else {})]
        return f"{text.clean(self.sentence)}\n\n{text.render_table(columns, rows)}"

    def _repr_html_(self) -> str:
        from .._display import report

        text, rows = report().text, self.table()
        columns = [text.Column(name, name) for name in (rows[0] if rows else {})]
        return f"<div><p>{text.escaped(self.sentence)}</p>{text.html_table(columns, rows)}</div>"


def bisect(
    target: Any,
    candidate: str | Candidate | Backend | type[Backend],
    data: Any,
    *,
    path: str | None = None,
    tolerance: Tolerance | None = None,
    inference_function: Callable[..., Any] | None = None,
    max_depth: int = 12,
    samples_per_shape: int = 2,
    max_sample_bytes: int = 1 << 30,
    progress: Callable[[str], None] = lambda line: None,
) -> Bisection:
    """Find the first submodule on which a candidate diverges from eager.

    The target runs eager throughout and is afterwards as it was.

    Args:
        target: a module or any object that holds modules.
        candidate: a backend (name, class, instance), a candidate, or its label, as `"inductor[freezing]"`.
        data: as `tune` takes it.
        path: begin at this module; default: the outermost ones.
        tolerance: what outputs may be off.
        inference_function: called with an item's arguments in place of the target.
        max_depth: go no deeper than this below the start.
        samples_per_shape: calls recorded for each shape.
        max_sample_bytes: memory for recorded inputs, at one level of the tree at a time.
        progress: gets a line before each module is tried.

    Raises:
        TargetError: no module at the path, or none that could be tried.
        DataError: the data is empty, or the target rejects it.
        PlanError: no such backend or option.
    """
    start = time.perf_counter()
    chosen = candidate_of_label(candidate) if isinstance(candidate, str) else as_candidate(candidate)
    inspection = inspect(target, data, inference_function=inference_function, iterations=1, warmup=0)
    understood = understand(data, takes=takes(target, inference_function))
    walk = _Walk(
        inspection,
        understood,
        inference_function,
        chosen,
        tolerance or Tolerance(),
        samples_per_shape,
        max_sample_bytes,
        progress,
    )
    rows: list[BisectRow] = []
    level = _first_level(inspection, path)
    suspect: BisectRow | None = None
    beneath: list[BisectRow] = []
    for depth in range(max_depth + 1):
        beneath = walk.level(level, depth, suspect.kind if suspect is not None else None)
        rows += beneath
        found = next(
            (r for r in beneath if r.kind == (suspect.kind if suspect is not None else r.kind) != "right"), None
        )
        if found is None:
            break
        suspect, level, beneath = found, _children(inspection, found.path), []
        if not level:
            break
    own = suspect is not None and bool(beneath)
    sentence = _sentence(chosen, suspect, own, rows, beneath)
    return Bisection(chosen, tuple(rows), suspect, own, sentence, time.perf_counter() - start)


def _first_level(inspection: Inspection, path: str | None) -> list[ModuleRow]:
    if path is not None:
        rows = [r for r in inspection.rows if r.path == path]
        if not rows:
            raise TargetError(f"path must be one of {[r.path for r in inspection.rows][:20]}, but got {path!r}")
    else:
        chosen = {item.path for item in inspection.get_modules()}
        rows = [r for r in inspection.rows if r.path in chosen]
    usable = [r for r in rows if r.tunable and r.calls]
    if not usable:
        reasons = "; ".join(f"{r.path or '(model)'}: {r.reason}" for r in (rows or inspection.rows)[:5])
        raise TargetError(f"no module of this {type(inspection.target).__name__} can be tried alone ({reasons})")
    return usable


def _children(inspection: Inspection, path: str) -> list[ModuleRow]:
    """The outermost modules beneath a path that ran and take and give tensors."""
    prefix = f"{path}." if path else ""
    found: list[ModuleRow] = []
    for row in sorted(inspection.rows, key=lambda r: r.depth):
        inside = row.path != path and row.path.startswith(prefix)
        if inside and row.calls and row.tunable and not any(row.path.startswith(f"{f.path}.") for f in found):
            found.append(row)
    return found


@dataclass(frozen=True)
class _Walk:
    """Tries the candidate on the modules of one level."""

    inspection: Inspection
    understood: Understood
    function: Callable[..., Any] | None
    candidate: Candidate
    tolerance: Tolerance
    samples: int
    max_bytes: int
    progress: Callable[[str], None]

    def level(self, rows: Sequence[ModuleRow], depth: int, kind: Kind | None) -> list[BisectRow]:
        """The modules in the order of execution, up to the first that diverges (in the given way, if one is given)."""
        tried = []
        with _folder() as folder, building(folder / "builds") as build:
            for row, recording in self._recorded(rows):
                self.progress(f"{row.path or '(model)'}: trying {self.candidate.label} on {row.class_name} alone")
                result = self._try(row, recording, depth, folder, build)
                recording.shapes.clear()
                tried.append(result)
                if result.kind == kind or (kind is None and result.kind != "right"):
                    break
        return tried

    def _recorded(self, rows: Sequence[ModuleRow]) -> list[tuple[ModuleRow, Recording]]:
        target, modules = self.inspection.target, self.inspection._modules
        recorder = Recorder(
            [(row.path, modules[row.path], row.method) for row in rows], samples=self.samples, max_bytes=self.max_bytes
        )
        with torch.no_grad(), preserved(outermost(find_modules(target))), recorder.recording():
            for item in self.understood.fresh_items():
                run_item(target, self.function, item.args, item.kwargs)
        pairs = [(row, rec) for row, rec in zip(rows, recorder.recordings, strict=True) if rec.place is not None]
        return sorted(pairs, key=lambda pair: pair[1].place or 0)

    def _try(
        self, row: ModuleRow, recording: Recording, depth: int, folder: Path, build: Callable[[BuildJob], BuildSteps]
    ) -> BisectRow:
        base = BisectRow(depth, row.path, row.class_name, "failed")
        reason = why_not(recording)
        if reason is not None:
            return BisectRow(depth, row.path, row.class_name, "refused", problem=reason)
        worst = None
        try:
            for recorded in signatures_of(recording):
                bench = Bench(
                    recording,
                    probe(recording, recorded),
                    self.tolerance,
                    {},
                    folder,
                    torch.get_num_threads(),
                    MeasureLimits(),
                    build=build,
                )
                built = finished(
                    trial_steps(bench, self.candidate, f"{depth}-{len(list(folder.iterdir()))}", timed=False)
                )
                if built.installed is not None:
                    built.installed.executable.close()
                result = _row(base, built.trial)
                if worst is None or _badness(result) > _badness(worst):
                    worst = result
        except Exception as failure:
            return BisectRow(depth, row.path, row.class_name, "failed", problem=as_error(failure))
        return worst or base


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aitune-lab-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _row(base: BisectRow, trial: Trial) -> BisectRow:
    compared = [p.comparison for p in trial.points if p.comparison is not None]
    leaf = max((leaf for c in compared for leaf in c.leaves), key=_off, default=None)
    problem = trial.reason
    return BisectRow(
        base.depth,
        base.path,
        base.class_name,
        trial.status,
        trial.error_class if trial.status == "ok" else None,
        leaf.relative_l2 if leaf is not None else None,
        leaf.allowed_relative if leaf is not None else None,
        problem,
    )


def _off(leaf: LeafDifference) -> tuple[bool, float]:
    """Refused leaves before others, then by error; NaN (which stands where eager has numbers) counts as the most."""
    off = leaf.relative_l2
    return leaf.error_class == "refused", off if off == off else float("inf")


def _badness(row: BisectRow) -> tuple[int, float]:
    return {"right": 0, "fails": 1, "wrong": 2}[row.kind], row.relative_l2 or 0.0


def _sentence(
    candidate: Candidate, culprit: BisectRow | None, own: bool, rows: Sequence[BisectRow], beneath: Sequence[BisectRow]
) -> str:
    if culprit is None:
        worst = max((r.relative_l2 or 0.0 for r in rows), default=0.0)
        names = ", ".join(r.path or r.class_name for r in rows[:5])
        return f"{candidate.label} is right on {names}: relative L2 error at most {error(worst)}"
    where = f"{culprit.class_name} {culprit.path!r}" if culprit.path else f"the {culprit.class_name} itself"
    if culprit.kind == "fails":
        head = f"{where} is the first on which {candidate.label} fails: {culprit.problem}"
    else:
        off = "" if culprit.relative_l2 is None else f" by a relative L2 error of {error(culprit.relative_l2)}"
        allowed = "" if culprit.allowed is None else f", allowed {error(culprit.allowed)}"
        head = f"{where} is the first on which {candidate.label} diverges from eager{off}{allowed} ({culprit.problem})"
    if not own:
        return head
    alone = [r for r in beneath if r.kind == "right"]
    untried = len(beneath) - len(alone)
    rest = f" ({untried} more could not be tried alone)" if untried else ""
    return (
        f"{head}; none of its {len(alone)} submodules does so alone{rest}, so it is in what {culprit.class_name} does "
        "between them"
    )
