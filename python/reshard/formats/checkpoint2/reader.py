"""Reads an iteration folder: the files of its manifest, or without a manifest the files that describe it.

With a manifest, sizes and headers are verified when the folder is opened. Each small file is read once, verified and
parsed. Other files in the folder are ignored. A folder without a manifest is an unfinished save if one of its shard
files was written by this package. Otherwise MindSpore Transformers wrote it, and only its structure can be checked. One
rank does this check. The other ranks open the same folder, and only the files that they use.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from reshard import _core, dtypes
from reshard._core import DeviceLayout
from reshard.commit import manifest as manifests
from reshard.commit import roots, writer_mark
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.documents.common_info import MAX_COMMON_BYTES, CommonInfo
from reshard.errors import CheckpointNotFoundError, DamagedFileError, MismatchError, ReshardError
from reshard.formats import state_files
from reshard.formats.base import CheckpointData, Shapes
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.traits import CHECKPOINT2, TILED
from reshard.formats.chosen import Chosen, Unlisted
from reshard.formats.outputs import load_all
from reshard.formats.own_files import MAX_METADATA_BYTES, opened_again, own_files, ranks_of_tensors
from reshard.formats.state_loader import TorchSaved
from reshard.formats.tiled import names as tiles
from reshard.storage.location import Location, locate
from reshard.storage.store import kind_words
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.commit.manifest import Manifest
    from reshard.formats.base import PartName
    from reshard.storage.store import Lock

_log = logging.getLogger("reshard")

_MAX_PARSED = 64  # headers that are parsed when a folder is opened
_TENSOR_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt")
_MAX_COMPARED = 4096  # bytes of a tensor whose copies are compared when a folder is opened
_MAX_TRIES = 10  # to open an iteration that is saved again meanwhile


@dataclass(frozen=True, kw_only=True)
class FolderData(CheckpointData):
    """An iteration folder, or a folder of rank files with a tiles.json.

    Attributes:
        tiles: content of tiles.json; None: there is none, or it does not describe these tensors.
    """

    tiles: tiles.TilesFile | None = None

    def check_files(self) -> None:
        """Of many files, headers whose checksum is not known are not parsed when the folder is opened."""
        if self.manifest is None:
            self.index.check()

    def part(self, key: str) -> PartName:
        """By the name of the file that holds the tensor."""
        if not self.has_optimizer():
            return "model"
        return "optimizer" if self._parts[self.index.holders(key)[0]] == "optimizer" else "model"

    def has_optimizer(self) -> bool:
        """Whether the name of a file says so."""
        return self.traits.has_metadata and self._has_optimizer

    @cached_property
    def _has_optimizer(self) -> bool:
        return "optimizer" in self._parts

    @cached_property
    def _parts(self) -> list[str | None]:
        """The part in the name of each file."""
        parsed = map(checkpoint2.parse_shard_file_name, self.index.file_names)
        return [None if one is None else one.part for one in parsed]

    def rank_files(self) -> Mapping[int, list[int]] | None:
        """From the manifest, metadata.json, or the names of the files."""
        numbers = {name: file for file, name in enumerate(self.index.file_names)}
        found = own_files(self.place, numbers, self.manifest)
        return {rank: [numbers[name] for name in names] for rank, names in found.items()}

    def extra_state(self, rank: int) -> dict[str, Any]:
        """Read from the state files beside the shard files."""
        found = {} if self.manifest is None else state_files.read(self.place, self.manifest, rank)
        return {name: one.decoded() if isinstance(one, TorchSaved) else one for name, one in found.items()}

    def encoded_state(self) -> dict[str, Any]:
        """The state of rank 0, which holds what all ranks share."""
        return {} if self.manifest is None else state_files.read(self.place, self.manifest, 0)

    def tiled_keys(self) -> Collection[str]:
        """The tensors of tiles.json."""
        return () if self.tiles is None else self.tiles.tensors

    def device_layouts(self, shapes: Callable[[], Shapes]) -> Mapping[str, DeviceLayout]:
        """From metadata.json. MindSpore Transformers records the first stage of a tensor that several stages hold."""
        layouts = super().device_layouts(shapes)
        if self.manifest is not None or len({tuple(layout.rank_list) for layout in layouts.values()}) < 2:
            return layouts
        held = ranks_of_tensors(self.place)
        return {key: _on_ranks(layout, held.get(key, set())) for key, layout in layouts.items()}

    def layout_mapping(self, shapes: Callable[[], Shapes]) -> Mapping[str, Any] | None:  # noqa: ARG002
        """From tiles.json."""
        return None if self.tiles is None else self.tiles.layout

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """Without the content of tiles.json, which describes the stored tensors."""
        return replace(super().view(index, lock), tiles=None)


def _on_ranks(layout: DeviceLayout, held: set[int]) -> DeviceLayout:
    """The layout of a tensor, repeated on the further ranks that hold it."""
    if held <= set(layout.rank_list):
        return layout
    matrix, tensor_map, alias, ranks = layout
    # The further ranks need not be whole stages: `ModelLayout.like` refuses them then.
    return DeviceLayout((len(held) // len(ranks), *matrix), tensor_map, ("", *alias), tuple(sorted(held)))


def open_folder(
    folder: Location,
    method: _core.ReadMethod,
    iteration: int | None = None,
    known: Chosen | None = None,
    locked: LockedManifest | None = None,
) -> CheckpointData:
    """Open an iteration folder, or any folder of shard files.

    Args:
        folder: the folder.
        method: how files are read.
        iteration: the iteration; None: from the name of the folder.
        known: the result of the rank that checked it. The folder must have this digest, and shard files are opened when
            they are first used.
        locked: its manifest, which is then not read again. The caller releases it.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or one of its files is missing.
        DamagedFileError: a file does not match the manifest or the description, or the save is unfinished.
        CoverageError: the stored shards do not cover a tensor.

    Example:
        >>> import numpy as np, reshard
        >>> report = reshard.save("a_run", 5, {"w": np.zeros(4)})
        >>> open_folder(locate(report.path), "auto").iteration
        5
    """
    for n_left in reversed(range(_MAX_TRIES)):
        with contextlib.ExitStack() as stack:
            if locked is None:
                locked = stack.enter_context(locked_manifest(folder, None if known is None else known.outline))
            # If the folder was replaced meanwhile, files of two saves may be mixed: try again.
            try:
                data = _open_locked(folder, locked, method, iteration, known)
            except ReshardError:
                if n_left == 0 or locked.is_unchanged(folder):
                    raise
            else:
                if n_left == 0 or data.lock is None or data.lock.is_current():
                    return data
                data.index.close()
                data.lock.close()
        locked = None
    raise AssertionError  # not reached


def _open_locked(
    folder: Location, locked: LockedManifest, method: _core.ReadMethod, iteration: int | None, known: Chosen | None
) -> CheckpointData:
    if iteration is None:
        iteration = roots.parse_iteration_folder(folder.resolved().name)
    manifest = locked.manifest
    if manifest is not None and known is None:
        manifests.check_sizes(folder, manifest)
        _warn_of_unlisted_files(folder, manifest)
    described = _read_description(folder, manifest)
    digest = described.digest
    if known is not None and known.digest != digest:
        raise MismatchError(
            f"{show(str(folder))} has digest {digest} on this rank, but {known.digest} on the rank that selected it",
            path=str(folder),
        )
    used = None if known is None else {file for *_, files in known.unlisted for file in files}
    index, rest = _index(folder, described, manifest, method, used)
    has_metadata = described.has_metadata
    described = replace(described, metadata=None, table=None)  # they can have hundreds of MB
    if manifest is not None:
        manifests.set_checksums(index, folder, manifest)
    if described.tiles is not None:
        _add_tiles(index, folder, described.tiles)
    is_checkpoint2 = has_metadata or described.common is not None or described.tiles is None
    if known is not None:
        unlisted = known.unlisted
    else:
        if manifest is None and (is_checkpoint2 or iteration is not None):
            _refuse_unfinished(index, folder, locked)
        unlisted = _unlisted(index, folder, rest)
        if manifest is None:
            _warn_of_different_copies(index, folder, unlisted)
    _add_unlisted(index, unlisted)
    data = FolderData(
        traits=CHECKPOINT2 if is_checkpoint2 else TILED,
        path=folder,
        index=index,
        method=method,
        iteration=iteration,
        common=described.common,
        manifest=manifest,
        lock=locked.keep_lock(),
        tiles=described.tiles,
        chosen=Chosen(str(folder), iteration, digest, unlisted),
    )
    if known is None and is_checkpoint2:
        _check_parts(data)
    return data


def _check_parts(data: FolderData) -> None:
    """Refuse a name that is both in model and in optimizer files, since it is ambiguous."""
    index, parts = data.index, data._parts  # noqa: SLF001  of this module
    if len(set(parts)) <= 1:
        return
    for key in index.keys():  # noqa: SIM118  not a mapping
        if len({parts[file] for file in index.holders(key)}) > 1:
            raise DamagedFileError(
                f"`{key}` is both in model and in optimizer files of {data.path}", path=str(data.path), key=key
            )


# -- the manifest


class LockedManifest:
    """The manifest of a folder that is locked against removal, or why there is none."""

    def __init__(self, folder: Location, outline: manifests.Outline | None = None) -> None:
        self.manifest: Manifest | None = None
        self.fault = ""
        self.is_damaged = False
        self._lock: Lock | None = None
        try:
            # The lock comes first: files that are read afterwards stay until it is released.
            self._lock = manifests.read_lock(folder)
            self.manifest = manifests.read(folder) if outline is None else manifests.read_part(folder, outline)
        except CheckpointNotFoundError:
            self.fault = f"there is no {MANIFEST_FILE}"
        except DamagedFileError as error:
            self.fault, self.is_damaged = error.message, True
        except BaseException:
            self.release()
            raise

    def keep_lock(self) -> Lock | None:
        """The lock. The caller closes it from now on."""
        lock, self._lock = self._lock, None
        return lock

    def is_unchanged(self, folder: Location) -> bool:
        """Whether the folder still has the manifest that was read, or still has none."""
        try:
            now = manifests.read_digest(folder)
        except ReshardError:
            now = None
        return now == (None if self.manifest is None else self.manifest.digest)

    def release(self) -> None:
        """Release the lock, unless `keep_lock` returned it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextlib.contextmanager
