"""One file of a bucket that several shares write: byte for byte that of one process, and no upload is left."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pytest
from tests.servers.killed import is_killed, nth_change
from tests.servers.proxy import Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard.conversion import buckets, destinations
from reshard.conversion.bucket_shares import BucketShares, SentParts, cut_files
from reshard.errors import ArgumentError, DamagedFileError, DestinationExistsError, ReshardError, StorageError
from reshard.ranks.places import ShareRun
from reshard.storage import remote
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

FACTOR, SEED = int(os.environ.get("RESHARD_CASES_FACTOR", "1")), int(os.environ.get("RESHARD_CASES_SEED", "11"))
_PART = 16 << 20
_numbers = itertools.count()
DESTINATIONS: dict[str, dict[str, Any]] = {
    "folder": {"to": "huggingface"},
    "file": {"to": "safetensors"},
    "several files": {"to": "huggingface", "max_shard_size": 45_000_000},
    "ranks": {"to": "safetensors", "layout": {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}},
    "torch": {"to": "torch"},
    "dcp": {"to": "dcp"},
    "pt": {"to": "torch"},
}
SUFFIXES = {"file": ".safetensors", "pt": ".pt"}


def made(folder: Path, sizes: Sequence[int] = (40_000_000, 3, 9_000_000)) -> Path:
    rng = np.random.default_rng(len(sizes))
    folder.mkdir(parents=True)
    tensors = {f"w{i}": rng.integers(0, 256, 2 * (size // 2 + 1), np.uint8) for i, size in enumerate(sizes)}
    reshard.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "made"}')
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "model")


def content(place: Path | Location) -> dict[str, bytes]:
    """The files of a folder or the one file, without what conversions leave beside them."""
    if isinstance(place, Location):
        found = dict.fromkeys(name for name, _ in store_of(place).below(place.path))
        names = [name for name in found if ".reshard." not in name]
        return {name: b"".join((place / name).pieces()) for name in names} or {"": b"".join(place.pieces())}
    if place.is_file():
        return {"": place.read_bytes()}
    return {str(one.relative_to(place)): one.read_bytes() for one in place.rglob("*") if one.is_file()}


def store_of(place: Location) -> RemoteStore:
    assert isinstance(place.store, RemoteStore)
    return place.store


def uploads_of(place: Location) -> list[str]:
    found, reason = store_of(place).unfinished_uploads([place.parent.path], is_file=False, wait_s=20)
    assert reason is None
    return [one.key for one in found if one.key.startswith(place.path.removeprefix(f"{store_of(place).root}/"))]


def claims_of(place: Location, kind: str) -> list[str]:
    """The claims that are not taken over; without them, what is left of others counts for nothing."""
    return [name for name in left_of_claims(place, kind) if name == ".reshard.convert.staging"]


def left_of_claims(place: Location, kind: str) -> list[str]:
    home = buckets.home_of(place) if kind == "file" else place
    return [name for name, _ in store_of(home).below(home.path) if name.startswith(".reshard.convert")]


def uploads_named(place: Location, kind: str) -> dict[str, list[str]]:
    """What the object beside the claim says of uploads."""
    home = buckets.home_of(place) if kind == "file" else place
    (name,) = (name for name in left_of_claims(place, kind) if name.endswith("-prepared.staging"))
    found: dict[str, list[str]] = json.loads((home / name).read_small(10_000))["uploads"]
    return found


def is_whole(place: Location) -> bool:
    try:
        with reshard.open(place) as opened:
            opened.load()
    except ReshardError:
        return False
    return True


def target_of(folder: Location, kind: str) -> Location:
    return folder / f"{next(_numbers)}{SUFFIXES.get(kind, '')}"


@pytest.fixture
def folder(s3: S3Server) -> Location:
    return locate(f"s3://{BUCKET}/parts-{os.getpid()}-{next(_numbers)}")


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy between the package and the server."""
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.mark.slow(disk=False)
def test_any_shares_in_any_order_are_byte_for_byte_one_process(
    bucket: tuple[Location, Proxy], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, proxy = bucket
    rng = random.Random(f"{SEED} {request.node.name}")
    for case in range(2 * FACTOR):
        kind = rng.choice(list(DESTINATIONS))
        sizes = [rng.randrange(1, 3_000_000) for _ in range(rng.randrange(4))] + [rng.randrange(33_000_000, 80_000_000)]
        rng.shuffle(sizes)
        source = made(tmp_path / str(case), sizes)
        target, n_shares = target_of(folder, kind), rng.randrange(1, 8)
        alone = tmp_path / f"alone{case}" / target.name  # which is in a file of torch
        report = reshard.convert(source, alone, **DESTINATIONS[kind])
        order = rng.sample(range(n_shares), n_shares)
        proxy.log.clear()
        for n, index in enumerate(order):
            if n:
                assert not is_whole(target)
            one = reshard.convert(source, str(target), share=(index, n_shares), **DESTINATIONS[kind])
            assert one.pending == tuple(sorted(order[n + 1 :]))
        place = f"seed {SEED}, case {case}, {kind}, {n_shares} shares, {sizes}"
        assert (one.n_files, one.n_bytes) == (report.n_files, report.n_bytes), place
        assert content(target) == content(alone), place
        if target.path.startswith("s3"):
            assert uploads_of(target) == [], place


def test_ranges_are_complete_parts_and_all_shares_have_some(folder: Location, source: Path, tmp_path: Path) -> None:
    target = target_of(folder, "file")
    reports = [reshard.convert(source, str(target), share=(index, 3)) for index in range(3)]
    reshard.convert(source, tmp_path / "alone.safetensors")
    n_bytes = (tmp_path / "alone.safetensors").stat().st_size
    assert [one.n_bytes for one in reports] == [_PART, _PART, n_bytes]
    assert content(target) == content(tmp_path / "alone.safetensors")
    assert cut_files([10, 40 << 20, 40 << 20], 1)[0][1:] == [(1, 0, 40 << 20, True), (2, 0, 40 << 20, False)]
    assert cut_files([10, 10], 1) == [[(0, 0, 10, True)]]
    assert cut_files([], 2) == [[], []]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["pt", "torch", "dcp"])
