"""Layouts that MindSpore Transformers knows, with tensors, to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from tests.helpers.strategies import content

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
