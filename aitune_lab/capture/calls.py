"""Calls normalised by the parameters of the function called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .structure import is_value, value_text

Parameter = inspect.Parameter


class CallForm:
    """Binds calls of one function to its parameters and back.

    A normalised call maps parameter names to values, in the parameters' order. Arguments equal to their default are
    left out, so that positional, keyword and spelled-out default are one call. `*args` stands as a tuple under
    `"*args"`, `**kwargs` as a dict under `"**kwargs"`, both only if they hold something.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        self.parameters = tuple(self.signature.parameters.values())

    def normalize(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call by parameter name. Raises TypeError as the function itself would for a wrong call."""
        bound = self.signature.bind(*args, **kwargs).arguments
        call: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name not in bound:
                continue
            value = bound[parameter.name]
            if parameter.kind is Parameter.VAR_POSITIONAL:
                if value:
                    call[f"*{parameter.name}"] = value
            elif parameter.kind is Parameter.VAR_KEYWORD:
                if value:
                    call[f"**{parameter.name}"] = dict(value)
            elif not is_default(value, parameter.default):
                call[parameter.name] = value
        return call

    def arguments(self, call: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of a normalised call.

        Parameters with a default go by keyword (decorated forwards count positional arguments themselves), unless
        `*args` follow, where everything before must be positional.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = any(name.startswith("*") and not name.startswith("**") for name in call)
        for parameter in self.parameters:
            name, kind = parameter.name, parameter.kind
            if kind is Parameter.VAR_POSITIONAL:
                args.extend(call.get(f"*{name}", ()))
                positional = False
            elif kind is Parameter.VAR_KEYWORD:
                kwargs.update(call.get(f"**{name}", {}))
            elif kind is Parameter.POSITIONAL_ONLY or (kind is Parameter.POSITIONAL_OR_KEYWORD and positional):
                if name in call:
                    args.append(call[name])
                elif positional or any(self._positional_only_after(name, call)):
                    args.append(parameter.default)
            elif name in call:
                if parameter.default is Parameter.empty and kind is Parameter.POSITIONAL_OR_KEYWORD and not kwargs:
                    args.append(call[name])
                else:
                    kwargs[name] = call[name]
        return tuple(args), kwargs

    def _positional_only_after(self, name: str, call: Mapping[str, Any]) -> list[bool]:
        names = [p.name for p in self.parameters if p.kind is Parameter.POSITIONAL_ONLY]
        return [later in call for later in names[names.index(name) + 1 :]] if name in names else []


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument says the same as leaving it out. Tensors and other objects count by identity."""
    if value is default:
        return True
    return type(value) is type(default) and is_value(value) and value_text(value) == value_text(default)
