"""Meshes and placements of DTensors, changed at random: each is an error of the package, or a part of the tensor.

`RESHARD_FUZZ_RUNS=1000000 pytest tests/formats/fsdp_ranks/test_mesh_fuzz.py` makes more of them. The files around
them are changed by `rust/formats/tests/fuzz.rs`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
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
from reshard.formats import mesh_shards
from reshard.formats.mesh_shards import RankTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """The description of a tensor on a rank, as `torch.save` writes it, without checksums."""

    def __init__(self, sizes: tuple[int, ...], placements: tuple[Any, ...], rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        with as_rank(rank, int(torch.tensor(sizes).prod())):
            tensor = distributed(torch.ones(SHAPE), init_device_mesh("cpu", sizes), placements)
            file = io.BytesIO()
            torch.save(tensor._spec, file)
            self.local = tuple(tensor.to_local().shape)
        self.rank = rank
        with zipfile.ZipFile(file) as archive:
            [name] = [one for one in archive.namelist() if one.endswith("/data.pkl")]
            self.pickle = archive.read(name)
        content = bytearray(file.getvalue())
        for at in places(content, b"PK\x01\x02"):
            content[at + 16 : at + 20] = bytes(4)
        self.start = content.index(self.pickle)
        self.content = bytes(content)

    def decoded(self, pickle: bytes) -> object:
        """The object of another pickle of the same length."""
        content = self.content[: self.start] + pickle + self.content[self.start + len(self.pickle) :]
        return _core.decode_torch_object(content)

    def tensor(self, spec: object) -> RankTensor:
        """The tensor with a description."""
        return RankTensor(self.rank, 0, "f.pt", "w", "w", "F32", self.local, SHAPE, spec)


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


def check(run: int) -> bool:
    """Decode one changed description; whether it has a part that lies in the tensor."""
    draw = Random(run)
    ranks = draw.choice(samples())
    one = draw.choice(ranks)
    try:
        spec = one.decoded(changed(one.pickle, draw))
    except ReshardError:
        return False
    mine = one.tensor(spec)
    try:
        offset, extent = mesh_shards.part_of(mine)
    except ReshardError:
        return False
    assert extent == one.local
    assert all(0 <= at <= at + size <= of for at, size, of in zip(offset, extent, SHAPE, strict=True))
    others = [other.tensor(other.decoded(other.pickle)) for other in ranks if other is not one]
    index = _core.Index()
    index.add_file("/nowhere/f.pt")
    with contextlib.suppress(ReshardError):
        mesh_shards.add_tensors(index, [mine, *others], "")
        index.check_coverage()
    return True


def test_changed_meshes_and_placements() -> None:
    runs = int(os.environ.get("RESHARD_FUZZ_RUNS", RUNS))
    n_parts = 0
    for run in range(runs):
        try:
            n_parts += check(run)
        except Exception as error:
            error.add_note(f"run {run}")
            raise
    assert n_parts > runs // 100


class Described:
    """An object with these attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__ |= attributes


def test_sizes_of_an_axis_that_refer_to_each_other() -> None:
    """Lists in lists, which are small in a file and have as many numbers as there are ways through them."""
    shape: Any = [1]
    for _ in range(14):
        shape = [shape] * 8
    layout = Described(axes=[Described(shape=shape)])
    file = io.BytesIO()
    torch.save(Described(mesh=Described(_layout=layout, _coordinate_on_dim=[0]), placements=(Shard(0),)), file)
    spec = _core.decode_torch_object(file.getvalue())
    with pytest.raises(DamagedFileError, match="its mesh and its placements do not belong together"):
        mesh_shards.part_of(RankTensor(0, 0, "f.pt", "w", "w", "F32", (5, 3), (5, 3), spec))


def test_the_samples_are_whole_tensors() -> None:
    for ranks in samples():
        index = _core.Index()
        index.add_file("/nowhere/f.pt")
        mesh_shards.add_tensors(index, [one.tensor(one.decoded(one.pickle)) for one in ranks], "")
        index.check_coverage()
        offsets = [mesh_shards.part_of(one.tensor(one.decoded(one.pickle))) for one in ranks]
        assert len(set(itertools.chain(offsets))) in (1, 2, len(ranks))
