"""The timeline of a run: what was built, compared and measured, when, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schema import Event, Trial, from_data
from ...tuning.strategies.words import counted
from ..theme import STYLES, Theme, ThemeName, theme_of
from .draw import figure, graph_objects, label, saying, short
from .source import EAGER, events_of, state_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from .source import Source

ROW_PIXELS = 24
MAX_ROWS = 60
PHASES = {
    "build": STYLES["inductor"],
    "compare": STYLES["openvino"],
    "measure": STYLES["tensorrt"],
    "other": STYLES[EAGER],
}
"""What a trial does, in this order, with the style it is drawn in."""
PHASE_PATTERNS = {"build": "", "compare": "/", "measure": "", "other": "x"}
_PHASE_OF = {"rough look": "measure", "compiling": "build", "building": "build"}


@dataclass(frozen=True)
class Phase:
    """A part of a trial, in seconds since the run's start."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Span:
    """One trial from its start to its end, in seconds since the run's start; `status` is how it ended."""

    path: str
    label: str
    start: float
    end: float
    phases: tuple[Phase, ...]
    status: str
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.path or '(model)'} · {self.label}"


@dataclass(frozen=True)
class TimelineInfo:
    """All trials in the order in which they started. `exact` is false where only durations were known."""

    spans: tuple[Span, ...]
    seconds: float
    exact: bool = True
    left_out: int = 0

    @property
    def title(self) -> str:
        return "Timeline of the run"

    @property
    def caption(self) -> tuple[str, ...]:
        if not self.spans:
            return ("No trial was started.",)
        failed = sum(span.status not in ("ok", "running", "not finished") for span in self.spans)
        said = [
            f"{counted(len(self.spans), 'trial')} in {self.seconds:.3g} s{f', {failed} without success' if failed else ''}."
        ]
        if not self.exact:
            said.append("Put end to end: only how long trials took is known, not when they ran.")
        if self.left_out:
            said.append(f"{self.left_out} shorter trials are not shown.")
        return tuple(said)


def timeline_info(source: Source) -> TimelineInfo:
    """When trials ran: from the events where there are any, else their durations put end to end."""
    events = events_of(source)
    state = state_of(source)
    spans = _from_events(events) if events else _from_trials(tuple(state.trials.values()))
    ended = max((span.end for span in spans), default=0.0)
    seconds = max(state.elapsed, ended) if events else ended
    kept = sorted(spans, key=lambda span: span.start - span.end)[:MAX_ROWS]
    shown = tuple(span for span in spans if span in kept)
    return TimelineInfo(shown, seconds, bool(events), len(spans) - len(shown))


def timeline(source: Source, *, theme: Theme | ThemeName = "neutral") -> go.Figure:
    """When each trial was built, compared and measured. Exact with a `TuneResult` or events, not with a state."""
    info = timeline_info(source)
    if not info.spans:
        return saying(info.title, info.caption[0], theme=theme, revision="timeline")
    colours = theme_of(theme)
    height = ROW_PIXELS * len(info.spans) + 20
    drawn = figure(info.title, info.caption, theme=theme, revision="timeline", height=height, legend=True)
    names = [f"{number}" for number in range(len(info.spans))]
    for phase, style in PHASES.items():
        parts = [
            (name, span, part)
            for name, span in zip(names, info.spans, strict=True)
            for part in span.phases
            if part.name == phase
        ]
        if not parts:
            continue
        drawn.add_bar(
            orientation="h",
            name=phase,
            y=[name for name, _, _ in parts],
            base=[part.start for _, _, part in parts],
            x=[max(part.end - part.start, 0.0) for _, _, part in parts],
            width=0.62,
            marker={
                "color": style.fill,
                "line": {"color": style.edge, "width": 1},
                "pattern": {"shape": PHASE_PATTERNS[phase], "fillmode": "overlay", "fgopacity": 0.5, "size": 6},
            },
            hovertext=[
                f"<b>{label(span.name)}</b><br>{phase} {part.end - part.start:.3g} s" for _, span, part in parts
            ],
            hoverinfo="text",
        )
    ends = [(name, span) for name, span in zip(names, info.spans, strict=True) if span.status != "running"]
    good = [span.status == "ok" for _, span in ends]
    drawn.add_trace(
        graph_objects().Scatter(
            name="ended",
            x=[span.end for _, span in ends],
            y=[name for name, _ in ends],
            mode="markers",
            marker={
                "symbol": ["circle" if ok else "x" for ok in good],
                "size": [6 if ok else 9 for ok in good],
                "color": colours.ink,
            },
            hovertext=[
                f"<b>{label(s.name)}</b><br>{label(s.status)}{': ' + short(s.reason, 160) if s.reason else ''}"
                for _, s in ends
            ],
            hoverinfo="text",
            showlegend=False,
        )
    )
    ticks = [label(span.name, 52) + " " for span in info.spans]
    drawn.update_layout(barmode="overlay")
    drawn.update_yaxes(
        autorange="reversed", tickmode="array", tickvals=names, ticktext=ticks, type="category", showgrid=False
    )
    drawn.update_xaxes(range=[0, 1.02 * info.seconds or 1.0], title={"text": "seconds since the start"})
    return drawn


def _from_events(events: Sequence[Event]) -> list[Span]:
    spans: list[Span] = []
    open_: tuple[Event, list[tuple[str, float]]] | None = None
    for event in events:
        if event.kind == "trial_started":
            open_ = (event, [(_phase(str(event.data.get("phase") or "build")), event.t)])
        elif event.kind == "trial_progress" and open_ is not None:
            phase = _phase(str(event.data.get("phase") or ""))
            if phase != open_[1][-1][0]:
                open_[1].append((phase, event.t))
        elif event.kind in ("trial_finished", "trial_failed") and open_ is not None:
            trial = from_data(event.data["trial"], Trial)
            spans.append(_span(open_, event.t, *outcome(trial)))
            open_ = None
    if open_ is not None:
        stopped = events[-1].kind in ("run_cancelled", "run_failed", "run_finished")
        spans.append(_span(open_, events[-1].t, "not finished" if stopped else "running", ""))
    return spans


def outcome(trial: Trial) -> tuple[str, str]:
    """How a trial ended, in a word or three, and why."""
    if trial.status == "ok" and trial.error_class == "refused":
        problems = [p.comparison.problem for p in trial.points if p.comparison is not None and p.comparison.problem]
        return "out of tolerance", problems[0] if problems else trial.reason
    return trial.status, trial.reason


def _span(started: tuple[Event, list[tuple[str, float]]], end: float, status: str, reason: str) -> Span:
    event, marks = started
    ends = [start for _, start in marks[1:]] + [end]
    phases = tuple(Phase(name, start, until) for (name, start), until in zip(marks, ends, strict=True))
    candidate = event.candidate.label if event.candidate is not None else ""
    return Span(event.path or "", candidate, event.t, end, phases, status, reason)


def _from_trials(trials: Sequence[Trial]) -> list[Span]:
    spans, now = [], 0.0
    for trial in trials:
        if trial.candidate.label == EAGER:
            continue
        built = now + max(trial.build_seconds, 0.0)
        end = built + max(trial.measure_seconds, 0.0)
        phases = tuple(p for p in (Phase("build", now, built), Phase("measure", built, end)) if p.end > p.start)
        spans.append(Span(trial.path, trial.candidate.label, now, end, phases, *outcome(trial)))
        now = end
    return spans


def _phase(name: str) -> str:
    name = _PHASE_OF.get(name, name)
    return name if name in PHASES else "other"
