"""The tensors in the state of other objects: an average of the weights, a second model, a wrapped optimizer.

The state dict of an object is a nested value. `lift` takes its tensors out, under keys `extra.<object>.<path>`, so that
they are saved as those of the model are: sharded, with checksums, and resharded for another number of ranks. The value
keeps None in their places, and there is an entry for each place. `put_back` is the inverse.

This module does not know how tensors are distributed over ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reshard import dtypes
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.formats.state_loader import MAX_DEPTH
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable

TENSORS = "object tensors"
"""The name of the entries in the saved state of a trainer."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Entry:
    """One place of a tensor in the state of an object.

    Attributes:
        key: the key under which it is saved. Places that share a tensor have the same key.
        path: keys of mappings and numbers of list items, from the outside in.
        placements: of a DTensor how it was placed on each axis of its mesh, such as "S(0)"; empty: a plain tensor, and
            no parameter was a DTensor; None: a plain tensor beside DTensors.
    """

    key: str
    path: tuple[Any, ...]
    placements: tuple[str, ...] | None = None

    def to_value(self) -> list[Any]:
        """The entry as plain values."""
        return [self.key, list(self.path), None if self.placements is None else list(self.placements)]


@dataclass(frozen=True, eq=False)
class Lifted:
    """The state of an object without its tensors.

    Attributes:
        state: the value, with None in the place of each tensor.
        tensors: the tensors by key.
        entries: their places.
    """

    state: Any
    tensors: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not distributed, on the host."""
        return {key: one.detach().cpu() for key, one in self.tensors.items() if not hasattr(one, "device_mesh")}


def lift(state: Any, name: str) -> Lifted:
    """Take the tensors out of a value. Tensors of a single element stay in it, unless they are distributed.

    Args:
        state: the state dict of an object.
        name: the name of the object.

    Raises:
        ArgumentError: the value contains itself or is nested too deeply.

    Example:
        >>> lifted = lift({"decay": 0.9, "shadow": {"w": torch.ones(2)}}, "ema")
        >>> lifted.state, lifted.entries[0].path, list(lifted.tensors)
        ({'decay': 0.9, 'shadow': {'w': None}}, ('shadow', 'w'), ['extra.ema.shadow.w'])
    """
    lifted = Lifted(None)
    key_of: dict[int, str] = {}

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise ArgumentError(f"the state of {show(name)} contains itself or is nested too deeply")
        if _is_lifted(value):
            if id(value) not in key_of:
                key_of[id(value)] = key = _free(".".join(("extra", name, *map(_word, path))), lifted.tensors)
                lifted.tensors[key] = value.detach() if type(value) in _PLAIN else value
            lifted.entries.append(Entry(key_of[id(value)], path, placements_of(value)))
            return None
        if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict", "defaultdict"):
            made = ((key, walk(item, (*path, key))) for key, item in value.items())
            return OrderedDict(made) if isinstance(value, OrderedDict) else dict(made)
        if type(value) in (list, tuple):
            return type(value)(walk(item, (*path, number)) for number, item in enumerate(value))
        return value

    left = walk(state, ())
    return Lifted(left, lifted.tensors, lifted.entries)


def put_back(state: Any, tensors: Iterable[tuple[tuple[Any, ...], Any]]) -> Any:
    """Put tensors into their places in a value.

    Args:
        state: the value that `lift` left.
        tensors: path and tensor of each place.

    Raises:
        MismatchError: the value has no such place.

    Example:
        >>> put_back({"shadow": {"w": None}}, [(("shadow", "w"), torch.ones(1))])
        {'shadow': {'w': tensor([1.])}}
    """
    places = dict(tensors)

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        if path in places:
            if value is not None:
                raise MismatchError(f"the saved state of an object has no tensor at {path!r}")
            return places.pop(path)
        if type(value) in (dict, OrderedDict):  # those that `lift` walks; a Counter of pairs counts them
            return type(value)((key, walk(item, (*path, key))) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(walk(item, (*path, number)) for number, item in enumerate(value))
        return value

    whole = walk(state, ())
    if places:
        raise MismatchError(f"the saved state of an object has no place {next(iter(places))!r}")
    return whole


def entries_of(trainer: object) -> dict[str, list[Entry]]:
    """The entries in the saved state of a trainer, by object.

    Raises:
        MismatchError: they are not valid.
    """
    if not isinstance(trainer, Mapping):
        return {}
    try:
        return {
            str(name): [
                Entry(_text(key), tuple(path), None if placements is None else tuple(map(str, placements)))
                for key, path, placements in entries
            ]
            for name, entries in trainer.get(TENSORS, {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise MismatchError(f"`extra` holds invalid entries of the tensors of objects: {error!r}") from None


def object_tensors(extra: Mapping[str, Any]) -> dict[str, tuple[str, Entry]]:
    """The object and the first entry of each tensor, by key, in the extra state of a checkpoint."""
    found: dict[str, tuple[str, Entry]] = {}
    for name, entries in entries_of(extra.get("trainer")).items():
        for entry in entries:
            found.setdefault(entry.key, (name, entry))
    return found


def placements_of(tensor: Any) -> tuple[str, ...] | None:
    """How a DTensor is placed on each axis of its mesh; None: a plain tensor.

    Example:
        >>> print(placements_of(torch.ones(2)))
        None
    """
    return tuple(map(str, tensor.placements)) if hasattr(tensor, "device_mesh") else None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a key")
    return value


def _is_lifted(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    if hasattr(value, "device_mesh"):
        return True
    if type(value) not in _PLAIN or value.layout is not torch.strided or value.numel() <= 1 or value.is_meta:
        return False
    try:
        dtypes.parse_dtype(value.dtype)
    except UnsupportedError:
        return False
    return True


def _word(part: Any) -> str:
    """A part of a path as text in a key."""
    text = part if isinstance(part, str) else str(part) if type(part) is int else show(repr(part))
    return "".join(one if one.isprintable() else "?" for one in text)[:200] or "?"


def _free(key: str, taken: Mapping[str, object]) -> str:
    number, free = 1, key
    while free in taken:
        number += 1
        free = f"{key}~{number}"
    return free
