"""Tied names: a tensor that is stored once and has further names, recorded in the header of its file.

`reshard.torch.save_file` writes them, as JSON in the metadata `reshard.aliases`. Each further name is a key of the
checkpoint that reads the same bytes. Other readers find the stored name only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reshard.documents.strict_json import parse_json
from reshard.errors import DamagedFileError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard import _core

ALIASES = "reshard.aliases"
"""Key in the header's metadata. Its value is a JSON mapping of each further name to the stored name."""

_MAX_BYTES = 4 << 20
_MAX_ALIASES = 1 << 16


def aliases_text(aliases: Mapping[str, str]) -> str | None:
    """The text for a header; None if they exceed the limits of the reader. Then each name must be stored in full.

    Example:
        >>> aliases_text({"lm_head.weight": "embed.weight"})
        '{"lm_head.weight": "embed.weight"}'
    """
    text = json.dumps(dict(aliases), sort_keys=True)
    return text if len(aliases) <= _MAX_ALIASES and len(text) <= _MAX_BYTES else None


def add_aliases(index: _core.Index) -> dict[str, str]:
    """Add the further names that the headers record to an index of whole tensors.

    Returns:
        The stored name of each further name.

    Raises:
        DamagedFileError: the text is too long or is not such a mapping; a further name is also a stored name or occurs
            twice; or its target is not a stored name.
    """
    aliases: dict[str, str] = {}
    for file in range(index.n_files):
        text = (index.file_metadata(file) or {}).get(ALIASES)
        if text is None:
            continue
        path = str(index.file_path(file))
        for alias, name in _parsed(text, path).items():
            if not isinstance(name, str) or name not in index:
                found = show(name) if isinstance(name, str) else f"a {type(name).__name__}"
                raise _damaged(path, f"has {found} for {show(alias)}, expected the name of a stored tensor")
            if alias in index or alias in aliases or alias == "__metadata__":
                raise _damaged(path, f"has {show(alias)} as a further name, which is the name of another tensor")
            aliases[alias] = name
    if len(aliases) > _MAX_ALIASES:
        raise _damaged(str(index.file_path(0)), f"has {len(aliases)} names, more than {_MAX_ALIASES}")
    for alias, name in aliases.items():
        dtype, shape = index.info(name)
        index.add_tiles(alias, dtype, shape, index.stored(name))
    return aliases


def _parsed(text: str, path: str) -> dict[str, object]:
    if len(text) > _MAX_BYTES:
        raise _damaged(path, f"has {len(text)} characters, more than {_MAX_BYTES}")
    found = parse_json(text.encode(), f"{path}: {ALIASES}")
    if not isinstance(found, dict):
        raise _damaged(path, f"is a {type(found).__name__}, expected a mapping")
    return found


def _damaged(path: str, what: str) -> DamagedFileError:
    return DamagedFileError(
        f"{show(path)}: the metadata `{ALIASES}` {what}",
        path=path,
        hint=f"write the file again with `reshard.torch.save_file`, or without `{ALIASES}`",
    )
