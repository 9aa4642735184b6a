"""A tuned module is still the user's module, to Python and to every tool of torch."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import tracemalloc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import AituneWarning, TargetError, stats, unwrap
from aitune_lab.runtime import registrations
from aitune_lab.testing import install_scripted
from aitune_lab.testing.models import Mlp, Pair

X = torch.linspace(-1, 1, 12).view(3, 4)

OURS = ("forward", "_old_forward", "__reduce_ex__", "__getstate__", "__deepcopy__", "_replicate_for_data_parallel")


@pytest.fixture
def pair() -> Pair:
    return Pair().eval()


def tune(module: nn.Module, **options: Any) -> Any:
    return install_scripted(module, X, **{"error": "scaled", **options})


def plain(module: nn.Module) -> bool:
    """Nothing of ours is left in any submodule's own attributes."""
    for child in module.modules():
        for name, value in vars(child).items():
            if name in OURS or name.startswith("_aitune") or type(value).__module__.startswith("aitune_lab"):
                return False
    return True


def test_identity_class_attributes_and_names_stay(pair: Pair) -> None:
    first, keys, attributes = pair.first, list(pair.state_dict()), [n for n in dir(pair) if not n.startswith("_")]
    shown, children = repr(pair), list(pair.named_modules())
    tune(pair.first)
    assert pair.first is first
    assert type(first) is Mlp
    assert isinstance(first, nn.Module)
    assert list(pair.state_dict()) == keys
    assert [n for n in dir(pair) if not n.startswith("_")] == attributes
    assert repr(pair) == shown
    assert list(pair.named_modules()) == children
    assert first.up.weight is dict(pair.named_parameters())["first.up.weight"]
    assert first.forward.__wrapped__.__func__ is Mlp.forward


def test_unwrap_restores_exactly(pair: Pair) -> None:
    before = {name: dict(vars(child)) for name, child in pair.named_modules()}
    tune(pair.first)
    tune(pair)
    assert unwrap(pair) is pair
    after = {name: dict(vars(child)) for name, child in pair.named_modules()}
    assert {n: list(v) for n, v in before.items()} == {n: list(v) for n, v in after.items()}
    assert all(before[n][k] is after[n][k] for n in before for k in before[n])
    assert plain(pair)


def test_global_hooks_go_with_the_last_tuned_module(pair: Pair) -> None:
    gc.collect()
    accessor = torch.nn.utils._named_member_accessor
    hooks = torch.nn.modules.module
    before = (accessor.swap_tensor, len(hooks._global_parameter_registration_hooks))
    tune(pair.first)
    tune(pair.second)
    assert accessor.swap_tensor is not before[0]
    unwrap(pair.first)
    assert accessor.swap_tensor is not before[0]
    unwrap(pair.second)
    assert (accessor.swap_tensor, len(hooks._global_parameter_registration_hooks)) == before
    assert not registrations._hooks
    assert not registrations._listeners


def test_global_hooks_go_with_the_last_module_that_is_dropped() -> None:
    module = Mlp().eval()
    tune(module)
    assert registrations._hooks
    del module
    gc.collect()
    assert not registrations._hooks


def test_load_state_dict_round_trip(pair: Pair) -> None:
    other = Pair().eval()
    tune(pair.first)
    assert pair.load_state_dict(other.state_dict()).missing_keys == []
    torch.testing.assert_close(pair.first(X), 1.5 * other.first(X))


def test_hooks_added_before_and_after_run_around(pair: Pair) -> None:
    seen: list[str] = []
    pair.first.register_forward_pre_hook(lambda m, a: seen.append("pre before"))
    pair.first.register_forward_hook(lambda m, a, y: seen.append("post before"))
    tune(pair.first)
    seen.clear()
    pair.first.register_forward_hook(lambda m, a, y: y + 100)
    handle = pair.first.register_forward_pre_hook(lambda m, a: seen.append("pre after"))
    y = pair.first(X)
    torch.testing.assert_close(y, 1.5 * Mlp.forward(pair.first, X) + 100)
    assert seen == ["pre before", "pre after", "post before"]
    handle.remove()
    unwrap(pair)
    seen.clear()
    pair.first(X)
    assert seen == ["pre before", "post before"]


