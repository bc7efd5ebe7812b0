"""A process ends before every single change that it makes to the file system: in a save, in the replacement of an
iteration, in recovery and in retention. What was acknowledged is found, what is found is whole, the next save works.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
from tests.helpers import retained
from tests.helpers.cases import slow
from tests.helpers.memory_store import MemoryStore
from tests.helpers.small_saves import (
    Root,
    all_held,
    debris,
    folders,
    found,
    found_by_the_original,
    killed_at,
    killed_at_step,
    readable,
    save,
    tracker,
)

import reshard
from reshard import _core
from reshard.commit import folder_protocol, protocol, staging
from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.formats.checkpoint2 import iteration as iterations
from reshard.formats.checkpoint2.metadata import write_metadata
from reshard.options import Retention
from reshard.storage.local import LocalStore
from reshard.storage.location import Location, locate
from reshard.storage.store import Abilities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD = {(100, 0), (200, 0)}


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A root with two iterations, whose writer is dead; in memory, as a kill loses nothing that a disk would keep."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield filled(Path(folder) / "base")


@pytest.fixture
def in_memory() -> Location:
    """The same in a store without folders, renames and locks."""
    return filled(Location(MemoryStore(), "run"))


RootT = TypeVar("RootT", Path, Location)


def filled(root: RootT) -> RootT:
    def act() -> None:
        for iteration, version in sorted(OLD):
            save(root, iteration, version, durable=False)

    restarted(act)
    return root


def restarted(act: Callable[[], Any]) -> Any:
    """As a new process would, once the old one is dead: what was held here before is given back."""
    try:
        return act()
    finally:
        protocol.release()


def copies(base: RootT) -> Iterator[tuple[int, RootT]]:
    """Fresh copies of a root, one a crash."""
    for number in range(1000):
        if isinstance(base, Location):
            assert isinstance(base.store, MemoryStore)
            yield number, Location(base.store.copy(), base.path)
            continue
        root = base.with_name(f"root{number}")
        shutil.copytree(base, root, symlinks=True)
        yield number, root
        shutil.rmtree(root)


def with_abilities(monkeypatch: pytest.MonkeyPatch, abilities: Abilities | None) -> None:
    if abilities is not None:
        monkeypatch.setattr(LocalStore, "abilities", lambda *_: abilities)


def check_next_save(root: Root, iteration: int, version: int) -> None:
    restarted(partial(save, root, iteration, version, durable=False))
    assert found(root) == (iteration, version)
    assert found_by_the_original(root) == (iteration, version)
    assert not debris(root)


ALL = Abilities(renames_folders=True, exchanges=True)
NO_EXCHANGE = Abilities(renames_folders=True, exchanges=False)
IN_PLACE = Abilities(renames_folders=False, exchanges=False)


def n_expected(root: Root) -> int:
    """The least number of different crashes: in memory each write is one change, on a disk it is several."""
    return 16 if isinstance(root, Path) else 10


def signature(root: Root) -> frozenset[str]:
    """What lies where, without the random parts of names: crashes that leave the same need not be recovered twice."""
    root = readable(root)
    left = {
        re.sub("[0-9a-f]{16,}", "*", f"{path.relative_to(root)} {path.is_dir() or path.stat().st_size}")
        for path in root.rglob("*")
    }
    return frozenset(left | {f"tracker {tracker(root)}"})  # of one size, whatever it names


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("abilities", "following"),
    [(None, 300), (None, 350), (IN_PLACE, 300)],
    ids=["then the same again", "then a later one", "in place"],
)
def test_killed_in_a_save(
    abilities: Abilities | None, following: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_abilities(monkeypatch, abilities)
    check_killed_in_a_save(base, following)


@pytest.mark.parametrize("following", [300, 350], ids=["then the same again", "then a later one"])
def test_killed_in_a_save_into_a_store_without_renames(following: int, in_memory: Location) -> None:
    check_killed_in_a_save(in_memory, following)


def check_killed_in_a_save(base: RootT, following: int) -> None:
    outcomes, seen = [], set()
    for number, root in copies(base):
        was_killed = killed_at(number, partial(save, root, 300, 1))
        if was_killed and signature(root) in seen:
            continue
        seen.add(signature(root))
        state = found(root)
        assert state in ({(200, 0), (300, 1)} if was_killed else {(300, 1)})
        assert found_by_the_original(root) in {(200, 0), state}
        assert all_held(root) >= OLD
        outcomes.append(state)
        restarted(partial(protocol.recover, locate(root)))
        assert all_held(root) >= OLD | {state}
        assert found(root) in {state, (300, 1)}
        assert found_by_the_original(root) == found(root)
        check_next_save(root, following, 2)
        assert all_held(root) >= OLD
        if not was_killed:
            break
    assert len(outcomes) >= n_expected(base)
    assert outcomes == sorted(outcomes), "once it is published it stays so"


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("abilities", [ALL, NO_EXCHANGE, IN_PLACE], ids=["exchange", "by way of the trash", "in place"])
def test_killed_while_an_iteration_is_replaced(
    abilities: Abilities, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_abilities(monkeypatch, abilities)
    check_killed_while_an_iteration_is_replaced(base, abilities)


def test_killed_while_an_iteration_is_replaced_in_a_store_without_renames(in_memory: Location) -> None:
    check_killed_while_an_iteration_is_replaced(in_memory, IN_PLACE)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kill", [killed_at, killed_at_step], ids=["no more changes", "signal"])
@pytest.mark.parametrize("seconds", [0.0, *slow([0.03])], ids=["first", "last"])
def test_killed_while_a_thread_writes_the_descriptions(
    seconds: float, kill: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save with all its steps. The thread writes before the shards are written, or once the save waits for it."""
    monkeypatch.setattr(iterations, "_MANY_LINES", 1)
    monkeypatch.setattr(iterations, "write_metadata", by_a_thread(seconds))
    base = tmp_path / "base"
    restarted(partial(save_arrays, base, 100))
    outcomes, seen = [], set()
    for number, root in copies(base):
        was_killed = kill(number, partial(save_arrays, root, 200))
        if was_killed and signature(root) in seen:
            continue
        seen.add(signature(root))
        outcomes.append(found_arrays(root))
        assert was_killed or outcomes[-1] == 200
        restarted(partial(protocol.recover, locate(root)))
        assert found_arrays(root) in {outcomes[-1], 200}
        restarted(partial(save_arrays, root, 300))
        assert found_arrays(root) == 300
        assert not debris(root)
        if not was_killed:
            break
    assert len(outcomes) > 5
    assert outcomes == sorted(outcomes)


