"""Object stores in memory: one in which objects can be created, and one in which processes and faults are scheduled."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.helpers.memory_store import MemoryStore

from reshard._core import PutNew
from reshard.errors import StorageError
from reshard.storage.objects import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.storage.store import Stat

Outcome = tuple[PutNew, Exception | None]


class MemoryObjects(MemoryStore, ObjectStore):
    """The store of `MemoryStore`, in which a root is a log."""

    def copy(self) -> MemoryObjects:
        with self.lock_of_objects:
            return MemoryObjects(dict(self.objects))

    def url(self, path: str) -> str:
        return f"memory://{path}"

    def put_new(self, path: str, data: bytes) -> Outcome:
        try:
            self.put(path, data, "create", if_absent=True)
        except FileExistsError:
            return PutNew.EXISTS, None
        return PutNew.CREATED, None

    def below(self, path: str, *, after: str = "", max_keys: int | None = None) -> list[tuple[str, Stat]]:
        with self.lock_of_objects:
            names = sorted(one.removeprefix(f"{path}/") for one in self.objects if one.startswith(f"{path}/"))
            return [(name, MemoryStore.stat(self, f"{path}/{name}")) for name in names if name > after][:max_keys]

    def remove_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.remove_file(path)


class KilledError(BaseException):
    """The process of an actor ends."""


class Schedule:
    """Processes of which one makes its next request at a time, in a random order.

    Args:
        seed: of the order and the faults.
        faults: how often an answer is lost, of 1.
        kills: how often a process is killed before a request.
    """

    def __init__(self, seed: int, *, faults: float = 0.05, kills: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.kills = kills
        self.late: list[Callable[[], object]] = []  # requests that arrive after their sender has given up
        self._turn = threading.Condition()
        self._waiting: dict[int, bool] = {}  # by thread: whether it may go on
        self._running: set[int] = set()
        self.failures: list[BaseException] = []

    def run(self, actors: Sequence[Callable[[], None]], check: Callable[[], None]) -> int:
        """Run actors to their end, and call `check` after each request. Returns the number of requests."""
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in actors]
        order: list[int] = []  # not that in which they come to wait, which no seed repeats
        with self._turn:
            for thread in threads:
                thread.start()
                assert thread.ident is not None
                self._running.add(thread.ident)
                order.append(thread.ident)
            n_steps = 0
            while self._running:
                if not self._turn.wait_for(lambda: self._running <= self._waiting.keys(), timeout=20):
                    self.failures.append(AssertionError("an actor hangs"))
                if not self._running or self.failures:
                    break
                if self.late and self.random.random() < 0.1:
                    self.late.pop(self.random.randrange(len(self.late)))()
                chosen = self.random.choice([one for one in order if one in self._waiting])
                self._waiting[chosen] = True
                self._turn.notify_all()
                self._turn.wait_for(partial(self._has_gone_on, chosen))
                n_steps += 1
                if n_steps > 20_000:
                    self.failures.append(AssertionError("it does not end"))
                else:
                    try:
                        self._turn.wait_for(lambda: self._running <= self._waiting.keys(), timeout=60)
                        check()
                    except BaseException as error:  # noqa: BLE001
                        self.failures.append(error)
            self._turn.notify_all()
        for thread in threads:
            thread.join(20)
        if self.failures:
            raise self.failures[0]
        return n_steps

    def _has_gone_on(self, actor: int) -> bool:
        return not self._waiting.get(actor)

    def _act(self, actor: Callable[[], None]) -> None:
        me = threading.get_ident()
        with self._turn:
            pass  # all are registered
        try:
            actor()
        except BaseException as error:  # noqa: BLE001
            self.failures.append(error)
        finally:
            with self._turn:
                self._running.discard(me)
                self._waiting.pop(me, None)
                self._turn.notify_all()

    def step(self, *, may_fail: bool = True) -> str:
        """Wait for the turn of this process. Returns what becomes of its request: "done", or how it fails."""
        me = threading.get_ident()
        with self._turn:
            if me not in self._running:
                return "done"
            self._waiting[me] = False
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._waiting[me] or self.failures)
            if self.failures:
                raise KilledError
            del self._waiting[me]
            self._turn.notify_all()
            if self.random.random() < self.kills:
                raise KilledError
            if may_fail and self.random.random() < self.faults:
                return self.random.choice(["lost answer", "lost request", "late"])
        return "done"


class ScheduledObjects(MemoryObjects):
    """The connection of one process to a store that others use, too."""

    def __init__(self, schedule: Schedule, shared: MemoryObjects) -> None:
        super().__init__(shared.objects)
        self.lock_of_objects = shared.lock_of_objects
        self._schedule = schedule
        self._shared = shared

    def _lost(self, path: str) -> StorageError:
        return StorageError(f"`{path}`: the connection broke", path=path, errno=errno.ECONNRESET)

    @contextlib.contextmanager
    def _request(self, path: str, act: Callable[[], object]) -> Iterator[None]:
        """A change, which may be made though its answer is lost, or later."""
        outcome = self._schedule.step()
        if outcome == "late":
            self._schedule.late.append(act)
        elif outcome == "lost answer":
            act()
        if outcome != "done":
            raise self._lost(path)
        yield

    def put_new(self, path: str, data: bytes) -> Outcome:
        def act() -> Any:
            return self._shared.put_new(path, data)

        try:
            with self._request(path, act):
                return self._shared.put_new(path, data)
        except StorageError as error:
            return PutNew.UNKNOWN, error

    def put(
        self, path: str, data: bytes, what: str = "put", *, if_absent: bool = False, etag: int | None = None
    ) -> int:
        with self._request(path, lambda: self._shared.put(path, data)):
            return self._shared.put(path, data, what, if_absent=if_absent, etag=etag)

    def remove_file(self, path: str) -> None:
        with self._request(path, lambda: self._shared.remove_file(path)):
            self._shared.remove_file(path)

    def _read(self, path: str) -> None:
        if self._schedule.step() != "done":
            raise self._lost(path)

    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        self._read(path)
        return self._shared.stat(path)

    def read_small(self, path: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
        self._read(path)
        return self._shared.read_small(path, max_bytes)

    def below(self, path: str, *, after: str = "", max_keys: int | None = None) -> list[tuple[str, Stat]]:
        self._read(path)
        return self._shared.below(path, after=after, max_keys=max_keys)

    def entries(self, path: str) -> Any:
        self._read(path)
        return self._shared.entries(path)

    def touched_ns(self, path: str) -> int | None:
        self._read(path)
        return self._shared.touched_ns(path)

    def sizes(self, path: str) -> Any:
        self._read(path)
        return self._shared.sizes(path)