def test_a_file_with_sums_is_written_by_all_shares_and_the_last_one_sends_parts_with_sums_of_others(
    proxy: Proxy, folder: Location, tmp_path: Path, kind: str
) -> None:
    source = made(tmp_path / "sizes", (7_000_000, 58_000_000, 3, 25_000_000, 0, 21_000_000))
    target = target_of(folder, kind)
    alone = tmp_path / "alone" / target.name
    reshard.convert(source, alone, **DESTINATIONS[kind])
    n_bytes = max(len(one) for one in content(alone).values())
    reports, sent = [], []
    for index in (2, 0, 1):
        proxy.log.clear()
        reports.append(reshard.convert(source, str(target), share=(index, 3), **DESTINATIONS[kind]))
        numbers = [re.search(r"partNumber=(\d+)", path) for method, path, *_ in proxy.log if method == "PUT"]
        sent.append([int(found[1]) for found in numbers if found is not None])
    # The second array and the fourth one end in other shares than they begin, in parts 4 and 6. The sums of all arrays
    # are in 7, but in DCP each array has its own directory.
    expected = [[5, 7], [1, 2], [3, 4, 6]] if kind == "dcp" else [[5], [1, 2], [3, 4, 6, 7]]
    assert [sorted(one) for one in sent] == expected
    assert n_bytes // _PART == 6
    assert content(target) == content(alone)
    assert uploads_of(target) == []


def test_sums_that_are_not_those_of_all_bytes_are_refused(folder: Location, source: Path) -> None:
    target = target_of(folder, "pt")
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)
    records = buckets.home_of(target)
    (record,) = (records / name for name, _ in store_of(target).below(records.path) if name.endswith("share-0.json"))
    found = json.loads(record.read_small(100_000))
    (one,) = found["parts"].values()
    one[-1].pop()
    record.replace(json.dumps(found))
    with pytest.raises(ArgumentError, match=r"there are sums of \d+ bytes, expected 49000008"):
        reshard.convert(source, str(target), share=(1, 2))
    assert target.kind() is None


