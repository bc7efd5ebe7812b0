"""Weights in Megatron-Core's format, loaded by Megatron-Core on the CPU."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.peers.required import required

import reshard
from reshard.errors import ArgumentError, DestinationExistsError

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = {
    "decoder.layers.self_attention.linear_proj.weight": torch.randn(4, 6, 8).bfloat16(),
    "embedding.word_embeddings.weight": torch.randn(64, 8),
}
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "decoder.*", "cut": [None, "tp"]}, {"match": "*"}]}


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Path:
    torch.save(WEIGHTS, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_megatron_core_loads_the_weights(source: Path, tmp_path: Path) -> None:
    required("megatron.core")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    report = reshard.convert(source, tmp_path / "root", to="megatron", layout=LAYOUT, iteration=120)
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        assert dist_checkpointing.load_common_state_dict(report.path) == {"checkpoint_version": 3.0, "iteration": 120}
        layers, embedding = WEIGHTS
        wanted: dict[Any, Any] = {  # other parts than those of the files
            part: ShardedTensor.from_rank_offsets(layers, torch.zeros(2, 6, 8).bfloat16(), (0, part, 2))
            for part in (0, 1)
        }
        whole = ShardedTensor.from_rank_offsets(embedding, torch.zeros(64, 8))
        found = dist_checkpointing.load({**wanted, "embedding": whole}, report.path, validate_access_integrity=False)
        for part in (0, 1):
            assert torch.equal(found[part], WEIGHTS[layers][2 * part : 2 * part + 2])
        assert torch.equal(found["embedding"], WEIGHTS[embedding])
    finally:
        dist.destroy_process_group()


def test_the_folders_of_a_root(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert reshard.convert(source, root, to="megatron").path == str(root / "release")
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "release"
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, root, to="megatron")
    reshard.convert(source, root, to="megatron", iteration=5, overwrite=True)
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000005", "latest_checkpointed_iteration.txt"]
    assert json.loads((root / "iter_0000005" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    with reshard.open(root / "iter_0000005") as written:
        for name, value in WEIGHTS.items():
            assert written.read(name).tobytes() == value.view(torch.uint8).numpy().tobytes()
    with pytest.raises(ArgumentError, match="weights"):
        reshard.convert(source, tmp_path / "other", to="megatron", part="all")
    (root / "iter_0000005" / ".metadata").write_bytes(b"another writer's")
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, root, to="megatron", overwrite=True)
