"""A checkpoint of Megatron-Core: one iteration, or a root of which the newest complete iteration is opened.

Megatron-LM loads what the tracker names. Here the tracker is a hint: the newest iteration that can be opened is used,
and a tracker that names another one is reported.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats.dcp.format import DCP
from reshard.formats.dcp.names import METADATA_FILE
from reshard.formats.megatron import names
from reshard.formats.megatron.rank_folders import open_rank_folders
from reshard.formats.megatron.torch_dist import open_torch_dist
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MAX_TRACKER_BYTES = 64


def open_iteration(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the folder of one iteration. Raises as `reshard.open`."""
    listed = folder.names()
    if any(names.numbers_of_rank(name) is not None for name in listed):
        return open_rank_folders(folder, options)
    if options.strategy is not None:
        _log.warning("%s records how its tensors are divided: the strategy is ignored", folder)
    if names.CONFIG_FILE not in listed and names.COMMON_FILE not in listed and METADATA_FILE in listed:
        # Megatron-FSDP saves with `torch.distributed.checkpoint`; so does Megatron-Core 0.19, which records more.
        data = DCP.open(folder, options)
        objects = [one for of_rank in getattr(data, "objects", ()) for one in of_rank]
        if not any(one[0].startswith(names.COMMON_OBJECT) for one in objects):
            return replace(data, iteration=names.iteration_of(folder.name))
    return open_torch_dist(folder, options.method)


def _tracker(root: Location) -> int | str | None:
    """What the tracker names; None without a tracker, or with an invalid one, which is reported."""
    path = root / names.TRACKER_FILE
    try:
        text = path.read_small(_MAX_TRACKER_BYTES).decode()
    except CheckpointNotFoundError:
        return None
    except (DamagedFileError, UnicodeDecodeError):
        text = ""
    found = names.parse_tracker(text)
    if found is None:
        _log.warning("%s: the tracker is invalid: it holds %s", root, show(text))
    return found


def compare_tracker(root: Location, opened: str) -> None:
    """Report that the tracker names another iteration than the one that is opened."""
    tracker, number = _tracker(root), names.iteration_of(opened)
    if tracker is None or tracker == (names.RELEASE if number is None else number):
        return
    _log.warning(
        "%s: %s is opened, but the tracker names %s, which Megatron-LM would load. To use that one, open its folder",
        root,
        opened,
        tracker if tracker == names.RELEASE else f"iteration {tracker}",
    )
