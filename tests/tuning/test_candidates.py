"""What is worth a trial on the CPU, in which order, and why: decided from what is known before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from aitune_lab.backends import registry
from aitune_lab.backends.base import BackendConfig
from aitune_lab.errors import PlanError
from aitune_lab.schema import Candidate, Plan, Rule, Signature, Tolerance
from aitune_lab.testing import ScriptedBackend, record_calls
from aitune_lab.tuning import candidates as policy
from aitune_lab.tuning.candidates import Shortlist, candidate_of_label, estimated_seconds, shortlist
from aitune_lab.tuning.seen import error_budget, see
from aitune_lab.tuning.strategies import OneBackendStrategy

WIDE = Plan(tolerance=Tolerance(max_relative_error=0.05))


@dataclass(frozen=True)
class RoundingConfig(BackendConfig):
    """`bits` of a backend that rounds; 0 doesn't. `name` is any text."""

    bits: int = 0
    name: str = ""


class Rounding(ScriptedBackend):
    """Proposes an exact form and two lower ones."""

    name = "rounding"
    config_type = RoundingConfig  # type: ignore[assignment]

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        return [Rounding(bits=bits).candidate() for bits in (0, 8, 4)]

    def typical_error(self) -> float:
        return {0: 0.0, 8: 5e-3, 4: 0.1}[self.config.bits]  # type: ignore[attr-defined]


class OnlyRounding(Rounding):
    """Proposes lower forms alone."""

    name = "only_rounding"

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        return [OnlyRounding(bits=bits).candidate() for bits in (4, 8)]


@pytest.fixture(autouse=True)
def two_backends(monkeypatch: pytest.MonkeyPatch):
    """Only these are known beside eager; the processor multiplies bfloat16."""
    monkeypatch.setattr(policy, "multiplies_bfloat16", lambda: True)
    for backend in (Rounding, OnlyRounding):
        registry.register(backend)
    monkeypatch.setattr(registry, "names", lambda: ["eager", "rounding", "only_rounding"])
    yield
    for backend in (Rounding, OnlyRounding):
        registry.unregister(backend.name)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval()


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()


def listed(module: nn.Module, plan: Plan | None = None, **options) -> Shortlist:
    x = torch.randn(2, 3, 8, 8) if isinstance(module[0], nn.Conv2d) else torch.randn(2, 16)
    _, (recorded, *_) = record_calls(module, x)
    return shortlist("part", module, recorded.signature, plan or Plan(), **options)


def labels(found: Shortlist) -> list[str]:
    return [candidate.label for candidate in found.candidates]


def test_by_default_only_what_the_dtypes_budget_admits() -> None:
    found = listed(mlp())
    assert labels(found) == ["rounding"]
    assert found.not_tried == {}
    assert found.left_out["rounding[bits=8]"] == (
        "beyond the budget: typically off by 0.005 or more, and the budget is 0.0001"
    )
    # A backend of which nothing is left is named once, with what comes nearest.
    assert found.left_out["only_rounding"].startswith("beyond the budget: typically off by 0.005")
    assert "only_rounding[bits=8]" not in found.left_out
    assert found.left_out["eager[bfloat16]"].startswith("beyond the budget")


def test_a_wider_budget_admits_lower_precisions_and_says_so() -> None:
    found = listed(mlp(), WIDE)
    assert labels(found) == ["eager[bfloat16]", "rounding", "only_rounding[bits=8]", "rounding[bits=8]"]
    assert set(found.left_out) == {"rounding[bits=4]", "only_rounding[bits=4]"}
    assert found.why["rounding"] == "first proposal of its backend"
    assert found.why["rounding[bits=8]"] == "the budget admits its typical error of 0.005"
    assert "multiplies bfloat16" in found.why["eager[bfloat16]"]


def test_the_budget_is_what_the_comparison_will_allow() -> None:
    _, (recorded, *_) = record_calls(mlp(), torch.randn(2, 16))
    seen = see(mlp(), recorded.signature)
    assert error_budget(seen, Tolerance()) == 1e-4
    assert error_budget(see(mlp().bfloat16(), recorded.signature), Tolerance()) == 5e-2
    assert error_budget(seen, Tolerance(accuracy="exact", max_relative_error=1.0)) == 0.0
    assert error_budget(seen, Tolerance(max_relative_error=0.05, min_snr_db=40)) == pytest.approx(0.01)
    assert error_budget(seen, Tolerance(max_relative_error=0.05, min_snr_db=20)) == 0.05


