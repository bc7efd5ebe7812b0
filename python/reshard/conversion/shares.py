"""A conversion by several processes or machines: each writes a share of the files, and the last one publishes.

The shares write into one folder on the file system of the destination. Its name is a digest of the source and the
options, so only shares of the same conversion use it. Each writes its files and then `share-<i>.json`, the record of
their sizes and checksums. No process waits for another: no claim is held and no message is sent. A share that was
interrupted is written by calling it again; one with a record is not written again. The files are linked into the
folder that is published, so that a crash during publication costs no work.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.documents.strict_json import read_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.storage.changes import link_or_move, remove_file, remove_folder, try_lock
from reshard.storage.location import locate
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard import _core
    from reshard.checkpoint import Checkpoint
    from reshard.storage.location import Location

_MAX_SHARES = 65536
_MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True)
class Share:
    """One share of a conversion.

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
        """The name of its record."""
        return _name(self.index)


@dataclass(frozen=True)
class Shared:
    """A share, and the folder of all shares.

    Attributes:
        share: the share.
        folder: the folder into which all shares write their files.
    """

    share: Share
    folder: Location


def digest_of(source: Checkpoint, options: Mapping[str, Any]) -> str:
    """A digest of the values that all shares must agree on: the files of the source, and all options.

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
    """The share that writes each file: large files first, each to the share with the fewest bytes so far.

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


def write_record(
    folder: Location, share: Share, written: Mapping[str, _core.Written], *, mode: int, durable: bool
) -> None:
    """Record that a share was written.

    Args:
        folder: the folder of the shares.
        share: the share that is written.
        written: the record of each of its files, which must have been synced.
        mode: permission bits of the record, less the umask.
        durable: whether the record is synced.

    Raises:
        StorageError: the system failed.
    """
    files = {
        name: [
            one.n_bytes,
            one.header_bytes,
            one.header_checksum,
            base64.b64encode(one.checksums).decode(),
            one.not_finite,
        ]
        for name, one in ((name, WrittenFile.of(record)) for name, record in written.items())
    }
    text = json.dumps({"version": 1, "files": files})
    locate(folder / share.name).replace(text, mode, durable=durable)


def read_record(folder: Location, share: Share) -> dict[str, WrittenFile] | None:
    """The records of the files of a share; None: there is no record, or its files are missing.

    Raises:
        StorageError: the system failed.
    """
    try:
        content: Any = read_json(folder / share.name, _MAX_RECORD_BYTES)
        files = {
            name: WrittenFile(
                n_bytes,
                header_bytes,
                header_checksum,
                base64.b64decode(checksums, validate=True),
                tuple((key, kind) for key, kind in not_finite),
            )
            for name, (n_bytes, header_bytes, header_checksum, checksums, not_finite) in content["files"].items()
        }
        if all((folder / name).stat().n_bytes == one.n_bytes for name, one in files.items()):
            return files
    except StorageError:
        raise
    except (ReshardError, KeyError, TypeError, ValueError, AttributeError):
        pass  # truncated or invalid: it is written again
    return None


def missing(folder: Location, n_shares: int) -> list[int]:
    """The shares that are not recorded yet."""
    try:
        names = set(folder.names())
    except CheckpointNotFoundError:
        names = set()
    return [index for index in range(n_shares) if _name(index) not in names]


@contextlib.contextmanager
def committing(folder: Location) -> Iterator[bool]:
    """Yield whether this process publishes: no other process is publishing or has published.

    If the block ends without an exception, the folder of the shares is removed.
    """
    with try_lock(folder) as is_ours:
        yield is_ours
        if is_ours:
            remove_folder(folder)


def place(folder: Location, target: Location, names: Sequence[str], n_shares: int) -> dict[str, WrittenFile]:
    """Link the files of all shares into the folder that is published.

    Args:
        folder: the folder of the shares.
        target: the folder that is published.
        names: the files that it must contain.
        n_shares: number of shares.

    Returns:
        The record of each file.

    Raises:
        DamagedFileError: a share does not have the files of its record; it must be written again.
        StorageError: the system failed.
    """
    records: dict[str, WrittenFile] = {}
    for index in range(n_shares):
        share = read_record(folder, Share(index, n_shares))
        if share is None:
            remove_file(folder / _name(index))
            raise DamagedFileError(
                f"share {index} of {n_shares} does not have the files of its record",
                path=str(folder / _name(index)),
                hint=f"write it again: `share=({index}, {n_shares})`",
            )
        records |= share
    if set(records) != set(names):
        odd = min(set(records) ^ set(names))
        raise DamagedFileError(
            f"the shares in {folder} and this conversion disagree on {odd}",
            path=str(folder),
            hint="remove that folder and convert again",
        )
    for name in names:
        link_or_move(folder / name, target / name)
    return records


def _name(index: int) -> str:
    return f"share-{index}.json"
