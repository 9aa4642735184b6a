"""transformers' generate() and a diffusers pipeline: the same answers, with executables really dispatched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aitune_lab as ait

sys.path.insert(0, str(Path(__file__).parent))

from case_run import instant
from pipelines import llama, stable_diffusion

from aitune_lab.schema import Plan
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.strategies import OneBackendStrategy

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def tune(target: Any, data: Any, backend: str, **options: Any) -> Any:
    plan = Plan(strategy=OneBackendStrategy(backend).config())
    return run(make_tuner(target, data, plan, TuneOptions(meter=instant, **options)))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("backend", ["onnxruntime", "inductor"])
def test_generate_is_equal_token_for_token(backend: str, cache: str | None) -> None:
    pytest.importorskip("transformers")
    model = llama()
    prompts = [torch.randint(1, 256, (b, 8)) for b in (1, 2)]
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    data = [{"inputs": p, "attention_mask": torch.ones_like(p), **options} for p in prompts]
    with torch.no_grad():
        expected = [model.generate(**item) for item in data]
    result = tune(model, data, backend, inference_function=model.generate)
    with torch.inference_mode():
        actual = [model.generate(**item) for item in data]
    assert all(map(torch.equal, expected, actual))
    assert ait.stats(model).dispatched > 0, str(result)
    labels = {s.signature for s in ait.stats(model).signatures if s.path == ""}
    if labels:
        assert any("[b, 8]" in x or "[1, 8]" in x for x in labels), "prefill is a signature of its own"
        assert any("[b, 1]" in x or "[1, 1]" in x for x in labels), "decode is a signature of its own"


def test_a_diffusion_pipeline_in_ten_lines(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pipe = stable_diffusion(tmp_path)
    options = {"num_inference_steps": 3, "height": 32, "width": 32, "output_type": "np"}
    before = pipe("a cat", generator=torch.Generator().manual_seed(0), **options).images

    data = [{"prompt": "a cat", "generator": torch.Generator(), **options}]
    info = ait.inspect(pipe, data)
    info.describe()
    modules = info.get_modules()
    pipe = ait.wrap(pipe, modules, strategy=ait.OneBackendStrategy("onnxruntime"))
    result = ait.tune(pipe, data, progress=False)
    ait.save(pipe, tmp_path / "pipe.ait")

    assert {m.path for m in modules} == {"unet", "vae.decode", "text_encoder"}
    after = pipe("a cat", generator=torch.Generator().manual_seed(0), **options).images
    assert np.abs(before - after).max() < 1e-4
    dispatched = {s.path for s in ait.stats(pipe).signatures if s.dispatched}
    assert {"unet", "text_encoder"} <= dispatched, str(result)

    fresh = stable_diffusion(tmp_path)
    report = ait.load(fresh, tmp_path / "pipe.ait")
    loaded = fresh("a cat", generator=torch.Generator().manual_seed(0), **options).images
    assert np.abs(before - loaded).max() < 1e-4
    assert ait.stats(fresh).dispatched, str(report)
