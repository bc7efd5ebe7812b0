"""A forked child has none of its parent's threads: whatever the parent has done before, nothing may wait for them."""

from __future__ import annotations

import os
import signal
import warnings
from typing import TYPE_CHECKING

import numpy as np

import reshard
from reshard import _core

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
    index.prove()
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
