"""The plan as a TOML file that people write, and the checks of a plan against a target."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import tomli_w

from ..backends import registry
from ..errors import PlanError
from ..schema import Candidate, Limits, Option, Plan, Rule, StrategyConfig, Tolerance, is_beneath
from ..schema.plan import Action, check_setting
from .candidates import candidate_of_label
from .strategies import strategy_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

_ACTIONS: tuple[Action, ...] = get_args(Action)
_TOLERANCE = ("accuracy", "max_relative_error", "min_snr_db", "min_agreement")
_LIMITS = ("max_seconds", "max_trials", "max_samples_per_point", "max_sample_bytes", "memory_bytes", "search")
_RULES = ("rules", "pin", "pins", "exclude", "excludes", "exclusions", "leave")
"""What people write at the top level though it stands in a `[[rule]]`."""
_FLOATS = ("max_relative_error", "min_snr_db", "min_agreement", "max_seconds")
_PIN = ("backend", "options", "precision", "memory_format", "cuda_graph", "unset")


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as TOML (UTF-8)."""
    Path(path).write_text(plan_to_toml(plan), encoding="utf-8", newline="\n")


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a TOML file. Raises PlanError that names the file, the place and what may stand there."""
    if not isinstance(path, (str, Path)):
        raise PlanError(f"a plan must be a Plan or the path of its TOML file, but got {path!r}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"the plan {str(path)!r} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"the plan {str(path)!r} can't be read: it must be UTF-8 text ({error.reason})") from None
    try:
        return plan_from_toml(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def plan_to_toml(plan: Plan) -> str:
    """The plan as TOML text; what is at its default is left out, but for the strategy."""
    data: dict[str, Any] = {}
    data |= _differing(plan.tolerance, Tolerance(), _TOLERANCE)
    if plan.split_points:
        data["split_points"] = True
    data["strategy"] = _strategy_to_data(plan.strategy)
    if limits := _differing(plan.limits, Limits(), _LIMITS):
        data["limits"] = limits
    if plan.rules:
        data["rule"] = [_rule_to_data(rule) for rule in plan.rules]
    return tomli_w.dumps(data)


def plan_from_toml(text: str) -> Plan:
    """The plan in a TOML text. Raises PlanError that names the place, the value and what may stand there."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"the plan is no valid TOML: {error}") from None
    if wrong := next((name for name in data if name in _RULES), None):
        raise PlanError(
            f"the plan has no {wrong!r}: each pin, exclusion, … is a rule of its own, such as\n"
            '[[rule]]\npattern = "encoder"\npin = "onnxruntime"'
        )
    _only(data, (*_TOLERANCE, "split_points", "strategy", "limits", "rule"), "the plan")
    limits = _table(data.get("limits", {}), "limits")
    _only(limits, _LIMITS, "limits")
    rules = data.get("rule", [])
    if not isinstance(rules, list):
        raise PlanError("rules must be written as [[rule]] tables")
    return Plan(
        rules=tuple(_rule_from_data(rule, f"rule {i}") for i, rule in enumerate(rules, 1)),
        strategy=_strategy_from_data(data["strategy"], "strategy") if "strategy" in data else StrategyConfig(),
        tolerance=Tolerance(**{name: _number(name, data[name], "") for name in _TOLERANCE if name in data}),
        limits=Limits(**{name: _number(name, limits[name], "limits.") for name in limits}),
        split_points=_bool(data.get("split_points", False), "split_points"),
    )


def check_plan(plan: Plan, paths: Sequence[str], known_backends: Collection[str]) -> list[str]:
    """Check a plan against the module paths of a target and the known backends.

    Returns warnings: patterns that match no module.

    Raises:
        PlanError: a path that doesn't exist (with close matches), an unknown backend or strategy, a regular
            expression that doesn't compile, a pin without candidate, or pins one beneath the other.
    """
    check_backends(plan, known_backends)
    warnings = []
    for number, rule in enumerate(plan.rules, 1):
        place = f"rule {number} ({rule.pattern!r})"
        if rule.pattern.startswith("re:"):
            pattern = _compiled(rule.pattern[3:], place)
            if not any(pattern.fullmatch(path) for path in paths):
                warnings.append(f"{place} matches no module, so it does nothing")
        elif rule.pattern not in paths:
            raise PlanError(f"{place}: no module has this path. {_close(rule.pattern, paths)}")
    outermost_pins(plan, paths)
    return warnings


