"""How MindSpore Transformers resumes from a Checkpoint 1.0 tree: a second implementation, for tests alone.

Written from the description of the format, with nothing of `reshard` in it. It accepts what the original accepts: of a
file it looks at the name, never at the content. `resume` says which file every rank takes, `read` what a rank then
has: its own file, and what was kept once by another rank of those that hold the same.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.helpers.original_reader import read_shard_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

_RANK = re.compile(r"_rank_(\d+)")
_NUMBERS = re.compile(r"-(\d+)_(\d+)\.safetensors")


def resume(root: Path) -> dict[int, Path]:
    """The file that each rank resumes from, with `resume_training: True` and a folder that all ranks see."""
    n_ranks = sum(entry.name.startswith("rank_") for entry in root.iterdir())
    metas = [meta for rank in range(n_ranks) if (meta := _meta(root / f"rank_{rank}")) is not None]
    if not metas:
        raise ValueError("no meta.json: the original fails here with safetensors")
    epoch, step, name = min(metas, key=lambda meta: meta[:2])
    prefix = name.rpartition("-")[0]
    groups: dict[tuple[int, int], dict[int, Path]] = {}
    for rank in range(n_ranks):
        own = _RANK.sub(f"_rank_{rank}", prefix, count=1)
        for path in (root / f"rank_{rank}").iterdir():
            match = _NUMBERS.search(path.name)
            if not path.name.startswith(f"{own}-") or match is None or not path.name.endswith(".safetensors"):
                continue
            at = (int(match[1]), int(match[2]))
            if at <= (epoch, step):
                found = _RANK.search(path.name)
                assert found is not None
                groups.setdefault(at, {})[int(found[1])] = path
    usable = [at for at, found in groups.items() if sorted(found) == list(range(n_ranks))]
    if not usable:
        raise RuntimeError("No checkpoint could be resumed.")
    return dict(sorted(groups[max(usable)].items()))


def _meta(folder: Path) -> tuple[int, int, str] | None:
    try:
        content = json.loads((folder / "meta.json").read_text())
        epoch, step, name = content["last_epoch"], content["last_step"], content["last_ckpt_file"]
    except (OSError, ValueError, KeyError):
        return None
    if type(epoch) is not int or type(step) is not int or not isinstance(name, str):
        return None
    return (epoch, step, name) if re.fullmatch(r"[^/]+-\d+_\d+\.safetensors", name) else None


def header(path: Path) -> dict[str, Any]:
    """`__metadata__` of a file."""
    with path.open("rb") as file:
        content: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return dict(content.get("__metadata__", {}))


def read(files: Mapping[int, Path], groups: Mapping[str, Sequence[Sequence[int]]]) -> list[dict[str, np.ndarray]]:
    """What each rank has after loading.

    Args:
        files: each rank's.
        groups: for each tensor the ranks of one stage that hold the same slice, as the strategy tells them.
    """
    own = {rank: read_shard_file(path) for rank, path in files.items()}
    found = {rank: dict(arrays) for rank, arrays in own.items()}
    for key, of_key in groups.items():
        for group in of_key:
            holders = [rank for rank in group if key in own[rank]]
            for rank in group:
                if key not in own[rank] and header(files[rank]).get("remove_redundancy") == "True":
                    if len(holders) != 1:
                        raise ValueError(f"{key} of rank {rank} is kept by {holders}")
                    found[rank][key] = own[holders[0]][key]
    return [found[rank] for rank in sorted(found)]
