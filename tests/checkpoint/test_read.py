from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from aitune_lab.checkpoint import check, load, save, selftest
from aitune_lab.errors import AituneWarning, CheckpointError, TargetError
from aitune_lab.measure.blocks import MeasureLimits
from aitune_lab.runtime.installed import installed_in, stats
from aitune_lab.schema import Candidate


@pytest.fixture
def saved(lab: SimpleNamespace, tmp_path: Path) -> Path:
    """A file with two data choices, and the log of backends emptied."""
    save(lab.tuned_net(), tmp_path / "tuned.ait")
    lab.log.__init__()
    return tmp_path / "tuned.ait"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this is another machine: its own store, which has saved nothing."""
    monkeypatch.setenv("AITUNE_LAB_CACHE_DIR", str(tmp_path / "elsewhere"))


def answers(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(x)  # type: ignore[no-any-return]


def untouched(net: nn.Module) -> bool:
    return not installed_in(net) and not any("forward" in vars(module) for module in net.modules())


def test_round_trip(lab: SimpleNamespace, saved: Path) -> None:
    net, plain = lab.make(), lab.make()
    report = load(net, saved)
    assert [(c.path, c.candidate, c.status) for c in report.choices] == [
        ("encoder", "data", "loaded"),
        ("head", "data", "loaded"),
    ]
    assert lab.log.loaded == ["encoder", "head"]
    assert lab.log.built == []
    for batch in (1, 2, 4):
        torch.testing.assert_close(answers(net, lab.inputs(batch)), answers(plain, lab.inputs(batch)))
    assert stats(net).dispatched == 6
    assert "2 of 2 tuned signatures in use" in str(report)
    assert report.trusted_by == "saved on this machine"


def test_a_loaded_target_can_be_untuned_and_saved_again(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    net = lab.make()
    load(net, saved)
    save(net, tmp_path / "again.ait")
    other = lab.make()
    assert len(load(other, tmp_path / "again.ait").loaded) == 2
    folders = [entry.job.folder for item in installed_in(net) for entry in item.entries]
    assert all(folder.is_dir() for folder in folders)
    lab.untune(net)
    assert untouched(net)
    assert not any(folder.exists() for folder in folders)
    assert sorted(lab.log.closed) == ["encoder", "head"]


def test_a_module_held_under_another_name(lab: SimpleNamespace, tmp_path: Path) -> None:
    pipe = SimpleNamespace(models={"net": lab.make()})
    x = lab.inputs(2)
    lab.tune(pipe, {"models.net.head": Candidate("data")}, lambda: pipe.models["net"](x))
    save(pipe, tmp_path / "x.ait")
    fresh = SimpleNamespace(models={"net": lab.make()})
    assert load(fresh, tmp_path / "x.ait").loaded[0].path == "models.net.head"
    with pytest.raises(
        CheckpointError, match=r"modules 'models.net.head', which this Net has not; it has '', 'encoder'"
    ):
        load(lab.make(), tmp_path / "x.ait")


def test_loading_onto_a_tuned_target_is_refused(lab: SimpleNamespace, saved: Path) -> None:
    net = lab.make()
    load(net, saved)
    with pytest.raises(TargetError, match=r"tuned already: call aitune_lab.unwrap\(target\)"):
        load(net, saved)
    assert len(installed_in(net)) == 2


# --- another model ------------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(4, 2)


class OtherLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda net: setattr(net, "encoder", OtherLinear(3, 4)),
            "'encoder' .*class is .*OtherLinear, but was .*Linear",
        ),
        (
            lambda net: setattr(net, "encoder", nn.Linear(3, 5)),
            r"'encoder' .*bias is float32\[5\], but was float32\[4\]",
        ),
        (lambda net: net.encoder.half(), r"bias is float16\[4\], but was float32\[4\]"),
        (lambda net: setattr(net, "encoder", nn.Linear(3, 4, bias=False)), "'encoder' .*it lacks bias"),
        (lambda net: net.encoder.register_buffer("scale", torch.ones(1)), "it has scale, which the saved one had not"),
        (lambda net: nn.init.zeros_(net.head.weight), "'head' .*weights have other values"),
        (lambda net: delattr(net, "head"), "'head', which this Net has not"),
    ],
)
def test_another_model_is_an_error_and_left_alone(change: Any, message: str, lab: SimpleNamespace, saved: Path) -> None:
    net = lab.make()
    change(net)
    with pytest.raises(CheckpointError, match=message):
        load(net, saved)
    assert untouched(net)
    assert lab.log.loaded == []


def test_executables_on_live_weights_take_other_values(lab: SimpleNamespace, tmp_path: Path) -> None:
    save(lab.tuned_net("rebuilt", "rebuilt"), tmp_path / "x.ait")
    net = lab.make()
    nn.init.zeros_(net.head.bias)
    expected = answers(net, lab.inputs(3))
    assert len(load(net, tmp_path / "x.ait").loaded) == 2
    torch.testing.assert_close(answers(net, lab.inputs(3)), expected)


def test_target_without_modules(saved: Path) -> None:
    with pytest.raises(TargetError, match=r"holds no torch modules"):
        load(object(), saved)


def test_weights_that_have_no_values(lab: SimpleNamespace, saved: Path) -> None:
    with torch.device("meta"):
        net = lab.Net().eval()
    with pytest.raises(CheckpointError, match=r"meta device"):
        load(net, saved)


class Configured(nn.Module):
    def __init__(self, act: nn.Module, scale: Any = 1.0, eps: float = 1e-5, heads: int = 2, stride: int = 1) -> None:
        super().__init__()
        self.act, self.scale, self.sizes = act, scale, (scale, 2)
        self.folder, self.calls = f"/home/{id(self)}", 0
        self.norm = nn.LayerNorm(4, eps=eps)
        self.attention = nn.MultiheadAttention(4, heads, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.act(self.norm(self.conv(y.mT).mT)) * self.scale


def configured_file(lab: SimpleNamespace, path: Path, backend: str = "rebuilt") -> Path:
    net = lab.make(Configured, act=nn.ReLU())
    lab.tune(net, {"": Candidate(backend)}, lambda: net(torch.ones(2, 5, 4)))
    save(net, path)
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act": nn.GELU()}, r"submodule 'act' is a .*:GELU, but was a .*:ReLU"),
        ({"act": nn.ReLU(inplace=True)}, r"submodule 'act' has inplace=True, but had inplace=False"),
        ({"act": nn.Sequential()}, r"submodule 'act' is a .*:Sequential"),
        ({"eps": 1.0}, r"submodule 'norm' has eps=1.0, but had eps=1e-05"),
        ({"heads": 4}, r"submodule 'attention' has head_dim=1, but had head_dim=2"),
        ({"stride": 2}, r"submodule 'conv' has stride=\(2,\), but had stride=\(1,\)|stride=\(2\), but"),
        ({"scale": 9.0}, r"it has scale=9.0, but had scale=1.0"),
    ],
)
def test_equal_weights_of_another_model(options: Any, message: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    path = configured_file(lab, tmp_path / "x.ait")
    net = lab.make(Configured, **{"act": nn.ReLU(), **options})
    with pytest.raises(CheckpointError, match=message):
        load(net, path)
    assert untouched(net)


def test_what_calls_and_machines_change_is_no_other_model(lab: SimpleNamespace, tmp_path: Path) -> None:
    path = configured_file(lab, tmp_path / "x.ait")
    net = lab.make(Configured, act=nn.ReLU())
    net.calls, net.note, net.act.cached = 77, None, 5
    assert len(load(net, path).loaded) == 1


def hooked(net: nn.Module) -> None:
    net.parts[0].register_forward_hook(lambda module, args, out: out * 10)


def replaced(net: nn.Module) -> None:
    net.parts[0].forward = lambda x: x * 7


def replaced_itself(net: nn.Module) -> None:
    net.forward = lambda x: x * 7


def put_back(net: nn.Module) -> None:
    net.forward, net.parts[0].forward = net.forward, net.parts[0].forward
    net.register_forward_hook(lambda module, args, out: None)


class Outer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.parts = nn.Sequential(nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](super().forward(x))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, r"submodule 'parts.0' has forward hooks here"),
        (replaced, r"submodule 'parts.0' has a forward of its own here"),
        (replaced_itself, r"the module has a forward of its own here"),
        (put_back, None),
    ],
)
def test_code_put_into_the_target(change: Any, reason: str | None, lab: SimpleNamespace, tmp_path: Path) -> None:
    net, x = lab.make(Outer), lab.inputs(2)
    lab.tune(net, {"": Candidate("data")}, lambda: net(x))
    save(net, tmp_path / "x.ait")
    fresh = lab.make(Outer)
    change(fresh)
    expected = answers(fresh, x)
    if reason is None:
        assert len(load(fresh, tmp_path / "x.ait").loaded) == 1
    else:
        with pytest.warns(AituneWarning, match=reason):
            assert load(fresh, tmp_path / "x.ait", self_test=False).loaded == ()
        with pytest.raises(CheckpointError, match=reason):
            load(fresh, tmp_path / "x.ait", on_mismatch="error")
    torch.testing.assert_close(answers(fresh, x), expected)


# --- all at once or not at all ------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, by this test only."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def test_nothing_is_half_loaded(lab: SimpleNamespace, saved: Path, scratch: Path, tmp_path: Path) -> None:
    head = next(e for e in check_entries(saved) if e.startswith("modules/head") and e.endswith("weights.safetensors"))
    lab.rewrite(saved, tmp_path / "bad.ait", content={head: b"x" * sizes(saved)[head]})
    net = lab.make()
    with pytest.raises(CheckpointError, match=r"damaged.*modules/head.*hash"):
        load(net, tmp_path / "bad.ait")
    assert lab.log.loaded == ["encoder"]
    assert lab.log.closed == ["encoder"]
    assert untouched(net)
    assert not list(scratch.iterdir())


def test_an_interrupt_leaves_the_target_as_it_was(
    lab: SimpleNamespace, saved: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    net = lab.make()
    for place in ("prepare", "install_all"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"aitune_lab.checkpoint.read.{place}", interrupted)
            load(net, saved)
        assert untouched(net)
    from aitune_lab.runtime.installed import install_all

    def late(prepared: Any) -> None:
        install_all(prepared)
        raise KeyboardInterrupt

    monkeypatch.setattr("aitune_lab.checkpoint.read.install_all", late)
    with pytest.raises(KeyboardInterrupt):
        load(net, saved)
    assert untouched(net)
    assert sorted(lab.log.closed) == ["encoder"] * 3 + ["head"] * 3
    assert not list(scratch.iterdir())


def check_entries(path: Path) -> list[str]:
    from aitune_lab.checkpoint import show

    return [entry.name for entry in show(path).manifest.entries]


def sizes(path: Path) -> dict[str, int]:
    from aitune_lab.checkpoint import show

    return {entry.name: entry.size_bytes for entry in show(path).manifest.entries}


# --- trust --------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_code(lab: SimpleNamespace, tmp_path: Path) -> tuple[Path, str]:
    digest = save(lab.tuned_net(encoder="code"), tmp_path / "code.ait")
    lab.log.__init__()
    return tmp_path / "code.ait", digest


def test_code_saved_here_is_trusted_here(lab: SimpleNamespace, with_code: tuple[Path, str]) -> None:
    assert len(load(lab.make(), with_code[0]).loaded) == 2


def test_untrusted_code_stays_eager(lab: SimpleNamespace, with_code: tuple[Path, str], elsewhere: None) -> None:
    path, digest = with_code
    net = lab.make()
    with pytest.warns(AituneWarning, match=rf"1 of 2 tuned signatures.*encoder.*can run code.*trust='{digest}'"):
        report = load(net, path)
    assert [c.status for c in report.choices] == ["eager", "loaded"]
    assert lab.log.loaded == ["head"]
    assert not any("encoder" in item.path for item in installed_in(net))
    other = lab.make()
    with pytest.raises(CheckpointError, match=r"code for encoder .*not trusted"):
        load(other, path, on_untrusted="error")
    assert untouched(other)


def test_a_digest_given_is_trust(lab: SimpleNamespace, with_code: tuple[Path, str], elsewhere: None) -> None:
    path, digest = with_code
    report = load(lab.make(), path, trust=digest.upper().replace("SHA256", "sha256"))
    assert (len(report.loaded), report.trusted_by) == (2, "the digest given")
    net = lab.make()
    with pytest.raises(CheckpointError, match=rf"not the file you trust: its digest is {digest}"):
        load(net, path, trust=f"sha256:{'0' * 64}")
    with pytest.raises(CheckpointError, match=r"64 hex digits"):
        load(net, path, trust="sha256:12")
    assert untouched(net)


def test_a_file_that_calls_its_code_data_needs_trust_all_the_same(
    lab: SimpleNamespace, with_code: tuple[Path, str], elsewhere: None, tmp_path: Path
) -> None:
    def deny(data: dict[str, Any]) -> None:
        for entry in data["entries"]:
            entry["code"] = False

    lab.rewrite(with_code[0], tmp_path / "lie.ait", manifest=deny)
    with pytest.warns(AituneWarning, match=r"can run code"):
        load(lab.make(), tmp_path / "lie.ait")
    assert lab.log.loaded == ["head"]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key, as PEM files."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_a_signature_is_trust(
    lab: SimpleNamespace, keys: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = keys
    path = tmp_path / "signed.ait"
    save(lab.tuned_net(encoder="code"), path, sign=private)
    save(lab.tuned_net(encoder="code"), tmp_path / "unsigned.ait")
    monkeypatch.setenv("AITUNE_LAB_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert load(lab.make(), path, trust=str(public)).trusted_by == "a signature by the key given"
    assert len(load(lab.make(), path, trust=public.read_text()).loaded) == 2
    lab.rewrite(path, tmp_path / "changed.ait", manifest=lambda data: data["notes"].append("harmless"))
    with pytest.raises(CheckpointError, match=r"not signed by the key given"):
        load(lab.make(), tmp_path / "changed.ait", trust=str(public))
    with pytest.raises(CheckpointError, match=r"is not signed"):
        load(lab.make(), tmp_path / "unsigned.ait", trust=str(public))
    with pytest.raises(CheckpointError, match=r"trust must be 'sha256:…' or an Ed25519 public key"):
        load(lab.make(), path, trust="whatever")
    with pytest.raises(CheckpointError, match=r"cannot read the private key"):
        save(lab.tuned_net(), path, sign=public)


# --- what doesn't hold here ---------------------------------------------------------------------------------------


def test_code_built_for_other_versions(
    lab: SimpleNamespace, with_code: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.CodeBackend, "version", "2.0")
    with pytest.warns(AituneWarning, match=r"it was built for code 1.0, here is 2.0"):
        report = load(lab.make(), with_code[0])
    assert [c.status for c in report.choices] == ["eager", "loaded"]
    with pytest.raises(CheckpointError, match=r"code for encoder .*does not hold here: it was built for code 1.0"):
        load(lab.make(), with_code[0], on_mismatch=r"error")
    report = load(lab.make(), with_code[0], on_mismatch=r"rebuild")
    assert [c.status for c in report.choices] == ["rebuilt", "loaded"]
    assert lab.log.built == ["encoder"]
    assert not check(with_code[0]).holds


def test_code_built_for_another_cpu(
    lab: SimpleNamespace, with_code: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aitune_lab.environment import fingerprint

    here = replace(fingerprint(), machine="riscv64", cpu_flags=())
    monkeypatch.setattr("aitune_lab.checkpoint.read.fingerprint", lambda: here)
    with pytest.warns(
        AituneWarning, match=r"built for machine .*, here is riscv64; a CPU with .*, which this one lacks"
    ):
        assert [c.status for c in load(lab.make(), with_code[0]).choices] == ["eager", "loaded"]


def test_data_of_other_versions_must_prove_its_numbers(
    lab: SimpleNamespace, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(lab.tuned_net(), tmp_path / "bare.ait", golden="none")
    monkeypatch.setattr(lab.DataBackend, "version", "2.0")
    report = load(lab.make(), saved)
    assert len(report.loaded) == 2
    assert "measured with data 1.0, here is 2.0; its numbers are right on the golden samples" in str(report)
    with pytest.warns(AituneWarning, match=r"data 1.0, here is 2.0, and no golden samples"):
        assert load(lab.make(), tmp_path / "bare.ait").loaded == ()
    assert [c.status for c in load(lab.make(), tmp_path / "bare.ait", on_mismatch=r"rebuild").choices] == [
        "rebuilt"
    ] * 2
    assert check(saved).holds
    assert "in doubt" not in str(check(saved))


def test_a_backend_that_is_missing(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def rename(data: dict[str, Any]) -> None:
        data["choices"][0]["choice"]["candidate"]["backend"] = "antigravity"

    lab.rewrite(saved, tmp_path / "x.ait", manifest=rename)
    with pytest.warns(AituneWarning, match=r"backend 'antigravity' is not installed here"):
        report = load(lab.make(), tmp_path / "x.ait")
    assert [c.status for c in report.choices] == ["eager", "loaded"]
    assert "antigravity" not in sys.modules


def test_a_backend_that_fails_to_load(lab: SimpleNamespace, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.DataBackend, "fails", True)
    with pytest.warns(AituneWarning, match=r"fails to load: RuntimeError: no such kernel"):
        assert load(lab.make(), saved).loaded == ()
    net = lab.make()
    with pytest.raises(CheckpointError, match=r"no such kernel"):
        load(net, saved, on_mismatch=r"error")
    assert untouched(net)
    report = load(lab.make(), saved, on_mismatch=r"rebuild")
    assert [c.status for c in report.choices] == ["rebuilt", "rebuilt"]


def test_options_that_the_backend_does_not_have(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def option(data: dict[str, Any]) -> None:
        data["choices"][0]["choice"]["candidate"]["options"] = [["library", "/tmp/evil.so"]]

    lab.rewrite(saved, tmp_path / "x.ait", manifest=option)
    with pytest.warns(AituneWarning, match=r"options of backend 'data' must be among \['offset'\]"):
        load(lab.make(), tmp_path / "x.ait")


def test_another_device(lab: SimpleNamespace, saved: Path) -> None:
    assert len(load(lab.make(), saved, device="cpu").loaded) == 2
    with pytest.warns(AituneWarning, match=r"tuned on cpu, and cannot run on cuda"):
        assert load(lab.make(), saved, device="cuda").loaded == ()


def test_training_mode_is_noted(lab: SimpleNamespace, saved: Path) -> None:
    assert "in training mode" in str(load(lab.make().train(), saved))


# --- rebuilding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", ["synthetic", "recorded", "none"])
def test_rebuilt_at_every_point_with_progress(golden: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    save(lab.tuned_net("rebuilt", "data"), tmp_path / "x.ait", golden=golden)
    lab.log.__init__()
    said: list[str] = []
    net, plain = lab.make(), lab.make()
    report = load(net, tmp_path / "x.ait", progress=lambda text, _: said.append(text))
    assert [c.status for c in report.choices] == ["rebuilt", "loaded"]
    assert sorted(lab.log.points[0]) == ["b=1", "b=4"]
    assert [text for text in said if "comparing" not in text] == ["encoder: rebuilt: building", "head: data: loading"]
    assert ("head: data: comparing golden samples" in said) == (golden != "none")
    torch.testing.assert_close(answers(net, lab.inputs(2)), answers(plain, lab.inputs(2)))


def test_rebuilt_at_the_first_call(lab: SimpleNamespace, tmp_path: Path) -> None:
    save(lab.tuned_net("rebuilt", "data"), tmp_path / "x.ait")
    lab.log.__init__()
    net, plain = lab.make(), lab.make()
    report = load(net, tmp_path / "x.ait", compile="first_call")
    assert [c.status for c in report.choices] == ["deferred", "loaded"]
    assert lab.log.built == []
    torch.testing.assert_close(answers(net, lab.inputs(2)), answers(plain, lab.inputs(2)))
    answers(net, lab.inputs(2))
    assert lab.log.built == ["encoder"]
    lab.untune(net)
    assert sorted(lab.log.closed) == ["encoder", "head"]


def test_a_first_call_that_cannot_build_runs_the_original(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(lab.tuned_net("rebuilt", "data"), tmp_path / "x.ait")
    net, plain = lab.make(), lab.make()
    load(net, tmp_path / "x.ait", compile="first_call")
    monkeypatch.setattr("aitune_lab.checkpoint.rebuild.structured", lambda *_: 1 / 0)
    with pytest.warns(AituneWarning, match=r"cannot be built here, the original runs"):
        result = answers(net, lab.inputs(2))
    torch.testing.assert_close(result, answers(plain, lab.inputs(2)))


@pytest.mark.parametrize("option", ["on_untrusted", "on_mismatch", "compile", "self_test"])
def test_bad_options(option: str, lab: SimpleNamespace, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{option} must be one of .* but got 'maybe'"):
        load(lab.make(), saved, **{option: "maybe"})


# --- self-test ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency is measured, but not for long."""
    limits = MeasureLimits(min_blocks=1, max_blocks=1, block_ms=0.1, warmup_seconds=0.01)
    monkeypatch.setattr("aitune_lab.checkpoint.read.measured", partial(selftest.measured, limits=limits))


