"""Does tuning fall for noise, and does it see a small real gain?

Small modules are tuned twice each:

- with ten placebos, which run the module's own forward: whoever is chosen in place of eager is a *false win*;
- with the same placebos and one candidate among them that does 5 % less arithmetic for the same result: it is *found* if
  it is chosen. The modules repeat one product 20 times; the candidate leaves one repetition out. They take milliseconds,
  so that the gain is not lost in the microseconds that dispatching a call costs every candidate.

Run it with `python benchmarks/placebo.py --json placebo.json` on a quiet machine; `--modules N` for fewer. Each module's
outcome is printed and kept as soon as it is there, and a second run goes on from the file. It exits with 1 if more than one module in 30 has a false win, or fewer than 27 in 30 find the faster candidate.
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
FASTER = "placebo[left_out=1]"
"""The label of the candidate that does less."""


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
    module = Repeated(rows=96 + 32 * (index % 5), width=256 + 64 * (index % 3), seed=index).eval()
    candidates = [PlaceboBackend(number=i + 1) for i in range(PLACEBOS)]
    if with_faster:
        candidates.insert(random.Random(index).randrange(PLACEBOS + 1), PlaceboBackend(left_out=1))
    x = torch.randn(module.rows, module.weight.shape[0], generator=torch.Generator().manual_seed(index))
    options = TuneOptions(backends=tuple(candidates), end_to_end=False, store=None, isolation="off")
    result = run(make_tuner(module, x, Plan(), options))
    unwrap(module)
    return result.choices[0].candidate.label


def earlier(path: Path | None, threads: int) -> list[dict[str, str]]:
    """The outcomes that an earlier run has kept. Exits if they are those of another number of threads."""
    if path is None or not path.exists():
        return []
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["threads"] != threads:
        sys.exit(f"{path} holds outcomes with {kept['threads']} threads, not {threads}: name another file")
    outcomes: list[dict[str, str]] = kept["outcomes"]
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep outcomes there, and go on from it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    registry.register(PlaceboBackend)
    start = time.perf_counter()
    outcomes = earlier(options.json, options.threads)
    for index in range(len(outcomes), options.modules):
        placebo = tuned_label(index, with_faster=False)
        faster = tuned_label(index, with_faster=True)
        outcomes.append({"among_placebos": placebo, "with_faster": faster})
        print(
            f"module {index + 1}: among placebos {placebo}; with a 5 % faster one {faster}; "
            f"{time.perf_counter() - start:.0f} s so far",
            flush=True,
        )
        if options.json:
            figures = {"threads": options.threads, "environment": to_data(fingerprint()), "outcomes": outcomes}
            options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    outcomes = outcomes[: options.modules]
    n = len(outcomes)
    false_wins = sum(o["among_placebos"] != "eager" for o in outcomes)
    found = sum(o["with_faster"] == FASTER for o in outcomes)
    mistaken = sum(o["with_faster"] not in ("eager", FASTER) for o in outcomes)
    print(f"false wins {false_wins} of {n}; 5 % found in {found} of {n} (a placebo instead: {mistaken})")
    held = false_wins <= math.ceil(MAX_FALSE_WINS_PER_30 * n / 30) and found >= math.floor(MIN_FOUND_PER_30 * n / 30)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
