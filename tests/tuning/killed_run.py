"""Small scripted tunes in processes of their own, some of which kill themselves at a random moment.

`python killed_run.py kill FOLDER N` runs one undisturbed, then N that are killed, each followed by one that is not, on the
same store. `python killed_run.py both FOLDER` runs two at once on one store, then a third. What they did is the last line
of output, as JSON. Children are forked from this process, which imports everything and runs nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from aitune_lab.schema import Plan
from aitune_lab.store.store import Store
from aitune_lab.testing.scripted import ScriptedBackend, ScriptedMeter, scripted_backend
from aitune_lab.tuning.api import make_tuner, run
from aitune_lab.tuning.options import TuneOptions

SETTINGS: tuple[dict[str, Any], ...] = (
    {"latency_ms": 0.6},
    {"latency_ms": 0.5},
    {"latency_ms": 0.1, "error": "scaled"},
    {"fails_at": "build"},
)


def tune(moment: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Tune, with the store in the cache folder; `moment` is called at each event. Gives what it came to."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    with scripted_backend():
        backends = tuple(ScriptedBackend(**settings).candidate() for settings in SETTINGS)
        options = TuneOptions(backends=backends, meter=ScriptedMeter())
        tuner = make_tuner(model, [torch.ones(4, 8), torch.ones(2, 8)], Plan(), options)
        result = run(tuner, lambda event: moment())
    (choice,) = result.choices
    counts = result.counts
    return {
        "choice": choice.candidate.label,
        "speedup": choice.speedup,
        "losers": sorted(choice.losers),
        "builds": counts.builds,
        "measurements": counts.measurements,
        "reused": counts.reused,
    }


def watched(at: int) -> dict[str, Any]:
    """Tune, and die at a moment: an event, or a call of the store or of what makes executables. -1: never."""
    moments = 0

    def moment() -> None:
        nonlocal moments
        moments += 1
        if moments == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and (name.startswith("aitune_lab.store") or name == "aitune_lab.tuning.making"):
            moment()

    sys.setprofile(watch)
    told = tune(moment)
    sys.setprofile(None)
    return told | {"moments": moments}


class Child:
    """A tune in a forked process, with the store in a folder."""

    def __init__(self, cache: Path, at: int = -1) -> None:
        self._reads, writes = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.environ["AITUNE_LAB_CACHE_DIR"] = str(cache)
                os.write(writes, json.dumps(watched(at)).encode())
            finally:
                os._exit(0)
        os.close(writes)

    def told(self) -> dict[str, Any] | None:
        """What it came to; None if it was killed."""
        with os.fdopen(self._reads, "rb") as stream:
            text = stream.read()
        _, status = os.waitpid(self.pid, 0)
        assert text or os.WIFSIGNALED(status), status
        return json.loads(text) if text else None


def kill(folder: Path, kills: int) -> dict[str, Any]:
    """Kill runs at moments spread over a run, at random within each share of it; then run again."""
    undisturbed = Child(folder / "undisturbed").told()
    assert undisturbed is not None
    random_numbers, killed = random.Random(0), []
    for number in range(kills):
        cache, at = (
            folder / f"killed-{number}",
            1 + int((number + random_numbers.random()) * undisturbed["moments"] / kills),
        )
        told = Child(cache, at).told()
        known = Store(cache).usage().trials
        killed.append({"cache": str(cache), "at": at, "told": told, "known": known, "again": Child(cache).told()})
    return {"undisturbed": undisturbed, "killed": killed}


def both(folder: Path) -> dict[str, Any]:
    """Two at once, then a third."""
    children = [Child(folder), Child(folder)]
    return {"told": [child.told() for child in children], "repeat": Child(folder).told()}


if __name__ == "__main__":
    place = Path(sys.argv[2])
    print(json.dumps(kill(place, int(sys.argv[3])) if sys.argv[1] == "kill" else both(place)))
