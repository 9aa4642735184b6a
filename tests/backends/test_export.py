"""What an exported graph can't keep is refused with the reason; what it can is right at every size."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import pytest
import torch
from harness import check, jobs
from torch import nn

from aitune_lab.backends.eager import TorchEagerBackend
from aitune_lab.backends.export import FlatModule, export_program, export_sample, refuse_impure
from aitune_lab.capture.signature import BatchDim
from aitune_lab.errors import Refused
from aitune_lab.schema import Alias


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def one_job(module: nn.Module, items: list, folder: Path, **facts: object):
    (job,) = jobs(module.eval(), items, TorchEagerBackend(), folder, facts=facts)
    return job


def test_eager_runs_the_original(tmp_path):
    job = one_job(Linear(), [torch.randn(2, 4)], tmp_path)
    executable = TorchEagerBackend().build(job)
    assert executable.live_weights
    check(executable, job)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"random": True}, "random numbers"),
        ({"state": ("steps",)}, r"state \(steps\)"),
        ({"varying_values": ("output[1]",)}, r"output\[1\] differs from call to call"),
        ({"hooked": ("layer",)}, "hooks on layer"),
        ({"aliases": (Alias("output", "x", "view"),)}, "output is a view of the input x"),
    ],
)
def test_what_a_graph_cannot_keep_is_refused(facts, reason, tmp_path):
    job = one_job(Linear(), [torch.randn(2, 4)], tmp_path, **facts)
    with pytest.raises(Refused, match=reason):
        refuse_impure(job)


def test_a_module_in_training_mode_is_refused(tmp_path):
    job = one_job(Linear(), [torch.randn(2, 4)], tmp_path)
    job.module.train()
    with pytest.raises(Refused, match="training mode"):
        export_program(job)


def test_opaque_objects_and_calls_without_tensors_are_refused(tmp_path):
    class Odd(nn.Module):
        def forward(self, x, thing=None):
            return torch.ones(3) if thing is None else x + 1

    with pytest.raises(Refused, match="thing is an object of class Generator"):
        refuse_impure(one_job(Odd(), [((torch.ones(2), torch.Generator()), {})], tmp_path / "a"))
    with pytest.raises(Refused, match="no tensor inputs"):
        refuse_impure(one_job(Odd(), [((1,), {})], tmp_path / "b"))


def test_sparse_inputs_are_refused(tmp_path):
    class Multiply(nn.Module):
        def forward(self, x, y):
            return x @ y

    with pytest.raises(Refused, match="x has the layout sparse_coo"):
        refuse_impure(one_job(Multiply(), [(torch.eye(3).to_sparse(), torch.ones(3, 2))], tmp_path))


def test_the_batch_stays_dynamic_and_is_read_back(tmp_path):
    job = one_job(Linear(), [torch.randn(b, 4) for b in (1, 3, 5)], tmp_path)
    program, notes = export_program(job)
    assert notes == ("dynamic: b",)
    for b in (1, 2, 5):
        x = torch.randn(b, 4)
        torch.testing.assert_close(program.module()(x)[0], job.original(x))


def test_export_never_starts_from_size_one_or_zero(tmp_path):
    job = one_job(Linear(), [torch.randn(b, 4) for b in (0, 1)], tmp_path)
    sample = export_sample(job)
    assert sample.synthetic
    assert sample.tensors()[0].shape[0] >= 2
    program, _ = export_program(job)
    assert program.module()(torch.randn(2, 4))[0].shape == (2, 3)


def test_a_declared_range_is_exported_from_a_resized_sample(tmp_path):
    (job,) = jobs(
        Linear().eval(), [torch.randn(1, 4)], TorchEagerBackend(), tmp_path, declared={"x": {0: BatchDim(1, 4, 8)}}
    )
    program, notes = export_program(job)
    assert notes == ("dynamic: b",)
    assert program.module()(torch.randn(8, 4))[0].shape == (8, 3)


def test_a_dimension_that_the_code_counts_is_refused_by_name(tmp_path):
    class Loop(nn.Module):
        def forward(self, x):
            total = x[:, 0]
            for i in range(1, x.shape[1]):
                total = total * 0.5 + x[:, i]
            return total

    job = one_job(Loop(), [torch.randn(2, s) for s in (3, 5)], tmp_path)
    with pytest.raises(Refused, match=r"axis 1 of x|dimension s0"):
        export_program(job)


def test_multiples_of_a_dimension_stay_dynamic(tmp_path):
    class Pair(nn.Module):
        def forward(self, x, y):
            return x + y.view(x.shape[0], 2, -1).sum(1)

    job = one_job(Pair(), [(torch.randn(b, 4), torch.randn(2 * b, 4)) for b in (2, 3, 1)], tmp_path)
    program, _ = export_program(job)
    x, y = torch.randn(3, 4), torch.randn(6, 4)
    torch.testing.assert_close(program.module()(x, y)[0], job.original(x, y))


def test_a_value_that_follows_from_a_dynamic_shape_is_refused(tmp_path):
    class Counts(nn.Module):
        def forward(self, x):
            return x + 1, x.shape[0]

    (job,) = jobs(
        Counts().eval(), [torch.randn(3, 4)], TorchEagerBackend(), tmp_path, declared={"x": {0: BatchDim(1, 3, 8)}}
    )
    with pytest.raises(Refused, match=r"output\[1\]"):
        export_program(job)


def test_values_from_data_are_refused_and_never_baked(tmp_path):
    class Peak(nn.Module):
        def forward(self, x):
            return x + 1, float(x.max())

    # One sample: nothing shows yet that the value varies.
    with pytest.raises(Exception, match=r"output\[1\]|data-dependent"):
        export_program(one_job(Peak(), [torch.randn(3, 4)], tmp_path))


def test_one_tensor_given_three_times_is_three_inputs(tmp_path):
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    x = torch.randn(2, 5, 4)
    program, _ = export_program(one_job(Attention(), [(x, x, x)], tmp_path))
    q, k, v = (torch.randn(2, 5, 4) for _ in range(3))
    torch.testing.assert_close(program.module()(q, k, v)[0], Attention()(q, k, v))


def test_exporting_changes_neither_the_state_nor_the_random_state(tmp_path):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.steps.add_(1)
            return x * 2

    job = one_job(Counter(), [torch.randn(3)], tmp_path)
    before = job.module.calls, job.module.steps.item(), torch.get_rng_state()
    export_program(job)
    assert (job.module.calls, job.module.steps.item()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert type(job.module.steps) is torch.Tensor


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    second: torch.Tensor | None


Pair = collections.namedtuple("Pair", "a b")


def test_structures_go_in_and_out_flat(tmp_path):
    class Nested(nn.Module):
        def forward(self, batch, pair=None, *, scale=1.0):
            return {"r": Result(batch["x"] * scale, None), "p": Pair(pair.a, [pair.b, "text"])}

    item = ((({"x": torch.ones(2), "n": 3}),), {"pair": Pair(torch.zeros(2), torch.ones(1)), "scale": 2.0})
    job = one_job(Nested(), [item], tmp_path)
    flat = FlatModule(job, job.samples[0])
    outputs = flat(*job.samples[0].tensors())
    assert [o.tolist() for o in outputs] == [[2.0, 2.0], [0.0, 0.0], [1.0]]
    export_program(job)


def test_mutated_inputs_become_outputs_and_the_given_ones_stay(tmp_path):
    class Scratch(nn.Module):
        def forward(self, x, table):
            table[1] = x.sum()
            return x + 1

    job = one_job(Scratch(), [(torch.ones(2), torch.zeros(3))], tmp_path)
    assert job.signature.facts.mutated == ("table",)
    program, _ = export_program(job)
    x, table = torch.ones(2), torch.zeros(3)
    result, new = program.module()(x, table)
    assert table.tolist() == [0, 0, 0]
    assert new.tolist() == [0, 2, 0]
    assert result.tolist() == [2, 2]


def test_autocast_is_part_of_the_graph(tmp_path):
    job = one_job(Linear(), [torch.randn(2, 4)], tmp_path)
    job = dataclasses.replace(job, signature=dataclasses.replace(job.signature, autocast=(("cpu", "bfloat16"),)))
    program, _ = export_program(job)
    assert program.module()(torch.randn(2, 4))[0].dtype == torch.bfloat16