def test_the_first_that_is_left_stands_for_its_variants() -> None:
    found = listed(mlp(), Plan(tolerance=Tolerance(max_relative_error=0.05)))
    assert found.variant_of == {Candidate("rounding", (("bits", 8),)): Candidate("rounding")}


def test_convolutions_are_tried_in_channels_last_by_eager() -> None:
    found = listed(convolutions())
    assert labels(found)[0] == "eager[channels_last]"
    assert found.why["eager[channels_last]"] == "2 convolutions in the default layout"
    assert "eager[channels_last]" not in labels(listed(convolutions().to(memory_format=torch.channels_last)))
    assert "eager[channels_last]" not in labels(listed(mlp()))


def test_what_the_user_names_is_tried_whatever_speaks_against_it() -> None:
    low = Candidate("rounding", (("bits", 4),))
    found = listed(mlp(), backends=[low, "only_rounding", "rounding[bits=8]"])
    assert set(labels(found)) == {"rounding[bits=4]", "only_rounding[bits=4]", "rounding[bits=8]"}
    assert found.why["rounding[bits=4]"].startswith("named by the user")
    assert found.variant_of == {}


def test_where_a_strategy_admits_nothing_else_the_reason_is_told() -> None:
    found = listed(mlp())
    found.keep(OneBackendStrategy("only_rounding").admits)
    assert found.candidates == []
    assert found.not_tried["only_rounding"].startswith("beyond the budget")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("part", "'part'"), ("re:.*", "every module"), ("re:pa.*", "paths that match 'pa.*'")],
)
def test_exclusions_name_their_rule_in_words(pattern: str, words: str) -> None:
    found = listed(mlp(), Plan(rules=(Rule(pattern, "exclude", excluded="rounding"),)))
    assert found.not_tried == {"rounding": f"excluded by the rule for {words}"}


def test_eight_bits_are_for_linear_layers_and_not_for_much_python() -> None:
    pytest.importorskip("torchao")
    named = ("torchao[scheme=int8dyn]", "torchao[compile, scheme=int8dyn]")
    plain, compiled = map(candidate_of_label, named)
    _, (recorded, *_) = record_calls(mlp(), torch.randn(2, 16))
    slow, quick = (see(mlp(), recorded.signature, eager_ms=ms) for ms in (10.0, 0.05))
    assert policy.why_not_worth(plain, slow, WIDE.tolerance) is None
    assert "much Python: about 80 %" in str(policy.why_not_worth(plain, quick, WIDE.tolerance))
    assert policy.why_not_worth(compiled, quick, WIDE.tolerance) is None
    no_layers = see(convolutions(), recorded.signature)
    assert "few Linear layers: they hold 0 %" in str(policy.why_not_worth(compiled, no_layers, WIDE.tolerance))


def test_cheap_builds_come_first_and_the_estimate_grows_with_the_module() -> None:
    big = nn.Sequential(*(nn.Linear(16, 16) for _ in range(50))).eval()
    small, large = listed(mlp()), listed(big)
    assert large.seconds["rounding"] > small.seconds["rounding"] > 0
    assert estimated_seconds(large, big, 1, 1.0) > estimated_seconds(small, mlp(), 1, 1.0)
    order = [policy.build_seconds(Candidate(name), 20) for name in ("eager", "openvino", "onnxruntime", "inductor")]
    assert order == sorted(order)
    compiled, plain = (policy.build_seconds(candidate_of_label(x), 20) for x in ("torchao[compile]", "torchao"))
    assert compiled > policy.build_seconds(Candidate("inductor"), 20) > plain


def test_texts_in_labels_stay_texts() -> None:
    assert candidate_of_label("rounding[bits=8, name=2]").option("name") == "2"
    assert candidate_of_label("rounding[name=1.10]").option("name") == "1.10"
    assert candidate_of_label("rounding[bits=8]").option("bits") == 8
    with pytest.raises(PlanError, match="must be among"):
        candidate_of_label("rounding[depth=8]")
