"""Looks into a `.ait` file without torch and without loading anything from it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .._display import Printed
from ..schema import Manifest, ModuleIdentity, SavedChoice
from ..schema.trial import PointResult
from ..store.trust import is_trusted
from .archive import Archive
from .report import module_name, printable


@dataclass(frozen=True)
class Description(Printed):
    """What a file says about itself; prints as text for people.

    Attributes:
        file: its path.
        digest: `sha256:…` of its manifest, and so of everything in it.
        size_bytes: of the whole file.
        trusted: whether this machine saved it.
        signed: whether it carries a signature (only a public key tells whose).
        manifest: everything else, as data.
    """

    file: str
    digest: str
    size_bytes: int
    trusted: bool
    signed: bool
    manifest: Manifest

    def __str__(self) -> str:
        manifest, print_ = self.manifest, manifest_lines(self.manifest)
        trust = (
            "saved on this machine" if self.trusted else f"not saved on this machine; trust={self.digest!r} trusts it"
        )
        lines = [
            f"{self.file}: {_size(self.size_bytes)}, tuned from {manifest.target}",
            f"  digest   {self.digest}",
            f"  trust    {trust}{'; signed' if self.signed else ''}",
            f"  saved    {manifest.created} by aitune_lab {manifest.aitune_lab}, format {manifest.format_version}",
            *print_,
        ]
        return "\n".join(printable(line) for line in lines)


def show(path: str | os.PathLike[str]) -> Description:
    """Read a file's manifest. Raises CheckpointError for a damaged file; entries' hashes are checked by `check`."""
    with Archive(path) as archive:
        return Description(
            str(path),
            archive.digest,
            archive.size_bytes,
            is_trusted(archive.digest),
            archive.signature is not None,
            archive.manifest,
        )


def manifest_lines(manifest: Manifest) -> list[str]:
    """The manifest as indented lines: environment, plan, modules with choices and figures, entries."""
    there = manifest.fingerprint
    lines = [
        f"  machine  {there.cpu}, {there.threads} threads, {', '.join(there.gpus) or 'no GPU'}, {there.platform}",
        f"  software Python {there.python}, torch {there.torch}"
        + "".join(f", {name} {version}" for name, version in there.packages.items()),
        f"  golden samples: {manifest.golden_samples}",
    ]
    for identity in manifest.modules:
        lines += _module_lines(identity, [c for c in manifest.choices if c.choice.path == identity.path])
    lines.append(f"  {len(manifest.entries)} entries")
    lines += [
        f"    {entry.name}  {_size(entry.size_bytes)}{'  can run code' if entry.code else ''}"
        for entry in manifest.entries
    ]
    lines += [f"  note: {note}" for note in manifest.notes]
    return lines


def _module_lines(identity: ModuleIdentity, choices: list[SavedChoice]) -> list[str]:
    lines = [f"  {module_name(identity.path)}: {identity.type}, {len(identity.parameters)} parameters and buffers"]
    for saved in choices:
        choice = saved.choice
        lines.append(f"    {choice.method}{saved.signature.label}")
        marks = [text for text, on in (("pinned", choice.pinned), ("error accepted", choice.accepted_error)) if on]
        kind = "rebuilt at load" if saved.recompiles else "reads the live weights" if saved.live_weights else ""
        extra = ", ".join(filter(None, [*marks, kind]))
        lines.append(f"      {choice.candidate.label}{f' ({extra})' if extra else ''}: {choice.reason}")
        lines += [
            f"        {_point_text(result)}" for result in (saved.trial.points if saved.trial is not None else ())
        ]
    return lines


def _point_text(result: PointResult) -> str:
    parts = []
    if result.latency is not None:
        parts.append(f"{result.latency.median_ms:.3g} ms (p90 {result.latency.p90_ms:.3g} ms)")
    if result.eager is not None:
        parts.append(f"eager {result.eager.median_ms:.3g} ms")
    if result.speedup is not None:
        parts.append(f"{result.speedup:.2f}×")
    if result.comparison is not None:
        parts.append(f"{result.comparison.error_class}, relative error {result.comparison.relative_l2:.1e}")
    if result.latency is not None and result.latency.disturbed:
        parts.append(f"disturbed: {result.latency.disturbed}")
    return f"{result.point.label}: {', '.join(parts) or 'not measured'}"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
