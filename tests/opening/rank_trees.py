"""Rank folders that are cut here by the formula of the format, and their strategies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers import original_reader

if TYPE_CHECKING:
    from tests.helpers.arrays import Arrays


@dataclass(frozen=True)
class Item:
    """A parameter of a strategy, in the words of the file."""

    shape: tuple[int, ...]
    dev_matrix: tuple[int, ...] = (1,)
    tensor_map: tuple[int, ...] = ()
    shard_size: int = 0
    stage: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def slices(self, array: np.ndarray) -> list[np.ndarray]:
        """What each rank of the stage holds: sections 1.4 and 4.3 of the format, device by device."""
        n = math.prod(self.dev_matrix)
        own = []
        for position in range(n):
            point = np.unravel_index(position, self.dev_matrix)
            box = []
            for extent, v in zip(self.shape, self.tensor_map, strict=True):
                parts, k = (1, 0) if v < 0 else (self.dev_matrix[-1 - v], int(point[len(point) - 1 - v]))
                box.append(slice(k * extent // parts, (k + 1) * extent // parts))
            own.append(tuple(box))
        if self.shard_size == 0:
            return [array[index] for index in own]
        shared = []
        for position, index in enumerate(own):
            holders = [p for p in range(n) if own[p] == index]
            size = len(holders) if self.shard_size == -1 else self.shard_size
            rows = array[index]
            k = holders.index(position) % size
            shared.append(rows[k * len(rows) // size : (k + 1) * len(rows) // size])
        return shared

    @property
    def shard_step(self) -> int:
        """The distance of neighbours that share a slice."""
        used = {len(self.dev_matrix) - 1 - v for v in self.tensor_map if v >= 0}
        free = [axis for axis, size in enumerate(self.dev_matrix) if axis not in used and size > 1]
        return math.prod(self.dev_matrix[free[-1] + 1 :]) if free and self.shard_size else 0


def write_strategy(folder: Path, items: dict[str, Item], n_stages: int = 1) -> Path:
    """The strategy file of each stage."""
    folder.mkdir(parents=True)
    for stage in range(n_stages):
        layouts = {
            key: {
                "dev_matrix": item.dev_matrix,
                "tensor_map": item.tensor_map,
                "param_split_shape": [],
                "indices_offset": [],
                "field": 0,
                "opt_weight_shard_step": item.shard_step,
                "opt_weight_shard_size": item.shard_size,
                **item.extra,
            }
            for key, item in items.items()
            if item.stage == stage
        }
        content = {
            "current_stage": 1,
            "parallel_strategy_item": {f"op{stage}": {"stage": stage, "parallel_strategy": [[1]]}},
            "parallel_layout_item": layouts,
        }
        (folder / f"strategy_stage_{stage}.json").write_text(json.dumps(content))
    return folder


def write_ranks(root: Path, ranks: list[Arrays], name: str = "net.safetensors") -> Path:
    for rank, arrays in enumerate(ranks):
        (root / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
        file = root / f"rank_{rank}" / name.replace("#", str(rank))
        save_file({key: np.array(array, order="C") for key, array in arrays.items()}, file, {"format": "ms"})
    return root


W = np.arange(24, dtype=np.float32).reshape(8, 3)
ITEM = Item((8, 3), (2, 2), (0, -1))
SLICES = ITEM.slices(W)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Four ranks, `w` cut in two rows-wise, each half held twice; the strategy lies in `tmp_path`."""
    write_strategy(tmp_path / "cut", {"w": ITEM})
    return write_ranks(tmp_path / "tree", [{"w": rows, "step_num": np.array(7)} for rows in SLICES])


Change = Callable[[Path], None]


def holding(*ranks: int, **arrays: np.ndarray) -> Change:
    """Other arrays in the file of a rank, which need not be there; one of no elements is taken out."""

    def change(tree: Path) -> None:
        for rank in ranks:
            (tree / f"rank_{rank}").mkdir(exist_ok=True)
            file = tree / f"rank_{rank}" / "net.safetensors"
            old = original_reader.read_shard_file(file) if file.exists() else {}
            save_file({key: array for key, array in {**old, **arrays}.items() if array.size}, file)

    return change
