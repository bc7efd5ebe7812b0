"""The model that is measured: bf16 tensors with the names and widths of a Llama and random bytes, in one file.

The file is read back here with numpy and json only, so that no result is checked by the code that produced it. This
module measures nothing.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from reshard import _core

if TYPE_CHECKING:
    from pathlib import Path

N_RANKS = 4
# Llama 3.2 1B: its widths, its vocabulary, its tied embedding. Only the number of layers depends on the size.
_VOCABULARY, _HIDDEN, _INNER, _KEYS = 128_256, 2048, 8192, 512
_CHUNK_BYTES = 64 << 20
_BITS = {"BF16": np.uint16, "F32": np.uint32}

# The dim that tensor parallelism shards; other tensors are whole on every rank.
_CUT_DIM = {
    "embed_tokens": 0,
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "o_proj": 1,
    "down_proj": 1,
}


def layout(n_ranks: int) -> dict[str, Any]:
    """Tensor parallelism over some ranks."""
    return {
        "mesh": {"tp": n_ranks},
        "rules": [
            {
                "match": [f"*.{name}.weight" for name, dim in _CUT_DIM.items() if dim == 0],
                "cut": ["tp"],
                "optional": True,
            },
            {
                "match": [f"*.{name}.weight" for name, dim in _CUT_DIM.items() if dim == 1],
                "cut": [None, "tp"],
                "optional": True,
            },
            {"match": "*", "optional": True},
        ],
    }


LAYOUT = layout(N_RANKS)


def shapes(size_gb: float) -> dict[str, tuple[int, ...]]:
    """Shapes by key of a model of about this size; small models have a smaller vocabulary. Of size 0: one tensor."""
    if size_gb == 0:
        return {"model.layers.0.self_attn.k_proj.weight": (_KEYS, _HIDDEN)}
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KEYS, _HIDDEN),
        "self_attn.v_proj": (_KEYS, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
    }
    layer_bytes = sum(2 * int(np.prod(shape)) for shape in layer.values())
    vocabulary = min(_VOCABULARY, int(size_gb * 1e9 / 5 / (2 * _HIDDEN)) // N_RANKS * N_RANKS)
    n_layers = max(1, round((size_gb * 1e9 - 2 * vocabulary * _HIDDEN) / layer_bytes))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, _HIDDEN)}
    for i in range(n_layers):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (_HIDDEN,)
    return found


def write(path: Path, size_gb: float) -> None:
    """Write the model, read the file back and compare.

    It is written through the page cache in calls of 4 MiB, so that the page cache holds it in large folios: mapping a
    file in small folios takes several times as long for every reader.
    """
    generator = np.random.Generator(np.random.SFC64(0))
    tensors: dict[str, np.ndarray] = {}
    for key, shape in shapes(size_gb).items():
        tensors[key] = generator.integers(0, 1 << 16, size=shape, dtype=np.uint16)
    arrays = [(key, "BF16", array.shape, array) for key, array in tensors.items()]
    _core.write_arrays(str(path), arrays, metadata={"format": "pt"}, durable=False, direct=False)
    stored = read(path)
    assert list(stored) == list(tensors)
    for key, array in tensors.items():
        assert_equal(key, array, stored[key])


def read(path: Path, dtype: Literal["BF16", "F32"] = "BF16") -> dict[str, np.ndarray]:
    """The tensors of a shard file, which have this dtype, as arrays of bits over a map of it."""
    with path.open("rb") as file:
        (n_header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(n_header_bytes))
    header.pop("__metadata__", None)
    content = np.memmap(path, np.uint8, "r", offset=8 + n_header_bytes)
    tensors = {}
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        assert entry["dtype"] == dtype, (key, entry)
        start, end = entry["data_offsets"]
        tensors[key] = np.asarray(content[start:end]).view(_BITS[dtype]).reshape(entry["shape"])
    return tensors


def header(shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and where in the file each begins."""
    entries, offsets, end = {}, {}, 0
    for key, shape in shapes.items():
        offsets[key], end = end, end + 2 * math.prod(shape)
        entries[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [offsets[key], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {key: 8 + len(text) + at for key, at in offsets.items()}


def cut_dim(key: str) -> int | None:
    """The dim of a tensor that is sharded under `LAYOUT`."""
    return next((dim for name, dim in _CUT_DIM.items() if f".{name}." in key), None)


def own_slice(key: str, shape: tuple[int, ...], rank: int, n_ranks: int = N_RANKS) -> tuple[slice, ...]:
    """What a rank holds of a tensor under `LAYOUT`, as an index."""
    dim = cut_dim(key)
    if dim is None:
        return (slice(None),) * len(shape)
    n = shape[dim] // n_ranks
    return tuple(slice(rank * n, (rank + 1) * n) if d == dim else slice(None) for d in range(len(shape)))


def own_bytes(path: Path, rank: int) -> int:
    """Bytes of a rank's slices."""
    return sum(array[own_slice(key, array.shape, rank)].nbytes for key, array in read(path).items())


def check_whole(path: Path, found: dict[str, np.ndarray]) -> None:
    """Compare whole tensors with the model, byte for byte."""
    expected = read(path)
    assert set(found) == set(expected), "the tensors are not those of the model"
    for key, array in expected.items():
        assert_equal(key, array, found[key])


def check_rank(path: Path, found: dict[str, np.ndarray], rank: int) -> None:
    """Compare a rank's slices with the model, byte for byte."""
    expected = read(path)
    assert set(found) == set(expected), "the tensors are not those of the model"
    for key, array in expected.items():
        assert_equal(key, array[own_slice(key, array.shape, rank)], found[key])


def check_split(path: Path, files: list[Path], n_ranks: int = N_RANKS) -> None:
    """Compare the files of a split, one per rank, with the model; whole tensors are stored once."""
    expected = read(path)
    found = [read(file) for file in files]
    assert len(files) == n_ranks, files
    for key, array in expected.items():
        holders = [rank for rank in range(n_ranks) if key in found[rank]]
        is_cut = cut_dim(key) is not None
        assert holders == list(range(n_ranks)) if is_cut else len(holders) == 1, (key, holders)
        for rank in holders:
            assert_equal(key, array[own_slice(key, array.shape, rank, n_ranks)], found[rank][key])


def assert_equal(key: str, expected: np.ndarray, found: np.ndarray) -> None:
    """Compare two tensors by their bits: as numbers, two NaNs would differ."""
    assert found.shape == expected.shape, f"{key} has shape {found.shape}, expected {expected.shape}"
    rows = max(1, _CHUNK_BYTES * len(expected) // max(1, expected.nbytes)) if expected.ndim else 1
    bits = found.view(expected.dtype)
    for start in range(0, len(expected), rows):
        same = np.array_equal(expected[start : start + rows], bits[start : start + rows])
        assert same, f"{key} differs in rows {start} to {start + rows}"
