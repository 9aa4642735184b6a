"""Events as lines for people."""

from __future__ import annotations

from ..schema import Choice, Event, Trial, from_data


def line(event: Event) -> str | None:
    """One line for an event worth telling, None for the others."""
    where = event.path or "(model)"
    data = event.data
    if event.kind == "log":
        return str(data.get("message", ""))
    if event.kind == "run_started":
        modules = data.get("modules", [])
        count = f"{len(modules)} module{'s' if len(modules) != 1 else ''}"
        return (
            f"data: {data.get('understood', '')}\n"
            f"{count}, {data.get('trials', 0)} trials, about {round(float(data.get('estimated_seconds') or 0))} s"
        )
    if event.kind == "trial_finished":
        return f"{where}: {trial_sentence(from_data(data['trial'], Trial))}"
    if event.kind == "trial_failed":
        trial = from_data(data["trial"], Trial)
        return f"{where}: {trial.candidate.label} {trial.status if trial.status != 'ok' else 'refused'}: {trial.reason}"
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
    """`onnxruntime: 3.10 ms (2.1 times eager) at b=8, exact, built in 4.2 s`."""
    parts = []
    for point in trial.points:
        if point.latency is not None and point.speedup is not None:
            noisy = ", disturbed" if point.latency.disturbed else ""
            parts.append(
                f"{point.latency.median_ms:.3g} ms, {point.speedup:.2f} times as fast at {point.point.label}{noisy}"
            )
    figures = "; ".join(parts) or "not timed"
    return f"{trial.candidate.label}: {figures}; {trial.error_class}, built in {trial.build_seconds:.1f} s"
