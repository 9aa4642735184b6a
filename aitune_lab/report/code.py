"""A run as a script: the same modules, each pinned to what was chosen for it, the same options, saved."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..backends.base import Backend
from ..errors import PlanError
from ..schema import Candidate, Choice, Limits, Plan, Rule, StrategyConfig, Tolerance, is_beneath
from .definitions import Definitions, described, is_importable
from .figures.source import EAGER, state_of
from .text import clean

if TYPE_CHECKING:
    from ..tuning.session import SessionState
    from .figures.source import Source

WIDTH = 100
FOLD_FROM = 3
"""So many modules that differ only in numbers, with one candidate, are written as one `re:` rule."""


def as_code(
    source: Source,
    *,
    target_name: str = "model",
    data_name: str = "data",
    path: str = "tuned.ait",
    options: Mapping[str, Any] | None = None,
) -> str:
    """A script that tunes the same modules to the same candidates, and saves them. Pins are in it, so nothing is raced.

    A module whose signatures have different candidates can't be pinned as a whole: its candidates are raced again,
    without those that no signature chose.

    Args:
        source: a session's state, a `TuneResult`, or events; choices and plan are read from it.
        target_name: the expression that the target goes by in the script: a name, or names joined by dots.
        data_name: the same for the data.
        path: the `.ait` file that the script writes.
        options: keyword arguments that `tune` was given beside the plan, such as `batch_sizes=[1, 8]`. Backends are
            written by their class with the options that differ from its defaults. Classes and functions are imported;
            for those of a notebook, and other objects, a comment says what to define.

    Raises:
        PlanError: a name isn't one in Python.
    """
    state = state_of(source)
    for what, name in (("target_name", target_name), ("data_name", data_name)):
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split(".")):
            raise PlanError(f"{what} must be a name in Python, such as 'model' or 'self.model', but got {name!r}")
    final = _final(state.choices.values())
    paths = list(dict.fromkeys(choice.path for choice in final))
    changes = any(choice.candidate.label != EAGER for choice in final)
    head = [
        f"# {line}"
        for line in (
            f"Tunes `{target_name}` as it was tuned when this was written.",
            f"`{target_name}` is the target with its weights, `{data_name}` the data, as they were then"
            + (":" if state.understood else "."),
            *([clean(state.understood)] if state.understood else []),
        )
    ]
    names = {target_name.partition(".")[0], data_name.partition(".")[0], "ait", "plan", "result", "digest", "registry"}
    needed = Definitions(names)
    rules = _rules(state, _pins(final))
    for backend in _backends(state.plan.strategy, rules, final):
        needed.use_backend(backend)
    arguments = [target_name, data_name, "plan=plan", *_options(options or {}, needed)]
    body = ["import aitune_lab as ait", *needed.imports(), "", *head, ""]
    if before := needed.lines():
        body += [*map(clean, before), ""]
    body.append(f"plan = {_plan(state.plan, rules, final)}")
    if paths:
        body += [*_reasons(final), f"ait.wrap({target_name}, {_sequence(_listed(paths))})"]
    body += [f"result = {_call('ait.tune', arguments)}", "print(result)"]
    if changes:
        body.append(f"digest = ait.save({target_name}, {quoted(path)})")
        body.append(f"# Elsewhere: ait.load(fresh_{target_name.rpartition('.')[2]}, {quoted(path)}, trust=digest)")
    elif final:
        body.append("# Everything stays eager, so there is nothing to save.")
    return "\n".join(body) + "\n"


def _final(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that count: a module that stays eager gives way to those beneath it that were tried in its place."""
    every = list(choices)
    return [
        choice
        for choice in every
        if choice.candidate.label != EAGER or not any(is_beneath(other.path, choice.path) for other in every)
    ]


@dataclass(frozen=True)
class _Pins:
    """What pins can say (`by_path`), and the modules whose signatures differ, with the candidates that they chose."""

    by_path: Mapping[str, Choice]
    several: Mapping[str, tuple[Candidate, ...]]


def _pins(final: Sequence[Choice]) -> _Pins:
    by_path: dict[str, list[Choice]] = {}
    for choice in final:
        by_path.setdefault(choice.path, []).append(choice)
    candidates = {path: tuple(dict.fromkeys(c.candidate for c in held)) for path, held in by_path.items()}
    # An error that was accepted for one signature is accepted by the pin.
    pinned = {path: max(held, key=lambda c: c.accepted_error) for path, held in by_path.items()}
    single = {path: pinned[path] for path, held in candidates.items() if len(held) == 1}
    return _Pins(single, {path: held for path, held in candidates.items() if len(held) > 1})


