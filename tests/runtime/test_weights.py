"""Weights changed after tuning are noticed: at once by event, within 100 calls by looking, within a second by content."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import AituneWarning, refresh, stats, unwrap
from aitune_lab.runtime import weights as watching
from aitune_lab.runtime.weights import WeightWatch, content_digest
from aitune_lab.testing import install_scripted
from aitune_lab.testing.models import CountsCalls, Mlp, Pair

X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def pair() -> Pair:
    return Pair().eval()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that passes only when a test says so; gives the function that advances it."""
    now = [1000.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def original(pair: Pair) -> torch.Tensor:
    return Mlp.forward(pair.second, Mlp.forward(pair.first, X))


def quiet(pair: nn.Module, calls: int = 1) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        for _ in range(calls):
            y = pair(X)
    return y


def new(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.randn_like(tensor))


def other_state(pair: Pair) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(t) for name, t in pair.state_dict().items()}


EVENTS: dict[str, Callable[[Pair], Any]] = {
    "load_state_dict": lambda p: p.load_state_dict(other_state(p)),
    "load_state_dict assign": lambda p: p.load_state_dict(other_state(p), assign=True),
    "load_state_dict of a child": lambda p: p.first.load_state_dict(
        {k: v + 1 for k, v in p.first.state_dict().items()}
    ),
    "load_state_dict of a grandchild": lambda p: p.first.up.load_state_dict(
        {k: v + 1 for k, v in p.first.up.state_dict().items()}
    ),
    "parameter replaced": lambda p: setattr(p.first.up, "weight", new(p.first.up.weight)),
    "parameter registered": lambda p: p.first.up.register_parameter("weight", new(p.first.up.weight)),
    "submodule replaced": lambda p: setattr(p.first, "up", nn.Linear(4, 8)),
    "submodule of the parent replaced": lambda p: setattr(p, "second", Mlp().eval()),
    "double": lambda p: p.double().float(),
    "to, of a submodule": lambda p: p.second.down.to(torch.float64).to(torch.float32) and p.second.down.weight.add_(1),
}


@pytest.mark.parametrize("change", EVENTS)
@pytest.mark.parametrize("option", ["baked", "refreshable", "live"])
def test_change_by_event_is_seen_at_the_next_call(pair: Pair, change: str, option: str) -> None:
    install_scripted(pair, X, weights=option)
    pair(X)
    EVENTS[change](pair)
    torch.testing.assert_close(quiet(pair), original(pair))
    torch.testing.assert_close(quiet(pair), original(pair))
    torch.testing.assert_close(pair(X), original(pair))


RAW: dict[str, Callable[[Pair], Any]] = {
    "in place": lambda p: p.first.up.weight.add_(1),
    "in place, last tensor": lambda p: p.second.down.bias.mul_(3),
    "data replaced": lambda p: setattr(p.first.up.weight, "data", torch.randn(8, 4)),
    "slot replaced": lambda p: p.first.up._parameters.__setitem__("weight", new(p.first.up.weight)),
    "optimizer step": lambda p: step(p),
}


def step(pair: Pair) -> None:
    optimizer = torch.optim.SGD(pair.parameters(), lr=1.0)
    with torch.enable_grad():
        original(pair).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", RAW)
def test_raw_change_is_seen_within_100_calls(pair: Pair, change: str) -> None:
    install_scripted(pair, X, weights="baked")
    pair(X)
    RAW[change](pair)
    quiet(pair, 100)
    torch.testing.assert_close(quiet(pair), original(pair))
    assert stats(pair).signatures[0].stale


CONTENT: dict[str, Callable[[Pair], Any]] = {
    "data added to": lambda p: p.first.up.weight.data.add_(1),
    "data of a bias": lambda p: p.second.down.bias.data.mul_(-2),
    "numpy": lambda p: p.first.up.weight.detach().numpy().__iadd__(1.0),
    "to NaN": lambda p: p.first.up.weight.data.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CONTENT)
