"""A tuned call gives what the original gives, or runs the original and says so."""

from __future__ import annotations

import collections
import dataclasses
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aitune_lab import AituneWarning, SignatureMiss, stats, unwrap
from aitune_lab.capture.signature import DynamicDim
from aitune_lab.testing import install_scripted
from aitune_lab.testing.models import Heads, Mlp, Nested, ReturnsInput, WritesInput


def dispatched(target: Any) -> int:
    return stats(target).dispatched


def expect(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What the class's own forward gives."""
    return type(module).forward(module, *args, **kwargs)


X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def mlp() -> Mlp:
    return Mlp().eval()


def test_call_that_fits_is_dispatched(mlp: Mlp) -> None:
    install_scripted(mlp, X, error="scaled")
    assert torch.equal(mlp(X), 1.5 * expect(mlp, X))
    assert stats(mlp).signatures[0].calls == 1
    assert stats(mlp).misses == 0


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"x": X}),
        ((X, 1.0), {}),
        ((X, 1.0, None), {}),
        ((X,), {"bias": None}),
        ((X,), {"mode": "plain"}),
        ((), {"mode": "plain", "bias": None, "scale": 1.0, "x": X}),
    ],
    ids=[
        "keyword",
        "default by position",
        "two defaults",
        "None spelled out",
        "keyword-only default",
        "all by keyword",
    ],
)
def test_positional_keyword_and_default_spelled_out_are_one_call(mlp: Mlp, args: Any, kwargs: Any) -> None:
    install_scripted(mlp, X)
    assert torch.equal(mlp(*args, **kwargs), expect(mlp, X))
    assert dispatched(mlp) == 1


MISSES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "changed scalar": ((X, 2.0), {}, "scale"),
    "int for float": ((X, 1), {}, "scale"),
    "new tensor argument": ((X,), {"bias": torch.ones(4)}, "bias is given"),
    "changed keyword-only": ((X,), {"mode": "tanh"}, "mode"),
    "new rank": ((X[0],), {}, "1 dimensions"),
    "more rank": ((X.expand(2, 3, 4),), {}, "3 dimensions"),
    "other size": ((X[:2],), {}, "size 2"),
    "subclass": ((nn.Parameter(X).as_subclass(type("Own", (torch.Tensor,), {})),), {}, "Own"),
}


@pytest.mark.parametrize("name", MISSES)
def test_miss_runs_the_original_counted_and_warned_once(mlp: Mlp, name: str) -> None:
    args, kwargs, said = MISSES[name]
    install_scripted(mlp, X, error="scaled")
    with pytest.warns(AituneWarning, match="ran the original") as seen:  # noqa: PT031
        for _ in range(3):
            torch.testing.assert_close(mlp(*args, **kwargs), expect(mlp, *args, **kwargs))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    (method,) = stats(mlp).methods
    assert method.misses == 3
    assert stats(mlp).dispatched == 0
    (reason,) = method.to_original
    assert said in reason
    assert method.to_original[reason] == 3


@pytest.mark.parametrize("name", MISSES)
def test_miss_raises_if_asked_for(mlp: Mlp, name: str) -> None:
    args, kwargs, said = MISSES[name]
    install_scripted(mlp, X, on_miss="error")
    with pytest.raises(SignatureMiss, match=r"x: float32\[3, 4\]") as error:
        mlp(*args, **kwargs)
    assert said in str(error.value)
    assert stats(mlp).misses == 1


def test_other_dtype_and_device_miss(mlp: Mlp) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = Halves().eval()
    install_scripted(module, X, error="scaled")
    with pytest.warns(AituneWarning, match="float64, tuned for float32"):
        assert torch.equal(module(X.double()), X.double() * 2)
    assert module(X.to("meta")).device.type == "meta"
    assert any("on meta" in reason for reason in stats(module).methods[0].to_original)


def test_wrong_call_raises_what_the_original_raises(mlp: Mlp) -> None:
    install_scripted(mlp, X)
    for args, kwargs in (((), {}), ((X, 1.0, None, 4), {}), ((X,), {"unknown": 1})):
        with pytest.raises(TypeError):
            mlp(*args, **kwargs)


def test_several_signatures_each_have_their_executable(mlp: Mlp) -> None:
    installed = install_scripted(mlp, X, torch.ones(5, 4), (X, 2.0), ({"x": X, "mode": "tanh"}))
    assert len(installed.entries) == 3
    for args, kwargs in (((X,), {}), ((torch.ones(4, 4),), {}), ((X, 2.0), {}), ((X,), {"mode": "tanh"})):
        torch.testing.assert_close(mlp(*args, **kwargs), expect(mlp, *args, **kwargs))
    assert [s.calls for s in stats(mlp).signatures] == [2, 1, 1]
    assert stats(mlp).misses == 0


