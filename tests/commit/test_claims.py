"""Who may write into a root: claims, locks, and what the file system can do."""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.commit.roots import names, root
from tests.helpers.small_saves import (
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
    write_files,
)

from reshard import _core
from reshard.commit import claims, owners, protocol, staging
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    ReshardError,
    StorageError,
)
from reshard.storage import host
from reshard.storage.local import LOCAL, LocalStore
from reshard.storage.location import Location, locate
from reshard.storage.store import Abilities

__all__ = ["root"]

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


def foreign_claim(root: Path, generation: int = 7, **changes: Any) -> Path:
    """The claim of a process on another machine."""
    path = root / ".writers" / f"epoch_{generation}"
    path.parent.mkdir(parents=True, exist_ok=True)
    me = owners.me() | {"boot_id": "another", "host": "elsewhere\x1b[2J"}
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
    owner = owners.me() | {"pid": parent, "started": host.process_start(parent)} | changes
    assert owners.is_dead(owner, True) is is_dead


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
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.01)
    save(root, 100)
    claim = claims.held(locate(root))
    assert claim is not None
    file, deadline = root / ".writers" / "epoch_1", time.monotonic() + 60
    os.utime(file, (5, 5))
    while file.stat().st_mtime == 5:
        assert time.monotonic() < deadline, "nobody touches it"
        time.sleep(0.01)
    assert claim.beat.is_alive()
    protocol.release(locate(root))
    assert not claim.beat.is_alive()


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
    gc.collect()  # files of objects of other tests are not closed in between
    before = n_handles()
    save(root, 200)
    save(root, 300)
    with pytest.raises(ArgumentError):
        save(root, 100)
    protocol.release()
    assert n_handles() == before