def test_change_of_content_alone_is_seen_within_a_second(
    pair: Pair, change: str, clock: Callable[[float], None]
) -> None:
    install_scripted(pair, X, weights="baked")
    before = pair(X)
    CONTENT[change](pair)
    # Nothing shows but the content, so for a moment the executable still answers with the old weights.
    assert torch.equal(pair(X), before)
    for _ in range(20):
        clock(0.055)
        quiet(pair)
    torch.testing.assert_close(quiet(pair), original(pair), equal_nan=True)
    assert stats(pair).signatures[0].stale


@pytest.mark.parametrize("change", [*EVENTS, *RAW, *CONTENT])
def test_refresh_sees_everything_at_once(pair: Pair, change: str, clock: Callable[[float], None]) -> None:
    install_scripted(pair, X, weights="refreshable")
    {**EVENTS, **RAW, **CONTENT}[change](pair)
    kept_kind = "submodule" not in change
    assert refresh(pair) is kept_kind or not kept_kind
    torch.testing.assert_close(quiet(pair), original(pair), equal_nan=True)


def test_what_cannot_be_refreshed_says_so_once_and_holds_again_when_weights_are_back(pair: Pair) -> None:
    install_scripted(pair, X, weights="baked", error="scaled")
    state = {k: v.clone() for k, v in pair.state_dict().items()}
    pair.load_state_dict(other_state(pair))
    with pytest.warns(AituneWarning, match="no longer holds.*tune again") as seen:  # noqa: PT031
        for _ in range(3):
            torch.testing.assert_close(pair(X), original(pair))
    assert len(seen) == 1
    assert refresh(pair) is False
    reason, count = next(iter(stats(pair).methods[0].to_original.items()))
    assert "load_state_dict was called" in reason
    assert count == 3
    pair.load_state_dict(state)
    torch.testing.assert_close(quiet(pair), 1.5 * original(pair))
    assert refresh(pair) is True
    assert not stats(pair).signatures[0].stale


def test_events_that_change_nothing_keep_the_executable(pair: Pair) -> None:
    install_scripted(pair, X, weights="baked", error="scaled")
    for nothing in (
        lambda: pair.load_state_dict({k: v.clone() for k, v in pair.state_dict().items()}),
        lambda: pair.load_state_dict({k: v.clone() for k, v in pair.state_dict().items()}, assign=True),
        lambda: pair.to(torch.float32),
        lambda: pair.to("cpu"),
        lambda: pair.eval(),
        lambda: pair.train().eval(),
        lambda: pair.requires_grad_(False),
        lambda: setattr(pair.first.up, "weight", pair.first.up.weight),
        lambda: pair.zero_grad(),
    ):
        nothing()
        torch.testing.assert_close(pair(X), 1.5 * original(pair))
    assert stats(pair).methods[0].to_original == {}


def test_frozen_weights_are_not_watched(pair: Pair) -> None:
    before = {name: set(vars(child)) for name, child in pair.named_modules()}
    install_scripted(pair.first, X, weights="baked", watching="frozen")
    assert {name: set(vars(child)) for name, child in pair.named_modules() if name != "first"} == {
        name: held for name, held in before.items() if name != "first"
    }
    want = pair.first(X)
    pair.load_state_dict(other_state(pair))
    assert torch.equal(pair.first(X), want)
    assert refresh(pair) is True


def test_training_flag_of_a_submodule(pair: Pair) -> None:
    install_scripted(pair, X, weights="baked", error="scaled")
    pair.first.train()
    with pytest.warns(AituneWarning, match=r"train\(\) or eval\(\) was called"):
        torch.testing.assert_close(pair(X), original(pair))
    pair.first.eval()
    torch.testing.assert_close(pair(X), 1.5 * original(pair))
    pair.first.up.training = True
    quiet(pair, 100)
    torch.testing.assert_close(quiet(pair), original(pair))


def test_buffers_that_a_live_module_changes_are_no_change_of_weights() -> None:
    module = CountsCalls().eval()
    install_scripted(module, X, weights="live")
    for number in range(1, 300):
        assert torch.allclose(module(X), X + 1 + number)
    assert stats(module).dispatched == 299


