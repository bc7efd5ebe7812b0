"""One conversion into a bucket in several shares: byte for byte that of one process, and whole or not there."""

from __future__ import annotations

import itertools
import json
import os
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pytest
from tests.helpers.ranks import Job
from tests.helpers.small_saves import fork
from tests.servers.killed import is_killed
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard.conversion import buckets
from reshard.errors import DamagedFileError, DestinationExistsError, ReshardError, StorageError
from reshard.ranks.places import ShareRun
from reshard.storage import remote
from reshard.storage.changes import temporary_folder
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3 import S3Server

    from reshard.ranks.group import TorchGroup

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

_numbers = itertools.count()
_BEGUN_ANEW = -2
LAYOUT = {"mesh": {"tp": 3}, "rules": [{"match": "*", "cut": ["tp", None]}]}
TARGETS: dict[str, dict[str, Any]] = {
    "huggingface": {"to": "huggingface", "max_shard_size": 4000},
    "safetensors": {"to": "safetensors", "layout": LAYOUT},
    "checkpoint1": {"to": "checkpoint1", "layout": LAYOUT},
    "dcp": {"to": "dcp", "layout": LAYOUT},
    "deepspeed-universal": {"to": "deepspeed-universal", "part": "all"},
    "one file": {"to": "huggingface"},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {f"w{i}": rng.standard_normal((6, 64 * (i + 1))).astype(np.float32) for i in range(4)}
    reshard.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "made"}')
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def objects_of(folder: Location) -> dict[str, bytes]:
    assert isinstance(folder.store, RemoteStore)
    names = [name for name, _ in folder.store.below(folder.path)]
    return {name: b"".join((folder / name).pieces()) for name in names if not name.endswith("/published.json")}


def is_whole(folder: Location) -> bool:
    try:
        with reshard.open(folder) as opened:
            opened.load()
    except ReshardError:
        return False
    return True


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
@pytest.mark.parametrize("to", TARGETS)
def test_shares_in_any_order_are_the_whole_conversion(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path, to: str
) -> None:
    target, options = bucket[0], TARGETS[to]
    whole = reshard.convert(source, tmp_path / "whole", **options)
    for n, index in enumerate(order := (2, 0, 1)):
        report = reshard.convert(source, str(target), share=(index, 3), **options)
        assert report.pending == tuple(sorted(order[n + 1 :]))
        assert n == 2 or not is_whole(target)
    assert (report.n_files, report.n_bytes) == (whole.n_files, whole.n_bytes)
    assert objects_of(target) == files_of(tmp_path / "whole")
    with pytest.raises(DestinationExistsError, match="is not empty"):
        reshard.convert(source, str(target), share=(0, 3), **options)
    for index in order:  # another conversion, which replaces this one
        changed = options | ({"iteration": 3} if to == "deepspeed-universal" else {"dtype": "bfloat16"})
        reshard.convert(source, str(target), share=(index, 3), overwrite=True, **changed)
    reshard.convert(source, tmp_path / "whole", overwrite=True, **changed)
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("bucket", ["az"], indirect=True)
def test_a_share_that_lost_a_file_is_written_again_and_another_conversion_is_not_joined(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path
) -> None:
    (target, _), options = bucket, TARGETS["huggingface"]
    report = reshard.convert(source, str(target), share=(0, 2), **options)
    assert (report.pending, report.warnings) == ((1,), ())
    assert reshard.convert(source, f"{target}-small", share=(0, 8), **options).warnings == ()
    first = {name: one.stat().identity for name in target.names() if (one := target / name).kind() == "file"}
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, str(target), share=(0, 2), dtype="bfloat16", **options)
    assert reshard.convert(source, str(target), share=(0, 2), **options).pending == (1,)
    assert first == {name: (target / name).stat().identity for name in first}, "it is not written again"
    victim = next(name for name in first if name.endswith(".safetensors"))
    (target / victim).replace("cut short")
    with pytest.raises(DamagedFileError, match="share 0 of 2 does not have the files of its record"):
        reshard.convert(source, str(target), share=(1, 2), **options)
    assert not is_whole(target)
    assert reshard.convert(source, str(target), share=(0, 2), **options).pending == ()
    reshard.convert(source, tmp_path / "whole", **options)
    assert objects_of(target) == files_of(tmp_path / "whole")


