"""Mixes of backends as data: which candidate runs which module, and what that is estimated to give. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .._display import Printed
from ..schema import Candidate, ErrorClass
from .strategies.words import milliseconds, number, size, times

EAGER = Candidate("eager")

Key = tuple[str, str, str]
"""(path, method, signature)."""
Wish = str | Candidate
Mix = Mapping[str, Wish] | Mapping[Key, Wish] | Mapping[str | Key, Wish]
"""Module path, or (path, method, signature), to a candidate or its label; `"eager"` leaves the module as it is."""


@dataclass(frozen=True)
class Bounded:
    """A figure in milliseconds with its bounds at 95 % confidence."""

    ms: float
    low_ms: float
    high_ms: float

    def __str__(self) -> str:
        if self.low_ms == self.high_ms:
            return milliseconds(self.ms)
        return f"{milliseconds(self.ms)} ({number(self.low_ms)} to {number(self.high_ms)})"


@dataclass(frozen=True)
class Part:
    """One (module, signature) under one candidate, with what the trial says about it.

    Attributes:
        calls: how often it is called in one pass over the data.
        eager: what those calls take in eager; None if that was not measured.
        tuned: what they take with the candidate; None if that was not measured.
        saving: `eager` minus `tuned`; None if one of them is.
        memory_bytes: what the executable holds beside the module's own weights.
        problem: why there is no saving; empty if there is one.
        note: what limits the figures, such as other load while they were taken.
    """

    path: str
    method: str
    signature: str
    candidate: Candidate
    trial: str | None = None
    calls: int = 0
    eager: Bounded | None = None
    tuned: Bounded | None = None
    saving: Bounded | None = None
    memory_bytes: int = 0
    error_class: ErrorClass | None = None
    relative_l2: float | None = None
    factor_over_eager: float | None = None
    problem: str = ""
    note: str = ""

    @property
    def key(self) -> Key:
        return self.path, self.method, self.signature

    @property
    def is_eager(self) -> bool:
        return self.candidate == EAGER


@dataclass(frozen=True)
class Estimate(Printed):
    """What a mix would give for the whole target: an estimate, whatever its digits say.

    Attributes:
        name: the mix's name.
        parts: the mix, by (module, signature); those it leaves out stay eager.
        eager: one pass over the data by the untuned target; its bounds are equal where it was not measured repeatedly.
        eager_source: `"measured"` in repeated passes, or `"inspected"` in a single one, whose scatter isn't known.
        latency: the same with the mix; None if a part has no figures or `eager` isn't known.
        weights_bytes: the target's own parameters.
        added_bytes: what the mix's executables hold beside them. Activations are not counted.
        notes: what limits the figures.
    """

    name: str
    parts: tuple[Part, ...]
    eager: Bounded | None
    eager_source: Literal["measured", "inspected", "unknown"]
    latency: Bounded | None
    weights_bytes: int
    added_bytes: int
    notes: tuple[str, ...] = ()
    kind: Literal["estimate"] = "estimate"
    end_to_end_error: Literal["unknown until measured"] = "unknown until measured"

    @property
    def speedup(self) -> float | None:
        if self.eager is None or self.latency is None or self.latency.ms <= 0:
            return None
        return self.eager.ms / self.latency.ms

    @property
    def problems(self) -> tuple[str, ...]:
        """Why there is no latency, one sentence for each part at fault."""
        return tuple(f"{p.path or '(model)'}, {p.candidate.label}: {p.problem}" for p in self.parts if p.problem)

    @property
    def errors(self) -> tuple[Part, ...]:
        """The parts that can change numbers; each carries its module's own error."""
        return tuple(part for part in self.parts if not part.is_eager)

    @property
    def mix(self) -> dict[Key, Candidate]:
        """The mix again, as `estimate` and `measure` take it."""
        return {part.key: part.candidate for part in self.parts}

    @property
    def sentence(self) -> str:
        """`all onnx: estimate 3.10 ms (2.98 to 3.22) a pass against 6.52 ms, 2.1 times as fast; …`."""
        head = f"{self.name}: " if self.name else ""
        memory = f"{size(self.added_bytes)} more memory"
        if self.latency is None or self.eager is None:
            why = "; ".join(self.problems) or "the untuned target's time is not known"
            return f"{head}no estimate: {why}"
        if not self.errors:
            return f"{head}all eager, {self.eager} a pass"
        gain = f", {times(self.speedup)} times as fast" if self.speedup else ""
        return (
            f"{head}estimate {self.latency} a pass against {milliseconds(self.eager.ms)}{gain}; {memory}; "
            f"end-to-end error {self.end_to_end_error}"
        )

    def to_dataframe(self) -> Any:
        """The parts as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().whatifs.parts_frame(self.parts)

    def __str__(self) -> str:
        from .._display import report

        return str(report().whatifs.estimate_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().whatifs.estimate_html(self))


@dataclass(frozen=True)
class SideBySide(Printed):
    """Several mixes of one run, in the order given."""

    estimates: tuple[Estimate, ...]

    def __getitem__(self, name: str) -> Estimate:
        for estimate in self.estimates:
            if estimate.name == name:
                return estimate
        raise KeyError(f"{name!r} is none of the mixes {[estimate.name for estimate in self.estimates]}")

    def to_dataframe(self) -> Any:
        """One row a mix, as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().whatifs.estimates_frame(self.estimates)

    def __str__(self) -> str:
        from .._display import report

        return str(report().whatifs.side_by_side_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().whatifs.side_by_side_html(self))


@dataclass(frozen=True)
class Change:
    """A (module, signature) that two mixes run differently. `saving` is what the second saves over the first."""

    before: Part
    after: Part
    saving: Bounded | None


@dataclass(frozen=True)
class MixDifference(Printed):
    """What the second of two mixes does otherwise. What both share cancels, its uncertainty too.

    Attributes:
        latency: the second's estimated end-to-end time minus the first's; None if a changed part has no figures.
        beyond_noise: whether the bounds of `latency` exclude 0; None if there is no `latency`.
        added_bytes: the second's memory minus the first's.
    """

    first: str
    second: str
    changes: tuple[Change, ...]
    latency: Bounded | None
    beyond_noise: bool | None
    added_bytes: int

    @property
    def sentence(self) -> str:
        if not self.changes:
            return f"{self.first} and {self.second} are the same mix"
        if self.latency is None:
            return f"{self.second} against {self.first}: no estimate, as a changed part has no figures"
        if not self.beyond_noise:
            return f"{self.second} against {self.first}: no difference beyond noise (estimate {self.latency} a pass)"
        word = "faster" if self.latency.ms < 0 else "slower"
        shown = Bounded(abs(self.latency.ms), *sorted((abs(self.latency.low_ms), abs(self.latency.high_ms))))
        return f"{self.second} is {word} than {self.first} by {shown} a pass (estimate)"

    def __str__(self) -> str:
        from .._display import report

        return str(report().whatifs.difference_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().whatifs.difference_html(self))
