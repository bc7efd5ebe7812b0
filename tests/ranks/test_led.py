"""Shares of a comparison by ranks: rank 0 leads, prints one result, and all end with the same code."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.command_line import run as run_alone
from tests.helpers.command_line import start
from tests.helpers.ports import unused_port
from tests.helpers.ranks import Job, Signal
from torch._C import _distributed_c10d as c10d

import reshard
from reshard.cli import main, output
from reshard.commit import manifest as manifests
from reshard.commit.scrub import scrub_folder
from reshard.errors import ArgumentError, GroupError
from reshard.ranks import led, torch_group
from reshard.ranks.group import SingleProcess
from reshard.ranks.led import LedRanks
from reshard.ranks.torch_group import TorchSession
from reshard.values.fetched import Fetched, fetched_so_far
from reshard.verbs import verify as verifications

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.torch_group import TorchGroup

LAYOUT: dict[str, Any] = {"mesh": {"tp": 4}, "rules": [{"match": "w*", "cut": ["tp"]}, {"match": "*"}]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    arrays = {f"w{i}": np.random.default_rng(i).standard_normal((8, 5)).astype(np.float32) for i in range(6)}
    reshard.save_file(arrays | {"b": np.arange(3)}, tmp_path / "src.safetensors")
    reshard.convert(tmp_path / "src.safetensors", tmp_path / "run", layout=LAYOUT, iteration=4)
    return tmp_path / "run"


def damage(run: Path) -> None:
    for number in (0, 2):
        with next(run.glob(f"*/*000000{number}-0000004.safetensors")).open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\x7f")


def command(*words: object) -> Callable[[TorchGroup], Any]:
    """The command line on a rank, as a process that a launcher has started."""

    def start(group: TorchGroup) -> Any:
        os.environ.update(RANK=str(group.rank), WORLD_SIZE=str(group.world_size), MASTER_ADDR="127.0.0.1")
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
            main([*map(str, words), "--on", "ranks"])
        sys.stdout.flush()
        return [end.value.code, out.getvalue(), errors.getvalue()]

    return start


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> c10d.TCPStore:
    """The store that the agent of torchrun serves."""
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def on_ranks(*words: object, n_ranks: int = 3) -> list[Any]:
    with Job(n_ranks, command(*words)) as job:
        return job.values()


def reports(said: list[Any], code: int) -> Any:
    assert [one[0] for one in said] == [code] * len(said), said
    assert [one[1:] for one in said[1:]] == [["", ""]] * (len(said) - 1), said
    report = json.loads(said[0][1])
    report.pop("seconds", None)
    return report


@pytest.mark.slow(disk=False)
def test_ranks_print_one_report_and_end_with_one_code(torchrun: c10d.TCPStore, run: Path) -> None:
    whole = reports(on_ranks("verify", run, "--json"), 0)
    assert whole["checkpoints"][0]["n_files"] == 7
    damage(run)
    damaged = reports(on_ranks("verify", run, "--json"), 1)
    alone = reshard.verify(run)
    assert [one["file"] for one in damaged["checkpoints"][0]["faults"]] == [
        fault.file for fault in alone.checkpoints[0].faults
    ]
    assert len(alone.checkpoints[0].faults) == 2
    missing = reports(on_ranks("verify", run / "none", "--json"), 1)
    assert missing["message"] == f"there is nothing at `{run / 'none'}`"


@pytest.mark.slow(disk=False)
def test_ranks_compare_tensors_as_one_process_does(torchrun: c10d.TCPStore, run: Path) -> None:
    source = run.parent / "src.safetensors"
    assert reports(on_ranks("diff", source, run, "--json"), 0)["n_equal"] == 7
    other = reshard.load_file(source) | {"w3": np.ones((8, 5), np.float32), "b": np.arange(4)}
    reshard.save_file(other, run.parent / "other.safetensors")
    found = reports(on_ranks("diff", run.parent / "other.safetensors", run, "--json"), 1)
    alone = reshard.diff(run.parent / "other.safetensors", run)
    assert [(one["key"], one["max_abs"]) for one in found["differences"]] == [
        (one.key, one.max_abs) for one in alone.differences
    ]
    assert len(alone.differences) == 2
    assert reports(on_ranks("diff", source, run.parent / "none", "--json"), 2)["error"] == "EmptyRootError"


@pytest.mark.slow(disk=False)
def test_rank_0_says_each_warning_once(torchrun: c10d.TCPStore, tmp_path: Path) -> None:
    """It opens the checkpoint to lead, and again for its share."""
    reshard.save_file({"w": np.zeros(3), "e": np.zeros(0)}, tmp_path / "src.safetensors")
    reshard.convert(tmp_path / "src.safetensors", tmp_path / "hf")
    warned = reports(on_ranks("diff", tmp_path / "hf", tmp_path / "src.safetensors", "--json", n_ranks=2), 0)[
        "warnings"
    ]
    assert [one.partition(":")[0] for one in warned] == [str(tmp_path / "hf")]


@pytest.mark.slow(disk=False)
def test_ranks_count_values_as_one_process_does(torchrun: c10d.TCPStore, run: Path) -> None:
    alone = json.loads(run_alone("inspect", run, "--stats", "--json").stdout)
    assert len(alone["tensors"]) == 7
    assert reports(on_ranks("inspect", run, "--stats", "--json"), 0) == alone
    damage(run)
    assert (
        reports(on_ranks("inspect", run / "iteration_00000004", "--stats", "--json"), 1)["error"] == "DamagedFileError"
    )


def test_every_rank_compares_its_part_of_the_bytes(run: Path) -> None:
    def work(group: TorchGroup) -> Any:
        own: list[int] = []
        scrub = scrub_folder

        def noted(folder: Any, manifest: Any, names: Any = None, **given: Any) -> Any:
            own.extend(end - start for start, end in given["within"].values())
            return scrub(folder, manifest, names, **given)

        vars(verifications)["scrub_folder"] = noted
        report = reshard.verify(run, on=LedRanks(group))
        return [sum(own), report.n_bytes, report.ok]

    with Job(4, work) as job:
        said = job.values()
    assert [one[1:] for one in said] == [[said[0][1], True]] * 4
    sizes = [one[0] for one in said]
    assert min(sizes) > 0
    assert sum(sizes) == sum(file.stat().st_size for file in run.glob("*/*.safetensors"))


def test_what_is_to_be_done_is_sent_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LedRanks, "n_shares", lambda *_: 6)
    scrubbing = vars(verifications)["_scrubbing"]

    def work(group: TorchGroup) -> Any:
        received: list[Any] = []

        def noted(sent: Any) -> Any:
            received.append(sent)
            return scrubbing(sent)

        vars(verifications)["_scrubbing"] = noted
        assert reshard.verify(run, on=LedRanks(group)).ok
        return [len(one.own) for one in received]

    with Job(2, work) as job:
        assert job.values() == [[4], [4]]  # of four files


@pytest.mark.slow(disk=False)
def test_rank_0_counts_once_what_each_rank_has_fetched(run: Path) -> None:
    def work(group: TorchGroup) -> Any:
        counts, before = itertools.count(), fetched_so_far()

        def fetched() -> Fetched:  # one request more at each call
            return Fetched(n_requests=next(counts) * 10 ** (2 * group.rank))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(led, "fetched_here", fetched)
            assert reshard.verify(run, on=LedRanks(group)).ok
        return (fetched_so_far() - before).n_requests

    with Job(3, work) as job:
        # A process counts its own requests itself.
        assert job.values() == [10_100, 0, 0]


@pytest.mark.parametrize("dies", [0, 2])
def test_a_rank_that_is_killed_is_named_on_all_others(run: Path, dies: int) -> None:
    dead, sent = Signal(), Signal()

    def work(group: TorchGroup) -> Any:
        ranks = LedRanks(group, timeout=60)
        gather = TorchSession.gather

        def noted(*arguments: Any, **given: Any) -> Any:
            if group.rank == 0:
                sent.wait()
            elif group.rank != dies:
                gather(*arguments, **given)
                sent.set()
            dead.wait()
            ranks.timeout = 3 if 0 in (dies, group.rank) else 60  # the first to give up tells the others
            return gather(*arguments, **(given | {"timeout": 3})) if group.rank == 0 else None

        TorchSession.gather = noted  # type: ignore[method-assign]
        if group.rank == dies:
            vars(verifications)["scrub_folder"] = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        return reshard.verify(run, on=ranks).ok

    with Job(3, work) as job:
        handle = os.pidfd_open(job.pids[dies])
        assert select.select([handle], [], [], 60)[0], "it was not killed"
        os.close(handle)
        dead.set()
        said = job.outcomes()
    assert said[dies] is None
    for one in (one for rank, one in enumerate(said) if rank != dies):
        assert one is not None
        assert one["error"] == "GroupError"
        assert f"no answer of rank {dies} of 3 within 3 s" in one["text"]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("interrupted", [0, 1])
def test_no_rank_waits_for_one_that_was_interrupted_and_the_next_call_works(run: Path, interrupted: int) -> None:
    def work(group: TorchGroup) -> Any:
        ranks, scrub = LedRanks(group), scrub_folder

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        if group.rank == interrupted:
            vars(verifications)["scrub_folder"] = interrupt
        with pytest.raises((GroupError, KeyboardInterrupt)) as caught:
            reshard.verify(run, on=ranks)
        is_told = ranks.is_told
        vars(verifications)["scrub_folder"] = scrub
        return [type(caught.value).__name__, str(caught.value), is_told, reshard.verify(run, on=ranks).ok]

    with Job(3, work) as job:
        said = job.values()
    for rank, one in enumerate(said):
        if rank == interrupted:
            assert one == ["KeyboardInterrupt", "", False, True]
        else:
            assert one == ["GroupError", f"rank {interrupted}: KeyboardInterrupt: ", False, True]


def test_a_rank_that_cannot_begin_is_an_error_on_all(run: Path) -> None:
    def work(group: TorchGroup) -> Any:
        ranks = LedRanks(group)

        def fail(*_: object) -> None:
            raise RuntimeError("no such work")

        if group.rank == 1:
            vars(verifications)["_scrubbing"] = fail
        with pytest.raises(reshard.errors.ReshardError, match=r"rank 1: on host `.*`: RuntimeError: no such work"):
            reshard.verify(run, on=ranks)
        return ranks.is_told

    with Job(3, work) as job:
        assert job.values() == [False, True, True]


@pytest.mark.slow(disk=False)
def test_rank_0_ends_once_all_have_the_report(run: Path) -> None:
    """It may serve the store that the others need."""
    has_ended = Signal()

    def work(group: TorchGroup) -> Any:
        torch_group._LINGER_S = 0.0
        broadcast = TorchSession.broadcast

        def late(*arguments: Any, **given: Any) -> Any:
            told = broadcast(*arguments, **given)
            if group.rank == 1 and "report" in told:
                time.sleep(0.5)  # it is slow
                assert not select.select([has_ended._reader], [], [], 0)[0], "rank 0 has ended"
            return told

        TorchSession.broadcast = late  # type: ignore[method-assign]
        is_ok = reshard.verify(run, on=LedRanks(group)).ok
        if group.rank == 0:
            has_ended.set()
        return is_ok

    with Job(2, work) as job:
        assert job.values() == [True, True]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("checkpoint", ["run", "none"])
def test_no_rank_ends_while_rank_0_prints(torchrun: c10d.TCPStore, run: Path, checkpoint: str) -> None:
    """Launchers end all processes as soon as one of them has ended with an error."""
    damage(run)
    has_ended = Signal()
    verify = command("verify", run.parent / checkpoint, "--json")

    def work(group: TorchGroup) -> Any:
        write = output._write

        def late(text: str, **options: Any) -> None:
            time.sleep(1)
            assert not select.select([has_ended._reader], [], [], 0)[0], "rank 1 has ended"
            write(text, **options)

        if group.rank == 0:
            output._write = late
        code, *printed = verify(group)
        if group.rank == 1:
            has_ended.set()
        return [code, *printed]

    with Job(2, work) as job:
        assert reports(job.values(), 1)


@pytest.mark.slow(disk=False)
def test_ranks_print_what_rank_0_cannot(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves the store, and is killed."""
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    begun = Signal()
    verify = command("verify", run, "--json")

    def work(group: TorchGroup) -> Any:
        scrub = scrub_folder

        def note(*arguments: Any, **given: Any) -> Any:
            if group.rank == 0:
                begun.wait(2)
                os.kill(os.getpid(), signal.SIGKILL)
            begun.set()
            return scrub(*arguments, **given)

        vars(verifications)["scrub_folder"] = note
        return verify(group)

    with Job(3, work) as job:
        first, *others = job.outcomes()
    assert first is None
    for one in others:
        assert one is not None
        code, out, _ = one["value"]
        assert (code, json.loads(out)["error"]) == (1, "GroupError")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("verb", ["verify", "diff", "inspect"])
