"""The commands `inspect` and `tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, PlanError
from .output import check_writable, print_json, stdout_for
from .targets import load_target

if TYPE_CHECKING:
    from ..schema import Plan
    from ..tuning.result import TuneResult


def inspect_target(options: argparse.Namespace) -> int:
    with stdout_for(options.json):
        target, data = load_target(options.target)
        from ..capture.inspector import inspect

        inspection = inspect(target, data, batch_sizes=options.batch_sizes)
    proposed = [item.path for item in inspection.get_modules()]
    if not options.json:
        from rich.console import Console

        from ..report.results import Block
        from ..report.terminal import inspection_blocks, print_blocks

        names = ", ".join(path or "(model)" for path in proposed) or "nothing"
        blocks = inspection_blocks(inspection, max_depth=options.depth)
        print_blocks(Console(), [*blocks, Block("", lines=[f"to tune: {names}"])])
        return 0
    from ..schema import to_data

    print_json(
        {
            "understood": inspection.understood,
            "seconds_per_iteration": inspection.seconds_per_iteration,
            "iterations": inspection.iterations,
            "warnings": list(inspection.warnings),
            "modules": [to_data(row) for row in inspection.rows],
            "proposed": proposed,
        }
    )
    return 0


def tune_target(options: argparse.Namespace) -> int:
    with stdout_for(options.json):
        result, digest = _tuned(options)
    if options.json:
        from ..report.results import result_data

        print_json(result_data(result) | {"file": options.output if digest else None, "digest": digest})
    if result.events[-1].kind == "run_cancelled":
        return 130
    if not digest and not result.dry_run:
        print(f"eager stays everywhere, so {options.output} was not written", file=sys.stderr)
        return 3
    return 0


def _tuned(options: argparse.Namespace) -> tuple[TuneResult, str | None]:
    """Tune, show, save; gives the result and the digest of the file, None if none was written."""
    plan = plan_of(options)
    check_writable(options.output, "the output")
    if Path(options.output).suffix != ".ait":
        print(f"note: {options.output} will be a .ait file, though its name doesn't end so", file=sys.stderr)
    if options.report:
        check_writable(options.report, "the report")
    if options.report and Path(options.report).absolute() == Path(options.output).absolute():
        raise DataError(f"--report and --output must be two files, but both are {options.output!r}")
    target, data = load_target(options.target)
    from rich.console import Console

    from ..report.results import result_blocks
    from ..report.terminal import print_blocks, progress_of
    from ..tuning import api
    from ..tuning.options import TuneOptions

    tuner = api.make_tuner(
        target,
        data,
        plan,
        TuneOptions(
            batch_sizes=options.batch_sizes,
            backends=backends_of(options.backend),
            dry_run=options.dry_run,
            store=options.store,
            retry=options.retry,
        ),
    )
    with progress_of(Console(stderr=True)) as progress:
        result = api.run(tuner, progress, journal=options.report)
    console = Console()
    if not options.json:
        console.print()
        print_blocks(console, result_blocks(result))
    if all(choice.candidate.backend == "eager" for choice in result.choices):
        return result, None
    from ..checkpoint import save

    return result, save(target, options.output)


def backends_of(names: Sequence[str] | None) -> tuple[Any, ...] | None:
    """What `--backend` names: a backend's own proposals, or one candidate where options stand in brackets."""
    from ..backends import registry
    from ..tuning.candidates import candidate_of_label

    if names is None:
        return None
    for name in names:
        registry.get(name.partition("[")[0])
    return tuple(candidate_of_label(name) if "[" in name else name for name in names)


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan file, if there is one, with the options of the command line laid over it; its rules come after theirs."""
    from ..backends import registry
    from ..schema import Plan, Rule
    from ..tuning.candidates import candidate_of_label
    from ..tuning.planfile import read_plan
    from ..tuning.strategies import strategy_of

    plan = read_plan(options.plan) if options.plan else Plan()
    rules = []
    for text in options.pin:
        path, equals, label = text.partition("=")
        if not equals or not label:
            raise PlanError(f"--pin must look like path=candidate, but got {text!r}")
        rules.append(Rule(path, "pin", candidate=candidate_of_label(label), accept_error=options.accept_error))
    for text in options.exclude:
        head, equals, tail = text.partition("=")
        # `inductor[mode=x]` has an equals sign of its own.
        path, label = (head, tail) if equals and "[" not in head else ("re:.*", text)
        name = label.partition("[")[0]
        if not label.startswith("re:") and name not in registry.names():
            raise PlanError(f"--exclude {text}: {registry.unknown(name, registry.names())}")
        rules.append(Rule(path, "exclude", excluded=label))
    plan = replace(plan, rules=(*rules, *plan.rules))
    if options.strategy:
        plan = replace(plan, strategy=strategy_of(options.strategy).config())
    if options.max_seconds is not None:
        _at_least_0("--max-seconds", options.max_seconds)
        plan = replace(plan, limits=replace(plan.limits, max_seconds=options.max_seconds))
    if options.memory_limit is not None:
        _at_least_0("--memory-limit", options.memory_limit)
        plan = replace(plan, limits=replace(plan.limits, memory_bytes=round(options.memory_limit * 1e9)))
    if options.accuracy:
        plan = replace(plan, tolerance=replace(plan.tolerance, accuracy=options.accuracy))
    if options.max_relative_error is not None:
        _at_least_0("--max-relative-error", options.max_relative_error)
        plan = replace(plan, tolerance=replace(plan.tolerance, max_relative_error=options.max_relative_error))
    return plan


def _at_least_0(name: str, value: float) -> None:
    if not value >= 0:
        raise PlanError(f"{name} must be a number of at least 0, but got {value}")