def test_every_tensor_is_looked_at_within_its_round() -> None:
    for count in (1, 7, 100, 399, 1000):
        module = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(count)])
        for index in {0, count // 2, count - 1}:
            watch = WeightWatch(module)
            module[index].add_(1)
            calls = next(i for i in itertools.count(1) if not watch.tick())
            # All tensors, and the module itself with its list of children.
            assert calls <= -(-(count + 2) // watching.LOOKS_PER_CALL)


@pytest.mark.parametrize("calls", [1, 10])
def test_of_many_tensors_all_are_looked_at_within_a_second(calls: int, clock: Callable[[float], None]) -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(1000)])
    for index in (0, 500, 999):
        watch = WeightWatch(module, values=False, addresses=True)
        module._parameters[str(index)] = nn.Parameter(torch.zeros(2))
        found = []
        for _ in range(calls):
            clock(1.0 / calls)
            found.append(not watch.tick())
        assert any(found)


def test_a_call_looks_at_as_much_however_many_tensors_there_are() -> None:
    shares = {}
    for count in (10, 300, 3000):
        watch = WeightWatch(nn.Sequential(*[nn.Linear(2, 2) for _ in range(count // 2)]))
        shares[count] = [sum(map(len, next(watch._shares_due))) for _ in range(watch._calls_per_round)]
    assert {max(looks) for looks in shares.values()} == {watching.LOOKS_PER_CALL}


def test_every_tensor_is_sampled_within_a_second(clock: Callable[[float], None]) -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=d)) for d in DTYPES for _ in range(40)])
    for step in (0.021, 0.1, 0.7, 30.0):
        for index in (0, len(module) // 2, len(module) - 1):
            watch = WeightWatch(module)
            module[index].data.fill_(1 - module[index].data[0].item())
            seconds = 0.0
            while watch.tick():
                clock(step)
                seconds += step
                assert seconds < 1.0 + 2 * step + 0.1


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(2000.0).view(40, 50),
        torch.arange(2000.0).view(40, 50).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 8)[:, 2:5],
        torch.randn(1, 5).expand(4, 5),
        torch.tensor(3.0),
        torch.tensor([True, False]),
        torch.randn(4, dtype=torch.complex64),
        torch.tensor([float("nan"), 1.0]),
        torch.randn(4).to(torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_samples_are_views_that_see_writes(tensor: torch.Tensor) -> None:
    view = watching._sampled(tensor)
    assert view is not None
    samples = watching._Samples([tensor])
    assert not samples.differ()
    samples.release()
    assert not samples.differ()
    data = tensor.data
    if data.dtype is torch.bool:
        data.logical_not_()
    else:
        data = data[0] if data.dim() and data.stride(0) == 0 else data
        data.copy_(torch.full(data.shape, 7.0))
    assert samples.differ()


def test_kinds_of_tensors_that_cannot_be_sampled_are_watched_all_the_same() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(3).to_sparse())
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("meta", torch.zeros(3, device="meta"))
            self.register_buffer("none", None)
            with torch.inference_mode():
                self.register_buffer("inference", torch.zeros(3))

    module = Odd()
    watch = WeightWatch(module)
    assert all(watch.tick() for _ in range(200))
    assert watch.untouched()
    module._buffers["inference"] = torch.zeros(3)
    assert not all(watch.tick() for _ in range(200))


def test_digest_counts_names_values_dtypes_and_sharing() -> None:
    def made(**tensors: torch.Tensor) -> str:
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return content_digest(module)

    a = torch.arange(4.0)
    different = [
        made(a=a),
        made(b=a),
        made(a=a + 1),
        made(a=a.view(2, 2)),
        made(a=a.double()),
        made(a=a, b=a),
        made(a=a, b=a.clone()),
        made(),
    ]
    assert len(set(different)) == len(different)
    assert made(a=a) == made(a=a.clone())
    assert made(a=a) == made(a=torch.stack([a, a], 1)[:, 0])


