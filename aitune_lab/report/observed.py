"""What host and GPUs did during a run, by trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..measure.monitor import Sample, TrialMetrics, columns, row
from ..tuning.observe import Observer
from ..tuning.strategies.words import counted, number, size
from .frames import frame_of
from .results import Block, blocks_html, blocks_text
from .text import Column

TRIAL_METRICS_COLUMNS = (
    Column("path", "module"),
    Column("candidate", "candidate"),
    Column("seconds", "s", right=True),
    Column("rss", "peak memory", right=True),
    Column("children", "of children", right=True),
    Column("cpu", "CPU %", right=True),
    Column("gpu_memory", "peak GPU memory", right=True),
    Column("gpu", "GPU %", right=True),
    Column("temperature", "GPU °C", right=True),
)


def samples_frame(samples: Sequence[Sample]) -> Any:
    """Samples as a data frame, one row each. Raises MissingDependency without pandas."""
    return frame_of([row(s) for s in samples], columns(max((len(s.gpus) for s in samples), default=0)))


def trial_metrics_rows(trials: Sequence[TrialMetrics]) -> list[dict[str, str]]:
    """What trials took as formatted cells of `TRIAL_METRICS_COLUMNS`."""
    return [
        {
            "path": t.path,
            "candidate": t.candidate,
            "seconds": f"{t.seconds:.1f}",
            "rss": size(t.peak_rss_bytes),
            "children": size(t.peak_children_rss_bytes) if t.peak_children_rss_bytes else "",
            "cpu": f"{t.mean_cpu_percent:.0f}",
            "gpu_memory": "" if t.gpu_peak_memory_bytes is None else size(t.gpu_peak_memory_bytes),
            "gpu": "" if t.gpu_mean_utilisation_percent is None else f"{t.gpu_mean_utilisation_percent:.0f}",
            "temperature": "" if t.gpu_max_temperature_c is None else number(t.gpu_max_temperature_c),
        }
        for t in trials
    ]


def observer_blocks(observer: Observer) -> list[Block]:
    """The switches, then what each trial took."""
    states = [
        f"{name} {'on' if on else 'off'}" for name, on in (("nvtx", observer.nvtx), ("metrics", observer.metrics))
    ]
    lines = [f"{', '.join(states)}; {counted(len(observer.samples), 'sample')}"]
    return [Block("By trial", TRIAL_METRICS_COLUMNS, trial_metrics_rows(observer.by_trial())), Block("", lines=lines)]


def observer_text(observer: Observer) -> str:
    return blocks_text(observer_blocks(observer))


def observer_html(observer: Observer) -> str:
    return blocks_html(observer_blocks(observer))
