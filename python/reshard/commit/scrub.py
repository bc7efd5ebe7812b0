"""Compares the bytes of a folder with its manifest, and reports the ranges that differ and the tensors in them."""

from __future__ import annotations

import errno
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import _core
from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.errors import DamagedFileError, ReshardError, StorageError, UnsupportedError
from reshard.storage.location import Location, is_fault_of_file, locate
from reshard.values.words import listed, one_line, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.commit.manifest import Manifest

_MAX_NAMED = 3  # tensors that a message lists before it only counts them


def is_damage(error: ReshardError) -> bool:
    """Whether an error means that a checkpoint is damaged, not that this process failed to read it.

    A valid manifest of a later version is not damage: an older release must not resume from an older iteration instead.

    Example:
        >>> import errno
        >>> is_damage(DamagedFileError("torn")), is_damage(StorageError("permission denied", errno=errno.EACCES))
        (True, False)
    """
    if isinstance(error, UnsupportedError) and locate(str(error.path)).name == MANIFEST_FILE:
        return False
    return not isinstance(error, StorageError) or is_fault_of_file(error)


@dataclass(frozen=True)
class Fault:
    """A fault of a file or a folder.

    Attributes:
        file: name of the file, or None for a fault of the folder.
        message: what is wrong.
        begin: first byte that differs in a shard file, from the start of the file; else None.
        end: the byte after the last.
        tensors: names of the stored tensors with bytes in this range.
        is_damage: False if the file could not be read, for example for lack of permission, or if this version or the
            file system does not support it. Its state is unknown then.
    """

    file: str | None
    message: str
    begin: int | None = None
    end: int | None = None
    tensors: tuple[str, ...] = ()
    is_damage: bool = True

    def __str__(self) -> str:
        return self.message if self.file is None or self.file in self.message else f"{self.file}: {self.message}"


def reason_of(error: ReshardError) -> str:
    """Why a checkpoint is skipped. If the error concerns one file, the reason includes its name."""
    name = "" if error.path is None else locate(error.path).name
    message = one_line(error.message)
    return message if name in message else f"{name}: {message}"


def fault_of(error: ReshardError, file: str | None) -> Fault:
    """The fault that an error reports. What this version or the file system does not support is no damage.

    A run still skips an iteration of which it does not support a file: that is what `is_damage` of the error says.

    Example:
        >>> fault_of(DamagedFileError("torn"), "common.json").is_damage
        True
        >>> fault_of(UnsupportedError("a name of 2000 characters"), "a.safetensors").is_damage
        False
    """
    is_unsupported = isinstance(error, UnsupportedError) or getattr(error, "errno", None) == errno.ENAMETOOLONG
    tensors = () if error.key is None else (error.key,)
    return Fault(file, one_line(error.message), tensors=tensors, is_damage=is_damage(error) and not is_unsupported)


def own_sums(index: _core.Index) -> tuple[list[int], list[Fault]]:
    """Compare the files of an index with the checksums that they hold.

    Returns:
        The bytes of each file that holds checksums and has no fault, and the faults of the others.
    """
    compared, faults = list[int](), list[Fault]()
    for file in range(index.n_files):
        try:
            if index.verify_crc(file):
                compared.append(index.file_bytes(file))
        except ReshardError as error:
            faults.append(fault_of(error, locate(index.file_path(file)).name))
    return compared, faults


@dataclass(frozen=True)
class Damage:
    """A range of a shard file that differs from its checksums: one chunk of 256 KiB, or several consecutive chunks.

    Attributes:
        file: name of the file.
        begin: first byte, from the start of the file.
        end: the byte after the last.
        tensors: names of the stored tensors with bytes in this range; empty if the header itself is damaged.
    """

    file: str
    begin: int
    end: int
    tensors: tuple[str, ...]

    def fault(self) -> Fault:
        """The fault that it is."""
        return Fault(self.file, str(self), self.begin, self.end, self.tensors)

    def __str__(self) -> str:
        some = listed(map(show, self.tensors), _MAX_NAMED) or "the header"
        return f"bytes {self.begin} to {self.end} were altered: {some}"


