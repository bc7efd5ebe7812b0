"""The state of the disk after a conversion that was refused, failed, interrupted or killed.

The rule: the destination is published completely or not at all, existing files are unchanged, and no temporary files
remain.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.conversion.destinations import KINDS, W, snapshot
from tests.helpers.interrupts import interrupt
from tests.helpers.threads import in_threads

import reshard
from reshard import _core
from reshard.commit import filling
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DestinationExistsError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.formats.checkpoint2 import iteration as planning
from reshard.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.storage.location import Location
every_kind = pytest.mark.parametrize(("name", "options"), KINDS.values(), ids=KINDS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({"a": W, "b": W + 1, "c": W + 2}, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 GiB in four tensors, sparse."""
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    n = 256 << 20
    entries = {
        name: {"dtype": "U8", "shape": [n >> 12, 1 << 12], "data_offsets": [i * n, (i + 1) * n]}
        for i, name in enumerate("abcd")
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * n)
    return path


class StopError(Exception):
    pass


def stop_when(n_bytes: int) -> Any:
    def progress(done: int, _: int) -> None:
        if done >= n_bytes:
            raise StopError

    return progress


# -- refused


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("_MAX_SHARD_FILES", "the ranks write 4 shard files; a checkpoint can have 1"),
        ("_MAX_COPIES", "2 ranks write copies of `a`, and metadata.json lists all of them for each copy; at most 1 "),
    ],
)
def test_a_layout_of_too_many_ranks_is_refused(
    limit: str, message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, limit, 1)
    layout = {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    with pytest.raises(UnsupportedError, match=message):
        reshard.convert(source, tmp_path / "out", layout=layout, files={"dedup": False})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["checkpoint1", "checkpoint2", "dcp", "megatron", "safetensors"])
def test_more_ranks_than_a_conversion_writes_for(to: Any, source: Path, tmp_path: Path) -> None:
    layout = {"mesh": {"dp": 1 << 18}, "rules": [{"match": "*"}]}
    with pytest.raises(UnsupportedError, match=r"the layout has 262144 ranks, .* writes for at most 131072") as caught:
        reshard.convert(source, tmp_path / "out", to=to, layout=layout)
    assert "`mesh`" in str(caught.value.hint)
    assert list(tmp_path.glob("*out*")) == []


def test_a_save_with_too_many_copies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_MAX_COPIES", 0)
    layout = {"mesh": {"tp": 1}, "rules": [{"match": "*"}]}
    with pytest.raises(UnsupportedError, match="1 ranks write copies of `a`"):
        reshard.save(tmp_path / "out", 1, {"a": W}, layout=layout, files={"dedup": False})
    assert not (tmp_path / "out").exists()


@every_kind
@pytest.mark.parametrize("there", ["file", "folder", "foreign shard"])
def test_a_destination_that_holds_anything_is_refused(
    source: Path, tmp_path: Path, name: str, options: Any, there: str
) -> None:
    target = tmp_path / name
    if there == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / ("x.safetensors" if there == "foreign shard" else "notes.txt")).write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(DestinationExistsError) as caught:
        reshard.convert(source, target, **options)
    assert isinstance(caught.value, FileExistsError)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", KINDS)
def test_overwrite_does_not_cover_what_others_wrote(source: Path, tmp_path: Path, name: str) -> None:
    target, options = tmp_path / KINDS[name][0], KINDS[name][1]
    if name == "one file":
        save_file({"mine": W}, target)
        foreign = [target]
    elif name == "checkpoint2":
        target.write_text("a file, and no root")
        foreign = [target]
    else:
        target.mkdir()
        foreign = [target / n for n in ("x.safetensors", "model.safetensors.index.json", "tiles.json")]
    for path in foreign:
        if path.parent == target:
            path.write_text("{}")
        before = snapshot(tmp_path)
        with pytest.raises(DestinationExistsError, match=rf"{re.escape(path.name)}|is a checkpoint of the format"):
            reshard.convert(source, target, overwrite=True, **options)
        assert snapshot(tmp_path) == before
        path.unlink()


