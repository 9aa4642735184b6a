"""The run: records, tries candidates, chooses, installs; every step is an event."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..backends import registry
from ..backends.base import Backend
from ..capture.data import understand
from ..capture.declared import declared_signatures
from ..capture.inspector import InspectedModule, Inspection, inspect, run_item, takes
from ..capture.probe import probe, why_not
from ..capture.recorder import Recorder, Recording
from ..capture.signature import DynamicShapes, RecordedSignature
from ..capture.state import preserved
from ..capture.tree import find_modules, modules_of, outermost
from ..errors import AituneWarning, DataError, PlanError, TargetError
from ..measure.benchmark import Timing, measure
from ..measure.blocks import MeasureLimits
from ..measure.verdict import faster
from ..runtime.installed import Installed, InstalledExecutable, install_all, prepare
from ..runtime.weights import content_digest
from ..schema import (
    Candidate,
    Choice,
    Event,
    EventKind,
    Plan,
    Point,
    PointResult,
    Rule,
    StrategyConfig,
    Trial,
    to_data,
)
from .candidates import EAGER, Shortlist, complexity_of, estimated_seconds, shortlist
from .endtoend import EndToEnd, Metric, check
from .planfile import check_plan, outermost_pins
from .search import Rival, best_so_far, limits_of, looks_first, rival_of, why_skipped
from .strategies import ChoiceContext, Decision, Strategy, decide_pin, strategy_of
from .strategies.score import Contender
from .trial import Bench, Built, Cancelled, Steps, as_error, eager_built, eager_trial, time_point, trial_steps

MAX_SIGNATURES = 8
"""Signatures tuned for one method; calls of further ones run the original."""
MAX_CUT_DEPTH = 2
"""How far a module that stays eager passes to its children."""
MIN_CHILD_SHARE = 0.05
"""Children with a smaller share of the end-to-end time are not worth a trial."""
MAX_PASS_SECONDS = 30.0
"""Targets that take longer for one pass over the data are not checked end to end."""

BackendLike = str | Candidate | Backend | type[Backend]


@dataclass(frozen=True)
class TuneOptions:
    """How a run goes about it, beside the plan."""

    inference_function: Callable[..., Any] | None = None
    batch_sizes: tuple[int, ...] | None = None
    max_batches_per_batch_size: int = 2
    backends: tuple[BackendLike, ...] | None = None
    dynamic_shapes: Mapping[str, DynamicShapes] = field(default_factory=dict)
    on_module_failure: Literal["eager", "raise"] = "eager"
    on_miss: Literal["original", "error"] = "original"
    weights: Literal["watched", "frozen"] = "watched"
    dry_run: bool = False
    measure_limits: MeasureLimits = field(default_factory=MeasureLimits)
    end_to_end: bool = True
    """Whether the tuned target is compared and timed as a whole."""
    metric: Metric | None = None
    """The user's metric on the outputs, for that check."""
    meter: Callable[..., Timing] = measure
    """What times contenders; scripted in tests."""


@dataclass
class _Unit:
    """One method of one module on its way through the run."""

    module: InspectedModule
    recording: Recording
    signatures: list[RecordedSignature]
    benches: list[Bench] = field(default_factory=list)
    lists: list[Shortlist] = field(default_factory=list)
    built: list[dict[str, Built]] = field(default_factory=list)
    trials: list[list[Trial]] = field(default_factory=list)
    contexts: list[ChoiceContext] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    depth: int = 0