def _plan(plan: Plan, rules: Sequence[Rule], final: Sequence[Choice]) -> str:
    pins = _pins(final)
    parts = []
    if rules:
        parts.append("rules=" + _sequence([_rule(rule) for rule in rules], "()"))
    if (pins.several or not final) and plan.strategy != StrategyConfig():
        parts.append(f"strategy={_strategy(plan.strategy)}")
    if tolerance := _differing(plan.tolerance, Tolerance()):
        parts.append(_call("tolerance=ait.Tolerance", tolerance))
    if limits := _differing(plan.limits, Limits()):
        parts.append(_call("limits=ait.Limits", limits))
    if plan.split_points:
        parts.append("split_points=True")
    return _call("ait.Plan", parts)


def _rules(state: SessionState, pins: _Pins) -> list[Rule]:
    """The user's own pins as they stand, and what is left alone; then a pin for everything else, many alike as one, and
    exclusions where needed.
    """
    plan = state.plan
    if not pins.by_path and not pins.several:
        return list(plan.rules)
    own = [rule for rule in plan.rules if rule.action == "pin"]
    kept = [r for r in own if any(plan.rule_for(path) is r for path in pins.by_path)]
    rest = {path: choice for path, choice in pins.by_path.items() if plan.rule_for(path) not in kept}
    others = [str(row.get("path", "")) for row in state.rows]
    left = [rule for rule in plan.rules if rule.action == "leave"]
    # Where a pattern that leaves modules alone also fits tuned ones, which an earlier rule held, it comes after their pins.
    later = [rule for rule in left if any(rule.matches(path) for path in {**rest, **pins.several})]
    rules = [rule for rule in plan.rules if rule in kept or (rule in left and rule not in later)]
    done: set[str] = set()
    for path, choice in rest.items():
        if path in done:
            continue
        pattern = _pattern(path)
        alike = [p for p, c in rest.items() if _pattern(p) == pattern and _same(c, choice)]
        fits = [p for p in {*others, *pins.by_path, *pins.several} if re.fullmatch(pattern, p)]
        if len(alike) >= FOLD_FROM and set(fits) <= set(alike):
            rules.append(Rule(f"re:{pattern}", "pin", choice.candidate, accept_error=choice.accepted_error))
            done.update(alike)
        else:
            rules.append(Rule(path, "pin", choice.candidate, accept_error=choice.accepted_error))
            done.add(path)
    for path, chosen in pins.several.items():
        labels = {t.candidate.label for t in state.trials.values() if t.path == path} | {EAGER}
        losers = {label for c in state.choices.values() if c.path == path for label in c.losers}
        out = sorted((labels | losers) - {candidate.label for candidate in chosen} - {EAGER})
        rules += [Rule(path, "exclude", excluded=label) for label in out]
        strategy = plan.rule_for(path)
        if strategy is not None and strategy.action == "strategy":
            rules.append(Rule(path, "strategy", strategy=strategy.strategy))
    return [*rules, *later]


def _same(one: Choice, other: Choice) -> bool:
    return one.candidate == other.candidate and one.accepted_error == other.accepted_error


def _pattern(path: str) -> str:
    """The regular expression of all paths that differ from this one in numbers only."""
    return r"\d+".join(re.escape(part) for part in re.split(r"\d+", path))


def _rule(rule: Rule) -> str:
    arguments = [quoted(rule.pattern), quoted(rule.action)]
    if rule.candidate is not None:
        arguments.append(f"candidate={_candidate(rule.candidate)}")
    if rule.strategy is not None:
        arguments.append(f"strategy={_strategy(rule.strategy)}")
    if rule.excluded:
        arguments.append(f"excluded={quoted(rule.excluded)}")
    if rule.accept_error:
        arguments.append("accept_error=True")
    return f"ait.Rule({', '.join(arguments)})"


def _candidate(candidate: Candidate) -> str:
    arguments = [quoted(candidate.backend)]
    if candidate.options:
        arguments.append(f"options={literal(candidate.options)}")
    arguments += _differing(candidate, Candidate(candidate.backend, candidate.options))
    return f"ait.Candidate({', '.join(arguments)})"


def _strategy(strategy: StrategyConfig) -> str:
    options = ", ".join(f"{name}={literal(value)}" for name, value in strategy.options)
    return f"ait.{strategy.name}Strategy({options}).config()"


def _differing(value: Any, default: Any) -> list[str]:
    found = ((f.name, getattr(value, f.name), getattr(default, f.name)) for f in fields(value))
    return [f"{name}={literal(mine)}" for name, mine, other in found if mine != other]


def _reasons(final: Sequence[Choice]) -> list[str]:
    """What each module runs and why, as comments; many are summed up."""
    if len(final) > 12:
        counts: dict[str, int] = {}
        for choice in final:
            counts[choice.candidate.label] = counts.get(choice.candidate.label, 0) + 1
        return [f"# {count} × {clean(label)}" for label, count in counts.items()]
    return [
        f"# {clean(choice.path or '(model)')}: {clean(choice.reason or choice.candidate.label)}" for choice in final
    ]


