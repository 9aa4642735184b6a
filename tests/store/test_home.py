from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from aitune_lab.errors import StoreError
from aitune_lab.store.home import VARIABLE, cache_dir, home


def test_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    assert not cache_dir().exists()
    assert home() == tmp_path / "here"
    assert home().is_dir()


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(folder))
    assert stat.S_IMODE(home().stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="owners are POSIX")
def test_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "theirs"))
    (tmp_path / "theirs").mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(StoreError, match=f"must belong to the user {user + 1}"):
        home()


def test_unusable_folder_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(StoreError, match=f"not usable.*Set {VARIABLE}"):
        home()


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/aitune-lab"),
        ("linux", {"HOME": "/home/ada"}, "/home/ada/.cache/aitune-lab"),
        ("darwin", {"HOME": "/Users/ada"}, "/Users/ada/Library/Caches/aitune-lab"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/aitune-lab"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="paths are POSIX")
def test_default_is_the_systems_cache_folder(
    system: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("aitune_lab.store.home.sys.platform", system)
    assert str(cache_dir()) == expected
