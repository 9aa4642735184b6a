"""Finds the target and data that a command is given."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect as python_inspect
import sys
from pathlib import Path
from typing import Any

from ..errors import AituneError, TargetError, with_article


def load_target(name: str) -> tuple[Any, Any]:
    """(target, data) from the function that `module:function` or `file.py:function` names.

    The current folder (a file's own folder) is searched first.

    Raises:
        TargetError: no such module or function, an import or call that fails, a result that is no pair.
    """
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise TargetError(f"a target must look like module:function or path/to/file.py:function, but got {name!r}")
    module = _import(place)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if python_inspect.isfunction(value)]
        close = difflib.get_close_matches(function_name, names, n=1) or names[:5]
        hint = f"; it has {', '.join(close)}" if close else ""
        raise TargetError(f"{place} has no function {function_name!r}{hint}")
    try:
        made = function()
    except AituneError:
        raise
    except Exception as error:
        raise TargetError(f"{name} failed: {type(error).__name__}: {error}. --debug shows where") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise TargetError(
            f"{name} must return the pair (target, data), but returned {with_article(type(made).__name__)}"
        )
    return made


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        _search_first(Path.cwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(f"{error.name}.")):
                raise TargetError(f"there is no module {place!r} in {Path.cwd()} or among those installed") from None
            raise TargetError(f"importing {place} failed: {error}") from error
        except Exception as error:
            raise TargetError(f"importing {place} failed: {type(error).__name__}: {error}") from error
    file = Path(place)
    if not file.is_file():
        raise TargetError(f"there is no file {place!r} in {Path.cwd()}")
    _search_first(file.resolve().parent)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickles look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"importing {place} failed: {type(error).__name__}: {error}") from error
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