class InProcesses:
    """A place whose workers are forks of this process; the first one can be killed in its first share."""

    cpus = 1

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def n_shares(self, n_bytes: int) -> int:
        del n_bytes
        return 3

    def run(self, work: Any, n_shares: int, done: Any) -> list[Any]:
        results: list[Any] = []
        for share in reversed(range(n_shares)):
            child = fork(lambda share=share: work(share)[0])  # type: ignore[misc]
            n_bytes = child.result()
            done(ShareRun(share, "host", 0, n_bytes, 0.0))
            results.append(None)
            if self.error is not None:
                raise self.error
        return results


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_workers_of_another_place_write_the_shares_and_an_error_leaves_nothing(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path
) -> None:
    (target, _), options = bucket, TARGETS["huggingface"]
    with pytest.raises(StorageError, match="a worker died"):
        reshard.convert(source, str(target), on=InProcesses(StorageError("a worker died")), **options)
    assert objects_of(target) == {}
    report = reshard.convert(source, str(target), on=InProcesses(), **options)
    assert [run.share for run in report.shares] == [0, 1, 2]
    assert sum(run.n_bytes for run in report.shares) > report.n_bytes / 2
    reshard.convert(source, tmp_path / "whole", **options)
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.slow(disk=False)
def test_ranks_of_a_group_share_the_files(s3: S3Server, tmp_path: Path, source: Path) -> None:
    target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")

    def work(group: TorchGroup) -> list[int]:
        return list(reshard.convert(source, str(target), group=group, timeout=60, **TARGETS["huggingface"]).pending)

    with Job(2, work) as job:
        assert job.values() == [[], []]
    reshard.convert(source, tmp_path / "whole", **TARGETS["huggingface"])
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.slow(disk=False)
def test_shares_at_the_same_time_are_published_by_one(s3: S3Server, tmp_path: Path, source: Path) -> None:
    reshard.convert(source, tmp_path / "whole", **TARGETS["safetensors"])
    for _ in range(5):
        target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")
        outcomes = shares_at_once(source, target, 2, **TARGETS["safetensors"])
        assert not [one for one in outcomes if isinstance(one, Exception)]
        assert objects_of(target) == files_of(tmp_path / "whole"), outcomes


@pytest.mark.parametrize("moment", ["before it looks for the others", "before it publishes"])
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_share_that_another_one_overtakes_publishes_nothing(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path, moment: str
) -> None:
    target, proxy = bucket
    assert share(source, target, 1).pending == (0,)
    has_overtaken = False

    def overtake(method: str, path: str) -> None:
        nonlocal has_overtaken
        name = "publishes.json" if moment == "before it publishes" else "share-0.json"
        if method == "PUT" and unquote(path).endswith(name) and not has_overtaken:
            has_overtaken = True
            assert share(source, target, 1).pending == ()

    if moment == "before it publishes":
        proxy.before = overtake
    else:
        proxy.after = overtake
    assert share(source, target, 0).pending == ()
    proxy.before = proxy.after = None
    assert has_overtaken
    reshard.convert(source, tmp_path / "whole", **TARGETS["safetensors"])
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_claim_of_a_share_that_was_called_again_is_none_that_takes_over(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path
) -> None:
    target, proxy = bucket
    assert share(source, target, 1).pending == (0,)
    claim = target / ".reshard.convert.staging"
    left = json.loads(claim.read_small(100_000)) | {"token": "of a share that was called again"}

    def publish(method: str, path: str) -> None:
        if method == "PUT" and unquote(path).endswith("share-0.json"):
            proxy.after = None
            assert share(source, target, 1).pending == ()
            claim.create(json.dumps(left).encode())  # until it finds that all is published

    proxy.after = publish
    report = share(source, target, 0)
    assert proxy.after is None
    assert report.pending == ()
    claim.remove_file()
    reshard.convert(source, tmp_path / "whole", **TARGETS["safetensors"])
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_share_that_is_called_again_after_the_publication_replaces_nothing(
    bucket: tuple[Location, Proxy], source: Path
) -> None:
    target, _ = bucket
    for index in (0, 1):
        pending = share(source, target, index, overwrite=True).pending
    assert pending == ()
    first = {name: (target / name).stat().identity for name in objects_of(target)}
    for index in (1, 0):
        assert share(source, target, index, overwrite=True).pending == ()
        assert {name: (target / name).stat().identity for name in objects_of(target)} == first
    (folder,) = (name for name in target.names() if name.startswith(".reshard.share-"))
    published = target / folder / "published.json"
    published.replace(
        json.dumps(json.loads(published.read_small(10_000)) | {"version": "0.0.1"})
    )  # another one wrote it
    assert share(source, target, 0, overwrite=True).pending == (1,)
    assert share(source, target, 1, overwrite=True).pending == ()
    assert objects_of(target).keys() == first.keys()
    (target / min(first)).remove_file()  # it is no longer whole, and is written anew
    assert share(source, target, 0, overwrite=True).pending == (1,)
    assert share(source, target, 1, overwrite=True).pending == ()
    assert objects_of(target).keys() == first.keys()
    assert is_whole(target)


