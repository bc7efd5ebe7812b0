"""A checkpoint of Megatron-Core: one iteration, or a root of which the newest complete iteration is opened.

Megatron-LM loads what the tracker names. Here the tracker is a hint: the newest iteration that can be opened is used,
and a tracker that names another one is reported.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats.base import Format, Match
from reshard.formats.dcp.names import DATA_SUFFIX, METADATA_FILE
from reshard.formats.dcp.reader import DCP
from reshard.formats.megatron import names
from reshard.formats.megatron.rank_folders import given_layout, has_rank_folders, open_rank_folders
from reshard.formats.megatron.torch_dist import TRAITS, open_torch_dist
from reshard.formats.newest import newest_of
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location

__all__ = ["MEGATRON"]

_log = logging.getLogger("reshard")

_MAX_TRACKER_BYTES = 64
_HEAD_BYTES = 512


class Megatron(Format):
    """A folder of one iteration of Megatron-Core, or the root of a run."""

    traits = TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of files and folders, and the first bytes of `metadata.json`."""
        if not path.is_folder():
            return Match.NO
        listed = path.names()
        return Match.YES if _is_iteration(path, listed) or _iterations(path, listed) else Match.NO

    def is_root(self, path: Location) -> bool:
        """Whether it holds folders of iterations, and is none itself."""
        listed = path.names()
        return not _is_iteration(path, listed) and bool(_iterations(path, listed))

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """One iteration; of a root, the newest that can be opened."""
        return _open_root(path, options) if self.is_root(path) else _open_iteration(path, options)


MEGATRON = Megatron()


def _is_iteration(folder: Location, listed: Sequence[str]) -> bool:
    """Whether a folder with these names holds one iteration."""
    if any(names.numbers_of_rank(name) is not None for name in listed) and has_rank_folders(folder):
        return True
    if names.CONFIG_FILE in listed and (folder / names.CONFIG_FILE).is_file():
        return b'"sharded_backend"' in (folder / names.CONFIG_FILE).read_head(_HEAD_BYTES)
    is_dcp = METADATA_FILE in listed or any(name.endswith(DATA_SUFFIX) for name in listed)
    return is_dcp and (names.COMMON_FILE in listed or _is_named(folder.name))


def _is_named(name: str) -> bool:
    """Whether a folder is named like an iteration."""
    return name == names.RELEASE or names.iteration_of(name) is not None


def _iterations(root: Location, listed: Sequence[str]) -> list[str]:
    """Names of the folders of iterations, the newest first, and `release` last."""
    named = [(names.iteration_of(name), name) for name in listed if _is_named(name)]
    found = sorted(((-1 if number is None else number, name) for number, name in named), reverse=True)
    folders = [root / name for _, name in found if (root / name).is_folder()]
    return [folder.name for folder in folders if _is_iteration(folder, folder.names())]


def _open_iteration(folder: Location, options: OpenOptions) -> CheckpointData:
    listed = folder.names()
    if any(names.numbers_of_rank(name) is not None for name in listed):
        return open_rank_folders(folder, options)
    if options.strategy is not None:
        _log.warning("%s records how its tensors are divided: the strategy is ignored", folder)
    if names.CONFIG_FILE not in listed and names.COMMON_FILE not in listed and METADATA_FILE in listed:
        # Megatron-FSDP saves with `torch.distributed.checkpoint`; so does Megatron-Core 0.19, which records more.
        data = DCP.open(folder, options)
        if not any(name.startswith(names.COMMON_OBJECT) for name in getattr(data, "objects", ())):
            return replace(data, iteration=names.iteration_of(folder.name))
    return open_torch_dist(folder, options.method)


def _open_root(root: Location, options: OpenOptions) -> CheckpointData:
    """The newest iteration that can be opened, with the reasons why newer ones cannot."""
    given_layout(options)  # a fault of the layout is no reason to skip an iteration
    tracker = _tracker(root)
    folders = [root / name for name in _iterations(root, root.names())]
    data = newest_of(root, {folder.name: partial(_open_iteration, folder, options) for folder in folders})
    _compare(root, data.path.name, tracker)
    return data


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


def _compare(root: Location, opened: str, tracker: int | str | None) -> None:
    """Report that the tracker names another iteration than the one that is opened."""
    number = names.iteration_of(opened)
    if tracker is None or tracker == (names.RELEASE if number is None else number):
        return
    _log.warning(
        "%s: %s is opened, but the tracker names %s, which Megatron-LM would load. To use that one, open its folder",
        root,
        opened,
        tracker if tracker == names.RELEASE else f"iteration {tracker}",
    )
