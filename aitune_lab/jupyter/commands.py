"""What the page's controls do. Each hands its work over and returns at once with a sentence that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import AituneError, PlanError
from ..tuning import whatif
from . import plans
from .views_compare import FIGURES
from .whatifs import as_plan

if TYPE_CHECKING:
    from .lab import Lab

Args = Mapping[str, Any]


def answer(lab: Lab, op: str, args: Args) -> dict[str, str]:
    """Do what a control asks; gives `{"said": sentence}` for the page.

    Work is started in the modes of torch that the cell was in which made the Lab, as the page has none.

    Raises AituneError for what can't be done; the page shows the message.
    """
    do = _OPERATIONS.get(op)
    if do is None:
        raise AituneError(f"the page asked for {op!r}, which this version doesn't know: reload the page")
    with lab.modes.entered():
        return {"said": do(lab, args)}


def _inspect(lab: Lab, args: Args) -> str:
    lab.begin_inspection()
    return "Inspecting"


def _inspect_again(lab: Lab, args: Args) -> str:
    if lab.running:
        raise AituneError("a tune is running; inspect again when it has ended")
    lab.begin_inspection(again=True)
    return "Inspecting again"


def _tune(lab: Lab, args: Args) -> str:
    lab.begin_tune()
    return "Tuning"


def _cancel(lab: Lab, args: Args) -> str:
    return "Cancelling; the target stays as it is" if lab.cancel() else "Nothing is running"


def _pause(lab: Lab, args: Args) -> str:
    return "Pausing before the next step" if lab.pause() else "Nothing is running"


def _resume(lab: Lab, args: Args) -> str:
    lab.resume()
    return "Going on"


def _apply(lab: Lab, args: Args) -> str:
    lab.begin_apply()
    return "Installing the best so far"


def _dismiss(lab: Lab, args: Args) -> str:
    lab.say("")
    return ""


def _restart(lab: Lab, args: Args) -> str:
    lab.start_over()
    return "Starting over with the new data"


def _adopt(lab: Lab, args: Args) -> str:
    lab.adopt_earlier()
    return "The earlier run is shown; nothing was built"


def _pin(lab: Lab, args: Args) -> str:
    path, label = str(args["path"]), str(args["candidate"])
    lab.pin(path, label, accept_error=bool(args.get("accept_error")))
    return f"{_where(path)} will run with {label}{_when(lab)}"


def _leave(lab: Lab, args: Args) -> str:
    path = str(args["path"])
    lab.leave(path)
    return f"{_where(path)} will be left alone{_when(lab)}"


def _unpin(lab: Lab, args: Args) -> str:
    pattern = str(args["pattern"])
    if not any(rule.pattern == pattern and rule.action != "exclude" for rule in lab.plan.rules):
        return f"{_where(pattern)} is chosen automatically"
    lab.unpin(pattern)
    return f"{_where(pattern)} is chosen automatically{_when(lab)}"


def _set(lab: Lab, args: Args) -> str:
    name, value = str(args["name"]), args["value"]
    if name in ("max_relative_error", "max_seconds"):
        value = _number(name, str(value))
    lab.choose(**{name: value})
    return f"{_WORDS.get(name, name)}: {args['value'] or 'by dtype'}{_when(lab)}"


def _backend(lab: Lab, args: Args) -> str:
    name, wanted = str(args["name"]), bool(args["value"])
    plan = plans.without_excluded(lab.plan, name) if wanted else plans.with_excluded(lab.plan, name)
    lab.change_plan(plan)
    return f"{name} will {'' if wanted else 'not '}be tried{_when(lab)}"


def _module(lab: Lab, args: Args) -> str:
    lab.look(module=str(args["value"]))
    return ""


def _figure(lab: Lab, args: Args) -> str:
    value = str(args["value"])
    if value not in dict(FIGURES):
        raise AituneError(f"figures are {list(dict(FIGURES))}, but got {value!r}")
    lab.look(figure=value)
    return ""


def _whatif_new(lab: Lab, args: Args) -> str:
    name = lab.shown.mixes.fresh_name()
    lab.whatif(whatif.chosen(lab.snapshot.state), name=name)
    return f"{name}: change a module to see what it would give"


def _whatif_show(lab: Lab, args: Args) -> str:
    mixes = lab.shown.mixes
    lab.look(mixes=mixes.with_mix(mixes.named(str(args["value"]))))
    return ""


def _whatif_set(lab: Lab, args: Args) -> str:
    current = lab.shown.mixes.current
    options = whatif.options(lab.snapshot.state)
    keys = list(options)
    number = int(args["name"])
    if current is None or not 0 <= number < len(keys):
        raise AituneError("this mix is gone; reload the page")
    key = keys[number]
    candidate = next((p.candidate for p in options[key] if p.candidate.label == args["value"]), None)
    if candidate is None:
        raise PlanError(f"{args['value']!r} was not tried for {_where(key[0])}")
    lab.look(
        mixes=lab.shown.mixes.with_mix(replace(current, mix={**current.mix, key: candidate}, measured=None, problem=""))
    )
    return f"{current.name}: {_where(key[0])} with {candidate.label}"


def _whatif_remove(lab: Lab, args: Args) -> str:
    name = str(args["name"])
    lab.look(mixes=lab.shown.mixes.without(name))
    return f"{name} is removed"


def _whatif_measure(lab: Lab, args: Args) -> str:
    name = str(args["name"])
    lab.begin_measure(name)
    return f"{name} will be measured when nothing else runs" if lab.running else f"Measuring {name}"


def _whatif_pin(lab: Lab, args: Args) -> str:
    mix = lab.shown.mixes.named(str(args["name"]))
    lab.change_plan(as_plan(lab.plan, mix.mix))
    return f"{mix.name} is the plan now{_when(lab)}"


def _export(lab: Lab, args: Args) -> str:
    what, path = str(args["what"]), str(args.get("path", "")).strip()
    lab.begin_export(what, path)
    return ""


def _finish(lab: Lab, args: Args) -> str:
    lab.finish()
    return "Finishing"


_WORDS = {
    "strategy": "Prefer",
    "accuracy": "Accepted results",
    "max_relative_error": "Error budget",
    "search": "Search",
    "max_seconds": "Stop after (s)",
}

_OPERATIONS: dict[str, Callable[[Lab, Args], str]] = {
    "inspect": _inspect,
    "inspect_again": _inspect_again,
    "tune": _tune,
    "cancel": _cancel,
    "pause": _pause,
    "resume": _resume,
    "apply": _apply,
    "dismiss": _dismiss,
    "restart": _restart,
    "adopt": _adopt,
    "pin": _pin,
    "leave": _leave,
    "unpin": _unpin,
    "set": _set,
    "backend": _backend,
    "module": _module,
    "figure": _figure,
    "whatif_new": _whatif_new,
    "whatif_show": _whatif_show,
    "whatif_set": _whatif_set,
    "whatif_remove": _whatif_remove,
    "whatif_measure": _whatif_measure,
    "whatif_pin": _whatif_pin,
    "export": _export,
    "finish": _finish,
}


def _where(path: str) -> str:
    if path.startswith("re:"):
        return "Every copy"
    return path or "(model)"


def _when(lab: Lab) -> str:
    return ", from the next tune on" if lab.running or lab.snapshot.result is not None else ""


def _number(name: str, text: str) -> float | None:
    if not text.strip() and name == "max_relative_error":
        return None
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"{_WORDS[name]} must be a number, but got {text!r}") from None
