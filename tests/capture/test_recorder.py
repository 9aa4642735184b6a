"""Recording sees every call and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aitune_lab.capture.probe import probe, why_not
from aitune_lab.capture.recorder import Recorder, clone_leaf
from aitune_lab.capture.signature import signatures_of
from aitune_lab.capture.state import Snapshot
from aitune_lab.schema import Alias, Facts
from aitune_lab.testing import record_calls
from aitune_lab.testing.models import CountsCalls, Mlp, Noisy, Pair, ReturnsInput, WritesInput

X = torch.linspace(-1, 1, 12).view(3, 4)


def untouched(module: nn.Module) -> bool:
    return not any(type(v).__module__.startswith("aitune_lab") for m in module.modules() for v in vars(m).values())


def facts(module: nn.Module, *calls: Any) -> Facts:
    _, (found,) = record_calls(module, *calls)
    return found.signature.facts


def test_nothing_is_left_behind() -> None:
    pair = Pair().eval()
    order: list[str] = []
    for name in "ab":
        pair.first.register_forward_pre_hook(lambda m, a, n=name: order.append("pre " + n))
        pair.first.register_forward_hook(lambda m, a, y, n=name: order.append("post " + n))
    hooks = [dict(pair.first._forward_hooks), dict(pair.first._forward_pre_hooks)]
    before = {name: dict(vars(m)) for name, m in pair.named_modules()}
    recorder = Recorder([("first", pair.first, "forward"), ("", pair, "forward")])
    with torch.no_grad(), recorder.recording():
        pair(X)
    assert order == ["pre a", "pre b", "post a", "post b"]
    assert [dict(pair.first._forward_hooks), dict(pair.first._forward_pre_hooks)] == hooks
    assert {name: list(vars(m)) for name, m in pair.named_modules()} == {n: list(v) for n, v in before.items()}
    assert [r.calls for r in recorder.recordings] == [1, 1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nothing_is_left_behind_by_an_exception(error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error("no")

    module = Pair(Mlp(), Fails()).eval()
    recorder = Recorder([(name, m, "forward") for name, m in module.named_modules()])
    with pytest.raises(error), torch.no_grad(), recorder.recording():
        module(X)
    assert untouched(module)
    with pytest.raises(error):
        module(X)


def test_samples_are_cloned_apart_from_the_users() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q + k + v

    x = X.clone()
    _, (found,) = record_calls(Attention(), (x, x, x))
    leaves = found.all_samples()[0].leaves
    assert x.data_ptr() not in {leaf.data_ptr() for leaf in leaves}
    assert leaves[0] is leaves[1] is leaves[2], "one object stays one object: forward may ask"
    assert found.signature.shared == ((0, 1, 2),)
    x.add_(1)
    assert all(torch.equal(leaf, X) for leaf in leaves)
    call = found.all_samples()[0].call(fresh=True)
    call["q"].zero_()
    assert call["k"] is call["q"]
    assert torch.equal(leaves[0], X)


def test_samples_of_inference_mode_can_be_used_anywhere() -> None:
    module = Mlp().eval()
    recorder = Recorder([("", module, "forward")])
    with torch.inference_mode(), recorder.recording():
        module(X + 0)
    (sample,) = next(iter(recorder.recordings[0].shapes.values())).samples
    assert not sample.leaves[0].is_inference()
    sample.leaves[0].add_(1)


def test_memory_is_bounded_by_number_and_bytes() -> None:
    module = Mlp().eval()
    recorder = Recorder([("", module, "forward")], samples=2, max_bytes=4 * 4 * 30)
    with torch.no_grad(), recorder.recording():
        for size in range(1, 40):
            for _ in range(3):
                module(torch.ones(size, 4))
    shapes = list(recorder.recordings[0].shapes.values())
    assert recorder.recordings[0].calls == 117
    samples = [s for shape in shapes for s in shape.samples]
    assert all(len(shape.samples) <= 2 for shape in shapes)
    assert sum(s.size_bytes for s in samples) <= 4 * 4 * 30
    assert all(x.device.type == "meta" for shape in shapes for flat in shape.outputs for x in flat.leaves)


def test_first_call_is_kept_however_large() -> None:
    module = Mlp().eval()
    recorder = Recorder([("", module, "forward")], max_bytes=10)
    with torch.no_grad(), recorder.recording():
        module(X)
        module(X[:2])
    assert [len(shape.samples) for shape in recorder.recordings[0].shapes.values()] == [1, 0]


def test_other_threads_run_the_original() -> None:
    module = Mlp().eval()
    recorder = Recorder([("", module, "forward")])
    results: list[torch.Tensor] = []
    with torch.no_grad(), recorder.recording():
        thread = threading.Thread(target=lambda: results.append(module(X)))
        thread.start()
        thread.join()
        module(X[:2])
    assert torch.equal(results[0], Mlp.forward(module, X))
    assert [s.samples[0].leaves[0].shape[0] for s in recorder.recordings[0].shapes.values()] == [2]


def test_recursive_call_is_recorded_once() -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            return self(x, depth - 1) if depth else x

    recorder, (found,) = record_calls(Recursive(), (X, 3))
    assert found.signature.label == "(x: float32[3, 4], depth=3)"
    assert recorder.recordings[0].calls == 1


def test_facts_of_a_plain_module() -> None:
    assert facts(Mlp().eval(), X) == Facts(grad_modes=("no_grad",))


def test_inputs_changed_in_place_are_found() -> None:
    assert facts(WritesInput().eval(), X.clone()).mutated == ("x",)

    class Nested(nn.Module):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            batch["a"][1].zero_()
            return batch["b"] + 1

    assert facts(Nested(), ({"a": [X.clone(), X.clone()], "b": X.clone()},)).mutated == ("batch['a'][1]",)

    class Arrays(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            x += 1
            return torch.from_numpy(x) * 2

    assert facts(Arrays(), np.ones(3)).mutated == ("x",)

    class Data(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(0)  # written to with what it held; at another call it may be something else
            return x * 2

    assert facts(Data(), X.clone()).mutated == ("x",)


def test_containers_that_a_call_changes_are_found() -> None:
    class Appends(nn.Module):
        def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
            past.append(x)
            return x + 1

    class Replaces(nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            x["a"] = x["a"] + 1
            return x["a"]

    assert facts(Appends(), (X, [])).state == ("the argument past",)
    assert facts(Replaces(), ({"a": X},)).state == ("the argument x",)


def test_state_is_found_and_put_back_by_the_probe() -> None:
    module = CountsCalls().eval()
    assert facts(module, X).state == ("seen", "steps")
    assert module.seen == 1
    assert module.steps == 1

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.inner.cache = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner.cache[len(self.inner.cache)] = x
            return x + 1

    caches = Caches()
    assert facts(caches, X).state == ("inner.cache",)
    assert len(caches.inner.cache) == 1


def test_randomness_is_found_and_the_random_state_kept() -> None:
    torch.manual_seed(3)
    want = torch.randn(3, 4), torch.randn(3, 4)
    torch.manual_seed(3)
    module = Noisy().eval()
    found = facts(module, torch.zeros(3, 4))
    assert found.random
    # The recorded call drew once, as the user's call does; the probe's calls drew nothing of the user's.
    assert torch.equal(torch.randn(3, 4), want[1])
    assert not facts(nn.Dropout(0.5).eval(), X).random


def test_aliases_are_found() -> None:
    assert facts(ReturnsInput().eval(), X.clone()).aliases == (
        Alias("output[0]", "x", "same"),
        Alias("output[1]", "x", "view"),
    )


def test_values_that_depend_on_the_data_are_found() -> None:
    class Maximum(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x + 1, float(x.max()), len(x)

    assert facts(Maximum(), X).varying_values == ("output[1]",)


def test_hooks_inside_are_found() -> None:
    pair = Pair().eval()
    pair.first.up.register_forward_hook(lambda m, a, y: None)
    pair.register_forward_hook(lambda m, a, y: None)
    assert facts(pair, X).hooked == ("first.up",)


class Strided(nn.Module):
    """Reads `x` by its strides, `y` as anybody does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 2)) + y.sum()


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1) * 2


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if not x.is_contiguous() else x + 1