def quoted(text: str) -> str:
    """A string as Python reads it: raw where it has backslashes, in double quotes where that needs no escapes."""
    if "\\" in text and '"' not in text and text.isprintable() and not text.endswith("\\"):
        return f'r"{text}"'
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in written else written


def literal(value: Any) -> str:
    """A plain value as Python reads it."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


_PLAIN = (bool, int, float, str, type(None))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict) and type(value) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _PLAIN


def _backends(strategy: StrategyConfig, rules: Sequence[Rule], final: Sequence[Choice]) -> list[str]:
    """Names of the backends that the plan and the choices speak of, each once."""
    named = [choice.candidate.backend for choice in final]
    named += [rule.candidate.backend for rule in rules if rule.candidate is not None]
    named += [
        rule.excluded.partition("[")[0] for rule in rules if rule.excluded and not rule.excluded.startswith("re:")
    ]
    strategies = [strategy, *(rule.strategy for rule in rules if rule.strategy is not None)]
    named += [str(value) for each in strategies for name, value in each.options if name == "backend"]
    return list(dict.fromkeys(named))


def _options(options: Mapping[str, Any], needed: Definitions) -> list[str]:
    written = []
    for name, value in options.items():
        if name == "plan" or not name.isidentifier():
            raise PlanError(f"options must be keyword arguments of tune other than the plan, but got {name!r}")
        if name == "backends" and not isinstance(value, str) and isinstance(value, Sequence):
            text = f"[{', '.join(_backend(item, needed) for item in value)}]"
        else:
            text = _value(name, value, needed)
        written.append(f"{name}={text}")
    return written


def _value(name: str, value: Any, needed: Definitions) -> str:
    """The value of an option: as it is, by an import, or a name that the script's user defines."""
    if _is_plain(value):
        return literal(value)
    if isinstance(value, PurePath):
        return quoted(str(value))
    if isinstance(value, FunctionType) and is_importable(value):
        return needed.name_of(value)
    needed.ask_for(name, described(value))
    return name


def _backend(value: Any, needed: Definitions) -> str:
    """One of the backends to try: a name, a candidate, a class, or an instance by its class and changed options."""
    if isinstance(value, str):
        needed.use_backend(value.partition("[")[0])
        return quoted(value)
    if isinstance(value, Candidate):
        needed.use_backend(value.backend)
        return _candidate(value)
    if isinstance(value, type) and issubclass(value, Backend):
        needed.use_backend(value.name, value)
        return needed.name_of(value)
    if not isinstance(value, Backend):
        raise PlanError(f"backends must be names, Backends or candidates, but got {described(value)}")
    kind = type(value)
    needed.use_backend(value.name, kind)
    if kind.__init__ is not Backend.__init__:
        # Its constructor takes what only its author knows; a run builds it from its candidate in any case.
        return _candidate(value.candidate())
    changed = [f for f in fields(value.config) if getattr(value.config, f.name) != f.default]
    return _call(needed.name_of(kind), [f"{f.name}={literal(getattr(value.config, f.name))}" for f in changed])


def _listed(paths: Sequence[str]) -> list[str]:
    """Paths as items of a list; a row of copies that are numbered on is one item: `*(f"layers.{i}" for i in range(24))`."""
    items: list[str] = []
    at = 0
    while at < len(paths):
        number = re.search(r"\d+", paths[at])
        head, tail = (paths[at][: number.start()], paths[at][number.end() :]) if number else ("", "")
        first = int(number[0]) if number else 0
        count = 1
        while number and at + count < len(paths) and paths[at + count] == f"{head}{first + count}{tail}":
            count += 1
        if count >= FOLD_FROM and paths[at] == f"{head}{first}{tail}" and re.fullmatch(r"[\w.]*", head + tail):
            span = f"{first}, {first + count}" if first else f"{count}"
            items.append(f'*(f"{head}{{i}}{tail}" for i in range({span}))')
        else:
            count = 1
            items.append(quoted(paths[at]))
        at += count
    return items


def _call(function: str, arguments: Sequence[str]) -> str:
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= WIDTH and "\n" not in line:
        return line
    inner = "".join(f"    {argument},\n".replace("\n", "\n    ", argument.count("\n")) for argument in arguments)
    return f"{function}(\n{inner})"


def _sequence(items: Sequence[str], brackets: str = "[]") -> str:
    left, right = brackets[0], brackets[1]
    comma = "," if brackets == "()" and len(items) == 1 else ""
    line = f"{left}{', '.join(items)}{comma}{right}"
    if len(line) <= WIDTH - 20:
        return line
    return f"{left}\n" + "".join(f"    {item},\n" for item in items) + right
