"""On what file system a folder lies: texts of the kernel, and real mounts where this process may make them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard
from reshard.errors import StorageError
from reshard.storage import mounts
from reshard.storage.mounts import Mount, filesystem_type, is_network, is_shared, parse_mountinfo, volatile

if TYPE_CHECKING:
    from pathlib import Path

MOUNTINFO = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
36 35 98:0 /mnt1 /mnt/parent rw,noatime master:1 propagate_from:2 unbindable - ext3 /dev/root rw,errors=continue
40 22 0:40 / /data/a\040b\011c\134d rw shared:7 - nfs4 filer:/export\040x rw,vers=4.2
41 22 0:41 / /scratch rw - fuse.sshfs me@host:/ rw,user_id=0
42 22 0:42 / /tricky\040-\040ext4 rw - lustre mgs:/fs rw
43 22 0:43 / /over rw - overlay overlay rw,lowerdir=/a,volatile,upperdir=/b

no line at all
44 22 0:44 / /torn rw - xfs
x 22 0:45 / /number rw - xfs /dev/sda rw
"""


def test_what_mountinfo_says() -> None:
    assert parse_mountinfo(MOUNTINFO) == {
        22: Mount("/proc", "proc", "rw"),
        36: Mount("/mnt/parent", "ext3", "rw,errors=continue"),
        40: Mount("/data/a b\tc\\d", "nfs4", "rw,vers=4.2"),
        41: Mount("/scratch", "fuse.sshfs", "rw,user_id=0"),
        42: Mount("/tricky - ext4", "lustre", "rw"),
        43: Mount("/over", "overlay", "rw,lowerdir=/a,volatile,upperdir=/b"),
    }


@pytest.mark.skipif(shutil.which("findmnt") is None, reason="no findmnt here")
def test_this_systems_mounts_agree_with_another_reader(tmp_path: Path) -> None:
    for folder in ("/", "/proc/self", "/dev/shm", "/sys", str(tmp_path)):
        told = subprocess.run(
            ["findmnt", "-n", "-o", "FSTYPE", "-T", folder], capture_output=True, text=True, check=True
        )
        assert filesystem_type(folder) == told.stdout.split()[-1], folder  # the last one is on top


TYPES = {
    True: "nfs nfs4 lustre gpfs ceph cifs smb3 beegfs dpc afs 9p virtiofs fuse fuse.sshfs fuse.s3fs fuse.glusterfs",
    False: "ext4 xfs btrfs zfs tmpfs overlay fuseblk fuse.overlayfs fuse.fuse-overlayfs unknown fusectl nfsd proc",
}


@pytest.mark.parametrize(
    ("expected", "name"), [(expected, name) for expected in TYPES for name in TYPES[expected].split()]
)
def test_which_types_are_of_a_network(expected: bool, name: str) -> None:  # noqa: FBT001
    assert is_network(name) is expected


SHARED: list[tuple[str, str | None, bool]] = [
    ("data01", "{}/data01", True),
    ("data01/x/y", "{}/data01", True),
    ("data01", "{}/data01/", True),
    ("data012/x", "{}/data01", False),
    ("data01/../data012", "{}/data01", False),
    ("data01", "{}/data01/deeper", False),
    ("b", "{}/a,{}/b", True),
    ("b", " {}/a , {}/b ", True),
    ("link/x", "{}/data01", True),
    ("data01/x", "{}/link", True),
    ("data01/x", "{}/no/such/folder", False),
    ("a", "", False),
    ("a", ",,", False),
    ("a", None, False),
    ("a", ".", False),
    ("a", "a", False),
]


@pytest.mark.parametrize(("path", "shared_paths", "expected"), SHARED)
def test_what_the_user_says_is_shared(
    path: str,
    shared_paths: str | None,
    expected: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("data01", "data012", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data01")
    monkeypatch.chdir(tmp_path)
    told = None if shared_paths is None else shared_paths.format(*[str(tmp_path)] * 2)
    monkeypatch.setattr(mounts, "filesystem_type", lambda _path: "ext4")
    assert is_shared(tmp_path / path, told) is expected
    assert is_shared(path, told) is expected
    monkeypatch.setattr(mounts, "filesystem_type", lambda _path: "nfs4")
    assert is_shared(path, told)


def in_a_namespace(folder: Path, shell: str, code: str) -> str:
    """What Python prints in a mount namespace of its own, after some mounts."""
    python = f"{sys.executable} -c 'from reshard.storage.mounts import *; {code}'"
    command = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "-m", "sh", "-ec", f"{shell}\n{python}"]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    ended = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, check=False)
    if ended.returncode:
        assert "Traceback" not in ended.stderr, ended.stderr
        if "not permitted" in ended.stderr or "denied" in ended.stderr:
            pytest.skip("mounting is not permitted here")
        raise AssertionError(ended.stderr)
    return ended.stdout.strip()


def test_real_mounts(tmp_path: Path) -> None:
    here = filesystem_type(tmp_path)
    mount = "mkdir -p 'a b/ramfs/x' plain; mount -t ramfs none 'a b/ramfs'; ln -s 'a b/ramfs' link; mkdir -p link/y"
    paths = ["a b/ramfs", "a b/ramfs/no/such", "link/y", "link/no", "a b/ramfsx", "a b", "plain"]
    code = f'print([filesystem_type(p) for p in {paths!r}], volatile("link"))'.replace("'", '"')
    assert in_a_namespace(tmp_path, mount, code) == f"{['ramfs'] * 4 + [here] * 3} ramfs"


def test_a_mount_that_hides_another_is_the_one_that_counts(tmp_path: Path) -> None:
    mount = "mkdir -p a/b; mount -t ramfs none a/b; mount -t tmpfs none a; mkdir a/b"
    assert in_a_namespace(tmp_path, mount, 'print(filesystem_type("a/b"))') == "tmpfs"


def test_a_volatile_overlay(tmp_path: Path) -> None:
    mount = "mkdir low up work m; mount -t overlay none -o volatile,lowerdir=low,upperdir=up,workdir=work m"
    base = "mkdir t; mount -t tmpfs none t; cd t; "
    assert in_a_namespace(tmp_path, base + mount, 'print(volatile("m"))') == "a volatile overlay"
    (tmp_path / "t").rmdir()
    kept = mount.replace("volatile,", "")
    assert in_a_namespace(tmp_path, base + kept, 'print(volatile("m"))') == "None"


def test_what_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_type("/no/such/root/folder") == filesystem_type("/")
    monkeypatch.setattr(mounts, "parse_mountinfo", lambda _data: {})
    assert filesystem_type("/") == "unknown"
    assert volatile("/") is None


@pytest.mark.parametrize("name", ["iteration_00000002/manifest.json", "latest_checkpointed_iteration.txt"])
def test_an_input_output_error_of_a_network_file_system_is_no_damage(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    for iteration in (1, 2, 3):
        reshard.save(root, iteration, {"w": np.full(4, iteration)})
    reshard.rollback(root, 2)
    real = os.open

    def fail(path: str, *args: int, **more: int) -> int:
        if str(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(mounts, "filesystem_type", lambda _: "ext4")
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration != 2
    for filesystem in ("nfs4", "fuse.s3fs"):
        monkeypatch.setattr(mounts, "filesystem_type", lambda _, found=filesystem: found)
        with pytest.raises(StorageError, match="Input/output error"):
            reshard.open(root)