class InProcess:
    """A place whose shares are written one after the other; the last one fails with an error, if there is one."""

    cpus = 1

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def n_shares(self, n_bytes: int) -> int:
        del n_bytes
        return 3

    def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
        for share in range(n_shares):
            if self.error is not None and share == n_shares - 1:
                raise self.error
            done(ShareRun(share, "host", 0, work(share)[0], 0.0))
        return [None] * n_shares


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_fails_or_is_interrupted_leaves_no_upload_and_the_old_file(
    folder: Location, source: Path, tmp_path: Path, kind: str
) -> None:
    target, options = target_of(folder, kind), DESTINATIONS[kind]
    for error in (StorageError("a worker died"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            reshard.convert(source, str(target), on=InProcess(error), **options)
        assert (uploads_of(target), target.kind(), claims_of(target, kind)) == ([], None, [])
    report = reshard.convert(source, str(target), on=InProcess(), **options)
    assert all(run.n_bytes for run in report.shares)
    alone = tmp_path / f"alone{target.suffix}"
    reshard.convert(source, alone, **options)
    assert content(target) == content(alone)
    assert (uploads_of(target), claims_of(target, kind)) == ([], [])
    if kind == "file":  # it is there until the new one is complete
        with pytest.raises(StorageError):
            reshard.convert(source, str(target), on=InProcess(StorageError("died")), overwrite=True, **options)
        assert content(target) == content(alone)
        assert uploads_of(target) == []
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, str(target), share=(0, 2), **options)
    for index in (1, 0):
        reshard.convert(source, str(target), share=(index, 2), overwrite=True, **options)
    assert content(target) == content(alone)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("next_one", ["one process", "shares"])
def test_the_next_conversion_ends_the_uploads_of_one_that_was_killed(
    folder: Location, source: Path, tmp_path: Path, kind: str, next_one: str
) -> None:
    target, options = target_of(folder, kind), DESTINATIONS[kind]
    assert reshard.convert(source, str(target), share=(0, 2), **options).pending == (1,)
    (name,) = uploads_named(target, kind)
    file = target.parent / name if kind == "file" else target / name
    store_of(target).begin_upload(str(file))  # by a process that was killed before its claim named it
    assert len(uploads_of(target)) == 2
    other = {"dtype": "bfloat16", **options}
    how: list[dict[str, Any]] = [{"share": (1, 2)}, {"share": (0, 2)}] if next_one == "shares" else [{}]
    with pytest.raises(DestinationExistsError, match=r"another conversion|is not empty"):
        reshard.convert(source, str(target), **how[0], **other)
    for one in how:
        report = reshard.convert(source, str(target), overwrite=True, **one, **other)
    assert report.pending == ()
    assert (uploads_of(target), claims_of(target, kind)) == ([], [])
    alone = tmp_path / f"alone{target.suffix}"
    reshard.convert(source, alone, **other)
    assert content(target) == content(alone)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["folder", "file", "torch"])
def test_an_upload_that_the_service_has_ended_is_begun_anew(
    folder: Location, source: Path, tmp_path: Path, kind: str
) -> None:
    target, options = target_of(folder, kind), DESTINATIONS[kind]
    alone = tmp_path / f"alone{target.suffix}"
    reshard.convert(source, alone, **options)
    # One of the shares finds out, or the one that publishes. A last share of torch has only parts with sums.
    for n_shares_before in (2,) if kind == "torch" else (1, 2):
        target = target_of(folder, kind)
        reports = [reshard.convert(source, str(target), share=(0, 3), **options)]
        if n_shares_before == 2:
            reports.append(reshard.convert(source, str(target), share=(1, 3), **options))
        ((name, (upload, _)),) = uploads_named(target, kind).items()
        store_of(target).end_upload(str((target.parent if kind == "file" else target) / name), upload)
        with pytest.raises(StorageError, match="NoSuchUpload") as caught:
            reshard.convert(source, str(target), share=(2, 3), **options)
        assert "overwrite=True" in (caught.value.hint or "")
        with pytest.raises(DestinationExistsError, match="another conversion"):
            reshard.convert(source, str(target), share=(2, 3), **options)
        assert content(target).keys() <= {"config.json"} if kind != "file" else target.kind() is None
        for index in (2, 0, 1):
            report = reshard.convert(source, str(target), share=(index, 3), overwrite=True, **options)
        assert report.pending == ()
        assert content(target) == content(alone)
        assert (uploads_of(target), claims_of(target, kind)) == ([], [])


