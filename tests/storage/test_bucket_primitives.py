"""Objects that are put, created once, listed and removed: in a real S3 server and in doubles of the other clouds."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import TYPE_CHECKING

import pytest
from tests.servers import doubles
from tests.servers.proxy import Fault, Proxy
from tests.servers.s3 import BUCKET, SECRET

from reshard._core import PutNew
from reshard.errors import ReshardError, StorageError, UnsupportedError
from reshard.storage import remote
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")


def store_of(place: Location) -> RemoteStore:
    assert isinstance(place.store, RemoteStore)
    return place.store


def is_put(method: str, _: str) -> bool:
    return method == "PUT"


def test_an_object_is_put_replaced_listed_and_removed(bucket: tuple[Location, Proxy]) -> None:
    folder, _ = bucket
    store = store_of(folder)
    names = ["a/b/deep", "a/first", "b", "c d+é%2F"]
    for name in names:
        (folder / name).replace(name.encode())
    (folder / "b").replace(b"newer")
    assert (folder / "b").read_small(10) == b"newer"
    assert (folder / names[3]).read_small(100) == names[3].encode()
    assert [(name, stat.n_bytes) for name, stat in store.below(folder.path)] == [
        (name, 5 if name == "b" else len(name.encode())) for name in names
    ]
    assert [name for name, _ in store.below(folder.path, after="a/first")] == names[2:]
    assert [name for name, _ in store.below(folder.path, after="a/a", max_keys=2)] == names[:2]
    assert store.below(f"{folder.path}/none") == []
    store.remove_files([str(folder / name) for name in ("b", "none", "a/first")])
    assert [name for name, _ in store.below(folder.path)] == [names[0], names[3]]
    (folder / "none").remove_file()
    (folder / "line").append_line(b"one\n")
    (folder / "line").append_line(b"two\n")
    assert (folder / "line").read_small(100) == b"one\ntwo\n"
    store.remove_folder(folder.path, first="line", last="a/b/deep", durable=True, announce=lambda _: None)
    assert folder.kind() is None


def test_an_object_is_created_once(bucket: tuple[Location, Proxy]) -> None:
    folder, _ = bucket
    store, path = store_of(folder), str(folder / "record")
    assert store.put_new(path, b"first") == (PutNew.CREATED, None)
    assert store.put_new(path, b"second") == (PutNew.EXISTS, None)
    assert (folder / "record").read_small(10) == b"first"
    with pytest.raises(FileExistsError):
        (folder / "record").create(b"third")
    (folder / "other").create(b"x")
    assert (folder / "other").read_small(10) == b"x"


@pytest.mark.slow(disk=False)
def test_one_of_several_writers_creates_an_object(bucket: tuple[Location, Proxy]) -> None:
    folder, _ = bucket
    store = store_of(folder)
    for number in range(10):
        path = str(folder / f"raced-{number}")
        outcomes: dict[bytes, PutNew] = {}
        barrier = threading.Barrier(4)

        def create(data: bytes, path: str = path, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            outcomes[data] = store.put_new(path, data)[0]  # noqa: B023  joined before the next round

        threads = [threading.Thread(target=create, args=(bytes([65 + i]),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(one.value for one in outcomes.values()) == ["created", "exists", "exists", "exists"]
        assert outcomes[locate(path).read_small(10)] is PutNew.CREATED


def test_a_lost_answer_is_told_and_not_sent_again(bucket: tuple[Location, Proxy]) -> None:
    folder, proxy = bucket
    store, path = store_of(folder), str(folder / "record")
    proxy.faults.append(Fault(is_put, is_lost=True))
    outcome, reason = store.put_new(path, b"ours")
    assert (outcome, sum(method == "PUT" for method, *_ in proxy.log)) == (PutNew.UNKNOWN, 0)
    assert isinstance(reason, StorageError)
    assert path in str(reason)
    assert locate(path).read_small(10) == b"ours"
    # `create` reads what is there.
    proxy.faults.append(Fault(is_put, is_lost=True))
    (folder / "created").create(b"ours, too")
    proxy.faults.append(Fault(is_put, is_lost=True))
    with pytest.raises(FileExistsError):
        (folder / "created").create(b"another")
    # A write that replaces is sent again.
    proxy.faults.append(Fault(is_put, is_lost=True))
    (folder / "record").replace(b"newer")
    assert proxy.faults[-1].times == 0
    assert (folder / "record").read_small(10) == b"newer"


@pytest.mark.parametrize("status", [500, 503])
def test_a_failure_of_the_service_leaves_a_creation_unknown(
    bucket: tuple[Location, Proxy], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proxy = bucket
    store, path = store_of(folder), str(folder / "record")
    proxy.faults.append(Fault(is_put, status, "SlowDown"))
    outcome, reason = store.put_new(path, b"ours")
    assert outcome is PutNew.UNKNOWN
    assert str(status) in str(reason)
    assert locate(path).kind() is None
    assert store.put_new(path, b"ours") == (PutNew.CREATED, None)
    # Where nothing is found, it is sent again, and in the end the failure is raised.
    monkeypatch.setattr(remote, "_CREATE_PAUSES", (0.0, 0.0))
    proxy.faults.append(Fault(is_put, status, "SlowDown", times=2))
    (folder / "created").create(b"ours")
    assert (folder / "created").read_small(10) == b"ours"
    proxy.faults.append(Fault(is_put, status, "SlowDown", times=3))
    with pytest.raises(StorageError, match=str(status)):
        (folder / "not created").create(b"ours")


def test_a_creation_that_is_carried_out_late_is_known(
    bucket: tuple[Location, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request has no answer and is carried out after a look: the second finds what the first has made."""
    folder, proxy = bucket
    monkeypatch.setattr(remote, "_CREATE_PAUSES", (0.0,))
    requests: list[str] = []

    def late(method: str, path: str) -> None:
        if is_put(method, path):
            requests.append(path)
            if len(requests) == 2:
                (folder / "record").replace(b"ours")

    proxy.before = late
    proxy.faults.append(Fault(is_put, 503, "SlowDown"))
    (folder / "record").create(b"ours")
    assert len(requests) == 3


