"""`reshard.torch.device_loads`: the pieces in which tensors pass the buffers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from reshard.torch.device_loads import batches

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SIZES = st.dictionaries(st.text(max_size=3), st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8]), st.booleans()))


@given(SIZES, st.integers(1, 400))
def test_every_byte_has_one_place(sizes: dict[str, tuple[tuple[int, ...], int, bool]], limit: int) -> None:
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for group in batches(sizes, limit):
        assert group
        end = 0
        for piece in group:
            shape, itemsize, is_whole = sizes[piece.name]
            assert piece.place >= end  # nothing overlaps
            end = piece.place + piece.n_bytes
            if piece.rows is not None:
                row = math.prod(shape[1:]) * itemsize
                assert not is_whole
                assert (piece.offset, piece.n_bytes) == (piece.rows[0] * row, (piece.rows[1] - piece.rows[0]) * row)
            seen[piece.name].append((piece.offset, piece.n_bytes))
        if end > limit:  # what cannot be divided
            piece = group[0]
            shape, itemsize, is_whole = sizes[piece.name]
            assert len(group) == 1
            assert is_whole or not shape or piece.rows is None or piece.rows[1] - piece.rows[0] == 1
    for name, (shape, itemsize, _) in sizes.items():
        position = 0
        for offset, n in seen[name]:
            assert offset == position
            position += n
        assert position == math.prod(shape) * itemsize
        assert len(seen[name]) >= 1  # also of an empty one