@pytest.mark.parametrize("moment", ["before a part", "after the last part"])
def test_a_share_that_was_written_and_published_by_another_process_is_done(
    bucket: tuple[Location, Proxy], source: Path, tmp_path: Path, moment: str
) -> None:
    folder, proxy = bucket
    target, how = target_of(folder, "pt"), DESTINATIONS["pt"]
    assert reshard.convert(source, str(target), share=(0, 2), **how).pending == (1,)

    first = threading.Semaphore()  # of parts that are sent at the same time

    def publish(method: str, path: str) -> None:
        wanted = "share-1.json" if moment == "after the last part" else "block|partNumber"
        if method == "PUT" and re.search(wanted, unquote(path)) and first.acquire(blocking=False):
            proxy.before = None
            assert reshard.convert(source, str(target), share=(1, 2), **how).pending == ()

    proxy.before = publish
    assert reshard.convert(source, str(target), share=(1, 2), **how).pending == ()
    assert proxy.before is None
    reshard.convert(source, tmp_path / "alone" / target.name, **how)
    assert content(target) == content(tmp_path / "alone" / target.name)
    assert claims_of(target, "file") == []


@pytest.mark.parametrize("taker", ["ended", "runs"])
def test_a_share_that_was_suspended_before_others_could_begin_brings_no_claim_back(
    bucket: tuple[Location, Proxy], tmp_path: Path, taker: str
) -> None:
    source = made(tmp_path / "small", (3, 70_000))
    (folder, proxy), claims = bucket, itertools.count()
    target = target_of(folder, "folder")
    other: dict[str, Any] = {"to": "safetensors", "overwrite": True}
    first = other if taker == "ended" else other | {"share": (0, 2)}

    def take_over(method: str, path: str) -> None:
        if method in ("PUT", "POST") and ".reshard.convert" in unquote(path) and next(claims) == 1:
            proxy.before = None
            done = reshard.convert(source, str(target), **first)
            assert done.pending == (() if taker == "ended" else (1,))

    proxy.before = take_over
    with pytest.raises(DestinationExistsError, match="another conversion"):
        reshard.convert(source, str(target), share=(0, 2), to="huggingface")
    assert proxy.before is None
    if taker == "runs":
        assert reshard.convert(source, str(target), share=(1, 2), **other).pending == ()
    assert left_of_claims(target, "folder") == []
    reshard.convert(source, tmp_path / "alone", to="safetensors")
    assert content(target) == content(tmp_path / "alone")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_of_shares_that_begin_at_the_same_time_one_begins_the_upload(
    proxy: Proxy, folder: Location, source: Path, tmp_path: Path, kind: str
) -> None:
    alone = tmp_path / f"alone{SUFFIXES.get(kind, '')}"
    reshard.convert(source, alone, **DESTINATIONS[kind])
    for number in range(3):
        target = target_of(folder, kind)
        assert not [one for one in at_once(source, target, kind) if isinstance(one, Exception)]
        assert content(target) == content(alone)
        assert left_of_claims(target, kind) == []
        begun = [path for method, path, *_ in proxy.log if method == "POST" and re.search("[?&]uploads", path)]
        assert len(begun) == number + 1
        assert (uploads_of(target), claims_of(target, kind)) == ([], [])


def at_once(source: Path, target: Location, kind: str) -> list[object]:
    """What becomes of three shares that begin together."""
    outcomes: list[object] = []
    meet = threading.Barrier(3)

    def one(index: int) -> None:
        meet.wait(30)
        try:
            outcomes.append(reshard.convert(source, str(target), share=(index, 3), **DESTINATIONS[kind]))
        except ReshardError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


@pytest.fixture
def _brief_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_PREPARED_SECONDS", 0.0)


@pytest.mark.slow(disk=False)
@pytest.mark.usefixtures("_brief_preparation")
@pytest.mark.parametrize("kind", ["folder", "file", "torch"])
def test_shares_that_are_killed_at_random_requests_leave_the_same_bytes_and_no_upload(
    proxy: Proxy, folder: Location, source: Path, tmp_path: Path, kind: str
) -> None:
    rng, n_killed, n_anew = random.Random(f"{SEED} {kind}"), 0, 0
    alone = tmp_path / f"alone{SUFFIXES.get(kind, '')}"
    reshard.convert(source, alone, **DESTINATIONS[kind])
    for case in range(4 * FACTOR):
        target, how, place = target_of(folder, kind), dict(DESTINATIONS[kind]), f"seed {SEED}, case {case}"
        todo = rng.sample(range(3), 3)
        while todo:
            write = functools.partial(reshard.convert, source, str(target), share=(todo[0], 3), **how)
            n_killed += killed_at(proxy, rng, write)
            if kind == "file" and target.kind() is not None:
                assert content(target) == content(alone), place
            outcome = report_or_refusal(write)
            if isinstance(outcome, reshard.ConvertReport):
                todo = todo[1:] or list(outcome.pending)
            else:  # it was killed while it prepared the folder, or after the publication
                assert "overwrite=True" in (outcome.hint or ""), (place, outcome)
                how["overwrite"] = True
                n_anew += 1
        assert content(target) == content(alone), place
        assert (uploads_of(target), claims_of(target, kind)) == ([], []), place
    assert n_killed > 4 * FACTOR
    print(f"{n_killed} shares killed, {n_anew} times with `overwrite`, seed {SEED}")


