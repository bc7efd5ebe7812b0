"""The gateway of a real Ceph cluster: an older interface of S3, of whose conditions only some hold."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.bucket_runs import arrays, check, iterations, run, train
from tests.helpers.small_saves import fork
from tests.servers import ceph
from tests.servers.s3 import BUCKET

import reshard
from reshard.commit import leases, log, log_records, protocol, roots
from reshard.errors import ClaimedError, DamagedFileError, StorageError
from reshard.storage import remote
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.slow(disk=False)
ROOT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[S3Server]:
    ceph.need_programs()
    if not remote.is_available():
        pytest.skip("the core was compiled without the feature `remote`")
    with ceph.running() as server:
        yield server


@pytest.fixture(autouse=True)
def _environment(cluster: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    protocol.release()


def test_a_run_keeps_the_best_pins_and_prunes() -> None:
    url = f"{ROOT}/keep/run"
    for iteration, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8)):
        retention = reshard.Retention(keep=1, best=("loss", 1))
        report = reshard.save(url, iteration, arrays(iteration), metrics={"loss": loss}, retention=retention)
        assert report is not None
        assert report.warnings == ()
        check(url, iteration)
    assert iterations(url) == [2, 4]
    reshard.pin(url, 2)
    assert reshard.prune(url, keep=1).iterations == ()
    reshard.unpin(url, 2)
    assert reshard.prune(url, keep=1).iterations == (2,)
    left = {name.partition("/")[0] for name, _ in locate(url).store.below(url)}  # type: ignore[attr-defined]
    assert {roots.parse_iteration_folder(name) for name in left if name.startswith("iteration")} == {4}
    assert "iteration 4, complete" in run("watch", url, "--once")
    assert "not part of a checkpoint" not in run("inspect", url)
    assert "complete" in run("verify", url)


def test_a_run_resumes_and_is_converted_and_back(tmp_path: Path) -> None:
    url = f"{ROOT}/train/run"
    assert train(url, 6)[0] == 0
    assert train(url, 12)[0] == 6
    assert iterations(url) == [10, 12]
    assert train(tmp_path / "whole", 12)[0] == 0
    assert reshard.diff(url, tmp_path / "whole").equal
    assert reshard.verify(url).ok
    run("convert", url, str(tmp_path / "hf"), "--to", "huggingface")
    run("convert", str(tmp_path / "hf"), f"{ROOT}/train/hf", "--to", "huggingface")
    run("convert", f"{ROOT}/train/hf", f"{ROOT}/train/dcp", "--to", "dcp")
    run("convert", str(tmp_path / "hf"), f"{ROOT}/train/dcp", "--to", "dcp", "--overwrite")
    for copy in ("hf", "dcp"):
        assert reshard.diff(f"{ROOT}/train/{copy}", tmp_path / "hf").equal, copy


def test_a_mirror_is_resumed_from(tmp_path: Path) -> None:
    url = f"{ROOT}/mirror/run"
    assert train(tmp_path / "a", 6, mirror=url)[0] == 0
    assert iterations(url)[-1] == 6  # retention may remove an earlier one before its turn
    assert train(tmp_path / "b", 8, mirror=url)[0] == 6
    assert iterations(url)[-1] == 8


def test_a_file_in_parts_is_read_as_it_was_opened(cluster: S3Server) -> None:
    """The gateway has no condition on the end of an upload; that of a read holds."""
    name = "parts/model.safetensors"
    data = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)
    reshard.save_file({"w": data}, f"{ROOT}/{name}")
    with reshard.safe_open(f"{ROOT}/{name}", framework="np") as file:
        rows = file.get_slice("w")
        assert np.array_equal(rows[: 1 << 20], data[: 1 << 20])
        cluster.put(name, cluster.request("GET", f"/{BUCKET}/{name}")[1][:-1] + b"0")
        with pytest.raises(DamagedFileError, match="was replaced while it was read"):
            rows[20 << 20 :]


def test_shares_send_the_parts_of_one_file(tmp_path: Path) -> None:
    source, alone = tmp_path / "source.safetensors", tmp_path / "model.safetensors"
    reshard.save_file({"w": np.random.default_rng(1).integers(0, 256, 60 << 20, np.uint8)}, source)
    reshard.convert(source, alone)
    target = locate(f"{ROOT}/shares/model.safetensors")
    store: Any = target.store

    def uploads() -> list[Any]:
        return list(store.unfinished_uploads([target.path], is_file=True, wait_s=20)[0])

    for index in (2, 0, 1):
        assert target.kind() is None
        pending = reshard.convert(source, str(target), share=(index, 3)).pending
    assert pending == ()
    assert b"".join(target.pieces()) == alone.read_bytes()
    assert uploads() == []
    reshard.convert(source, str(target), share=(1, 2), overwrite=True)
    (one,) = uploads()
    store.end_upload(target.path, one.upload_id)
    with pytest.raises(StorageError, match="NoSuchUpload"):
        reshard.convert(source, str(target), share=(0, 2), overwrite=True)
    for index in (0, 1):
        reshard.convert(source, str(target), share=(index, 2), overwrite=True)
    reshard.convert(source, str(target), share=(0, 4), overwrite=True)
    assert len(uploads()) == 1
    reshard.convert(source, str(target), overwrite=True)
    assert b"".join(target.pieces()) == alone.read_bytes()
    assert uploads() == []


def test_what_was_damaged_is_found(cluster: S3Server) -> None:
    """The gateway does not compare the CRC of a part: the checksums of the checkpoint prove what arrived."""
    url = f"{ROOT}/damage/run"
    report = reshard.save(url, 1, arrays(1))
    assert report is not None
    (name,) = [name for name, _ in locate(report.path).store.below(report.path) if name.endswith(".safetensors")]  # type: ignore[attr-defined]
    path = f"{report.path}/{name}".removeprefix("s3:/")
    data = bytearray(cluster.request("GET", path)[1])
    data[-1] ^= 1
    assert cluster.request("PUT", path, bytes(data))[0] == 200
    assert not reshard.verify(url).ok
    with pytest.raises(DamagedFileError, match=name):
        reshard.load(report.path, verify="full")


def race_for_records(url: str, name: int, n_rounds: int, barrier: Any) -> list[int]:
    """Create records against another process; returns the numbers of those that were created."""
    root, won = locate(url), []
    for _ in range(n_rounds):
        barrier.wait(60)
        made = log_records.claimed(log.next_record(log.head_of(root), "claim"), {"name": name})
        barrier.wait(60)
        if log.create(root, made):
            won.append(made.n)
        barrier.wait(60)
    return won


def test_of_two_writers_of_a_record_one_wins() -> None:
    url, n_rounds = f"{ROOT}/records/run", 100
    reshard.save(url, 1, arrays(1))
    protocol.release()
    head = log.head_of(locate(url))
    assert head is not None
    barrier = multiprocessing.get_context("fork").Barrier(2)
    racers = [fork(lambda name=name: race_for_records(url, name, n_rounds, barrier)) for name in range(2)]  # type: ignore[misc]
    won = [racer.result(300) for racer in racers]
    assert sorted(won[0] + won[1]) == list(range(head.n + 1, head.n + 1 + n_rounds)), "one each"
    print(f"{n_rounds} races: {len(won[0])} and {len(won[1])} won")


def race_for_a_root(url: str, n_rounds: int, barrier: Any) -> list[int]:
    """Save against another process; returns the iterations that were saved."""
    saved = []
    for iteration in range(1, n_rounds + 1):
        barrier.wait(60)
        try:
            reshard.save(url, iteration, arrays(iteration))
            saved.append(iteration)
        except ClaimedError:
            pass
        barrier.wait(60)
        protocol.release()
        barrier.wait(60)
    return saved


def test_of_two_processes_that_save_one_wins() -> None:
    url, n_rounds = f"{ROOT}/claims/run", 20
    barrier = multiprocessing.get_context("fork").Barrier(2)
    racers = [fork(lambda: race_for_a_root(url, n_rounds, barrier)) for _ in range(2)]
    won = [racer.result(300) for racer in racers]
    assert sorted(won[0] + won[1]) == list(range(1, n_rounds + 1)), "one each"
    print(f"{n_rounds} races: {len(won[0])} and {len(won[1])} won")
    check(url, n_rounds)
    assert reshard.verify(url).ok
