"""What ran, how long, what can be tuned; and the target is as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab import DataError, TargetError, inspect
from aitune_lab.testing.models import AutoEncoder, CountsCalls, Mlp, Pair, WritesInput

X = torch.linspace(-1, 1, 12).view(3, 4)


class Pipeline:
    def __init__(self) -> None:
        self.encoder = Mlp().eval()
        self.blocks = [Mlp().eval(), Mlp().eval()]
        self.unused = Mlp().eval()

    def __call__(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
            x = block(x) if twice else x
        return x


def rows(info: Any) -> dict[str, Any]:
    return {row.path: row for row in info.rows}


def untouched(target: Any) -> bool:
    from aitune_lab.capture.tree import modules_of

    entries = [v for m in modules_of(target).values() for v in vars(m).values()]
    return not any(type(v).__module__.startswith("aitune_lab") for v in entries)


def test_calls_shapes_and_shares() -> None:
    pipeline = Pipeline()
    info = inspect(pipeline, [X, {"x": X, "twice": True}], iterations=2)
    found = rows(info)
    assert found["encoder"].calls == 4
    assert found["blocks.0"].calls == 6
    assert found["blocks.0"].inputs == ("x: float32[3, 4]",)
    assert found["blocks.0"].outputs == ("output: float32[3, 4]",)
    assert found["encoder"].parameters == 4 * 8 + 8 + 8 * 4 + 4
    assert found["encoder"].parameter_bytes == 4 * found["encoder"].parameters
    assert 0 < found["encoder"].share < 1
    assert found["encoder"].self_seconds < found["encoder"].total_seconds
    assert found["encoder.up"].depth == found["encoder"].depth + 1
    assert (found["unused"].tunable, found["unused"].reason) == (False, "it did not run")
    assert info.understood == "2 items of a list of 2, each one call as it stands"
    assert untouched(pipeline)


def test_outermost_modules_the_slowest_first() -> None:
    info = inspect(Pipeline(), X, iterations=1)
    chosen = info.get_modules()
    assert {m.path for m in chosen} == {"encoder", "blocks.0", "blocks.1"}
    assert [m.row.total_seconds for m in chosen] == sorted((m.row.total_seconds for m in chosen), reverse=True)
    assert len(info.get_modules(limit=2)) == 2
    assert info.get_modules(min_execution_ratio=1.1) == []
    assert {m.path for m in info.get_modules(min_depth=1)} == {
        f"{p}.{c}" for p in ("encoder", "blocks.0", "blocks.1") for c in ("up", "down")
    }
    assert [m.path for m in inspect(Pair().eval(), X).get_modules()] == [""]


def test_methods_other_than_forward() -> None:
    class Codec:
        def __init__(self) -> None:
            self.vae = AutoEncoder().eval()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.vae.decode(self.vae.encode(x))

    info = inspect(Codec(), X, iterations=1)
    assert {m.path: m.method for m in info.get_modules()} == {"vae.encode": "encode", "vae.decode": "decode"}


def test_why_a_module_cannot_be_tuned() -> None:
    class Strings(nn.Module):
        def forward(self, text: str) -> int:
            return len(text)

    class Whole:
        def __init__(self) -> None:
            self.training_mode = Mlp()
            self.tokens = Strings().eval()
            self.good = Mlp().eval()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.good(self.training_mode(x)) + self.tokens("ab")

    found = rows(inspect(Whole(), X, iterations=1))
    assert "training mode" in found["training_mode"].reason
    assert found["tokens"].reason == "it takes or returns no tensors"
    assert found["good"].tunable


def test_shared_modules_are_one_row() -> None:
    shared = Mlp().eval()
    found = rows(inspect(Pair(shared, shared).eval(), X, iterations=1))
    assert found["first"].shared_with == ("second",)
    assert found["first"].calls == 2
    assert "second" not in found


def test_data_of_the_user_is_not_changed_by_a_target_that_writes_inputs() -> None:
    x = X.clone()
    inspect(WritesInput().eval(), [x], iterations=2)
    assert torch.equal(x, X)


def test_inference_function_and_batch_sizes() -> None:
    model = Mlp().eval()
    seen: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return model(x)

    inspect(model, [X[0], X[1]], inference_function=run, batch_sizes=[1, 2], iterations=1)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize(
    ("target", "data", "error", "said"),
    [
        (object(), X, TargetError, "no torch.nn.Module was found"),
        (Mlp().eval(), [], DataError, "at least one item"),
        (Mlp().eval(), torch.ones(3, 5), DataError, r"rejected an item of the data \(argument 0: float32\[3, 5\]\)"),
        (type("Holder", (), {"__init__": lambda s: setattr(s, "m", Mlp())})(), X, TargetError, "inference_function="),
    ],
    ids=["no modules", "no data", "rejected", "not callable"],
)
def test_errors_say_what_to_do(target: Any, data: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        inspect(target, data)
    assert untouched(target)


def test_iterations_must_be_positive() -> None:
    with pytest.raises(
        DataError, match=r"iterations >= 1 and warmup >= 0 must hold, but got \(iterations=0, warmup=1\)"
    ):
        inspect(Mlp().eval(), X, iterations=0)


def test_exceptions_and_calls_of_other_threads_leave_nothing_behind() -> None:
    pair = Pair().eval()
    stop = threading.Event()
    problems: list[BaseException] = []

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    pair(X)
                except BaseException as error:
                    problems.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(3):
            inspect(pair, X, iterations=3)
            with pytest.raises(DataError):
                inspect(pair, torch.ones(1, 9))
    finally:
        stop.set()
        thread.join()
    assert not problems
    assert untouched(pair)


def test_state_is_as_it_was() -> None:
    module = CountsCalls().eval()
    info = inspect(module, X, iterations=2, warmup=1)
    assert rows(info)[""].calls == 2
    assert (module.seen, float(module.steps)) == (0, 0.0)


def test_shows_itself_as_a_table() -> None:
    info = inspect(Pipeline(), X, iterations=1)
    assert "encoder" in str(info)
    assert "encoder" in info._repr_html_()