def by_a_thread(seconds: float) -> Callable[..., object]:
    def write(*args: Any, **options: Any) -> object:
        assert threading.current_thread().name == "reshard descriptions"
        time.sleep(seconds)
        return write_metadata(*args, **options)

    return write


def save_arrays(root: Path, iteration: int) -> None:
    arrays = {f"w{i}": np.full(i + 1, iteration) for i in range(3)}
    reshard.save(root, iteration, arrays, extra={"array": arrays["w2"]}, common={"epoch_num": 0})


def found_arrays(root: Path) -> int:
    """The iteration that a restart takes, which is whole."""
    with reshard.open(root) as checkpoint:
        arrays, extra, number = checkpoint.load(verify="full"), checkpoint.extra(), checkpoint.iteration
        assert checkpoint.manifest is not None
        assert "metadata.json" in checkpoint.manifest.files
    assert number is not None
    for array in (*arrays.values(), extra["array"]):
        assert array.tolist() == [number] * array.size
    assert len(arrays) == 3
    return number


def check_killed_while_an_iteration_is_replaced(base: RootT, abilities: Abilities) -> None:
    seen = set()
    for number, root in copies(base):
        was_killed = killed_at(number, partial(save, root, 200, 1))
        if was_killed and signature(root) in seen:
            continue
        seen.add(signature(root))
        old_or_new = {(200, 0), (200, 1)} if was_killed else {(200, 1)}
        if abilities == ALL:
            assert found_by_the_original(root) in old_or_new
        assert found(root) in (old_or_new if abilities != IN_PLACE else {(100, 0)} | old_or_new)
        restarted(partial(protocol.recover, locate(root)))
        assert (100, 0) in all_held(root)
        if abilities == IN_PLACE:
            assert found(root) in {(100, 0)} | old_or_new
        else:
            assert found(root) in old_or_new
            assert found_by_the_original(root) == found(root)
        check_next_save(root, 200 if len(seen) % 2 else 250, 2)
        if not was_killed:
            break
    assert len(seen) >= n_expected(base)


