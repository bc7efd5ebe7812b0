"""The ranks of a torch.distributed job, over its rendezvous store: the default group.

The store is a key-value server that every such job has. The sender sets a key, and the receiver polls for it. A
collective operation is a session, see `ranks.group`. Rank 0 opens it under a new unique name, and the other ranks find
that name under the label. So a session never reads messages of a failed one, and a rank that missed a session takes
part in the next. If a session fails on one rank, it fails on all ranks that wait in it.

This module does not import torch: it uses the module that the caller has imported.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from reshard.errors import ArgumentError, GroupError, ReshardError, UnsupportedError
from reshard.values.words import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

_log = logging.getLogger("reshard")

_PART_CHARACTERS = 1 << 20  # the store's server closes the connection of a client that sends 8 MiB at once
_MAX_PARTS = 4096
_BATCH = 64  # keys asked for in one request
_FIRST_SLEEP_S = 0.0005
_LAST_SLEEP_S = 0.01  # longest interval between requests, by which an exchange of a save can be delayed
_RANKS_PER_SLEEP = 128  # with more ranks the interval is longer, since one server answers all of them
_GRACE_S = 1.0  # ranks that wait for a root wait this much longer, so that the root can report the missing ranks
_LINGER_S = 1.0  # for which the root of a broadcast waits until it is fetched
_LOOK_S = 0.1  # between looks after the deadline. Only looks are counted: a process that was stopped has made none
_SILENT_LOOKS = 15  # at one request without an answer
_LATE_LOOKS = 60  # if the store answers and only this process is slow
_POST_S = 1.5  # to tell the others of a failure
_MAX_MESSAGE = 2000
_FIRST_NOTICE_S = 30.0  # after which a line says whom a rank waits for
_NOTICE_EVERY_S = 60.0


class TorchGroup:
    """The ranks of a process group of torch.distributed, over its rendezvous store.

    It uses a separate connection to the store: a thread that waits in the connection of torch would block other users
    of it. Each operation here is a session of one operation.

    Args:
        process_group: None: the default group.

    Raises:
        ArgumentError: torch.distributed is not initialised, or this process is not a member.
        UnsupportedError: the process group has no store (backend `mpi`).
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        distributed = torch_distributed()
        if distributed is None or not distributed.is_initialized():
            raise ArgumentError("torch.distributed is not initialised", hint="call init_process_group first")
        process_group = process_group or distributed.group.WORLD
        self.rank: int = distributed.get_rank(process_group)
        self.world_size: int = distributed.get_world_size(process_group)
        if self.rank < 0:
            raise ArgumentError("this process is not a member of the process group")
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public way to it
        if store is None:
            raise UnsupportedError(
                f"the process group has no store (backend `{distributed.get_backend(process_group)}`)",
                hint="pass as `group=` an object with rank, world_size, barrier, gather and broadcast",
            )
        # Older torch cannot open a second connection. No request here waits, so sharing one is only slower.
        own = store.clone() if hasattr(store, "clone") else store
        self._use(distributed.PrefixStore(f"reshard/{process_group.group_name}", own))

    @classmethod
    def over(cls, store: Store, rank: int, world_size: int) -> TorchGroup:
        """The ranks that share a store which nothing else uses.

        Args:
            store: the store.
            rank: of this process, from 0.
            world_size: how many there are.
        """
        group = cls.__new__(cls)
        group.rank, group.world_size = rank, world_size
        group._use(store)  # noqa: SLF001  its own
        return group

    def _use(self, store: Store) -> None:
        self._store = store
        self._joined: collections.deque[str] = collections.deque(maxlen=1024)
        self._pid = os.getpid()

    def session(self, label: str) -> TorchSession:
        """A separate channel, see `reshard.ranks.group.session`."""
        return TorchSession(self, label)

    def barrier(self, *, timeout: float) -> None:
        """Wait until every rank has called this.

        Raises:
            GroupError: the deadline passed; the message names the missing ranks.
        """
        self.session("barrier").barrier(timeout=timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        """The values of all ranks in rank order at the root, None elsewhere. As `Group.gather`.

        Raises:
            GroupError: the deadline passed; the message names the missing ranks.
            ArgumentError: the value is not JSON-able, or too large.
        """
        return self.session("gather").gather(value, root=root, timeout=timeout)

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        """The root's value, on every rank. As `Group.broadcast`.

        The root waits up to a second until the others have fetched it: if the root's process serves the store and
        exits, the value is lost. The root raises no error if they do not fetch it.

        Raises:
            GroupError: the deadline passed.
            ArgumentError: the value is not JSON-able, or too large.
        """
        return self.session("broadcast").broadcast(value, root=root, timeout=timeout)


class TorchSession:
    """One session over the store; used by one thread at a time.

    Keys, all below `reshard/<group>/`:

        <label>                          the token, a random name: set by rank 0 once it is "none", and set to "none"
                                         by the last rank that joins
        <token>/joined                   how many have
        <token>/<operation>/<rank>       what a rank sent: the number of parts, a newline, the first part
        <token>/<operation>/<rank>/<i>   its other parts, set before the first
        <token>/<operation>/<rank>/read  how many have read a broadcast: the last one deletes all of it
        <token>/failed                   why the session is over

    Waiting is polling: a request that waits in the store would block the connection for other threads, could not be
    interrupted, and prints a warning when its time is up.
    """

    def __init__(self, group: TorchGroup, label: str) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._label = label
        self._token: str | None = None
        self._n_operations = 0
        self._error: GroupError | None = None
        self._is_abandoned = False
        self._asked_at = 0.0  # when the last request was sent; all before it were answered
        self._longest_sleep_s = _LAST_SLEEP_S * max(1.0, group.world_size / _RANKS_PER_SLEEP)

    def barrier(self, *, timeout: float) -> None:
        """As `TorchGroup`."""
        end = time.monotonic() + timeout
        self.gather(None, timeout=timeout)
        self.broadcast(None, timeout=max(end - time.monotonic(), 0.0))

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        """As `TorchGroup.gather`."""
        self._check_root(root)
        if self.world_size == 1:
            return [value]

        def work(name: str, deadline: float) -> list[Any] | None:
            parts = self._parts(value)
            self._join(name, deadline, timeout)
            if self.rank != root:
                self._send(name, parts)
                return None
            others = [rank for rank in range(self.world_size) if rank != root]
            text = "".join(parts).encode()
            known = (text, json.loads(text))
            received: dict[int, Any] = {root: known[1]}
            for start in range(0, len(others), _BATCH):
                batch = others[start : start + _BATCH]
                awaited = {self._key(name, rank): rank for rank in batch}
                if not self._wait(list(awaited), deadline, notice=(name, awaited)):
                    missing = [rank for rank in others[start:] if not self._store.check([self._key(name, rank)])]
                    self._give_up(name, timeout, missing or batch)
                received |= self._receive(name, batch, last=True, known=known)
            return [received[rank] for rank in range(self.world_size)]

        result: list[Any] | None = self._bounded("gather", work, timeout)
        return result

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        """As `TorchGroup.broadcast`."""
        self._check_root(root)
        if self.world_size == 1:
            return value

        def work(name: str, deadline: float) -> Any:
            parts = self._parts(value) if self.rank == root else []
            self._join(name, deadline, timeout)
            if self.rank == root:
                self._send(name, parts)
                end = min(deadline, time.monotonic() + max(_LINGER_S, 2 * self._longest_sleep_s))
                with contextlib.suppress(GroupError, RuntimeError):
                    self._wait([], end, lambda: not self._store.check([self._key(name, root)]))
                return json.loads("".join(parts))
            awaited = {self._key(name, root): root}
            if not self._wait(list(awaited), deadline + _GRACE_S, notice=(name, awaited)):
                self._give_up(name, timeout, [root])
            return self._receive(name, [root], last=False)[root]

        return self._bounded("broadcast", work, timeout)

    def fail(self, error: BaseException) -> None:
        """End the session for all ranks that wait in it, as this rank sends nothing more. Waits for no other rank.

        Args:
            error: why; the others raise a `GroupError` with its message.
        """
        if self._error is not None:  # they have been told
            return
        self._is_abandoned = True
        self._error = GroupError(f"session `{self._label}` has failed")
        poster = threading.Thread(target=self._post_failure, args=(error,), daemon=True)
        poster.start()
        poster.join(_POST_S)

    def _bounded(self, kind: str, work: Callable[[str, float], Any], timeout: float) -> Any:
        """Do one operation in a thread, which is abandoned if the store does not answer.

        A server whose machine has failed or whose process is stopped does not answer, and does not report timeouts.
        """
        if os.getpid() != self._group._pid:  # noqa: SLF001
            raise GroupError(
                f"{kind} in session `{self._label}`: this process was forked from a rank and is none itself"
            )
        if self._error is not None:
            raise GroupError(self._error.message, hint=self._error.hint, ranks=self._error.ranks)
        self._n_operations += 1
        name = f"{kind} {self._n_operations}"
        ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        deadline = time.monotonic() + timeout

        def run() -> None:
            try:
                ended.put((work(name, deadline), None))
            except RuntimeError as error:  # of the store
                ended.put((None, self._lost(name, error)))
            except BaseException as error:  # noqa: BLE001  raised by the caller's thread
                self._post_failure(error)
                ended.put((None, error))

        threading.Thread(target=run, name=f"reshard {self._label}: {name}", daemon=True).start()
        result: Any = None
        error: BaseException | None
        wait_s, asked_at, n_silent, n_late = deadline - time.monotonic(), 0.0, 0, 0
        while True:
            try:
                result, error = ended.get(timeout=max(wait_s, _LOOK_S))
                break
            except queue.Empty:
                # If a request was sent since the last look, the one before it was answered: the store is not silent.
                n_silent = n_silent + 1 if self._asked_at == asked_at else 0
                wait_s, asked_at, n_late = _LOOK_S, self._asked_at, n_late + 1
                if n_silent < _SILENT_LOOKS and n_late < _LATE_LOOKS:
                    continue
                self._is_abandoned = True
                error = GroupError(
                    f"{name} in session `{self._label}`: the rendezvous store did not answer within {timeout:g} s",
                    hint="it is served by rank 0 or by the launcher on its host: see whether that one is alive",
                )
                break
            except BaseException:  # Ctrl-C
                self._is_abandoned = True
                raise
        if error is None:
            return result
        self._error = error if isinstance(error, GroupError) else GroupError(f"session `{self._label}` has failed")
        raise error

    @property
    def _store(self) -> Store:
        """The store, while a caller waits for this session. Raises in an abandoned thread, which then ends."""
        if self._is_abandoned:
            raise GroupError(f"session `{self._label}` was given up")
        self._asked_at = time.monotonic()
        return self._group._store  # noqa: SLF001  two halves of one thing

    def _join(self, name: str, deadline: float, timeout: float) -> None:
        """Open the session (rank 0) or find it (the others), once."""
        if self._token is not None:
            return
        if self.rank == 0:
            # Late ranks of an earlier session with this label must not find this one instead.
            if not self._wait([], deadline, lambda: self._open_token() is None):
                self._store.set(self._label, "none")
                self._give_up(name, timeout, [], "not all ranks have come to the session of this label before")
            self._token = os.urandom(8).hex()
            self._store.set(self._label, self._token)
            return
        joined = self._group._joined  # noqa: SLF001
        found: str | None = None

        def find() -> bool:
            nonlocal found
            found = self._open_token()
            return found is not None and found not in joined

        if not self._wait([], deadline + _GRACE_S, find, notice=(name, {"": 0})):
            self._give_up(name, timeout, [0])
        joined.append(str(found))
        self._token = str(found)
        if self._store.add(f"{found}/joined", 1) == self.world_size - 1:
            # Only if this session is open: rank 0 may have abandoned it and opened the next one.
            self._store.compare_set(self._label, self._token, "none")
            self._store.delete_key(f"{found}/joined")

    def _open_token(self) -> str | None:
        """The session that is open under the label; uses the only request that does not wait."""
        found: str = self._store.compare_set(self._label, "none", "none").decode()
        return None if found == "none" else found

    def _wait(
        self,
        keys: Sequence[str],
        deadline: float,
        condition: Callable[[], bool] | None = None,
        notice: tuple[str, Mapping[str, int]] | None = None,
    ) -> bool:
        """Whether all keys are there, or the condition holds, before the deadline.

        Args:
            keys: keys of the store.
            deadline: by the monotonic clock.
            condition: what is asked instead of keys.
            notice: the operation, and the rank of each key: a long wait for them is logged.

        Raises:
            GroupError: another rank has ended the session.
        """
        sleep_s, began = _FIRST_SLEEP_S, time.monotonic()
        notice_at = began + _FIRST_NOTICE_S

        def holds() -> bool:
            return condition() if condition is not None else self._store.check(list(keys))

        while not holds():
            failed = f"{self._token}/failed"
            if self._token is not None and self._store.check([failed]):
                if holds():  # what was sent before another rank failed
                    return True
                record = json.loads(self._store.get(failed))
                raise GroupError(record["message"], hint=record["hint"], ranks=tuple(record["ranks"]))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            if notice is not None and time.monotonic() >= notice_at:
                notice_at += _NOTICE_EVERY_S
                self._say_who_is_missing(*notice, time.monotonic() - began)
            time.sleep(min(sleep_s, left_s))
            sleep_s = min(1.5 * sleep_s, self._longest_sleep_s)
        return True

    def _say_who_is_missing(self, name: str, awaited: Mapping[str, int], waited_s: float) -> None:
        """Log the ranks whose keys are not there. Of the ranks that wait for one rank, only the first says so."""
        missing = sorted(rank for key, rank in awaited.items() if not (key and self._store.check([key])))
        if missing == [0] and self.rank != 1:
            return
        if missing:
            # Rank 0 may wait for another rank, and says then for which one.
            whom = f"rank{'s' if len(missing) > 1 else ''} {listed(missing)}"
            _log.warning(
                "rank %d has waited for %.0f s in session `%s` (%s) for %s of %d%s: every rank has to call the same "
                "methods of reshard, such as `Checkpointer.step`, also if it writes no files",
                self.rank,
                waited_s,
                self._label,
                name,
                whom,
                self.world_size,
                ", or a rank for which that one waits" if missing == [0] and self._token is not None else "",
            )

    def _give_up(self, name: str, timeout: float, missing: Sequence[int], why: str = "") -> NoReturn:
        who = why or f"no answer of rank{'s' if len(missing) > 1 else ''} {listed(missing)} of {self.world_size}"
        raise GroupError(
            f"{name} in session `{self._label}`: {who} within {timeout:g} s",
            hint="see the log of that rank for its error, or set a longer `timeout=`",
            ranks=tuple(missing),
        )

    def _post_failure(self, error: BaseException) -> None:
        """End the session for all ranks that wait in it."""
        if self._token is None:
            return
        known = error if isinstance(error, ReshardError) else ReshardError(f"{type(error).__name__}: {error}")
        record = {
            "message": known.message,
            "hint": known.hint,
            "ranks": list(known.ranks) if isinstance(known, GroupError) else [self.rank],
        }
        store = self._group._store  # noqa: SLF001  also of an abandoned session
        try:
            store.compare_set(f"{self._token}/failed", "", json.dumps(record))  # the first one is the cause
            if self.rank == 0:
                store.compare_set(self._label, self._token, "none")
        except RuntimeError:
            return  # the store does not answer; the other ranks detect that themselves

    def _lost(self, name: str, error: RuntimeError) -> GroupError:
        return GroupError(
            f"{name} in session `{self._label}`: the connection to the rendezvous store is lost: {_first_line(error)}",
            hint="it is served by rank 0 or by the launcher on its host: see whether that one is alive",
        )

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ArgumentError(f"`root` is {root}, expected a rank below {self.world_size}")

    def _key(self, name: str, rank: int) -> str:
        return f"{self._token}/{name}/{rank}"

    @staticmethod
    def _parts(value: Any) -> list[str]:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"ranks exchange JSON values, this one is none: {error}") from None
        if len(text) > _MAX_PARTS * _PART_CHARACTERS:
            raise ArgumentError(f"ranks exchange at most {_MAX_PARTS * _PART_CHARACTERS} bytes, this is {len(text)}")
        return [text[start : start + _PART_CHARACTERS] for start in range(0, len(text), _PART_CHARACTERS)]

    def _send(self, name: str, parts: Sequence[str]) -> None:
        key = self._key(name, self.rank)
        for i, part in enumerate(parts[1:], 1):
            self._store.set(f"{key}/{i}", part)
        self._store.set(key, f"{len(parts)}\n{parts[0]}")

    def _receive(
        self, name: str, ranks: Sequence[int], *, last: bool, known: tuple[bytes, Any] | None = None
    ) -> dict[int, Any]:
        """The values of ranks whose first parts exist. The last reader deletes them.

        Args:
            name: the operation.
            ranks: the ranks.
            last: whether no other rank reads the values.
            known: a text and its value. Ranks that sent the same text get this value: a thousand ranks often report the
                same, and parsing it takes long.
        """
        keys = [self._key(name, rank) for rank in ranks]
        received = {}
        for rank, key, first in zip(ranks, keys, self._store.multi_get(keys), strict=True):
            n_parts, _, text = first.partition(b"\n")
            others = [f"{key}/{i}" for i in range(1, int(n_parts))]
            whole = b"".join([text, *(self._store.get(other) for other in others)])
            received[rank] = known[1] if known is not None and known[0] == whole else json.loads(whole)
            read = f"{key}/read"
            # Received values stay valid even if the server ends now.
            with contextlib.suppress(RuntimeError):
                if last or self._store.add(read, 1) == self.world_size - 1:
                    for done in [*others, *([] if last else [read]), key]:
                        self._store.delete_key(done)
        return received


# One group object, and so one connection, for each process group.
_TORCH_GROUPS: weakref.WeakKeyDictionary[Any, TorchGroup] = weakref.WeakKeyDictionary()


def torch_group(process_group: Any) -> TorchGroup:
    """The group of a process group, always the same one."""
    made = _TORCH_GROUPS.get(process_group)
    if made is None:
        made = _TORCH_GROUPS[process_group] = TorchGroup(process_group)
    return made


def torch_distributed() -> Any:
    """`torch.distributed` if it was imported and this torch was built with it, else None."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:_MAX_MESSAGE]
