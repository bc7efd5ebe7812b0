"""The log of a root in an object store: its records, and processes that race for it in a store that loses answers."""

from __future__ import annotations

import contextlib
import itertools
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.object_stores import KilledError, MemoryObjects, Schedule, ScheduledObjects
from tests.helpers.small_saves import N_RANKS, common_content, save, shard_content, shard_name, write_files

from reshard._core import PutNew
from reshard.commit import claims, leases, log, log_claims, log_records, protocol, roots
from reshard.commit.log_records import Gone, Live, Record, SupersededError, decode, encode, record_name
from reshard.commit.session import sessions
from reshard.errors import CheckpointNotFoundError, ClaimedError, DamagedFileError, ReshardError, UnsupportedError
from reshard.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEEP = 2


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    for one in sessions():
        claims._drop(one)


T = TypeVar("T")


def some(value: T | None) -> T:
    assert value is not None
    return value


# -- records


def name_of(iteration: int, generation: int = 1, attempt: int = 0) -> str:
    return log_records.attempt_name(f"iteration_{iteration:08d}", generation, f"{attempt:032x}")


def live(iteration: int, generation: int = 1, **more: Any) -> Live:
    return Live(iteration, name_of(iteration, generation), f"{iteration:032x}", **more)


small = st.integers(0, 10**6)
records = st.builds(
    Record,
    n=st.integers(1, 10**9),
    kind=st.sampled_from(["claim", "commit", "retire", "pin"]),
    id=st.just("0" * 32),
    at=st.text(),
    generation=small,
    owner=st.dictionaries(st.text(), st.none() | small | st.text()),
    tracker=st.none() | small,
    live=st.lists(
        st.builds(
            live,
            small,
            small,
            previous_tracker=st.none() | small,
            passed_over=st.tuples(small),
            is_pinned=st.booleans(),
        )
    ).map(tuple),
    retired=st.lists(st.builds(Gone, st.just(name_of(3)), small)).map(tuple),
)


@given(records, st.data())
def test_a_record_is_read_as_it_was_written_and_not_if_a_byte_is_wrong(record: Record, data: st.DataObject) -> None:
    written = encode(record)
    assert decode(written, "x", record.n) == record
    at = data.draw(st.integers(0, len(written) - 1))
    wrong = bytearray(written)
    wrong[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedFileError, match="not a record of the log"):
        decode(bytes(wrong), "x", record.n)
    with pytest.raises(DamagedFileError, match="its name says"):
        decode(written, "x", record.n + 1)


@given(st.sets(st.integers(1, 10**12 - 1), min_size=1))
def test_the_newest_record_is_the_first_by_name(numbers: set[int]) -> None:
    assert min(map(record_name, numbers)) == record_name(max(numbers))
    assert {log_records.number_of(record_name(n)) for n in numbers} == numbers


def test_what_may_follow_a_record() -> None:
    head = log_records.claimed(Record(1, "claim", "", ""), {"pid": 7})

    def following(kind: Any = "commit") -> Record:
        return log_records.following(head, kind, "", "")

    def commit(one: Live, generation: int = 1, begun_at: int | None = None) -> Record | None:
        return log_records.committed(following(), one, generation, begun_at=begun_at)

    head = some(commit(live(10)))
    assert (head.n, head.tracker, head.live) == (2, 10, (live(10),))
    assert commit(live(10)) is None, "it is there"
    head = some(commit(live(20)))
    assert head.live[1].previous_tracker == 10
    with pytest.raises(SupersededError):
        commit(live(30), generation=2)
    assert (commit(live(5), begun_at=10) or head).tracker == 20, "another save moved it meanwhile"
    assert (commit(live(5), begun_at=20) or head).tracker == 5, "the run went back on purpose"
    head = some(log_records.pinned(following(), 10, is_pinned=True))
    assert log_records.pinned(following(), 10, is_pinned=True) is None
    with pytest.raises(KeyError):
        log_records.pinned(following(), 11, is_pinned=True)
    same = live(10)._replace(name=name_of(10, 1, 1))
    replaced = some(commit(same, begun_at=None))
    assert next((one.name, one.is_pinned) for one in replaced.live) == (same.name, True)
    assert replaced.retired == (Gone(name_of(10), head.n + 1),)
    assert log_records.retired(following(), {name_of(10), name_of(20)}).live == head.live, "pinned, and of the tracker"
    head = some(log_records.pinned(following(), 10, is_pinned=False))
    head = log_records.retired(following(), {name_of(10), name_of(20)})
    assert ([one.iteration for one in head.live], head.retired) == ([20], (Gone(name_of(10), head.n),))
    head = some(log_records.removed(following(), {name_of(10)}))
    assert not head.retired
    assert log_records.removed(following(), {name_of(10)}) is None
    with pytest.raises(SupersededError):
        log_records.gone_back(following(), 20, 2)


