"""Conversions by the workers of a real cluster of Ray, of which processes are killed at random moments.

`RESHARD_CASES_FACTOR` multiplies the kills, with other moments on every run: 10 are 200 kills and more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard

pytest.importorskip("ray", reason="pip install 'reshard[ray]'")

from tests.helpers.ports import unused_port
from tests.helpers.ray_cluster import RayCluster, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

FACTOR = os.environ.get("RESHARD_CASES_FACTOR")
SEED = random.randrange(1 << 32) if FACTOR else 1
PATIENCE_S = 240
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "w*", "cut": ["tp", None]}, {"match": "*"}]}
# Conversions into a file, a folder and an iteration of a root, as in the fixture `alone`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "file": ("{}.safetensors", {}),
    "folder": ("{}", {}),
    "root": ("{}", {"layout": LAYOUT, "iteration": 4}),
}

LEAD = """
import json, sys, ray, reshard
from reshard.ray import Ray
ray.init(address=sys.argv[2], log_to_driver=False, logging_level=40)
for line in sys.stdin:
    dst, options = json.loads(line)
    report = reshard.convert(sys.argv[1], dst, on=Ray(retries=20), **options)
    print(sum(len(one.retried) for one in report.shares), file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running(3, client=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "src.safetensors"
    rng = np.random.default_rng(5)
    reshard.save_file({f"w{i}": rng.standard_normal((4096, 1024)).astype(np.float32) for i in range(8)}, path)
    return path


@pytest.fixture(scope="module")
def alone(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What one process writes, of each kind."""
    folder = tmp_path_factory.mktemp("alone")
    for kind, (name, options) in KINDS.items():
        reshard.convert(source, folder / kind / name.format("dst"), **options)
    return {kind: content(folder / kind) for kind in KINDS}


def content(folder: Path) -> dict[str, bytes]:
    """The files below a folder, of a root those with tensors; others have times."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    is_root = any("iteration_" in name for name in files)
    return {name: path.read_bytes() for name, path in files.items() if not is_root or name.endswith(".safetensors")}


def n_cases(n: int) -> int:
    return n * int(FACTOR or 1)


def until(is_so: Callable[[], object], process: subprocess.Popen[str]) -> bool:
    """Whether it became so before the process ended."""
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "nothing happens"
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


def hear(answers: IO[str], said: list[str]) -> None:
    said.append(answers.readline())


def is_over_or_begun(hearing: threading.Thread, cluster: RayCluster) -> bool:
    return not hearing.is_alive() or bool(cluster.workers())


def test_workers_that_are_killed_at_random_change_nothing(
    cluster: RayCluster, source: Path, alone: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    rng, n_killed, n_retried, n_conversions = random.Random(SEED), 0, 0, 0
    lead = subprocess.Popen(
        [sys.executable, "-c", LEAD, str(source), cluster.address],
        env=cluster.environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    told, answers = lead.stdin, lead.stderr
    assert told is not None
    assert answers is not None
    try:
        while n_killed < n_cases(14):
            kind = rng.choice(list(KINDS))
            name, options = KINDS[kind]
            folder = tmp_path / kind
            print(json.dumps([str(folder / name.format("dst")), options]), file=told, flush=True)
            said: list[str] = []
            hearing = threading.Thread(target=functools.partial(hear, answers, said))
            hearing.start()
            for _ in range(rng.randint(1, 4)):
                hearing.join(rng.uniform(0, 0.4))
                until(functools.partial(is_over_or_begun, hearing, cluster), lead)
                if workers := cluster.workers():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(workers), signal.SIGKILL)
                        n_killed += 1
            hearing.join(PATIENCE_S)
            assert said, f"seed {SEED}: no answer"
            assert said[0].strip().isdigit(), f"seed {SEED}: {said}"
            n_retried += int(said[0])
            n_conversions += 1
            assert content(folder) == alone[kind], f"seed {SEED}"
            shutil.rmtree(folder)
            assert not list(tmp_path.iterdir())
    finally:
        lead.kill()
        lead.communicate()
    assert 0.5 * n_killed < n_retried <= n_killed  # a worker can end its share in the moment in which it is killed
    print(f"{n_conversions} conversions, {n_killed} workers killed, {n_retried} shares begun again, seed {SEED}")


@pytest.mark.parametrize("what", ["driver", "connection"])
def test_a_driver_that_goes_at_random_publishes_all_or_nothing(
    cluster: RayCluster, source: Path, alone: dict[str, dict[str, bytes]], tmp_path: Path, what: str
) -> None:
    """A worker is killed before it. The next conversion begins while workers of the first one may still write."""
    rng, ends, states = random.Random(SEED + 1), [], []
    whole = start(cluster, ["convert", str(source), str(tmp_path / "whole")], "ray")
    until(cluster.workers, whole)
    begun = time.monotonic()
    whole.communicate(timeout=PATIENCE_S)
    seconds = time.monotonic() - begun
    for _ in range(n_cases(4 if what == "driver" else 2)):
        kind = rng.choice(list(KINDS))
        name, options = KINDS[kind]
        folder = tmp_path / kind
        folder.mkdir()
        words = ["convert", str(source), str(folder / name.format("dst"))]
        if options:
            (tmp_path / "layout.json").write_text(json.dumps(LAYOUT))
            words += ["--layout", str(tmp_path / "layout.json"), "--iteration", "4"]
        with contextlib.ExitStack() as stack:
            address, cut = "ray", None
            if what == "connection":
                port, cut = stack.enter_context(forwarded(int(cluster.client.rpartition(":")[2])))
                address = f"ray://127.0.0.1:{port}"
            driver = start(cluster, words, address)
            if rng.random() < 0.8:
                until(cluster.workers, driver)
            if rng.random() < 0.5 and (workers := cluster.workers()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(workers), signal.SIGKILL)
            time.sleep(rng.uniform(0, seconds))
            if cut is None:
                driver.kill()
            else:
                cut()
            errors = driver.communicate(timeout=PATIENCE_S)[1]
        ends.append(driver.returncode)
        place = f"seed {SEED}, case {len(ends)}, {kind}, ended with {driver.returncode}: {errors}"
        found = content(folder)
        if driver.returncode == 1:
            assert "Ray cluster at" in errors, place
            assert "Traceback" not in errors, place
            assert found == {}, place
            assert not list(folder.iterdir()), place
        visible = {name: data for name, data in found.items() if not name.startswith(".")}
        states.append("shares" if any(folder.rglob("*share-*.staging")) else "nothing")
        is_published = (folder / name.format("dst")).exists() and (
            kind != "root" or (folder / "dst" / "iteration_00000004").exists()
        )
        if is_published:
            states[-1] = "published"
            for shares in (*folder.glob(".dst*.share-*.staging"), *folder.glob("dst/.staging/share-*")):  # links
                shutil.rmtree(shares)
            assert visible == alone[kind], place
            assert reshard.verify(folder / name.format("dst")).ok, place
            words.append("--overwrite")
        elif kind != "root":
            assert visible == {}, place
        again = start(cluster, words, "ray")
        said = again.communicate(timeout=PATIENCE_S)
        assert again.returncode == 0, (place, said)
        assert content(folder) == alone[kind], place
        left = sorted(path.name for path in folder.iterdir())
        assert left == [name.format("dst")], (place, left)
        shutil.rmtree(folder)
    print(f"processes that led ended with {Counter(ends)} and left {Counter(states)}, seed {SEED}")


def start(cluster: RayCluster, words: list[str], address: str) -> subprocess.Popen[str]:
    environment = cluster.environment | {"RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "reshard", *words, "--on", address],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def forwarded(port: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """A port that leads to another one, and what cuts its connections for good."""
    own = unused_port()
    program = (
        "import asyncio, sys\n"
        "own, other = map(int, sys.argv[1:])\n"
        "async def pass_on(reader, writer):\n"
        "    while data := await reader.read(1 << 16):\n"
        "        writer.write(data)\n"
        "        await writer.drain()\n"
        "    writer.close()\n"
        "async def connected(reader, writer):\n"
        "    there, back = await asyncio.open_connection('127.0.0.1', other)\n"
        "    await asyncio.gather(pass_on(reader, back), pass_on(there, writer), return_exceptions=True)\n"
        "async def serve():\n"
        "    await (await asyncio.start_server(connected, '127.0.0.1', own)).serve_forever()\n"
        "asyncio.run(serve())\n"
    )
    between = subprocess.Popen([sys.executable, "-c", program, str(own), str(port)])

    def cut() -> None:
        between.kill()
        between.wait()

    try:
        end = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < end
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", own)).close()
                break
            time.sleep(0.01)
        yield own, cut
    finally:
        cut()
