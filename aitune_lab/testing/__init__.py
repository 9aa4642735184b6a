"""For tests of aitune_lab and of backends: a scripted backend, a scripted meter and clock, tiny models."""

from .clock import ScriptedClock
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
    "ScriptedBackend",
    "ScriptedClock",
    "ScriptedConfig",
    "ScriptedMeter",
    "install_scripted",
    "prepare_scripted",
    "record_calls",
    "scripted_backend",
]
