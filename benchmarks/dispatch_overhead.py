"""What a tuned call costs beside the executable that it runs.

Three figures, each the least of many repetitions, in one run:

- the dispatch: a tuned call less a direct call of the same executable with the same tensors, for 1, 8 and 52 tensors in a
  nested dict, with weights watched and without;
- the watch over weights alone, for modules of 10, 300 and 3000 tensors;
- what ONNX Runtime needs to take tensors in and give them out, for a model that does next to nothing.

Run it with `python benchmarks/dispatch_overhead.py`; it exits with 1 if a limit is passed. `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aitune_lab import unwrap
from aitune_lab.runtime.weights import WeightWatch
from aitune_lab.testing import install_scripted
from aitune_lab.testing.models import Nested

LIMITS_US = {"1 tensor": 4.0, "52 tensors": 25.0, "watch": 2.0, "ONNX Runtime, 1 tensor": 15.0}


def least_us(function: Callable[[], Any], calls: int = 50, repetitions: int = 3000) -> float:
    """Microseconds of one call: the least over repetitions, which other load can't make smaller.

    Repetitions are short, so that on a busy machine some run without being interrupted.
    """
    return min(timeit.repeat(function, number=calls, repeat=repetitions)) / calls * 1e6


def nested(count: int) -> dict[str, dict[str, torch.Tensor]]:
    """`count` tensors in dicts of up to eight."""
    tensors = [torch.randn(2, 3) for _ in range(count)]
    return {f"group{i}": {f"t{j}": t for j, t in enumerate(tensors[i : i + 8])} for i in range(0, count, 8)}


def dispatch_us(count: int, *, watched: bool) -> tuple[float, float, float]:
    """(tuned call through the module, direct call, a plain module's call less its forward) in microseconds."""
    result = [torch.zeros(2, 3)]

    def executable(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return result

    batch, module = nested(count), Nested().eval()
    flat = [t for group in batch.values() for t in group.values()]
    install_scripted(module, (batch,), call=executable, weights="baked", watching="watched" if watched else "frozen")
    tuned = least_us(lambda: module(batch))
    unwrap(module)

    class Empty(nn.Module):
        def forward(self, batch: Any) -> torch.Tensor:
            return result[0]

    empty = Empty().eval()
    return tuned, least_us(lambda: executable(*flat)), least_us(lambda: empty(batch))


def watch_us(count: int) -> float:
    """One look of the watch over a module with so many weights, averaged over whole rounds."""
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count // 2)])
    watch = WeightWatch(module)
    return least_us(watch.tick, calls=750, repetitions=500)


def onnxruntime_us(count: int) -> tuple[float, float] | None:
    """(tuned call, session.run with numpy arrays alone) for a model that adds tensors up; None without ONNX Runtime."""
    from aitune_lab.backends import registry
    from aitune_lab.backends.base import BuildJob
    from aitune_lab.capture.swap import original_method
    from aitune_lab.testing import record_calls

    backend_class = registry.get("onnxruntime")
    if not backend_class.available().ok:
        return None
    module, batch = Nested().eval(), nested(count)
    recorder, (recorded,) = record_calls(module, (batch,))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = backend_class()
        job = BuildJob(
            "",
            module,
            original_method(module, "forward"),
            recorder.recordings[0].form,
            recorded.signature,
            recorded.all_samples(),
            backend.candidate(),
            Path(folder),
        )
        executable = backend.build(job)
        flat = [t for group in batch.values() for t in group.values()]
        direct = least_us(lambda: executable.call(*flat), calls=4, repetitions=2000)
        install_scripted(module, (batch,), call=executable.call, weights="baked")
        tuned = least_us(lambda: module(batch), calls=4, repetitions=2000)
    return tuned, direct


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.processor() or platform.machine()}"
    )
    with torch.inference_mode():
        print(f"\n{'µs a call':24}{'tuned':>8}{'direct':>8}{'added':>8}{'unwatched':>11}{'plain module':>14}")
        for count in (1, 8, 52):
            tuned, direct, plain = dispatch_us(count, watched=True)
            unwatched, _, _ = dispatch_us(count, watched=False)
            name = f"{count} tensor{'s' if count > 1 else ''}"
            figures[name] = tuned - direct
            print(f"{name:24}{tuned:8.2f}{direct:8.2f}{tuned - direct:8.2f}{unwatched - direct:11.2f}{plain:14.2f}")
        print(f"\n{'watch over weights':24}{'µs':>8}")
        for count in (10, 300, 3000):
            figures[f"watch, {count} tensors"] = watch_us(count)
            print(f"{f'{count} tensors':24}{figures[f'watch, {count} tensors']:8.2f}")
    with torch.no_grad():
        print(f"\n{'ONNX Runtime':24}{'tuned':>8}{'direct':>8}{'added':>8}")
        for count in (1, 8, 52):
            measured = onnxruntime_us(count)
            if measured is None:
                print("not installed")
                break
            name = f"{count} tensor{'s' if count > 1 else ''}"
            figures[f"ONNX Runtime, {name}"] = measured[1]
            print(f"{name:24}{measured[0]:8.2f}{measured[1]:8.2f}{measured[0] - measured[1]:8.2f}")
    passed = {
        n: us
        for n, us in figures.items()
        for limit in [LIMITS_US.get(n.partition(",")[0] if n.startswith("watch") else n)]
        if limit and us > limit
    }
    for name, microseconds in passed.items():
        print(f"over the limit: {name}: {microseconds:.2f} µs")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 1 if passed else 0


if __name__ == "__main__":
    sys.exit(main())
