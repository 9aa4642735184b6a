"""The command line: `aitune-lab demo | inspect | tune | bisect | show | doctor`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import inspect as python_inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import AituneError, DataError, PlanError, StoreError, TargetError, with_article

if TYPE_CHECKING:
    from .schema import Plan
    from .tuning.result import TuneResult

EXIT_CODES = """exit codes: 0 done; 1 unexpected error; 2 something in the input can't be used; 3 nothing was both right
and faster than eager, so no file was written; 130 cancelled, the target is as it was"""
_TARGET_HELP = "module:function or path/to/file.py:function, which returns (target, data)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code (see `EXIT_CODES`)."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("cancelled; the target is as it was", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`).
        sys.stderr.close()
        return 0
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        elif isinstance(error, AituneError):
            print(f"error: {_one_line(str(error))}", file=sys.stderr)
        else:
            said = _one_line(f"{type(error).__name__}: {error}")
            print(f"unexpected error: {said}; --debug shows where", file=sys.stderr)
        return 2 if isinstance(error, AituneError) else 1


def make_parser() -> argparse.ArgumentParser:
    """The parser; each command's namespace has `run`, the function that does it."""
    parser = argparse.ArgumentParser(
        prog="aitune-lab",
        description="Finds which inference backend is really fastest for each part of a PyTorch model.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"aitune-lab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="{demo,inspect,tune,bisect,show,doctor}")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EXIT_CODES)
        added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "tune a real sentence encoder, save it, and check it in a new process")
    demo.add_argument("--output", metavar="FILE", default="demo.ait", help="the .ait file (default: %(default)s)")
    _add_backend(demo)

    look = command("inspect", _inspect, "list the modules of a target with calls, time, shapes")
    look.add_argument("target", help=_TARGET_HELP)
    _add_batch_sizes(look)
    look.add_argument(
        "--depth", metavar="N", type=int, default=3, help="show so many levels of modules (default: %(default)s)"
    )

    tune = command("tune", _tune, "find the fastest right backend for a target and save it")
    tune.add_argument("target", help=_TARGET_HELP)
    tune.add_argument("--output", metavar="FILE", default="tuned.ait", help="the .ait file (default: %(default)s)")
    tune.add_argument("--plan", metavar="FILE", help="pins, exclusions, tolerances and limits as TOML")
    tune.add_argument("--strategy", metavar="NAME", help="how to choose, such as MinLatency (the default)")
    _add_backend(tune)
    _add_batch_sizes(tune)
    tune.add_argument(
        "--pin",
        metavar="PATH=CANDIDATE",
        action="append",
        default=[],
        help="use this candidate for a module, such as encoder=onnxruntime or 'encoder=inductor[freezing]'; "
        "an empty path is the target itself; repeatable",
    )
    tune.add_argument("--accept-error", action="store_true", help="keep pins also where they are out of tolerance")
    tune.add_argument(
        "--exclude",
        metavar="[PATH=]CANDIDATE",
        action="append",
        default=[],
        help="don't try a backend or candidate, everywhere or for one module; repeatable",
    )
    tune.add_argument("--max-seconds", metavar="S", type=float, help="start no trial after so many seconds")
    tune.add_argument("--accuracy", choices=("exact", "budget"), help="which candidates are right enough")
    tune.add_argument(
        "--max-relative-error", metavar="E", type=float, help="the budget: relative L2 error of an output"
    )
    tune.add_argument("--dry-run", action="store_true", help="say what would be tried, and try nothing")
    tune.add_argument("--report", metavar="FILE", help="write every event of the run, one line of JSON each")

    find = command("bisect", _bisect, "find the first submodule on which a candidate's numbers diverge")
    find.add_argument("target", help=_TARGET_HELP)
    find.add_argument("candidate", help="a backend or candidate, such as onnxruntime or 'inductor[freezing]'")
    find.add_argument("--module", metavar="PATH", help="begin at this module (default: the outermost ones)")

    show = command("show", _show, "print what is in a .ait file, without PyTorch")
    show.add_argument("file", help="the .ait file")

    command("doctor", _doctor, "say what this machine can do, what is missing and how to get it")
    return parser


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        metavar="NAME",
        action="append",
        help="try only this backend, or candidate such as 'inductor[freezing]'; repeatable (default: all)",
    )


def _add_batch_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes", metavar="1,8", type=_sizes, help="items are samples, collated to these batch sizes"
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"batch sizes must be positive whole numbers like 1,8, but got {text!r}")
    return sizes


