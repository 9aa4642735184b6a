"""The magics `%aitune` and `%%aitune`: the Lab's steps as commands; every call gives an object that shows itself."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from .._display import Printed
from ..capture.inspector import Inspection, inspect
from ..errors import AituneError, DataError, TargetError
from ..report.doctor import examine, findings_text
from ..report.text import Column, html_table, render_table
from ..schema import Plan
from ..tuning.planfile import plan_to_toml, read_plan, write_plan
from ..tuning.strategies.words import counted
from . import plans, registry
from .core import options_of
from .executed import Executed, names_of, watching
from .lab import Lab
from .magic_parser import WORDS, Help, WrongUsage, documentation, make_parser, options_of_word, parse
from .plans import rule_sentence

MODEL = "(model)"
"""How the target itself is called where its path, which is empty, can't be typed."""


@dataclass(frozen=True)
class Shown(Printed):
    """A few lines of text that show themselves; `value` is what they are about."""

    text: str
    value: Any = None

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@dataclass(frozen=True)
class PlanShown(Printed):
    """A plan as TOML, and its rules in words."""

    plan: Plan

    def __str__(self) -> str:
        rules = "\n".join(f"# {rule_sentence(rule)}" for rule in self.plan.rules)
        return f"{rules or '# no rules: each module gets what measures best'}\n{plan_to_toml(self.plan)}".rstrip()

    __repr__ = __str__


_RAN = (
    Column("name", "module"),
    Column("class_name", "class"),
    Column("calls", "calls", right=True),
    Column("tunable", "can be tuned"),
    Column("next", "tune it with"),
)