@pytest.mark.parametrize("iteration", [*slow([200]), 300], ids=["replacement", "new"])
def test_killed_by_a_signal_at_a_named_step(iteration: int, base: Path) -> None:
    for number, root in copies(base):
        was_killed = killed_at_step(number, partial(save, root, iteration, 1))
        assert found(root) in ({(200, 0), (iteration, 1)} if was_killed else {(iteration, 1)})
        assert found_by_the_original(root) in {(200, 0), (iteration, 1)}
        assert len(all_held(root)) >= len(OLD)
        check_next_save(root, 300, 2)
        if not was_killed:
            break
    assert number > 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("abilities", "iteration"),
    [(ALL, 200), (NO_EXCHANGE, 200), (ALL, 300), (IN_PLACE, 300)],
    ids=["replaced by exchange", "replaced by way of the trash", "new", "new, in place"],
)
def test_killed_in_the_recovery_of_a_killed_save(
    abilities: Abilities, iteration: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_abilities(monkeypatch, abilities)
    seen = set()
    for number, crashed in copies(base):
        was_killed = killed_at_step(number, partial(save, crashed, iteration, 1))
        if not was_killed:
            break
        if signature(crashed) in seen:
            continue
        seen.add(signature(crashed))
        root = crashed.with_name("recovered")
        shutil.copytree(crashed, root)
        restarted(partial(protocol.recover, locate(root)))
        expected, whole = found(root), all_held(root)
        shutil.rmtree(root)
        for again in range(100):
            shutil.copytree(crashed, root)
            was_killed = killed_at(again, partial(protocol.recover, locate(root)))
            restarted(partial(protocol.recover, locate(root)))
            assert (found(root), all_held(root)) == (expected, whole)
            shutil.rmtree(root)
            if not was_killed:
                break
        check_next_save(crashed, 350, 2)
    assert len(seen) > 5


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("iteration", [200, 300], ids=["replacement", "new"])
def test_killed_in_the_recovery_of_a_store_without_renames(iteration: int, in_memory: Location) -> None:
    seen = set()
    for number, crashed in copies(in_memory):
        was_killed = killed_at(number, partial(save, crashed, iteration, 1))
        if not was_killed:
            break
        if signature(crashed) in seen:
            continue
        seen.add(signature(crashed))
        for again, root in copies(crashed):
            was_killed = killed_at(again, partial(protocol.recover, locate(root)))
            restarted(partial(protocol.recover, locate(root)))
            if again == 0:
                expected, whole = found(root), all_held(root)
            assert (found(root), all_held(root)) == (expected, whole)
            if not was_killed:
                break
        check_next_save(crashed, 350, 2)
    assert len(seen) > 5


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("is_in_place", [False, True], ids=["rename", "in place"])
def test_killed_in_retention(*, is_in_place: bool, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted(partial(fill, base))
    if is_in_place:
        refuse_folder_renames(monkeypatch)
        with_abilities(monkeypatch, IN_PLACE)
    check_killed_in_retention(base)


@pytest.mark.slow(disk=False)
def test_killed_in_retention_on_a_full_disk(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trash and without the mark: what has lost its manifest does not count, and is left."""
    restarted(partial(fill, base))
    protocol.recover(locate(base))
    protocol.release(locate(base))
    assert not (base / ".trash").exists()
    real_create, real_make = LocalStore.create, LocalStore.make_folder

    def create(store: LocalStore, path: str, *args: Any, **how: Any) -> None:
        if path.endswith(".unfinished"):
            raise StorageError("the disk is full", path=path, errno=errno.ENOSPC)
        real_create(store, path, *args, **how)

    def make_folder(store: LocalStore, path: str, mode: int = 0o777) -> None:
        if path.endswith(".trash") and (Path(path).parent / "iteration_00000100").exists():
            raise StorageError("the disk is full", path=path, errno=errno.ENOSPC)
        real_make(store, path, mode)

    n_left = 0
    for number, root in copies(base):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "create", create)
            patch.setattr(LocalStore, "make_folder", make_folder)
            was_killed = killed_at(number, partial(retained.apply, locate(root), Retention(keep=2)))
        assert found(root) == found_by_the_original(root) == (500, 0)
        whole = all_held(root)
        assert whole >= {(400, 0), (500, 0)}
        for iteration, folder in folders(root).items():
            if (iteration, 0) not in whole:
                n_left += 1
                with pytest.raises((DamagedFileError, CheckpointNotFoundError)):
                    reshard.open(folder)
        assert not restarted(partial(warnings_of_retention, root))
        assert all_held(root) == {(400, 0), (500, 0)}
        check_next_save(root, 600, 0)
        if not was_killed:
            break
    assert n_left > 3
    assert number > 10


def test_killed_in_retention_in_a_store_without_renames(in_memory: Location) -> None:
    restarted(partial(fill, in_memory))
    check_killed_in_retention(in_memory)


def fill(root: Root) -> None:
    for iteration in (300, 400, 500):
        save(root, iteration, durable=False)


def check_killed_in_retention(base: RootT) -> None:
    for number, root in copies(base):
        was_killed = killed_at(number, partial(retained.apply, locate(root), Retention(keep=2)))
        assert found(root) == (500, 0)
        assert found_by_the_original(root) == (500, 0)
        whole = sorted(all_held(root))
        assert whole[-2:] == [(400, 0), (500, 0)]
        check_that_debris_is_marked(root, whole)
        restarted(partial(protocol.recover, locate(root)))
        assert not restarted(partial(warnings_of_retention, root))
        assert all_held(root) == {(400, 0), (500, 0)}
        check_next_save(root, 600, 0)
        if not was_killed:
            break
    assert number > 10


def check_that_debris_is_marked(root: Root, whole: list[tuple[int, int]]) -> None:
    """What is not whole is not left looking as if it were of the original."""
    for iteration, folder in folders(root).items():
        assert (iteration, 0) in whole or (folder / ".unfinished").exists() or not [*folder.iterdir()]


def warnings_of_retention(root: Root) -> list[str]:
    return list(retained.apply(locate(root), Retention(keep=2)).warnings)


def refuse_folder_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., None] = _core.rename

    def rename(source: str, target: str, *, exchange: bool) -> None:
        if Path(source).is_dir():
            raise OSError(22, "Invalid argument")
        real(source, target, exchange=exchange)

    monkeypatch.setattr(_core, "rename", rename)


def n_faults(base: Any, killed: Callable[[int, Callable[[], Any]], bool]) -> int:
    """After how many of the crashes in a save the reader without a manifest finds something that is not complete."""
    n_caught = 0
    for number, root in copies(base):
        was_killed = killed(number, partial(save, root, 300, 1))
        try:
            found_by_the_original(root)
        except AssertionError:
            n_caught += 1
        if not was_killed:
            break
    return n_caught


@pytest.mark.slow
def test_the_harness_notices_what_it_is_for(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker before the folder, the mistake of the original: some crash must be found to be one too many."""
    real = staging.move_tracker

    def put_in_place(attempt: Any, claim: Any) -> Any:
        real(attempt.root, attempt.iteration, durable=False)
        return placed(attempt, claim)

    placed = folder_protocol._put_in_place
    monkeypatch.setattr(folder_protocol, "_put_in_place", put_in_place)
    assert n_faults(base, killed_at_step)


def test_the_harness_notices_what_it_is_for_in_a_store_without_renames(
    in_memory: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark of an unfinished folder goes, and the tracker moves, before there is a manifest."""
    real = protocol.seal

    def seal(attempt: Any, *args: Any, **more: Any) -> Any:
        staging.move_tracker(attempt.root, attempt.iteration, durable=False)
        return real(attempt, *args, **more)

    monkeypatch.setattr(protocol, "seal", seal)
    assert n_faults(in_memory, killed_at)
