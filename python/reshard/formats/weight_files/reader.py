"""Reads files of whole weights: a set in a folder, those that an index or a caller lists, folders of components."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, DamagedFileError, UnsupportedError
from reshard.formats import mesh_shards, torch_head
from reshard.formats import weight_map as maps
from reshard.formats.aliases import add_aliases
from reshard.formats.base import CheckpointData, Match
from reshard.formats.huggingface.reader import HUGGINGFACE
from reshard.formats.rank_file import check_no_int4
from reshard.formats.torch_file.format import TORCH_FILE
from reshard.formats.weight_files import names
from reshard.storage.location import locate
from reshard.storage.names import component_fault
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.formats.base import OpenOptions
    from reshard.formats.rank_replicas import Replicas
    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_MAX_NAMED = 3
_MAX_PIPELINE_BYTES = 1 << 20
_MAX_COMPONENTS = 1000
_CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class _FilesData(CheckpointData):
    """Several files.

    Attributes:
        replicas: arrays of the files of several ranks that are read as copies of each other.
    """

    replicas: Replicas | None = None

    def check(self, keys: Collection[str] | None) -> None:
        """Compare the copies that several ranks hold."""
        if self.replicas is not None:
            self.replicas.check(self.index, self.index.keys() if keys is None else keys)


def open_folder(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the set of weight files in a folder; where there are several, the one without a variant.

    Raises:
        CheckpointNotFoundError: numbered files are missing.
        UnsupportedError: there are several sets, and none of them is the one without a variant.
        DamagedFileError, StorageError: as `reshard.open`.
    """
    chosen, others = _chosen(folder)
    if others:
        _log.warning(
            "%s: %s is read; not read: %s",
            folder,
            show(chosen.title),
            listed((show(one.title) for one in others), _MAX_NAMED),
        )
    if chosen.index is not None and chosen.single is None:
        named = {name for one in others for name in one.files}
        return replace(open_index(folder / chosen.index, method, named=named), path=folder)
    files = [chosen.single] if chosen.single is not None else _numbered(folder, chosen)
    index, replicas = _index_of([folder / name for name in files], method)
    return _data(folder, index, method, base=chosen.base, replicas=replicas)


def _chosen(folder: Location) -> tuple[names.FileSet, list[names.FileSet]]:
    """The set that is read, and those that are not."""
    sets = names.sets_in(folder)
    if not sets:
        raise CheckpointNotFoundError(f"{show(str(folder))} holds no weight files any more", path=str(folder))
    bases = {one.base for one in sets}
    variants = {one.variant for one in sets}
    if len(bases) > 1 or (len(variants) > 1 and "" not in variants):
        titles = [show(one.title) for one in sets]
        raise UnsupportedError(
            f"{show(str(folder))} holds several sets of weights: {listed(titles)}",
            path=str(folder),
            hint=f"open one of them by the path of its file or of its index, or by a pattern for its files, such as "
            f"{show(str(folder / sets[0].title))}",
        )
    # Those without a variant come first, and safetensors before `.bin`.
    return sets[0], sets[1:]


def _numbered(folder: Location, found: names.FileSet) -> list[str]:
    """The files of a set without an index, in the order of their numbers."""
    if len(found.numbered) > 1:
        counts = listed([str(count) for count in sorted(found.numbered)])
        raise DamagedFileError(
            f"{show(str(folder))} holds files of several saves: the names {show(found.title)} count {counts} files",
            path=str(folder),
            hint="remove the files of the other save, or give a pattern for the files of one of them",
        )
    [(count, files)] = found.numbered.items()
    check_numbers(folder, files, count)
    return [files[number] for number in sorted(files)]


def check_numbers(folder: Location, files: Mapping[int, str], count: int) -> None:
    """Refuse numbered files of which some are missing.

    Args:
        folder: their folder, for errors.
        files: their names, by number.
        count: how many there are by their names.

    Raises:
        CheckpointNotFoundError: files are missing.
        DamagedFileError: a number is not from 1 to the count.
    """
    wrong = next((name for number, name in files.items() if not 1 <= number <= count), None)
    if wrong is not None:
        raise DamagedFileError(
            f"{show(str(folder / wrong))}: its number is not from 1 to {count}", path=str(folder / wrong)
        )
    absent = names.missing(files, count, _MAX_NAMED)
    if absent:
        like = next(iter(files.values()))
        which = [show(names.numbered_like(like, number)) for number in absent]
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds {len(files)} of {count} files of weights; missing: "
            f"{listed(which, _MAX_NAMED, n_items=count - len(files))}",
            path=str(folder / names.numbered_like(like, absent[0])),
            hint="the download or copy of the model is incomplete",
        )


