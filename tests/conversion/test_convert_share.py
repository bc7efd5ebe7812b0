"""One conversion in several shares, by processes that know nothing of each other, or by the ranks of a group."""

import contextlib
import dataclasses
import fcntl
import inspect
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.cases import slow
from tests.helpers.ranks import Job
from tests.servers.doubles import running

import reshard
from reshard.commit import publication
from reshard.conversion import destinations
from reshard.errors import ArgumentError, DamagedFileError, DestinationExistsError
from reshard.ranks.group import TorchGroup
from reshard.storage.changes import try_lock
from reshard.verbs.convert import ConvertOptions

LAYOUT: dict[str, Any] = {"mesh": {"tp": 4}, "rules": [{"match": "w*", "cut": ["tp"]}, {"match": "*"}]}
TARGETS: list[dict[str, Any]] = [
    {"to": "checkpoint2", "layout": LAYOUT, "iteration": 7},
    {"to": "huggingface", "files": {"max_shard_size": 4096}},
    {"to": "safetensors", "layout": LAYOUT},
    {"to": "mindspore", "files": {"max_shard_size": 4096}},
    {"to": "checkpoint1", "layout": LAYOUT, "files": {"prefix": "run"}},
]


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    whole = {f"w{i}": generator.standard_normal((8, 16 * (i + 1))).astype(np.float32) for i in range(6)}
    return whole | {"b": np.arange(3)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    reshard.save_file(arrays(), tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


def content(path: Path) -> dict[str, bytes]:
    """The files of a destination, less what only one attempt has."""
    folder = next(path.glob("iteration_*"), path)
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*")}
    kept = {name: file for name, file in files.items() if file.suffix in SUFFIXES or file.name in KEPT}
    return {name: file.read_bytes() for name, file in kept.items() if not name.startswith(".")}


SUFFIXES = (".safetensors", ".ckpt")
KEPT = (
    *("metadata.json", "tiles.json", "common.json", "checksums.bin", "model.safetensors.index.json"),
    *("param_name_map.json", "meta.json"),
)


def debris(folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder)) for path in folder.rglob("*") if "share-" in path.name or path.name == ".staging"
    ]