# -- requests


def test_a_lost_answer_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Location(MemoryObjects(), "run")
    real = MemoryObjects.put_new
    save(root, 1)

    def lossy(self: MemoryObjects, path: str, data: bytes) -> Any:
        real(self, path, data)
        return PutNew.UNKNOWN, OSError("no answer")

    monkeypatch.setattr(MemoryObjects, "put_new", lossy)
    save(root, 2)
    assert [one.iteration for one in some(log.head_of(root)).live] == [1, 2]
    kinds = [some(log.read(root, n)).kind for n in range(1, 4)]
    assert kinds == ["claim", "commit", "commit"]


def test_a_request_that_is_lost_is_sent_again_and_then_the_outcome_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Location(MemoryObjects(), "run")
    save(root, 1)
    real = MemoryObjects.put_new
    n_lost = 3

    def lossy(self: MemoryObjects, path: str, data: bytes) -> Any:
        nonlocal n_lost
        n_lost -= 1
        return (PutNew.UNKNOWN, OSError("no answer")) if n_lost >= 0 else real(self, path, data)

    monkeypatch.setattr(MemoryObjects, "put_new", lossy)
    save(root, 2)
    n_lost = 10**9
    monkeypatch.setattr(log, "_RETRY_SECONDS", 0.01)
    with pytest.raises(ReshardError, match=r"not known whether iteration 3 was published(?s:.*)no answer"):
        save(root, 3)
    assert [one.iteration for one in some(log.head_of(root)).live] == [1, 2]
    left = [name for name, _ in root.store.below("run") if name.startswith("iteration_00000003")]  # type: ignore[attr-defined]
    assert any(name.endswith("manifest.json") for name in left), "it may still be published"
    n_lost = 0
    claims.release(root)
    save(root, 4)
    assert not [name for name, _ in root.store.below("run") if name.startswith("iteration_00000003")]  # type: ignore[attr-defined]


def test_a_store_in_which_several_writers_win_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_new(self: MemoryObjects, path: str, data: bytes) -> Any:
        self.put(path, data)
        return PutNew.CREATED, None

    monkeypatch.setattr(MemoryObjects, "put_new", put_new)
    root = Location(MemoryObjects(), "run")
    with pytest.raises(UnsupportedError, match=r"of 8 writers that created one new object at once, 8 were told"):
        save(root, 1)
    assert not root.store.objects  # type: ignore[attr-defined]


def test_an_interrupt_leaves_no_object_of_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, real = itertools.count(), MemoryObjects.put_new

    def put_new(self: MemoryObjects, path: str, data: bytes) -> Any:
        if next(numbers) == 3:
            raise KeyboardInterrupt
        return real(self, path, data)

    monkeypatch.setattr(MemoryObjects, "put_new", put_new)
    root = Location(MemoryObjects(), "run")
    with pytest.raises(KeyboardInterrupt):
        save(root, 1)
    assert next(numbers) == 8, "eight writers, at once"
    assert not root.store.objects  # type: ignore[attr-defined]


def test_objects_of_a_probe_are_removed_by_later_claims_only() -> None:
    """Another process may be probing the same new root while the first claim is made."""
    store = MemoryObjects()
    root = Location(store, "run")
    store.put("run/.probe/of_another", b"")
    save(root, 1)
    assert [name for name, _ in store.below("run/.probe")] == ["of_another"]
    claims.release(root)
    save(Location(other_connection(store), "run"), 2)
    assert not [name for name, _ in store.below("run/.probe")]


