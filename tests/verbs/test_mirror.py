"""Saves on a disk that are copied into a bucket of a real S3 server, and runs that resume from either."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.small_saves import fork
from tests.servers.killed import is_killed, nth_change
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard import _core
from reshard.commit import leases, log, log_records, protocol, roots
from reshard.commit import manifest as manifests
from reshard.commit.copies import copy_iteration
from reshard.commit.session import forget_all
from reshard.config import Config
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    DamagedFileError,
    DestinationExistsError,
    StorageError,
    UnsupportedError,
)
from reshard.opening.gather import gather_both
from reshard.resume import evaluate
from reshard.storage.location import locate
from reshard.values.events import Observers
from reshard.verbs import mirror
from reshard.verbs.mirror import Copier
from reshard.write.collective_save import log_once

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

    from reshard.storage.location import Location

torch = pytest.importorskip("torch")

from reshard.torch import Checkpointer  # noqa: E402

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    protocol.release()


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://{BUCKET}/mirror-{os.getpid()}-{next(_numbers)}/run"


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def arrays(iteration: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(iteration, iteration + 100_000, dtype=np.float32).reshape(100, 1000), "b": np.ones(7)}


def save(root: Path, *iterations: int, **how: Any) -> None:
    for iteration in iterations:
        reshard.save(root, iteration, arrays(iteration), **how)


def check(url: str, iteration: int) -> None:
    with reshard.open(url) as opened:
        assert opened.iteration == iteration
        found = opened.load(verify="full")
    assert {key: one.tobytes() for key, one in found.items()} == {
        key: one.tobytes() for key, one in arrays(iteration).items()
    }


def copied(url: str) -> list[int]:
    return [number for number, _ in roots.list_iterations(locate(url))]


def copier(root: Path, mirror: Any, events: list[Any] | None = None, save_every: int | None = None) -> Copier:
    observers = Observers.of(None if events is None else events.append)
    return Copier(locate(root), reshard.Mirror.of(mirror), save_every=save_every, observers=observers)


class Run:
    """A small training, whose state says how far it is."""

    def __init__(self, root: Path, mirror: Any, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(root, mirror=mirror, signals=(), **{"save_every": 2, "keep": 2, **how})
        self.decision = self.checkpointer.resume(model=self.model, optimizer=self.optimizer)
        self.step = self.decision.initial_step

    def train(self, until: int) -> float:
        loss = torch.zeros(())
        for step in range(self.step + 1, until + 1):
            loss = self.model(torch.ones(3, 8)).pow(2).sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.checkpointer.step(step)
        self.step = max(self.step, until)
        value: float = loss.item()
        return value


def train(root: Path, mirror: Any, until: int, **how: Any) -> tuple[Any, float]:
    run = Run(root, mirror, **how)
    with run.checkpointer:
        loss = run.train(until)
    forget_all()
    return run.decision, loss


@pytest.mark.slow(disk=False)
def test_a_host_without_the_local_copy_goes_on_from_the_bucket(url: str, tmp_path: Path) -> None:
    events: list[reshard.Event] = []
    decision, _ = train(tmp_path / "a", url, 6, on_event=events.append, keep=None)
    assert decision.fresh
    mirrored = [event for event in events if event.kind == "mirrored"]
    assert [event.iteration for event in mirrored] == [2, 4, 6], "oldest first"
    assert mirrored[0].fields["path"] == f"{url}/iteration_00000002"
    assert copied(url) == [2, 4, 6]
    assert reshard.diff(tmp_path / "a", url).equal
    digest = (tmp_path / "a/iteration_00000006/manifest.json").read_bytes()
    assert (roots.folder_of(locate(url), 6) / "manifest.json").read_small(1 << 20) == digest
    shutil.rmtree(tmp_path / "a")
    decision, loss = train(tmp_path / "b", {"url": url, "keep": 2}, 12)
    assert (decision.initial_step, decision.iteration) == (6, 6)
    assert decision.path.startswith(f"{url}/iteration_00000006.")
    assert "the newest complete save is the copy in" in decision.reasons[0]
    assert copied(url) == [10, 12]
    assert train(tmp_path / "whole", None, 12)[1] == loss
    assert reshard.diff(tmp_path / "whole", url).equal


def test_each_nth_save_is_copied(url: str, tmp_path: Path) -> None:
    train(tmp_path / "a", reshard.Mirror(url, every=3, keep=None), 14, keep=None)
    assert copied(url) == [6, 12]
    save(tmp_path / "b", 1)
    one = copier(tmp_path / "b", {"url": f"{url}-other", "every": 2})
    for iteration in (1, 2, 3, 4):
        save(tmp_path / "b", iteration)
        one.saved(iteration)
    assert one.close() == ()
    assert copied(f"{url}-other") == [2, 4]


@pytest.mark.slow(disk=False)
def test_the_newest_complete_save_of_both_is_taken(url: str, tmp_path: Path) -> None:
    train(tmp_path / "a", url, 6)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    train(tmp_path / "a", url, 10)
    assert train(tmp_path / "old", url, 10)[0].initial_step == 10, "another host went on"
    decision, _ = train(tmp_path / "old", url, 12)
    assert (decision.initial_step, copied(url)[-1]) == (10, 12)
    shard = next((tmp_path / "old/iteration_00000012").glob("model-*.safetensors"))
    shard.chmod(0o600)
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    decision, _ = train(tmp_path / "old", url, 14)
    assert decision.initial_step == 12, "the local one is damaged, and its copy is not"
    assert decision.path.startswith(url)
    assert any("skipped" in line for line in decision.warnings)
    assert copied(url)[-1] == 14
    assert train(tmp_path / "old", url, 14)[0].path == str(tmp_path / "old/iteration_00000014")


@pytest.mark.slow(disk=False)
def test_copies_follow_a_run_that_goes_back(url: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(root, url, 8, keep=None)
    reshard.rollback(root, 4)
    forget_all()
    run = Run(root, url, keep=None)
    assert run.decision.iteration == 4, "the copies of 6 and 8 are refused, too"
    with run.checkpointer:
        run.train(6)
    forget_all()
    assert roots.read_tracker(locate(url))[0] == 6
    assert reshard.open(url).iteration == 6
    assert reshard.diff(root, url).equal
    decision, _ = train(tmp_path / "other", url, 8, keep=None)
    assert decision.initial_step == 6


@pytest.mark.slow(disk=False)
def test_the_record_of_a_run_that_went_back_holds_for_copies(url: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 2, 4, 6)
    one = copier(root, url)
    one.start()
    assert one.close() == ()
    reshard.rollback(root, 2)
    assert reshard.load(root).iteration == 2
    save(root, 3)
    for left in (4, 6):
        shutil.rmtree(root / f"iteration_0000000{left}")
    forget_all()
    facts = gather_both(Config(load_path=str(root), resume=True), url)
    taken = next(one for one in evaluate(Config(load_path=str(root), resume=True), facts) if one.taken)
    assert taken.path == str(root / "iteration_00000003")


@pytest.mark.slow(disk=False)
def test_a_start_from_weights_goes_on_where_only_the_bucket_has_saves(url: str, tmp_path: Path) -> None:
    train(tmp_path / "a", url, 6)
    weights = {"weight": np.zeros((8, 8), np.float32), "bias": np.zeros(8, np.float32)}
    reshard.save_file(weights, tmp_path / "w.safetensors")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "b", mirror=url, signals=(), save_every=2) as checkpointer:
        decision = checkpointer.resume(model=model, optimizer=optimizer, init_from=str(tmp_path / "w.safetensors"))
    assert decision.iteration == 6
    assert decision.path is not None
    assert decision.path.startswith(f"{url}/iteration_00000006")
    assert roots.read_tracker(locate(url))[0] == 6


def test_after_a_rollback_no_copy_of_what_was_left_is_taken(url: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 8, 10)
    one = copier(root, url)
    one.start()
    assert one.close() == ()
    shutil.rmtree(root / "iteration_00000010")  # as retention does
    save(root, 11, 12)
    reshard.rollback(root, 8)
    forget_all()
    config = Config(load_path=str(root), resume=True)
    taken = next(one for one in evaluate(config, gather_both(config, url)) if one.taken)
    assert taken.path == str(root / "iteration_00000008")


def taken_path(root: Path, url: str) -> str:
    forget_all()
    config = Config(load_path=str(root), resume=True)
    return next(one for one in evaluate(config, gather_both(config, url)) if one.taken).path


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("removed", [(), (8,)])
def test_what_another_host_saved_after_a_rollback_is_taken(url: str, tmp_path: Path, removed: tuple[int, ...]) -> None:
    train(tmp_path / "a", url, 8, keep=None)
    reshard.rollback(tmp_path / "a", 4)
    forget_all()
    train(tmp_path / "a", url, 6, keep=None)
    assert train(tmp_path / "b", url, 8, keep=None)[0].initial_step == 6
    for number in removed:  # as retention does
        shutil.rmtree(tmp_path / f"a/iteration_0000000{number}")
    assert taken_path(tmp_path / "a", url).startswith(f"{url}/iteration_00000008."), "of the new line, not of the old"
    decision, loss = train(tmp_path / "a", url, 10)
    assert decision.initial_step == 8
    assert train(tmp_path / "whole", None, 10)[1] == loss


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("keep", [None, 1])
def test_what_another_host_saved_on_the_line_that_was_left_is_not_taken(
    url: str, tmp_path: Path, keep: int | None
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, 8, 10)
    one = copier(a, url)
    one.start()
    assert one.close() == ()
    save(a, 12)
    reshard.rollback(a, 8)
    for left in (10, 12):  # as retention does: no file of this host tells that they were there
        shutil.rmtree(a / f"iteration_000000{left}")
    assert taken_path(a, url) == str(a / "iteration_00000008")
    save(b, 14, 16)
    one = copier(b, {"url": url, "keep": keep})
    one.start()
    assert one.close() == ()
    assert copied(url) == ([8, 10, 14, 16] if keep is None else [16])
    assert taken_path(a, url) == str(a / "iteration_00000008")
    assert taken_path(b, url) == str(b / "iteration_00000016")
    assert taken_path(tmp_path / "c", url).startswith(f"{url}/iteration_00000016.")


def copy(root: Path, mirror: Any, *told: int) -> None:
    one = copier(root, mirror)
    for iteration in told:
        one.saved(iteration)
    one.start()
    assert one.close() == ()


def go_back(root: Path, iteration: int, *iterations: int) -> None:
    reshard.rollback(root, iteration)
    assert reshard.load(root).iteration == iteration
    save(root, *iterations)
    forget_all()


def truncate(root: Path, iteration: int) -> None:
    shard = next((root / f"iteration_{iteration:08d}").glob("*.safetensors"))
    shard.chmod(0o600)
    os.truncate(shard, 100)


@pytest.mark.slow(disk=False)
def test_a_save_stays_left_when_the_new_line_reaches_its_number(url: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, 4, 6, 8)
    copy(a, url)
    go_back(a, 4, 6, 8)
    save(b, 10)  # of the line that was left: the bucket has no other
    copy(b, url)
    assert copied(url) == [4, 6, 8, 10]
    assert taken_path(a, url) == str(a / "iteration_00000008")
    truncate(a, 8)
    assert taken_path(a, url) == str(a / "iteration_00000006"), "the copy of 8 is not its copy"
    reshard.rollback(a, 4)
    assert taken_path(a, url) == str(a / "iteration_00000004")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("lines_are", ["gone", "of an earlier build", "a link", "torn"])
def test_without_a_log_of_saves_no_copy_of_what_was_left_is_taken(
    url: str, tmp_path: Path, lines_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, lines = tmp_path / "run", tmp_path / "run/saves.jsonl"
    save(root, 4, 6)
    copy(root, url)
    if lines_are == "of an earlier build":
        go_back(root, 4, 6, 8)
        lines.write_text(re.sub(r', "digest": "\w+"', "", lines.read_text()))
        shutil.rmtree(root / "iteration_00000006")
        truncate(root, 8)
        assert taken_path(root, url) == str(root / "iteration_00000004")
        return
    go_back(root, 4, 5, 6)
    lines.rename(tmp_path / "moved")
    if lines_are == "a link":
        lines.symlink_to(tmp_path / "moved")
    elif lines_are == "torn":
        lines.write_text("{\n" * 3)
        monkeypatch.setattr("reshard.commit.save_log._MAX_BAD_LINES", 2)
    truncate(root, 6)
    forget_all()
    config = Config(load_path=str(root), resume=True)
    facts = gather_both(config, url)
    taken = next(one for one in evaluate(config, facts) if one.taken)
    assert taken.path == str(root / "iteration_00000005")
    assert any("told apart by their numbers" in line for line in facts.warnings) == (lines_are != "gone")


def test_copies_of_saves_that_a_power_cut_took_are_taken(url: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 6, 8, 10)
    copy(root, url)
    for lost in (8, 10):
        shutil.rmtree(root / f"iteration_{lost:08d}")
    (root / "latest_checkpointed_iteration.txt").write_text("6")
    assert taken_path(root, url).startswith(f"{url}/iteration_00000010.")


def test_a_copy_that_cannot_be_looked_at_stops_a_resume(proxy: Proxy, url: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 4, 6, 8)
    copy(root, url)
    go_back(root, 4, 6, 8)
    truncate(root, 8)
    proxy.faults = [Fault(lambda method, path: "iteration_00000006" in path, 403, "AccessDenied")]
    with pytest.raises(StorageError, match="AccessDenied"):
        taken_path(root, url)


def test_a_damaged_record_of_the_copies_does_not_stop_a_resume(url: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, 4, 6)
    copy(a, url)
    reshard.rollback(a, 4)
    save(b, 8, 10)
    copy(b, url)
    head = log.head_of(locate(url))
    assert head is not None
    record = locate(url) / log_records.LOG_FOLDER / log_records.record_name(head.n - 1)
    record.store.replace(str(record), b"{", durable=True)
    forget_all()
    facts = gather_both(Config(load_path=str(a), resume=True), url)
    assert any("copies of older saves are told apart by their numbers" in line for line in facts.warnings)


@pytest.mark.slow(disk=False)
def test_what_another_host_saved_after_it_went_back_on_the_line_that_was_left_is_not_taken(
    url: str, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, 8, 10)
    copy(a, url)
    reshard.rollback(a, 8)
    save(b, 14, 16)
    copy(b, url)
    go_back(b, 14, 15)
    copy(b, url, 15)
    assert roots.read_tracker(locate(url))[0] == 15
    assert taken_path(a, url) == str(a / "iteration_00000008")
    assert taken_path(b, url) == str(b / "iteration_00000015")


@pytest.mark.slow(disk=False)
def test_after_a_rollback_the_copy_of_a_damaged_save_is_taken(url: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, 2, 4, 6, 8)
    one = copier(root, url)
    one.start()
    assert one.close() == ()
    reshard.rollback(root, 4)
    shard = next((root / "iteration_00000004").glob("*.safetensors"))
    shard.chmod(0o600)
    os.truncate(shard, 100)
    forget_all()
    config = Config(load_path=str(root), resume=True)
    taken = next(one for one in evaluate(config, gather_both(config, url)) if one.taken)
    assert taken.path.startswith(f"{url}/iteration_00000004")


@pytest.mark.parametrize("error", [RuntimeError("no thread"), StorageError("a bad sector", path="{root}/x")])
def test_after_an_error_of_one_save_the_others_are_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    root = tmp_path / "run"
    save(root, 1, 2)
    is_local = isinstance(error, StorageError)

    failed = threading.Event()

    def fail(folder: Location, *given: Any, **how: Any) -> Any:
        if folder.name == "iteration_00000001" and failing:
            failed.set()
            raise StorageError("a bad sector", path=f"{folder}/x") if is_local else error
        return copy_iteration(folder, *given, **how)

    failing = True
    monkeypatch.setattr(mirror, "copy_iteration", fail)
    one = copier(root, url)
    one.start()
    assert failed.wait(60)
    _until(lambda: bool(copied(url)) or not is_local)
    assert copied(url) == ([2] if is_local else [])
    save(root, 3)
    one.saved(3)
    failing = is_local
    assert one.close() == ()
    assert copied(url) == ([2, 3] if is_local else [1, 2, 3])


def test_a_damaged_save_is_not_copied_and_newer_ones_are(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    save(root, 1, 2, 3)
    shard = next((root / "iteration_00000002").glob("*.safetensors"))
    shard.chmod(0o600)
    with shard.open("r+b") as file:
        file.seek(300_000)
        file.write(b"\x01\x02")
    events: list[Any] = []
    one = copier(root, url, events)
    one.start()
    assert one.close() == ()
    assert copied(url) == [1, 3]
    assert [(event.kind, event.iteration) for event in events] == [
        ("mirrored", 1), ("not_mirrored", 2), ("mirrored", 3),
    ]  # fmt: skip
    assert events[1].fields["is_final"] is True
    assert "bytes 262144 to" in str(events[1].fields["reason"])
    assert "iteration 2 is not copied" in caplog.text
    check(url, 3)


def test_a_copy_that_fails_is_tried_again_with_the_next(proxy: Proxy, url: str, tmp_path: Path) -> None:
    events: list[Any] = []
    run = Run(tmp_path / "run", url, on_event=events.append, keep=None)
    with run.checkpointer:
        proxy.faults = [Fault(lambda method, path: method == "PUT" and "model-" in path, 403, "AccessDenied")]
        run.train(2)
        run.checkpointer.wait()
        _until(lambda: any(event.kind == "not_mirrored" for event in events))
        assert copied(url) == []
        run.train(4)
    assert copied(url) == [2, 4]
    failed = next(event for event in events if event.kind == "not_mirrored")
    assert (failed.iteration, failed.fields["is_final"]) == (2, False)
    assert "AccessDenied" in str(failed.fields["reason"])


def test_that_an_iteration_is_being_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    save(tmp_path / "run", 7701)
    with manifests.read_lock(locate(tmp_path / "run/iteration_00007701")):  # as while it is copied
        save(tmp_path / "run", 7702, 7703, 7704, keep=1)
    assert caplog.text.count("iteration 7701 is being read") == 1


@pytest.mark.slow(disk=False)
def test_a_step_never_waits_for_a_copy(proxy: Proxy, url: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "reshard")
    begun, go_on = threading.Event(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "PUT" and "model-" in path:
            begun.set()
            go_on.wait(60)

    run = Run(tmp_path / "run", reshard.Mirror(url, wait_s=1.0), keep=3)
    proxy.before = before
    try:
        run.train(2)
        assert begun.wait(60)
        run.train(8)
        run.checkpointer.wait()
        # The one that is being copied stays.
        assert [number for number, _ in roots.list_iterations(locate(tmp_path / "run"))] == [2, 4, 6, 8]
        started = time.monotonic()
        run.checkpointer.close()
        assert time.monotonic() - started < 30
    finally:
        go_on.set()
    assert "of the saves" in caplog.text or "not copied to" in caplog.text
    assert copied(url) == []
    forget_all()
    proxy.before = None
    train(tmp_path / "run", url, 10, keep=3)
    assert copied(url)[-1] == 10
    assert 8 in copied(url)


@pytest.mark.slow(disk=False)
def test_what_cannot_be_mirrored_is_refused(url: str, tmp_path: Path, s3: S3Server) -> None:
    with pytest.raises(UnsupportedError, match="which is not in a bucket"):
        Checkpointer(tmp_path, mirror=str(tmp_path / "other"))
    with pytest.raises(UnsupportedError, match="is not on a disk of this host"):
        Checkpointer(url, mirror=f"{url}-other")
    with pytest.raises(UnsupportedError, match="`mirror` copies iterations of"):
        Checkpointer(tmp_path, mirror=url, format="checkpoint1")
    with pytest.raises(ArgumentError, match="`every` is of type int"):
        Checkpointer(tmp_path, mirror={"url": url, "every": 0})
    with pytest.raises(ArgumentError, match="`mirror` has no `url`"):
        Checkpointer(tmp_path, mirror={"every": 2})
    first = Run(tmp_path / "a", url)
    with pytest.raises(ClaimedError, match="claimed by another Copier of this process"):
        Run(tmp_path / "b", url)
    first.checkpointer.close()
    train(tmp_path / "c", None, 2)
    s3.upload(tmp_path / "c", f"{url}-plain".removeprefix(f"s3://{BUCKET}/"))
    with pytest.raises(DestinationExistsError, match="was copied from a disk"):
        Run(tmp_path / "d", f"{url}-plain")


def mirror_all(root: Path, url: str) -> list[int]:
    one = copier(root, {"url": url, "keep": 2})
    one.start()
    one.close(60)
    return copied(url)


@pytest.mark.slow(disk=False)
def test_killed_at_any_request_of_a_copy(proxy: Proxy, url: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 100, 200, 300)
    n_killed = 0
    for number in range(0, 200, 1 if "RESHARD_CASES_FACTOR" in os.environ else 3):
        copies = f"{url}{number}"
        mirror_all(tmp_path / "run", copies)
        save(tmp_path / "run", 400, 500)
        protocol.release()
        was_killed = is_killed(proxy, partial(mirror_all, tmp_path / "run", copies), nth_change(number))
        with reshard.open(copies) as opened:
            newest = opened.iteration or 0
        assert newest in ((300, 400, 500) if was_killed else (500,))
        check(copies, newest)
        # Killed before retention, the next copy removes what is no longer kept.
        assert mirror_all(tmp_path / "run", copies) in ([400, 500], [300, 400, 500])
        check(copies, 500)
        left = {name.partition("/")[0] for name, _ in locate(copies).store.below(copies)}  # type: ignore[attr-defined]
        head = log.head_of(locate(copies))
        assert head is not None
        # A lease of the process that was killed keeps what it was reading for a while.
        known = {one.name for one in head.live} | {one.name for one in head.retired}
        assert {name for name in left if name.startswith("iteration")} <= known, "nothing unfinished is left"
        protocol.release()
        for iteration in (400, 500):
            shutil.rmtree(tmp_path / f"run/iteration_00000{iteration}")
        (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("300")
        n_killed += was_killed
        if not was_killed:
            break
    assert n_killed > 4


def test_one_of_two_processes_copies(url: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    one = copier(tmp_path / "run", url)
    one.start()

    def other() -> str:
        try:
            mirror_all(tmp_path / "run", url)
        except ClaimedError as error:
            return error.message
        return "copied"

    assert "which is alive" in fork(other).result(60)
    assert one.close() == ()
    assert copied(url) == [1]


@pytest.mark.slow(disk=False)
def test_large_files_are_compared_part_by_part(url: str, s3: S3Server, tmp_path: Path) -> None:
    file = tmp_path / "large"
    data = np.random.default_rng(0).integers(0, 256, (40 << 20) + 12345, np.uint8).tobytes()
    file.write_bytes(data)
    sums = b"".join(
        _core.crc32c(data[at : at + (256 << 10)], 0).to_bytes(4, "little") for at in range(0, len(data), 256 << 10)
    )
    store: Any = locate(url).store
    told: list[tuple[int, int]] = []
    store.upload(file, f"{url}/a", checksums=(len(data), sums), progress=lambda *one: told.append(one))
    assert locate(f"{url}/a").read_small(1 << 30) == data
    assert told == sorted(told)
    assert all(total == len(data) for _, total in told)
    with file.open("r+b") as opened:
        opened.seek(20 << 20)
        opened.write(bytes([data[20 << 20] ^ 1]))
    with pytest.raises(DamagedFileError, match="bytes 20971520 to 21233664 were altered"):
        store.upload(file, f"{url}/b", checksums=(len(data), sums))
    assert not locate(f"{url}/b").exists()
    with pytest.raises(DamagedFileError, match=r"has 41955385 bytes, expected 41955384"):
        store.upload(file, f"{url}/b", checksums=(len(data) - 1, sums))

    class StopError(Exception):
        pass

    def stop(*_: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        store.upload(file, f"{url}/b", progress=stop)
    assert not locate(f"{url}/b").exists()


def test_the_bucket_has_to_list_what_was_sent(proxy: Proxy, url: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    gone = threading.Event()

    def after(method: str, path: str) -> None:
        if method == "PUT" and "model-" in path and not gone.is_set():
            gone.set()
            with contextlib.suppress(Exception):
                locate(url).store.remove_file(path.replace(f"/{BUCKET}", f"s3://{BUCKET}"))

    proxy.after = after
    with pytest.raises(reshard.ReshardError, match="and the bucket lists nothing"):
        copy_iteration(locate(tmp_path / "run/iteration_00000001"), locate(url))
    proxy.after = None
    assert copied(url) == []
    head = log.head_of(locate(url))
    assert head is not None
    assert head.kind == "claim"


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