@pytest.mark.parametrize("options", TARGETS, ids=lambda options: options["to"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_shares_in_any_order_are_the_whole_conversion(
    tmp_path: Path, source: Path, options: dict[str, Any], order: tuple[int, ...]
) -> None:
    reshard.convert(source, tmp_path / "whole", **options)
    dst = tmp_path / "shared"
    for n, index in enumerate(order):
        assert reshard.convert(source, dst, share=(index, 3), **options).pending == tuple(sorted(order[n + 1 :]))
        assert (n == 2) == bool(dst.exists() and content(dst))
    assert content(dst) == content(tmp_path / "whole")
    assert debris(tmp_path) == []
    with reshard.open(dst) as opened:
        found = opened.load()
        assert opened.verified == (options["to"] == "checkpoint2")
    assert {key: array.tobytes() for key, array in found.items()} == {k: a.tobytes() for k, a in arrays().items()}
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, dst, share=(0, 3), **options)


@pytest.mark.parametrize("options", TARGETS, ids=lambda options: options["to"])
def test_a_share_that_was_cut_short_is_written_again_and_one_that_is_there_is_not(
    tmp_path: Path, source: Path, options: dict[str, Any]
) -> None:
    dst = tmp_path / "shared"
    reshard.convert(source, dst, share=(0, 2), **options)
    (record,) = tmp_path.rglob("share-0.json")
    files = {path: path.stat().st_ino for path in record.parent.rglob("*")}
    assert reshard.convert(source, dst, share=(0, 2), **options).pending == (1,)
    assert files == {path: path.stat().st_ino for path in record.parent.rglob("*")}
    victim = next(path for path in files if path.suffix == ".safetensors")
    os.truncate(victim, 9)
    record.write_bytes(record.read_bytes()[:-3])
    assert reshard.convert(source, dst, share=(0, 2), **options).pending == (1,)
    assert victim.stat().st_size > 9
    # Lost after it was told of: whoever publishes finds it out, and it can be written again.
    victim.unlink()
    with pytest.raises(DamagedFileError, match=r"share 0 of 2 .* of its record"):
        reshard.convert(source, dst, share=(1, 2), **options)
    assert not dst.exists() or content(dst) == {}
    assert reshard.convert(source, dst, share=(0, 2), **options).pending == ()
    reshard.convert(source, tmp_path / "whole", **options)
    assert content(dst) == content(tmp_path / "whole")


@pytest.mark.parametrize("options", TARGETS[:2], ids=lambda options: options["to"])
def test_shares_of_different_conversions_do_not_meet(
    tmp_path: Path, source: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dst = tmp_path / "dst"
    reshard.convert(source, dst, share=(0, 2), **options)
    assert not caplog.records
    assert reshard.convert(source, dst, share=(1, 2), dtype="bfloat16", **options).pending == (0,)
    reshard.save_file(arrays() | {"b": np.arange(4)}, source)
    assert reshard.convert(source, dst, share=(1, 2), **options).pending == (0,)
    folders = [path for path in tmp_path.rglob("*share-*") if path.is_dir()]
    assert len(folders) == 3
    warned = [record.getMessage() for record in caplog.records]
    assert [sum(str(folder) in one for one in warned) for folder in folders].count(0) == 1  # of the last share
    assert len(warned) == 3
    assert all("has shares of another conversion" in one for one in warned)


@pytest.mark.parametrize("end", ["", ".safetensors"])
def test_a_destination_with_a_long_name(
    tmp_path: Path, source: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (f"{'模' * 80}1{end}", f"{'模' * 80}2{end}"):  # 252 bytes with the ending
        assert reshard.convert(source, tmp_path / "alone" / name).pending == ()
        assert reshard.convert(source, tmp_path / name, share=(0, 2)).pending == (1,)
    assert not caplog.records
    for name in (f"{'模' * 80}1{end}", f"{'模' * 80}2{end}"):
        assert reshard.convert(source, tmp_path / name, share=(1, 2)).pending == ()
        assert reshard.diff(tmp_path / name, source).equal
    assert debris(tmp_path) == []


@pytest.mark.slow(disk=False)
def test_the_last_share_publishes_if_another_process_that_publishes_ends_before(tmp_path: Path, source: Path) -> None:
    dst = tmp_path / "dst"
    reshard.convert(source, dst, share=(0, 2), **TARGETS[1])
    with ThreadPoolExecutor(1) as thread, try_lock(next(tmp_path.glob(".dst.share-*"))) as is_ours:
        assert is_ours
        last = thread.submit(reshard.convert, source, dst, share=(1, 2), **TARGETS[1])
        with pytest.raises(TimeoutError):
            last.result(1)
    reshard.convert(source, tmp_path / "whole", **TARGETS[1])
    assert last.result().pending == ()
    assert (content(dst), debris(tmp_path)) == (content(tmp_path / "whole"), [])


def test_of_two_hosts_that_have_all_shares_one_publishes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, lock, rename = tmp_path / "dst", fcntl.flock, vars(publication)["_rename"]
    later: list[Future[reshard.ConvertReport]] = []

    def as_of_nfs(handle: int, how: int) -> None:
        """Threads are hosts: the lock of a folder is not seen on another one."""
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            lock(handle, how)

    def meanwhile(*arguments: Any, **given: Any) -> None:
        monkeypatch.setattr(publication, "_rename", rename)
        later.append(thread.submit(reshard.convert, source, dst, share=(0, 2), **TARGETS[1]))
        with contextlib.suppress(TimeoutError):
            later[0].result(0.4)
        rename(*arguments, **given)

    monkeypatch.setattr(fcntl, "flock", as_of_nfs)
    assert reshard.convert(source, dst, share=(0, 2), **TARGETS[1]).pending == (1,)
    monkeypatch.setattr(publication, "_rename", meanwhile)
    with ThreadPoolExecutor(1) as thread:
        assert reshard.convert(source, dst, share=(1, 2), **TARGETS[1]).pending == ()
        assert later[0].result().pending == ()
    reshard.convert(source, tmp_path / "whole", **TARGETS[1])
    assert (content(dst), debris(tmp_path)) == (content(tmp_path / "whole"), [])


def test_a_share_that_others_publish_before_it_looks_is_not_pending(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, record = tmp_path / "dst", vars(destinations)["write_record"]

    def then_others(*arguments: Any, **given: Any) -> None:
        record(*arguments, **given)
        monkeypatch.setattr(destinations, "write_record", record)
        assert reshard.convert(source, dst, share=(0, 2), **TARGETS[1]).pending == ()

    assert reshard.convert(source, dst, share=(0, 2), **TARGETS[1]).pending == (1,)
    monkeypatch.setattr(destinations, "write_record", then_others)
    assert reshard.convert(source, dst, share=(1, 2), **TARGETS[1]).pending == ()
    assert content(dst)


ROOT, FOLDER, PADDED = TARGETS[0], TARGETS[1], {"to": "huggingface", "select": {"pad": {"b": "vocab_size"}}}
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((ROOT, {name: value}) for name, value in (("part", "model"), ("dtype", "bfloat16"), ("overwrite", True))),
    *((ROOT, {"select": one}) for one in ({"only": "w"}, {"drop": "b"}, {"rename": {"b": "c"}})),
    *((ROOT, {"select": one}) for one in ({"pad": {"b": 5}}, {"trim": {"b": 2}})),
    *((ROOT, {"files": one}) for one in ({"prefix": "run"}, {"strict_format": True}, {"dedup": True})),
    *((ROOT, {"commit": one}) for one in ({"durable": False}, {"private": True})),
    (ROOT, {"iteration": 8}),
    (ROOT, {"names": {"rules": [{"from": "b", "to": "c"}]}}),
    (ROOT, {"layout": {"mesh": {"tp": 2}, "rules": [{"match": "w*", "cut": ["tp"]}, {"match": "*"}]}}),
    (ROOT | {"dtype": "bfloat16"}, {"dtype_all": True}),
    *(
        (FOLDER, {"files": {"max_shard_size": 4096} | one})
        for one in ({"max_shard_size": 8192}, {"check_names": False})
    ),
    (FOLDER, {"files": {"max_shard_size": 4096, "model_files": "hf"}}),
    (PADDED | {"config": {"vocab_size": 5}}, {"config": {"vocab_size": 6}}),
]


def test_a_share_that_finds_the_destination_filled_removes_no_record_of_the_others(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, how = tmp_path / "dst", TARGETS[2]
    assert reshard.convert(source, dst, share=(0, 2), **how).pending == (1,)

    def meanwhile(*_: object) -> None:
        dst.mkdir()
        (dst / "notes").write_text("of a user")

    with monkeypatch.context() as patched:
        patched.setattr(destinations, "warn_of_others", meanwhile)
        with pytest.raises(DestinationExistsError, match="was made while share 1 of 2 began"):
            reshard.convert(source, dst, share=(1, 2), **how)
    (dst / "notes").unlink()
    dst.rmdir()
    assert reshard.convert(source, dst, share=(1, 2), **how).pending == ()
    assert debris(tmp_path) == []


@pytest.mark.parametrize(("base", "change"), CHANGES, ids=str)
def test_shares_that_differ_in_an_option_do_not_meet(
    base: dict[str, Any], change: dict[str, Any], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"vocab_size": 5}')
    monkeypatch.chdir(tmp_path)
    reshard.convert(source, "dst", share=(0, 2), **base)
    assert reshard.convert(source, "dst", share=(1, 2), **base | change).pending == (0,)
    assert reshard.convert(source, "dst", share=(1, 2), threads=1, memory="16MiB", **base).pending == ()


def test_every_argument_of_a_conversion_is_compared_between_shares_or_marked() -> None:
    of_the_call = {"src", "dst", "share", "group", "on", "timeout", "max_shard_size"}
    options = dataclasses.fields(ConvertOptions)
    assert {one.name for one in options} == inspect.signature(reshard.convert).parameters.keys() - of_the_call
    assert {one.name for one in options if one.metadata} == {"config", "memory", "threads", "progress"}


@pytest.mark.parametrize("share", [(2, 2), (-1, 2), (0, 0), (True, 2), (0.0, 1)])
def test_a_share_that_cannot_be_is_refused(tmp_path: Path, source: Path, share: Any) -> None:
    with pytest.raises(ArgumentError, match="share"):
        reshard.convert(source, tmp_path / "dst", share=share)


def big_arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(6)
    arrays = {f"w{i}": generator.standard_normal((1000 + i, 1024)).astype(np.float32) for i in range(5)}
    arrays["w3"][-1, -1] = np.nan
    arrays["w4"][:] = np.inf
    arrays["w4"][1000, 5] = np.nan
    return arrays | {"none": np.zeros((0, 3)), "b": np.arange(3)}


BIG_TARGETS: list[dict[str, Any]] = [
    {"to": "safetensors"},
    {"to": "huggingface"},
    {"to": "huggingface", "max_shard_size": "13MB"},
    {
        "to": "checkpoint2",
        "layout": {"mesh": {"tp": 2}, "rules": [{"match": "w*", "cut": [None, "tp"]}, {"match": "*"}]},
    },
    {"to": "dcp", "max_shard_size": "3MB"},
]


@pytest.mark.parametrize(("options", "n"), [(one, 3 + i) for i, one in enumerate(BIG_TARGETS)], ids=str)
def test_shares_are_ranges_of_large_files(tmp_path: Path, options: dict[str, Any], n: int) -> None:
    source, end = tmp_path / "src.safetensors", ".safetensors" if options["to"] == "safetensors" else ""
    reshard.save_file(big_arrays(), source)
    whole, dst = tmp_path / f"whole{end}", tmp_path / f"shared{end}"
    reshard.convert(source, whole, **options)
    wanted = sum(file.stat().st_size for file in [whole, *whole.rglob("*")] if file.suffix in {*SUFFIXES, ".distcp"})
    sizes = [reshard.convert(source, dst, share=(i, n), **options).n_bytes for i in reversed(range(n))][:-1]
    if options["to"] != "dcp":  # of whole files
        assert max(sizes) < 1.2 * wanted / n, (sizes, wanted)
    files = [file.relative_to(whole) for file in [whole, *whole.rglob("*")] if file.is_file()]
    same = [file for file in files if file.suffix in {*SUFFIXES, ".distcp", ".bin"} or (not file.suffix and end)]
    assert same
    for file in [*same, *(file for file in files if file.name == "not_finite.json")]:
        assert (whole / file).read_bytes() == (dst / file).read_bytes(), file
    assert debris(tmp_path) == []
    assert reshard.verify(dst).ok


def test_a_range_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    source, dst = tmp_path / "src.safetensors", tmp_path / "dst.safetensors"
    reshard.save_file(big_arrays(), source)
    assert reshard.convert(source, dst, share=(2, 3)).pending == (0, 1)
    assert reshard.convert(source, dst, share=(0, 3)).pending == (1,)
    (shared,) = tmp_path.glob(".dst*")
    (file,) = shared.rglob("dst.safetensors")
    os.truncate(file, 9)  # as if a host had lost what it had not synced
    with pytest.raises(DamagedFileError, match=r"share 2 of 3 .* of its record"):
        reshard.convert(source, dst, share=(1, 3))
    assert not dst.exists()
    assert [reshard.convert(source, dst, share=(i, 3)).pending for i in (0, 2, 1)] == [(1, 2), (1,), ()]
    reshard.convert(source, tmp_path / "whole.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == dst.read_bytes()


def read_from_disk(source: Path, dst: Path, **options: Any) -> int:
    """Bytes that a conversion reads from the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def n_read() -> int:
        (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
        return int(line.split()[1])

    before = n_read()
    reshard.convert(source, dst, **options)
    return n_read() - before


@pytest.mark.disk
@pytest.mark.slow
def test_shares_together_read_what_one_process_reads(tmp_path: Path) -> None:
    source, n = tmp_path / "src.safetensors", 3
    # The system reads up to 8 MiB ahead of each share.
    reshard.save_file({f"w{i}": np.full((16384, 1024), i, np.float32) for i in range(6)}, source)
    warm = reshard.convert(source, tmp_path / "warm.safetensors").n_bytes  # what else is read once
    alone = read_from_disk(source, tmp_path / "whole.safetensors")
    if alone < warm // 2:
        pytest.skip("the source is not read from a disk here")
    parts = [read_from_disk(source, tmp_path / "dst.safetensors", share=(i, n)) for i in range(n)]
    assert sum(parts) < 1.1 * alone
    assert max(parts) < 1.2 * alone / n
    assert (tmp_path / "dst.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("n", [2, 5])
def test_shares_read_their_ranges_from_a_server(tmp_path: Path, n: int) -> None:
    reshard.save_file(big_arrays(), tmp_path / "src.safetensors")
    with running("files") as server:
        server.objects["src.safetensors"] = (tmp_path / "src.safetensors").read_bytes()
        url, dst = f"{server.endpoint}/src.safetensors", tmp_path / "dst.safetensors"
        for i in range(n):
            reshard.convert(url, dst, share=(i, n), dtype="float16")
    reshard.convert(tmp_path / "src.safetensors", tmp_path / "whole.safetensors", dtype="float16")
    assert (tmp_path / "dst.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.slow(disk=False)
def test_ranks_of_a_group_each_write_their_share_and_all_learn_the_outcome(tmp_path: Path, source: Path) -> None:
    dst = tmp_path / "dst"

    def work(group: TorchGroup) -> list[object]:
        report = reshard.convert(source, dst, group=group, timeout=30, **TARGETS[0])
        return [report.path, report.n_files > 0, list(report.pending)]

    with Job(3, work) as job:
        outcomes = job.outcomes()
    assert outcomes == [{"value": [str(dst / "iteration_00000007"), True, []]}] * 3
    assert debris(tmp_path) == []
    with Job(2, work) as job:
        outcomes = job.outcomes()
    assert [outcome["error"] for outcome in outcomes if outcome] == ["DestinationExistsError"] * 2


@pytest.mark.slow(disk=False)
def test_ranks_that_plan_different_conversions_are_told(tmp_path: Path, source: Path) -> None:
    def work(group: TorchGroup) -> list[object]:
        dtype = ("bfloat16", "float16")[group.rank]
        return list(reshard.convert(source, tmp_path / "dst", group=group, timeout=30, dtype=dtype).pending)

    with Job(2, work) as job:
        outcomes = job.outcomes()
    assert [outcome["error"] for outcome in outcomes if outcome] == ["MismatchError"] * 2
    assert not (tmp_path / "dst").exists()


NAMES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
LAUNCHERS: list[dict[str, str]] = [
    {"RANK": "{}", "WORLD_SIZE": "2"},
    {"RANK": "{}", "WORLD_SIZE": "2", "SLURM_PROCID": "9", "SLURM_NTASKS": "99"},  # srun has started torchrun
    {"SLURM_PROCID": "{}", "SLURM_NTASKS": "2", "PMI_RANK": "{}", "PMI_SIZE": "2"},
    {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2"},
    {"PMI_RANK": "{}", "PMI_SIZE": "2"},
]


def converted(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name not in NAMES} | variables
    command = [sys.executable, "-m", "reshard", "convert", *map(str, arguments), "--json"]
    return subprocess.run(command, env=environment, capture_output=True, check=False, text=True)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("variables", [LAUNCHERS[0], *slow(LAUNCHERS[1:])], ids=lambda one: next(iter(one)))
def test_each_process_of_a_launcher_writes_its_share(tmp_path: Path, source: Path, variables: dict[str, str]) -> None:
    pending = []
    for rank in ("1", "0"):
        done = converted(source, tmp_path / "dst", "--on", "ranks", **{k: v.format(rank) for k, v in variables.items()})
        assert done.returncode == 0, done.stderr
        pending.append(json.loads(done.stdout)["pending"])
    assert pending == [[0], []]
    assert content(tmp_path / "dst")


@pytest.mark.slow(disk=False)
def test_a_command_by_hand_in_the_environment_of_a_launcher_converts_all(tmp_path: Path, source: Path) -> None:
    done = converted(source, tmp_path / "dst", RANK="1", WORLD_SIZE="8")
    assert json.loads(done.stdout)["pending"] == []
    assert content(tmp_path / "dst")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {}, "none of RANK and WORLD_SIZE, SLURM_PROCID and SLURM_NTASKS"),
        (("--share", "0/2"), {"RANK": "0", "WORLD_SIZE": "2"}, "--share and --on exclude each other"),
        ((), {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"},
         "rank 0 of 2 (SLURM_PROCID, SLURM_NTASKS) and rank 1 of 2 (PMI_RANK, PMI_SIZE)"),
        ((), {"RANK": "2"}, "no launcher has started"),
        ((), {"RANK": "2", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "1"}, "RANK is '2' and WORLD_SIZE is '2'"),
        ((), {"PMI_RANK": "-1", "PMI_SIZE": "many"}, "PMI_RANK is '-1' and PMI_SIZE is 'many': these are no rank"),
    ],
)  # fmt: skip
def test_a_rank_that_no_launcher_tells_is_refused(
    tmp_path: Path, source: Path, arguments: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = converted(source, tmp_path / "dst", "--on", "ranks", *arguments, **variables)
    assert done.returncode in {1, 2}
    assert message in done.stdout + done.stderr
    assert not (tmp_path / "dst").exists()


@pytest.mark.slow(disk=False)
def test_the_share_of_the_command(tmp_path: Path, source: Path) -> None:
    said = json.loads(converted(source, tmp_path / "x", "--share", "1/3").stdout)
    assert said["pending"] == [0, 2]
    assert said["share"] == "1/3"