def test_rank_0_alone_shows_progress(torchrun: c10d.TCPStore, run: Path, verb: str) -> None:
    more: dict[str, list[object]] = {"diff": [run.parent / "src.safetensors"], "inspect": ["--stats"]}
    found = command(verb, run, *more.get(verb, []))

    def work(group: TorchGroup) -> Any:
        output.ProgressLines.wait_s = 0.05
        begin = LedRanks.led

        def late(self: LedRanks, *arguments: Any) -> Any:
            time.sleep(0.5)
            return begin(self, *arguments)

        vars(led)["LedRanks"].led = late
        return found(group)

    with Job(2, work) as job:
        first, other = job.values()
    assert (first[0], other) == (0, [0, "", ""])
    assert first[2].startswith("preparing, ")


def test_a_rank_that_sees_another_save_is_an_error_on_all(run: Path) -> None:
    reshard.save(run.parent / "other", 4, {"w": np.zeros(3)})

    def work(group: TorchGroup) -> Any:
        if group.rank == 1:
            read = manifests.read
            manifests.read = lambda folder: read(folder.parent.parent / "other" / folder.name)
        return reshard.verify(run, on=LedRanks(group)).ok

    with Job(2, work) as job:
        said = job.outcomes()
    assert [one and one["error"] for one in said] == ["MismatchError"] * 2
    host = f"rank 1: on host `{socket.gethostname()}`: "
    assert all(one and host in one["text"] and "holds another save here" in one["text"] for one in said)


