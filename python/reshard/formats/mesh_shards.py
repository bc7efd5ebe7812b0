"""Shards of tensors in files of `torch.save`, of each rank one, and whole tensors.

Of a DTensor, a tensor of a device mesh, a file holds the local tensor of its rank, the mesh with the coordinates of the
rank, and a placement for each axis of the mesh. The part that a rank holds is computed as torch computes it, and its
shape has to be that of the stored local tensor.

Of a ShardedTensor, as FSDP1 saves it without a mesh, a file holds the regions of its rank, and lists the regions of all
ranks. All ranks have to list the same ones, and their files have to hold each of them.

The core decodes the files (`_core.read_torch_ranks`); nothing in them is executed.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from reshard._core import TensorKind
from reshard.errors import UnsupportedError
from reshard.formats.rank_replicas import Replicas
from reshard.formats.run_state import is_optimizer
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard import _core
    from reshard._core import StoredArray

_log = logging.getLogger("reshard")

_FLAT = frozenset(("_flat_param", "flat_param"))
"""What FSDP1 calls the parameters of a module in one tensor."""


def is_flat(key: str) -> bool:
    """Whether a tensor is the parameters of a module of FSDP1, one after the other, or belongs to them.

    Example:
        >>> is_flat("layers.0._flat_param"), is_flat("layers.0.weight")
        (True, False)
    """
    return "flat_param" in key and not _FLAT.isdisjoint(key.split("."))


def refuse_flat(tensors: Sequence[_core.RankTensor], *, is_alone: bool = False) -> None:
    """Refuse flat parameters: each rank has a part of them, and no file says where a parameter begins.

    Args:
        tensors: those of the files, without a prefix. State of an optimizer is let through.
        is_alone: the name of the file does not say that a rank wrote it. Then only ShardedTensors, and tensors of one
            dim that are called as FSDP1 calls its parameters, are refused. For others there is a warning.

    Raises:
        UnsupportedError: there are some.
    """
    flat = [one for one in tensors if is_flat(one.key) and not is_optimizer(one.key)]
    certain = [
        one
        for one in flat
        if not is_alone
        or one.kind is TensorKind.SHARDED_TENSOR
        or (len(one.local) == 1 and one.key.rpartition(".")[2] in _FLAT)
    ]
    if not certain:
        if flat:
            _log.warning(
                "%s: %s is read as an ordinary tensor: FSDP1 gives such names to the parameters of a module in one "
                "tensor",
                flat[0].path,
                show(flat[0].key),
            )
        return
    raise UnsupportedError(
        f"{show(certain[0].path)}: {show(certain[0].key)} holds the parameters of a module of FSDP1 one after the "
        "other, or the part of one rank of them, and no file says where each begins",
        path=certain[0].path,
        key=certain[0].key,
        hint="save the state dict under `StateDictType.SHARDED_STATE_DICT` or `FULL_STATE_DICT`, not under "
        "`LOCAL_STATE_DICT`",
    )


def add_tensors(
    index: _core.Index, tensors: Sequence[tuple[_core.RankTensors, Collection[str]]], hint: str
) -> Replicas:
    """Add the whole tensors of the shards of all ranks to an index. Tensors that are no shards are copies.

    Args:
        index: with the files.
        tensors: the tensors of files of all ranks, and the keys of those that are added.
        hint: what to do if the ranks do not hold all of a tensor.

    Returns:
        The copies that several ranks hold, to be compared before they are read.

    Raises:
        DamagedFileError: ranks describe a tensor differently.
        CoverageError: the shards of a tensor leave a hole, or overlap.
    """
    holder = {key: of_files for of_files, keys in tensors for key in of_files.add_to(index, list(keys), hint)}
    return Replicas(
        index,
        _Copies(holder),
        "the ranks should hold copies: the files are of different saves, or a rank went on without the others",
    )


class _Copies:
    """The copies of each tensor, which the core finds when it compares them: a run of 256 ranks can have a million."""

    def __init__(self, holder: Mapping[str, _core.RankTensors]) -> None:
        self._holder = holder

    def __contains__(self, key: object) -> bool:
        return key in self._holder

    def __len__(self) -> int:
        return len(self._holder)

    def keys_of(self, stored: StoredArray) -> Collection[str]:
        """As `rank_replicas.Copies.keys_of`: of several parts in a file, each has a number."""
        return [key for key in (stored.name, stored.name.rpartition("[")[0]) if key in self._holder]

    def different(self, index: _core.Index, keys: Sequence[str]) -> tuple[str, int, int] | None:
        """As `rank_replicas.Copies.different`."""
        for holder, of_holder in itertools.groupby(keys, self._holder.__getitem__):
            found = holder.first_different(index, list(of_holder))
            if found is not None:
                key, *ranks = found
                return key, ranks[0], ranks[1]
        return None
