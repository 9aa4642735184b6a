"""What is installed in a target: tuning and loading write it, save, stats and unwrap read it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .._display import Printed
from ..backends.base import BuildJob, Executable
from ..capture.interrupts import guarded
from ..capture.swap import SwappedMethod, keep, kept, restore, swap
from ..capture.tree import modules_of
from ..errors import TargetError
from ..schema import Choice, Plan, Signature, Trial
from .dispatch import MethodDispatch
from .originals import Originals, Parked, bytes_of, drop_weights, weights_of, why_needed


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
    originals: Originals = "device",
) -> Installed:
    """Generate the dispatch without changing the module. Raises what makes it impossible."""
    name = f"{type(module).__name__} {path!r}" if path else type(module).__name__
    dispatch = MethodDispatch(
        module, method, name, list(entries), on_miss=on_miss, weights=weights, originals=originals
    )
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
        kept = {id(entry.executable) for item in prepared for entry in item.entries}
        for old in before:
            if old is not None:
                _close(old, kept)


def _attach(item: Installed) -> None:
    item.dispatch.install()
    keep(item.module, {**_held(item.module), item.method: item})


def _detach(item: Installed) -> None:
    item.dispatch.uninstall()
    if isinstance(item.dispatch.original, Parked):
        item.dispatch.original.bring_back()
    others = {method: held for method, held in _held(item.module).items() if held is not item}
    keep(item.module, others or None)


def _close(item: Installed, kept: Collection[int] = ()) -> None:
    """Free its executables, but for those that are used elsewhere, by `id`."""
    for entry in item.entries:
        if id(entry.executable) not in kept:
            entry.executable.close()


def release_originals(target: Any, installed: Sequence[Installed], originals: Originals) -> dict[str, str]:
    """Move the weights of tuned modules to the host, or free them; gives why some stay where they are, by path.

    Calls that executables answer go on as before. Changes of the weights are not noticed any more.
    """
    refused: dict[str, str] = {}
    groups: dict[int, list[Installed]] = {}
    for item in installed:
        groups.setdefault(id(item.module), []).append(item)
    for items in groups.values():
        module, path = items[0].module, items[0].path
        reasons = [
            f"{entry.choice.candidate.label}: {why}"
            for item in items
            for entry in item.entries
            if (why := why_needed(entry.executable))
        ]
        if originals == "cpu" and (other := _shares_weights(target, module)) is not None:
            reasons.append(f"{other or '(model)'} uses some of them too")
        if reasons:
            refused[path] = reasons[0]
            continue
        on_miss = "error" if originals == "drop" else items[0].dispatch.on_miss
        made = [
            prepare(module, item.method, path, item.entries, item.plan, on_miss=on_miss, originals=originals)
            for item in items
        ]
        install_all(made)
        for item in made:
            if isinstance(item.dispatch.original, Parked):
                item.dispatch.original.park()
        if originals == "drop":
            drop_weights(module, made[0].dispatch.name)
    return refused


def _shares_weights(target: Any, module: torch.nn.Module) -> str | None:
    """The path of a module outside of a module that holds one of its weights itself."""
    own, inside = weights_of(module), {id(child) for child in module.modules()}
    for path, other in modules_of(target).items():
        tensors = (*other.parameters(recurse=False), *other.buffers(recurse=False))
        if id(other) not in inside and any(id(tensor) in own for tensor in tensors):
            return path
    return None


def installed_in(target: Any) -> list[Installed]:
    """What is installed anywhere in a target, in the order of its modules."""
    return [item for module in modules_of(target).values() for item in _held(module).values()]


def uninstall_all(target: Any) -> None:
    """Take everything back exactly: the target is as it was before tuning.

    Raises TargetError, and takes nothing back, if weights were dropped.
    """
    installed = installed_in(target)
    _refuse_dropped(installed, "be unwrapped")
    with guarded():
        for item in installed:
            _detach(item)
            _close(item)


def _refuse_dropped(installed: Sequence[Installed], what: str) -> None:
    for item in installed:
        if item.dispatch.originals == "drop":
            raise TargetError(
                f"{item.dispatch.name} can't {what}: its weights were dropped after tuning (originals='drop'); "
                "make the model anew"
            )


def take_back(target: Any, installed: Sequence[Installed]) -> None:
    """Take back those of the given that are installed in a target; others stay."""
    with guarded():
        for item in installed_in(target):
            if any(item is other for other in installed):
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
    """While entered nothing is installed in the target; then again what was, the same executables, and nothing else.

    Raises TargetError if weights were dropped.
    """
    held = installed_in(target)
    _refuse_dropped(held, "run untuned")
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
                if isinstance(item.dispatch.original, Parked):
                    item.dispatch.original.park()


@contextmanager
def unparked(target: Any) -> Iterator[None]:
    """While entered, weights that are kept on the host stand where the original modules need them.

    Raises TargetError if weights were dropped.
    """
    held = installed_in(target)
    _refuse_dropped(held, "run untuned")
    parked = [item.dispatch.original for item in held if isinstance(item.dispatch.original, Parked)]
    for original in parked:
        original.bring_back()
    try:
        yield
    finally:
        for original in parked:
            original.park()


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
class Stats(Printed):
    """What tuned calls did since tuning: by signature, and what ran the original and why."""

    signatures: tuple[SignatureStats, ...]
    methods: tuple[MethodStats, ...]
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """What tuned modules and executables hold, in bytes, by owner: `originals` are the modules' own weights (on whatever
    device, none if they were dropped), the others are candidates with what their executables hold beside them."""

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
        if len(self.memory_bytes) > 1:
            shares = (f"{owner} {amount / 1e6:.1f} MB" for owner, amount in self.memory_bytes.items())
            lines.append(f"memory: {', '.join(shares)}")
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
    return Stats(tuple(signatures), tuple(methods), _memory(target))


def _memory(target: Any) -> dict[str, int]:
    installed = installed_in(target)
    if not installed:
        return {}
    held = {"originals": bytes_of([item.module for item in installed])}
    for item in installed:
        for entry in item.entries:
            label, amount = entry.choice.candidate.label, entry.executable.memory_bytes
            if amount:
                held[label] = held.get(label, 0) + amount
    return held
