"""What every store must do, of the local one and of one that behaves as an object store; and locations in them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.memory_store import MemoryStore

import reshard
from reshard.commit import filesystem
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.storage.local import LOCAL
from reshard.storage.location import Location, locate
from reshard.storage.store import NO_FOLDER_RENAME, Abilities, LockHeldError


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A folder with one file, in each kind of store."""
    place = locate(tmp_path) if request.param == "local" else Location(MemoryStore(), "run")
    (place / "there").create(b"0123456789")
    return place


def test_what_is_made_is_listed_and_read(folder: Location) -> None:
    place = folder / "there"
    assert (place.exists(), place.is_file(), place.is_folder(), place.kind()) == (True, True, False, "file")
    assert folder.is_folder()
    assert folder.names() == ["there"]
    assert folder.entries() == [("there", "file")]
    assert place.read_small(10) == b"0123456789"
    assert (place.read_head(3), place.read_tail(3), place.read_tail(99)) == (b"012", b"789", b"0123456789")
    assert b"".join(place.pieces(10)) == b"0123456789"
    assert list(place.pieces(ranges=[(8, 10), (0, 1)])) == [b"89", b"0"]
    with place.open() as file:
        file.seek(4)
        assert file.read(2) == b"45"
    assert place.stat().n_bytes == 10
    with folder.opened() as opened:
        opened.check("there", 10)
        assert list(opened.pieces("there", 10)) == [b"0123456789"]


def test_what_is_missing(folder: Location) -> None:
    missing = folder / "missing"
    assert (missing.exists(), missing.is_file(), missing.kind()) == (False, False, None)
    for act in (missing.stat, missing.names, missing.entries, missing.opened, missing.open):
        with pytest.raises(CheckpointNotFoundError):
            act()
    for read in (missing.read_small, missing.read_head, missing.read_tail):
        with pytest.raises(CheckpointNotFoundError):
            read(10)
    with pytest.raises(DamagedFileError, match="there is no file"):
        list(missing.pieces())
    with folder.opened() as opened:
        with pytest.raises(DamagedFileError, match="there is no file"):
            opened.check("missing", 1)
        with pytest.raises(DamagedFileError, match="there is no file"):
            list(opened.pieces("missing"))
    assert missing.store.touched_ns(missing.path) is None
    assert filesystem.names(missing) == []
    missing.remove_file()


def test_what_is_another_than_expected(folder: Location) -> None:
    place = folder / "there"
    with pytest.raises(DamagedFileError, match="larger than 9 bytes"):
        place.read_small(9)
    with pytest.raises(DamagedFileError, match="has 10 bytes, expected 11"):
        list(place.pieces(11))
    with pytest.raises(DamagedFileError, match="truncated"):
        list(place.pieces(ranges=[(5, 11)]))
    with folder.opened() as opened, pytest.raises(DamagedFileError, match="has 10 bytes, expected 9"):
        opened.check("there", 9)
    for act in (folder.read_small, folder.read_head, folder.read_tail):
        with pytest.raises(DamagedFileError, match="not a regular file"):
            act(10)


def test_a_file_that_exists_is_not_created(folder: Location) -> None:
    with pytest.raises(FileExistsError):
        (folder / "there").create(b"other")
    assert (folder / "there").read_small(10) == b"0123456789"


def test_of_several_that_create_one_file_one_wins(folder: Location) -> None:
    n_won = 0
    start, lock = threading.Barrier(4, timeout=10), threading.Lock()

    def claim(number: int) -> None:
        nonlocal n_won
        for name in range(50):
            start.wait()
            try:
                (folder / f"claim_{name}").create(b"%d" % number, durable=False)
            except FileExistsError:
                continue
            with lock:
                n_won += 1

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert n_won == 50


