"""The words that `%aitune` understands: a parser for each, with help that people can read in the notebook."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import AituneError


class WrongUsage(AituneError):
    """A magic was called with words that it doesn't understand; the message ends with the right usage."""


@dataclass(frozen=True)
class Help:
    """Help that was asked for, as text."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class _HelpAsked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise WrongUsage(f"{message}\n{self.format_usage().strip()}")

    def print_help(self, file: Any = None) -> None:
        raise _HelpAsked(self.format_help())


@dataclass(frozen=True)
class _Word:
    """One subcommand: what it does in a sentence, and an example."""

    does: str
    example: str


WORDS = {
    "inspect": _Word("See which modules run, how long, and which can be tuned.", "%aitune inspect model data -o info"),
    "tune": _Word("Find the fastest right backend for each part, and install it.", "%aitune tune model data -o result"),
    "plan": _Word("Show the plan of a target, or follow one from a file.", "%aitune plan model --write plan.toml"),
    "pin": _Word("Use a candidate for a module, whatever is faster.", "%aitune pin model encoder onnxruntime"),
    "unpin": _Word("Choose automatically again for a module.", "%aitune unpin model encoder"),
    "compare": _Word("Show what was chosen and why, or mixes side by side.", "%aitune compare model"),
    "whatif": _Word("Estimate another mix of backends at once.", "%aitune whatif model encoder=eager --measure"),
    "export": _Word("Write .ait, .toml (plan), .py (script) or .html (report).", "%aitune export model tuned.ait"),
    "load": _Word("Use a .ait in a target.", "%aitune load fresh tuned.ait --trust sha256:…"),
    "report": _Word("Write a report as one HTML file.", "%aitune report model report.html"),
    "doctor": _Word("Say what this machine can do, and what is missing.", "%aitune doctor"),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of `%aitune`; the namespace's `word` is the subcommand."""
    parser = _Parser(
        prog="%aitune",
        description="Finds which inference backend is really fastest for each part of a PyTorch model.\n\n"
        + "\n".join(f"  {word.example}" for word in WORDS.values()),
        epilog="`%aitune tune -h` explains one of them. Names are those of your variables.",
    )
    words = parser.add_subparsers(dest="word", metavar=f"{{{','.join(WORDS)}}}", required=True)

    def word(name: str) -> argparse.ArgumentParser:
        described = WORDS[name]
        added: argparse.ArgumentParser = words.add_parser(
            name, help=described.does, description=described.does, epilog=f"example: {described.example}"
        )
        added.add_argument("-o", "--output", metavar="NAME", help="store the result in a variable of this name")
        return added

    inspect = word("inspect")
    _target(inspect)
    _data(inspect)
    _sizes(inspect)
    tune = word("tune")
    _target(tune)
    _data(tune)
    _sizes(tune)
    tune.add_argument("--plan", metavar="NAME|FILE", help="a Plan in a variable, or a TOML file")
    tune.add_argument("--strategy", help="how to choose, such as MinLatency (the default)")
    tune.add_argument("--backend", action="append", metavar="NAME", help="try only this one; repeatable")
    tune.add_argument("--pin", action="append", default=[], metavar="PATH=CANDIDATE", help="repeatable")
    tune.add_argument("--exclude", action="append", default=[], metavar="NAME", help="don't try this one; repeatable")
    tune.add_argument("--accept-error", action="store_true", help="keep pins also where they are out of tolerance")
    tune.add_argument("--accuracy", choices=("budget", "exact"), help="which candidates are right enough")
    tune.add_argument("--max-relative-error", type=float, metavar="E", help="the error budget")
    tune.add_argument("--max-seconds", type=float, metavar="S", help="start no trial after so many seconds")
    tune.add_argument("--dry-run", action="store_true", help="say what would be tried, and try nothing")
    plan = word("plan")
    _target(plan)
    plan.add_argument("--read", metavar="FILE", help="follow the plan in this TOML file from now on")
    plan.add_argument("--write", metavar="FILE", help="write the plan to this TOML file")
    pin = word("pin")
    _target(pin)
    pin.add_argument("path", help="of the module, or re: and an expression; (model) is the target itself")
    pin.add_argument("candidate", help="a label, such as onnxruntime or 'inductor[freezing]'")
    pin.add_argument("--accept-error", action="store_true", help="also if it is out of tolerance")
    unpin = word("unpin")
    _target(unpin)
    unpin.add_argument("path", help="of the module, or the expression of the rule")
    compare = word("compare")
    _target(compare)
    compare.add_argument("mix", nargs="*", help="names of mixes, to see them side by side")
    whatif = word("whatif")
    _target(whatif)
    whatif.add_argument(
        "mix",
        nargs="+",
        metavar="PATH=CANDIDATE",
        help="what runs which module, (model) being the target itself; others stay eager",
    )
    whatif.add_argument("--name", help="of the mix")
    whatif.add_argument("--measure", action="store_true", help="build and measure it too")
    export = word("export")
    _target(export)
    export.add_argument("file", help="its ending says what is written: .ait, .toml, .py, .html")
    load = word("load")
    _target(load)
    load.add_argument("file", help="the .ait file")
    load.add_argument("--trust", metavar="DIGEST", help="the digest that saving gave; without, code is not run")
    report = word("report")
    _target(report)
    report.add_argument("file", help="the HTML file")
    word("doctor")
    return parser


def parse(parser: argparse.ArgumentParser, line: str) -> argparse.Namespace | Help:
    """The words of a line, or the help that it asks for. Raises WrongUsage, with the right usage."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise WrongUsage(f"{error} in {line!r}") from None
    try:
        return parser.parse_args(words or ["-h"])
    except _HelpAsked as asked:
        return Help(asked.text)


def options_of_word(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """The options of a subcommand, for completion."""
    found: Sequence[argparse.Action] = parser._subparsers._group_actions[0].choices[name]._actions  # type: ignore[union-attr, index]
    return [option for action in found for option in action.option_strings if option.startswith("--")]


def documentation(parser: argparse.ArgumentParser) -> str:
    """All help in one text, for `%aitune?`."""
    choices = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    return "\n".join([parser.format_help(), *(f"\n{added.format_help()}" for added in choices.values())])  # type: ignore[union-attr]


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="variable that holds the model or pipeline, such as model or pipe.unet")


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="?", help="variable that holds the data; once it is known it may be left out")


def _sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", metavar="1,8", type=_batch_sizes, help="items are samples, collated to these")


def _batch_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"batch sizes must be positive whole numbers like 1,8, but got {text!r}")
    return sizes