def locked_manifest(folder: Location, outline: manifests.Outline | None = None) -> Iterator[LockedManifest]:
    """Lock a folder and read its manifest. The lock is released at the end, unless `keep_lock` returned it.

    Args:
        folder: the folder.
        outline: of the manifest that another rank has read; then only a part of it is read.
    """
    locked = LockedManifest(folder, outline)
    try:
        yield locked
    finally:
        locked.release()


def unfinished(path: Location, name: str, locked: LockedManifest) -> DamagedFileError:
    """The error for a file or folder of this package without a valid manifest.

    Args:
        path: the file or folder.
        name: name of the file that this package wrote.
        locked: gives the fault of the manifest.
    """
    return DamagedFileError(
        f"{show(str(path))} is not a complete checkpoint: {locked.fault}. This package wrote {show(name)}, and ends "
        "a save with a valid manifest",
        path=str(path),
        hint="the save is unfinished, or its manifest is damaged or lost: use another iteration",
    )


# -- description of the tensors


@dataclass(frozen=True)
class _Description:
    """The small files of an iteration folder, each read once, and verified if there is a manifest."""

    metadata: bytes | None
    table: bytes | None  # that of the metadata, which is not read then
    tiles: tiles.TilesFile | None
    common: CommonInfo | None
    digest: str  # that of the manifest, if there is one

    @property
    def has_metadata(self) -> bool:
        return self.metadata is not None or self.table is not None