def test_a_file_is_replaced_as_a_whole(folder: Location) -> None:
    place = folder / "there"
    before = place.stat()
    place.replace("new")
    assert place.read_small(10) == b"new"
    assert place.stat().identity != before.identity
    assert folder.names() == ["there"]

    class StopError(Exception):
        pass

    def write_half() -> None:
        with place.writing() as file:
            file.write(b"half")
            assert place.read_small(10) == b"new"
            raise StopError

    with pytest.raises(StopError):
        write_half()
    assert place.read_small(10) == b"new"
    assert folder.names() == ["there"]


def test_lines_are_appended_and_a_torn_one_is_ended(folder: Location) -> None:
    log = folder / "log"
    log.append_line(b"one\n")
    log.append_line(b"two\n")
    assert log.read_small(99) == b"one\ntwo\n"
    log.replace(b"one\ntor")
    log.append_line(b"three\n")
    assert log.read_small(99) == b"one\ntor\nthree\n"


def test_a_folder_is_removed_in_order(folder: Location) -> None:
    inside = folder / "inside"
    filesystem.make_folder(inside, 0o777, durable=False)
    for name in ("a", ".unfinished", "manifest.json", "z"):
        (inside / name).create(durable=False)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "_step", lambda name: said.append(f"{name}: {len(inside.names())}"))
        filesystem.remove_folder(inside, keep=(".unfinished",))
    assert inside.names() == [".unfinished"]
    assert [line.rpartition(": ")[2] for line in said] == ["4", "3"]
    filesystem.remove_folder(inside)
    assert not inside.exists()
    assert folder.names() == ["there"]
    filesystem.remove_folder(inside)
    with pytest.raises(StorageError):
        folder.store.remove_empty_folder(folder.path)


def test_a_file_that_is_held_tells_when_it_is_replaced(folder: Location) -> None:
    place = folder / "claim"
    place.create(b"mine")
    held = place.store.hold(place.path)
    before = place.store.touched_ns(place.path)
    assert before is not None
    while place.store.touched_ns(place.path) == before:
        held.beat()
    assert held.is_current()
    held.write(b"done")
    assert place.read_small(10) == b"done"
    assert held.is_current()
    place.replace(b"of another")
    assert not held.is_current()
    place.remove_file()
    assert not held.is_current()
    held.close()


def test_abilities_are_true(folder: Location) -> None:
    store = folder.store
    found = store.abilities(folder.path)
    assert folder.names() == ["there"]
    (folder / "one" / "file").store.make_folder(str(folder / "one"))
    (folder / "one" / "file").create(b"1")
    if found.renames_folders:
        filesystem.rename(folder / "one", folder / "two")
        assert (folder / "two" / "file").read_small(1) == b"1"
        with pytest.raises(FileExistsError):
            filesystem.rename(folder / "there", folder / "two")
    else:
        with pytest.raises(StorageError) as caught:
            filesystem.rename(folder / "one", folder / "two")
        assert caught.value.errno in NO_FOLDER_RENAME
        with pytest.raises(StorageError):
            filesystem.exchange(folder / "one", folder / "two")
    assert found in (Abilities(renames_folders=True, exchanges=True), Abilities(renames_folders=False, exchanges=False))


# -- locks and locations of the local store


def test_a_lock_keeps_others_out_until_it_is_closed(tmp_path: Path) -> None:
    place = locate(tmp_path) / "lock"
    with place.lock(make=True) as lock:
        assert lock.is_real
        with pytest.raises(LockHeldError) as caught:
            place.lock(seconds=0.05)
        assert caught.value.errno == errno.EWOULDBLOCK
    with place.lock(shared=True) as one, place.lock(shared=True) as other:
        copy = one.duplicate()
        one.close()
        other.close()
        with pytest.raises(LockHeldError):
            place.lock()
        copy.close()
    place.lock().close()


