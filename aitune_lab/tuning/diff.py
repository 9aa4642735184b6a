"""What changed between two runs: environment, plan, candidates, choices, figures; and whether it is beyond noise."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Any, Literal

from .._display import Printed
from ..measure.significance import holm
from ..schema import Candidate, Choice, ErrorClass, Measurement, Point, Trial, to_data
from .run_report import Run, RunReport, report_of

ALPHA = 0.01
"""Of all figures of a difference together (Holm's correction)."""
_Z95 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class FieldChange:
    """A setting that differs; `before` or `after` is empty where it isn't there."""

    part: Literal["environment", "plan", "run"]
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class ChoiceChange:
    """A (module, signature) for which the runs chose differently; None where it was not tuned."""

    path: str
    method: str
    signature: str
    before: str | None
    after: str | None
    reason: str
    """The second run's, or the first's where the second has none."""


@dataclass(frozen=True)
class TrialChange:
    """A candidate that came to something else: its status or error class; None where it was not tried."""

    path: str
    signature: str
    candidate: Candidate
    before: str | None
    after: str | None
    reason: str


@dataclass(frozen=True)
class Ratio:
    """`after` over `before` with its bounds at 95 % confidence: 1.2 takes 20 % longer."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class FigureChange:
    """A latency that both runs measured.

    Attributes:
        latency: the second run's median over the first's.
        beside_eager: the same relative to eager, which each run measured in alternation: what remains when the whole
            machine got faster or slower. None where eager was not measured beside it.
        p_value: of `beside_eager` (or else `latency`) being 1, corrected over all figures of the difference.
        beyond_noise: whether that is below `ALPHA`; None where a measurement was disturbed.
    """

    path: str
    signature: str
    candidate: Candidate
    point: Point
    before: Measurement
    after: Measurement
    latency: Ratio
    beside_eager: Ratio | None
    p_value: float = 1.0
    beyond_noise: bool | None = None

    @property
    def judged(self) -> Ratio:
        """The ratio that is judged."""
        return self.beside_eager or self.latency


@dataclass(frozen=True)
class EndToEndChange:
    """The tuned target as a whole: what each run measured."""

    latency: Ratio | None
    beside_eager: Ratio | None
    before_class: ErrorClass | None
    after_class: ErrorClass | None
    beyond_noise: bool | None


@dataclass(frozen=True)
class RunDiff(Printed):
    """What changed from one run to another. Shows itself as tables; `to_dataframe()` gives the figures.

    Attributes:
        fields: environment, versions and plan.
        choices: where the runs chose differently.
        trials: where a candidate came to something else.
        figures: every latency that both runs measured, also those that did not change.
        machine: the median over points of eager's latency in the second run over the first; None if none is in both.
        end_to_end: None if one of the runs has no check of the whole target.
    """

    fields: tuple[FieldChange, ...]
    choices: tuple[ChoiceChange, ...]
    trials: tuple[TrialChange, ...]
    figures: tuple[FigureChange, ...]
    machine: float | None
    end_to_end: EndToEndChange | None

    @property
    def changed(self) -> tuple[FigureChange, ...]:
        """The figures that changed beyond noise, the largest changes first."""
        beyond = [figure for figure in self.figures if figure.beyond_noise]
        return tuple(sorted(beyond, key=lambda figure: -abs(math.log(figure.judged.value))))

    def __bool__(self) -> bool:
        """Whether anything changed that isn't noise."""
        whole = self.end_to_end is not None and bool(self.end_to_end.beyond_noise)
        return bool(self.fields or self.choices or self.trials or self.changed or whole)

    def to_dataframe(self) -> Any:
        """The figures as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().runs.figures_frame(self.figures)

    def __str__(self) -> str:
        from .._display import report

        return str(report().runs.diff_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().runs.diff_html(self))


def diff(run_a: Run, run_b: Run) -> RunDiff:
    """What changed from run a to run b, and whether changes of figures are beyond noise.

    A latency is judged beside eager's, which each run measured in alternation with it, so that a machine that is busier
    or hotter on the second day changes nothing. The test: the logarithm of the ratio over its standard error, which
    the 95 % intervals of the medians give; Holm's correction over all figures; α = 0.01.

    Args:
        run_a: a `TuneResult`, a loaded report, a state, events, or the path of a report or a journal.
        run_b: likewise.

    Raises:
        DataError: a file is neither a report nor a journal.
    """
    before, after = report_of(run_a), report_of(run_b)
    figures = _judged(_figures(before, after))
    return RunDiff(
        tuple(_fields(before, after)),
        tuple(_choices(before, after)),
        tuple(_trials(before, after)),
        tuple(figures),
        _machine(before, after),
        _end_to_end(before, after),
    )


def _fields(before: RunReport, after: RunReport) -> list[FieldChange]:
    facts = [
        {"aitune_lab": r.aitune_lab, "target": r.target, "data": r.understood, "status": r.status}
        for r in (before, after)
    ]
    found = _changed("run", *facts)
    if before.environment is not None and after.environment is not None:
        found += _changed("environment", _flat(to_data(before.environment)), _flat(to_data(after.environment)))
    return found + _changed("plan", _flat(to_data(before.plan)), _flat(to_data(after.plan)))


def _changed(part: Any, before: Mapping[str, str], after: Mapping[str, str]) -> list[FieldChange]:
    names = dict.fromkeys([*before, *after])
    pairs = ((name, before.get(name, ""), after.get(name, "")) for name in names)
    return [FieldChange(part, name, mine, other) for name, mine, other in pairs if mine != other]


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested data as text by dotted name."""
    flat: dict[str, str] = {}
    for name, value in data.items():
        name = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            plain = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in value]
            # One line each where order carries no more than presence, so that a difference names what differs.
            flat |= {f"{name}: {text}": "yes" for text in plain}
        else:
            flat[name] = "" if value is None else str(value)
    return flat


