"""Reads the weights of the newest epoch in a folder of torchtune. They are files of other formats."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, UnsupportedError
from reshard.formats.base import Match
from reshard.formats.dcp.format import DCP
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.formats.torchtune import names
from reshard.formats.weight_files.format import WEIGHT_FILES
from reshard.formats.weight_files.reader import open_files
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MOST_NAMED = 3
_FORMATS = (HUGGINGFACE, TORCH_FILE, DCP, WEIGHT_FILES)


def open_folder(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the weights of the newest epoch that has any.

    Raises:
        CheckpointNotFoundError: no epoch has weights, or a file is missing.
        UnsupportedError: an epoch has weights under several namings.
        DamagedFileError, StorageError: as `reshard.open`.
    """
    there = folder.names()
    old = names.old_files(there)
    data = _of_epochs(folder, names.epochs(there), options) if names.STATE_FOLDER in there or not old else None
    if data is None:
        data = _of_files(folder, old, options)
    if names.STATE_FOLDER in there or names.STATE_FILE in there:
        _log.warning("%s: the weights are read; the optimizer in %s is not", folder, names.STATE_FILE)
    return replace(data, traits=data.traits._replace(name=names.TRAITS.name, is_pretrained=True, counters=None))


def _of_epochs(folder: Location, epochs: list[tuple[int, str]], options: OpenOptions) -> CheckpointData:
    """The weights in the newest folder of an epoch that has any."""
    skipped: list[tuple[str, str]] = []
    for _, name in epochs:
        found = next((one for one in _FORMATS if one.detect(folder / name) is Match.YES), None)
        if found is not None:
            return replace(found.open(folder / name, options), skipped=tuple(skipped))
        skipped.append((name, "it holds no weights"))
        _log.warning("%s holds no weights: an older epoch is read", folder / name)
    raise CheckpointNotFoundError(
        f"{show(str(folder))}: no epoch holds weights: {listed([show(name) for _, name in epochs], _MOST_NAMED)}",
        path=str(folder),
        hint="the copy of the run is incomplete",
    )


def _of_files(
    folder: Location, old: Mapping[int, Mapping[str, Mapping[int, str]]], options: OpenOptions
) -> CheckpointData:
    """The files of the newest epoch."""
    newest = max(old)
    if len(old[newest]) > 1:
        titles = [show(next(iter(files.values()))) for files in old[newest].values()]
        raise UnsupportedError(
            f"{show(str(folder))} holds weights of epoch {newest} under several namings: {listed(titles)}",
            path=str(folder),
            hint="open one of the files, or a pattern for the files of one naming",
        )
    [(kind, files)] = old[newest].items()
    # No name counts the files: as many as another epoch has are expected.
    count = max(*files, *(len(of[kind]) for of in old.values() if kind in of))
    if missing := [number for number in range(1, min(count, 10_000) + 1) if number not in files]:
        words = [show(f"hf_model_{number:04}_{newest}") for number in missing[:_MOST_NAMED]]
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds {len(files)} of {count} files of epoch {newest}; missing: "
            f"{listed(words, _MOST_NAMED, n_items=count - len(files))}",
            path=str(folder),
            hint="the copy of the run is incomplete",
        )
    if len(old) > 1:
        _log.warning("%s: epoch %d is read; not read: those of %s", folder, newest, listed(map(str, sorted(old)[:-1])))
    return open_files([folder / files[number] for number in sorted(files)], folder, options.method)
