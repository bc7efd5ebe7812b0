"""Which tensors of a source a conversion writes, and under which names.

Tensors are left out and renamed by how their names begin. What is done with whole families of names, or fuses and
splits tensors, is for name maps.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reshard import opening
from reshard.errors import ArgumentError
from reshard.formats import checkpoint1, scalars
from reshard.opening.rank_folders import open_rank_files, strategy_for
from reshard.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from reshard.checkpoint import Checkpoint, Part

__all__ = ["new_names", "open_source", "select"]

_log = logging.getLogger("reshard")


def open_source(path: Path, *, strategy: str | os.PathLike[str] | None = None, suffix: str | None = None) -> Checkpoint:
    """Open what a conversion reads.

    Args:
        path: whatever `reshard.open` opens.
        strategy: of rank folders, how they are cut.
        suffix: of rank folders, which file of each is read.

    Raises:
        ArgumentError: `suffix`, and there are no rank folders.
        ReshardError: as `reshard.open`.
    """
    if suffix is None:
        return opening.open(path, strategy=strategy)
    if not path.is_dir() or not checkpoint1.is_root(path):
        raise ArgumentError(
            f"{path} holds no folders `rank_<number>`: `suffix` says which of their files are read", path=str(path)
        )
    files = checkpoint1.choose_by_suffix(path, suffix)
    return open_rank_files(path, files, strategy_for(path, strategy))


def select(
    source: Checkpoint, part: Part, *, drop: str | Sequence[str] = (), rename: Mapping[str, str] | None = None
) -> tuple[Checkpoint, list[str], dict[str, np.ndarray]]:
    """What is written of a source: a view of it in which only that is, and under its new names.

    Args:
        source: the opened source, which stays open for as long as the view is used.
        part: "model", "optimizer" or "all".
        drop: as in `new_names`; one beginning, or several.
        rename: as there.

    Returns:
        The view; the keys that are written; the counters that the source knows and has no tensors of.

    Raises:
        ArgumentError: nothing is left, or as `new_names`.
    """
    keys = source.keys(part)
    told = {} if part == "model" or source.common is None else scalars.arrays_of(source.common)
    counters = {name: array for name, array in told.items() if name not in source}
    names = new_names([*source, *counters], (drop,) if isinstance(drop, str) else drop, rename)
    written = [names[key] for key in keys if key in names]
    if not written:
        raise ArgumentError(
            f"{source.path} holds no tensors of that part; there is nothing to write", path=str(source.path)
        )
    view = _view(source, {key: names[key] for key in source if key in names})
    return view, written, {names[name]: array for name, array in counters.items() if name in names}


def _view(source: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """The tensors of a source that have a new name, under that name."""
    if list(names) == list(source) and all(old == new for old, new in names.items()):
        return source
    tensors = {}
    for old, new in names.items():
        dtype, shape = source._index.info(old)  # noqa: SLF001  a view is made of what an index tells
        tensors[new] = dtype, shape, source._index.stored(old)  # noqa: SLF001
    return source.view(tensors)


def new_names(keys: Sequence[str], drop: Sequence[str] = (), rename: Mapping[str, str] | None = None) -> dict[str, str]:
    """The new name of each tensor that stays.

    State of an optimizer, `<slot>.<parameter>`, is renamed as its parameter, where no longer beginning says otherwise;
    counters keep their names unless they are given whole.

    Args:
        keys: names of the tensors.
        drop: how the names begin of those that are left out.
        rename: by how names begin, how they begin instead; the longest that fits counts, "" begins every name.

    Raises:
        ArgumentError: a beginning is no text, or two tensors would have one name.

    Example:
        >>> new_names(["w", "adam_m.w", "step_num"], rename={"": "model."})
        {'w': 'model.w', 'adam_m.w': 'adam_m.model.w', 'step_num': 'step_num'}
        >>> new_names(["layers.0.w", "layers.1.w", "head.w"], drop=["layers.1."], rename={"head.": "lm_head."})
        {'layers.0.w': 'layers.0.w', 'head.w': 'lm_head.w'}
    """
    changes = dict(rename or {})
    for text in (*drop, *changes, *changes.values()):
        if not isinstance(text, str):
            raise ArgumentError(f"`drop` and `rename` take names of tensors, or how they begin, not {text!r}")
    if "" in drop:
        raise ArgumentError("`drop` names the beginning '', with which every name begins: nothing would be left")
    kept = [key for key in keys if not key.startswith(tuple(drop))]
    unused = [text for text in drop if not any(key.startswith(text) for key in keys)]
    used: set[str] = set()
    longest_first = sorted(changes, key=len, reverse=True)
    names = {key: _renamed(key, changes, longest_first, used) for key in kept}
    unused += [text for text in changes if text not in used]
    for text in unused:
        _log.warning("no tensor's name begins with %s: nothing to leave out or rename there", show(text))
    seen: dict[str, str] = {}
    for old, new in names.items():
        if not new:
            raise ArgumentError(f"{show(old)} would be left without a name", key=old)
        if seen.setdefault(new, old) != old:
            raise ArgumentError(f"{show(seen[new])} and {show(old)} would both be named {show(new)}", key=old)
    return names


def _renamed(key: str, changes: Mapping[str, str], longest_first: Sequence[str], used: set[str]) -> str:
    old = next((text for text in longest_first if key.startswith(text)), None)
    state = scalars.parameter_of(key)
    if state is not None and not (old and len(old) > len(state[0])):
        # Not asked for by its own name: it goes where its parameter goes.
        return f"{state[0]}.{_renamed(state[1], changes, longest_first, used)}"
    if old is None or (scalars.is_counter(key) and old != key):
        return key
    used.add(old)
    return changes[old] + key[len(old) :]
