"""A forked child has none of its parent's threads: whatever the parent has done before, nothing may wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard
from reshard import _core
from reshard.write import shard_files

if TYPE_CHECKING:
    from pathlib import Path


def everything(folder: Path) -> None:
    """Each call of the core that computes on several threads."""
    folder.mkdir()
    arrays = {key: np.full((64, 512), n, np.float32) for n, key in enumerate("abc")}
    reshard.save(folder / "root", 1, arrays)
    with reshard.open(folder / "root") as checkpoint:
        assert (checkpoint.load(verify="full")["c"] == 2).all()
    boxes = {key: reshard.Shard(array, (64, 512), (0, 0)) for key, array in arrays.items()}
    reshard.save(folder / "boxes", 1, boxes, blocking=False).result(30)  # proves what the boxes cover
    assert reshard.verify(folder / "boxes").ok
    reshard.convert(folder / "boxes", folder / "hf")
    index = _core.Index()
    file = index.add_file(str(folder / "hf" / "model.safetensors"))
    for key in arrays:
        index.add_whole(key, file)
    index.check_coverage()
    assert index.check() == []


def test_a_forked_child_does_all_that_its_parent_did(tmp_path: Path) -> None:
    everything(tmp_path / "parent")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: that they are there is the point
        pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # ends a child that waits for ever
        status = 1
        try:
            everything(tmp_path / "child")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_that_is_forked_while_memory_is_touched_saves(tmp_path: Path) -> None:
    big = np.ones(20 << 20, np.uint8)
    reshard.save(tmp_path / "parent", 1, {"w": big})
    shard_files._idle.clear()
    with shard_files._buffers() as buffers:
        buffers.prepare(32 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        status = 1
        try:
            reshard.save(tmp_path / "child", 1, {"w": big})
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


WORKER = """
import multiprocessing, sys
import numpy as np, reshard

def save_at_the_end(root):
    reshard.save(root, 1, {"w": np.ones(8 << 20, np.float32)}, blocking=False)

if __name__ == "__main__":
    method, parent_root, root = sys.argv[1:]
    reshard.save(parent_root, 1, {"w": np.ones(1)}, blocking=False).result(60)
    worker = multiprocessing.get_context(method).Process(target=save_at_the_end, args=(root,))
    worker.start()
    worker.join(60)
    sys.exit(worker.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("fails", ["", "fails"])
def test_background_save_of_an_ending_worker_is_published_or_reported(tmp_path: Path, method: str, fails: str) -> None:
    script, root = tmp_path / "worker.py", tmp_path / "root"
    script.write_text(WORKER)
    if fails:
        root.write_text("no folder")
    command = [sys.executable, "-W", "ignore", str(script), method, str(tmp_path / "of the parent"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    if not fails:
        assert reshard.verify(root).ok
        assert [file.read_text() for file in (root / ".writers").iterdir()] == ['{"released":true}']
    assert done.stderr.count("the save of iteration 1 failed in the background") == bool(fails)
