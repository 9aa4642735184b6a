"""Tunes models of the usual sizes on a GPU and shows what every candidate gives, beside graphs captured by hand.

    python benchmarks/gpu.py                                   # all models that fit into eight minutes
    python benchmarks/gpu.py --model bert vit --json gpu.json
    python benchmarks/gpu.py --model resnet50 --candidates "eager[cuda graph]" "inductor[cuda graph]" inductor
    python benchmarks/gpu.py --store kept                      # may be stopped and started again
    python benchmarks/gpu.py --model resnet50 --rebuild        # builds again from timings of kernels alone
    python benchmarks/gpu.py --dry-run                         # tiny models on the CPU; says what would be tried

Models come from configs with random weights (transformers; the UNet needs diffusers), in half precision. For each are shown:
eager, every candidate, the best of two graphs captured by hand without this package (of the module as it is, and of
`torch.compile(module)`), a bare TensorRT engine in a graph (`bare_tensorrt.py`; built after ours with the timings of kernels
that ours left, so that it doesn't take minutes again), and the tuned module itself, all timed in alternation; its error class
and how many times eager's own error it is off; build seconds; the pick when only exact candidates are admitted; and the share
of the roofline, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import bare_tensorrt
import torch
from torch import nn

import aitune_lab as ait
from aitune_lab.backends.tensorrt import TensorRTBackend
from aitune_lab.measure.benchmark import measure
from aitune_lab.measure.blocks import Contender, MeasureLimits
from aitune_lab.schema import Candidate
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.candidates import candidate_of_label
from aitune_lab.tuning.tuner import TuneOptions

SECONDS = 480.0
BY_HAND = "by hand: TensorRT, graph"
OURS_BARE = "our engine without aitune_lab, graph"
"""Shows what the dispatch costs; it is built by aitune_lab, so says nothing about how good the engine is."""
LIMITS = MeasureLimits(min_blocks=12, max_blocks=30, block_ms=10.0, max_seconds=4.0, warmup_seconds=0.5)


@dataclass
class Model:
    """A module with the arguments of a call, and its precision on the GPU."""

    module: nn.Module
    args: tuple[torch.Tensor, ...]
    dtype: torch.dtype = torch.float16
    channels_last: bool = False

    def on(self, device: str) -> Model:
        """The model on a device, in its own precision there, in float32 on the CPU."""
        dtype = self.dtype if device != "cpu" else torch.float32
        module: Any = self.module.eval().requires_grad_(False).to(device, dtype)
        args = [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self.args]
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)
            args = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in args]
        return Model(module, tuple(args), dtype, self.channels_last)


def resnet50(batch: int, tiny: bool) -> Model:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = (
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]) if tiny else ResNetConfig(num_labels=1000)
    )
    side = 32 if tiny else 224
    return Model(ResNetForImageClassification(config), (torch.randn(batch, 3, side, side),), channels_last=True)


def vit(batch: int, tiny: bool) -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=32, **small) if tiny else ViTConfig(num_labels=1000)
    return Model(ViTForImageClassification(config), (torch.randn(batch, 3, config.image_size, config.image_size),))


def bert(batch: int, tiny: bool) -> Model:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**small) if tiny else BertConfig()
    ids = torch.randint(0, config.vocab_size, (batch, 128))
    return Model(BertModel(config, add_pooling_layer=False), (ids, torch.ones_like(ids)))


def unet(batch: int, tiny: bool) -> Model:
    from diffusers import UNet2DConditionModel

    small = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32, "norm_num_groups": 8}
    small |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8}
    small |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    module = UNet2DConditionModel(**small) if tiny else UNet2DConditionModel(cross_attention_dim=768)
    side, width = (16, 32) if tiny else (64, 768)
    args = (torch.randn(batch, 4, side, side), torch.full((batch,), 500), torch.randn(batch, 77, width))
    return Model(module, args, channels_last=True)


def whisper(batch: int, tiny: bool) -> Model:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    large = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    small = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    config = WhisperConfig(num_mel_bins=128, **(small if tiny else large))
    return Model(WhisperEncoder(config), (torch.randn(batch, 128, 3000),), torch.bfloat16)


MODELS: dict[str, Callable[[bool], Model]] = {
    "resnet50": lambda tiny: resnet50(1, tiny),
    "bert": lambda tiny: bert(1, tiny),
    "vit": lambda tiny: vit(1, tiny),
    "resnet50-b64": lambda tiny: resnet50(2 if tiny else 64, tiny),
    "unet": lambda tiny: unet(2, tiny),
    "whisper": lambda tiny: whisper(1, tiny),
}


def graph_by_hand(function: Callable[..., Any], args: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call that copies the arguments into a captured graph and replays it: what one writes without this package."""
    statics = [t.clone() for t in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*statics)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*statics)

    def call() -> Any:
        for static, given in zip(statics, args, strict=True):
            static.copy_(given)
        graph.replay()
        return output

    return call


