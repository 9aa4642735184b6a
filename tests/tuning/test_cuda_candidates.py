"""What is tried on CUDA, decided from signatures alone: no GPU is needed to say it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from aitune_lab.errors import PlanError
from aitune_lab.schema import LEAF, Candidate, Limits, Node, Plan, Signature, TensorLeaf, Tolerance
from aitune_lab.tuning.candidates import candidate_of_label, complexity_of, cuda_variants, shortlist

ON_GPU = Signature(
    "forward", Node("dict", "builtins:dict", ("x",), (LEAF,)), (TensorLeaf("x", "float32", (1, 3), "cuda:0"),)
)
INDUCTOR = Candidate("inductor")


def labels(module: nn.Module, plan: Plan | None = None, proposed: tuple[Candidate, ...] = (INDUCTOR,)) -> list[str]:
    return [c.label for c in cuda_variants(proposed, ON_GPU, module, plan or Plan())]


def test_each_with_and_without_a_graph() -> None:
    assert labels(nn.Linear(3, 3)) == ["inductor[cuda graph]", "inductor"]


def test_eager_itself_is_measured_anyway() -> None:
    assert labels(nn.Linear(3, 3), proposed=(Candidate("eager"),)) == ["eager[cuda graph]"]


def test_convolutions_in_channels_last() -> None:
    assert "inductor[channels_last, cuda graph]" in labels(nn.Conv2d(3, 3, 3))
    already = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert "inductor[channels_last, cuda graph]" not in labels(already)


def test_lower_precision_needs_a_budget_for_it() -> None:
    def with_budget(error: float, module: nn.Module) -> list[str]:
        return labels(module, Plan(tolerance=Tolerance(max_relative_error=error)))

    float32 = nn.Linear(3, 3)
    assert len(with_budget(1e-4, float32)) == 2
    assert with_budget(5e-4, float32)[2:] == ["inductor[tf32, cuda graph]"]
    assert "inductor[float16]" in with_budget(2e-3, float32)
    assert "inductor[bfloat16, cuda graph]" in with_budget(5e-2, float32)
    assert len(with_budget(5e-2, nn.Linear(3, 3).half())) == 2


def test_tf32_exists_in_graphs_only() -> None:
    found = labels(nn.Linear(3, 3), Plan(tolerance=Tolerance(max_relative_error=0.1)))
    assert "inductor[tf32, cuda graph]" in found
    assert "inductor[tf32]" not in found


def test_further_proposals_and_all_precisions_in_an_exhaustive_search() -> None:
    autotuned = replace(INDUCTOR, options=(("mode", "max-autotune-no-cudagraphs"),))
    assert autotuned.label not in labels(nn.Linear(3, 3), proposed=(INDUCTOR, autotuned))
    found = labels(nn.Linear(3, 3), Plan(limits=Limits(search="exhaustive")), (INDUCTOR, autotuned))
    assert {autotuned.label, "inductor[tf32, cuda graph]", "inductor[bfloat16]"} <= set(found)


def test_autocast_of_the_user_leaves_no_room_for_another() -> None:
    signature = replace(ON_GPU, autocast=(("cuda", "float16"),))
    plan = Plan(tolerance=Tolerance(max_relative_error=0.1))
    found = [c.precision for c in cuda_variants([INDUCTOR], signature, nn.Linear(3, 3), plan)]
    assert set(found) == {"as is", "tf32"}


def test_eager_graphs_are_tried_without_being_named() -> None:
    found = shortlist("", nn.Linear(3, 3), ON_GPU, Plan())
    assert Candidate("eager", cuda_graph=True) in found.candidates
    assert Candidate("eager") not in found.candidates


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate("eager", cuda_graph=True),
        Candidate("inductor", (("freezing", True),), "float16", "channels_last", True),
        Candidate("inductor", precision="tf32", cuda_graph=True),
        Candidate("inductor", memory_format="channels_last"),
    ],
)
def test_labels_name_candidates(candidate: Candidate) -> None:
    assert candidate_of_label(candidate.label) == candidate


def test_a_precision_nobody_knows() -> None:
    with pytest.raises(PlanError):
        candidate_of_label("inductor[float8]")


def test_ties_go_to_the_simpler() -> None:
    graph = replace(INDUCTOR, cuda_graph=True)
    assert complexity_of(Candidate("eager")) < complexity_of(INDUCTOR) < complexity_of(graph)
