"""What is refused at once, before anything runs: values that can't be, and names that aren't known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.tuning.options import TuneOptions


class Counting(nn.Linear):
    """A module that knows how often it ran."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.ran = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ait.Tolerance(-1), r"accuracy must be one of \['budget', 'exact'\], but got -1"),
        (lambda: ait.Tolerance(max_relative_error=-1), "max_relative_error must be a number of at least 0, but got -1"),
        (lambda: ait.Tolerance(min_agreement=2), "min_agreement must be a share of at most 1, but got 2"),
        (lambda: ait.Limits(max_trials=0.5), "max_trials must be a whole number of at least 0, but got 0.5"),
        (
            lambda: ait.Limits(search="deep"),
            r"search must be one of \['quick', 'normal', 'exhaustive'\], but got 'deep'",
        ),
        (
            lambda: ait.Rule("x", "frob"),
            r"'x' must be one of \['pin', 'strategy', 'exclude', 'leave'\], but got 'frob'",
        ),
        (lambda: ait.Rule(3, "leave"), "pattern must be a module path or 're:…', but got 3"),
        (lambda: ait.tune(nn.Linear(2, 2), [], backends=[]), r"backends must name at least one to try, but got \[\]"),
        (lambda: TuneOptions(backends=("onnx",)), "but got 'onnx'. Did you mean 'onnxruntime'?"),
    ],
)
def test_values_that_cannot_be_are_refused_where_they_are_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ait.PlanError, match=said):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"backends": ["opnvino"]},
        {"plan": ait.Plan((ait.Rule("", "pin", ait.Candidate("opnvino")),))},
        {"plan": ait.Plan((ait.Rule("re:.*", "exclude", excluded="opnvino"),))},
    ],
)
def test_unknown_backends_are_noticed_before_the_target_runs(options: dict[str, Any]) -> None:
    model = Counting()
    with pytest.raises(ait.PlanError, match=r"\['eager', .*, but got 'opnvino'. Did you mean 'openvino'\?"):
        ait.tune(model, [torch.ones(2, 8)], progress=False, **options)
    assert model.ran == 0


def test_progress_leaves_the_error_to_what_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ait.PlanError, match="no module has this path"):
        ait.tune(Counting(), [torch.ones(2, 8)], plan=ait.Plan((ait.Rule("head", "leave"),)))
    said = capsys.readouterr().err
    assert "failed; the target is as it was" in said
    assert "head" not in said
