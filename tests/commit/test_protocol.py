"""The commit protocol: who may write, what is refused, what an error of the system leaves, what recovery does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import shutil
import stat
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.small_saves import (
    FileRecord,
    all_held,
    debris,
    fail_with,
    fork,
    found,
    found_by_the_original,
    held,
    in_child,
    kill_self,
    save,
    stopped_at,
    stopped_at_step,
    sync_by_python,
    tracker,
    write_files,
)

import reshard
from reshard import _core
from reshard.commit import claims, filesystem, protocol, roots, staging, trash
from reshard.commit import manifest as manifests
from reshard.commit.roots import write_tracker
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    StorageError,
)
from reshard.opening import iterations
from reshard.storage import host, mounts
from reshard.storage.local import LOCAL, LocalStore
from reshard.storage.location import Location, locate
from reshard.storage.store import Abilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.commit.attempts import Attempt


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "root"
    protocol.release()


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# -- a save


def test_what_a_save_leaves(root: Path) -> None:
    old = os.umask(0o022)
    try:
        assert save(root, 100) == []
    finally:
        os.umask(old)
    assert names(root) == [
        ".lock", ".staging", ".trash", ".writers", "iteration_00000100", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    assert (root / "latest_checkpointed_iteration.txt").read_bytes() == b"100"
    folder = root / "iteration_00000100"
    assert names(folder) == [
        ".tracked", "checksums.bin", "common.json", "manifest.json",
        "model-0000000-0000002.safetensors", "model-0000001-0000002.safetensors",
    ]  # fmt: skip
    assert not debris(root)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "manifest.json").stat().st_mode) == 0o644
    manifest = manifests.read(locate(folder))
    assert (manifest.iteration, manifest.world_size, manifest.previous_tracker) == (100, 2, None)
    assert manifest.writer == f"reshard {_core.__version__}"
    manifests.check_sizes(locate(folder), manifest)
    manifests.check_headers(locate(folder), manifest)
    assert set(manifests.read_checksums(locate(folder), manifest)) == set(manifest.shards)
    protocol.release(locate(root))
    assert names(root) == [".lock", ".writers", "iteration_00000100", "latest_checkpointed_iteration.txt"]


def test_a_manifest_tells_where_it_comes_from(root: Path) -> None:
    save(root, 100)
    save(root, 200, passed_over=(150, 120))
    manifest = manifests.read(locate(root / "iteration_00000200"))
    assert (manifest.previous_tracker, manifest.passed_over, manifest.generation) == (100, (150, 120), 1)
    protocol.release(locate(root))
    save(root, 300)
    assert manifests.read(locate(root / "iteration_00000300")).generation == 2


def test_files_that_the_core_wrote(root: Path) -> None:
    attempt = protocol.begin(locate(root), 100)
    name = "model-0000000-0000001.safetensors"
    written = _core.write_arrays(str(attempt.staging / name), [("w", "U8", (600_000,), bytes(600_000))])
    protocol.publish(attempt, protocol.seal(attempt, {name: (written, 0)}, world_size=1))
    manifest = manifests.read(attempt.folder)
    manifests.check_headers(attempt.folder, manifest)
    assert (
        _core.scrub(
            str(attempt.folder / name), written.n_bytes, manifests.read_checksums(attempt.folder, manifest)[name]
        )
        == []
    )
    assert len(manifests.read_checksums(attempt.folder, manifest)[name]) == 3 * 4


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and named from now on, without random names; not what the core does for its own files."""
    events: list[str] = []
    real: dict[str, Any] = {"fsync": os.fsync, "replace": os.replace, "rename": _core.rename}

    def fsync(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        events.append(f"sync {re.sub('[0-9a-f]{16,}', '*', name)}")
        real["fsync"](handle)

    def rename(source: str, target: str, **more: Any) -> None:
        events.append(f"name {Path(target).name}")
        real["rename" if more else "replace"](source, target, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(_core, "rename", rename)
    monkeypatch.setattr(_core, "sync_together", sync_by_python)
    return events


def test_everything_is_synced_before_it_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that appears belongs to what was synced before, and its folder is synced before the next one does."""
    save(root, 100)
    attempt = protocol.begin(locate(root), 200)
    told = write_files(attempt.staging, 200, 0)
    events = recorded(monkeypatch)
    protocol.publish(attempt, protocol.seal(attempt, told, world_size=2))
    assert events == [
        "name checksums.bin",
        "sync checksums.bin", "sync .manifest.json.*.tmp", "sync 200.1.*", "name manifest.json",
        "name iteration_00000200",
        "sync .latest_checkpointed_iteration.txt.*.tmp", "sync iteration_00000200", "sync root", "sync .staging",
        "name latest_checkpointed_iteration.txt",
        "sync .tracked", "sync iteration_00000200", "sync root",
    ]  # fmt: skip
    events.clear()
    save(root, 300, durable=False)
    synced = [event for event in events if event.startswith("sync")]
    assert len(synced) == 3, synced
    assert all(re.fullmatch(r"sync \.(model|common).*", event) for event in synced), "those of the test's own writer"


@pytest.mark.parametrize("limit", [None, 0], ids=["together", "one by one"])
def test_all_files_of_a_save_are_synced_before_the_manifest_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    if limit is not None:
        monkeypatch.setattr("reshard.formats.checkpoint2.save._SYNCED_TOGETHER_BYTES", limit)
    events = recorded(monkeypatch)
    reshard.save(root, 100, {"w": np.zeros(4)}, {"m.w": np.zeros(4)}, extra={"array": np.arange(3), "number": 1})
    written = {path.name for path in (root / "iteration_00000100").iterdir()} - {"manifest.json", ".tracked"}
    assert len(written) == 7
    before = events[: events.index("name manifest.json")]
    last = {name: before.index(f"sync {name}") for name in written if f"sync {name}" in before}
    by_core = {name for name in written if name.endswith((".safetensors", ".arrays"))}
    own = {"extra-0000000.json"}  # synced under its temporary name
    assert written - last.keys() == (set() if limit is None else by_core | own)
    folders = [n for n, event in enumerate(before) if event == "sync 100.1.*"]
    assert max(last.values()) < max(folders), "the names"
    protocol.release(locate(root))


def test_a_file_that_cannot_be_synced_fails_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name == "metadata.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(_core, "sync_together", sync_by_python)
    with pytest.raises(StorageError, match=r"syncing .*metadata.json"):
        reshard.save(root, 100, {"w": np.zeros(4)})
    assert not (root / "iteration_00000100").exists()
    protocol.release(locate(root))


def test_a_pin_survives_the_replacement(root: Path) -> None:
    save(root, 100)
    (root / "iteration_00000100" / ".pinned").touch()
    save(root, 100, 1)
    assert held(root / "iteration_00000100") == (100, 1)
    assert (root / "iteration_00000100" / ".pinned").exists()


def test_replacing_a_pinned_iteration_is_a_warning(root: Path) -> None:
    reports = []
    for _ in range(3):
        reports.append(reshard.save(root, 100, {"w": np.zeros(4)}, commit={"durable": False}))
        reshard.pin(locate(root), 100)
    reshard.unpin(locate(root), 100)
    reports.append(reshard.save(root, 100, {"w": np.zeros(4)}, commit={"durable": False}))
    warning = "iteration 100 was pinned, and this save has replaced its content; it stays pinned"
    assert [report.warnings for report in reports] == [(), (warning,), (warning,), ()]
    protocol.release(locate(root))


def test_two_saves_in_flight(root: Path) -> None:
    """As a background writer has them: the second is begun before the first is published."""
    first = protocol.begin(locate(root), 100)
    second = protocol.begin(locate(root), 200)
    told = {attempt: write_files(attempt.staging, attempt.iteration, 0) for attempt in (first, second)}
    protocol.publish(first, protocol.seal(first, told[first], world_size=2))
    manifest = protocol.seal(second, told[second], world_size=2)
    assert manifest.previous_tracker == 100
    protocol.publish(second, manifest)
    assert found(root) == (200, 0)


def test_of_two_saves_published_the_wrong_way_round_the_tracker_names_the_newer(root: Path) -> None:
    first, second = protocol.begin(locate(root), 100), protocol.begin(locate(root), 200)
    for attempt in (second, first):
        told = write_files(attempt.staging, attempt.iteration, 0)
        warnings = protocol.publish(attempt, protocol.seal(attempt, told, world_size=2))
    assert warnings == ["the tracker names the newer iteration 200 already and stays there"]
    assert all_held(root) == {(100, 0), (200, 0)}
    assert found(root) == found_by_the_original(root) == (200, 0)


# -- what is refused


def test_below_the_tracker_only_on_purpose(root: Path) -> None:
    for iteration in (100, 200, 300):
        save(root, iteration)
    with pytest.raises(ArgumentError, match="iteration 200 is below 300, which the tracker") as caught:
        save(root, 200, 1)
    assert "give `commit=Commit(rollback=True)`" in str(caught.value)
    save(root, 200, 1, rollback=True, passed_over=(300,))
    assert found(root) == found_by_the_original(root) == (200, 1)
    assert manifests.read(locate(root / "iteration_00000200")).previous_tracker == 300
    protocol.release()
    assert protocol.recover(locate(root)) == []
    assert found(root) == (200, 1)
    save(root, 300, 1)
    assert found(root) == (300, 1)


def test_a_tracker_without_its_folder_is_none(root: Path) -> None:
    save(root, 100)
    write_tracker(locate(root), 900)
    save(root, 200)
    assert found(root) == (200, 0)
    assert manifests.read(locate(root / "iteration_00000200")).previous_tracker is None


def test_without_overwrite(root: Path) -> None:
    save(root, 100)
    with pytest.raises(DestinationExistsError, match="exists"):
        save(root, 100, 1, overwrite=False)
    attempt = protocol.begin(locate(root), 200, overwrite=False)
    manifest = protocol.seal(attempt, write_files(attempt.staging, 200, 1), world_size=2)
    shutil.copytree(root / "iteration_00000100", root / "iteration_00000200")
    with pytest.raises(DestinationExistsError, match="was made while it was being saved"):
        protocol.publish(attempt, manifest)
    protocol.abandon(attempt)
    assert not debris(root)
    assert tracker(root) == 100


@pytest.mark.parametrize("iteration", [-1, 1.5, True, "7", 10**18])
def test_what_is_no_iteration(iteration: Any, root: Path) -> None:
    with pytest.raises(ArgumentError, match="an iteration is an integer"):
        protocol.begin(locate(root), iteration)
    assert not root.exists()


def test_a_root_that_is_no_folder(root: Path) -> None:
    root.touch()
    with pytest.raises(DestinationExistsError, match="is not a folder"):
        protocol.begin(locate(root), 100)


def test_a_root_that_is_a_link_to_nothing(root: Path, tmp_path: Path) -> None:
    root.symlink_to(tmp_path / "not mounted" / "run")
    for place in (root, root / "run"):
        found = protocol.obstacle(locate(place))
        assert found is not None
        assert f"is not a folder: it is a symbolic link to `{tmp_path}/not mounted/run`, which does not exist" in str(
            found
        )
    with pytest.raises(DestinationExistsError, match="mount the disk"):
        protocol.begin(locate(root), 100)


@pytest.mark.parametrize("name", [".staging", ".trash", ".writers"])
def test_links_in_place_of_our_folders(name: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    root.mkdir()
    (root / name).symlink_to("../outside")
    with pytest.raises(StorageError, match=f"{name}` is a symbolic link, expected a folder"):
        protocol.begin(locate(root), 100)
    assert names(tmp_path / "outside") == []


def test_a_link_in_place_of_the_lock(root: Path) -> None:
    root.mkdir()
    (root / ".lock").symlink_to("../outside")
    with pytest.raises(StorageError, match=r"\.lock` is a symbolic link, expected a file") as caught:
        protocol.begin(locate(root), 100)
    assert caught.value.hint == "remove the link"


def test_another_file_system_in_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        found = list(real(path))
        found[2] += Path(path).name == ".staging"
        return os.stat_result(found)

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(StorageError, match="lies on another file system than") as caught:
        protocol.begin(locate(root), 100)
    assert caught.value.errno == errno.EXDEV


def test_too_little_space_is_told_before_anything_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 100)
    before = all_held(root)
    with pytest.raises(StorageError, match=f"bytes free; the save writes {2**60}") as caught:
        protocol.begin(locate(root), 200, planned_bytes=2**60)
    assert caught.value.errno == errno.ENOSPC
    assert all_held(root) == before
    assert not debris(root)
    # Exactly the planned bytes are not enough, and 5 % more are.
    monkeypatch.setattr(LocalStore, "free_bytes", lambda *_: 1000)
    with pytest.raises(StorageError):
        protocol.begin(locate(root), 200, planned_bytes=953)
    protocol.abandon(protocol.begin(locate(root), 200, planned_bytes=952))
    monkeypatch.setattr(LocalStore, "free_bytes", lambda *_: None)
    protocol.abandon(protocol.begin(locate(root), 200, planned_bytes=2**60))


def test_a_disk_that_is_full_of_trash_is_emptied_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 100)
    (root / "iteration_00000100").rename(root / ".trash" / ("100." + "0" * 32))
    monkeypatch.setattr(LocalStore, "free_bytes", lambda *_: 0 if names(root / ".trash") else 1000)
    protocol.abandon(protocol.begin(locate(root), 200, planned_bytes=500))
    assert names(root / ".trash") == []


def damage_staging(attempt: Attempt, told: dict[str, tuple[FileRecord, int]], how: str) -> None:
    name = "model-0000001-0000002.safetensors"
    path = (attempt.staging / name).local
    if how == "missing":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "link":
        path.rename(attempt.root.local / "elsewhere")
        path.symlink_to(attempt.root.local / "elsewhere")
    elif how == "folder":
        (attempt.staging / "folder").local.mkdir()
    elif how == "untold":
        del told[name]
    elif how == "sums":
        one, rank = told[name]
        told[name] = (FileRecord(one.n_bytes, one.header_bytes, one.header_checksum, one.checksums * 2), rank)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("missing", DamagedFileError, "is missing"),
        ("cut", DamagedFileError, "its writer reported"),
        ("link", DamagedFileError, "is not a regular file"),
        ("folder", DamagedFileError, "is not a regular file"),
        ("untold", DamagedFileError, "an unexpected shard file"),
        ("sums", ArgumentError, "8 bytes of checksums were reported, 1 chunks"),
    ],
)
def test_what_is_staged_must_be_what_was_told(how: str, error: type[ReshardError], message: str, root: Path) -> None:
    save(root, 100)
    attempt = protocol.begin(locate(root), 200)
    told = write_files(attempt.staging, 200, 0)
    damage_staging(attempt, told, how)
    with pytest.raises(error, match=message):
        protocol.seal(attempt, told, world_size=2)
    protocol.abandon(attempt)
    assert not debris(root)
    assert found(root) == (100, 0)


def test_temporary_files_of_writes_that_were_made_again_are_no_part_of_it(root: Path) -> None:
    attempt = protocol.begin(locate(root), 100)
    told = write_files(attempt.staging, 100, 0)
    (attempt.staging / ".model-0000000-0000002.safetensors.77-0.tmp").local.write_bytes(b"torn")
    protocol.publish(attempt, protocol.seal(attempt, told, world_size=2))
    assert not debris(root)


def test_a_manifest_that_is_not_the_sealed_one_is_not_published(root: Path) -> None:
    attempt = protocol.begin(locate(root), 100)
    manifest = protocol.seal(attempt, write_files(attempt.staging, 100, 0), world_size=2)
    other = protocol.seal(attempt, write_files(attempt.staging, 100, 1), world_size=3)
    assert other.digest != manifest.digest
    with pytest.raises(DamagedFileError, match="another manifest than was sealed"):
        protocol.publish(attempt, manifest)
    assert names(root / ".staging") == [attempt.staging.name]


def test_abandoning_leaves_nothing_and_never_raises(root: Path) -> None:
    attempt = protocol.begin(locate(root), 100)
    write_files(attempt.staging, 100, 0)
    protocol.abandon(attempt)
    protocol.abandon(attempt)
    assert not debris(root)
    shutil.rmtree(root)
    protocol.abandon(attempt)


# -- errors of the system


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [100, 200], ids=["replacement", "new"])
def test_an_error_at_any_change_is_a_failed_save_at_worst(iteration: int, root: Path) -> None:
    save(root, 100)
    for place in range(1000):
        number = errno.EIO if place % 2 else errno.ENOSPC
        protocol.release()  # the claim too is made anew
        base = root.with_name(f"root{place}")
        shutil.copytree(root, base)
        failure: StorageError | None = None
        with stopped_at(place, fail_with(number)) as seen:
            try:
                save(base, iteration, 1)
            except StorageError as error:
                failure = error
        assert failure is None or (failure.errno == number and failure.path)
        failed = failure is not None
        assert (100, 0) in all_held(base) or (100, 1) in all_held(base)
        assert found(base) in {(100, 0), (iteration, 1)}
        assert found_by_the_original(base) == found(base) or failed
        if not failed:
            assert found(base) == (iteration, 1)
        protocol.release()
        save(base, 300, 2, durable=False)
        assert found(base) == found_by_the_original(base) == (300, 2)
        assert not debris(base)
        shutil.rmtree(base)
        if len(seen) <= place:
            break
    assert place > 30


@pytest.mark.parametrize("abilities", [None, Abilities(renames_folders=False, exchanges=False)], ids=["", "in place"])
def test_a_save_that_fails_as_it_begins_leaves_nothing(
    abilities: Abilities | None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process may live on for weeks, and recovery is for what dead ones left."""
    if abilities is not None:
        monkeypatch.setattr(LocalStore, "abilities", lambda *_: abilities)
    save(root, 100)
    for place in range(20):
        attempt = None
        with stopped_at(place, fail_with(errno.EIO)) as seen, contextlib.suppress(StorageError):
            attempt = protocol.begin(locate(root), 200)
        if attempt is not None:
            protocol.abandon(attempt)
        assert not debris(root)
        assert found(root) == (100, 0)
        if len(seen) <= place:
            break
    assert place > 1


def test_what_a_failed_replacement_left_goes_with_the_next_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, which goes on: a whole iteration on the disk that nobody would remove before it ends."""
    save(root, 100)
    with monkeypatch.context() as patch:
        patch.setattr(
            "reshard.commit.trash.discard",
            lambda *_, **__: filesystem.rename(locate(root / "nothing"), locate(root / "there")),
        )
        with pytest.raises(StorageError):
            save(root, 100, 1)
    (left,) = (root / ".staging").iterdir()
    assert held(left) == (100, 0)
    assert found(root) == (100, 1)
    save(root, 200)
    assert not debris(root)
    assert all_held(root) == {(100, 1), (200, 0)}


def test_nothing_is_synced_again_after_a_sync_that_failed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "sync_together", sync_by_python)
    save(root, 100)
    for place in range(1000):
        attempt = protocol.begin(locate(root), 200)
        told = write_files(attempt.staging, 200, 0)
        synced: list[int] = []
        failed: list[int] = []
        real = os.fsync

        def fsync(handle: int, place: int = place, synced: list[int] = synced, failed: list[int] = failed) -> None:
            inode = os.fstat(handle).st_ino
            assert inode not in failed, "a second sync would say that all is well"
            synced.append(inode)
            if len(synced) == place + 1:
                failed.append(inode)
                raise OSError(errno.EIO, "Input/output error")

        os.fsync = fsync  # type: ignore[assignment]
        try:
            try:
                protocol.publish(attempt, protocol.seal(attempt, told, world_size=2))
            except StorageError:
                assert failed
                with pytest.raises(StorageError, match="has failed before") as caught:
                    protocol.seal(attempt, told, world_size=2)
                assert caught.value.errno == errno.EIO
            protocol.abandon(attempt)
        finally:
            os.fsync = real
        assert found(root) in {(100, 0), (200, 0)}
        if not failed:
            break
    assert place > 5


# -- what the file system can do


def test_probing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 100)
    claim = claims.held(locate(root))
    assert claim is not None
    assert staging.abilities(claim) == Abilities(renames_folders=True, exchanges=True)
    calls = []
    monkeypatch.setattr(LocalStore, "abilities", lambda *_: calls.append(1))
    save(root, 200)
    assert not calls
    assert names(root / ".staging") == []


def test_probing_is_not_taken_in_by_an_exchange_in_three_steps(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the core does where the system cannot exchange names."""
    real = _core.rename

    def rename(source: str, target: str, *, exchange: bool) -> None:
        if not exchange:
            real(source, target, exchange=False)
            return
        Path(target).rename(source + ".old")
        Path(source).rename(target)
        Path(source + ".old").rename(source)

    monkeypatch.setattr(_core, "rename", rename)
    assert LOCAL.abilities(str(tmp_path)) == Abilities(renames_folders=True, exchanges=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_probing_a_file_system_that_renames_no_folders(
    number: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rename(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_core, "rename", rename)
    assert LOCAL.abilities(str(tmp_path)) == Abilities(renames_folders=False, exchanges=False)
    # The weaker path, all the way.
    save(root, 100)
    assert "cannot rename folders" in caplog.text
    save(root, 200)
    save(root, 200, 1)
    assert found(root) == found_by_the_original(root) == (200, 1)
    assert all_held(root) == {(100, 0), (200, 1)}
    assert not debris(root)
    attempt = protocol.begin(locate(root), 300)
    write_files(attempt.staging, 300, 0)
    assert attempt.in_place
    assert held(attempt.folder) is None
    protocol.abandon(attempt)
    assert not attempt.folder.exists()


def test_a_full_disk_is_no_ability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "rename", lambda *_, **__: fail_with(errno.ENOSPC)())
    with pytest.raises(StorageError):
        LOCAL.abilities(str(tmp_path))


# -- who may write


def test_a_claim_says_who_holds_it_and_is_made_once(root: Path) -> None:
    save(root, 100)
    save(root, 200)
    assert names(root / ".writers") == ["epoch_1"]
    content = json.loads((root / ".writers" / "epoch_1").read_bytes())
    assert content["pid"] == os.getpid()
    assert set(content) == {"host", "boot_id", "pid_namespace", "pid", "started", "writer"}
    protocol.release(locate(root))
    assert json.loads((root / ".writers" / "epoch_1").read_bytes()) == {"released": True}
    save(root, 300)
    assert names(root / ".writers") == ["epoch_2"]


def claim_and_wait(root: Path, go: int, stay: int) -> str:
    os.read(go, 1)
    try:
        protocol.begin(locate(root), 100)
    except ClaimedError as error:
        return f"refused: {error.message}"
    os.read(stay, 1)
    return "claimed"


@pytest.mark.slow
def test_of_many_processes_one_wins(tmp_path: Path) -> None:
    for number in range(10):
        root = tmp_path / f"root{number}"
        go_out, go = os.pipe()
        stay_out, stay = os.pipe()
        children = [fork(partial(claim_and_wait, root, go_out, stay_out)) for _ in range(5)]
        os.write(go, b"x" * 5)
        # All have the same handle: the winner is still there while the others are refused.
        losers: list[str] = []
        while len(losers) < 4:
            ready, _, _ = select.select([child.handle for child in children], [], [], 20)
            assert ready, "somebody hangs"
            for child in [child for child in children if child.handle in ready]:
                losers.append(child.result())
                children.remove(child)
        os.write(stay, b"x")
        assert children[0].result() == "claimed"
        assert all("refused" in one and "which is alive" in one for one in losers)
        for handle in (go_out, go, stay_out, stay):
            os.close(handle)


def test_a_dead_process_holds_nothing_even_before_its_parent_looks(root: Path) -> None:
    def claim_and_die() -> None:
        protocol.begin(locate(root), 100)
        kill_self()

    child = fork(claim_and_die)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table
    save(root, 200)
    assert child.result() is None
    assert names(root / ".writers") == ["epoch_2"]
    assert not debris(root)


def foreign_claim(root: Path, epoch: int = 7, **changes: Any) -> Path:
    """The claim of a process on another machine."""
    path = root / ".writers" / f"epoch_{epoch}"
    path.parent.mkdir(parents=True, exist_ok=True)
    me = claims._me() | {"boot_id": "another", "host": "elsewhere\x1b[2J"}
    path.write_text(json.dumps(me | changes))
    return path


def test_a_claim_from_elsewhere_is_watched(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_WATCH_SECONDS", 0.2)
    path = foreign_claim(root)
    os.utime(path, (2**33, 2**33))  # its clock is of no interest
    save(root, 100)
    assert names(root / ".writers") == ["epoch_8"]


def test_a_claim_from_elsewhere_that_is_touched_is_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_WATCH_SECONDS", 20)
    path = foreign_claim(root)
    real = claims._beat
    beats = []

    def beat(path: Location) -> int | None:
        beats.append(path)
        if len(beats) == 3:
            os.utime(path, (5, 5))
        return real(path)

    monkeypatch.setattr(claims, "_beat", beat)
    with pytest.raises(ClaimedError, match=r"is claimed by process `\d+` on host `elsewhere\\x1b\[2J`, which is alive"):
        save(root, 100)
    assert names(root / ".writers") == [path.name]
    save(root, 100, takeover=True)
    assert names(root / ".writers") == ["epoch_8"]


@pytest.mark.parametrize(
    ("changes", "is_dead"),
    [
        ({}, False),
        ({"boot_id": "another"}, None),
        ({"pid_namespace": "pid:[1]"}, None),
        ({"started": 1}, True),
        ({"pid": 2**22 + 1}, True),
        ({"pid": os.getpid()}, True),
        ({"pid": "1"}, None),
        ({"pid": -1}, None),
        ({"pid": True}, None),
        ({"released": True}, True),
    ],
)
def test_what_a_claim_of_this_machine_says(changes: dict[str, Any], *, is_dead: bool | None) -> None:
    parent = os.getppid()
    owner = claims._me() | {"pid": parent, "started": host.process_start(parent)} | changes
    assert claims._is_dead(owner, True) is is_dead


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"x" * 5000, b'{"pid": 1, "pid": 2}'])
def test_a_torn_claim_is_dead_where_locks_are_real(content: bytes, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign_claim(root).write_bytes(content)
    monkeypatch.setattr(claims, "_watch", lambda *_: pytest.fail("there is nothing to wait for"))
    save(root, 100)
    assert names(root / ".writers") == ["epoch_8"]


def test_without_locks_claims_alone_keep_writers_apart(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(claims, "_WATCH_SECONDS", 0.1)
    real = claims._watch
    watched: list[int] = []

    def watch(root: Location, writers: Location, beats: dict[int, int]) -> dict[int, int]:
        watched.extend(beats)
        return real(root, writers, beats)

    monkeypatch.setattr(claims, "_watch", watch)
    foreign_claim(root).write_bytes(b"")  # somebody may be writing it at this moment
    save(root, 100)
    assert watched == [7]
    assert in_child(partial(refusal, root)) == "ClaimedError"
    assert names(root / ".writers") == ["epoch_8"]


def refusal(root: Path, iteration: int = 900) -> str | None:
    try:
        protocol.begin(locate(root), iteration)
    except ReshardError as error:
        return type(error).__name__
    return None


def test_who_was_overtaken_publishes_nothing(root: Path) -> None:
    save(root, 100)
    attempt = protocol.begin(locate(root), 200)
    told = write_files(attempt.staging, 200, 1)
    manifest = protocol.seal(attempt, told, world_size=2)
    # The other job recovers first: what this one has staged goes, and 300 is its own.
    in_child(partial(save, root, 150, 2, takeover=True))
    for act in (
        lambda: protocol.publish(attempt, manifest),
        lambda: protocol.seal(attempt, told, world_size=2),
        lambda: protocol.begin(locate(root), 400),
    ):
        with pytest.raises(ClaimedError, match="was taken over by process"):
            act()
    protocol.abandon(attempt)
    assert found(root) == (150, 2)
    assert not debris(root)
    # On demand, and the other one being gone.
    save(root, 400, 1, takeover=True)
    assert found(root) == (400, 1)


def test_a_claim_that_was_removed(root: Path) -> None:
    save(root, 100)
    (root / ".writers" / "epoch_1").unlink()
    foreign_claim(root, 1)
    with pytest.raises(ClaimedError, match="of this process was removed"):
        save(root, 200)


def test_a_root_that_is_another_folder_than_the_claimed_one_is_reported(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 100)
    moved = root.rename(root.with_name("moved"))
    root.mkdir()
    save(root, 200)
    save(root, 300)
    message = f"{root} is not the folder that this process has claimed"
    assert sum(line.startswith(message) for line in caplog.messages) == 1
    assert claims.held(locate(moved)) is None
    assert (root / "iteration_00000300").is_dir()


def test_a_forked_child_is_another_process(root: Path) -> None:
    save(root, 100)
    attempt = protocol.begin(locate(root), 200)
    manifest = protocol.seal(attempt, write_files(attempt.staging, 200, 1), world_size=2)

    def act() -> list[str]:
        messages = []
        for one in (lambda: protocol.publish(attempt, manifest), lambda: protocol.begin(locate(root), 300)):
            try:
                one()
            except ClaimedError as error:
                messages.append(error.message)
        protocol.release()
        return messages

    first, second = in_child(act)
    assert "this process does not hold claim 1" in first
    assert "which is alive" in second
    protocol.publish(attempt, manifest)
    assert found(root) == (200, 1)


def test_the_heartbeat(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = threading.Event()
    real = os.utime

    def utime(*args: Any) -> None:
        real(*args)
        touched.set()

    monkeypatch.setattr(os, "utime", utime)
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.01)
    save(root, 100)
    os.utime(root / ".writers" / "epoch_1", (5, 5))
    touched.clear()
    assert touched.wait(20)
    assert (root / ".writers" / "epoch_1").stat().st_mtime > 10**6
    n_threads = threading.active_count()
    protocol.release(locate(root))
    assert threading.active_count() == n_threads - 1


def test_the_lock_has_a_deadline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 100)
    monkeypatch.setattr(claims, "_LOCK_SECONDS", 0.05)
    with (
        claims.locked(locate(root)),
        pytest.raises(StorageError, match=r"was held by another process for 0\.05 s") as caught,
    ):
        protocol.begin(locate(root), 200)
    assert caught.value.errno == errno.EWOULDBLOCK
    save(root, 200)


def test_handles_are_given_back(root: Path) -> None:
    def n_handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    save(root, 100)
    protocol.release()
    before = n_handles()
    save(root, 200)
    save(root, 300)
    with pytest.raises(ArgumentError):
        save(root, 100)
    protocol.release()
    assert n_handles() == before


# -- recovery


def crash(root: Path, step: str, iteration: int, version: int = 0, **how: Any) -> None:
    """A process that is killed before a named step of a save."""

    def kill_before(name: str) -> None:
        if name.startswith(step):
            kill_self()

    def act() -> None:
        filesystem._step = kill_before
        save(root, iteration, version, **how)

    assert in_child(act) is None


def recovered(root: Path, **how: Any) -> list[str]:
    """As another process that then ends."""
    done: list[str] = in_child(partial(protocol.recover, locate(root), **how))
    assert in_child(partial(protocol.recover, locate(root), **how)) == [], "a second time there is nothing to do"
    return done


def test_what_was_sealed_is_published(root: Path) -> None:
    in_child(partial(save, root, 100))
    crash(root, "rename 200", 200)
    assert found(root) == (100, 0)
    assert recovered(root) == ["iteration 200 was saved but not published, and is now"]
    assert found(root) == found_by_the_original(root) == (200, 0)
    assert (root / "iteration_00000200" / ".tracked").exists()


def test_unless_it_is_not_wanted(root: Path) -> None:
    in_child(partial(save, root, 100))
    crash(root, "rename 200", 200)
    assert recovered(root, roll_forward=False) == []
    assert all_held(root) == {(100, 0)}
    assert len(names(root / ".trash")) == 1


@pytest.mark.parametrize(("iteration", "is_published"), [(150, False), (200, False), (250, True)])
def test_a_save_publishes_only_what_is_below_it(iteration: int, *, is_published: bool, root: Path) -> None:
    """A run that went back to 100 and saves 150 is making 200 anew: a tracker at 200 would be in its way."""
    in_child(partial(save, root, 100))
    crash(root, "rename 200", 200)
    in_child(partial(save, root, iteration, 1))
    assert found(root) == (iteration, 1)
    assert ((200, 0) in all_held(root)) is is_published
    assert not debris(root)


def test_a_roll_back_publishes_nothing_else(root: Path) -> None:
    in_child(partial(save, root, 100))
    in_child(partial(save, root, 300))
    for iteration in (200, 350):
        crash(root, "rename 320", 320)
        in_child(partial(save, root, iteration, 1, rollback=True))
        assert found(root) == (iteration, 1)
    assert all_held(root) == {(100, 0), (200, 1), (300, 0), (350, 1)}


@pytest.mark.parametrize("damage", ["cut", "header", "common", "sums", "manifest", "missing", "another attempt"])
def test_what_is_not_whole_is_not_published(damage: str, root: Path) -> None:
    in_child(partial(save, root, 100))
    crash(root, "rename 200", 200)
    (staged,) = (root / ".staging").iterdir()
    path = staged / "model-0000001-0000002.safetensors"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "missing":
        path.unlink()
    elif damage == "another attempt":
        staged.rename(staged.with_name(f"200.1.{'0' * 32}"))
    else:
        path = {"header": path, "common": staged / "common.json", "sums": staged / "checksums.bin"}.get(
            damage, staged / "manifest.json"
        )
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    assert recovered(root) == []
    assert all_held(root) == {(100, 0)}
    assert names(root / ".staging") == []
    in_child(partial(save, root, 200, 1))
    assert not debris(root)


def test_what_was_published_is_tracked(root: Path) -> None:
    in_child(partial(save, root, 100))
    crash(root, "move the tracker", 200)
    assert tracker(root) == 100
    assert recovered(root) == ["iteration 200 was published but not tracked, and is now"]
    assert found_by_the_original(root) == (200, 0)
    assert (root / "iteration_00000200" / ".tracked").exists()
    crash(root, "make .tracked", 300)
    assert recovered(root) == []
    assert (root / "iteration_00000300" / ".tracked").exists()


def test_a_tracker_that_was_set_back_by_hand_is_obeyed(root: Path) -> None:
    for iteration in (100, 200):
        in_child(partial(save, root, iteration))
    write_tracker(locate(root), 100)
    assert recovered(root) == []
    assert tracker(root) == 100
    # And what another line of saves left untracked is not taken for the crash of this one.
    crash(root, "move the tracker", 300)
    write_tracker(locate(root), 200)
    assert recovered(root) == []
    assert tracker(root) == 200


def test_the_old_one_is_not_given_up_for_a_new_one_whose_name_may_not_last(root: Path) -> None:
    save(root, 100)
    attempt = protocol.begin(locate(root), 100)
    manifest = protocol.seal(attempt, write_files(attempt.staging, 100, 1), world_size=2)
    real = os.fsync

    def fsync(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), root.stat()):
            fail_with(errno.EIO)()
        real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(_core, "sync_together", sync_by_python)
        with pytest.raises(StorageError):
            protocol.publish(attempt, manifest)
    protocol.abandon(attempt)
    assert held(attempt.folder) == (100, 1)
    assert held(attempt.staging) == (100, 0)
    protocol.release()
    save(root, 200)
    assert all_held(root) == {(100, 1), (200, 0)}
    assert not debris(root)


def stop_between_two_renames(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a process that saves iteration 100 again where names cannot be exchanged."""
    monkeypatch.setattr(LocalStore, "abilities", lambda *_: Abilities(renames_folders=True, exchanges=False))
    in_child(partial(save, root, 100))
    crash(root, "rename 100", 100, 1)


def test_what_made_room_is_put_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_between_two_renames(root, monkeypatch)
    assert all_held(root) == set()
    assert recovered(root) == ["iteration 100 was being replaced, and is put back"]
    assert all_held(root) == {(100, 0)}
    # What retention left in the trash is not meant.
    (root / "iteration_00000100").rename(root / ".trash" / f"100.{'0' * 32}")
    assert recovered(root) == []
    place = locate(root)
    assert not staging.put_back(place, place / ".staging" / f"100.9.{'0' * 32}", durable=True)
    assert all_held(root) == set()


def test_where_a_rename_copies_the_files_iterations_are_written_in_place(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "filesystem_type", lambda _: "fuse.s3fs")
    monkeypatch.setattr(filesystem, "rename", lambda one, other: pytest.fail(f"rename {one} to {other}"))
    assert LOCAL.abilities(str(root)) == Abilities(renames_folders=False, exchanges=False)
    for iteration in (100, 200, 300):
        in_child(partial(save, root, iteration))
    place = locate(root)
    trash.remove(place, place / "iteration_00000100", 100, durable=True)
    assert all_held(root) == {(200, 0), (300, 0)}
    assert not debris(root)


def test_what_made_room_is_found_before_it_is_put_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_between_two_renames(root, monkeypatch)
    place = locate(root)
    ((iteration, name),) = roots.list_iterations(place)
    assert (iteration, name.partition("/")[0], roots.tracked_iteration(place)) == (100, ".trash", 100)
    order = iterations(str(place))
    assert order is not None
    assert [(one.iteration, one.reason) for one in order.candidates] == [(100, "named by the tracker")]
    assert "its replacement was interrupted" in order.warnings[0]
    reshard.pin(locate(root), 100)
    assert trash.empty(place, durable=False) == []
    assert recovered(root) == ["iteration 100 was being replaced, and is put back"]
    assert all_held(root) == {(100, 0)}
    assert (root / "iteration_00000100" / ".pinned").exists()


def test_names_that_nobody_here_gives_are_not_touched(root: Path) -> None:
    in_child(partial(save, root, 100))
    foreign = [
        ".staging/share-0123/file", ".staging/200.x.y/file", ".staging/notes", f".staging/200.9.{'0' * 32}/file",
        ".trash/200/file", ".trash/keep", ".trash/200.0123/file", ".writers/notes", "iteration_x/file", "notes",
        ".latest_checkpointed_iteration.txt.swp", "iteration_00000050/file",
    ]  # fmt: skip
    for name in foreign:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    recovered(root)
    in_child(partial(save, root, 300))
    in_child(partial(save, root, 300, 1))
    protocol.recover(locate(root))
    protocol.release(locate(root))
    for name in foreign:
        assert (root / name).read_text() == "mine", name


def test_links_in_the_trash_are_removed_and_not_followed(root: Path, tmp_path: Path) -> None:
    in_child(partial(save, root, 100))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("mine")
    (root / ".trash" / f"5.{'0' * 32}").symlink_to(outside)
    inner = root / ".trash" / f"6.{'0' * 32}"
    (inner / "deep" / "deeper").mkdir(parents=True)
    (inner / "deep" / "link").symlink_to(outside)
    (inner / "manifest.json").symlink_to(outside / "manifest.json")
    in_child(partial(save, root, 200))
    assert not debris(root)
    assert names(outside) == ["manifest.json"]


def test_trash_that_is_still_read_is_left(root: Path) -> None:
    save(root, 100)
    lock = manifests.read_lock(locate(root / "iteration_00000100"))
    warnings = save(root, 100, 1)
    assert len(warnings) == 1
    assert "is still being read" in warnings[0]
    assert found(root) == (100, 1)
    lock.close()
    save(root, 200)
    assert not debris(root)


def test_every_named_step_is_announced(root: Path) -> None:
    """The hook that crash tests of others use."""
    with stopped_at_step(1000, kill_self) as seen:
        save(root, 100)
    wanted = ["make root", "make .writers", "make epoch_1", "make .staging", "make .trash", "write checksums.bin",
        "write manifest.json", "rename 100.1.", "move the tracker", "make .tracked", "sync .tracked and"]  # fmt: skip
    rest = iter(seen)
    assert all(any(name.startswith(one) for name in rest) for one in wanted), seen
