"""What became of a job in a child, in words."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailable, ChildFailed, Refused

LOG_CHARACTERS = 8000
_VERBS = {signal.SIGABRT: "aborted", signal.SIGSEGV: "crashed", signal.SIGBUS: "crashed", signal.SIGFPE: "crashed"}


def raise_failure(answer: dict[str, Any], log: str) -> None:
    """What became of a job that isn't done, as an error."""
    kind, stage = answer["kind"], answer.get("stage", "build")
    if kind == "refused":
        raise Refused(answer["text"])
    if kind == "unavailable":
        raise BackendUnavailable(answer["text"])
    seconds = float(answer.get("total_seconds", 0.0))
    doing = {"build": "the build", "load": "loading what was built", "call": "a first call"}[stage]
    if kind == "raised":
        what = {"build": "failed to build", "load": "failed to load", "call": "failed to run"}[stage]
        raise ChildFailed(f"{what}: {answer['text']}", "raised", log=log, seconds=seconds)
    if kind == "ended":
        code = int(answer["exit_code"])
        reason = f"{doing} ended its process with exit code {code} after {seconds:.1f} s"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            verb = _VERBS.get(-code, "was killed")  # type: ignore[call-overload]
            reason = f"{doing} {verb} ({name}) after {seconds:.1f} s"
            if code == -signal.SIGKILL:
                reason += ", perhaps because the machine ran out of memory"
        raise ChildFailed(
            f"{reason}; it ran in a process of its own", "ended", exit_code=code, log=log, seconds=seconds
        )
    if kind == "excess":
        limit, used = answer["limit"], answer["used"]
        figures = f"{limit:g} s" if answer["what"] == "time" else f"{_size(limit)} ({_size(used)} in use)"
        reason = f"stopped: {doing} went over the {answer['what']} limit of {figures}"
        raise ChildFailed(reason, answer["what"], log=log, seconds=seconds)
    raise ChildFailed(f"{answer['text']} while it was asked for {doing}", "ended", log=log, seconds=seconds)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def tail(log: Path) -> str:
    """The end of a log file; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * LOG_CHARACTERS))
            return file.read().decode("utf-8", "replace")[-LOG_CHARACTERS:]
    except OSError:
        return ""