@pytest.mark.parametrize("hook", ["before", "after"])
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_share_that_creates_its_claim_after_the_publication_replaces_nothing(
    bucket: tuple[Location, Proxy], source: Path, hook: str
) -> None:
    target, proxy = bucket
    assert share(source, target, 0, overwrite=True).pending == (1,)
    first: dict[str, object] = {}

    def publish(method: str, path: str) -> None:
        if method in ("PUT", "POST") and ".convert.staging" in unquote(path):
            setattr(proxy, hook, None)
            assert share(source, target, 1, overwrite=True).pending == ()
            first.update({name: (target / name).stat().identity for name in objects_of(target)})

    setattr(proxy, hook, publish)
    assert share(source, target, 0, overwrite=True).pending == ()
    assert first
    assert {name: (target / name).stat().identity for name in objects_of(target)} == first


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_share_whose_conversion_was_taken_over_does_not_say_that_it_is_published(
    bucket: tuple[Location, Proxy], source: Path
) -> None:
    target, proxy = bucket
    assert share(source, target, 1).pending == (0,)

    def take_over(method: str, path: str) -> None:
        if method == "PUT" and unquote(path).endswith("share-0.json"):
            proxy.after = None
            other = reshard.convert(
                source, str(target), share=(0, 2), overwrite=True, dtype="bfloat16", **TARGETS["safetensors"]
            )
            assert other.pending == (1,)

    proxy.after = take_over
    with pytest.raises(DestinationExistsError, match="has taken it over"):
        share(source, target, 0)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_share_that_another_one_overtakes_while_it_takes_over_joins_it(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, proxy = bucket
    monkeypatch.setattr(buckets, "_PREPARED_SECONDS", 0.0)
    (target / ".reshard.convert.staging").replace('{"names": []}')  # left by a conversion that was killed

    def overtake(method: str, path: str) -> None:
        if method in ("PUT", "POST") and "convert-" in unquote(path):  # it has taken over, and has prepared nothing
            proxy.after = None
            assert share(source, target, 1, overwrite=True).pending == (0,)

    proxy.after = overtake
    assert share(source, target, 0, overwrite=True).pending == ()
    assert proxy.after is None
    reshard.convert(source, tmp_path / "whole", **TARGETS["safetensors"])
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_claim_is_read_once_however_many_files_there_are(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path
) -> None:
    """It has the names of all files."""
    target, proxy = bucket
    n_read = []
    for size in (1000, 1_000_000):
        proxy.log.clear()
        report = reshard.convert(source, f"{target}-{size}", to="huggingface", max_shard_size=size)
        assert report.n_files >= (4 if size == 1000 else 1)
        n_read.append(sum("convert.staging" in unquote(path) for method, path, *_ in proxy.log if method == "GET"))
    assert n_read[0] == n_read[1] > 0


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_folder_is_not_listed_for_a_share_that_is_not_written_yet(
    bucket: tuple[Location, Proxy], tmp_path: Path, source: Path
) -> None:
    target, proxy = bucket
    reshard.convert(source, str(target), share=(0, 3), **TARGETS["huggingface"])
    proxy.log.clear()
    reshard.convert(source, str(target), share=(1, 3), **TARGETS["huggingface"])
    lists = [unquote(path) for method, path, *_ in proxy.log if method == "GET" and "prefix=" in path]
    assert lists
    assert not [path for path in lists if "delimiter=" not in path and "max-keys=1" not in path]


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_records_are_read_several_at_a_time(bucket: tuple[Location, Proxy], source: Path) -> None:
    target, proxy = bucket
    reshard.convert(source, str(target), share=(0, 2), **TARGETS["safetensors"])
    names = ("share-0.json", "share-1.json")
    asked = {name: threading.Event() for name in names}

    def wait(method: str, path: str) -> None:
        name = unquote(path).rpartition("/")[2]
        if method == "GET" and name in asked and written:
            asked[name].set()
            assert all(one.wait(30) for one in asked.values()), "one after the other"

    def note(method: str, path: str) -> None:
        if method == "PUT" and unquote(path).endswith(names[1]):
            written.append(path)

    written: list[str] = []
    proxy.before, proxy.after = wait, note
    assert reshard.convert(source, str(target), share=(1, 2), **TARGETS["safetensors"]).pending == ()
    assert written


@pytest.mark.slow(disk=False)
def test_one_of_several_shares_takes_over_what_was_left(
    s3: S3Server, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard.convert(source, tmp_path / "whole", **TARGETS["huggingface"])
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        for number in range(5):
            target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")
            left = {"token": "0f", "names": ["old.safetensors"]} if number else {"names": ["old.safetensors"]}
            (target / ".reshard.convert.staging").replace(json.dumps(left))
            (target / "old.safetensors").replace("cut short")
            outcomes = shares_at_once(source, target, 3, overwrite=True, **TARGETS["huggingface"])
            assert not [one for one in outcomes if isinstance(one, Exception)], outcomes
            assert objects_of(target) == files_of(tmp_path / "whole")
            written = [path for method, path, *_ in proxy.log if method == "PUT" and path.endswith("/config.json")]
            assert len(written) == number + 1, "one prepares the folder"


def test_of_two_conversions_that_take_over_one_goes_on(
    s3: S3Server, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")
    (target / ".reshard.convert.staging").replace('{"names": []}')
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

        def overtake(method: str, path: str) -> None:
            if method == "PUT" and "convert-" in unquote(path):
                proxy.before = None
                assert share(source, target, 0, overwrite=True).pending == (1,)

        proxy.before = overtake
        with pytest.raises(DestinationExistsError, match="has taken it over at the same time"):
            reshard.convert(source, str(target), overwrite=True, **TARGETS["huggingface"])
    assert share(source, target, 1, overwrite=True).pending == ()
    reshard.convert(source, tmp_path / "whole", **TARGETS["safetensors"])
    assert objects_of(target) == files_of(tmp_path / "whole"), "nothing of the other one, and no claim"


def test_what_a_conversion_that_took_over_and_was_killed_has_left_is_taken_over(
    s3: S3Server, tmp_path: Path, source: Path
) -> None:
    target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")
    (target / ".reshard.convert.staging").replace('{"names": ["first.safetensors"]}')
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, str(target), **TARGETS["huggingface"])
    with temporary_folder("test-") as beside:
        folder = buckets.BucketFolder(target, locate(beside), ())
        assert folder.claim(["second.safetensors"], overwrite=True)
    for name in ("first.safetensors", "second.safetensors"):
        (target / name).replace("cut short")
    assert buckets.left_in(target) == {"first.safetensors", "second.safetensors"}
    reshard.convert(source, str(target), overwrite=True, **TARGETS["huggingface"])
    with pytest.raises(DestinationExistsError, match="has taken it over"):
        folder.check_claim()
    reshard.convert(source, tmp_path / "whole", **TARGETS["huggingface"])
    assert objects_of(target) == files_of(tmp_path / "whole")


def test_a_claim_and_a_record_that_are_no_json_count_for_nothing(s3: S3Server, tmp_path: Path, source: Path) -> None:
    target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")
    deep = "[" * 100_000
    (target / ".reshard.convert.staging").replace(deep)
    with pytest.raises(DestinationExistsError, match="another conversion writes there, or was killed"):
        share(source, target, 0)
    assert share(source, target, 0, overwrite=True).pending == (1,)
    (record,) = (name for name, _ in buckets.bucket_of(target).below(target.path) if name.endswith("share-0.json"))
    (target / record).replace(deep)
    with pytest.raises(DamagedFileError, match="share 0 of 2 does not have the files of its record"):
        share(source, target, 1, overwrite=True)
    assert share(source, target, 0, overwrite=True).pending == ()
    reshard.convert(source, tmp_path / "whole", **TARGETS["safetensors"])
    assert objects_of(target) == files_of(tmp_path / "whole")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["killed", "lost answer"])
def test_a_share_that_is_killed_at_a_request_is_written_again(
    s3: S3Server, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    options = TARGETS["safetensors"]
    monkeypatch.setattr(buckets, "_PREPARED_SECONDS", 0.0)
    reshard.convert(source, tmp_path / "whole", **options)
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        for number in itertools.count():
            target = locate(f"s3://{BUCKET}/shares-{os.getpid()}-{next(_numbers)}")
            n_left = number
            for index in (0, 1):
                if n_left != _BEGUN_ANEW:
                    n_left = _share_with_fault(proxy, source, target, (index, n_left), kind)
            assert objects_of(target) == files_of(tmp_path / "whole")
            if n_left >= 0:
                break
        assert number >= 6


def shares_at_once(source: Path, target: Location, n_shares: int, **options: Any) -> list[Any]:
    """What becomes of shares that are written by threads that begin together: reports, or errors."""
    outcomes: list[Any] = [None] * n_shares
    meet = threading.Barrier(n_shares)

    def one(index: int) -> None:
        meet.wait(30)
        try:
            outcomes[index] = reshard.convert(source, str(target), share=(index, n_shares), **options)
        except ReshardError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(n_shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def share(source: Path, target: Location, index: int, **how: Any) -> reshard.ConvertReport:
    return reshard.convert(source, str(target), share=(index, 2), **TARGETS["safetensors"], **how)


def _share_with_fault(proxy: Proxy, source: Path, target: Location, at: tuple[int, int], kind: str) -> int:
    """Write a share while the n-th change fails, and again. Returns how many changes are left until the fault."""
    (index, number), changes = at, itertools.count()

    def is_it(method: str, _: str) -> bool:
        return method not in ("GET", "HEAD") and next(changes) == number

    if kind == "lost answer":
        proxy.faults = [Fault(is_it, is_lost=True)]
        share(source, target, index)
        is_over = proxy.faults[0].times == 0
        proxy.faults = []
        return -1 if is_over else number - next(changes)
    if not is_killed(proxy, lambda: share(source, target, index), is_it):
        return number - next(changes)
    whole = is_whole(target)
    refusal = None
    try:  # the same call again
        assert share(source, target, index).pending == ((1,) if index == 0 else ())
    except DestinationExistsError as error:
        refusal = error
    if refusal is not None:  # it was killed after the publication, or while it prepared the folder
        assert whole or (index == 0 and "overwrite=True" in (refusal.hint or ""))
        for again in (0, 1):
            share(source, target, again, overwrite=True)
        return _BEGUN_ANEW
    return -1
