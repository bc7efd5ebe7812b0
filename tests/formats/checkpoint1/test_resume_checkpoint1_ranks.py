"""Checkpoint 1.0: the save that is used where each rank sees its own folder alone, and what `explain` says of it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file
from tests.formats.checkpoint1.copies import RANKS, copy, file, load, put, truncate
from tests.helpers.threads import in_threads

import reshard
from reshard.cli import main
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    MismatchError,
    StorageError,
)
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.checkpoint1 import rank_saves
from reshard.formats.checkpoint1 import reader as rank_folders
from reshard.storage.location import locate

if TYPE_CHECKING:
    from reshard.storage.location import Location

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"
STRATEGY = SAMPLES / "strategy"

# -- ranks that see their own folders alone


def scatter(root: Path, to: Path) -> list[Path]:
    """The folder of each rank on a host of its own."""
    hosts = []
    for rank in RANKS:
        (to / f"host_{rank}" / "checkpoint").mkdir(parents=True)
        hosts.append(to / f"host_{rank}" / "checkpoint")
        shutil.move(root / f"rank_{rank}", hosts[rank])
    return hosts


def together(hosts: list[Path], world_size: int = 4, **what: Any) -> list[Any]:
    return in_threads(world_size, lambda group: load(hosts[group.rank], group, **what))


def test_hosts_that_do_not_share_take_what_all_have_whole(tmp_path: Path) -> None:
    whole = copy("ckpt1", tmp_path / "whole")
    hosts = scatter(copy("ckpt1", tmp_path), tmp_path)
    truncate(file(hosts[1], 1, "-20_2"))
    file(hosts[3], 3, "-15_2").unlink()
    for rank, got in enumerate(together(hosts)):
        assert (got.iteration, got.decision.initial_step) == (20, 20)
        expected = load_file(file(whole, rank, "-10_2"))
        assert got.state.keys() == expected.keys()
        np.testing.assert_array_equal(got.state["layers.0.w"], expected["layers.0.w"])


def test_a_host_whose_folder_is_not_there(tmp_path: Path) -> None:
    hosts = scatter(copy("ckpt1", tmp_path), tmp_path)
    shutil.rmtree(hosts[2])
    for got in together(hosts):
        assert isinstance(got, CheckpointNotFoundError | DamagedFileError)
        assert "rank 2 has no file of it" in str(got)


def test_hosts_that_are_fewer_or_more_than_saved(tmp_path: Path) -> None:
    hosts = scatter(copy("ckpt1", tmp_path), tmp_path)
    for got in together(hosts, 2):  # two hosts see two ranks of four, and cannot know
        assert isinstance(got, MismatchError) or got.decision.path is not None
    shared = copy("ckpt1", tmp_path / "shared")
    for world_size in (2, 6):
        for got in in_threads(world_size, lambda group: load(shared, group)):
            assert isinstance(got, MismatchError)
            assert "saved by 4 ranks" in got.message


def test_a_save_without_replicas_needs_its_strategy() -> None:
    root, strategy = STRATEGY / "src_rank_slices_dedup", STRATEGY / "src_strategy_json"
    for got in in_threads(8, lambda group: load(root, group)):
        assert isinstance(got, MismatchError)
        assert "without replicas" in got.message
    for rank, got in enumerate(in_threads(8, lambda group: load(root, group, layout=strategy, strategy=strategy))):
        assert (got.iteration, got.decision.is_resharded) == (40, False)
        # The same tree, saved with replicas.
        expected = reshard.load_file(file(STRATEGY / "src_rank_slices", rank, "-20_2"))
        assert got.state.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(got.state[key], array, strict=True)


@pytest.mark.parametrize("tree", ["src_rank_slices", "src_rank_slices_dedup"])
def test_a_run_that_is_cut_otherwise(tree: str, tmp_path: Path) -> None:
    """`auto_trans_ckpt`: every rank gets its part under the new strategy."""
    root = tmp_path / "checkpoint"
    shutil.copytree(STRATEGY / tree, root)
    shutil.copytree(STRATEGY / "src_strategy", tmp_path / "strategy")  # where the original writes it
    layout = STRATEGY / "dst_strategy"
    config = {"load_checkpoint": str(root), "resume_training": True, "auto_trans_ckpt": True}
    named = {**config, "src_strategy_path_or_dir": str(STRATEGY / "src_strategy_json")}
    for one in (config, named):
        for rank, got in enumerate(in_threads(8, lambda group: load(None, group, layout=layout, config=one))):  # noqa: B023
            expected = reshard.load_file(STRATEGY / "expected_dst_slices" / f"rank_{rank}" / "net.safetensors")
            assert got.state.keys() >= expected.keys()
            for key, array in expected.items():
                np.testing.assert_array_equal(got.state[key], array, strict=True)
        shutil.rmtree(tmp_path / "strategy", ignore_errors=True)
    truth = reshard.load_file(STRATEGY / "expected_full.safetensors")
    for got in in_threads(2, lambda group: load(None, group, config=named)):  # without a layout the whole tensors
        for key, array in truth.items():
            np.testing.assert_array_equal(got.state[key], array, strict=True)


def test_every_rank_looks_at_its_own_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy("ckpt1", tmp_path)
    looked, opened = list[str](), list[str]()
    real_look, real_open = rank_folders.look_at, rank_saves.open_own

    def look(folder: Location) -> Any:
        looked.append(folder.name)
        return real_look(folder)

    def open_own(path: Location, method: Any) -> Any:
        opened.append(path.name)
        return real_open(path, method)

    monkeypatch.setattr("reshard.formats.checkpoint1.rank_saves.look_at", look)

    def read_own(self: rank_saves.Checkpoint1Saves, save: str, rank: int, method: Any) -> Any:
        return real_open(self.place(save, rank), method)  # read, after all have looked

    monkeypatch.setattr("reshard.formats.checkpoint1.rank_saves.open_own", open_own)
    monkeypatch.setattr(rank_saves.Checkpoint1Saves, "open_own", read_own)
    for world_size in (1, 4, 6):
        looked.clear()
        opened.clear()
        in_threads(world_size, lambda group: load(root, group, keys=["layers.0.w"]))
        assert sorted(looked) == [f"rank_{rank}" for rank in RANKS]
        assert sorted(opened) == [f"llama2_7b_rank_{rank}-20_2.safetensors" for rank in RANKS]


@pytest.mark.slow(disk=False)
def test_real_processes_that_do_not_share(tmp_path: Path) -> None:
    from tests.helpers.ranks import Job

    whole = copy("ckpt1_pb", tmp_path / "whole")
    hosts = scatter(copy("ckpt1_pb", tmp_path), tmp_path)
    truncate(file(hosts[1], 1, "-20_2"))

    def work(group: Any) -> Any:
        os.chdir(hosts[group.rank].parent)  # the same path names another folder on each host
        got = reshard.load("checkpoint", group=group, timeout=30)
        return [got.iteration, got.decision.path, got.state["layers.0.w"].tolist()]

    with Job(4, work) as job:
        outcomes = job.outcomes()
    for rank, outcome in enumerate(outcomes):
        expected = reshard.load(file(whole, rank, "-15_2")).state["layers.0.w"]
        assert outcome is not None
        assert outcome["value"] == [30, "checkpoint/rank_0/old_rank_0-15_2.ckpt", expected.tolist()]


def test_damage_that_only_loading_finds_rolls_back_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy("ckpt1", tmp_path)
    real, lock, seen = rank_saves.Checkpoint1Saves.open_own, threading.Lock(), list[str]()

    def fails_late(self: rank_saves.Checkpoint1Saves, save: str, rank: int, method: Any) -> Any:
        path = self.place(save, rank)
        with lock:
            seen.append(path.name)
        if path.name == "llama2_7b_rank_2-20_2.safetensors":
            raise DamagedFileError("cut since it was looked at", path=str(path))
        return real(self, save, rank, method)

    monkeypatch.setattr(rank_saves.Checkpoint1Saves, "open_own", fails_late)
    results = in_threads(4, lambda group: load(root, group))
    assert [got.iteration for got in results] == [30] * 4
    for got in results:
        assert any("rank 2: " in warning and "cut since" in warning for warning in got.decision.warnings)
    assert len(seen) == 8


def test_one_rank_fails_otherwise_and_all_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = scatter(copy("ckpt1", tmp_path), tmp_path)
    real = checkpoint1.rank_folders

    def fails(root: str) -> Any:
        if "host_3" in str(root):
            raise StorageError("the disk is gone", errno=5)
        return real(locate(root))

    monkeypatch.setattr(checkpoint1, "rank_folders", fails)
    for got in together(hosts):
        assert isinstance(got, StorageError)
        assert "rank 3: the disk is gone" in got.message


# -- the command


def explain(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["explain", *map(str, words)])
    return result.exit_code, result.output


def test_explain_shows_what_each_ranks_folder_offers(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path, "output_second_run")
    file(root, 2, "_1-25_2").unlink()
    truncate(file(root, 1, "-20_2"))
    put(root / "rank_3" / "meta.json", "{")
    code, page = explain(root)
    assert code == 0
    rows = [" ".join(line.split()) for line in page.splitlines()]
    assert "llama2_7b_rank_0_1-25_2.safetensors skipped rank 2 has no file of it" in rows
    assert any(row.startswith("llama2_7b_rank_0-20_2.safetensors skipped rank 1: ") for row in rows)
    assert any(row.startswith("llama2_7b_rank_0-15_2.safetensors selected of an earlier run") for row in rows)
    assert "0 1-25_2 10_2, 15_2, 20_2, 1-25_2" in rows
    assert "1 1-25_2 10_2, 15_2, 20_2 (incomplete), 1-25_2" in rows
    assert "2 1-25_2 10_2, 15_2, 20_2" in rows
    assert "3 damaged 10_2, 15_2, 20_2, 1-25_2" in rows
    code, text = explain(root, "--json")
    told = json.loads(text)
    assert code == 0
    assert told["initial_step"] == 30
    assert [view["rank"] for view in told["ranks"]] == [0, 1, 2, 3]
    assert set(told["ranks"][0]) == {"rank", "meta", "meta_fault", "files", "faults"}
    ((name, fault),) = told["ranks"][1]["faults"]
    assert name == "llama2_7b_rank_1-20_2.safetensors"
    assert "header" in fault


def test_explain_ranks_that_offer_the_same_share_a_line(tmp_path: Path) -> None:
    code, page = explain(copy("ckpt1_pb", tmp_path))
    assert code == 0
    assert "0-3 20_2 10_2, 15_2, 20_2" in [" ".join(line.split()) for line in page.splitlines()]


def test_explain_a_run_that_would_not_start(tmp_path: Path) -> None:
    root = copy("ckpt1", tmp_path)
    shutil.rmtree(root / "rank_1")
    code, page = explain(root)
    assert code == 1
    assert "there is no folder of rank 1" in page
    code, text = explain(root, "--json")
    told = json.loads(text)
    assert (code, told["outcome"]) == (1, "refused")
    assert [view["rank"] for view in told["ranks"]] == [0, 2, 3]
