"""A conversion by several processes or machines: each writes a share of the files, and the last one publishes.

The files of a conversion, one after the other, are cut into shares of as many bytes; a large file can belong to several
shares. These write into one folder on the file system of the destination. Its name is a digest of the source and the
options, so only shares of the same conversion use it. Each writes its files, or its ranges of them, and then
`share-<i>.json`, the record of their sizes and checksums. The files with ranges lie in a folder with a random name, the
token, which the first share makes and all records name: files that were removed and made again have another one, so no
range of an old record is taken for one of the new files. No process waits for another but for one that publishes: no
claim is held and no message is sent. A share that was interrupted is written by calling it again; one with a record is
not written again. The files are linked into the folder that is published, so that a crash during publication costs no
work.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import logging
import re
import secrets
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard import _core
from reshard.commit.publication import SHARED_PREFIX, remove_links
from reshard.commit.trash import STAGING_FOLDER
from reshard.documents.strict_json import read_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError
from reshard.storage.changes import link_or_move, make_folders, remove_file, remove_folder
from reshard.storage.location import locate
from reshard.storage.names import as_start
from reshard.values.words import show
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.conversion.source import Source
    from reshard.storage.location import Location

    Spread = Callable[[int, "Begun | None"], list[dict[str, "SentPart"]]]

_log = logging.getLogger("reshard")

_MAX_SHARES = 65536
_MAX_RECORD_BYTES = 1 << 30
MIN_CUT_BYTES = 1 << 20  # smaller files belong to one share
_RECORD_VERSION = 5
_TOKEN = re.compile("[0-9a-f]{16}")
_CUT = ".cut"  # the folder of the folder of files that several shares write
_TRIES = 8  # to make it, while other processes make and remove it


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
class Begun:
    """What the process that begins an iteration tells the others.

    Attributes:
        digest: of the conversion.
        folder: the name of the folder of the attempt, in the root.
        uploads: the ID of the upload of each file that several shares write.
    """

    digest: str
    folder: str
    uploads: dict[str, str]


@dataclass(frozen=True)
class SentPart:
    """What a share has written of a file.

    Attributes:
        start: its first byte in the file.
        end: its end in the file.
        file: the record of the file, with the checksums of this part only.
        first: the number of the first part of the upload, from 0.
        sent: what the service has said of each part of the upload; empty if the file was written at once.
    """

    start: int
    end: int
    file: WrittenFile
    first: int = 0
    sent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shared:
    """A share, and the folder of all shares.

    Attributes:
        share: the share.
        folder: the folder into which all shares write their files. Its name has the digest of the conversion. There is
            none for an iteration of a root in a bucket.
        spread: None, or what lets other processes write all shares, given the bytes of the files, and for such an
            iteration what it has begun; this one publishes. It returns what each share has written of such files.
        is_sent: whether another process has made the folder and publishes; this one only writes the share.
        begun: what the other process has begun.
    """

    share: Share
    folder: Location
    spread: Spread | None = None
    is_sent: bool = False
    begun: Begun | None = None


def start_beside(target: Location) -> str:
    """How the names of folders of shares begin that lie beside a destination.

    Example:
        >>> from reshard.storage.location import locate
        >>> start_beside(locate("model.safetensors"))
        '.model.safetensors.share-'
    """
    return f".{as_start(target.name)}.{SHARED_PREFIX}"


def remove_published(target: Location, own: Location | None) -> None:
    """Remove folders of shares whose files a conversion had published to a destination before it was killed.

    Args:
        target: the destination.
        own: the folder of this conversion, which is not removed.
    """
    if target.is_local and target.exists():
        for folder in _folders_for(target):
            if folder != own:
                remove_links(folder, target)


def warn_of_others(target: Location, own: Location) -> None:
    """Log which folders of shares of other conversions to a destination there are.

    Args:
        target: the destination.
        own: the folder of this conversion.
    """
    for folder in _folders_for(target):
        if folder != own:
            _log.warning(
                "%s has shares of another conversion to %s: of another source or one that was changed meanwhile, with "
                "other options, or by another version of reshard. Shares that belong together need the same. If no "
                "process writes it, remove it",
                show(str(folder)),
                show(str(target)),
            )


def _folders_for(target: Location) -> Iterator[Location]:
    """The folders of shares of conversions to a destination. What cannot be listed is left out."""
    places = [(target.parent, start_beside(target))]
    if target.is_folder():
        places += [(target, f".reshard.{SHARED_PREFIX}"), (target / STAGING_FOLDER, SHARED_PREFIX)]
    for folder, start in places:
        with contextlib.suppress(ReshardError):
            for name in folder.names():
                if name.startswith(start):
                    yield folder / name


def digest_of(source: Source, options: Mapping[str, Any]) -> str:
    """A digest of the values that all shares must agree on: this version, the files of the source, and all options.

    Args:
        source: the opened source.
        options: JSON-able.
    """
    path, index = source.data.path, source.data.index
    stat = path.store.stat if path.is_local else lambda file, **how: locate(file).stat(**how)
    files = [
        (file.name, file.n_bytes, stat(index.file_path(number), follow_links=True).modified_ns)
        for number, file in enumerate(source.files())
    ]
    proof = None if source.manifest is None else source.manifest.digest
    text = json.dumps([_core.__version__, str(path.resolved()), proof, files, options], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Part(NamedTuple):
    """What a share writes of a file.

    Attributes:
        file: the number of the file.
        start: where it begins, in bytes of the arrays of the file.
        end: where it ends.
        is_whole: whether it is the whole file.
    """

    file: int
    start: int
    end: int
    is_whole: bool


def cut(sizes: Sequence[int], n_shares: int, min_bytes: int | None = None) -> list[list[Part]]:
    """The parts of files that each share writes: as many bytes for each, in the order of the files.

    Args:
        sizes: bytes of the arrays of each file.
        n_shares: how many shares there are.
        min_bytes: files with fewer bytes have no parts; None: `MIN_CUT_BYTES`.

    Example:
        >>> [[part.file for part in share] for share in cut([10, 40, 30, 10], 2)]
        [[0, 1], [2, 3]]
        >>> [[(part.start >> 20, part.end >> 20) for part in share] for share in cut([80 << 20], 2)]
        [[(0, 40)], [(40, 80)]]
    """
    shares: list[list[Part]] = [[] for _ in range(n_shares)]
    least = MIN_CUT_BYTES if min_bytes is None else min_bytes
    total = sum(sizes) + len(sizes)  # empty files are spread, too
    bounds = [total * index // n_shares for index in range(1, n_shares)]
    start = 0
    for number, size in enumerate(sizes):
        if size < least:
            shares[bisect_right(bounds, start + size // 2)].append(Part(number, 0, size, is_whole=True))
        else:
            index, at = bisect_right(bounds, start), 0
            while at < size:
                end = size if index == len(bounds) else min(size, bounds[index] - start)
                if end > at:
                    shares[index].append(Part(number, at, end, is_whole=(at, end) == (0, size)))
                index, at = index + 1, max(at, end)
        start += size + 1
    return shares


@dataclass(frozen=True)
class WrittenPart:
    """The record of a part of a file.

    Attributes:
        start: its first byte in the file.
        end: its end in the file.
        file: the record of the file, with the checksums of this part only.
        sums: of a file with sums of its arrays, those of what the part has of each; the file lacks them still.
        token: that of the folder of the file, if several shares write it.
    """

    start: int
    end: int
    file: WrittenFile
    sums: tuple[_core.PartSum, ...] = ()
    token: str = ""

    @property
    def n_bytes(self) -> int:
        """Its bytes."""
        return self.end - self.start

    @property
    def not_finite(self) -> Sequence[tuple[str, _core.NotFinite]]:
        """As of the file."""
        return self.file.not_finite


def joined(parts: Sequence[WrittenPart]) -> WrittenFile | None:
    """The record of a file from those of its parts; None: they are not those of one file.

    Args:
        parts: the records, at least one.

    Example:
        >>> parts = [WrittenPart(0, 262144, WrittenFile(262150, 8, 7, b"abcd")),
        ...          WrittenPart(262144, 262150, WrittenFile(262150, 8, 7, b"efgh"))]
        >>> joined(parts).checksums, joined(parts[1:])
        (b'abcdefgh', None)
    """
    ordered = _in_order(parts)
    alike = {(part.file.n_bytes, part.file.header_bytes, part.file.header_checksum, part.token) for part in ordered}
    ends = [0, *(part.end for part in ordered)]
    if len(alike) != 1 or ends[-1] != ordered[0].file.n_bytes or ends[:-1] != [part.start for part in ordered]:
        return None
    worst: dict[str, _core.NotFinite] = {}
    for name, kind in (one for part in ordered for one in part.file.not_finite):
        worst[name] = max(kind, worst.get(name, kind))
    checksums = b"".join(part.file.checksums for part in ordered)
    first = ordered[0].file
    header_checksum = first.header_checksum if first.header_bytes else 0  # without a header, parts are compared by it
    return replace(first, header_checksum=header_checksum, checksums=checksums, not_finite=tuple(worst.items()))


def folder_of(folder: Location, token: str) -> Location:
    """The folder of the files with this token; without one, that of the shares."""
    return folder / _CUT / token if token else folder


def made_once(folder: Location, names: Collection[str], *, mode: int, folder_mode: int) -> str:
    """The token of the files that several shares write. The first share makes them, and all find the same ones.

    If one of them is lost, all are made again under another token, and no record of the old ones counts.

    Args:
        folder: the folder of the shares, which is not made.
        names: the files.
        mode: permission bits of the files, less the umask.
        folder_mode: of folders.

    Raises:
        StorageError: the system failed, or the folder of the shares was removed.
    """
    place = folder / _CUT
    for _ in range(_TRIES):
        for token in _names(place):
            if all((place / token / name).is_file() for name in names):
                return token
            lost = folder / f"{_CUT}-{secrets.token_hex(8)}"  # NFS keeps the name of a file that is open somewhere
            with contextlib.suppress(ReshardError):  # another share has done it
                place.store.rename((place / token).path, lost.path)
            remove_folder(lost)
        with contextlib.suppress(StorageError):  # another share has made it again
            place.store.remove_empty_folder(place.path)
        token = secrets.token_hex(8)
        made = folder / f"{_CUT}-{token}"
        make_folders(made / token, folder_mode, inside=folder)
        for name in names:
            file = made / token / name
            make_folders(file.parent, folder_mode, inside=made)
            file.create(mode=mode, durable=False)
        try:
            place.store.rename(made.path, place.path)  # refused if there is one
        except FileExistsError:
            remove_folder(made)
        else:
            return token
    raise StorageError(
        f"the files of several shares cannot be made in {show(str(place))}",
        path=str(place),
        hint="remove that folder and convert again",
    )


def write_record(
    folder: Location, share: Share, written: Mapping[str, WrittenPart], *, mode: int, durable: bool
) -> None:
    """Record that a share was written.

    Args:
        folder: the folder of the shares.
        share: the share that is written.
        written: the record of what it wrote of each file, which must have been synced.
        mode: permission bits of the record, less the umask.
        durable: whether the record is synced.

    Raises:
        StorageError: the system failed, or a file was removed meanwhile.
    """
    for name, part in written.items():
        if not (folder_of(folder, part.token) / name).is_file():
            raise StorageError(
                f"{show(name)} was removed while share {share.index} of {share.count} wrote it",
                path=str(folder),
                hint="write this share again",
            )
    files = {
        name: [
            part.start,
            part.end,
            part.file.n_bytes,
            part.file.header_bytes,
            part.file.header_checksum,
            base64.b64encode(part.file.checksums).decode(),
            part.file.not_finite,
            part.sums,
            part.token,
        ]
        for name, part in written.items()
    }
    text = json.dumps({"version": _RECORD_VERSION, "digest": _digest(files), "files": files})
    locate(folder / share.name).replace(text, mode, durable=durable)


def read_record(folder: Location, share: Share) -> dict[str, WrittenPart] | None:
    """The records of what a share wrote of its files; None: there is no record, or its files are missing.

    Raises:
        StorageError: the system failed.
    """
    try:
        content: Any = read_json(folder / share.name, _MAX_RECORD_BYTES)
        if content["version"] != _RECORD_VERSION or content["digest"] != _digest(content["files"]):
            return None
        files = {}
        for name, (*numbers, checksums, not_finite, sums, token) in content["files"].items():
            start, end, n_bytes, header_bytes, checksum = numbers
            of_chunks = base64.b64decode(checksums, validate=True)
            worst = tuple((key, _core.NotFinite(kind)) for key, kind in not_finite)
            file = WrittenFile(n_bytes, header_bytes, checksum, of_chunks, worst)
            if token != "" and _TOKEN.fullmatch(token) is None:  # it is the name of a folder
                return None
            files[name] = WrittenPart(start, end, file, tuple(_core.PartSum(*one) for one in sums), token)
        if all(one.end <= _size_of(folder, name, one) <= one.file.n_bytes for name, one in files.items()):
            return files
    except StorageError:
        raise
    except (ReshardError, KeyError, TypeError, ValueError, AttributeError):
        pass  # truncated or invalid: it is written again
    return None


def _size_of(folder: Location, name: str, part: WrittenPart) -> int:
    path = folder_of(folder, part.token) / name
    if not part.token:
        return path.stat().n_bytes
    with path.open() as file:  # NFS may know an older size of what other hosts write, until it is opened
        return file.seek(0, io.SEEK_END)


def _digest(files: Mapping[str, Any]) -> str:
    """Of a record: what was changed in it is not written into a file."""
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()


def missing(folder: Location, n_shares: int) -> list[int]:
    """The shares that are not recorded yet."""
    names = set(_names(folder))
    return [index for index in range(n_shares) if _name(index) not in names]


def _names(folder: Location) -> list[str]:
    """Of its entries; none if it is not there."""
    try:
        return folder.names()
    except CheckpointNotFoundError:
        return []


def remove_shares(folder: Location) -> None:
    """Remove the folder of the shares, which are published. Never raises."""
    remove_folder(folder)
    if folder.parent.name == STAGING_FOLDER:  # of a root, where one process leaves none
        with contextlib.suppress(ReshardError):
            folder.store.remove_empty_folder(folder.parent.path)


def place(
    folder: Location,
    target: Location,
    files: Mapping[str, _core.Container | None],
    n_shares: int,
    *,
    durable: bool,
) -> dict[str, WrittenFile]:
    """Link the files of all shares into the folder that is published.

    The sums of the arrays of a file of which shares have written parts are joined, and written into it before.

    Args:
        folder: the folder of the shares.
        target: the folder that is published.
        files: the files that it must contain, and the container of each.
        n_shares: number of shares.
        durable: whether the sums are synced.

    Returns:
        The record of each file.

    Raises:
        DamagedFileError: a share does not have the files of its record; it must be written again.
        StorageError: the system failed.
    """
    shares = [read_record(folder, Share(index, n_shares)) for index in range(n_shares)]
    if None in shares:
        lost = shares.index(None)
        for index, share in enumerate(shares):
            # A file that was cut short can have its size again, but not what other shares had written of it.
            if share is None or any(part.token for part in share.values()):
                remove_file(folder / _name(index))
        raise DamagedFileError(
            f"share {lost} of {n_shares} does not have the files of its record",
            path=str(folder / _name(lost)),
            hint=f"write it again: `share=({lost}, {n_shares})`, and so the others that are pending",
        )
    parts: dict[str, list[WrittenPart]] = {}
    for name, part in (one for share in shares if share is not None for one in share.items()):
        parts.setdefault(name, []).append(part)
    records = {name: joined(of_file) for name, of_file in parts.items()}
    odd = set(records) ^ set(files) | {name for name, record in records.items() if record is None}
    odd |= {name for name in records.keys() & files if not _has_all_sums(parts[name], files[name])}
    if odd:
        raise DamagedFileError(
            f"the shares in {folder} and this conversion disagree on {min(odd)}",
            path=str(folder),
            hint="remove that folder and convert again",
        )
    found = {name: record for name, record in records.items() if record is not None}
    for name, container in files.items():
        sums = [one for part in _in_order(parts[name]) for one in part.sums]
        path = folder_of(folder, parts[name][0].token) / name
        if container is not None and sums:
            checksums = _core.write_sums(str(path), container, sums, found[name].checksums, durable=durable)
            found[name] = replace(found[name], checksums=checksums)
        link_or_move(path, target / name)
    return found


def _has_all_sums(parts: Sequence[WrittenPart], container: _core.Container | None) -> bool:
    """Whether shares that have written parts of a file have the sums of all bytes of its arrays, if it needs them."""
    if not any(part.token for part in parts):
        return True
    n_bytes = 0 if container is None or not container[2] else parts[0].file.n_bytes - len(container[0])
    return n_bytes == sum(one.n_bytes for part in parts for one in part.sums)


def _in_order(parts: Sequence[WrittenPart]) -> list[WrittenPart]:
    return sorted((part for part in parts if part.n_bytes or len(parts) == 1), key=lambda part: part.start)


def _name(index: int) -> str:
    return f"share-{index}.json"
