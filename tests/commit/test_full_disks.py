"""Saves on disks that are full, read-only or at a limit, and with an error of the system at every change they make.

What was there is intact and found, the error is typed and names errno and path, nothing is left over, and once the
trouble is gone the next save works. Disks are tmpfs of a given size in a mount namespace of a forked process, see
`namespaces`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers import original_reader, retained, small_saves
from tests.helpers.namespaces import LIBC, MS_RDONLY, MS_REMOUNT, checked, in_namespaces
from tests.helpers.small_saves import fork, stopped_at

import reshard
from reshard import _core
from reshard.commit import manifest as manifests
from reshard.commit import protocol, roots
from reshard.errors import StorageError
from reshard.formats.checkpoint2 import save as saving
from reshard.storage.local import LOCAL
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES)  # EACCES: at a lock of the trash it means that somebody holds it


# -- disks


def mount(disk: Path, options: str, flags: int = 0) -> None:
    checked(LIBC.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", flags, options.encode()))


@contextlib.contextmanager
def disk_of(folder: Path, options: str) -> Iterator[Path]:
    mount(folder, options)
    try:
        yield folder / "root"
    finally:
        protocol.release()  # its handle is on the disk
        checked(LIBC.umount2(os.fsencode(folder), 2))  # MNT_DETACH


# -- saves


def content(iteration: int, n_rows: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(iteration)
    return {"w": rng.random((n_rows, 256), np.float32), "b": rng.random(3), "global_step": np.array(iteration)}


def save(root: Path, iteration: int, n_rows: int = 4, **options: Any) -> Any:
    return reshard.save(root, iteration, content(iteration, n_rows), extra={"a": np.zeros(9), "b": 1}, **options)


def is_whole(root: Path, *allowed: tuple[int, int]) -> int:
    """The iteration that a run resumes from; one of those with their numbers of rows, and all of it."""
    got = reshard.load(root)
    assert got.iteration in dict(allowed)
    expected = content(got.iteration, dict(allowed)[got.iteration])
    assert {key: array.tobytes() for key, array in got.state.items()} == {k: a.tobytes() for k, a in expected.items()}
    return got.iteration


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def files_of(root: Path, iteration: int) -> dict[str, bytes]:
    return snapshot(root / f"iteration_{iteration:08d}")


@pytest.fixture(autouse=True)
def _no_claim_outlives_a_test() -> Iterator[None]:
    yield
    protocol.release()


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


# -- no room

PAGE = 4096
N_ROWS = 40  # 40 KiB


def fails_for_want_of_room(root: Path, iteration: int, **options: Any) -> bool:
    """Save, on a disk that may be too small; whether it was."""
    before = files_of(root, 100)
    try:
        report = save(root, iteration, N_ROWS, **options)
        if not options.get("blocking", True):
            report.result(30)
    except StorageError as error:
        assert error.errno == errno.ENOSPC, error  # noqa: PT017
        assert error.path is not None  # noqa: PT017
        failed = True
    else:
        failed = False
    if failed or options.get("keep") is None:
        assert files_of(root, 100) == before, "what was there is not touched"
    assert not small_saves.debris(root)
    taken = is_whole(root, (100, 4), (iteration, N_ROWS))
    assert taken == iteration or failed
    assert "w" in original_reader.read_tree(root)
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "options"),
    [
        ("pages", {}),
        ("pages", {"blocking": False, "keep": 1}),
        ("pages", {"again": True}),
        ("inodes", {}),
        ("inodes", {"again": True}),
    ],
    ids=["bytes", "in the background, keep 1", "saved again", "inodes", "inodes, saved again"],
)
def test_every_size_of_a_disk(unit: str, options: dict[str, Any], disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one that the old checkpoint fills to one with room for the new, a page or an inode at a time."""
    # Met while it writes, not foreseen: others may have filled the disk meanwhile.
    monkeypatch.setattr(saving, "planned_bytes", lambda *_: 0)
    options = dict(options)
    iteration = 100 if options.pop("again", False) else 200

    def size(n: int) -> str:
        return f"size={n * PAGE}" if unit == "pages" else f"nr_inodes={n}"

    def act() -> list[int]:
        with disk_of(disk, "size=64m") as root:
            save(root, 100)
            used = os.statvfs(root)
        first = used.f_blocks - used.f_bfree if unit == "pages" else used.f_files - used.f_ffree
        n_failed = 0
        for spare in range(200):
            with disk_of(disk, "size=64m") as root:
                save(root, 100)
                protocol.release()
                mount(disk, size(first + spare), MS_REMOUNT)
                if iteration == 100:
                    failed = fails_for_want_of_room_again(root)
                else:
                    failed = fails_for_want_of_room(root, iteration, **options)
                if failed:
                    # Once there is room again.
                    mount(disk, "size=64m,nr_inodes=1000", MS_REMOUNT)
                    save(root, 300, **options | {"blocking": True})
                    assert not small_saves.debris(root)
                    is_whole(root, (300, 4))
            n_failed += failed
            if not failed and spare > n_failed + 3:
                return [n_failed, spare]
        raise AssertionError("it never fits")

    n_failed, _ = in_namespaces(act)
    assert n_failed > (10 if unit == "pages" else 5)


