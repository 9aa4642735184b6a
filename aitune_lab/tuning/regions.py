"""Times the calls of some modules, with what is installed in them or without, and tells the kernels they start."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

import torch
from torch.autograd.profiler import record_function

from ..capture.data import Understood
from ..capture.inspector import run_item
from ..capture.interrupts import guarded
from ..capture.swap import SwappedMethod, original_method, restore, swap
from ..capture.tree import Found, modules_of, outermost, tuned_methods, unit_path
from ..errors import TargetError
from ..runtime.installed import Installed, installed_in

Kind = Literal["tuned", "untuned", "around", "outside"]
Run = Literal["eager", "tuned"]

OUTSIDE = "(outside of modules)"
_MARK = "aitune_lab region "


@dataclass(frozen=True)
class Kernel:
    """What one kind of operation took in one region, in one pass: time of its own, without operations inside it.

    On a GPU `device_ms` is the time of the kernels that it started, whose names are `launched`; on the CPU None.
    """

    region: str
    run: Run
    name: str
    calls: int
    cpu_ms: float
    device_ms: float | None = None
    launched: tuple[str, ...] = ()


@dataclass
class Watched:
    """A method of a module whose calls are timed: a region, or a module around regions."""

    path: str
    module: torch.nn.Module
    method: str
    kind: Kind
    installed: Installed | None = None

    @property
    def candidates(self) -> tuple[str, ...]:
        entries = self.installed.entries if self.installed is not None else []
        return tuple(dict.fromkeys(entry.choice.candidate.label for entry in entries))


@dataclass
class Spent:
    """What was spent in one pass: seconds of its own and calls, by watched path; and the whole pass."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    whole: float = 0.0


def watched_in(target: Any, found: Sequence[Found], named: Sequence[str]) -> list[Watched]:
    """The regions, and the modules around them. Raises TargetError for a named path that the target doesn't hold."""
    paths = modules_of(target)
    unknown = [path for path in named if path not in paths]
    if unknown:
        raise TargetError(f"modules must be among those of the target, {sorted(paths)[:20]}, but got {unknown}")
    tuned = installed_in(target)
    by_id = {id(item.module): item.paths[0] for item in found}
    inner = [by_id[id(item.module)] for item in tuned if id(item.module) in by_id]
    known = set(paths)
    apart = {*inner, *(path for path in named if not any(above in inner for above in _above(path, known)))}
    if apart:
        around = {above for path in apart for above in _above(path, known)}
    else:
        # Nothing is set apart, so the outermost modules are looked into.
        outer = {id(module) for module in outermost(found)}
        around = {path for path, module in paths.items() if id(module) in outer}
    watched = [Watched(by_id[id(i.module)], i.module, i.method, "tuned", i) for i in tuned if id(i.module) in by_id]
    for path, module in paths.items():
        hidden = path in inner or isinstance(module, torch.jit.ScriptModule)
        if hidden or any(above not in around for above in _above(path, known)):
            continue
        kind: Kind = "around" if path in around else "untuned"
        watched += [Watched(path, module, method, kind) for method in ("forward", *tuned_methods(type(module)))]
    return watched


def _above(path: str, known: Iterable[str]) -> list[str]:
    """The paths of the modules that a module lies in."""
    parts = path.split(".") if path else []
    return [above for n in range(len(parts)) if (above := ".".join(parts[:n])) in known]


