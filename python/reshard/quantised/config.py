"""What the files beside a model say about its quantised weights."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

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
_CHANNELS = {"num_bits": 8, "type": "int", "group_size": -1}
_FP8, _FP4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
_NVFP4, _MXFP4, _MXFP8 = {**_FP4, "group_size": 16}, {**_FP4, "group_size": 32}, {**_FP8, "group_size": 32}
_MXFP6 = {**_MXFP4, "num_bits": 6}
_PRESETS: Mapping[str, dict[str, Any] | None] = {
    "UNQUANTIZED": None, "W8A8": _CHANNELS, "INT8": _CHANNELS,
    "W4A16_ASYM": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": False},
    "W4AFP8": {"num_bits": 4, "type": "int", "group_size": 128},
    "FP8": _FP8, "FP8_DYNAMIC": {**_FP8, "group_size": -1},
    "FP8_BLOCK": {**_FP8, "strategy": "block", "block_structure": [128, 128]},
    "NVFP4A16": _NVFP4, "NVFP4": _NVFP4, "MXFP4A16": _MXFP4, "MXFP4": _MXFP4, "MXFP4XFP8": _MXFP4,
    "MXFP6A16": _MXFP6, "MXFP6A8": _MXFP6, "MXFP8A16": _MXFP8, "MXFP8": _MXFP8,
}  # fmt: skip


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


_Told: TypeAlias = "Group | Literal['unknown', 'not quantised']"


class Groups:
    """What `config_groups` of compressed-tensors say of the weights of modules.

    The `targets` of a group are names of modules, regular expressions after `re:`, and names of classes. As in
    compressed-tensors, a name comes first, then the first expression in the order of their texts, then a class. The
    classes of modules are not known here: a module that no target names has one of the groups with a class.

    transformers renames modules of some models on load, and targets can have either name. So the groups of targets that
    name no module at all are also possible for a module that no target names.

    Args:
        of: what config.json says.
        modules: the names of all modules of the checkpoint.

    Raises:
        MismatchError: an entry is not as compressed-tensors writes it.

    Example:
        >>> weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
        >>> told = {"config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}, "FP8": ["re:.*b"]}}
        >>> groups = Groups(Said("config.json", "compressed-tensors", told))
        >>> groups.of("a")
        [Group(type='int', bits=4, block=(1, 128), is_symmetric=True)]
        >>> groups.of("m.b")
        [Group(type='float', bits=8, block=(None, None), is_symmetric=True)]
    """

    def __init__(self, of: Said, modules: Iterable[str] = ()) -> None:
        entries = of.values.get("config_groups") if of.method == "compressed-tensors" else None
        self._modules = frozenset(modules)
        self._all: list[_Told] = []
        self._of_target: dict[str, _Told] = {}  # of two groups the later one, as in compressed-tensors
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            told = _told(of, name, entry)
            given = entry.get("targets") if isinstance(entry, dict) else entry
            targets = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
            self._of_target |= dict.fromkeys(targets or [name], told)
            self._all.append(told)
        self._expressions = sorted(target for target in self._of_target if target.startswith("re:"))

    def of(self, module: str) -> list[Group]:
        """The groups that a module can have; empty: nothing is said of it, or not in words that are known here."""
        if not self._all:
            return []
        if module in self._of_target:
            return _known([self._of_target[module]])
        for target in self._expressions:
            is_named = _names(target, module)
            if is_named is None:
                return _known(self._all)
            if is_named:
                return _known([self._of_target[target]])
        last = module.rpartition(".")[2]
        possible = [told for target, told in self._possible if "." not in target or target.endswith("." + last)]
        return _known([*possible, *self._elsewhere] or self._all)

    @functools.cached_property
    def _possible(self) -> list[tuple[str, _Told]]:
        """Classes, and names that no module of the checkpoint has, with their groups."""
        passed = {*self._modules, *self._expressions}
        return [(target, told) for target, told in self._of_target.items() if target not in passed]

    @functools.cached_property
    def _elsewhere(self) -> list[_Told]:
        """The groups of the expressions for names that begin otherwise than those of all modules here."""
        return [
            self._of_target[target]
            for target in self._expressions
            if not target.startswith("re:.*") and not any(_names(target, module) for module in self._modules)
        ]


def _known(told: Iterable[_Told]) -> list[Group]:
    """The groups among these; empty if one of them is not known here."""
    found = list(dict.fromkeys(told))
    return [] if "unknown" in found else [one for one in found if isinstance(one, Group)]


def _told(of: Said, name: str, entry: object) -> _Told:
    """What an entry of `config_groups` says of weights: a scheme, or the targets of the preset of that name."""
    if isinstance(entry, dict):
        weights = entry.get("weights")  # None: of activations alone
    else:
        weights = _preset(name.upper()) if isinstance(entry, list) else "unknown"
    if weights is None or weights == "unknown":
        return "not quantised" if weights is None else "unknown"
    told = _group(weights) if isinstance(weights, dict) else None
    if told is None:
        raise MismatchError(
            f"{show(str(of.path))}: `weights` of the group {show(name)} in `config_groups` is {show(str(weights))}"
            ", expected `num_bits`, `type` and `strategy`, and the size of its groups or blocks",
            path=of.path,
        )
    return told


def _preset(name: str) -> dict[str, Any] | Literal["unknown"] | None:
    """The weights of a preset of compressed-tensors; None: they are not quantised.

    Source: `PRESET_SCHEMES` in `compressed_tensors/quantization/quant_scheme.py`, version 0.20.1.
    """
    if name in _PRESETS:
        return _PRESETS[name]
    integers = re.fullmatch(r"W([2-8])A(4|8|16)", name)
    if integers is None or int(integers[1]) > int(integers[2]):
        return "unknown"
    return {"num_bits": int(integers[1]), "type": "int", "group_size": 128}


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


def _group(weights: Mapping[str, Any]) -> Group | Literal["unknown"] | None:
    """The group of some weights; None: it contradicts itself."""
    bits, size, block = weights.get("num_bits", 8), weights.get("group_size"), weights.get("block_structure")
    kind = _lower(weights.get("type", "int"))
    strategy = _lower(weights.get("strategy"))
    strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    if isinstance(block, str):  # "128x128", as compressed-tensors reads it, too
        sizes = re.fullmatch(r"([0-9]{1,18})x([0-9]{1,18})", block)
        block = [] if sizes is None else [int(n) for n in sizes.groups()]
    if not (isinstance(kind, str) and isinstance(strategy, str)) or type(bits) is not int:
        return None
    shared: dict[str, tuple[Any, ...]] = {"tensor": (None, None), "channel": (1, None), "group": (1, size)}
    shared |= {"tensor_group": (1, size), "block": tuple(block) if isinstance(block, list) else ()}
    if kind not in ("int", "float") or strategy not in shared:
        return "unknown"
    rows, columns = shared[strategy] if len(shared[strategy]) == 2 else (0, 0)
    needed = {"group": (columns,), "tensor_group": (columns,), "block": (rows, columns)}.get(strategy, ())
    if not all(type(n) is int and n > 0 for n in needed):
        return None
    return Group(kind, bits, (rows, columns), weights.get("symmetric") is not False)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


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