def test_weights_that_go_while_watched_are_freed(pair: Pair) -> None:
    import gc
    import weakref

    install_scripted(pair, X, weights="baked")
    quiet(pair)
    storage = weakref.ref(pair.first.up.weight.untyped_storage())
    pair.first.up.weight.data = torch.zeros(8, 4)
    quiet(pair, 101)
    gc.collect()
    assert storage() is None
    unwrap(pair)


class Constants(nn.Module):
    """Numbers, flags, strings and tuples in attributes, its own and those of submodules, all of which are baked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.activation = nn.LeakyReLU(0.1)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 1.0
        self.mode = "plain"
        self.window = (1, 2)
        self.signed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.norm(self.activation(x)) * self.scale * self.window[0]
        y = torch.tanh(y) if self.mode == "tanh" else y
        return y if self.signed else y.abs()


ATTRIBUTES: dict[str, tuple[Callable[[Constants], Any], Callable[[Constants], Any]]] = {
    "number": (lambda m: setattr(m, "scale", 5.0), lambda m: setattr(m, "scale", 1.0)),
    "number, now a tensor": (lambda m: setattr(m, "scale", torch.ones(4)), lambda m: setattr(m, "scale", 1.0)),
    "flag": (lambda m: setattr(m, "signed", False), lambda m: setattr(m, "signed", True)),
    "string": (lambda m: setattr(m, "mode", "tanh"), lambda m: setattr(m, "mode", "plain")),
    "tuple": (lambda m: setattr(m, "window", (3, 2)), lambda m: setattr(m, "window", (1, 2))),
    "of a submodule": (
        lambda m: setattr(m.activation, "negative_slope", 5.0),
        lambda m: setattr(m.activation, "negative_slope", 0.1),
    ),
    "eps": (lambda m: setattr(m.norm, "eps", 3.0), lambda m: setattr(m.norm, "eps", 1e-5)),
}


def swap_layers(module: Constants) -> None:
    layers = module.layers._modules
    layers["0"], layers["1"] = layers["1"], layers["0"]


STRUCTURE: dict[str, Callable[[Constants], Any]] = {
    "del": lambda m: m.layers.__delitem__(-1),
    "pop": lambda m: m.layers.pop(0),
    "insert": lambda m: m.layers.insert(1, nn.Tanh()),
    "insert one that is there": lambda m: m.layers.insert(1, m.layers[0]),
    "two exchanged": swap_layers,
    "append": lambda m: m.layers.append(nn.Tanh()),
    "forward of a submodule assigned": lambda m: setattr(m.activation, "forward", lambda x: x * 100),
}
HOOKS: dict[str, Callable[[Constants], Any]] = {
    "forward hook": lambda m: m.layers[0].register_forward_hook(lambda _, args, y: y * 10),
    "forward pre-hook": lambda m: m.activation.register_forward_pre_hook(lambda _, args: (args[0] - 3,)),
}
SCALED = {"error": "scaled"}


def scaled(option: str) -> Constants:
    """Installed so that calls which an executable answers can be told: they give 1.5 times the original's result."""
    module = Constants().eval()
    install_scripted(module, X, weights=option, **SCALED)
    torch.testing.assert_close(module(X), 1.5 * Constants.forward(module, X))
    return module


@pytest.mark.parametrize("option", ["baked", "refreshable"])
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_changed_attribute_is_seen_within_100_calls_and_by_refresh(attribute: str, option: str) -> None:
    change, put_back = ATTRIBUTES[attribute]
    module = scaled(option)
    change(module)
    quiet(module, 100)
    torch.testing.assert_close(quiet(module), Constants.forward(module, X))
    assert refresh(module) is False
    put_back(module)
    assert refresh(module) is True
    torch.testing.assert_close(module(X), 1.5 * Constants.forward(module, X))
    change(module)
    assert refresh(module) is False
    torch.testing.assert_close(quiet(module), Constants.forward(module, X))
    assert all("attribute '" in reason and "was changed" in reason for reason in stats(module).methods[0].to_original)


def test_live_executables_look_at_attributes_themselves() -> None:
    module = scaled("live")
    for change, _ in ATTRIBUTES.values():
        change(module)
        torch.testing.assert_close(module(X), 1.5 * Constants.forward(module, X))
    quiet(module, 200)
    assert stats(module).methods[0].to_original == {}