def load_target(name: str) -> tuple[Any, Any]:
    """(target, data) from the function that `module:function` or `file.py:function` names.

    The current folder (a file's own folder) is searched first.

    Raises:
        TargetError: no such module or function, an import or call that fails, a result that is no pair.
    """
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise TargetError(f"a target must look like module:function or path/to/file.py:function, but got {name!r}")
    module = _import(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if python_inspect.isfunction(value)]
        close = difflib.get_close_matches(function_name, names, n=1) or names[:5]
        hint = f"; it has {', '.join(close)}" if close else ""
        raise TargetError(f"{place} has no function {function_name!r}{hint}")
    try:
        made = function()
    except AituneError:
        raise
    except Exception as error:
        raise TargetError(f"{name} failed: {type(error).__name__}: {error}. --debug shows where") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise TargetError(
            f"{name} must return the pair (target, data), but returned {with_article(type(made).__name__)}"
        )
    return made


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        _search_first(Path.cwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(f"{error.name}.")):
                raise TargetError(f"there is no module {place!r} in {Path.cwd()} or among those installed") from None
            raise TargetError(f"importing {place} failed: {error}") from error
        except Exception as error:
            raise TargetError(f"importing {place} failed: {type(error).__name__}: {error}") from error
    file = Path(place)
    if not file.is_file():
        raise TargetError(f"there is no file {place!r} in {Path.cwd()}")
    _search_first(file.resolve().parent)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickles look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"importing {place} failed: {type(error).__name__}: {error}") from error
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan file, if there is one, with the options of the command line laid over it; its rules come after theirs."""
    from .backends import registry
    from .schema import Plan, Rule
    from .tuning.candidates import candidate_of_label
    from .tuning.planfile import read_plan
    from .tuning.strategies import strategy_of

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
            raise PlanError(f"--exclude {text}: backend must be one of {sorted(registry.names())}, but got {name!r}")
        rules.append(Rule(path, "exclude", excluded=label))
    plan = replace(plan, rules=(*rules, *plan.rules))
    if options.strategy:
        plan = replace(plan, strategy=strategy_of(options.strategy).config())
    if options.max_seconds is not None:
        _at_least_0("--max-seconds", options.max_seconds)
        plan = replace(plan, limits=replace(plan.limits, max_seconds=options.max_seconds))
    if options.accuracy:
        plan = replace(plan, tolerance=replace(plan.tolerance, accuracy=options.accuracy))
    if options.max_relative_error is not None:
        _at_least_0("--max-relative-error", options.max_relative_error)
        plan = replace(plan, tolerance=replace(plan.tolerance, max_relative_error=options.max_relative_error))
    return plan


def _at_least_0(name: str, value: float) -> None:
    if not value >= 0:
        raise PlanError(f"{name} must be a number of at least 0, but got {value}")


def check_writable(path: str, what: str) -> None:
    """Raise StoreError, before anything takes time, if a file can't be written there."""
    folder = Path(path).absolute().parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(
            f"{what} {path!r} can't be written: {error.strerror or error} ({folder}). Name a file in another folder"
        ) from None
    if Path(path).is_dir():
        raise StoreError(f"{what} {path!r} is a folder: name a file")


def _demo(options: argparse.Namespace) -> int:
    from .demo import run_demo

    check_writable(options.output, "the output")
    return run_demo(options.output, backends=options.backend, as_json=options.json)


def _inspect(options: argparse.Namespace) -> int:
    with _stdout_for(options.json):
        target, data = load_target(options.target)
        from .capture.inspector import inspect

        inspection = inspect(target, data, batch_sizes=options.batch_sizes)
    proposed = [item.path for item in inspection.get_modules()]
    if not options.json:
        from rich.console import Console

        from .report.results import Block
        from .report.terminal import inspection_blocks, print_blocks

        names = ", ".join(path or "(model)" for path in proposed) or "nothing"
        blocks = inspection_blocks(inspection, max_depth=options.depth)
        print_blocks(Console(), [*blocks, Block("", lines=[f"to tune: {names}"])])
        return 0
    from .schema import to_data

    _print_json(
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


def _tune(options: argparse.Namespace) -> int:
    with _stdout_for(options.json):
        result, digest = _tuned(options)
    if options.json:
        from .report.results import result_data

        _print_json(result_data(result) | {"file": options.output if digest else None, "digest": digest})
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

    from .report.results import result_blocks
    from .report.terminal import print_blocks, progress_of
    from .tuning import api
    from .tuning.options import TuneOptions

    tuner = api.make_tuner(
        target,
        data,
        plan,
        TuneOptions(
            batch_sizes=options.batch_sizes,
            backends=backends_of(options.backend),
            dry_run=options.dry_run,
        ),
    )
    with progress_of(tuner, Console(stderr=True)) as progress:
        result = api.run(tuner, progress, journal=options.report)
    console = Console()
    if not options.json:
        console.print()
        print_blocks(console, result_blocks(result))
    if all(choice.candidate.backend == "eager" for choice in result.choices):
        return result, None
    from .checkpoint import save

    return result, save(target, options.output)


def backends_of(names: Sequence[str] | None) -> tuple[Any, ...] | None:
    """What `--backend` names: a backend's own proposals, or one candidate where options stand in brackets."""
    from .backends import registry
    from .tuning.candidates import candidate_of_label

    if names is None:
        return None
    for name in names:
        registry.get(name.partition("[")[0])
    return tuple(candidate_of_label(name) if "[" in name else name for name in names)


def _bisect(options: argparse.Namespace) -> int:
    with _stdout_for(options.json):
        target, data = load_target(options.target)
        from .schema import to_data
        from .tuning.bisect import bisect

        found = bisect(target, options.candidate, data, path=options.module)
    return _say(options, to_data(found), found)


def _show(options: argparse.Namespace) -> int:
    from .checkpoint import show
    from .schema import to_data

    description = show(options.file)
    return _say(options, to_data(description), description)


def _doctor(options: argparse.Namespace) -> int:
    from .report.doctor import examine, findings_text

    findings = examine()
    return _say(options, findings, findings_text(findings))


def _say(options: argparse.Namespace, data: Any, text: object) -> int:
    _print_json(data) if options.json else print(text)
    return 0


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


def _stdout_for(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """With `--json` everything else that is printed, by the user's code too, goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _one_line(text: str) -> str:
    return " ".join(text.split())
