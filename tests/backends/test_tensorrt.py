"""TensorRT without a card: specs of engines, what is said when something is missing, and real builds for RTX."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import jobs
from hypothesis import given, strategies as st
from torch import nn

from aitune_lab.backends import registry
from aitune_lab.backends.export import export_program
from aitune_lab.backends.onnx_file import write_onnx
from aitune_lab.backends.tensorrt import TensorRTBackend, TensorRTConfig, TensorRTRTXBackend, backend, builder, flavor
from aitune_lab.backends.tensorrt.spec import EngineSpec, specs_of
from aitune_lab.environment import Gpu
from aitune_lab.errors import BackendUnavailable, BuildError, Refused
from aitune_lab.schema import Node, Point, Signature, Symbol, TensorLeaf

B = Symbol("b", 1, 4, 16)


def signature(*symbols: Symbol, dims=("b", 3)) -> Signature:
    return Signature("forward", Node("dict", "", ("x",)), (TensorLeaf("x", "float32", dims, "cuda:0"),), symbols)


# --- which engines


def test_a_static_signature_has_one_engine():
    assert specs_of(signature(dims=(2, 3)), [Point()], static=4, dynamic=True) == [EngineSpec("static")]


def test_recorded_points_are_static_and_the_rest_dynamic():
    points = [Point((("b", 1),)), Point((("b", 4),)), Point((("b", 1),))]
    specs = specs_of(signature(B), points, static=4, dynamic=True)
    assert [(s.name, s.static) for s in specs] == [("static-b1", True), ("static-b4", True), ("dynamic", False)]
    assert specs[-1].ranges == {"b": (1, 4, 16)}
    assert specs[-1].shapes(signature(B).tensor_leaves[0]) == ((1, 3), (4, 3), (16, 3))


def test_static_engines_are_bounded_and_a_dynamic_one_can_be_left_out():
    points = [Point((("b", i),)) for i in range(1, 9)]
    assert len(specs_of(signature(B), points, static=2, dynamic=True)) == 3
    assert len(specs_of(signature(B), points, static=2, dynamic=False)) == 2


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8), st.lists(st.integers(1, 24), max_size=6))
def test_every_size_in_range_has_an_engine(low: int, more: int, most: int, sizes: list[int]):
    symbol = Symbol("b", low, low + more, low + more + most)
    points = [Point((("b", n),)) for n in sizes if symbol.min <= n <= symbol.max]
    specs = specs_of(signature(symbol), points, static=3, dynamic=True)
    for size in range(symbol.min, symbol.max + 1):
        assert any(spec.serves({"b": size}) for spec in specs)
    assert all(low <= usual <= high for spec in specs for low, usual, high in spec.ranges.values())


# --- what is missing


def test_without_the_package_it_says_how_to_get_it():
    state = TensorRTBackend.available()
    assert not state.ok
    assert state.reason == "tensorrt is not installed"
    assert state.cure == "pip install tensorrt"
    with pytest.raises(BackendUnavailable, match=r"TensorRT cannot be used: tensorrt is not installed. pip install"):
        flavor.require(TensorRTBackend.flavor)


@pytest.fixture
def package(monkeypatch, tmp_path: Path):
    """Makes a package of the name `tensorrt` with the given source; CUDA's driver shows a card of the given kind."""

    def make(
        source: str = "Builder = object\n__version__ = '10.6.0'\n", card: str | None = "9.0", bindings: bool = False
    ):
        name = "tensorrt_bindings" if bindings else "tensorrt"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(flavor, "gpus", lambda: (Gpu("NVIDIA H200", card, 1 << 37),) if card else ())
        flavor.load.cache_clear()
        return TensorRTBackend.available()

    yield make
    monkeypatch.undo()
    for name in ("tensorrt", "tensorrt_bindings"):
        __import__("sys").modules.pop(name, None)
    flavor.load.cache_clear()