def test_sizes_inside_a_range_fit_and_outside_miss(mlp: Mlp) -> None:
    install_scripted(mlp, torch.ones(2, 4), torch.ones(6, 4))
    for size in (2, 3, 6, 4, 3):
        mlp(torch.ones(size, 4))
    assert dispatched(mlp) == 5
    with pytest.warns(AituneWarning, match="b=7 is outside 2 to 6"):
        mlp(torch.ones(7, 4))
    mlp(torch.ones(1, 4))
    assert stats(mlp).misses == 2


def test_more_shapes_than_the_memo_holds(mlp: Mlp) -> None:
    declared = {"x": {0: DynamicDim("b", 1, 2, 2000)}}
    installed = install_scripted(mlp, torch.ones(2, 4), declared=declared)
    for size in range(1, 600):
        mlp(torch.ones(size, 4))
    assert dispatched(mlp) == 599
    assert installed.dispatch.misses.value() == 0


def test_sizes_of_one_symbol_must_agree() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum() + y.sum()

    module = Add().eval()
    install_scripted(module, (torch.ones(2, 3), torch.ones(4)), (torch.ones(5, 3), torch.ones(10)))
    assert stats(module).signatures[0].signature == "(x: float32[b, 3], y: float32[2*b])"
    module(torch.ones(3, 3), torch.ones(6))
    with pytest.warns(AituneWarning):
        module(torch.ones(3, 3), torch.ones(8))
    module(torch.ones(3, 3), torch.ones(7))
    assert (dispatched(module), stats(module).misses) == (1, 2)


def test_strides_do_not_matter_and_subclasses_do(mlp: Mlp) -> None:
    install_scripted(mlp, X, error="scaled")
    for x in (X.t().contiguous().t(), torch.ones(3, 8)[:, ::2], torch.ones(4).expand(3, 4)):
        assert torch.equal(mlp(x), 1.5 * expect(mlp, x))
    assert torch.equal(mlp(nn.Parameter(X, requires_grad=False)), 1.5 * expect(mlp, X))
    assert dispatched(mlp) == 4


def test_inference_mode_and_inference_tensors_fit(mlp: Mlp) -> None:
    install_scripted(mlp, X, error="scaled")
    with torch.inference_mode():
        made_inside = X + 0
        for x in (X, made_inside):
            torch.testing.assert_close(mlp(x), 1.5 * expect(mlp, x))
    torch.testing.assert_close(mlp(made_inside), 1.5 * expect(mlp, X))
    torch.testing.assert_close(mlp(X), 1.5 * expect(mlp, X))
    assert dispatched(mlp) == 4


