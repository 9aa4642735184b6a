"""Loads a `.ait` file onto a target, all at once or not at all, and checks one without a target."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from ..capture.tree import module_path, modules_of, tuned_methods
from ..environment import differences, fingerprint
from ..errors import AituneWarning, CheckpointError, TargetError
from ..runtime.installed import Installed, InstalledExecutable, install_all, installed_in, prepare, uninstall_all
from ..schema import Manifest, SavedChoice
from ..store.trust import check_digest, is_trusted
from .archive import Archive
from .holds import Verdict, verdict
from .identity import mismatch
from .rebuild import Made, Progress, make, on_devices
from .report import (
    CheckedChoice,
    CheckReport,
    LoadedChoice,
    LoadReport,
    LoadStatus,
    PointTest,
    listed,
    module_name,
    printable,
)
from .selftest import measured, numbers_of, numbers_problem
from .signing import is_valid
from .structure import foreign_code
from .validate import signature_problem

T = TypeVar("T")


def _silent(phase: str, fraction: float | None) -> None:
    return None


def load(
    target: Any,
    path: str | os.PathLike[str],
    *,
    trust: str | None = None,
    on_untrusted: Literal["eager", "error"] = "eager",
    on_mismatch: Literal["eager", "rebuild", "error"] = "eager",
    self_test: bool | Literal["full"] = True,
    compile: Literal["load", "first_call"] = "load",
    device: str | torch.device | None = None,
    progress: Progress = _silent,
) -> LoadReport:
    """Use what was tuned and saved elsewhere on a freshly built target of the same classes and weights.

    Everything is loaded and checked first and then installed in one step: on any error the target is as it was.

    Args:
        target: as it was before tuning; modules are found by their paths.
        path: the `.ait` file.
        trust: makes entries that can run code usable: the file's digest (`"sha256:…"`) as its author gave it, or the
            author's Ed25519 public key (PEM text, or a PEM file's path). Files that this machine saved need none.
        on_untrusted: what becomes of such entries without trust.
        on_mismatch: what becomes of entries that don't hold on this machine (versions, hardware, a missing backend, a
            failing load or self-test): eager runs, they are built again from their configuration, or it is an error.
        self_test: run the golden samples: numbers must hold. `"full"` also reports latencies beside those at tuning.
        compile: when to build what is saved as configuration only; `"first_call"` lets the first user wait.
        device: where to run what was tuned on another device of the same type.
        progress: `progress(text, fraction or None)` at each step.

    Raises:
        CheckpointError: a damaged file, another format version, another model, missing modules, trust that doesn't hold.
        TargetError: the target is tuned already.
    """
    _one_of("on_untrusted", on_untrusted, ("eager", "error"))
    _one_of("on_mismatch", on_mismatch, ("eager", "rebuild", "error"))
    _one_of("compile", compile, ("load", "first_call"))
    _one_of("self_test", self_test, (True, False, "full"))
    with Archive(path) as archive:
        trusted_by = _trusted_by(archive, trust)
        modules = _bound(archive, target)
        loading = _Loading(
            archive, modules, trusted_by is not None, on_untrusted, on_mismatch, self_test, compile, device, progress
        )
        prepared = loading.run()
        try:
            report = LoadReport(
                str(path), archive.digest, trusted_by, tuple(loading.rows), tuple(loading.tests), _training(modules)
            )
            install_all(prepared)
        except BaseException:
            # An interrupt that waited for the installation to end finds it done.
            uninstall_all(target)
            loading.close()
            raise
    if report.fell_back:
        first = report.fell_back[0]
        warnings.warn(
            printable(
                f"{len(report.fell_back)} of {len(report.choices)} tuned signatures of {path} run eager; {first}"
            ),
            AituneWarning,
            stacklevel=2,
        )
    return report


def check(path: str | os.PathLike[str]) -> CheckReport:
    """Verify every entry's hash and say which choices hold on this machine, without a target and without loading any.

    Raises CheckpointError for a damaged file.
    """
    with Archive(path) as archive:
        for name in archive.entries:
            archive.verify(name)
        manifest, here = archive.manifest, fingerprint()
        trusted = is_trusted(archive.digest)
        rows = [_checked(saved, verdict(saved, manifest, here, trusted=trusted), trusted) for saved in manifest.choices]
        return CheckReport(
            str(path),
            archive.digest,
            trusted,
            len(manifest.entries),
            archive.size_bytes,
            tuple(rows),
            differences(manifest.fingerprint, here),
        )


def _checked(saved: SavedChoice, judged: Verdict, trusted: bool) -> CheckedChoice:
    reason = judged.obstacle or judged.doubt
    if not reason and judged.code and not trusted:
        reason = "it can run code, so loading it needs trust"
    return CheckedChoice(
        saved.choice.path, saved.choice.method, saved.choice.candidate.label, not judged.obstacle, reason
    )


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise CheckpointError(f"{name} must be one of {', '.join(map(repr, allowed))}, but got {value!r}")


def _trusted_by(archive: Archive, trust: str | None) -> str | None:
    """Why the file's code may be used, or None. Raises CheckpointError if the trust given doesn't fit the file."""
    if trust is None:
        return "saved on this machine" if is_trusted(archive.digest) else None
    if trust.strip().lower().startswith("sha256:"):
        try:
            digest = check_digest(trust)
        except ValueError as error:
            raise CheckpointError(f"trust: {error}") from None
        if digest != archive.digest:
            raise CheckpointError(
                f"{archive.path} is not the file you trust: its digest is {archive.digest}, but trust is {digest}"
            )
        return "the digest given"
    if archive.signature is None:
        raise CheckpointError(
            f"{archive.path} is not signed, so no public key can vouch for it; pass its digest instead"
        )
    if not is_valid(trust, archive.signature, archive.manifest_bytes):
        raise CheckpointError(f"{archive.path} is not signed by the key given: don't use it, or ask its author")
    return "a signature by the key given"


def _bound(archive: Archive, target: Any) -> dict[str, torch.nn.Module]:
    """The target's module for each path of the file. Raises CheckpointError unless every one is the saved one."""
    manifest = archive.manifest
    found = modules_of(target)
    if not found:
        raise TargetError(f"the target holds no torch modules, but is a {type(target).__name__}")
    if installed_in(target):
        raise TargetError("the target is tuned already: call aitune_lab.unwrap(target) before loading a file onto it")
    identities = {identity.path: identity for identity in manifest.modules}
    # A path in the file is that of a method: `vae.decode` is the method `decode` of the module `vae`.
    methods = {saved.choice.path: saved.choice.method for saved in manifest.choices}
    held = {path: found.get(module_path(path, methods.get(path, "forward"))) for path in identities}
    found = {path: module for path, module in held.items() if module is not None}
    missing = [path for path in identities if path not in found]
    if missing:
        raise CheckpointError(
            f"{archive.path} was saved from a {manifest.target} with modules {listed(missing)}, which this "
            f"{type(target).__name__} has not; it has {listed(list(modules_of(target)))}"
        )
    seen = set()
    for saved in manifest.choices:
        key = (saved.choice.path, saved.choice.method, saved.signature.key)
        if saved.choice.path not in identities or key in seen or saved.choice.method != saved.signature.method:
            raise CheckpointError(f"{archive.path} is damaged: the choice for {saved.choice.path!r} is not consistent")
        seen.add(key)
    for path, identity in identities.items():
        baked = any(s.choice.path == path and not s.live_weights and not s.recompiles for s in manifest.choices)
        state = {name for s in manifest.choices if s.choice.path == path for name in s.signature.facts.state}
        problem = mismatch(identity, found[path], weights=baked, state=state)
        if problem is not None:
            raise CheckpointError(
                f"module {path or '(model)'!r} is not the one that {archive.path} was saved from: {printable(problem)}"
            )
    return {path: found[path] for path in identities}


