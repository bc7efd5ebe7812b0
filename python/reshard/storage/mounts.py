"""The file system of a folder: whether other hosts can read it, and whether its content survives a power failure.

The kernel reports the mount of a path (`mnt_id` of an opened handle), and `/proc/self/mountinfo` describes the mount.
A comparison of path prefixes would be wrong where one mount hides another, and statfs(2) reports the same number for
every FUSE file system. If the system does not report the type, it is "unknown", which is neither shared nor volatile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

_NETWORK = re.compile(
    "nfs|nfs4|lustre|gpfs|ceph|cifs|smb3|smbfs|beegfs|dpc|afs|9p|virtiofs|glusterfs|orangefs|pvfs2|panfs|wekafs"
)
# FUSE file systems on a disk of this host. Most others (s3fs, sshfs, gcsfuse, juicefs) are network file systems.
_FUSE = re.compile(r"fuse|fuse\..*")
_LOCAL_FUSE = re.compile(r"fuse\.(overlayfs|fuse-overlayfs|lxcfs|squashfuse|squashfuse_ll|snapfuse)")
# Buckets of object stores. They have no rename: these programs copy each object of a folder and then remove it.
_BUCKET = re.compile(r"fuse\.(s3fs|ossfs|obsfs|cosfs|goofys|geesefs|rclone|gcsfuse|blobfuse2?|mountpoint-s3)")
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")  # space, tab, newline and backslash, as \040 and so on
_UNKNOWN = "unknown"


class Mount(NamedTuple):
    """One mounted file system.

    Attributes:
        point: where it is mounted.
        type: as mount(8) spells it: "ext4", "nfs4", "fuse.sshfs".
        options: options of the file system, separated by commas.
    """

    point: str
    type: str
    options: str


def mount_of(path: str | os.PathLike[str]) -> Mount:
    """The mount of a path. If the path does not exist, the mount of its nearest existing parent folder.

    Args:
        path: any path; links are followed.

    Returns:
        The mount; its type is "unknown" if the system does not report it.
    """
    try:
        handle = os.open(_nearest(path), os.O_PATH | os.O_CLOEXEC)
    except (OSError, AttributeError):  # not Linux
        return Mount("", _UNKNOWN, "")
    try:
        facts = Path(f"/proc/self/fdinfo/{handle}").read_bytes()
        lines = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return Mount("", _UNKNOWN, "")
    finally:
        with contextlib.suppress(OSError):
            os.close(handle)
    number = re.search(rb"^mnt_id:\s*([0-9]{1,18})$", facts, re.MULTILINE)
    line = number and re.search(rb"^%d .*$" % int(number[1]), lines, re.MULTILINE)  # of hundreds, in some containers
    found = list(parse_mountinfo(line[0]).values()) if line else []
    return found[0] if found else Mount("", _UNKNOWN, "")


def parse_mountinfo(data: bytes) -> dict[int, Mount]:
    r"""Parse the mounts in the format of `/proc/self/mountinfo`, by mount id; see proc_pid_mountinfo(5).

    Lines in another form are skipped.

    Example:
        >>> parse_mountinfo(b"36 35 98:0 /mnt1 /my\\040data rw,noatime master:1 - ext3 /dev/root rw,errors=continue")
        {36: Mount(point='/my data', type='ext3', options='rw,errors=continue')}
    """
    mounts = {}
    for line in data.split(b"\n"):
        before, _, after = line.partition(b" - ")  # the number of optional fields before it varies
        head, tail = before.split(b" "), after.split(b" ")
        if len(head) >= 6 and len(tail) == 3 and head[0].isdigit():
            point, kind = _unescaped(head[4]), _unescaped(tail[0])
            mounts[int(head[0][:18])] = Mount(point, kind, _unescaped(tail[2]))
    return mounts


def filesystem_type(path: str | os.PathLike[str]) -> str:
    """Type of a path's file system, as mount(8) spells it; "unknown" if the system does not report it.

    Example:
        >>> filesystem_type("/proc/self/no/such/folder")
        'proc'
    """
    return mount_of(path).type


def is_network(filesystem: str) -> bool:
    """Whether this type is a network file system. FUSE types count as network file systems, with a few exceptions.

    Example:
        >>> is_network("nfs4"), is_network("fuse.sshfs"), is_network("fuseblk"), is_network("xfs")
        (True, True, False, False)
    """
    if _FUSE.fullmatch(filesystem):
        return _LOCAL_FUSE.fullmatch(filesystem) is None
    return _NETWORK.fullmatch(filesystem) is not None


def renames_by_copy(filesystem: str) -> bool:
    """Whether this type renames a folder by copying its files one by one, so that a crash leaves a part of them.

    Example:
        >>> renames_by_copy("fuse.s3fs"), renames_by_copy("fuse.sshfs")
        (True, False)
    """
    return _BUCKET.fullmatch(filesystem) is not None


def is_shared(path: str | os.PathLike[str], shared_paths: str | None) -> bool:
    """Whether other hosts can read files below a path: on a network file system, or in a folder that the user lists.

    Args:
        path: it need not exist yet.
        shared_paths: folders separated by commas, the content of the environment variable SHARED_PATHS, or None. Real
            paths are compared, component by component: `/data01` does not match `/data012`.

    Example:
        >>> is_shared("/proc/checkpoints", "/data01, /proc"), is_shared("/proc/checkpoints", "/pro")
        (True, False)
    """
    real = Path(os.path.realpath(path))
    entries = [entry.strip() for entry in (shared_paths or "").split(",")]
    # A relative entry would be a different folder in processes with another working directory.
    admitted = any(real.is_relative_to(os.path.realpath(entry)) for entry in entries if entry.startswith("/"))
    return admitted or is_network(filesystem_type(path))


def volatile(path: str | os.PathLike[str]) -> str | None:
    """Why the content of a path is lost at a power failure even if it was synced; None if it is not.

    Example:
        >>> volatile("/proc") is None
        True
    """
    try:
        found = Path(path).stat()
    except OSError:
        return _volatile(path)
    return _volatile_folder(os.fspath(path), found.st_dev, found.st_ino)


@functools.lru_cache(maxsize=64)
def _volatile_folder(path: str, device: int, inode: int) -> str | None:  # noqa: ARG001  the key
    """Reading the mounts takes half a millisecond. What is mounted later has another device or inode."""
    return _volatile(path)


def _volatile(path: str | os.PathLike[str]) -> str | None:
    mount = mount_of(path)
    if mount.type in ("tmpfs", "ramfs"):
        return mount.type
    # With this option, an overlay ignores every sync. The kernel reports the option in two forms.
    is_volatile = not {"volatile", "fsync=volatile"}.isdisjoint(mount.options.split(","))
    return "a volatile overlay" if mount.type == "overlay" and is_volatile else None


def _nearest(path: str | os.PathLike[str]) -> str:
    """The path with links resolved, or the nearest folder above it that exists."""
    real = Path(os.path.realpath(path))
    found = next((folder for folder in (real, *real.parents) if folder.exists()), real)
    # Listed, and not only tested for existence: this mounts a folder that is mounted on demand.
    return f"{found}/." if found.is_dir() else str(found)


def _unescaped(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field))
