"""Every byte of a folder against its manifest: what differs and which tensors lie there; which errors are damage."""

from __future__ import annotations

import errno
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DamagedFileError, ReshardError, StorageError, UnsupportedError
from reshard.formats import manifest as manifests
from reshard.storage.location import Location, locate
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.formats.manifest import Manifest

__all__ = ["Damage", "Fault", "fault_of", "is_damage", "scrub_file", "scrub_folder", "scrub_plain", "scrub_share"]

_MAX_NAMED = 3  # tensors that a message lists before it only counts
# Not the checkpoint's fault: another one would fare no better, and what is newest must not be lost to them.
_NOT_DAMAGE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EINTR, errno.ETIMEDOUT}
)


def is_damage(error: ReshardError) -> bool:
    """Whether an error says that a checkpoint is no good, and not that this process could not look at it.

    A valid manifest of a later version is good: a run must not fall back behind it because an older release reads it.

    Example:
        >>> is_damage(DamagedFileError("torn")), is_damage(StorageError("permission denied", errno=errno.EACCES))
        (True, False)
    """
    if isinstance(error, UnsupportedError) and locate(str(error.path)).name == manifests.MANIFEST_FILE:
        return False
    return not (isinstance(error, StorageError) and error.errno in _NOT_DAMAGE)


@dataclass(frozen=True)
class Fault:
    """Something that is not as it should be.

    Attributes:
        file: name of the file, or None where it is about the folder.
        message: what is wrong.
        begin: of bytes that differ in a shard file, the first, counted from the start of the file; else None.
        end: the byte after the last.
        tensors: names of the stored tensors that have bytes in there.
        is_damage: False where the file could not be read, for want of permission for example: nothing is known of it.
    """

    file: str | None
    message: str
    begin: int | None = None
    end: int | None = None
    tensors: tuple[str, ...] = ()
    is_damage: bool = True


def fault_of(error: ReshardError, file: str | None) -> Fault:
    """A fault that is known by an error.

    Example:
        >>> fault_of(DamagedFileError("torn"), "common.json").is_damage
        True
    """
    tensors = () if error.key is None else (error.key,)
    return Fault(file, error.message, tensors=tensors, is_damage=is_damage(error))


@dataclass(frozen=True)
class Damage:
    """A range of a shard file that is not what its manifest says: 256 KiB, or several that follow each other.

    Attributes:
        file: its name.
        begin: the first byte, counted from the start of the file.
        end: the byte after the last.
        tensors: names of the stored tensors that have bytes in there; none where the header itself is damaged.
    """

    file: str
    begin: int
    end: int
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        some = listed(map(show, self.tensors), _MAX_NAMED) or "the header"
        return f"bytes {self.begin} to {self.end} were altered: {some}"


def scrub_file(
    folder: Location,
    manifest: Manifest,
    name: str,
    sums: bytes,
    *,
    direct: bool = True,
    threads: int | None = None,
    progress: _core.Progress | None = None,
) -> list[Damage]:
    """Compare every byte of a shard file with its sums.

    Args:
        folder: where it lies.
        manifest: of the folder.
        name: the file.
        sums: its sums, as `formats.manifest.read_checksums` gives them.
        direct: read past the page cache, where the file system allows it: what the disk holds is proven.
        threads: threads that read.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        What differs; nothing if the file is whole.

    Raises:
        DamagedFileError: it is of another size, or no regular file.
        StorageError: it cannot be read.

    Example:
        >>> sums = manifests.read_checksums(folder, manifest)  # doctest: +SKIP
        >>> scrub_file(folder, manifest, "model-0000000-0000001.safetensors", sums[name])  # doctest: +SKIP
        []
    """
    path, entry = str(folder / name), manifest.shards[name]
    if folder.is_local:
        ranges = _core.scrub(path, entry.n_bytes, sums, direct=direct, threads=threads, progress=progress)
    else:
        ranges = _scrub_pieces(folder / name, entry.n_bytes, sums)
    if not ranges:
        return []
    try:
        # With the header's sum told, a damaged header is not asked what lies where.
        index = _core.Index()
        file = index.add_file(path, follow_links=False)
        index.set_sums(file, entry.n_bytes, entry.header_bytes, entry.header_sum, sums)
        tensors = index.file_tensors(file)
    except ReshardError:
        tensors = []
    return [
        Damage(
            name,
            begin,
            end,
            tuple(
                key
                for key, _, _, first, last in tensors
                if entry.header_bytes + first < end and begin < entry.header_bytes + last
            ),
        )
        for begin, end in ranges
    ]


