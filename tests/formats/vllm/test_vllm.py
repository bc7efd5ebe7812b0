"""Folders of the loader `sharded_state` of vLLM.

vLLM needs a GPU and is not installed: `save` follows `ShardedStateLoader.save_model`, which the docstring of
`reshard.formats.vllm.names` cites. It writes the state of a rank in the order of its parameters, and begins a new part
where the size of one would be exceeded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers.command_line import run

import reshard
from reshard.errors import CheckpointNotFoundError, DamagedFileError, LayoutError, ReshardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

QKV = "model.layers.0.self_attn.qkv_proj.weight"


def save(folder: Path, rank: int, state: Mapping[str, np.ndarray[Any, Any]], max_size: int | None = None) -> None:
    folder.mkdir(exist_ok=True)
    part, size, held = 0, 0, dict[str, np.ndarray[Any, Any]]()
    for key, array in state.items():
        if max_size is not None and size + array.nbytes > max_size:
            save_file(held, folder / f"model-rank-{rank}-part-{part}.safetensors")
            part, size, held = part + 1, 0, {}
        held[key] = array
        size += array.nbytes
    if held:
        save_file(held, folder / f"model-rank-{rank}-part-{part}.safetensors")


def state(rank: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    return {
        QKV: np.arange(24, dtype=np.float32).reshape(8, 3) + 100 * rank,
        "model.layers.0.self_attn.o_proj.weight": np.ones((3, 4), np.float16) * rank,
        "model.norm.weight": np.ones(3, np.float32),
    }


def test_one_rank_holds_whole_tensors(tmp_path: Path) -> None:
    save(tmp_path / "v", 0, state(), max_size=100)
    assert len(list((tmp_path / "v").iterdir())) == 2
    with reshard.open(tmp_path / "v") as checkpoint:
        assert checkpoint.format == "vllm"
        assert set(checkpoint) == set(state())
        assert (checkpoint.read(QKV, slice(2, 5)) == state()[QKV][2:5]).all()
    assert run("convert", tmp_path / "v", tmp_path / "hf").exit_code == 0
    with reshard.open(tmp_path / "hf") as converted:
        assert all((converted.read(key) == array).all() for key, array in state().items())


def test_ranks_are_read_one_by_one_and_not_joined(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / "v", rank, state(rank), max_size=100)
    with reshard.open(tmp_path / "v") as checkpoint:
        assert checkpoint.ranks() == [0, 1]
        assert checkpoint.unplaced()[QKV].local_shapes == ((8, 3),)
        for rank in range(2):
            held = checkpoint.stored(rank)
            assert all((held[key] == array).all() for key, array in state(rank).items())
            assert set(held) == set(state())
        with pytest.raises(LayoutError, match="positions in the tensor are not known") as caught:
            checkpoint.read(QKV)
        assert "no file records how vLLM divided them" in str(caught.value.hint)
    shown = run("inspect", tmp_path / "v").output
    assert "tp 2 (2 ranks, by the names of files and folders)" in shown
    assert QKV in shown
    for to in ("huggingface", "dcp"):
        result = run("convert", tmp_path / "v", tmp_path / to, "--to", to)
        assert result.exit_code == 1
        assert "positions in the tensor are not known" in result.stderr
        assert not (tmp_path / to).exists()
    assert run("convert", tmp_path / "v" / "model-rank-1-part-0.safetensors", tmp_path / "one").exit_code == 0


def test_missing_and_mixed_files(tmp_path: Path) -> None:
    for rank in range(3):
        save(tmp_path / "v", rank, state(rank), max_size=100)

    def refused(words: str, error: type[ReshardError]) -> ReshardError:
        with pytest.raises(error, match=words) as caught:
            reshard.open(tmp_path / "v")
        return caught.value

    def file(rank: int, part: int) -> Path:
        return tmp_path / "v" / f"model-rank-{rank}-part-{part}.safetensors"

    parts = {(rank, part): file(rank, part).read_bytes() for rank in range(3) for part in range(2)}
    file(1, 0).unlink()
    refused("missing: `model-rank-1-part-0.safetensors`", CheckpointNotFoundError)
    file(1, 1).unlink()
    refused("missing: `model-rank-1-part-0.safetensors`", CheckpointNotFoundError)
    file(1, 0).write_bytes(parts[1, 0])
    assert refused("rank 1 holds no", CheckpointNotFoundError).key is not None
    file(1, 1).write_bytes(parts[1, 0])
    refused("another part of its rank both hold", DamagedFileError)
    save_file({key: array.astype(np.float64) for key, array in state().items()}, file(1, 1))
    refused("both hold", DamagedFileError)
    file(1, 1).unlink()
    save_file({key: array.astype(np.float64) for key, array in state().items()}, file(1, 0))
    refused("is F64 on rank 1, and F16 on rank 0", DamagedFileError)
    for rank in range(3):
        file(rank, 1).unlink(missing_ok=True)
        save_file({QKV: np.zeros((2, 2), np.uint8)}, file(rank, 0))
    assert refused("is U8: vLLM arranges quantised weights", UnsupportedError).key == QKV
    file(9_999_999, 0).write_bytes(parts[0, 0])
    assert len(str(refused("up to rank 9999999; missing", CheckpointNotFoundError))) < 400


@pytest.mark.parametrize(
    "name", ["model-rank-00-part-0", "model-rank--1-part-0", "model-rank-0-part-", "xmodel-rank-0-part-0"]
)
def test_other_names(tmp_path: Path, name: str) -> None:
    save_file(state(), tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        reshard.open(tmp_path)
