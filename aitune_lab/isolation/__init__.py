"""Builds and first runs in child processes, which may crash, hang or eat memory without harm to this one."""

from .children import Build, Children, Isolation, build_here, building, default_isolation
from .limits import BuildLimits

__all__ = ["Build", "BuildLimits", "Children", "Isolation", "build_here", "building", "default_isolation"]