def copies(module: nn.Module) -> dict[str, nn.Module]:
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    return {
        "deepcopy": copy.deepcopy(module),
        "pickle": pickle.loads(pickle.dumps(module)),
        "torch.save": torch.load(saved, weights_only=False),
    }


@pytest.mark.parametrize("of_parent", [False, True], ids=["module", "parent"])
def test_copies_are_the_plain_original(pair: Pair, of_parent: bool) -> None:
    tune(pair.first)
    source = pair if of_parent else pair.first
    want = Pair.forward(unwrapped_copy(pair), X) if of_parent else Mlp.forward(pair.first, X)
    for name, made in copies(source).items():
        assert plain(made), name
        assert torch.equal(made(X), want), name
        # The copy has weights of its own.
        next(made.parameters()).add_(1)
    assert stats(pair.first).signatures[0].calls == 0
    torch.testing.assert_close(pair.first(X), 1.5 * Mlp.forward(pair.first, X))


def unwrapped_copy(pair: Pair) -> Pair:
    made = Pair().eval()
    made.load_state_dict(pair.state_dict())
    return made


def test_shallow_copy_is_the_plain_original(pair: Pair) -> None:
    tune(pair.first)
    made = copy.copy(pair.first)
    assert plain_itself(made)
    assert torch.equal(made(X), Mlp.forward(pair.first, X))
    assert made.up is pair.first.up
    assert not plain_itself(pair.first)


def plain_itself(module: nn.Module) -> bool:
    return not any(type(v).__module__.startswith("aitune_lab") for v in vars(module).values())


def test_copies_of_classes_with_protocols_of_their_own() -> None:
    class Reduces(Mlp):
        def __reduce__(self) -> Any:
            return _made, (dict(self.__dict__),)

    class Copies(Mlp):
        def __deepcopy__(self, memo: Any) -> Any:
            made = Copies()
            made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
            return made

    class States(Mlp):
        def __getstate__(self) -> Any:
            return {**self.__dict__, "noted": True}

    for cls in (Reduces, Copies, States):
        module = cls().eval()
        tune(module)
        made = copy.deepcopy(module)
        assert plain(made), cls
        assert torch.equal(made(X), Mlp.forward(module, X))
        assert "forward" in vars(module)
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    want = graph(X)
    tune(graph)
    for name, made in {"deepcopy": copy.deepcopy(graph), "pickle": pickle.loads(pickle.dumps(graph))}.items():
        assert plain(made), name
        assert torch.equal(made(X), want)


def _made(state: dict[str, Any]) -> nn.Module:
    made = Mlp()
    made.__dict__.update(state)
    return made


def test_deepcopy_in_a_memo_shared_with_weights(pair: Pair) -> None:
    tune(pair.first)
    holder = {"pair": pair, "weight": pair.first.up.weight, "bound": pair.first.forward}
    made = copy.deepcopy({"pair": holder["pair"], "weight": holder["weight"]})
    assert made["weight"] is made["pair"].first.up.weight


