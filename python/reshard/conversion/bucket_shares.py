"""A conversion into a bucket by several processes or machines: each writes files and ranges, the last publishes.

Nothing is renamed or linked in a bucket, so all shares write under the names of the files. The first share that comes
creates the claim (see `buckets`), removes what is replaced, writes the files without tensors, begins an upload in parts
for each file of which several shares write ranges, and then lets others begin: the claim names the digest of the
conversion and the uploads, and only shares with the same digest join. Each share writes its files, sends its parts
and then writes its record: the ETags that the writes were told, and what the service has said of each part.

The share that finds all records there publishes: it completes the uploads, one file after the other, writes the last
file, which belongs to no share if it is small or cannot be sent in parts, compares all ETags with a list of the folder,
and commits as one process does. The ETags of all files stay beside them, so that a share that is called again later
finds that all is done.

    parts     ranges of a file begin with parts of its upload. All parts but the last have one size, which follows from
              the size of the file, so they are those of one process, and so is the object
    again     a share that was interrupted is written by calling it again, also one that was publishing. It sends all of
              its parts, which take the place of those with the same numbers; the record tells which ones count. If a
              file is complete already, it has its size and another ETag than before, and counts as completed
    sums      of a file with sums of its arrays, as of `torch.save`, a share records the sums of what it has of each
              array, and does not send the few parts with sums of arrays that begin in another share. The one that
              publishes sends these, as it knows the sums of all arrays
    lost      if the service does not have an upload or a part any more, as after a rule of the bucket, a share says so
              in an object beside the records: nobody joins the claim any more, and `overwrite` begins anew
"""

from __future__ import annotations

import contextlib
import errno
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.conversion.buckets import bucket_of, plain_e_tag
from reshard.conversion.shares import cut, missing
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.conversion.buckets import BucketFolder
    from reshard.conversion.shares import Part, Share
    from reshard.storage.location import Location

MIN_UPLOAD_BYTES = 32 << 20  # smaller files belong to one share: they have few parts
_MAX_RECORD_BYTES = 64 << 20
_READS_AT_ONCE = 16
_PUBLISHES = "publishes.json"
_PUBLISHED = "published.json"
_LOST = "lost.json"


def cut_files(sizes: Sequence[int], n_shares: int) -> list[list[Part]]:
    """The files and the parts of files that each share writes.

    The last file is visible after all others: it is never whole. If it has no parts, no share writes it.

    Args:
        sizes: bytes of the arrays of each file, in the order in which files become visible.
        n_shares: how many shares there are.

    Example:
        >>> [[(part.file, part.is_whole) for part in share] for share in cut_files([10, 10, 10], 2)]
        [[(0, True)], [(1, True)]]
        >>> [[(part.start >> 20, part.end >> 20) for part in share] for share in cut_files([80 << 20], 2)]
        [[(0, 40)], [(40, 80)]]
    """
    last = len(sizes) - 1
    has_parts = bool(sizes) and sizes[last] >= MIN_UPLOAD_BYTES
    shares = cut(sizes if has_parts else sizes[:-1], n_shares, MIN_UPLOAD_BYTES)
    return [[part._replace(is_whole=part.is_whole and part.file != last) for part in share] for share in shares]


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
class SentParts:
    """What a share tells of the parts that it has sent of a file.

    Attributes:
        upload: the ID of the upload.
        n_file_bytes: bytes of the file.
        n_bytes: bytes of the parts.
        first: number of the first one, from 0.
        sent: what the service has said of each; empty: it is left to the share that publishes.
        sums: of a file with sums of its arrays, those of what the parts have of each.
    """

    upload: str
    n_file_bytes: int
    n_bytes: int
    first: int
    sent: tuple[str, ...]
    sums: tuple[_core.PartSum, ...] = ()


@dataclass(frozen=True)
class ShareRecord:
    """What a share has written.

    Attributes:
        files: the files.
        parts: by the name of the file, what it has sent.
    """

    files: dict[str, WrittenObject] = field(default_factory=dict)
    parts: dict[str, SentParts] = field(default_factory=dict)

    @property
    def n_files(self) -> int:
        """How many files it has written, or parts of."""
        return len(self.files) + len(self.parts)

    @property
    def n_bytes(self) -> int:
        """Their bytes."""
        return sum(one.n_bytes for one in self.files.values()) + sum(one.n_bytes for one in self.parts.values())


