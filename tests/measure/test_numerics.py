"""What is refused and what is accepted, and that every refusal names leaf, index and values."""

import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from aitune_lab.capture.structure import flatten
from aitune_lab.errors import PlanError
from aitune_lab.measure import figures
from aitune_lab.measure.numerics import Call, compare
from aitune_lab.schema import Tolerance, from_json, to_json

BUDGET = Tolerance()
INF = float("inf")
NAN = float("nan")


def comparison(expected, actual, reference=None, tolerance=BUDGET, **options):
    high = None if reference is None else flatten(reference)
    return compare([Call(flatten(expected), flatten(actual), high)], tolerance, **options)


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


Pair = namedtuple("Pair", "values indices")


def model_output():
    return Output(logits=numbers(4, 8), hidden=(numbers(4, 3, 5, seed=1), numbers(4, 3, 5, seed=2)))


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def wrong(**parts):
    output = model_output()
    return Output(parts.get("logits", output.logits), parts.get("hidden", output.hidden))


Y = model_output()
MASKED = changed(Y.logits, (1, 2), -INF)
WITH_NAN = changed(Y.logits, (1, 2), NAN)
INTEGERS = torch.arange(12).reshape(3, 4)

# name, eager's output, the wrong one, what the message must name
MUTATIONS = [
    (
        "scaled and shifted",
        Y,
        wrong(logits=1000 * Y.logits + 7),
        ["output.logits", "element [", "relative L2 error", "> 0.0001"],
    ),
    ("scaled by 0.1 %", Y, wrong(logits=1.001 * Y.logits), ["output.logits", "element [", "0.001 > 0.0001"]),
    ("shifted", Y, wrong(logits=Y.logits + 0.01), ["output.logits", "element ["]),
    ("one element", Y, wrong(logits=changed(Y.logits, (3, 7), 1007.1)), ["output.logits", "element [3, 7]", "1007.1"]),
    (
        "one element of a million",
        {"y": torch.ones(1000, 1000)},
        {"y": changed(torch.ones(1000, 1000), (700, 3), 1.05)},
        ["output['y']", "element [700, 3]", "is 1.05 where eager gives 1", "root mean square"],
    ),
    (
        "one channel",
        Y,
        wrong(hidden=(changed(Y.hidden[0], (slice(None), 1), 0.0), Y.hidden[1])),
        ["output.hidden[0]", ", 1, ", "is 0 where"],
    ),
    ("swapped leaves", Y, wrong(hidden=Y.hidden[::-1]), ["output.hidden[0]", "element [", "1 more leaves differ"]),
    ("transposed", (numbers(4, 4),), (numbers(4, 4).T,), ["output[0]", "element ["]),
    ("rolled by one", Y, wrong(logits=Y.logits.roll(1, 0)), ["output.logits", "element ["]),
    ("sign flipped", Y, wrong(logits=-Y.logits), ["output.logits", "element [", "2 > 0.0001"]),
    ("all zeros", Y, wrong(logits=torch.zeros(4, 8)), ["output.logits", "is 0 where", "1 > 0.0001"]),
    (
        "stale buffer",
        [numbers(2, 2), numbers(2, 2, seed=5)],
        [numbers(2, 2), numbers(2, 2)],
        ["output[1]", "element ["],
    ),
    (
        "dtype",
        Y,
        wrong(logits=Y.logits.double()),
        ["output.logits", "dtype torch.float64 where eager gives torch.float32"],
    ),
    ("truncated batch", Y, wrong(logits=Y.logits[:3]), ["output.logits", "shape [3, 8] where eager gives [4, 8]"]),
    (
        "NaN out of place",
        WITH_NAN,
        changed(Y.logits, (1, 3), NAN),
        ["output", "element [1, 2]", "where eager gives nan", "2 of 32"],
    ),
    (
        "NaN in a nested dataclass",
        {"inner": [Y]},
        {"inner": [wrong(logits=WITH_NAN)]},
        ["output['inner'][0].logits", "element [1, 2] is nan"],
    ),
    ("Inf of other sign", MASKED, changed(MASKED, (1, 2), INF), ["element [1, 2] is inf where eager gives -inf"]),
    ("number for -Inf", MASKED, changed(MASKED, (1, 2), -1e30), ["element [1, 2] is -1e+30 where eager gives -inf"]),
    ("one integer", INTEGERS, changed(INTEGERS, (2, 1), 0), ["element [2, 1] is 0 where eager gives 9", "1 of 12"]),
    ("one bool", INTEGERS > 5, INTEGERS > 6, ["element [1, 2] is False where eager gives True"]),
    (
        "tuple for namedtuple",
        Pair(Y.logits, INTEGERS),
        (Y.logits, INTEGERS),
        ["output", "tuple where eager gives", "Pair"],
    ),
    ("lost key", {"a": Y.logits, "b": 1}, {"a": Y.logits}, ["output", "['b'] are missing"]),
    ("longer list", {"a": [Y.logits]}, {"a": [Y.logits] * 2}, ["output['a']", "2 items where eager gives 1"]),
    ("string", {"name": "cat"}, {"name": "dog"}, ["output['name']", "'dog' where eager gives 'cat'"]),
    ("bool for integer", {"n": 1}, {"n": True}, ["output['n']", "class bool where eager gives int"]),
    ("imaginary part", torch.complex(Y.logits, Y.logits), torch.complex(Y.logits, -Y.logits), ["element [", "j where"]),
    ("array for tensor", Y.logits, Y.logits.numpy(), ["class ndarray where eager gives Tensor"]),
]