@pytest.mark.parametrize("change", ["to", "half", "double", "bfloat16"])
def test_dtype_changed_runs_the_original(pair: Pair, change: str) -> None:
    tune(pair.first, weights="baked")
    made = pair.to(torch.float64) if change == "to" else getattr(pair, change)()
    assert made is pair
    x = X.to(pair.first.up.weight.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        assert torch.equal(pair.first(x), Mlp.forward(pair.first, x))
    assert stats(pair).dispatched == 0


def test_train_and_eval(pair: Pair) -> None:
    tune(pair.first)
    assert pair.train() is pair
    assert pair.first.training
    with pytest.warns(AituneWarning, match="training mode"):
        assert torch.equal(pair.first(X), Mlp.forward(pair.first, X))
    pair.eval()
    torch.testing.assert_close(pair.first(X), 1.5 * Mlp.forward(pair.first, X))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes(pair: Pair, mode: Any) -> None:
    tune(pair.first)
    with torch.enable_grad(), mode():
        torch.testing.assert_close(pair.first(X), 1.5 * Mlp.forward(pair.first, X))
    assert stats(pair).dispatched == 1


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_compile_of_a_parent_and_of_the_module(pair: Pair) -> None:
    tune(pair.first)
    want = Pair.forward(unwrapped_copy(pair), X)
    for module, wanted in ((pair, want), (pair.first, Mlp.forward(pair.first, X))):
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X), wanted)
        torch.testing.assert_close(compiled(X), wanted)
    assert stats(pair).signatures[0].calls == 0
    assert stats(pair).misses == 0


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_parent(pair: Pair, strict: bool) -> None:
    tune(pair.first)
    program = torch.export.export(pair, (X,), strict=strict)
    assert sorted(program.state_dict) == sorted(pair.state_dict())
    torch.testing.assert_close(program.module()(X), Pair.forward(unwrapped_copy(pair), X))
    torch.testing.assert_close(pair.first(X), 1.5 * Mlp.forward(pair.first, X))
    assert stats(pair).signatures[0].calls == 1


def test_fx_and_jit_trace_see_the_original(pair: Pair) -> None:
    tune(pair.first, error="ok")  # the tracer compares what it traced with a call of its own
    want = Pair.forward(unwrapped_copy(pair), X)
    assert torch.equal(torch.fx.symbolic_trace(pair)(X), want)
    assert stats(pair).signatures[0].calls == 0
    traced = torch.jit.trace(pair, X)
    assert torch.equal(traced(X), want)
    assert len(list(traced.graph.nodes())) > 1
    assert stats(pair).misses == 0


def test_jit_script_is_refused_with_the_cure(pair: Pair) -> None:
    tune(pair.first)
    with pytest.raises(TargetError, match="unwrap"):
        torch.jit.script(pair)
    unwrap(pair)


def test_vmap_and_grad_transforms_run_the_original(pair: Pair) -> None:
    tune(pair.first)
    stacked = torch.stack([X, X + 1])
    got = torch.vmap(pair.first)(stacked)
    torch.testing.assert_close(got, Mlp.forward(pair.first, stacked))
    slope = torch.func.grad(lambda x: pair.first(x).sum())(X)
    assert slope.shape == X.shape
    assert stats(pair).signatures[0].calls == 0


