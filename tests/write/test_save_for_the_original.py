"""What `save` writes, read by the original's rules: every tensor of every rank comes back, from both of its releases.

Layouts here are those that the original has words for (pipeline stages, even cuts, several axes on a dim, optimizer
states that are cut further), in worlds of up to eight ranks, de-duplicated or not. What it has no words for is seen
elsewhere.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import original_reader
from tests.helpers.oracle import local_arrays
from tests.helpers.strategies import cases, content
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [np.dtype(one) for one in (np.float32, ml_dtypes.bfloat16, np.float16, np.int8, np.int64, np.bool_)]
CUTS: list[list[Any]] = [
    [], ["tp"], [None, "tp"], [["dp", "tp"]], [["tp", "dp"]], ["dp", "tp"], ["tp", "dp"], [None, ["dp", "tp"]],
]  # fmt: skip


def draw_world(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[dict[str, Any], dict[str, np.ndarray], set[str]]:
    """A layout, the tensors that it cuts, and which of them are the optimizer's."""
    pp, dp, tp = draw(
        st.sampled_from([(p, d, t) for p in (1, 2, 3) for d in (1, 2, 3, 4) for t in (1, 2, 4) if p * d * t <= 8])
    )
    n_layers = pp * draw(st.integers(1, 2))
    is_zero = draw(st.booleans())
    cuts = [cut for cut in CUTS if not (is_zero and "dp" in str(cut))]
    rules = [{"match": f"*.{name}", "cut": draw(st.sampled_from(cuts))} for name in ("up", "down")]
    mapping: dict[str, Any] = {
        "mesh": {"pp": pp, "dp": dp, "tp": tp},
        "rules": [*rules, {"match": "*"}],
        "place": [
            {"match": "layers.{i}.*", "axis": "pp"},
            {"match": "embed.up", "axis": "pp", "at": 0},
            {"match": ["head.down", "norm.b"], "axis": "pp", "at": -1},
        ],
    }
    if is_zero:
        mapping["optimizer"] = {"add": {0: ["dp"]}}
    keys = ["embed.up", "head.down", "norm.b", "shared.up"]
    keys += [f"layers.{i}.{name}" for i in range(n_layers) for name in ("up", "down", "b")]
    seed = draw(st.integers(0, 2**16))
    model, states = {}, {}
    for number, key in enumerate(keys):
        # Norms are not a multiple of anything: where ZeRO cannot cut them their states stay whole.
        shape = (dp * tp * draw(st.integers(1, 3)), dp * tp * draw(st.integers(1, 2))) if key[-1] != "b" else (7,)
        model[key] = content(draw(st.sampled_from(DTYPES)), shape, seed + number)
        for slot in ("adam_m", "adam_v"):
            states[f"{slot}.{key}"] = content(DTYPES[0], shape, seed + 100 * number)
    states["global_step"] = np.array(draw(st.integers(0, 1000)), np.int32)
    states["loss_scale"] = np.array(2.0, np.float32)
    return mapping, model | states, set(states)


def as_bytes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


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
