from __future__ import annotations

import builtins
import html
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from aitune_lab import _display
from aitune_lab.capture.inspector import Inspection, ModuleRow
from aitune_lab.errors import MissingDependency, install_command
from aitune_lab.report import (
    CANDIDATE_COLUMNS,
    MODULE_COLUMNS,
    Column,
    candidate_rows,
    choices_frame,
    clean,
    events_frame,
    html_table,
    module_rows,
    modules_frame,
    render_table,
    trials_frame,
)
from aitune_lab.schema import (
    Candidate,
    Choice,
    Comparison,
    Event,
    LeafDifference,
    Measurement,
    Point,
    PointResult,
    Trial,
)

EVIL = "<script>alert(1)</script>\x1b[31m\u202e&"


def latency(ms: float, disturbed: str | None = None) -> Measurement:
    return Measurement(ms, ms * 1.2, ms, ms, ms, 0.04, 20, 5, "perf_counter", 2, disturbed)


def result(size: int, ms: float, eager: float, disturbed: str | None = None) -> PointResult:
    leaf = LeafDifference("y", "within budget", 0.5, 0, 0, 0, 0, 3.2e-5, 0.999, 80.0, 0, 1.5, 1e-7, 1e-4)
    comparison = Comparison("within budget", "float64", (leaf,), 2)
    return PointResult(Point((("b", size),)), 2, 1.0, comparison, latency(ms, disturbed), latency(eager), 1 << 20)


ORT = Trial(
    "k1",
    "encoder",
    "s",
    Candidate("onnxruntime"),
    "ok",
    points=(result(1, 1.0, 2.0), result(8, 3.1, 6.52)),
    build_seconds=1.5,
)
FAILED = Trial("k2", "encoder", "s", Candidate("inductor"), "failed", reason="no compiler")
EAGER = Trial("k0", "encoder", "s", Candidate("eager"), "ok", points=(result(1, 2.0, 2.0), result(8, 6.5, 6.5)))
CHOICE = Choice(
    "encoder", "forward", "s", ORT.candidate, "k1", "2.1 times as fast", 2.1, losers={"inductor": "failed: no compiler"}
)
ROW = ModuleRow(
    "encoder.layer", "Layer", "forward", 1, 3, 0.03, 0.01, 0.5, 1200, 0, 4800, ("float32",), ("cpu",), ("x: float32[8, 3]",), ("float32[8, 3]",)
)  # fmt: skip


def test_module_rows() -> None:
    row, method, shared = module_rows(
        [
            ROW,
            replace(ROW, path="vae.encode", method="encode", depth=0, tunable=False, reason="no tensors"),
            replace(ROW, path="", depth=0, shared_with=("twin",)),
        ]
    )
    assert row["path"] == "  encoder.layer"
    assert (row["calls"], row["total_ms"], row["self_ms"], row["mean_ms"]) == ("3", "30.0", "10.0", "10.0")
    assert (row["share"], row["parameters"], row["parameter_bytes"]) == ("50.0 %", "1,200", "4.7 KiB")
    assert (row["inputs"], row["dtypes"], row["tunable"]) == ("x: float32[8, 3]", "float32", "yes")
    assert (method["path"], method["tunable"]) == ("vae.encode", "no: no tensors")
    assert (shared["path"], shared["tunable"]) == ("(model)", "yes; same module as twin")


def test_module_rows_take_mappings_with_gaps() -> None:
    assert module_rows([{"path": "a", "class_name": "A"}])[0]["calls"] == ""


def test_candidate_rows_name_their_point() -> None:
    eager, ort, failed = candidate_rows([EAGER, ORT, FAILED], CHOICE)
    assert (ort["chosen"], ort["candidate"], ort["point"]) == ("*", "onnxruntime", "b=8 (of 2)")
    assert (ort["latency"], ort["eager"]) == ("3.10 ± 0.062", "6.52 ± 0.13")
    assert ort["speedup"] == "×2.08"  # (2.0 + 6.52) / (1.0 + 3.1)
    assert (ort["error_class"], ort["relative_l2"]) == ("within budget (1.5× eager's)", "3.2e-05")
    assert (ort["build"], ort["status"]) == ("1.50", "chosen: 2.1 times as fast")
    assert failed["status"] == "failed: no compiler"
    assert (failed["point"], failed["latency"], failed["chosen"]) == ("", "", "")
    assert (eager["speedup"], eager["status"]) == ("×1", "ok")