def scrub_file(
    folder: Location,
    manifest: Manifest,
    name: str,
    checksums: bytes,
    *,
    within: tuple[int, int] | None = None,
    direct: bool = True,
    values: _core.ValueCounts | None = None,
    threads: int | None = None,
    progress: _core.Progress | None = None,
) -> list[Damage]:
    """Compare every byte of a shard file with its checksums.

    Args:
        folder: the folder of the file.
        manifest: the manifest of the folder.
        name: name of the file.
        checksums: its checksums, as `formats.manifest.read_checksums` returns them.
        within: the first byte of the chunks that are compared, and their end; None: all.
        direct: read past the page cache, if the file system allows it, so that the content of the disk is compared.
        values: looks at all bytes of the file in the same pass.
        threads: threads that read.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        The ranges that differ; empty if there are none.

    Raises:
        DamagedFileError: it has another size, or is not a regular file.
        StorageError: it cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> folder = locate(reshard.save("run", 1, {"w": np.zeros(4)}).path)
        >>> manifest = manifests.read(folder)
        >>> [name] = manifest.shards
        >>> scrub_file(folder, manifest, name, manifests.read_checksums(folder, manifest)[name])
        []
    """
    path, entry = str(folder / name), manifest.shards[name]
    start, end = within or (0, entry.n_bytes)
    if folder.store.is_opened_by_core:
        ranges = _core.scrub(
            path,
            entry.n_bytes,
            checksums,
            start=start,
            end=end,
            direct=direct,
            values=values,
            threads=threads,
            progress=progress,
        )
    else:
        ranges = _scrub_pieces(folder / name, entry.n_bytes, checksums, values, (start, end))
    if not ranges:
        return []
    try:
        # With the checksum of the header set, a damaged header is not used to find the tensors.
        index = _core.Index()
        file = index.add_file(path, follow_links=False)
        index.set_checksums(file, entry.n_bytes, entry.header_bytes, entry.header_checksum, checksums)
        tensors = index.file_tensors(file)
    except ReshardError:
        tensors = []
    return [
        Damage(
            name,
            begin,
            end,
            tuple(
                tensor.name
                for tensor in tensors
                if max(begin, entry.header_bytes + tensor.start) < min(end, entry.header_bytes + tensor.end)
            ),
        )
        for begin, end in ranges
    ]


def _scrub_pieces(
    file: Location, n_bytes: int, checksums: bytes, values: _core.ValueCounts | None, within: tuple[int, int]
) -> list[tuple[int, int]]:
    """As `_core.scrub`, for a file that the core cannot open: it is read from its store."""
    ranges: list[tuple[int, int]] = []
    begin, filled, total = within[0], 0, 0
    for piece in file.pieces(n_bytes, None if within == (0, n_bytes) else [within]):
        rest = memoryview(piece)
        while rest:
            part, rest = rest[: manifests.CHUNK_BYTES - filled], rest[manifests.CHUNK_BYTES - filled :]
            total = _core.crc32c(part, total)
            if values is not None:
                values.look(begin + filled, part)
            filled += len(part)
            if filled < manifests.CHUNK_BYTES and begin + filled < n_bytes:
                continue
            chunk = begin // manifests.CHUNK_BYTES
            if total.to_bytes(4, "little") != checksums[4 * chunk : 4 * chunk + 4]:
                first = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin
                ranges.append((first, begin + filled))
            begin, filled, total = begin + filled, 0, 0
    return ranges