def _scrub_pieces(file: Location, n_bytes: int, sums: bytes) -> list[tuple[int, int]]:
    """As `_core.scrub`, for a file that the core cannot open: it is read from its store."""
    ranges: list[tuple[int, int]] = []
    begin = filled = total = 0
    for piece in file.pieces(n_bytes):
        rest = memoryview(piece)
        while rest:
            part, rest = rest[: manifests.CHUNK_BYTES - filled], rest[manifests.CHUNK_BYTES - filled :]
            total = _core.crc32c(part, total)
            filled += len(part)
            if filled < manifests.CHUNK_BYTES and begin + filled < n_bytes:
                continue
            chunk = begin // manifests.CHUNK_BYTES
            if total.to_bytes(4, "little") != sums[4 * chunk : 4 * chunk + 4]:
                first = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin
                ranges.append((first, begin + filled))
            begin, filled, total = begin + filled, 0, 0
    return ranges


def scrub_folder(
    folder: Location,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    direct: bool = True,
    threads: int | None = None,
    advance: Callable[[int], object] | None = None,
) -> list[Fault]:
    """Compare files of a folder with its manifest.

    Args:
        folder: where they lie.
        manifest: of the folder.
        names: shard files; None: all of them, and all other files that the manifest lists.
        direct: as in `scrub_file`.
        threads: threads that read.
        advance: called as `advance(n_bytes)` with the bytes of shard files that were read since the last call.

    Returns:
        What differs and what cannot be read; nothing if all is whole.

    Example:
        >>> scrub_folder(folder, manifests.read(folder))  # doctest: +SKIP
        []
    """
    faults = scrub_plain(folder, manifest) if names is None else []
    for name, entry in manifest.shards.items():
        if names is not None and name not in names:
            continue
        told = 0

        def tell(done_bytes: int, _: int) -> None:
            nonlocal told
            if advance is not None:
                advance(done_bytes - told)
            told = done_bytes

        try:
            sums = manifests.read_checksums(folder, manifest, [name])[name]
            damaged = scrub_file(folder, manifest, name, sums, direct=direct, threads=threads, progress=tell)
            faults += [Fault(name, str(one), one.begin, one.end, one.tensors) for one in damaged]
        except ReshardError as error:
            about = manifests.CHECKSUMS_FILE if str(error.path).endswith(manifests.CHECKSUMS_FILE) else name
            if about == name or not any(fault.file == about for fault in faults):
                faults.append(fault_of(error, about))
        tell(entry.n_bytes, entry.n_bytes)
    return faults


def scrub_plain(folder: Location, manifest: Manifest) -> list[Fault]:
    """Compare the files that are no shard files with the manifest; what differs, and what cannot be read."""
    faults = []
    for name, entry in manifest.files.items():
        try:
            manifests.read_plain(folder, manifest, name, entry.n_bytes)
        except ReshardError as error:
            faults.append(fault_of(error, name))
    return faults


def scrub_share(
    folder: Location,
    manifest: Manifest,
    share: tuple[int, int],
    only: str | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Compare shard files with their sums, through the page cache: what is read is going to be loaded.

    Args:
        folder: where they lie.
        manifest: of the folder.
        share: `(i, n)`: the i-th of n equal shares of the files, i from 0.
        only: this file alone; None: all.
        threads: threads that read.

    Raises:
        DamagedFileError: bytes differ; the message names file, tensors and range.
        StorageError: a file cannot be read.
    """
    number, count = share
    # The largest file first, to whoever has least: every rank comes to the same division.
    loads = [(0, rank) for rank in range(count)]
    own = []
    entries = [one for one in manifest.shards.items() if only in (None, one[0])]
    for name, entry in sorted(entries, key=lambda one: (-one[1].n_bytes, one[0])):
        n_bytes, rank = loads[0]
        heapq.heapreplace(loads, (n_bytes + entry.n_bytes, rank))
        if rank == number:
            own.append(name)
    sums = manifests.read_checksums(folder, manifest, own)
    for name in own:
        damaged = scrub_file(folder, manifest, name, sums[name], direct=False, threads=threads)
        if damaged:
            raise DamagedFileError(f"{show(str(folder / name))}: {damaged[0]}", path=str(folder / name))
