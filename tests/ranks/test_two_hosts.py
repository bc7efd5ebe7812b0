"""Two hosts, which share a folder or have one each: their ranks save and resume together, or learn why they cannot.

Hosts are namespaces of one machine with a cable between them, see `hosts`. A host can lose its power, and the cable can
be pulled, in the middle of a save.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.hosts import INTERFACE, Host, on_two_hosts
from tests.helpers.ranks import Job, Signal, no_longer_patient
from tests.helpers.training import whole_run
from torch import nn

import reshard
from reshard import _core
from reshard.commit import claims
from reshard.errors import ReshardError
from reshard.examples.train_gpt import arguments, train
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

pytestmark = pytest.mark.slow

LAYOUT: dict[str, Any] = {"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": ["tp"]}]}
WHOLE = np.arange(64.0).reshape(8, 8)


def save(group: TorchGroup, root: Path, iteration: int, timeout: float = 30) -> None:
    own = WHOLE[2 * group.rank :][:2] + iteration
    reshard.save(root, iteration, {"w": own}, layout=LAYOUT, group=group, timeout=timeout, commit={"durable": False})


def is_whole(root: Path, iteration: int) -> bool:
    with reshard.open(root) as found:
        return found.iteration == iteration and np.array_equal(found.read("w"), WHOLE + iteration)


def told(act: Callable[[], object]) -> str:
    """The error that it ends with, hint and all, and the host that says so."""
    try:
        act()
    except ReshardError as error:
        return f"{type(error).__name__} on {socket.gethostname()}: {error}"
    return f"no error on {socket.gethostname()}"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that both hosts see, and that they are told to be shared."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setenv("SHARED_PATHS", str(folder))
    return folder


def own_folders(tmp_path: Path) -> Callable[[str], dict[Path, Path]]:
    """Another folder on each host in the place of that."""

    def own(name: str) -> dict[Path, Path]:
        (tmp_path / name).mkdir(exist_ok=True)
        return {tmp_path / "root": tmp_path / name}

    return own


# -- a folder that both see


def test_torchrun_on_two_hosts_and_then_on_the_one_that_is_left(tmp_path: Path, root: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = ["--save-every", "30", "--out", str(root), "--log", str(log)]

    def launch(host: Host, number: int, address: str) -> subprocess.Popen[bytes]:
        meet = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", address, "--master-port", "29511"]
        example = ["-m", "--", "reshard.examples.train_gpt", *words, "--steps", "100000"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        with (tmp_path / host.name).open("ab") as stderr:
            command = host.command(sys.executable, "-m", "torch.distributed.run", *meet, *example)
            return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)

    def go_on(group: TorchGroup, last: int) -> str:
        del group
        train(arguments([*words, "--steps", str(last)]))
        return socket.gethostname()

    def act(a: Host, b: Host) -> list[Any]:
        launched = [launch(host, number, a.name) for number, host in enumerate((a, b))]
        deadline = time.monotonic() + 240  # other people's processes: there is nothing to wait for but what they leave
        while not list(root.glob("iteration_*")) or len(log.read_text().splitlines()) < 32:
            assert time.monotonic() < deadline, (tmp_path / a.name).read_text()
            time.sleep(0.01)
        b.power_off()
        failed, _ = (one.wait(240) for one in launched)
        with reshard.open(root) as found:
            newest = found.iteration or 0
        with Job(2, partial(go_on, last=newest + 6), hosts=[a, a]) as job:
            return [failed, newest, *job.values()]

    failed, newest, *where = on_two_hosts(act)
    assert (failed, where) == (1, ["host-a", "host-a"]), (tmp_path / "host-a").read_text()
    last = newest + 6
    expected = whole_run(tmp_path / "whole", 2, "--save-every 100000", steps=last).lines
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (resumed,) = (n for n, line in enumerate(lines) if n and line["step"] <= lines[n - 1]["step"])
    assert lines[resumed]["step"] == newest + 1
    assert lines[-1]["step"] == last
    assert all(line == expected[line["step"]] for line in lines if line["step"] <= last)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_power_of_a_host_fails_in_a_save(root: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The other host's ranks learn it in time, the old checkpoint stays, and another job goes on without that host."""
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(claims, "_WATCH_SECONDS", 1.0)
    writing, failed = Signal(), Signal()
    write = _core.write_arrays

    def hang(*_: Any, **__: Any) -> None:
        writing.set()
        signal.pause()

    def go_on_writing(*args: Any, **options: Any) -> Any:
        failed.wait()
        no_longer_patient()
        return write(*args, **options)

    def work(group: TorchGroup) -> None:
        save(group, root, 1)
        is_lost = socket.gethostname() == f"host-{lost}"
        monkeypatch.setattr(_core, "write_arrays", hang if is_lost else go_on_writing)
        save(group, root, 2, timeout=120)

    def go_on(group: TorchGroup) -> Any:
        layout = {"mesh": {"tp": 2}, "rules": LAYOUT["rules"]}
        loaded = reshard.load(root, layout, group=group)
        reshard.save(root, 2, {"w": loaded.state["w"] + 1}, layout=layout, group=group, commit={"durable": False})
        return [loaded.iteration, socket.gethostname()]

    def act(a: Host, b: Host) -> list[Any]:
        gone, left = (a, b) if lost == "a" else (b, a)
        with Job(4, work, hosts=[a, a, b, b]) as job:
            writing.wait(2)
            gone.cable(plugged=False)  # or the other host would be told at once
            gone.power_off()
            failed.set()
            outcomes = job.outcomes()
            assert is_whole(root, 1)
        with Job(2, go_on, hosts=[left, left]) as job:
            return [outcomes, job.values()]

    outcomes, went_on = on_two_hosts(act)
    dead, alive = (outcomes[:2], outcomes[2:]) if lost == "a" else (outcomes[2:], outcomes[:2])
    assert dead == [None, None]
    assert [one["error"] for one in alive] == ["GroupError"] * 2
    assert any(
        ("no answer of rank" if lost == "b" else "the rendezvous store did not answer") in one["text"] for one in alive
    )
    assert went_on == [[1, f"host-{'b' if lost == 'a' else 'a'}"]] * 2
    assert is_whole(root, 2)
    assert not list((root / ".staging").glob("*"))


