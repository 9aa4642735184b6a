"""Records the modules of a cut and sets up a race for each of their signatures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..capture.data import understand
from ..capture.declared import declared_signatures
from ..capture.inspector import InspectedModule, run_item, takes
from ..capture.probe import probe, why_not
from ..capture.recorder import Recorder, Recording
from ..capture.signature import RecordedSignature
from ..capture.state import preserved
from ..capture.tree import find_modules, outermost
from ..errors import DataError, TargetError
from ..isolation import Children, steps_here
from ..schema import Choice, Plan, Rule
from .bench import Bench
from .candidates import EAGER, Shortlist, complexity_of, shortlist
from .keys import Keys
from .options import TuneOptions
from .race import Race
from .recall import CountingMeter, Known, Recall
from .search import limits_of
from .strategies import ChoiceContext, Strategy, strategy_of
from .trial import as_error

MAX_SIGNATURES = 8
"""Signatures tuned for one method; calls of further ones run the original."""


@dataclass
class Unit:
    """One method of one module on its way through the run, with a race for each signature of its calls."""

    module: InspectedModule
    races: list[Race]
    notes: tuple[str, ...] = ()
    depth: int = 0
    """How many parents stayed eager before this one was tried."""

    @property
    def path(self) -> str:
        return self.module.path

    @property
    def name(self) -> str:
        """How logs call the module."""
        return self.path or "(model)"

    @property
    def choices(self) -> list[Choice]:
        return [race.choice for race in self.races if race.choice is not None]


@dataclass
class Preparation:
    """Turns modules into units: runs the data once, infers signatures, lists candidates.

    `digests` caches the content digests of modules' weights; `failures` collects what can't be tuned.
    """

    target: Any
    data: Any
    plan: Plan
    options: TuneOptions
    recall: Recall
    check_cancelled: Callable[[], None]
    digest: Callable[[torch.nn.Module], str]
    failures: dict[str, str] = field(default_factory=dict)
    children: Children | None = None
    """Where candidates are built; None: in this process."""

    @cached_property
    def meter(self) -> CountingMeter:
        """The options' meter, counted."""
        return CountingMeter(self.options.meter, self.recall.counts)

    def units(self, cut: Sequence[InspectedModule]) -> list[Unit]:
        """A unit for each module whose calls could be recorded. The target's state is put back.

        Raises TargetError for one that couldn't, if `on_module_failure` is "raise".
        """
        options = self.options
        understood = understand(
            self.data,
            takes=takes(self.target, options.inference_function),
            batch_sizes=options.batch_sizes,
            max_batches_per_batch_size=options.max_batches_per_batch_size,
        )
        recorder = Recorder(
            [(item.path, item.module, item.method) for item in cut],
            samples=self.plan.limits.max_samples_per_point,
            max_bytes=self.plan.limits.max_sample_bytes,
        )
        no_grad = torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
        with no_grad, preserved(outermost(find_modules(self.target))), recorder.recording():
            for item in understood.fresh_items():
                self.check_cancelled()
                recorder.batch = item.batch
                run_item(self.target, options.inference_function, item.args, item.kwargs)
        made = [self._unit(item, recording) for item, recording in zip(cut, recorder.recordings, strict=True)]
        return [unit for unit in made if unit is not None]

    def _unit(self, item: InspectedModule, recording: Recording) -> Unit | None:
        reason = why_not(recording)
        if reason is None and not recording.calls:
            reason = "it did not run"
        signatures: list[RecordedSignature] = []
        try:
            if reason is None:
                declared = self.options.dynamic_shapes.get(item.path)
                signatures = declared_signatures(recording, declared, split_points=self.plan.split_points)
                signatures.sort(key=lambda s: -sum(s.seconds.values()))
                signatures = [probe(recording, s) for s in signatures[:MAX_SIGNATURES]]
        except DataError:
            raise
        except Exception as error:
            reason = f"its recorded calls can't be run again: {as_error(error)}"
        if reason is not None:
            if self.options.on_module_failure == "raise":
                raise TargetError(f"module {item.path or '(model)'!r} can't be tuned: {reason}")
            self.failures[item.path] = reason
            return None
        rule = self.plan.rule_for(item.path)
        races = [self._race(item, recording, recorded, rule) for recorded in signatures]
        return Unit(item, races, tuple(note for recorded in signatures for note in recorded.notes))

    def _race(
        self, item: InspectedModule, recording: Recording, recorded: RecordedSignature, rule: Rule | None
    ) -> Race:
        listed = self._shortlist(item, recorded, rule)
        bench = Bench(
            recording,
            recorded,
            self.plan.tolerance,
            {},
            self.recall.folder,
            torch.get_num_threads(),
            limits_of(self.plan.limits.search, self.options.measure_limits),
            self.check_cancelled,
            self.meter,
            self.children.steps if self.children is not None else steps_here,
        )
        context = ChoiceContext(
            self.plan.tolerance,
            complexity={c.label: complexity_of(c) for c in [EAGER, *listed.candidates]},
            not_tried=listed.not_tried,
            memory_limit_bytes=self.plan.limits.memory_bytes,
        )
        equal_points = self.options.batch_sizes is not None
        known = Known(self.recall, Keys(bench, self.digest(item.module)))
        return Race(item, bench, listed, self.plan, known, context, equal_points)

    def _shortlist(self, item: InspectedModule, recorded: RecordedSignature, rule: Rule | None) -> Shortlist:
        signature = recorded.signature
        if rule is not None and rule.action == "pin" and rule.candidate is not None:
            listed = [] if rule.candidate == EAGER else [rule.candidate]
            return shortlist(item.path, item.module, signature, Plan(), listed)
        strategy = strategy_for(self.plan, rule)
        result = shortlist(
            item.path, item.module, signature, self.plan, self.options.backends, eager_ms=item.row.mean_ms
        )
        for extra in strategy.extra_candidates():
            if extra not in result.candidates:
                result.candidates.insert(0, extra)
        result.keep(strategy.admits)
        return result


def strategy_for(plan: Plan, rule: Rule | None) -> Strategy:
    """The strategy of a rule, else the plan's."""
    own = rule.strategy if rule is not None and rule.action == "strategy" else None
    return strategy_of(own or plan.strategy)


def weights_digests(content_digest: Callable[[torch.nn.Module], str]) -> Callable[[torch.nn.Module], str]:
    """`content_digest`, remembered for the length of a run."""
    digests: dict[int, str] = {}

    def digest(module: torch.nn.Module) -> str:
        if id(module) not in digests:
            digests[id(module)] = content_digest(module)
        return digests[id(module)]

    return digest
