"""Checkpoint 1.0 on disk: names, folders, and the file of each rank that a suffix selects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.formats.checkpoint1.names import (
    EXTENSIONS,
    FileKind,
    FileName,
    choose_by_suffix,
    is_root,
    list_files,
    list_weight_files,
    parse_file_name,
    rank_folder_name,
    rank_folders,
)
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[2] / "data" / "mindspore"
NUMBERS = st.integers(0, 10**18 - 1)
PREFIXES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)


@given(
    st.builds(
        FileName,
        PREFIXES,
        NUMBERS,
        st.none() | st.integers(1, 10**18 - 1),
        st.sampled_from(get_args(FileKind)),
        NUMBERS,
        NUMBERS,
        st.sampled_from(EXTENSIONS),
    ),
    NUMBERS,
)
def test_names_say_what_they_were_made_of(file: FileName, rank: int) -> None:
    assert parse_file_name(file.name) == file
    assert parse_file_name(file.of_rank(rank).name) == file.of_rank(rank)
    assert file.name.endswith((f"-{file.epoch}_{file.step}.safetensors", f"-{file.epoch}_{file.step}.ckpt"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "meta.json",
        "net.safetensors",
        "x_rank_0.safetensors",
        "_rank_0-1_2.safetensors",
        "x_rank_-1-1_2.safetensors",
        "x_rank_00-1_2.safetensors",
        "x_rank_0-01_2.safetensors",
        "x_rank_0_0-1_2.safetensors",
        "x_rank_0-1_2.safetensor",
        "x_rank_0-1_2.safetensors.tmp",
        "x_rank_0-1-2.safetensors",
        "x_rank_0-lora-1_2.safetensors",
        "x_rank_0-1_2.safetensors\n",
        ".x_rank_0-1_2.safetensors",
        "../x_rank_0-1_2.safetensors",
        "x_rank_0-1_9999999999999999999.safetensors",
        "x_rank_0-\u0661_2.safetensors",
        "x\0_rank_0-1_2.safetensors",
        "x" * 300 + "_rank_0-1_2.safetensors",
    ],
)
def test_names_that_are_none(name: str) -> None:
    assert parse_file_name(name) is None


def test_a_prefix_may_look_like_a_rank() -> None:
    parsed = parse_file_name("a_rank_3-1_2_rank_5_1-network-20_2.ckpt")
    assert parsed == FileName("a_rank_3-1_2", 5, 1, "network", 20, 2, "ckpt")


def test_the_samples_names() -> None:
    for sample in ("ckpt1", "ckpt1_pb"):
        root = DATA / sample / "output_second_run" / "checkpoint"
        assert is_root(locate(root))
        assert not is_root(locate(root / "rank_0"))
        for rank, folder in rank_folders(locate(root)).items():
            files = list_files(folder)
            assert [file.suffix for file in files] == ["10_2", "15_2", "20_2", "1-25_2"]
            assert {file.rank for file in files} == {rank}
            assert [file.name for file in files] == sorted(list_weight_files(folder), key=len)


def test_folders_that_are_of_no_rank(tmp_path: Path) -> None:
    for name in ("rank_2", "rank_0", "rank_10", "rank_01", "rank_", "rank_x", "rank_1.old", ".rank_3", "Rank_4"):
        (tmp_path / name).mkdir()
    (tmp_path / "a file").write_text("")
    assert list(rank_folders(locate(tmp_path))) == [0, 2, 10]
    with pytest.raises(CheckpointNotFoundError):
        rank_folders(locate(tmp_path / "a file"))


def test_a_link_to_a_folder_is_a_ranks_folder(tmp_path: Path) -> None:
    (tmp_path / "host" / "rank_1").mkdir(parents=True)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "rank_1").symlink_to("../host/rank_1")
    assert rank_folders(locate(tmp_path / "root")) == {1: locate(tmp_path / "root" / "rank_1")}
    assert is_root(locate(tmp_path / "root"))


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        os.mkfifo,
        lambda path: path.symlink_to("gone"),
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/null"),
    ],
    ids=["a file", "a pipe", "a link to nothing", "a link to itself", "a link to a device"],
)
def test_what_bears_the_name_of_a_rank_and_is_no_folder(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "rank_1")
    assert not is_root(locate(tmp_path))
    (tmp_path / "rank_0").mkdir()
    assert is_root(locate(tmp_path))
    for look in (rank_folders, choose_by_suffix):
        with pytest.raises(DamagedFileError, match=r"rank_1` is .*not (a|lead to a) folder"):
            look(locate(tmp_path))


@pytest.mark.parametrize("rank", [-1, 10**18, True, 1.0, "1"])
def test_ranks_that_are_none(rank: int) -> None:
    with pytest.raises(ArgumentError):
        rank_folder_name(rank)


def tree(root: Path, *folders: str) -> Path:
    """Rank folders with files of these names."""
    for rank, names in enumerate(folders):
        (root / f"rank_{rank}").mkdir(parents=True)
        for name in names.split():
            (root / f"rank_{rank}" / name.format(rank)).touch()
    return root


THREE = "x_rank_{0}-9_2.ckpt x_rank_{0}-10_2.ckpt x_rank_{0}_1-12_2.ckpt"
CHOICES: list[tuple[str, list[str], str | None, str | type[ReshardError]]] = [
    ("the only one", ["net.ckpt", "net.ckpt"], None, "net.ckpt"),
    ("the highest, as numbers", [THREE, THREE], None, "x_rank_{0}_1-12_2.ckpt"),
    ("the highest that all have", [THREE, "x_rank_{0}-9_2.ckpt x_rank_{0}-10_2.ckpt"], None, "x_rank_{0}-10_2.ckpt"),
    ("epoch and step", [THREE, THREE], "9_2", "x_rank_{0}-9_2.ckpt"),
    ("with a dash", [THREE, THREE], "-10_2", "x_rank_{0}-10_2.ckpt"),
    ("not the end of another number", [THREE, THREE], "0_2", CheckpointNotFoundError),
    ("of a run", [THREE, THREE], "1-12_2", "x_rank_{0}_1-12_2.ckpt"),
    ("of a run, with an underscore", [THREE, THREE], "_1-12_2", "x_rank_{0}_1-12_2.ckpt"),
    ("of a run, not of a rank", ["x_rank_{0}-9_2.ckpt x_rank_{0}_1-9_2.ckpt"] * 2, "1-9_2", "x_rank_{0}_1-9_2.ckpt"),
    ("a number alone", ["x-3.ckpt x-5.ckpt"] * 2, "5", "x-5.ckpt"),
    ("a number alone that fits several", [THREE, THREE], "2", ArgumentError),
    ("the shortest name", ["x_rank_{0}-9_2.ckpt x_rank_{0}_1-9_2.ckpt"] * 2, "9_2", "x_rank_{0}-9_2.ckpt"),
    ("two of a length", ["a-9_2.ckpt b-9_2.ckpt"] * 2, "9_2", ArgumentError),
    ("both formats", ["x-9_2.ckpt x-9_2.safetensors"] * 2, "9_2", ArgumentError),
    ("no such text", [THREE], "../9_2", ArgumentError),
    ("one rank has none", [THREE, ""], None, CheckpointNotFoundError),
    ("nothing that all have", ["x-1_2.ckpt", "x-2_2.ckpt"], None, CheckpointNotFoundError),
    ("runs that differ", ["x_rank_0-9_2.ckpt", "x_rank_1_1-9_2.ckpt"], "9_2", CheckpointNotFoundError),
    ("no folders", [], None, CheckpointNotFoundError),
]


@pytest.mark.parametrize(
    ("folders", "suffix", "expected"), [one[1:] for one in CHOICES], ids=[one[0] for one in CHOICES]
)
def test_choice_by_suffix(
    folders: list[str], suffix: str | None, expected: str | type[ReshardError], tmp_path: Path
) -> None:
    root = tree(tmp_path, *folders)
    if isinstance(expected, str):
        assert choose_by_suffix(locate(root), suffix) == {
            rank: locate(root) / f"rank_{rank}" / expected.format(rank) for rank in range(len(folders))
        }
    else:
        with pytest.raises(expected):
            choose_by_suffix(locate(root), suffix)


def test_choice_of_a_format(tmp_path: Path) -> None:
    root = tree(tmp_path, "x-9_2.ckpt x-9_2.safetensors")
    assert choose_by_suffix(locate(root), extension="ckpt")[0].name == "x-9_2.ckpt"
