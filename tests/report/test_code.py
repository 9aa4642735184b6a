"""A run as a script: run it, and it makes the same choices."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import sample_runs as runs

import aitune_lab as ait
from aitune_lab.backends import registry
from aitune_lab.report import as_code
from aitune_lab.schema import Candidate, Choice, Plan, Rule
from aitune_lab.testing.models import AutoEncoder, Mlp, Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning import api
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult

Picked = dict[tuple[str, str, str], str]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs take the scripted backend, and latencies from its labels."""
    monkeypatch.setattr(api, "TuneOptions", functools.partial(TuneOptions, meter=ScriptedMeter()))
    with scripted_backend():
        yield


def picked(result: TuneResult) -> Picked:
    return {(c.path, c.method, c.signature): c.candidate.label for c in result.choices}


def run(code: str, **names: Any) -> Picked:
    space = dict(names)
    exec(compile(code, "script.py", "exec"), space)
    return picked(space["result"])


def candidates(*options: dict[str, Any]) -> list[Candidate]:
    return [ScriptedBackend(**each).candidate() for each in options]


class OddNames(nn.Module):
    """Holds modules whose names are no Python."""

    def __init__(self) -> None:
        super().__init__()
        for name in ('a "quoted" one', "it's", runs.EVIL.replace(".", ""), "plain"):
            self.add_module(name, Mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x + len(list(self.children()))


def test_the_script_makes_the_same_choices_and_saves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = Pair(Mlp(), Mlp()).eval(), [torch.randn(2, 4), torch.randn(3, 4)]
    ait.wrap(model, ["first", "second"])
    wanted = candidates({"latency_ms": 0.4}, {"latency_ms": 0.3})
    plan = Plan(rules=(Rule("second", "pin", candidate=Candidate("eager")),))
    result = ait.tune(model, data, plan=plan, backends=wanted, progress=False)
    code = as_code(result, target_name="net", data_name="samples")
    ait.unwrap(model)
    again = run(code, net=model, samples=data)
    assert set(again.values()) == {"scripted[latency_ms=0.3]", "eager"}
    assert again == picked(result)
    assert (tmp_path / "tuned.ait").exists()
    assert 'ait.save(net, "tuned.ait")' in code


def test_odd_names_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = OddNames().eval(), [torch.randn(2, 4)]
    paths = [name for name, _ in model.named_children()]
    ait.wrap(model, paths)
    result = ait.tune(model, data, backends=candidates({}), progress=False)
    code = as_code(result)
    assert "\x1b" not in code
    ait.unwrap(model)
    again = run(code, model=model, data=data)
    assert {path for path, _, _ in again} == set(paths)
    assert again == picked(result)


def test_tuned_methods_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = AutoEncoder().eval(), [torch.randn(4) for _ in range(3)]

    def through(x: torch.Tensor) -> torch.Tensor:
        return model.decode(model.encode(x))

    options = {"batch_sizes": [1, 2], "inference_function": through, "backends": candidates({})}
    result = ait.tune(model, data, progress=False, **options)
    assert {choice.method for choice in result.choices} == {"encode", "decode"}
    code = as_code(result, options=options)
    assert "batch_sizes=[1, 2]" in code
    assert "inference_function=inference_function" in code
    assert "# inference_function is yours" in code
    ait.unwrap(model)
    assert run(code, model=model, data=data, inference_function=through) == picked(result)


def ran_elsewhere(folder: Path, code: str, before: str = "") -> str:
    """What a script prints at its end in a process of its own, whose model and data are two lines of code."""
    setup = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\nmodel, data = nn.Linear(4, 4).eval(), [torch.randn(2, 4)]\n"
    script = folder / "script.py"
    script.write_text(setup + before + code + "print(*{c.candidate.label for c in result.choices})", encoding="utf-8")
    search = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    variables = {**os.environ, "PYTHONPATH": search, "AITUNE_LAB_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_backends_are_written_by_their_class_with_what_was_changed() -> None:
    options = {"backends": [ait.ONNXRuntimeBackend(), ait.TorchInductorJitBackend(freezing=True), ait.OpenVINOBackend]}
    code = as_code(runs.state(), options=options)
    written = "backends=[ait.ONNXRuntimeBackend(), ait.TorchInductorJitBackend(freezing=True), ait.OpenVINOBackend]"
    assert written in code
    assert "yours" not in code
    rest = as_code(runs.state(), options={"backends": ["eager", "inductor[freezing]", Candidate("onnxruntime")]})
    assert 'backends=["eager", "inductor[freezing]", ait.Candidate("onnxruntime")]' in rest


def test_a_backend_of_a_package_is_imported_and_registered_and_the_script_runs_elsewhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 4).eval(), [torch.randn(2, 4)]
    options = {"backends": [ScriptedBackend(latency_ms=0.3, weights="baked")], "isolation": "off"}
    result = ait.tune(model, data, progress=False, **options)
    code = as_code(result, options=options)
    ait.unwrap(model)
    assert "from aitune_lab.testing.scripted import ScriptedBackend\n" in code
    assert 'backends=[ScriptedBackend(latency_ms=0.3, weights="baked")]' in code
    assert ran_elsewhere(tmp_path, code) == "scripted[latency_ms=0.3, weights=baked]"
    assert (tmp_path / "tuned.ait").exists()


def test_a_backend_of_a_notebook_is_asked_for_and_with_its_definition_the_script_runs(tmp_path: Path) -> None:
    definition = (
        "from aitune_lab.testing import ScriptedBackend\nclass Mine(ScriptedBackend):\n    name = 'mine'\n"
        "    def __init__(self, config=None, **options):\n        super().__init__(config, **options)\n"
    )
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(definition, space)
    registry.register(space["Mine"])
    try:
        torch.manual_seed(0)
        model, data = nn.Linear(4, 4).eval(), [torch.randn(2, 4)]
        options = {"backends": [space["Mine"](latency_ms=0.2)], "isolation": "off"}
        code = as_code(ait.tune(model, data, progress=False, **options), options=options)
        ait.unwrap(model)
    finally:
        registry.unregister("mine")
    assert "# Mine is yours: bring the definition of the class here.\nregistry.register(Mine)\n" in code
    assert 'backends=[ait.Candidate("mine", options=(("latency_ms", 0.2),))]' in code
    assert ran_elsewhere(tmp_path, code, before=definition) == "mine[latency_ms=0.2]"


def test_a_backend_that_nobody_knows_any_more_is_asked_for() -> None:
    gone = runs.trial("of_another_process", 1.0, 1e-8)
    code = as_code(runs.state(gone, choices=(runs.chosen(gone),)))
    assert "# The backend 'of_another_process' is yours: register its class here." in code


def test_functions_are_imported_and_objects_asked_for_without_addresses() -> None:
    class Gauge:
        def __call__(self, outputs: Any) -> float:
            return 0.0

    options = {"metric": Gauge(), "inference_function": lambda x: x, "store": Path("kept")}
    code = as_code(runs.state(), options=options)
    assert "# metric is yours, an object of class Gauge: define it here." in code
    assert "# inference_function is yours, a lambda: define it here." in code
    assert 'store="kept"' in code
    assert "0x" not in code
    imported = as_code(runs.state(), options={"inference_function": run})
    assert f"from {__name__} import run\n" in imported
    assert "inference_function=run" in imported
    named = as_code(runs.state(), options={"inference_function": run}, target_name="run")
    assert f"from {__name__} import run as run_\n" in named
    assert "inference_function=run_" in named


def test_a_parent_that_stays_eager_gives_way_to_its_children() -> None:
    winner = runs.trial("scripted", 1.0, 1e-8, path="a.x")
    eager = Candidate("eager")
    parent = Choice("a", "forward", "s", eager, None, "eager stays")
    code = as_code(runs.state(winner, choices=(parent, runs.chosen(winner))))
    assert 'ait.wrap(model, ["a.x"])' in code
    assert 'ait.Rule("a", ' not in code


def test_many_copies_are_one_rule_and_others_stay_apart() -> None:
    trials = [runs.trial("onnxruntime", 1.0, 1e-8, path=f"layers.{i}.mlp") for i in range(6)]
    other = runs.trial("inductor[freezing]", 1.0, 1e-8, path="layers.6.mlp")
    rows = tuple(runs.row(f"layers.{i}.mlp", 1, 1) for i in range(7))
    choices = tuple(map(runs.chosen, trials))
    folded = as_code(runs.state(*trials, choices=choices, rows=rows[:6]))
    assert folded.count("ait.Rule(") == 1
    assert r'r"re:layers\.\d+\.mlp"' in folded
    assert '[*(f"layers.{i}.mlp" for i in range(6))]' in folded
    # A rule for all would pin the seventh too, which is something else.
    apart = as_code(runs.state(*trials, other, choices=(*choices, runs.chosen(other)), rows=rows))
    assert apart.count("ait.Rule(") == 7
    assert 'ait.Candidate("inductor", options=(("freezing", True),))' in apart


@pytest.mark.parametrize(
    ("paths", "written"),
    [
        (["a.3", "a.4", "a.5", "head"], '[*(f"a.{i}" for i in range(3, 6)), "head"]'),
        (["a.0", "a.1", "b.2"], '["a.0", "a.1", "b.2"]'),
        (["a.00", "a.01", "a.02"], '["a.00", "a.01", "a.02"]'),
        (["{x}.0", "{x}.1", "{x}.2"], '["{x}.0", "{x}.1", "{x}.2"]'),
        ([f"l.{i}.{n}" for i in range(2) for n in "ab"], '["l.0.a", "l.0.b", "l.1.a", "l.1.b"]'),
    ],
)
def test_numbered_modules_are_listed_in_short(paths: list[str], written: str) -> None:
    trials = [runs.trial("onnxruntime", 1.0, 1e-8, path=path) for path in paths]
    code = as_code(runs.state(*trials, choices=tuple(map(runs.chosen, trials))))
    assert f"ait.wrap(model, {written})" in code
    assert eval(written) == paths


def test_own_pins_stay_as_they_were_written_with_what_was_accepted() -> None:
    wrong = runs.trial("openvino", 1.0, 0.3, path="layers.0")
    same = runs.trial("openvino", 1.0, 0.3, path="layers.1")
    rule = Rule("re:layers.*", "pin", candidate=Candidate("openvino"), accept_error=True)
    choices = tuple(runs.chosen(t, pinned=True, accepted_error=True) for t in (wrong, same))
    code = as_code(runs.state(wrong, same, choices=choices, plan=Plan(rules=(rule,))))
    assert code.count("ait.Rule(") == 1
    assert 'ait.Rule("re:layers.*", "pin", candidate=ait.Candidate("openvino"), accept_error=True)' in code
    unpinned = as_code(runs.state(wrong, choices=(runs.chosen(wrong, accepted_error=True),)))
    assert "accept_error=True" in unpinned


def test_signatures_with_different_choices_are_raced_among_those() -> None:
    small = runs.trial("onnxruntime", 1.0, 1e-8, signature="small")
    large = runs.trial("openvino", 1.0, 1e-8, signature="large")
    lost = runs.trial("inductor", 3.0, 1e-8, signature="large")
    code = as_code(
        runs.state(small, large, lost, choices=(runs.chosen(small), runs.chosen(large, {"inductor": "slower"})))
    )
    assert '"pin"' not in code
    assert 'ait.Rule("m", "exclude", excluded="inductor")' in code
    assert code.count("ait.Rule(") == 1


@pytest.mark.parametrize("name", runs.NAMES)
def test_every_recorded_run_gives_python(name: str) -> None:
    code = as_code(runs.recorded(name))
    compile(code, name, "exec")
    assert ("ait.save" in code) == (name == "success")


def test_tolerance_and_limits_are_kept() -> None:
    plan = Plan(tolerance=ait.Tolerance(max_relative_error=1e-2), limits=ait.Limits(max_trials=7), split_points=True)
    space: dict[str, Any] = {}
    code = as_code(runs.state(plan=plan)).partition("result =")[0]
    exec(code, space)
    assert space["plan"] == plan


def test_what_is_left_alone_stays_so_and_hides_no_pin() -> None:
    pin = Rule("left", "pin", candidates({"latency_ms": 0.2})[0])
    plan = Plan((Rule("norm", "leave"), pin, Rule("re:.*", "leave")))
    chosen = Choice("left", "forward", "s", pin.candidate, None, "because", pinned=True)
    code = as_code(runs.state(plan=plan, choices=(chosen,)))
    space: dict[str, Any] = {}
    exec(code.partition("ait.wrap")[0], space)
    rules = space["plan"].rules
    assert rules == plan.rules
    assert space["plan"].rule_for("left") == pin


@pytest.mark.parametrize("name", ["my model", "class", "a;b", "", "x."])
def test_names_must_be_names(name: str) -> None:
    with pytest.raises(ait.PlanError, match="must be a name in Python"):
        as_code(runs.state(), target_name=name)
    with pytest.raises(ait.PlanError, match="other than the plan"):
        as_code(runs.state(), options={"plan": None})