class Clock:
    """Times watched methods while `spent` is set; each runs the original, or what is installed while `tuned` is set."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self.watched = watched
        self.tuned = False
        self.spent: Spent | None = None
        self.marks = False
        self._thread = threading.get_ident()
        self._stack: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        entries: list[SwappedMethod] = []
        with guarded() as self._guard:
            try:
                for item in self.watched:
                    if callable(getattr(item.module, item.method, None)):
                        entries.append(self._install(item))
                self._guard.allowed = True
                yield
            finally:
                self._guard.allowed = False
                for entry in reversed(entries):
                    restore(entry)

    def _install(self, item: Watched) -> SwappedMethod:
        original = original_method(item.module, item.method)
        installed = item.installed.dispatch.call if item.installed is not None else original
        path = unit_path(item.path, item.method)
        mark = f"{_MARK}{path}"
        devices = _cuda_devices(item.module)

        def timed(*args: Any, **kwargs: Any) -> Any:
            run = installed if self.tuned else original
            spent = self.spent
            if threading.get_ident() != self._thread:
                return installed(*args, **kwargs)
            if torch.compiler.is_compiling() or (spent is None and not self.marks):
                return run(*args, **kwargs)
            self._guard.check()
            if spent is None:
                with record_function(mark):
                    return run(*args, **kwargs)
            self._stack.append(0.0)
            _synchronize(devices)
            start = time.perf_counter()
            try:
                result = run(*args, **kwargs)
                _synchronize(devices)
                return result
            finally:
                seconds = time.perf_counter() - start
                inside = self._stack.pop()
                if self._stack:
                    self._stack[-1] += seconds
                spent.seconds[path] = spent.seconds.get(path, 0.0) + seconds - inside
                spent.calls[path] = spent.calls.get(path, 0) + 1

        return swap(item.module, item.method, timed)


@dataclass
class Runner:
    """Runs passes over the data, eager and tuned."""

    target: Any
    function: Callable[..., Any] | None
    understood: Understood
    clock: Clock

    def measure(self, passes: int) -> tuple[dict[Run, list[Spent]], dict[str, int]]:
        """What was spent in each pass of each run, and calls of tuned modules in one pass that ran the original."""
        held = [item for item in self.clock.watched if item.installed is not None]
        runs: tuple[Run, ...] = ("eager", "tuned") if held else ("eager",)
        for run in runs:
            self._pass(run, None)
        before = {item.path: _answered(item) for item in held}
        spent: dict[Run, list[Spent]] = {run: [] for run in runs}
        for _ in range(passes):
            for run in runs:
                one = Spent()
                self._pass(run, one)
                spent[run].append(one)
        missed = {}
        for item in held:
            path = unit_path(item.path, item.method)
            calls = sum(one.calls.get(path, 0) for one in spent["tuned"])
            missed[path] = (calls - (_answered(item) - before[item.path])) // passes
        return spent, missed

    def _pass(self, run: Run, spent: Spent | None) -> None:
        self.clock.tuned, self.clock.spent = run == "tuned", spent
        devices = {device for item in self.clock.watched for device in _cuda_devices(item.module)}
        if torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        try:
            for item in self.understood.fresh_items():
                start = time.perf_counter()
                run_item(self.target, self.function, item.args, item.kwargs)
                _synchronize(devices)
                if spent is not None:
                    spent.whole += time.perf_counter() - start
        finally:
            self.clock.tuned, self.clock.spent = False, None

    def kernels(self, runs: Sequence[Run]) -> tuple[Kernel, ...]:
        """One pass of each run under torch's profiler."""
        self.clock.marks = True
        try:
            with _quiet():
                with _profiler():
                    pass  # the first start takes long, and would count for what runs first
                found: list[Kernel] = []
                for run in runs:
                    with _profiler() as profiler:
                        self._pass(run, None)
                    found += _kernels(profiler.events(), run)
        finally:
            self.clock.marks = False
        return tuple(found)


def _answered(item: Watched) -> int:
    """Calls that an executable answered so far."""
    assert item.installed is not None
    return sum(entry.hits.value() - entry.uncovered() for entry in item.installed.dispatch.entries)


def _kernels(events: Any, run: Run) -> list[Kernel]:
    """Events by region and name: time of their own, kernels that they launched. The longest first."""
    sums: dict[tuple[str, str], tuple[int, float, float, dict[str, None]]] = {}
    on_device = False
    for event in events:
        if event.device_type.name != "CPU" or event.name.startswith("ProfilerStep"):
            continue
        region = _region_of(event)
        name = "(outside of torch's operations)" if event.name.startswith(_MARK) else event.name
        calls, cpu, device, launched = sums.get((region, name), (0, 0.0, 0.0, {}))
        launches = list(event.kernels)
        on_device |= bool(launches)
        device += sum(kernel.duration for kernel in launches) / 1000
        launched |= dict.fromkeys(kernel.name for kernel in launches)
        sums[region, name] = calls + 1, cpu + event.self_cpu_time_total / 1000, device, launched
    made = [
        Kernel(region, run, name, calls, cpu, device if on_device else None, tuple(launched))
        for (region, name), (calls, cpu, device, launched) in sums.items()
    ]
    return sorted(made, key=lambda kernel: -(kernel.cpu_ms if kernel.device_ms is None else kernel.device_ms))


def _region_of(event: Any) -> str:
    while event is not None:
        if event.name.startswith(_MARK):
            return str(event.name[len(_MARK) :])
        event = event.cpu_parent
    return OUTSIDE


def _profiler() -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Some versions of torch warn that events of earlier cycles are dropped, though there is one cycle only.
    keeping = {"acc_events": True} if "acc_events" in signature(torch.profiler.profile.__init__).parameters else {}
    return torch.profiler.profile(activities=activities, **keeping)  # type: ignore[arg-type]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's library from printing to stderr."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _cuda_devices(module: torch.nn.Module) -> set[torch.device]:
    """Where a module's weights lie on CUDA: seldom anywhere but on the current device."""
    return {p.device for p in module.parameters() if p.is_cuda}


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