def test_locations_compose() -> None:
    place = locate("a//b/./c/")
    assert (str(place), place.name, place.parent, place / "d") == ("a/b/c", "c", locate("a/b"), locate("a/b/c/d"))
    assert [str(one) for one in locate("/a/b").parents] == ["/a", "/"]
    assert [str(one) for one in locate("a/b").parents] == ["a", "."]
    assert (str(locate(".") / "a"), str(locate("/") / "a")) == ("a", "/a")
    assert locate(place) is place
    assert place == locate(Path("a/b/c"))
    assert len({place, locate("a/b/c"), place / "d"}) == 2
    assert os.fspath(place) == "a/b/c"
    assert locate("w.safetensors").suffix == ".safetensors"
    with pytest.raises(ArgumentError, match="not relative"):
        place / "/d"


def test_a_file_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = locate(tmp_path) / "x"
    place.create(b"1")

    def fstat(_: int) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        with pytest.raises(StorageError, match="looking at"):
            place.read_small(10)


@pytest.mark.parametrize("path", ["hf://org/model", Path("s3://bucket/run"), "file:///run", "gs:/bucket"])
def test_a_url_is_no_path(path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reshard.save_file({"w": np.zeros(2)}, "w.safetensors")
    for act in (
        lambda: reshard.save(path, 1, {"w": np.zeros(2)}),
        lambda: reshard.convert("w.safetensors", path),
        lambda: reshard.open(path),
        lambda: reshard.load(path),
        lambda: reshard.verify(path),
        lambda: reshard.save_file({"w": np.zeros(2)}, path),
        lambda: reshard.convert("w.safetensors", "to", layout=path),
        lambda: reshard.load(config=path),
    ):
        with pytest.raises(ArgumentError, match="is a URL"):
            act()
    assert [one.name for one in tmp_path.iterdir()] == ["w.safetensors"]
    assert str(locate(tmp_path / "s3:" / "x")).endswith("/s3:/x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://KEY:sec/ret@host/run@2", "`ftp://host/run@2`"),
        ("abfss://container.host/run?X-Amz-Signature=secret", "`abfss://container.host/run`"),
        ("hf://org/model@main", "`hf://org/model@main`"),
    ],
)
def test_credentials_in_a_url_are_not_shown(url: str, shown: str) -> None:
    with pytest.raises(ArgumentError, match="is a URL") as caught:
        locate(url)
    assert caught.value.message.startswith(shown)
    assert "sec" not in repr(vars(caught.value))


@pytest.mark.parametrize("path", ["~/run", Path("~/run"), "~"])
def test_a_path_that_a_shell_expands_is_refused(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: reshard.save(path, 1, {"w": np.zeros(2)}),
        lambda: reshard.open(path),
        lambda: reshard.load(path),
    ):
        with pytest.raises(ArgumentError, match="begins with `~`"):
            act()
    assert not list(tmp_path.iterdir())
    assert locate("~run").name == "~run"
    assert str(locate(tmp_path / "~" / "x")).endswith("/~/x")


def test_a_location_of_another_store_is_no_local_path() -> None:
    place = Location(MemoryStore(), "run")
    assert not place.is_local
    with pytest.raises(StorageError, match="not on a file system of this host"):
        os.fspath(place)
    with pytest.raises(StorageError, match="not on a file system of this host"):
        _ = place.local
    assert place != Location(LOCAL, "run")


@pytest.mark.parametrize("n_files", [3, 1500])
def test_sizes_are_those_of_each_entry(n_files: int, tmp_path: Path) -> None:
    """Of a few, and of many, which several threads look at."""
    for i in range(n_files):
        (tmp_path / f"ä{i}").write_bytes(b"x" * i)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("ä1")
    os.mkfifo(tmp_path / "pipe")
    expected = [
        (entry.name, entry.kind, (tmp_path / entry.name).lstat().st_size) for entry in LOCAL.entries(str(tmp_path))
    ]
    assert LOCAL.sizes(str(tmp_path)) == expected
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        LOCAL.sizes(str(tmp_path / "none"))
    with pytest.raises(StorageError, match="listing"):
        LOCAL.sizes(str(tmp_path / "link"))