def _read_description(folder: Location, manifest: Manifest | None) -> _Description:
    read: dict[str, bytes] = {}
    table = None if manifest is None else _read_table(folder, manifest)
    for name, max_bytes in (
        (checkpoint2.METADATA_FILE, MAX_METADATA_BYTES),
        (tiles.TILES_FILE, tiles.MAX_BYTES),
        (checkpoint2.COMMON_FILE, MAX_COMMON_BYTES),
    ):
        if table is not None and name == checkpoint2.METADATA_FILE:
            continue
        if manifest is not None:
            if name in manifest.files:
                read[name] = manifests.read_plain(folder, manifest, name, max_bytes)
        # A broken link is read too, and raises an error: a damaged description must not be ignored.
        elif (folder / name).exists():
            read[name] = locate(folder / name).read_small(max_bytes)
    tiled, common = read.get(tiles.TILES_FILE), read.get(checkpoint2.COMMON_FILE)
    return _Description(
        read.get(checkpoint2.METADATA_FILE),
        table,
        None if tiled is None else tiles.parse(tiled, str(folder / tiles.TILES_FILE)),
        None if common is None else CommonInfo.parse(common, str(folder / checkpoint2.COMMON_FILE)),
        _digest_of(read) if manifest is None else manifest.digest,
    )


