"""A process ends before every change that it makes to an object store, as `test_crash_points` has it for disks."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers import retained
from tests.helpers.object_stores import MemoryObjects
from tests.helpers.small_saves import State, held, killed_at, readable, save

from reshard.commit import claims, leases, log, protocol, roots
from reshard.commit.session import sessions
from reshard.options import Retention
from reshard.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD = {(100, 0), (200, 0)}


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    for one in sessions():
        claims._drop(one)


@pytest.fixture
def base() -> Location:
    """A root with two iterations, whose writer has ended."""
    root = Location(MemoryObjects(), "run")
    for iteration, version in sorted(OLD):
        restarted(partial(save, root, iteration, version))
    return root


def restarted(act: Callable[[], Any]) -> Any:
    try:
        return act()
    finally:
        protocol.release()


def copies(base: Location) -> Iterator[tuple[int, Location]]:
    assert isinstance(base.store, MemoryObjects)
    for number in range(200):
        yield number, Location(base.store.copy(), base.path)


def newest_record(root: Location) -> dict[str, Any]:
    """The newest record, read as the documentation says."""
    first = min((readable(root) / "log").iterdir())
    return json.loads(first.read_bytes())  # type: ignore[no-any-return]


def published(root: Location) -> set[State]:
    """Everything that is published, each of it whole."""
    return {state(root, one[1]) for one in newest_record(root)["live"]}


def state(root: Location, name: str) -> State:
    found = held(root / name)
    assert found is not None, "what is published is whole"
    return found


def found(root: Location) -> State:
    """What a restart takes."""
    record = newest_record(root)
    [name] = [one[1] for one in record["live"] if one[0] == record["tracker"]]
    return state(root, name)


def debris(root: Location) -> list[str]:
    """What no record names."""
    live = {one[1] for one in newest_record(root)["live"]}
    known = {"log", "clock", "writers", "readers", *live, *(f".{name}.verified.json" for name in live)}
    return sorted({one.name for one in readable(root).iterdir()} - known)


def check_next_save(root: Location, iteration: int, version: int) -> None:
    restarted(partial(save, root, iteration, version))
    assert found(root) == (iteration, version)
    assert not debris(root)


@pytest.mark.parametrize(("iteration", "following"), [(300, 300), (300, 350), (200, 250), (200, 200)])
def test_killed_in_a_save(iteration: int, following: int, base: Location) -> None:
    outcomes = []
    for number, root in copies(base):
        was_killed = killed_at(number, partial(save, root, iteration, 1))
        now = found(root)
        assert now in ({(200, 0), (iteration, 1)} if was_killed else {(iteration, 1)})
        assert published(root) == (OLD if now == (200, 0) else {one for one in OLD if one[0] != iteration} | {now})
        outcomes.append(now)
        restarted(partial(protocol.recover, root))
        assert found(root) == now
        check_next_save(root, following, 2)
        assert (100, 0) in published(root)
        if not was_killed:
            break
    assert len(outcomes) >= 10
    assert outcomes == sorted(outcomes), "once it is published it stays so"


@pytest.mark.slow(disk=False)
def test_killed_in_the_first_save() -> None:
    empty = Location(MemoryObjects(), "run")
    for number, root in copies(empty):
        was_killed = killed_at(number, partial(save, root, 100, 1))
        restarted(partial(save, root, 100, 2))
        check_next_save(root, 200, 2)  # the first record may have followed a probe that was killed
        if not was_killed:
            break
    assert number >= 8


def test_killed_in_retention(base: Location) -> None:
    for iteration in (300, 400, 500):
        restarted(partial(save, base, iteration))
    for number, root in copies(base):
        was_killed = killed_at(number, partial(retained.apply, root, Retention(keep=2)))
        assert found(root) == (500, 0)
        assert published(root) in ({(400, 0), (500, 0)}, OLD | {(300, 0), (400, 0), (500, 0)})
        assert not restarted(partial(retained.apply, root, Retention(keep=2))).warnings
        assert published(root) == {(400, 0), (500, 0)}
        check_next_save(root, 600, 0)  # which leaves no debris
        if not was_killed:
            break
    assert number > 5


def test_killed_in_a_rollback(base: Location) -> None:
    for number, root in copies(base):
        was_killed = killed_at(number, partial(protocol.go_back, root, lambda: 100))
        assert found(root) in (OLD if was_killed else {(100, 0)})
        assert published(root) == OLD
        restarted(partial(protocol.go_back, root, lambda: 100))
        assert found(root) == (100, 0)
        if not was_killed:
            break
    assert number > 1


@pytest.mark.parametrize("act", ["pin", "unpin"])
def test_killed_while_it_pins(act: str, base: Location) -> None:
    if act == "unpin":
        protocol.pin(base, 100)
    for number, root in copies(base):
        was_killed = killed_at(number, partial(getattr(protocol, act), root, 100))
        assert published(root) == OLD
        getattr(protocol, act)(root, 100)
        assert roots.is_pinned(root / dict(roots.list_iterations(root))[100]) == (act == "pin")
        if not was_killed:
            break
    assert number == 1
    head = log.head_of(root)
    assert head is not None
    assert head.kind == act