def report_or_refusal(write: Callable[[], reshard.ConvertReport]) -> reshard.ConvertReport | DestinationExistsError:
    try:
        return write()
    except DestinationExistsError as error:
        return error


def killed_at(proxy: Proxy, rng: random.Random, work: Callable[[], object]) -> bool:
    """Do work in a child that is killed at a random change, before or after the service has got it."""
    number, is_after = rng.randrange(9), rng.random() < 0.5

    def act() -> None:
        with contextlib.suppress(DestinationExistsError):
            work()

    return is_killed(proxy, act, nth_change(number), when="after" if is_after else "before")


def test_parts_that_are_not_those_of_the_file_are_refused(folder: Location, source: Path) -> None:
    target = target_of(folder, "file")
    store = store_of(target)
    upload = store.begin_upload(str(target))
    with pytest.raises(ArgumentError, match="has 1 parts, expected 3"):
        store.complete_upload(str(target), upload, 40 << 20, ["x"])
    with pytest.raises(StorageError):
        store.complete_upload(str(target), upload, 40 << 20, ["x", "y", "z"])
    store.end_upload(str(target), upload)
    store.end_upload(str(target), upload)
    assert uploads_of(target) == []
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)
    records = buckets.home_of(target)
    (record,) = (records / name for name, _ in store.below(records.path) if name.endswith("share-0.json"))
    found = json.loads(record.read_small(100_000))
    (one,) = found["parts"].values()
    assert SentParts(*one).first == 0
    one[3] = 1  # not where the file begins
    record.replace(json.dumps(found))
    with pytest.raises(DamagedFileError, match="disagree on"):
        reshard.convert(source, str(target), share=(1, 2))
    assert target.kind() is None


def record_of(target: Location, kind: str) -> Location:
    """The record of share 0."""
    home = buckets.home_of(target) if kind != "folder" else target
    (record,) = (home / name for name, _ in store_of(home).below(home.path) if name.endswith("share-0.json"))
    return record


@pytest.mark.parametrize("odd", [[-1, 5, 5], [1 << 70, 5, 5], [0, 5, 1 << 40], [0, -5, 3], [0, 1 << 64, 3]])
def test_a_record_with_sums_that_no_part_has_is_written_again(folder: Location, source: Path, odd: list[int]) -> None:
    target = target_of(folder, "pt")
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)
    record = record_of(target, "pt")
    found = json.loads(record.read_small(100_000))
    (one,) = found["parts"].values()
    one[-1][0] = odd
    record.replace(json.dumps(found))
    with pytest.raises(DamagedFileError, match="does not have the files of its record"):
        reshard.convert(source, str(target), share=(1, 2))
    assert target.kind() is None
    assert reshard.convert(source, str(target), share=(0, 2)).pending == ()


@pytest.mark.parametrize("share", [7, -1, True, "1", 1 << 80])
def test_a_share_that_is_none_does_not_publish(folder: Location, source: Path, share: object) -> None:
    target = target_of(folder, "file")
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)
    (record_of(target, "file").parent / "publishes.json").replace(json.dumps({"share": share}))
    assert reshard.convert(source, str(target), share=(1, 2)).pending == ()


def changed_claim(target: Location, key: str, values: dict[str, Any]) -> None:
    """Change what the object beside the claim of a folder says."""
    (name,) = (name for name in left_of_claims(target, "folder") if name.endswith("-prepared.staging"))
    found = json.loads((target / name).read_small(100_000))
    found[key] |= values
    (target / name).replace(json.dumps(found))


def test_a_claim_with_odd_etags_is_taken_for_one_without(folder: Location, source: Path) -> None:
    target, how = target_of(folder, "folder"), DESTINATIONS["folder"]
    assert reshard.convert(source, str(target), share=(0, 2), **how).pending == (1,)
    changed_claim(target, "written", {"config.json": 5, "x": None, "y": ["a"]})
    assert reshard.convert(source, str(target), share=(1, 2), **how).pending == ()
    assert is_whole(target)


