"""Habits of modules by which a faster executable could come to answer wrongly: it is refused, or the original runs."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.capture.tree import find_modules
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.strategies import OneBackendStrategy


class Add(nn.Module):
    """Holds a weight, and does what the test says."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.function = function


def module(function: Callable[..., Any]) -> nn.Module:
    """A module whose forward is the function, with its parameters."""
    made = type("Made", (Add,), {"forward": function})
    return made(function).eval()


def tuned(model: nn.Module, *items: Any, backend: str = "onnxruntime") -> Any:
    plan = ait.Plan(strategy=OneBackendStrategy(backend).config())
    options = TuneOptions(meter=ScriptedMeter(), end_to_end=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(make_tuner(model, list(items), plan, options))


def same(model: nn.Module, plain: nn.Module, *args: Any, **kwargs: Any) -> bool:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.allclose(model(*args, **kwargs), plain(*args, **kwargs), atol=1e-4)


X, Y = torch.randn(3, 4), torch.randn(3, 4)


def order_of_keywords(self: Any, **feats: torch.Tensor) -> torch.Tensor:
    return self.l(sum((i + 1) * f for i, f in enumerate(feats.values())))


def order_of_keys(self: Any, d: dict[str, torch.Tensor]) -> torch.Tensor:
    return self.l(sum((i + 1) * f for i, f in enumerate(d.values())))


def optional_key(self: Any, d: dict[str, Any]) -> torch.Tensor:
    return self.l(d["x"]) * d.get("scale", 1.0)


def identity(self: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return self.l(q) if q is k else self.l(q) - self.l(k) + 1


def named_type(self: Any, x: torch.Tensor, type: str = "a", len: int = 1) -> torch.Tensor:
    return self.l(x) * len if type == "a" else x


@pytest.mark.parametrize(
    ("function", "item", "calls"),
    [
        (order_of_keywords, {"b": X, "a": Y}, [((), {"b": X, "a": Y}), ((), {"a": Y, "b": X})]),
        (order_of_keys, ({"b": X, "a": Y},), [(({"b": X, "a": Y},), {}), (({"a": Y, "b": X},), {})]),
        (optional_key, ({"x": X, "bias": None},), [(({"x": X, "scale": 3.0},), {})]),
        (identity, (X, X), [((X, X), {}), ((X, Y), {})]),
        (identity, (X, Y), [((X, Y), {}), ((X, X), {})]),
        (named_type, {"x": X, "type": "a", "len": 2}, [((X,), {"type": "a", "len": 2}), ((X, "b"), {})]),
    ],
)
def test_calls_that_differ_in_order_presence_or_identity(function: Any, item: Any, calls: Any) -> None:
    model, plain = module(function), module(function)
    plain.load_state_dict(model.state_dict())
    tuned(model, item)
    for args, kwargs in calls:
        assert same(model, plain, *args, **kwargs)


@pytest.mark.parametrize("special", [lambda b: b == 5, lambda b: b % 2 == 1, lambda b: 3 < b < 7])
def test_a_branch_on_a_size_between_those_recorded(special: Callable[[int], bool]) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) * (100.0 if special(x.shape[0]) else 1.0)

    model, plain = module(forward), module(forward)
    plain.load_state_dict(model.state_dict())
    tuned(model, torch.randn(2, 4), torch.randn(8, 4))
    for b in range(2, 9):
        assert same(model, plain, torch.randn(b, 4)), b


def test_a_write_that_changed_nothing_while_recording_is_still_a_write() -> None:
    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x.masked_fill_(mask, 0.0)
        return self.l(x)

    model = module(forward)
    tuned(model, (torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool)))
    x = torch.ones(3, 4)
    with torch.inference_mode():
        model(x, torch.ones(3, 4, dtype=torch.bool))
    assert not x.any()


def test_a_counter_in_an_argument_keeps_counting() -> None:
    def forward(self: Any, x: torch.Tensor, state: dict[str, int]) -> torch.Tensor:
        state["step"] += 1
        return self.l(x) * state["step"]

    model, state = module(forward), {"step": 0}
    tuned(model, (X, {"step": 0}))
    with torch.inference_mode():
        model(X, state)
        model(X, state)
    assert state == {"step": 2}


