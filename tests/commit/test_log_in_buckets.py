"""Saves into buckets: everything that a root on a disk does, kills, lost answers and races.

S3 is a real server; Google Cloud Storage and Azure Blob Storage are doubles.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pytest
from tests.helpers.bucket_runs import arrays, check, iterations, run, train
from tests.helpers.small_saves import fork
from tests.helpers.threads import in_threads
from tests.servers.killed import is_killed, nth_change
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard.commit import claims, leases, log, log_claims, log_records, protocol, roots
from reshard.commit.session import find_session, forget_all
from reshard.errors import ArgumentError, ClaimedError, DestinationExistsError, UnsupportedError
from reshard.storage import remote
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.s3 import S3Server

    from reshard.storage.location import Location

_numbers = itertools.count()
_WHOLE_PROBE = {name: getattr(log, name) for name in ("_PROBE_ROUNDS", "_PROBE_WRITERS")}


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    protocol.release()


@pytest.fixture
def url(s3: S3Server) -> str:
    """A root in the bucket that no other test uses."""
    return f"s3://{BUCKET}/log-{os.getpid()}-{next(_numbers)}/run"


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
        protocol.release()  # while it still answers


@pytest.fixture
def place(bucket: tuple[Location, Proxy]) -> Iterator[tuple[str, Proxy]]:
    """A root in a bucket of each service, and the proxy before it."""
    folder, proxy = bucket
    yield str(folder), proxy
    protocol.release()


def save(url: str, iteration: int, **how: Any) -> reshard.SaveReport:
    report: reshard.SaveReport | None = reshard.save(url, iteration, arrays(iteration), **how)
    assert report is not None
    return report


@pytest.mark.slow(disk=False)
def test_a_run_saves_keeps_pins_goes_back_and_prunes(place: tuple[str, Proxy]) -> None:
    url, _ = place
    for iteration in (100, 200, 300, 400):
        report = save(url, iteration, keep=2, metrics={"loss": 1.0 / iteration})
        assert report.warnings == ()
        check(url, iteration)
    assert iterations(url) == [300, 400]
    left = {name.partition("/")[0] for name, _ in locate(url).store.below(url)}  # type: ignore[attr-defined]
    assert {roots.parse_iteration_folder(name) for name in left if name.startswith("iteration")} == {300, 400}
    assert reshard.open(f"{url}/iteration_00000300").iteration == 300
    assert reshard.load(url, iteration=300).iteration == 300
    assert reshard.verify(url).ok
    assert reshard.verify(f"{url}/iteration_00000300").ok
    reshard.pin(url, 300)
    save(url, 500, keep=1)
    assert iterations(url) == [300, 500]
    assert reshard.rollback(url, 300).newer == (500,)
    check(url, 300)
    report = save(url, 301)
    assert report.warnings == ()
    check(url, 301)
    reshard.unpin(url, 300)
    assert reshard.prune(url, keep=1).iterations == (300,)
    assert iterations(url) == [301, 500]
    with pytest.raises(ArgumentError, match="is below 301, which the tracker"):
        save(url, 300)
    save(url, 301)
    check(url, 301)
    assert "iteration_00000301" in run("explain", url)
    assert "selected" in run("inspect", url)
    assert "not part of a checkpoint" not in run("inspect", url)
    assert "iteration 301, complete" in run("watch", url, "--once")
    assert "complete" in run("verify", url)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("bucket", ["gs", "az"], indirect=True)
def test_a_large_save_in_parts(place: tuple[str, Proxy]) -> None:
    url, proxy = place
    w = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)
    reshard.save(url, 1, {"w": w})
    parts = [method == "PUT" and ("partNumber" in path or "comp=block&" in path) for method, path, *_ in proxy.log]
    assert sum(parts) > 1
    np.testing.assert_array_equal(reshard.load(url).state["w"], w)


@pytest.mark.slow(disk=False)
def test_ranks_save_and_others_resume(place: tuple[str, Proxy]) -> None:
    url, _ = place
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp", None]}, {"match": "*"}]}
    whole = arrays(7)

    def save_rank(group: Any) -> Any:
        part = slice(group.rank * 60, group.rank * 60 + 60)
        return reshard.save(url, 7, {**whole, "w": whole["w"][part]}, layout=layout, group=group)

    reports = in_threads(2, save_rank)
    assert [report.iteration for report in reports] == [7, 7]
    check(url, 7)
    thirds = {"mesh": {"tp": 3}, "rules": [{"match": "w", "cut": ["tp", None]}, {"match": "*"}]}
    loaded = in_threads(3, lambda group: reshard.load(url, layout=thirds, group=group))
    np.testing.assert_array_equal(np.concatenate([one.state["w"] for one in loaded]), whole["w"])


@pytest.mark.slow(disk=False)
def test_a_checkpointer_saves_in_the_background_and_resumes(place: tuple[str, Proxy]) -> None:
    url, _ = place
    assert train(url, 6)[0] == 0
    first, loss = train(url, 12)
    assert first == 6
    assert iterations(url) == [10, 12]
    assert train(f"{url}-whole", 12) == (0, loss)
    assert reshard.diff(url, f"{url}-whole").equal


@pytest.mark.slow(disk=False)
def test_a_new_root_is_probed_by_several_writers(place: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    url, proxy = place
    for name, value in _WHOLE_PROBE.items():
        monkeypatch.setattr(log, name, value)
    save(url, 1)
    assert sum(method == "PUT" and "probe/" in unquote(path) for method, path, *_ in proxy.log) >= 24


@pytest.mark.slow(disk=False)
def test_few_requests_are_sent(proxy: Proxy, url: str) -> None:
    """Names and sizes are asked for by lists of folders, not one by one."""

    def requests(act: Any) -> int:
        before = len(proxy.log)
        act()
        return len(proxy.log) - before

    for iteration in (1, 2, 3, 4):
        n_requests = requests(lambda iteration=iteration: save(url, iteration, keep=3))
        assert n_requests <= 80, iteration
    assert requests(lambda: reshard.load(url)) <= 30
    looks = [path for method, path, *_ in proxy.log if method == "HEAD"]
    assert len(looks) <= 40


def test_a_root_that_was_copied_from_a_disk_is_read_and_not_saved_into(url: str, s3: S3Server, tmp_path: Any) -> None:
    reshard.save(tmp_path / "run", 3, arrays(3))
    s3.upload(tmp_path / "run", url.removeprefix(f"s3://{BUCKET}/"))
    check(url, 3)
    with pytest.raises(DestinationExistsError, match="was copied from a disk"):
        save(url, 4)
    check(url, 3)


def test_what_needs_renames_is_refused_by_name(url: str, s3: S3Server) -> None:
    from reshard.torch import Checkpointer

    with pytest.raises(UnsupportedError, match=r"rank folders of Checkpoint 1\.0 are published by renames"):
        reshard.save(url, 1, arrays(1), format="checkpoint1")
    with pytest.raises(UnsupportedError, match=r"rank folders of Checkpoint 1\.0 are published by renames"):
        Checkpointer(url, format="checkpoint1")


@pytest.mark.slow
def test_killed_at_every_request_of_a_save(proxy: Proxy, url: str) -> None:
    outcomes: list[int] = []
    for number in range(200):
        root = f"{url}{number}"
        for iteration in (100, 200):
            save(root, iteration)
        protocol.release()
        was_killed = is_killed(proxy, partial(save, root, 300, keep=2), nth_change(number))
        with reshard.open(root) as opened:
            found = opened.iteration
        assert found is not None
        assert found in ((200, 300) if was_killed else (300,))
        check(root, found)
        outcomes.append(found)
        assert set(iterations(root)) >= {200}
        save(root, 400, keep=2)
        check(root, 400)
        assert len(iterations(root)) == 2
        protocol.release()
        if not was_killed:
            break
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["lost answer", "lost request"])
def test_an_answer_is_lost_at_every_change_of_a_save(place: tuple[str, Proxy], kind: str) -> None:
    url, proxy = place
    save(url, 100)
    iteration = 100
    for number in itertools.count():
        seen = itertools.count()
        iteration += 1

        def matches(method: str, path: str, seen: Any = seen, number: int = number) -> bool:
            return method in ("PUT", "POST", "DELETE") and next(seen) == number

        fault = Fault(matches, is_lost=True) if kind == "lost answer" else Fault(matches, 503, "SlowDown")
        proxy.faults = [fault]
        save(url, iteration, keep=2)
        check(url, iteration)
        assert len(iterations(url)) == 2
        if fault.times:
            break
    proxy.faults = []
    assert number > 8
    root = locate(url)
    kinds = [record.kind for n in range(1, log.head_of(root).n + 1) if (record := log.read(root, n))]  # type: ignore[union-attr]
    assert kinds.count("commit") == iteration - 99, "each save once"
    assert kinds.count("claim") == 1


def race(url: str, name: int, n_rounds: int, barrier: Any) -> list[tuple[int, str]]:
    """Create records against another process; returns those that were created, by number and id."""
    root, won = locate(url), []
    for _ in range(n_rounds):
        barrier.wait(60)
        head = log.head_of(root)
        made = log_records.claimed(log.next_record(head, "claim"), {"name": name})
        barrier.wait(60)
        if log.create(root, made):
            won.append((made.n, made.id))
        barrier.wait(60)
    return won


@pytest.mark.parametrize("n_rounds", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_of_two_writers_that_race_one_wins(url: str, s3: S3Server, n_rounds: int) -> None:
    save(url, 1)
    protocol.release()
    before = log.head_of(locate(url))
    assert before is not None
    barrier = multiprocessing.get_context("fork").Barrier(2)
    racers = [fork(lambda name=name: race(url, name, n_rounds, barrier)) for name in range(2)]  # type: ignore[misc]
    won = [racer.result(600) for racer in racers]
    assert sorted(n for one in won for n, _ in one) == list(range(before.n + 1, before.n + 1 + n_rounds)), "one each"
    root = locate(url)
    for name, records in enumerate(won):
        for n, id_ in records:
            record = log.read(root, n)
            if record is not None:  # not yet a stub
                assert (record.id, record.owner["name"]) == (id_, name)
    print(f"{n_rounds} races: {len(won[0])} and {len(won[1])} won")


@pytest.mark.parametrize("bucket", ["gs", "az"], indirect=True)
def test_of_several_writers_that_race_one_wins(place: tuple[str, Proxy]) -> None:
    url, _ = place
    root = locate(url)
    save(url, 1)
    before = log.head_of(root)
    assert before is not None
    for number in range(10):
        made = [log_records.claimed(log.next_record(log.head_of(root), "claim"), {"name": name}) for name in range(4)]
        won = in_threads(4, lambda group, made=made: log.create(locate(url), made[group.rank]))  # type: ignore[misc]
        assert sum(won) == 1, number
    head = log.head_of(root)
    assert head is not None
    assert head.n == before.n + 10


@pytest.mark.slow(disk=False)
def test_a_process_of_this_host_that_is_alive_keeps_its_claim(place: tuple[str, Proxy]) -> None:
    url, _ = place
    save(url, 1)

    def other() -> str:
        try:
            save(url, 2)
        except ClaimedError as error:
            return error.message
        return "saved"

    assert "which is alive" in fork(other).result(60)
    protocol.release()
    assert fork(other).result(60) == "saved"
    check(url, 2)


@pytest.mark.slow(disk=False)
def test_a_service_that_is_gone_does_not_hold_up_the_end(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(url, 1)
    monkeypatch.setattr(claims, "_RELEASE_SECONDS", 0.5)
    answered = threading.Event()

    def hold(_: str, __: str) -> None:
        answered.wait(60)

    proxy.before = hold
    try:
        protocol.release()
        assert not answered.is_set(), "it did not wait for an answer"
        assert find_session(locate(url)).claim is None  # type: ignore[union-attr]
        assert f"the claim on {url} is not released yet" in caplog.text
    finally:
        proxy.before = None
        answered.set()
    monkeypatch.setattr(claims, "_RELEASE_SECONDS", 60.0)
    caplog.clear()
    save(url, 2)
    protocol.release()
    head = log.head_of(locate(url))
    assert head is not None
    assert (locate(url) / log_claims.WRITERS_FOLDER / str(head.generation)).read_small(100) == b'{"released":true}'
    assert "not released" not in caplog.text


@pytest.mark.slow(disk=False)
def test_a_save_that_waits_for_a_service_does_not_hold_up_the_end(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(url, 1)
    monkeypatch.setattr(claims, "_RELEASE_SECONDS", 0.2)
    asked, answered = threading.Event(), threading.Event()
    session = find_session(locate(url))
    assert session is not None

    def hold(_: str, __: str) -> None:
        if session.claiming.locked():  # as while the save checks its claim
            asked.set()
            answered.wait(60)

    proxy.before = hold
    saving = threading.Thread(target=save, args=(url, 2))
    ending = threading.Thread(target=protocol.release)
    try:
        saving.start()
        assert asked.wait(60)
        ending.start()
        ending.join(30)
        assert not ending.is_alive(), "it waits for an answer"
        assert f"the claim on {url} is not released yet" in caplog.text
    finally:
        proxy.before = None
        answered.set()
        saving.join()
    monkeypatch.setattr(claims, "_RELEASE_SECONDS", 60.0)
    protocol.release()
    check(url, 2)


@pytest.mark.slow(disk=False)
def test_a_claim_of_another_host_is_watched(url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    root = locate(url)
    save(url, 1)
    protocol.release()
    elsewhere = {"host": "elsewhere", "boot_id": "x", "pid_namespace": "y", "pid": 1, "started": 1}
    monkeypatch.setattr(log_claims, "_WATCH_SECONDS", 120.0)
    monkeypatch.setattr(log_claims, "_LOOK_SECONDS", 0.2)
    made = log_records.claimed(log.next_record(log.head_of(root), "claim"), elsewhere)
    assert log.create(root, made)
    look = log_claims._beat

    def beat(*args: Any) -> Any:
        (root / log_claims.WRITERS_FOLDER / str(made.n)).replace('{"host":"elsewhere","pid":1}')
        return look(*args)

    monkeypatch.setattr(log_claims, "_beat", beat)
    with pytest.raises(ClaimedError, match="process `1` on host `elsewhere`"):
        save(url, 2)
    monkeypatch.setattr(log_claims, "_beat", look)
    monkeypatch.setattr(log_claims, "_WATCH_SECONDS", 2.0)
    save(url, 2)
    check(url, 2)


@pytest.mark.slow(disk=False)
def test_a_reader_of_a_bucket_keeps_what_it_has_opened(url: str, s3: S3Server) -> None:
    for iteration in (1, 2):
        save(url, iteration)
    with reshard.open(f"{url}/iteration_00000001") as opened:
        forget_all()
        claims.release()
        save(url, 3, keep=1)
        assert iterations(url) == [3]
        np.testing.assert_array_equal(opened.load()["w"], arrays(1)["w"])
    save(url, 4, keep=1)
    names = {name.partition("/")[0] for name, _ in locate(url).store.below(url)}  # type: ignore[attr-defined]
    assert sorted(name[:18] for name in names if name.startswith("iteration")) == ["iteration_00000004"]


@pytest.mark.slow(disk=False)
def test_an_object_that_bears_the_name_of_the_log_hides_nothing(s3: S3Server, url: str) -> None:
    save(url, 1)
    assert s3.request("PUT", f"/{url.removeprefix('s3://')}/log", b"a log of the training")[0] == 200
    check(url, 1)
    save(url, 2)
    check(url, 2)
    assert iterations(url) == [1, 2]
    assert "iteration_00000002" in run("inspect", url)


@pytest.mark.slow(disk=False)
def test_a_service_that_does_not_answer_holds_up_no_save_that_has_failed(
    bucket: tuple[Location, Proxy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, proxy = bucket
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 0.2)
    attempt = protocol.begin(folder, 1)
    (attempt.staging / "common.json").replace("{}")
    proxy.faults = [Fault(lambda *_: True, 503, "SlowDown", times=1 << 20)]
    begun = time.monotonic()
    protocol.abandon(attempt)
    assert time.monotonic() - begun < 30, "one request alone is tried for a minute"
    assert [one for one in caplog.messages if "is left over, and removed by a later run" in one]
    proxy.faults = []
    protocol.abandon(attempt)
    assert not attempt.staging.exists()
