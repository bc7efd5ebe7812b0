"""A conversion into an existing folder: the folder keeps its mode and owner, and never holds a mixture of two models.

The expected modes are those that `mkdir` and `open` of the operating system give in the same folder.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.conversion.destinations import KINDS, W, snapshot
from tests.helpers.namespaces import LIBC, MS_BIND, MS_RDONLY, MS_REMOUNT, checked, in_namespaces

import reshard
from reshard import _core
from reshard.commit import filling
from reshard.errors import ArgumentError, DestinationExistsError, ReshardError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.storage.location import Location

FOLDERS = {name: options for name, (target, options) in KINDS.items() if target == "out"}
into_folders = pytest.mark.parametrize("options", FOLDERS.values(), ids=FOLDERS)
# Those that are written into the folder itself: an iteration of a root is a folder of its own.
FILLED = {name: options for name, options in FOLDERS.items() if name != "checkpoint2"}
into_filled = pytest.mark.parametrize("options", FILLED.values(), ids=FILLED)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "source.safetensors", 0)


def written(path: Path, version: int) -> Path:
    save_file({"a": W + version, "b": W + version + 1, "c": W + version + 2}, path)
    return path


def mode_of(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


# -- the folder stays


@into_folders
def test_a_folder_that_exists_keeps_its_mode_and_its_inode(source: Path, tmp_path: Path, options: Any) -> None:
    target = tmp_path / "out"
    target.mkdir()
    target.chmod(0o2700)
    inode = target.stat().st_ino
    for overwrite in (False, True):
        reshard.convert(source, target, overwrite=overwrite, **options)
        assert (mode_of(target), target.stat().st_ino) == ("0o2700", inode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@into_folders
def test_what_is_made_in_a_setgid_folder_has_its_group(source: Path, tmp_path: Path, options: Any) -> None:
    target = tmp_path / "out"
    target.mkdir()
    os.chown(target, 12345, 23456)
    target.chmod(0o2770)
    reshard.convert(source, target, **options)
    assert (target.stat().st_uid, target.stat().st_gid, mode_of(target)) == (12345, 23456, "0o2770")
    for path in target.rglob("*"):
        assert path.stat().st_gid == 23456, path
        assert not path.is_dir() or mode_of(path) == "0o2755", path


@into_filled
def test_files_that_are_replaced_pass_their_modes_on(source: Path, tmp_path: Path, options: Any) -> None:
    target = tmp_path / "out"
    reshard.convert(source, target, **options)
    for path in target.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    reshard.convert(source, target, overwrite=True, **options)
    modes = {mode_of(path) for path in target.rglob("*") if path.is_file()}
    assert modes == {"0o600"}
    assert {mode_of(path) for path in target.rglob("*") if path.is_dir()} <= {"0o700"}


def test_a_file_that_is_replaced_passes_its_mode_on(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.safetensors"
    reshard.convert(source, target)
    assert mode_of(target) == "0o644"
    target.chmod(0o600)
    reshard.convert(source, target, overwrite=True)
    assert mode_of(target) == "0o600"


@into_folders
def test_the_working_directory_is_filled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for overwrite in (False, True):
        reshard.convert(source, ".", overwrite=overwrite, **options)
        assert Path.cwd() == tmp_path / "here"
        with reshard.open(".") as opened:
            assert np.array_equal(opened.read("b"), W + 1)


@into_folders
def test_a_mount_point_is_filled_and_nothing_is_written_beside_it(source: Path, tmp_path: Path, options: Any) -> None:
    target = tmp_path / "disk"
    target.mkdir()

    def act() -> list[Any]:
        checked(LIBC.mount(bytes(tmp_path), bytes(tmp_path), None, MS_BIND, None))
        checked(LIBC.mount(b"none", bytes(target), b"tmpfs", 0, None))
        checked(LIBC.mount(None, bytes(tmp_path), None, MS_RDONLY | MS_REMOUNT | MS_BIND, None))
        found = []
        for overwrite in (False, True):
            reshard.convert(source, target, overwrite=overwrite, **options)
            with reshard.open(target) as opened:
                found.append(opened.read("b").tolist())
        return [found, sorted(path.name for path in tmp_path.iterdir())]

    assert in_namespaces(act) == [[(W + 1).tolist()] * 2, ["disk", "source.safetensors"]]


@into_filled
def test_shares_meet_in_a_folder_that_exists(source: Path, tmp_path: Path, options: Any) -> None:
    target = tmp_path / "out"
    target.mkdir()
    inode = target.stat().st_ino
    assert reshard.convert(source, target, share=(1, 2), **options).pending == (0,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source.safetensors"]
    assert reshard.convert(source, target, share=(0, 2), **options).pending == ()
    assert target.stat().st_ino == inode
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    with reshard.open(target) as opened:
        assert np.array_equal(opened.read("b"), W + 1)


def test_what_a_killed_conversion_left_is_named_and_in_nobodys_way(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out"
    left = target / filling.staging_name("0123456789abcdef")
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    reshard.convert(source, target)
    assert f"{left} is left by a conversion that did not end" in caplog.text
    assert sorted(path.name for path in target.iterdir()) == [left.name, "model.safetensors"]


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_what_a_killed_conversion_left_beside_the_destination_is_named(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    left = tmp_path / f".{name}.0123456789abcdef.staging"
    left.mkdir()
    (tmp_path / ".other.0123456789abcdef.staging").mkdir()
    reshard.convert(source, tmp_path / name)
    assert f"`{left}` is left by a conversion that did not end" in caplog.text
    assert "other" not in caplog.text
    assert left.is_dir()


def test_where_folders_cannot_be_renamed_one_that_exists_is_filled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _core.rename

    def rename(one: str, other: str, *, exchange: bool) -> None:
        if Path(one).is_dir():
            raise OSError(errno.ENOSYS, "Function not implemented")
        real(one, other, exchange=exchange)

    monkeypatch.setattr(_core, "rename", rename)
    target = tmp_path / "out"
    with pytest.raises(StorageError, match=r"hint: .*make `.*out` first"):
        reshard.convert(source, target, to="huggingface")
    assert not target.exists()
    target.mkdir()
    reshard.convert(source, target, to="huggingface")
    assert not reshard.diff(source, target, part="model").differences


def test_a_loop_of_links_is_an_error_that_names_it(source: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for target, model_files in ((loop, None), (loop / "out", None), (tmp_path / "out", loop)):
        with pytest.raises(ReshardError, match="loop"):
            reshard.convert(source, target, files={"model_files": model_files})
    with pytest.raises(StorageError, match=r"looking at .*/loop`: Too many levels of symbolic links"):
        reshard.convert(source, loop)
    assert sorted(path.name for path in tmp_path.iterdir() if path != source) == ["loop"]


def test_what_appears_in_an_empty_folder_is_not_mixed_up_with_the_new(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()

    def appear(done: int, total: int) -> None:
        if done == total:
            (target / "theirs").write_text("mine")

    with pytest.raises(DestinationExistsError, match="was made"):
        reshard.convert(source, target, progress=appear)
    assert [path.name for path in target.iterdir()] == ["theirs"]


# -- every instant

MORE = {
    **FILLED,
    "one Hugging Face file": {},
    "more Hugging Face files": {"files": {"max_shard_size": 400}},
    "three parts": {"to": "mindspore", "files": {"max_shard_size": 400}},
    "one rank": {"to": "checkpoint1", "files": {"prefix": "run"}},
}
# What is there, and what is written over it: the same kind, and another one.
PAIRS = [
    *((name, name) for name in MORE),
    ("one Hugging Face file", "huggingface"),
    ("huggingface", "one Hugging Face file"),
    ("huggingface", "more Hugging Face files"),
    ("three parts", "full weights"),
    ("a file a rank", "huggingface"),
    ("rank folders", "one rank"),
    ("one rank", "rank folders"),
]


def at_move(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None], *, before: bool) -> list[int]:
    """Let something happen right before, or right after, the `number`-th move; the moves that there were."""
    made: list[int] = []
    move = filling._Moves.move

    def counted(self: Any, source: Location, target: Location) -> None:
        made.append(len(made))
        if made[-1] == number and before:
            act()
        move(self, source, target)
        if made[-1] == number and not before:
            act()

    monkeypatch.setattr(filling._Moves, "move", counted)
    return made


def read(target: Path) -> float | str:
    """Which version a folder holds, or that it is refused."""
    try:
        with reshard.open(target) as opened:
            found = {float((opened.read(key) - W).max()) - n for n, key in enumerate("abc")}
            assert opened.keys() == ["a", "b", "c"]
    except ReshardError:
        return "refused"
    assert len(found) == 1, f"a mixture: {found}"
    return found.pop()


@pytest.mark.parametrize("number", [3, 5])
def test_two_conversions_at_a_time_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    target, options = tmp_path / "out", MORE["more Hugging Face files"]
    old, one, other = (written(tmp_path / f"{version}.safetensors", version) for version in (0, 10, 20))
    reshard.convert(old, target, **options)
    begun: list[Future[reshard.ConvertReport]] = []
    with ThreadPoolExecutor(1) as thread:

        def meanwhile() -> None:
            begun.append(thread.submit(reshard.convert, other, target, overwrite=True, **options))
            with suppress(TimeoutError):
                begun[0].result(0.4)

        at_move(monkeypatch, number, meanwhile, before=True)
        reshard.convert(one, target, overwrite=True, **options)
        assert begun[0].result().n_files > 1
    assert read(target) == 20
    assert not list(target.glob(".*"))


class KilledError(Exception):
    pass


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_killed_between_two_moves_it_leaves_the_old_or_the_new_or_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    def killed() -> None:
        raise KilledError

    outcomes: list[float | str] = []
    for number in range(100):
        target = tmp_path / f"out{number}"
        reshard.convert(written(source, 0), target, **MORE[old])
        with monkeypatch.context() as patched:
            made = at_move(patched, number, killed, before=True)
            patched.setattr(filling._Moves, "undo", lambda _: False)  # a dead process undoes nothing
            with suppress(KilledError):
                reshard.convert(written(source, 10), target, overwrite=True, **MORE[new])
        outcomes.append(read(target))
        # Asked for once more it is done.
        reshard.convert(source, target, overwrite=True, **MORE[new])
        assert read(target) == 10
        if number >= len(made):
            break
    assert outcomes[0] == 0
    assert outcomes[-1] == 10
    assert [one for one in outcomes if one != "refused"] == sorted(one for one in outcomes if one != "refused")
    if old == new == "one Hugging Face file":
        assert outcomes == [0, 10]
    if (old, new) == ("one Hugging Face file", "huggingface"):
        assert "refused" not in outcomes


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
@pytest.mark.parametrize(
    "failure",
    [(OSError(28, "No space left on device"), StorageError, True), (KeyboardInterrupt(), KeyboardInterrupt, False)],
    ids=["an error", "an interrupt"],
)
def test_a_move_that_fails_leaves_what_was_there(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[str, str],
    failure: tuple[BaseException, type[BaseException], bool],
) -> None:
    (old, new), (error, expected, before) = pair, failure

    def fail() -> None:
        raise error

    target = tmp_path / "out"
    reshard.convert(source, target, **MORE[old])
    (target / "notes.txt").write_text("mine")
    there = snapshot(target)
    written(source, 10)
    for number in range(100):
        with monkeypatch.context() as patched:
            made = at_move(patched, number, fail, before=before)
            with suppress(expected):
                reshard.convert(source, target, overwrite=True, **MORE[new])
        if number >= len(made):
            break
        assert snapshot(target) == there, number
    assert number > 0
    assert read(target) == 10
    assert (target / "notes.txt").read_text() == "mine"


# -- for whom


@pytest.mark.parametrize("name", KINDS)
def test_what_is_private_is_for_its_owner_alone(source: Path, tmp_path: Path, name: str) -> None:
    target, options = KINDS[name]
    (tmp_path / "made").mkdir()
    reshard.convert(source, tmp_path / "made" / target, commit={"private": True}, **options)
    paths = [path for path in (tmp_path / "made").rglob("*") if path.parent.name != ".writers"]
    tracked = (".lock", "latest_checkpointed_iteration.txt", ".tracked")
    assert {mode_of(path) for path in paths if path.is_dir()} <= {"0o700"}
    assert {mode_of(path) for path in paths if path.is_file() and path.name not in tracked} == {"0o600"}


def test_private_makes_files_private_that_were_not(source: Path, tmp_path: Path) -> None:
    reshard.convert(source, tmp_path / "out")
    reshard.convert(source, tmp_path / "out", overwrite=True, commit={"private": True})
    assert (mode_of(tmp_path / "out"), mode_of(tmp_path / "out" / "model.safetensors")) == ("0o755", "0o600")
    with pytest.raises(ArgumentError, match=re.escape("`modes` and `private`")):
        reshard.convert(
            source,
            tmp_path / "c2",
            to="checkpoint2",
            files={"modes": "mindspore-transformers"},
            commit={"private": True},
        )