def test_attributes_set_to_equal_values_and_those_that_calls_change_are_no_change() -> None:
    class Counts(Constants):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    module = Counts().eval()
    module.calls = 0
    install_scripted(module, X, weights="baked")
    for number in range(250):
        module.calls, module.scale, module.window = number + 1000, float(str(1.0)), (int("1"), 2)
        module(X)
    assert refresh(module) is True
    assert stats(module).dispatched == 250


@pytest.mark.parametrize("option", ["baked", "refreshable", "live"])
@pytest.mark.parametrize("change", STRUCTURE)
def test_changed_structure_is_seen_within_100_calls_and_by_refresh(change: str, option: str) -> None:
    module = scaled(option)
    STRUCTURE[change](module)
    quiet(module, 100)
    torch.testing.assert_close(quiet(module), Constants.forward(module, X))
    assert refresh(module) is False
    module = scaled(option)
    STRUCTURE[change](module)
    assert refresh(module) is False
    torch.testing.assert_close(quiet(module), Constants.forward(module, X))


def test_forward_of_a_submodule_taken_back_by_the_user_holds_again() -> None:
    module = scaled("baked")
    module.activation.forward = lambda x: x * 100
    assert refresh(module) is False
    del module.activation.forward
    assert refresh(module) is True
    torch.testing.assert_close(module(X), 1.5 * Constants.forward(module, X))


def test_a_submodule_tuned_on_its_own_later_is_no_change() -> None:
    module = scaled("baked")
    install_scripted(module.activation, X)
    for _ in range(200):
        module(X)
    unwrap(module.activation)
    for _ in range(200):
        module(X)
    assert refresh(module) is True
    assert stats(module).methods[0].to_original == {}


@pytest.mark.parametrize("option", ["baked", "refreshable", "live"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hook_on_a_submodule_runs_at_the_next_call_and_executables_return_with_its_removal(
    hook: str, option: str
) -> None:
    module = scaled(option)
    plain = Constants.forward(module, X)
    handle = HOOKS[hook](module)
    with pytest.warns(AituneWarning, match="hook was registered on a submodule") as seen:  # noqa: PT031
        for _ in range(3):
            y = module(X)
            torch.testing.assert_close(y, Constants.forward(module, X))
            assert not torch.allclose(y, plain)
    assert len(seen) == 1
    assert refresh(module) is False
    handle.remove()
    assert refresh(module) is True
    torch.testing.assert_close(module(X), 1.5 * plain)


def test_hook_of_the_tuned_module_itself_runs_around_the_executable() -> None:
    module = scaled("baked")
    plain = Constants.forward(module, X)
    module.register_forward_hook(lambda _, args, y: y + 1)
    torch.testing.assert_close(module(X), 1.5 * plain + 1)
    assert refresh(module) is True


@pytest.mark.parametrize("option", ["baked", "refreshable"])
def test_refresh_sees_one_row_written_through_data_that_no_sample_shows(option: str) -> None:
    table = nn.Embedding(5000, 4).eval()
    install_scripted(table, torch.tensor([1234, 7]), weights=option)
    table(torch.tensor([1234, 7]))
    table.weight.data[1234] = torch.arange(4.0)
    assert refresh(table) is (option == "refreshable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AituneWarning)
        assert torch.equal(table(torch.tensor([1234, 7])), table.weight[[1234, 7]])


def test_class_of_a_submodule_changed_is_seen_by_refresh() -> None:
    class Tenfold(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 10 * super().forward(x)

    module = scaled("baked")
    module.layers[0].__class__ = Tenfold
    assert refresh(module) is False
    torch.testing.assert_close(quiet(module), Constants.forward(module, X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_module_inside_is_no_obstacle() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.scripted = nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scripted(self.own(x))

    model = Parent().eval()
    x = torch.randn(2, 4)
    expected = model(x).detach()
    install_scripted(model, x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert stats(model).dispatched == 1
