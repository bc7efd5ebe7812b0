"""Reads the states of tensor-parallel ranks of vLLM. A layout says how several ranks divide the tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError, LayoutError, UnsupportedError
from reshard.formats.base import CheckpointData, UnplacedTensor
from reshard.formats.given_layout import given_layout
from reshard.formats.rank_replicas import HeldArray, ListedCopies, Replicas, copies_of
from reshard.formats.vllm import names
from reshard.layout.invert import check_local_shapes, global_shapes
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.formats.base import OpenOptions
    from reshard.layout.model import ModelLayout
    from reshard.storage.location import Location

_MOST_NAMED = 3
_HINT = (
    "the layout has a mesh of the axis `tp`, with the number of tensor-parallel ranks, and rules that say how vLLM "
    "divided each tensor: `cut: [tp]`, `cut: [null, tp]`, and `blocks` for the parts of a fused one"
)


@dataclass(frozen=True, kw_only=True)
class _RanksData(CheckpointData):
    """The files of all ranks.

    Attributes:
        files: numbers of the files of each rank.
        of_ranks: the tensors of several ranks, without a layout.
        replicas: the copies that ranks hold under the layout.
    """

    files: Mapping[int, list[int]]
    of_ranks: Mapping[str, UnplacedTensor] = field(default_factory=dict)
    replicas: Replicas

    def keys(self) -> Sequence[str] | None:
        """Those of a rank."""
        return list(self.of_ranks) or None

    def unplaced(self) -> Mapping[str, UnplacedTensor]:
        """All tensors of several ranks."""
        return self.of_ranks

    def unplaced_hint(self) -> str:
        """What vLLM needs."""
        return (
            "no file records how vLLM divided them: pass `strategy=` with a layout, `--strategy layout.yaml`, or use "
            "the model that vLLM read; `checkpoint.stored(rank)` reads the arrays of a rank"
        )

    def check(self, keys: Collection[str] | None) -> None:
        """Compare the copies that several ranks hold."""
        self.replicas.check(self.index, self.index.keys() if keys is None else keys)

    def rank_axes(self) -> Mapping[str, int]:
        """From the names of the files."""
        return {"tp": len(self.files)} if len(self.files) > 1 else {}

    def rank_files(self) -> Mapping[int, list[int]] | None:
        """The parts of each rank."""
        return self.files if len(self.files) > 1 else None

    def world_size(self) -> int:
        """From the names of the files."""
        return len(self.files)


def open_folder(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the files of all ranks.

    Raises:
        CheckpointNotFoundError: the file of a rank or a part is missing.
        DamagedFileError: files hold a tensor twice, or are of several saves; or as `reshard.open`.
        UnsupportedError: the weights are quantised.
        LayoutError, MismatchError: the layout is not that of the files.
        StorageError: as `reshard.open`.
    """
    found = names.rank_files(folder.names())
    if not found:
        raise CheckpointNotFoundError(f"{show(str(folder))} holds no files of ranks any more", path=str(folder))
    _check_numbers(folder, found)
    index = _core.Index()
    files: dict[int, list[int]] = {}
    held: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for rank, parts in sorted(found.items()):
        of_rank = held.setdefault(rank, {})
        for _, name in sorted(parts.items()):
            file = index.add_file(str(folder / name), method=options.method)
            files.setdefault(rank, []).append(file)
            for tensor in index.file_tensors(file):
                if tensor.name in of_rank:
                    raise DamagedFileError(
                        f"{show(str(folder / name))} and another part of its rank both hold {show(tensor.name)}",
                        path=str(folder / name),
                        key=tensor.name,
                        hint="they are of different saves",
                    )
                of_rank[tensor.name] = (tensor.dtype, tensor.shape)
    _check_tensors(folder, held)
    _refuse_quantised(folder, held[0])
    of_ranks: dict[str, UnplacedTensor] = {}
    replicas = Replicas(index, ListedCopies(), _HINT)
    layout = given_layout(options, _HINT)
    if layout is not None:
        replicas = _join(folder, index, files, held, layout)
    elif len(files) == 1:
        for file in range(index.n_files):
            index.add_whole_file(file)
    else:
        for key, (dtype, _) in next(iter(held.values())).items():
            of_ranks[key] = UnplacedTensor(dtype, tuple(dict.fromkeys(tensors[key][1] for tensors in held.values())))
    return _RanksData(
        traits=names.TRAITS,
        path=folder,
        index=index,
        method=options.method,
        files=files,
        of_ranks=of_ranks,
        replicas=replicas,
    )


