"""Whole tensors of a checkpoint on a device.

On the way to a GPU the bytes pass two buffers of pinned memory: the threads of the core fill one from the files while
the GPU copies the other. A copy from memory that is not pinned is several times slower, and pinned memory of the size
of the checkpoint would cost more to allocate than it saves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from reshard import dtypes
from reshard.torch.tensors import as_tensor, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    from reshard.checkpoint import Checkpoint

_BUFFER_BYTES = 64 << 20
_ALIGNMENT = 64


class Piece(NamedTuple):
    """Rows of an array on their way to a device; all of them for one that is transferred whole.

    Attributes:
        name: name of the tensor.
        rows: first row and the row after the last; None: the whole array, of any number of dims.
        offset: position of its bytes in the array.
        n_bytes: number of its bytes.
        place: position in the buffer.
    """

    name: str
    rows: tuple[int, int] | None
    offset: int
    n_bytes: int
    place: int


def load_on(checkpoint: Checkpoint, names: Mapping[str, str], device: torch.device) -> dict[str, torch.Tensor]:
    """Load whole tensors into new memory of a device. They are complete on return.

    Args:
        checkpoint: an open checkpoint.
        names: dtype by the name of the tensor.
        device: any device of torch.

    Raises:
        ReshardError: while reading.
        RuntimeError: the device has too little memory.
        UnsupportedError: this torch has no such dtype.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.arange(3)}, "model.safetensors")
        >>> load_on(reshard.open("model.safetensors"), {"w": "I64"}, torch.device("cpu"))
        {'w': tensor([0, 1, 2])}
    """
    if device.type == "cpu":
        arrays = checkpoint.load(keys=names)
        return {name: as_tensor(arrays[name], dtype) for name, dtype in names.items()}
    if device.type != "cuda":
        return {name: as_tensor(checkpoint.read(name), dtype).to(device) for name, dtype in names.items()}
    shapes = {name: dtypes.array_shape(dtype, checkpoint[name].shape) for name, dtype in names.items()}
    kinds = {name: dtypes.numpy_dtype(dtype) for name, dtype in names.items()}
    loaded = {n: torch.empty(shapes[n], dtype=torch_dtype(dtype), device=device) for n, dtype in names.items()}
    sizes = {n: (shapes[n], kinds[n].itemsize, dtypes.is_packed(dtype)) for n, dtype in names.items()}
    groups = list(batches(sizes, _BUFFER_BYTES))
    n_bytes = max((group[-1].place + group[-1].n_bytes for group in groups), default=0)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))  # the new memory may still be in use by queued work
    buffers = [torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True) for _ in groups[:2]]
    copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    try:
        for n, group in enumerate(groups):
            buffer, event = buffers[n % 2], copied[n % 2]
            event.synchronize()  # returns at once if it was never recorded
            _fill(checkpoint, group, buffer.numpy(), shapes, kinds)
            with torch.cuda.stream(side):
                for piece in group:
                    target = loaded[piece.name].view(-1).view(torch.uint8)
                    source = buffer[piece.place : piece.place + piece.n_bytes]
                    target[piece.offset : piece.offset + piece.n_bytes].copy_(source, non_blocking=True)
                event.record(side)
    finally:
        side.synchronize()
    return loaded


def batches(sizes: Mapping[str, tuple[Sequence[int], int, bool]], limit: int) -> Iterator[list[Piece]]:
    """Divide arrays into groups of pieces that fill a buffer.

    A piece is larger than the buffer only if it cannot be divided: a single row, or a packed array.

    Args:
        sizes: shape, bytes of an element and whether the array can be read whole only, by name.
        limit: bytes of the buffer.

    Example:
        >>> for group in batches({"a": ((3,), 4, False), "b": ((4, 2), 4, False)}, 76):
        ...     print([(piece.name, piece.rows, piece.place) for piece in group])
        [('a', None, 0)]
        [('b', None, 0)]
    """
    group: list[Piece] = []
    end = 0
    for name, (shape, itemsize, is_whole) in sizes.items():
        total = math.prod(shape) * itemsize
        n_rows = 1 if is_whole or total <= limit or not shape else shape[0]
        row_bytes = total // max(n_rows, 1)
        step = max(1, limit // row_bytes) if n_rows > 1 else 1
        for first in range(0, n_rows, step):
            last = min(first + step, n_rows)
            size = (last - first) * row_bytes
            place = -(-end // _ALIGNMENT) * _ALIGNMENT
            if group and place + size > limit:
                yield group
                group, place = [], 0
            rows = (first, last) if n_rows > 1 else None
            group.append(Piece(name, rows, first * row_bytes, size, place))
            end = place + size
    if group:
        yield group


def _fill(
    checkpoint: Checkpoint,
    group: list[Piece],
    buffer: np.ndarray,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, np.dtype],
) -> None:
    """Read the pieces of a group into their places."""
    whole: dict[str, np.ndarray] = {}
    for piece in group:
        shape = shapes[piece.name]
        array = buffer[piece.place : piece.place + piece.n_bytes].view(kinds[piece.name])
        if piece.rows is None:
            whole[piece.name] = array.reshape(shape)
        else:
            first, last = piece.rows
            checkpoint.read(piece.name, (slice(first, last),), array.reshape(last - first, *shape[1:]))
    if whole:
        checkpoint.load(keys=whole, out=whole)
