"""Saves what is tuned in a target as one `.ait` file."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from ..backends import registry
from ..environment import fingerprint
from ..errors import AituneWarning, CheckpointError, StoreError
from ..runtime.installed import Installed, InstalledExecutable, installed_in
from ..runtime.weights import content_digest
from ..schema import FORMAT_VERSION, Manifest, ModuleIdentity, Plan, SavedChoice
from ..store import trust
from .archive import Source, entries_of, manifest_bytes, name_problem, replacing, write_archive
from .golden import collect, described, pack
from .identity import identity_of
from .signing import sign as sign_message
from .structure import class_name

GoldenSamples = Literal["synthetic", "recorded", "none"]


def save(
    target: Any,
    path: str | os.PathLike[str],
    *,
    golden: GoldenSamples = "synthetic",
    overwrite: bool = True,
    sign: str | os.PathLike[str] | None = None,
) -> str:
    """Save everything that is tuned in a target, so that `load` can use it on a freshly built one.

    Args:
        target: a tuned target; it is not changed.
        path: the file, by custom `….ait`. Until everything is written it is as it was. A symbolic link is followed.
        golden: the samples that travel along for the self-test: `"synthetic"` (same shapes and ranges, none of the
            user's values), `"recorded"` (the user's own inputs), or `"none"`.
        overwrite: replace an existing file.
        sign: PEM file of an Ed25519 private key; whoever has the public key can then trust the file by it.

    Returns:
        The file's digest, `sha256:…`, which is printed too. It is the SHA-256 of the manifest, which in turn holds the
        SHA-256 of every entry. Files saved by this machine are trusted by `load` on this machine.

    Raises:
        CheckpointError: nothing is tuned, weights changed since tuning, the folder can't be written, the file exists and `overwrite` is off.
    """
    if golden not in ("synthetic", "recorded", "none"):
        raise CheckpointError(f"golden must be 'synthetic', 'recorded' or 'none', but got {golden!r}")
    installed = installed_in(target)
    if not installed:
        raise CheckpointError(
            "nothing but eager runs in this target, so there is nothing to save: aitune_lab.tune was not called, or it "
            "kept eager everywhere (its result says why)"
        )
    destination = Path(os.path.realpath(path))
    with replacing(destination, overwrite=overwrite) as stream:
        manifest, sources = _gather(target, installed, golden)
        signature = sign_message(sign, manifest_bytes(manifest)) if sign is not None else None
        digest = write_archive(stream, manifest, sources, signature)
    try:
        trust.add(digest)
    except StoreError as error:
        warnings.warn(
            f"{path} is saved, but not noted as trusted on this machine: {error}", AituneWarning, stacklevel=2
        )
    print(f"saved {path}: {digest}")  # noqa: T201 - the digest is what one hands on beside the file
    return digest


def _gather(target: Any, installed: list[Installed], golden: GoldenSamples) -> tuple[Manifest, dict[str, Source]]:
    sources: dict[str, Source] = {}
    code: list[str] = []
    choices: list[SavedChoice] = []
    notes: list[str] = []
    identities: dict[str, ModuleIdentity] = {}
    folders = _folder_names(item.path for item in installed)
    for item in installed:
        _check_weights(item)
        if item.path not in identities:
            identities[item.path] = identity_of(item.path, item.module)
        for entry in item.entries:
            folder = f"modules/{folders[item.path]}/{entry.signature.key}"
            saved, files, remarks = _saved(entry, folder, golden)
            sources |= files
            notes += remarks
            choices.append(saved)
            if registry.get(entry.choice.candidate.backend).runs_code:
                code += saved.artifact
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        aitune_lab=__version__,
        target=class_name(target),
        fingerprint=fingerprint(),
        plan=_plan(installed),
        modules=tuple(identities.values()),
        choices=tuple(choices),
        entries=entries_of(sources, code),
        golden_samples=golden,
        notes=tuple(notes),
    )
    return manifest, sources


def _check_weights(item: Installed) -> None:
    """Raise unless the module still has the weights that its executables were made from."""
    baked = {entry.digest for entry in item.dispatch.entries if entry.digest is not None}
    if baked and baked != {content_digest(item.module)}:
        raise CheckpointError(
            f"module {item.path or '(model)'!r} cannot be saved: its weights changed since tuning; tune again"
        )


def _saved(
    entry: InstalledExecutable, folder: str, golden: GoldenSamples
) -> tuple[SavedChoice, dict[str, Source], list[str]]:
    """One choice with the files that belong to it, and remarks on golden samples left out."""
    files: dict[str, Source] = {}
    artifact: list[str] = []
    if not entry.executable.recompiles:
        for file in _artifact_files(entry):
            name = f"{folder}/artifact/{file.relative_to(entry.job.folder).as_posix()}"
            files[name] = file
            artifact.append(name)
    remarks: list[str] = []
    samples = []
    golden_name = f"{folder}/golden.safetensors"
    if golden != "none":
        kept, remarks = collect(entry.job, synthetic=golden == "synthetic")
        if kept:
            files[golden_name] = pack(kept)
            samples = [described(item) for item in kept]
    saved = SavedChoice(
        choice=entry.choice,
        signature=entry.signature,
        # Logs hold paths and messages of the machine where it was built; nobody needs them elsewhere.
        trial=replace(entry.trial, log="") if entry.trial is not None else None,
        artifact=tuple(artifact),
        golden=(golden_name,) if samples else (),
        live_weights=entry.executable.live_weights,
        recompiles=entry.executable.recompiles,
        folder=f"{folder}/artifact",
        samples=tuple(samples),
    )
    return saved, files, remarks


def _artifact_files(entry: InstalledExecutable) -> list[Path]:
    folder, label = entry.job.folder, entry.choice.candidate.label
    if not folder.is_dir():
        raise CheckpointError(
            f"the files of {label} for {entry.choice.path!r} are no longer in {folder}: tune again, then save"
        )
    found = sorted(folder.rglob("*"))
    links = [file for file in found if file.is_symlink()]
    if links:
        raise CheckpointError(f"the artifact of {label} for {entry.choice.path!r} holds a symbolic link: {links[0]}")
    return [file for file in found if file.is_file()]


def _plan(installed: list[Installed]) -> Plan:
    """The plan of the latest tuning; modules of one target are tuned by one plan."""
    return installed[-1].plan


def _folder_names(paths: Iterable[str]) -> dict[str, str]:
    """A folder name for each module path, readable and different also where letter case doesn't count."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for path in paths:
        if path in names:
            continue
        base = re.sub(r"[^A-Za-z0-9._-]", "_", path)[:80].strip("._") or "model"
        if name_problem(base) is not None:  # a name that some system reserves, such as "aux"
            base = f"m_{base}"
        name, number = base, 1
        while name.casefold() in taken:
            number += 1
            name = f"{base}~{number}"
        taken.add(name.casefold())
        names[path] = name
    return names