@dataclass(frozen=True)
class Ceilings:
    """What the device really reaches: FLOP/s of a large half-precision matrix product, bytes/s of a large copy."""

    flops: float
    bytes: float

    @classmethod
    def measured(cls) -> Ceilings:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        source = torch.empty(1 << 30, device="cuda", dtype=torch.float32).normal_()
        product = _seconds(lambda: a @ a)
        copying = _seconds(source.clone)
        return cls(2 * 8192**3 / product, 2 * source.numel() * 4 / copying)

    def floor_ms(self, model: Model) -> float:
        """No version of the model runs much faster: its operations and its weights, inputs and outputs, at full rate."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.module(*model.args)
        tensors = [*model.module.parameters(), *model.module.buffers(), *model.args]
        moved = sum(t.numel() * t.element_size() for t in tensors)
        return 1000 * max(counter.get_total_flops() / self.flops, moved / self.bytes)


def _seconds(function: Callable[[], Any]) -> float:
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e4


def tune(
    model: Model,
    candidates: Sequence[Candidate] | None,
    seconds: float,
    store: Path | None,
    dry_run: bool = False,
    accuracy: Literal["budget", "exact"] = "budget",
) -> Any:
    plan = ait.Plan(limits=ait.Limits(max_seconds=seconds), tolerance=ait.Tolerance(accuracy=accuracy))
    options = TuneOptions(
        backends=tuple(candidates) if candidates else None,
        measure_limits=LIMITS,
        end_to_end=False,
        dry_run=dry_run,
        store=store,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ait.AituneWarning)
        return run(make_tuner(model.module, [model.args], plan, options))


def rebuilt(name: str, store: Path, seconds: float) -> dict[str, Any]:
    """TensorRT's build of a model where nothing is kept of an earlier one but its timings of kernels."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / "store"
        (fresh / "shared").mkdir(mode=0o700, parents=True)
        fresh.chmod(0o700)
        for cache in (store / "shared").glob("*.timing"):
            shutil.copy(cache, fresh / "shared" / cache.name)
        torch.manual_seed(0)
        model = MODELS[name](False).on("cuda")
        (trial,) = [
            t
            for t in tune(model, [Candidate("tensorrt", cuda_graph=True)], seconds, fresh).trials.values()
            if t.candidate.backend == "tensorrt"
        ]
        ait.unwrap(model.module)
        return {"build_s": trial.build_seconds, "notes": list(trial.notes), "reason": trial.reason}


