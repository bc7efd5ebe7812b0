"""Workers of a cluster send the parts of one file of a bucket; workers and drivers are killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard

pytest.importorskip("ray", reason="pip install 'reshard[ray]'")

from tests.helpers.ray_cluster import RayCluster, running
from tests.servers.s3 import BUCKET

from reshard.storage import remote
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`"),
]

SEED = 23


@pytest.fixture(scope="module")
def cluster(s3_server: S3Server) -> Iterator[RayCluster]:
    """Its hosts have the variables of the bucket."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in s3_server.environment.items():
                patch.setenv(name, value)
            cluster = stack.enter_context(running(3))
        yield cluster


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of 302 MB, as one process writes it."""
    rng, folder = np.random.default_rng(3), tmp_path_factory.mktemp("model")
    reshard.save_file(
        {f"w{i}": rng.integers(0, 256, (8192, 4096), np.uint8) for i in range(9)}, folder / "made.safetensors"
    )
    reshard.convert(folder / "made.safetensors", folder / "src.safetensors")
    return folder / "src.safetensors"


@pytest.fixture
def folder(s3: S3Server, tmp_path: Path) -> Location:
    del s3
    return locate(f"s3://{BUCKET}/ray-{os.getpid()}-{tmp_path.name}")


def start(cluster: RayCluster, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reshard", "convert", *map(str, arguments), "--on", "ray", "--json"]
    return subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, output + errors
    return json.loads(output)


def until_a_worker_works(cluster: RayCluster, process: subprocess.Popen[str]) -> list[int]:
    end = time.monotonic() + 120
    while not (found := cluster.workers()) and process.poll() is None:
        assert time.monotonic() < end, "no worker does a share"
        time.sleep(0.002)
    return found


def below(folder: Location) -> tuple[set[str], list[str]]:
    """The files below a folder, without the records of publications, and the unfinished uploads."""
    assert isinstance(folder.store, RemoteStore)
    names = {name for name, _ in folder.store.below(folder.path) if not name.endswith("/published.json")}
    uploads, reason = folder.store.unfinished_uploads([folder.path], is_file=False, wait_s=20)
    assert reason is None
    return names, [one.key for one in uploads]


@pytest.mark.parametrize("name", ["dst.safetensors", "dst"])
def test_one_file_is_written_by_all_workers_also_if_some_are_killed(
    cluster: RayCluster, source: Path, folder: Location, name: str
) -> None:
    rng, file = random.Random(SEED), folder / name if name.endswith("s") else folder / name / "model.safetensors"
    n_all = 0
    for n_kills in (0, 1, 3):
        conversion = start(cluster, source, folder / name, "--overwrite")
        for _ in range(n_kills):
            if workers := until_a_worker_works(cluster, conversion):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(workers), signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.3))
        report = ended(conversion)
        assert len(report["shares"]) == 12
        assert len({one["process"] for one in report["shares"]}) > 1
        sizes = [one["n_bytes"] for one in report["shares"]]
        assert (sum(sizes), min(sizes) > 0) == (source.stat().st_size, True)
        n_retried = sum(len(one["retried"]) for one in report["shares"])
        assert n_retried <= n_kills  # a worker can end its share in the moment in which it is killed
        assert report["remote"]["n_lost_workers"] == n_retried
        n_all += n_retried
        assert b"".join(file.pieces()) == source.read_bytes()
        assert below(folder) == ({file.path.removeprefix(f"{folder.path}/")}, [])
    assert n_all > 0


@pytest.mark.parametrize("name", ["dst.safetensors", "dst"])
def test_a_driver_that_is_interrupted_leaves_nothing_and_what_a_killed_one_leaves_is_replaced(
    cluster: RayCluster, source: Path, folder: Location, name: str
) -> None:
    rng = random.Random(SEED)
    for _ in range(2):
        conversion = start(cluster, source, folder / name)
        until_a_worker_works(cluster, conversion)
        time.sleep(rng.uniform(0, 0.5))
        conversion.send_signal(signal.SIGINT)
        output, errors = conversion.communicate(timeout=120)
        assert conversion.returncode == 130, output + errors
        assert below(folder) == (set(), [])
    for _ in range(3):
        conversion = start(cluster, source, folder / name, "--overwrite")
        until_a_worker_works(cluster, conversion)
        time.sleep(rng.uniform(0, 0.7))
        conversion.kill()
        conversion.communicate(timeout=120)
    refused = start(cluster, source, folder / name)
    output, errors = refused.communicate(timeout=120)
    assert refused.returncode == 1
    assert "overwrite" in output + errors
    ended(start(cluster, source, folder / name, "--overwrite"))
    file = folder / name if name.endswith("s") else folder / name / "model.safetensors"
    assert b"".join(file.pieces()) == source.read_bytes()
    assert below(folder) == ({file.path.removeprefix(f"{folder.path}/")}, [])


def test_an_iteration_of_a_root_is_written_by_all_workers(
    cluster: RayCluster, source: Path, folder: Location, tmp_path: Path
) -> None:
    """Workers and drivers are killed, and drivers are interrupted."""
    rng, as_root = random.Random(SEED), ("--to", "checkpoint2", "--overwrite")
    reshard.convert(source, tmp_path / "alone", to="checkpoint2")
    files = {one.name: one.read_bytes() for one in (tmp_path / "alone/iteration_00000000").iterdir()}
    for sent in (None, "worker", signal.SIGINT, signal.SIGKILL, None):
        conversion = start(cluster, source, folder, *as_root)
        if sent is not None:
            workers = until_a_worker_works(cluster, conversion)
            time.sleep(rng.uniform(0, 0.5))
        if isinstance(sent, signal.Signals):
            conversion.send_signal(sent)
            conversion.communicate(timeout=120)
            assert conversion.returncode == (130 if sent == signal.SIGINT else -sent)
            continue
        if sent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
        report = ended(conversion)
        assert len({one["process"] for one in report["shares"]}) > 1
        with reshard.open(folder) as opened:
            place = locate(opened.path)
        for name in files.keys() - {"manifest.json", ".tracked"}:
            assert b"".join((place / name).pieces()) == files[name], name
        assert reshard.verify(folder).ok
        assert below(folder)[1] == []
