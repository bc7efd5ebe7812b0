"""The files that a caller lists, or that a pattern of names matches: they are opened as one checkpoint."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, CheckpointNotFoundError, StorageError
from reshard.storage.location import Location, locate
from reshard.values.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

_MAGIC = "*?["
_MAX_FILES = 100_000


def files_of(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Location] | None:
    """The files that a list or a pattern names, by their paths; None: it is the path of one checkpoint.

    A text is a pattern if it has `*`, `?` or `[`, nothing has this path, and it matches a file. `*` matches within a
    component of a path.

    Args:
        path: a list of paths, or a path.

    Raises:
        ArgumentError: a pattern matches too many files, or an index is among them.

    Example:
        >>> import numpy as np, reshard
        >>> for name in "ab":
        ...     reshard.save_file({name: np.zeros(2)}, f"part_{name}.safetensors")
        >>> [file.name for file in files_of("part_*.safetensors")]
        ['part_a.safetensors', 'part_b.safetensors']
        >>> files_of("part_a.safetensors") is None
        True
    """
    if isinstance(path, list | tuple):
        return _weights([locate(one) for one in path])
    target = locate(path)  # type: ignore[arg-type]
    if not any(sign in target.path for sign in _MAGIC) or target.exists():
        return None
    *folders, last = target.path.split("/")
    found = [Location(target.store, "/" if target.path.startswith("/") else ".")]
    for part in filter(None, folders):
        found = [below for folder in found for below in _matching(folder, part) if below.is_folder()]
    files = [file for folder in found for file in _matching(folder, last) if file.is_file()]
    if len(files) > _MAX_FILES:
        raise ArgumentError(
            f"the pattern matches {len(files)} files, at most {_MAX_FILES} are opened", path=str(target)
        )
    return _weights(files) or None


def _weights(files: list[Location]) -> list[Location]:
    """The files. Raises ArgumentError if one of them is a text about weights."""
    for file in files:
        if file.suffix == ".json":
            is_index = file.name.endswith(".index.json")
            what = "an index of weight files" if is_index else "a JSON file"
            raise ArgumentError(
                f"{show(str(file))} is {what}, and a list or a pattern names the files of weights themselves",
                path=str(file),
                hint=f"open {show(str(file))} alone, which opens all files that it lists; or leave it out"
                if is_index
                else "leave it out",
            )
    return files


def common_folder(files: Sequence[Location]) -> Location:
    """The folder in which all files are, or in folders of it.

    Example:
        >>> str(common_folder([locate("model/a/x.bin"), locate("model/b.bin")]))
        'model'
    """
    folder = files[0].parent
    return next(
        (one for one in (folder, *folder.parents) if all(one in file.parents for file in files)), files[0].parent
    )


def _matching(folder: Location, part: str) -> list[Location]:
    """The entries of a folder that a component of a pattern matches. Hidden ones are matched by their first dot."""
    if not any(sign in part for sign in _MAGIC):
        return [folder / part]
    try:
        names = folder.names()
    except (StorageError, CheckpointNotFoundError):
        return []
    return [
        folder / name
        for name in names
        if fnmatch.fnmatchcase(name, part) and not (name.startswith(".") and not part.startswith("."))
    ]
