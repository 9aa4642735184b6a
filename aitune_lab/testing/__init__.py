"""For tests of aitune_lab and of backends: contract tests, a scripted backend, a scripted meter and clock, tiny models."""

from .clock import ScriptedClock
from .contract import BackendContract
from .scripted import (
    ScriptedBackend,
    ScriptedConfig,
    ScriptedMeter,
    install_scripted,
    prepare_scripted,
    record_calls,
    scripted_backend,
)

__all__ = [
    "BackendContract",
    "ScriptedBackend",
    "ScriptedClock",
    "ScriptedConfig",
    "ScriptedMeter",
    "install_scripted",
    "prepare_scripted",
    "record_calls",
    "scripted_backend",
]
