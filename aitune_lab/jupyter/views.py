"""What the Lab's five steps show: pure functions from a snapshot to blocks."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.text import Column
from ..report.tree_candidates import candidates_of
from ..schema import Plan
from ..tuning.session import SessionState
from ..tuning.strategies import strategy_names
from ..tuning.strategies.words import counted, milliseconds, size, times
from . import blocks as b
from .blocks import Block
from .plans import rule_sentence, settings_of
from .snapshot import Notice, Preview, Snapshot

STEPS = (("inspect", "Inspect"), ("choose", "Choose"), ("tune", "Tune"), ("compare", "Compare"), ("export", "Export"))

_ACCURACY = (("budget", "within the error budget"), ("exact", "exact only"))
_SEARCH = (("quick", "quick"), ("normal", "normal"), ("exhaustive", "exhaustive"))
_STRATEGY_WORDS = {
    "MinLatency": "lowest latency",
    "MaxThroughput": "highest throughput",
    "FirstWins": "the first that is faster",
    "Pareto": "best trade of latency and error",
}


def seconds_words(seconds: float) -> str:
    """`12 s`, `2 min 5 s`, `1 h 4 min`: seconds as people say them."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def module_name(path: str) -> str:
    return path or "(model)"


def head(snap: Snapshot) -> Block:
    """Title, status and stepper."""
    state = snap.state
    done = {"inspect": bool(state.rows), "tune": snap.result is not None}
    done["choose"] = done["tune"] or snap.phase == "tuning"
    done["compare"] = done["tune"] and not snap.stale
    now = {
        "new": "inspect",
        "inspecting": "inspect",
        "ready": "choose",
        "tuning": "tune",
        "cancelled": "choose",
        "failed": "choose" if state.rows else "inspect",
        "tuned": "choose" if snap.stale else "compare",
    }[snap.phase]
    steps = [
        {
            "key": key,
            "title": title,
            "done": done.get(key, False),
            "now": key == now,
            "note": _step_note(key, snap),
        }
        for key, title in STEPS
    ]
    tone, words = _status(snap)
    return {"title": state.target or "target", "status": {"tone": tone, "text": words}, "steps": steps, "now": now}


def _step_note(key: str, snap: Snapshot) -> str:
    state = snap.state
    if key == "inspect" and state.rows:
        return counted(len(state.rows), "module")
    if key == "choose":
        rules = len(snap.plan.rules)
        return counted(rules, "rule") if rules else "automatic"
    if key == "tune" and snap.phase == "tuning":
        return f"{state.progress.done} of {state.progress.total}"
    if key == "tune" and snap.result is not None:
        tried = sum(t.candidate.label != "eager" for t in snap.result.trials.values())
        return counted(tried, "trial")
    if key == "compare" and snap.result is not None and not snap.stale:
        changed = any(choice.candidate.label != "eager" for choice in snap.result.choices)
        return gain_words(snap) or ("tuned" if changed else "no gain")
    return ""


def _status(snap: Snapshot) -> tuple[str, str]:
    if snap.phase == "tuning":
        return "busy", "cancelling" if snap.cancelling else "paused" if snap.paused else "tuning"
    if snap.phase == "tuned" and not snap.stale and snap.was_cancelled:
        return "good", "cancelled; the best so far is installed"
    if snap.phase == "tuned":
        return ("warning", "plan changed since the tune") if snap.stale else ("good", "tuned")
    words = {
        "new": ("", "not inspected yet"),
        "inspecting": ("busy", "inspecting"),
        "ready": ("", "ready to tune"),
        "cancelled": ("warning", "cancelled; the target is as it was before"),
        "failed": ("error", "failed; the target is as it was before"),
    }
    return words[snap.phase]


def gain_words(snap: Snapshot) -> str:
    """`×1.8` or `about as before`: the whole target, measured end to end if it was, else estimated; empty if unknown."""
    result = snap.result
    if result is None:
        return ""
    if result.end_to_end is not None and result.end_to_end.speedup:
        return _gain(result.end_to_end.speedup)
    before, after = result.estimate.get("eager_seconds"), result.estimate.get("tuned_seconds")
    if before and after and any(c.candidate.label != "eager" for c in result.choices):
        return f"{_gain(before / after)} (estimate)"
    return ""


