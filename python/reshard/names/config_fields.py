"""Fields of a model's config.json that may lie in the config of a part, such as `text_config.vocab_size`.

A model of several modalities has a config for each of its parts, and the number of rows is that of its text model.
transformers is asked which part this is, where it is installed and knows the model. Otherwise the file says it, if only
one part has the field, or all have the same value.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_MAX_DEPTH = 8


def config_fields(config: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """The values of fields of a config, or of that of its text model.

    Args:
        config: the content of a config.json.
        names: the fields.

    Returns:
        The values of those that are there.

    Raises:
        ArgumentError: two parts have a field with different values, and it is not known which is the text model.

    Example:
        >>> config_fields({"audio": {"rate": 8}, "text": {"vocab_size": 100}}, ["vocab_size", "hidden_size"])
        {'vocab_size': 100}
    """
    parts = [
        (path, part) for path, part in _parts(config) if "model_type" in part or any(name in part for name in names)
    ]
    if not parts:
        return {name: config[name] for name in names if name in config}
    texts = _text_configs(config)
    found: dict[str, object] = {}
    for name in names:
        values = {path: value for path, one in texts.items() if (value := getattr(one, name, None)) is not None} or {
            path: part[name] for path, part in [("", config), *parts] if part.get(name) is not None
        }
        if len({repr(value) for value in values.values()}) > 1:
            several = listed(
                f"{show(f'{path}.{name}' if path else name)} is {value!r}" for path, value in values.items()
            )
            raise ArgumentError(
                f"several parts of the model have `{name}` in its config: {several}",
                key=name,
                hint="write the number; or give the config of one part as a mapping, `config=`",
            )
        if values:
            found[name] = next(iter(values.values()))
    return found


def _parts(config: Mapping[str, object], path: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The configs inside another one, each with where it is."""
    for name, value in config.items():
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            where = f"{path}.{name}" if path else name
            yield where, value
            yield from _parts(value, where, depth + 1)


def _text_configs(config: Mapping[str, object]) -> dict[str, Any]:
    """The configs of the text models by transformers, each with where it is; empty: it is not known.

    An encoder and a decoder may be two text models.
    """
    try:
        library: Any = importlib.import_module("transformers")
        made = library.CONFIG_MAPPING[config.get("model_type")].from_dict(dict(config))
        if made.is_encoder_decoder and any(hasattr(made, name) for name in ("encoder", "decoder")):
            return {name: getattr(made, name) for name in ("encoder", "decoder") if hasattr(made, name)}
        found = {
            _where(made, one): one for one in (made.get_text_config(decoder=True), made.get_text_config(encoder=True))
        }
    except Exception:  # noqa: BLE001  not installed, another model, or one with several text models: the file says it
        return {}
    return {where: one for where, one in found.items() if where} or {"": made}


def _where(made: Any, part: Any) -> str:
    """The name of the field with the config of a part; empty: it is the whole one."""
    if type(part) is type(made):
        return ""
    return next((name for name, value in vars(made).items() if value is part), type(part).__name__)