@pytest.mark.parametrize(("expected", "actual", "named"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_wrong_outputs_are_refused_with_leaf_index_and_values(expected, actual, named):
    found = comparison(expected, actual)
    assert found.error_class == "refused"
    assert found.problem is not None
    missing = [part for part in named if part not in found.problem]
    assert not missing, found.problem


def reordered_sum():
    x = numbers(64, 257, seed=3)
    return x.sum(1), x.flip(1).sum(1)


HARMLESS = [
    ("identical", Y, model_output()),
    ("float reordering", *reordered_sum()),
    ("negative zero", torch.zeros(3, 3), -torch.zeros(3, 3)),
    ("equal NaN", WITH_NAN, WITH_NAN.clone()),
    ("equal -Inf", MASKED, MASKED.clone()),
    ("all NaN", torch.full((3,), NAN), torch.full((3,), NAN)),
    ("memory format", numbers(2, 3, 4, 4), numbers(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
    ("strides", numbers(4, 6), numbers(4, 6).T.contiguous().T),
    ("one ulp everywhere", Y.logits, torch.nextafter(Y.logits, torch.full_like(Y.logits, INF))),
    ("rounding noise", Y.logits, Y.logits * (1 + 1e-6 * numbers(4, 8, seed=9))),
    ("half rounding", numbers(8, 8, dtype=torch.float16), (numbers(8, 8) * 1.0005).half()),
    ("empty", torch.empty(0, 4), torch.empty(0, 4)),
    ("scalar", torch.tensor(2.5), torch.tensor(2.5)),
    ("NaN in Python", {"loss": NAN, "name": "x", "none": None}, {"loss": NAN, "name": "x", "none": None}),
    ("parameter for tensor", Y.logits, torch.nn.Parameter(Y.logits)),
    ("overflow in half", torch.tensor([1.0, INF]).half(), torch.tensor([1.0, INF]).half()),
]


@pytest.mark.parametrize(("expected", "actual"), [h[1:] for h in HARMLESS], ids=[h[0] for h in HARMLESS])
def test_harmless_differences_are_accepted(expected, actual):
    found = comparison(expected, actual)
    assert found.error_class in ("exact", "within budget"), found.problem
    assert found.problem is None


def test_layout_and_class_differences_are_notes():
    found = comparison(numbers(2, 3, 4, 4), numbers(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    assert "strides" in found.leaves[0].notes[0]
    shared = numbers(3)
    found = comparison({"a": shared, "b": shared}, {"a": shared, "b": shared.clone()})
    assert found.error_class == "exact"
    assert "output['a'], output['b'] share memory" in found.notes[0]


def test_every_figure_is_filled_and_survives_json():
    expected = torch.tensor([3.0, 4.0, 0.0, 12.0])
    found = comparison(expected, expected + torch.tensor([0.0, 0.0, 0.0, 1.3]))
    leaf = found.leaves[0]
    assert leaf.max_absolute == pytest.approx(1.3)
    assert leaf.mean_absolute == pytest.approx(1.3 / 4)
    assert leaf.p99_absolute == pytest.approx(1.3)
    assert leaf.max_relative == pytest.approx(1.3 / 12)
    assert leaf.mean_relative == pytest.approx(1.3 / 12 / 3)
    assert leaf.relative_l2 == pytest.approx(0.1)
    assert leaf.snr_db == pytest.approx(20.0)
    assert 0.99 < leaf.cosine < 1
    assert leaf.mismatch_share == 0.25
    assert leaf.worst_index == (3,)
    assert (leaf.expected, leaf.actual) == ("12", "13.3")
    assert from_json(to_json(found), type(found)) == found
    assert from_json(to_json(comparison(expected, expected[:2])), type(found)).leaves[0].relative_l2 == INF


class TestClasses:
    exact = numbers(1000, dtype=torch.float64)
    eager = (exact * (1 + 1e-7 * numbers(1000, seed=1, dtype=torch.float64))).float()

    def candidate(self, factor):
        return (self.exact + factor * (self.eager.double() - self.exact)).float()

    def test_twice_what_eager_is_off_is_exact(self):
        found = comparison(self.eager, self.candidate(-1.7), self.exact, yardstick="float64")
        assert (found.error_class, found.yardstick) == ("exact", "float64")
        assert found.factor_over_eager == pytest.approx(1.7, rel=0.05)

    def test_more_is_within_budget(self):
        found = comparison(self.eager, self.candidate(5), self.exact, yardstick="float64")
        assert found.error_class == "within budget"
        assert found.leaves[0].allowed_relative == 1e-4

    def test_more_is_refused_if_exact_was_asked_for(self):
        tolerance = Tolerance(accuracy="exact")
        found = comparison(self.eager, self.candidate(5), self.exact, tolerance)
        assert found.error_class == "refused"
        assert "twice eager's own" in found.problem

    def test_more_exact_than_eager_is_exact(self):
        assert comparison(self.eager, self.candidate(0), self.exact).error_class == "exact"

    def test_eager_itself_is_exact_whatever_it_is_off(self):
        spiked = self.eager.clone()
        spiked[17] += 0.5
        assert comparison(spiked, spiked.clone(), self.exact).error_class == "exact"

    def test_without_reference_exact_is_two_ulp(self):
        y = torch.ones(100)
        eps = torch.finfo(torch.float32).eps
        assert comparison(y, y * (1 + 2 * eps)).error_class == "exact"
        assert comparison(y, y * (1 + 3 * eps)).error_class == "within budget"

    def test_a_reference_that_tells_something_else_is_no_yardstick(self):
        found = comparison(self.eager, self.eager.clone(), 2 * self.exact, yardstick="float64")
        assert found.error_class == "exact"
        assert "compared with eager" in found.leaves[0].notes[0]
        assert comparison(self.eager, 2 * self.eager, 2 * self.exact).error_class == "refused"

    def test_reference_of_another_shape_is_left_out(self):
        assert comparison(self.eager, self.eager.clone(), self.exact[:3]).leaves[0].factor_over_eager is None


class TestTolerance:
    @pytest.mark.parametrize(
        ("dtype", "budget"),
        [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)],
    )
    def test_default_budget_follows_the_module(self, dtype, budget):
        y = numbers(500, dtype=torch.float64)
        off = 1 + numbers(500, seed=1, dtype=torch.float64) * budget
        kept = comparison(y, y * (1 + 0.7 * (off - 1)), dtype=dtype)
        assert kept.error_class == "within budget"
        assert comparison(y, y * (1 + 1.5 * (off - 1)), dtype=dtype).error_class == "refused"

    def test_snr(self):
        y = numbers(100)
        off = y * (1 + 1e-5)
        assert comparison(y, off, tolerance=Tolerance(min_snr_db=99)).error_class == "within budget"
        found = comparison(y, off, tolerance=Tolerance(min_snr_db=101))
        assert found.error_class == "refused"
        assert "dB < 101 dB" in found.problem

    @pytest.mark.parametrize("bound", ["max_relative_error", "min_snr_db"])
    def test_a_bound_that_is_no_number_is_refused(self, bound):
        with pytest.raises(PlanError, match=f"{bound} must be a number"):
            Tolerance(**{bound: NAN})

    def test_agreement_of_integers(self):
        e, a = torch.zeros(100, dtype=torch.int64), torch.zeros(100, dtype=torch.int64)
        a[42] = 7
        found = comparison(e, a, tolerance=Tolerance(min_agreement=0.99))
        assert found.error_class == "within budget"
        assert found.leaves[0].mismatch_share == pytest.approx(0.01)
        assert comparison(e, a, tolerance=Tolerance(min_agreement=0.995)).error_class == "refused"
        assert comparison(e, a, tolerance=Tolerance(accuracy="exact", min_agreement=0.9)).error_class == "refused"

    def test_large_integers_are_compared_exactly(self):
        e = torch.tensor([2**60, 2**60 + 1])
        found = comparison(e, torch.tensor([2**60, 2**60 + 2]))
        assert "element [1] is 1152921504606846978 where eager gives 1152921504606846977" in found.problem


class TestSeveralCalls:
    def test_a_call_with_large_numbers_hides_no_other(self):
        big, small = 1e6 * numbers(10), numbers(10)
        calls = [Call(flatten(big), flatten(big)), Call(flatten(small), flatten(1.01 * small))]
        found = compare(calls, BUDGET)
        assert found.error_class == "refused"
        assert "in call 1" in found.problem
        assert found.calls == 2

    def test_outputs_may_grow_from_call_to_call(self):
        calls = [Call(flatten([numbers(2)] * n), flatten([numbers(2)] * n)) for n in (1, 3, 2)]
        found = compare(calls, BUDGET)
        assert found.error_class == "exact"
        assert [leaf.path for leaf in found.leaves] == ["output[0]", "output[1]", "output[2]"]

    def test_no_calls(self):
        with pytest.raises(ValueError, match="at least one call"):
            compare([], BUDGET)


class TestPicks:
    scores = torch.tensor([[0.1, 0.9, 0.9 - 1e-7, 0.3], [0.5, 0.2, 0.1, 0.0]])

    def outputs(self, scores, picks):
        return {"logits": scores, "best": torch.tensor(picks)}

    def test_argmax_may_differ_where_scores_tie(self):
        rounded = self.scores + 1e-7 * torch.tensor([[0, -1, 1, 0], [0, 0, 0, 0]])
        found = comparison(self.outputs(self.scores, [1, 0]), self.outputs(rounded, [2, 0]))
        assert found.error_class in ("exact", "within budget"), found.problem
        assert "1 of 2 indices differ where output['logits'] ties" in found.leaves[1].notes[0]

    def test_argmax_may_not_differ_elsewhere(self):
        rounded = self.scores + 1e-7
        found = comparison(self.outputs(self.scores, [1, 0]), self.outputs(rounded, [3, 0]))
        assert found.error_class == "refused"
        assert "output['best']: element [0] is 3 where eager gives 1" in found.problem

    def test_indices_that_are_no_argmax_of_the_scores_are_not_excused(self):
        tied = torch.ones(2, 4)
        assert comparison(self.outputs(tied, [1, 0]), self.outputs(tied, [2, 0])).error_class == "exact"
        rising = torch.arange(8.0).reshape(2, 4)
        noise = 1 + 3e-5 * numbers(2, 4)
        found = comparison(self.outputs(rising, [1, 0]), self.outputs(rising * noise, [2, 0]))
        assert found.error_class == "refused"

    def test_topk_picks_may_trade_places(self):
        values = torch.tensor([[3.0, 2.0, 2.0 - 1e-7]])
        eager = torch.return_types.topk((values, torch.tensor([[5, 1, 2]])))
        swapped = torch.return_types.topk((values + 1e-7, torch.tensor([[5, 2, 1]])))
        assert comparison(tuple(eager), tuple(swapped)).error_class in ("exact", "within budget")
        stranger = (values + 1e-7, torch.tensor([[5, 2, 9]]))
        assert comparison(tuple(eager), stranger).error_class == "refused"
        far = (values + 1e-7, torch.tensor([[1, 5, 2]]))
        assert comparison(tuple(eager), far).error_class == "refused"
        twice = (values + 1e-7, torch.tensor([[5, 1, 1]]))
        assert comparison(tuple(eager), twice).error_class == "refused"

    def test_topk_with_all_scores(self):
        scores = numbers(3, 50)
        scores[:, 10] = scores[:, 20]
        expected = scores.topk(50)
        picks = expected.indices.clone()
        ten, twenty = picks == 10, picks == 20
        picks[ten], picks[twenty] = 20, 10
        found = comparison((scores, expected.indices[:, :7]), (scores.clone(), picks[:, :7]))
        assert found.error_class == "exact", found.problem


class Cache:
    def __init__(self, key, steps=1):
        self.layers = [key]
        self.steps = steps
        self.owner = self


class TestUnusualLeaves:
    def test_objects_are_compared_by_their_attributes(self):
        y = numbers(3)
        assert comparison(Cache(y), Cache(y.clone())).error_class == "exact"
        found = comparison(Cache(y), Cache(y + 1))
        assert found.error_class == "refused"
        assert "output['layers'][0]: element [" in found.problem
        assert "output['steps']: is 2 where eager gives 1" in comparison(Cache(y), Cache(y, 2)).problem
        assert comparison({(1, 2): y}, {(1, 2): y + 1}).error_class == "refused"

    @pytest.mark.parametrize(
        "dtype",
        [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.bool, torch.float8_e4m3fn,
         torch.float8_e5m2, torch.bfloat16, torch.complex64, torch.complex128],
    )  # fmt: skip
    def test_dtypes(self, dtype):
        e, a = torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1, 1, 1]).to(dtype)
        assert comparison(e, e.clone()).error_class == "exact"
        assert "element [1]" in comparison(e, a).problem

    @pytest.mark.filterwarnings("ignore")
    def test_layouts(self):
        y = numbers(4, 4).relu()
        quantized = torch.quantize_per_tensor(y, 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
        for same in (y.to_sparse(), y.to_sparse_csr(), quantized, nested, y.to("meta"), torch.ones(1).expand(5, 5)):
            assert comparison(same, same.clone()).error_class == "exact"
        assert "element [" in comparison(y.to_sparse(), (y * 2).to_sparse()).problem
        assert "layout" in comparison(y.to_sparse(), y).problem
        other = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(2, 3)])
        assert "shape" in comparison(nested, other).problem

    def test_numpy(self):
        y = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
        assert comparison(y, y[::-1][::-1]).error_class == "exact"
        assert comparison(np.broadcast_to(np.float32(1), (3,)), np.ones(3, np.float32)).error_class == "exact"
        assert "element [" in comparison(y, y + 1).problem
        assert comparison(np.float32(1), np.float32(1)).error_class == "exact"
        assert comparison(np.array(["a", "b"]), np.array(["a", "c"])).problem.startswith("output: element [1]")
        assert comparison(y.astype(">f4"), y.astype(">f4")).error_class == "exact"

    def test_python_floats_are_judged_like_numbers(self):
        assert comparison(0.1, 0.1 * (1 + 1e-6), dtype=torch.float32).error_class == "within budget"
        assert comparison(0.1, 0.2, dtype=torch.float32).error_class == "refused"

    def test_huge_dynamic_range(self):
        y = torch.logspace(-9, 9, 1000, dtype=torch.float64).float()
        assert comparison(y, y * (1 + 1e-6)).error_class == "within budget"
        assert comparison(y, y * 1.01).error_class == "refused"
        extreme = torch.tensor([1e300, 1e-300], dtype=torch.float64)
        assert comparison(extreme, extreme * (1 + 1e-11)).relative_l2 == pytest.approx(1e-11, rel=1e-3)
        assert comparison(extreme, -extreme).error_class == "refused"

    def test_zero_leaf(self):
        zero = torch.zeros(5)
        assert comparison(zero, zero + 1e-30).relative_l2 == INF
        assert comparison(zero, zero.clone()).leaves[0].cosine == 1.0

    @pytest.mark.parametrize("shape", [(2100,), (3, 700), (700, 3), (3, 7, 100), (2, 1, 1500)])
    def test_larger_than_a_chunk(self, shape, monkeypatch):
        monkeypatch.setattr(figures, "CHUNK", 1000)
        y = numbers(*shape)
        last = tuple(size - 1 for size in shape)
        found = comparison(y, changed(y, last, 50.0))
        assert found.leaves[0].worst_index == last
        assert found.relative_l2 == pytest.approx(float((50.0 - y[last]).abs() / y.norm()))
        assert comparison(y.T if y.dim() == 2 else y, y.T.contiguous() if y.dim() == 2 else y).error_class == "exact"
        integers = torch.zeros(shape, dtype=torch.int64)
        assert comparison(integers, changed(integers, last, 1)).leaves[0].worst_index == last


values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30)
errors = st.floats(1e-9, 1.0)
ORDER = {"exact": 0, "within budget": 1, "refused": 2}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=0, max_size=30), st.sampled_from([torch.float32, torch.float16]))
def test_property_reflexive(data, dtype):
    y = torch.tensor(data, dtype=torch.float32).to(dtype)
    for accuracy in ("budget", "exact"):
        found = comparison(y, y.clone(), tolerance=Tolerance(accuracy, max_relative_error=0.0))
        assert found.error_class == "exact"
        assert found.relative_l2 == 0


