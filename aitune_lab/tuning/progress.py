"""Events as lines for people."""

from __future__ import annotations

from ..schema import Choice, Event, Trial, from_data
from .recall import RETRIED
from .strategies.words import accuracy, counted, milliseconds, times


def line(event: Event) -> str | None:
    """One line for an event worth telling, None for the others."""
    where = event.path or "(model)"
    data = event.data
    if event.kind == "log":
        return str(data.get("message", ""))
    if event.kind == "run_started":
        modules = data.get("modules", [])
        trials = int(data.get("trials") or 0)
        return (
            f"data: {data.get('understood', '')}\n"
            f"{counted(len(modules), 'module')}, {counted(trials, 'trial')}"
            f"{f' ({known} known from earlier runs)' if (known := int(data.get('known') or 0)) else ''}"
            f", about {round(float(data.get('estimated_seconds') or 0))} s"
        )
    if event.kind == "trial_finished":
        earlier = " (in an earlier run)" if data.get("reused") else ""
        return f"{where}: {trial_sentence(from_data(data['trial'], Trial))}{earlier}"
    if event.kind == "trial_failed":
        trial = from_data(data["trial"], Trial)
        status = trial.status if trial.status != "ok" else "refused"
        again = "; retry=True tries it again" if trial.status in RETRIED else ""
        earlier = f" (in an earlier run{again})" if data.get("reused") else ""
        return f"{where}: {trial.candidate.label} {status}: {trial.reason}{earlier}"
    if event.kind == "choice_made":
        return f"{where}: {from_data(data['choice'], Choice).reason}"
    if event.kind == "run_finished":
        return f"finished in {float(data.get('seconds') or 0):.1f} s"
    if event.kind == "run_cancelled":
        return "cancelled; the target is as it was"
    if event.kind == "run_failed":
        return f"failed: {data.get('error')}; the target is as it was"
    return None


def trial_sentence(trial: Trial) -> str:
    """`onnxruntime: 1.9 to 2.4 times as fast over 4 points, 3.10 ms against 6.52 ms at b=8; exact; built in 4.2 s`.

    The point named is the one at which eager takes the longest.
    """
    timed = [(p.speedup, p) for p in trial.points if p.speedup is not None]
    if not timed:
        why = trial.reason or "not timed"
        return f"{trial.candidate.label}: {why}; {accuracy(trial)}; built in {trial.build_seconds:.1f} s"
    low, high = min(s for s, _ in timed), max(s for s, _ in timed)
    heaviest = max((p for _, p in timed), key=lambda p: p.eager.median_ms if p.eager is not None else 0.0)
    assert heaviest.latency is not None
    assert heaviest.eager is not None
    ratio = times(low) if times(low) == times(high) else f"{times(low)} to {times(high)}"
    over = f" over {len(timed)} points" if len(timed) > 1 else ""
    figures = f"{milliseconds(heaviest.latency.median_ms)} against {milliseconds(heaviest.eager.median_ms)}"
    noisy = any(m.disturbed for _, p in timed for m in (p.latency, p.eager) if m is not None)
    gain = (
        "disturbed by other load, so it decides nothing"
        if noisy
        else f"{ratio} times as fast{over}, {figures} at {heaviest.point.label}"
    )
    return f"{trial.candidate.label}: {gain}; {accuracy(trial)}; built in {trial.build_seconds:.1f} s"