@dataclass(frozen=True)
class CellExecuted(Printed):
    """What a cell executed: for each name its inspection, and the commands that tune it."""

    inspections: Mapping[str, Inspection]
    executed: Mapping[str, Executed]
    problems: Mapping[str, str] = field(default_factory=dict)
    unnamed: int = 0

    def _rows(self) -> list[dict[str, str]]:
        rows = []
        for name, held in self.executed.items():
            inspection = self.inspections.get(name)
            tunable = len(inspection.get_modules()) if inspection is not None else 0
            rows.append(
                {
                    "name": name,
                    "class_name": type(held.module).__name__,
                    "calls": str(held.calls),
                    "tunable": counted(tunable, "module") if inspection is not None else self.problems.get(name, ""),
                    "next": f"%aitune tune {name}" if tunable else "",
                }
            )
        return rows

    def _notes(self) -> list[str]:
        if not self.executed and not self.unnamed:
            return ["The cell called no torch module."]
        if self.unnamed:
            return [f"{counted(self.unnamed, 'module')} that no variable leads to ran too."]
        return []

    def __str__(self) -> str:
        return "\n".join([*([render_table(_RAN, self._rows())] if self.executed else []), *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{note}</p>" for note in self._notes())
        return (html_table(_RAN, self._rows()) if self.executed else "") + notes


@magics_class
class AituneMagics(Magics):  # type: ignore[misc]
    """Holds the Labs that the magics made, so that plan and results of a target last from call to call."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._parser = make_parser()
        self._labs: dict[int, Lab] = {}
        self._data: dict[int, Any] = {}
        shell.set_hook("complete_command", self._complete, str_key="%aitune")

    @line_cell_magic  # type: ignore[untyped-decorator]
    def aitune(self, line: str, cell: str | None = None) -> Any:
        """Replaced below by the help of all subcommands."""
        try:
            if cell is not None:
                return self._cell(line, cell)
            options = parse(self._parser, line)
            if isinstance(options, Help):
                return options
            result = getattr(self, f"_do_{options.word}")(options)
        except WrongUsage as error:
            raise UsageError(str(error)) from None
        except AituneError as error:
            # The message says it all: what happened, with which values, and what to do.
            raise UsageError(f"{type(error).__name__}: {error}") from None
        if options.output:
            self.shell.push({options.output: result})
        return result

    # --- subcommands -------------------------------------------------------------------------------------------

    def _do_inspect(self, options: argparse.Namespace) -> Inspection:
        return self._lab(options, batch_sizes=options.batch_sizes).inspect()

    def _do_tune(self, options: argparse.Namespace) -> Any:
        lab = self._lab(options, batch_sizes=options.batch_sizes, backends=options.backend, strategy=options.strategy)
        plan = self._plan_of(options, lab.plan)
        lab.change_plan(plan)
        if options.dry_run:
            return lab.would_do()
        try:
            return lab.run()
        except KeyboardInterrupt:
            # Cancelled cleanly by then: what was tried until then is a result, too.
            return lab.last_run() or Shown("cancelled; the target is as it was")

    def _do_plan(self, options: argparse.Namespace) -> PlanShown:
        lab = self._known(options.target)
        if options.read:
            lab.change_plan(read_plan(options.read))
        if options.write:
            write_plan(lab.plan, options.write)
        return PlanShown(lab.plan)

    def _do_pin(self, options: argparse.Namespace) -> PlanShown:
        lab = self._known(options.target)
        return PlanShown(lab.pin(_path(options.path), options.candidate, accept_error=options.accept_error))

    def _do_unpin(self, options: argparse.Namespace) -> PlanShown:
        return PlanShown(self._known(options.target).unpin(_path(options.path)))

    def _do_compare(self, options: argparse.Namespace) -> Any:
        return self._known(options.target).compare(*options.mix)

    def _do_whatif(self, options: argparse.Namespace) -> Any:
        lab = self._known(options.target)
        mix = dict(_pair(text, "a mix") for text in options.mix)
        estimate = lab.whatif(mix, name=options.name)
        return lab.measure(estimate.name) if options.measure else estimate

    def _do_export(self, options: argparse.Namespace) -> Shown:
        written = self._known(options.target).export(options.file)
        said = (
            f"saved to {options.file}; digest: {written}" if options.file.endswith(".ait") else f"written to {written}"
        )
        return Shown(said, written)

    def _do_load(self, options: argparse.Namespace) -> Any:
        from ..checkpoint import load

        return load(self._variable(options.target), options.file, trust=options.trust)

    def _do_report(self, options: argparse.Namespace) -> Shown:
        if not options.file.endswith(".html"):
            raise DataError(f"a report is an .html file, but got {options.file!r}")
        return Shown(f"written to {self._known(options.target).export(options.file)}", options.file)

    def _do_doctor(self, options: argparse.Namespace) -> Shown:
        found = examine()
        return Shown(findings_text(found), found)

    # --- %%aitune ----------------------------------------------------------------------------------------------

    def _cell(self, line: str, cell: str) -> Any:
        parser = argparse.ArgumentParser(prog="%%aitune", add_help=False, exit_on_error=False)
        parser.add_argument("-o", "--output")
        try:
            options, rest = parser.parse_known_args(line.split())
        except argparse.ArgumentError as error:
            raise WrongUsage(f"{error}\nusage: %%aitune [-o NAME]") from None
        if rest:
            raise WrongUsage(f"%%aitune takes only -o NAME, but got {' '.join(rest)!r}; a line of its own is %aitune …")
        with watching() as found:
            ran = self.shell.run_cell(cell, store_history=False)
        if not ran.success:
            return None  # IPython has shown the error
        named = names_of(found, self.shell.user_ns)
        inspections: dict[str, Inspection] = {}
        problems: dict[str, str] = {}
        for name, held in named.items():
            try:
                inspections[name] = inspect(held.module, held.data, iterations=1)
            except AituneError as error:
                problems[name] = str(error)
            else:
                self._data[id(held.module)] = held.data
        result = CellExecuted(inspections, named, problems, len(found) - len(named))
        if options.output:
            self.shell.push({options.output: result})
        return result

    # --- names, Labs, completion -------------------------------------------------------------------------------

    def _variable(self, name: str) -> Any:
        """A variable of the user's, or an attribute of one. Raises TargetError with close names."""
        first, *rest = name.split(".")
        names = self.shell.user_ns
        if first not in names:
            close = difflib.get_close_matches(first, [n for n in names if not n.startswith("_")], n=3)
            hint = f". Did you mean {' or '.join(close)}?" if close else ""
            raise TargetError(f"there is no variable {first!r}{hint}")
        value = names[first]
        for part in rest:
            if not hasattr(value, part):
                raise TargetError(f"{name!r} can't be found: a {type(value).__name__} has no attribute {part!r}")
            value = getattr(value, part)
        return value

    def _lab(self, options: argparse.Namespace, **given: Any) -> Lab:
        """The target's Lab, made anew where other data or other options are named."""
        target = self._variable(options.target)
        held = registry.lab_of(target)
        data = self._variable(options.data) if options.data else None
        wanted = {name: value for name, value in given.items() if value is not None}
        if isinstance(held, Lab) and (data is None or data is held.data) and not wanted:
            return held
        if data is None:
            data = held.data if held is not None else self._data.get(id(target))
        if data is None:
            raise DataError(
                f"no data is known for {options.target}: name a variable, as in `%aitune {options.word} {options.target} data`"
            )
        plan = held.plan if held is not None else None
        self._labs[id(target)] = lab = Lab(target, data, plan=plan, **wanted)
        return lab

    def _known(self, name: str) -> Lab:
        target = self._variable(name)
        held = registry.lab_of(target)
        if isinstance(held, Lab):
            return held
        data = self._data.get(id(target))
        if data is None:
            raise TargetError(f"{name} was not inspected yet: `%aitune inspect {name} data` does that")
        self._labs[id(target)] = lab = Lab(target, data)
        return lab

    def _plan_of(self, options: argparse.Namespace, plan: Plan) -> Plan:
        if options.plan:
            held = self.shell.user_ns.get(options.plan)
            plan = held if isinstance(held, Plan) else read_plan(options.plan)
        if options.strategy:
            plan = replace(plan, strategy=options_of(None, {"strategy": options.strategy})[0].strategy)
        for text in options.pin:
            path, label = _pair(text, "--pin")
            plan = plans.with_pin(plan, path, label, accept_error=options.accept_error)
        for name in options.exclude:
            plan = plans.with_excluded(plan, name)
        settings = {
            name: getattr(options, name)
            for name in ("accuracy", "max_relative_error", "max_seconds")
            if getattr(options, name) is not None
        }
        return plans.with_settings(plan, settings)

    def _complete(self, _: Any, event: Any) -> list[str]:
        """Subcommands, then options, module paths and candidates where they belong, and the user's variables."""
        words = event.line.split()[1:]
        done = words if event.line.endswith(" ") else words[:-1]
        if not done:
            return list(WORDS)
        if done[0] not in WORDS:
            return []
        if event.symbol.startswith("-"):
            return options_of_word(self._parser, done[0])
        if done[0] in ("pin", "unpin", "whatif") and len(done) >= 2:
            return self._paths_or_labels(done)
        return [name for name in self.shell.user_ns if not name.startswith("_")]

    def _paths_or_labels(self, done: list[str]) -> list[str]:
        try:
            held = registry.lab_of(self._variable(done[1]))
        except TargetError:
            return []
        if held is None:
            return []
        if done[0] == "pin" and len(done) >= 3:
            preview = held.snapshot.preview
            planned = [label for unit in preview.planned for label in unit["candidates"]] if preview else []
            return list(dict.fromkeys(["eager", *planned]))
        if done[0] == "unpin":
            return [rule.pattern or MODEL for rule in held.plan.rules if rule.action != "exclude"]
        return [path or MODEL for path in held.paths]


AituneMagics.aitune.__doc__ = documentation(make_parser())


def _path(text: str) -> str:
    return "" if text == MODEL else text


def _pair(text: str, what: str) -> tuple[str, str]:
    """`encoder=onnxruntime`, apart. A label in brackets may hold equals signs of its own."""
    path, equals, label = text.partition("=")
    if not equals or not label or "[" in path:
        raise WrongUsage(f"{what} must look like path=candidate, but got {text!r}")
    return _path(path), label
