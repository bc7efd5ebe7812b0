"""Shares of some work by the ranks that a launcher has started: rank 0 leads, and the others do what it gives out.

All ranks make the same call. Rank 0 reads what is to be done, and gives each rank one share after another, as messages.
At the end it sends its report, or its error, to all of them. The ranks meet at the rendezvous store of
torch.distributed: torchrun serves it, and else rank 0 does, at MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import ArgumentError, GroupError, ReshardError, UnsupportedError
from reshard.ranks.group import ErrorRecord, joint_error, session
from reshard.ranks.launcher import known_variables, launched
from reshard.ranks.messages import decode, encode
from reshard.ranks.places import ShareDone, ShareRun, Work
from reshard.ranks.torch_group import TorchGroup
from reshard.values.fetched import add_fetched, fetched_here
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.ranks.group import Group

R = TypeVar("R")

_SHARE_BYTES = 1 << 30  # the bar moves in such steps
_END_S = 30.0  # for ranks that still have to read the report
_PORTS = 1 << 16
_TORCHRUN_SERVES = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class _Order:
    """What rank 0 gives out: one share for each rank, as far as there are. The message comes with the first ones."""

    message: Any
    first_share: int
    n_shares: int


@dataclass
class LedRanks:
    """The ranks of a group, for `on=` of `reshard.verify` and `reshard.diff`. All of them make the same call.

    All hosts must see the files under the same paths. Rank 0 records and logs what there is to record, and all ranks
    return its report or raise its error.

    Args:
        group: a `reshard.ranks.group.Group`.
        timeout: seconds that ranks wait for each other at each share.

    Attributes:
        is_told: whether rank 0 sent what this rank has returned or raised, and so can print it.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.ranks.group import SingleProcess
        >>> _ = reshard.save("led_run", 1, {"w": np.eye(2)})
        >>> reshard.verify("led_run", on=LedRanks(SingleProcess())).ok
        True
    """

    group: Group
    timeout: float = 3600.0
    is_told: bool = field(default=False, init=False)
    _channel: Group = field(init=False, repr=False, compare=False)
    _has_last: bool = field(default=False, init=False, repr=False, compare=False)  # the last message of rank 0

    @property
    def cpus(self) -> None:
        """See `Place.cpus`."""
        return None

    def n_shares(self, n_bytes: int) -> int:
        """See `Place.n_shares`."""
        return self.group.world_size * max(1, n_bytes // (_SHARE_BYTES * self.group.world_size))

    def run(self, work: Work[Any], n_shares: int, done: Callable[[ShareRun], object]) -> list[Any]:
        """See `Place.run`. Called on rank 0 only; the others are in `led`."""
        message, results = encode(work.message), []
        for first in range(0, n_shares, self.group.world_size):
            order = _Order(None if first else message, first, n_shares)
            self._channel.broadcast({"order": encode(order)}, timeout=self.timeout)
            with self._ending():
                own = self._do(lambda _: work, order)
                reports = self._channel.gather(encode(own), timeout=self.timeout)
            all_done = [decode(ShareDone, one) for one in reports or []]
            failed = {
                rank: replace(one.error, message=f"on host {show(one.host)}: {one.error.message}")
                for rank, one in enumerate(all_done)
                if one.error is not None
            }
            if failed:
                error = joint_error(failed)
                if isinstance(error, FileNotFoundError):
                    error.hint = "all hosts must see the files under the same paths"
                raise error
            for one in all_done[1:]:
                add_fetched(one.fetched)
            for share, one in enumerate(all_done[: n_shares - first], first):
                results.append(decode(work.result, one.result))
                done(ShareRun(share, one.host, one.process, one.n_bytes, one.seconds))
        return results

    def led(self, lead: Callable[[], R], work: Callable[[Any], Work[Any]], message: type, report: type[R]) -> R:
        """Let rank 0 call a function, which may call `run`.

        Args:
            lead: called on rank 0.
            work: what is done with a message of rank 0 on the other ranks.
            message: the type of such a message.
            report: the type of what `lead` returns.

        Returns:
            What `lead` has returned, on every rank.

        Raises:
            ReshardError: that of rank 0, on every rank.
            GroupError: a rank did not answer in time; the message names it.
        """
        self.is_told = self._has_last = False
        self._channel = session(self.group, "shares of rank 0")
        if self.group.rank == 0:
            try:
                made = lead()
                told = {"report": encode(made)}
            except BaseException as error:
                with contextlib.suppress(ReshardError, KeyboardInterrupt):
                    self._say_last({"failed": encode({0: ErrorRecord.of(error)})})
                raise
            self._say_last(told)
            return made

        given: list[Work[Any]] = []

        def sent(text: Any) -> Work[Any]:
            if text is not None:
                given[:] = [work(decode(message, text))]
            return given[0]

        with self._ending():
            while True:
                told = self._channel.broadcast(None, timeout=self.timeout)
                if "order" not in told:
                    break
                done = self._do(sent, decode(_Order, told["order"]))
                self._channel.gather(encode(done), timeout=self.timeout)
            self._has_last = True
            with contextlib.suppress(GroupError):
                self._channel.gather(None, timeout=self.timeout)  # now rank 0, which may serve the store, can end
            if "failed" in told:
                failed = decode(dict[int, ErrorRecord], told["failed"])
                self.is_told = True
                raise joint_error(failed)
            made = decode(report, told["report"])
            self.is_told = True
            return made

    def end(self) -> None:
        """Wait until rank 0 calls this, too. A program calls it when it has printed the report.

        Launchers end all processes as soon as one of them has ended with an error: rank 0 may still print.
        """
        if self._has_last:
            with contextlib.suppress(ReshardError):
                self._channel.broadcast(None, timeout=self.timeout)

    def _say_last(self, told: dict[str, Any]) -> None:
        """Send the report or the error to all other ranks, and wait for a moment until they have it."""
        self._channel.broadcast(told, timeout=self.timeout)
        self._has_last = True
        with contextlib.suppress(GroupError):
            self._channel.gather(None, timeout=min(self.timeout, _END_S))

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Let no rank wait for this one if it raises what was not sent."""
        try:
            yield
        except BaseException as error:
            fail = getattr(self._channel, "fail", None)
            if fail is not None and not self.is_told:
                fail(joint_error({self.group.rank: ErrorRecord.of(error)}))
            raise

    def _do(self, work: Callable[[Any], Work[Any]], order: _Order) -> ShareDone:
        host, process, begun, before = socket.gethostname(), os.getpid(), time.monotonic(), fetched_here()
        share = order.first_share + self.group.rank
        if share >= order.n_shares:
            return ShareDone(host, process)
        try:
            n_bytes, result = work(order.message)(share)
            seconds, fetched = time.monotonic() - begun, fetched_here() - before
            return ShareDone(host, process, seconds, n_bytes, encode(result), fetched=fetched)
        except Exception as error:  # noqa: BLE001  rank 0 waits for it
            return ShareDone(host, process, error=ErrorRecord.of(error))


