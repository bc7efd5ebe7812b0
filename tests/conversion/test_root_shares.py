"""An iteration of a root in a bucket that several processes write: its files are those of one process."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.threads import in_threads
from tests.servers.s3 import BUCKET

import reshard
from reshard.commit import roots
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    ClaimedError,
    DestinationExistsError,
    StorageError,
    UnsupportedError,
)
from reshard.ranks.group import SingleProcess
from reshard.ranks.led import LedRanks
from reshard.ranks.places import ShareRun
from reshard.storage import remote
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.servers.proxy import Proxy
    from tests.servers.s3 import S3Server

    from reshard.ranks.group import Group
    from reshard.verbs.convert import ConvertReport

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

FACTOR, SEED = int(os.environ.get("RESHARD_CASES_FACTOR", "1")), int(os.environ.get("RESHARD_CASES_SEED", "11"))
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
_numbers = itertools.count()


def made(file: Path, sizes: Sequence[int]) -> Path:
    rng = np.random.default_rng(sum(sizes))
    tensors = {f"w{i}": rng.integers(0, 256, 2 * (size // 2 + 1), np.uint8) for i, size in enumerate(sizes)}
    reshard.save_file(tensors, file)
    return file


class InProcess:
    """A place whose shares are written in any order, some of them twice; then an error is raised, if there is one."""

    cpus = 1

    def __init__(self, rng: random.Random, n_shares: int = 3, error: BaseException | None = None) -> None:
        self.rng, self.n, self.error = rng, n_shares, error

    def n_shares(self, n_bytes: int) -> int:
        del n_bytes
        return self.n

    def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
        results: list[Any] = [None] * n_shares
        order = self.rng.sample(range(n_shares), n_shares)
        for share in order + [one for one in order if self.rng.random() < 0.3]:
            n_bytes, results[share] = work(share)
            done(ShareRun(share, "host", 0, n_bytes, 0.0))
        if self.error is not None:
            raise self.error
        return results


def store_of(place: Location) -> RemoteStore:
    assert isinstance(place.store, RemoteStore)
    return place.store


def below(place: Location) -> dict[str, bytes]:
    return {name: b"".join((place / name).pieces()) for name, _ in store_of(place).below(place.path)}


def files_of(place: Path | Location) -> dict[str, bytes]:
    """The files of the newest iteration but what tells one save from another."""
    with reshard.open(place) as opened:
        folder = locate(opened.path)
    names = {"manifest.json", ".tracked"}
    if folder.is_local:
        return {name: (folder / name).read_small(1 << 30) for name in folder.names() if name not in names}
    return {name: data for name, data in below(folder).items() if name not in names}


def uploads_of(place: Location) -> list[str]:
    found, reason = store_of(place).unfinished_uploads([place.path], is_file=False, wait_s=20)
    assert reason is None
    return [one.key for one in found]


@pytest.fixture
def folder(s3: S3Server) -> Location:
    return locate(f"s3://{BUCKET}/roots-{os.getpid()}-{next(_numbers)}")


@pytest.mark.slow(disk=False)
def test_any_shares_are_byte_for_byte_one_process(
    bucket: tuple[Location, Proxy], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, _ = bucket
    rng = random.Random(f"{SEED} {request.node.name}")
    for case in range((2 if folder.path.startswith("s3") else 1) * FACTOR):
        sizes = [rng.randrange(1, 3_000_000) for _ in range(rng.randrange(4))] + [rng.randrange(66_000_000, 99_000_000)]
        source, n_shares = made(tmp_path / f"{case}.safetensors", sizes), rng.randrange(1, 8)
        options: dict[str, Any] = rng.choice([{}, {"layout": LAYOUT}])
        url, alone = folder / f"run{case}", tmp_path / f"alone{case}"
        one = reshard.convert(source, alone, to="checkpoint2", iteration=7, **options)
        report = reshard.convert(
            source, str(url), to="checkpoint2", iteration=7, on=InProcess(rng, n_shares), **options
        )
        place = f"seed {SEED}, case {case}, {n_shares} shares, {sizes}, {options}"
        assert (report.n_files, report.n_bytes, report.pending) == (one.n_files, one.n_bytes, ()), place
        assert files_of(url) == files_of(alone), place
        assert reshard.verify(str(url)).ok, place
        if url.path.startswith("s3"):
            assert uploads_of(url) == [], place


@pytest.mark.slow(disk=False)
def test_what_fails_or_is_interrupted_leaves_nothing(folder: Location, tmp_path: Path) -> None:
    source, rng = made(tmp_path / "w.safetensors", [40_000_000, 5]), random.Random(SEED)
    for error in (StorageError("a worker died"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            reshard.convert(source, str(folder), to="checkpoint2", on=InProcess(rng, error=error))
        assert [name for name in below(folder) if name.startswith("iteration")] == []
        assert uploads_of(folder) == []
    assert reshard.convert(source, str(folder), to="checkpoint2", on=InProcess(rng)).n_files == 1
    with pytest.raises(DestinationExistsError, match="is not empty"):
        reshard.convert(source, str(folder), to="checkpoint2", on=InProcess(rng))
    report = reshard.convert(source, str(folder), to="checkpoint2", on=InProcess(rng), overwrite=True)
    assert reshard.verify(str(folder)).ok
    assert [number for number, _ in roots.list_iterations(folder)] == [0]
    assert report.path.endswith("iteration_00000000")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_of_a_group(folder: Location, tmp_path: Path, world_size: int) -> None:
    source = made(tmp_path / "w.safetensors", [70_000_000, 5])
    reshard.convert(source, tmp_path / "alone", to="checkpoint2", layout=LAYOUT)

    def work(group: Group) -> ConvertReport:
        return reshard.convert(source, str(folder), to="checkpoint2", layout=LAYOUT, group=group)

    reports = in_threads(world_size, work)
    n_bytes = sum(len(data) for name, data in files_of(folder).items() if name.endswith(".safetensors"))
    assert {(one.n_files, one.n_bytes, one.pending, len(one.shares)) for one in reports} == {
        (2, n_bytes, (), world_size if world_size > 1 else 0)
    }
    assert files_of(folder) == files_of(tmp_path / "alone")


def test_shares_without_a_leader_are_refused(folder: Location, tmp_path: Path) -> None:
    source = made(tmp_path / "w.safetensors", [5])
    with pytest.raises(UnsupportedError, match="with `share`, none does") as caught:
        reshard.convert(source, str(folder), to="checkpoint2", share=(0, 2))
    assert "one process leads them" in (caught.value.hint or "")
    with pytest.raises(ArgumentError, match="are given as `group`"):
        reshard.convert(source, tmp_path / "run", to="checkpoint2", on=LedRanks(SingleProcess()))
    assert not folder.exists()


@pytest.mark.slow(disk=False)
def test_a_share_of_what_was_taken_over_writes_nothing(folder: Location, tmp_path: Path) -> None:
    source, late = made(tmp_path / "w.safetensors", [70_000_000, 5]), []

    class Late(InProcess):
        def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
            late.append(work)
            return super().run(work, n_shares, done)

    reshard.convert(source, str(folder), to="checkpoint2", on=Late(random.Random(SEED)))
    with pytest.raises(ClaimedError, match="was published while this process"):
        late[0](0)
    reshard.convert(source, str(folder), to="checkpoint2", iteration=1, overwrite=True)
    there = sorted(below(folder))
    for index in range(3):
        with pytest.raises(ClaimedError, match="was taken over"):
            late[0](index)
    assert sorted(below(folder)) == there
    assert uploads_of(folder) == []


@pytest.mark.slow(disk=False)
def test_a_share_that_plans_another_conversion_is_refused(folder: Location, tmp_path: Path) -> None:
    source = made(tmp_path / "w.safetensors", [40_000_000, 5])

    class Changed(InProcess):
        def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
            made(source, [40_000_002, 5])
            return super().run(work, n_shares, done)

    with pytest.raises(CheckpointNotFoundError, match="plans another conversion"):
        reshard.convert(source, str(folder), to="checkpoint2", on=Changed(random.Random(SEED)))
    assert [name for name in below(folder) if name.startswith("iteration")] == []


def _killed(source: str, url: str) -> None:
    class Killed(InProcess):
        def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
            super().run(work, n_shares, done)
            os._exit(3)

    reshard.convert(source, url, to="checkpoint2", on=Killed(random.Random(SEED)))


@pytest.mark.slow(disk=False)
def test_the_next_claim_removes_what_a_killed_leader_has_left(folder: Location, tmp_path: Path) -> None:
    source = made(tmp_path / "w.safetensors", [70_000_000, 5])
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(str(source), str(folder)))
    process.start()
    process.join(120)
    assert process.exitcode == 3
    assert len(uploads_of(folder)) == 1
    reshard.convert(source, str(folder), to="checkpoint2", on=InProcess(random.Random(SEED)))
    assert uploads_of(folder) == []
    assert len({name.partition("/")[0] for name in below(folder) if name.startswith("iteration")}) == 1
    assert reshard.verify(str(folder)).ok


def test_a_service_that_does_not_answer_is_not_asked_to_end_each_upload(
    folder: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ended = made(tmp_path / "w.safetensors", [70_000_000, 5]), []

    def down(_: RemoteStore, path: str, *, wait_s: float) -> None:
        raise StorageError(f"no answer in {wait_s} s", path=path)

    class Fails(InProcess):
        def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
            del work, n_shares, done
            monkeypatch.setattr(RemoteStore, "ask", down)
            monkeypatch.setattr(RemoteStore, "end_upload", lambda _, path, upload: ended.append((path, upload)))
            raise StorageError("a worker died")

    with pytest.raises(StorageError, match="a worker died"):
        reshard.convert(source, str(folder), to="checkpoint2", on=Fails(random.Random(SEED)))
    assert ended == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_option_that_one_rank_cannot_read_is_an_error_of_all(folder: Location, tmp_path: Path, rank: int) -> None:
    source, layout = made(tmp_path / "w.safetensors", [6]), tmp_path / "layout.json"
    layout.write_text(json.dumps(LAYOUT))

    def work(group: Group) -> ConvertReport:
        file = tmp_path / "missing.json" if group.rank == rank else layout
        return reshard.convert(source, str(folder), to="checkpoint2", layout=str(file), group=group, timeout=60)

    for error in in_threads(2, work):
        assert isinstance(error, CheckpointNotFoundError)
        assert "missing.json" in str(error)
