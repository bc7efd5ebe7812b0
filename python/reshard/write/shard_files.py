"""This rank's shard files, ready to be written: straight from the caller's memory, or from a copy of it.

A save that waits writes what it was given. One that goes on in the background first takes an image of each file, after
which the caller may change its arrays. Where the files lie and what they are called is not known here.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.write import background

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from reshard.write.arrays import LocalArray

__all__ = ["ShardFile", "maker"]

_BUFFERS_BYTES = 32 << 20


@dataclass(frozen=True)
class ShardFile:
    """A shard file of this rank that is ready to be written: `write(path, durable=, mode=, progress=)`."""

    name: str
    n_bytes: int
    write: Callable[..., _core.Written]


def maker(
    metadata: Mapping[str, str],
    threads: int | None = None,
    *,
    blocking: bool,
    ready: Callable[[], object] | None = None,
) -> Callable[[str, Sequence[LocalArray]], ShardFile]:
    """What makes a file of a name and arrays.

    Args:
        metadata: text that stands in the header.
        threads: threads of the copies.
        blocking: whether the arrays stay as they are until the file is written; else a copy is taken now.
        ready: waits until the arrays have their content; with it they belong to the save, and nothing is copied.
    """

    def straight(name: str, arrays: Sequence[LocalArray]) -> ShardFile:
        def write(path: str, **options: Any) -> _core.Written:
            if ready is not None:
                ready()
            # Arrays that must be copied to be written are copied here, a file at a time.
            return _core.write_arrays(
                path, _tensors(arrays), metadata=metadata, buffers=_buffers(), threads=threads, **options
            )

        return ShardFile(name, sum(array.n_bytes for array in arrays), write)

    def image(name: str, arrays: Sequence[LocalArray]) -> ShardFile:
        snapshot = background.snapshot_pool().take(_tensors(arrays), metadata=metadata, threads=threads)
        return ShardFile(name, snapshot.n_bytes, functools.partial(snapshot.write, threads=threads))

    return straight if blocking or ready is not None else image


_kept = threading.local()


def _buffers() -> _core.Buffers:
    """This thread's buffers, kept from save to save: touching fresh memory costs more than filling it."""
    if not hasattr(_kept, "buffers"):
        _kept.buffers = _core.Buffers(_BUFFERS_BYTES)
    buffers: _core.Buffers = _kept.buffers
    return buffers


def _tensors(arrays: Sequence[LocalArray]) -> list[tuple[str, str, tuple[int, ...], np.ndarray]]:
    return [(array.name, array.dtype, array.shape, array.buffer()) for array in arrays]