def _gain(ratio: float) -> str:
    """A ratio that reads as 1 would contradict modules that are said to run faster."""
    return "about as before" if 0.98 < ratio < 1.02 else f"×{times(ratio)}"


def notice(value: Notice | None) -> Block | None:
    """The notice above everything else."""
    if value is None:
        return None
    return {
        "text": value.text,
        "tone": value.tone,
        "actions": [b.action(op, label) for op, label in (*value.actions, ("dismiss", "Dismiss"))],
    }


def inspect_step(snap: Snapshot) -> list[Block]:
    """Where the time goes."""
    state = snap.state
    if not state.rows:
        if snap.phase == "inspecting":
            return [b.progress(None, "Running your data through the target, to see where the time goes")]
        return [
            b.text(
                "See where the time goes. This runs your data through the target twice and changes nothing.", "lead"
            ),
            b.actions(b.action("inspect", "Inspect", primary=True)),
        ]
    ran = [row for row in state.rows if row.get("calls")]
    tunable = [row for row in ran if row.get("tunable")]
    figures = [("modules that ran", f"{len(ran)} of {len(state.rows)}"), ("can be tuned", str(len(tunable)))]
    if state.eager_seconds:
        figures.insert(0, ("a pass over your data", milliseconds(1000 * state.eager_seconds)))
    return [
        b.facts(figures),
        b.slot("tree"),
        b.text(state.understood or "The share of time includes the modules beneath.", "muted"),
        b.actions(b.goto("choose", "Choose what to try"), b.action("inspect_again", "Inspect again")),
    ]


def choose_step(snap: Snapshot, backends: Sequence[tuple[str, bool, str]]) -> list[Block]:
    """What will be tried, and the user's own wishes. `backends` are (name, available, why not)."""
    if not snap.state.rows:
        return [
            b.text("Inspect first: then every module can be chosen here.", "muted"),
            b.actions(b.goto("inspect", "Go to Inspect")),
        ]
    return [
        b.text(
            "Every backend is tried on the modules that matter; the fastest one that is right wins. "
            "Open the menu of a module to decide for yourself.",
            "lead",
        ),
        b.slot("tree"),
        b.panel("Your rules", *_rules(snap.plan)),
        b.panel("How to look", _settings(snap.plan), _backends(snap.plan, backends)),
        *start_blocks(snap),
    ]


def _rules(plan: Plan) -> list[Block]:
    held = [rule for rule in plan.rules if rule.action != "exclude"]
    if not held:
        return [b.text("None: each module gets what measures best.", "muted")]
    rows = [
        {
            "key": rule.pattern,
            "rule": rule_sentence(rule),
            "tone": "warning" if rule.accept_error else "",
            "action": b.action("unpin", "Remove", {"pattern": rule.pattern}),
        }
        for rule in held
    ]
    return [b.table([_RULE], rows)]


def _settings(plan: Plan) -> Block:
    now = settings_of(plan)
    budget = now["max_relative_error"]
    strategies = [(name, _STRATEGY_WORDS[name]) for name in strategy_names() if name in _STRATEGY_WORDS]
    if now["strategy"] not in _STRATEGY_WORDS:
        strategies.append((now["strategy"], now["strategy"]))
    return b.form(
        b.select("set", "strategy", "Prefer", now["strategy"], strategies),
        b.select("set", "accuracy", "Accept results", now["accuracy"], _ACCURACY),
        b.field(
            "set",
            "max_relative_error",
            "Error budget",
            "" if budget is None else f"{budget:g}",
            type="number",
            placeholder="by dtype",
            help="Relative L2 error of an output. Empty: 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16",
        ),
        b.select("set", "search", "Search", now["search"], _SEARCH),
        b.field("set", "max_seconds", "Stop after (s)", f"{now['max_seconds']:g}", type="number"),
    )


