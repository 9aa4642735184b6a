"""Cells that show a module tree and a plot of a made-up session; shared by tests and the paint benchmark."""

from __future__ import annotations

from pathlib import Path

TREE = """
import json, threading
from pathlib import Path
from aitune_lab.jupyter import PlotView, TreeView
from aitune_lab.report.tree_candidates import candidates_of
from aitune_lab.report.tree_rows import TreeRows
from aitune_lab.schema import Candidate, Event, Plan, Rule, from_data
from aitune_lab.tuning.session import SessionState, replay
from dataclasses import replace

BLOCK = {"norm": "LayerNorm", "attention": "Attention", "attention.query": "Linear", "attention.key": "Linear",
         "attention.value": "Linear", "attention.out": "Linear", "mlp": "Mlp", "mlp.up": "Linear", "mlp.act": "GELU",
         "mlp.down": "Linear"}
EVIL = "<img src=x onerror=window.PWNED=1>"

def candidate(label):
    backend, _, options = label.rstrip("]").partition("[")
    return Candidate(backend, tuple((name, True) for name in options.split(", ") if name))

def row(path, class_name, depth, share, calls=4, parameters=0, tunable=True, reason=""):
    return dict(path=path, class_name=class_name, method="forward", depth=depth, calls=calls, total_seconds=share * 0.2,
                self_seconds=0.0, share=share, parameters=parameters, buffers=0, parameter_bytes=4 * parameters,
                dtypes=["float32"] if parameters else [], devices=["cpu"], inputs=[], outputs=[], tunable=tunable,
                reason=reason, shared_with=[])

def model_rows(blocks=12, width=64):
    rows = [row("", "TextEncoder", 0, 1.0, 4, blocks * 12 * width * width + 2_000_000),
            row("embeddings", "Embeddings", 1, 0.031, 4, 2_000_000),
            row("layers", "ModuleList", 1, 0.0, 0, blocks * 12 * width * width, False, "it did not run")]
    for b in range(blocks):
        share = 0.9 / blocks
        rows.append(row(f"layers.{b}", "Block", 2, share, 4, 12 * width * width))
        for name, kind in BLOCK.items():
            part = share * (0.5 if name == "mlp" else 0.4 if name == "attention" else 0.1)
            parameters = {"Linear": width * width, "LayerNorm": 2 * width}.get(kind, 4 * width * width if "." not in name else 0)
            rows.append(row(f"layers.{b}.{name}", kind, 3 + name.count("."), part, 4, parameters))
    rows += [row("pool", "Pooler", 1, 0.012, 4, 0, False, "it takes or returns no tensors"),
             row(EVIL, "<b>Evil</b>", 1, 0.021, 4, 1000),
             row("head", "Linear", 1, 0.0004, 4, width * 2), row("unused", "Dropout", 1, 0.0, 0, 0, False, "it did not run")]
    return tuple(rows)
"""

SHOW = """
def recorded_run(name):
    return replay([from_data(x, Event) for x in json.loads(Path(FIXTURES, f"{name}.json").read_text())])

recorded, failed = recorded_run("success"), recorded_run("failures")
encoder = [t for t in recorded.trials.values() if t.path == "encoder"]
trials, choices = {}, {}
from aitune_lab.schema import Choice
def settle(path, label, speedup, error_class="exact", error=4.2e-7, **more):
    choices[(path, "forward", "s")] = Choice(path, "forward", "s", candidate(label), None, "because", speedup, error_class, error, **more)
for b in range(BLOCKS):
    for trial in encoder:
        key = f"{trial.key}-{b}"
        trials[key] = replace(trial, key=key, path=f"layers.{b}", signature="s")
    settle(f"layers.{b}", "inductor[freezing]" if b > 3 else "onnxruntime", 2.5 + b / 40, *(("within budget", 3.1e-5) if b == 5 else ()))
settle("embeddings", "onnxruntime", 1.31)
settle("head", "eager", None, "exact", 0.0)
settle(EVIL, "openvino", 4.4, "refused", 0.021, pinned=True, accepted_error=True)
plan = Plan(rules=(Rule(EVIL, "pin", candidate=candidate("openvino"), accept_error=True),))
state = SessionState(status="running", rows=model_rows(BLOCKS), trials=trials, choices=choices, plan=plan)
layout = TreeRows(state.rows)
view = TreeView(layout.columns(state))
commands = []

def answer(command):
    global state
    commands.append(dict(command))
    paths = layout.paths(command["path"])
    if command["op"] == "candidates" and command["path"] == "head":
        return candidates_of(failed, ["shifts"])
    if command["op"] == "candidates":
        return candidates_of(state, paths, offered=["tensorrt"])
    if command["op"] in ("pin", "unpin", "leave"):
        rules = tuple(r for r in state.plan.rules if r.pattern != command["path"])
        if command["op"] == "pin":
            rule = Rule(command["path"], "pin", candidate=candidate(command["candidate"]), accept_error=command["accept_error"])
        else:
            rule = Rule(command["path"], "leave")
        rules = rules if command["op"] == "unpin" else (rule, *rules)
        before, state = state, replace(state, plan=replace(state.plan, rules=rules))
        view.patch(layout.changes(before, state))

view.on_command(answer)
view
"""


FIXTURES = Path(__file__).parents[1] / "fixtures"


def shown(blocks: int = 12) -> list[str]:
    """The cells that define and show the tree; `view` is the widget, `commands` what it was asked."""
    return [TREE, f"FIXTURES = {str(FIXTURES)!r}\nBLOCKS = {blocks}\n{SHOW}"]
