"""What loading, testing and checking a `.ait` file found, as data that prints well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .._display import Printed
from ..schema import Comparison, Measurement

LoadStatus = Literal["loaded", "rebuilt", "deferred", "eager"]


@dataclass(frozen=True)
class LoadedChoice:
    """What became of one (module, signature) of the file.

    `loaded` from its files, `rebuilt` from its configuration, `deferred` (rebuilt at its first call) or left to
    `eager`, then with the reason.
    """

    path: str
    method: str
    signature: str
    candidate: str
    status: LoadStatus
    reason: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = module_name(self.path)
        if self.status == "eager":
            return f"{where} {self.signature}: eager instead of {self.candidate}: {self.reason}"
        took = f" in {self.seconds:.1f} s" if self.seconds >= 0.05 else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{where} {self.signature}: {self.candidate} {self.status}{took}{notes}"


@dataclass(frozen=True)
class PointTest:
    """The golden sample at one point: numbers and latency here, beside those at tuning.

    `numbers` compares the executable with eager, both here; `eager_then` compares eager here with eager where the file
    was saved. Latencies are medians in milliseconds, eager and executable measured in alternation.
    """

    path: str
    method: str
    candidate: str
    point: str
    numbers: Comparison
    eager_then: Comparison
    class_at_tuning: str | None = None
    latency: Measurement | None = None
    eager: Measurement | None = None
    latency_at_tuning: Measurement | None = None
    eager_at_tuning: Measurement | None = None

    @property
    def speedup(self) -> float | None:
        return _speedup(self.eager, self.latency)

    @property
    def speedup_at_tuning(self) -> float | None:
        return _speedup(self.eager_at_tuning, self.latency_at_tuning)

    @property
    def disturbed(self) -> str | None:
        """Why the latencies decide nothing, or None."""
        return next((m.disturbed for m in (self.latency, self.eager) if m is not None and m.disturbed), None)

    def __str__(self) -> str:
        error_class = self.numbers.error_class
        then = self.class_at_tuning
        compared = f" ({then} at tuning)" if then and then != error_class else ""
        parts = [f"{error_class}{compared}, relative error {self.numbers.relative_l2:.1e}"]
        if self.numbers.problem:
            parts.append(self.numbers.problem)
        if self.eager_then.error_class == "refused":
            parts.append(f"eager itself gives other outputs here than where it was saved: {self.eager_then.problem}")
        if self.latency is not None and self.eager is not None and self.speedup is not None:
            parts.append(f"{self.latency.median_ms:.3g} ms against {self.eager.median_ms:.3g} ms, {self.speedup:.2f}×")
            if self.speedup_at_tuning is not None:
                parts[-1] += f" ({self.speedup_at_tuning:.2f}× at tuning)"
        if self.disturbed:
            parts.append(f"disturbed: {self.disturbed}")
        return f"{module_name(self.path)} {self.candidate} at {self.point}: {'; '.join(parts)}"


@dataclass(frozen=True)
class LoadReport(Printed):
    """What `load` did. `trusted_by` says why code entries were used, None if the file is not trusted."""

    file: str
    digest: str
    trusted_by: str | None
    choices: tuple[LoadedChoice, ...]
    tests: tuple[PointTest, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def loaded(self) -> tuple[LoadedChoice, ...]:
        return tuple(c for c in self.choices if c.status != "eager")

    @property
    def fell_back(self) -> tuple[LoadedChoice, ...]:
        return tuple(c for c in self.choices if c.status == "eager")

    def __str__(self) -> str:
        lines = [f"{self.file}: {len(self.loaded)} of {len(self.choices)} tuned signatures in use ({self.digest})"]
        lines += [f"  {choice}" for choice in self.choices]
        lines += [f"  test: {test}" for test in self.tests]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(printable(line) for line in lines)


@dataclass(frozen=True)
class CheckedChoice:
    """Whether one choice of a file holds on this machine; `reason` says why not, or what is in doubt."""

    path: str
    method: str
    candidate: str
    holds: bool
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{module_name(self.path)} {self.candidate}: {'holds' if self.holds else 'does not hold'}{reason}"


@dataclass(frozen=True)
class CheckReport(Printed):
    """What `check` found: every entry's hash was right (else it raises), and what holds here."""

    file: str
    digest: str
    trusted: bool
    entries: int
    size_bytes: int
    choices: tuple[CheckedChoice, ...]
    environment: tuple[str, ...] = ()
    """What differs between the machine of the tuning and this one, in words."""

    @property
    def holds(self) -> bool:
        return all(choice.holds for choice in self.choices)

    def __str__(self) -> str:
        trusted = "saved on this machine" if self.trusted else "not saved on this machine"
        lines = [f"{self.file}: {self.entries} entries, all undamaged ({self.digest}, {trusted})"]
        lines += [f"  {choice}" for choice in self.choices]
        lines += [f"  environment: {difference}" for difference in self.environment]
        return "\n".join(printable(line) for line in lines)


def module_name(path: str) -> str:
    """`unet`, `vae.decode`, `(model)` for the target itself."""
    return path or "(model)"


def printable(text: str) -> str:
    """Text from a file, safe to print: what could steer a terminal is shown as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more


def _speedup(eager: Measurement | None, latency: Measurement | None) -> float | None:
    if eager is None or latency is None or latency.median_ms <= 0:
        return None
    return eager.median_ms / latency.median_ms
