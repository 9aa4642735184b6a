"""Every error that aitune_lab raises on purpose.

Messages say what happened, with which values, and what to do next. All derive from `AituneError`,
so that `except ait.AituneError` catches whatever the library itself refuses and nothing else.
"""

from __future__ import annotations


class AituneError(Exception):
    """Base of all errors raised by aitune_lab."""


class AituneWarning(UserWarning):
    """Something a user should know that stops nothing: a call that ran the original module, weights that changed."""


class TargetError(AituneError):
    """The target cannot be inspected or tuned as it stands (no modules, unknown path, already tuned)."""


class DataError(AituneError):
    """The data is empty, not understood, or the target rejected it."""


class PlanError(AituneError):
    """A rule of the plan names something that doesn't exist, contradicts another rule, or is out of tolerance."""


class BackendUnavailable(AituneError):
    """A backend was asked for that cannot run here; the message holds the reason and the cure."""


class BuildError(AituneError):
    """A candidate could not be built; the reason is kept in its trial."""


class Refused(BuildError):
    """A candidate cannot keep what the module does (randomness, state, aliasing, …), so it is not tried."""


class ChildFailed(BuildError):
    """A build or the first calls of what was built failed in their own process; this one is unharmed.

    Attributes:
        cause: `"raised"` an error, `"ended"` by a signal or an exit, or stopped over a limit: `"time"`, `"memory"`, `"disk"`.
        exit_code: of the process, negative for a signal; None if it was stopped or raised.
        log: the last lines that the process wrote.
        seconds: from the start of the build to its end.
    """

    def __init__(
        self, reason: str, cause: str, *, exit_code: int | None = None, log: str = "", seconds: float = 0.0
    ) -> None:
        super().__init__(reason)
        self.cause, self.exit_code, self.log, self.seconds = cause, exit_code, log, seconds


class DeviceLost(AituneError):
    """A failure on the GPU (a device-side assert, an illegal access) ended its use in this process; start a new one."""


class SignatureMiss(AituneError):
    """A call fits no tuned signature and the user asked for an error instead of the original module."""


class CheckpointError(AituneError):
    """A `.ait` file is damaged, of another format version, or does not belong to this target."""


class StoreError(AituneError):
    """The cache folder cannot be made, is not writable, or belongs to somebody else."""


def install_command(extra: str) -> str:
    """The command that installs an extra of this package: from the clone if it is one, else from the index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("aitune-lab").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {"dir_info": {}}  # runs from a clone without being installed
    except ValueError:
        origin = {}
    return f"pip install -e '.[{extra}]'" if "dir_info" in origin else f"pip install 'aitune-lab[{extra}]'"


def with_article(name: str) -> str:
    """`a Pipe`, `an int`: for messages that name a type."""
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


class MissingDependency(AituneError, ImportError):
    """An optional package is needed for what was asked; the message holds the install command."""

    def __init__(self, package: str, purpose: str, install: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}, which is not installed. Install it with: {install}")
        self.package = package
        self.install = install