def check_backends(plan: Plan, known_backends: Collection[str]) -> None:
    """Check what a plan names beside modules, which needs no target.

    Raises PlanError for an unknown backend or strategy (with close matches), and a pin or strategy that names none.
    """
    _check_strategy(plan.strategy, known_backends, "the plan's strategy")
    for number, rule in enumerate(plan.rules, 1):
        place = f"rule {number} ({rule.pattern!r})"
        if rule.action == "pin":
            if rule.candidate is None:
                raise PlanError(f"{place}: a pin must name a backend")
            _check_backend(rule.candidate.backend, known_backends, place)
        elif rule.action == "strategy":
            if rule.strategy is None:
                raise PlanError(f"{place}: a strategy must be named")
            _check_strategy(rule.strategy, known_backends, place)
        elif rule.action == "exclude":
            if rule.excluded.startswith("re:"):
                _compiled(rule.excluded[3:], f"{place}, exclude")
            else:
                _check_backend(rule.excluded.partition("[")[0], known_backends, place)


def outermost_pins(plan: Plan, paths: Sequence[str]) -> dict[str, Rule]:
    """The paths that pins hold, with their rules. Where one pattern matches a module and those beneath it, the
    outermost is pinned.

    Raises PlanError that names both if two rules pin a module and one beneath it.
    """
    pinned: dict[str, Rule] = {}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        rule = plan.rule_for(path)
        if rule is None or rule.action != "pin":
            continue
        above = next((other for other in pinned if is_beneath(path, other)), None)
        if above is None:
            pinned[path] = rule
        elif pinned[above] is not rule:
            raise PlanError(
                f"a pin must not lie beneath another, but {above!r} (by {pinned[above].pattern!r}) and {path!r} "
                f"(by {rule.pattern!r}) are both pinned. Remove one of the two rules."
            )
    return pinned


def _differing(value: object, default: object, names: Sequence[str]) -> dict[str, Any]:
    found = ((name, getattr(value, name), getattr(default, name)) for name in names)
    return {name: mine for name, mine, other in found if mine != other and mine is not None}


def _strategy_to_data(strategy: StrategyConfig) -> dict[str, Any]:
    return {"name": strategy.name, **_options_to_data(strategy.options)}


def _options_to_data(options: Sequence[tuple[str, Option]]) -> dict[str, Any]:
    """Options by name. TOML has no null: those that are None are listed under `unset`."""
    data: dict[str, Any] = {name: value for name, value in options if value is not None}
    if unset := [name for name, value in options if value is None]:
        data["unset"] = unset
    return data


def _rule_to_data(rule: Rule) -> dict[str, Any]:
    data: dict[str, Any] = {"pattern": rule.pattern}
    if rule.action == "pin" and rule.candidate is not None:
        candidate = rule.candidate
        data["pin"] = {"backend": candidate.backend} | _differing(candidate, Candidate(""), _PIN[2:5])
        options = _options_to_data(candidate.options)
        if unset := options.pop("unset", None):
            data["pin"]["unset"] = unset
        if options:
            data["pin"]["options"] = options
    elif rule.action == "strategy" and rule.strategy is not None:
        data["strategy"] = _strategy_to_data(rule.strategy)
    elif rule.action == "exclude":
        data["exclude"] = rule.excluded
    else:
        data["leave"] = True
    if rule.accept_error:
        data["accept_error"] = True
    return data


def _rule_from_data(value: Any, place: str) -> Rule:
    data = _table(value, place)
    _only(data, ("pattern", *_ACTIONS, "accept_error"), place)
    pattern = _str(data.get("pattern"), f"{place}: pattern")
    place = f"{place} ({pattern!r})"
    if pattern.startswith("re:"):
        _compiled(pattern[3:], place)
    actions = [action for action in _ACTIONS if action in data]
    if len(actions) != 1:
        raise PlanError(f"{place}: exactly one of {list(_ACTIONS)} must stand here, but got {actions or 'none'}")
    accept_error = _bool(data.get("accept_error", False), f"{place}: accept_error")
    action, wish = actions[0], data[actions[0]]
    if accept_error and action != "pin":
        raise PlanError(f"{place}: accept_error belongs to a pin, but this rule is {action!r}")
    if action == "pin":
        return Rule(pattern, "pin", candidate=_candidate_from_data(wish, f"{place}: pin"), accept_error=accept_error)
    if action == "strategy":
        return Rule(pattern, "strategy", strategy=_strategy_from_data(wish, f"{place}: strategy"))
    if action == "exclude":
        return Rule(pattern, "exclude", excluded=_str(wish, f"{place}: exclude"))
    if wish is not True:
        raise PlanError(f"{place}: leave must be true, but got {wish!r}")
    return Rule(pattern, "leave")


