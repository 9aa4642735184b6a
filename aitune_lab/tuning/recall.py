"""A run's use of the store: what it need not do again, and what it keeps for later runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..backends import registry
from ..errors import DeviceLost, StoreError
from ..measure.benchmark import Timing
from ..measure.blocks import Contender
from ..schema import Candidate, Point, Trial, from_data, to_data
from ..store.artifacts import Artifact
from ..store.store import Store
from .bench import Bench
from .keys import Keys
from .search import Rival
from .strategies.score import admitted

T = TypeVar("T")
StoreLike = Path | str | None
"""`"auto"`: the store in the cache folder, or none where that can't be used; None or `"off"`: none; else a folder."""

RETRIED = ("failed", "timed out", "crashed")
"""Statuses that another time may end otherwise; `retry` tries those again."""


@dataclass
class Counts:
    """What a run really did: `builds` by backends, artifacts taken from the store and loaded (or recompiled with what the
    store holds) in `load_seconds`, `measurements` of latencies, and trials, second looks and checks that were `reused`.
    """

    builds: int = 0
    loads: int = 0
    measurements: int = 0
    reused: int = 0
    load_seconds: float = field(default=0.0, compare=False)


class CountingMeter:
    """A meter that counts, and remembers whether other load disturbed anything since `watch()`."""

    def __init__(self, meter: Callable[..., Timing], counts: Counts) -> None:
        self._meter, self._counts = meter, counts
        self.disturbed = False

    def watch(self) -> None:
        """Begin to look for disturbances anew."""
        self.disturbed = False

    def __call__(self, contenders: Sequence[Contender], **options: Any) -> Timing:
        self._counts.measurements += 1
        timing = self._meter(contenders, **options)
        self.disturbed |= any(m.disturbed is not None for m in timing.measurements.values())
        return timing


class Recall:
    """What a run has of the store. Without one everything is new, and nothing is kept.

    A store that fails (a full disk) is left alone from then on: a run doesn't end for that. `problem` then says why.
    `folder` is the run's own, for artifacts in use; its owner removes it.
    """

    def __init__(self, store: StoreLike = "auto", *, retry: bool = False) -> None:
        self.retry = retry
        self.counts = Counts()
        self.problem = ""
        self.kept: dict[str, Mapping[str, Any]] = {}
        """Facts of the artifacts that this run has built or taken out, by key: their files lie in its own folder."""
        self.store: Store | None = None
        if store not in (None, "off"):
            try:
                self.store = Store(None if store == "auto" else store)
            except StoreError as error:
                if store != "auto":
                    raise
                self.problem = f"nothing is kept for later runs: {error}"
        self.own: set[str] = set()
        """Those that it has built itself."""
        self._begun: set[str] = set()
        made = self._ask(lambda held: held.new_work(), None)
        self.folder = made if made is not None else Path(tempfile.mkdtemp(prefix="aitune-lab-"))

    @property
    def shared(self) -> Path | None:
        """A folder for what builds share: compilers' caches."""
        return self._ask(lambda store: store.shared(), None)

    def _ask(self, what: Callable[[Store], T], otherwise: T) -> T:
        if self.store is None:
            return otherwise
        try:
            return what(self.store)
        except StoreError as error:
            self.problem = f"nothing more is kept for later runs: {error}"
            self.store = None
            return otherwise

    def read(self, kind: str, key: str, cls: type[T]) -> T | None:
        """A record as an object of a schema class; None if there is none, or one of another form."""
        data = self._ask(lambda store: store.read(kind, key), None)
        if data is None:
            return None
        try:
            return from_data(data, cls)
        except ValueError:  # written by another version
            return None

    def write(self, kind: str, key: str, value: Any) -> None:
        """Keep an object of a schema class."""
        self._ask(lambda store: store.write(kind, key, to_data(value)), None)

    def take(self, key: str, into: Path) -> Artifact | None:
        """An artifact's files, in an empty folder; None if there is none."""
        return self._ask(lambda store: store.take(key, into), None)

    def put(self, key: str, source: Path, facts: Mapping[str, Any]) -> None:
        """Keep an artifact's files."""
        self._ask(lambda store: store.put(key, source, facts, self.folder), None)

    def drop(self, key: str) -> None:
        """Forget an artifact that turned out to be of no use."""
        self._ask(lambda store: store.drop(key), None)

    def new_journal(self) -> Path | None:
        """Where the events of a run go; None without a store."""
        return self._ask(lambda store: store.new_journal(), None)

    def begin(self, key: str, candidate: Candidate) -> None:
        """Note that native code of a candidate is about to run in this process, which might not survive it."""
        if registry.get(candidate.backend).isolation != "none":
            self._ask(lambda store: store.begin(key, candidate.label), None)
            self._begun.add(key)

    @contextmanager
    def surviving(self, key: str) -> Iterator[None]:
        """At its end the process has survived what was begun in it, unless it has lost its GPU."""
        try:
            yield
        except DeviceLost:
            raise  # the process will end with it: the next one must not try this again
        except BaseException:
            self._end(key)
            raise
        self._end(key)

    def _end(self, key: str) -> None:
        if key in self._begun:
            self._begun.remove(key)
            self._ask(lambda store: store.end(key), None)

    def quarantined(self, key: str) -> str | None:
        """Why something is not tried: an earlier process died of it, or in it. With `retry` that is forgotten."""
        if self.retry:
            self._ask(lambda store: store.forgive(key), None)
            return None
        attempt = self._ask(lambda store: store.abandoned(key), None)
        if attempt is None:
            return None
        return (
            f"not tried: its earlier trial never finished, as the process {attempt.owner.pid} died in it; "
            "tune with retry=True (--retry) to try it again"
        )


