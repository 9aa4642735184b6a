"""TensorRT without a card: specs of engines, what is said when something is missing, and real builds for RTX."""

from __future__ import annotations

import json
import mmap
import re
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from harness import jobs
from hypothesis import given, strategies as st
from torch import nn

import aitune_lab as ait
from aitune_lab.backends import registry
from aitune_lab.backends.export import export_program
from aitune_lab.backends.onnx_file import write_onnx
from aitune_lab.backends.tensorrt import TensorRTBackend, TensorRTConfig, TensorRTRTXBackend, backend, builder, flavor
from aitune_lab.backends.tensorrt.artifact import Description
from aitune_lab.backends.tensorrt.spec import EngineSpec, specs_of
from aitune_lab.capture.signature import DynamicDim
from aitune_lab.checkpoint.holds import verdict
from aitune_lab.cli import main
from aitune_lab.environment import Gpu, fingerprint
from aitune_lab.errors import AituneWarning, BackendUnavailable, BuildError, Refused
from aitune_lab.schema import (
    Candidate,
    Choice,
    Entry,
    Manifest,
    Node,
    Plan,
    Point,
    Rule,
    SavedChoice,
    Signature,
    Symbol,
    TensorLeaf,
    Trial,
)
from aitune_lab.testing.scripted import ScriptedMeter
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

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


HEALTHY = "Builder = object\n__version__ = '10.6.0'\n"


@pytest.fixture
def package(monkeypatch, tmp_path: Path):
    """Makes a package of the name `tensorrt` with the given source, beside a driver that shows a card of the given kind."""

    def make(
        source: str | None = HEALTHY,
        card: str | None = "9.0",
        bindings: bool = False,
        driver: str | None = "580.65",
        visible: str | None = None,
        cuda: str | None = "13.0",
        kernels: str | None = None,
    ):
        if source is not None:
            (tmp_path / f"tensorrt{'_bindings' if bindings else ''}.py").write_text(source)
        folder = tmp_path / "lib"
        if kernels is not None:
            folder.mkdir()
            (folder / kernels).touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(flavor, "gpus", lambda: (Gpu("NVIDIA H200", card, 1 << 37),) if card else ())
        monkeypatch.setattr(flavor, "driver_version", lambda: driver)
        monkeypatch.setattr(flavor, "library_folder", lambda of: folder)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        flavor.load.cache_clear()
        return TensorRTBackend.available()

    yield make
    monkeypatch.undo()
    for name in ("tensorrt", "tensorrt_bindings"):
        sys.modules.pop(name, None)
    flavor.load.cache_clear()


def test_a_fitting_card_with_the_package_is_available(package):
    state = package()
    assert state.ok
    assert state.versions == {"tensorrt": "10.6.0"}
    assert package(kernels="libnvinfer_builder_resource_sm90.so.10.6.0").ok


