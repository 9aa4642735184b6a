"""What another mix of backends would give: estimates from the trials of a run, before anything is built. No torch here.

A mix says for some modules which candidate runs them; all others stay eager. Its latency is estimated as the untuned
target's end-to-end time minus calls x saving, with the uncertainty of the measurements behind it. What it does to the
end-to-end error is unknown until measured: `measure` does that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import PlanError
from ..schema import Candidate, Measurement, Trial, from_data, is_beneath
from .mixes import EAGER, Bounded, Change, Estimate, Key, Mix, MixDifference, Part, SideBySide
from .session import SessionState, replay
from .strategies.score import eager_at, why_untimed
from .strategies.words import milliseconds, why_not_ok

if TYPE_CHECKING:
    from .result import TuneResult
    from .whatif_measure import Measured

__all__ = [
    "Bounded",
    "Change",
    "Estimate",
    "Key",
    "Mix",
    "MixDifference",
    "Part",
    "SideBySide",
    "chosen",
    "compare",
    "diff",
    "estimate",
    "measure",
    "options",
]


def options(source: SessionState | TuneResult) -> dict[Key, tuple[Part, ...]]:
    """What a mix can choose from: for each (module, signature) that was tried, eager and every candidate's part.

    `source` is a state, a `TuneResult`, or anything else that holds a run's `events` or `state`.
    """
    return {key: (held.eager(), *held.parts()) for key, held in _tried(_state(source)).items()}


def chosen(source: SessionState | TuneResult) -> dict[Key, Candidate]:
    """The mix that the run chose."""
    return {key: choice.candidate for key, choice in _state(source).choices.items()}


def estimate(source: SessionState | TuneResult, mix: Mix, *, name: str = "") -> Estimate:
    """What a mix would give, at once, from a run's trials.

    The uncertainty: half-widths of the measurements' 95 % intervals, times calls, added in quadrature over points and
    modules, as these were measured apart; calls at one point share their error. It does not cover what the estimate
    leaves out: modules that run otherwise beside one another than alone.

    Args:
        source: a state, a `TuneResult`, or anything else that holds a run's `events` or `state`.
        mix: for each module, by path or (path, method, signature), a candidate or its label. A path stands for
            all of its signatures for which that was tried; the more specific key wins. Modules left out stay eager.
        name: shown with the figures.

    Raises:
        PlanError: a module, signature or candidate was not tried; or a module lies beneath another of the mix.
    """
    state = _state(source)
    tried = _tried(state)
    parts = tuple(tried[key].part(candidate) for key, candidate in _resolved(tried, mix).items())
    eager, eager_source = _untuned(state)
    notes = [f"{_name(p.path)}, {p.candidate.label}: {p.note}" for p in parts if p.note and not p.is_eager]
    latency = None
    if eager is not None and all(not part.problem for part in parts):
        savings = [part.saving for part in parts if part.saving is not None]
        latency = _sum([eager, *(_negative(saving) for saving in savings)])
        # A pass can't take less than the mix's own modules do.
        least = _sum(part.tuned for part in parts if part.tuned is not None and not part.is_eager)
        if latency.ms < least.ms:
            notes.append(
                "the modules' own times add up to more than the whole target's, so they were taken under other conditions"
            )
        by_share = _by_share(state, tried, parts, eager)
        if by_share is not None and not latency.low_ms <= by_share <= latency.high_ms:
            notes.append(
                f"by the modules' shares of the inspected pass it would be {milliseconds(by_share)}: the whole and its "
                "modules were measured under different load, so the bounds take both in"
            )
            latency = Bounded(latency.ms, min(latency.low_ms, by_share), max(latency.high_ms, by_share))
        ms, high = max(latency.ms, least.ms), max(latency.high_ms, least.ms)
        latency = Bounded(ms, min(max(latency.low_ms, least.low_ms, 0.0), ms), high)
    if eager_source == "inspected":
        notes.append("the untuned time is that of a single pass, whose scatter is not known")
    elif _disturbed(state):
        notes.append(
            "other load disturbed the passes of the untuned target, so its bounds are its fastest round and its 90th percentile"
        )
    return Estimate(
        name,
        parts,
        eager,
        eager_source,
        latency,
        _weights_bytes(state),
        sum(part.memory_bytes for part in parts),
        tuple(notes),
    )


def compare(source: SessionState | TuneResult, mixes: Mapping[str, Mix]) -> SideBySide:
    """Several named mixes side by side. Raises what `estimate` raises."""
    return SideBySide(tuple(estimate(source, mix, name=name) for name, mix in mixes.items()))


def diff(first: Estimate, second: Estimate) -> MixDifference:
    """What the second of two mixes of one run changes, and whether that is beyond noise."""
    mine, theirs = {p.key: p for p in first.parts}, {p.key: p for p in second.parts}
    changes = []
    for key in {**mine, **theirs}:
        before, after = mine.get(key) or _left_out(theirs[key]), theirs.get(key) or _left_out(mine[key])
        if before.candidate == after.candidate:
            continue
        known = before.saving is not None and after.saving is not None
        saving = _sum([after.saving, _negative(before.saving)]) if known else None  # type: ignore[list-item, arg-type]
        changes.append(Change(before, after, saving))
    savings = [change.saving for change in changes]
    latency = None if any(s is None for s in savings) else _sum(_negative(s) for s in savings if s is not None)
    beyond = None if latency is None else not latency.low_ms <= 0 <= latency.high_ms
    added = second.added_bytes - first.added_bytes
    return MixDifference(
        first.name or "the first mix", second.name or "the second mix", tuple(changes), latency, beyond, added
    )


def measure(target: Any, data: Any, mix: Mix, **settings: Any) -> Measured:
    """Build a mix, install it for a moment, compare and time the whole target with it, and take it off again.

    The target is afterwards exactly as it was before, tuned or not. Settings and errors are those of
    `aitune_lab.tuning.whatif_measure.measure`; with `source=` the result holds the estimate too.
    """
    from . import whatif_measure

    return whatif_measure.measure(target, data, mix, **settings)


def _left_out(part: Part) -> Part:
    """The same (module, signature) as a mix that doesn't name it runs it."""
    zero = Bounded(0.0, 0.0, 0.0)
    return Part(part.path, part.method, part.signature, EAGER, None, part.calls, part.eager, part.eager, zero)