def test_self_test_reports_numbers_and_latency(lab: SimpleNamespace, saved: Path, quick: None) -> None:
    report = load(lab.make(), saved, self_test="full")
    assert [(t.path, t.point) for t in report.tests] == [
        ("encoder", "b=1"), ("encoder", "b=4"), ("head", "b=1"), ("head", "b=4")
    ]  # fmt: skip
    for test in report.tests:
        assert test.numbers.error_class == "exact"
        assert test.eager_then.error_class == "exact"
        assert test.latency is not None
        assert test.speedup == pytest.approx(test.eager.median_ms / test.latency.median_ms)
        assert f"at {test.point}: exact" in str(report)


def test_numbers_alone_are_tested_by_default(
    lab: SimpleNamespace, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitune_lab.checkpoint.read.measured", lambda *_: pytest.fail("latency was measured"))
    for options in ({}, {"self_test": True}):
        report = load(lab.make(), saved, **options)
        assert [(t.numbers.error_class, t.latency) for t in report.tests] == [("exact", None)] * 4
    assert load(lab.make(), saved, self_test=False).tests == ()
    report = load(lab.make().train(), saved)
    assert report.tests == ()
    assert "not tested: the module is in training mode" in str(report)


def test_wrong_numbers_stay_eager(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def off(data: dict[str, Any]) -> None:
        data["choices"][1]["choice"]["candidate"]["options"] = [["offset", 0.5]]

    lab.rewrite(saved, tmp_path / "x.ait", manifest=off)
    net, plain = lab.make(), lab.make()
    with pytest.warns(AituneWarning, match=r"its numbers are wrong here at b="):
        report = load(net, tmp_path / "x.ait")
    assert [c.status for c in report.choices] == ["loaded", "eager"]
    torch.testing.assert_close(answers(net, lab.inputs(2)), answers(plain, lab.inputs(2)))
    with pytest.raises(CheckpointError, match=r"its numbers are wrong here"):
        load(lab.make(), tmp_path / "x.ait", on_mismatch="error")


def test_self_test_without_samples_says_so(lab: SimpleNamespace, tmp_path: Path) -> None:
    save(lab.tuned_net(), tmp_path / "x.ait", golden="none")
    assert "not tested: the file has no golden samples" in str(load(lab.make(), tmp_path / "x.ait"))


# --- real backends ------------------------------------------------------------------------------------------------

FRESH = """
import sys, torch
from torch import nn
import aitune_lab as ait
from aitune_lab.runtime.installed import stats
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
x = torch.linspace(-1, 1, 18).reshape(3, 6)
with torch.no_grad():
    before = net(x)
    print(ait.load(net, sys.argv[1], self_test=False))
    after = net(x)
torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)
assert stats(net).dispatched == 1, stats(net)
assert not {"pickle5", "onnx", "pandas"} & set(sys.modules)
"""


def test_onnxruntime_in_a_fresh_process(lab: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    lab.tune(net, {"": Candidate("onnxruntime")}, lambda: [net(torch.randn(2, 6)), net(torch.randn(5, 6))])
    path = tmp_path / "tuned.ait"
    save(net, path)
    done = subprocess.run([sys.executable, "-W", "error", "-c", FRESH, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime loaded" in done.stdout


@pytest.mark.full
def test_inductor_is_compiled_again_at_load(lab: SimpleNamespace, tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    fresh = copy.deepcopy(net)
    calls = [torch.randn(1, 6), torch.randn(5, 6)]
    lab.tune(net, {"": Candidate("inductor", (("freezing", True),))}, lambda: [net(x) for x in calls])
    save(net, tmp_path / "tuned.ait")
    report = load(fresh, tmp_path / "tuned.ait")
    assert report.choices[0].status == "rebuilt"
    for x in calls:
        torch.testing.assert_close(answers(fresh, x), answers(net, x))
    assert stats(fresh).dispatched == 2


def test_check_of_a_sound_file(saved: Path) -> None:
    report = check(saved)
    assert report.holds
    assert report.trusted
    assert report.entries == 6
    assert "all undamaged" in str(report)
    assert "head data: holds" in str(report)
