"""How MindSpore Transformers reads a Checkpoint 2.0 tree: a second implementation, for tests alone.

Written from the description of the format, in plain numpy, with nothing of `reshard` in it. It accepts what the
original accepts, raises what the original raises, and knows two releases of it: "1.9.0", and "head", a year younger.
`read_tree` gives whole tensors; `audit` checks that `metadata.json` says everything twice in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Release = Literal["1.9.0", "head"]

TRACKER = "latest_checkpointed_iteration.txt"
FILE_NAME = re.compile(r"(?:.+-)?(model|opt)-(\d{7,})-(\d{7,})\.safetensors")
# Those that MindSpore's reader of shard files knows; a file with any other in it cannot be opened at all.
DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}
KNOWN = {str(np.dtype(dtype)) for dtype in DTYPES.values()}
SPELLINGS = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"{sign}int{bits}": f"{short}{bits}" for sign, short in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}


@dataclasses.dataclass
class CommonInfo190:
    """The constructor of release 1.9.0."""

    epoch_num: int | None = None
    step_num: int | None = None
    global_step: int | None = None
    loss_scale: float | None = None
    global_batch_size: int | None = None
    ckpt_status: int | None = None


@dataclasses.dataclass
class CommonInfoHead(CommonInfo190):
    """The constructor of the later release."""

    consumed_samples: int | None = None


def iteration_folder(root: Path) -> Path:
    """The folder that a restart reads: the tracker's, or the given one itself."""
    tracker = root / TRACKER
    if not tracker.exists():
        return root
    try:
        iteration = int(tracker.read_text().strip())
    except ValueError:
        raise ValueError(f"Invalid iteration num in {tracker}") from None
    folder = root / f"iteration_{iteration:08d}"
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    return folder


def read_common(root: Path, release: Release = "1.9.0") -> CommonInfo190:
    """The counters; an unknown key is a TypeError."""
    content = json.loads((iteration_folder(root) / "common.json").read_text(encoding="utf-8"))
    return (CommonInfo190 if release == "1.9.0" else CommonInfoHead)(**content)


def read_tree(root: Path, release: Release = "1.9.0", keys: set[str] | None = None) -> dict[str, np.ndarray]:
    """Every tensor, whole, as a run on one device would ask for it."""
    folder = iteration_folder(root)
    if not (folder / "metadata.json").exists():
        return _read_whole_files(folder)
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    storage = metadata["storage_data"]
    for entry in itertools.chain.from_iterable(storage.values()):
        if not (folder / entry["file_name"]).exists():
            raise FileNotFoundError(entry["file_name"])
    read = functools.cache(lambda name: read_shard_file(folder / name))
    tensors = {}
    for key, meta in metadata["state_dict_metadata"].items():
        if keys is None or key in keys:
            tensors[key] = _read_tensor(key, meta, storage, read, release)
    return tensors


def _read_tensor(
    key: str,
    meta: dict[str, Any],
    storage: dict[str, Any],
    read: Callable[[str], dict[str, np.ndarray]],
    release: Release,
) -> np.ndarray:
    shape = meta["global_shape"]
    by_rank: dict[int, dict[str, Any]] = {}
    for chunk in meta["chunk"]:
        for entry in storage[str((key, tuple(chunk["global_offset"])))]:
            by_rank[entry["storage_rank"]] = entry
    if meta["layout"] is None:
        if release == "1.9.0":
            raise AttributeError("'NoneType' object has no attribute 'values'")
        sources = [(0, [(0, extent) for extent in shape])]
    else:
        matrix, tensor_map, _, alias_name, rank_list = meta["layout"].values()  # by position, whatever the names
        _check_layout(matrix, tensor_map, alias_name, rank_list)
        cut = _cut(matrix, tensor_map)
        mapped = set(itertools.chain.from_iterable(cut))
        sources = []
        for position, point in enumerate(itertools.product(*map(range, matrix))):
            if all(axis in mapped or coordinate == 0 for axis, coordinate in enumerate(point)):
                sources.append((rank_list[position], _area(matrix, cut, point, shape)))
    tensor: np.ndarray | None = None
    for rank, area in sources:
        if any(start >= stop for start, stop in area):
            continue
        entry = by_rank.get(rank) or next((e for e in by_rank.values() if rank in e["rank_group"]), None)
        if entry is None:
            raise ValueError(f"Cannot find storage file for parameter '{key}' at search_rank={rank}.")
        stored = read(entry["file_name"])[key]
        if stored.shape != tuple(stop - start for start, stop in area):
            raise ValueError(f"Slice from rank {rank} has incorrect shape: {stored.shape} for {area}")
        if tensor is None:
            tensor = np.zeros(shape, stored.dtype)
        tensor[tuple(slice(start, stop) for start, stop in area)] = stored
    return np.zeros(shape, DTYPES[SPELLINGS[meta["properties"]["dtype"].lower()]]) if tensor is None else tensor


