"""Which shard files are a rank's own: those that it wrote.

Where every rank writes all that it holds, its number stands in the names of its files. Where each shard is written
once it does not: a rank that had nothing to write has no file, and is left out of the numbers. Then the manifest
knows, or the `storage_rank` of `metadata.json`. Files of an opened checkpoint are opened again as the very same files,
for an index of other tensors in them; whole tensors and layouts are not known here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import ArgumentError, DamagedFileError
from reshard.formats import manifest as manifests
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.storage.location import Location, locate
from reshard.strict_json import parse_json
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from reshard.formats.manifest import Manifest

__all__ = ["MAX_METADATA_BYTES", "opened_again", "own_files", "own_index", "storage_ranks"]

MAX_METADATA_BYTES = 4 << 30
_RANK_FILE = re.compile(r"rank_(0|[1-9][0-9]{0,17})\.safetensors")


def own_files(folder: Location, names: Iterable[str], manifest: Manifest | None) -> dict[int, list[str]]:
    """The shard files of each rank, by rank, ascending; of a rank those of the model first.

    Args:
        folder: where they lie: an iteration folder, or one with `tiles.json`.
        names: the shard files of which the checkpoint consists.
        manifest: that of the folder, or None.

    Returns:
        The ranks that are known; with a manifest also those that had nothing to write.

    Raises:
        ArgumentError: nothing tells whose the files are.
        DamagedFileError: `metadata.json` gives one file to two ranks, or is none.
        StorageError: it cannot be read.

    Example:
        >>> own_files(locate("tp2"), ["rank_1.safetensors", "rank_0.safetensors"], None)
        {0: ['rank_0.safetensors'], 1: ['rank_1.safetensors']}
    """
    parsed = {name: checkpoint2.parse_shard_file_name(name) for name in names}
    if manifest is not None:
        rank_of = {name: entry.rank for name, entry in manifest.shards.items()}
        found: dict[int, list[str]] = {rank: [] for rank in range(manifest.world_size)}
    else:
        path = folder / checkpoint2.METADATA_FILE
        rank_of = storage_ranks(locate(path).read_small(MAX_METADATA_BYTES), str(path)) if path.exists() else {}
        found = {}
    for name in sorted(parsed, key=lambda name: (getattr(parsed[name], "part", "model") != "model", name)):
        rank = rank_of.get(name, _rank_in(name))
        if rank is None:
            raise ArgumentError(
                f"nothing tells which rank wrote {show(name)} in {show(str(folder))}",
                path=str(folder / name),
                hint="without metadata.json or a manifest, only files named `rank_<number>.safetensors` tell",
            )
        found.setdefault(rank, []).append(name)
    return dict(sorted(found.items()))


def _rank_in(name: str) -> int | None:
    """The rank that a name tells where every rank has its file."""
    if (match := _RANK_FILE.fullmatch(name)) is not None:
        return int(match[1])
    parsed = checkpoint2.parse_shard_file_name(name)
    return None if parsed is None else parsed.index


def own_index(
    opened: _core.Index,
    numbers: Iterable[int],
    manifest: Manifest | None,
    *,
    ckpt: Collection[int] = (),
    method: _core.ReadMethod = "auto",
) -> _core.Index:
    """An index of what some files hold, each array by itself.

    Args:
        opened: the index in which they are.
        numbers: of the files.
        manifest: that of their folder, or None: then there are no sums to compare.
        ckpt: those of the numbers that are `.ckpt` files.
        method: how they are read.

    Raises:
        DamagedFileError: a file is not the one that was opened, or two of them hold one name.
        StorageError: one cannot be read.
    """
    index = opened_again(opened, numbers, manifest, ckpt=ckpt, method=method)
    for file in range(index.n_files):
        for key, *_ in index.file_arrays(file):
            index.add_whole(key, file)
    return index


def opened_again(
    opened: _core.Index,
    numbers: Iterable[int],
    manifest: Manifest | None,
    *,
    ckpt: Collection[int] = (),
    follow_links: bool = False,
    method: _core.ReadMethod = "auto",
) -> _core.Index:
    """An index of the same files, in the order of the numbers, and of no tensors yet. Arguments and errors as above."""
    numbers = list(numbers)
    index = _core.Index()
    for number in numbers:
        add = index.add_ckpt_file if number in ckpt else index.add_file
        add(opened.file_path(number), follow_links=follow_links, method=method)
    if manifest is not None:
        if numbers:
            manifests.set_checksums(index, locate(opened.file_path(numbers[0])).parent, manifest)
        return index  # a file that is another one has another sum
    for file, number in enumerate(numbers):
        if index.file_tensors(file) != opened.file_tensors(number):
            path = str(opened.file_path(number))
            raise DamagedFileError(f"{show(path)} is another file than the one that was opened", path=path)
    return index


def storage_ranks(data: bytes, name: str) -> dict[str, int]:
    """Which rank wrote each file, as a `metadata.json` says; `name` is what messages call it.

    Raises:
        DamagedFileError: it is no such file, or gives one file to two ranks.

    Example:
        >>> storage_ranks(b'{"storage_data": {"k": [{"file_name": "f", "storage_rank": 3}]}}', "metadata.json")
        {'f': 3}
    """
    found: dict[str, int] = {}
    for file, rank in _holders(parse_json(data, name)):
        if not isinstance(file, str) or isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise DamagedFileError(f"{show(name)}: a `file_name` or `storage_rank` is none", path=name)
        if found.setdefault(file, rank) != rank:
            raise DamagedFileError(
                f"{show(name)}: {show(file)} was written by rank {found[file]} and by rank {rank}", path=name
            )
    return found


def _holders(content: object) -> Iterator[tuple[object, object]]:
    storage = content.get("storage_data") if isinstance(content, dict) else None
    for entries in storage.values() if isinstance(storage, dict) else ():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                yield entry.get("file_name"), entry.get("storage_rank")