class Tuner:
    """Tunes a target. `steps()` is the one generator that the command line, tests and notebooks drive.

    Nothing of the target changes before the last step, in which all choices are installed at once; a failure, an
    interrupt or `cancel()` before leaves it as it was. After the generator has ended, `choices`, `trials` and
    `inspection` hold the result.
    """

    def __init__(
        self,
        target: Any,
        data: Any,
        *,
        plan: Plan | None = None,
        modules: Sequence[InspectedModule] | None = None,
        inspection: Inspection | None = None,
        options: TuneOptions | None = None,
    ) -> None:
        self.target, self.data = target, data
        self.plan = plan or Plan()
        self.options = options or TuneOptions()
        self.modules = modules
        self.inspection = inspection
        self.trials: dict[str, Trial] = {}
        self.choices: list[Choice] = []
        self.failures: dict[str, str] = {}
        self.end_to_end: EndToEnd | None = None
        self.understood = ""
        self.phase = ""
        """What the running trial does just now (`"compiling"`, `"measure"`); may be read from any thread."""
        self._seq = 0
        self._start = time.perf_counter()
        self._cancelled = False
        self._seconds_by_backend: dict[str, list[float]] = {}
        self._digests: dict[int, str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="aitune-lab-"))
        self._folder.chmod(0o700)
        # Artifacts live as long as what is installed from them (the jobs hold the tuner's finaliser through `keep`).
        self.keep = weakref.finalize(self, shutil.rmtree, str(self._folder), True)

    def cancel(self) -> None:
        """Stop at the next step; may be called from any thread."""
        self._cancelled = True

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise Cancelled

    def _event(self, kind: EventKind, **parts: Any) -> Event:
        data = parts.pop("data", {})
        self._seq += 1
        return Event(self._seq - 1, time.perf_counter() - self._start, kind, data=data, **parts)

    def _log(self, message: str, level: str = "info") -> Event:
        return self._event("log", data={"level": level, "message": message})

    def steps(self) -> Iterator[Event]:
        """Run, an event at a time. Errors of the user's input are raised after a `run_failed` event."""
        units: list[_Unit] = []
        try:
            yield from self._run(units)
        except Cancelled:
            self._close(units)
            yield self._event("run_cancelled", data={"seconds": time.perf_counter() - self._start})
        except Exception as error:
            self._close(units)
            yield self._event("run_failed", data={"error": as_error(error)})
            raise
        except KeyboardInterrupt:
            self._close(units)
            yield self._event("run_cancelled", data={"seconds": time.perf_counter() - self._start})
            raise
        except BaseException:
            self._close(units)
            raise
        finally:
            _free_cached_memory()

    def _run(self, units: list[_Unit]) -> Iterator[Event]:
        yield self._log("inspecting the target")
        if self.inspection is None:
            self.inspection = self._inspect()
        self.understood = self.inspection.understood
        yield self._event("inspected", data={"rows": [to_data(row) for row in self.inspection.rows]})
        paths = [row.path for row in self.inspection.rows]
        for warning in check_plan(self.plan, paths, registry.names()):
            yield self._log(warning, "warning")
        cut = self._cut()
        if not cut:
            raise TargetError(self._nothing_to_tune())
        yield self._log(f"recording {len(cut)} module{'s' if len(cut) > 1 else ''}")
        units.extend(self._record(cut))
        planned = [c for unit in units for listed in unit.lists for c in listed.candidates]
        yield self._event(
            "run_started",
            data={
                "target": type(self.target).__name__,
                "modules": [unit.module.path for unit in units],
                "trials": len(planned),
                "estimated_seconds": estimated_seconds(planned, {}),
                "estimated_bytes": sum(
                    u.module.row.parameter_bytes * len(s.candidates) for u in units for s in u.lists
                ),
                "understood": self.understood,
                "planned": [_planned(unit, index) for unit in units for index in range(len(unit.lists))],
                "limits": to_data(self.plan.limits),
            },
        )
        yield self._event("plan_changed", data={"plan": to_data(self.plan)})
        for unit in units:
            for recorded in unit.signatures:
                for note in recorded.notes:
                    yield self._log(f"{unit.module.path or '(model)'}: {note}", "warning")
        if self.options.dry_run:
            yield self._event(
                "run_finished", data={"seconds": time.perf_counter() - self._start, "choices": 0, "dry_run": True}
            )
            return
        done = 0
        total = len(planned)
        while done < len(units):
            unit = units[done]
            yield from self._tune_unit(unit, total)
            children = self._children(unit, units)
            if children:
                yield self._log(
                    f"{unit.module.path or '(model)'} stays eager, so its {len(children)} children are tried"
                )
                added = self._record(children)
                for child in added:
                    child.depth = unit.depth + 1
                units.extend(added)
                total += sum(len(s.candidates) for child in added for s in child.lists)
            done += 1
        prepared = self._prepare(units)
        self._check_cancelled()
        install_all(prepared)
        self.choices = [choice for unit in units for choice in unit.choices]
        estimate = self._estimate(units)
        units.clear()  # what is installed belongs to the target now, whatever happens from here on
        if prepared and self.options.end_to_end:
            yield self._log("checking the tuned target end to end")
            self.end_to_end = self._check_end_to_end(prepared)
            yield self._log(self.end_to_end.sentence, "info" if self.end_to_end.within_budget else "warning")
        yield self._event(
            "run_finished",
            data={
                "seconds": time.perf_counter() - self._start,
                "choices": len(self.choices),
                "estimate": estimate,
                "end_to_end": to_data(self.end_to_end) if self.end_to_end is not None else None,
            },
        )

    def _check_end_to_end(self, prepared: Sequence[Installed]) -> EndToEnd:
        """What is installed is left as it is, whatever comes out, also if the check fails or is interrupted."""
        options = self.options
        assert self.inspection is not None
        seconds = self.inspection.seconds_per_iteration
        if seconds > MAX_PASS_SECONDS:
            why = (
                f"one pass over the data takes {seconds:.0f} s; aitune_lab.tuning.endtoend.check(target, data) does it"
            )
            return EndToEnd(skipped=why)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AituneWarning)
                return check(
                    self.target,
                    self.data,
                    metric=options.metric,
                    inference_function=options.inference_function,
                    batch_sizes=options.batch_sizes,
                    max_batches_per_batch_size=options.max_batches_per_batch_size,
                    tolerance=self.plan.tolerance,
                    max_seconds=MAX_PASS_SECONDS,
                    meter=options.meter,
                )
        except KeyboardInterrupt:
            return EndToEnd(skipped="interrupted; what was chosen is in use")
        except Exception as error:
            return EndToEnd(skipped=f"it failed: {as_error(error)}")
        finally:
            for item in prepared:
                item.dispatch.reset_counts()

    def _inspect(self) -> Inspection:
        return inspect(
            self.target,
            self.data,
            inference_function=self.options.inference_function,
            iterations=1,
            batch_sizes=self.options.batch_sizes,
            max_batches_per_batch_size=self.options.max_batches_per_batch_size,
        )

    def _cut(self) -> list[InspectedModule]:
        """What to tune: the user's modules or the outermost ones, less what the plan leaves, with pins instead of parents."""
        assert self.inspection is not None
        by_path = {row.path: row for row in self.inspection.rows}
        pinned = [p for p in outermost_pins(self.plan, list(by_path)) if by_path[p].tunable and by_path[p].calls]
        for path, rule in outermost_pins(self.plan, list(by_path)).items():
            if path not in pinned and not rule.pattern.startswith("re:"):
                raise PlanError(f"the pin on {path!r} can't be kept: the module can't be tuned: {by_path[path].reason}")
        chosen = list(self.modules) if self.modules is not None else self.inspection.get_modules()
        for item in chosen:
            row = by_path.get(item.path)
            if (
                self.modules is not None
                and row is not None
                and not row.tunable
                and self.options.on_module_failure == "raise"
            ):
                raise TargetError(f"module {item.path!r} can't be tuned: {row.reason}")
        kept = []
        for item in chosen:
            row = by_path.get(item.path, item.row)
            if not row.tunable:
                self.failures[item.path] = row.reason
                continue
            kept.extend(self._around(item, pinned))
        kept.extend(self._handle(p) for p in pinned if not any(_same_or_beneath(p, k.path) for k in kept))
        unique = {item.path: item for item in kept}
        return [item for path, item in unique.items() if not self._left_alone(path)]

    def _around(self, item: InspectedModule, pinned: Sequence[str]) -> list[InspectedModule]:
        """The module, or, if the user pinned something beneath it, its children with the pinned ones among them."""
        inner = [p for p in pinned if _beneath(p, item.path)]
        if not inner or self._rule(item.path) is not None:
            return [item]
        result = []
        for child in self._child_handles(item.path):
            result.extend(self._around(child, pinned))
        return result or [item]

    def _rule(self, path: str) -> Rule | None:
        return self.plan.rule_for(path)

    def _left_alone(self, path: str) -> bool:
        rule = self._rule(path)
        return rule is not None and rule.action == "leave"

    def _handle(self, path: str) -> InspectedModule:
        assert self.inspection is not None
        row = next(r for r in self.inspection.rows if r.path == path)
        return InspectedModule(path, self.inspection._modules[path], row.method, row)

    def _child_handles(self, path: str) -> list[InspectedModule]:
        """The outermost tunable modules beneath a path that ran."""
        assert self.inspection is not None
        found: list[str] = []
        for row in sorted(self.inspection.rows, key=lambda r: r.depth):
            if _beneath(row.path, path) and row.calls and row.tunable and not any(_beneath(row.path, p) for p in found):
                found.append(row.path)
        return [self._handle(p) for p in found]

    def _nothing_to_tune(self) -> str:
        assert self.inspection is not None
        reasons = sorted(
            {f"{r.path or '(model)'}: {r.reason}" for r in self.inspection.rows if r.reason and r.depth <= 1}
        )
        left = [r.path for r in self.inspection.rows if self._left_alone(r.path)]
        why = "; ".join(reasons[:5]) or (f"the plan leaves {left} alone" if left else "none ran")
        return f"no module of this {type(self.target).__name__} can be tuned ({why})"

    def _record(self, cut: Sequence[InspectedModule]) -> list[_Unit]:
        understood = understand(
            self.data,
            takes=takes(self.target, self.options.inference_function),
            batch_sizes=self.options.batch_sizes,
            max_batches_per_batch_size=self.options.max_batches_per_batch_size,
        )
        recorder = Recorder(
            [(item.path, item.module, item.method) for item in cut],
            samples=self.plan.limits.max_samples_per_point,
            max_bytes=self.plan.limits.max_sample_bytes,
        )
        no_grad = torch.no_grad() if torch.is_grad_enabled() else _nothing()
        with no_grad, preserved(outermost(find_modules(self.target))), recorder.recording():
            for item in understood.fresh_items():
                self._check_cancelled()
                recorder.batch = item.batch
                run_item(self.target, self.options.inference_function, item.args, item.kwargs)
        units = []
        for chosen, recording in zip(cut, recorder.recordings, strict=True):
            unit = self._unit(chosen, recording)
            if unit is not None:
                units.append(unit)
        return units

    def _unit(self, item: InspectedModule, recording: Recording) -> _Unit | None:
        reason = why_not(recording)
        if reason is None and not recording.calls:
            reason = "it did not run"
        try:
            declared = self.options.dynamic_shapes.get(item.path)
            split = self.plan.split_points
            signatures = declared_signatures(recording, declared, split_points=split) if reason is None else []
            signatures.sort(key=lambda s: -sum(s.seconds.values()))
            signatures = [probe(recording, s) for s in signatures[:MAX_SIGNATURES]]
        except DataError:
            raise
        except Exception as error:
            reason = f"its recorded calls can't be run again: {as_error(error)}"
        if reason is not None:
            self._fail(item.path, reason)
            return None
        unit = _Unit(item, recording, signatures)
        rule = self._rule(item.path)
        for recorded in signatures:
            unit.lists.append(self._shortlist(item, recorded, rule))
            unit.benches.append(self._bench(recording, recorded))
            unit.built.append({})
            unit.trials.append([])
            complexity = {c.label: complexity_of(c) for c in [EAGER, *unit.lists[-1].candidates]}
            context = ChoiceContext(self.plan.tolerance, complexity=complexity, not_tried=unit.lists[-1].not_tried)
            unit.contexts.append(replace(context, memory_limit_bytes=self.plan.limits.memory_bytes))
        return unit

    def _fail(self, path: str, reason: str) -> None:
        if self.options.on_module_failure == "raise":
            raise TargetError(f"module {path or '(model)'!r} can't be tuned: {reason}")
        self.failures[path] = reason

    def _strategy(self, rule: Rule | None) -> Strategy:
        own = rule.strategy if rule is not None and rule.action == "strategy" else None
        config: StrategyConfig = own or self.plan.strategy
        return strategy_of(config)

    def _shortlist(self, item: InspectedModule, recorded: RecordedSignature, rule: Rule | None) -> Shortlist:
        if rule is not None and rule.action == "pin" and rule.candidate is not None:
            listed = [] if rule.candidate == EAGER else [rule.candidate]
            return shortlist(item.path, item.module, recorded.signature, Plan(), listed)
        strategy = self._strategy(rule)
        result = shortlist(item.path, item.module, recorded.signature, self.plan, self.options.backends)
        for extra in strategy.extra_candidates():
            if extra not in result.candidates:
                result.candidates.insert(0, extra)
        result.candidates = [c for c in result.candidates if strategy.admits(c)]
        return result

    def _bench(self, recording: Recording, recorded: RecordedSignature) -> Bench:
        return Bench(
            recording,
            recorded,
            self.plan.tolerance,
            {},
            self._folder,
            torch.get_num_threads(),
            limits_of(self.plan.limits.search, self.options.measure_limits),
            self._check_cancelled,
            self.options.meter,
        )

    def _tune_unit(self, unit: _Unit, total: int) -> Iterator[Event]:
        """All candidates over all signatures of a unit, the cheapest candidates first, then the choices."""
        rule = self._rule(unit.module.path)
        strategy = self._strategy(rule)
        order = sorted(
            {c for s in unit.lists for c in s.candidates}, key=lambda c: min(_position(s, c) for s in unit.lists)
        )
        stops_early = type(strategy).enough is not Strategy.enough and not (rule is not None and rule.action == "pin")
        settled: set[int] = set()
        for candidate in order:
            for index, listed in enumerate(unit.lists):
                if candidate not in listed.candidates:
                    continue
                if skipped := self._why_skipped(unit, index, candidate, strategy):
                    listed.not_tried[candidate.label] = skipped
                    continue
                if index in settled:
                    listed.not_tried[candidate.label] = "not tried: the first right and faster one was taken"
                    continue
                yield from self._one_trial(unit, index, candidate, total, rule)
                if stops_early:
                    decision = yield from self._decide(unit, index, strategy)
                    if strategy.enough(decision):
                        settled.add(index)
        for index in range(len(unit.signatures)):
            yield from self._choose(unit, index, strategy, rule)

    def _one_trial(
        self, unit: _Unit, index: int, candidate: Candidate, total: int, rule: Rule | None
    ) -> Iterator[Event]:
        self._check_cancelled()
        listed, bench = unit.lists[index], unit.benches[index]
        place = {"path": unit.module.path, "signature": bench.recorded.signature.key, "candidate": candidate}
        spent, limits = time.perf_counter() - self._start, self.plan.limits
        if spent > limits.max_seconds or len(self.trials) >= limits.max_trials:
            what = f"{limits.max_seconds:.0f} s" if spent > limits.max_seconds else f"{limits.max_trials} trials"
            listed.not_tried[candidate.label] = f"not tried: the run's limit of {what} was reached"
            yield self._log(
                f"{unit.module.path or '(model)'}: {candidate.label} {listed.not_tried[candidate.label]}", "warning"
            )
            return
        yield self._event("trial_started", **place, data={"index": len(self.trials), "total": total, "phase": "build"})
        start = time.perf_counter()
        accept = rule is not None and rule.action == "pin" and rule.accept_error
        rival = self._rival(unit, index, rule)
        steps = trial_steps(bench, candidate, self._digest(unit.module.module), accept_error=accept, rival=rival)
        built = yield from self._progress(steps, place)
        self._seconds_by_backend.setdefault(candidate.backend, []).append(time.perf_counter() - start)
        built.trial = self._weighted(bench, built.trial)
        if built.installed is not None:
            built.installed.trial = built.trial
        unit.trials[index].append(built.trial)
        unit.built[index][candidate.label] = built
        self.trials[built.trial.key] = built.trial
        failed = built.trial.status != "ok" or built.trial.error_class == "refused"
        yield self._event("trial_failed" if failed else "trial_finished", **place, data={"trial": to_data(built.trial)})

    def _best(self, unit: _Unit, index: int) -> Contender | None:
        return best_so_far(unit.trials[index], self._eager_so_far(unit, index), self.plan.tolerance)

    def _rival(self, unit: _Unit, index: int, rule: Rule | None) -> Rival | None:
        """Who a rough look compares the next candidate with; None if it is measured in full whatever it takes."""
        strategy = self._strategy(rule)
        pinned = rule is not None and rule.action == "pin"
        if not looks_first(self.plan.limits.search, strategy, pinned=pinned):
            return None
        return rival_of(self._best(unit, index), strategy)

    def _why_skipped(self, unit: _Unit, index: int, candidate: Candidate, strategy: Strategy) -> str | None:
        first = unit.lists[index].variant_of.get(candidate)
        if first is None:
            return None
        trials, best = unit.trials[index], self._best(unit, index)
        return why_skipped(self.plan.limits.search, candidate, first, trials, best, strategy)

    def _progress(self, steps: Steps[Built], place: Mapping[str, Any]) -> Generator[Event, None, Built]:
        """A trial's phases as events."""
        while True:
            self._check_cancelled()
            try:
                phase, fraction = next(steps)
            except StopIteration as stop:
                result: Built = stop.value
                return result
            yield self._event("trial_progress", **place, data={"phase": phase, "fraction": fraction})

    def _digest(self, module: torch.nn.Module) -> str:
        if id(module) not in self._digests:
            self._digests[id(module)] = content_digest(module)
        return self._digests[id(module)]

    def _weighted(self, bench: Bench, trial: Trial) -> Trial:
        """With batch_sizes each size counts the same, relative to eager there; else each point counts its calls."""
        if self.options.batch_sizes is None:
            points = tuple(replace(p, weight=float(p.calls)) for p in trial.points)
            return replace(trial, points=points)

        def weight(result: PointResult) -> float:
            if not result.calls:  # an end of a declared range, which no batch size asked for
                return 0.0
            return 1.0 / result.eager.median_ms if result.eager is not None and result.eager.median_ms > 0 else 1.0

        return replace(trial, points=tuple(replace(p, weight=weight(p)) for p in trial.points))

    def _eager(self, unit: _Unit, index: int) -> Trial:
        eager = self._eager_so_far(unit, index)
        self.trials[eager.key] = eager
        return eager

    def _eager_so_far(self, unit: _Unit, index: int) -> Trial:
        bench = unit.benches[index]
        return self._weighted(bench, eager_trial(bench, self._digest(unit.module.module), unit.trials[index]))

    def _decide(self, unit: _Unit, index: int, strategy: Strategy) -> Generator[Event, None, Decision]:
        """The strategy's decision, with second looks at provisional winners until it stands."""
        trials, eager = unit.trials[index], self._eager(unit, index)
        decision = strategy.choose(trials, eager, unit.contexts[index])
        while decision.second_look:
            context, trial = unit.contexts[index], decision.second_look[0]
            label = trial.candidate.label
            yield self._log(f"{unit.module.path or '(model)'}: measuring {label} a second time")
            confirmed, p_value = self._second_look(unit, index, trial, strategy, eager)
            unit.contexts[index] = replace(
                context,
                confirmed={**context.confirmed, label: confirmed},
                p_values={**context.p_values, label: p_value},
            )
            decision = strategy.choose(trials, eager, unit.contexts[index])
        return decision

    def _choose(self, unit: _Unit, index: int, strategy: Strategy, rule: Rule | None) -> Iterator[Event]:
        pinned = rule is not None and rule.action == "pin"
        if rule is not None and rule.action == "pin":
            listed = unit.lists[index]
            if listed.not_tried and rule.candidate is not None and rule.candidate != EAGER:
                reason = next(iter(listed.not_tried.values()))
                raise PlanError(f"the pin of {rule.candidate.label} on {rule.pattern!r} can't be kept: {reason}")
            decision = decide_pin(rule, unit.trials[index], self._eager(unit, index), self.plan.tolerance)
        else:
            decision = yield from self._decide(unit, index, strategy)
        choice = self._as_choice(unit, index, decision, pinned)
        unit.choices.append(choice)
        for label, built in unit.built[index].items():
            if label != choice.candidate.label and built.installed is not None:
                built.installed.executable.close()
        yield self._event(
            "choice_made",
            path=unit.module.path,
            signature=choice.signature,
            candidate=choice.candidate,
            data={"choice": to_data(choice)},
        )

    def _second_look(
        self, unit: _Unit, index: int, trial: Trial, strategy: Strategy, eager: Trial
    ) -> tuple[bool, float]:
        """Fresh blocks at the points that decide: the candidate must be faster again, weighted as the first time."""
        bench, label, context = unit.benches[index], trial.candidate.label, unit.contexts[index]
        built = unit.built[index][label]
        points = strategy.decisive_points(trial, eager, context)
        weights = {p.point: p.weight if len(points) > 1 else 1.0 for p in trial.points}
        timings = {point: time_point(bench, built, point, seed=1) for point in points}
        # The candidates already looked at took their share of alpha (Holm's step-down).
        alpha = 0.01 / max(1, len(unit.lists[index].candidates) - len(context.confirmed))
        verdict = faster(weighted_sum(timings, weights, (label, "eager")), label, "eager", alpha=alpha)
        return verdict.is_faster, verdict.p_value

    def _as_choice(self, unit: _Unit, index: int, decision: Decision, pinned: bool) -> Choice:
        trial, signature = decision.winner, unit.signatures[index].signature
        speedups = [p.speedup for p in trial.points if p.speedup is not None and p.weight]
        costs = [
            (p.weight * p.latency.median_ms, p.weight * p.eager.median_ms)
            for p in trial.points
            if p.latency and p.eager
        ]
        overall = sum(e for _, e in costs) / sum(c for c, _ in costs) if costs and speedups else None
        return Choice(
            unit.module.path,
            unit.module.method,
            signature.key,
            trial.candidate,
            trial.key,
            decision.reason,
            overall,
            trial.error_class,
            trial.relative_l2,
            trial.factor_over_eager,
            pinned,
            decision.accepted_error,
            decision.losers,
        )

    def _children(self, unit: _Unit, units: Sequence[_Unit]) -> list[InspectedModule]:
        """The children of a unit that stays eager everywhere: the next cut to try."""
        if unit.depth >= MAX_CUT_DEPTH or any(c.candidate != EAGER for c in unit.choices):
            return []
        if any(c.pinned for c in unit.choices) or unit.module.method != "forward":
            return []
        # Other load spoilt the measurements, or time is up: that says nothing against the module as a whole.
        spent = time.perf_counter() - self._start
        measured = [m for trials in unit.trials for t in trials for p in t.points for m in (p.latency, p.eager) if m]
        if spent > self.plan.limits.max_seconds or any(m.disturbed for m in measured):
            return []
        known = {u.module.path for u in units}
        children = [c for c in self._child_handles(unit.module.path) if c.row.share >= MIN_CHILD_SHARE]
        return [c for c in children if c.path not in known and not self._left_alone(c.path)]

    def _prepare(self, units: Sequence[_Unit]) -> list[Installed]:
        """The dispatch of every method with a choice other than eager."""
        prepared = []
        for unit in units:
            if all(choice.candidate == EAGER for choice in unit.choices):
                continue
            entries = [self._installed(unit, i, choice) for i, choice in enumerate(unit.choices)]
            options = self.options
            prepared.append(
                prepare(
                    unit.module.module,
                    unit.module.method,
                    unit.module.path,
                    entries,
                    self.plan,
                    on_miss=options.on_miss,
                    weights=options.weights,
                )
            )
        return prepared

    def _installed(self, unit: _Unit, index: int, choice: Choice) -> InstalledExecutable:
        built = unit.built[index].get(choice.candidate.label)
        if built is None or built.installed is None:
            # Eager among other choices: the call still counts as tuned, and runs the original.
            built = eager_built(unit.benches[index], self.trials[choice.trial or ""])
            assert built.installed is not None
        built.installed.choice = choice
        return built.installed

    def _estimate(self, units: Sequence[_Unit]) -> dict[str, Any]:
        """The target's time with these choices: eager end to end minus calls × saving. An estimate until measured."""
        assert self.inspection is not None
        saving = 0.0
        for unit in units:
            for choice in unit.choices:
                trial = self.trials.get(choice.trial or "")
                for p in trial.points if trial is not None and choice.candidate != EAGER else ():
                    if p.latency is not None and p.eager is not None:
                        saving += p.calls * (p.eager.median_ms - p.latency.median_ms) / 1000
        before = self.inspection.seconds_per_iteration
        return {
            "eager_seconds": before,
            "tuned_seconds": max(before - saving, 0.0),
            "kind": "estimate",
            "error": "unknown until measured",
        }

    def _close(self, units: Sequence[_Unit]) -> None:
        for unit in units:
            for held in unit.built:
                for built in held.values():
                    if built.installed is not None:
                        built.installed.executable.close()