def open_index(listing: Location, method: _core.ReadMethod, *, named: Collection[str] = ()) -> CheckpointData:
    """Open the files that an index lists.

    Args:
        listing: the index.
        method: how files are read.
        named: files of which a warning says that they are not read.

    Raises:
        CheckpointNotFoundError, DamagedFileError, StorageError: as `reshard.open`.
    """
    folder = listing.parent
    file_of = maps.read(listing)
    index = _core.Index()
    maps.add_tensors(index, folder, file_of, lambda file: _add(index, file, method))
    maps.add_unlisted(index, folder, listing.name, add=lambda index, file: _add(index, file, method), named=named)
    parsed = names.parse_index(listing.name)
    return _data(listing, index, method, listing=listing, base=None if parsed is None else parsed[0])


def open_files(files: Sequence[Location], path: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the tensors of several files as one checkpoint.

    Args:
        files: safetensors files, or files of `torch.save` with a dict of tensors.
        path: what is opened, for messages.
        method: how files are read.

    Raises:
        CheckpointNotFoundError: a file is missing, or numbered files of which all others are there.
        DamagedFileError: two files hold one tensor with different content; or a file is damaged.
        UnsupportedError: one of them is a folder.
    """
    for file in files:
        found = file.found()
        if found is None:
            raise CheckpointNotFoundError(f"there is nothing at {show(str(file))}", path=str(file))
        if found != "file":
            raise UnsupportedError(
                f"{show(str(file))} is no file: several paths are one checkpoint only if all are weight files",
                path=str(file),
                hint="open folders one by one",
            )
    by_folder: dict[str, list[str]] = {}
    for file in files:
        by_folder.setdefault(str(file.parent), []).append(file.name)
    for folder, of_folder in by_folder.items():
        for one in names.file_sets(of_folder):
            for count, numbered in one.numbered.items():
                check_numbers(locate(folder), numbered, count)
    index, replicas = _index_of(files, method)
    return _data(path, index, method, replicas=replicas)


def _index_of(files: Sequence[Location], method: _core.ReadMethod) -> tuple[_core.Index, Replicas | None]:
    """The index of all tensors of some files, and the copies in those of several ranks."""
    index = _core.Index()
    numbers = [_add(index, str(path), method) for path in files]
    of_torch = [rank for rank, path in enumerate(files) if _is_of_torch(path)]
    tensors = _core.read_torch_ranks([(str(files[rank]), numbers[rank], rank) for rank in of_torch])
    place = {rank: n for n, rank in enumerate(of_torch)}
    holder: dict[str, int] = {}
    shards: dict[str, str] = {}  # with the path of a file that has them
    for rank, (path, file) in enumerate(zip(files, numbers, strict=True)):
        check_no_int4(index, file)
        if rank in place:
            held = tensors.tensors(place[rank])
            mesh_shards.refuse_flat(held, is_alone=True)
            keys = [one.key for one in held]
            if any(one.kind is not _core.TensorKind.TENSOR for one in held):
                shards |= dict.fromkeys(keys, str(path))
                continue
        else:
            keys = [one.name for one in index.file_tensors(file)]
        for key in keys:
            first = holder.setdefault(key, file)
            if first == file:
                index.add_whole(key, file)
                continue
            paths = [str(index.file_path(first)), str(path)]
            if not maps.is_equal(paths, key, lambda alone, one: _add(alone, one, method)):
                raise DamagedFileError(
                    f"{show(paths[0])} and {show(paths[1])} both hold {show(key)}, with different content",
                    path=paths[1],
                    key=key,
                    hint="they are not parts of one model: open them one by one",
                )
    both = next((key for key in shards if key in holder), None)
    if both is not None:
        raise DamagedFileError(
            f"{show(shards[both])} has shards of other ranks beside {show(both)}, which another file holds as a whole",
            path=shards[both],
            key=both,
            hint="they are not parts of one model: open them one by one",
        )
    replicas = mesh_shards.add_tensors(index, [(tensors, shards)], "name the files of all ranks") if shards else None
    return index, replicas


def _add(index: _core.Index, file: str, method: _core.ReadMethod) -> int:
    """Add a file, by its first bytes. Files of a hub cache are links, which are followed."""
    add = index.add_torch_file if _is_of_torch(locate(file)) else index.add_file
    return add(file, method=method)


def _is_of_torch(file: Location) -> bool:
    return torch_head.is_head(file.read_head(torch_head.HEAD_BYTES, follow_links=True))


def _data(
    path: Location,
    index: _core.Index,
    method: _core.ReadMethod,
    *,
    listing: Location | None = None,
    base: str | None = None,
    replicas: Replicas | None = None,
) -> CheckpointData:
    for file in range(index.n_files):
        maps.refuse_differences(locate(index.file_path(file)), index.file_metadata(file))
    maps.refuse_differences(path, None, index.keys())
    aliases = add_aliases(index)
    return _FilesData(
        traits=names.TRAITS,
        path=path,
        index=index,
        method=method,
        aliases=aliases,
        listing=listing,
        base_name=base if base in names.KEPT else None,
        replicas=replicas,
    )


def open_pipeline(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the components of a pipeline that hold weights: their tensors are named `<component>.<name>`.

    Raises:
        CheckpointNotFoundError: the folder or the weights of a component are missing.
        DamagedFileError: `model_index.json` is invalid.
        UnsupportedError: the weights of a component are in another form.
        StorageError: as `reshard.open`.
    """
    index = _core.Index()
    aliases: dict[str, str] = {}
    without = []
    for component in _components(folder / names.PIPELINE_FILE):
        below = folder / component
        opened = _open_component(below, options)
        if opened is None:
            without.append(component)
            continue
        files = [_add(index, str(opened.index.file_path(file)), options.method) for file in range(opened.index.n_files)]
        for key in opened.index.keys():  # noqa: SIM118  an index is no mapping
            dtype, shape = opened.index.info(key)
            stored = [one._replace(file=files[one.file]) for one in opened.index.stored(key)]
            index.add_tiles(f"{component}.{key}", dtype, shape, stored)
        aliases |= {f"{component}.{alias}": f"{component}.{key}" for alias, key in opened.aliases.items()}
    if not len(index):
        raise CheckpointNotFoundError(
            f"{show(str(folder))}: no component of {names.PIPELINE_FILE} holds weights: {listed(map(show, without))}",
            path=str(folder),
            hint="the download or copy of the pipeline is incomplete",
        )
    return CheckpointData(
        traits=names.PIPELINE_TRAITS, path=folder, index=index, method=options.method, aliases=aliases
    )


def _components(listing: Location) -> list[str]:
    """The names of the components that a pipeline has: those with a class that is not null."""
    content = read_json(listing, _MAX_PIPELINE_BYTES, follow_links=True)
    if not isinstance(content, dict):
        raise DamagedFileError(f"{show(str(listing))} is no object", path=str(listing))
    found = []
    for name, value in content.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or None in value:
            continue  # settings of the pipeline, and components that it does not have
        fault = component_fault(name)
        if fault is not None:
            raise DamagedFileError(
                f"{show(str(listing))}: the component {show(name)} is refused: {fault}", path=str(listing)
            )
        found.append(name)
    if len(found) > _MAX_COMPONENTS:
        raise DamagedFileError(f"{show(str(listing))} has {len(found)} components", path=str(listing))
    return found


def _open_component(folder: Location, options: OpenOptions) -> CheckpointData | None:
    """A component; None: it has no weights, as a tokenizer or a scheduler."""
    if not folder.is_folder():
        raise CheckpointNotFoundError(
            f"{show(str(folder))} is missing: {names.PIPELINE_FILE} lists this component",
            path=str(folder),
            hint="the download or copy of the pipeline is incomplete",
        )
    for one in (HUGGINGFACE, TORCH_FILE):
        if one.detect(folder) is Match.YES:
            return one.open(folder, options)
    if names.sets_in(folder):
        return open_folder(folder, options.method)
    if (folder / _CONFIG_FILE).is_file():
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds {_CONFIG_FILE} of a model, and no weights",
            path=str(folder),
            hint="the download or copy of the pipeline is incomplete",
        )
    return None
