"""What a script must import, define and register before the names in it mean what they meant where it was written."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from types import FunctionType
from typing import Any

from ..backends import registry
from ..backends.base import Backend

_PACKAGE = __name__.partition(".")[0]
_BUILT_IN = f"{_PACKAGE}.backends."


class Definitions:
    """Names of classes and functions in a script, and how it comes by them.

    What can be imported is, by its path; for what was defined in a notebook a comment asks for its definition.

    Args:
        taken: names that mean something else in the script.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self._taken = set(taken)
        self._names: dict[Any, str] = {}
        self._imports: dict[str, None] = {}
        self._lines: dict[str, None] = {}

    def name_of(self, thing: type | FunctionType) -> str:
        """The expression that a class or function goes by in the script."""
        if thing not in self._names:
            self._names[thing] = self._named(thing)
        return self._names[thing]

    def ask_for(self, name: str, what: str) -> None:
        """Say that the script's user has to define a name first."""
        self._lines[f"# {name} is yours, {what}: define it here."] = None

    def use_backend(self, name: str, known: type[Backend] | None = None) -> None:
        """See to it that a backend is registered: built-in ones and those of installed packages are by themselves."""
        if name not in registry.names():
            if known is None:
                self._lines[f"# The backend {name!r} is yours: register its class here."] = None
                return
        elif not registry.is_imported(name):
            return
        backend = known or registry.get(name)
        if not backend.__module__.startswith(_BUILT_IN):
            self._imports[f"from {_PACKAGE}.backends import registry"] = None
            there = self.name_of(backend)  # its definition is asked for first
            self._lines[f"registry.register({there})"] = None

    def imports(self) -> list[str]:
        """The lines that import."""
        return sorted(self._imports)

    def lines(self) -> list[str]:
        """The lines that come before the first use: what is to be defined and registered."""
        return list(self._lines)

    def _named(self, thing: type | FunctionType) -> str:
        name = thing.__name__
        if is_importable(thing):
            if thing.__module__.startswith(f"{_PACKAGE}.") and name in sys.modules[_PACKAGE].__all__:
                return f"ait.{name}"
            alias = self._free(name)
            renamed = "" if alias == name else f" as {alias}"
            self._imports[f"from {thing.__module__} import {name}{renamed}"] = None
            return alias
        alias = self._free(name)
        renamed = "" if alias == name else f" (there {name})"
        self._lines[f"# {alias} is yours: bring the definition of {described(thing)}{renamed} here."] = None
        return alias

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def is_importable(thing: Any) -> bool:
    """Whether another process finds this very class or function by its module and name."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__name__", "")
    return module != "__main__" and getattr(sys.modules.get(module or ""), name, None) is thing


def described(value: Any) -> str:
    """What a value is, in a few words and without addresses in memory."""
    if isinstance(value, type):
        return "the class"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}" if value.__name__ != "<lambda>" else "a lambda"
    written = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return (
        written if len(written) <= 60 and not written.startswith("<") else f"an object of class {type(value).__name__}"
    )
