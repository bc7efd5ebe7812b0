"""What the files beside a model say about its quantised weights."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard import _core
from reshard.documents.strict_json import read_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, MismatchError
from reshard.quantised.kinds import KINDS
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.storage.location import Location

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
ENTRIES = ("quantization_config", "compression_config")
"""Entries of config.json that say how the weights are quantised."""
METHODS = frozenset(method for kind in KINDS.values() for method in kind.methods)
"""The methods that are known here, by their names in config.json."""
_MAX_CONFIG_BYTES = 16 << 20
_NESTED = ("text_config", "language_config", "llm_config")


class Said(NamedTuple):
    """What config.json says.

    Attributes:
        path: the file, or None: there is none of a model.
        method: `quant_method`; None: it says nothing.
        values: all values of the entry.
    """

    path: str | None = None
    method: str | None = None
    values: Mapping[str, Any] = {}


class Group(NamedTuple):
    """How compressed-tensors quantises the weights of some modules.

    Attributes:
        type: "int" or "float".
        bits: bits of a value.
        block: rows and columns that share a scale; None for one of them: all there are.
        is_symmetric: whether there are no zero points.
    """

    type: str
    bits: int
    block: tuple[int | None, int | None]
    is_symmetric: bool = True


def groups(of: Said, module: str) -> list[Group]:
    """What `config_groups` of compressed-tensors say of the weight of a module; empty: nothing.

    The `targets` of a group are names of modules, regular expressions after `re:`, and names of classes. As in
    compressed-tensors, a name comes first, then the first expression in the order of their texts. A module that none of
    them names has one of the groups with a class.

    Args:
        of: what config.json says.
        module: the name of the module.

    Raises:
        MismatchError: an entry is not as compressed-tensors writes it.

    Example:
        >>> weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
        >>> groups(Said("config.json", "compressed-tensors", {"config_groups": {"group_0": {"weights": weights}}}), "a")
        [Group(type='int', bits=4, block=(1, 128), is_symmetric=True)]
    """
    entries = of.values.get("config_groups") if of.method == "compressed-tensors" else None
    found: dict[Group, bool] = {}  # whether a class can name it
    of_target: dict[str, Group | None] = {}
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        weights = entry.get("weights") if isinstance(entry, dict) else None
        given = entry.get("targets") if isinstance(entry, dict) else None
        targets = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        if not isinstance(weights, dict):  # of activations alone
            of_target |= dict.fromkeys(targets)
            continue
        one = _group(weights)
        if one is None:
            raise MismatchError(
                f"{show(str(of.path))}: `weights` of the group {show(name)} in `config_groups` is {show(str(weights))}"
                ", expected `num_bits`, `type` and `strategy`, and the size of its groups or blocks",
                path=of.path,
            )
        of_target |= dict.fromkeys(targets, one)
        is_of_class = not targets or any(not target.startswith("re:") and "." not in target for target in targets)
        found[one] = found.get(one, False) or is_of_class
    order = sorted(of_target, key=lambda target: (target.startswith("re:"), target))
    for target in order:
        is_named = _names(target, module)
        if is_named is None:
            return list(found)
        if is_named:
            first = of_target[target]
            return [] if first is None else [first]
    return [one for one, is_of_class in found.items() if is_of_class] or list(found)


def _names(target: str, module: str) -> bool | None:
    """Whether a target names a module; None: its expression is not supported."""
    if not target.startswith("re:"):
        return target == module
    expression = _compiled(target.removeprefix("re:"))
    return None if expression is None else expression.matches(module)


@functools.lru_cache(maxsize=256)
def _compiled(text: str) -> _core.Expression | None:
    """An expression that matches from the start of a name, as in compressed-tensors; None: it is not supported."""
    try:
        return _core.Expression(f"(?:{text}).*")
    except ArgumentError:
        return None


def packs_loosely(of: Said) -> bool | None:
    """Whether the version of compressed-tensors in config.json keeps each packed integer in one word of 32 bits.

    Versions to 0.17.1 do, and those from 0.18.0 pack them one after the other. None: it names none, or one between.

    Example:
        >>> [packs_loosely(Said(values={"version": one})) for one in ("0.17.1", "0.18.0", "0.20.1", "0.18.0a1", "main")]
        [True, False, False, None, None]
    """
    found = re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(.*)", str(of.values.get("version")))
    if found is None:
        return None
    number = (int(found[1]), int(found[2]), int(found[3] or 0))
    is_between = (0, 17, 1) < number < (0, 18) or (number == (0, 18, 0) and found[4] != "")
    return None if is_between else number < (0, 18)


def _group(weights: Mapping[str, Any]) -> Group | None:
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    block = weights.get("block_structure")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    shared: tuple[Any, Any] | None = {"tensor": (None, None), "channel": (1, None), "group": (1, size),
        "tensor_group": (1, size)}.get(str(strategy))  # fmt: skip
    if isinstance(block, str):  # "128x128", as compressed-tensors reads it, too
        block = [int(n) if n.isdecimal() else None for n in block.split("x")]
    if strategy == "block":
        shared = tuple(block) if isinstance(block, list) and len(block) == 2 and None not in block else None
    is_known = shared is not None and all(n is None or (type(n) is int and n > 0) for n in shared)
    if kind not in ("int", "float") or type(bits) is not int or shared is None or not is_known:
        return None
    if strategy in ("group", "tensor_group") and size is None:
        return None
    return Group(kind, bits, shared, weights.get("symmetric") is not False)


def said(folder: Location | None) -> Said:
    """What the files in a folder say. A folder without the config.json of a model says nothing.

    Raises:
        StorageError: the system failed to read a file.
        MismatchError: an entry is no object.
    """
    if folder is None:
        return Said()
    config = _object(folder / CONFIG_FILE)
    if config is None or not ("architectures" in config or "model_type" in config):
        return Said()
    path = str(folder / CONFIG_FILE)
    nested = (part for name in _NESTED if isinstance(part := config.get(name), dict))
    for part in (config, *nested):
        for name in ENTRIES:
            if part.get(name) is None:
                continue
            entry = part[name]
            if not isinstance(entry, dict):
                raise MismatchError(f"{show(path)}: `{name}` is {show(str(entry))}, no object", path=path)
            if entry:
                return Said(path, _method(entry), entry)
    of_modelopt = _object(folder / MODELOPT_FILE)
    if of_modelopt is not None and isinstance(entry := of_modelopt.get("quantization"), dict):
        return Said(str(folder / MODELOPT_FILE), "modelopt", entry)
    return Said(path)


def without_entries(config: object) -> object:
    """A config without the entries that say how weights are quantised.

    Example:
        >>> without_entries({"quantization_config": {}, "text_config": {"quantization_config": {}, "a": 1}})
        {'text_config': {'a': 1}}
    """
    if not isinstance(config, dict):
        return config
    return {
        name: without_entries(value) if name in _NESTED else value
        for name, value in config.items()
        if name not in ENTRIES
    }


def _method(entry: Mapping[str, Any]) -> str:
    method = entry.get("quant_method")
    if isinstance(method, str):
        return method
    if entry.get("load_in_4bit") or entry.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in entry else ""


def _object(path: Location) -> dict[str, Any] | None:
    try:
        value = read_json(path, _MAX_CONFIG_BYTES, follow_links=True)
    except (CheckpointNotFoundError, DamagedFileError):
        return None  # that it is damaged is reported where the model is needed
    return value if isinstance(value, dict) else None


def check_method(of: Said, kinds: Iterable[tuple[str, str]], *, is_whole: bool = True) -> None:
    """Compare the method that config.json names with what the tensors are.

    Args:
        of: what config.json says.
        kinds: `(name, kind)` of each quantised weight.
        is_whole: whether these are those of the whole model, of which one must be quantised if config.json says so.

    Raises:
        MismatchError: they differ.
    """
    found = dict[str, str]()
    for name, kind in kinds:
        found.setdefault(kind, name)
    if of.path is None:
        return
    for kind, name in found.items():
        if of.method is None:
            raise MismatchError(
                f"{show(name)} is quantised ({KINDS[kind].title}), and {show(of.path)} has no `quantization_config`",
                path=of.path,
                key=name,
                hint="copy config.json from the folder of these weights",
            )
        if of.method in METHODS and of.method not in KINDS[kind].methods:
            raise MismatchError(
                f"{show(name)} is quantised as {kind} ({KINDS[kind].title}), and {show(of.path)} says `quant_method` "
                f"{show(of.method)}",
                path=of.path,
                key=name,
                hint=f"{kind} belongs to {listed(map(show, KINDS[kind].methods))}; copy config.json from the folder of "
                "these weights",
            )
    # The files of torchao can be pickles, in which its tensors are not seen.
    if is_whole and not found and of.method in METHODS - {"torchao"}:
        raise MismatchError(
            f"{show(of.path)} says `quant_method` {show(str(of.method))}, and no tensor is quantised so",
            path=of.path,
            hint="remove `quantization_config` from config.json if the weights are not quantised",
        )
