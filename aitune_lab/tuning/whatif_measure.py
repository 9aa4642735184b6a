"""Measures a mix: builds it, installs it for a moment, checks the whole target with it, and takes it off again."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .._display import Printed
from ..capture.inspector import inspect
from ..errors import AituneWarning, BuildError, PlanError
from ..isolation import Children
from ..measure.benchmark import Timing, measure as benchmark
from ..runtime.installed import Installed, install_all, lifted, prepare, uninstall_all
from ..runtime.weights import content_digest
from ..schema import Candidate, Choice, Measurement, Plan
from .candidates import candidate_of_label
from .cut import checked_modules
from .endtoend import EndToEnd, Metric, check
from .mixes import EAGER, Bounded, Estimate, Key, Mix
from .options import TuneOptions
from .race import Race
from .recall import Recall
from .strategies.words import times
from .trial import Built, trial_steps
from .units import Preparation, Unit, weights_digests
from .whatif import estimate

if TYPE_CHECKING:
    from .result import TuneResult
    from .session import SessionState


@dataclass(frozen=True)
class Measured(Printed):
    """A mix as measured on the whole target, beside what was estimated for it.

    Attributes:
        name: the mix's name.
        ran: (module path, candidate's label) of what was installed.
        end_to_end: outputs and latency of the target with the mix against the untuned one.
        estimate: what `estimate` said before; None without a run to estimate from.
    """

    name: str
    ran: tuple[tuple[str, str], ...]
    end_to_end: EndToEnd
    estimate: Estimate | None = None

    @property
    def latency(self) -> Bounded | None:
        """One pass over the data with the mix; None if it was not timed in alternation, or was disturbed."""
        return _latency(self.end_to_end.tuned)

    @property
    def eager(self) -> Bounded | None:
        """One pass by the untuned target, measured in alternation with the mix."""
        return _latency(self.end_to_end.eager)

    @property
    def as_estimated(self) -> bool | None:
        """Whether the estimate's and the measurement's bounds overlap; None where one of them is missing."""
        guess = self.estimate.latency if self.estimate is not None else None
        if guess is None or self.latency is None:
            return None
        return guess.low_ms <= self.latency.high_ms and self.latency.low_ms <= guess.high_ms

    @property
    def ratio(self) -> float | None:
        """Measured over estimated latency: 1.1 is 10 % slower than estimated; None where one of them is missing."""
        guess = self.estimate.latency if self.estimate is not None else None
        if guess is None or self.latency is None or guess.ms <= 0:
            return None
        return self.latency.ms / guess.ms

    @property
    def sentence(self) -> str:
        """`all onnx: measured 3.20 ms (…) a pass, estimated 3.10 ms (…): as estimated; end to end …`."""
        head = f"{self.name}: " if self.name else ""
        if self.latency is None:
            guess = self.estimate.latency if self.estimate is not None else None
            said = f"estimated {guess}, not measured; " if guess is not None else ""
            return f"{head}{said}{self.end_to_end.sentence}"
        parts = f"{head}measured {self.latency} a pass"
        if self.estimate is not None and self.estimate.latency is not None and self.ratio is not None:
            fits = "as estimated" if self.as_estimated else f"{times(self.ratio)} times the estimate"
            parts += f", estimated {self.estimate.latency}: {fits}"
        return f"{parts}; {self.end_to_end.sentence}"

    def __str__(self) -> str:
        from .._display import report

        return str(report().whatifs.measured_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().whatifs.measured_html(self))


def measure(
    target: Any,
    data: Any,
    mix: Mix,
    *,
    source: SessionState | TuneResult | None = None,
    name: str = "",
    plan: Plan | None = None,
    inference_function: Callable[..., Any] | None = None,
    batch_sizes: Sequence[int] | None = None,
    max_batches_per_batch_size: int = 2,
    metric: Metric | None = None,
    max_seconds: float = 60.0,
    options: TuneOptions | None = None,
    meter: Callable[..., Timing] = benchmark,
    progress: Callable[[str], None] = lambda message: None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Measured:
    """Build a mix, install it for a moment, compare and time the whole target with it, and take it off again.

    A candidate out of tolerance is measured too: that is what one wants to see. Calls from other threads run the
    original modules meanwhile. However it ends, the target is then as it was before, with what was installed in it.

    Args:
        target: the module or object that the run tuned; it may be tuned or not.
        data: as `tune` takes it.
        mix: as `estimate` takes it.
        source: the run to estimate from, a state or a `TuneResult`.
        name: shown with the figures.
        plan: tolerances and limits; default: those of the source.
        inference_function: as `tune` takes it.
        batch_sizes: as `tune` takes them.
        max_batches_per_batch_size: as `tune` takes it.
        metric: as `tune` takes it.
        max_seconds: no second pass over the data if the first takes longer.
        options: how candidates are built, as in the run.
        meter: what times the passes; scripted in tests.
        progress: gets a line for each step.
        check_cancelled: called between steps, from this thread; what it raises ends the measurement.

    Raises:
        PlanError: the mix names a module, signature or candidate that isn't there, or nested modules; or nothing but
            eager.
        BuildError: a candidate can't be built or run; the message holds the reason.
        DataError: the data is empty, or the target rejects it.
        TargetError: weights were dropped after tuning, so that the target can't run untuned.
    """
    guess = estimate(source, mix, name=name) if source is not None else None
    wished = {k: c for k, c in (guess.mix.items() if guess is not None else _named(mix).items()) if c != EAGER}
    if not wished:
        raise PlanError("there is nothing to measure: the mix leaves every module eager")
    if plan is None:
        plan = getattr(source, "plan", None) or Plan()
    held = replace(
        options or TuneOptions(),
        inference_function=inference_function,
        batch_sizes=tuple(batch_sizes) if batch_sizes is not None else None,
        max_batches_per_batch_size=max_batches_per_batch_size,
        on_module_failure="raise",
    )
    recall = Recall(held.store, retry=held.retry)
    builds = None
    if held.isolation != "off":
        builds = Children(recall.folder / "builds", limits=held.build_limits, gpu=held.isolation == "all")
    try:
        with lifted(target), warnings.catch_warnings():
            warnings.simplefilter("ignore", AituneWarning)
            prepared = _prepared(target, data, wished, plan, held, recall, builds, progress, check_cancelled)
            try:
                install_all(prepared)
                progress("checking the target with the mix end to end")
                checked = check(
                    target,
                    data,
                    metric=metric,
                    inference_function=inference_function,
                    batch_sizes=batch_sizes,
                    max_batches_per_batch_size=max_batches_per_batch_size,
                    tolerance=plan.tolerance,
                    max_seconds=max_seconds,
                    meter=meter,
                )
            finally:
                uninstall_all(target)
    finally:
        if builds is not None:
            builds.close()
        shutil.rmtree(recall.folder, ignore_errors=True)
    ran = tuple((e.choice.path, e.choice.candidate.label) for i in prepared for e in i.entries)
    return Measured(name, ran, checked, guess)


def _latency(measurement: Measurement | None) -> Bounded | None:
    if measurement is None or measurement.disturbed:
        return None
    return Bounded(measurement.median_ms, measurement.ci_low_ms, measurement.ci_high_ms)


def _named(mix: Mix) -> dict[Key, Candidate]:
    """A mix without a run to look it up in: labels are those of candidates; "" as a signature stands for all."""
    named = {}
    for key, wish in mix.items():
        path, method, signature = (key, "", "") if isinstance(key, str) else key
        named[path, method, signature] = wish if isinstance(wish, Candidate) else candidate_of_label(wish)
    return named


def _prepared(
    target: Any,
    data: Any,
    wished: Mapping[Key, Candidate],
    plan: Plan,
    options: TuneOptions,
    recall: Recall,
    builds: Children | None,
    progress: Callable[[str], None],
    check_cancelled: Callable[[], None],
) -> list[Installed]:
    """The dispatch of every module of the mix, built but not installed."""
    inspection = inspect(
        target,
        data,
        inference_function=options.inference_function,
        iterations=1,
        batch_sizes=options.batch_sizes,
        max_batches_per_batch_size=options.max_batches_per_batch_size,
    )
    modules = checked_modules(target, list(dict.fromkeys(path for path, _, _ in wished)), inspection)
    # Nothing is proposed: the mix says what is built.
    nothing = replace(options, backends=())
    bare = Plan(tolerance=plan.tolerance, limits=plan.limits)
    digest = weights_digests(content_digest)
    made = Preparation(target, data, bare, nothing, recall, check_cancelled, digest, children=builds)
    units = made.units(modules)
    races = [race for unit in units for race in unit.races]
    try:
        for race in races:
            _settle(race, wished, progress)
        unmet = [key for key in wished if not any(_meant(race, key) for race in races)]
        if unmet:
            known = [(r.path, r.module.method, r.bench.recorded.signature.key) for r in races]
            raise PlanError(f"with this data the modules were called as {known}, but the mix names {unmet}")
        return [_dispatch(unit, plan, options) for unit in units]
    except BaseException:
        for race in races:
            race.close()
        raise


def _meant(race: Race, key: Key) -> bool:
    path, method, signature = key
    return (
        race.path == path
        and method in ("", race.module.method)
        and signature in ("", race.bench.recorded.signature.key)
    )


def _settle(race: Race, wished: Mapping[Key, Candidate], progress: Callable[[str], None]) -> None:
    """Build and try what the mix says for a signature, and take it as the choice."""
    candidate = next((c for key, c in wished.items() if _meant(race, key)), EAGER)
    signature = race.bench.recorded.signature.key
    trial = race.eager()
    if candidate != EAGER:
        progress(f"building {candidate.label} for {race.name}")
        built = _run(race, candidate)
        trial = race.add(built)
        if built.installed is None:
            raise BuildError(f"{candidate.label} for {race.name} can't be measured: {trial.status}: {trial.reason}")
    reason = "measured as a part of a mix"
    race.choice = Choice(
        race.path,
        race.module.method,
        signature,
        candidate,
        trial.key,
        reason,
        error_class=trial.error_class,
        relative_l2=trial.relative_l2,
        factor_over_eager=trial.factor_over_eager,
        accepted_error=trial.error_class == "refused",
    )


def _run(race: Race, candidate: Candidate) -> Built:
    """The candidate from the store, or built; compared with eager, not timed."""
    known = race.known
    key, artifact = known.keys.trial(candidate), known.keys.artifact(candidate)
    if why := known.recall.quarantined(artifact):
        raise BuildError(f"{candidate.label} for {race.name} can't be measured: {why}")
    with known.recall.surviving(artifact):
        with closing(trial_steps(race.bench, candidate, key, accept_error=True, timed=False, known=known)) as steps:
            while True:
                race.bench.check_cancelled()
                try:
                    next(steps)
                except StopIteration as stop:
                    built: Built = stop.value
                    return built


def _dispatch(unit: Unit, plan: Plan, options: TuneOptions) -> Installed:
    entries = [race.installed() for race in unit.races]
    return prepare(unit.module.module, unit.module.method, unit.path, entries, plan, weights=options.weights)
