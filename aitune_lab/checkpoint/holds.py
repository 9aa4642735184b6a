"""Whether a saved choice holds on this machine: entry by entry, by what its artifact depends on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..backends import registry
from ..backends.base import Availability, Ties
from ..errors import PlanError
from ..schema import Fingerprint, Manifest, SavedChoice


@dataclass(frozen=True)
class Verdict:
    """What stands against using a saved choice here; both empty if nothing does.

    `obstacle` makes its files unusable, `rebuildable` says that its backend can make them anew here; `doubt` lets them
    be used once golden samples show that the numbers are right. `code` says that loading them can run code, so that
    they need trust first.
    """

    obstacle: str = ""
    rebuildable: bool = False
    doubt: str = ""
    code: bool = False


def verdict(saved: SavedChoice, manifest: Manifest, here: Fingerprint, *, trusted: bool) -> Verdict:
    """Judge a choice by what is installed here.

    Files that hold native code (`runs_code`) are bound to what their backend's `ties` say of versions, CPU and GPU; files
    that hold data (`.onnx`) are read by other versions too, but their figures were not measured with those. What is
    rebuilt at load depends on nothing but its backend. Backends of other packages are imported only if `trusted`: a
    file must not decide what is imported.
    """
    name = saved.choice.candidate.backend
    flagged = {entry.name for entry in manifest.entries if entry.code}
    code = any(artifact in flagged for artifact in saved.artifact)
    if not registry.is_imported(name):
        if name not in registry.names():
            return Verdict(f"backend {name!r} is not installed here", code=code)
        if not trusted:
            return Verdict(code=True)
    try:
        backend = registry.get(name)
        ties = backend.of(saved.choice.candidate).ties()
        available = backend.available()
    except PlanError as error:
        return Verdict(str(error), code=code)
    except Exception as error:
        return Verdict(f"backend {name!r} cannot be imported: {error}", code=code)
    code = code or (backend.runs_code and not saved.recompiles)
    if not available.ok:
        cure = f"; {available.cure}" if available.cure else ""
        return Verdict(f"backend {name!r} is not available here: {available.reason}{cure}", code=code)
    kinds = {leaf.device.partition(":")[0] for leaf in saved.signature.tensor_leaves}
    if "cuda" in kinds and not here.gpus:
        return Verdict("it was tuned on a GPU, and there is none here", code=code)
    if saved.recompiles or not saved.artifact:
        return Verdict(code=code)
    if code:
        bound = _changed_versions(saved, available, here, ties)
        bound += _changed_hardware(manifest.fingerprint, here, ties, gpu="cuda" in kinds)
        return Verdict(f"it was built for {'; '.join(bound)}" if bound else "", rebuildable=True, code=True)
    changed = _changed_versions(saved, available, here, Ties())
    return Verdict(doubt=f"it was measured with {'; '.join(changed)}" if changed else "")


def _changed_versions(saved: SavedChoice, available: Availability, here: Fingerprint, ties: Ties) -> list[str]:
    now: Mapping[str, str] = {"torch": here.torch, **here.packages, **available.versions}
    recorded = saved.trial.versions if saved.trial is not None else {}
    return [
        f"{name} {version}, here is {now[name]}"
        for name, version in recorded.items()
        if name in now and not ties.version_holds(version, now[name])
    ]


def _changed_hardware(there: Fingerprint, here: Fingerprint, ties: Ties, *, gpu: bool) -> list[str]:
    systems = [there.platform, here.platform]
    if not ties.cpu:  # nor to the C library, which stands behind the system's name
        systems = [system.partition(",")[0] for system in systems]
    found = [
        f"{what} {old}, here is {new}"
        for what, (old, new) in (("machine", (there.machine, here.machine)), ("system", systems))
        if old != new
    ]
    lacking = sorted({*there.cpu_flags} - {*here.cpu_flags}) if ties.cpu else []
    if lacking:
        found.append(f"a CPU with {', '.join(lacking)}, which this one lacks")
    pairs = itertools.product(there.compute_capabilities or ("",), here.compute_capabilities)
    if gpu and not any(ties.gpu_holds(old, new) for old, new in pairs):
        wanted = f"{ties.oldest_gpu} or newer" if ties.oldest_gpu else "/".join(there.compute_capabilities)
        found.append(f"compute capability {wanted}, here is {'/'.join(here.compute_capabilities)}")
    return found
