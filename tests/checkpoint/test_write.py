from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aitune_lab.checkpoint import archive, load, save, show
from aitune_lab.errors import AituneWarning, CheckpointError
from aitune_lab.schema import Candidate
from aitune_lab.store import trust


def test_layout(lab: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tuned.ait"
    digest = save(lab.tuned_net(), path)
    assert digest in capsys.readouterr().out
    assert trust.is_trusted(digest)
    data = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        infos = file.infolist()
        manifest = file.read("manifest.json")
    assert infos[0].filename == "manifest.json"
    assert digest == f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    entries = {entry["name"]: entry for entry in json.loads(manifest)["entries"]}
    assert {info.filename for info in infos[1:]} == entries.keys()
    for info in infos:
        name_length, extra_length = (
            int.from_bytes(data[info.header_offset + at : info.header_offset + at + 2], "little") for at in (26, 28)
        )
        start = info.header_offset + 30 + name_length + extra_length
        assert start % 64 == 0
        assert info.compress_type == zipfile.ZIP_STORED
        if info.filename in entries:
            content = data[start : start + info.file_size]
            assert entries[info.filename]["sha256"] == hashlib.sha256(content).hexdigest()
    assert any(name.startswith("modules/encoder/") and name.endswith("parts/weights.safetensors") for name in entries)
    assert b"/secret/path" not in data


def test_the_same_target_gives_the_same_entries_and_any_change_another_digest(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    net = lab.tuned_net()
    save(net, tmp_path / "a.ait")
    save(net, tmp_path / "b.ait")
    assert show(tmp_path / "a.ait").manifest.entries == show(tmp_path / "b.ait").manifest.entries
    other = save(net, tmp_path / "c.ait", golden="none")
    assert other != show(tmp_path / "a.ait").digest


def test_nothing_tuned(lab: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing but eager runs in this target"):
        save(lab.make(), tmp_path / "x.ait")
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_shows_before_any_work(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = lab.tuned_net()
    monkeypatch.setattr("aitune_lab.checkpoint.write._gather", lambda *_: pytest.fail("work was done"))
    with pytest.raises(CheckpointError, match=r"cannot write into folder .*missing"):
        save(net, tmp_path / "missing" / "x.ait")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write into folder"):
        save(net, tmp_path / "file" / "x.ait")
    with pytest.raises(CheckpointError, match=r"must be a file, but a folder is there"):
        save(net, tmp_path)


def test_existing_file_is_kept_on_request(lab: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "x.ait").write_text("old")
    with pytest.raises(CheckpointError, match=r"exists already.*overwrite=True"):
        save(lab.tuned_net(), tmp_path / "x.ait", overwrite=False)
    assert (tmp_path / "x.ait").read_text() == "old"
    save(lab.tuned_net(), tmp_path / "x.ait")
    assert show(tmp_path / "x.ait").manifest.choices


def test_a_link_is_written_through(lab: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "x.ait", tmp_path / "there" / "real.ait"
    link.symlink_to(target)
    for _ in ("dangling", "there"):
        digest = save(lab.tuned_net(), link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert show(target).digest == digest
    with pytest.raises(CheckpointError, match=r"real.ait exists already"):
        save(lab.tuned_net(), link, overwrite=False)


def test_weights_that_changed_since_tuning(lab: SimpleNamespace, tmp_path: Path) -> None:
    net = lab.tuned_net()
    with torch.no_grad():
        net.head.weight.data.view(-1)[-1].add_(1)  # moves no version counter
    with pytest.raises(CheckpointError, match=r"'head' cannot be saved: its weights changed since tuning; tune again"):
        save(net, tmp_path / "x.ait")
    assert not list(tmp_path.iterdir())
    live = lab.tuned_net("rebuilt", "rebuilt")
    nn.init.zeros_(live.head.weight)
    save(live, tmp_path / "x.ait")


@pytest.mark.parametrize("moment", ["gathering", "hashing", "writing", "flushing", "renaming"])
def test_an_interrupted_save_leaves_the_old_file(
    moment: str, lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, path = lab.tuned_net(), tmp_path / "x.ait"
    save(net, path)
    before = path.read_bytes()

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if moment == "gathering":
        monkeypatch.setattr("aitune_lab.checkpoint.write.collect", stop)
    elif moment == "hashing":
        monkeypatch.setattr("aitune_lab.checkpoint.archive.hash_of", stop)
    elif moment == "writing":
        add = archive._add
        monkeypatch.setattr(archive, "_add", lambda a, name, *r: stop() if "head" in name else add(a, name, *r))
    elif moment == "flushing":
        monkeypatch.setattr("aitune_lab.checkpoint.archive.os.fsync", stop)
    else:
        monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save(net, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_clear_error(lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    net = lab.tuned_net()
    monkeypatch.setattr("aitune_lab.checkpoint.archive.os.fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left"):
        save(net, tmp_path / "x.ait")
    assert not list(tmp_path.iterdir())


def test_a_file_that_changes_while_saved_is_noticed(
    lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = lab.tuned_net()
    original = archive.hash_of
    monkeypatch.setattr(archive, "hash_of", lambda source: (original(source)[0], "0" * 64))
    with pytest.raises(CheckpointError, match=r"changed while it was being saved"):
        save(net, tmp_path / "x.ait")


def test_artifact_gone_or_linked(lab: SimpleNamespace, tmp_path: Path) -> None:
    from aitune_lab.runtime.installed import installed_in

    net = lab.tuned_net()
    folder = installed_in(net)[0].entries[0].job.folder
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=r"symbolic link"):
        save(net, tmp_path / "x.ait")
    folder.rename(folder.with_name(f"{folder.name}-moved"))
    with pytest.raises(CheckpointError, match=r"no longer in .*tune again"):
        save(net, tmp_path / "x.ait")


def test_rebuilt_choices_store_no_artifact(lab: SimpleNamespace, tmp_path: Path) -> None:
    save(lab.tuned_net(encoder="rebuilt"), tmp_path / "x.ait")
    encoder, head = show(tmp_path / "x.ait").manifest.choices
    assert (encoder.artifact, encoder.recompiles, encoder.live_weights) == ((), True, True)
    assert (len(head.artifact), head.recompiles, head.live_weights) == (2, False, False)


def test_unusable_cache_only_warns(lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AITUNE_LAB_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(AituneWarning, match=r"is saved, but not noted as trusted"):
        save(lab.tuned_net(), tmp_path / "x.ait")
    assert show(tmp_path / "x.ait").manifest.choices


def test_bad_options(lab: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"golden must be .* but got 'real'"):
        save(lab.tuned_net(), tmp_path / "x.ait", golden="real")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(3, 3)
        self.AUX = nn.Linear(3, 3)
        self.parts = nn.ModuleDict({"a b/c": nn.Linear(3, 3), "a_b:c": nn.Linear(3, 3), "ü": nn.Linear(3, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.aux, self.AUX, *self.parts.values()):
            x = part(x)
        return x


def test_odd_module_names_become_file_names(lab: SimpleNamespace, tmp_path: Path) -> None:
    net = lab.make(Odd)
    paths = ["aux", "AUX", "parts.a b/c", "parts.a_b:c", "parts.ü"]
    lab.tune(net, {path: Candidate("data") for path in paths}, lambda: net(lab.inputs(2)))
    save(net, tmp_path / "x.ait")
    fresh = lab.make(Odd)
    assert len(load(fresh, tmp_path / "x.ait").loaded) == 5
    with torch.no_grad():
        assert torch.equal(fresh(lab.inputs(2)), net(lab.inputs(2)))


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_permissions_follow_the_umask(lab: SimpleNamespace, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save(lab.tuned_net(), tmp_path / "x.ait")
    finally:
        os.umask(old)
    assert (tmp_path / "x.ait").stat().st_mode & 0o777 == 0o640
