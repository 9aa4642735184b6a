"""Does tuning fall for noise, and does it see a small real gain?

Small modules are tuned twice each:

- with ten placebos, which run the module's own forward: whoever is chosen in place of eager is a *false win*;
- with the same placebos and one candidate among them that does 5 % less arithmetic for the same result: it is *found* if
  it is chosen. The modules repeat one product 20 times; the candidate leaves one repetition out.

Run it with `python benchmarks/placebo.py` on a quiet machine (about 20 minutes); `--modules N` for fewer. It exits with 1
if more than one module in 30 has a false win, or fewer than 27 in 30 find the faster candidate.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from aitune_lab.backends import registry
from aitune_lab.backends.base import Availability, Backend, BackendConfig, BuildJob, Executable
from aitune_lab.environment import fingerprint
from aitune_lab.schema import Candidate, Plan, Signature, to_data
from aitune_lab.tuning.api import make_tuner, run, unwrap
from aitune_lab.tuning.options import TuneOptions

PLACEBOS = 10
REPETITIONS = 20
MAX_FALSE_WINS_PER_30 = 1
MIN_FOUND_PER_30 = 27


class Repeated(nn.Module):
    """The same product over and over: (rows, width) to (rows, width), float32."""

    def __init__(self, rows: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows = rows
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / width**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.repeated(x, REPETITIONS)

    def repeated(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            y = torch.relu(x @ self.weight)
        return y


@dataclass(frozen=True)
class PlaceboConfig(BackendConfig):
    """`number` tells placebos apart; `left_out` repetitions are not computed."""

    number: int = 0
    left_out: int = 0


class PlaceboBackend(Backend):
    """Runs the module's own forward, or the same with a repetition less."""

    name = "placebo"
    config_type = PlaceboConfig
    isolation = "none"
    config: PlaceboConfig

    @classmethod
    def available(cls) -> Availability:
        return Availability(True)

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        return [self.candidate()]

    def build(self, job: BuildJob) -> Executable:
        if not self.config.left_out:
            return Executable(job.original, flat=False, live_weights=True)
        assert isinstance(job.module, Repeated)
        module, times = job.module, REPETITIONS - self.config.left_out
        return Executable(lambda x: module.repeated(x, times), flat=False, live_weights=True)


def tuned_label(index: int, *, with_faster: bool) -> str:
    """The candidate chosen for the module of that number."""
    module = Repeated(rows=32 + 8 * (index % 5), width=128 + 64 * (index % 3), seed=index).eval()
    candidates = [PlaceboBackend(number=i + 1) for i in range(PLACEBOS)]
    if with_faster:
        candidates.insert(random.Random(index).randrange(PLACEBOS + 1), PlaceboBackend(left_out=1))
    x = torch.randn(module.rows, module.weight.shape[0], generator=torch.Generator().manual_seed(index))
    options = TuneOptions(backends=tuple(candidates), end_to_end=False, store=None, isolation="off")
    result = run(make_tuner(module, x, Plan(), options))
    unwrap(module)
    return result.choices[0].candidate.label


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    registry.register(PlaceboBackend)
    start, false_wins, found, mistaken = time.perf_counter(), 0, 0, 0
    for index in range(options.modules):
        placebo = tuned_label(index, with_faster=False)
        faster = tuned_label(index, with_faster=True)
        false_wins += placebo != "eager"
        found += faster == "placebo[left_out=1]"
        mistaken += faster not in ("eager", "placebo[left_out=1]")
        print(f"module {index + 1}: among placebos {placebo}; with a 5 % faster one {faster}", flush=True)
    seconds = time.perf_counter() - start
    n = options.modules
    print(
        f"false wins {false_wins} of {n}; 5 % found in {found} of {n} (a placebo instead: {mistaken}); {seconds:.0f} s"
    )
    if options.json:
        figures = {"modules": n, "false_wins": false_wins, "found": found, "mistaken": mistaken, "seconds": seconds}
        figures |= {"threads": options.threads, "environment": to_data(fingerprint())}
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    held = false_wins <= math.ceil(MAX_FALSE_WINS_PER_30 * n / 30) and found >= math.floor(MIN_FOUND_PER_30 * n / 30)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