def test_autocast_runs_the_original_unless_tuned_with_it(mlp: Mlp) -> None:
    install_scripted(mlp, X, error="scaled")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(AituneWarning, match="autocast is"):
        assert torch.equal(mlp(X), expect(mlp, X))
    assert stats(mlp).misses == 1
    unwrap(mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        install_scripted(mlp, X, error="scaled")
        assert torch.equal(mlp(X), 1.5 * expect(mlp, X))
    with pytest.warns(AituneWarning, match="autocast is off"):
        assert torch.equal(mlp(X), expect(mlp, X))
    with torch.autocast("cpu", dtype=torch.float16):
        mlp(X)
    assert (dispatched(mlp), stats(mlp).misses) == (1, 2)


def test_gradients_wanted_run_the_original_said_once_with_the_cure(mlp: Mlp) -> None:
    install_scripted(mlp, X, error="scaled")
    with torch.enable_grad(), pytest.warns(AituneWarning, match="inference_mode") as seen:  # noqa: PT031
        for _ in range(2):
            y = mlp(X)
            y.sum().backward()
    assert len(seen) == 1
    assert mlp.up.weight.grad is not None
    assert dispatched(mlp) == 0
    assert sum(stats(mlp).methods[0].to_original.values()) == 2


def test_grad_mode_without_anything_that_wants_gradients_is_dispatched(mlp: Mlp) -> None:
    mlp.requires_grad_(False)
    install_scripted(mlp, X, error="scaled")
    with torch.enable_grad():
        assert torch.equal(mlp(X), 1.5 * expect(mlp, X))
        with pytest.warns(AituneWarning, match="gradients"):
            assert mlp(X.clone().requires_grad_()).requires_grad
    assert dispatched(mlp) == 1


def test_training_mode_runs_the_original_and_is_counted(mlp: Mlp) -> None:
    install_scripted(mlp, X, error="scaled")
    mlp.train()
    with pytest.warns(AituneWarning, match="training mode"):
        assert torch.equal(mlp(X), expect(mlp, X))
    mlp.eval()
    assert torch.equal(mlp(X), 1.5 * expect(mlp, X))
    assert stats(mlp).methods[0].to_original == {
        "the module is in training mode; call .eval() on it to use the tuned executable": 1
    }


def test_executable_that_fails_falls_back_to_the_original(mlp: Mlp) -> None:
    install_scripted(mlp, X, fails_at="run")
    with pytest.warns(AituneWarning, match="scripted.* failed and the original ran: RuntimeError"):
        assert torch.equal(mlp(X), expect(mlp, X))
    assert torch.equal(mlp(X), expect(mlp, X))
    assert dispatched(mlp) == 0
    assert sum(stats(mlp).methods[0].to_original.values()) == 2


def test_miss_passes_on_exactly_what_the_caller_passed() -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Counts(nn.Module):
        """Decorated forwards look at how arguments came."""

        def forward(self, x: Any, a: int = 1, *rest: Any, key: int, b: int = 2, **extra: Any) -> Any:
            seen.append(((x, a, *rest), {"key": key, "b": b, **extra}))
            return x * a

    module = Counts().eval()
    install_scripted(module, ((X,), {"key": 1}))
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(X, 3, 4, 5, key=6, b=7, c=8)
        module(X, key=9, d=1)
        module(X, 1, 2, key=1)
        module(x=X, key=2)
    assert seen == [
        ((X, 3, 4, 5), {"key": 6, "b": 7, "c": 8}),
        ((X, 1), {"key": 9, "b": 2, "d": 1}),
        ((X, 1, 2), {"key": 1, "b": 2}),
        ((X, 1), {"key": 2, "b": 2}),
    ]


def test_parameter_names_cannot_collide_with_ours() -> None:
    class Names(nn.Module):
        def forward(self, _a0_0: Any, _a1_: Any = 1, call: int = 2, type: int = 3, len: int = 4, next: int = 5) -> Any:
            return _a0_0 + _a1_ + call + type + len + next

    module = Names().eval()
    install_scripted(module, X)
    torch.testing.assert_close(module(X), X + 15)
    with pytest.warns(AituneWarning):
        torch.testing.assert_close(module(X, type=10), X + 22)
    assert dispatched(module) == 1


def test_outputs_keep_their_classes() -> None:
    heads = Heads().eval()
    install_scripted(heads, X, torch.ones(2, 4))
    got, want = heads(X), expect(heads, X)
    assert type(got) is type(want)
    assert got.names == want.names
    assert list(got.scores) == list(want.scores)
    assert all(torch.equal(got.scores[k], want.scores[k]) for k in want.scores)
    assert dispatched(heads) == 1


def test_inputs_changed_in_place_are_changed() -> None:
    module = WritesInput().eval()
    install_scripted(module, X.clone())
    x = X.clone()
    assert torch.equal(module(x), 2 * (X + 1))
    assert torch.equal(x, X + 1)
    assert dispatched(module) == 1


def test_output_that_is_the_input_is_the_very_object() -> None:
    module = ReturnsInput().eval()
    installed = install_scripted(module, X.clone())
    x = X.clone()
    same, _, more = module(x)
    assert same is x
    assert torch.equal(more, X + 1)
    assert {(a.output, a.kind) for a in installed.entries[0].signature.facts.aliases} == {
        ("output[0]", "same"),
        ("output[1]", "view"),
    }


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    more: dict[str, torch.Tensor]
    flag: bool = True


Point2 = collections.namedtuple("Point2", ["x", "y"])


class TakesAnything(nn.Module):
    def forward(self, value: Any) -> Any:
        if isinstance(value, Inputs):
            return value.x + value.more["y"] + value.flag
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value) + 1
        if isinstance(value, collections.UserDict):
            return value["a"] * 2
        return value[0] + value[1]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (Inputs(X, {"y": X}), Inputs(X, {"y": X}, False)),
        (Point2(X, X), (X, X)),
        ([X, X], [X, X, X]),
        ((X, X), [X, X]),
        (collections.UserDict(a=X), collections.UserDict(a=X, b=X)),
        (X.numpy(), X.numpy().astype(np.float64)),
        ({0: X, 1: X}, {0: X, 1: 2.0}),
        (collections.OrderedDict([(0, X), (1, X)]), {0: X, 1: X}),
    ],
    ids=lambda v: type(v).__name__,
)
def test_containers_fit_by_class_and_content(value: Any, other: Any) -> None:
    module = TakesAnything().eval()
    install_scripted(module, (value,), error="scaled")
    torch.testing.assert_close(module(value), 1.5 * expect(module, value))
    assert dispatched(module) == 1
    with pytest.warns(AituneWarning):
        torch.testing.assert_close(module(other), expect(module, other))
    assert stats(module).misses == 1