def _backends(plan: Plan, backends: Sequence[tuple[str, bool, str]]) -> Block:
    excluded = {rule.excluded for rule in plan.rules if rule.action == "exclude" and rule.pattern == "re:.*"}
    return b.form(
        *(
            b.check(
                "backend",
                name,
                name,
                available and name not in excluded,
                disabled="" if available else reason or "not available here",
                help="" if available else reason,
            )
            for name, available, reason in backends
        ),
        label="Backends to try",
    )


def start_blocks(snap: Snapshot) -> list[Block]:
    """What a run would take, before it starts, and the button that starts it."""
    preview, limit = snap.preview, snap.plan.limits.max_seconds
    again = snap.result is not None
    label = "Tune again" if again else "Start tuning"
    if snap.phase == "tuning":
        return [b.actions(b.goto("tune", "See the run"))]
    if preview is None:
        return [b.progress(None, "Counting what would be tried"), b.actions(b.action("tune", label, primary=True))]
    if preview.problem:
        return [b.text(preview.problem, "error"), b.actions(b.action("tune", label, disabled=preview.problem))]
    return [
        b.text(preview_sentence(preview, limit), "lead"),
        *_not_tried(preview),
        b.actions(b.action("tune", label, primary=True)),
    ]


def preview_sentence(preview: Preview, limit_seconds: float) -> str:
    """Trials, estimated time and disk, and the limit: what is said before the start."""
    units = {(unit["path"], unit["method"]) for unit in preview.planned}
    over = f" over {counted(len(units), 'module')}" if units else ""
    bound = f" The run stops after {seconds_words(limit_seconds)} and keeps the best so far."
    return (
        f"{counted(preview.trials, 'trial')}{over}: about {seconds_words(preview.seconds)} and up to "
        f"{size(preview.bytes)} of disk.{bound}"
    )


def _not_tried(preview: Preview) -> list[Block]:
    reasons: dict[str, str] = {}
    for unit in preview.planned:
        reasons |= {str(label): str(why) for label, why in unit["not_tried"].items()}
    if not reasons:
        return []
    rows = [{"key": label, "candidate": label, "why": why} for label, why in reasons.items()]
    return [b.details(f"{counted(len(rows), 'candidate')} will not be tried", b.table([_CANDIDATE, _WHY], rows))]


def planned_labels(snap: Snapshot, paths: Sequence[str]) -> list[str]:
    """Candidates that the preview offers for these modules."""
    if snap.preview is None:
        return []
    wanted = set(paths)
    return [label for unit in snap.preview.planned if unit["path"] in wanted for label in unit["candidates"]]


def candidate_table(state: SessionState, path: str, offered: Sequence[str] = ()) -> Block:
    """Every candidate of a module with its figures; a row opens its reason and log."""
    logs = {
        t.candidate.label: "\n".join(part for part in (t.reason, *t.notes, t.log) if part)
        for t in state.trials.values()
        if t.path == path
    }
    rows = []
    for found in candidates_of(state, [path], offered=offered):
        mark = "pinned" if found["pinned"] else "chosen" if found["chosen"] else ""
        rows.append(
            {
                "key": found["label"],
                "mark": mark,
                "candidate": found["label"],
                "latency": found["latency"],
                "at": found["at"],
                "speedup": found["speedup"],
                "error": " ".join(part for part in (found["error_class"], found["error"]) if part)
                or (found["status"].partition(":")[0] if found["pinnable"] == "no" else ""),
                "tone": "good" if mark else "error" if found["pinnable"] == "no" else "",
                "detail": "\n".join(part for part in (found["status"], logs.get(found["label"], "")) if part),
            }
        )
    return b.table(_CANDIDATES, rows, empty="Nothing was tried for this module.")


_RULE = Column("rule", "rule")
_CANDIDATE = Column("candidate", "candidate")
_WHY = Column("why", "why")
_CANDIDATES = (
    Column("mark", ""),
    _CANDIDATE,
    Column("latency", "latency (ms)", right=True),
    Column("at", "at"),
    Column("speedup", "speed-up", right=True),
    Column("error", "error"),
)
