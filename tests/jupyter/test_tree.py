"""The module tree: how rows are laid out and folded, what they show of a session, and the widget that sends them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.errors import PlanError
from aitune_lab.jupyter import TreeView
from aitune_lab.jupyter.bundle import bundled
from aitune_lab.report.tree_candidates import candidates_of
from aitune_lab.report.tree_rows import Columns, TreeRows, columns_of
from aitune_lab.schema import Candidate, Choice, Event, Plan, Rule, from_data, to_data
from aitune_lab.tuning.session import Progress, Session, SessionState, replay

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNS = ("success", "failures", "cancelled")
ONNX, INDUCTOR = Candidate("onnxruntime"), Candidate("inductor", (("freezing", True),))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        self.spare = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inspected(target: Any) -> SessionState:
    rows = ait.inspect(target, [torch.randn(2, 8)]).rows
    return SessionState(rows=tuple(to_data(row) for row in rows))


def events(name: str) -> list[Event]:
    return [from_data(item, Event) for item in json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))]


def at(columns: Columns, path: str) -> dict[str, Any]:
    i = columns["path"].index(path)
    return {name: values[i] for name, values in columns.items()}  # type: ignore[attr-defined]


def chosen(path: str, candidate: Candidate, **facts: Any) -> dict[tuple[str, str, str], Choice]:
    facts = {"speedup": 2.0, "error_class": "exact", "relative_l2": 1e-7} | facts
    return {(path, "forward", "s"): Choice(path, "forward", "s", candidate, None, "because", **facts)}


@pytest.fixture(scope="module")
def stack() -> SessionState:
    return inspected(Stack().eval())


def test_rows_lie_as_in_the_model_with_names_under_their_parents(stack: SessionState) -> None:
    columns = columns_of(stack)
    lengths = {len(values) for values in columns.values()}  # type: ignore[arg-type]
    assert len(lengths) == 1
    assert columns["name"][0] == "(model)"
    assert columns["depth"][0] == 0
    block = at(columns, "layers.2")
    assert (block["name"], block["class_name"], block["depth"], block["calls"]) == ("2", "Block", 2, 3)
    assert at(columns, "layers.2.up")["depth"] == 3
    assert at(columns, "spare")["state"] == "not run"


def test_repeated_blocks_fold_into_one_row_that_adds_them_up(stack: SessionState) -> None:
    columns = columns_of(stack)
    fold = at(columns, r"re:layers\.\d+")
    copies = [at(columns, f"layers.{i}") for i in range(4)]
    assert (fold["kind"], fold["copies"], fold["name"], fold["class_name"]) == ("fold", 4, "layers", "Block")
    assert fold["calls"] == sum(copy["calls"] for copy in copies)
    assert fold["parameters"] == sum(copy["parameters"] for copy in copies)
    assert fold["share"] == pytest.approx(sum(copy["share"] for copy in copies), abs=1e-5)
    assert fold["total_ms"] == pytest.approx(sum(copy["total_ms"] for copy in copies), rel=1e-2)


def test_a_folds_pattern_matches_its_copies_and_no_other_module(stack: SessionState) -> None:
    columns = columns_of(stack)
    tree = TreeRows(stack.rows)
    for i, pattern in enumerate(columns["path"]):
        if columns["kind"][i] == "fold":
            rule = Rule(pattern, "leave")
            matched = [row["path"] for row in stack.rows if rule.matches(row["path"])]
            assert matched == list(tree.paths(pattern))
    # Of the three numbered layers only two have one shape, so `\d+` would match too much.
    assert "re:head\\.(?:0|1)" in columns["path"]


def test_only_what_is_alike_folds() -> None:
    model = nn.ModuleDict({"a": Block(), "other": nn.Linear(8, 8), "b": Block()})
    model["wide"] = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    columns = columns_of(inspected(_chain(model)))
    folds = [path for path, kind in zip(columns["path"], columns["kind"], strict=True) if kind == "fold"]
    assert folds == ["re:parts\\.(?:a|b)"]


def _chain(parts: nn.ModuleDict) -> nn.Module:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    return Chain().eval()


def test_a_module_with_other_methods_has_a_row_of_its_own_above_them() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 8)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(x)

    class Pipe:
        def __init__(self) -> None:
            self.coder = Coder().eval()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.coder.decode(self.coder.encode(x))

    columns = columns_of(inspected(Pipe()))
    shown = list(zip(columns["path"], columns["kind"], columns["depth"], strict=True))
    assert shown == [
        ("coder", "container", 0),
        ("coder.encode", "method", 1),
        ("coder.decode", "method", 1),
        ("coder.inner", "module", 1),
        ("coder.outer", "module", 1),
    ]


@pytest.mark.parametrize("name", RUNS)
def test_following_a_run_by_changes_ends_where_a_fresh_look_does(name: str) -> None:
    session, tree, shown = Session(), None, None
    for event in events(name):
        before = session.state
        after = session.apply(event)
        if tree is None:
            if after.rows:
                tree = TreeRows(after.rows)
                shown = tree.columns(after)
            continue
        for row, values in tree.changes(before, after).items():
            for column, value in values.items():
                shown[column][row] = value  # type: ignore[index,literal-required]
        assert shown == tree.columns(after), event.kind


@pytest.mark.parametrize("name", RUNS)
def test_columns_are_json_with_finite_figures(name: str) -> None:
    assert json.loads(json.dumps(columns_of(replay(events(name))), allow_nan=False))


def test_a_run_shows_what_was_chosen_and_what_failed() -> None:
    run = replay(events("success"))
    encoder = at(columns_of(run), "encoder")
    (recorded,) = (choice for choice in run.choices.values() if choice.path == "encoder")
    assert (encoder["choice"], encoder["state"], encoder["error_class"]) == ("onnxruntime", "tuned", "exact")
    assert encoder["speedup"] == pytest.approx(recorded.speedup, rel=1e-3)
    assert at(columns_of(replay(events("failures"))), "shifts")["state"] == "kept"


def test_a_fold_shows_mixed_choices_the_worst_error_and_a_speedup_weighted_by_time(stack: SessionState) -> None:
    choices = chosen("layers.0", ONNX) | chosen("layers.1", ONNX)
    choices |= chosen("layers.2", INDUCTOR, error_class="within budget", relative_l2=2e-5, speedup=4.0)
    choices |= chosen("layers.3", Candidate("eager"), speedup=None)
    columns = columns_of(replace(stack, choices=choices))
    fold = at(columns, r"re:layers\.\d+")
    assert (fold["choice"], fold["error_class"], fold["error"]) == ("mixed", "within budget", 2e-5)
    shares = [at(columns, f"layers.{i}")["share"] for i in range(4)]
    expected = sum(shares) / (shares[0] / 2 + shares[1] / 2 + shares[2] / 4 + shares[3])
    assert fold["speedup"] == pytest.approx(expected, rel=1e-3)
    assert (fold["state"], fold["activity"]) == ("tuned", "3 of 4")


def test_a_pin_on_a_fold_shows_on_all_copies_and_one_before_it_on_its_own(stack: SessionState) -> None:
    pattern = r"re:layers\.\d+"
    every, one = Rule(pattern, "pin", candidate=ONNX), Rule("layers.2", "leave")
    columns = columns_of(replace(stack, plan=Plan(rules=(every,))))
    assert {at(columns, f"layers.{i}")["wanted"] for i in range(4)} == {"onnxruntime"}
    assert (at(columns, pattern)["rule"], at(columns, pattern)["wanted"]) == ("pin", "onnxruntime")
    columns = columns_of(replace(stack, plan=Plan(rules=(one, every))))
    assert at(columns, "layers.2")["rule"] == "leave"
    assert at(columns, "layers.1")["rule"] == "pin"
    assert (at(columns, pattern)["rule"], at(columns, pattern)["wanted"]) == ("mixed", "")


def test_figures_of_another_candidate_than_the_pinned_one_are_not_shown(stack: SessionState) -> None:
    plan = Plan(rules=(Rule("layers.0", "pin", candidate=INDUCTOR),))
    row = at(columns_of(replace(stack, plan=plan, choices=chosen("layers.0", ONNX))), "layers.0")
    assert (row["state"], row["speedup"], row["error"]) == ("pending", None, None)


def test_the_module_that_is_tried_now_says_so(stack: SessionState) -> None:
    progress = Progress(path="layers.1", phase="build", candidate="onnxruntime")
    columns = columns_of(replace(stack, status="running", progress=progress), planned={"layers.0", "layers.1"})
    assert at(columns, "layers.0")["state"] == "waiting"
    assert at(columns, "layers.1")["state"] == "running"
    assert at(columns, "layers.1")["activity"] == "build onnxruntime"
    assert at(columns, r"re:layers\.\d+")["state"] == "running"


def test_candidates_say_which_can_be_pinned() -> None:
    figures = {c["label"]: c for c in candidates_of(replay(events("failures")), ["shifts"], offered=["tensorrt"])}
    assert figures["scripted[error=scaled]"]["pinnable"] == "accept"
    assert figures["scripted[error=scaled]"]["error_class"] == "out of tolerance"
    assert figures["scripted[fails_at=build]"]["pinnable"] == "no"
    assert "scripted failure" in figures["scripted[fails_at=build]"]["status"]
    assert figures["absent"]["pinnable"] == "no"
    assert figures["tensorrt"]["pinnable"] == "yes"


def test_candidates_of_one_module_and_of_several() -> None:
    state = replay(events("success"))
    one = {c["label"]: c for c in candidates_of(state, ["encoder"])}
    assert one["onnxruntime"]["chosen"]
    assert one["onnxruntime"]["speedup"] == "×8.67"
    assert next(iter(one)) == "eager"
    assert one["eager"]["latency"]
    both = {c["label"]: c for c in candidates_of(state, ["encoder", "head"])}
    assert both["onnxruntime"]["at"] == "mean of 2"


# --- the widget ---------------------------------------------------------------------------------------------------


def widget(state: SessionState) -> tuple[TreeView, list[Any]]:
    view, sent = TreeView(columns_of(state)), []
    view.send = lambda content, buffers=None: sent.append(content)  # type: ignore[method-assign]
    return view, sent


def test_a_patch_changes_the_trait_in_place_and_is_one_message(stack: SessionState) -> None:
    view, sent = widget(stack)
    trait = view.tree
    view.patch({1: {"state": "running", "activity": "build"}, 2: {"choice": "onnxruntime"}})
    assert view.tree is trait
    assert view.columns["state"][1] == "running"
    assert view.columns["choice"][2] == "onnxruntime"
    assert [message["op"] for message in sent] == ["patch"]
    assert sent[0]["revision"] == trait["revision"] == 1
    view.patch({})
    assert len(sent) == 1


def test_a_wrong_patch_changes_nothing(stack: SessionState) -> None:
    view, sent = widget(stack)
    before = view.columns
    with pytest.raises(IndexError, match="row 999 of column 'state'"):
        view.patch({0: {"state": "running"}, 999: {"state": "running"}})
    with pytest.raises(KeyError):
        view.patch({0: {"colour": "red"}})
    assert view.columns == before
    assert not sent


def test_columns_are_a_copy(stack: SessionState) -> None:
    view, _ = widget(stack)
    view.columns["state"][0] = "failed"
    assert view.columns["state"][0] != "failed"


def test_patches_from_many_threads_all_count(stack: SessionState) -> None:
    view, sent = widget(stack)

    def work(row: int) -> None:
        for i in range(50):
            view.patch({row: {"activity": str(i)}})

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert view.columns["activity"][:4] == ["49"] * 4
    assert [message["revision"] for message in sent] == list(range(1, 201))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda command: [command["path"]], {"ok": True, "reply": ["encoder"], "error": ""}),
        (lambda command: raised(PlanError("no such path")), {"ok": False, "reply": None, "error": "no such path"}),
        (lambda command: raised(ValueError("odd")), {"ok": False, "reply": None, "error": "ValueError: odd"}),
    ],
)
def test_a_command_is_answered_once_by_id(
    stack: SessionState, answer: Callable[[Any], Any], expected: dict[str, Any]
) -> None:
    view, sent = widget(stack)
    view.on_command(answer)
    view._handle_custom_msg({"id": "7", "op": "candidates", "path": "encoder"}, [])
    assert sent == [{"op": "ack", "id": "7", **expected}]


def raised(error: Exception) -> None:
    raise error


def test_a_page_that_missed_patches_gets_the_present_tree(stack: SessionState) -> None:
    view, sent = widget(stack)
    view.patch({0: {"state": "running"}})
    view._handle_custom_msg({"id": "1", "op": "hello", "path": "", "revision": 0}, [])
    view._handle_custom_msg({"id": "2", "op": "hello", "path": "", "revision": 1}, [])
    assert sent[1]["reply"]["columns"]["state"][0] == "running"
    assert sent[2]["reply"] is None


def test_what_is_no_command_is_ignored(stack: SessionState) -> None:
    view, sent = widget(stack)
    for content in (None, "pin", {"op": "pin"}, {"id": 3}):
        view._handle_custom_msg(content, [])
    assert not sent


def test_other_rows_are_shown_as_a_new_tree(stack: SessionState) -> None:
    view, _ = widget(stack)
    view.patch({0: {"state": "running"}})
    view.show(columns_of(replay(events("success"))))
    assert view.columns["path"][0] == "encoder"
    assert view.tree["revision"] == 2


def test_two_thousand_modules_are_small(stack: SessionState) -> None:
    block = [row for row in stack.rows if row["path"].startswith("layers.0")]
    rows = list(stack.rows)
    for i in range(500):
        rows += [dict(row) | {"path": row["path"].replace("layers.0", f"blocks.{i}.layers.0")} for row in block]
    assert len(rows) > 2000
    assert len(json.dumps(columns_of(SessionState(rows=tuple(rows))))) + len(bundled("tree_widget.js")) < 500_000


def test_joined_modules_share_a_scope_without_a_clash() -> None:
    source = bundled("tree_widget.js")
    assert "import {" not in source.replace('import("', "")
    names = re.findall(
        r"^(?:export default )?(?:async )?(?:function|class|const|let) (\w+)", source, flags=re.MULTILINE
    )
    assert len(names) == len(set(names)) > 20
    assert len(re.findall("^export ", source, flags=re.MULTILINE)) == 1
