"""The power fails before every change of a save, on a disk image with ext4: what was not synced is lost.

The file system is shut down without writing its log (as `xfs_io -x -c shutdown` does), unmounted and mounted again.
The image is mounted in a namespace of its own: a file system that is mounted elsewhere too does not restart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers import original_reader
from tests.helpers.namespaces import in_namespaces, refuse
from tests.helpers.small_saves import stopped_at_step

import reshard
from reshard import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
_WITHOUT_THE_LOG = struct.pack("I", 2)


class Disk:
    """A file with an ext4 file system, mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mounted_at = folder / "image", folder / "mounted"
        self.mounted_at.mkdir()
        with self.image.open("wb") as file:
            file.truncate(32 << 20)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1", self.image)
        self.mount()

    @property
    def root(self) -> Path:
        """The checkpoint root."""
        return self.mounted_at / "root"

    def mount(self) -> None:
        """Replay the journal."""
        _run("mount", "-o", "loop", self.image, self.mounted_at)

    def unmount(self) -> None:
        """Write what was not synced, unless the power has failed."""
        _run("umount", self.mounted_at)

    def lose_power(self) -> None:
        """Lose what was not synced."""
        handle = os.open(self.mounted_at, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, _WITHOUT_THE_LOG)
        finally:
            os.close(handle)
        self.unmount()
        self.mount()


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def with_disk(folder: Path, act: Callable[[Disk], None]) -> None:
    """Call `act` in a process that has a disk."""

    def run() -> str | None:
        try:
            disk = Disk(folder)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            return str(error)
        act(disk)
        return None

    refusal = in_namespaces(run, 300)
    if refusal is not None:
        refuse(f"no disk image can be mounted here: {refusal}")


def save(root: Path, iteration: int) -> None:
    content = np.full(50_000, iteration, np.float32)
    reshard.save(root, iteration, {"w": content}, {"m.w": content + 1}, extra={"note": iteration, "array": content})


def in_child(root: Path, iteration: int, number: int) -> bool:
    """Save in a process that ends before the change with this number; whether the save ended."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), stopped_at_step(number, partial(os._exit, 1)):
            save(root, iteration)
            os._exit(0)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in {0, 1}
    return status == 0


def found(root: Path) -> int:
    """The iteration that a restart takes; its content is compared, and that of the original's rule too."""
    with reshard.open(root) as checkpoint:
        number, state = checkpoint.iteration, checkpoint.load()
    assert number is not None
    assert np.array_equal(state["w"], np.full(50_000, number, np.float32))
    assert np.array_equal(state["m.w"], np.full(50_000, number + 1, np.float32))
    tracked = int((root / original_reader.TRACKER).read_text())
    assert np.all(original_reader.read_tree(root)["w"] == tracked)
    return number


@pytest.mark.slow
@pytest.mark.parametrize("iteration", [200, 300], ids=["replacement", "new"])
def test_power_fails_before_every_change_of_a_save(iteration: int, tmp_path: Path) -> None:
    with_disk(tmp_path, partial(check_every_change, iteration))


def check_every_change(iteration: int, disk: Disk) -> None:
    for first in (100, 200):
        assert in_child(disk.root, first, 1000)
    disk.unmount()
    base = disk.image.with_name("base")
    shutil.copy(disk.image, base)
    outcomes = []
    for number in range(100):
        shutil.copy(base, disk.image)
        disk.mount()
        has_ended = in_child(disk.root, iteration, number)
        disk.lose_power()
        outcomes.append(found(disk.root))
        assert outcomes[-1] in ({iteration} if has_ended else {200, iteration})
        assert in_child(disk.root, 400, 1000)
        disk.lose_power()
        assert found(disk.root) == 400
        disk.unmount()
        if has_ended:
            break
    assert outcomes == sorted(outcomes)
    assert number > 10


@pytest.mark.slow
def test_the_disk_loses_what_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(disk: Disk) -> None:
        assert in_child(disk.root, 100, 1000)
        monkeypatch.setattr(_core, "sync_together", lambda *_: None)
        monkeypatch.setattr(os, "fsync", lambda _: None)
        assert in_child(disk.root, 200, 1000)
        disk.lose_power()
        assert found(disk.root) == 100

    with_disk(tmp_path, act)