def _join(
    folder: Location,
    index: _core.Index,
    files: Mapping[int, list[int]],
    held: Mapping[int, Mapping[str, tuple[str, tuple[int, ...]]]],
    layout: ModelLayout,
) -> Replicas:
    """Add the whole tensors that the ranks hold under a layout; returns the copies."""
    n_ranks = math.prod(layout.mesh.values())
    if n_ranks != len(held):
        raise LayoutError(
            f"{show(str(folder))} has files of {counted(len(held), 'rank')}, the mesh of the layout {n_ranks}",
            path=str(folder),
            hint="the mesh is the axis `tp` with the number of tensor-parallel ranks",
        )
    local: dict[str, dict[int, tuple[int, ...]]] = {
        key: {rank: tensors[key][1] for rank, tensors in held.items()} for key in held[0]
    }
    bound = layout.bind(global_shapes(layout, local, {}), strict=True)
    check_local_shapes(bound, local)
    file_of = {
        (tensor.name, rank): file
        for rank, of_rank in files.items()
        for file in of_rank
        for tensor in index.file_tensors(file)
    }
    copies = ListedCopies()
    for key, shapes in local.items():
        of_key, dtype = bound.layouts[key], held[0][key][0]
        stored, arrays = [], []
        for rank, shape in shapes.items():
            tiles = of_key.tiles(rank)
            file = file_of[key, rank]
            stored.append(_core.StoredArray(file, key, shape, tiles))
            arrays.append((HeldArray(rank, file, key, shape, 0, shape, dtype), tiles))
        index.add_tiles(key, dtype, of_key.shape, stored)
        copies[key] = copies_of(arrays, of_key.shape)
    index.check_coverage()
    return Replicas(index, copies, _HINT)


def _check_numbers(folder: Location, found: Mapping[int, Mapping[int, str]]) -> None:
    """Refuse files of which some before the last are missing: no file records how many there are."""
    of_ranks: Iterable[str] = (names.file_name(rank, 0) for rank in _missing(found))
    of_parts = (names.file_name(rank, part) for rank, parts in found.items() for part in _missing(parts))
    missing = list(itertools.islice(itertools.chain(of_ranks, of_parts), _MOST_NAMED))
    if missing:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds files of vLLM up to rank {max(found)}; missing: {listed(map(show, missing))}",
            path=str(folder / missing[0]),
            hint="copy the files of all ranks into one folder",
        )


def _missing(numbers: Mapping[int, object]) -> Iterable[int]:
    return (number for number in range(max(numbers) + 1) if number not in numbers)


def _check_tensors(folder: Location, held: Mapping[int, Mapping[str, tuple[str, tuple[int, ...]]]]) -> None:
    """Refuse ranks that lack tensors of others: then a part is missing, or they are of several saves."""
    every: dict[str, tuple[int, str]] = {}
    for rank, tensors in held.items():
        for key, (dtype, _) in tensors.items():
            at, other = every.setdefault(key, (rank, dtype))
            if other != dtype:
                raise DamagedFileError(
                    f"{show(str(folder))}: {show(key)} is {dtype} on rank {rank}, and {other} on rank {at}",
                    path=str(folder),
                    key=key,
                    hint="the files are of different saves",
                )
    for rank, tensors in held.items():
        lacking = next((key for key in every if key not in tensors), None)
        if lacking is not None:
            raise CheckpointNotFoundError(
                f"{show(str(folder))}: rank {rank} holds no {show(lacking)}, which rank {every[lacking][0]} holds",
                path=str(folder),
                key=lacking,
                hint="a part of the rank is missing, or the files are of different saves",
            )


def _refuse_quantised(folder: Location, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuse weights whose values cannot be told from what is stored."""
    quantised = next((key for key, (dtype, _) in tensors.items() if "weight" in key and dtype not in names.PLAIN), None)
    if quantised is not None:
        raise UnsupportedError(
            f"{show(str(folder))}: {show(quantised)} is {tensors[quantised][0]}: vLLM arranges quantised weights for "
            "its kernels before it saves them, and no file records how",
            path=str(folder),
            key=quantised,
            hint="use the model that vLLM read; the files can be opened one by one",
        )
