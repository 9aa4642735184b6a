from __future__ import annotations

import contextlib
import json
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from aitune_lab.checkpoint import check, load, save, show
from aitune_lab.checkpoint.archive import MAX_ENTRIES, Archive, name_problem
from aitune_lab.errors import CheckpointError
from aitune_lab.runtime.installed import installed_in

ENTRY = "modules/encoder/"


@pytest.fixture
def saved(lab: SimpleNamespace, tmp_path: Path) -> Path:
    save(lab.tuned_net(), tmp_path / "tuned.ait")
    return tmp_path / "tuned.ait"


def refused(lab: SimpleNamespace, path: Path, message: str) -> None:
    """Every way into the file gives one CheckpointError, and a target stays as it was."""
    net = lab.make()
    for use in (lambda: load(net, path), lambda: check(path), lambda: show(path)):
        with pytest.raises(CheckpointError, match=message):
            use()
    assert not installed_in(net)


def first_entry(path: Path) -> str:
    return next(entry.name for entry in show(path).manifest.entries)


# --- names --------------------------------------------------------------------------------------------------------

BAD_NAMES = [
    "/etc/passwd", "../evil", "modules/../../evil", "modules/./x", "modules//x", "a\\b", "C:/x", "a\x00b", "a\nb",
    "x" * 500, "nul", "modules/aux.txt", "modules/x.", "modules/x ", "~/../x", "modules/\u202ex",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_leave_the_folder(name: str, lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    assert name_problem(name) is not None
    old = first_entry(saved)

    def rename(data: dict[str, Any]) -> None:
        data["entries"][0]["name"] = name
        for choice in data["choices"]:
            choice["artifact"] = [name if n == old else n for n in choice["artifact"]]

    bad = lab.rewrite(saved, tmp_path / "x.ait", manifest=rename, rename={old: name})
    refused(lab, bad, "is not allowed|must hold the same entries|no complete zip")


@given(st.text(max_size=60))
def test_accepted_names_stay_below_their_folder(name: str) -> None:
    if name_problem(name) is None:
        root = Path("/some/folder")
        assert (root / name).resolve().is_relative_to(root)


def test_files_outside_the_choices_folder(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def point_elsewhere(data: dict[str, Any]) -> None:
        data["choices"][0]["folder"] = "modules/encoder/elsewhere"

    refused(lab, lab.rewrite(saved, tmp_path / "x.ait", manifest=point_elsewhere), "files outside its folder")


# --- entries ------------------------------------------------------------------------------------------------------


def add(name: str, data: bytes = b"", **attributes: Any) -> Callable[[zipfile.ZipFile], None]:
    def extra(archive: zipfile.ZipFile) -> None:
        info = zipfile.ZipInfo(name)
        for key, value in attributes.items():
            setattr(info, key, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr(info, data)

    return extra


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (add("modules/more"), "same entries, but differ in .*modules/more"),
        (add("manifest.json", b"{}"), "'manifest.json' is not allowed: it stands there twice"),
        (add("MANIFEST.json", b"{}"), "it stands there twice"),
        (add("modules/link", b"/etc/passwd", external_attr=(stat.S_IFLNK | 0o777) << 16), "not a plain file"),
        (add("modules/folder/"), "is not allowed"),
        (add("modules/zeros", b"\0" * 10_000, compress_type=zipfile.ZIP_DEFLATED), "it is compressed"),
    ],
)
def test_entries_that_should_not_be_there(
    extra: Any, message: str, lab: SimpleNamespace, saved: Path, tmp_path: Path
) -> None:
    refused(lab, lab.rewrite(saved, tmp_path / "x.ait", extra=extra), message)


def test_overlapping_entries(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def overlap(archive: zipfile.ZipFile) -> None:
        last = archive.infolist()[-1]
        info = zipfile.ZipInfo("modules/again")
        info.header_offset, info.CRC = last.header_offset, last.CRC
        info.file_size = info.compress_size = last.file_size
        archive.filelist.append(info)

    refused(lab, lab.rewrite(saved, tmp_path / "x.ait", extra=overlap), "overlaps another entry")


@pytest.mark.parametrize("size", [10_000_000, 2**33, 2**62])
def test_huge_declared_sizes(size: int, lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def inflate(archive: zipfile.ZipFile) -> None:
        info = archive.infolist()[-1]
        info.file_size = info.compress_size = size

    refused(lab, lab.rewrite(saved, tmp_path / "x.ait", extra=inflate), "larger than the file|no complete zip")


def test_too_many_entries(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def many(archive: zipfile.ZipFile) -> None:
        for i in range(MAX_ENTRIES):
            archive.writestr(f"x/{i}", b"")

    refused(lab, lab.rewrite(saved, tmp_path / "x.ait", extra=many), f"at most {MAX_ENTRIES} entries")


def test_renamed_and_missing_entries(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    name = first_entry(saved)
    renamed = lab.rewrite(saved, tmp_path / "x.ait", rename={name: "modules/encoder/other"})
    refused(lab, renamed, "same entries, but differ")

    def drop(data: dict[str, Any]) -> None:
        del data["entries"][0]

    refused(lab, lab.rewrite(saved, tmp_path / "y.ait", manifest=drop), "same entries, but differ")

    def unknown(data: dict[str, Any]) -> None:
        data["choices"][0]["golden"] = ["modules/none"]

    refused(lab, lab.rewrite(saved, tmp_path / "z.ait", manifest=unknown), "names entries that aren't there")

    def twice(data: dict[str, Any]) -> None:
        data["entries"].append(data["entries"][0])

    refused(lab, lab.rewrite(saved, tmp_path / "w.ait", manifest=twice), "names an entry twice")


def test_wrong_hash_and_wrong_size(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def rename_hash(data: dict[str, Any]) -> None:
        for entry in data["entries"]:
            entry["sha256"] = "0" * 64

    bad = lab.rewrite(saved, tmp_path / "x.ait", manifest=rename_hash)
    with pytest.raises(CheckpointError, match=r"does not have the hash"):
        load(lab.make(), bad)
    with pytest.raises(CheckpointError, match=r"does not have the hash"):
        check(bad)

    def resize(data: dict[str, Any]) -> None:
        data["entries"][0]["size_bytes"] += 1

    refused(lab, lab.rewrite(saved, tmp_path / "y.ait", manifest=resize), r"must have \d+ bytes, but has")


# --- manifests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "no JSON|manifest.json"),
        (b"[]", "not a valid Manifest"),
        (b"[" * 200_000, "manifest.json"),
        (b"\xff\xfe", "manifest.json"),
        (b'{"format_version": 1}', "not a valid Manifest"),
        (b'{"format_version": 99, "aitune_lab": "7.0"}', "format version 99, written by aitune_lab '7.0'.*Upgrade"),
    ],
)
def test_manifests_that_are_none(content: bytes, message: str, lab: SimpleNamespace, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.ait", "w") as archive:
        archive.writestr("manifest.json", content)
    refused(lab, tmp_path / "x.ait", message)


def test_what_a_newer_writer_adds_is_let_through(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def more(data: dict[str, Any]) -> None:
        data["colour"] = data["choices"][0]["colour"] = "blue"

    assert len(load(lab.make(), lab.rewrite(saved, tmp_path / "x.ait", manifest=more)).loaded) == 2


def test_files_that_are_none(lab: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "text.ait").write_text("hello")
    (tmp_path / "empty.ait").write_bytes(b"")
    refused(lab, tmp_path / "text.ait", "no complete zip file")
    refused(lab, tmp_path / "empty.ait", "no complete zip file")
    refused(lab, tmp_path / "missing.ait", "cannot open .*missing.ait: No such file")
    refused(lab, tmp_path, "cannot open .*: Is a directory")
    with zipfile.ZipFile(tmp_path / "other.ait", "w") as archive:
        archive.writestr("data.pkl", b"")
    refused(lab, tmp_path / "other.ait", "holds no manifest.json; not a file saved by aitune_lab")


def test_inconsistent_choices(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def double(data: dict[str, Any]) -> None:
        data["choices"].append(data["choices"][0])

    def stray(data: dict[str, Any]) -> None:
        data["choices"][0]["choice"]["path"] = "body"

    for i, change in enumerate((double, stray)):
        with pytest.raises(CheckpointError, match=r"is not consistent"):
            load(lab.make(), lab.rewrite(saved, tmp_path / f"{i}.ait", manifest=change))


# --- properties ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A file's bytes, saved once for all examples."""
    return {"folder": tmp_path_factory.mktemp("flips")}


settings_here = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def bytes_of(lab: SimpleNamespace, shared_file: dict[str, Any]) -> bytes:
    if "data" not in shared_file:
        path = shared_file["folder"] / "tuned.ait"
        with contextlib.redirect_stdout(None):
            save(lab.tuned_net(), path)
        shared_file["data"] = path.read_bytes()
    data: bytes = shared_file["data"]
    return data


def all_or_nothing(lab: SimpleNamespace, shared_file: dict[str, Any], content: bytes) -> None:
    """A changed file is refused with the target untouched, or does what the original does."""
    path = shared_file["folder"] / "changed.ait"
    path.write_bytes(content)
    net = lab.make()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = load(net, path)
    except CheckpointError:
        assert not installed_in(net)
        return
    assert len(report.loaded) == 2
    with torch.no_grad():
        torch.testing.assert_close(net(lab.inputs(2)), lab.make()(lab.inputs(2)))


@settings_here
@given(data=st.data())
def test_a_flipped_byte_is_noticed_or_without_effect(
    data: st.DataObject, lab: SimpleNamespace, shared_file: dict[str, Any]
) -> None:
    content = bytearray(bytes_of(lab, shared_file))
    # Structure stands at both ends of a zip; half of the flips go there.
    anywhere = st.integers(0, len(content) - 1)
    ends = st.integers(0, 199) | st.integers(len(content) - 700, len(content) - 1)
    content[data.draw(anywhere | ends)] ^= data.draw(st.integers(1, 255))
    all_or_nothing(lab, shared_file, bytes(content))


@settings_here
@given(data=st.data())
def test_a_file_cut_short_is_refused(data: st.DataObject, lab: SimpleNamespace, shared_file: dict[str, Any]) -> None:
    content = bytes_of(lab, shared_file)
    path = shared_file["folder"] / "cut.ait"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError), Archive(path):
        pass


def json_leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in json_leaves(v, (*path, k))]
    if isinstance(value, list) and value:
        return [p for k, v in enumerate(value) for p in json_leaves(v, (*path, k))]
    return [path]


hostile = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        "",
        "nan",
        "../x",
        "subprocess:Popen",
        "x):\n  import os",
        "dict",
        "leaf",
        [],
        {},
        [[]],
    ]
)


@settings_here
@given(data=st.data())
def test_a_hostile_manifest_never_crashes_or_half_loads(
    data: st.DataObject, lab: SimpleNamespace, shared_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any value of the manifest replaced by an attacker, checksums right: an error of ours, eager, or the right answer."""
    bytes_of(lab, shared_file)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a file started a process"))

    def change(manifest: dict[str, Any]) -> None:
        *parents, last = data.draw(st.sampled_from(json_leaves(manifest)))
        at: Any = manifest
        for key in parents:
            at = at[key]
        at[last] = data.draw(hostile)

    path = lab.rewrite(shared_file["folder"] / "tuned.ait", shared_file["folder"] / "hostile.ait", manifest=change)
    net = lab.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            str(load(net, path, self_test=False))
        except CheckpointError:
            assert not installed_in(net)
            return
        str(show(path))
        with torch.no_grad():
            torch.testing.assert_close(net(lab.inputs(2)), lab.make()(lab.inputs(2)))


def test_describing_needs_no_torch(saved: Path) -> None:
    code = (
        "import sys, aitune_lab as ait\n"
        "text = str(ait.show(sys.argv[1]))\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "print(text)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for text in ("encoder", "data: it is the fastest", "b=4", "trust", "sha256:", "golden.safetensors", "torch "):
        assert text in done.stdout


def test_text_of_a_file_cannot_steer_the_terminal(lab: SimpleNamespace, saved: Path, tmp_path: Path) -> None:
    def paint(data: dict[str, Any]) -> None:
        data["target"] = "\x1b[31mred\x1b]0;title\x07"
        data["choices"][0]["choice"]["reason"] = "line\r\nbreak"

    text = str(show(lab.rewrite(saved, tmp_path / "x.ait", manifest=paint)))
    assert "\x1b" not in text
    assert "\r" not in text
    assert r"\x1b[31mred" in text
    assert json.loads(json.dumps(text)) == text