@dataclass(frozen=True)
class _Tried:
    """The trials of one (module, signature), by candidate."""

    key: Key
    trials: Mapping[Candidate, Trial]

    def parts(self) -> Iterator[Part]:
        yield from (self.part(candidate) for candidate in self.trials if candidate != EAGER)

    def eager(self) -> Part:
        measured = next((part for part in self.parts() if part.eager is not None), None)
        own = self.trials.get(EAGER)
        trial = own or next(iter(self.trials.values()))
        eager = _total([(r.calls, r.latency) for r in own.points if r.latency]) if own is not None else None
        if eager is None and measured is not None:
            eager = measured.eager
        zero = Bounded(0.0, 0.0, 0.0)
        calls = sum(result.calls for result in trial.points)
        return Part(*self.key, EAGER, own.key if own is not None else None, calls, eager, eager, zero)

    def part(self, candidate: Candidate) -> Part:
        if candidate == EAGER:
            return self.eager()
        trial = self.trials[candidate]
        eager = self.trials.get(EAGER, trial)
        called = [result for result in trial.points if result.calls]
        # Figures of a rough look are better than none, and marked.
        pairs = [
            (r, r.rough, r.rough_eager)
            if r.latency is None and r.rough is not None
            else (r, r.latency, eager_at(r, eager))
            for r in called
        ]
        rough = any(r.latency is None for r in called)
        measured = [m for _, mine, theirs in pairs for m in (mine, theirs)]
        problem = ""
        if trial.status != "ok":
            problem = why_not_ok(trial)
        elif not pairs or not all(_is_figure(m) for m in measured):
            untimed = (
                why_untimed(m, whose, result.point)
                for result, mine, theirs in pairs
                for m, whose in ((mine, "its"), (theirs, "eager's"))
                if not _is_figure(m)
            )
            problem = trial.reason or next((why for why in untimed if why), "it was not measured")
        before = _total([(r.calls, e) for r, _, e in pairs if e is not None])
        after = None if problem else _total([(r.calls, m) for r, m, _ in pairs if m is not None])
        return Part(
            *self.key,
            candidate,
            trial.key,
            sum(result.calls for result in called),
            before,
            after,
            None if before is None or after is None else _sum([before, _negative(after)]),
            trial.memory_bytes,
            trial.error_class,
            trial.relative_l2,
            trial.factor_over_eager,
            problem,
            "" if problem else _note(measured, rough=rough),
        )


