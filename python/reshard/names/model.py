"""`NameMap`, the one value that `names=` takes, and every way to get one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Self, TypeAlias, TypeGuard

from reshard.arguments import checked
from reshard.errors import ArgumentError, CheckpointNotFoundError, NamesError
from reshard.fields import found
from reshard.names import presets
from reshard.names.file import NamesFile, Size
from reshard.names.resolve import ResolvedTensor, resolve
from reshard.names.sizes import Expression
from reshard.storage.location import Location, locate
from reshard.strict_json import read_json
from reshard.strict_yaml import read_yaml
from reshard.words import show

__all__ = ["ConfigLike", "NameMap", "NamesLike", "as_names", "config_beside"]

_MAX_CONFIG_BYTES = 16 << 20
_CONFIG_FILE = "config.json"
_REVERSE = ":reverse"

ConfigLike: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
"""A `config.json`, a folder with one, or its content."""


class NameMap(NamesFile):
    """How the tensors of one naming become those of another: renamed, fused, split, stacked, transposed, tied.

    What may stand in it is told at `reshard.names.file`. Printed, it is such a file.

    Example:
        >>> names = NameMap.from_mapping({"rules": [{"from": ["a.q", "a.k"], "to": "a.qk", "join": 0}]})
        >>> print(names)
        rules:
          - {from: ["a.q", "a.k"], to: "a.qk", join: 0}
        <BLANKLINE>
    """

    @classmethod
    @checked
    def from_yaml(cls, path: str | os.PathLike[str], config: ConfigLike | None = None) -> Self:
        r"""Read a name map.

        Args:
            path: the file, UTF-8 YAML (JSON is YAML too), at most 16 MiB.
            config: the model's `config.json`, for sizes that are taken from it.

        Raises:
            CheckpointNotFoundError: there is no such file.
            NamesError: it is not YAML, or not a name map; the message names file, line and field.
            DamagedFileError: the config is no JSON object.

        Example:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder) / "names.yaml"
            ...     _ = path.write_text('rules:\n  - {from: "a.{i}", to: "b.{i}"}')
            ...     len(NameMap.from_yaml(path).rules)
            1
        """
        value, lines = read_yaml(path, what="name map", error_class=NamesError)
        names = cls.from_lines(value, source=os.fspath(path), lines=lines)
        return names if config is None else names.with_config(config)

    @classmethod
    @checked
    def preset(cls, name: str, config: ConfigLike | None = None) -> Self:
        """The map from Hugging Face names to those of MindSpore Transformers (mcore) or Megatron-core.

        Args:
            name: "<family>-<naming>", such as "qwen3-mindspore" or "mixtral-megatron", or the naming alone: then the
                config says which family it is. Keys that it does not know are refused.
            config: the model's `config.json`: sizes of heads, numbers of experts and layers.

        Raises:
            ArgumentError: there is no such preset, or it needs a config.
            CheckpointNotFoundError, DamagedFileError: of the config.

        Example:
            >>> heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
            >>> NameMap.preset("llama-megatron", heads).rules[0].whole.text
            'embedding.word_embeddings.weight'
        """
        values = None if config is None else read_config(config)
        names = cls.from_mapping(presets.mapping_of_preset(name, values), source=f"preset {name}")
        return names if values is None else names.with_config(values)

    @property
    def needs_config(self) -> bool:
        """Whether a size is to be taken from a config."""
        return any(choice.names for size in self.sizes.values() for choice in size.choices)

    @checked
    def with_config(self, config: ConfigLike) -> Self:
        """The same map with numbers for the sizes that a model's config says; the others stay as they are.

        Raises:
            CheckpointNotFoundError, DamagedFileError, ArgumentError: of the config.
            NamesError: the config says of a size what is no whole number; the message names both.

        Example:
            >>> names = NameMap.from_mapping({"sizes": {"e": "num_experts"}, "rules": []})
            >>> print(names.with_config({"num_experts": 8}))
            sizes:
              e: 8
            rules: []
            <BLANKLINE>
        """
        values = read_config(config)
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        sizes = {name: _said(name, size, numbers, values) or size for name, size in self.sizes.items()}
        return replace(self, sizes=sizes)

    def resolve(
        self, shapes: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = ()
    ) -> list[ResolvedTensor]:
        """What the map makes of tensors, going from its side `from` to its side `to`.

        Args:
            shapes: the tensors: key and shape, in order.
            optimizer_keys: which of them belong to the optimizer part.

        Returns:
            The tensors under their new names, each with where it lies in the old ones.

        Raises:
            NamesError: the map does not fit the tensors; the message names the key.

        Example:
            >>> names = NameMap.from_mapping({"rules": [{"from": ["q", "k"], "to": "qk", "join": 0}]})
            >>> [(made.key, made.shape) for made in names.reversed().resolve({"qk": (6, 4), "other": (1,)})]
            [('q', (3, 4)), ('k', (3, 4)), ('other', (1,))]
        """
        sizes = {
            name: known.choices[0].value({}) for name, size in self.sizes.items() if (known := _said(name, size, {}))
        }
        return resolve(self, shapes, optimizer_keys=optimizer_keys, sizes=sizes)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _said(
    name: str, size: Size, numbers: Mapping[str, int], config: Mapping[str, object] = MappingProxyType({})
) -> Size | None:
    """The size as a number, if these numbers say it, which are those of the config."""
    for choice in size.choices:
        told = {word: config[word] for word in choice.names if config.get(word) is not None}
        odd = next((word for word, value in told.items() if not _is_number(value)), None)
        if odd is not None and len(told) == len(set(choice.names)):
            raise NamesError(
                f"the size `{name}` of the name map is {show(choice.text)}, and {show(odd)} of the config is no whole "
                f"number from 0: found {found(told[odd])}",
                hint=f"correct the config, or write a number as `{name}` under `sizes`",
            )
        if all(word in numbers for word in choice.names):
            try:
                return Size((Expression.parse(choice.value(numbers)),))
            except ValueError as error:
                raise NamesError(f"the size `{name}` of the name map: {error}") from None
    return None


NamesLike: TypeAlias = NameMap | str | os.PathLike[str] | Mapping[str, object]
"""What `names=` takes: a name map, the path of one, its mapping, or a preset; text may end in `:reverse`."""


def as_names(value: NamesLike, config: ConfigLike | None = None) -> NameMap:
    """The name map that an argument `names=` means.

    Args:
        value: a `NameMap`, the path of a file, a preset ("qwen3-mindspore", "megatron"), or a mapping. A path or a
            preset that ends in `:reverse` is reversed.
        config: the model's `config.json`, for a map that does not have its numbers yet.

    Raises:
        ArgumentError: it is none of these.

    Example:
        >>> as_names({"rules": []}).other
        'keep'
    """
    if isinstance(value, Mapping):
        value = NameMap.from_mapping(value)
    if isinstance(value, NameMap):
        return value.with_config(config) if config is not None and value.needs_config else value
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(f"names are a NameMap, a path, a preset or a mapping, found a {type(value).__name__}")
    text = os.fspath(value)
    if isinstance(value, str) and text.endswith(_REVERSE):
        return as_names(text.removesuffix(_REVERSE), config).reversed()
    if isinstance(value, str) and presets.is_preset(text):
        return NameMap.preset(text, config)
    if locate(text).suffix not in (".yaml", ".yml", ".json") and not locate(text).exists():
        raise presets.unknown(text)
    return as_names(NameMap.from_yaml(text), config)


def config_beside(path: str | os.PathLike[str]) -> Location | None:
    """The `config.json` in a folder, or beside a file; None if there is none."""
    location = locate(path)
    config = (location if location.is_folder() else location.parent) / _CONFIG_FILE
    return config if config.is_file() else None


def read_config(config: ConfigLike) -> Mapping[str, object]:
    """The content of a model's config.

    Raises:
        CheckpointNotFoundError: there is none.
        DamagedFileError: it is not JSON.
        ArgumentError: it is no object.
    """
    if isinstance(config, Mapping):
        return config
    path = locate(config)
    if path.is_folder():
        path /= _CONFIG_FILE
    if path.kind(follow_links=True) is None:
        raise CheckpointNotFoundError(f"there is no config at {show(str(path))}", path=str(path))
    value = read_json(path, _MAX_CONFIG_BYTES, follow_links=True)
    if not isinstance(value, dict):
        raise ArgumentError(f"{show(str(path))} is no config: expected a JSON object", path=str(path))
    return value
