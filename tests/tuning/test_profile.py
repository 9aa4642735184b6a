"""Where the time goes: which regions there are, that their times add up, and that the target is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.capture.swap import swapped
from aitune_lab.errors import AituneError
from aitune_lab.runtime.installed import installed_in, release_originals
from aitune_lab.testing.models import AutoEncoder, CountsCalls, Mlp, Pair
from aitune_lab.testing.scripted import install_scripted, scripted_backend
from aitune_lab.tuning.profile import Profile


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    with scripted_backend():
        yield


class Pipe:
    """Python around two modules."""

    def __init__(self) -> None:
        self.encoder = Pair().eval()
        self.head = Mlp().eval()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.encoder(x)) + self.head(x), -1)


def kinds(profile: Profile) -> dict[str, str]:
    return {region.path: region.kind for region in profile.regions}


def test_tuned_untuned_and_outside() -> None:
    pipe, x = Pipe(), torch.randn(2, 4)
    install_scripted(pipe.encoder.first, x, path="encoder.first")
    before = installed_in(pipe)
    profile = ait.profile(pipe, [x, torch.randn(2, 4)], passes=2)
    assert kinds(profile) == {
        "encoder": "around",
        "encoder.first": "tuned",
        "encoder.second": "untuned",
        "head": "untuned",
        "(outside of modules)": "outside",
    }
    regions = {region.path: region for region in profile.regions}
    assert regions["encoder.first"].candidates == ("scripted",)
    assert regions["head"].calls == 4
    assert regions["encoder"].calls == 2
    assert profile.tuned is not None
    assert all(region.tuned is not None for region in profile.regions)
    assert installed_in(pipe) == before
    assert not swapped(pipe.head)
    # The target is called once more for each pass, and what is installed answers in the tuned ones only.
    assert ait.stats(pipe).dispatched == 2 * (1 + 2 + 1)
    assert not profile.notes


def test_times_of_a_single_pass_add_up() -> None:
    pipe = Pipe()
    profile = ait.profile(pipe, [torch.randn(2, 4)], passes=1, kernels=False)
    assert sum(region.eager.ms for region in profile.regions) == pytest.approx(profile.eager.ms)
    assert sum(region.eager_share for region in profile.regions) == pytest.approx(1.0)
    assert profile.tuned is None
    assert profile.speedup is None
    assert all(region.tuned is None and region.speedup is None for region in profile.regions)
    assert not profile.kernels


def test_kernels_by_region() -> None:
    pipe, x = Pipe(), torch.randn(2, 4)
    install_scripted(pipe.head, x, path="head")
    profile = ait.profile(pipe, [x], passes=1)
    found = {(k.region, k.run, k.name): k for k in profile.kernels}
    assert found["head", "eager", "aten::addmm"].calls == 4
    assert found["head", "tuned", "aten::addmm"].calls == 4
    assert found["encoder", "eager", "aten::addmm"].calls == 4
    assert found["(outside of modules)", "eager", "aten::_softmax"].calls == 1
    assert all(k.device_ms is None for k in profile.kernels)
    head = next(region for region in profile.regions if region.path == "head")
    assert {k.name for k in profile.kernels_of(head, "tuned")} >= {"aten::addmm", "aten::relu"}


def test_an_untuned_module_is_looked_into_and_named_ones_are_set_apart() -> None:
    model, x = nn.Sequential(Pair(), Mlp()).eval(), torch.randn(2, 4)
    assert kinds(ait.profile(model, [x], passes=1, kernels=False)) == {
        "": "around",
        "0": "untuned",
        "1": "untuned",
        "(outside of modules)": "outside",
    }
    apart = kinds(ait.profile(model, [x], modules=["0.first"], passes=1, kernels=False))
    assert {path for path, kind in apart.items() if kind == "untuned"} == {"0.first", "0.second", "1"}
    install_scripted(model[0], x, path="0")
    tuned = kinds(ait.profile(model, [x], modules=["0.first"], passes=1, kernels=False))
    assert tuned["0"] == "tuned"
    assert "0.first" not in tuned


def test_methods_other_than_forward() -> None:
    model, x = AutoEncoder().eval(), torch.randn(2, 4)
    install_scripted(model, x, method="encode", path="encode")

    def both(x: torch.Tensor) -> torch.Tensor:
        return model.decode(model.encode(x))

    profile = ait.profile(model, [x], inference_function=both, passes=1, kernels=False)
    assert kinds(profile)["encode"] == "tuned"
    assert next(region.calls for region in profile.regions if region.path == "encode") == 1


def test_calls_that_ran_the_original_are_told() -> None:
    model = Mlp().eval()
    install_scripted(model, torch.randn(2, 4))
    with pytest.warns(ait.AituneWarning, match="fits no tuned signature"):
        profile = ait.profile(model, [torch.randn(2, 4), torch.randn(5, 4)], passes=2, kernels=False)
    assert profile.notes == ("(model): 1 call a pass ran the original; aitune_lab.stats(target) says why",)


def test_state_and_random_state_are_put_back() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = CountsCalls()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.counts(x) + torch.randn_like(x)

    model = Both().eval()
    state = torch.get_rng_state()
    ait.profile(model, [torch.randn(2, 4, generator=torch.Generator())], passes=1)
    assert int(model.counts.steps) == 0
    assert model.counts.seen == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failing_target_is_left_as_it_was() -> None:
    pipe, x = Pipe(), torch.randn(2, 4)
    install_scripted(pipe.head, x, path="head")
    before = installed_in(pipe)

    def fails(x: torch.Tensor) -> Any:
        pipe.head(x)
        raise ValueError("it fails")

    with pytest.raises(AituneError, match="it fails"):
        ait.profile(pipe, [x], inference_function=fails)
    assert installed_in(pipe) == before
    with torch.inference_mode():
        pipe(x)
    assert not swapped(pipe.encoder)


@pytest.mark.parametrize("originals", ["cpu", "drop"])
def test_weights_kept_elsewhere(originals: Any) -> None:
    pipe, x = Pipe(), torch.randn(2, 4)
    install_scripted(pipe.head, x, path="head", weights="baked")
    assert not release_originals(pipe, installed_in(pipe), originals)
    if originals == "cpu":
        assert kinds(ait.profile(pipe, [x], passes=1, kernels=False))["head"] == "tuned"
        return
    before = installed_in(pipe)
    with pytest.raises(AituneError, match="can't run untuned: its weights were dropped"):
        ait.profile(pipe, [x])
    with pytest.raises(AituneError, match="can't run untuned: its weights were dropped"):
        ait.whatif.measure(pipe, [x], {"encoder": "scripted"})
    assert installed_in(pipe) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [({"passes": 0}, "passes >= 1 must hold"), ({"modules": ["nowhere"]}, r"but got \['nowhere'\]")],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AituneError, match=words):
        ait.profile(Mlp().eval(), [torch.randn(2, 4)], **options)
    with pytest.raises(AituneError, match=r"no torch\.nn\.Module"):
        ait.profile(len, [torch.randn(2, 4)])


def test_how_it_shows_itself() -> None:
    pipe, x = Pipe(), torch.randn(2, 4)
    install_scripted(pipe.head, x, path="head")
    profile = ait.profile(pipe, [x], passes=2)
    text, page = str(profile), profile._repr_html_()
    for shown in (text, page):
        assert "Where the time goes" in shown
        assert "tuned, scripted" in shown
        assert "aten::addmm" in shown
    assert "median of 2 passes" in text
    frame = profile.to_dataframe()
    assert set(frame["path"]) == {region.path for region in profile.regions}
    assert (frame["eager_low_ms"] <= frame["eager_ms"]).all()
    assert len(profile.kernels_frame()) == len(profile.kernels)
