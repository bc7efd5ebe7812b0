"""Meshes and placements of DTensors, changed at random: each is an error of the package, or a part of the tensor.

`RESHARD_FUZZ_RUNS=1000000 pytest tests/formats/fsdp_ranks/test_mesh_fuzz.py` makes more of them. The files around
them are changed by `rust/formats/tests/fuzz.rs`.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.mesh_files import as_rank, distributed
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from reshard import _core
from reshard.errors import DamagedFileError, ReshardError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUNS = 3_000
SHAPE = (5, 3)
MESHES: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    ((2,), (Shard(0),)),
    ((3,), (Replicate(),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
)
# Numbers and containers of a pickle, and what DTensors consist of.
WORDS = (
    b"K\x00", b"K\x01", b"K\x02", b"K\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"N", b"\x88", b")", b"]", b"}", b"(", b"t", b"\x85", b"\x86", b"\x87", b"h\x00", b"h\x01", b"q\x01", b"R", b"b",
    b"a", b"e", b"s",
    b"Shard\n", b"Replicate\n", b"Partial\n", b"DeviceMesh\n", b"_FlatLayout\n", b"placements", b"_coordinate_on_dim",
)  # fmt: skip


class Saved:
    """The file of a rank with a tensor, as `torch.save` writes it, without checksums."""

    def __init__(self, sizes: tuple[int, ...], placements: tuple[Any, ...], rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        with as_rank(rank, int(torch.tensor(sizes).prod())):
            tensor = distributed(torch.ones(SHAPE), init_device_mesh("cpu", sizes), placements)
            file = io.BytesIO()
            torch.save({"w": tensor}, file)
        self.rank = rank
        with zipfile.ZipFile(file) as archive:
            [name] = [one for one in archive.namelist() if one.endswith("/data.pkl")]
            self.pickle = archive.read(name)
        content = bytearray(file.getvalue())
        for at in places(content, b"PK\x01\x02"):
            content[at + 16 : at + 20] = bytes(4)
        self.start = content.index(self.pickle)
        self.content = bytes(content)

    def write(self, folder: Path, pickle: bytes | None = None) -> tuple[str, int, int]:
        """Write it, perhaps with another pickle of the same length; what `read_torch_ranks` is given."""
        content = self.content
        if pickle is not None:
            content = content[: self.start] + pickle + content[self.start + len(pickle) :]
        (folder / f"{self.rank}.pt").write_bytes(content)
        return str(folder / f"{self.rank}.pt"), self.rank, self.rank


def places(content: bytes | bytearray, word: bytes) -> Iterator[int]:
    at = content.find(word)
    while at >= 0:
        yield at
        at = content.find(word, at + 1)


@cache
def samples() -> list[list[Saved]]:
    """For each mesh what each of its ranks saved."""
    worlds = [(sizes, placements, int(torch.tensor(sizes).prod())) for sizes, placements in MESHES]
    return [[Saved(sizes, placements, rank) for rank in range(n)] for sizes, placements, n in worlds]


def changed(pickle: bytes, draw: Random) -> bytes:
    """The same number of bytes, some of them others: single ones, or words that mean something."""
    made = bytearray(pickle)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(made))
        choice = draw.randrange(4)
        if choice == 0:
            made[at] = draw.randrange(256)
        elif choice == 1:
            made[at] ^= 1 << draw.randrange(8)
        elif choice == 2:
            word = draw.choice(WORDS)
            made[at : at + len(word)] = word
        else:
            # A number of the description becomes another one.
            numbers = [one for one in places(made, b"K") if one + 1 < len(made)]
            if numbers:
                made[draw.choice(numbers) + 1] = draw.choice((0, 1, 2, 3, 4, 5, 127, 255))
    return bytes(made[: len(pickle)])


def added(files: list[tuple[str, int, int]]) -> _core.Index:
    """The index of all tensors of some files."""
    index = _core.Index()
    for path, *_ in sorted(files, key=lambda one: one[1]):
        index.add_torch_file(path)
    tensors = _core.read_torch_ranks(files)
    tensors.add_to(index, list(dict.fromkeys(one.key for one in tensors.tensors())), "")
    index.check_coverage()
    return index


def check(run: int, folder: Path) -> bool:
    """Read the files of the ranks, one of them changed; whether it has a part that lies in the tensor."""
    draw = Random(run)
    ranks = draw.choice(samples())
    one = draw.choice(ranks)
    mine = one.write(folder, changed(one.pickle, draw))
    try:
        tensors = _core.read_torch_ranks([mine])
    except ReshardError:
        return False
    if [(tensor.key, tensor.kind) for tensor in tensors.tensors()] != [("w", "DTensor")]:
        return False
    with contextlib.suppress(ReshardError):
        index = added([mine, *(other.write(folder) for other in ranks if other is not one)])
        assert all(
            0 <= at <= at + size <= of
            for region in index.shards("w")
            for at, size, of in zip(region.offset, region.shape, index.info("w")[1], strict=True)
        )
    return True


def test_changed_meshes_and_placements(tmp_path: Path) -> None:
    runs = int(os.environ.get("RESHARD_FUZZ_RUNS", RUNS))
    n_parts = 0
    for run in range(runs):
        try:
            n_parts += check(run, tmp_path)
        except Exception as error:
            error.add_note(f"run {run}")
            raise
    assert n_parts > runs // 100


class Described:
    """An object with these attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__ |= attributes


def test_sizes_of_an_axis_that_refer_to_each_other(tmp_path: Path) -> None:
    """Lists in lists, which are small in a file and have as many numbers as there are ways through them."""
    shape: Any = [1]
    for _ in range(14):
        shape = [shape] * 8
    with as_rank(0, 1):
        from torch.distributed.device_mesh import init_device_mesh

        tensor = distributed(torch.ones(SHAPE), init_device_mesh("cpu", (1,)), (Shard(0),))
        layout = Described(axes=[Described(shape=shape)])
        tensor._spec = Described(mesh=Described(_layout=layout, _coordinate_on_dim=[0]), placements=(Shard(0),))
        torch.save({"w": tensor}, tmp_path / "f.pt")
    with pytest.raises(DamagedFileError, match="its mesh and its placements do not belong together"):
        _core.read_torch_ranks([(str(tmp_path / "f.pt"), 0, 0)])


def test_the_samples_are_whole_tensors(tmp_path: Path) -> None:
    for ranks, (_, placements) in zip(samples(), MESHES, strict=True):
        index = added([one.write(tmp_path) for one in ranks])
        assert index.info("w") == ("F32", SHAPE)
        n_regions = 1 if all(one.is_replicate() for one in placements) else len(index.shards("w"))
        assert len(index.shards("w")) == n_regions > (0 if len(ranks) == 3 else 1)
