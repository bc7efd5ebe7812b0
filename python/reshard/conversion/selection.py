"""Which tensors of a source a conversion writes, and under which names.

Tensors are left out and renamed by how their names begin. What is done with whole families of names, or fuses and
splits tensors, is for name maps.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.checkpoint import Checkpoint
from reshard.errors import ArgumentError
from reshard.formats import scalars
from reshard.formats.base import StoredTensor
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np

    from reshard.checkpoint import Checkpoint, Part
    from reshard.names import NameMap

__all__ = ["Selection", "new_names", "select"]

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Selection:
    """What is written of a source.

    Attributes:
        source: a view of the source in which only that is, under its new names.
        keys: the tensors that are written.
        counters: tensors of one element that are set apart, and those that the source knows without having a tensor.
        left_out: tensors that `drop` names, as `rename` would name them.
    """

    source: Checkpoint
    keys: list[str]
    counters: dict[str, np.ndarray]
    left_out: list[str]


def select(
    source: Checkpoint,
    part: Part,
    *,
    drop: str | Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    names: NameMap | None = None,
    apart: Collection[str] = (),
) -> Selection:
    """Choose what is written of a source, and name it.

    Args:
        source: the opened source, which stays open.
        part: "model", "optimizer" or "all".
        drop: as in `new_names`; one beginning, or several.
        rename: as there.
        names: a name map that is applied after that.
        apart: names of counters that are no tensors of the destination: they are set apart.

    Returns:
        The selection, whose source is closed by itself.

    Raises:
        ArgumentError: nothing is left, or as `new_names`.
        NamesError: the name map does not fit the tensors.
    """
    keys = [key for key in source.keys(part) if not _is_apart(source, key, apart)]
    counters = {} if part == "model" else _counters(source, apart)
    tensors = [key for key in source if not _is_apart(source, key, apart)]
    beside = [name for name in counters if name not in source or name in apart]
    drop = (drop,) if isinstance(drop, str) else tuple(drop)
    new = new_names([*tensors, *beside], drop, rename)
    written = [new[key] for key in keys if key in new]
    if not written:
        raise ArgumentError(
            f"{source.path} holds no tensors of that part; there is nothing to write", path=str(source.path)
        )
    source._check_placed(*(key for key in tensors if key in new))  # noqa: SLF001  as reading one would
    view = _view(source, {key: new[key] for key in tensors if key in new})
    if names is not None:
        # Tensors that nobody asked for need not fit the map.
        with contextlib.nullcontext() if view is source else view:
            view = view.renamed(names, part="model" if part == "model" else "all")
        written = view.keys(part)
    if source.common is not None:
        # A counter that was left out does not come back in another file.
        left_out = [name for name in scalars.NAMES if name.startswith(drop)]
        view.common = replace(source.common, **dict.fromkeys(left_out))  # type: ignore[arg-type]
    changes = dict(rename or {})
    longest_first = sorted(changes, key=len, reverse=True)
    left_out = [_renamed(key, changes, longest_first, set()) for key in tensors if key not in new]
    return Selection(view, written, {new[name]: counters[name] for name in beside if name in new}, left_out)


def _is_apart(source: Checkpoint, key: str, apart: Collection[str]) -> bool:
    return key in apart and math.prod(source.shape(key)) == 1


def _counters(source: Checkpoint, apart: Collection[str]) -> dict[str, np.ndarray]:
    """The counters: as the source has them, or made of what it knows."""
    known = {} if source.common is None else scalars.arrays_of(source.common)
    known = {name: array for name, array in known.items() if name not in source}
    return known | {key: source.read(key) for key in source if _is_apart(source, key, apart)}


def _view(source: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """The tensors of a source that have a new name, under that name."""
    if list(names) == list(source) and all(old == new for old, new in names.items()):
        return source
    tensors = {}
    for old, new in names.items():
        dtype, shape = source.data.index.info(old)
        tensors[new] = StoredTensor(dtype, shape, source.data.index.stored(old))
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
