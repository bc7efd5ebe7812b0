"""Ranges of a file that is removed and made again while several shares write it, and records that are wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard.conversion import destinations, shares
from reshard.errors import DamagedFileError, StorageError
from reshard.storage.changes import make_folders
from reshard.storage.local import LocalStore
from reshard.storage.location import locate
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.storage.store import Stat

NAMES = ("one.pt", "one.safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    arrays = {f"w{i}": generator.integers(1, 255, 3 << 20).astype(np.uint8) for i in range(3)}
    reshard.save_file(arrays, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def whole(source: Path, dst: Path) -> bytes:
    path = source.parent / "whole" / dst.name
    reshard.convert(source, path)
    return path.read_bytes()


def folder_of_shares(dst: Path) -> Path:
    (folder,) = dst.parent.glob(".one*")
    return folder


# On a disk: ext4 gives a new file the inode number of the one that was removed before, which tmpfs does not.
@pytest.mark.disk
@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_a_file_that_is_made_again_while_it_writes_is_not_published(
    tmp_path: Path, source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "out" / name

    def write_record(*arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        shutil.rmtree(folder_of_shares(dst))
        assert reshard.convert(source, dst, share=(1, 2)).pending == (0,)
        shares.write_record(*arguments, **options)

    monkeypatch.setattr(destinations, "write_record", write_record)
    with pytest.raises(StorageError, match="was removed while share 0 of 2 wrote it"):
        reshard.convert(source, dst, share=(0, 2))
    assert not dst.exists()
    assert reshard.convert(source, dst, share=(0, 2)).pending == ()
    assert dst.read_bytes() == whole(source, dst)


@pytest.mark.disk
@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_a_file_that_was_made_again_does_not_count(tmp_path: Path, source: Path, name: str) -> None:
    dst = tmp_path / "out" / name
    reshard.convert(source, dst, share=(0, 2))
    record = folder_of_shares(dst) / "share-0.json"
    text = record.read_bytes()
    shutil.rmtree(record.parent)
    reshard.convert(source, dst, share=(1, 2))
    record.write_bytes(text)
    with pytest.raises(DamagedFileError, match="share 0 of 2"):
        reshard.convert(source, dst, share=(1, 2))
    assert not dst.exists()
    assert [reshard.convert(source, dst, share=(i, 2)).pending for i in (0, 1)] == [(1,), ()]
    assert dst.read_bytes() == whole(source, dst)


@pytest.mark.disk
@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_lost_takes_its_ranges_with_it(tmp_path: Path, source: Path, name: str) -> None:
    dst = tmp_path / "out" / name
    reshard.convert(source, dst, share=(1, 3))
    (lost,) = dst.parent.rglob(name)
    lost.unlink()
    assert reshard.convert(source, dst, share=(0, 3)).pending == (2,)
    with pytest.raises(DamagedFileError, match="share 1 of 3"):
        reshard.convert(source, dst, share=(2, 3))
    assert not dst.exists()
    assert [reshard.convert(source, dst, share=(i, 3)).pending for i in range(3)] == [(1, 2), (2,), ()]
    assert dst.read_bytes() == whole(source, dst)
    assert [path.name for path in dst.parent.iterdir()] == [name]


def test_a_folder_of_shares_that_was_removed_is_not_made_by_a_share(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with pytest.raises(StorageError):
        make_folders(folder / "sub", inside=folder)
    with pytest.raises(StorageError):
        shares.made_once(locate(folder), ["a/b"], mode=0o640, folder_mode=0o750)
    assert not folder.exists()
    folder.mkdir()
    token = shares.made_once(locate(folder), ["a/b", "c"], mode=0o640, folder_mode=0o750)
    assert shares.made_once(locate(folder), ["c", "a/b"], mode=0o640, folder_mode=0o750) == token
    (folder / ".cut" / token / "c").unlink()
    assert shares.made_once(locate(folder), ["a/b", "c"], mode=0o640, folder_mode=0o750) != token
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 2


def test_a_size_that_another_host_has_changed_is_seen(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, stat = tmp_path / "out" / "one.pt", LocalStore.stat

    def as_of_nfs(self: LocalStore, path: str, **given: bool) -> Stat:
        """A file that was looked at before another host wrote its end."""
        found = stat(self, path, **given)
        return found._replace(n_bytes=min(found.n_bytes, 1 << 20)) if "/.cut/" in path else found

    reshard.convert(source, dst, share=(0, 2))
    monkeypatch.setattr(LocalStore, "stat", as_of_nfs)
    assert reshard.convert(source, dst, share=(1, 2)).pending == ()
    monkeypatch.undo()
    assert dst.read_bytes() == whole(source, dst)


def test_ranges_of_different_files_are_no_file() -> None:
    file = WrittenFile(12, 8, 0, b"abcdefgh")
    for tokens, is_one in ((("a", "a"), True), (("a", "b"), False)):
        parts = [
            shares.WrittenPart(start, start + 6, file, (), token) for start, token in zip((0, 6), tokens, strict=True)
        ]
        assert (shares.joined(parts) is not None) == is_one


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(("name", "to"), [("one.pt", None), ("one", "huggingface")])
def test_what_a_publisher_that_was_killed_has_left_is_removed(tmp_path: Path, source: Path, name: str, to: Any) -> None:
    dst = tmp_path / "out" / name
    reshard.convert(source, dst, to=to, share=(0, 2))
    left = folder_of_shares(dst) / "published"
    if to is None:
        left.write_bytes(b"some")
    else:
        left.mkdir()
        (left / "some").write_bytes(b"some")
    assert reshard.convert(source, dst, to=to, share=(1, 2)).pending == ()
    assert [path.name for path in dst.parent.iterdir()] == [name]
    assert not (dst / "some").exists()
    with reshard.open(source) as expected, reshard.open(dst) as found:
        assert {key: found.read(key).tobytes() for key in found} == {
            key: expected.read(key).tobytes() for key in expected
        }


CHANGES: dict[str, dict[str, Any]] = {
    "no sums": {"sums": []},
    "another array": {"sums": [[99, 1, 2]]},
    "text": {"sums": [["x", 1, 2]]},
    "negative": {"sums": [[0, -1, 2]]},
    "another version": {"version": 77},
    "another size": {"n_bytes": 1},
}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_record_that_was_changed_is_written_again(tmp_path: Path, source: Path, change: dict[str, Any]) -> None:
    dst = tmp_path / "out" / "one.pt"
    reshard.convert(source, dst, share=(0, 2))
    changed(folder_of_shares(dst), change)
    with pytest.raises(DamagedFileError, match=r"share 0 of 2 .* of its record") as caught:
        reshard.convert(source, dst, share=(1, 2))
    assert "write it again" in str(caught.value)
    assert [reshard.convert(source, dst, share=(i, 2)).pending for i in (0, 1)] == [(1,), ()]
    assert dst.read_bytes() == whole(source, dst)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("change", [{"sums": []}, {"header_checksum": 5}], ids=str)
def test_shares_of_another_container_are_not_published(tmp_path: Path, source: Path, change: dict[str, Any]) -> None:
    dst = tmp_path / "out" / "one.pt"
    reshard.convert(source, dst, share=(0, 2))
    changed(folder_of_shares(dst), change, is_valid=True)
    with pytest.raises(DamagedFileError, match=r"disagree on one\.pt") as caught:
        reshard.convert(source, dst, share=(1, 2))
    assert "remove that folder" in str(caught.value)
    assert not dst.exists()


@pytest.mark.slow(disk=False)
def test_a_record_names_no_file_elsewhere(tmp_path: Path, source: Path) -> None:
    dst = tmp_path / "out" / "one.pt"
    reshard.convert(source, dst, share=(0, 2))
    (dst.parent / "other").mkdir()
    (cut,) = dst.parent.rglob("one.pt")
    shutil.copy(cut, dst.parent / "other")
    changed(folder_of_shares(dst), {"token": "../../other"}, is_valid=True)
    with pytest.raises(DamagedFileError, match=r"share 0 of 2 .* of its record"):
        reshard.convert(source, dst, share=(1, 2))


def changed(folder: Path, change: dict[str, Any], *, is_valid: bool = False) -> None:
    record = json.loads((folder / "share-0.json").read_text())
    (values,) = record["files"].values()
    for name, value in change.items():
        if name == "version":
            record[name] = value
        else:
            values[{"n_bytes": 2, "header_checksum": 4, "sums": 7, "token": 8}[name]] = value
    if is_valid:
        text = json.dumps(record["files"]).encode()
        record["digest"] = hashlib.blake2b(text, digest_size=16).hexdigest()
    (folder / "share-0.json").write_text(json.dumps(record))
