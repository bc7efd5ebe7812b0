"""The quantised weights among the tensors of an index."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from reshard.documents.strict_json import parse_json
from reshard.errors import DamagedFileError
from reshard.quantised.config import METHODS, Said, said
from reshard.quantised.kinds import KINDS
from reshard.quantised.recognise import may_be_quantised, recognise
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard import _core
    from reshard.quantised.kinds import Quantised
    from reshard.quantised.recognise import ReadBytes
    from reshard.storage.location import Location

_NAMES = "tensor_names"  # of torchao: all tensors that the file describes


def quantised_in(
    index: _core.Index, keys: Sequence[str], folder: Location | None, *, is_whole: bool, read: ReadBytes
) -> Mapping[str, Quantised]:
    """The quantised weights among some tensors of an index, by name.

    Args:
        index: the index.
        keys: the tensors.
        folder: the folder of the model with its config.json; None: there is none.
        is_whole: whether these are all tensors of the model.
        read: gives the bytes of a small tensor.

    Raises:
        MismatchError, UnsupportedError: as `recognise`.
    """
    of = said(folder) if folder is not None else Said()
    if not may_be_quantised(keys) and of.method not in METHODS:
        return {}
    headers: dict[str, str] = {}
    if any(key.endswith("_qdata") for key in keys):
        for file in range(index.n_files):
            headers |= index.file_metadata(file) or {}
    return recognise({key: index.info(key) for key in keys}, of, read=read, headers=headers, is_whole=is_whole)


def described(weights: Mapping[str, Quantised], index: _core.Index) -> dict[str, str]:
    """The entries of `__metadata__` that describe weights; empty for kinds that need none.

    Args:
        weights: the quantised weights of an index, by name.
        index: the index.

    Raises:
        DamagedFileError: the header of a file lists no names.
    """
    if not any(KINDS[one.kind].named for one in weights.values()):
        return {}
    found: dict[str, str] = {}
    names: list[str] = []
    for file in range(index.n_files):
        metadata = index.file_metadata(file) or {}
        if (text := metadata.get(_NAMES)) is not None:
            of_file = _names_in(text, str(index.file_path(file)))
            names += of_file
            found |= {name: metadata[name] for name in of_file if name in metadata}
    return {**found, _NAMES: json.dumps(list(dict.fromkeys(names)))}


def _names_in(text: str, path: str) -> list[str]:
    with contextlib.suppress(DamagedFileError):
        names = parse_json(text.encode(), _NAMES)
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    raise DamagedFileError(
        f"the header of {show(path)} has {show(_NAMES)} {show(text)}, expected a list of the names of tensors",
        path=path,
        key=_NAMES,
        hint="fetch the file again",
    )