@dataclass(frozen=True)
class BucketShares:
    """The records of the shares of a conversion.

    Attributes:
        bucket: the folder of the bucket that is filled, or the file.
        folder: the folder of the records.
        share: the share of this process.
    """

    bucket: BucketFolder
    folder: Location
    share: Share

    def record(self, written: ShareRecord) -> None:
        """Record that this share was written. Raises StorageError."""
        files = {name: [one.n_bytes, one.e_tag] for name, one in written.files.items()}
        parts = {
            name: [one.upload, one.n_file_bytes, one.n_bytes, one.first, one.sent, one.sums]
            for name, one in written.parts.items()
        }
        (self.folder / self.share.name).replace(json.dumps({"files": files, "parts": parts}))

    def own(self) -> ShareRecord | None:
        """The record of this share; None: there is none, or its files are not there as it says. Raises StorageError."""
        return self._read(self.share.name, self.bucket.e_tags)

    def missing(self) -> list[int]:
        """The shares that are not recorded yet."""
        return missing(self.folder, self.share.count)

    def all(self, names: Collection[str]) -> tuple[dict[str, WrittenObject], dict[str, list[SentParts]]]:
        """What all shares have written: files, and the parts of files in their order.

        Args:
            names: the files that they must have.

        Raises:
            DamagedFileError: a file is not there as it was written, or they have other files.
            StorageError: the service failed.
        """
        e_tags = self.bucket.e_tags()
        found, parts = dict[str, WrittenObject](), dict[str, list[SentParts]]()
        shares = [type(self.share)(index, self.share.count) for index in range(self.share.count)]
        with ThreadPoolExecutor(_READS_AT_ONCE) as threads:
            records = list(threads.map(lambda share: self._read(share.name, lambda: e_tags), shares))
        for share, record in zip(shares, records, strict=True):
            if record is None:
                (self.folder / share.name).remove_file()
                raise DamagedFileError(
                    f"share {share.index} of {share.count} does not have the files of its record",
                    path=str(self.folder / share.name),
                    hint=f"write it again: `share=({share.index}, {share.count})`",
                )
            found |= record.files
            for name, one in record.parts.items():
                parts.setdefault(name, []).append(one)
        parts = {name: sorted(some, key=lambda one: (one.first, len(one.sent))) for name, some in parts.items()}
        odds = {*found, *parts} ^ set(names) | {name for name, some in parts.items() if not _are_of_one_file(some)}
        if odds:
            odd = min(odds)
            raise DamagedFileError(
                f"the shares in {show(str(self.bucket.target))} and this conversion disagree on {show(odd)}",
                path=str(self.folder),
                hint="convert again with `overwrite=True`",
            )
        return found, parts

    def publisher(self) -> int:
        """The share that publishes: the first one that asks, also when it is called again. Raises StorageError.

        It is this one, too, if another has published meanwhile: the claim is gone then.
        """
        place = self.folder / _PUBLISHES
        try:
            place.create(json.dumps({"share": self.share.index}).encode())
        except FileExistsError:
            found = self._json(_PUBLISHES)
            index = found.get("share")
            return index if type(index) is int and 0 <= index < self.share.count else self.share.index
        return self.share.index

    def withdraw(self) -> None:
        """Let another share publish: this one has failed. Never raises."""
        with contextlib.suppress(ReshardError), self.bucket.cleaning_up():
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
        record = self._read(_PUBLISHED, self.bucket.e_tags)
        if not (record and record.files) or self._json(_PUBLISHED).get("version") != _core.__version__:
            return False
        return record.files.keys() >= set(names)

    def is_published_by_others(self, names: Collection[str]) -> bool:
        """Whether the claim is gone, and the conversion was published. Never raises: False, if it is not known.

        Args:
            names: as of `is_published`.
        """
        try:
            return self.bucket.has_ended() and self.is_published(names)
        except ReshardError:
            return False

    def lost(self) -> str:
        """The name of the claim of which an upload was lost; empty: none was. Raises StorageError."""
        return str(self._json(_LOST).get("claim", ""))

    @contextlib.contextmanager
    def noting_lost_uploads(self) -> Iterator[None]:
        """If the service does not have an upload any more, let nobody join the claim."""
        try:
            yield
        except StorageError as error:
            # Of a file of the source this number says that it is gone from a network file system.
            if error.errno == errno.ESTALE and str(error.path).startswith(str(self.bucket.target)):
                with contextlib.suppress(ReshardError):  # the first error is the one that is raised
                    if not self.bucket.has_ended():
                        error.hint = (
                            "a rule of the bucket or another program ended it: convert again with `overwrite=True`"
                        )
                        (self.folder / _LOST).replace(json.dumps({"claim": self.bucket.claim_name}))
            raise

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

    def _read(self, name: str, e_tags: Callable[[], Mapping[str, str]]) -> ShareRecord | None:
        """A record; None: there is none, or what is there is not what it says. A folder is only listed for files."""
        try:
            content = self._json(name)
            files = {name: WrittenObject(int(n_bytes), str(tag)) for name, (n_bytes, tag) in content["files"].items()}
            parts = {
                name: SentParts(
                    str(upload), int(n_file), int(n_bytes), int(first), tuple(map(str, sent)), _sums(sums, int(n_file))
                )
                for name, (upload, n_file, n_bytes, first, sent, sums) in content.get("parts", {}).items()
            }
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return None
        there = e_tags() if files else {}
        is_there = all(there.get(name) == plain_e_tag(one.e_tag) for name, one in files.items())
        uploads = self.bucket.uploads
        is_sent = all(name in uploads and uploads[name].id == one.upload for name, one in parts.items())
        return ShareRecord(files, parts) if is_there and is_sent else None

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: Any = json.loads((self.folder / name).read_small(_MAX_RECORD_BYTES))
        except (CheckpointNotFoundError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


def _sums(found: Sequence[Sequence[int]], n_file_bytes: int) -> tuple[_core.PartSum, ...]:
    """The sums of a record. Raises ValueError: one has a number that no file has."""
    sums = tuple(_core.PartSum(int(array), int(n_bytes), int(crc)) for array, n_bytes, crc in found)
    for one in sums:
        in_file = 0 <= one.array <= n_file_bytes < 1 << 63 and 0 <= one.n_bytes <= n_file_bytes
        if not (in_file and 0 <= one.crc < 1 << 32):
            raise ValueError(f"{one} is no sum of a part of a file of {n_file_bytes} bytes")
    return sums


def _are_of_one_file(parts: Sequence[SentParts]) -> bool:
    """Whether parts follow each other. How many there must be is known to what completes the upload."""
    next_part = 0
    for one in parts:
        if one.n_file_bytes != parts[0].n_file_bytes or (one.sent and one.first != next_part):
            return False
        next_part += len(one.sent)
    return sum(one.n_bytes for one in parts) == parts[0].n_file_bytes
