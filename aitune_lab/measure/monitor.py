"""What host and GPUs do while something runs: memory, load, temperature, sampled on a thread of its own."""

from __future__ import annotations

import collections
import contextlib
import csv
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

MAX_SAMPLES = 100_000
"""Samples kept; the oldest go first. At two a second that is 14 hours."""
INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class Doing:
    """What runs just now: a trial's module, signature and candidate, and its phase; empty between trials."""

    path: str = ""
    signature: str = ""
    candidate: str = ""
    phase: str = ""


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment. Memory and load are the whole card's, not this process's; None where NVML doesn't say."""

    memory_used_bytes: int | None = None
    utilisation_percent: float | None = None
    temperature_c: float | None = None
    power_watts: float | None = None


@dataclass(frozen=True)
class Sample:
    """One moment. `t` is in seconds since the monitor was made.

    Attributes:
        rss_bytes: resident memory of this process.
        children_rss_bytes: that of its child processes together (isolated builds, compilers).
        cpu_percent: this process since the sample before; 200 is two busy CPUs.
        system_cpu_percent: all CPUs of the machine since the sample before; 100 is all busy.
        available_bytes: memory that the machine can still give.
        gpus: one for each NVIDIA GPU of the machine, in the driver's order.
    """

    t: float
    doing: Doing = field(default_factory=Doing)
    rss_bytes: int = 0
    children_rss_bytes: int = 0
    cpu_percent: float = 0.0
    system_cpu_percent: float = 0.0
    available_bytes: int = 0
    gpus: tuple[GpuSample, ...] = ()


@dataclass(frozen=True)
class TrialMetrics:
    """The samples of one trial together; GPU figures are the worst over all cards, None without one."""

    path: str
    signature: str
    candidate: str
    seconds: float
    samples: int
    peak_rss_bytes: int
    peak_children_rss_bytes: int
    mean_cpu_percent: float
    gpu_peak_memory_bytes: int | None = None
    gpu_mean_utilisation_percent: float | None = None
    gpu_max_temperature_c: float | None = None


class Monitor:
    """Samples on a daemon thread between `start` and `stop`, which may be called any number of times, from any thread.

    `read` takes one sample, given the time and what runs; tests script it.
    """

    def __init__(
        self,
        interval_seconds: float = INTERVAL_SECONDS,
        read: Callable[[float, Doing], Sample] | None = None,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._read = read if read is not None else _Reader()
        self._begin = time.perf_counter()
        self._samples: collections.deque[Sample] = collections.deque(maxlen=MAX_SAMPLES)
        self._lock = threading.Lock()
        self._doing = Doing()
        self._stop: threading.Event | None = None

    @property
    def running(self) -> bool:
        return self._stop is not None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples so far, the oldest first."""
        with self._lock:
            return tuple(self._samples)

    def start(self) -> None:
        with self._lock:
            if self._stop is not None:
                return
            self._stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(self._stop,), name="aitune-lab-metrics", daemon=True)
        self.sample()
        thread.start()

    def stop(self) -> None:
        with self._lock:
            stop, self._stop = self._stop, None
        if stop is not None:
            stop.set()
            self.sample()

    def now(self, doing: Doing) -> None:
        """Say what runs from now on; while running, one sample is taken on either side of the change."""
        if not self.running or doing == self._doing:
            self._doing = doing
            return
        self.sample()
        self._doing = doing
        self.sample()

    def sample(self) -> None:
        """Take one sample now; none where the system doesn't tell, as a run goes on without."""
        with self._lock, contextlib.suppress(psutil.Error, OSError):
            self._samples.append(self._read(time.perf_counter() - self._begin, self._doing))

    def clear(self) -> None:
        """Forget the samples."""
        with self._lock:
            self._samples.clear()

    def by_trial(self) -> tuple[TrialMetrics, ...]:
        """The samples of each trial together, in the order in which trials began."""
        trials: dict[tuple[str, str, str], list[Sample]] = {}
        for sample in self.samples:
            if sample.doing.candidate:
                key = sample.doing.path, sample.doing.signature, sample.doing.candidate
                trials.setdefault(key, []).append(sample)
        return tuple(_summary(*key, samples) for key, samples in trials.items())

    def to_csv(self, path: str | Path) -> Path:
        """Write all samples as CSV, one row each, columns as the fields of `Sample` with units in their names."""
        path = Path(path)
        samples = self.samples
        cards = max((len(sample.gpus) for sample in samples), default=0)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns(cards))
            writer.writeheader()
            writer.writerows(map(row, samples))
        return path

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self.interval_seconds):
            self.sample()


def columns(cards: int) -> list[str]:
    """The columns of samples as rows, for a number of GPUs."""
    host = "rss_bytes children_rss_bytes cpu_percent system_cpu_percent available_bytes".split()
    gpu = list(asdict(GpuSample()))
    return ["t_seconds", *asdict(Doing()), *host, *(f"gpu{i}_{name}" for i in range(cards) for name in gpu)]


def row(sample: Sample) -> dict[str, Any]:
    """A sample as one flat row."""
    flat = asdict(sample)
    gpus, doing, t = flat.pop("gpus"), flat.pop("doing"), flat.pop("t")
    cards = {f"gpu{i}_{name}": value for i, gpu in enumerate(gpus) for name, value in gpu.items()}
    return {"t_seconds": round(t, 3), **doing, **flat, **cards}


def _summary(path: str, signature: str, candidate: str, samples: list[Sample]) -> TrialMetrics:
    cards = [gpu for sample in samples for gpu in sample.gpus]
    busy = [g.utilisation_percent for g in cards if g.utilisation_percent is not None]
    return TrialMetrics(
        path,
        signature,
        candidate,
        samples[-1].t - samples[0].t,
        len(samples),
        max(s.rss_bytes for s in samples),
        max(s.children_rss_bytes for s in samples),
        sum(s.cpu_percent for s in samples) / len(samples),
        _highest(g.memory_used_bytes for g in cards),
        sum(busy) / len(busy) if busy else None,
        _highest(g.temperature_c for g in cards),
    )


def _highest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


class _Reader:
    """Reads host and GPUs. CUDA is not started: the driver is asked, by NVML; without it there are no GPUs."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        psutil.cpu_percent()
        self._nvml, self._cards = _cards()

    def __call__(self, t: float, doing: Doing) -> Sample:
        with self._process.oneshot():
            rss, cpu = self._process.memory_info().rss, self._process.cpu_percent()
        children = 0
        for child in self._process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                children += child.memory_info().rss
        gpus = tuple(self._gpu(card) for card in self._cards)
        available = psutil.virtual_memory().available
        return Sample(t, doing, rss, children, cpu, psutil.cpu_percent(), available, gpus)

    def _gpu(self, card: Any) -> GpuSample:
        nvml = self._nvml

        def ask(question: Callable[[], Any]) -> Any:
            try:
                return question()
            except nvml.NVMLError:  # this card, or this driver, doesn't tell
                return None

        return GpuSample(
            ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(card).used)),
            ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(card).gpu)),
            ask(lambda: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))),
            ask(lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
        )


def _cards() -> tuple[Any, list[Any]]:
    """(NVML's module, the handles of all GPUs), or (None, [])."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []
