"""The quantised weights among the tensors of an index."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reshard.quantised.config import METHODS, Said, said
from reshard.quantised.kinds import KINDS
from reshard.quantised.recognise import may_be_quantised, recognise

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
    """
    if not any(KINDS[one.kind].named for one in weights.values()):
        return {}
    found: dict[str, str] = {}
    names: list[str] = []
    for file in range(index.n_files):
        metadata = index.file_metadata(file) or {}
        text = metadata.get(_NAMES)
        if text is not None:
            names += json.loads(text)
            found |= {name: metadata[name] for name in json.loads(text) if name in metadata}
    return {**found, _NAMES: json.dumps(list(dict.fromkeys(names)))}
