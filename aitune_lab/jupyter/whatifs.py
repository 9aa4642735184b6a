"""Mixes that the user tries out in a Lab: named, changed one module at a time, estimated at once, measured on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..schema import Candidate, Plan
from ..tuning import whatif
from ..tuning.mixes import EAGER, Estimate, Key, Mix
from ..tuning.session import SessionState
from .plans import with_left_alone, with_pin

if TYPE_CHECKING:
    from ..tuning.whatif_measure import Measured

CHOSEN = "as tuned"
"""The name of the mix that the run chose."""


@dataclass(frozen=True)
class NamedMix:
    """A mix under a name. `measured` is what measuring it gave; `doing` says that it is being measured, `problem` why not."""

    name: str
    mix: Mapping[Key, Candidate] = field(default_factory=dict)
    measured: Measured | None = None
    doing: bool = False
    problem: str = ""

    def estimate(self, state: SessionState) -> Estimate | None:
        """What it would give; None if its modules can't go together, for which `problem_in` has the reason."""
        try:
            return whatif.estimate(state, self.mix, name=self.name)
        except PlanError:
            return None

    def problem_in(self, state: SessionState) -> str:
        """Why there is no estimate; empty if there is one."""
        try:
            return "; ".join(whatif.estimate(state, self.mix, name=self.name).problems)
        except PlanError as error:
            return str(error)


@dataclass(frozen=True)
class Mixes:
    """The mixes of a Lab; immutable, as its views may draw it at any time. `at` is the number of the one being changed."""

    held: tuple[NamedMix, ...] = ()
    at: int = 0

    @property
    def current(self) -> NamedMix | None:
        return self.held[self.at] if self.at < len(self.held) else None

    def all_of(self, state: SessionState) -> tuple[NamedMix, ...]:
        """What the run chose, then the mixes."""
        return (NamedMix(CHOSEN, whatif.chosen(state)), *self.held)

    def named(self, name: str) -> NamedMix:
        """Raises PlanError that lists the names."""
        for mix in self.held:
            if mix.name == name:
                return mix
        raise PlanError(f"mixes are {[mix.name for mix in self.held]}, but got {name!r}")

    def with_mix(self, mix: NamedMix) -> Mixes:
        """With a mix in place of the one of its name, or at the end, and chosen to be changed."""
        names = [held.name for held in self.held]
        if mix.name in names:
            at = names.index(mix.name)
            return Mixes((*self.held[:at], mix, *self.held[at + 1 :]), at)
        return Mixes((*self.held, mix), len(self.held))

    def without(self, name: str) -> Mixes:
        """Without the mix of a name."""
        held = tuple(mix for mix in self.held if mix.name != name)
        return Mixes(held, min(self.at, max(len(held) - 1, 0)))

    def updated(self, name: str, **changes: object) -> Mixes:
        """With something changed in the mix of a name; the one being changed stays so."""
        held = tuple(replace(m, **changes) if m.name == name else m for m in self.held)  # type: ignore[arg-type]
        return Mixes(held, self.at)

    def fresh_name(self) -> str:
        """`mix 1`, `mix 2`, …: the first that is free."""
        names = {mix.name for mix in self.held}
        return next(name for i in range(1, len(names) + 2) if (name := f"mix {i}") not in names)


def resolved(state: SessionState, mix: Mix) -> dict[Key, Candidate]:
    """A mix by path or label, as (path, method, signature) to candidate. Raises PlanError for what was not tried."""
    return whatif.estimate(state, mix).mix


def as_plan(plan: Plan, mix: Mapping[Key, Candidate]) -> Plan:
    """The plan with a pin for each module of a mix, so that the next tune installs it.

    Raises PlanError if signatures of one module want different candidates: a pin is on a module.
    """
    wanted: dict[str, Candidate] = {}
    for (path, _, _), candidate in mix.items():
        if wanted.setdefault(path, candidate) != candidate:
            raise PlanError(
                f"a pin is on a module, but the mix wants {wanted[path].label} and {candidate.label} for signatures of "
                f"{path or '(model)'!r}"
            )
    for path, candidate in reversed(wanted.items()):
        plan = with_left_alone(plan, path) if candidate == EAGER else with_pin(plan, path, candidate)
    return plan
