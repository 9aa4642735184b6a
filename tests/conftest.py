"""What all tests share: which of them run, and a process that is the same for each.

- `pytest` runs everything that isn't marked;
- `pytest -m full` runs everything, but for `gpu` and `browser` tests on a machine that can't, which show as skipped;
- `pytest -m gpu` and `-m browser` run those, and fail at once on a machine that can't;
- any other `-m` means what pytest says it means.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

# Before anything imports transformers or torch: no test reaches a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# Most tests tune in this process: a helper process takes seconds to start. Those that care say isolation="auto".
os.environ.setdefault("AITUNE_LAB_ISOLATION", "off")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing(need: str) -> str:
    """What this machine lacks for tests marked `gpu` or `browser`; empty if nothing."""
    if need == "gpu":
        import torch

        return "" if torch.cuda.is_available() else "needs an NVIDIA GPU that torch can use"
    return "" if any(map(shutil.which, BROWSERS)) else f"needs one of {', '.join(BROWSERS)} on PATH"


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts this in the background has interrupts ignored; the tests of Ctrl-C need Python's own handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = config.option.markexpr
    if not wanted:
        config.option.markexpr = "not full and not gpu and not browser"
    elif wanted == "full":
        config.option.markexpr = ""
    elif wanted in ("gpu", "browser") and missing(wanted):
        raise pytest.UsageError(f"-m {wanted} was asked for, but this machine cannot: it {missing(wanted)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in ("gpu", "browser"):
        if item.get_closest_marker(need) and (reason := missing(need)):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, alone or in a run."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's cache is never read or written, also not by fixtures that live longer than a test."""
    os.environ["AITUNE_LAB_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def fresh_cache(own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts with an empty cache folder of its own; made when something is stored."""
    folder = tmp_path.with_name(f"{tmp_path.name}-cache")
    monkeypatch.setenv("AITUNE_LAB_CACHE_DIR", str(folder))
    return folder
