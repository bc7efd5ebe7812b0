"""The strategies draw what they promise: layouts that the oracle can cut, of every kind, that lose no element."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.oracle import assemble, local_arrays, mesh_ranks
from tests.helpers.strategies import KINDS, Checkpoint, cases, checkpoints, kinds, layouts


@pytest.mark.slow
def test_layouts_of_every_kind_hold_every_element() -> None:
    seen: Counter[str] = Counter()
    n_ranks: list[int] = []

    @cases(600)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints())
        mapping: dict[str, Any] = data.draw(layouts(checkpoint))
        seen.update(kinds(mapping))
        ranks = mesh_ranks(mapping)
        n_ranks.append(len(ranks))
        keys = checkpoint.optimizer_keys
        pieces = {rank: local_arrays(mapping, checkpoint.tensors, rank, keys) for rank in ranks}
        kind = {key: (tensor.shape, tensor.dtype) for key, tensor in checkpoint.tensors.items()}
        whole = assemble(mapping, pieces, kind, keys)
        assert {k: v.tobytes() for k, v in whole.items()} == {k: v.tobytes() for k, v in checkpoint.tensors.items()}

    check()
    assert set(seen) == KINDS
    assert max(n_ranks) > 32