def _choices(before: RunReport, after: RunReport) -> list[ChoiceChange]:
    mine = {(c.path, c.method, c.signature): c for c in before.choices}
    theirs = {(c.path, c.method, c.signature): c for c in after.choices}
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        one, other = mine.get(key), theirs.get(key)
        was, now = _chose(one), _chose(other)
        if was != now:
            why = other or one
            found.append(ChoiceChange(*key, was, now, why.reason if why is not None else ""))
    return found


def _trials(before: RunReport, after: RunReport) -> list[TrialChange]:
    mine, theirs = _by_candidate(before), _by_candidate(after)
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        one, other = mine.get(key), theirs.get(key)
        was, now = _came_to(one), _came_to(other)
        if was != now and key[2].label != "eager":
            why = other or one
            found.append(TrialChange(*key, was, now, why.reason if why is not None else ""))
    return found


def _chose(choice: Choice | None) -> str | None:
    return None if choice is None else choice.candidate.label + (" (pinned)" if choice.pinned else "")


def _came_to(trial: Trial | None) -> str | None:
    return None if trial is None else trial.status if trial.status != "ok" else trial.error_class or "ok"


def _by_candidate(run: RunReport) -> dict[tuple[str, str, Candidate], Trial]:
    return {(t.path, t.signature, t.candidate): t for t in run.trials}


def _figures(before: RunReport, after: RunReport) -> list[FigureChange]:
    mine, theirs = _by_candidate(before), _by_candidate(after)
    found = []
    for key, trial in mine.items():
        if key[2].label == "eager" or key not in theirs:
            continue
        later = {result.point: result for result in theirs[key].points}
        for result in trial.points:
            other = later.get(result.point)
            if other is None or result.latency is None or other.latency is None:
                continue
            ratio = _ratio([(other.latency, 1), (result.latency, -1)])
            beside = None
            if result.eager is not None and other.eager is not None:
                beside = _ratio([(other.latency, 1), (other.eager, -1), (result.latency, -1), (result.eager, 1)])
            if ratio is not None:
                found.append(FigureChange(*key, result.point, result.latency, other.latency, ratio, beside))
    return found


def _judged(figures: list[FigureChange]) -> list[FigureChange]:
    disturbed = [bool(f.before.disturbed or f.after.disturbed) for f in figures]
    corrected = iter(holm([_p_value(f.judged) for f, bad in zip(figures, disturbed, strict=True) if not bad]))
    judged = []
    for figure, bad in zip(figures, disturbed, strict=True):
        p_value = 1.0 if bad else next(corrected)
        judged.append(replace(figure, p_value=p_value, beyond_noise=None if bad else p_value < ALPHA))
    return judged


def _machine(before: RunReport, after: RunReport) -> float | None:
    mine, theirs = _by_candidate(before), _by_candidate(after)
    ratios = []
    for key, trial in mine.items():
        if key[2].label != "eager" or key not in theirs:
            continue
        later = {result.point: result.latency for result in theirs[key].points}
        pairs = [(result.latency, later.get(result.point)) for result in trial.points]
        ratios += [b.median_ms / a.median_ms for a, b in pairs if a is not None and b is not None and a.median_ms > 0]
    return median(ratios) if ratios else None


def _end_to_end(before: RunReport, after: RunReport) -> EndToEndChange | None:
    one, other = before.end_to_end, after.end_to_end
    if one is None or other is None:
        return None
    latency = beside = None
    beyond = None
    if one.tuned is not None and other.tuned is not None:
        latency = _ratio([(other.tuned, 1), (one.tuned, -1)])
        if one.eager is not None and other.eager is not None:
            beside = _ratio([(other.tuned, 1), (other.eager, -1), (one.tuned, -1), (one.eager, 1)])
        judged = beside or latency
        if judged is not None and not any(
            m is not None and m.disturbed for r in (one, other) for m in (r.eager, r.tuned)
        ):
            beyond = _p_value(judged) < ALPHA
    classes = [r.comparison.error_class if r.comparison is not None else None for r in (one, other)]
    return EndToEndChange(latency, beside, classes[0], classes[1], beyond)


def _ratio(factors: list[tuple[Measurement, int]]) -> Ratio | None:
    """The product of medians to the power of 1 or -1; half-widths of the logarithms add in quadrature."""
    value, low, high = 0.0, 0.0, 0.0
    for m, power in factors:
        if not all(math.isfinite(x) and x > 0 for x in (m.median_ms, m.ci_low_ms, m.ci_high_ms)):
            return None
        centre, down, up = math.log(m.median_ms), math.log(m.ci_low_ms), math.log(m.ci_high_ms)
        value += power * centre
        below, above = (centre - down, up - centre) if power > 0 else (up - centre, centre - down)
        low, high = low + below**2, high + above**2
    return Ratio(math.exp(value), math.exp(value - math.sqrt(low)), math.exp(value + math.sqrt(high)))


def _p_value(ratio: Ratio) -> float:
    """Two-sided: the logarithm over its standard error, taken from the half-width towards 1."""
    centre = math.log(ratio.value)
    half = centre - math.log(ratio.low) if centre > 0 else math.log(ratio.high) - centre
    if half <= 0:
        return 0.0 if centre else 1.0
    return 2 * (1 - NormalDist().cdf(abs(centre) / half * _Z95))
