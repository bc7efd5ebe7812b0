"""The commit protocol: what a save leaves, what is refused, what an error of the system leaves."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.commit.roots import names, root
from tests.helpers.small_saves import (
    FileRecord,
    all_held,
    debris,
    fail_with,
    found,
    found_by_the_original,
    held,
    save,
    stopped_at,
    sync_by_python,
    tracker,
    write_files,
)

import reshard
from reshard import _core
from reshard.commit import filesystem, protocol
from reshard.commit import manifest as manifests
from reshard.commit.roots import write_tracker
from reshard.errors import (
    ArgumentError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    StorageError,
)
from reshard.storage.local import LocalStore
from reshard.storage.location import locate
from reshard.storage.store import Abilities

if TYPE_CHECKING:
    from reshard.commit.attempts import Attempt
__all__ = ["root"]

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
