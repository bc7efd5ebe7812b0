"""`convert --on ranks`, of which some ranks are killed at random moments, and which is then started again.

`RESHARD_CASES_FACTOR` multiplies the kills, with other moments on every run: 40 are 200 kills and more.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard.cli import main
from reshard.commit import publication
from reshard.conversion import destinations

if TYPE_CHECKING:
    from pathlib import Path

FACTOR = os.environ.get("RESHARD_CASES_FACTOR")
SEED = random.randrange(1 << 32) if FACTOR else 1
N_RANKS = 3
LAYOUT = "mesh: {tp: 4}\nrules: [{match: 'w*', cut: [tp]}, {match: '*'}]\n"
# The name of the destination, and the options of the command.
KINDS: dict[str, tuple[str, list[str]]] = {
    "file": ("dst.safetensors", []),
    "folder": ("dst", ["--max-shard-size", "2MB"]),
    "root": ("dst", ["--layout", "layout.yaml", "--iteration", "7"]),
    "checkpoint1": ("dst", ["--to", "checkpoint1", "--layout", "layout.yaml", "--prefix", "run", "--iteration", "7"]),
}


def start(words: list[str], rank: int) -> int:
    """A rank as a launcher starts it, forked off this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(N_RANKS))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        main([*words, "--on", "ranks"])
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        os._exit(code)


def codes_of(ranks: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def content(folder: Path) -> dict[str, bytes]:
    """The files below a folder with tensors or their checksums; others have times."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    ends = (".safetensors", ".ckpt", ".index.json", "checksums.bin")
    return {name: path.read_bytes() for name, path in files.items() if name.endswith(ends)}


def published(folder: Path) -> dict[str, bytes]:
    """The content without links that a kill has left, which the next command removes."""
    return {name: data for name, data in content(folder).items() if "share-" not in name}


@pytest.mark.parametrize("name", ["dst", "dst.safetensors"])
def test_a_rank_that_is_killed_while_it_publishes_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, words = tmp_path / "src.safetensors", ["convert", str(tmp_path / "src.safetensors"), str(tmp_path / name)]
    reshard.save_file({f"w{i}": np.arange(64.0) + i for i in range(4)}, source)
    with monkeypatch.context() as patch:
        patch.setattr(publication, "_rename", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        codes = [codes_of([start(words, rank)])[0] for rank in range(N_RANKS)]
    assert codes == [0] * (N_RANKS - 1) + [-signal.SIGKILL]
    assert not (tmp_path / name).exists()
    assert codes_of([start(words, 0)]) == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "src.safetensors"]
    assert reshard.diff(source, tmp_path / name).equal


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_begins_while_others_publish_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    name, options = KINDS[kind]
    source, words = tmp_path / "src.safetensors", ["convert", "src.safetensors", str(tmp_path / name), *options]
    reshard.save_file({f"w{i}": np.arange(64.0) + i for i in range(4)}, source)
    make = vars(destinations)["make_folders"]

    def late(*arguments: Any) -> None:
        vars(destinations)["make_folders"] = make
        assert [codes_of([start(words, rank)])[0] for rank in range(N_RANKS)] == [0] * N_RANKS
        make(*arguments)

    with monkeypatch.context() as patch:
        patch.setitem(vars(destinations), "make_folders", late)
        assert codes_of([start(words, 2)]) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "layout.yaml", "src.safetensors"]
    assert published(tmp_path) == content(tmp_path)
    assert reshard.diff(source, tmp_path / name).equal


@pytest.mark.slow(disk=False)
def test_ranks_that_are_killed_at_random_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    rng, source = random.Random(SEED), tmp_path / "src.safetensors"
    values = np.random.default_rng(5)
    reshard.save_file({f"w{i}": values.standard_normal((512, 512)).astype(np.float32) for i in range(8)}, source)
    alone, seconds = {}, {}
    for kind, (name, options) in KINDS.items():
        words = ["convert", str(source), str(tmp_path / "alone" / kind / name), *options]
        begun = time.monotonic()
        assert codes_of([start(words, rank) for rank in range(N_RANKS)]) == [0] * N_RANKS
        seconds[kind] = time.monotonic() - begun
        alone[kind] = content(tmp_path / "alone" / kind)
        single = tmp_path / "single" / kind
        given: dict[str, Any] = {"standalone_mode": False}
        main(["convert", str(source), str(single / name), *options], **given)
        assert content(single) == alone[kind]
    n_killed = n_conversions = n_published = 0
    while n_killed < 5 * int(FACTOR or 1):
        kind = rng.choice(list(KINDS))
        name, options = KINDS[kind]
        folder = tmp_path / "new"
        words = ["convert", str(source), str(folder / name), *options]
        ranks = [start(words, rank) for rank in range(N_RANKS)]
        end = time.monotonic() + rng.uniform(0, 0.8 * seconds[kind])
        killed = rng.sample(ranks, rng.randint(1, N_RANKS))
        time.sleep(max(0, end - time.monotonic()))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        codes = codes_of(ranks)
        where = f"seed {SEED}, conversion {n_conversions}, {kind}, {codes}"
        assert set(codes) <= {0, -signal.SIGKILL}, where
        n_killed += codes.count(-signal.SIGKILL)
        n_conversions += 1
        done = folder / name / "iteration_00000007" if kind == "root" else folder / name
        if done.exists():  # a rank had written the last share
            n_published += 1
            left = [*folder.glob(".dst*.share-*.staging"), *folder.glob("dst/.staging/share-*")]
            assert not left or -signal.SIGKILL in codes, where
            assert published(folder) == alone[kind], where
        elif kind != "root" and folder.exists():
            assert all(path.name.startswith(".") for path in folder.iterdir()), where
        again = codes_of([start(words, rank) for rank in range(N_RANKS)])
        if again != [0] * N_RANKS:
            assert done.exists(), where
            assert n_published, where
        assert content(folder) == alone[kind], where
        assert [path.name for path in folder.iterdir()] == [name], where
        shutil.rmtree(folder)
    print(f"{n_conversions} conversions, {n_killed} ranks killed, {n_published} published before, seed {SEED}")
    assert n_published < n_conversions
