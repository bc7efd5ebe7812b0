"""Two hosts on one machine, as network namespaces: a name, mounts and processes of their own, a cable between them.

    def act(a, b):
        with Job(4, work, hosts=[a, a, b, b]) as job:
            b.cable(plugged=False)
            b.power_off()

    on_two_hosts(act)

A host begins with its first process, and with that one all others on it are gone at once. The other host is told of it
as after a reboot, by whatever it sends; if the cable was pulled before, by nothing, as when the power fails.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.namespaces import LIBC, MS_BIND, NEWNET, NEWNS, NEWPID, NEWUTS, checked, in_namespaces, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

INTERFACE = "cable"
_ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
_CLONE_FS = 0x200
_KINDS = {"net": NEWNET, "uts": NEWUTS, "mnt": NEWNS, "pid": NEWPID}


class Host:
    """A host that is switched on.

    Attributes:
        name: it has this name.
        address: what others reach it by.
        pid: of its first process, as everybody else sees it; 0 once it is off.
    """

    def __init__(self, name: str, address: str, own: dict[Path, Path]) -> None:
        self.name, self.address, self._own = name, address, own
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's own, idle
            self._keeper = os.fork()
        if self._keeper == 0:
            try:
                self._be(writer)
            finally:
                os._exit(1)
        os.close(writer)
        pid = os.read(reader, 20)
        has_begun = os.read(reader, 1) == b"."
        os.close(reader)
        if not has_begun:
            raise PermissionError(f"{self.name} does not start")
        self.pid = int(pid)
        # Held, so that the cable stays where it is when the host is switched off.
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    def _be(self, writer: int) -> None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        checked(LIBC.unshare(NEWNET | NEWUTS | NEWNS | NEWPID))
        told, tell = os.pipe()
        first = os.fork()
        if first:
            os.close(told)
            os.write(writer, str(first).encode().ljust(20))
            os.write(tell, b".")
            os.waitpid(first, 0)
            os._exit(0)
        LIBC.prctl(1, signal.SIGKILL)
        os.read(told, 1)
        checked(LIBC.sethostname(self.name.encode(), len(self.name)))
        checked(LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
        for place, folder in self._own.items():
            checked(LIBC.mount(os.fsencode(folder), os.fsencode(place), None, MS_BIND, None))
        os.write(writer, b".")
        os.close(writer)
        while True:
            signal.pause()

    def power_off(self) -> None:
        """End all that runs on it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self._keeper, 0)
        self.pid = 0

    def command(self, *words: str) -> list[str]:
        """A command as it is run on this host."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--pid", f"--wd={Path.cwd()}", *words]

    def enter(self) -> None:
        """Go on in a process that lives on this host, which ends with the one that calls this."""
        here = Path.cwd()
        handles = {os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY): kind for name, kind in _KINDS.items()}
        # A library may start threads in a forked child. Threads share the working folder: mounts cannot change then.
        checked(LIBC.unshare(_CLONE_FS))
        for handle, kind in handles.items():
            checked(LIBC.setns(handle, kind))
            os.close(handle)
        os.chdir(here)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            os._exit(0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def cable(self, *, plugged: bool) -> None:
        """Pull the cable out, or put it in again: who waits for an answer meanwhile is told nothing."""
        _ip(self.pid, "link", "set", INTERFACE, "up" if plugged else "down")


def on_two_hosts(
    act: Callable[[Host, Host], Any], own: Callable[[str], dict[Path, Path]] = lambda _: {}, seconds: float = 600
) -> Any:
    """What `act` returns, given two hosts.

    Args:
        act: called in a process of its own; returns what has a JSON form.
        own: given the name of a host, which folders it sees in the places of which others: `{place: folder}`.
        seconds: after which it hangs.
    """
    if shutil.which("ip") is None:
        refuse("there is no `ip` (iproute2) to lay a cable between hosts")

    def run() -> list[Any]:
        hosts: list[Host] = []
        with tempfile.NamedTemporaryFile("w") as known:  # there is no server of names
            print(
                "127.0.0.1 localhost", *(f"{where} {name}" for name, where in _ADDRESSES.items()), sep="\n", file=known
            )
            known.flush()
            try:
                try:
                    for name, address in _ADDRESSES.items():
                        hosts.append(Host(name, address, {Path("/etc/hosts"): Path(known.name), **own(name)}))
                    _connect(*hosts)
                except (PermissionError, subprocess.CalledProcessError) as error:
                    return [str(error), None]
                return [None, act(*hosts)]
            finally:
                for host in hosts:
                    if host.pid:
                        host.power_off()

    refusal, result = in_namespaces(run, seconds)
    if refusal is not None:
        refuse(f"hosts are not permitted here: {refusal}")
    return result


def _connect(a: Host, b: Host) -> None:
    """Lay the cable."""
    _ip(a.pid, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(b.pid))
    for host in (a, b):
        _ip(host.pid, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip(host.pid, "link", "set", INTERFACE, "up")
        _ip(host.pid, "link", "set", "lo", "up")


def _ip(pid: int, *words: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "--net", "ip", *words], check=True)