def bench(
    name: str,
    candidates: Sequence[Candidate] | None,
    seconds: float,
    store: Path,
    ceilings: Ceilings,
    *,
    compiled: bool = True,
    build_by_hand: bool = True,
    rebuild: bool = False,
) -> dict[str, Any]:
    """Tune one model and time it against graphs captured by hand; gives a row for each."""
    torch.manual_seed(0)
    model = MODELS[name](False).on("cuda")
    module, args = model.module, model.args
    floor = ceilings.floor_ms(model)
    hand: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    plain = torch.compile(module.forward)
    functions = {"eager": module.forward, **({"torch.compile": plain} if compiled else {})}
    with torch.inference_mode():
        for label, function in functions.items():
            try:
                hand[f"by hand: {label}, graph"] = graph_by_hand(function, args)
            except Exception as error:
                reasons[f"by hand: {label}, graph"] = str(error).partition("\n")[0]
    original = module.forward
    result = tune(model, candidates, seconds, store)
    choice = result.choices[0]
    if TensorRTBackend.available().ok and not (candidates and all(c.backend != "tensorrt" for c in candidates)):
        try:
            hand[OURS_BARE] = bare_tensorrt.graph(newest_plan(store), args)
        except Exception as error:
            reasons[OURS_BARE] = str(error).partition("\n")[0]
        if build_by_hand:
            try:
                hand[BY_HAND], said = bare_engine(name, args, store)
                print(f"{name}: bare engine {said}; the timings of ours were there to use", flush=True)
            except Exception as error:
                reasons[BY_HAND] = str(error).partition("\n")[0]
    rows = []
    for trial in result.trials.values():
        latency = trial.points[0].latency if trial.points else None
        rows.append(
            {
                "candidate": trial.candidate.label,
                "latency_ms": latency.median_ms if latency else None,
                "speedup": trial.points[0].speedup if trial.points else None,
                "error_class": trial.error_class,
                "times_eager_error": trial.factor_over_eager,
                "relative_l2": trial.relative_l2,
                "build_s": trial.build_seconds,
                "reason": trial.reason,
                "notes": list(trial.notes),
            }
        )
    with torch.inference_mode():
        contenders = [Contender("eager", [lambda: original(*args)]), Contender("tuned", [lambda: module(*args)])]
        if compiled:
            contenders.append(Contender("torch.compile", [lambda: plain(*args)]))
        contenders += [Contender(label, [call]) for label, call in hand.items()]
        timing = measure(contenders, device="cuda", limits=LIMITS)
    final = {label: m.median_ms for label, m in timing.measurements.items()}
    best = min((ms for label, ms in final.items() if label.startswith("by hand")), default=None)
    bare, ours_bare = final.get(BY_HAND), final.get(OURS_BARE)
    ait.unwrap(module)
    exact = tune(model, candidates, seconds, store, accuracy="exact")
    ait.unwrap(module)
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "pick": choice.candidate.label,
        "why": choice.reason,
        "pick_exact": exact.choices[0].candidate.label,
        "builds": [result.counts.builds, exact.counts.builds],
        "rebuilt": rebuilt(name, store, seconds) if rebuild else None,
        "candidates": rows,
        "final_ms": final,
        "by_hand_failed": reasons,
        "disturbed": {label: m.disturbed for label, m in timing.measurements.items() if m.disturbed},
        "tuned_over_best_by_hand": final["tuned"] / best if best else None,
        "tuned_over_bare_engine": final["tuned"] / bare if bare else None,
        "tuned_over_ours_bare": final["tuned"] / ours_bare if ours_bare else None,
        "torch_compile_over_tuned": final["torch.compile"] / final["tuned"] if compiled else None,
        "roofline_ms": floor,
        "share_of_roofline": floor / final["tuned"],
    }


def newest_plan(store: Path) -> Path:
    """The engine for one shape that was kept last. Raises FileNotFoundError if there is none."""
    plans = sorted(store.rglob("static*.plan"), key=lambda path: path.stat().st_mtime)
    if not plans:
        raise FileNotFoundError("the store holds no engine")
    return plans[-1]


def bare_engine(name: str, args: Sequence[torch.Tensor], store: Path) -> tuple[Callable[[], Any], str]:
    """A bare engine in a graph, and what its build said. Timings of its kernels stay in the store for the next run."""
    timings = store / f"by-hand-{name}.timings"
    if not timings.exists():
        for cache in (store / "shared").glob("*.timing"):
            shutil.copy(cache, timings)
    with tempfile.TemporaryDirectory() as scratch:
        plan, said = bare_tensorrt.build_aside(name, Path(scratch), timings)
        return bare_tensorrt.graph(plan, args), said


