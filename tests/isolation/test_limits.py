"""Limits are figures, and messages come whole or not at all."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from aitune_lab.isolation import BuildLimits
from aitune_lab.isolation.limits import Watch, size_on_disk
from aitune_lab.isolation.wire import Channel


def test_limits_are_checked_and_filled_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seconds must be positive, but got 0"):
        BuildLimits(seconds=0)
    settled = BuildLimits(seconds=5, disk_bytes=7).settled(tmp_path)
    assert (settled.seconds, settled.disk_bytes) == (5, 7)
    assert 0 < (settled.memory_bytes or 0) < psutil.virtual_memory().total


def test_watch_tells_what_is_over(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(bytes(1 << 20))
    this = [psutil.Process()]
    assert Watch(BuildLimits(60, 1 << 50, 1 << 20), [tmp_path]).excess(this) is None
    over = Watch(BuildLimits(60, 1, 1 << 20), [tmp_path]).excess(this)
    assert over is not None
    assert (over.what, over.limit) == ("memory", 1)
    watch = Watch(BuildLimits(60, 1 << 50, 1 << 20), [tmp_path])
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "more").write_bytes(bytes(2 << 20))
    over = watch.excess(this)
    assert over is not None
    assert over.what == "disk"
    assert over.used >= 2 << 20
    assert watch.peak_bytes > 0


def test_size_of_what_is_not_there(tmp_path: Path) -> None:
    assert size_on_disk(tmp_path / "nothing") == 0


def test_messages_come_whole() -> None:
    here, there = socket.socketpair()
    channel = Channel(here)
    other = Channel(there)
    other.send({"kind": "first", "text": "ä" * 10_000})
    other.send({"kind": "second"})
    there.sendall(b"\x00\x00")
    assert channel.receive(10.0) == {"kind": "first", "text": "ä" * 10_000}
    assert channel.receive(10.0) == {"kind": "second"}
    assert channel.receive(0.0) is None
    other.close()
    with pytest.raises(EOFError):
        channel.receive(10.0)
    channel.close()