def test_every_point_has_its_own_speedup() -> None:
    rows = candidate_rows([ORT, FAILED], CHOICE, every_point=True)
    assert [(r["candidate"], r["point"], r["speedup"]) for r in rows] == [
        ("onnxruntime", "b=1", "×2"),
        ("", "b=8", "×2.1"),
        ("inductor", "", ""),
    ]


def test_marks() -> None:
    disturbed = replace(ORT, points=(result(8, 3.1, 6.52, "other load"),))
    choice = replace(CHOICE, pinned=True, accepted_error=True)
    row = candidate_rows([disturbed], choice)[0]
    assert row["latency"] == "3.10 ± 0.062 (disturbed)"
    assert row["speedup"] == "—"  # it decides nothing
    assert row["status"].startswith("pinned, error accepted: ")


def test_render_table_aligns() -> None:
    columns = (Column("name", "name"), Column("ms", "ms", right=True), Column("empty", "empty"), Column("why", "why"))
    text = render_table(columns, [{"name": "a", "ms": "1.0", "why": "x" * 99}, {"name": "bb" * 50, "ms": "10.0"}])
    head, rule, first, second = text.splitlines()
    assert "empty" not in head
    assert set(rule) == {"-", " "}
    assert first.index("1.0") == second.index("10.0") + 1
    assert "x" * 99 in first
    assert "…" in second
    assert render_table(columns, []).splitlines()[0].split() == ["name", "ms", "empty", "why"]


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_names_are_untrusted() -> None:
    rows = [dict.fromkeys((c.key for c in CANDIDATE_COLUMNS), EVIL)]
    page = html_table((*CANDIDATE_COLUMNS, Column("x", EVIL)), rows, caption=EVIL)
    parser = Text()
    parser.feed(page)
    assert parser.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert html.escape(clean(EVIL)) in page
    for text in (page, render_table(CANDIDATE_COLUMNS, rows)):
        assert not re.search("[\x1b\u202e]", text)
    assert clean("naïve ± 模型") == "naïve ± 模型"


def test_inspection_through_the_lazy_hook() -> None:
    inspection = Inspection(
        None, (replace(ROW, class_name=EVIL),), 0.06, "2 items, one call each", 3, ("eval mode forgotten",)
    )
    text = str(inspection)
    assert text.startswith("2 items, one call each\n60.0 ms end to end, over 3 iterations\n")
    assert "encoder.layer" in text
    assert text.endswith("warning: eval mode forgotten")
    assert "<script>" not in inspection._repr_html_()
    assert _display.report().__name__ == "aitune_lab.report"
    assert list(inspection.to_dataframe()["path"]) == ["encoder.layer"]


def test_frames() -> None:
    pytest.importorskip("pandas")
    modules = modules_frame([ROW, {"path": "other"}])
    assert modules.loc[0, "mean_ms"] == 10.0
    assert modules.loc[0, "inputs"] == "x: float32[8, 3]"
    trials = trials_frame([ORT, FAILED])
    assert list(trials["point"].fillna("")) == ["b=1", "b=8", ""]
    assert trials.loc[1, "latency_ms"] == 3.1
    assert trials.loc[1, "speedup"] == pytest.approx(6.52 / 3.1)
    assert trials.loc[2, "reason"] == "no compiler"
    assert trials.loc[0, "snr_db"] == 80.0
    choices = choices_frame([CHOICE])
    assert choices.loc[0, "candidate"] == "onnxruntime"
    events = events_frame([Event(0, 0.5, "log", candidate=ORT.candidate, data={"message": "é"})])
    assert events.loc[0, "data"] == '{"message": "é"}'
    for frame, column in (
        (trials_frame([]), "latency_ms"),
        (modules_frame([]), "share"),
        (choices_frame([]), "reason"),
    ):
        assert len(frame) == 0
        assert column in frame.columns


def test_without_pandas_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match=re.escape(install_command("report"))):
        modules_frame([ROW])


def test_columns_and_rows_agree() -> None:
    assert {c.key for c in MODULE_COLUMNS} <= set(module_rows([ROW])[0])
    assert {c.key for c in CANDIDATE_COLUMNS} <= set(candidate_rows([ORT])[0])


@dataclass
class Loose:
    path: str = "x"


def test_frame_of_other_dataclasses() -> None:
    pytest.importorskip("pandas")
    assert modules_frame([Loose()]).loc[0, "path"] == "x"