def remove_folder(folder: Path, process: int) -> None:
    """Remove a folder and what is in it, in the process of that id only."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Known:
    """What the store knows of one (module, signature)."""

    recall: Recall
    keys: Keys

    def trial(self, bench: Bench, candidate: Candidate, rival: Rival | None, *, wanted: bool) -> Trial | None:
        """An earlier trial that says all that a new one would.

        Args:
            rival: whom a rough look would compare the candidate with; None if it is measured in full.
            wanted: it would be measured also if it is out of tolerance.
        """
        key = self.keys.trial(candidate)
        found = self.recall.read("trial", key, Trial)
        if found is not None and not self._says_all(found, bench, wanted=wanted):
            found = None
        if found is None and rival is not None:
            found = self.recall.read("trial", self.keys.rough(candidate, rival), Trial)
        if found is None:
            return None
        self.recall.counts.reused += 1
        points = tuple(replace(p, calls=bench.recorded.calls[p.point]) for p in found.points)
        return replace(found, points=points)

    def is_known(self, bench: Bench, candidate: Candidate) -> bool:
        """Whether there is an earlier trial with everything in it."""
        found = self.recall.read("trial", self.keys.trial(candidate), Trial)
        return found is not None and self._says_all(found, bench, wanted=False)

    def _says_all(self, trial: Trial, bench: Bench, *, wanted: bool) -> bool:
        if trial.status in RETRIED:
            return not self.recall.retry
        if trial.status != "ok":
            return trial.status == "refused"
        if is_disturbed(trial):
            return False
        timed = {p.point for p in trial.points if p.latency is not None}
        return timed >= set(bench.recorded.samples) or not (wanted or admitted(trial.error_class, bench.tolerance))

    def keep(self, trial: Trial, bench: Bench, rival: Rival | None) -> None:
        """Keep a trial that has ended."""
        if trial.status not in ("ok", "refused", *RETRIED) or is_disturbed(trial):
            return
        untimed = all(p.latency is None for p in trial.points)
        if trial.status == "ok" and untimed and admitted(trial.error_class, bench.tolerance):
            if rival is not None and trial.reason:  # stopped after a rough look
                self.recall.write("trial", self.keys.rough(trial.candidate, rival), trial)
            return
        self.recall.write("trial", self.keys.trial(trial.candidate), trial)

    def look(self, trial: Trial, weights: Mapping[Point, float], contenders: int) -> tuple[bool, float] | None:
        """What an earlier second look at a trial came to: (confirmed, p-value)."""
        found = self.recall.read("look", self.keys.look(trial, weights, contenders), Look)
        if found is None:
            return None
        self.recall.counts.reused += 1
        return found.confirmed, found.p_value

    def keep_look(
        self, trial: Trial, weights: Mapping[Point, float], contenders: int, confirmed: bool, p_value: float
    ) -> None:
        """Keep what a second look came to."""
        self.recall.write("look", self.keys.look(trial, weights, contenders), Look(confirmed, p_value))


@dataclass(frozen=True)
class Look:
    """What a second look came to."""

    confirmed: bool
    p_value: float


def is_disturbed(trial: Trial) -> bool:
    """Whether other load spoilt one of its measurements."""
    return any(m is not None and m.disturbed for p in trial.points for m in (p.latency, p.eager))
