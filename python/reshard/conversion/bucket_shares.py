"""A conversion into a bucket by several processes or machines: each writes whole files, and the last one publishes.

Nothing is renamed or linked in a bucket, so all shares write under the names of the files. The first share that comes
creates the claim (see `buckets`), removes what is replaced, writes the files without tensors, and then lets others
begin: the claim names the digest of the conversion, and only shares with the same one join. Each share writes its files
and then its record: the ETags that the writes were told. The last file of the order belongs to no share: the share that
finds all records there writes it, compares all ETags with a list of the folder, and commits as one process does.
The ETags of all files stay beside them, so that a share that is called again later finds that all is done.

A share that was interrupted is written by calling it again, also one that was publishing.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.conversion.buckets import bucket_of, plain_e_tag
from reshard.conversion.shares import missing
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.conversion.shares import Share
    from reshard.storage.location import Location

_MAX_RECORD_BYTES = 64 << 20
_PUBLISHES = "publishes.json"
_PUBLISHED = "published.json"


@dataclass(frozen=True)
class WrittenObject:
    """What a share tells of a file.

    Attributes:
        n_bytes: its bytes.
        e_tag: its ETag.
    """

    n_bytes: int
    e_tag: str


@dataclass(frozen=True)
class BucketShares:
    """The records of the shares of a conversion.

    Attributes:
        target: the folder of the bucket that is filled.
        folder: the folder of the records, in it.
        share: the share of this process.
    """

    target: Location
    folder: Location
    share: Share

    def record(self, written: Mapping[str, WrittenObject]) -> None:
        """Record that this share was written. Raises StorageError."""
        files = {name: [one.n_bytes, one.e_tag] for name, one in written.items()}
        (self.folder / self.share.name).replace(json.dumps({"files": files}))

    def own(self) -> dict[str, WrittenObject] | None:
        """The record of this share; None: there is none, or its files are not there as it says. Raises StorageError."""
        return self._read(self.share.name, self._e_tags())

    def missing(self) -> list[int]:
        """The shares that are not recorded yet."""
        return missing(self.folder, self.share.count)

    def all(self, names: Collection[str]) -> dict[str, WrittenObject]:
        """What all shares have written.

        Args:
            names: the files that they must have.

        Raises:
            DamagedFileError: a file is not there as it was written, or they have other files.
            StorageError: the service failed.
        """
        there, found = self._e_tags(), dict[str, WrittenObject]()
        for index in range(self.share.count):
            share = type(self.share)(index, self.share.count)
            record = self._read(share.name, there)
            if record is None:
                (self.folder / share.name).remove_file()
                raise DamagedFileError(
                    f"share {index} of {share.count} does not have the files of its record",
                    path=str(self.folder / share.name),
                    hint=f"write it again: `share=({index}, {share.count})`",
                )
            found |= record
        if found.keys() != set(names):
            odd = min(found.keys() ^ set(names))
            raise DamagedFileError(
                f"the shares in {show(str(self.target))} and this conversion disagree on {show(odd)}",
                path=str(self.folder),
                hint="convert again with `overwrite=True`",
            )
        return found

    def publisher(self) -> int:
        """The share that publishes: the first one that asks, also when it is called again. Raises StorageError.

        It is this one, too, if another has published meanwhile: the claim is gone then.
        """
        place = self.folder / _PUBLISHES
        try:
            place.create(json.dumps({"share": self.share.index}).encode())
        except FileExistsError:
            found = self._json(_PUBLISHES)
            return found["share"] if isinstance(found.get("share"), int) else self.share.index
        return self.share.index

    def withdraw(self) -> None:
        """Let another share publish: this one has failed. Never raises."""
        with contextlib.suppress(ReshardError):
            (self.folder / _PUBLISHES).remove_file()

    def record_all(self, e_tags: Mapping[str, str]) -> None:
        """Record that the conversion is published, with the ETags of all its files. Raises StorageError."""
        files = {name: [0, tag] for name, tag in e_tags.items()}
        (self.folder / _PUBLISHED).replace(json.dumps({"version": _core.__version__, "files": files}))

    def is_published(self, names: Collection[str]) -> bool:
        """Whether the conversion was published by this version, and all its files are there as it left them.

        Args:
            names: files that it must have written.

        Raises:
            StorageError: the service failed.
        """
        files = self._read(_PUBLISHED, self._e_tags())
        if not files or self._json(_PUBLISHED).get("version") != _core.__version__:
            return False
        return files.keys() >= set(names)

    def remove(self, *, is_published: bool = False) -> None:
        """Remove all records, which count for nothing without the claim. Never raises.

        Args:
            is_published: keep the one that says so.
        """
        with contextlib.suppress(ReshardError):
            store = bucket_of(self.folder)
            names = [name for name, _ in store.below(self.folder.path)]
            kept = {_PUBLISHED} if is_published else set()
            store.remove_files([str(self.folder / name) for name in names if name not in kept])

    def _e_tags(self) -> dict[str, str]:
        there = bucket_of(self.target).below(self.target.path)
        return {name: plain_e_tag(str(found.identity)) for name, found in there}

    def _read(self, name: str, there: Mapping[str, str]) -> dict[str, WrittenObject] | None:
        try:
            content = self._json(name)
            files = {name: WrittenObject(int(n_bytes), str(tag)) for name, (n_bytes, tag) in content["files"].items()}
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return None
        return files if all(there.get(name) == plain_e_tag(one.e_tag) for name, one in files.items()) else None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: Any = json.loads((self.folder / name).read_small(_MAX_RECORD_BYTES))
        except CheckpointNotFoundError:
            return {}
        return content if isinstance(content, dict) else {}