def _digest_of(read: Mapping[str, bytes]) -> str:
    """The digest of the checksums of all chunks: metadata.json can have hundreds of MB."""
    digest = manifests.new_digest()
    for name, data in read.items():
        digest.update(f"{name} {len(data)}\n".encode())
        for start in range(0, len(data), manifests.CHUNK_BYTES):
            chunk = memoryview(data)[start : start + manifests.CHUNK_BYTES]
            digest.update(_core.crc32c(chunk).to_bytes(4, "little"))
    return digest.hexdigest()


def _read_table(folder: Location, manifest: Manifest) -> bytes | None:
    """The table of metadata.json, if the manifest lists both; None: metadata.json is read."""
    if not {checkpoint2.METADATA_FILE, checkpoint2.METADATA_TABLE_FILE} <= manifest.files.keys():
        return None
    try:
        return manifests.read_plain(folder, manifest, checkpoint2.METADATA_TABLE_FILE, MAX_METADATA_BYTES)
    except DamagedFileError as error:
        # It is derived from metadata.json, so nothing is lost. `verify` reports it as damage.
        _log.warning("%s; %s is read instead", error.message, checkpoint2.METADATA_FILE)
        return None


def _index(
    folder: Location,
    described: _Description,
    manifest: Manifest | None,
    method: _core.ReadMethod,
    used: Collection[str] | None,
) -> tuple[_core.Index, list[int]]:
    """An index of the shard files with the tensors of metadata.json, and the files that nothing describes.

    `used`: of the files that the manifest lists and nothing describes, only these; None: all.
    """
    index = _core.Index()
    if described.table is not None and manifest is not None:
        path = str(folder / checkpoint2.METADATA_TABLE_FILE)
        # A table of another metadata.json than that of the manifest is refused.
        digest = manifest.files[checkpoint2.METADATA_FILE].digest
        # Another rank has checked the headers, or they are parsed soon.
        is_parsed = used is None and len(manifest.shards) <= _MAX_PARSED
        index = _core.Index.from_metadata_table(path, described.table, digest, method=method, read_headers=is_parsed)
    elif described.metadata is not None:
        path = str(folder / checkpoint2.METADATA_FILE)
        index = _core.Index.from_metadata(path, data=described.metadata, method=method)
    files = set(index.file_names)
    if described.tiles is not None:
        for tensor in described.tiles.tensors.values():
            for stored in tensor.stored:
                if stored.file not in files:
                    files.add(stored.file)
                    index.add_file(str(folder / stored.file), follow_links=False, method=method)
    names: list[str] = []
    if manifest is not None:
        listed = manifest.shards if used is None else used
        parsed = {name: checkpoint2.parse_shard_file_name(name) for name in listed}
        # Files of the model come first, as without a manifest.
        known = sorted((one.part != "model", one.index, name) for name, one in parsed.items() if one is not None)
        names = [name for *_, name in known if name not in files]
    elif described.metadata is None and described.tiles is None:
        names = checkpoint2.list_shard_files(folder)
    elif described.metadata is not None and not any(map(_is_of_optimizer, files)):
        # Files of an optimizer without state hold `global_step` alone, which metadata.json does not list.
        names = sorted(filter(_is_of_optimizer, folder.names()))
    if not described.has_metadata and described.tiles is None and not names:
        reason = _not_a_file(folder)
        raise CheckpointNotFoundError(
            f"{folder} holds no checkpoint{'' if reason is None else f': {reason}'}",
            path=str(folder),
            hint="pass a .safetensors file, a Hugging Face folder, a checkpoint root or an iteration folder",
        )
    return index, [index.add_file(str(folder / name), follow_links=False, method=method) for name in names]