def test_a_fitting_card_with_the_package_is_available(package):
    state = package()
    assert state.ok
    assert state.versions == {"tensorrt": "10.6.0"}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"bindings": True}, "only the bindings of TensorRT are installed"),
        (
            {"source": "raise ImportError('libnvinfer.so.10: cannot open shared object file')"},
            "can't be loaded: libnvinfer",
        ),
        ({"source": "raise RuntimeError('placeholder')"}, "fails to import: RuntimeError: placeholder"),
        ({"source": "__version__ = '10.6'"}, "is a placeholder"),
        ({"source": "Builder = object\n__version__ = '8.6.1'"}, "must be at least 10.3, but 8.6.1"),
        ({"card": None}, "no NVIDIA driver or GPU was found"),
        ({"card": "7.0"}, "NVIDIA H200 (compute capability 7.0) is too old for TensorRT, which needs 7.5"),
    ],
)
def test_what_is_missing_is_told_apart(package, made: dict, reason: str):
    state = package(**made)
    assert not state.ok
    assert reason in state.reason
    assert state.cure


def test_kernels_for_other_cards_only_are_named(tmp_path: Path):
    (tmp_path / "libnvinfer_builder_resource_ptx.so.10.15.1").touch()
    (tmp_path / "libnvinfer_builder_resource_sm86.so.10.15.1").touch()
    of = flavor.FLAVORS["tensorrt"]
    assert "libnvinfer_builder_resource_sm90.so) are missing" in flavor.lacking_kernels(of, (9, 0), tmp_path)
    assert not flavor.lacking_kernels(of, (8, 6), tmp_path)
    (tmp_path / "libnvinfer_builder_resource.so.10.6.0").touch()
    assert not flavor.lacking_kernels(of, (9, 0), tmp_path)


def test_rtx_names_the_cards_it_runs_on():
    rtx = flavor.FLAVORS["rtx"]
    assert "is none of them" in flavor.why_unfit(rtx, (9, 0), "NVIDIA H200")
    assert not flavor.why_unfit(rtx, (12, 0), "NVIDIA RTX 5090")


def test_on_the_cpu_it_proposes_nothing():
    leaf = TensorLeaf("x", "float32", (2, 3), "cpu")
    assert TensorRTBackend().candidates(Signature("forward", Node("leaf"), (leaf,)), nn.Linear(3, 3)) == []


def test_float32_has_its_tf32_as_a_candidate_of_its_own():
    labels = [c.label for c in TensorRTBackend().candidates(signature(B), nn.Linear(3, 3))]
    assert labels == ["tensorrt", "tensorrt[tf32]"]
    assert [c.label for c in TensorRTBackend().candidates(signature(B), nn.Linear(3, 3).half())] == ["tensorrt"]


# --- real builds, for RTX cards, on any machine


rtx = pytest.importorskip("tensorrt_rtx")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().mean((2, 3))) * scale


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("net")
    items = [(torch.randn(b, 3, 16, 16), torch.ones(())) for b in (1, 2, 8)]
    (job,) = jobs(Net().eval(), items, TensorRTRTXBackend(), folder)
    program, _ = export_program(job)
    write_onnx(program, folder / "model.onnx", fold_integers=True)
    return job, folder / "model.onnx"


class WithoutBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_parameters_of_a_convolution_stand_in_the_file(tmp_path, dtype):
    import onnx

    items = [torch.randn(2, 3, 8, 8, dtype=dtype)]
    (job,) = jobs(WithoutBias().eval().to(dtype), items, TensorRTRTXBackend(), tmp_path)
    program, _ = export_program(job)
    write_onnx(program, tmp_path / "model.onnx", fold_integers=True)
    graph = onnx.load(tmp_path / "model.onnx").graph
    held = {value.name for value in graph.initializer}
    (conv,) = [node for node in graph.node if node.op_type == "Conv"]
    assert held.issuperset(conv.input[1:])  # a builder fuses only what it knows
    assert [node.op_type for node in graph.node if node.op_type in ("Expand", "Add")] == ["Add"]  # `+ 1e-9` stays


def quiet(phase: str, fraction: float | None) -> None:
    return None


