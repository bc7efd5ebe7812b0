"""What the next save does with what an unfinished one left."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.commit.roots import names, root
from tests.helpers.small_saves import (
    all_held,
    debris,
    fail_with,
    found,
    found_by_the_original,
    held,
    in_child,
    kill_self,
    save,
    stopped_at_step,
    sync_by_python,
    tracker,
    write_files,
)

import reshard
from reshard import _core
from reshard.commit import filesystem, protocol, roots, staging, trash
from reshard.commit import manifest as manifests
from reshard.commit.roots import write_tracker
from reshard.errors import (
    StorageError,
)
from reshard.opening import iterations
from reshard.storage import mounts
from reshard.storage.local import LOCAL, LocalStore
from reshard.storage.location import locate
from reshard.storage.store import Abilities

if TYPE_CHECKING:
    from pathlib import Path
__all__ = ["root"]


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


@pytest.mark.slow(disk=False)
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