@pytest.mark.parametrize(
    ("module", "calls", "strided"),
    [
        (Strided(), ((X, X),), ("x",)),
        (Views(), ((X,),), ("x",)),
        (Branches(), ((X,),), ("x",)),
        (Views(), ((X[0],),), ()),  # one dimension has one order
        (Mlp().eval(), ((X,),), ()),
        (Noisy(), ((X,),), ()),
    ],
    ids=["as_strided", "view", "is_contiguous", "one dimension", "layers", "random"],
)
def test_a_result_that_depends_on_strides_is_found(module: nn.Module, calls: tuple[Any, ...], strided: Any) -> None:
    assert facts(module, *calls).strided == strided


def test_grad_modes_are_kept() -> None:
    module = Mlp().eval()
    recorder = Recorder([("", module, "forward")])
    with recorder.recording():
        module(X)
        with torch.no_grad():
            module(X)
        with torch.inference_mode():
            module(X)
    (found,) = signatures_of(recorder.recordings[0])
    assert found.signature.facts.grad_modes == ("grad", "inference", "no_grad")
    assert torch.equal(probe(recorder.recordings[0], found).all_samples()[0].leaves[0], X)


def test_what_cannot_be_recorded_is_said() -> None:
    class Generates(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            yield x

    class Awaits(nn.Module):
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def reason(module: nn.Module) -> str | None:
        return why_not(Recorder([("", module, "forward")]).recordings[0])

    assert "generator" in str(reason(Generates().eval()))
    assert "coroutine" in str(reason(Awaits().eval()))
    assert "training mode" in str(reason(Mlp()))
    assert reason(Mlp().eval()) is None

    class Locked:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
            return x + 1

    module = Takes().eval()
    recorder = Recorder([("", module, "forward")])
    with torch.no_grad(), recorder.recording():
        assert torch.equal(module(X, Locked()), X + 1)
    assert "Locked cannot be copied" in str(why_not(recorder.recordings[0]))


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(2),
        torch.eye(2).to_sparse(),
        np.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        {"a": 1},
        torch.Generator(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_clones_share_nothing(leaf: Any) -> None:
    made = clone_leaf(leaf)
    assert made is not leaf
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        assert made.data_ptr() != leaf.data_ptr()
        assert type(made) is torch.Tensor
        assert not made.requires_grad


def test_snapshot_puts_everything_back() -> None:
    module = CountsCalls().eval()
    module.history = [1, 2]
    module.table = {"a": 1}
    snapshot = Snapshot(module)
    history = module.history
    module(X)
    module.history.append(3)
    module.table["b"] = 2
    module.fresh = 1
    module.steps = torch.full((), 9.0)
    assert snapshot.changes() == ("fresh", "history", "seen", "steps", "table")
    snapshot.restore()
    assert (module.seen, float(module.steps), module.history, module.table) == (0, 0.0, [1, 2], {"a": 1})
    assert module.history is history
    assert not hasattr(module, "fresh")
    assert snapshot.changes() == () or snapshot.changes() == ("steps",)


def test_interrupt_between_installing_waits() -> None:
    module = Mlp().eval()
    recorder = Recorder([("", module, "forward")])
    with pytest.raises(KeyboardInterrupt), torch.no_grad(), recorder.recording():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            module(X)
    assert untouched(module)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