def test_rank_0_serves_the_store_where_the_launcher_does_not(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    assert reports(on_ranks("verify", run, "--json", n_ranks=2), 0)["ok"]


@pytest.mark.slow(disk=False)
def test_a_rank_that_nobody_started_or_that_does_not_know_rank_0_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # the command sets it
    result = CliRunner().invoke(main, ["verify", str(run), "--on", "ranks"])
    assert result.exit_code == 1
    assert "no launcher has started this process" in result.output
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(main, ["diff", str(run), str(run), "--on", "ranks"])
    assert result.exit_code == 2
    assert "rank 1 of 2 does not know where rank 0 is: MASTER_ADDR is '' and MASTER_PORT is ''" in result.output
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for port in ("0", "65536", "9" * 30):
        monkeypatch.setenv("MASTER_PORT", port)
        result = CliRunner().invoke(main, ["verify", str(run), "--on", "ranks"])
        assert f"MASTER_PORT is '{port}'" in result.output
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        result = CliRunner().invoke(main, ["verify", str(run), "--on", "ranks", "--timeout", "1"])
    assert result.exit_code == 1
    assert "rank 1 of 2 cannot reach rank 0 at 127.0.0.1:" in result.output


@pytest.mark.slow(disk=False)
def test_torch_prints_no_stack_beside_the_error(run: Path) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        environment = os.environ | launched | {"MASTER_PORT": str(taken.getsockname()[1])}
        environment.pop("TORCH_CPP_LOG_LEVEL", None)
        process = start("verify", run, "--on", "ranks", "--timeout", "1", "--quiet", env=environment)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["error", "hint"]


def test_ranks_of_a_conversion_are_a_group(run: Path) -> None:
    with pytest.raises(ArgumentError, match="given as `group`"):
        reshard.convert(run, run.parent / "dst", on=LedRanks(SingleProcess()))
