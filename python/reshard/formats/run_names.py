"""Renames tensors in the state of a torch run beside its tensors: the value `trainer` of `Checkpoint.extra`.

`reshard.torch` saves that value. It names parameters in the record of the optimizer, modules with state of their own,
and tensors in the state of other objects. A conversion that only renames tensors, or leaves some out, changes these
names alike, so that the run goes on under the new names. This module knows the names, not the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from reshard.errors import MismatchError

TRAINER = "trainer"

Rename: TypeAlias = Callable[[str], str | None]
"""The new name of a tensor or a module; None: it is left out."""

_WRAPPER = "module."  # before the names in the state of an average or of another wrapped copy of the model


def renamed(trainer: Mapping[str, Any], rename: Rename, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The state of a run with other names of tensors.

    Args:
        trainer: the saved state.
        rename: the new name of each tensor and module.
        parameters: the new names of the parameters that change, by the old ones.

    Returns:
        A new value. The given one is not changed.

    Raises:
        MismatchError: the value has not the form that `reshard.torch` saves.

    Example:
        >>> optimizer = {"groups": [{"params": ["fc.w"]}], "slots": [[["exp_avg"], ["fc.w"]]], "state": {}}
        >>> renamed({"optimizer": optimizer, "objects": {}}, lambda name: name.replace("fc", "proj"), {})["optimizer"]
        {'groups': [{'params': ['proj.w']}], 'slots': [[['exp_avg'], ['proj.w']]], 'state': {}}
    """
    try:
        return _renamed(trainer, rename, parameters)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MismatchError(f"`extra` holds an invalid state of a run: {error!r}") from None


def _renamed(trainer: Mapping[str, Any], rename: Rename, parameters: Mapping[str, str]) -> dict[str, Any]:
    made = dict(trainer)
    if "aliases" in made:
        made["aliases"] = {
            new: key
            for name, of_name in made["aliases"].items()
            if (new := rename(name)) is not None and (key := rename(of_name)) is not None
        }
    if "modules" in made:
        # The name of a module is a prefix of names of tensors; that of an entry of a module is one itself.
        by_name = {_of_module(name, rename): value for name, value in made["modules"].items()}
        made["modules"] = {name: value for name, value in by_name.items() if name is not None}
    if "frozen" in made:
        made["frozen"] = {
            kind: [new for name in names if (new := rename(name)) is not None] for kind, names in made["frozen"].items()
        }
    if "orders" in made:
        made["orders"] = {
            name: [[new for one in names if (new := rename(one)) is not None] for names in groups]
            for name, groups in made["orders"].items()
        }
    if "optimizer" in made:
        made["optimizer"] = _record(made["optimizer"], rename)
    places = made.get("object tensors", {})
    if places:
        made["objects"] = {
            name: _with_paths(state, [tuple(path) for _, path, _ in places.get(name, ())], rename, parameters)
            for name, state in made["objects"].items()
        }
        made["object tensors"] = {
            name: [
                [key, _path(path, parameters), placements]
                for old, path, placements in entries
                if (key := rename(old)) is not None
            ]
            for name, entries in places.items()
        }
    return made


def _of_module(name: str, rename: Rename) -> str | None:
    as_prefix = rename(f"{name}.")
    return rename(name) if as_prefix == f"{name}." else None if as_prefix is None else as_prefix.removesuffix(".")


def _record(record: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """The record of the optimizers."""

    def names(old: Any) -> list[str]:
        return [new for name in old if (new := rename(name)) is not None]

    made = {**record, "groups": [{**group, "params": names(group["params"])} for group in record["groups"]]}
    for kind in ("slots", "local", "plain"):
        if kind in made:
            made[kind] = [[slots, names(of_slots)] for slots, of_slots in made[kind]]
    made["state"] = {new: one for name, one in made["state"].items() if (new := rename(name)) is not None}
    return made


def _word(part: Any, parameters: Mapping[str, str]) -> Any:
    """A key on the way to a tensor, if it is the name of a parameter."""
    if not isinstance(part, str):
        return part
    start = _WRAPPER if part.startswith(_WRAPPER) and part.removeprefix(_WRAPPER) in parameters else ""
    return start + parameters[part.removeprefix(start)] if part.removeprefix(start) in parameters else part


def _path(path: Any, parameters: Mapping[str, str]) -> list[Any]:
    return [_word(part, parameters) for part in path]


def _with_paths(state: Any, paths: list[tuple[Any, ...]], rename: Rename, parameters: Mapping[str, str]) -> Any:
    """The state of an object in which the keys that lead to tensors are renamed, and the names beside them alike."""
    if not paths or not isinstance(state, dict):
        return state
    inner: dict[Any, list[tuple[Any, ...]]] = {}
    for path in paths:
        if path:
            inner.setdefault(path[0], []).append(path[1:])
    # Beside parameters there are names of modules, such as `<module>._extra_state`.
    is_state_dict = any(_word(key, parameters) != key for key in inner)
    made = {}
    for key, value in state.items():
        new = _word(key, parameters)
        if is_state_dict and key not in inner and isinstance(key, str):
            start = _WRAPPER if key.startswith(_WRAPPER) else ""
            name = rename(key.removeprefix(start))
            if name is None:
                continue
            new = start + name
        made[new] = _with_paths(value, inner.get(key, []), rename, parameters)
    return type(state)(made)