def _is_of_optimizer(name: str) -> bool:
    parsed = checkpoint2.parse_shard_file_name(name)
    return parsed is not None and parsed.part == "optimizer"


def _not_a_file(folder: Location) -> str | None:
    """What in a folder has the name of a file of tensors, and is no file; None: nothing."""
    for entry in folder.entries():
        if entry.name.endswith(_TENSOR_FILES) and entry.kind != "file":
            kind = (folder / entry.name).found() if entry.kind == "link" else entry.kind
            return f"{show(entry.name)} is {'a symbolic link' if kind == 'file' else kind_words(kind)}, expected a file"
    return None


def _add_tiles(index: _core.Index, folder: Location, described: tiles.TilesFile) -> None:
    files = {name: file for file, name in enumerate(index.file_names)}
    for key, tensor in described.tensors.items():
        stored = [_core.StoredArray(files[one.file], one.name, one.shape, one.tiles) for one in tensor.stored]
        try:
            index.add_tiles(key, tensor.dtype, tensor.shape, stored, overlapping=tensor.overlapping)
        except ReshardError as error:
            error.message = f"{folder / tiles.TILES_FILE}: `{key}`: {error.message}"
            raise


def _warn_of_unlisted_files(folder: Location, manifest: Manifest) -> None:
    names = [
        name
        for name in folder.names()
        if name.endswith((".safetensors", ".safetensor")) and name not in manifest.shards
    ]
    if names:
        more = f" and {len(names) - 1} more are ignored" if len(names) > 1 else " is ignored"
        _log.warning("%s: %s%s: not listed in the manifest", folder, show(names[0]), more)


def _refuse_unfinished(index: _core.Index, folder: Location, locked: LockedManifest) -> None:
    # Parsing every header takes long for many files, and few hold the name of the mark.
    may_be_ours = range(index.n_files) if index.n_files <= _MAX_PARSED else index.headers_with(writer_mark.SPELT)
    for file in may_be_ours:
        try:
            is_ours = writer_mark.is_marked(index, file)
        except ReshardError:
            continue  # the next step reports what is wrong with the file
        if is_ours:
            raise unfinished(folder, locate(index.file_path(file)).name, locked)