def test_nested_dict_of_52_tensors() -> None:
    batch: dict[str, Any] = {f"g{i}": {f"t{j}": torch.randn(2, 3) for j in range(8)} for i in range(6)}
    batch["last"] = tuple(torch.randn(2, 3) for _ in range(4))
    module = Nested().eval()
    install_scripted(module, (batch,), error="scaled")
    torch.testing.assert_close(module(batch), 1.5 * expect(module, batch))
    batch["g3"]["t4"] = torch.randn(2, 3).double()
    with pytest.warns(AituneWarning, match=r"batch\['g3'\]\['t4'\] is float64"):
        torch.testing.assert_close(module(batch), expect(module, batch))


def test_methods_other_than_forward() -> None:
    from aitune_lab.testing.models import AutoEncoder

    module = AutoEncoder().eval()
    install_scripted(module, X, method="encode", path="encode", error="scaled")
    install_scripted(module, torch.ones(3, 2), method="decode", path="decode", error="scaled")
    torch.testing.assert_close(module.decode(torch.ones(3, 2)), 1.5 * expect_method(module, "decode", torch.ones(3, 2)))
    torch.testing.assert_close(module.encode(X), 1.5 * expect_method(module, "encode", X))
    assert [s.method for s in stats(module).signatures] == ["encode", "decode"]
    unwrap(module)
    assert "encode" not in vars(module)


def expect_method(module: nn.Module, method: str, *args: Any) -> torch.Tensor:
    return getattr(type(module), method)(module, *args)


def test_reentrant_call() -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            return self(x, depth=depth - 1) + 1 if depth else x

    module = Recursive().eval()
    install_scripted(module, X)
    with pytest.warns(AituneWarning, match="depth is 3, tuned for its default 0"):
        assert torch.equal(module(X, depth=3), X + 3)
    assert dispatched(module) == 1


def test_eight_threads_of_ten_thousand_calls_are_all_dispatched_right_and_counted(mlp: Mlp) -> None:
    # A cheap executable, so that the dispatch is what threads meet in.
    install_scripted(mlp, torch.ones(1, 4), torch.ones(16, 4), call=lambda x: (x + 1,))
    wrong: list[Any] = []

    def work(number: int) -> None:
        with torch.no_grad():
            inputs = [torch.full((size, 4), float(number)) for size in range(1, 11)]
            wanted = [x + 1 for x in inputs]
            for i in range(10_000):
                if not torch.equal(mlp(inputs[i % 10]), wanted[i % 10]):
                    wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert stats(mlp).signatures[0].calls == 80_000
    assert stats(mlp).misses == 0


def test_counts_stay_exact_when_read_while_calls_run(mlp: Mlp) -> None:
    install_scripted(mlp, X)
    seen = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(500):
                mlp(X)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        seen.append(stats(mlp).signatures[0].calls)
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    assert stats(mlp).signatures[0].calls == 2000


def test_stats_read_as_text(mlp: Mlp) -> None:
    install_scripted(mlp, X)
    mlp(X)
    with pytest.warns(AituneWarning):
        mlp(X, 3.0)
    assert str(stats(mlp)).splitlines() == [
        "(model)(x: float32[3, 4]): 1 call by scripted",
        "(model): 1 by the original: scale is 3.0, tuned for its default 1.0",
    ]
    assert str(stats(unwrap(mlp))).startswith("nothing but eager runs here")


def test_reasons_are_bounded_and_misses_exact(mlp: Mlp) -> None:
    install_scripted(mlp, X)
    with pytest.warns(AituneWarning):  # noqa: PT031
        for i in range(1000):
            mlp(X, 2.0 + i)
    (method,) = stats(mlp).methods
    assert method.misses == 1000
    assert len(method.to_original) <= 33


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.is_contiguous() else x - 1


def test_where_strides_matter_other_strides_run_the_original() -> None:
    module = Branches().eval()
    install_scripted(module, X, X[:2], error="scaled")
    turned = X.t().contiguous().t()
    for _ in range(2):  # the second time the shape is known
        assert torch.equal(module(X), 1.5 * (X + 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AituneWarning)
            assert torch.equal(module(turned), turned - 1)
    assert dispatched(module) == 2
    assert "is not contiguous, and the result depends on its strides" in " ".join(stats(module).methods[0].to_original)


def test_where_strides_do_not_matter_any_are_tuned(mlp: Mlp) -> None:
    install_scripted(mlp, X)
    assert torch.allclose(mlp(X.t().contiguous().t()), expect(mlp, X))
    assert dispatched(mlp) == 1
