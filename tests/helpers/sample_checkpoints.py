"""The checkpoints of other programs in `tests/data`."""

from __future__ import annotations

from pathlib import Path

import reshard
from reshard.errors import ReshardError

DATA = Path(__file__).parents[1] / "data"
SAMPLES = [
    *("mindspore/ckpt", "mindspore/ckpt1", "mindspore/ckpt1_pb", "mindspore/ckpt2", "mindspore/ckpt2_dedup"),
    *("mindspore/ckpt2_named", "mindspore/ckpt2_single", "mindspore/full_hf", "mindspore/full_ms"),
    *(f"torch/{name}" for name in ("dcp_2d", "dcp_fsdp2", "dcp_hf", "dcp_hsdp", "dcp_no_collectives", "dcp_plain")),
    *(f"torch/{name}" for name in ("dcp_threads", "dcp_zstd", "ds_zero1_bf16", "ds_zero2_fp32", "ds_zero3_bf16")),
    *(f"torch/{name}" for name in ("hf_bin", "mcore_dp2_buckets", "mcore_mp_rank", "mcore_tp2pp2", "mcore_v016_tp2")),
]


def checkpoints_of(sample: str) -> list[Path]:
    """The paths below a sample that are opened as checkpoints."""
    top = DATA / sample
    found = []
    for path in (top, *sorted(top.rglob("*"))):
        if path.is_dir() and path.name not in ("strategy", "expected"):
            try:
                reshard.open(path).close()
            except ReshardError:
                continue
            found.append(path)
    return found
