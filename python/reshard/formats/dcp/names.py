"""A folder of `torch.distributed.checkpoint` (DCP): the names of its files.

    .metadata               which tensor consists of which chunks, and where each one lies; written last
    __<rank>.metadata       the same of one rank, where the ranks saved without talking to each other
    __<rank>_<n>.distcp     items back to back: each one a file of `torch.save` with one chunk or one other value

A trainer such as torchtitan writes each save into a folder `step-<N>` of a root.

Source: `torch/distributed/checkpoint/filesystem.py` of torch 2.15; `components/checkpoint.py` of torchtitan 0.3.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from reshard.commit import writer_mark
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.storage.location import Location

METADATA_FILE = ".metadata"
DATA_SUFFIX = ".distcp"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""In a root of Megatron-Core: which iteration is the latest."""
MAX_METADATA_BYTES = 4 << 30
SAVE_ID = f"{writer_mark.KEY} {writer_mark.MARK[writer_mark.KEY]}"
"""The `save_id` in a `.metadata` that this package wrote; torch stores a random one, and only compares it."""
OPTIMIZER_ENTRY = f"{writer_mark.KEY} optimizer"
"""The entry of the paths in a `.metadata` of this package whose path lists the tensors of the optimizer.

Only tensors whose names do not say so are listed. torch looks up the path of an existing tensor or value, no other one.
"""

_STEP = re.compile(r"step-([0-9]{1,18})")
_RANK = re.compile(r"__([0-9]{1,9})\.metadata")
_FILE = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp|shard-([0-9]{5,9})-model-[0-9]+-of-[0-9]+\.safetensors")


def step_of(name: str) -> int | None:
    """The step of a folder's name, or None. Names that only begin like one are left out: `step-15.tmp` is not complete.

    Example:
        >>> step_of("step-15"), step_of("step-15.tmp")
        (15, None)
    """
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def rank_of_metadata(name: str) -> int | None:
    """The rank that wrote a description of its own, from the name of the file, or None.

    Example:
        >>> rank_of_metadata("__12.metadata"), rank_of_metadata(".metadata")
        (12, None)
    """
    match = _RANK.fullmatch(name)
    return None if match is None else int(match[1])


def rank_of_file(name: str) -> int | None:
    """The rank that wrote a data file, from its name, or None.

    Example:
        >>> rank_of_file("__3_0.distcp"), rank_of_file("shard-00002-model-00001-of-00001.safetensors")
        (3, 1)
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return int(match[1]) if match[2] is None else int(match[2]) - 1


def data_file(rank: int, number: int) -> str:
    """The name of a data file.

    Args:
        rank: the rank whose chunks it holds.
        number: number of the file among those of the rank, from 0.

    Example:
        >>> data_file(3, 0)
        '__3_0.distcp'
    """
    return f"__{rank}_{number}{DATA_SUFFIX}"


def is_ours(folder: Location) -> bool:
    """Whether this package wrote the `.metadata` of a folder."""
    with contextlib.suppress(ReshardError):
        # The last entries of the file are those about the save: a name, and a short text behind it.
        tail = (folder / METADATA_FILE).read_tail(1 << 10)
        return re.search(rb"save_id\x94\x8c." + writer_mark.KEY.encode() + rb" ", tail, re.DOTALL) is not None
    return False
