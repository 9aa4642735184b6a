"""The workbench: inspect, choose, tune, compare and export one target, in a notebook or from a script."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..capture.data import refuse_empty
from ..capture.inspector import Inspection
from ..capture.tree import require_modules
from ..errors import PlanError, TargetError
from ..schema import Plan, StrategyConfig
from ..tuning import whatif
from ..tuning.api import moved
from ..tuning.candidates import as_candidate
from ..tuning.mixes import Estimate, Mix, SideBySide
from ..tuning.options import BackendLike, TuneOptions
from ..tuning.result import TuneResult
from ..tuning.strategies import Strategy
from . import plans, registry
from .core import options_of
from .display import HINT, Display, ProgressLine, bundle_of, can_show_widgets
from .exports import as_script, static_html, write_export
from .views_tune import ending_words, lab_text, run_words
from .whatifs import NamedMix, resolved
from .work import LabWork

if TYPE_CHECKING:
    from ..tuning.whatif_measure import Measured
    from .page import Page

LEAVE_SECONDS = 5.0
"""How long a Lab that ends waits for its page to say that it shows it no more."""

_log = logging.getLogger("aitune_lab")
_shown: weakref.WeakSet[Lab] = weakref.WeakSet()


class Lab(LabWork):
    """A target in the workbench. As the last expression of a notebook's cell it shows itself; every step is a method too.

    The engine runs on a thread of its own, in the modes of torch (gradients, autocast, device) of the cell that starts
    it. There is one engine for a target: making a Lab for a target that is being tuned gives the Lab that tunes it.

    Args:
        target: a module or any object that holds modules.
        data: what `aitune_lab.tune` takes.
        plan: pins, exclusions, tolerances, limits: a `Plan`, or the path of its TOML file.
        device: move target and data there first.
        options: the other keywords of `aitune_lab.tune`: `strategy`, `backends`, `batch_sizes`, `inference_function`, ….

    Raises:
        PlanError: unknown options, strategies or backends.
        DataError: an empty list, Dataset or DataLoader.
        TargetError: the target holds no module, or can't be moved to the device.

    Example::

        lab = ait.Lab(model, data)
        lab                     # shows the workbench
        lab.run()               # in a script: inspects and tunes, and waits for it
        lab.export("tuned.ait")
    """

    def __new__(cls, target: Any, data: Any = None, **options: Any) -> Lab:
        found = registry.lab_of(target)
        if isinstance(found, cls) and found.running:
            return found
        return super().__new__(cls)

    def __init__(
        self,
        target: Any,
        data: Any,
        *,
        plan: Plan | str | Path | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        known = registry.lab_of(target)
        if plan is None and known is not None:
            plan = known.plan  # running the cell again keeps what was pinned
        held, chosen = options_of(plan, options)
        if getattr(self, "_made", False):
            self._offer(data, held, chosen)
            return
        require_modules(target)
        refuse_empty(data)
        if device is not None:
            target, data = moved(target, data, torch.device(device))
        before = registry.lab_of(target)
        self._set_up(target, data, held, chosen)
        if isinstance(before, Lab):
            before._give_way()

    def _set_up(self, target: Any, data: Any, plan: Plan, options: TuneOptions) -> None:
        self._made = True
        self._page: Page | None = None
        self._display = Display()
        self._closed = self._replaced = False
        super().__init__(target, data, plan, options)

    # --- the five steps ----------------------------------------------------------------------------------------

    def inspect(self) -> Inspection:
        """Run the data through the target once or twice, wait for it, and give what was found.

        Raises what `aitune_lab.inspect` raises.
        """
        self._go("inspect")
        return self.settle(self.begin_inspection())

    def choose(self, **settings: Any) -> Plan:
        """Change how the next tune chooses; gives the plan.

        Args:
            settings: `strategy`, `accuracy` (`"budget"`, `"exact"`), `max_relative_error`, `search` (`"quick"`, `"normal"`,
                `"exhaustive"`), `max_seconds`, `max_trials`, `split_points`.

        Raises PlanError for other names and impossible values.
        """
        self.change_plan(plans.with_settings(self.plan, settings))
        return self.plan

    def pin(self, path: str, candidate: BackendLike, *, accept_error: bool = False) -> Plan:
        """Use a candidate for a module, whatever is faster, from the next tune on; gives the plan.

        Args:
            path: of the module, or `re:` and an expression that must match the whole path.
            candidate: a label such as `"inductor[freezing]"`, a backend class or instance, a `Candidate`.
            accept_error: also if it is out of tolerance; it stays marked so everywhere.

        Raises PlanError for unknown paths and backends, for one pin beneath another, and, with the figures, for a
        candidate that was found out of tolerance.
        """
        wanted = as_candidate(candidate)
        if not accept_error:
            why = plans.refusal(self.plan, path, wanted, self.snapshot.state.trials.values())
            if why is not None:
                raise PlanError(f"{why}. To use it all the same, say accept_error=True")
        self.change_plan(plans.with_pin(self.plan, path, wanted, accept_error=accept_error))
        return self.plan

    def unpin(self, path: str) -> Plan:
        """Choose automatically again for a module, or for those of a pattern; gives the plan."""
        self.change_plan(plans.without_rule(self.plan, path))
        return self.plan

    def leave(self, path: str) -> Plan:
        """Leave a module as it is; gives the plan."""
        self.change_plan(plans.with_left_alone(self.plan, path))
        return self.plan

    def exclude(self, candidate: str, path: str = "re:.*") -> Plan:
        """Don't try a backend, or a candidate by its label, for a module (all, if none is named); gives the plan."""
        self.change_plan(plans.with_excluded(self.plan, candidate, path))
        return self.plan

    def include(self, candidate: str) -> Plan:
        """Take back all exclusions of a backend or candidate; gives the plan."""
        self.change_plan(plans.without_excluded(self.plan, candidate))
        return self.plan

    def prefer(self, path: str, strategy: Strategy | StrategyConfig | str) -> Plan:
        """Choose by another strategy for a module, or for those of a pattern; gives the plan."""
        self.change_plan(plans.with_strategy(self.plan, path, strategy))
        return self.plan

    def tune(self) -> None:
        """Start tuning, and return at once. A tune that is going on goes on."""
        self._go("tune")
        self.begin_inspection()
        self.begin_tune()

    def wait(self) -> TuneResult:
        """Wait until the tune ends, with a line of progress, and give its result.

        An interrupt ends the waiting, not the tune. Raises what the tune raised; TargetError if none was started.
        """
        job = self._tune_job
        if job is None:
            raise TargetError("there is no tune to wait for: start one with lab.tune(), or lab.run()")
        line = ProgressLine()
        result = self.settle(job, tick=lambda: line.say(run_words(self.snapshot)))
        line.say(ending_words(self.snapshot, result))
        return result

    def run(self) -> TuneResult:
        """Inspect and tune, wait for it, and give the result: for scripts, and notebooks that run by themselves.

        An interrupt cancels the tune, which leaves the target as it was, and is raised again when it has ended.
        """
        self.tune()
        try:
            return self.wait()
        except KeyboardInterrupt:
            self.cancel()
            assert self._tune_job is not None
            self.settle(self._tune_job)
            raise

    def compare(self, *names: str) -> TuneResult | SideBySide:
        """The result of the tune; or the mixes of these names side by side.

        Raises TargetError before a tune has ended, PlanError for unknown names.
        """
        result = self.ended("lab.compare()")
        self._go("compare")
        if not names:
            return result
        mixes = {mix.name: mix for mix in self.shown.mixes.all_of(self.snapshot.state)}
        if unknown := [name for name in names if name not in mixes]:
            raise PlanError(f"mixes are {list(mixes)}, but got {unknown[0]!r}")
        return whatif.compare(self.snapshot.state, {name: mixes[name].mix for name in names})

    def whatif(self, mix: Mix, *, name: str | None = None) -> Estimate:
        """What another mix of what was tried would give: an estimate, at once. It joins the mixes of the step Compare.

        Args:
            mix: for each module, by path or (path, method, signature), a candidate or its label; those left out stay
                eager.
            name: of the mix; one of this name is replaced.

        Raises PlanError for what was not tried, and for a module beneath another of the mix.
        """
        state = self.snapshot.state
        held = NamedMix(name or self.shown.mixes.fresh_name(), resolved(state, mix))
        self.look(mixes=self.shown.mixes.with_mix(held))
        return whatif.estimate(state, held.mix, name=held.name)

    def measure(self, mix: str | Mix) -> Measured:
        """Build a mix, measure the whole target with it, and take it off again; waits, and gives both figures.

        Args:
            mix: a name, or a mix as `whatif` takes it.

        Raises PlanError and BuildError as `aitune_lab.tuning.whatif.measure` does.
        """
        name = mix if isinstance(mix, str) else self.whatif(mix).name
        return self.settle(self.begin_measure(name))

    def fork(self) -> Lab:
        """A second Lab of this target, with the same data, options, plan and results, to try something else in."""
        other = object.__new__(type(self))
        other._set_up(self.target, self.data, self.plan, self.options)
        other.inspection = self.inspection
        other._carry(self.snapshot.state, self.snapshot.result)
        other.shown, other.exports = self.shown, self.exports
        other.say("")
        registry.remember(self)
        return other

    def export(self, path: str | Path = "tuned.ait") -> str:
        """Write what its ending says: `.ait` the tuned model, `.toml` the plan, `.py` the code, `.html` the report.

        Gives the digest of a `.ait`, which `aitune_lab.load(trust=…)` takes, and else the path.

        Raises:
            TargetError: nothing is tuned yet, or a tune is running.
            DataError: another ending.
            CheckpointError: what `aitune_lab.save` raises.
        """
        self._go("export")
        return self.settle(self.begin("export", lambda: write_export(self, Path(path))))

    def code(self) -> str:
        """A script that comes to the same result."""
        return as_script(self)

    # --- the page ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the Lab: the notebook keeps a static copy. Returns at once; `close()` waits for it."""
        if not self._closed:
            threading.Thread(target=self.close, name="aitune-lab-close", daemon=True).start()

    def close(self) -> None:
        """End the Lab: cancel what runs, put the static copy in place of the page, and close its widgets.

        What is tuned stays tuned. If the page was reloaded since the first display it can't be replaced; then its
        widgets stay, and a line says how to keep the copy.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.cancel()
        page, self._page = self._page, None
        if page is None:
            return
        page.leave()
        self._display.replace(bundle_of(str(self), self.static()))
        if page.view.wait_until_left(LEAVE_SECONDS):
            page.view.close()
            return
        page.view.on_command(None)
        self.say(
            "This page was reloaded, so the notebook can't keep its copy here: run display(HTML(lab.static())).",
            "warning",
        )
        page.view.show(
            {
                "notice": {
                    "text": self.snapshot.notice.text if self.snapshot.notice else "",
                    "tone": "warning",
                    "actions": [],
                }
            }
        )

    def _give_way(self) -> None:
        """Another Lab of this target was made: this one's widgets go as soon as no page shows them."""
        self._replaced = True
        self._left()

    def _left(self) -> None:
        page = self._page
        if self._replaced and not self.running and page is not None and page.view.pages == 0:
            self.finish()

    def static(self) -> str:
        """What the page shows, as HTML that needs neither kernel nor script."""
        return static_html(self)

    def _ipython_display_(self) -> None:
        if self._closed or not can_show_widgets():
            hint = "" if self._closed or self.snapshot.result is not None else HINT
            Display().show(bundle_of(str(self), self.static() + hint))
            return
        try:
            page = self._make_page()
        except ImportError as error:
            self.say(str(error), "warning")
            Display().show(bundle_of(f"{error}\n{self}", self.static()))
            return
        self._display.show(bundle_of(str(self), self.static(), page.view.model_id))
        if not self.snapshot.state.rows:
            self.begin_inspection()

    def _make_page(self) -> Page:
        if self._page is None:
            from .page import Page

            self._page = Page(self)
            self._page.view.on_left(self._left)
            _shown.add(self)
        return self._page

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return lab_text(self.snapshot, self.inspection, running=self.running)

    def _tune(self) -> TuneResult:
        try:
            return super()._tune()
        finally:
            self._refresh(running=False)

    def _inspect(self) -> Inspection:
        try:
            return super()._inspect()
        finally:
            self._refresh()

    def _refresh(self, *, running: bool | None = None) -> None:
        """Bring the static copy in the notebook up to date; `running` says how it is as soon as this job has ended."""
        page = self._page
        if page is not None and not self._closed:
            try:
                now = self.running if running is None else running
                text = lab_text(self.snapshot, self.inspection, running=now)
                self._display.replace(bundle_of(text, self.static(), page.view.model_id))
            except Exception:
                _log.exception("the static copy in the notebook could not be brought up to date")

    def _go(self, step: str) -> None:
        if self._page is not None:
            self._page.go(step)


def _finish_all() -> None:
    """The kernel shuts down: leave static copies behind."""
    for lab in list(_shown):
        try:
            if not lab._closed and lab._page is not None:
                lab._display.replace(bundle_of(str(lab), lab.static()))
        except Exception:
            _log.debug("no static copy could be left behind", exc_info=True)


atexit.register(_finish_all)