def launched_ranks(timeout: float) -> LedRanks:
    """The ranks that a launcher has started, of which this process is one.

    Args:
        timeout: seconds that ranks wait for each other.

    Raises:
        ArgumentError: no launcher says which rank this is, or where rank 0 is.
        GroupError: rank 0 cannot be reached.
        UnsupportedError: torch is not installed.
    """
    found = launched()
    if found is None:
        raise ArgumentError(
            f"no launcher has started this process: none of {known_variables()} are set",
            hint="start it with torchrun, srun or mpirun",
        )
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < _PORTS):
        raise ArgumentError(
            f"rank {found.rank} of {found.size} does not know where rank 0 is: MASTER_ADDR is {address!r} and "
            f"MASTER_PORT is {port!r}",
            hint="set both on all ranks, to the host of rank 0 and to a free port there; torchrun sets them itself",
        )
    try:
        distributed: Any = importlib.import_module("torch.distributed")  # takes seconds, and is not needed otherwise
    except ImportError as error:
        raise UnsupportedError(
            f"ranks meet at a store of torch.distributed, and torch cannot be imported: {error}",
            hint="pip install torch, or give each process its share",
        ) from None
    serves = found.rank == 0 and os.environ.get(_TORCHRUN_SERVES) != "True"
    try:
        wait = timedelta(seconds=timeout)
        store = distributed.TCPStore(address, int(port), found.size, serves, timeout=wait, wait_for_workers=False)
    except (RuntimeError, ValueError, OverflowError) as error:
        what = "cannot serve the store of the ranks" if serves else "cannot reach rank 0"
        raise GroupError(
            f"rank {found.rank} of {found.size} {what} at {address}:{port}: {str(error).partition(chr(10))[0]}",
            hint="MASTER_ADDR and MASTER_PORT are the host of rank 0 and a free port there, the same on all ranks",
            ranks=(0,),
        ) from None
    # torchrun keeps the store when it starts the ranks again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = distributed.PrefixStore(f"reshard/shares/{attempt}", store)
    return LedRanks(TorchGroup.over(own, found.rank, found.size), timeout)
