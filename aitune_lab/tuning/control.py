"""What others may do to a run from any thread: cancel it, pause it, resume it; and what it has cost so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ..errors import TargetError
from ..schema import Event
from .bench import Cancelled

PRIOR_SECONDS = 20.0
"""How much work must be done until what it really took says as much as what was expected."""


class Control:
    """The switches of one run, and its clock, which stands still during a pause.

    The run holds `running()` while it executes, so that nobody else touches its state then. Every method may be called
    from any thread.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused_seconds = 0.0
        self._cancelled = False
        self._may_run = threading.Event()
        self._may_run.set()
        self._executing = threading.Lock()
        self._holder: int | None = None

    def cancel(self) -> None:
        """Stop at the next step, also out of a pause."""
        self._cancelled = True
        self._may_run.set()

    def pause(self) -> None:
        """Wait before the next step, until `resume` or `cancel`."""
        if not self._cancelled:
            self._may_run.clear()

    def resume(self) -> None:
        """Go on."""
        self._may_run.set()

    @property
    def pausing(self) -> bool:
        """Whether the run waits, or will before its next step."""
        return not self._may_run.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def renew(self) -> None:
        """Take an earlier `cancel` back, for what is done after the run."""
        self._cancelled = False

    def check(self) -> None:
        """Raise Cancelled if the run was cancelled."""
        if self._cancelled:
            raise Cancelled

    def seconds(self) -> float:
        """Seconds since the start, pauses left out."""
        return time.perf_counter() - self._start - self._paused_seconds

    def wait(self) -> None:
        """Wait as long as the run is paused. Raises Cancelled if it was cancelled meanwhile."""
        start = time.perf_counter()
        self._holder = None
        self._executing.release()
        try:
            self._may_run.wait()
        finally:
            self._executing.acquire()
            self._holder = threading.get_ident()
            self._paused_seconds += time.perf_counter() - start
        self.check()

    @contextmanager
    def running(self, *, wait: bool = False) -> Iterator[None]:
        """While entered, the run's state is the caller's.

        Where another thread has it, this one waits for it, or TargetError is raised.
        """
        here = threading.get_ident()
        if not self._executing.acquire(blocking=wait and self._holder != here):
            raise TargetError("the run is at work: pause() or cancel() it first, and wait until it has stopped")
        self._holder = here
        try:
            yield
        finally:
            self._holder = None
            self._executing.release()


def alternating(events: Iterator[Event], control: Control) -> Iterator[Event]:
    """Pass a run's events on. The run's state is its own while it makes one, and free while the caller has one.

    But while a child builds, it stays the run's.
    """
    free = True
    with ExitStack() as held:
        try:
            while True:
                if free:
                    held.enter_context(control.running(wait=True))
                event = next(events, None)
                if event is None:
                    return
                free = not under_way(event)
                if free:
                    held.close()
                yield event
        finally:
            if isinstance(events, Generator):
                events.close()


def under_way(event: Event) -> bool:
    """Whether a child goes on building while the caller has this event."""
    return event.kind == "trial_progress" and "doing" in event.data


@dataclass
class Remaining:
    """How long a run will still take: what was planned, by what finished ones really took against what was expected.

    Things are named by (where, backend, what).
    """

    _planned: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _done: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds taken and expected, by backend."""

    def plan(self, what: tuple[str, str, str], seconds: float) -> None:
        """Something that will be done, and what it should take."""
        self._planned[what] = seconds

    def skip(self, what: tuple[str, str, str]) -> None:
        """Something that will not be done after all."""
        self._planned.pop(what, None)

    def finish(self, what: tuple[str, str, str], seconds: float, *, counts: bool = True) -> None:
        """Something that was done in so many seconds; `counts` says whether that tells about others of its backend."""
        expected = self._planned.pop(what, 0.0)
        if counts and expected > 0:
            taken, planned = self._done.get(what[1], (0.0, 0.0))
            self._done[what[1]] = taken + seconds, planned + expected

    def seconds(self, current: tuple[str, str, str] | None = None, spent: float = 0.0) -> float:
        """The estimate. On what is done just now, so many seconds were spent already."""
        taken = sum(t for t, _ in self._done.values()) + PRIOR_SECONDS
        overall = taken / (sum(e for _, e in self._done.values()) + PRIOR_SECONDS)
        total = 0.0
        for what, seconds in self._planned.items():
            own_taken, own_expected = self._done.get(what[1], (0.0, 0.0))
            scaled = seconds * (own_taken + PRIOR_SECONDS * overall) / (own_expected + PRIOR_SECONDS)
            total += max(scaled - spent, 0.1 * scaled) if what == current else scaled
        return total
