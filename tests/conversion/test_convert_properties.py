"""Any checkpoint, converted to Checkpoint 2.0 under any layout, loads under any other layout as the oracle says."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.helpers import original_reader
from tests.helpers.arrays import as_bytes
from tests.helpers.oracle import local_arrays
from tests.helpers.original_reader import KNOWN
from tests.helpers.strategies import KINDS, Checkpoint, cases, checkpoints, kinds, layouts, some_ranks

import reshard

if TYPE_CHECKING:
    from reshard.options import Target


def save_source(folder: Path, checkpoint: Checkpoint) -> None:
    """Model and optimizer as one device leaves them, by stock safetensors."""
    folder.mkdir()
    for part, is_state in (("model", False), ("opt", True)):
        arrays = {k: a for k, a in checkpoint.tensors.items() if (k in checkpoint.optimizer_keys) == is_state}
        if arrays:
            save_file(arrays, folder / f"{part}-0000000-0000001.safetensors")


@pytest.mark.slow
def test_a_converted_checkpoint_loads_under_any_layout() -> None:
    seen: Counter[str] = Counter()

    @cases(160)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints())
        stored = data.draw(layouts(checkpoint, max_ranks=12))
        wanted = data.draw(layouts(checkpoint, max_ranks=16))
        dedup = data.draw(st.booleans())
        to: Target = data.draw(st.sampled_from(("checkpoint2", "checkpoint2", "safetensors")))
        seen.update(kinds(stored) | kinds(wanted))
        with tempfile.TemporaryDirectory() as name:
            source, target = Path(name) / "iteration_3", Path(name) / "out"
            save_source(source, checkpoint)
            report = reshard.convert(
                source, target, to=to, layout=stored, files={"dedup": dedup}, commit={"durable": False}
            )
            if to == "checkpoint2":
                expressible = {k: a for k, a in checkpoint.tensors.items() if k not in report.not_expressible}
                # Its reader knows fewer types, and cannot open a file with any other in it.
                if {str(array.dtype) for array in checkpoint.tensors.values()} <= KNOWN:
                    assert as_bytes(original_reader.read_tree(target)) == as_bytes(expressible)
                original_reader.audit(Path(report.path), dedup=dedup)
            with reshard.open(target) as opened:
                assert as_bytes(opened.load()) == as_bytes(checkpoint.tensors)
                # One file a rank does not say which part a tensor is of; a layout then sees parameters alone.
                is_state = checkpoint.optimizer_keys if to == "checkpoint2" else ()
                assert sorted(opened.keys("optimizer")) == sorted(is_state)
                if to == "checkpoint2":
                    for rank in data.draw(some_ranks(wanted, 3)):
                        expected = local_arrays(wanted, checkpoint.tensors, rank, is_state)
                        assert as_bytes(opened.load(wanted, rank)) == as_bytes(expected)
                        assert as_bytes(opened.load(wanted, rank, copy=False)) == as_bytes(expected)

    check()
    assert set(seen) == KINDS
