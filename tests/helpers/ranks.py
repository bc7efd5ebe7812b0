"""Real ranks for tests: processes forked from the one that has imported torch, since importing it takes seconds.

    with Job(4, work) as job:
        job.outcomes()    # {"value": what work(group) returned}, {"error": "GroupError", ...} or None if it died

The store is served by a process of its own, as launchers do it, whose id is `job.server`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from reshard.errors import ReshardError
from reshard.ranks import torch_group
from reshard.ranks.group import TorchGroup, resolve
from reshard.ranks.torch_group import TorchSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.helpers.hosts import Host

_PATIENCE_S = 600  # until a test that hangs is ended: beside other work, ranks take minutes
_LOOKS = torch_group._SILENT_LOOKS, torch_group._LATE_LOOKS


class Signal:
    """Something that processes say, and that all others can wait for."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def set(self) -> None:
        os.write(self._writer, b".")

    def wait(self, n_times: int = 1) -> None:
        """Until it has been said so often."""
        for _ in range(n_times):
            ready, _, _ = select.select([self._reader], [], [], _PATIENCE_S)
            assert ready, "nobody has said it"
            os.read(self._reader, 1)
        os.write(self._writer, b"." * n_times)  # for the next one who waits


@contextlib.contextmanager
def only_missing(absent: int) -> Iterator[None]:
    """In the process of a rank: deadlines pass once all ranks but one have answered, however long that takes.

    With a timeout that does not pass before, the rank that gathers gives up the absent one alone, and tells the others.
    """
    wait = TorchSession._wait

    def wait_for_others(session: TorchSession, keys: Sequence[str], deadline: float, *rest: Any, **given: Any) -> bool:
        others = [key for key in keys if not key.endswith(f"/{absent}")]
        if 0 < len(others) < len(keys):
            assert wait(session, others, deadline), "the others do not answer"
        if len(others) < len(keys):
            deadline = time.monotonic() + 0.2
        return wait(session, keys, deadline, *rest, **given)

    TorchSession._wait = wait_for_others  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TorchSession._wait = wait  # type: ignore[method-assign]


def may_be_silent() -> None:
    """In the process of a rank: from now on a store that does not answer is given up. Otherwise its server is slow."""
    torch_group._SILENT_LOOKS, torch_group._LATE_LOOKS = _LOOKS


def no_longer_patient() -> None:
    """In the process of a rank: from now on it waits 2 s for the answers of others, whatever its timeout is."""
    bounded = TorchSession._bounded

    def briefly(session: TorchSession, kind: str, work: Callable[[str, float], Any], timeout: float) -> Any:
        return bounded(session, kind, work, min(timeout, 2.0))

    TorchSession._bounded = briefly  # type: ignore[method-assign, assignment]


class Job:
    """Ranks that do `work(group)`; `store` is "tcp" or "file"; `hosts` has one of each rank, the first the store's."""

    def __init__(
        self, world_size: int, work: Callable[[TorchGroup], Any], store: str = "tcp", hosts: Sequence[Host] = ()
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ends: list[int] = []  # of pipes to the children
        self.pids: list[int] = []
        self._address, interface = (hosts[0].address, "cable") if hosts else ("127.0.0.1", "lo")
        self.server, pipe = self._fork(self._serve, hosts[0] if hosts else None)
        port = int(os.read(pipe, 100))
        self._pipes = []
        for rank in range(world_size):
            connect = functools.partial(self._connect, store, port, world_size)
            stack = f"{self._folder.name}/rank {rank}.stack"
            be = functools.partial(self._be, work, rank, world_size, connect, interface=interface, stack=stack)
            pid, pipe = self._fork(be, hosts[rank] if hosts else None)
            self.pids.append(pid)
            self._pipes.append(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (*self.pids, self.server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for pipe in self._ends:
            os.close(pipe)
        self._folder.cleanup()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def outcomes(self) -> list[dict[str, Any] | None]:
        """What each rank had to say; None of one that died silently."""
        said: list[dict[str, Any] | None] = []
        for rank, pipe in enumerate(self._pipes):
            text = b""
            while (is_there := select.select([pipe], [], [], _PATIENCE_S)[0]) and (part := os.read(pipe, 1 << 20)):
                text += part
            assert is_there, f"rank {rank} hangs:\n{self._stacks()}"
            said.append(json.loads(text) if text else None)
        crashes = [entry["crash"] for entry in said if entry is not None and "crash" in entry]
        assert not crashes, "\n".join(crashes)
        return said

    def values(self) -> list[Any]:
        """What the ranks returned, all of which must have ended well."""
        said = self.outcomes()
        assert all(entry is not None and "value" in entry for entry in said), f"{said}\n{self._stacks()}"
        return [entry["value"] for entry in said if entry is not None]

    def _stacks(self) -> str:
        """Where the ranks are, and of what those have died that are gone."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT)
        time.sleep(1)  # until they have written it
        files = sorted(Path(self._folder.name).glob("*.stack"))
        return "\n".join(f"-- {path.stem}\n{path.read_text()}" for path in files)

    def _fork(self, do: Callable[[int], object], host: Host | None) -> tuple[int, int]:
        """A child, and the end of a pipe that it writes into."""
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's own, idle
            pid = os.fork()
        if pid == 0:
            try:
                gc.freeze()  # a collection would copy every page that holds an object of the parent
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody outlives the test run
                os.close(reader)
                if host is not None:
                    host.enter()
                do(writer)
            except BaseException:  # noqa: BLE001  nothing above this line in a forked child may go on
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(0)
        os.close(writer)
        self._ends.append(reader)
        return pid, reader

    @staticmethod
    def _serve(writer: int) -> NoReturn:
        store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        while True:
            signal.pause()

    def _connect(self, store: str, port: int, world_size: int) -> Any:
        if store == "file":
            return c10d.FileStore(f"{self._folder.name}/store", world_size)
        return c10d.TCPStore(self._address, port, world_size, is_master=False, wait_for_workers=False)

    @staticmethod
    def _be(
        work: Callable[[TorchGroup], Any],
        rank: int,
        world_size: int,
        connect: Callable[[], Any],
        out: int,
        *,
        interface: str,
        stack: str,
    ) -> None:
        # What the store warns of is what the tests do to it. What the process dies of, or is at when it hangs, stays.
        handle = os.open(stack, os.O_WRONLY | os.O_CREAT)
        faulthandler.enable(handle)
        faulthandler.register(signal.SIGQUIT, handle)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # gloo fails on a rank that is not ready when another one ends
        if interface == "lo":  # else a host with the server may lose its power
            torch_group._SILENT_LOOKS = torch_group._LATE_LOOKS = 10**9
        try:
            dist.init_process_group("gloo", store=connect(), rank=rank, world_size=world_size)
            group = resolve()
            assert isinstance(group, TorchGroup)
            said = {"value": work(group)}
        except ReshardError as error:
            said = {"error": type(error).__name__, "text": str(error)} | error.__dict__
        except BaseException:  # noqa: BLE001
            said = {"crash": traceback.format_exc()}
        text = json.dumps(said).encode()
        while text:
            text = text[os.write(out, text) :]
        os.close(out)
        if "value" in said and interface == "lo":  # on another host, a process above this one has the pipe open, too
            signal.pause()  # gloo fails on a rank whose peer ends first, though all messages were sent: the job ends it
