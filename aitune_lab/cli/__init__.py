"""The command line: `aitune-lab demo | inspect | tune | bisect | show | runs | cache | doctor`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import AituneError
from .cache import clean_cache, list_cache, print_path
from .output import check_writable, say, stdout_for
from .runs import list_runs
from .targets import load_target
from .tune import inspect_target, tune_target

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
    commands = parser.add_subparsers(required=True, metavar="{demo,inspect,tune,bisect,show,runs,cache,doctor}")

    def command(name: str, run: Any, text: str, group: Any = commands) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = group.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EXIT_CODES
        )
        added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(run=run)
        return added

    demo = command("demo", _demo, "tune a real sentence encoder, save it, and check it in a new process")
    demo.add_argument("--output", metavar="FILE", default="demo.ait", help="the .ait file (default: %(default)s)")
    _add_backend(demo)

    look = command("inspect", inspect_target, "list the modules of a target with calls, time, shapes")
    look.add_argument("target", help=_TARGET_HELP)
    _add_batch_sizes(look)
    look.add_argument(
        "--depth", metavar="N", type=int, default=3, help="show so many levels of modules (default: %(default)s)"
    )

    tune = command("tune", tune_target, "find the fastest right backend for a target and save it")
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
    tune.add_argument("--memory-limit", metavar="GB", type=float, help="try nothing that would need more memory")
    tune.add_argument(
        "--store",
        metavar="FOLDER",
        default="auto",
        help="keep trials in this folder, or nowhere: 'off' (default: cache)",
    )
    tune.add_argument("--retry", action="store_true", help="try again what failed in earlier runs, or never finished")
    tune.add_argument("--dry-run", action="store_true", help="say what would be tried, and try nothing")
    tune.add_argument("--report", metavar="FILE", help="write every event of the run, one line of JSON each")

    find = command("bisect", _bisect, "find the first submodule on which a candidate's numbers diverge")
    find.add_argument("target", help=_TARGET_HELP)
    find.add_argument("candidate", help="a backend or candidate, such as onnxruntime or 'inductor[freezing]'")
    find.add_argument("--module", metavar="PATH", help="begin at this module (default: the outermost ones)")

    show = command("show", _show, "print what is in a .ait file, without PyTorch")
    show.add_argument("file", help="the .ait file")

    runs = command("runs", list_runs, "list earlier runs on this machine, or print the report of one")
    runs.add_argument("journal", nargs="?", help="the journal or report of a run, to print what it came to")
    runs.add_argument("--last", metavar="N", type=int, default=20, help="list so many (default: %(default)s)")
    runs.add_argument("--store", metavar="FOLDER", help="where they were kept (default: cache)")

    cache = commands.add_parser("cache", help="what earlier runs left on this machine: list it, make room, say where")
    kinds = cache.add_subparsers(required=True, metavar="{ls,gc,path}")
    command("ls", list_cache, "list what the cache holds", kinds)
    clean = command(
        "gc", clean_cache, "remove leftovers, and what was unused for longest, until the limit holds", kinds
    )
    clean.add_argument(
        "--limit", metavar="GB", type=float, help="in place of AITUNE_LAB_CACHE_SIZE_GB (10); 0 removes all"
    )
    command("path", print_path, "print the cache folder", kinds)

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


def _demo(options: argparse.Namespace) -> int:
    from ..demo import run_demo

    check_writable(options.output, "the output")
    return run_demo(options.output, backends=options.backend, as_json=options.json)


def _bisect(options: argparse.Namespace) -> int:
    with stdout_for(options.json):
        target, data = load_target(options.target)
        from ..schema import to_data
        from ..tuning.bisect import bisect

        found = bisect(target, options.candidate, data, path=options.module)
    return say(options, to_data(found), found)


def _show(options: argparse.Namespace) -> int:
    from ..checkpoint import show
    from ..schema import to_data

    description = show(options.file)
    return say(options, to_data(description), description)


def _doctor(options: argparse.Namespace) -> int:
    from ..report.doctor import examine, findings_text

    findings = examine()
    return say(options, findings, findings_text(findings))


def _one_line(text: str) -> str:
    return " ".join(text.split())
