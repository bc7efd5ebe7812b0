"""The shard files that each rank wrote.

If every rank writes all shards that it holds, the names of its files contain its number. If each shard is written once,
they do not: a rank with nothing to write has no file and no number. Then the manifest records the rank, or
`storage_rank` in `metadata.json`. This module also opens the files of an opened checkpoint again, for an index of other
tensors in them. It knows no whole tensors and no layouts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reshard.commit import manifest as manifests
from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, DamagedFileError
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.storage.location import Location, locate
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reshard import _core
    from reshard.commit.manifest import Manifest

MAX_METADATA_BYTES = 4 << 30
_RANK_FILE = re.compile(r"rank_(0|[1-9][0-9]{0,17})\.safetensors")


def own_files(folder: Location, names: Iterable[str], manifest: Manifest | None) -> dict[int, list[str]]:
    """The shard files of each rank, by rank in ascending order; for each rank, files of the model first.

    Args:
        folder: the folder of the files: an iteration folder, or one with `tiles.json`.
        names: names of the shard files of the checkpoint.
        manifest: the manifest of the folder, or None.

    Returns:
        Names of files by rank. With a manifest, ranks that had nothing to write are included.

    Raises:
        ArgumentError: nothing records which rank wrote a file.
        DamagedFileError: `metadata.json` is invalid, or lists two ranks for one file.
        StorageError: the system failed to read `metadata.json`.

    Example:
        >>> own_files(locate("tp2"), ["rank_1.safetensors", "rank_0.safetensors"], None)
        {0: ['rank_0.safetensors'], 1: ['rank_1.safetensors']}
    """
    parsed = {name: checkpoint2.parse_shard_file_name(name) for name in names}
    if manifest is not None:
        rank_of = {name: manifest.shards[name].rank for name in parsed if name in manifest.shards}
        found: dict[int, list[str]] = {rank: [] for rank in range(manifest.world_size)}
    else:
        path = folder / checkpoint2.METADATA_FILE
        rank_of = storage_ranks(locate(path).read_small(MAX_METADATA_BYTES), str(path)) if path.exists() else {}
        found = {}
    for name in sorted(parsed, key=lambda name: (getattr(parsed[name], "part", "model") != "model", name)):
        rank = rank_of.get(name, _rank_in(name))
        if rank is None:
            raise ArgumentError(
                f"nothing records which rank wrote {show(name)} in {show(str(folder))}",
                path=str(folder / name),
                hint="without metadata.json and manifest, the files must be named `rank_<number>.safetensors`",
            )
        found.setdefault(rank, []).append(name)
    return dict(sorted(found.items()))


def _rank_in(name: str) -> int | None:
    """The rank in the name of a file, if every rank wrote all its shards."""
    if (match := _RANK_FILE.fullmatch(name)) is not None:
        return int(match[1])
    parsed = checkpoint2.parse_shard_file_name(name)
    return None if parsed is None else parsed.index


def own_index(opened: _core.Index, numbers: Iterable[int], manifest: Manifest | None) -> _core.Index:
    """An index of the arrays in some files, each array as a tensor.

    Args:
        opened: the index that contains the files.
        numbers: numbers of the files in `opened`.
        manifest: the manifest of their folder, or None: then no checksums are compared.

    Raises:
        DamagedFileError: a file is not the file that was opened, or two files hold the same name.
        StorageError: the system failed to read a file.
    """
    index = opened_again(opened, numbers, manifest)
    for file in range(index.n_files):
        for array in index.file_arrays(file):
            index.add_whole(array.name, file)
    return index


def opened_again(opened: _core.Index, numbers: Iterable[int], manifest: Manifest | None) -> _core.Index:
    """An index of the same files without tensors. Arguments and errors as `own_index`.

    Args:
        opened: the index that contains the files.
        numbers: numbers of the files in `opened`; they become 0, 1, ... in this order.
        manifest: the manifest of their folder, or None.
    """
    numbers = list(numbers)
    index = opened.files_again(numbers)
    if manifest is not None:
        if numbers:
            manifests.set_checksums(index, locate(opened.file_path(numbers[0])).parent, manifest)
        return index  # a replaced file has another checksum
    for file, number in enumerate(numbers):
        if index.file_tensors(file) != opened.file_tensors(number):
            path = str(opened.file_path(number))
            raise DamagedFileError(f"{show(path)} is not the file that was opened before", path=path)
    return index


def storage_ranks(data: bytes, name: str) -> dict[str, int]:
    """The rank that wrote each file, from the content of a `metadata.json`; `name` is its name in messages.

    Raises:
        DamagedFileError: the content is invalid, or lists two ranks for one file.

    Example:
        >>> storage_ranks(b'{"storage_data": {"k": [{"file_name": "f", "storage_rank": 3}]}}', "metadata.json")
        {'f': 3}
    """
    found: dict[str, int] = {}
    for file, rank in _holders(parse_json(data, name)):
        if not isinstance(file, str) or isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise DamagedFileError(f"{show(name)}: a `file_name` or `storage_rank` is invalid", path=name)
        if found.setdefault(file, rank) != rank:
            raise DamagedFileError(
                f"{show(name)}: {show(file)} was written by rank {found[file]} and by rank {rank}", path=name
            )
    return found


def ranks_of_tensors(folder: Location) -> dict[str, set[int]]:
    """The ranks that hold each tensor, whether their copy is stored or not, from `metadata.json`.

    Raises:
        DamagedFileError: the content is invalid.
        StorageError: the system failed to read it.
    """
    path = folder / checkpoint2.METADATA_FILE
    content: Any = parse_json(path.read_small(MAX_METADATA_BYTES), str(path))
    found: dict[str, set[int]] = {}
    try:
        for key, tensor in content["state_dict_metadata"].items():
            held = found.setdefault(key, set())
            for chunk in tensor["chunk"]:
                for entry in content["storage_data"][str((key, tuple(chunk["global_offset"])))]:
                    held.update(entry["rank_group"], (entry["storage_rank"],))
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{show(str(path))} changed while it was read", path=str(path)) from error
    return found


def _holders(content: object) -> Iterator[tuple[object, object]]:
    storage = content.get("storage_data") if isinstance(content, dict) else None
    for entries in storage.values() if isinstance(storage, dict) else ():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                yield entry.get("file_name"), entry.get("storage_rank")