def fails_for_want_of_room_again(root: Path) -> bool:
    """The same of an iteration that is there: it is the old one or the new one."""
    try:
        save(root, 100, N_ROWS)
    except StorageError as error:
        assert error.errno == errno.ENOSPC, error  # noqa: PT017
        failed = True
    else:
        failed = False
    got = reshard.load(root).state["w"]
    left = small_saves.debris(root)
    # If the tracker could not be written, the old one is kept until something newer is.
    assert not left or (failed and len(got) == N_ROWS and [Path(one).parts[0] for one in left] == [".trash"])
    assert any(got.tobytes() == content(100, n_rows)["w"].tobytes() for n_rows in (4, N_ROWS))
    assert failed or len(got) == N_ROWS
    assert original_reader.read_tree(root)["w"].tobytes() == got.tobytes()
    return failed


def test_a_disk_without_room_is_seen_before_anything_is_written(disk: Path) -> None:
    def act() -> int:
        with disk_of(disk, f"size={40 * PAGE}") as root:
            save(root, 100)
            before = snapshot(root)
            n = 0
            for blocking in (True, False):
                try:
                    pending = save(root, 200, 4 * N_ROWS, blocking=blocking)
                    pending.result(30)
                except StorageError as error:
                    assert error.errno == errno.ENOSPC  # noqa: PT017
                    assert "bytes free; the save writes" in str(error)  # noqa: PT017
                    n += 1
            assert snapshot(root) == before
            return n

    assert in_namespaces(act) == 2


