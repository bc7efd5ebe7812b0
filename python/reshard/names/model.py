"""`NameMap`, the value of `names=`, and the functions that create one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Self, TypeAlias, TypeGuard

from reshard.documents.fields import found
from reshard.documents.strict_json import read_json
from reshard.documents.strict_yaml import read_yaml
from reshard.errors import ArgumentError, CheckpointNotFoundError, NamesError
from reshard.names import presets
from reshard.names.config_fields import config_fields
from reshard.names.file import NamesFile, Size
from reshard.names.resolve import ResizedTensor, ResolvedTensor, resized_tensors, resolve
from reshard.names.sizes import Expression
from reshard.storage.location import Location, locate
from reshard.values.arguments import checked
from reshard.values.words import show

_MAX_CONFIG_BYTES = 16 << 20
_CONFIG_FILE = "config.json"
_REVERSE = ":reverse"

ConfigLike: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
"""A `config.json`, a folder with one, or its content."""


class NameMap(NamesFile):
    """Converts the tensors of one naming to another: renames, fuses, splits, stacks, transposes and ties them.

    `reshard.names.file` describes the file format. `str` of a name map is such a file.

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
            config: the model's `config.json`, for the sizes that the map takes from it.

        Raises:
            CheckpointNotFoundError: the file does not exist.
            NamesError: the file is not YAML, or not a name map; the message names file, line and field.
            DamagedFileError: the config is not JSON.

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
        """The map from Hugging Face names to those of MindSpore Transformers (mcore), Megatron-core or GGUF.

        Unknown keys are refused.

        Args:
            name: "<family>-<naming>", such as "qwen3-mindspore" or "mixtral-megatron"; or only the naming, with the
                family from the config.
            config: the model's `config.json`, for sizes of heads and numbers of experts and layers.

        Raises:
            ArgumentError: there is no such preset, or it needs a config.
            CheckpointNotFoundError, DamagedFileError: the config cannot be read.

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
        """Whether the map needs a config for its sizes."""
        return any(choice.names for size in self.sizes.values() for choice in size.choices)

    @checked
    def with_config(self, config: ConfigLike) -> Self:
        """The same map with the sizes from a model's config as numbers. Sizes that are not in the config do not change.

        Raises:
            CheckpointNotFoundError, DamagedFileError: the config cannot be read.
            ArgumentError: it is no config; or several parts of the model have the field of a size, with other values.
            NamesError: a size in the config is not a non-negative integer; the message names the size and the field.

        Example:
            >>> names = NameMap.from_mapping({"sizes": {"e": "num_experts"}, "rules": []})
            >>> print(names.with_config({"num_experts": 8}))
            sizes:
              e: 8
            rules: []
            <BLANKLINE>
        """
        words = {word for size in self.sizes.values() for choice in size.choices for word in choice.names}
        values = config_fields(read_config(config), sorted(words))
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        sizes = {name: _size_from(name, size, numbers, values) or size for name, size in self.sizes.items()}
        return replace(self, sizes=sizes)

    def resolve(
        self, shapes: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = ()
    ) -> list[ResolvedTensor]:
        """Apply the map to tensors, from side `from` to side `to`.

        Args:
            shapes: the shape of each tensor by key, in elements.
            optimizer_keys: the keys of optimizer state.

        Returns:
            The tensors under their new names, each with its part map in the old ones.

        Raises:
            NamesError: the map does not fit the tensors; the message names the key.

        Example:
            >>> names = NameMap.from_mapping({"rules": [{"from": ["q", "k"], "to": "qk", "join": 0}]})
            >>> [(tensor.key, tensor.shape) for tensor in names.reversed().resolve({"qk": (6, 4), "other": (1,)})]
            [('q', (3, 4)), ('k', (3, 4)), ('other', (1,))]
        """
        return resolve(self, shapes, optimizer_keys=optimizer_keys, sizes=self._numbers())

    def resized(
        self, shapes: Mapping[str, tuple[int, ...]], *, optimizer_keys: Collection[str] = ()
    ) -> list[ResizedTensor]:
        """The tensors that the map pads or trims, from side `from` to side `to`.

        Args:
            shapes: the shape of each tensor by key, in elements.
            optimizer_keys: the keys of optimizer state.

        Raises:
            NamesError: the map does not fit the tensors; the message names the key.

        Example:
            >>> names = NameMap.from_mapping({"rules": [{"from": "w", "to": "w", "pad": 0, "to_size": 8}]})
            >>> [(one.key, one.n_before, one.n_after) for one in names.resized({"w": (6, 4), "v": (6, 4)})]
            [('w', 6, 8)]
        """
        return resized_tensors(self, shapes, optimizer_keys=optimizer_keys, sizes=self._numbers())

    def _numbers(self) -> dict[str, int]:
        """The sizes that are known."""
        found = ((name, _size_from(name, size, {})) for name, size in self.sizes.items())
        return {name: known.choices[0].value({}) for name, known in found if known is not None}


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _size_from(
    name: str, size: Size, numbers: Mapping[str, int], config: Mapping[str, object] = MappingProxyType({})
) -> Size | None:
    """The size as a number, if it can be computed from these numbers of the config; else None."""
    for choice in size.choices:
        values = {word: config[word] for word in choice.names if config.get(word) is not None}
        invalid = next((word for word, value in values.items() if not _is_number(value)), None)
        if invalid is not None and len(values) == len(set(choice.names)):
            raise NamesError(
                f"the size `{name}` of the name map is {show(choice.text)}, and {show(invalid)} of the config is not a "
                f"non-negative integer: found {found(values[invalid])}",
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
    """The name map for the value of an argument `names=`.

    Args:
        value: a `NameMap`, the path of a file, a preset ("qwen3-mindspore", "megatron"), or a mapping. A path or a
            preset that ends in `:reverse` is reversed.
        config: the model's `config.json`, for a map that needs it.

    Raises:
        ArgumentError: the value is none of these.

    Example:
        >>> as_names({"rules": []}).other
        'keep'
    """
    if isinstance(value, Mapping):
        value = NameMap.from_mapping(value)
    if isinstance(value, NameMap):
        return value.with_config(config) if config is not None and value.needs_config else value
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(f"`names` is a {type(value).__name__}, expected a NameMap, a path, a preset or a mapping")
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
        CheckpointNotFoundError: the file does not exist.
        DamagedFileError: it is not JSON.
        ArgumentError: it is not a JSON object.
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
        raise ArgumentError(f"{show(str(path))} is not a config: expected a JSON object", path=str(path))
    return value