def _check_layout(matrix: list[int], tensor_map: list[Any], alias_name: list[str], rank_list: list[int]) -> None:
    """What the constructor of a layout refuses."""
    if not matrix:
        raise TypeError("reduce() of empty iterable with no initial value")
    if len(matrix) != len(alias_name) or len(set(alias_name)) != len(alias_name):
        raise ValueError("alias_name does not fit device_matrix")
    if any(name in ("", "None") for name in alias_name) or "interleaved_parallel" in alias_name[:-1]:
        raise ValueError(f"alias_name {alias_name}")
    if len(rank_list) != math.prod(matrix):
        raise ValueError("The length of rank_list should be equal to the product of device_matrix")
    flat = [v for one in tensor_map for v in (one if isinstance(one, list) else [one]) if v != -1]
    if len(set(flat)) != len(flat) or any(not 0 <= v < len(matrix) for v in flat):
        raise ValueError(f"tensor_map {tensor_map}")


def _cut(matrix: list[int], tensor_map: list[Any]) -> list[list[int]]:
    """For each dim the device axes that cut it, the most significant first, counted from the first axis."""
    nested = [one if isinstance(one, list) else [one] for one in tensor_map]
    return [[len(matrix) - 1 - v for v in one if v != -1] for one in nested]


def _indices(matrix: list[int], cut: list[list[int]], point: tuple[int, ...]) -> list[tuple[int, int]]:
    """`(index, number of parts)` of each dim at a device."""
    found = []
    for axes in cut:
        index = 0
        for axis in axes:
            index = index * matrix[axis] + point[axis]
        found.append((index, math.prod(matrix[axis] for axis in axes)))
    return found


def _area(matrix: list[int], cut: list[list[int]], point: tuple[int, ...], shape: list[int]) -> list[tuple[int, int]]:
    area = []
    for (index, n_parts), extent in zip(_indices(matrix, cut, point), shape, strict=True):
        size = extent // n_parts
        area.append((index * size, (index + 1) * size))
    return area


def _read_whole_files(folder: Path) -> dict[str, np.ndarray]:
    """Without metadata.json every file of the folder is read, and every tensor in it is whole."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(folder)
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        for name, tensor in read_shard_file(path).items():
            if name in tensors:
                raise RuntimeError(f"Duplicate parameter_name found: {name}.")
            tensors[name] = tensor
    return tensors


def read_shard_file(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, as MindSpore's reader takes it: in header order without a gap, known dtypes only."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    tensors, expected = {}, 0
    for name, info in header.items():
        start, stop = info["data_offsets"]
        dtype = np.dtype(DTYPES[info["dtype"]])
        if start != expected or stop - start != math.prod(info["shape"]) * dtype.itemsize:
            raise ValueError(f"Fail to parse the input safetensors: '{path}'")
        tensors[name] = np.frombuffer(data[8 + n + start : 8 + n + stop], dtype).reshape(info["shape"])
        expected = stop
    if 8 + n + expected != len(data):
        raise ValueError(f"Fail to parse the input safetensors: '{path}'")
    return tensors


def audit(folder: Path, *, dedup: bool) -> None:
    """Assert that every fact in `metadata.json` agrees with every other, and with names of files."""
    metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert list(metadata) == ["state_dict_metadata", "storage_data"]
    storage = metadata["storage_data"]
    expected_ids = set()
    for key, meta in metadata["state_dict_metadata"].items():
        assert list(meta) == ["properties", "global_shape", "axis_fragmentations", "layout", "chunk"]
        assert meta["properties"]["dtype"].lower() in SPELLINGS
        assert meta["properties"]["allow_shape_mismatch"] is False
        assert meta["properties"]["allow_to_save"] is True
        layout = meta["layout"]
        assert list(layout) == ["device_matrix", "tensor_map", "interleaved_parallel", "alias_name", "rank_list"]
        matrix, ranks = layout["device_matrix"], layout["rank_list"]
        assert len(ranks) == math.prod(matrix)
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        assert ranks[0] % len(ranks) == 0
        cut = _cut(matrix, layout["tensor_map"])
        assert len(cut) == len(meta["global_shape"])
        assert meta["axis_fragmentations"] == [math.prod(matrix[axis] for axis in axes) for axes in cut]
        local = [extent // n for extent, n in zip(meta["global_shape"], meta["axis_fragmentations"], strict=True)]
        holders: dict[int, list[int]] = {}
        replicas = []
        for rank, point in zip(ranks, itertools.product(*map(range, matrix)), strict=True):
            offset = 0
            for index, n_parts in _indices(matrix, cut, point):
                offset = offset * n_parts + index
            replicas.append(len(holders.setdefault(offset, [])))
            holders[offset].append(rank)
        assert meta["properties"]["replica_id"] == replicas
        assert meta["chunk"] == [{"global_offset": [offset], "local_shape": local} for offset in holders]
        for offset, group in holders.items():
            name = str((key, (offset,)))
            expected_ids.add(name)
            writers = [entry["storage_rank"] for entry in storage[name]]
            assert all(entry["rank_group"] == group for entry in storage[name])
            assert len(writers) == 1 and writers[0] in group if dedup else writers == group
    assert set(storage) == expected_ids
    for entry in itertools.chain.from_iterable(storage.values()):
        match = FILE_NAME.fullmatch(entry["file_name"])
        assert match is not None
        assert int(match[2]) < int(match[3])
        assert dedup or int(match[2]) == entry["storage_rank"]
        assert (folder / entry["file_name"]).is_file()