@pytest.mark.parametrize("name", ["\ud800", "../x", "/x", "", "a\0", "a//b"])
def test_a_claim_with_odd_uploads_is_replaced(folder: Location, source: Path, name: str) -> None:
    target, how = target_of(folder, "folder"), DESTINATIONS["folder"]
    assert reshard.convert(source, str(target), share=(0, 2), **how).pending == (1,)
    changed_claim(target, "uploads", {name: ["a", None], "b": [name, None]})
    reshard.convert(source, str(target), overwrite=True, **how)
    assert is_whole(target)
    assert (uploads_of(target), left_of_claims(target, "folder")) == ([], [])


def test_a_source_that_is_stale_is_no_lost_upload(
    folder: Location, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(folder, "file")
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)

    def stale(*_: object, **__: object) -> None:
        raise StorageError("reading: Stale file handle", path=str(source / "model.safetensors"), errno=errno.ESTALE)

    with monkeypatch.context() as patched:
        patched.setattr(destinations, "_streamed", stale)
        with pytest.raises(StorageError, match="Stale") as caught:
            reshard.convert(source, str(target), share=(1, 2))
        assert caught.value.hint is None
    assert reshard.convert(source, str(target), share=(1, 2)).pending == ()


def test_a_service_that_does_not_answer_hides_no_lost_upload(
    folder: Location, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(folder, "file")
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)

    def down(_: object) -> None:
        raise StorageError("no answer", path=str(target))

    def lost(*_: object, **__: object) -> None:
        monkeypatch.setattr(buckets.BucketFolder, "has_ended", down)
        raise StorageError("the unfinished upload was removed", path=str(target), errno=errno.ESTALE)

    monkeypatch.setattr(destinations, "_streamed", lost)
    with pytest.raises(StorageError, match="the unfinished upload was removed"):
        reshard.convert(source, str(target), share=(1, 2))


def test_a_share_whose_records_are_removed_while_it_reads_them_is_done(
    folder: Location, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, read_all = target_of(folder, "file"), BucketShares.all
    assert reshard.convert(source, str(target), share=(0, 2)).pending == (1,)

    def overtaken(self: BucketShares, names: Any) -> Any:
        monkeypatch.setattr(BucketShares, "all", read_all)
        assert reshard.convert(source, str(target), share=(1, 2)).pending == ()
        return read_all(self, names)

    monkeypatch.setattr(BucketShares, "all", overtaken)
    assert reshard.convert(source, str(target), share=(1, 2)).pending == ()
    assert claims_of(target, "file") == []


def test_a_conversion_that_is_suspended_while_it_lists_uploads_changes_nothing_of_the_next_one(
    folder: Location, proxy: Proxy, source: Path
) -> None:
    target, how = target_of(folder, "folder"), DESTINATIONS["folder"]
    assert reshard.convert(source, str(target), share=(0, 2), **how).pending == (1,)

    def take_over(method: str, path: str) -> None:
        if method == "GET" and re.search("[?&]uploads", path):
            proxy.before = None
            reshard.convert(source, str(target), overwrite=True, **how)
            assert is_whole(target)
            proxy.log.clear()

    proxy.before = take_over
    with pytest.raises(DestinationExistsError, match="has taken it over"):
        reshard.convert(source, str(target), overwrite=True, **how)
    assert proxy.before is None
    assert {method for method, *_ in proxy.log} <= {"GET", "HEAD"}
    assert is_whole(target)


def test_an_index_replaces_none_of_a_conversion_that_took_over(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    source, target = made(tmp_path / "m", (3_000_000, 2_000_000, 1_000_000)), target_of(folder, "folder")
    after: dict[str, bytes] = {}

    def take_over(method: str, path: str) -> None:
        if method == "PUT" and unquote(path).partition("?")[0].endswith("index.json"):
            proxy.before = None
            reshard.convert(source, str(target), max_shard_size=4_000_000, overwrite=True, to="huggingface")
            after.update(content(target))

    proxy.before = take_over
    with pytest.raises(DestinationExistsError, match="has taken it over"):
        reshard.convert(source, str(target), max_shard_size=2_500_000, to="huggingface")
    assert after
    assert content(target) == after
    assert is_whole(target)
