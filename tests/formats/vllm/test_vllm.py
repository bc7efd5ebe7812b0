"""Folders of the loader `sharded_state` of vLLM.

vLLM needs a GPU and is not installed: `save` follows `ShardedStateLoader.save_model`, which the docstring of
`reshard.formats.vllm.names` cites. It writes the state of a rank in the order of its parameters, and begins a new part
where the size of one would be exceeded.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers.command_line import run

import reshard
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.layout.strategy_file import LayoutItem

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


def divided(heads: int, kv_heads: int, n_ranks: int) -> tuple[dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    """A model, and the state of each rank as the layers of vLLM divide it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2 * n, 6)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    gate, up = (rng.normal(size=(8, 6)).astype(np.float32) for _ in range(2))
    whole = {
        QKV: np.concatenate([q, k, v]),
        "model.layers.0.self_attn.o_proj.weight": rng.normal(size=(6, 2 * heads)).astype(np.float32),
        "model.layers.0.mlp.gate_up_proj.weight": np.concatenate([gate, up]),
        "model.embed_tokens.weight": rng.normal(size=(10, 6)).astype(np.float16),
        "model.norm.weight": rng.normal(size=6).astype(np.float32),
    }

    def part(array: np.ndarray[Any, Any], rank: int, axis: int = 0) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(np.split(array, n_ranks, axis)[rank])

    ranks = [
        {
            QKV: np.concatenate([part(one, rank) for one in (q, k, v)]),
            "model.layers.0.self_attn.o_proj.weight": part(whole["model.layers.0.self_attn.o_proj.weight"], rank, 1),
            "model.layers.0.mlp.gate_up_proj.weight": np.concatenate([part(gate, rank), part(up, rank)]),
            "model.embed_tokens.weight": part(whole["model.embed_tokens.weight"], rank),
            "model.norm.weight": whole["model.norm.weight"],
        }
        for rank in range(n_ranks)
    ]
    return whole, ranks


LAYOUT = """\
mesh: {tp: 2}
rules:
  - {match: "*.qkv_proj.weight", cut: [tp], blocks: {0: [8, 4, 4]}}
  - {match: "*.gate_up_proj.weight", cut: [tp], blocks: {0: 2}}
  - {match: "*.o_proj.weight", cut: [null, tp]}
  - {match: "model.embed_tokens.weight", cut: [tp]}
  - {match: "*"}
"""


