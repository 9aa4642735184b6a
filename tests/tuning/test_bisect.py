"""The first diverging submodule is found, with its figures, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.backends import registry
from aitune_lab.backends.base import BuildJob, Executable
from aitune_lab.capture.swap import swapped
from aitune_lab.errors import PlanError, TargetError
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedConfig
from aitune_lab.tuning.bisect import bisect


@dataclass(frozen=True)
class FaultyConfig(ScriptedConfig):
    """`on`: class name of the modules that come out wrong, also inside a module that holds one; `how`: see below."""

    on: str = "LayerNorm"
    how: str = "wrong"


class Faulty(ScriptedBackend):
    """Right but for modules of one class: their outputs are off by 1 %, or the build fails."""

    name = "faulty"
    config_type = FaultyConfig
    config: FaultyConfig
    built: ClassVar[list[str]] = []

    def build(self, job: BuildJob) -> Executable:
        self.built.append(job.path)
        made = super().build(job)
        faulty = [m for m in job.module.modules() if type(m).__name__ == self.config.on]
        if faulty and self.config.how == "fails":
            raise RuntimeError("no such kernel")
        run = made.call
        itself = job.module in faulty  # what runs is its forward, around which its own hooks don't go

        def call(*tensors: torch.Tensor) -> Any:
            inner = [m for m in faulty if m is not job.module]
            handles = [m.register_forward_hook(lambda module, args, output: 1.01 * output) for m in inner]
            try:
                return [1.01 * x if itself else x for x in run(*tensors)]
            finally:
                for handle in handles:
                    handle.remove()

        made.call = call
        return made


class Block(nn.Module):
    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8) if normed else nn.Identity()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        for layer in self.layers:
            y = layer(y)
        return x + y


@pytest.fixture(autouse=True)
def _faulty() -> Iterator[None]:
    registry.register(Faulty)
    Faulty.built.clear()
    yield
    registry.unregister("faulty")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(normed=False), Block(), Block()).eval()


def data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 8), torch.randn(5, 8)]


def test_the_first_wrong_submodule_is_named_with_its_figures() -> None:
    result = ait.bisect(model(), "faulty", data())
    assert result.culprit is not None
    assert (result.culprit.path, result.culprit.class_name, result.culprit.depth) == ("1.norm", "LayerNorm", 2)
    assert result.culprit.relative_l2 == pytest.approx(0.01, rel=0.01)
    assert result.culprit.allowed == pytest.approx(1e-4)
    assert not result.own
    assert result.sentence.startswith(
        "LayerNorm '1.norm' is the first on which faulty diverges from eager by a relative L2 error of "
    )
    assert "output" in result.culprit.problem


def test_the_walk_goes_in_execution_order_and_no_further_than_needed() -> None:
    result = bisect(model(), "faulty", data())
    assert [(r.depth, r.path, r.kind) for r in result.rows] == [
        (0, "", "wrong"),
        (1, "0", "right"),
        (1, "1", "wrong"),
        (2, "1.linear", "right"),
        (2, "1.norm", "wrong"),
    ]
    assert Faulty.built == ["", "0", "1", "1.linear", "1.norm"]


def test_error_by_depth_follows_the_culprit() -> None:
    result = bisect(model(), "faulty", data())
    assert [(depth, path) for depth, path, _ in result.error_by_depth] == [(0, ""), (1, "1"), (2, "1.norm")]
    assert all(off > 1e-4 for _, _, off in result.error_by_depth)


def test_an_error_between_submodules_is_told_apart() -> None:
    result = bisect(model(), Faulty(on="Block"), data())
    assert result.own
    assert result.culprit is not None
    assert result.culprit.path == "0"
    assert result.sentence.endswith("none of its 4 submodules does so alone, so it is in what Block does between them")


def test_a_right_candidate_has_no_culprit() -> None:
    result = bisect(model(), Faulty(on="Conv2d"), data())
    assert result.culprit is None
    assert result.sentence.startswith("faulty[on=Conv2d] is right on Sequential")


def test_a_failing_build_is_tracked_down_too() -> None:
    result = bisect(model(), "faulty[how=fails]", data())
    assert result.culprit is not None
    assert result.culprit.path == "1.norm"
    assert (
        "is the first on which faulty[how=fails] fails: failed to build: RuntimeError: no such kernel"
        in result.sentence
    )


def test_a_target_that_is_no_module_and_a_start_below_the_top() -> None:
    class Pipe:
        def __init__(self) -> None:
            self.first, self.second = Block(normed=False).eval(), model()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    whole = bisect(Pipe(), "faulty", data())
    assert whole.culprit is not None
    assert whole.culprit.path == "second.1.norm"
    below = bisect(Pipe(), "faulty", data(), path="second.2")
    assert below.culprit is not None
    assert below.culprit.path == "second.2.norm"
    shallow = bisect(Pipe(), "faulty", data(), max_depth=1)
    assert shallow.culprit is not None
    assert shallow.culprit.path == "second.1"


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target, items = model(), data()
    keys = {name: set(vars(m)) for name, m in target.named_modules()}
    state = torch.get_rng_state()
    bisect(target, "faulty", items)
    assert {name: set(vars(m)) for name, m in target.named_modules()} == keys
    assert not any(swapped(m) for m in target.modules())
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_result_shows_itself() -> None:
    text = str(bisect(model(), "faulty", data()))
    assert "1.norm" in text
    assert "LayerNorm" in text
    assert "<table" in bisect(model(), "faulty", data())._repr_html_()


def test_what_cannot_be_looked_for_is_an_error() -> None:
    with pytest.raises(TargetError, match="path must be one of"):
        bisect(model(), "faulty", data(), path="nowhere")
    with pytest.raises(PlanError, match="backend must be one of"):
        bisect(model(), "tensorflow", data())
    with pytest.raises(TargetError, match="can be tried alone"):
        bisect(model().train(), "faulty", data())


@pytest.mark.full
def test_a_real_trap_of_onnx_runtime_is_found() -> None:
    pytest.importorskip("onnxruntime")
    from importlib.util import module_from_spec, spec_from_file_location

    case = Path(__file__).parent.parent / "cases" / "export" / "g06_sdpa_bool_rows_off.py"
    spec = spec_from_file_location("case_g06", case)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    target, inputs, _ = module.make()
    result = bisect(target, "onnxruntime", inputs)
    if result.culprit is None:
        pytest.skip("the backend keeps this case right")
    assert result.culprit.path == ""
    assert result.own
    assert "between them" in result.sentence
