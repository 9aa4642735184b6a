"""The step Tune: what is tried just now, what came of it, and what is left."""

from __future__ import annotations

from ..capture.inspector import Inspection
from ..report.text import Column
from ..schema import Trial
from ..tuning.progress import trial_sentence
from ..tuning.result import TuneResult
from ..tuning.session import SessionState
from ..tuning.strategies.words import counted, times
from . import blocks as b
from .blocks import Block
from .snapshot import Snapshot
from .views import gain_words, module_name, preview_sentence, seconds_words, start_blocks

_PHASES = {
    "build": "building",
    "compiling": "compiling",
    "compare": "comparing its numbers with eager",
    "measure": "measuring",
    "graph": "capturing a CUDA graph",
}
_TRIALS = (
    Column("module", "module"),
    Column("candidate", "candidate"),
    Column("speedup", "speed-up", right=True),
    Column("error", "error"),
    Column("seconds", "took", right=True),
    Column("outcome", "outcome"),
)
_TAIL = 80


def tune_step(snap: Snapshot) -> list[Block]:
    """Before, during and after a run."""
    if not snap.state.rows:
        return [
            b.text("Inspect first: a tune needs to know the modules.", "muted"),
            b.actions(b.goto("inspect", "Go to Inspect")),
        ]
    blocks: list[Block] = []
    tried = any(t.candidate.label != "eager" for t in snap.state.trials.values())
    if snap.phase == "tuning":
        blocks += _running(snap, tried=tried)
    elif snap.phase == "tuned" and not snap.stale:
        blocks += _finished(snap)
    else:
        if snap.phase == "cancelled" and tried:
            said = "The run was cancelled, so nothing is installed. What it has found can be used all the same."
            blocks += [b.text(said, "muted"), b.actions(b.action("apply", "Use the best so far"))]
        blocks += start_blocks(snap)
    trials = [t for t in snap.state.trials.values() if t.candidate.label != "eager"]
    if trials or snap.phase == "tuning":
        rows = [_row(trial) for trial in reversed(trials)]
        blocks.append(b.table(_TRIALS, rows, empty="No trial has ended yet."))
    log = [f"{seconds:7.1f} s  {message}" for seconds, _, message in snap.state.log[-_TAIL:]]
    if log:
        blocks.append(b.details("Log", b.lines(log), key="log"))
    if snap.output:
        count = counted(len(snap.output), "line")
        blocks.append(b.details(f"Printed meanwhile ({count})", b.lines(snap.output[-_TAIL:]), key="output"))
    return blocks


def progress_words(state: SessionState) -> str:
    """`onnxruntime on encoder: measuring`."""
    progress = state.progress
    if progress.candidate is None:
        return state.log[-1][2] if state.log else "starting"
    doing = _PHASES.get(progress.phase, progress.phase)
    return f"{progress.candidate} on {module_name(progress.path or '')}: {doing}"


def run_words(snap: Snapshot) -> str:
    """One line on a run that goes on: `trial 3 of 12: onnxruntime on encoder: measuring, about 20 s left`."""
    state = snap.state
    if state.status != "running":
        return "ending" if snap.phase == "tuning" and state.trials else "inspecting"
    left = state.remaining_seconds
    rest = f", about {seconds_words(left)} left" if left is not None else ""
    return f"trial {state.progress.done} of {state.progress.total}: {progress_words(state)}{rest}"


def ending_words(snap: Snapshot, result: TuneResult) -> str:
    """One line on a run that has ended: `tuned in 12 s: 2 choices, ×1.8 end to end`."""
    if result.events and result.events[-1].kind == "run_cancelled":
        if not result.choices:
            return "cancelled; the target is as it was"
        return f"cancelled; the best so far is installed: {counted(len(result.choices), 'choice')}"
    took = f"tuned in {seconds_words(result.seconds)}"
    tuned = sum(choice.candidate.label != "eager" for choice in result.choices)
    if not tuned:
        return f"{took}: nothing that is right is faster, so eager stays"
    gain = gain_words(snap)
    return f"{took}: {counted(tuned, 'choice')}{f', {gain} end to end' if gain else ''}"


