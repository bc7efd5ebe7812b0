"""Every byte of a shard file against the sums that its manifest tells, and which tensors lie where it differs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import DamagedFileError, ReshardError
from reshard.formats import manifest as manifests
from reshard.small_files import show
from reshard.words import listed

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.formats.manifest import Manifest

__all__ = ["Damage", "scrub_file", "scrub_share"]

_MAX_NAMED = 3  # tensors that a message lists before it only counts


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
    folder: Path,
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
        sums: its sums, as `formats.manifest.read_sums` gives them.
        direct: read past the page cache, where the file system allows it: what the disk holds is proven.
        threads: threads that read.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        What differs; nothing if the file is whole.

    Raises:
        DamagedFileError: it is of another size, or no regular file.
        StorageError: it cannot be read.

    Example:
        >>> sums = manifests.read_sums(folder, manifest)  # doctest: +SKIP
        >>> scrub_file(folder, manifest, "model-0000000-0000001.safetensors", sums[name])  # doctest: +SKIP
        []
    """
    path, entry = str(folder / name), manifest.shards[name]
    ranges = _core.scrub(path, entry.n_bytes, sums, direct=direct, threads=threads, progress=progress)
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


def scrub_share(
    folder: Path,
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
    sums = manifests.read_sums(folder, manifest, own)
    for name in own:
        damaged = scrub_file(folder, manifest, name, sums[name], direct=False, threads=threads)
        if damaged:
            raise DamagedFileError(f"{show(str(folder / name))}: {damaged[0]}", path=str(folder / name))
