"""A Ceph cluster of one disk with its S3 gateway, for as long as a block lasts.

The programs are those of the Debian packages `radosgw ceph-mon ceph-osd ceph-mgr ceph-common`. They listen on
127.0.0.1 and keep their data in a temporary folder.
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.servers.s3 import BUCKET, KEY, SECRET, S3Server, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAMS = ("radosgw", "radosgw-admin", "monmaptool", "ceph", "ceph-mon", "ceph-osd", "ceph-mgr")
_START_SECONDS = 180
# Without `tcp_nodelay` each small request of a connection takes 40 ms.
# An encrypted channel, the default of the gateway, cannot be had where nobody is authenticated. Nothing is replicated.
_SETTINGS = """[global]
fsid = {id}
mon host = {monitor}
mon initial members = a
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd
rgw data = {folder}/rgw
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 2
bluestore block size = 8589934592
bluestore cache autotune = false
bluestore cache size = 268435456
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
"""


def need_programs() -> None:
    """Skip the test where a program of Ceph is not installed."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"needs Ceph, and there is no program {missing[0]}: "
            "apt-get install radosgw ceph-mon ceph-osd ceph-mgr ceph-common"
        )


@contextlib.contextmanager
def running() -> Iterator[S3Server]:
    """Start a cluster with an empty bucket, and end it with the block."""
    need_programs()
    with (
        tempfile.TemporaryDirectory(prefix="reshard-ceph-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as daemons,
    ):
        folder, port = Path(name), free_port()
        monitor = f"[v2:127.0.0.1:{port + 1},v1:127.0.0.1:{port + 2}]"
        for one in ("mon", "mgr", "osd", "rgw"):
            (folder / one).mkdir()
        cluster, disk = str(uuid.uuid4()), str(uuid.uuid4())
        settings = folder / "ceph.conf"
        settings.write_text(_SETTINGS.format(id=cluster, monitor=monitor, folder=folder, port=port))
        log = folder / "out"

        def call(program: str, *options: str) -> None:
            result = subprocess.run(
                [program, "-c", str(settings), *options], capture_output=True, timeout=_START_SECONDS, check=False
            )
            assert result.returncode == 0, (program, options, result.stderr[-2000:])

        def start(program: str, *options: str) -> None:
            with log.open("ab") as file:
                process = subprocess.Popen([program, "-c", str(settings), "-f", *options], stdout=file, stderr=file)
            daemons.callback(process.wait)
            daemons.callback(process.kill)

        subprocess.run(
            ["monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitor, str(folder / "map")],
            check=True,
            capture_output=True,
        )
        call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "map"))
        start("ceph-mon", "-i", "a")
        call("ceph", "osd", "new", disk)
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        start("ceph-mgr", "-i", "x")
        start("radosgw", "-n", "client.rgw")
        user = ("--uid", "test", "--display-name", "test", "--access-key", KEY, "--secret", SECRET)
        call("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        server = S3Server(port)
        _wait(server, log)
        yield server


def _wait(server: S3Server, log: Path) -> None:
    """Wait until the gateway answers and has the bucket."""
    end = time.monotonic() + _START_SECONDS
    last: object = None
    while time.monotonic() < end:
        try:
            last = server.request("PUT", f"/{BUCKET}")
            if last[0] in (200, 409):
                return
        except (OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.2)
    pytest.fail(f"the gateway of Ceph does not answer: {last}; {log.read_text(errors='replace')[-2000:]}")