def test_cable_is_pulled_and_put_in_again(root: Path) -> None:
    """Neither side publishes while it is out; then the same ranks save together again."""
    first, pulled, failed, mended = (Signal() for _ in range(4))

    def work(group: TorchGroup) -> str:
        save(group, root, 1)
        first.set()
        pulled.wait()
        failure = told(lambda: save(group, root, 2, timeout=1))
        failed.set()
        mended.wait()
        save(group, root, 3)
        return failure

    def act(a: Host, b: Host) -> Any:
        with Job(4, work, hosts=[a, a, b, b]) as job:
            first.wait(4)
            b.cable(plugged=False)
            pulled.set()
            failed.wait(4)
            assert is_whole(root, 1)
            b.cable(plugged=True)
            mended.set()
            return job.values()

    failures = on_two_hosts(act)
    assert [text.partition(":")[0] for text in failures] == [f"GroupError on host-{x}" for x in "aabb"]
    assert is_whole(root, 3)
    assert sorted(path.name for path in root.glob("iteration_*")) == ["iteration_00000001", "iteration_00000003"]
    assert not list((root / ".staging").glob("*"))


def test_second_job_behind_a_cut_waits_until_the_first_is_gone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot reach the other host cannot know whether it is alive, but for what it does in the shared folder."""
    monkeypatch.setattr(claims, "_BEAT_SECONDS", 0.1)
    saved = Signal()

    def stay(group: TorchGroup) -> None:
        reshard.save(root, 1, {"w": WHOLE + 1}, group=group, commit={"durable": False})
        saved.set()
        signal.pause()

    def come(group: TorchGroup, watch_s: float) -> str:
        monkeypatch.setattr(claims, "_WATCH_SECONDS", watch_s)
        return told(lambda: reshard.save(root, 2, {"w": WHOLE + 2}, group=group, commit={"durable": False}))

    def act(a: Host, b: Host) -> Any:
        with Job(1, stay, hosts=[a]):
            saved.wait()
            a.cable(plugged=False)
            with Job(1, partial(come, watch_s=60.0), hosts=[b]) as job:  # until the first beat
                (refused,) = job.values()
            a.power_off()
            with Job(1, partial(come, watch_s=1.0), hosts=[b]) as job:
                return [refused, *job.values()]

    refused, went_on = on_two_hosts(act)
    assert refused.startswith("ClaimedError on host-b")
    assert "on host `host-a`, which is alive" in refused
    assert went_on == "no error on host-b"
    assert is_whole(root, 2)


# -- a folder on each


@pytest.mark.parametrize("is_told_to_be_shared", [False, True])
def test_half_a_checkpoint_on_each_host_is_refused(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, *, is_told_to_be_shared: bool
) -> None:
    if not is_told_to_be_shared:
        monkeypatch.delenv("SHARED_PATHS")
    monkeypatch.setattr("reshard.formats.checkpoint2.save._VISIBLE_SECONDS", 0.5)

    def work(group: TorchGroup) -> list[str]:
        def train() -> None:
            with Checkpointer(root, save_every=1, signals=(), timeout=60, async_save=False) as made:
                made.resume(model=nn.Linear(2, 2))
                for step in range(1, 4):
                    made.step(step)

        return [told(lambda: save(group, root, 1, timeout=60)), told(train)]

    def act(a: Host, b: Host) -> Any:
        with Job(4, work, hosts=[a, a, b, b]) as job:
            return job.values()

    for text in itertools.chain(*on_two_hosts(act, own_folders(tmp_path))):
        if is_told_to_be_shared:
            assert text.startswith("StorageError")
            assert "did not appear on host-b within 0.5 s" in text
            assert "is the checkpoint root on a file system that all hosts share?" in text
        else:
            assert text.startswith("ArgumentError")
            assert f"2 hosts save together, and {root} is not on a file system that they are known to share" in text
            assert "name the folder in the environment variable SHARED_PATHS" in text
    left = [path for name in ("host-a", "host-b") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert not [path for path in left if "iteration" in str(path) or ".staging" in str(path)]


def test_copies_on_each_host_are_loaded_if_they_are_the_same(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.verbs.load._VISIBLE_SECONDS", 0.5)

    def work(_: TorchGroup) -> Any:
        torch.manual_seed(5)
        model = nn.Linear(2, 2)
        with Checkpointer(root, signals=(), timeout=60) as made:
            found: list[Any] = []
            failure = told(lambda: found.append(made.resume(model=model).initial_step))
        return [failure, found, model.weight[0, 0].item()]

    def copy(change: Callable[[Path], object] = lambda _: None) -> list[Any]:
        """What two ranks resume from, on host b from a copy with a change."""
        own = own_folders(tmp_path)
        for name in ("host-a", "host-b"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            shutil.copytree(original, tmp_path / name)
        change(tmp_path / "host-b")

        def act(a: Host, b: Host) -> Any:
            with Job(2, work, hosts=[a, b]) as job:
                return job.values()

        outcomes: list[Any] = on_two_hosts(act, own)
        return outcomes

    def numbered(folder: Path, iteration: int, value: float) -> None:
        with Checkpointer(folder, signals=()) as made:
            model = nn.Linear(2, 2)
            made.resume(model=model)
            nn.init.constant_(model.weight, value)
            made.save(iteration, blocking=True)

    original = tmp_path / "original"
    numbered(original, 1, 1.0)
    numbered(original, 2, 2.0)
    assert copy() == [[f"no error on host-{x}", [2], 2.0] for x in "ab"]

    def damage(folder: Path) -> None:
        path = next((folder / "iteration_00000002").glob("model-*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    assert copy(damage) == [[f"no error on host-{x}", [1], 1.0] for x in "ab"]
    for text, found, _ in copy(lambda folder: numbered(folder, 2, 3.0)):
        assert found == []
        assert text.startswith("MismatchError")
        assert "rank 1: this rank does not see the checkpoint that rank 0 has chosen" in text
        assert "is the checkpoint root on a file system that all hosts share?" in text