def test_the_newest_is_found_by_two_requests_whatever_the_number_of_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Location(MemoryObjects(), "run")
    save(root, 1)
    monkeypatch.setattr(log, "_WHOLE_RECORDS", 3)
    for iteration in range(2, 12):
        save(root, iteration)
    assert log.read(root, 1) is None, "an old record is a stub"
    assert some(log.head_of(root)).n == 12
    seen: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            seen.append(name)
            return real(*args, **more)

        return call

    for name in ("below", "read_small", "stat", "entries"):
        monkeypatch.setattr(MemoryObjects, name, watched(name, getattr(MemoryObjects, name)))
    assert some(log.head_of(root)).tracker == 11
    assert seen == ["below", "read_small"]


def test_a_claim_that_was_replaced_meanwhile_removes_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryObjects()
    root, other = Location(store, "run"), Location(other_connection(store), "run")
    save(root, 1)
    claims.release(root)
    real = MemoryObjects.entries

    def entries(self: MemoryObjects, path: str) -> Any:
        if self is store:  # the process was paused before it looked for what is left
            monkeypatch.setattr(MemoryObjects, "entries", real)
            save(other, 2)
        return real(self, path)

    monkeypatch.setattr(MemoryObjects, "entries", entries)
    with pytest.raises(ClaimedError):
        save(root, 3)
    [one] = [one for one in some(log.head_of(root)).live if one.iteration == 2]
    assert (root / one.name / "manifest.json").exists()


def test_a_claim_is_looked_at_again_after_the_process_that_watches_it_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Location(MemoryObjects(), "run")
    save(root, 1)
    claims.release(root)
    elsewhere = {"host": "elsewhere", "boot_id": "x", "pid_namespace": "y", "pid": 1, "started": 1}
    made = log_records.claimed(log.next_record(log.head_of(root), "claim"), elsewhere)
    assert log.create(root, made)
    now, n_looks, look = 0.0, 0, log_claims._beat

    def beat(*args: Any) -> Any:
        nonlocal now, n_looks
        found, n_looks = look(*args), n_looks + 1
        if n_looks == 2:  # it is suspended here, while the other process goes on
            now += 2 * log_claims._WATCH_SECONDS
            (root / log_claims.WRITERS_FOLDER / str(made.n)).replace('{"host":"elsewhere","pid":1}')
        return found

    monkeypatch.setattr(log_claims, "_beat", beat)
    monkeypatch.setattr(log_claims, "time", SimpleNamespace(monotonic=lambda: now, sleep=lambda _: None))
    with pytest.raises(ClaimedError, match="process `1` on host `elsewhere`, which is alive"):
        save(root, 2)


def test_a_writer_that_was_replaced_publishes_nothing() -> None:
    store = MemoryObjects()
    first, second = Location(store, "run"), Location(other_connection(store), "run")
    save(first, 1)
    attempt = protocol.begin(first, 2)
    save(second, 3)
    with pytest.raises(ClaimedError, match="was taken over by process"):
        finish(attempt, 2)
    assert [one.iteration for one in some(log.head_of(first)).live] == [1, 3]


def other_connection(store: MemoryObjects) -> MemoryObjects:
    other = MemoryObjects(store.objects)
    other.lock_of_objects = store.lock_of_objects
    return other


def finish(attempt: Any, iteration: int) -> None:
    told = write_files(attempt.staging, iteration, 0)
    protocol.publish(attempt, protocol.seal(attempt, told, world_size=N_RANKS))


def test_what_is_read_stays_until_it_is_closed() -> None:
    store = MemoryObjects()
    root = Location(store, "run")
    for iteration in (1, 2):
        save(root, iteration)
    [name] = [one.name for one in some(log.head_of(root)).live if one.iteration == 1]
    reader = Location(other_connection(store), "run") / name
    lease = leases.take(reader)
    assert lease is not None
    other = lease.duplicate()
    lease.close()
    removed = protocol.retire(root, lambda: [(1, name)])
    assert removed is not None
    assert list(removed.sizes) == [1]
    assert (reader / "manifest.json").exists(), "its files are still read"
    assert roots.list_iterations(root)[0][0] == 2
    with pytest.raises(CheckpointNotFoundError, match="no longer published"):
        leases.take(reader)
    other.close()
    save(root, 3)
    assert not (reader / "manifest.json").exists()
    assert not [name for name, _ in store.below("run/readers")]