def test_a_layout_joins_the_ranks(tmp_path: Path) -> None:
    whole, ranks = divided(4, 2, 2)
    for rank, of_rank in enumerate(ranks):
        save(tmp_path / "v", rank, of_rank, max_size=200)
    layout = tmp_path / "vllm.yaml"
    layout.write_text(LAYOUT)
    with reshard.open(tmp_path / "v", strategy=layout) as checkpoint:
        assert not checkpoint.unplaced()
        assert checkpoint.format == "vllm"
        for key, array in whole.items():
            assert np.array_equal(checkpoint.read(key), array), key
            assert np.array_equal(checkpoint.read(key, slice(1, 5)), array[1:5]), key
        assert np.array_equal(checkpoint.stored(1)[QKV], ranks[1][QKV])
    assert run("convert", tmp_path / "v", tmp_path / "hf", "--strategy", layout).exit_code == 0
    with reshard.open(tmp_path / "hf") as converted:
        assert all(np.array_equal(converted.read(key), array) for key, array in whole.items())
    assert run("inspect", tmp_path / "v", "--strategy", layout).exit_code == 0
    # Without it, the hint says what to give.
    refused = run("convert", tmp_path / "v", tmp_path / "other")
    assert refused.exit_code == 1
    assert "--strategy layout.yaml" in refused.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tp: 2", "tp: 4", "has files of 2 ranks, the mesh of the layout 4"),
        ("tp: 2", "tp: 1", "has files of 2 ranks, the mesh of the layout 1"),
        ("[8, 4, 4]", "[8, 4, 2]", "qkv_proj"),
        ("[8, 4, 4]", "[8, 4]", "qkv_proj"),
        ('  - {match: "*"}\n', "", "no rule matches"),
        ("*.o_proj.weight", "*.no_proj.weight", "no_proj"),
        ("cut: [null, tp]", "cut: [null, null, tp]", "o_proj"),
        ("cut: [null, tp]", "cut: [null, ep]", "ep"),
        ("cut: [null, tp]", "flat: {axes: [tp]}", "flattened"),
        ("rules:", "rules:\n  - 3", "layout"),
        ("tp: 2", "tp: 0", r"line 1: mesh\.tp: expected an integer of at least 1"),
        ("tp: 2", "tp: -2", r"mesh\.tp: expected an integer"),
        ("tp: 2", "tp: 2.5", r"mesh\.tp: expected an integer"),
        ("tp: 2", "tp: two", r"mesh\.tp: expected an integer"),
        ("tp: 2", "tp: true", r"mesh\.tp: expected an integer"),
        ("tp: 2", "tp: 4611686018427387904", "4611686018427387904 ranks, more than"),
        ("{tp: 2}", "[2]", "mesh: expected axes and their sizes"),
        ("{tp: 2}", "{}", "mesh: expected axes and their sizes"),
        ("{tp: 2}", "{tp: 2, dp: 2}", "has files of 2 ranks, the mesh of the layout 4"),
        ("{tp: 2}", "{tp: 2, tp: 2}", "key `tp` is repeated"),
        ("mesh:", "mash:", "unknown field `mash`"),
        ("mesh:", "mesh: &a [*a]\nmash:", "has no anchor before it"),
        ("mesh:", "!!python/object/apply:os.system [x]\nmesh:", "tags are not accepted"),
        ("mesh:", "\0", "not YAML"),
        ("rules:", "rule:", "unknown field `rule`"),
        ("[8, 4, 4]", "[-8, 20, 4]", "expected an integer of at least 0"),
        ("[8, 4, 4]", "[8.0, 4, 4]", "expected an integer of at least 0"),
        ("[8, 4, 4]", "[[8, 4], 4]", "expected an integer of at least 0"),
        ("[8, 4, 4]", "[7, 5, 4]", "has 7 elements, not a multiple of tp"),
        ("[8, 4, 4]", "[4611686018427387904, 4, 4]", "4611686018427387912 elements, more than"),
        ("[8, 4, 4]", "3", "no 3 equal blocks"),
        ("[8, 4, 4]", "0", "expected an integer of at least 1"),
        ("[8, 4, 4]", "text", "expected a list"),
        ("[8, 4, 4]", "[{size: 8, cut: ep}, 4, 4]", "can only be null"),
        ("[8, 4, 4]", "[{size: 8, more: 1}, 4, 4]", "unknown field `more`"),
        ("{0: [8", "{1: [8", r"rank 0 gave an array of shape \(8, 6\)"),
        ("{0: [8", "{7: [8", "`blocks` names dim 7"),
        ("{0: [8", "{-3: [8", "expected a dim, counted from 0"),
        ("{0: [8", "{x: [8", "expected a dim, counted from 0"),
        ("cut: [null, tp]", "cut: [tp, tp]", "is used twice in one tensor"),
        ("cut: [null, tp]", "cut: tp", "expected a list"),
        ("cut: [null, tp]", "cut: [null, 3]", "expected null, an axis or a list of axes"),
        ("cut: [null, tp]", "cat: [null, tp]", "unknown field `cat`"),
        ('match: "*.o_proj.weight", ', "", "`match` is missing"),
        ('"*.o_proj.weight"', "3", "match: expected a list"),
        ('"*.o_proj.weight"', '"["', "matches no key"),
        ('"*.o_proj.weight"', '""', "a pattern cannot be empty"),
    ],
)
def test_layouts_that_are_not_those_of_the_files(tmp_path: Path, old: str, new: str, words: str) -> None:
    for rank, of_rank in enumerate(divided(4, 2, 2)[1]):
        save(tmp_path / "v", rank, of_rank)
    (tmp_path / "layout.yaml").write_text(LAYOUT.replace(old, new, 1))
    with pytest.raises(ReshardError, match=words):
        reshard.open(tmp_path / "v", strategy=tmp_path / "layout.yaml")


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    """A tensor that a layout leaves whole is the same on all ranks: else the layout, or a file, is another one."""
    _, ranks = divided(4, 2, 2)
    layout = tmp_path / "vllm.yaml"
    layout.write_text(LAYOUT.replace('  - {match: "model.embed_tokens.weight", cut: [tp]}\n', ""))
    for rank, of_rank in enumerate(ranks):
        save(tmp_path / "v", rank, of_rank)
    with reshard.open(tmp_path / "v", strategy=layout) as checkpoint:
        assert checkpoint.read("model.norm.weight").shape == (6,)
        with pytest.raises(MismatchError, match=r"embed_tokens"):
            checkpoint.read("model.embed_tokens.weight")
    assert run("convert", tmp_path / "v", tmp_path / "hf", "--strategy", layout).exit_code == 1
    with pytest.raises(UnsupportedError, match="a layout is needed here"):
        reshard.open(tmp_path / "v", strategy=reshard.layout.Strategy({0: {"w": LayoutItem((2,), ((0,),))}}))


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_that_are_not_cut_are_compared(axis: int, first: int, tmp_path: Path) -> None:
    """Beside blocks that are cut: the tiles of the ranks differ, and some are copies or parts of others."""
    blocks: list[Any] = [{"size": 4, "cut": None}, 6, {"size": 2, "cut": None}]
    blocks = blocks if first == 0 else blocks[1:]
    whole = np.arange(36, dtype=np.float32).reshape(3, 12)[:, first:]
    parts = np.split(whole, np.cumsum([block if block == 6 else block["size"] for block in blocks])[:-1], 1)
    layout = tmp_path / "vllm.yaml"
    cut = [None] * axis + ["tp"]
    layout.write_text(json.dumps({"mesh": {"tp": 3}, "rules": [{"match": "w", "cut": cut, "blocks": {axis: blocks}}]}))

    def held(rank: int) -> np.ndarray[Any, Any]:
        local = [part if part.shape[1] != 6 else part[:, 2 * rank : 2 * rank + 2] for part in parts]
        array = np.concatenate(local, 1)
        return np.ascontiguousarray(array if axis else array.T)

    arrays = {rank: held(rank) for rank in range(3)}
    n = arrays[0].shape[axis]
    for rank in range(3):
        save(tmp_path / "v", rank, {"w": arrays[rank]})
    with reshard.open(tmp_path / "v", strategy=layout) as checkpoint:
        assert np.array_equal(checkpoint.read("w"), whole if axis else whole.T)
    cut_part = range(n - 4, n - 2)
    for rank in range(3):
        for at in range(n):
            changed = arrays[rank].copy()
            changed[(slice(None), at) if axis else at][1] = 99
            save(tmp_path / "v", rank, {"w": changed})
            with reshard.open(tmp_path / "v", strategy=layout) as checkpoint:
                if at in cut_part:
                    assert (checkpoint.read("w") == 99).sum() == 1
                else:
                    with pytest.raises(
                        MismatchError, match=f"`w` is read as one value.* rank {rank or '[012]'} differ"
                    ):
                        checkpoint.read("w")
        save(tmp_path / "v", rank, {"w": arrays[rank]})