@every_kind
def test_an_empty_folder_is_free(source: Path, tmp_path: Path, name: str, options: Any) -> None:
    if name == "out":
        (tmp_path / name).mkdir()
        reshard.convert(source, tmp_path / name, **options)
        with reshard.open(tmp_path / name) as opened:
            assert np.array_equal(opened.read("b"), W + 1)


@every_kind
def test_a_link_to_a_folder_is_that_folder(source: Path, tmp_path: Path, name: str, options: Any) -> None:
    if name != "out":
        return
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for target in ("disk/empty", "disk/new"):
        link = tmp_path / f"to {Path(target).name}"
        link.symlink_to(target)
        for overwrite in (False, True):
            reshard.convert(source, link, overwrite=overwrite, **options)
            assert link.is_symlink()
            with reshard.open(tmp_path / target) as opened:
                assert np.array_equal(opened.read("b"), W + 1)
    assert sorted(entry.name for entry in (tmp_path / "disk").iterdir()) == ["empty", "new"]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("tree", "tree"),
        ("tree", "tree/out"),
        ("tree/iteration_00000000", "tree"),
        ("tree", "."),
        ("tree", "tree/../tree"),
        ("tree", "link"),
        ("link", "tree/x"),
        ("tree/iteration_00000000/model-0000000-0000001.safetensors", "tree"),
    ],
)
def test_inside_each_other(source: Path, tmp_path: Path, src: str, dst: str) -> None:
    reshard.convert(source, tmp_path / "tree", to="checkpoint2", commit={"durable": False})
    (tmp_path / "link").symlink_to("tree")
    before = snapshot(tmp_path)
    for options in ({}, {"overwrite": True}, {"to": "checkpoint2", "overwrite": True}):
        with pytest.raises((ArgumentError, DestinationExistsError)):
            reshard.convert(tmp_path / src, tmp_path / dst, **options)
    assert snapshot(tmp_path) == before


@every_kind
def test_a_source_that_is_not_there(tmp_path: Path, name: str, options: Any) -> None:
    with pytest.raises(CheckpointNotFoundError):
        reshard.convert(tmp_path / "gone", tmp_path / name, **options)
    assert not list(tmp_path.iterdir())


# -- overwrite