def test_static_and_dynamic_engines_build(exported):
    job, path = exported
    specs = specs_of(job.signature, [s.point for s in job.samples], static=1, dynamic=True)
    assert [spec.name for spec in specs] == ["static-b1", "dynamic"]
    phases: list[str] = []
    for spec in specs:
        plan = builder.build_plan(
            rtx, path, job.signature, spec, TensorRTConfig(), progress=lambda phase, fraction: phases.append(phase)
        )
        assert len(plan) > 1000


@pytest.mark.parametrize("options", [{"tf32": True}, {"optimization_level": 1, "workspace_bytes": 1 << 24}], ids=str)
def test_options_build(exported, options: dict):
    job, path = exported
    config = TensorRTConfig(**options)
    assert builder.build_plan(rtx, path, job.signature, EngineSpec("dynamic", {"b": (1, 2, 8)}), config, progress=quiet)


def test_what_progress_raises_cancels_the_build(exported):
    job, path = exported

    class Cancelled(BaseException):
        pass

    def cancel(phase: str, fraction: float | None) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        builder.build_plan(
            rtx, path, job.signature, EngineSpec("dynamic", {"b": (1, 2, 8)}), TensorRTConfig(), progress=cancel
        )


def test_builds_share_a_builder_until_a_run_ends(exported, tmp_path: Path, monkeypatch):
    job, path = exported
    made = []
    builder.release_builders()
    original = rtx.Builder
    monkeypatch.setattr(rtx, "Builder", lambda logger: made.append(1) or original(logger))
    damaged = tmp_path / "model.onnx"
    damaged.write_bytes(b"no onnx")
    for file in (path, damaged, path):
        with nullcontext() if file is path else pytest.raises(Refused, match="ONNX parser can't take"):
            assert builder.build_plan(
                rtx, file, job.signature, EngineSpec("dynamic", {"b": (1, 2, 8)}), TensorRTConfig(), progress=quiet
            )
    assert len(made) == 1
    registry.of(TensorRTRTXBackend().candidate())
    registry.release()
    builder.build_plan(
        rtx, path, job.signature, EngineSpec("dynamic", {"b": (1, 2, 8)}), TensorRTConfig(), progress=quiet
    )
    assert len(made) == 2


def test_a_damaged_file_is_refused_with_the_parsers_words(exported, tmp_path: Path):
    job, _ = exported
    damaged = tmp_path / "model.onnx"
    damaged.write_bytes(b"no onnx")
    with pytest.raises(Refused, match="ONNX parser can't take"):
        builder.build_plan(rtx, damaged, job.signature, EngineSpec("static"), TensorRTConfig(), progress=quiet)


def test_ranges_that_contradict_themselves_are_refused(exported):
    job, path = exported
    with pytest.raises((Refused, BuildError, ValueError)):
        builder.build_plan(
            rtx, path, job.signature, EngineSpec("dynamic", {"b": (8, 2, 1)}), TensorRTConfig(), progress=quiet
        )


def test_a_build_without_a_card_says_so_and_leaves_no_model(exported):
    job, _ = exported
    with pytest.raises((Refused, BackendUnavailable)):
        TensorRTRTXBackend().build(job)


def test_kept_layers_must_exist(exported):
    job, _ = exported
    with pytest.raises(Refused, match="matches no submodule"):
        backend._keeping_float32(job, "head.nothing")
    with pytest.raises(Refused, match="must be a regular expression"):
        backend._keeping_float32(job, "(")


def test_kept_layers_are_those_of_a_copy(exported):
    job, _ = exported
    kept = backend._keeping_float32(job, "head")
    assert kept.module is not job.module
    assert "forward" not in vars(job.module.head)
    assert torch.equal(
        kept.module(*[torch.ones(2, 3, 16, 16), torch.ones(())]), job.module(torch.ones(2, 3, 16, 16), torch.ones(()))
    )


def test_damaged_engine_lists_are_refused(exported, tmp_path: Path, monkeypatch):
    job, _ = exported
    monkeypatch.setattr(backend, "require", lambda of: SimpleNamespace(__version__="1"))
    for text in ("", "[]", json.dumps({"engines": [{"name": 1}]})):
        (tmp_path / "engines.json").write_text(text)
        with pytest.raises((BuildError, Refused)):
            TensorRTRTXBackend().load(backend.replace(job, folder=tmp_path))