def show(row: dict[str, Any], seconds: float) -> None:
    print(f"\n## {row['model']} ({row['dtype']}), {seconds:.0f} s. Pick: {row['pick']}. {row['why']}")
    print(f"{'candidate':44} {'ms':>9} {'×':>6} {'class':>14} {'× eager err':>11} {'build s':>8}")
    for c in row["candidates"]:
        figures = [c["latency_ms"], c["speedup"], c["error_class"], c["times_eager_error"], c["build_s"]]
        ms, speedup, kind, factor, build = figures
        print(
            f"{c['candidate']:44} {_number(ms, 4):>9} {_number(speedup, 2):>6} {kind or '':>14} "
            f"{_number(factor, 2):>11} {_number(build, 1):>8}  {c['reason'][:90]}"
        )
    for label, ms in row["final_ms"].items():
        print(f"{'final: ' + label:44} {ms:9.4f}")
    for c in row["candidates"]:
        if c["candidate"].startswith("tensorrt"):
            print(f"{c['candidate']}: {'; '.join(c['notes'])}")
    print(f"with accuracy='exact': {row['pick_exact']}; builds {row['builds'][0]}, then {row['builds'][1]}")
    if row["rebuilt"]:
        again = row["rebuilt"]
        print(
            f"built again with timings only: {_number(again['build_s'], 1)} s; {'; '.join(again['notes'])} {again['reason']}"
        )
    for label, reason in row["by_hand_failed"].items():
        print(f"{label:44} failed: {reason[:120]}")
    print(
        f"tuned / best by hand {_number(row['tuned_over_best_by_hand'], 3)}, tuned / bare engine by hand "
        f"{_number(row['tuned_over_bare_engine'], 3)}, tuned / {OURS_BARE} "
        f"{_number(row['tuned_over_ours_bare'], 3)}, torch.compile / tuned "
        f"{_number(row['torch_compile_over_tuned'], 2)}, roofline {row['roofline_ms']:.4f} ms, share "
        f"{100 * row['share_of_roofline']:.0f} % {row['disturbed'] or ''}",
        flush=True,
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def dry_run(names: Sequence[str], candidates: Sequence[Candidate] | None) -> None:
    """Tiny versions on the CPU: shows that the models build and run, and what would be tried."""
    for name in names:
        try:
            model = MODELS[name](True).on("cpu")
        except ImportError as error:
            print(f"{name:14} skipped: {error}")
            continue
        result = tune(model, candidates, SECONDS, None, dry_run=True)
        started = next(e for e in result.events if e.kind == "run_started")
        print(f"{name:14} {started.data['planned'][0]['candidates']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--candidates", nargs="+", type=candidate_of_label, help="labels; default: all that can run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the whole run; further models are left out")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    parser.add_argument("--store", type=Path, help="keep trials in this folder; a further run goes on from there")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-build-by-hand", action="store_true", help="time our engine bare, and build none by hand")
    parser.add_argument("--rebuild", action="store_true", help="build TensorRT's engines again from timings alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU, nothing measured")
    options = parser.parse_args()
    if options.dry_run:
        dry_run(options.model, options.candidates)
        return 0
    if not torch.cuda.is_available():
        print("this needs an NVIDIA GPU that torch can use; --dry-run needs none", file=sys.stderr)
        return 1
    start, rows = time.perf_counter(), []
    store = options.store or Path(tempfile.mkdtemp(prefix="aitune-lab-benchmark-"))
    ceilings = Ceilings.measured()
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "aitune_lab": ait.__version__,
        "tflops": ceilings.flops / 1e12,
        "copy_tb_per_s": ceilings.bytes / 1e12,
    }
    print(environment)
    for number, name in enumerate(options.model):
        left = options.seconds - (time.perf_counter() - start)
        share = left / (len(options.model) - number)
        if left < 30:
            print(f"{name}: left out, {options.seconds:.0f} s are over")
            continue
        began = time.perf_counter()
        try:
            row = bench(
                name,
                options.candidates,
                0.8 * share,
                store,
                ceilings,
                compiled=not options.no_compile,
                build_by_hand=not options.no_build_by_hand,
                rebuild=options.rebuild,
            )
        except ImportError as error:
            print(f"{name}: left out: {error}")
            continue
        rows.append(row)
        show(row, time.perf_counter() - began)
        if options.json:
            options.json.write_text(
                json.dumps({"environment": environment, "models": rows}, indent=1), encoding="utf-8"
            )
        torch.compiler.reset()
        torch.cuda.empty_cache()
    if options.store is None:
        shutil.rmtree(store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