def scrub_folder(
    folder: Location,
    manifest: Manifest,
    names: Collection[str] | None = None,
    *,
    within: Mapping[str, tuple[int, int]] | None = None,
    direct: bool = True,
    values: Mapping[str, _core.ValueCounts] | None = None,
    threads: int | None = None,
    advance: Callable[[int], object] | None = None,
) -> list[Fault]:
    """Compare files of a folder with its manifest.

    Args:
        folder: the folder of the files.
        manifest: the manifest of the folder.
        names: names of shard files; None: all of them, and all other files that the manifest lists.
        within: by the name of a file, as in `scrub_file`.
        direct: as in `scrub_file`.
        values: by the name of a file, what looks at its bytes.
        threads: threads that read.
        advance: called as `advance(n_bytes)` with the bytes of shard files that were read since the last call.

    Returns:
        The differences, and the files that cannot be read; empty if there are none.

    Example:
        >>> import numpy as np, reshard
        >>> folder = locate(reshard.save("a_run", 1, {"w": np.zeros(4)}).path)
        >>> scrub_folder(folder, manifests.read(folder))
        []
    """
    faults = scrub_plain(folder, manifest) if names is None else []
    for name, entry in manifest.shards.items():
        if names is not None and name not in names:
            continue
        reported = 0

        def report(done_bytes: int, _: int) -> None:
            nonlocal reported
            if advance is not None:
                advance(done_bytes - reported)
            reported = done_bytes

        try:
            checksums = manifests.read_checksums(folder, manifest, [name])[name]
            looks = None if values is None else values.get(name)
            damaged = scrub_file(
                folder,
                manifest,
                name,
                checksums,
                within=None if within is None else within.get(name),
                direct=direct,
                values=looks,
                threads=threads,
                progress=report,
            )
            faults += [one.fault() for one in damaged]
        except ReshardError as error:
            about = manifests.CHECKSUMS_FILE if str(error.path).endswith(manifests.CHECKSUMS_FILE) else name
            if about == name or not any(fault.file == about for fault in faults):
                faults.append(fault_of(error, about))
        start, end = (0, entry.n_bytes) if within is None else within.get(name, (0, entry.n_bytes))
        report(end - start, end - start)
    return faults


def joined_faults(found: Sequence[Fault]) -> list[Fault]:
    """The faults of a file, as one process finds them, from those of its ranges, in their order.

    A range that cannot be read does not hide the damage of others.

    Example:
        >>> one = Damage("a.safetensors", 0, 8, ("w",)).fault()
        >>> other = Damage("a.safetensors", 8, 9, ("w", "v")).fault()
        >>> [str(fault) for fault in joined_faults([one, other])]
        ['a.safetensors: bytes 0 to 9 were altered: `w`, `v`']
    """
    joined, unread = list[Fault](), list[Fault]()
    for one in found:
        if one.file is None or one.begin is None or one.end is None:
            if one.is_damage:  # another size
                return [one]
            unread = unread or [one]
            continue
        before = joined[-1] if joined else None
        if before is not None and before.begin is not None and before.end == one.begin:
            tensors = tuple(dict.fromkeys((*before.tensors, *one.tensors)))
            joined[-1] = Damage(one.file, before.begin, one.end, tensors).fault()
        else:
            joined.append(one)
    return joined + unread


def scrub_plain(folder: Location, manifest: Manifest) -> list[Fault]:
    """Compare the files that are not shard files with the manifest; returns differences and unreadable files."""
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
    """Compare shard files with their checksums, through the page cache, because the bytes are loaded next.

    Args:
        folder: the folder of the files.
        manifest: the manifest of the folder.
        share: `(i, n)`: the i-th of n equal shares of the files, i from 0.
        only: compare this file only; None: all files.
        threads: threads that read.

    Raises:
        DamagedFileError: bytes differ; the message names file, tensors and range.
        StorageError: a file cannot be read.
    """
    number, count = share
    # The largest file first, to the share with the fewest bytes: every rank computes the same division.
    loads = [(0, rank) for rank in range(count)]
    own = []
    entries = [one for one in manifest.shards.items() if only in (None, one[0])]
    for name, entry in sorted(entries, key=lambda one: (-one[1].n_bytes, one[0])):
        n_bytes, rank = loads[0]
        heapq.heapreplace(loads, (n_bytes + entry.n_bytes, rank))
        if rank == number:
            own.append(name)
    checksums = manifests.read_checksums(folder, manifest, own)
    for name in own:
        damaged = scrub_file(folder, manifest, name, checksums[name], direct=False, threads=threads)
        if damaged:
            raise DamagedFileError(f"{show(str(folder / name))}: {damaged[0]}", path=str(folder / name))
