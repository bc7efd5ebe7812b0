"""The files of an iteration of Checkpoint 2.0, as MindSpore Transformers names them.

    iteration_<at least 8 digits>/
        [<prefix>-]{model|opt}-<index>-<count>.safetensors         index and count of at least 7 digits
        common.json                                                counters: `documents.common_info`
        metadata.json                                              shards: `checkpoint2.metadata`; one device has none

`commit.roots` names the folders and the tracker. This package writes `.safetensors`, which MindSpore Transformers
reads. It reads `.safetensor`, too, which its published documents show. This module opens no shard file, and does not
check whether an iteration is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, DamagedFileError
from reshard.storage.names import component_fault
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from reshard.storage.location import Location
    from reshard.write.contents import Part

COMMON_FILE = "common.json"
METADATA_FILE = "metadata.json"
METADATA_TABLE_FILE = "metadata.bin"  # the same content, see `metadata.write_metadata`

_TAGS: dict[Part, str] = {"model": "model", "optimizer": "opt"}
_PARTS: dict[str, Part] = {tag: part for part, tag in _TAGS.items()}
_SHARD_FILE = re.compile(r"(?:(.+)-)?(model|opt)-([0-9]{7,18})-([0-9]{7,18})\.safetensors?")
_MAX_PREFIX_BYTES = 128
_MAX_NAMED = 3  # number of names that a message lists


# -- names


@dataclass(frozen=True)
class ShardFileName:
    """The fields in the name of a shard file.

    Attributes:
        prefix: the text before the part, or None.
        part: "model" or "optimizer".
        index: number of the file; the rank, unless the tree is de-duplicated.
        count: number of files of the part.
    """

    prefix: str | None
    part: Part
    index: int
    count: int


def shard_file_name(part: Part, index: int, count: int, prefix: str | None = None) -> str:
    """The name of a shard file.

    Args:
        part: "model" or "optimizer".
        index: number of the file, from 0.
        count: number of files of the part.
        prefix: text before the part, joined with a dash.

    Raises:
        ArgumentError: the prefix is not allowed in a name, or the index is not below the count.

    Example:
        >>> shard_file_name("optimizer", 3, 8, "demo")
        'demo-opt-0000003-0000008.safetensors'
    """
    if not 0 <= index < count:
        raise ArgumentError(f"file {index} of {count}: the index is from 0 to the count less 1")
    check_prefix(prefix)
    return f"{'' if prefix is None else prefix + '-'}{_TAGS[part]}-{index:07d}-{count:07d}.safetensors"


def parse_shard_file_name(name: str) -> ShardFileName | None:
    """Parse the name of a shard file, from the right, since a prefix may hold dashes. None if it is not a shard file.

    Example:
        >>> parse_shard_file_name("my-run-model-0000001-0000004.safetensors")
        ShardFileName(prefix='my-run', part='model', index=1, count=4)
    """
    match = _SHARD_FILE.fullmatch(name)
    if match is None or name.startswith("."):
        return None
    index, count = int(match[3]), int(match[4])
    return ShardFileName(match[1], _PARTS[match[2]], index, count) if index < count else None


def check_prefix(prefix: str | None) -> None:
    """Refuse a prefix that cannot begin the name of a shard file.

    Raises:
        ArgumentError: it is empty, hidden, longer than 128 bytes, or holds a separator or a control character.
    """
    if prefix is None:
        return
    fault = component_fault(prefix)
    if fault is None and prefix.startswith("."):
        fault = "it begins with a dot, and hidden files are never read"
    if fault is None and len(prefix.encode()) > _MAX_PREFIX_BYTES:
        fault = f"it has more than {_MAX_PREFIX_BYTES} bytes"
    if fault is not None:
        raise ArgumentError(f"{show(prefix)} cannot begin the names of shard files: {fault}")


# -- the shard files of an iteration


def list_shard_files(folder: Location) -> list[str]:
    """The shard files of an iteration folder that has no `metadata.json`: model files first, each part by index.

    Hidden files (temporary ones) and other names are skipped; links are not followed.

    Returns:
        File names; empty if there are no shard files.

    Raises:
        DamagedFileError: an index below the count is missing or duplicate, or counts or prefixes disagree.
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.
    """
    path = str(folder)
    found: dict[Part, dict[int, str]] = {"model": {}, "optimizer": {}}
    first: dict[Part, tuple[str, ShardFileName]] = {}
    for name in [entry.name for entry in folder.entries() if entry.kind == "file"]:
        parsed = parse_shard_file_name(name)
        if parsed is None:
            continue
        other, expected = first.setdefault(parsed.part, (name, parsed))
        if (parsed.prefix, parsed.count) != (expected.prefix, expected.count):
            raise DamagedFileError(
                f"{show(path)} holds shard files of more than one save: {show(other)} and {show(name)}",
                path=path,
                hint="keep the files of one prefix and one count",
            )
        twin = found[parsed.part].get(parsed.index)
        if twin is not None:
            raise DamagedFileError(
                f"{show(path)} holds {parsed.part} file {parsed.index} twice: {show(twin)} and {show(name)}",
                path=path,
            )
        found[parsed.part][parsed.index] = name
    for part, (_, expected) in first.items():
        _check_complete(path, part, expected, found[part])
    return [name for part in found.values() for _, name in sorted(part.items())]


def _check_complete(path: str, part: Part, expected: ShardFileName, found: dict[int, str]) -> None:
    n_missing = expected.count - len(found)
    if n_missing == 0:
        return
    # The count is parsed from a name and may be any number: at most as many indices are checked as there are files.
    absent = (index for index in range(expected.count) if index not in found)
    names = (show(shard_file_name(part, index, expected.count, expected.prefix)) for index in absent)
    raise DamagedFileError(
        f"{show(path)} lists {len(found)} of {expected.count} {part} files; "
        f"{listed(names, _MAX_NAMED, n_items=n_missing)} {'is' if n_missing == 1 else 'are'} missing",
        path=path,
    )
