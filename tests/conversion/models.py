"""A small model with its optimizer, and layouts that it is converted to."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers.arrays import Arrays, assert_same

import reshard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BF16 = ml_dtypes.bfloat16


def noise(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits: NaNs of every payload, infinities, -0.0."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(n_bytes), dtype).reshape(shape).copy()


MODEL: Arrays = {
    "embed.weight": noise(BF16, (24, 8), 1),
    **{f"layers.{i}.qkv.weight": noise(BF16, (16, 8), 10 + i) for i in range(4)},
    **{f"layers.{i}.out.weight": noise(BF16, (8, 12), 20 + i) for i in range(4)},
    **{f"layers.{i}.experts.weight": noise(np.float32, (4, 4, 6), 30 + i) for i in range(4)},
    **{f"layers.{i}.norm.weight": noise(np.float32, (8,), 40 + i) for i in range(4)},
    "head.weight": noise(np.float16, (24, 8), 2),
    "scale": noise(np.float32, (), 3),
    "ids": noise(np.int64, (6,), 4),
    "none": noise(np.float32, (0, 4), 5),
}
OPTIMIZER: Arrays = {
    f"{slot}.{key}": noise(np.float32, array.shape, 100 + i)
    for i, (slot, key, array) in enumerate((s, k, a) for s in ("exp_avg", "exp_avg_sq") for k, a in MODEL.items())
    if array.dtype == BF16
} | {"step": np.array([7], np.int32)}
BOTH = MODEL | OPTIMIZER

TP = [
    {"match": ["embed.*", "head.*", "*.qkv.*"], "cut": ["tp"]},
    {"match": "*.out.*", "cut": [None, "tp"]},
    {"match": "*.experts.*", "cut": [None, None, "tp"]},
]
REST = {"match": "*"}
PIPELINE = [
    {"match": "layers.{i}.*", "axis": "pp"},
    {"match": "embed.*", "axis": "pp", "at": 0},
    {"match": "head.*", "axis": "pp", "at": -1},
]
Layout = dict[str, Any]
EXPRESSIBLE: dict[str, Layout] = {
    "one": {"mesh": {"tp": 1}, "rules": [REST]},
    "replicated": {"mesh": {"dp": 3}, "rules": [REST]},
    "tp2": {"mesh": {"tp": 2}, "rules": [*TP, REST]},
    "tp4": {"mesh": {"tp": 4}, "rules": [{"match": "*.experts.*", "cut": ["tp"]}, *TP, REST]},
    "dp2 tp2": {"mesh": {"dp": 2, "tp": 2}, "rules": [*TP, REST]},
    "tp2 dp2": {"mesh": {"tp": 2, "dp": 2}, "rules": [*TP, REST]},
    "pp2 tp2": {"mesh": {"pp": 2, "tp": 2}, "rules": [*TP, REST], "place": PIPELINE},
    "pp4": {"mesh": {"pp": 4}, "rules": [REST], "place": PIPELINE},
    "pp2 dp2 tp2": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "rules": [*TP, REST], "place": PIPELINE},
    "pp uneven": {
        "mesh": {"pp": 2, "tp": 2},
        "rules": [*TP, REST],
        "place": [{"match": "layers.{i}.*", "axis": "pp", "sizes": [3, 1]}],
    },
    "two axes on a dim": {
        "mesh": {"dp": 2, "tp": 2},
        "rules": [{"match": "embed.*", "cut": [["dp", "tp"]]}, {"match": "head.*", "cut": [["tp", "dp"]]}, *TP, REST],
    },
    "two dims": {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*.weight", "cut": ["tp"]}, REST]},
    "an axis of one": {"mesh": {"dp": 1, "tp": 2, "cp": 1}, "rules": [*TP, REST]},
    "zero": {"mesh": {"dp": 2, "tp": 2}, "rules": [*TP, REST], "optimizer": {"add": {0: ["dp"]}}},
    "zero with stages": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "rules": [*TP, REST],
        "place": PIPELINE,
        "optimizer": {"add": {0: ["dp"]}},
    },
}
# Each with the keys that metadata.json cannot express.
INEXPRESSIBLE: dict[str, tuple[Layout, str]] = {
    "ceil": (
        {"mesh": {"tp": 5}, "rules": [{"match": ["embed.*", "ids"], "cut": ["tp"], "uneven": "ceil"}, REST]},
        "embed.weight ids exp_avg.embed.weight exp_avg_sq.embed.weight",
    ),
    "sizes": (
        {"mesh": {"tp": 3}, "rules": [{"match": "head.weight", "cut": ["tp"], "sizes": {0: [20, 0, 4]}}, REST]},
        "head.weight",
    ),
    "blocks": (
        {
            "mesh": {"tp": 4},
            "rules": [
                {"match": "layers.0.qkv.*", "cut": ["tp"], "blocks": {0: [8, {"size": 4, "cut": None}, 4]}},
                REST,
            ],
        },
        "layers.0.qkv.weight exp_avg.layers.0.qkv.weight exp_avg_sq.layers.0.qkv.weight",
    ),
    "flat": (
        {"mesh": {"dp": 5}, "rules": [{"match": ["head.weight", "ids"], "flat": ["dp"]}, REST]},
        "head.weight ids",
    ),
    "flat after a cut": (
        {"mesh": {"tp": 2, "dp": 3}, "rules": [{"match": "head.weight", "cut": ["tp"], "flat": ["dp"]}, *TP, REST]},
        "head.weight",
    ),
    "flat optimizer": (
        {"mesh": {"dp": 3}, "rules": [REST], "optimizer": {"flat": ["dp"]}},
        " ".join(key for key in OPTIMIZER if key != "step"),
    ),
    "stored": (
        {"mesh": {"tp": 2}, "rules": [{"match": "head.weight", "cut": ["tp"], "stored": [1, 0]}, REST]},
        "head.weight",
    ),
    "joined": (
        {
            "mesh": {"dp": 4},
            "rules": [{"match": "*.norm.weight", "flat": {"axes": ["dp"], "join": "norms", "align": 3}}, REST],
        },
        " ".join(f"layers.{i}.norm.weight" for i in range(4)),
    ),
    "joined in stages": (
        {
            "mesh": {"pp": 2, "dp": 2},
            "rules": [{"match": ["*.norm.weight"], "flat": {"axes": ["dp"], "join": "norms"}}, REST],
            "place": PIPELINE,
        },
        " ".join(f"layers.{i}.norm.weight" for i in range(4)),
    ),
    "ranks in another order": ({"mesh": {"tp": 2}, "ranks": [1, 0], "rules": [*TP, REST]}, " ".join(BOTH)),
    "ranks with gaps": ({"mesh": {"tp": 2}, "ranks": [4, 9], "rules": [*TP, REST]}, " ".join(BOTH)),
}


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, written by stock safetensors."""
    folder = tmp_path_factory.mktemp("hf")
    save_file(MODEL, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and optimizer as one device leaves them: no metadata.json."""
    folder = tmp_path_factory.mktemp("single") / "iteration_0000042"
    folder.mkdir()
    save_file(MODEL, folder / "model-0000000-0000001.safetensors")
    save_file(OPTIMIZER, folder / "opt-0000000-0000001.safetensors")
    (folder / "common.json").write_text(
        json.dumps({"epoch_num": 1, "step_num": 42, "global_step": 42, "loss_scale": 0.5, "ckpt_status": None})
    )
    return folder


def assert_opens_as(path: Path, expected: Arrays, optimizer: Arrays | None = None) -> None:
    with reshard.open(path) as opened:
        assert_same(opened.load(), expected)
        if optimizer is not None:
            assert set(opened.keys("optimizer")) == set(optimizer)


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)