def _state(source: Any) -> SessionState:
    if isinstance(source, SessionState):
        return source
    if isinstance(held := getattr(source, "state", None), SessionState):
        return held
    events = getattr(source, "events", None)
    if events is None:
        raise PlanError(
            "estimates need a run: a SessionState, a TuneResult or a loaded report, but got " + type(source).__name__
        )
    return replay(events)


def _tried(state: SessionState) -> dict[Key, _Tried]:
    methods = {str(row["path"]): str(row.get("method", "forward")) for row in state.rows}
    methods |= {choice.path: choice.method for choice in state.choices.values()}
    found: dict[Key, dict[Candidate, Trial]] = {}
    for trial in state.trials.values():
        key = trial.path, methods.get(trial.path, "forward"), trial.signature
        found.setdefault(key, {})[trial.candidate] = trial
    return {key: _Tried(key, trials) for key, trials in found.items()}


def _resolved(tried: Mapping[Key, _Tried], mix: Mix) -> dict[Key, Candidate]:
    """The mix by (path, method, signature). Raises PlanError for what was not tried, and for nested modules."""
    result: dict[Key, Candidate] = {}
    for name, wish in sorted(mix.items(), key=lambda item: not isinstance(item[0], str)):
        keys = [key for key in tried if name in (key, key[0])]
        if not keys:
            known = sorted({key[0] for key in tried})
            itself = "; '' is the target itself, (model) in a magic" if "" in known else ""
            raise PlanError(f"a mix can name what the run tried, {known[:20]}, but got {name!r}{itself}")
        for key in keys:
            candidate = _candidate(tried[key], wish)
            if candidate is not None:
                result[key] = candidate
        if not any(key in result for key in keys):
            labels = ["eager", *dict.fromkeys(c.label for key in keys for c in tried[key].trials if c != EAGER)]
            label = wish.label if isinstance(wish, Candidate) else wish
            raise PlanError(f"for {_name(keys[0][0])} the run tried {labels}, but got {label!r}")
    active = [key for key, candidate in result.items() if candidate != EAGER]
    for key in active:
        above = next((other for other in active if _is_in(key, other)), None)
        if above is not None:
            raise PlanError(
                f"no module of a mix may lie beneath another, but {_name(key[0])} lies in {_name(above[0])}: "
                "leave one of the two eager"
            )
    return result


def _candidate(held: _Tried, wish: str | Candidate) -> Candidate | None:
    """The candidate that was tried here and is meant; None if it was not tried for this signature."""
    if wish == EAGER or wish == EAGER.label:
        return EAGER
    return next((c for c in held.trials if wish in (c, c.label)), None)


def _is_in(key: Key, other: Key) -> bool:
    """Whether a module's method is a part of another module, or of another method of the same one."""
    mine, theirs = _module(key), _module(other)
    if key[1] != "forward" and mine == theirs:
        return False
    return is_beneath(mine, theirs)


def _module(key: Key) -> str:
    path, method, _ = key
    return path if method == "forward" else path.removesuffix(method).rstrip(".")