def _training(modules: dict[str, torch.nn.Module]) -> tuple[str, ...]:
    names = [path or "(model)" for path, module in modules.items() if module.training]
    if not names:
        return ()
    return (f"{listed(names)} in training mode, where the original runs: call .eval() on it",)


class _NotUsed(Exception):
    """A choice can't be used here; the message says why."""


@dataclass
class _Loading:
    """One load: judges every choice before any is built, builds all, prepares all. Installs nothing."""

    archive: Archive
    modules: dict[str, torch.nn.Module]
    trusted: bool
    on_untrusted: str
    on_mismatch: str
    self_test: bool | str
    compile: str
    device: str | torch.device | None
    progress: Progress
    rows: list[LoadedChoice] = field(default_factory=list)
    tests: list[PointTest] = field(default_factory=list)
    entries: list[InstalledExecutable] = field(default_factory=list)

    def run(self) -> list[Installed]:
        choices = self.archive.manifest.choices
        here = fingerprint()
        judged = [self._judge(saved, verdict(saved, self.manifest, here, trusted=self.trusted)) for saved in choices]
        try:
            for saved, (reason, found) in zip(choices, judged, strict=True):
                self._load(saved, reason, found)
            return self._prepared()
        except BaseException:
            self.close()
            raise

    @property
    def manifest(self) -> Manifest:
        return self.archive.manifest

    def close(self) -> None:
        while self.entries:
            self.entries.pop().executable.close()

    def _judge(self, saved: SavedChoice, found: Verdict) -> tuple[str, Verdict]:
        """(why the choice can't be used as it is, the verdict). Raises where the caller wants errors."""
        module = self.modules[saved.choice.path]
        method = saved.signature.method
        if method != "forward" and method not in tuned_methods(type(module)):
            return self._mismatch(saved, f"{type(module).__name__} has no method {method!r} that can be tuned"), found
        problem = signature_problem(saved.signature) or self._device_problem(saved, module)
        if problem is None and not saved.recompiles:
            problem = foreign_code(module, method)
        if problem is not None:
            return self._mismatch(saved, problem), found
        if found.code and not self.trusted:
            reason = (
                "it can run code, and this file is not trusted here; if you know where it comes from, pass "
                f"trust={self.archive.digest!r}"
            )
            if self.on_untrusted == "error":
                raise CheckpointError(f"{self._where(saved)} cannot be used: {reason}")
            return reason, found
        if found.obstacle and not (found.rebuildable and self.on_mismatch == "rebuild"):
            return self._mismatch(saved, found.obstacle), found
        return "", found

    def _mismatch(self, saved: SavedChoice, reason: str) -> str:
        if self.on_mismatch == "error":
            raise CheckpointError(f"{self._where(saved)} does not hold here: {reason}")
        return reason

    def _where(self, saved: SavedChoice) -> str:
        choice = saved.choice
        return f"{choice.candidate.label} for {module_name(choice.path)} of {self.archive.path}"

    def _devices(self, saved: SavedChoice) -> dict[str, str]:
        """Where to run what was tuned elsewhere: the device asked for, for all of its type."""
        if self.device is None:
            return {}
        wanted = torch.device(self.device)
        if wanted.type != "cpu" and wanted.index is None:
            wanted = torch.device(wanted.type, 0)
        leaves = [*saved.signature.tensor_leaves, *(x for x in saved.signature.output_leaves if hasattr(x, "device"))]
        return {leaf.device: str(wanted) for leaf in leaves if leaf.device.partition(":")[0] == wanted.type}

    def _device_problem(self, saved: SavedChoice, module: torch.nn.Module) -> str | None:
        tuned = {leaf.device.partition(":")[0] for leaf in saved.signature.tensor_leaves}
        if self.device is not None and tuned and torch.device(self.device).type not in tuned:
            return f"it was tuned on {'/'.join(sorted(tuned))}, and cannot run on {self.device}: tune it there"
        own = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}
        if own and tuned and not own & tuned:
            return f"it was tuned on {'/'.join(sorted(tuned))}, but its parameters are on {'/'.join(sorted(own))}"
        return None

    def _load(self, saved: SavedChoice, reason: str, found: Verdict) -> None:
        if not reason:
            anew = saved.recompiles or bool(found.obstacle)
            reason = self._attempt(saved, found.doubt, anew=anew, because=found.obstacle)
            if reason and not anew and self.on_mismatch == "rebuild":
                reason = self._attempt(saved, "", anew=True, because=reason)
        if reason:
            self._note(saved, "eager", reason)

    def _attempt(self, saved: SavedChoice, doubt: str, *, anew: bool, because: str) -> str:
        """Why the choice can't be used after all, or nothing if it now stands in `entries`."""
        try:
            self._make(saved, doubt, anew=anew, because=because)
        except CheckpointError:
            raise
        except _NotUsed as error:
            return self._mismatch(saved, str(error))
        except Exception as error:
            return self._mismatch(saved, f"it fails to load: {type(error).__name__}: {error}")
        return ""

    def _note(
        self,
        saved: SavedChoice,
        status: LoadStatus,
        reason: str = "",
        *,
        seconds: float = 0.0,
        notes: tuple[str, ...] = (),
    ) -> None:
        choice = saved.choice
        label = choice.candidate.label
        self.rows.append(
            LoadedChoice(choice.path, choice.method, saved.signature.label, label, status, reason, seconds, notes)
        )

    def _make(self, saved: SavedChoice, doubt: str, *, anew: bool, because: str) -> None:
        """Load or build one executable and test what has to be tested; it then stands in `entries`."""
        defer = anew and self.compile == "first_call" and self.self_test != "full" and not saved.signature.facts.mutated
        label, where = saved.choice.candidate.label, module_name(saved.choice.path)

        def progress(phase: str, fraction: float | None) -> None:
            self.progress(f"{where}: {label}: {phase}", fraction)

        progress("waiting for its first call" if defer else "building" if anew else "loading", None)
        module, devices = self.modules[saved.choice.path], self._devices(saved)
        start = time.perf_counter()
        made = make(self.archive, saved, module, devices, progress, anew=anew, defer=defer)
        seconds = time.perf_counter() - start
        try:
            notes = made.executable.notes + (() if defer else self._tested(made, saved, doubt, progress))
        except BaseException:
            made.executable.close()
            raise
        signature = on_devices(saved.signature, devices)
        choice = replace(saved.choice, signature=signature.key)
        # Golden samples, and the memory they hold, are needed no longer.
        job = replace(made.job, samples=(), progress=_silent)
        self.entries.append(InstalledExecutable(choice, signature, saved.trial, made.executable, job))
        if because:
            notes += (f"built again: {because}",)
        self._note(saved, "deferred" if defer else "rebuilt" if anew else "loaded", seconds=seconds, notes=notes)

    def _tested(self, made: Made, saved: SavedChoice, doubt: str, progress: Progress) -> tuple[str, ...]:
        """Notes on the golden samples' run, where one was asked for or is needed. Raises _NotUsed if numbers are wrong."""
        if not (self.self_test or doubt):
            return ()
        if made.job.module.training and not doubt:
            return ("not tested: the module is in training mode",)
        if not made.goldens:
            if doubt:
                raise _NotUsed(f"{doubt}, and no golden samples show that its numbers are right here")
            return ("not tested: the file has no golden samples for it that can be used here",)
        progress("comparing golden samples", None)
        tests = numbers_of(made.executable, made.job, made.goldens, saved, self.manifest.plan.tolerance)
        problem = numbers_problem(tests, saved)
        if problem is None and self.self_test == "full":
            progress("measuring golden samples", None)
            tests = measured(made.executable, made.job, made.goldens, tests)
        self.tests += tests
        if problem is not None:
            raise _NotUsed(problem)
        return (f"{doubt}; its numbers are right on the golden samples",) if doubt else ()

    def _prepared(self) -> list[Installed]:
        """The dispatch of every method, generated but not installed."""
        groups: dict[tuple[str, str], list[InstalledExecutable]] = {}
        for entry in self.entries:
            groups.setdefault((entry.choice.path, entry.choice.method), []).append(entry)
        prepared = []
        for (path, method), entries in groups.items():
            try:
                prepared.append(prepare(self.modules[path], method, path, entries, self.manifest.plan))
            except Exception as error:
                name = module_name(path)
                raise CheckpointError(f"{name} of {self.archive.path} cannot be installed: {error}") from error
        return prepared