def lab_text(snap: Snapshot, inspection: Inspection | None, *, running: bool) -> str:
    """A Lab as plain text: a line on where it is, and what is known by then."""
    name = snap.state.target
    if running:
        return f"Lab of {name}: {run_words(snap)}"
    if snap.result is not None:
        return f"Lab of {name}: {ending_words(snap, snap.result)}\n{snap.result}"
    if inspection is None:
        return f"Lab of {name}: not inspected yet. lab.run() inspects and tunes"
    said = f"Lab of {name}: inspected, {counted(len(snap.state.rows), 'module')}"
    if snap.preview is not None and not snap.preview.problem:
        said += f"; {preview_sentence(snap.preview, snap.plan.limits.max_seconds)}"
    return f"{said}\n{inspection}"


def _running(snap: Snapshot, *, tried: bool) -> list[Block]:
    state = snap.state
    progress = state.progress
    fraction = None
    if progress.total:
        fraction = min(1.0, (progress.done + (progress.fraction or 0.0)) / progress.total)
    left = state.remaining_seconds
    note = f"{progress.done} of {counted(progress.total, 'trial')}, {seconds_words(state.elapsed)} so far"
    if left is not None and progress.done < progress.total:
        note += f", about {seconds_words(left)} left"
    doing = progress_words(state)
    if snap.cancelling:
        waits = b.text(
            "What runs in this process can't be broken off; a build in a process of its own ends at once.", "muted"
        )
        return [b.progress(fraction, f"cancelling, which waits for: {doing}", note), waits]
    if not snap.paused:
        return [b.progress(fraction, doing, note), b.actions(b.action("cancel", "Cancel"), b.action("pause", "Pause"))]
    best = b.action("apply", "Use the best so far", disabled="" if tried else "No trial has ended yet")
    actions = b.actions(b.action("cancel", "Cancel"), b.action("resume", "Go on"), best)
    return [b.progress(fraction, f"paused before the next step; {doing}", note), actions]


def _finished(snap: Snapshot) -> list[Block]:
    result = snap.result
    assert result is not None
    tuned = [choice for choice in result.choices if choice.candidate.label != "eager"]
    if not tuned:
        return [
            b.text("Nothing that was both right and faster was found; the target stays as it is.", "lead"),
            b.actions(b.goto("compare", "See the figures"), b.action("tune", "Tune again")),
        ]
    gain = gain_words(snap)
    names = ", ".join(dict.fromkeys(module_name(c.path) for c in tuned))
    how = (
        "Cancelled, with the best so far installed"
        if snap.was_cancelled
        else f"Tuned in {seconds_words(result.seconds)}"
    )
    said = f"{how}: {names} {'run' if len(tuned) > 1 else 'runs'} faster"
    return [
        b.text(f"{said}{f', the whole target {gain}' if gain else ''}.", "good"),
        b.actions(b.goto("compare", "Compare"), b.action("tune", "Tune again")),
    ]


def _row(trial: Trial) -> dict[str, object]:
    ok = trial.status == "ok" and trial.error_class != "refused"
    ratios = [point.speedup for point in trial.points if point.speedup is not None]
    noisy = any(m is not None and m.disturbed for p in trial.points for m in (p.latency, p.eager))
    speedup = "" if not ratios else "disturbed" if noisy else f"×{times(min(ratios))}"
    if ratios and not noisy and times(min(ratios)) != times(max(ratios)):
        speedup += f" to ×{times(max(ratios))}"
    outcome = "right" if ok else "out of tolerance" if trial.error_class == "refused" else trial.status
    detail = [trial_sentence(trial) if ok else trial.reason or outcome, *trial.notes]
    if trial.log:
        detail.append(trial.log)
    return {
        "key": trial.key,
        "module": module_name(trial.path),
        "candidate": trial.candidate.label,
        "speedup": speedup,
        "error": trial.error_class if ok and trial.error_class else "",
        "seconds": f"{trial.build_seconds + trial.measure_seconds:.1f} s",
        "outcome": outcome,
        "tone": "" if ok else "error",
        "detail": "\n".join(detail),
    }
