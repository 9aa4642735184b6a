"""What is installed in a target: tuning and loading write it, save, stats and unwrap read it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..backends.base import BuildJob, Executable
from ..capture.interrupts import guarded
from ..capture.swap import SwappedMethod, keep, kept, restore, swap
from ..capture.tree import modules_of
from ..schema import Choice, Plan, Signature, Trial
from .dispatch import MethodDispatch


@dataclass
class InstalledExecutable:
    """The executable of one (module, signature) with what explains and rebuilds it. `job.folder` holds its artifact."""

    choice: Choice
    signature: Signature
    trial: Trial | None
    executable: Executable
    job: BuildJob


@dataclass
class Installed:
    """All that is installed on one method of one module."""

    path: str
    module: torch.nn.Module
    method: str
    entries: list[InstalledExecutable]
    plan: Plan
    dispatch: MethodDispatch


def _held(module: torch.nn.Module) -> dict[str, Installed]:
    """What is installed on a module, by method. It lives on the module, so that it goes when the module goes."""
    return kept(module) or {}


def prepare(
    module: torch.nn.Module,
    method: str,
    path: str,
    entries: Sequence[InstalledExecutable],
    plan: Plan,
    *,
    on_miss: Literal["original", "error"] = "original",
    weights: Literal["watched", "frozen"] = "watched",
) -> Installed:
    """Generate the dispatch without changing the module. Raises what makes it impossible."""
    name = f"{type(module).__name__} {path!r}" if path else type(module).__name__
    dispatch = MethodDispatch(module, method, name, list(entries), on_miss=on_miss, weights=weights)
    return Installed(path, module, method, list(entries), plan, dispatch)


def install_all(prepared: Sequence[Installed]) -> None:
    """Install everything in one step, in place of what was installed on the same methods.

    An interrupt waits until the end of the step and then undoes it, as does an error.
    """
    before = [_held(item.module).get(item.method) for item in prepared]
    with guarded() as guard:
        try:
            for old in before:
                if old is not None:
                    _detach(old)
            for item in prepared:
                _attach(item)
            guard.check()
        except BaseException:
            for item in prepared:
                _detach(item)
            for old in before:
                if old is not None:
                    _attach(old)
            raise
        for old in before:
            if old is not None:
                _close(old)


def _attach(item: Installed) -> None:
    item.dispatch.install()
    keep(item.module, {**_held(item.module), item.method: item})


def _detach(item: Installed) -> None:
    item.dispatch.uninstall()
    others = {method: held for method, held in _held(item.module).items() if held is not item}
    keep(item.module, others or None)


def _close(item: Installed) -> None:
    for entry in item.entries:
        entry.executable.close()


def installed_in(target: Any) -> list[Installed]:
    """What is installed anywhere in a target, in the order of its modules."""
    return [item for module in modules_of(target).values() for item in _held(module).values()]


def uninstall_all(target: Any) -> None:
    """Take everything back exactly: the target is as it was before tuning."""
    with guarded():
        for item in installed_in(target):
            _detach(item)
            _close(item)


def refresh(target: Any) -> bool:
    """Look at the weights of all tuned modules now; True if every executable holds (again).

    Executables whose backend can swap weights take the new ones; the others run the original until tuned again.
    """
    # Every one is asked, also after the first that doesn't hold.
    hold = [item.dispatch.refresh() for item in installed_in(target)]
    return all(hold)


@contextmanager
def lifted(target: Any) -> Iterator[None]:
    """While entered nothing is installed in the target; then again what was, the same executables, and nothing else."""
    held = installed_in(target)
    with guarded():
        for item in held:
            _detach(item)
    try:
        yield
    finally:
        with guarded():
            uninstall_all(target)
            for item in held:
                _attach(item)


class Bypass:
    """While `on()`, the thread that made it runs the originals of all tuned methods; other threads notice nothing.

    Both may be called any number of times; a call takes microseconds and happens outside of the target's calls.
    """

    def __init__(self, target: Any) -> None:
        self._installed = installed_in(target)
        self._thread = threading.get_ident()
        self._entries: list[SwappedMethod] = []

    def on(self) -> None:
        if not self._entries:
            self._entries = [swap(item.module, item.method, self._chooser(item)) for item in self._installed]

    def off(self) -> None:
        entries, self._entries = self._entries, []
        for entry in reversed(entries):
            restore(entry)

    def _chooser(self, item: Installed) -> Callable[..., Any]:
        thread, original, tuned, ident = self._thread, item.dispatch.original, item.dispatch.call, threading.get_ident

        def choose(*args: Any, **kwargs: Any) -> Any:
            return (original if ident() == thread else tuned)(*args, **kwargs)

        return choose


@contextmanager
def untuned(target: Any) -> Iterator[None]:
    """While entered, calls of the target from this thread run the original modules; other threads notice nothing."""
    bypass = Bypass(target)
    bypass.on()
    try:
        yield
    finally:
        bypass.off()


@dataclass(frozen=True)
class SignatureStats:
    """Counts of one signature. `uncovered` calls fitted it but ran the original (they would have recompiled)."""

    path: str
    method: str
    signature: str
    candidate: str
    calls: int
    uncovered: int
    stale: bool
    memory_bytes: int

    @property
    def dispatched(self) -> int:
        return self.calls - self.uncovered


@dataclass(frozen=True)
class MethodStats:
    """Calls of one method that fitted no signature, and how many ran the original for which reason."""

    path: str
    method: str
    misses: int
    to_original: dict[str, int]


@dataclass(frozen=True)
class Stats:
    """What tuned calls did since tuning: by signature, and what ran the original and why."""

    signatures: tuple[SignatureStats, ...]
    methods: tuple[MethodStats, ...]

    @property
    def dispatched(self) -> int:
        """Calls that an executable other than eager really answered."""
        return sum(s.dispatched for s in self.signatures if s.candidate != "eager")

    @property
    def misses(self) -> int:
        return sum(m.misses for m in self.methods)

    def __str__(self) -> str:
        lines = []
        for s in self.signatures:
            state = " (stale: runs the original)" if s.stale else ""
            extra = f", {s.uncovered} of them by the original" if s.uncovered else ""
            calls = f"{s.calls} call{'' if s.calls == 1 else 's'}"
            lines.append(f"{s.path or '(model)'}{s.signature}: {calls} by {s.candidate}{extra}{state}")
        for m in self.methods:
            lines.extend(f"{m.path or '(model)'}: {n} by the original: {reason}" for reason, n in m.to_original.items())
        return "\n".join(lines) or "nothing but eager runs here: not tuned, or eager was kept everywhere"


def stats(target: Any) -> Stats:
    """Counts of tuned calls in a target, exact from any number of threads."""
    signatures, methods = [], []
    for item in installed_in(target):
        for entry in item.dispatch.entries:
            held = entry.installed
            signatures.append(
                SignatureStats(
                    item.path,
                    item.method,
                    held.signature.label,
                    held.choice.candidate.label,
                    entry.hits.value(),
                    entry.uncovered(),
                    entry.stale,
                    held.executable.memory_bytes,
                )
            )
        methods.append(
            MethodStats(item.path, item.method, item.dispatch.misses.value(), dict(item.dispatch.to_original))
        )
    return Stats(tuple(signatures), tuple(methods))
