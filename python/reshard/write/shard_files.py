"""Shard files of this rank: prepared, then written, from the caller's memory or from a copy of it; and their records.

A save that waits writes the arrays of the caller. A save in the background first copies the content of each file; after
that the caller may change its arrays. Paths and names of files are not known here.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard import _core
from reshard.errors import DamagedFileError
from reshard.storage.location import locate
from reshard.values.words import show
from reshard.write import background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reshard.commit.attempts import ValueRecord
    from reshard.write.arrays import LocalArrays

    ShardFileMaker: TypeAlias = Callable[[str, LocalArrays, Mapping[str, str]], "ShardFile"]

__all__ = ["ShardFile", "ShardFileMaker", "WrittenFile", "read_back", "reserved_bytes", "shard_file"]

_BUFFERS_BYTES = 32 << 20
_OBJECT_BUFFERS_BYTES = 256 << 20  # the parts of an object stay in memory until they are answered
_TOUCHED_FROM_BYTES = 16 << 20  # for smaller files the start of a thread costs more
_MAX_NAMED = 1000  # arrays of a file that are not finite
_HEADER_BYTES = 512  # at most of an array in a header, without its name


@dataclass(frozen=True)
class WrittenFile:
    """The record of a shard file that another process has written, as `_core.Written` is that of this one.

    Attributes:
        n_bytes: its size.
        header_bytes: size of its header.
        header_checksum: CRC-32C of its header.
        checksums: checksums of its chunks.
        not_finite: names of its arrays that hold values that are not finite, and the worst one; at most 1,000.
    """

    n_bytes: int
    header_bytes: int
    header_checksum: int
    checksums: bytes = field(repr=False)
    not_finite: tuple[tuple[str, _core.NotFinite], ...] = ()

    @classmethod
    def of(cls, written: ValueRecord) -> WrittenFile:
        """The record of a file as a value that can be sent."""
        return cls(
            written.n_bytes,
            written.header_bytes,
            written.header_checksum,
            written.checksums,
            tuple(written.not_finite[:_MAX_NAMED]),
        )


@dataclass(frozen=True)
class ShardFile:
    """A shard file of this rank that is ready to be written: `write(path, durable=, mode=, progress=)`."""

    name: str
    n_bytes: int
    write: Callable[..., _core.Written]


def shard_file(
    name: str,
    arrays: LocalArrays,
    metadata: Mapping[str, str],
    *,
    threads: int | None = None,
    blocking: bool,
    ready: Callable[[], object] | None = None,
) -> ShardFile:
    """Prepare a shard file.

    Args:
        name: its name.
        arrays: the arrays in it, in the order in which they are stored.
        metadata: the `__metadata__` of its header.
        threads: threads of the copies.
        blocking: whether the arrays stay unchanged until the file is written; if not, they are copied now.
        ready: waits until the arrays have their content. With it the arrays belong to the save and are not copied.
    """
    if not blocking and ready is None:
        snapshot = background.snapshot_pool().take(arrays.tensors(), metadata=metadata, threads=threads)
        return ShardFile(name, snapshot.n_bytes, functools.partial(snapshot.write, threads=threads))

    def write(path: str, **options: Any) -> _core.Written:
        if ready is not None:
            ready()
        # Arrays that must be copied to be written are copied here, a file at a time.
        with _buffers(is_object=locate(path).objects is not None) as buffers:
            return _core.write_arrays(
                path, arrays.tensors(), metadata=metadata, buffers=buffers, threads=threads, **options
            )

    if arrays.n_bytes >= _TOUCHED_FROM_BYTES:
        # Meanwhile the folder of the file is made.
        with _buffers() as buffers:
            buffers.prepare(arrays.n_bytes)

    return ShardFile(name, arrays.n_bytes, write)


def reserved_bytes(arrays: LocalArrays) -> int:
    """Upper bound of the size of a shard file, to reserve memory for its copy."""
    return arrays.n_bytes + sum(map(len, arrays)) + _HEADER_BYTES * len(arrays)


def read_back(path: str, written: _core.Written, threads: int | None) -> None:
    """Read a file past the page cache.

    Args:
        path: the file.
        written: its record.
        threads: threads that read.

    Raises:
        DamagedFileError: its content is not what was written.
    """
    damaged = _core.scrub(path, written.n_bytes, written.checksums, threads=threads)
    if damaged:
        first, end = damaged[0]
        raise DamagedFileError(
            f"{show(path)}: bytes {first} to {end}, read back, are not what was written",
            path=path,
            hint="the disk or the memory fails: save elsewhere",
        )


_idle: list[_core.Buffers] = []


@contextlib.contextmanager
def _buffers(*, is_object: bool = False) -> Iterator[_core.Buffers]:
    """Buffers for one file. They are kept from save to save: touching new memory costs more than filling it."""
    if is_object:
        yield _core.Buffers(_OBJECT_BUFFERS_BYTES)
        return
    buffers = _idle.pop() if _idle else _core.Buffers(_BUFFERS_BYTES)
    try:
        yield buffers
    finally:
        _idle.append(buffers)


os.register_at_fork(after_in_child=_idle.clear)  # a thread of the parent may have been touching them
