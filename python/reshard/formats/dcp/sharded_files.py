"""Safetensors files of `torch.distributed.checkpoint` that hold shards of tensors, and say where each one lies.

    shard-0000R-model-0000I-of-0000N.safetensors   by `HuggingFaceStorageWriter`: rank R - 1, file I of N
    __<rank>_<n>.distcp                            by `FileSystemWriter` with `SerializationFormat.SAFETENSORS`

The first element of each shard is in the header, in `DCP_SHARDING_INFO`. The shape of a tensor is stored nowhere in the
first kind: it is the extent of the shards that are there. A missing file therefore leaves a hole, which is refused, or
makes tensors smaller. `check_files` refuses what the names of the files and the other tensors tell of that.

Source: `torch/distributed/checkpoint/hf_storage.py` and `filesystem.py` of torch 2.15.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core
from reshard.documents.strict_json import parse_json
from reshard.errors import CheckpointNotFoundError, CoverageError, DamagedFileError
from reshard.values.indexing import row_major
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.storage.location import Location

_NAME = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
_INFO = "DCP_SHARDING_INFO"
_MAX_VALUES = 1 << 23  # of a header with a million tensors
_OFFSETS = "saved_offsets"


class FileName(NamedTuple):
    """The numbers in the name of a file, each from 1.

    Attributes:
        rank: the rank that wrote it, plus 1.
        number: which of the files of a rank it is.
        total: how many files a rank can have.
    """

    rank: int
    number: int
    total: int


def parse_name(name: str) -> FileName | None:
    """The numbers in the name of a shard file, or None.

    Example:
        >>> parse_name("shard-00002-model-00001-of-00003.safetensors")
        FileName(rank=2, number=1, total=3)
        >>> parse_name("model-00001-of-00003.safetensors")
    """
    match = _NAME.fullmatch(name)
    return None if match is None else FileName(*map(int, match.groups()))


def is_safetensors(head: bytes) -> bool:
    r"""Whether a file with these first bytes is a safetensors file.

    Example:
        >>> is_safetensors(b"\x08\0\0\0\0\0\0\0{}      "), is_safetensors(b"PK\x03\x04\0\0\0\0{")
        (True, False)
    """
    return head[8:9] == b"{" and not head.startswith(b"PK")


class Stored(NamedTuple):
    """A shard of a tensor.

    Attributes:
        file: number of its file in the index.
        offset: its first element in the tensor.
        shape: its shape, in elements.
    """

    file: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """One past its last element, in each dim."""
        return tuple(map(sum, zip(self.offset, self.shape, strict=True)))


def read_index(
    folder: Location, files: Sequence[str], method: _core.ReadMethod
) -> tuple[_core.Index, dict[str, list[Stored]]]:
    """The index of the tensors of some files, and the shards of each tensor. All headers are read.

    Args:
        folder: their folder.
        files: their names.
        method: how they are read.

    Raises:
        DamagedFileError: a file has no valid header; it does not say where a shard lies; shards of a tensor have
            different dtypes or dims, or overlap.
        CoverageError: the shards of a tensor leave a hole.
        CheckpointNotFoundError, StorageError: a file cannot be read.
    """
    index = _core.Index()
    shards: dict[str, list[Stored]] = {}
    dtypes: dict[str, str] = {}
    for name in files:
        path = folder / name
        file = index.add_file(str(path), follow_links=False, method=method)
        offsets = _offsets(path, (index.file_metadata(file) or {}).get(_INFO))
        for tensor in index.file_tensors(file):
            offset = offsets.get(tensor.name)
            if offset is None or len(offset) != len(tensor.shape):
                raise _damaged(path, f"`{_INFO}` does not say where {show(tensor.name)} lies", tensor.name)
            if dtypes.setdefault(tensor.name, tensor.dtype) != tensor.dtype:
                other = dtypes[tensor.name]
                raise _damaged(path, f"{show(tensor.name)} is {tensor.dtype}, and {other} in other files", tensor.name)
            before = shards.setdefault(tensor.name, [])
            if before and len(before[0].offset) != len(offset):
                raise _damaged(path, f"{show(tensor.name)} has other dims than in other files", tensor.name)
            before.append(Stored(file, offset, tuple(tensor.shape)))
    for key, stored in shards.items():
        shape = tuple(map(max, zip(*(one.end for one in stored), strict=True)))
        held = [one for one in stored if 0 not in one.shape]
        regions = {(one.offset, one.shape) for one in held}
        if len(regions) < len(held):
            raise DamagedFileError(
                f"{show(str(folder))}: two files hold the same shard of {show(key)}", path=str(folder), key=key
            )
        arrays = [
            _core.StoredArray(one.file, key, one.shape, [_core.Tile(one.offset, one.shape, 0, row_major(one.shape))])
            for one in held
        ]
        index.add_tiles(key, dtypes[key], shape, arrays)
    try:
        index.check_coverage()
    except CoverageError as error:
        raise CoverageError(
            f"{show(str(folder))}: {error.message}",
            path=str(folder),
            key=error.key,
            hint="a file of another rank is missing, or one rank had several shards of this tensor, of which "
            "torch's writer keeps the last",
        ) from None
    return index, shards


def check_files(folder: Location, names: Mapping[str, FileName], shards: Mapping[str, Sequence[Stored]]) -> None:
    """Refuse a folder of which files are missing, as far as the others tell.

    Missing ranks and file numbers are gaps in the numbering. A rank lacks a single file if it shares tensors of other
    files with the ranks that have one of that number, and the tensors of that number have fewer shards than any tensor
    of a complete file. If the last ranks are missing altogether, and tensors are divided in one dim, nothing tells.

    Args:
        folder: the folder.
        names: its shard files.
        shards: the shards of each tensor; their files are numbered in the order of `names`.

    Raises:
        CheckpointNotFoundError: a file is missing.
        DamagedFileError: files of two saves are in the folder.
    """
    counts = {one.total for one in names.values()}
    if len(counts) > 1 or any(one.number > one.total or 0 in one for one in names.values()):
        raise DamagedFileError(
            f"{show(str(folder))} holds files of several saves: their names count {listed(map(str, sorted(counts)))} "
            "files a rank",
            path=str(folder),
        )
    for what, found in (
        ("rank", {one.rank for one in names.values()}),
        ("file", {one.number for one in names.values()}),
    ):
        most = max(found) if what == "rank" else max(counts)
        # The names of ranks can reach a billion; as many gaps are not listed.
        gap = next((number for number in range(1, most + 1) if number not in found), None)
        if gap is not None:
            which = f"shard-{gap:05d}-..." if what == "rank" else f"...-model-{gap:05d}-of-{most:05d}"
            raise _missing(folder, f"no file `{which}`, but files up to number {most}")
    files = list(names.values())
    ranks_of = {number: {one.rank for one in files if one.number == number} for number in range(1, max(counts) + 1)}
    everyone = set().union(*ranks_of.values())
    divided = {key: {files[one.file].rank for one in stored} for key, stored in shards.items() if len(stored) > 1}
    number_of = {key: files[stored[0].file].number for key, stored in shards.items()}
    complete = {len(shards[key]) for key in divided if ranks_of[number_of[key]] == everyone}
    for key, ranks in divided.items():
        number = number_of[key]
        lacking = everyone - ranks_of[number]
        peers = {rank for other in divided.values() if not other.isdisjoint(ranks) for rank in other}
        if lacking & peers and complete and len(shards[key]) < min(complete):
            rank = min(lacking & peers)
            raise _missing(folder, f"no file `shard-{rank:05d}-model-{number:05d}-of-{max(counts):05d}.safetensors`")


def _missing(folder: Location, what: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{show(str(folder))} has {what}: a file of the save is missing",
        path=str(folder),
        hint="copy all files of the save; without one of them tensors would be smaller than they were",
    )


def _offsets(path: Location, text: str | None) -> dict[str, tuple[int, ...]]:
    if text is None:
        raise _damaged(path, f"its header has no `{_INFO}`: it is no shard file of torch.distributed.checkpoint")
    content = parse_json(text.encode(), f"{path}: {_INFO}", max_values=_MAX_VALUES)
    if not isinstance(content, dict):
        raise _damaged(path, f"`{_INFO}` is no object")
    return {name: _offset(path, name, value) for name, value in content.items()}


def _offset(path: Location, name: str, value: object) -> tuple[int, ...]:
    offsets = value.get(_OFFSETS) if isinstance(value, dict) else None
    if not isinstance(offsets, list) or not all(type(one) is int and 0 <= one < 1 << 63 for one in offsets):
        raise _damaged(path, f"`{_INFO}` has no valid `{_OFFSETS}` of {show(name)}", name)
    return tuple(offsets)


def _damaged(path: Location, fault: str, key: str | None = None) -> DamagedFileError:
    return DamagedFileError(f"{show(str(path))}: {fault}", path=str(path), key=key)
