"""Reads GGUF files. A tensor of blocks is a quantised weight, whose values are computed when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError, UnsupportedError
from reshard.formats.base import CheckpointData
from reshard.formats.gguf import names
from reshard.quantised.kinds import Quantised
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.storage.location import Location

_MOST_PARTS = 10_000
_MOST_NAMED = 5


class _Blocks(NamedTuple):
    """How the elements of a tensor are stored."""

    type: str
    number: int
    n_bytes: int
    shape: tuple[int, ...]
    stored: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _GgufData(CheckpointData):
    """Files with tensors of blocks, by their stored names."""

    blocks: Mapping[str, _Blocks] = field(default_factory=dict)

    def quantised(self, keys: Collection[str]) -> Mapping[str, Quantised]:
        found = {}
        for key in keys:
            stored = self.index.stored(key)
            one = self.blocks.get(stored[0].name) if len(stored) == 1 else None
            if one is not None and self.index.info(key) == ("U8", one.stored):
                values = {"type": one.type, "number": one.number}
                steps = {len(one.shape) - 1: one.n_bytes}
                found[key] = Quantised(key, "gguf-blocks", one.shape, {"weight": key}, {}, steps, values=values)
        return found


def open_gguf(path: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open a GGUF file, one part of a divided model with all others, or a folder with one model.

    Args:
        path: a file or folder.
        method: how files are read.

    Raises:
        CheckpointNotFoundError: a part is missing.
        DamagedFileError: a file is damaged, or the parts do not belong together.
        UnsupportedError: a folder holds several models, or a file has an unknown type.
        StorageError: as `reshard.open`.
    """
    files = _files(path)
    index = _core.Index()
    of_model: dict[str, object] = {}
    blocks: dict[str, _Blocks] = {}
    heads = dict[str, tuple[int, ...]]()
    for file in files:
        values, tensors = _core.read_gguf(str(file))
        of_model = {**values, **of_model}  # the first part has those of the model
        number = index.add_gguf_file(str(file), method=method)
        for one in tensors:
            name, shape = one.name, one.shape
            if name in heads:
                raise DamagedFileError(
                    f"{show(str(file))} and a part before it both hold {show(name)}", path=str(file), key=name
                )
            heads[name] = shape
            index.add_whole(name, number)
            if one.n_values > 1:
                stored = (*shape[:-1], shape[-1] // one.n_values * one.n_bytes)
                blocks[name] = _Blocks(one.type, one.type_number, one.n_bytes, shape, stored)
    if not heads:
        raise CheckpointNotFoundError(
            f"{show(str(path))} is a GGUF file without tensors, such as a vocabulary of llama.cpp", path=str(path)
        )
    _check_count(files, of_model, len(heads))
    config = names.config_of(of_model)
    n_heads, query = config.get("num_attention_heads"), heads.get("blk.0.attn_q.weight")
    if query and isinstance(n_heads, int) and n_heads and query[0] % n_heads == 0:
        config["head_dim"] = query[0] // n_heads
    return _GgufData(
        traits=names.TRAITS,
        path=path,
        index=index,
        method=method,
        blocks=blocks,
        naming="gguf",
        config=config,
        derived=tuple(name for name in heads if names.DERIVED.fullmatch(name)),
    )


def _files(path: Location) -> list[Location]:
    if not path.is_folder():
        part = names.part_of(path.name)
        return [path] if part is None else _parts(path.parent, part[0], part[2])
    models = {(None, name) if (part := names.part_of(name)) is None else (part[2], part[0]) for name in _names(path)}
    if len(models) > 1:
        titles = sorted(show(name) for _, name in models)
        raise UnsupportedError(
            f"{show(str(path))} holds several GGUF models: {listed(titles, _MOST_NAMED)}",
            path=str(path),
            hint="open one of them by the path of its file, or of its first part",
        )
    [(count, name)] = models
    return [path / name] if count is None else _parts(path, name, count)


def _names(folder: Location) -> list[str]:
    return [name for name in folder.names() if name.endswith(names.SUFFIX)]


def _parts(folder: Location, model: str, count: int) -> list[Location]:
    there = set(folder.names())
    if not 1 <= count <= _MOST_PARTS:
        raise DamagedFileError(f"{show(str(folder))}: the names of {show(model)} count {count} parts", path=str(folder))
    wanted = names.part_names(model, count)
    absent = [name for name in wanted if name not in there]
    if absent:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds {count - len(absent)} of {count} parts of {show(model)}; missing: "
            f"{listed(map(show, absent), _MOST_NAMED, n_items=len(absent))}",
            path=str(folder / absent[0]),
            hint="the download or copy of the model is incomplete",
        )
    return [folder / name for name in wanted]


def _check_count(files: list[Location], values: Mapping[str, object], n_tensors: int) -> None:
    """Refuse parts whose header counts other parts or tensors."""
    count, total = values.get("split.count"), values.get("split.tensors.count")
    if isinstance(count, int) and count not in (0, len(files)):
        raise DamagedFileError(
            f"{show(str(files[0]))} is one of {count} parts by its header, and of {len(files)} by its name",
            path=str(files[0]),
            hint=f"name all parts `<model>-<number>-of-{count:05}{names.SUFFIX}`",
        )
    if isinstance(total, int) and total not in (0, n_tensors):
        raise DamagedFileError(
            f"{show(str(files[0]))} counts {total} tensors in all parts, and they hold {n_tensors}", path=str(files[0])
        )
