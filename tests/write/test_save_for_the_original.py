"""What `save` writes, read by the original's rules: every tensor of every rank comes back, from both of its releases.

Layouts here are those that the original has words for (pipeline stages, even cuts, several axes on a dim, optimizer
states that are cut further), in worlds of up to eight ranks, de-duplicated or not. What it has no words for is seen
elsewhere.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import original_reader
from tests.helpers.arrays import as_bytes
from tests.helpers.oracle import local_arrays
from tests.helpers.original_worlds import draw_world
from tests.helpers.strategies import cases
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import protocol


@pytest.mark.slow
def test_the_original_rebuilds_every_tensor() -> None:
    seen: Counter[str] = Counter()

    @cases(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mapping, tensors, states = draw_world(data.draw)
        dedup = data.draw(st.booleans())
        prefix = data.draw(st.sampled_from([None, "run", "a-b"]))
        world_size = int(np.prod(list(mapping["mesh"].values())))
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)

            def work(group: Any) -> Any:
                own = local_arrays(mapping, tensors, group.rank, sorted(states))
                return reshard.save(
                    root,
                    7,
                    {k: a for k, a in own.items() if k not in states},
                    {k: own[k] for k in own if k in states},
                    layout=mapping,
                    files={"dedup": dedup, "prefix": prefix, "strict_format": True},
                    group=group,
                    commit={"durable": False},
                    timeout=20,
                    extra={"own": reshard.per_rank(group.rank)},
                )

            reports = in_threads(world_size, work)
            protocol.release()
            assert not [one for one in reports if isinstance(one, Exception)], reports
            for release in ("1.9.0", "head"):
                assert as_bytes(original_reader.read_tree(root, release)) == as_bytes(tensors)
                assert original_reader.read_common(root, release).global_step == 7
            folder = Path(reports[0].path)
            original_reader.audit(folder, dedup=dedup)
            # Nothing is written twice where it need not be, and by all holders where it is to be.
            held = sum(
                array.nbytes
                for rank in range(world_size)
                for array in local_arrays(mapping, tensors, rank, sorted(states)).values()
            )
            stored = sum(
                array.nbytes
                for path in folder.glob("*.safetensors")
                for array in original_reader.read_shard_file(path).values()
            )
            assert stored == (sum(array.nbytes for array in tensors.values()) if dedup else held)
        seen.update(["dedup" if dedup else "all", "zero" if "optimizer" in mapping else "no zero"])
        seen.update([f"{axis} > 1" for axis, size in mapping["mesh"].items() if size > 1])

    check()
    assert set(seen) == {"dedup", "all", "zero", "no zero", "pp > 1", "dp > 1", "tp > 1"}
