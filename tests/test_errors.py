"""What error messages are made of."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from aitune_lab.errors import install_command, with_article


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"url": "file:///clone", "dir_info": {"editable": true}}', "pip install -e '.[report]'"),
        ('{"url": "file:///clone", "dir_info": {}}', "pip install -e '.[report]'"),
        ('{"url": "https://host/x.whl", "archive_info": {}}', "pip install 'aitune-lab[report]'"),
        (None, "pip install 'aitune-lab[report]'"),
        ("no JSON", "pip install 'aitune-lab[report]'"),
    ],
)
def test_a_clone_installs_its_own_extras(origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert install_command("report") == command


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command("demo") == "pip install -e '.[demo]'"


def test_articles() -> None:
    assert [with_article(name) for name in ("Pipe", "int", "object")] == ["a Pipe", "an int", "an object"]
