from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aitune_lab.errors import StoreError
from aitune_lab.store import trust
from aitune_lab.store.home import VARIABLE

A, B = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "trusted-digests.txt"


def test_what_was_added_is_trusted(store: Path) -> None:
    assert not trust.is_trusted(A)
    assert not store.parent.exists()
    trust.add(A)
    assert trust.is_trusted(A)
    assert not trust.is_trusted(B)
    assert trust.trusted() == {A}
    if os.name == "posix":
        assert stat.S_IMODE(store.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "g" * 64, "md5:" + "a" * 64, A + "\n" + B])
def test_only_digests_are_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        trust.add(text)


def test_torn_and_foreign_lines_are_ignored(store: Path) -> None:
    trust.add(A)
    with store.open("a") as stream:
        stream.write("sha256:bbbb")
    trust.add(B)
    assert trust.trusted() == {A, B}


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_a_store_that_others_can_write_counts_for_nothing(store: Path) -> None:
    trust.add(A)
    store.chmod(0o666)
    assert not trust.is_trusted(A)
    store.chmod(0o600)
    store.parent.chmod(0o777)
    assert not trust.is_trusted(A)


@pytest.mark.skipif(os.name != "posix", reason="symbolic links need rights elsewhere")
def test_a_link_is_not_followed(store: Path, tmp_path: Path) -> None:
    store.parent.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_text(f"{A}\n")
    store.symlink_to(tmp_path / "elsewhere")
    assert not trust.is_trusted(A)
    with pytest.raises(StoreError, match="cannot note a trusted digest"):
        trust.add(B)


def test_several_processes_lose_nothing(store: Path) -> None:
    code = (
        "import sys; from aitune_lab.store import trust\n"
        "for i in range(50): trust.add(f'sha256:{int(sys.argv[1]) * 1000 + i:064x}')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert trust.trusted() == {f"sha256:{n * 1000 + i:064x}" for n in range(3) for i in range(50)}


def test_needs_no_torch() -> None:
    code = "import sys, aitune_lab.store.trust; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
