"""A folder of `torch.distributed.checkpoint` (DCP): the names of its files.

    .metadata               which tensor consists of which chunks, and where each one lies; written last
    __<rank>_<n>.distcp     items back to back: each one a file of `torch.save` with one chunk or one other value

Source: `torch/distributed/checkpoint/filesystem.py` of torch 2.15.
"""

from __future__ import annotations

__all__ = ["DATA_SUFFIX", "MAX_METADATA_BYTES", "METADATA_FILE"]

METADATA_FILE = ".metadata"
DATA_SUFFIX = ".distcp"
MAX_METADATA_BYTES = 4 << 30