def test_one_tensor_for_two_arguments_of_which_one_is_written() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return self.l(x) + y

    model, plain = module(forward), module(forward)
    plain.load_state_dict(model.state_dict())
    tuned(model, (X.clone(), Y.clone()))
    a, b = torch.ones(3, 4), torch.ones(3, 4)
    with torch.inference_mode(), pytest.warns(ait.AituneWarning, match="share memory"):
        assert torch.allclose(model(a, a), plain(b, b), atol=1e-5)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python_and_numpy_are_noticed_however_rarely_they_act(draw: Callable[[], float]) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) if draw() > 1e-9 else x

    model = module(forward)
    before = random.getstate(), np.random.get_state()[1].tolist()
    result = tuned(model, X)
    own = next(c for c in result.choices if c.path == "")
    assert own.candidate.backend == "eager"
    assert "random" in own.reason
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@dataclass
class Box:
    x: torch.Tensor


class Bag(UserDict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("make", [lambda: Box(X), lambda: Bag(x=X)])
def test_attributes_beside_the_fields_are_not_lost(make: Callable[[], Any]) -> None:
    def forward(self: Any, box: Any) -> torch.Tensor:
        x = box.x if isinstance(box, Box) else box["x"]
        return self.l(x) * getattr(box, "scale", 1.0)

    model, plain = module(forward), module(forward)
    plain.load_state_dict(model.state_dict())
    scaled = make()
    scaled.scale = 3.0
    tuned(model, (scaled,))
    assert same(model, plain, scaled)


def test_an_output_that_is_the_input_only_if_contiguous() -> None:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.contiguous(), self.l(x)

    model = module(forward)
    tuned(model, torch.randn(4, 4))
    x = torch.randn(4, 4).t()
    kept = x.clone()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output, _ = model(x)
        output.zero_()
    assert torch.equal(x, kept)


def one_tensor_twice(self: Any, x: torch.Tensor) -> Any:
    y = self.l(x)
    return {"last": y, "all": (x + 1, y)}


def part_of_another(self: Any, x: torch.Tensor) -> Any:
    y = self.l(x)
    return y, y[:, 0]


def expanded(self: Any, x: torch.Tensor) -> Any:
    y = self.l(x)[:, :1].expand(-1, 3)
    return y, y[:, 1]


def side_by_side(self: Any, x: torch.Tensor) -> Any:
    return self.l(x).chunk(2, -1)


@pytest.mark.parametrize("function", [one_tensor_twice, part_of_another, expanded, side_by_side])
def test_outputs_that_share_memory_go_on_sharing_it(function: Callable[..., Any]) -> None:
    model, plain = module(function), module(function)
    plain.load_state_dict(model.state_dict())
    result = tuned(model, torch.randn(2, 4), torch.randn(3, 4))
    own = next(c for c in result.choices if c.path == "")
    if function in (part_of_another, expanded):
        assert own.candidate.backend == "eager"
        assert "output[1] is a view of output[0]" in own.reason
    else:
        assert own.candidate.backend == "onnxruntime"
    with torch.inference_mode():
        found, wanted = model(X), plain(X)
        for outputs in (found, wanted):
            (outputs["last"] if isinstance(outputs, dict) else outputs[0]).zero_()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [np.ones((3, 4))[::-1], np.ones((3, 4), dtype=">f8"), None, "text"])
def test_arrays_that_torch_cannot_hold_run_the_original(given: Any) -> None:
    def forward(self: Any, x: Any) -> torch.Tensor:
        value = np.ascontiguousarray(x, dtype=np.float32) if isinstance(x, np.ndarray) else np.zeros((3, 4), np.float32)
        return self.l(torch.from_numpy(value.copy()))

    model, plain = module(forward), module(forward)
    plain.load_state_dict(model.state_dict())
    with scripted_backend():
        plan = ait.Plan(strategy=OneBackendStrategy("scripted").config())
        options = TuneOptions(backends=(ScriptedBackend().candidate(),), meter=ScriptedMeter(), end_to_end=False)
        run(make_tuner(model, [(np.ones((3, 4)),)], plan, options))
        assert same(model, plain, given)


def test_objects_that_cannot_be_looked_into_hold_nothing() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no")

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    class Pipe:
        def __init__(self) -> None:
            self.bad, self.net, self.words = Hostile(), nn.Linear(2, 2), {str(i): i for i in range(50_000)}

    assert [item.paths for item in find_modules(Pipe())] == [["net"]]
