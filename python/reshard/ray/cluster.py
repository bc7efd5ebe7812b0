"""Shares of some work as tasks of a Ray cluster.

Ray starts a worker for each task on a host that has the processors. A task whose worker was killed, or whose host has
vanished, is begun again wherever there is room. Errors of the package are results of a task: they are not tried again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import ArgumentError, GroupError, ReshardError, StorageError, UnsupportedError
from reshard.ranks.group import ErrorRecord
from reshard.ranks.places import ShareDone, ShareRun, Work
from reshard.storage.changes import enter_folder
from reshard.storage.remote import check_sent, options_to_send, take_options
from reshard.values.fetched import Fetched, add_fetched, fetched_here
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from reshard.storage.remote import BucketOptions

_log = logging.getLogger("reshard")

_SHARE_BYTES = 1 << 30  # the bar moves and work is lost in such steps
_MIN_SHARE_BYTES = 16 << 20  # a smaller share takes less time than to open the source again
_MAX_SHARES = 4096
_SHARES_OF_SLOT = 4  # so that all workers end at about the same time
_MIN_BEGUN = 256  # shares whose tasks are begun at least, as far as there are; a cluster grows with those that wait
_TICK_S = 1.0
_START_S = 30.0  # of a worker on a host that has the processors
_SAID_S = 10.0  # after which a log says that the processors are in use
_CONNECT_S = 10.0
_MAX_MESSAGE = 500
_END_S = 30.0  # for workers that are being killed
_ENDS_SOON_S = 0.5


@dataclass(frozen=True)
class Ray:
    """The workers of a Ray cluster, for `on=` of `reshard.convert`, `verify` and `diff`.

    This process reads what is to be done, starts the tasks, and makes one result of theirs. All hosts must see the
    files under the same paths, and have the same version of this package.

    Attributes:
        address: of the cluster, as `ray.init` takes it: "auto" is the one that runs on this host or that `RAY_ADDRESS`
            names, "ray://HOST:10001" connects as a client. Not used if `ray.init` was called before.
        cpus: processors of each task; also its threads, if `threads` is not given.
        retries: how often a share is begun again whose worker died.
        wait: seconds to wait until the processors of one task are free, for example until a host was added.

    Example:
        >>> Ray("ray://head:10001", cpus=4).n_shares(100 << 30)  # doctest: +SKIP
        100
    """

    address: str = "auto"
    cpus: int = 1
    retries: int = 3
    wait: float = 300.0

    def __post_init__(self) -> None:
        if type(self.cpus) is not int or self.cpus < 1:
            raise ArgumentError(f"`cpus` is {self.cpus!r}, expected a whole number from 1 on")
        if type(self.retries) is not int or self.retries < 0:
            raise ArgumentError(f"`retries` is {self.retries!r}, expected a whole number from 0 on")
        if type(self.wait) not in (int, float) or not 0 <= self.wait < math.inf:
            raise ArgumentError(f"`wait` is {self.wait!r}, expected seconds, from 0 on")
        if not isinstance(self.address, str) or not self.address:
            raise ArgumentError(f"`address` is {self.address!r}, expected that of a cluster, such as 'auto'")

    def n_shares(self, n_bytes: int) -> int:
        """See `Place.n_shares`."""
        with self._connected() as ray, self._of_ray():
            n_slots = max(1, int(ray.cluster_resources().get("CPU", 0)) // self.cpus)
        wanted = max(_SHARES_OF_SLOT * n_slots, n_bytes // _SHARE_BYTES)
        return int(max(1, min(wanted, n_bytes // _MIN_SHARE_BYTES, _MAX_SHARES)))

    def run(self, work: Work[Any], n_shares: int, done: Callable[[ShareRun], object]) -> list[Any]:
        """See `Place.run`."""
        results: dict[int, Any] = {}
        ended: dict[int, list[str]] = {share: [] for share in range(n_shares)}
        with self._connected() as ray:
            running: dict[Any, int] = {}
            try:
                with self._of_ray():
                    self._wait_for_room(ray)
                    task = ray.remote(num_cpus=self.cpus, max_retries=0, scheduling_strategy="SPREAD")(
                        _sent_task()
                    ).options(name="_do_share")
                    pickled = ray.cloudpickle.dumps((work, str(Path.cwd()), options_to_send()))
                    check_sent(pickled)
                    # The work of all shares, once for all tasks.
                    begin = functools.partial(task.remote, ray.put(pickled), version=_core.__version__)
                waiting = deque(range(n_shares))
                while running or waiting:
                    with self._of_ray():
                        # A task that waits takes memory of this process.
                        n_begun = max(_MIN_BEGUN, 2 * self._n_slots(ray))
                        while waiting and len(running) < n_begun:
                            share = waiting.popleft()
                            running[begin(share)] = share
                        ready = ray.wait(list(running), num_returns=1, timeout=_TICK_S)[0]
                    for reference in ready:
                        share = running.pop(reference)
                        one = self._result(ray, reference)
                        if isinstance(one, str):
                            ended[share].append(one)
                            add_fetched(Fetched(n_lost_workers=1))
                            if len(ended[share]) > self.retries:
                                raise _failed_often(share, n_shares, ended[share])
                            waiting.appendleft(share)
                            continue
                        if one.error is not None:
                            raise _of_host(one.error, one.host)
                        results[share] = one.result
                        add_fetched(one.fetched)
                        retried = tuple(ended[share])
                        done(ShareRun(share, one.host, one.process, one.n_bytes, one.seconds, retried))
            finally:
                end_tasks(ray, list(running))
        return [results[share] for share in range(n_shares)]

    def _result(self, ray: Any, reference: Any) -> ShareDone | str:
        """What a task has returned, or why its worker has died."""
        with self._of_ray():
            try:
                done: ShareDone | tuple[str, str, str] = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise GroupError(
                    f"a worker of the Ray cluster at {show(self._where)} could not begin: {_one_line(error.cause)}",
                    hint="install the same versions of reshard and Python on all hosts",
                ) from None
            except ray.exceptions.RayError as error:
                return _one_line(error)
        if isinstance(done, tuple):
            host, why, hint = done
            raise UnsupportedError(f"on host {show(host)}: {why}", hint=hint)
        return done

    @contextlib.contextmanager
    def _of_ray(self) -> Iterator[None]:
        """Give what Ray raises in the block, which is of many classes, the one class of this package."""
        try:
            yield
        except ReshardError:
            raise
        except Exception as error:  # noqa: BLE001  Ray raises Exception itself, too
            raise GroupError(
                f"the Ray cluster at {show(self._where)} does not answer any more: {_one_line(error)}",
                hint="see whether its head runs, and start again; `ray status` on a host of it says more",
            ) from None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            import ray  # noqa: PLC0415  not needed otherwise
        except ImportError as error:
            raise UnsupportedError(
                f"Ray cannot be imported: {error}", hint="pip install 'reshard[ray]', the version of the cluster"
            ) from None
        if ray.is_initialized():
            yield ray
            return
        try:
            self._check_address()
        except OSError as error:
            raise GroupError(
                f"there is no Ray cluster at {show(self._where)}: {_one_line(error)}",
                hint="start Ray on this host, or give the address of a cluster",
            ) from None
        try:
            ray.init(address=self.address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # noqa: BLE001  Ray raises Exception itself, too
            shut_down(ray)
            own = f"Ray {ray.__version__} with Python {platform.python_version()}"
            raise GroupError(
                f"this process, {own}, cannot use the Ray cluster at {show(self._where)}: {_one_line(error)}",
                hint="start a cluster, or give the address of one, with the same versions; HOST:6379 is for hosts of "
                "the cluster, and ray://HOST:10001 for all others",
            ) from None
        try:
            yield ray
        finally:
            shut_down(ray)

    @property
    def _wanted(self) -> str:
        return "a processor" if self.cpus == 1 else f"{self.cpus} processors"

    @property
    def _where(self) -> str:
        return os.environ.get("RAY_ADDRESS", "auto") if self.address == "auto" else self.address

    def _check_address(self) -> None:
        """Connect once: Ray tries for minutes. Raises OSError."""
        host, _, port = self._where.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()

    def _n_slots(self, ray: Any) -> int:
        """How many tasks can run at once. Refuses to wait for ever: Ray waits until a host has the processors."""
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        most = max(cpus, default=0)
        if most < self.cpus:
            raise GroupError(
                f"no host of the Ray cluster has {self._wanted} for a task; the largest has {most}",
                hint="ask for fewer processors, or add a larger host to the cluster",
            )
        return sum(n // self.cpus for n in cpus)

    def _wait_for_room(self, ray: Any) -> None:
        """Refuse to wait for ever while other programs use all processors: wait for a task that does nothing."""
        is_free = ray.available_resources().get("CPU", 0) >= self.cpus
        wait_s = max(self.wait, _START_S) if is_free else self.wait
        first = ray.remote(num_cpus=self.cpus)(lambda: None).remote()
        begun, is_said = time.monotonic(), False
        try:
            while not ray.wait([first], timeout=min(_TICK_S, wait_s))[0]:
                self._n_slots(ray)  # refuses if no host is large enough
                free, waited = ray.available_resources().get("CPU", 0), time.monotonic() - begun
                said = f"no host of the Ray cluster at {show(self._where)} has {self._wanted} free"
                if waited >= wait_s:
                    raise GroupError(
                        f"{said}, also not after {waited:.0f} s; {free:.0f} are free on all hosts together",
                        hint="`ray status` tells what is in use; wait for the programs that use them, or add a host",
                    )
                if waited >= _SAID_S and not is_said:
                    _log.warning("%s; this waits for at most %.0f s", said, wait_s)
                    is_said = True
        finally:
            end_tasks(ray, [first])


def _sent_task() -> Callable[..., ShareDone | tuple[str, str, str]]:
    """What does a share in a worker. It is sent as it is, so that it runs where this package is not installed."""

    def _do_share(pickled: bytes, share: int, *, version: str) -> ShareDone | tuple[str, str, str]:
        import socket  # noqa: PLC0415  nothing of this module is sent

        import ray  # noqa: PLC0415

        host = socket.gethostname()
        try:
            import reshard  # noqa: PLC0415

            if reshard.__version__ != version:
                why = f"this host has reshard {reshard.__version__}, and the process that started the work {version}"
                return host, why, "install the same version on all hosts"
            from reshard.ray.cluster import do_share  # noqa: PLC0415

            work, folder, buckets = ray.cloudpickle.loads(pickled)
            return do_share(work, folder, buckets, share)
        except (ImportError, AttributeError) as error:
            why = f"a worker cannot import what it needs: {error}"
            return host, why, "install the same versions of reshard and of what it needs on all hosts of the cluster"

    return _do_share


def do_share(work: Work[Any], folder: str, buckets: Mapping[str, BucketOptions], share: int) -> ShareDone:
    """Do a share, in a worker.

    Args:
        work: what is done.
        folder: the current folder of the caller.
        buckets: its options.
        share: the number of the share.
    """
    host, process, begun, before = socket.gethostname(), os.getpid(), time.monotonic(), fetched_here()
    try:
        enter_folder(folder)  # relative paths are those of the caller
        take_options(buckets)  # and so are the services
        n_bytes, result = work(share)
    except ReshardError as error:
        return ShareDone(host, process, time.monotonic() - begun, error=ErrorRecord.of(error))
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  of any class: Ray would print its traceback
        _log.exception("share %d failed", share)
        kind = StorageError if isinstance(error, OSError) else GroupError
        translated = kind(_one_line(error), hint="the log of its worker, in the logs of Ray on that host, says where")
        return ShareDone(host, process, time.monotonic() - begun, error=ErrorRecord.of(translated))
    return ShareDone(host, process, time.monotonic() - begun, n_bytes, result, fetched=fetched_here() - before)


def shut_down(ray: Any) -> None:
    """End the connection to a cluster. An interrupt takes effect after it; a second one does not wait.

    Ray ends the process with exit code 1 if its shutdown is begun again after an exception in the middle of it.

    Args:
        ray: the package.
    """
    with _held_interrupts(), contextlib.suppress(Exception):  # of a cluster that has gone
        ray.shutdown()


@contextlib.contextmanager
def _held_interrupts() -> Iterator[None]:
    """Call the handlers of the first interrupt of the block, and of the alarm that may follow it, after the block."""
    old: dict[int, Any] = {}
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        if held.count(number) > 1:
            old[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
        old = {number: handler for number, handler in found.items() if callable(handler)}
    for number in old:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            old[number](number, None)


def end_tasks(ray: Any, references: list[Any]) -> None:
    """End tasks, and wait until they have ended. Never raises.

    Ray aborts this process if it cancels a task while the result of the task comes in. So those that end at once, such
    as those that fail as another has failed, are awaited, and those that wait are cancelled before those that run.

    Args:
        ray: the package.
        references: of the tasks, in the order in which they were begun.
    """
    if not references:
        return
    with contextlib.suppress(Exception):  # of a cluster that has gone: the first error counts
        left = ray.wait(references, num_returns=len(references), timeout=_ENDS_SOON_S)[1]
        for reference in reversed(left):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.cancel(reference, force=True)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_END_S)


def _of_host(record: ErrorRecord, host: str) -> ReshardError:
    error = record.as_error(f"on host {show(host)}: {record.message}")
    if isinstance(error, FileNotFoundError):
        error.hint = "all hosts must see the source and the destination under the same paths"
    return error


def _failed_often(share: int, n_shares: int, ended: list[str]) -> GroupError:
    return GroupError(
        f"share {share} of {n_shares} was begun {len(ended)} times, and each time its worker died: {ended[-1]}",
        hint="the logs of Ray say why; a worker that uses too much memory is killed by the system",
    )


def _one_line(error: BaseException) -> str:
    # A server of Ray sends its traceback, of which the last line says what failed.
    before, _, trace = str(error).partition("Traceback (most recent call last):")
    text = " ".join([*before.split(), *(trace.strip().splitlines() or [""])[-1].split()])
    known = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return known if len(known) <= _MAX_MESSAGE else known[:_MAX_MESSAGE] + "..."