def test_a_tracker_that_can_be_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says all the same that the iteration is complete."""

    def lose(_: Any, *__: Any, **___: Any) -> None:
        patch.setattr(roots, "read_tracker", lose)
        raise StorageError("the connection is lost", path="the tracker", errno=errno.ENOTCONN)

    with monkeypatch.context() as patch:
        patch.setattr(roots, "write_tracker", lose)
        with pytest.raises(StorageError) as caught:
            save(tmp_path / "root", 100)
    assert "iteration 100 is complete in " in caught.value.message
    assert "but the tracker cannot be read" in caught.value.message
    assert caught.value.errno == errno.ENOTCONN


@pytest.mark.parametrize(
    ("iteration", "restart", "said"),
    [
        (200, 200, "and a restart resumes from it"),
        (100, 100, "and a restart resumes from it"),
        (50, 100, "but the tracker still names 100"),
    ],
    ids=["new", "saved again", "below the tracker"],
)
def test_a_tracker_that_cannot_be_written(
    iteration: int, restart: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that the iteration is complete, and any later save finishes it."""
    root = tmp_path / "root"
    save(root, 100)

    def full(*_: Any, **__: Any) -> None:
        raise StorageError("no room", path="the tracker", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(roots, "write_tracker", full)
        with pytest.raises(StorageError) as caught:
            save(root, iteration, N_ROWS, commit={"rollback": True})
    assert f"iteration {iteration} is complete in `{root}/iteration_{iteration:08d}`, {said}" in caught.value.message
    assert caught.value.message.endswith("its save is not finished: no room")
    assert "save again" in str(caught.value.hint)
    assert caught.value.errno == errno.ENOSPC
    assert is_whole(root, (200, N_ROWS), (100, N_ROWS if iteration == 100 else 4)) == restart
    save(root, 300)
    assert not small_saves.debris(root)
    assert (root / f"iteration_{iteration:08d}" / ".tracked").exists() == (iteration != 50)
    assert is_whole(root, (300, 4)) == 300


def test_retention_on_a_full_disk(disk: Path) -> None:
    """It makes room, and asks for none."""

    def act() -> list[int]:
        with disk_of(disk, "size=64m") as root:
            for iteration in (100, 200, 300):
                save(root, iteration)
            used = os.statvfs(root)
            mount(disk, f"size={(used.f_blocks - used.f_bfree) * PAGE}", MS_REMOUNT)
            removed = retained.apply(locate(root), reshard.Retention(keep=1))
            # That 300 was verified cannot be recorded on a full disk; it is verified all the same.
            assert all("the result is not recorded" in one for one in removed.warnings)
            assert not small_saves.debris(root)
            is_whole(root, (300, 4))
            return list(removed.iterations)

    assert in_namespaces(act) == [100, 200]


def test_retention_without_a_trash_on_a_full_disk(disk: Path) -> None:
    """The oldest iteration is removed in place. A tmpfs without inodes refuses a folder, as a full ext4 does."""

    def act() -> list[list[int]]:
        with disk_of(disk, "size=64m") as root:
            for iteration in (100, 200, 300, 400):
                save(root, iteration)
            reshard.verify(root)
            protocol.release(locate(root))
            assert not (root / ".trash").exists()
            used = os.statvfs(root)
            mount(disk, f"size=64m,nr_inodes={used.f_files - used.f_ffree}", MS_REMOUNT)
            lock = manifests.read_lock(locate(root / "iteration_00000200"))
            first = retained.apply(locate(root), reshard.Retention(keep=1))
            lock.close()
            second = retained.apply(locate(root), reshard.Retention(keep=1))
            assert not second.warnings
            assert not small_saves.debris(root)
            is_whole(root, (400, 4))
            return [list(first.iterations), list(second.iterations)]

    assert in_namespaces(act) == [[100, 300], [200]]


# -- read-only


def test_a_disk_that_becomes_read_only(disk: Path) -> None:
    def act() -> list[int | None]:
        told: list[int | None] = []
        with disk_of(disk, "size=8m") as root:
            save(root, 100)
            save(root, 200)
            protocol.release()
            before = snapshot(root)
            mount(disk, "size=8m", MS_REMOUNT | MS_RDONLY)
            for options in ({}, {"blocking": False}, {"commit": {"rollback": True}}):
                try:
                    report = save(root, 300, **options)
                    report.result(30)
                except StorageError as error:
                    told.append(error.errno)
                    assert str(disk) in str(error)  # noqa: PT017
            is_whole(root, (200, 4))
            assert not [one for one in reshard.verify(root).checkpoints if one.faults]
            with contextlib.suppress(StorageError):
                assert retained.apply(locate(root), reshard.Retention(keep=1)).iterations == ()
            assert snapshot(root) == before
            mount(disk, "size=8m", MS_REMOUNT)
            save(root, 300)
            assert not small_saves.debris(root)
            is_whole(root, (300, 4))
        return told

    assert in_namespaces(act) == [errno.EROFS] * 3


# -- limits of the process


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    root = tmp_path / "root"

    def act() -> list[int]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        save(root, 100)
        failed = []
        for limit in (0, 1, 100, 300, 1000, PAGE, 10 * PAGE, 11 * PAGE):
            protocol.release()
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                save(root, 200, N_ROWS)
            except StorageError as error:
                failed.append(limit)
                assert error.errno == errno.EFBIG, error  # noqa: PT017
                assert "disk space" not in error.message + (error.hint or ""), error  # noqa: PT017
            else:
                break
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            is_whole(root, (100, 4))
            assert not debris_of(root)
        save(root, 300)
        assert not small_saves.debris(root)
        is_whole(root, (300, 4))
        return failed

    assert fork(act).result(60)[:6] == [0, 1, 100, 300, 1000, PAGE]


def test_a_line_of_which_a_limit_lets_a_part_in(tmp_path: Path) -> None:
    """The system writes the part and reports no error; the next call does."""

    def act() -> int | None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, resource.RLIM_INFINITY))
        with pytest.raises(StorageError) as caught:
            LOCAL.append_line(str(tmp_path / "log"), b"0123456\n", durable=False)
        return caught.value.errno

    assert fork(act).result(60) == errno.EFBIG


