"""The memory of the workers of a real cluster of Ray, and of the process that leads: a file of 1 TB that is a hole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard

pytest.importorskip("ray", reason="pip install 'reshard[ray]'")

from tests.helpers.memory import sparse_model
from tests.helpers.ray_cluster import RayCluster, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PATIENCE_S = 240
LOOK_S = float(os.environ.get("RESHARD_LOOK_S", "10"))  # how long the workers are looked at
BEYOND = 64 << 20
BUDGETS = {"convert": 64 << 20, "diff": 128 << 20, "stats": 0}
MOST_WRITTEN = 4 << 30
LEAD = """
import sys, ray, reshard
from reshard.verbs.stats import stats
from reshard.ray import Ray
verb, small, large, dst, address = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level=40)

def work(src, dst):
    if verb == "convert":
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
        reshard.convert(src, dst, on=Ray(), memory="64MiB", to="safetensors", layout=layout)
    elif verb == "diff":
        reshard.diff(src, src.replace(".safetensors", ".other.safetensors"), on=Ray(), memory="128MiB")
    else:
        stats(src, on=Ray())

work(small, dst + ".small")
open(small + ".done", "x").close()
sys.stdin.readline()
work(large, dst)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running(3) as cluster:
        yield cluster


def private(pid: int) -> int:
    """Bytes that only this process has; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def written(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


@pytest.mark.parametrize("verb", ["convert", "diff", "stats"])
def test_processes_need_no_more_memory_for_a_terabyte(cluster: RayCluster, tmp_path: Path, verb: str) -> None:
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    reshard.save_file({f"w{i}": np.ones((4096, 1024), np.float32) for i in range(8)}, small)
    for path in (large, tmp_path / "large.other.safetensors"):
        sparse_model(path, 10**12 >> 20)
    os.link(small, tmp_path / "small.other.safetensors")
    errors = tmp_path / "small.errors"
    with errors.open("w") as output:
        lead = subprocess.Popen(
            [sys.executable, "-c", LEAD, verb, str(small), str(large), str(tmp_path / "dst"), cluster.address],
            env=cluster.environment, stdin=subprocess.PIPE, stderr=output, text=True,
        )  # fmt: skip
    known: set[int] = set()
    try:
        end = time.monotonic() + PATIENCE_S
        while not (tmp_path / "small.safetensors.done").exists():
            assert time.monotonic() < end, errors.read_text()
            assert lead.poll() is None, errors.read_text()
            known |= set(cluster.workers())
            time.sleep(0.01)
        before = {pid: size for pid in (*known, lead.pid) if (size := private(pid))}
        assert lead.stdin is not None
        print(file=lead.stdin, flush=True)
        peaks: dict[int, int] = {}
        end, begun = time.monotonic() + PATIENCE_S, 0.0
        while not begun or time.monotonic() < begun + LOOK_S:
            assert time.monotonic() < end, "no worker does a share"
            assert lead.poll() is None, errors.read_text()
            workers = cluster.workers()
            begun = begun or (time.monotonic() if workers else 0.0)
            for pid in (*workers, lead.pid):
                peaks[pid] = max(peaks.get(pid, 0), private(pid))
            if verb == "convert" and written(tmp_path) > MOST_WRITTEN:
                break
            time.sleep(0.02)
        # An interrupt removes what was written.
        lead.send_signal(signal.SIGINT)
        lead.wait(PATIENCE_S)
    finally:
        lead.kill()
        lead.communicate()
    more = {pid: (peaks[pid] - before[pid]) >> 20 for pid in peaks if pid in before}
    in_mib = [{pid: size >> 20 for pid, size in sizes.items()} for sizes in (before, peaks)]
    print(f"{verb}: process {lead.pid} leads, MiB before {in_mib[0]}, peaks {in_mib[1]}")
    assert len(more) > 2
    assert lead.pid in more
    assert max(more.values()) << 20 <= BUDGETS[verb] + BEYOND, more
    assert {path.name for path in tmp_path.iterdir() if "small" not in path.name} == {
        "large.safetensors",
        "large.other.safetensors",
    }
