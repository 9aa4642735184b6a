"""Builds and first runs in child processes, which may crash, hang or eat memory without harm to this one."""

from .children import Build, BuildSteps, Children, Isolation, build_here, building, default_isolation, steps_here
from .limits import BuildLimits

__all__ = [
    "Build",
    "BuildLimits",
    "BuildSteps",
    "Children",
    "Isolation",
    "build_here",
    "building",
    "default_isolation",
    "steps_here",
]
