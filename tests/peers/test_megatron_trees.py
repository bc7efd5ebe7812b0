"""Checkpoints that Megatron-Core writes here, on four CPU ranks, against the values of its live model and optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.peers.launch import run_ranks
from tests.peers.required import required

import reshard
from reshard.torch import as_tensor

if TYPE_CHECKING:
    from pathlib import Path

SIZE = {"tp": 2, "pp": 2, "vocab": 46}
SLOTS = ("weight", "param", "exp_avg", "exp_avg_sq")
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    required("megatron.core")
    folder = tmp_path_factory.mktemp("megatron")
    run_ranks("megatron_save.py", folder, SIZE, 4)
    return folder


def whole(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors of the model and its optimizer, from what the ranks held and how the library divided it."""
    held: dict[str, dict[int, dict[str, Any]]] = {}
    for file in folder.glob("truth_*.pt"):
        for key, entry in torch.load(file, weights_only=False).items():
            held.setdefault(key, {})[entry["t"]] = entry
    made = {}
    for key, by_rank in held.items():
        for slot in SLOTS:
            parts, dim = [by_rank[t][slot] for t in sorted(by_rank)], by_rank[0]["dim"]
            if dim is not None and "linear_fc1" in key:
                parts = [part.chunk(2)[half] for half in range(2) for part in parts]
            made[key, slot] = parts[0] if dim is None else torch.cat(parts, dim)
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["old", "new"])
def test_tensors_are_those_of_the_live_model(kind: str, trees: Path) -> None:
    expected = whole(trees)
    with reshard.open(trees / kind) as checkpoint:
        assert checkpoint.common is not None
        assert (checkpoint.iteration, checkpoint.common.consumed_samples) == (10, 640)
        seen = set()
        for (key, slot), right in expected.items():
            index: int | None = None
            if kind == "old":
                name = key if slot == "weight" else f"{key}.{'fp32_param' if slot == 'param' else slot}"
            else:
                parts = key.split(".")
                index = int(parts.pop(2)) if "layers" in parts else None
                name = ".".join(parts)
                for plain, fused in FUSED.items():
                    name = name.replace(plain, fused)
                name = name if slot == "weight" else f"optimizer.state.{slot}.{name}"
            seen.add(name)
            found = checkpoint.read(name) if index is None else checkpoint.read(name, index)
            assert torch.equal(as_tensor(np.ascontiguousarray(found)), right), name
        assert seen == set(checkpoint)