def test_a_limit_of_open_files(tmp_path: Path) -> None:
    """One more at a time, until both a save and a load succeed; too few are no damage, so nothing is passed over."""
    root = tmp_path / "root"

    def limited(spare: int, act: Callable[[], Any]) -> Any:
        taken = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208  with that of the listing
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = next(n for n in range(1024) if len(set(range(n)) - taken) + 1 > spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            return act()
        except StorageError as error:
            assert error.errno == errno.EMFILE, error  # noqa: PT017
            return None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def act() -> list[int]:
        save(root, 100)
        save(root, 200)
        reshard.load(root)  # and with it imported
        n_saves_failed = n_loads_failed = 0
        for spare in range(64):
            loaded = limited(spare, lambda: reshard.load(root))
            assert loaded is None or loaded.iteration == is_whole(root, (200, 4), (300, 4))
            n_loads_failed += loaded is None
            protocol.release()
            saved = limited(spare, lambda: save(root, 300))
            is_whole(root, (200, 4), (300, 4))
            n_saves_failed += saved is None
            if saved is not None and loaded is not None:
                break
        save(root, 400)
        assert not small_saves.debris(root)
        is_whole(root, (400, 4))
        return [n_saves_failed, n_loads_failed]

    n_saves_failed, n_loads_failed = fork(act).result(60)
    assert n_saves_failed > 3
    assert n_loads_failed >= 3


# -- an error at every change


def debris_of(root: Path) -> list[str]:
    """But for the claim of a process that has ended: whoever claims next removes it."""
    return [one for one in small_saves.debris(root) if "epoch_" not in one] if (root / ".writers").exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "is_again"),
    [(number, is_again) for number in ERRNOS for is_again in (False, True)],
    ids=lambda value: errno.errorcode[value] if value > 1 else ["new", "saved again"][value],
)
def test_an_error_at_every_change_of_a_save(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_again: bool
) -> None:
    """Those that Python makes: of what the core writes, disks and limits above."""
    real = _core.write_arrays
    monkeypatch.setattr(_core, "write_arrays", lambda *args, **how: real(*args, **how | {"durable": False}))
    root = tmp_path / "root"
    base = 1000
    save(root, base, commit={"durable": False})
    n_failed = 0
    for place in range(1000):
        protocol.release()  # the claim, too, is made anew
        iteration = base if is_again else base + 1
        n_rows = 5 + place % 2
        before = 4 if not is_again or place == 0 else 5 + (place - 1) % 2
        failure: StorageError | None = None
        with stopped_at(place, small_saves.fail_with(number)) as seen:
            try:
                save(root, iteration, n_rows)
            except StorageError as error:
                failure = error
        if failure is not None:
            assert failure.errno == number
            assert failure.path
            n_failed += 1
        taken = reshard.load(root)
        allowed = {(base, before), (iteration, n_rows)}
        assert taken.iteration is not None
        if failure is not None and not (is_again and len(taken.state["w"]) == n_rows):
            assert not debris_of(root)
        assert (taken.iteration, len(taken.state["w"])) in (allowed if failure else {(iteration, n_rows)})
        assert taken.state["w"].tobytes() == content(taken.iteration, len(taken.state["w"]))["w"].tobytes()
        if len(seen) <= place:
            break
        base = iteration if is_again else base + 2
        save(root, base, n_rows if is_again else 4, commit={"durable": False}, keep=1)
        assert not debris_of(root)
        assert is_whole(root, (base, n_rows if is_again else 4)) == base
        assert "w" in original_reader.read_tree(root)
    assert n_failed > 20