MISSING = {
    "package": ({"source": None}, "tensorrt is not installed", "pip install tensorrt"),
    "libraries": (
        {"bindings": True},
        "only the bindings of TensorRT are installed (tensorrt_bindings), not its libraries",
        "pip install tensorrt",
    ),
    "library that loads": (
        {"source": "raise ImportError('libnvinfer.so.10: cannot open shared object file')"},
        "a library of TensorRT can't be loaded: libnvinfer.so.10: cannot open shared object file",
        "put the folder of libnvinfer.so in LD_LIBRARY_PATH, or pip install tensorrt",
    ),
    "package that imports": (
        {"source": "raise RuntimeError('placeholder')"},
        "tensorrt fails to import: RuntimeError: placeholder",
        "pip install tensorrt",
    ),
    "more than a placeholder": (
        {"source": "__version__ = '10.6'"},
        "the package tensorrt is a placeholder without TensorRT",
        "pip install tensorrt",
    ),
    "newer version": (
        {"source": "Builder = object\n__version__ = '8.6.1'"},
        "TensorRT must be at least 10.3, but 8.6.1 is installed",
        "pip install --upgrade tensorrt",
    ),
    "driver": ({"card": None, "driver": None}, "no NVIDIA driver or GPU was found", "install the NVIDIA driver"),
    "GPU": ({"card": None}, "the NVIDIA driver finds no GPU", "see what nvidia-smi says"),
    "visible GPU": (
        {"card": None, "visible": ""},
        "CUDA_VISIBLE_DEVICES='' hides every GPU from this process",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "torch for CUDA": (
        {"cuda": None},
        f"torch {torch.__version__} is built without CUDA, which engines take their tensors from",
        "install a build of torch for CUDA",
    ),
    "newer card": (
        {"card": "7.0"},
        "NVIDIA H200 (compute capability 7.0) is too old for TensorRT, which needs 7.5 or newer",
        "use another backend, or TensorRT for RTX (pip install tensorrt-rtx)",
    ),
    "older card": (
        {"card": "12.0"},
        "NVIDIA H200 (compute capability 12.0) is too new for TensorRT 10.6.0: it takes 10.8 or newer",
        "pip install --upgrade tensorrt",
    ),
    "kernels": (
        {"kernels": "libnvinfer_builder_resource_ptx.so.10.15.1"},
        "the builder's kernels for this card (libnvinfer_builder_resource_sm90.so) are missing in",
        "install a full build of TensorRT (its wheel or archive for this card)",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_told_apart_and_doctor_says_what_cures_it(package, capsys, name: str):
    made, reason, cure = MISSING[name]
    state = package(**made)
    assert not state.ok
    assert state.reason.startswith(reason)
    assert state.cure == cure
    assert main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  tensorrt "))
    assert f" missing: {reason}" in line
    assert line.endswith(f". To get it: {cure}")


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (
            "9.0",
            "runs on compute capabilities 8.0, 8.6, 8.9, 12.0, 12.1, and NVIDIA H200 (compute capability 9.0) is none",
        ),
        ("7.5", "NVIDIA H200 (compute capability 7.5) is too old for TensorRT for RTX, which needs 8.0 or newer"),
    ],
)
def test_rtx_names_the_cards_it_runs_on(package, card: str, reason: str):
    pytest.importorskip("tensorrt_rtx")
    package(source=None, card=card)
    state = TensorRTRTXBackend.available()
    assert not state.ok
    assert reason in state.reason
    assert state.cure == "use another backend, or TensorRT (pip install tensorrt)"


def test_the_libraries_folder_is_the_one_they_were_loaded_from(tmp_path: Path):
    of = flavor.FLAVORS["tensorrt"]
    assert flavor.library_folder(of) is None
    library = tmp_path / "libnvinfer.so.10"
    library.write_bytes(bytes(4096))
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert flavor.library_folder(of) == tmp_path


def test_kernels_for_other_cards_only_are_named(tmp_path: Path):
    (tmp_path / "libnvinfer_builder_resource_ptx.so.10.15.1").touch()
    (tmp_path / "libnvinfer_builder_resource_sm86.so.10.15.1").touch()
    of = flavor.FLAVORS["tensorrt"]
    found = flavor.lacking_kernels(of, (9, 0), tmp_path)
    assert found.endswith(f"are missing in {tmp_path}, which holds those for ptx, sm86")
    assert not flavor.lacking_kernels(of, (8, 6), tmp_path)
    (tmp_path / "libnvinfer_builder_resource.so.10.6.0").touch()
    assert not flavor.lacking_kernels(of, (9, 0), tmp_path)


# --- where engines hold

CUDA = TensorLeaf("x", "float32", (2, 3), "cuda:0")
ELSEWHERE = {
    "nothing": ({}, {}, ""),
    "another torch, C library and CPU": (
        {},
        {"torch": "2.13.0", "platform": "Linux, glibc 2.39", "cpu_flags": ()},
        "",
    ),
    "another system": ({}, {"platform": "Windows 11"}, "it was built for system Windows 11, here is Linux"),
    "another version": ({}, {"version": "10.5.0"}, "it was built for tensorrt 10.5.0, here is 10.6.0"),
    "another card": ({}, {"capabilities": ("8.6",)}, "it was built for compute capability 8.6, here is 9.0"),
    "compatible hardware": ({"hardware_compatible": True}, {"capabilities": ("8.6",)}, ""),
    "compatible versions": ({"version_compatible": True}, {"version": "10.5.0"}, "10.5.0, here is 10.6.0"),
    "with host code": ({"version_compatible": True, "host_code": True}, {"version": "10.5.0"}, ""),
    "of a later version": ({"version_compatible": True, "host_code": True}, {"version": "10.7.0"}, "here is 10.6.0"),
    "of another major one": ({"version_compatible": True, "host_code": True}, {"version": "9.3.0"}, "here is 10.6.0"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_engines_hold_where_their_options_say(package, name: str):
    options, there, obstacle = ELSEWHERE[name]
    assert package().ok
    candidate = TensorRTBackend(**options).candidate()
    at = Signature("forward", Node("leaf"), (CUDA,))
    trial = Trial("t", "", at.key, candidate, "ok", versions={"tensorrt": there.get("version", "10.6.0")})
    saved = SavedChoice(Choice("", "forward", at.key, candidate, "t", ""), at, trial, artifact=("engine.plan",))
    here = replace(
        fingerprint(),
        gpus=("NVIDIA H200",),
        compute_capabilities=("9.0",),
        platform="Linux, glibc 2.35",
        torch="2.11.0",
    )
    built = replace(
        here,
        torch=there.get("torch", here.torch),
        platform=there.get("platform", here.platform),
        cpu_flags=there.get("cpu_flags", ("amx_tile",)),
        compute_capabilities=there.get("capabilities", ("9.0",)),
    )
    entries = (Entry("engine.plan", 1, "", code=True),)
    found = verdict(saved, Manifest(1, "", "", "", built, Plan(), (), (saved,), entries), here, trusted=True)
    assert found.code
    assert (obstacle in found.obstacle) if obstacle else not found.obstacle
    assert found.rebuildable


def test_hardware_compatible_engines_need_a_card_of_their_kind():
    ties = TensorRTBackend(hardware_compatible=True).ties()
    assert ties.gpu_holds("9.0", "8.0")
    assert not ties.gpu_holds("9.0", "7.5")
    assert not TensorRTBackend().ties().gpu_holds("9.0", "8.0")
    assert TensorRTRTXBackend().ties().gpu_holds("", "12.0")  # built where no card was


@pytest.mark.parametrize(
    ("options", "version", "capability", "reason"),
    [
        ({}, "10.6.0", "9.0", ""),
        ({}, "10.6.0", "", ""),
        ({}, "10.7.0", "9.0", "built by TensorRT 10.6.0, and 10.7.0 is here, which doesn't load them"),
        ({}, "10.6.0", "8.9", "built for compute capability 9.0, and this card has 8.9"),
        ({"hardware_compatible": True}, "10.6.0", "8.9", ""),
        (
            {"hardware_compatible": True},
            "10.6.0",
            "7.5",
            "built for compute capability 8.0 or newer, and this card has 7.5",
        ),
    ],
)
def test_a_description_says_where_its_engines_are_foreign(tmp_path, options, version, capability, reason):
    Description("10.6.0", "NVIDIA H200", "9.0", "torch.export", (EngineSpec("static"),)).write(tmp_path)
    said = Description.read(tmp_path).foreign("TensorRT", version, capability, TensorRTBackend(**options).ties())
    assert said.endswith(reason) if reason else not said


def test_on_the_cpu_it_proposes_nothing():
    leaf = TensorLeaf("x", "float32", (2, 3), "cpu")
    assert TensorRTBackend().candidates(Signature("forward", Node("leaf"), (leaf,)), nn.Linear(3, 3)) == []


def test_float32_has_its_tf32_as_a_candidate_of_its_own():
    labels = [c.label for c in TensorRTBackend().candidates(signature(B), nn.Linear(3, 3))]
    assert labels == ["tensorrt", "tensorrt[tf32]"]
    assert [c.label for c in TensorRTBackend().candidates(signature(B), nn.Linear(3, 3).half())] == ["tensorrt"]


def test_the_docs_tell_every_option_and_its_default():
    page = (Path(__file__).parents[2] / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    page = page.partition("## Options")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    for field in fields(TensorRTConfig):
        told = rows[field.name]
        assert told.strip("`") == str(field.default) if field.default is not None else told[0] != "`"


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
        with pytest.raises(BuildError, match=r"engines\.json of the engines is damaged"):
            TensorRTRTXBackend().load(replace(job, folder=tmp_path))


# --- building, with a stand-in for what runs the engines


class StandIn:
    """Takes the place of an engine, which no machine without a card loads."""

    made: ClassVar[list[StandIn]] = []
    answer = staticmethod(lambda *tensors: [torch.zeros(())])
    memory_bytes = 1

    def __init__(self, trt, plan, spec, signature, device, *, scratch, host_code):
        assert len(plan) > 1000
        self.spec, self.host_code = spec, host_code
        self.made.append(self)

    def __call__(self, tensors):
        return self.answer(*tensors)

    def close(self):
        return None


@pytest.fixture
def card(monkeypatch):
    """A card that TensorRT for RTX builds for, as far as can be seen without running an engine."""
    monkeypatch.setattr(flavor, "gpus", lambda: (Gpu("NVIDIA RTX 5090", "12.0", 1 << 35),))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(backend, "_device", lambda signature: torch.device("cuda", 0))
    monkeypatch.setattr(backend, "Engine", StandIn)
    monkeypatch.setattr(backend, "Scratch", lambda device: SimpleNamespace(size_bytes=0))
    monkeypatch.setattr(StandIn, "made", [])


def built(module, items, folder, **options):
    (job,) = jobs(module.eval(), items, TensorRTRTXBackend(**options), folder)
    return job, TensorRTRTXBackend(**options).build(job)


def files(job) -> list[str]:
    return sorted(file.name for file in job.folder.iterdir())


def test_what_a_build_leaves(card, tmp_path: Path):
    items = [torch.randn(b, 6) for b in (1, 3)]
    job, executable = built(nn.Linear(6, 4), items, tmp_path / "a", static_engines=1)
    assert files(job) == ["dynamic.plan", "engines.json", "static-b1.plan"]
    described = Description.read(job.folder)
    assert (described.version, described.card, described.exporter) == (rtx.__version__, "", "torch.export")
    assert [spec.name for spec in described.engines] == ["static-b1", "dynamic"]
    assert executable.notes[0] == "dynamic: b"
    assert executable.notes[-1].startswith("engines: static-b1 (")
    kept, _ = built(nn.Linear(6, 4), items[:1], tmp_path / "b", keep_onnx=True)
    assert files(kept) == ["engines.json", "model.onnx", "static.plan"]
    assert not any(engine.host_code for engine in StandIn.made)


def test_a_plan_without_host_code_is_the_default(card, tmp_path: Path):
    for options, expected in (({"version_compatible": True}, False), ({"host_code": True}, False)):
        built(nn.Linear(6, 4), [torch.randn(2, 6)], tmp_path / str(options), **options)
        assert StandIn.made[-1].host_code is expected


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 6), requires_grad=False)

    def forward(self, x):
        return torch.cdist(x, self.centres)


class Median(nn.Module):
    def forward(self, x):
        return x.median(-1).values


def test_what_one_exporter_can_not_convert_is_traced_by_the_other(card, tmp_path: Path):
    job, executable = built(Distances(), [torch.randn(b, 6) for b in (1, 3)], tmp_path, keep_onnx=True)
    assert executable.notes[0].startswith(
        "traced by torch's older exporter, because: DispatchError: No ONNX function found for <OpOverload(op='aten._cdist"
    )
    assert Description.read(job.folder).exporter == "torch.jit.trace"
    assert files(job) == ["dynamic.plan", "engines.json", "model.onnx", "static-b1.plan", "static-b3.plan"]


def test_a_file_that_the_parser_refuses_is_traced_as_well(card, tmp_path: Path, monkeypatch):
    real = backend.write_onnx

    def damaged(program, path, **options):
        real(program, path, **options)
        path.write_bytes(b"no onnx")

    monkeypatch.setattr(backend, "write_onnx", damaged)
    _, executable = built(nn.Linear(6, 4), [torch.randn(2, 6)], tmp_path)
    assert "because: TensorRT's ONNX parser can't take" in executable.notes[0]


def test_when_both_fail_both_are_named(card, tmp_path: Path, monkeypatch):
    with pytest.raises(Refused, match=r"^DispatchError: .*aten.median.*; with torch's older exporter: .*aten::median"):
        built(Median(), [torch.randn(2, 6)], tmp_path / "a")
    assert not list(tmp_path.rglob("model.onnx*"))
    with pytest.raises(Refused, match=r"_cdist_forward.*; with torch's older exporter: a trace holds for the size b"):
        (job,) = jobs(
            Distances().eval(),
            [torch.randn(2, 6)],
            TensorRTRTXBackend(),
            tmp_path / "b",
            declared={"x": {0: DynamicDim("b", 1, 2, 4)}},
        )
        TensorRTRTXBackend().build(job)
    monkeypatch.setattr(backend, "can_trace", lambda: False)
    with pytest.raises(Exception, match="Failed to convert the exported program"):
        built(Median(), [torch.randn(2, 6)], tmp_path / "c")


def test_what_no_graph_keeps_is_not_traced(card, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(backend, "write_traced", lambda *_: pytest.fail("traced"))
    (job,) = jobs(nn.Linear(6, 4).eval(), [torch.randn(2, 6)], TensorRTRTXBackend(), tmp_path, facts={"random": True})
    with pytest.raises(Refused, match="random numbers"):
        TensorRTRTXBackend().build(job)
    monkeypatch.setattr(backend, "write_onnx", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        built(nn.Linear(6, 4), [torch.randn(2, 6)], tmp_path / "full")


# --- `.ait`


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()


def saved(path: Path, **options) -> str:
    """Tunes a module on engines of RTX, saves it, and gives the file's digest."""
    reference = small()
    StandIn.answer = staticmethod(lambda *tensors: [reference(*tensors)])
    net, candidate = small(), Candidate("tensorrt_rtx", tuple(sorted(options.items())))
    plan = Plan(rules=(Rule("", "pin", candidate=candidate),))
    limits = TuneOptions(meter=ScriptedMeter(), end_to_end=False, isolation="off")
    with torch.no_grad():
        run(make_tuner(net, [torch.randn(2, 6)], plan, limits))
        net(torch.randn(2, 6))
    assert ait.stats(net).dispatched == 1
    return ait.save(net, path)


def no_export(monkeypatch) -> None:
    for name in ("export_program", "write_traced"):
        monkeypatch.setattr(backend, name, lambda *_: pytest.fail("exported"))


def test_engines_of_another_version_stay_eager_or_are_built_from_the_file_beside_them(card, tmp_path, monkeypatch):
    path = tmp_path / "kept.ait"
    saved(path, keep_onnx=True)
    entries = {Path(entry.name).name: entry.code for entry in ait.show(path).manifest.entries}
    assert entries == {"engines.json": True, "model.onnx": True, "static.plan": True, "golden.safetensors": False}
    assert [c.status for c in ait.load(small(), path).choices] == ["loaded"]
    version = rtx.__version__
    monkeypatch.setattr(rtx, "__version__", "9.9.9")
    no_export(monkeypatch)
    told = f"it was built for tensorrt_rtx {version}, here is 9.9.9"
    assert told in str(ait.check(path))
    with pytest.warns(AituneWarning, match=told):
        assert ait.load(small(), path).loaded == ()
    net = small()
    (choice,) = ait.load(net, path, on_mismatch="rebuild").choices
    assert choice.status == "rebuilt"
    assert choice.notes[0] == "built from the ONNX file that was kept"
    assert f"built again: {told}" in choice.notes
    with torch.no_grad():
        torch.testing.assert_close(net(torch.ones(2, 6)), small()(torch.ones(2, 6)))
    assert ait.stats(net).dispatched == 1


def test_without_that_file_the_module_is_exported_again(card, tmp_path, monkeypatch):
    path = tmp_path / "bare.ait"
    saved(path)
    assert not any(entry.name.endswith(".onnx") for entry in ait.show(path).manifest.entries)
    monkeypatch.setattr(rtx, "__version__", "9.9.9")
    (choice,) = ait.load(small(), path, on_mismatch="rebuild").choices
    assert choice.status == "rebuilt"
    assert not any("kept" in note for note in choice.notes)


def test_engines_that_turn_out_foreign_while_loading_are_built_again(card, tmp_path, monkeypatch):
    path = tmp_path / "kept.ait"
    saved(path, keep_onnx=True)
    monkeypatch.setattr(backend, "card_of", lambda device: ("NVIDIA RTX 2080", "7.5"))
    with pytest.warns(AituneWarning, match=r"built for compute capability 8.0 or newer, and this card has 7.5"):
        assert ait.load(small(), path).loaded == ()
    monkeypatch.setattr(backend, "card_of", lambda device: ("NVIDIA RTX 4090", "8.9"))
    (choice,) = ait.load(small(), path).choices
    assert choice.status == "loaded"


def test_code_in_a_file_that_is_not_trusted_is_not_built_from(card, tmp_path, monkeypatch):
    path = tmp_path / "kept.ait"
    saved(path, keep_onnx=True)
    monkeypatch.setenv("AITUNE_LAB_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(rtx, "__version__", "9.9.9")
    StandIn.made.clear()
    with pytest.warns(AituneWarning, match="it can run code, and this file is not trusted here"):
        ait.load(small(), path, on_mismatch="rebuild")
    assert StandIn.made == []