def test_overwrite_keeps_foreign_files_of_every_kind(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    reshard.convert(source, target, files={"max_shard_size": 300})
    (target / "config.json").write_text("{}")
    (target / "config.json").chmod(0o600)
    (target / "tokenizer").mkdir(mode=0o700)
    (target / "tokenizer" / "vocabulary").write_text("a b c")
    (target / "link").symlink_to("config.json")
    (target / "dangling").symlink_to("/nowhere")
    os.mkfifo(target / "pipe")
    foreign = {name: entry for name, entry in snapshot(target).items() if not name.startswith("model")}
    assert len(foreign) == 6
    inode = (target / "config.json").stat().st_ino
    save_file({"new": W}, tmp_path / "new.safetensors")
    reshard.convert(tmp_path / "new.safetensors", target, overwrite=True)
    after = snapshot(target)
    assert set(after) == set(foreign) | {"model.safetensors"}
    assert {name: after[name] for name in foreign} == foreign
    assert (target / "config.json").stat().st_ino == inode
    assert list(load_file(target / "model.safetensors")) == ["new"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new.safetensors", "out", "source.safetensors"]


def test_overwrite_replaces_that_iteration_alone(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for iteration in (3, 7):
        reshard.convert(
            source,
            root,
            to="checkpoint2",
            iteration=iteration,
            overwrite=True,
            files={"prefix": "old"},
            commit={"durable": False},
        )
    (root / "notes.txt").write_text("mine")
    (root / "logs").mkdir()
    (root / "iteration_00000007" / "extra").mkdir()
    before = snapshot(root)
    save_file({"new": W}, tmp_path / "new.safetensors")
    report = reshard.convert(
        tmp_path / "new.safetensors", root, to="checkpoint2", iteration=7, overwrite=True, commit={"durable": False}
    )
    assert report.warnings == ()
    after = snapshot(root)
    assert {k: v for k, v in after.items() if "00000007" not in k} == {
        k: v for k, v in before.items() if "00000007" not in k
    }
    assert sorted(path.name for path in (root / "iteration_00000007").iterdir()) == [
        ".tracked",
        "checksums.bin",
        "common.json",
        "manifest.json",
        "metadata.json",
        "model-0000000-0000001.safetensors",
    ]
    with reshard.open(root) as opened:
        assert (opened.iteration, opened.keys()) == (7, ["new"])


def test_a_tracker_is_not_turned_back(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    tracker = root / "latest_checkpointed_iteration.txt"
    reshard.convert(source, root, to="checkpoint2", iteration=9)
    report = reshard.convert(source, root, to="checkpoint2", iteration=4, overwrite=True)
    assert tracker.read_text() == "9"
    assert any("tracker" in warning for warning in report.warnings)
    reshard.convert(source, root, to="checkpoint2", iteration=12, overwrite=True)
    assert tracker.read_text() == "12"
    tracker.write_text("99")  # names nothing
    reshard.convert(source, root, to="checkpoint2", iteration=5, overwrite=True)
    assert tracker.read_text() == "5"


def test_an_iteration_that_is_a_link_is_replaced_and_what_it_led_to_stays(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("mine")
    root.mkdir()
    (root / "iteration_00000000").symlink_to("../elsewhere")
    reshard.convert(source, root, to="checkpoint2", overwrite=True)
    assert (tmp_path / "elsewhere" / "precious").read_text() == "mine"
    assert not (root / "iteration_00000000").is_symlink()
    with reshard.open(root) as opened:
        assert opened.keys() == ["a", "b", "c"]
    assert {entry.name for entry in root.iterdir()} - {".lock", ".writers"} == {
        "iteration_00000000",
        "latest_checkpointed_iteration.txt",
    }


def test_views_of_what_was_replaced_stay_valid(source: Path, tmp_path: Path) -> None:
    reshard.convert(source, tmp_path / "out")
    with reshard.open(tmp_path / "out") as opened:
        views = opened.load(copy=False)
        save_file({"a": W * 0}, tmp_path / "zeros.safetensors")
        reshard.convert(tmp_path / "zeros.safetensors", tmp_path / "out", overwrite=True)
        assert np.array_equal(views["a"], W)
        assert np.array_equal(opened.read("b"), W + 1)


# -- failing


@every_kind
@pytest.mark.parametrize("at", [0, 400, 1152])
def test_an_exception_leaves_nothing(source: Path, tmp_path: Path, name: str, options: Any, at: int) -> None:
    before = snapshot(tmp_path)
    for target in (tmp_path / name, tmp_path / "new" / "folders" / name):
        with pytest.raises(StopError):
            reshard.convert(source, target, progress=stop_when(at), **options)
        assert snapshot(tmp_path) == before


@every_kind
@pytest.mark.parametrize("at", [0, 400, 1152])
def test_an_exception_leaves_what_was_there(source: Path, tmp_path: Path, name: str, options: Any, at: int) -> None:
    target = tmp_path / name
    reshard.convert(source, target, **options)
    if target.is_dir():
        (target / "notes.txt").write_text("mine")
        (target / "sub").mkdir()
        (target / "sub" / "notes.txt").write_text("mine")
    save_file({"a": W + 5, "b": W + 6, "c": W + 7}, source)
    before = snapshot(tmp_path)
    with pytest.raises(StopError):
        reshard.convert(source, target, overwrite=True, progress=stop_when(at), **options)
    assert snapshot(tmp_path) == before


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A small disk of its own, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(("mode=777", *options)), "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@every_kind
@pytest.mark.parametrize("limit", ["size=128k", "size=8k", "nr_inodes=4", "nr_inodes=6"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, name: str, options: Any, limit: str) -> None:
    save_file(
        {key: np.zeros((8, 4096), np.float32) + i for i, key in enumerate("abc")}, tmp_path / "source.safetensors"
    )
    with mounted(tmp_path / "disk", limit) as disk:
        try:
            reshard.convert(
                tmp_path / "source.safetensors",
                disk / name,
                **{**options, "files": {**options.get("files", {}), "max_shard_size": 200_000}},
            )
        except StorageError as error:
            assert error.errno == 28  # noqa: PT017  ENOSPC
            assert str(disk) in str(error)  # noqa: PT017
            assert not list(disk.iterdir())
        else:
            assert limit.startswith("nr_inodes")
            with reshard.open(disk / name) as opened:
                assert opened.read("b")[0, 0] == 1


@every_kind
def test_a_disk_that_cannot_be_written(source: Path, tmp_path: Path, name: str, options: Any) -> None:
    with mounted(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for target in (disk / name, disk / "new" / name):
            with pytest.raises(StorageError) as caught:
                reshard.convert(source, target, **options)
            assert caught.value.errno == 30  # EROFS
        assert not list(disk.iterdir())


@pytest.mark.slow(disk=False)
def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    save_file({key: np.zeros((8, 40_000), np.float32) for key in "abc"}, tmp_path / "source.safetensors")
    code = """
    import json, resource, signal, sys, reshard
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
    for name, options in json.loads(sys.argv[3]):
        try:
            reshard.convert(sys.argv[1], sys.argv[2] + name, **options)
        except reshard.errors.StorageError as error:
            print(error.errno, "disk space" in error.hint, "ulimit -f" in error.hint)
    """
    source, folder, kinds = f"{tmp_path}/source.safetensors", f"{tmp_path}/", json.dumps(list(KINDS.values()))
    command = [sys.executable, "-c", textwrap.dedent(code), source, folder, kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "27 False True\n" * len(KINDS), done.stderr  # EFBIG
    assert [entry.name for entry in tmp_path.iterdir()] == ["source.safetensors"]


def test_a_parent_that_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    before = snapshot(tmp_path)
    for name, options in KINDS.values():
        with pytest.raises(ReshardError):
            reshard.convert(source, tmp_path / "file" / name, **options)
    assert snapshot(tmp_path) == before


@every_kind
def test_a_destination_that_appears_meanwhile(source: Path, tmp_path: Path, name: str, options: Any) -> None:
    """It is theirs: what was written here goes away again."""
    target = tmp_path / name
    theirs = target / "iteration_00000000" if "dedup" in options.get("files", {}) else target

    def appear(done: int, total: int) -> None:
        if done == total and not theirs.exists():
            if theirs.suffix:
                theirs.write_text("x")
            else:
                theirs.mkdir()
                (theirs / "file").write_text("x")

    with pytest.raises(DestinationExistsError, match="was made"):
        reshard.convert(source, target, progress=appear, **options)
    expected = {source, theirs if theirs.suffix else theirs / "file"}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == expected
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == {theirs, target} - expected


def test_an_interrupt_in_the_publication_loses_no_foreign_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard.convert(source, tmp_path / "out")
    (tmp_path / "out" / "tokenizer").mkdir()
    (tmp_path / "out" / "tokenizer" / "vocabulary").write_text("mine")
    (tmp_path / "out" / "config.json").write_text("mine")
    move = filling._Moves.move

    def interrupted(moves: Any, old: Location, new: Location) -> None:
        move(moves, old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr(filling._Moves, "move", interrupted)
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(source, tmp_path / "out", overwrite=True)
    assert snapshot(tmp_path) == before


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n: int) -> list[str]:
    """Raise KeyboardInterrupt right after the n-th call that makes, renames or syncs; the calls so far."""
    calls: list[str] = []

    def watched(name: str) -> Any:
        method = getattr(LocalStore, name)

        def call(store: LocalStore, path: str, *args: Any, **options: Any) -> Any:
            found = method(store, path, *args, **options)
            calls.append(f"{name} {path}")
            if len(calls) == n + 1:
                raise KeyboardInterrupt
            return found

        return call

    for name in ("make_folder", "rename", "exchange", "link", "sync_folder"):
        monkeypatch.setattr(LocalStore, name, watched(name))
    return calls


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("there", ["nothing", "an empty folder", "an earlier one"])
@every_kind
def test_an_interrupt_after_any_call_leaves_the_old_or_the_new(
    source: Path, tmp_path: Path, name: str, options: Any, there: str
) -> None:
    for n in range(100):
        folder = tmp_path / str(n)
        target = folder / "new" / name
        folder.mkdir()
        save_file({"a": W, "b": W + 1, "c": W + 2}, source)
        if there == "an empty folder":
            (target if "." not in name else target.parent).mkdir(parents=True)
        elif there == "an earlier one":
            reshard.convert(source, target, **options)
            save_file({"a": W + 5, "b": W + 6, "c": W + 7}, source)
        before = snapshot(folder)
        with pytest.MonkeyPatch.context() as patches:
            calls = interrupt_after(patches, n)
            try:
                reshard.convert(source, target, overwrite=there == "an earlier one", **options)
            except KeyboardInterrupt:
                is_interrupted = True
            else:
                is_interrupted = False
        if not is_interrupted:
            assert n > 1
            break
        if snapshot(folder) == before:
            continue
        if (target / ".lock").exists():  # the next process recovers what a save of a checkpoint root left
            reshard.convert(source, target, overwrite=True, **options)
        left = [path for path in folder.rglob("*") if path.name.endswith((".staging", ".tmp")) or path.is_symlink()]
        assert [path for path in left if not path.is_dir() or any(path.iterdir())] == [], calls[-1]
        with reshard.open(target) as opened:
            assert np.array_equal(opened.read("b"), load_file(source)["b"]), calls[-1]
    else:
        pytest.fail("it never ended")


def test_a_tracker_that_cannot_be_written_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def block(done: int, total: int) -> None:
        (tmp_path / "root" / "latest_checkpointed_iteration.txt").mkdir(exist_ok=True)

    with pytest.raises(StorageError):
        reshard.convert(source, tmp_path / "root", to="checkpoint2", progress=block)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["latest_checkpointed_iteration.txt"]


def test_damage_in_the_source_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "source.safetensors"
    for name, options in KINDS.values():
        save_file({key: np.zeros((8, 40_000), np.float32) for key in "abc"}, path)

        def truncate(done: int, total: int) -> None:
            if done == 0:
                os.truncate(path, 8192)

        with pytest.raises(ReshardError, match=r"source\.safetensors"):
            reshard.convert(path, tmp_path / name, progress=truncate, **options)
        assert [entry.name for entry in tmp_path.iterdir()] == ["source.safetensors"]


# -- interrupted, killed


def started(big: Path, target: Path, options: Any) -> subprocess.Popen[bytes]:
    """A conversion in a process of its own, once it has begun to write. It does not end before a signal comes."""
    code = """
    import json, sys, time, reshard
    def progress(done, total):
        if done: print("go", flush=True)
        if done > total // 2: time.sleep(600)
    reshard.convert(sys.argv[1], sys.argv[2], progress=progress, **json.loads(sys.argv[3]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(big), str(target), json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    return process


@pytest.mark.slow(disk=False)
@every_kind
def test_ctrl_c_stops_at_once_and_leaves_nothing(big: Path, tmp_path: Path, name: str, options: Any) -> None:
    process = started(big, tmp_path / name, {**options, "commit": {"durable": False}})
    assert interrupt(process) < 1  # at a load of 100 it was 0.4
    assert not list(tmp_path.iterdir())


@pytest.mark.slow(disk=False)
@every_kind
def test_killed_it_leaves_no_destination(big: Path, source: Path, tmp_path: Path, name: str, options: Any) -> None:
    target = tmp_path / "there" / name
    process = started(big, target, {**options, "commit": {"durable": False}})
    process.kill()
    process.communicate(timeout=30)
    with pytest.raises(CheckpointNotFoundError):
        reshard.open(target)
    # And it is free: the same is asked for once more.
    reshard.convert(source, target, **options)
    with reshard.open(target) as opened:
        assert np.array_equal(opened.read("c"), W + 2)


# -- durable


def calls_of(source: Path, target: Path, trace: Path, options: Any) -> list[str]:
    """What a conversion syncs and renames, in order: names of files without what is random in them."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    code = "import json, sys, reshard; reshard.convert(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))"
    wanted = "trace=fsync,fdatasync,sync_file_range,rename,renameat,renameat2,syncfs"
    done = subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-e",
            wanted,
            "-o",
            trace,
            sys.executable,
            "-c",
            code,
            source,
            target,
            json.dumps(options),
        ],
        capture_output=True,
        timeout=120,
        check=False,
    )
    if not trace.exists() or b"ptrace" in done.stderr:
        pytest.skip("may not trace here")
    assert done.returncode == 0, done.stderr.decode()
    found = []
    for line in trace.read_text().splitlines():
        call = re.search(r"(fsync|fdatasync)\(\d+<([^>]*)>", line)
        if call:
            found.append("sync " + call[2].removesuffix(" (deleted)"))
        elif "rename" in line and (names := re.findall(r'"([^"]*)"', line)):  # not the second line of a call
            found.append(f"rename {names[-1]}")
    return [re.sub(r"[0-9a-f]{16}", "#", entry).replace(str(target.parent), "") for entry in found]


def in_order(found: list[str], *wanted: str) -> None:
    """Each of `wanted` is there, one after the other."""
    at = 0
    for entry in wanted:
        assert entry in found[at:], (entry, found)
        at = found.index(entry, at) + 1


@pytest.mark.slow(disk=False)
def test_what_is_durable_is_synced_before_it_is_named(source: Path, tmp_path: Path) -> None:
    found = calls_of(source, tmp_path / "new" / "root", tmp_path / "trace", {"to": "checkpoint2"})
    manifest = next(i for i, entry in enumerate(found) if entry.startswith("rename") and "manifest.json" in entry)
    publish, tracker = "rename /root/iteration_00000000", "rename /root/latest_checkpointed_iteration.txt"
    synced = [i for i, entry in enumerate(found) if entry.startswith("sync /root/.staging/0.1.##")]
    for name in (
        "model-0000000-0000001.safetensors",
        "metadata.json",
        "common.json",
        "checksums.bin",
        ".manifest.json",
    ):
        is_file = [i for i in synced if name in found[i]]
        assert is_file
        assert is_file[-1] < manifest < found.index(publish)
    # The content of the manifest and the names beside it before its name; its name, and that of the folder, before the
    # tracker has a name.
    assert any(found[i] == "sync /root/.staging/0.1.##" for i in synced if i < manifest)
    in_order(found, publish, "sync /root/iteration_00000000", tracker)
    in_order(found, publish, "sync /root", tracker, "sync /root")
    # The folders that were made have names too.
    assert "sync " in found  # the folder `new`
    assert f"sync {tmp_path}" in found


def test_state_is_synced_at_once_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(group: Any) -> None:
        extra = {"random": reshard.per_rank(np.arange(4) + group.rank)}
        layout = {"mesh": {"dp": 3}, "rules": [{"match": "*"}]}
        reshard.save(tmp_path / "source", 7, {"w": W}, extra=extra, layout=layout, group=group)

    in_threads(3, save)
    real_sync, real_write = _core.sync_together, _core.write_arrays
    synced: list[list[str]] = []
    durable: list[bool] = []

    def sync_together(files: list[str], folders: list[str]) -> None:
        synced.append([Path(file).name for file in files])
        real_sync(files, folders)

    def write_arrays(*args: Any, **options: Any) -> Any:
        durable.append(options["durable"])
        return real_write(*args, **options)

    monkeypatch.setattr(_core, "sync_together", sync_together)
    monkeypatch.setattr(_core, "write_arrays", write_arrays)
    reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2")
    assert durable == [False] * 3
    (before_manifest,) = [names for names in synced if any("manifest.json" in name for name in names)]
    assert {f"extra-000000{rank}.{end}" for rank in range(3) for end in ("json", "arrays")} <= {*before_manifest}


@pytest.mark.slow(disk=False)
def test_a_hugging_face_folder_is_synced_before_it_is_named(source: Path, tmp_path: Path) -> None:
    found = calls_of(source, tmp_path / "hf", tmp_path / "trace", {"files": {"max_shard_size": 300}})
    for name in ("model-00001-of-00003.safetensors", "model.safetensors.index.json"):
        assert any(entry.startswith("sync") and name in entry for entry in found[: found.index("rename /hf")])
    in_order(found, "sync /.hf.#.staging", "rename /hf", "sync ")


@pytest.mark.slow
def test_without_durable_nothing_is_synced(source: Path, tmp_path: Path) -> None:
    for name, options in KINDS.values():
        found = calls_of(source, tmp_path / "x" / name, tmp_path / "trace", {**options, "commit": {"durable": False}})
        assert [entry for entry in found if entry.startswith("sync")] == []
        shutil.rmtree(tmp_path / "x")