@settings(deadline=None, max_examples=60)
@given(values, errors, st.integers(-20, 20))
def test_property_scaling_both_by_a_power_of_two_changes_nothing(data, error, exponent):
    y = torch.tensor(data, dtype=torch.float64)
    off = y * (1 + error)
    one = comparison(y, off, dtype=torch.float32)
    other = comparison(y * 2.0**exponent, off * 2.0**exponent, dtype=torch.float32)
    assert one.error_class == other.error_class
    assert one.relative_l2 == pytest.approx(other.relative_l2)


@settings(deadline=None, max_examples=60)
@given(values, errors, errors, errors)
def test_property_monotone_in_tolerance(data, error, one, other):
    y = torch.tensor(data)
    off = y * (1 + error)
    strict, loose = sorted((one, other))
    strict_class = comparison(y, off, tolerance=Tolerance(max_relative_error=strict)).error_class
    loose_class = comparison(y, off, tolerance=Tolerance(max_relative_error=loose)).error_class
    assert ORDER[loose_class] <= ORDER[strict_class]


@settings(deadline=None, max_examples=60)
@given(values, errors, st.randoms(use_true_random=False))
def test_property_order_of_elements_and_leaves_does_not_matter(data, error, random):
    order = list(range(len(data)))
    random.shuffle(order)
    y = torch.tensor(data, dtype=torch.float64)
    off = y.clone()
    off[0] += error * (1 + abs(off[0]))
    one, other = comparison([y, y], [y, off]), comparison([y[order], y[order]], [off[order], y[order]])
    assert one.error_class == other.error_class
    assert one.leaves[1].relative_l2 == pytest.approx(other.leaves[0].relative_l2)
    assert one.leaves[1].max_absolute == pytest.approx(other.leaves[0].max_absolute)


@settings(deadline=None, max_examples=60)
@given(values, st.integers(0, 29), st.sampled_from([NAN, INF, -INF]))
def test_property_a_number_made_nonfinite_is_always_refused(data, at, value):
    y = torch.tensor(data)
    index = at % len(data)
    found = comparison(y, changed(y, index, value), tolerance=Tolerance(max_relative_error=1e9, min_agreement=0.0))
    assert found.error_class == "refused"
    assert found.leaves[0].worst_index == (index,)
    assert math.isinf(found.relative_l2)


@settings(deadline=None, max_examples=40)
@given(values, errors)
def test_property_more_calls_never_make_a_better_class(data, error):
    y = torch.tensor(data)
    right, wrong_call = Call(flatten(y), flatten(y)), Call(flatten(y), flatten(y * (1 + error)))
    alone = compare([wrong_call], BUDGET).error_class
    assert compare([right, wrong_call, right], BUDGET).error_class == alone