def weighted_sum(timings: Mapping[Point, Timing], weights: Mapping[Point, float], labels: Sequence[str]) -> Timing:
    """Timings of several points as one: round by round the weighted sum of latencies; disturbed if any one is."""
    rounds = min(len(t.blocks_ms[label]) for t in timings.values() for label in labels)
    blocks = {
        label: tuple(sum(weights[p] * t.blocks_ms[label][i] for p, t in timings.items()) for i in range(rounds))
        for label in labels
    }
    measurements = {}
    for label in labels:
        held = [t.measurements[label] for t in timings.values()]
        measurements[label] = next((m for m in held if m.disturbed), held[0])
    return Timing(measurements, blocks)


def _planned(unit: _Unit, index: int) -> dict[str, Any]:
    """One (module, signature) with the labels of its candidates, for those who want to know before the start."""
    listed, signature = unit.lists[index], unit.signatures[index].signature
    labels = [candidate.label for candidate in listed.candidates]
    return {
        "path": unit.module.path,
        "method": unit.module.method,
        "signature": signature.key,
        "label": signature.label,
        "candidates": labels,
        "not_tried": dict(listed.not_tried),
    }


def _free_cached_memory() -> None:
    """Give memory of the GPU that the run used back to the device: the user's process goes on with what it had."""
    if torch.cuda.is_initialized():
        gc.collect()
        with suppress(RuntimeError):  # a lost device keeps it
            torch.cuda.empty_cache()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _position(listed: Shortlist, candidate: Candidate) -> int:
    return listed.candidates.index(candidate) if candidate in listed.candidates else len(listed.candidates)


def _beneath(path: str, other: str) -> bool:
    return path != other and (other == "" or path.startswith(other + "."))


def _same_or_beneath(path: str, other: str) -> bool:
    return path == other or _beneath(path, other)


def checked_modules(target: Any, modules: Sequence[Any], inspection: Inspection) -> list[InspectedModule]:
    """Modules given as such, by path or as `InspectedModule`. Raises TargetError for one that the target doesn't hold."""
    by_module = {id(m): p for p, m in modules_of(target).items()}
    rows = {row.path: row for row in inspection.rows}
    result = []
    for item in modules:
        path = item if isinstance(item, str) else getattr(item, "path", None)
        if isinstance(item, torch.nn.Module):
            path = by_module.get(id(item))
            path = path if path in rows else next((p for p, m in inspection._modules.items() if m is item), None)
        if path not in rows:
            raise TargetError(f"modules must be among those of the target, {sorted(rows)[:20]}, but got {item!r}")
        row = rows[path]
        result.append(InspectedModule(path, inspection._modules[path], row.method, row))
    return result