def _candidate_from_data(value: Any, place: str) -> Candidate:
    if isinstance(value, str):
        if "[" not in value:
            return Candidate(value)  # known or not: `check_plan` says, with the rule's number
        try:
            return candidate_of_label(value)
        except PlanError as error:
            raise PlanError(f"{place}: {error}") from None
    if not isinstance(value, dict):
        raise PlanError(
            f"{place} must be a label such as 'inductor[freezing]', or a table such as "
            f"{{backend = 'inductor', options = {{freezing = true}}}}, but got {value!r}"
        )
    data = _table(value, place)
    _only(data, _PIN, place)
    options = _table(data.get("options", {}), f"{place}.options")
    if "unset" in data:
        options = {**options, "unset": data["unset"]}
    memory_format = data.get("memory_format")
    return Candidate(
        backend=_str(data.get("backend"), f"{place}.backend"),
        options=_options_from_data(options, place),
        precision=_str(data.get("precision", "as is"), f"{place}.precision"),
        memory_format=None if memory_format is None else _str(memory_format, f"{place}.memory_format"),
        cuda_graph=_bool(data.get("cuda_graph", False), f"{place}.cuda_graph"),
    )


def _strategy_from_data(value: Any, place: str) -> StrategyConfig:
    data = dict({"name": value} if isinstance(value, str) else _table(value, place))
    config = StrategyConfig(_str(data.pop("name", None), f"{place}.name"), _options_from_data(data, place))
    try:
        strategy_of(config)
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None
    return config


def _options_from_data(data: Mapping[str, Any], place: str) -> tuple[tuple[str, Option], ...]:
    options: dict[str, Option] = {}
    for name, value in data.items():
        if name == "unset":
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise PlanError(f"{place}.unset must be a list of option names, but got {value!r}")
            options |= dict.fromkeys(value)
        elif isinstance(value, (bool, int, float, str)):
            options[name] = value
        else:
            raise PlanError(f"{place}.{name} must be a boolean, a number or a string, but got {value!r}")
    return tuple(sorted(options.items()))


def _only(data: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for name in data:
        if name not in known:
            raise PlanError(
                f"keys of {place} must be among {list(known)}, but got {name!r}. {_close(name, known)}".rstrip()
            )


def _table(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{place} must be a table, but got {value!r}")
    return cast("dict[str, Any]", value)


def _str(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{place} must be a string, but got {'nothing' if value is None else repr(value)}")
    return value


def _bool(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{place} must be true or false, but got {value!r}")
    return value


def _number(name: str, value: Any, place: str) -> Any:
    """The value of a tolerance or a limit, with the place in the file where it can't stand there."""
    check_setting(name, value, place)
    return float(value) if name in _FLOATS else value


def _compiled(pattern: str, place: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PlanError(f"{place}: {pattern!r} is no regular expression: {error}") from None


def _check_strategy(config: StrategyConfig, known_backends: Collection[str], place: str) -> None:
    try:
        strategy_of(config)
    except PlanError as error:
        raise PlanError(f"{place}: {error}") from None
    backend = dict(config.options).get("backend")
    if isinstance(backend, str):
        _check_backend(backend, known_backends, place)


def _check_backend(name: str, known_backends: Collection[str], place: str) -> None:
    if name not in known_backends:
        raise PlanError(f"{place}: {registry.unknown(name, known_backends)}")


def _close(name: str, known: Sequence[str]) -> str:
    # A path that is none itself may hold some: the methods of `vae` go by `vae.decode` and `vae.encode`.
    beneath = [other for other in known if name and is_beneath(other, name)]
    close = beneath[:3] or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