def test_leases_are_written_again_while_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_REFRESH_SECONDS", 0.01)
    store = MemoryObjects()
    root = Location(store, "run")
    save(root, 1)
    [one] = some(log.head_of(root)).live
    held = [some(leases.take(root / one.name)) for _ in range(2)]
    written = [name for name, _ in store.below("run/readers")]
    assert len(written) == 2
    store.remove_files([f"run/readers/{name}" for name in written])
    leases._wake.set()  # the thread may be that of a lease that was not closed before, and wait for a minute
    deadline = time.monotonic() + 60
    while {name for name, _ in store.below("run/readers")} != set(written):
        assert time.monotonic() < deadline, "nobody has written the leases again"
        time.sleep(0.01)
    for lease in held:
        lease.close()


def test_what_goes_is_chosen_again_if_the_root_changes_meanwhile() -> None:
    store = MemoryObjects()
    root, other = Location(store, "run"), Location(other_connection(store), "run")
    for iteration in (1, 2, 3):
        save(root, iteration)
    n_looks = 0

    def choose() -> list[tuple[int, str]]:
        nonlocal n_looks
        n_looks += 1
        found = roots.list_iterations(root)
        if n_looks == 1:
            protocol.retire(other, lambda: [found[1]])
        return found[:1] if len(found) > 2 else []

    assert some(protocol.retire(root, choose)).sizes == {}
    assert n_looks == 2
    assert [n for n, _ in roots.list_iterations(root)] == [1, 3]


def test_pins_rollback_and_marks() -> None:
    root = Location(MemoryObjects(), "run")
    for iteration in (1, 2, 3):
        save(root, iteration)
    protocol.pin(root, 1)
    names = dict(roots.list_iterations(root))
    assert [roots.is_pinned(root / names[n]) for n in (1, 2)] == [True, False]
    protocol.retire(root, lambda: [(1, names[1]), (2, names[2]), (3, names[3])])
    assert [n for n, _ in roots.list_iterations(root)] == [1, 3]
    protocol.go_back(root, lambda: 1)
    assert roots.read_tracker(root) == (1, None)
    protocol.unpin(root, 1)
    with pytest.raises(CheckpointNotFoundError, match="there is no iteration 2"):
        protocol.pin(root, 2)
    with pytest.raises(CheckpointNotFoundError, match="there is no log"):
        protocol.pin(Location(MemoryObjects(), "run"), 2)


# -- processes