def test_a_creation_that_meets_another_is_sent_again(bucket: tuple[Location, Proxy]) -> None:
    folder, proxy = bucket
    proxy.faults = [Fault(is_put, 409, "ConditionalRequestConflict", times=2), Fault(is_put, 429, "SlowDown")]
    assert store_of(folder).put_new(str(folder / "record"), b"ours") == (PutNew.CREATED, None)
    assert [fault.times for fault in proxy.faults] == [0, 0]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("answer", "what", "hint"),
    [
        ((403, "AccessDenied", {}), "do not permit it (403", "writing needs"),
        ((403, "SignatureDoesNotMatch", {}), "does not accept the credentials (403", ""),
        ((400, "ExpiredToken", {}), "have expired (400 ExpiredToken)", ""),
        ((403, "RequestTimeTooSkewed", {}), "the clock of this host is not that of the service (403", "set the clock"),
        ((404, "NoSuchBucket", {}), "there is no bucket", "check its name"),
        ((301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-7"}), "301", ""),
    ],
)
def test_a_refused_write_is_one_clear_error(
    bucket: tuple[Location, Proxy], answer: tuple[int, str, dict[str, str]], what: str, hint: str
) -> None:
    folder, proxy = bucket
    file = folder / "record"

    def act(do: Callable[[], object]) -> None:
        proxy.faults = [Fault(lambda method, _: method != "GET", *answer)]
        with pytest.raises(StorageError) as caught:
            do()
        assert what in caught.value.message
        assert hint in (caught.value.hint or "")
        assert str(folder) in caught.value.message
        assert SECRET not in repr(vars(caught.value))

    act(lambda: file.replace(b"x"))
    act(lambda: store_of(folder).put_new(file.path, b"x"))
    act(lambda: file.create(b"x"))
    assert file.kind() is None
    file.replace(b"x")
    act(file.remove_file)
    assert file.read_small(5) == b"x"


@pytest.mark.slow(disk=False)
def test_a_busy_service_is_asked_again_to_write_and_remove(bucket: tuple[Location, Proxy]) -> None:
    folder, proxy = bucket
    # S3 says the last ones of a body that does not arrive, and of requests that meet.
    busy = (
        (503, "SlowDown"),
        (429, "SlowDown"),
        (500, "InternalError"),
        (400, "RequestTimeout"),
        (409, "OperationAborted"),
    )
    proxy.faults = [Fault(lambda method, _: method != "GET", *answer) for answer in busy]
    (folder / "note").replace(b"x")
    assert {fault.times for fault in proxy.faults} == {0}
    proxy.faults = [Fault(lambda method, _: method != "GET", *answer) for answer in busy]
    (folder / "note").remove_file()
    assert {fault.times for fault in proxy.faults} == {0}
    assert (folder / "note").kind() is None
    proxy.faults = [Fault(is_put, 400, "RequestTimeout")]
    (folder / "created").create(b"x")
    assert (folder / "created").read_small(5) == b"x"


def _write_in_child(path: str, queue: multiprocessing.Queue[str]) -> None:
    store, place = locate(path).store, locate(path).path
    assert isinstance(store, RemoteStore)
    queue.put(store.put_new(place, str(os.getpid()).encode())[0].value)


def test_a_forked_process_writes_with_connections_of_its_own(s3: S3Server) -> None:
    folder = locate(f"s3://{BUCKET}/forked-{os.getpid()}")
    (folder / "before").replace(b"x")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=_write_in_child, args=(str(folder / "record"), queue)) for _ in range(3)]
    for child in children:
        child.start()
    assert sorted(queue.get(timeout=30) for _ in children) == ["created", "exists", "exists"]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    (folder / "after").replace(b"x")
    assert folder.names() == ["after", "before", "record"]


def test_a_server_of_files_is_not_written() -> None:
    with doubles.running("files") as double:
        file = locate(f"{double.endpoint}/w.safetensors")
        acts: list[Callable[[], None]] = [
            lambda: file.replace(b"x"),
            lambda: file.create(b"x"),
            lambda: file.append_line(b"x\n"),
            file.remove_file,
        ]
        for act in acts:
            with pytest.raises(ReshardError) as caught:
                act()
            assert isinstance(caught.value, UnsupportedError)
        assert {method for method, *_ in double.log} <= {"GET", "HEAD"}
