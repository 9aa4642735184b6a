"""What a tuning came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._display import Printed
from ..schema import Choice, Event, Plan, Signature, Trial
from .endtoend import EndToEnd
from .recall import Counts

if TYPE_CHECKING:
    from .run_report import RunReport


@dataclass(frozen=True)
class TuneResult(Printed):
    """Choices, trials and events of a run. Shows itself as tables; `to_dataframe()` gives the trials.

    Attributes:
        choices: one for each (module, signature), with its reason in a sentence.
        trials: everything that was tried, by key.
        failures: modules that could not be tuned, with the reason.
        plan: the plan that was followed.
        events: the run, replayable.
        understood: what the data was taken to mean.
        seconds: how long the run took.
        end_to_end: the tuned target as a whole against the untuned one, measured; None if nothing was tuned.
        signatures: those for which something is installed, by key.
        counts: what was really built and measured, and what was taken from earlier runs.
        estimate: predicted end-to-end seconds with these choices (`eager_seconds`, `tuned_seconds`).
    """

    choices: tuple[Choice, ...]
    trials: Mapping[str, Trial]
    failures: Mapping[str, str]
    plan: Plan
    events: tuple[Event, ...]
    understood: str = ""
    seconds: float = 0.0
    estimate: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    end_to_end: EndToEnd | None = None
    signatures: Mapping[str, Signature] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def trials_of(self, choice: Choice) -> list[Trial]:
        """The trials of a choice's module and signature, in the order in which they ran."""
        return [t for t in self.trials.values() if t.path == choice.path and t.signature == choice.signature]

    @property
    def figures(self) -> Any:
        """Its figures, drawn by Plotly: `result.figures.latency("encoder")`; see `aitune_lab.figures`."""
        from .._display import report

        return report().figures.Figures(self)

    def to_dataframe(self) -> Any:
        """The trials as a pandas DataFrame. Raises MissingDependency without pandas."""
        from .._display import report

        return report().frames.trials_frame(tuple(self.trials.values()))

    def advice(self, stats: Any = None) -> list[Any]:
        """Findings with hazard, evidence and mitigation, the gravest first; see `aitune_lab.report.advice`.

        With `aitune_lab.stats(target)` also what calls since the tuning show.
        """
        from .._display import report

        return list(report().advice.tuning_advice(self, stats))

    def report(self) -> RunReport:
        """The whole run as one piece of data; `aitune_lab.save_report(result, path)` writes it as JSON."""
        from .run_report import report_of

        return report_of(self)

    def __str__(self) -> str:
        from .._display import report

        return str(report().results.result_text(self))

    def _repr_html_(self) -> str:
        from .._display import report

        return str(report().results.result_html(self))
