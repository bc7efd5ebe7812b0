"""Records of tensors for `metadata.json`, to draw."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from reshard._core import Mesh
from reshard.formats.checkpoint2.shards import (
    TensorRecord,
)
from reshard.layout import Partition, TensorLayout

if TYPE_CHECKING:
    from reshard.write.contents import Part


def record_of(
    key: str, dtype: str, shape: tuple[int, ...], part: Part = "model", *, place: Any = (), **partition: Any
) -> TensorRecord:
    return TensorRecord(key, dtype, part, TensorLayout(shape, Partition(**partition), place))


NUMPY = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "I64": np.int64, "BOOL": np.bool_, "U8": np.uint8}


@st.composite
def models(draw: st.DrawFn) -> tuple[Mesh, list[TensorRecord]]:
    axes = tuple((name, draw(st.integers(1, 3))) for name in draw(st.permutations(["pp", "dp", "tp"])))
    mesh = Mesh(axes)
    records = []
    for number in range(draw(st.integers(1, 5))):
        names = draw(st.permutations([name for name, _ in axes]))
        n_placed = draw(st.integers(0, 2))
        placed = tuple(names[:n_placed])
        n_points = math.prod(dict(axes)[axis] for axis in placed)
        place = ((placed, draw(st.integers(0, n_points - 1))),) if placed else ()
        free = names[n_placed:]
        n_dims = draw(st.integers(0, 3))
        cut: list[tuple[str, ...]] = []
        for _ in range(n_dims):
            n_axes = draw(st.integers(0, len(free)))
            cut.append(tuple(free[:n_axes]))
            free = free[n_axes:]
        shape = tuple(draw(st.integers(0, 3)) * math.prod(dict(axes)[axis] for axis in one) for one in cut)
        dtype = draw(st.sampled_from(sorted(NUMPY)))
        part: Part = draw(st.sampled_from(("model", "optimizer")))
        key = draw(st.sampled_from(["w", "it's", "a,b", 'say "x"', "ключ", "back\\slash"])) + str(number)
        records.append(record_of(key, dtype, shape, part, cut=tuple(cut), place=place))
    return mesh, records
