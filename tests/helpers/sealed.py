"""Checkpoints with a manifest, made by hand: stock safetensors files, JSON, and sums by the textbook.

Two ranks: `w` is cut in two by rows, `b` is on both, `adam_m.w` is the optimizer's. What `reshard` writes is not used.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save
from tests.helpers.crc32c import crc32c

from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.storage.location import locate

if TYPE_CHECKING:
    from pathlib import Path

CHUNK = 256 << 10
FILES = {(part, rank): f"{part}-{rank:07d}-0000002.safetensors" for part in ("model", "opt") for rank in (0, 1)}
TP2 = {"mesh": {"tp": 2}, "rules": [{"match": ["w", "adam_m.w"], "cut": ["tp"]}, {"match": "*"}]}


def arrays_of(iteration: int, shape: tuple[int, int] = (4, 2)) -> dict[str, np.ndarray]:
    """What the iteration holds."""
    rng = np.random.default_rng(iteration)
    return {
        "w": rng.random(shape, np.float32),
        "b": rng.random(3, np.float32),
        "adam_m.w": rng.random(shape, np.float32),
    }


def metadata(shape: tuple[int, int]) -> Any:
    def tensor(shape: list[int], cuts: list[int], replicas: list[int]) -> Any:
        return {
            "properties": {
                "dtype": "Float32",
                "replica_id": replicas,
                "allow_shape_mismatch": False,
                "allow_to_save": True,
            },
            "global_shape": shape,
            "axis_fragmentations": cuts,
            "layout": {
                "device_matrix": [2],
                "tensor_map": [0, -1] if cuts[0] == 2 else [-1],
                "interleaved_parallel": False,
                "alias_name": ["tp"],
                "rank_list": [0, 1],
            },
            "chunk": [{"global_offset": [i], "local_shape": [shape[0] // cuts[0], *shape[1:]]} for i in range(cuts[0])],
        }

    def entry(part: str, rank: int, group: list[int]) -> Any:
        return {"file_name": FILES[part, rank], "storage_rank": rank, "rank_group": group}

    return {
        "state_dict_metadata": {
            "w": tensor(list(shape), [2, 1], [0, 0]),
            "b": tensor([3], [1], [0, 1]),
            "adam_m.w": tensor(list(shape), [2, 1], [0, 0]),
        },
        "storage_data": {
            "('w', (0,))": [entry("model", 0, [0])],
            "('w', (1,))": [entry("model", 1, [1])],
            "('b', (0,))": [entry("model", 0, [0, 1]), entry("model", 1, [0, 1])],
            "('adam_m.w', (0,))": [entry("opt", 0, [0])],
            "('adam_m.w', (1,))": [entry("opt", 1, [1])],
        },
    }


def make(root: Path, iteration: int, shape: tuple[int, int] = (4, 2), *, tracked: bool = True, **facts: Any) -> Path:
    """An iteration folder, sealed, and the tracker moved to it if it is `tracked`."""
    folder = root / f"iteration_{iteration:08d}"
    folder.mkdir(parents=True)
    arrays, half = arrays_of(iteration, shape), shape[0] // 2
    header = {"reshard": "1.0"}  # one entry: stock safetensors writes several in any order
    for rank in (0, 1):
        rows = slice(rank * half, (rank + 1) * half)
        model = {"w": arrays["w"][rows], "b": arrays["b"]}
        (folder / FILES["model", rank]).write_bytes(save(model, header))
        (folder / FILES["opt", rank]).write_bytes(save({"adam_m.w": arrays["adam_m.w"][rows]}, header))
    (folder / "metadata.json").write_text(json.dumps(metadata(shape)))
    (folder / "common.json").write_text(json.dumps({"step_num": iteration, "global_step": iteration}))
    seal(folder, iteration, **facts)
    if tracked:
        (folder / ".tracked").touch()
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def seal(folder: Path, iteration: int, **facts: Any) -> manifests.Manifest:
    """Write the sums and the manifest of whatever lies in a folder."""

    def digest(data: bytes) -> str:
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    shards, files, checksums = {}, {}, b""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (MANIFEST_FILE, manifests.CHECKSUMS_FILE):
            continue
        data = path.read_bytes()
        if path.suffix not in (".safetensors", ".arrays"):
            files[path.name] = manifests.PlainEntry(len(data), digest(data))
            continue
        own = b"".join(crc32c(data[at : at + CHUNK]).to_bytes(4, "little") for at in range(0, len(data), CHUNK))
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        shards[path.name] = manifests.ShardEntry(
            len(data), header_bytes, crc32c(data[:header_bytes]), len(checksums) // 4, digest(own), 0
        )
        checksums += own
    (folder / manifests.CHECKSUMS_FILE).write_bytes(checksums)
    files[manifests.CHECKSUMS_FILE] = manifests.PlainEntry(len(checksums), digest(checksums))
    told: dict[str, Any] = {
        "generation": 1,
        "attempt": f"{iteration:032x}",
        "world_size": 2,
        "previous_tracker": None,
        "passed_over": (),
        "writer": "by hand",
        "saved_at": "2026-01-31T12:00:00Z",
        "ckpt_status": None,
        **facts,
    }
    manifest = manifests.Manifest(iteration=iteration, shards=shards, files=files, **told)
    manifests.write(locate(folder), manifest, durable=False)
    return manifest


TINY = "model-0000000-0000001.safetensors"


def make_tiny(root: Path, iteration: int, *, tracked: bool = True, **facts: Any) -> Path:
    """The smallest tree that has every kind of file: one rank, `w` in metadata.json and `b` in no description."""
    folder = root / f"iteration_{iteration:08d}"
    folder.mkdir(parents=True)
    arrays = arrays_of(iteration, (2, 3))
    (folder / TINY).write_bytes(save({"w": arrays["w"], "b": arrays["b"]}, {"reshard": "1"}))
    tensor = {
        "properties": {"dtype": "Float32", "replica_id": 0, "allow_shape_mismatch": False, "allow_to_save": True},
        "global_shape": [2, 3],
        "axis_fragmentations": [1, 1],
        "layout": None,
        "chunk": [{"global_offset": [0], "local_shape": [2, 3]}],
    }
    stored = [{"file_name": TINY, "storage_rank": 0, "rank_group": [0]}]
    content = {"state_dict_metadata": {"w": tensor}, "storage_data": {"('w', (0,))": stored}}
    (folder / "metadata.json").write_text(json.dumps(content, separators=(",", ":")))
    (folder / "common.json").write_text(json.dumps({"global_step": iteration}))
    seal(folder, iteration, world_size=1, **facts)
    if tracked:
        (folder / ".tracked").touch()
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder
