"""A checkpoint root of Megatron-Core: the names of its folders and files.

    <root>/latest_checkpointed_iteration.txt     the tracker: an iteration, or the word `release`
    <root>/iter_<at least 7 digits>/, <root>/release/
        metadata.json                            `torch_dist`: which format it is; written last
        .metadata, __<rank>_<n>.distcp           as `torch.distributed.checkpoint` writes them
        common.pt                                state without tensors; from release 0.19 on it is among the items
        mp_rank_<TT>[_<PPP>][_<EEE>]/            the older layout: a folder for each tensor, pipeline and expert rank
            model_optim_rng.pt                   weights and other state
            distrib_optim.pt                     state of the distributed optimizer, as flat buffers

Source: `megatron/training/checkpointing.py` and `megatron/core/dist_checkpointing` of Megatron-Core 0.12 to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.dcp.names import DATA_SUFFIX, METADATA_FILE
from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.storage.location import Location

import re

TRAITS = Traits("megatron", takes_strategy=True, counters="number of an iteration")

_HEAD_BYTES = 512


TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/"
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
MAX_COMMON_BYTES = 1 << 30

SLOTS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""The flat buffers of the distributed optimizer in `distrib_optim.pt`, and what their parts are called here."""

_ITERATION = re.compile(r"iter_([0-9]{7,18})")
_RANK = re.compile(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?(?:_([0-9]{3,6}))?")
_TRACKER = re.compile(r"\s*([0-9]{1,18}|release)\s*")


def iteration_of(name: str) -> int | None:
    """The iteration of a folder's name; None if it is none.

    Example:
        >>> iteration_of("iter_0000120"), iteration_of("iter_0000120.old"), iteration_of("release")
        (120, None, None)
    """
    match = _ITERATION.fullmatch(name)
    return None if match is None else int(match[1])


def numbers_of_rank(name: str) -> tuple[int, ...] | None:
    """The numbers in the name of a model-parallel rank's folder; None if it is none.

    Example:
        >>> numbers_of_rank("mp_rank_01"), numbers_of_rank("mp_rank_00_003"), numbers_of_rank("rank_0")
        ((1,), (0, 3), None)
    """
    match = _RANK.fullmatch(name)
    return None if match is None else tuple(int(group) for group in match.groups() if group is not None)


def parse_tracker(text: str) -> int | str | None:
    """The content of the tracker: an iteration, the word `release`, or None if it is neither.

    Example:
        >>> parse_tracker("120"), parse_tracker("release"), parse_tracker("../../x")
        (120, 'release', None)
    """
    match = _TRACKER.fullmatch(text)
    return None if match is None else (RELEASE if match[1] == RELEASE else int(match[1]))


def is_state(key: str) -> bool:
    """Whether a name is that of optimizer state out of a flat buffer.

    Example:
        >>> is_state("decoder.layers.0.mlp.linear_fc1.weight.exp_avg"), is_state("output_layer.weight")
        (True, False)
    """
    return key.rpartition(".")[2] in SLOTS.values()


def is_iteration(folder: Location, listed: Sequence[str]) -> bool:
    """Whether a folder with these names holds one iteration."""
    if any(numbers_of_rank(name) is not None for name in listed) and _has_rank_folders(folder):
        return True
    if CONFIG_FILE in listed and (folder / CONFIG_FILE).is_file():
        return b'"sharded_backend"' in (folder / CONFIG_FILE).read_head(_HEAD_BYTES)
    is_dcp = METADATA_FILE in listed or any(name.endswith(DATA_SUFFIX) for name in listed)
    return is_dcp and (COMMON_FILE in listed or _is_named(folder.name))


def _is_named(name: str) -> bool:
    """Whether a folder is named like an iteration."""
    return name == RELEASE or iteration_of(name) is not None


def iterations(root: Location, listed: Sequence[str]) -> list[str]:
    """Names of the folders of iterations, the newest first, and `release` last."""
    named = [(iteration_of(name), name) for name in listed if _is_named(name)]
    found = sorted(((-1 if number is None else number, name) for number, name in named), reverse=True)
    folders = [root / name for _, name in found if (root / name).is_folder()]
    return [folder.name for folder in folders if is_iteration(folder, folder.names())]


def _has_rank_folders(folder: Location) -> bool:
    """Whether a folder holds the folder of a model-parallel rank."""
    return any(numbers_of_rank(name) is not None and (folder / name).is_folder() for name in folder.names())
