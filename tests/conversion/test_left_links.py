"""Links of a conversion that was killed after the rename: the next command removes them, and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard.commit import protocol
from reshard.conversion import shares
from reshard.errors import DestinationExistsError
from reshard.storage.changes import try_lock
from reshard.storage.location import locate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.disk

LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
# The name of the destination, its options, and whether its folder is there before.
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "file": ("dst.safetensors", {}, False),
    "folder": ("dst", {"to": "huggingface"}, False),
    "filled folder": ("dst", {"to": "huggingface"}, True),
    "several shares": ("dst.pt", {"part": "model"}, False),
    "root": ("dst", {"layout": LAYOUT, "iteration": 7}, False),
    "checkpoint1": ("dst", {"to": "checkpoint1", "layout": LAYOUT, "files": {"prefix": "run"}, "iteration": 7}, False),
}


def is_killed(act: Any) -> bool:
    """Do something in a process that is killed before it removes a folder of shares."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    try:
        shares.remove_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined]
        act()
    finally:
        os._exit(99)


def folder_of_shares(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.rglob("*share-*") if path.is_dir()]


@pytest.fixture(params=KINDS)
def left(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A source, a destination that was published by two shares, of which links are left, and its options."""
    name, options, is_there = KINDS[request.param]
    source, target = tmp_path / "src.safetensors", tmp_path / name
    n = 1 << 19 if request.param == "several shares" else 64
    reshard.save_file({f"w{i}": np.arange(n, dtype=np.float32) + i for i in range(4)}, source)
    if is_there:
        target.mkdir()
    reshard.convert(source, target, share=(0, 2), **options)
    assert is_killed(lambda: reshard.convert(source, target, share=(1, 2), **options))
    assert len(folder_of_shares(tmp_path)) == 1
    assert reshard.diff(source, target).equal
    return source, target, options


@pytest.mark.parametrize("options", [{}, {"share": (1, 2)}, {"overwrite": True}])
def test_the_next_conversion_removes_what_is_left(
    left: tuple[Path, Path, dict[str, Any]], options: dict[str, Any], tmp_path: Path
) -> None:
    source, target, before = left
    if "overwrite" in options:
        reshard.convert(source, target, **before, **options)
    else:
        with pytest.raises(DestinationExistsError):
            reshard.convert(source, target, **before, **options)
    assert folder_of_shares(tmp_path) == []
    assert reshard.diff(source, target).equal


def test_what_is_locked_or_not_published_stays(left: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    source, target, options = left
    (folder,) = folder_of_shares(tmp_path)

    def again() -> None:
        with pytest.raises(DestinationExistsError):
            reshard.convert(source, target, **options)

    with try_lock(folder) as is_ours:  # a process that publishes
        assert is_ours
        again()
    assert folder.exists()
    (folder / "more").write_bytes(b"of a share that is written")
    again()
    assert folder.exists()
    (folder / "more").unlink()
    for path in [path for path in folder.rglob("*") if path.is_file()]:  # as another conversion would have it
        shutil.copy(path, path.with_suffix(".copy"))
        path.with_suffix(".copy").replace(path)
    again()
    assert folder.exists()
    for path in [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("share-")]:
        path.unlink()  # a share that begins has no file yet
    again()
    assert folder.exists()


def test_the_next_save_removes_what_a_conversion_has_left_in_its_root(tmp_path: Path) -> None:
    source, root = tmp_path / "src.safetensors", tmp_path / "root"
    reshard.save_file({"w": np.arange(8.0)}, source)
    options: dict[str, Any] = {"layout": LAYOUT, "iteration": 7, "overwrite": True}
    reshard.convert(source, root, share=(0, 2), **options)
    (unfinished,) = folder_of_shares(tmp_path)
    reshard.save(root, 1, {"w": np.arange(8.0)})
    protocol.release(locate(root))
    assert folder_of_shares(tmp_path) == [unfinished]
    assert is_killed(lambda: reshard.convert(source, root, share=(1, 2), **options))
    assert folder_of_shares(tmp_path) == [unfinished]
    reshard.save(root, 8, {"w": np.arange(8.0)})
    assert folder_of_shares(tmp_path) == []
    with reshard.open(root / "iteration_00000007") as checkpoint:
        assert np.array_equal(checkpoint.read("w"), np.arange(8.0))
