"""The higher-precision run is right or refused, and leaves nothing behind."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from aitune_lab.capture.structure import flatten
from aitune_lab.measure.figures import relative_l2
from aitune_lab.measure.numerics import Call, compare
from aitune_lab.measure.reference import reference_dtype, reference_outputs
from aitune_lab.schema import Tolerance


class Habits(nn.Module):
    """One habit of real models per name."""

    def __init__(self, habit):
        super().__init__()
        self.habit = habit
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.history = []

    def forward(self, x):
        return getattr(self, self.habit)(x)

    def encode(self, x):
        return {"code": self.linear(x).tanh()}

    def write_into_zeros(self, x):
        out = torch.zeros(2, 4, dtype=x.dtype)
        out[0] = self.linear(x)[0]
        return out

    def inplace_view(self, x):
        y = self.linear(x)
        y[:, 0].mul_(3)
        return y

    def empty_out(self, x):
        out = torch.empty(2, 4, dtype=x.dtype)
        torch.add(x, 1, out=out)
        return out

    def index_put(self, x):
        out = x.new_zeros(2, 4)
        out[x > 0] = 1.0
        return out * self.linear(x)

    def attention(self, x):
        q = self.linear(x).view(1, 1, 2, 4)
        return F.scaled_dot_product_attention(q, q, q)

    def input_attention(self, x):
        q = x.view(1, 1, 2, 4)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3)

    def tensor_constant(self, x):
        return self.linear(x) + torch.tensor(1.5)

    def rotary(self, x):
        return self.linear(x) * torch.arange(4, dtype=x.dtype).cos()

    def counting(self, x):
        self.count += 1
        return self.linear(x) * self.count

    def remembering(self, x):
        self.last = self.linear(x)
        self.history.append(self.last)
        return self.last

    def nested_outputs(self, x):
        return {"y": [self.linear(x)], "n": 3, "x": x}

    def float_buffer(self, x):
        self.scale += 1
        return self.linear(x) * self.scale

    def input_inplace(self, x):
        x.add_(1)
        return self.linear(x)

    def input_view_inplace(self, x):
        x[:, 0].add_(1)
        return self.linear(x)

    def weight_view_inplace(self, x):
        self.linear.weight.data[0].mul_(2)
        return self.linear(x)

    def dropout(self, x):
        return F.dropout(self.linear(x), 0.5, training=True)

    def bits(self, x):
        return self.linear(x).view(torch.int16)

    def raises(self, x):
        raise RuntimeError("no such luck\nwith details")


RIGHT = [
    "write_into_zeros", "inplace_view", "empty_out", "index_put", "attention", "input_attention", "tensor_constant",
    "rotary", "counting", "remembering",
]  # fmt: skip
REFUSED = {
    "float_buffer": "writes in place",
    "input_inplace": "writes in place",
    "input_view_inplace": "writes in place",
    "weight_view_inplace": "writes in place",
    "dropout": "random numbers",
    "bits": "bits of a tensor",
    "raises": "RuntimeError: no such luck",
}
PRECISIONS = [(torch.float32, "float64", 1e-6), (torch.float16, "float32", 5e-3), (torch.bfloat16, "float32", 3e-2)]


@pytest.mark.parametrize(("dtype", "yardstick", "error"), PRECISIONS)
@pytest.mark.parametrize("habit", RIGHT)
def test_right_and_more_precise_than_eager(habit, dtype, yardstick, error):
    module, x = Habits(habit).eval().to(dtype), torch.randn(2, 4).to(dtype)
    with torch.no_grad():
        eager = copy.deepcopy(module)(x.clone())
        exact = copy.deepcopy(module).double()(x.double())
    found = reference_outputs(module, (x,), {})
    assert (found.yardstick, found.reason) == (yardstick, "")
    assert found.cross_checked
    assert relative_l2(found.outputs, exact) < 1e-6
    assert relative_l2(found.outputs, eager) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("habit", REFUSED)
def test_what_cannot_be_trusted_is_refused_with_the_reason(habit, dtype):
    found = reference_outputs(Habits(habit).eval().to(dtype), (torch.randn(2, 4).to(dtype),), {})
    assert found.outputs is None
    assert found.yardstick == "eager"
    assert REFUSED[habit] in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize("habit", [*RIGHT, *REFUSED])
def test_module_inputs_and_random_states_stay_as_they_were(habit):
    module, x = Habits(habit).eval(), torch.randn(2, 4)
    state, kept, attributes = copy.deepcopy(module.state_dict()), x.clone(), set(vars(module))
    identities = {name: id(p) for name, p in module.named_parameters()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    reference_outputs(module, (x,), {})
    assert torch.equal(x, kept)
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    assert {name: id(p) for name, p in module.named_parameters()} == identities
    assert all(p.dtype == torch.float32 and p.grad is None for p in module.parameters())
    assert set(vars(module)) == attributes
    assert module.history == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert torch.is_grad_enabled()


def test_keyword_arguments_methods_and_nested_outputs():
    module, x = Habits("nested_outputs").eval(), torch.randn(2, 4)
    found = reference_outputs(module, (), {"x": x})
    assert found.outputs["y"][0].dtype == torch.float64
    assert found.outputs["n"] == 3
    assert reference_outputs(module, (x,), {}, method="encode").outputs["code"].dtype == torch.float64
    comparison = compare(
        [Call(flatten(module(x)), flatten(module(x)), flatten(found.outputs))], Tolerance(), None, "float64"
    )
    assert (comparison.error_class, comparison.yardstick) == ("exact", "float64")


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), torch.randn(2, 5, 16)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), torch.randn(2, 3, 8, 8)),
        (nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1)), torch.randn(3, 8)),
    ],
    ids=["transformer", "convolution", "elementwise"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_common_layers(module, x, dtype):
    module, x = copy.deepcopy(module).eval().to(dtype), x.to(dtype)
    found = reference_outputs(module, (x,), {})
    assert found.reason == ""
    with torch.no_grad():
        assert relative_l2(found.outputs, copy.deepcopy(module).double()(x.double())) < 1e-5


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_layers(layer, dtype):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(4, 4)
            self.first, self.second = layer(4, 6), layer(4, 6)

        def forward(self, x):
            return self.first(x)[0], self.second(self.before(x))[0]

    module, x = Tagger().to(dtype), torch.randn(3, 2, 4).to(dtype)
    found = reference_outputs(module, (x,), {})
    assert found.reason == ""
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
    assert all(relative_l2(mine, theirs) < 1e-5 for mine, theirs in zip(found.outputs, exact))


def test_a_branch_on_dtype_gives_no_reference_or_one_that_compare_sets_aside():
    class Branch(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if y.dtype == torch.float32 else 2 * y

    module, x = Branch(4, 4).eval(), torch.randn(2, 4)
    found = reference_outputs(module, (x,), {})
    eager = module(x).detach()
    reference = None if found.outputs is None else flatten(found.outputs)
    good = compare([Call(flatten(eager), flatten(eager + 1e-7), reference)], Tolerance())
    assert good.error_class in ("exact", "within budget")
    assert compare([Call(flatten(eager), flatten(2 * eager), reference)], Tolerance()).error_class == "refused"


def test_hard_coded_rounding_is_told_by_the_cross_check():
    class Rounds(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(torch.bfloat16).to(x.dtype))

    found = reference_outputs(Rounds(4, 4).eval(), (torch.randn(2, 4),), {})
    assert found.outputs is None
    assert "depends on dtypes" in found.reason


def test_autocast_neither_lowers_the_reference_nor_gets_its_weights_cached():
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    exact = copy.deepcopy(module).double()(x.double()).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = reference_outputs(module, (x,), {})
        assert module(x).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    assert relative_l2(found.outputs, exact) < 1e-12


def test_foreign_operators_and_tensor_subclasses_are_refused():
    @torch.library.custom_op("aitune_lab_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    class Custom(nn.Module):
        def forward(self, x):
            return twice(x)

    assert "not torch's own" in reference_outputs(Custom(), (torch.ones(2),), {}).reason


def test_memory_limit_and_nothing_higher():
    module, x = nn.Linear(100, 100), torch.ones(1, 100)
    reason = reference_outputs(module, (x,), {}, memory_limit_bytes=80_000).reason
    assert "need 80800 bytes, more than the 80000 allowed" in reason
    assert reference_outputs(module, (x,), {}, memory_limit_bytes=80_800).reason == ""
    assert "no higher precision" in reference_outputs(module.double(), (x.double(),), {}).reason
    with pytest.raises(ValueError, match=r"torch.float64 or torch.float32, but got torch.int8"):
        reference_outputs(module, (x,), {}, torch.int8)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([], torch.float64),
        ([torch.float32, torch.float16], torch.float64),
        ([torch.float16], torch.float32),
        ([torch.bfloat16, torch.int64], torch.float32),
        ([torch.float64, torch.float32], None),
    ],
)
def test_reference_dtype(dtypes, expected):
    module = nn.Module()
    for i, dtype in enumerate(dtypes):
        module.register_buffer(f"b{i}", torch.zeros(1, dtype=dtype))
    assert reference_dtype(module) == expected
