"""A real cluster of Ray on this machine: a head without processors, and workers, each a host for Ray."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.ports import unused_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_START_S = 120


class RayCluster:
    """The processes of a cluster.

    Attributes:
        folder: where Ray keeps its files.
        address: of the cluster, once the head runs.
        client: the same, from outside.
        nodes: the processes that have started the head and each of its hosts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = self.client = ""
        self.nodes: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Of programs that use the cluster."""
        return self._own_environment | {"RAY_ADDRESS": self.address}

    @property
    def _own_environment(self) -> dict[str, str]:
        # A token in the home of the user, as `ray.init` leaves it, would be asked for by a head but not sent by hosts.
        return os.environ | {"RAY_AUTH_MODE": "disabled"}

    def start(self, *options: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a host, and wait until it belongs to the cluster.

        Args:
            options: of `ray start`.
            before: words before the command.
        """
        where = f"--address={self.address}" if self.address else f"--temp-dir={self.folder}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", where, "--disable-usage-stats"]
        log = self.folder.parent / f"{os.urandom(4).hex()}.log"
        with log.open("wb") as output:
            node = subprocess.Popen(
                [*before, *command, "--object-store-memory=80000000", *options],
                env=self._own_environment | {"RAY_raylet_start_wait_time_s": str(_START_S)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)
        end, wanted = time.monotonic() + _START_S, "runtime started" if self.address else r"--address='([^']+:\d+)'"
        while (found := re.search(wanted, log.read_text())) is None:
            if node.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        self.address = self.address or found[1]
        return node

    def workers(self, node: subprocess.Popen[bytes] | None = None) -> list[int]:
        """Processes that do a share just now, of a host or of all."""
        roots = {one.pid for one in ([node] if node else self.nodes)}
        return [pid for pid in below(roots) if title(pid).startswith("ray::_do_share")]

    def stop(self, node: subprocess.Popen[bytes]) -> None:
        """Kill a host with all of its processes, as if it had vanished."""
        pids = below({node.pid})
        for pid in [node.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        self.nodes.remove(node)


def title(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def below(pids: set[int]) -> list[int]:
    """The processes that these have started, and those that they have."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while True:
        more = {pid for pid, parent in parents.items() if parent in pids | found} - found
        if not more:
            return sorted(found)
        found |= more


@contextlib.contextmanager
def running(n_hosts: int, *, client: bool = False) -> Iterator[RayCluster]:
    """A cluster with so many hosts of one processor each.

    Args:
        n_hosts: the hosts, besides the head, which does no tasks.
        client: whether programs can connect from outside.
    """
    # The paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    cluster = RayCluster(folder / "ray")
    try:
        port = unused_port() if client else 0
        outside = f"--ray-client-server-port={port}"
        cluster.start("--head", "--port=0", "--num-cpus=0", "--include-dashboard=false", *([outside] if client else []))
        cluster.client = f"ray://127.0.0.1:{port}"
        for _ in range(n_hosts):
            cluster.start("--num-cpus=1")
        yield cluster
    finally:
        for node in list(reversed(cluster.nodes)):
            cluster.stop(node)
        shutil.rmtree(folder, ignore_errors=True)