def _unlisted(index: _core.Index, folder: Location, rest: list[int]) -> Unlisted:
    """Check every file against its description, and find tensors that no file describes.

    Args:
        index: the described tensors.
        folder: the folder, for messages.
        rest: numbers of the files that nothing describes.

    Returns:
        The tensors without a description. Every file that holds such a tensor holds it whole.
    """
    is_described = index.n_files > len(rest)
    holders: dict[str, list[int]] = {}
    found: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    # Parsing every header takes long for many files, of which most loads use a part.
    for file, name in index.check() if index.n_files <= _MAX_PARSED else index.check_headers():
        holders.setdefault(name, []).append(file)
    for file in {file for files in holders.values() for file in files}:
        for tensor in index.file_tensors(file):
            found[tensor.name, file] = tensor.dtype, tensor.shape
    for file in rest:
        for tensor in index.file_tensors(file):
            holders.setdefault(tensor.name, []).append(file)
            found[tensor.name, file] = tensor.dtype, tensor.shape
    unlisted = []
    for name, files in holders.items():
        path = index.file_path(files[-1])
        if name in index:
            raise DamagedFileError(
                f"{path} holds `{name}`, but the description of {folder} lists it in other files", path=path, key=name
            )
        if not is_described and len(files) > 1:
            first = locate(index.file_path(files[0])).name
            raise DamagedFileError(
                f"{show(name)} is in {first} and in {locate(path).name}, and {folder} has no metadata.json that "
                "describes it",
                path=path,
                key=name,
                hint="without metadata.json, only tensors that are whole in one file can be read",
            )
        dtype, shape = found[name, files[0]]
        for file in files:
            if found[name, file] != (dtype, shape):
                other = found[name, file]
                raise DamagedFileError(
                    f"`{name}` has no description and differs between files: {dtype} {shape} in "
                    f"{index.file_path(files[0])}, {other[0]} {other[1]} in {index.file_path(file)}",
                    path=index.file_path(file),
                    key=name,
                )
        unlisted.append((name, dtype, tuple(shape), tuple(locate(index.file_path(file)).name for file in files)))
    return tuple(unlisted)


def _warn_of_different_copies(index: _core.Index, folder: Location, unlisted: Unlisted) -> None:
    """Compare the copies of small tensors without a description, which are read as replicas of each other."""
    compared = {
        name: files[:_MAX_PARSED]
        for name, dtype, shape, files in unlisted
        if len(files) > 1 and dtypes.n_bytes(dtype, shape) <= _MAX_COMPARED
    }
    if not compared:
        return
    numbers = {name: file for file, name in enumerate(index.file_names)}
    place = {file: n for n, file in enumerate(dict.fromkeys(itertools.chain.from_iterable(compared.values())))}
    copies = opened_again(index, [numbers[file] for file in place], None)
    for name, dtype, shape, _ in unlisted:
        for file in compared.get(name, ()):
            copies.add_tiles(f"{file} {name}", dtype, shape, _copies(name, shape, [place[file]]))
    for name, files in compared.items():  # one after the other: all of them may take more memory than there is
        arrays = load_all(copies.plan(copies.whole_request([f"{file} {name}" for file in files]), verify=False))
        values = {file: arrays[f"{file} {name}"].tobytes() for file in files}
        different = next((file for file in files if values[file] != values[files[0]]), None)
        if different is not None:
            _log.warning(
                "%s: %s is not in the description, and is read as one value, but %s and %s hold different values",
                *(folder, show(name), show(files[0]), show(different)),
            )
    copies.close()


def _add_unlisted(index: _core.Index, unlisted: Unlisted) -> None:
    if not unlisted:
        return
    numbers = {name: file for file, name in enumerate(index.file_names)}
    for name, dtype, shape, files in unlisted:
        index.add_tiles(name, dtype, shape, _copies(name, shape, [numbers[file] for file in files]))


def _copies(name: str, shape: tuple[int, ...], files: Sequence[int]) -> list[_core.StoredArray]:
    """The copies of a tensor that each of some files holds whole."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    tile = _core.Tile((0,) * len(shape), shape, 0, tuple(strides))
    return [_core.StoredArray(file, name, shape, [tile]) for file in files]