@pytest.mark.parametrize("option", ["live", "baked"])
def test_functional_call_uses_the_weights_given(pair: Pair, option: str) -> None:
    tune(pair.first, weights=option, error="ok")
    given = {name: torch.zeros_like(p) for name, p in pair.first.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        assert torch.equal(torch.func.functional_call(pair.first, given, (X,)), torch.zeros(3, 4))
        one = {"up.weight": torch.zeros_like(pair.first.up.weight)}
        got = torch.func.functional_call(pair.first, one, (X,))
    other = Mlp().eval()
    other.load_state_dict({**pair.first.state_dict(), **one})
    torch.testing.assert_close(got, other(X))
    calls = stats(pair).signatures[0].calls
    torch.testing.assert_close(pair.first(X), Mlp.forward(pair.first, X))
    assert stats(pair).signatures[0].calls == calls + 1


def test_accelerate_hooks_in_both_orders(pair: Pair) -> None:
    accelerate = pytest.importorskip("accelerate.hooks")

    class Shifts(accelerate.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + 1, *args[1:]), kwargs

    first = pair.first
    want = Mlp.forward(first, X + 1)
    # Hook first, then tuned: the hook still runs around.
    accelerate.add_hook_to_module(first, Shifts())
    tune(first)
    torch.testing.assert_close(first(X), 1.5 * want)
    made = copy.deepcopy(first)
    unwrap(first)
    assert torch.equal(first(X), want)
    # Tuned under the hook, hook taken off, then unwrapped.
    tune(first)
    accelerate.remove_hook_from_module(first)
    torch.testing.assert_close(first(X), 1.5 * Mlp.forward(first, X))
    unwrap(first)
    assert torch.equal(first(X), Mlp.forward(first, X))
    vars(first).pop("forward", None)
    # Tuned first, then hooked.
    tune(first)
    accelerate.add_hook_to_module(first, Shifts())
    torch.testing.assert_close(first(X), 1.5 * want)
    unwrap(first)
    assert torch.equal(first(X), want)
    accelerate.remove_hook_from_module(first)
    assert torch.equal(first(X), Mlp.forward(first, X))
    assert made is not first


def test_tuned_then_hooked_then_unhooked(pair: Pair) -> None:
    accelerate = pytest.importorskip("accelerate.hooks")
    tune(pair.first)
    accelerate.add_hook_to_module(pair.first, accelerate.ModelHook())
    accelerate.remove_hook_from_module(pair.first)
    torch.testing.assert_close(pair.first(X), 1.5 * Mlp.forward(pair.first, X))
    unwrap(pair)
    assert plain(pair)


def test_data_parallel_replicas_are_refused(pair: Pair) -> None:
    tune(pair.first)
    with pytest.raises(TargetError, match=r"DataParallel.*unwrap"):
        pair.first._replicate_for_data_parallel()


def test_forward_replaced_by_the_user_wins_and_unwrap_leaves_it(pair: Pair) -> None:
    tune(pair.first)
    pair.first.forward = lambda x: x * 0  # type: ignore[method-assign]
    assert torch.equal(pair.first(X), X * 0)
    unwrap(pair)
    assert torch.equal(pair.first(X), X * 0)
    assert not any(type(v).__module__.startswith("aitune_lab") for v in vars(pair.first.up).values())
    del pair.first.forward
    assert plain(pair)


def test_two_targets_that_share_a_submodule() -> None:
    shared = Mlp().eval()
    one, two = Pair(shared).eval(), Pair(shared).eval()
    tune(one)
    tune(two)
    tune(shared)
    want = [unwrapped_copy(p) for p in (one, two)]
    for target, original in zip((one, two), want, strict=True):
        torch.testing.assert_close(target(X), 1.5 * original.second(1.5 * original.first(X)))
    unwrap(one)
    assert torch.equal(one(X), want[0](X))
    # The shared module is part of both: taking back the one took it back there too.
    torch.testing.assert_close(two(X), 1.5 * want[1](X))
    unwrap(two)
    assert torch.equal(two(X), want[1](X))
    assert plain(one)
    assert plain(two)


def test_module_under_two_names_is_one(pair: Pair) -> None:
    pair.second = pair.first
    tune(pair.first)
    want = 1.5 * Mlp.forward(pair.first, 1.5 * Mlp.forward(pair.first, X))
    torch.testing.assert_close(pair(X), want)
    assert stats(pair).dispatched == 2
    assert len(stats(pair).signatures) == 1


def test_tuning_twice_replaces_the_first(pair: Pair) -> None:
    first = tune(pair.first)
    second = tune(pair.first, error="ok")
    assert torch.equal(pair.first(X), Mlp.forward(pair.first, X))
    assert first.dispatch.entries[0].hits.value() == 0
    assert second.dispatch.entries[0].hits.value() == 1
    unwrap(pair)
    assert plain(pair)


def test_ten_thousand_calls_grow_nothing(pair: Pair) -> None:
    install_scripted(pair.first, torch.ones(2, 4), torch.ones(50, 4), call=lambda x: (x,))
    inputs = [torch.ones(n, 4) for n in range(2, 12)]

    def run(calls: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(calls):
                pair.first(inputs[i % 10], 1.0 if i % 50 else float(i))

    run(3000)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run(10_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000


def test_module_goes_with_its_last_reference() -> None:
    pair = Pair().eval()
    tune(pair)
    tune(pair.first, weights="baked")
    pair(X)
    gone = weakref.ref(pair), weakref.ref(pair.first), weakref.ref(pair.first.up.weight)
    del pair
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
