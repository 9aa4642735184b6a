"""Findings: each hazard is seen where it is, not seen where it isn't, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.capture.inspector import Inspection, ModuleRow, inspect
from aitune_lab.report.advice import (
    Finding,
    MachineFacts,
    advice_text,
    inspection_advice,
    machine_facts,
    outliers,
    ranked,
    static_dimensions,
    tuning_advice,
)
from aitune_lab.runtime.installed import stats
from aitune_lab.schema import Limits, Plan, Signature
from aitune_lab.testing.models import Mlp, Pair
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, record_calls, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.result import TuneResult

QUIET = MachineFacts(threads=2, cores=2)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


def kinds(findings: list[Finding]) -> set[str]:
    return {f.kind for f in findings}


def only(findings: list[Finding], kind: str) -> Finding:
    (found,) = [f for f in findings if f.kind == kind]
    assert found.hazard
    assert found.evidence
    assert found.mitigation
    return found


def tune(target: Any, *data: torch.Tensor, **figures: float) -> TuneResult:
    options = TuneOptions(meter=ScriptedMeter(dict(figures)), backends=(ScriptedBackend(),))
    return run(make_tuner(target, list(data), Plan(limits=Limits(search="exhaustive")), options))


def row(**changes: Any) -> ModuleRow:
    base = ModuleRow("net", "Net", "forward", 0, 10, 1.0, 0.0, 1.0, 1000, 0, 4000, ("float32",), ("cpu",))
    return replace(base, **changes)


def inspection(*rows: ModuleRow, seconds: float = 1.0, **modules: nn.Module) -> Inspection:
    return Inspection(None, rows, seconds, "", 1, _modules=modules)


def test_a_quiet_small_model_has_nothing_to_say() -> None:
    wide = nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval()
    findings = inspection_advice(inspect(wide, torch.randn(64, 512)), QUIET)
    assert findings == []
    assert advice_text(findings) == "nothing to say"


def test_training_mode_is_named_at_its_outermost_module() -> None:
    target = Pair()
    target.first.eval()
    found = only(inspection_advice(inspect(target, torch.randn(2, 4)), QUIET), "training_mode")
    assert found.path == ""
    assert ".eval()" in found.mitigation
    assert found.severity == "high"


def test_float32_products_matter_on_tensor_cores_only() -> None:
    on_gpu = row(devices=("cuda:0",))
    facts = replace(QUIET, cuda=True, tensor_cores=True)
    findings = inspection_advice(inspection(on_gpu), facts)
    assert "set_float32_matmul_precision('high')" in only(findings, "matmul_precision").mitigation
    assert "half" in only(findings, "half_precision").hazard
    assert not inspection_advice(inspection(row()), QUIET)
    assert not inspection_advice(inspection(on_gpu), replace(facts, tensor_cores=False))
    assert kinds(inspection_advice(inspection(on_gpu), replace(facts, matmul_precision="high"))) == {"half_precision"}
    half = row(devices=("cuda:0",), dtypes=("float16", "float32"))
    assert kinds(inspection_advice(inspection(half), facts)) == {"matmul_precision"}


def test_a_module_of_tiny_tensors_and_much_time_of_its_own_is_bound_by_python() -> None:
    tiny = row(self_seconds=0.6, inputs=("x: float32[2, 3]",), outputs=("output: float32[2, 3]",))
    found = only(inspection_advice(inspection(tiny), QUIET), "python_bound")
    assert "60 %" in found.evidence
    assert "60 ms a call" in found.evidence
    large = replace(tiny, inputs=("x: float32[64, 512]",))
    assert not inspection_advice(inspection(large, replace(tiny, self_seconds=0.1)), QUIET)


def test_channels_last_is_proposed_for_convolutions_in_the_default_layout() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    findings = inspection_advice(inspect(net, torch.randn(1, 3, 16, 16)), QUIET)
    assert "2 convolutions" in only(findings, "channels_last").evidence
    net.to(memory_format=torch.channels_last)
    assert "channels_last" not in kinds(inspection_advice(inspect(net, torch.randn(1, 3, 16, 16)), QUIET))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (MachineFacts(threads=8, cores=2), "torch uses 8 threads and this process may use 2 CPUs"),
        (MachineFacts(threads=2, cores=2, omp_threads=16), "OMP_NUM_THREADS is 16"),
    ],
)
def test_threads_beyond_the_cpus(facts: MachineFacts, said: str) -> None:
    assert said in only(inspection_advice(inspection(row()), facts), "threads").evidence


def test_outlier_channels_are_named() -> None:
    calm, wild = nn.Linear(16, 4), nn.Linear(16, 4)
    with torch.no_grad():
        wild.weight[:, 5] *= 500
    (found,) = outliers({"calm": calm, "wild": wild})
    assert found.path == "wild"
    assert "input channel 5 of 16" in found.evidence
    with torch.no_grad():
        wild.weight.zero_()
    assert outliers({"wild": wild}) == []


def signature(*calls: torch.Tensor) -> Signature:
    return record_calls(Mlp().eval(), *calls)[1][0].signature


def test_a_batch_that_never_varied_is_pointed_out() -> None:
    (found,) = static_dimensions("net", signature(torch.randn(8, 4)))
    assert "8 as the first dimension" in found.evidence
    assert static_dimensions("net", signature(torch.randn(8, 4), torch.randn(2, 4))) == []


def test_results_say_what_the_data_never_showed() -> None:
    result = tune(Mlp().eval(), torch.randn(8, 4))
    assert "batch_sizes" in only(result.advice(), "static_shapes").mitigation
    assert tune(Mlp().eval(), torch.randn(8, 4), torch.randn(2, 4)).advice() != result.advice()


def test_a_small_batch_is_pointed_out_where_larger_ones_do_more() -> None:
    # Every point takes the same scripted time, so throughput rises with the batch.
    result = tune(Mlp().eval(), torch.randn(1, 4), torch.randn(16, 4))
    found = only(result.advice(), "batch_size")
    assert "batch 16" in found.evidence
    assert "items/s" in found.evidence


@pytest.mark.filterwarnings("ignore::aitune_lab.AituneWarning")
def test_calls_that_ran_the_original_are_explained() -> None:
    target = Mlp().eval()
    result = tune(target, torch.randn(8, 4))
    assert kinds(result.advice(stats(target))) == {"static_shapes"}
    target(torch.randn(8, 4))
    target.train()
    target(torch.randn(8, 4))
    target.eval()
    with torch.inference_mode():
        target(torch.randn(3, 4))
    findings = result.advice(stats(target))
    assert "inference_mode" in only(findings, "gradients").mitigation
    assert ".eval()" in only(findings, "training_mode").mitigation
    assert "1 calls of forward ran the original" in only(findings, "misses").evidence


def test_an_end_to_end_error_is_the_gravest() -> None:
    result = tune(Mlp().eval(), torch.randn(8, 4))
    assert result.end_to_end is not None
    assert result.end_to_end.comparison is not None
    refused = replace(result.end_to_end.comparison, error_class="refused", problem="output: off by 0.3")
    wrong = replace(result, end_to_end=replace(result.end_to_end, comparison=refused))
    assert tuning_advice(wrong)[0].kind == "end_to_end"
    assert "off by 0.3" in tuning_advice(wrong)[0].evidence


def test_findings_are_ranked_and_read_well() -> None:
    low, high = Finding("b", "seen", "do", severity="low"), Finding("a\x1b[2J", "seen", "do", "net", severity="high")
    assert ranked([low, high]) == [high, low]
    text = advice_text(ranked([low, high]))
    assert text.splitlines()[0] == "a\\x1b[2J (net)"
    assert "  do: do" in text


def test_facts_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    facts = machine_facts([row()])
    assert facts.threads == torch.get_num_threads()
    assert facts.cores >= 1
    assert facts.omp_threads == 3
    assert not facts.cuda