class World:
    """Processes that use one root at the same time, and what is true of it after every request."""

    def __init__(self, seed: int, *, n_writers: int, faults: float, kills: float) -> None:
        self.n_writers = n_writers
        self.store = MemoryObjects()
        self.root = Location(self.store, "run")
        self.schedule = Schedule(seed, faults=faults, kills=kills)
        save(self.root, 1)
        claims.release(self.root)
        self.iterations = itertools.count(2)
        self.records: dict[int, bytes] = {}
        self.newest = 0
        self.ever: set[int] = set()
        self.acknowledged: set[str] = set()
        self.refused: set[str] = set()
        self.n_read = 0

    def process(self) -> Location:
        return Location(ScheduledObjects(self.schedule, self.store), "run")

    def writer(self) -> None:
        root = self.process()
        for _ in range(4):
            iteration = next(self.iterations)
            if self.schedule.random.random() < 0.2:
                iteration -= 1  # perhaps once more
            try:
                self.save(root, iteration)
            except KilledError:
                root = self.process()  # started again

    def save(self, root: Location, iteration: int) -> None:
        attempt = None
        try:
            attempt = protocol.begin(root, iteration)
            finish(attempt, iteration)
        except ClaimedError:
            if attempt is not None:
                self.refused.add(attempt.folder.name)
                protocol.abandon(attempt)
            claims.release(root)
            for _ in range(self.schedule.random.randrange(300)):
                self.schedule.step(may_fail=False)  # it comes back later
        except ReshardError:
            if attempt is not None:
                protocol.abandon(attempt)
        else:
            self.acknowledged.add(attempt.folder.name)

    def retention(self) -> None:
        for _ in range(4):
            root = self.process()
            with contextlib.suppress(ReshardError, KilledError):
                protocol.retire(root, partial(self.choose, root))

    def choose(self, root: Location) -> list[tuple[int, str]]:
        """All but the newest one and another: which one differs each time that it is asked."""
        found = roots.list_iterations(root)
        kept = found[-1:] + self.schedule.random.sample(found[:-1], min(KEEP - 1, len(found) - 1))
        return [one for one in found if one not in kept]

    def reader(self) -> None:
        for _ in range(4):
            root = self.process()
            with contextlib.suppress(KilledError):
                lease = None
                try:
                    head = log.head_of(root)
                    assert head is not None
                    one = self.schedule.random.choice(head.live)
                    lease = leases.take(root / one.name)
                except ReshardError:
                    continue
                # Without a lease it is the grace that protects the files, and here there is none.
                if lease is not None and lease.errno is None:
                    self.read(root / one.name, one.iteration)
                    lease.close()

    def read(self, folder: Location, iteration: int) -> None:
        contents = {shard_name(rank): shard_content(iteration, 0, rank)[0] for rank in range(N_RANKS)}
        contents["common.json"] = common_content(iteration, 0)
        for name, content in contents.items():
            while True:
                try:
                    assert (folder / name).read_small(1 << 20) == content
                except CheckpointNotFoundError as error:
                    raise AssertionError("what was read has been removed") from error
                except ReshardError:
                    continue  # an answer was lost
                break
        self.n_read += 1

    def check(self) -> None:
        """What holds after every request, seen from outside."""
        found = {
            n: one.data
            for path, one in self.store.objects.items()
            if path.startswith("run/log/") and (n := log_records.number_of(path.rpartition("/")[2])) is not None
        }
        assert sorted(found) == list(range(1, len(found) + 1)), "no number is left out"
        assert all(found[n] == data for n, data in self.records.items()), "no record ever changes"
        before = len(self.records)
        self.records = found
        head = decode(found[len(found)], "head", len(found))
        assert head is not None
        for n in range(max(before, 1), len(found) + 1):
            record = decode(found[n], "record", n)
            assert record is not None
            assert (record.tracker or 0) >= self.newest, "the newest never goes back"
            self.newest = record.tracker or 0
            self.ever |= {other.iteration for other in record.live}
            assert len(record.live) >= min(KEEP, len(self.ever)), "so many are always complete"
            assert len({other.iteration for other in record.live}) == len(record.live)
        for one in head.live:
            expected = {shard_name(rank): shard_content(one.iteration, 0, rank)[0] for rank in range(N_RANKS)}
            for name, content in expected.items():
                assert self.store.get(f"run/{one.name}/{name}").data == content, "what is published is there"
            assert one.digest.encode() in self.store.get(f"run/{one.name}/manifest.json").data

    def committed(self) -> list[str]:
        names: list[str] = []
        known: set[str] = set()
        for n in sorted(self.records):
            record = decode(self.records[n], "record", n)
            assert record is not None
            new = [one.name for one in record.live if one.name not in known]
            assert len(new) <= (record.kind == "commit")
            known |= set(new)
            names += new
        return names

    def run(self) -> None:
        n = self.n_writers
        self.schedule.run([self.writer] * n + [self.retention] * 2 + [self.reader] * 2, self.check)
        for late in self.schedule.late:
            late()
            self.check()
        names = self.committed()
        assert len(names) == len(set(names)), "nothing is published twice"
        assert self.acknowledged <= set(names), "what was acknowledged is published"
        assert not self.refused & set(names), "what was refused is not"


def run_worlds(seeds: range, monkeypatch: pytest.MonkeyPatch) -> list[World]:
    worlds = []
    for seed in seeds:
        monkeypatch.setattr(log, "_RETRY_SECONDS", (2.0, 0.0)[seed // 2 % 2])
        world = World(seed, n_writers=1 + seed % 2, faults=(0, 0.05, 0.2)[seed % 3], kills=(0, 0.01)[seed % 5 // 3])
        world.run()
        for one in sessions():
            claims._drop(one)
        worlds.append(world)
    return worlds


@pytest.mark.slow(disk=False)
def test_two_writers_retention_and_readers_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = run_worlds(range(40), monkeypatch)
    assert any(world.acknowledged for world in worlds)
    assert any(world.refused for world in worlds)
    assert any(world.n_read for world in worlds)


@pytest.mark.slow
def test_many_orders_of_two_writers_retention_and_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    run_worlds(range(1000, 1180), monkeypatch)  # each number of writers with each rate of faults and kills, three times
