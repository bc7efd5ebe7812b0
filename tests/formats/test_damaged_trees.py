"""Real trees of torchtune and of DeepSpeed with experts or pipelines, each damaged in many ways.

A damaged tree is refused with an error of this package, or it has the tensors of the whole one. No pickle is executed,
and no file outside of the tree is read.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import reshard
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data" / "torch"
TREES = (
    "torchtune/hf_bin",
    "torchtune/torchtune",
    "ds_experts",
    "ds_experts_ep2/checkpoint",
    "ds_pipeline",
    "ds_pipeline_dp2/checkpoint",
)
_N_FLIPS = 64


class _Hostile:
    """Its pickle makes a folder when it is executed."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.made),)


def shapes_of(tree: Path) -> dict[str, tuple[int, ...]]:
    with reshard.open(tree) as checkpoint:
        return {key: checkpoint.read(key).shape for key in checkpoint}


def damages(tree: Path, outside: Path) -> dict[str, Callable[[Path], object]]:
    """What can be done to a file of a tree, by what it is."""
    outside.mkdir()
    torch.save({"module": _Hostile(outside / "made"), "model": _Hostile(outside / "made")}, outside / "hostile.pt")
    hostile = (outside / "hostile.pt").read_bytes()

    def flipped(seed: int, n: int) -> Callable[[Path], object]:
        def flip(file: Path) -> None:
            content, numbers = bytearray(file.read_bytes()), random.Random(f"{seed} {file.name}")
            for _ in range(n if content else 0):
                content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            file.write_bytes(content)

        return flip

    def folder(file: Path) -> None:
        file.unlink()
        file.mkdir()

    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(outside / "hostile.pt")

    def other(file: Path) -> None:
        others = [one for one in sorted(tree.rglob(f"*{file.suffix}")) if one.is_file() and one.name != file.name]
        file.write_bytes(others[0].read_bytes() if others else b"other")

    return {
        "missing": Path.unlink,
        "empty": lambda file: file.write_bytes(b""),
        "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
        "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "a byte less": lambda file: file.write_bytes(file.read_bytes()[:-1]),
        "a byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        "twice": lambda file: file.write_bytes(file.read_bytes() * 2),
        "text": lambda file: file.write_text("{" * 100_000),
        "hostile pickle": lambda file: file.write_bytes(hostile),
        "folder": folder,
        "link to a hostile file": link,
        "another file": other,
        "many changed bits": flipped(0, _N_FLIPS),
        **{f"changed bit {seed}": flipped(seed, 1) for seed in range(1, 5)},
    }


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", TREES)
def test_a_damaged_tree_is_refused_or_has_the_same_tensors(tmp_path: Path, name: str) -> None:
    expected = shapes_of(DATA / name)
    files = sorted(
        path.relative_to(DATA / name)
        for path in (DATA / name).rglob("*")
        if path.is_file() and path.name != "truth.safetensors"
    )
    ways = damages(DATA / name, tmp_path / "outside")
    n_refused = 0
    for number, (file, what) in enumerate(itertools.product(files, ways)):
        tree = Path(shutil.copytree(DATA / name, tmp_path / str(number)))
        ways[what](tree / file)
        try:
            found = shapes_of(tree)
        except ReshardError:
            n_refused += 1
        else:
            # Without the only file of an optimizer, it is a save of weights alone.
            is_alone = what == "missing" and len(list((DATA / name).rglob("*optim_states.pt"))) == 1
            assert found == ({key: expected[key] for key in found} if is_alone else expected), f"{what}: {file}"
        assert not (tmp_path / "outside" / "made").exists(), f"{what}: {file}"
        shutil.rmtree(tree)
    assert n_refused >= (15 if name == "torchtune/torchtune" else 40)  # that has one file of weights