def _untuned(state: SessionState) -> tuple[Bounded | None, Literal["measured", "inspected", "unknown"]]:
    """One pass of the untuned target: measured in repeated passes if it was, else as inspected."""
    measured = (state.end_to_end or {}).get("eager")
    if measured is not None:
        eager = from_data(measured, Measurement)
        if _is_figure(eager):
            # Also where other load disturbed them, repeated passes say more than a single one; not with tight bounds, though.
            disturbed = Bounded(eager.median_ms, eager.min_ms, max(eager.p90_ms, eager.ci_high_ms))
            return disturbed if eager.disturbed else _total([(1, eager)]), "measured"
    seconds = state.eager_seconds or (state.estimate or {}).get("eager_seconds")
    if not seconds:
        # Journals that say neither: a module's share is of the target's own time.
        shares = [(row.get("total_seconds") or 0.0, row.get("share") or 0.0) for row in state.rows]
        seconds = next((total / share for total, share in shares if total and share), None)
    if not seconds:
        return None, "unknown"
    return Bounded(1000 * seconds, 1000 * seconds, 1000 * seconds), "inspected"


def _disturbed(state: SessionState) -> bool:
    measured = (state.end_to_end or {}).get("eager")
    return measured is not None and bool(from_data(measured, Measurement).disturbed)


def _weights_bytes(state: SessionState) -> int:
    """Parameters of the outermost modules, those that several methods or paths share once."""
    modules = {_module((str(row["path"]), str(row.get("method", "forward")), "")): row for row in state.rows}
    outer = [path for path in modules if not any(is_beneath(path, other) for other in modules)]
    return sum(int(modules[path].get("parameter_bytes") or 0) for path in outer)


def _note(measured: Iterable[Measurement | None], *, rough: bool) -> str:
    notes = ["from a rough look, not measured in full"] if rough else []
    if any(m is not None and m.disturbed for m in measured):
        notes.append("other load disturbed a measurement")
    return "; ".join(notes)


def _is_figure(measurement: Measurement | None) -> bool:
    return measurement is not None and math.isfinite(measurement.median_ms) and measurement.median_ms > 0


def _total(measured: Sequence[tuple[int, Measurement]]) -> Bounded | None:
    """Calls x median, summed over points. None without points."""
    figures = []
    for calls, m in measured:
        bounds = (m.ci_low_ms, m.ci_high_ms)
        low, high = (b if math.isfinite(b) else m.median_ms for b in bounds)
        figures.append(Bounded(calls * m.median_ms, calls * low, calls * high))
    return _sum(figures) if figures else None


def _sum(figures: Iterable[Bounded]) -> Bounded:
    """The sum of figures that were measured apart: half-widths add in quadrature."""
    held = list(figures)
    total = sum(f.ms for f in held)
    low = math.sqrt(sum((f.ms - f.low_ms) ** 2 for f in held))
    high = math.sqrt(sum((f.high_ms - f.ms) ** 2 for f in held))
    return Bounded(total, total - low, total + high)


def _by_share(state: SessionState, tried: Mapping[Key, _Tried], parts: Sequence[Part], eager: Bounded) -> float | None:
    """The mix's latency by another way, which load that differs between two measurements doesn't touch, in ms.

    A module's share of the inspected pass, times its speed-up. None if a share isn't known.
    """
    shares = {str(row["path"]): row.get("share") for row in state.rows}
    saved = 0.0
    for part in parts:
        if part.is_eager or part.saving is None or part.eager is None:
            continue
        siblings = [held.eager().eager for key, held in tried.items() if key[0] == part.path]
        of_path = sum(figure.ms for figure in siblings if figure is not None)
        share = shares.get(part.path)
        if not share or not of_path:
            return None
        saved += share * (part.eager.ms / of_path) * (part.saving.ms / part.eager.ms)
    return max(eager.ms * (1 - saved), 0.0)


def _negative(figure: Bounded) -> Bounded:
    return Bounded(-figure.ms, -figure.high_ms, -figure.low_ms)


def _name(path: str) -> str:
    return path or "(model)"
