"""A conversion that several processes or machines share: each writes some of the files, whoever finds all publishes.

The shares meet in a folder on the destination's file system, named by a digest of the source and the options, so that
only shares of one and the same conversion meet. Each leaves its files and then, last, `share-<i>.json`, which tells of
their sizes and sums. Nobody waits for anybody: no claim is held, no message is sent. A share that was cut short is
written again by giving it again, one that is there is not. The files get second names in the folder that is published,
so that a crash in mid-publication costs no work.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.storage.changes import link_or_move, remove_file, remove_folder, try_lock
from reshard.storage.location import locate
from reshard.strict_json import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard import _core
    from reshard.checkpoint import Checkpoint
    from reshard.storage.location import Location

__all__ = ["Share", "Shared", "WrittenFile", "assign", "committing", "digest_of", "missing", "place", "record", "told"]

_MAX_SHARES = 65536
_MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True)
class Share:
    """Which part of the work this is.

    Attributes:
        index: from 0.
        count: how many shares there are.

    Raises:
        ArgumentError: the index is not from 0 to the count less 1.

    Example:
        >>> Share(1, 4).name
        'share-1.json'
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not (type(self.index) is type(self.count) is int and 0 <= self.index < self.count <= _MAX_SHARES):
            raise ArgumentError(
                f"`share` is ({self.index!r}, {self.count!r}); the index is from 0 to the count less 1, "
                f"and there are at most {_MAX_SHARES}",
                hint="the first of four shares is `share=(0, 4)`",
            )

    @property
    def name(self) -> str:
        """The file that tells of it."""
        return _name(self.index)


@dataclass(frozen=True)
class Shared:
    """A share and where it meets the others.

    Attributes:
        share: which one it is.
        folder: where the files of all shares gather.
    """

    share: Share
    folder: Location


@dataclass(frozen=True)
class WrittenFile:
    """What a share tells of a file that it has written: what `_core.Written` does."""

    n_bytes: int
    header_bytes: int
    header_checksum: int
    checksums: bytes


def digest_of(source: Checkpoint, options: Mapping[str, Any]) -> str:
    """What two shares must agree on: the source's files and everything that was asked for.

    Args:
        source: the opened source.
        options: JSON-able.
    """
    path = source.data.path
    folder = path if path.is_folder() else path.parent
    files = [
        (file.name, file.n_bytes, (folder / file.name).stat(follow_links=True).modified_ns) for file in source.files()
    ]
    proof = None if source.manifest is None else source.manifest.digest
    text = json.dumps([str(path.resolved()), proof, files, options], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def assign(sizes: Sequence[int], n_shares: int) -> list[int]:
    """The share that writes each file: large ones first, each to the share with the least so far.

    Example:
        >>> assign([10, 40, 30, 10], 2)
        [1, 0, 1, 0]
    """
    loads = [0] * n_shares
    chosen = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[i] = min(range(n_shares), key=loads.__getitem__)
        loads[chosen[i]] += sizes[i] + 1  # empty files are spread too
    return chosen


def record(folder: Location, share: Share, written: Mapping[str, _core.Written], *, mode: int, durable: bool) -> None:
    """Tell that a share is written: its files are synced already.

    Raises:
        StorageError: the system failed.
    """
    files = {
        name: [one.n_bytes, one.header_bytes, one.header_checksum, base64.b64encode(one.checksums).decode()]
        for name, one in written.items()
    }
    text = json.dumps({"version": 1, "files": files})
    locate(folder / share.name).replace(text, mode, durable=durable)


def told(folder: Location, share: Share) -> dict[str, WrittenFile] | None:
    """What a share told of its files; None if it is not there, or its files are not.

    Raises:
        StorageError: the system failed.
    """
    try:
        content: Any = read_json(folder / share.name, _MAX_RECORD_BYTES)
        files = {
            name: WrittenFile(n_bytes, header_bytes, header_checksum, base64.b64decode(checksums, validate=True))
            for name, (n_bytes, header_bytes, header_checksum, checksums) in content["files"].items()
        }
        if all((folder / name).stat().n_bytes == one.n_bytes for name, one in files.items()):
            return files
    except StorageError:
        raise
    except (ReshardError, KeyError, TypeError, ValueError, AttributeError):
        pass  # cut short, or something else: it is written again
    return None


def missing(folder: Location, n_shares: int) -> list[int]:
    """The shares that have not told of their files yet."""
    try:
        names = set(folder.names())
    except CheckpointNotFoundError:
        names = set()
    return [index for index in range(n_shares) if _name(index) not in names]


@contextlib.contextmanager
def committing(folder: Location) -> Iterator[bool]:
    """Whether it is up to this process to publish: nobody else is doing it, or has done it.

    If the block ends well, the folder of the shares is removed.
    """
    with try_lock(folder) as is_ours:
        yield is_ours
        if is_ours:
            remove_folder(folder)


def place(folder: Location, target: Location, names: Sequence[str], n_shares: int) -> dict[str, WrittenFile]:
    """Give the files of all shares a name in the folder that is published; what they told.

    Raises:
        DamagedFileError: a share does not hold what it told of; it is to be written again.
        StorageError: the system failed.
    """
    all_told: dict[str, WrittenFile] = {}
    for index in range(n_shares):
        share = told(folder, Share(index, n_shares))
        if share is None:
            remove_file(folder / _name(index))
            raise DamagedFileError(
                f"share {index} of {n_shares} does not hold the files that it told of",
                path=str(folder / _name(index)),
                hint=f"write it again: `share=({index}, {n_shares})`",
            )
        all_told |= share
    if set(all_told) != set(names):
        odd = min(set(all_told) ^ set(names))
        raise DamagedFileError(
            f"the shares in {folder} and this conversion disagree on {odd}",
            path=str(folder),
            hint="remove that folder and convert again",
        )
    for name in names:
        link_or_move(folder / name, target / name)
    return all_told


def _name(index: int) -> str:
    return f"share-{index}.json"
