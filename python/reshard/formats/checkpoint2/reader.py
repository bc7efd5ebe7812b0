"""An iteration folder, opened: what its manifest lists, or, without one, what its description says.

With a manifest, sizes and headers are proven when the folder is opened, the small files are read once, and what was
proven is what is parsed; whatever else lies in the folder is ignored. Without one, a folder in which a shard file says
that this package wrote it is a save that did not end; any other is the work of the original, and its structure is all
that can be checked. One rank checks that; the others open the very same folder, and of it only what they use.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError, MismatchError, ReshardError
from reshard.formats import manifest as manifests
from reshard.formats import state_files
from reshard.formats.base import CheckpointData, Shapes, Traits
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.own_files import MAX_METADATA_BYTES, own_files
from reshard.formats.tiled import names as tiles
from reshard.storage.location import Location, locate
from reshard.words import show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.formats.base import PartName
    from reshard.formats.manifest import Manifest
    from reshard.storage.store import Lock

__all__ = [
    "CHECKPOINT2",
    "Chosen",
    "FolderData",
    "Proof",
    "chosen",
    "marks",
    "open_chosen",
    "open_folder",
    "opened_proof",
    "unfinished",
]

_log = logging.getLogger("reshard")

_MAX_TRIES = 3  # to open what is saved again meanwhile

Unlisted: TypeAlias = tuple[tuple[str, str, tuple[int, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Chosen:
    """An iteration folder that one rank has opened, so that the others open the very same, and only what they use.

    Attributes:
        folder: the folder.
        iteration: the number in its name.
        digest: that of its manifest, or without one of the files that describe it.
        unlisted: tensors that lie in shard files but in no description: `(name, dtype, shape, file names)`.
    """

    folder: str
    iteration: int | None
    digest: str
    unlisted: Unlisted = ()

    def to_value(self) -> list[Any]:
        """As JSON has it, for a message between ranks."""
        return [self.folder, self.iteration, self.digest, [list(one) for one in self.unlisted]]

    @classmethod
    def from_value(cls, value: list[Any]) -> Chosen:
        """What `to_value` gave."""
        folder, iteration, digest, unlisted = value
        return cls(
            folder,
            iteration,
            digest,
            tuple((name, dtype, tuple(shape), tuple(files)) for name, dtype, shape, files in unlisted),
        )


CHECKPOINT2 = Traits("checkpoint2", expects_manifest=True, has_metadata=True)
TILED = Traits("safetensors")


@dataclass(frozen=True, kw_only=True)
class FolderData(CheckpointData):
    """An iteration folder, or a folder of rank files that tiles.json describes.

    Attributes:
        tiles: the content of tiles.json; None: there is none, or the tensors are not those that it describes.
        chosen: what other ranks need to open the same.
    """

    tiles: tiles.TilesFile | None = None
    chosen: Chosen | None = None

    def part(self, key: str) -> PartName:
        """By the name of the file that holds the tensor."""
        if not self.traits.has_metadata:
            return "model"
        is_optimizer = _part_of_file(self.index.file_path(self.index.holders(key)[0])) == "optimizer"
        return "optimizer" if is_optimizer else "model"

    def rank_files(self) -> Mapping[int, list[int]] | None:
        """By the names of the files, the manifest or metadata.json."""
        numbers = {locate(self.index.file_path(file)).name: file for file in range(self.index.n_files)}
        found = own_files(self.path, numbers, self.manifest)
        return {rank: [numbers[name] for name in names] for rank, names in found.items()}

    def extra_state(self, rank: int) -> dict[str, Any]:
        """From the state files beside the shard files."""
        return {} if self.manifest is None else state_files.read(self.path, self.manifest, rank)

    def tiled_keys(self) -> Collection[str]:
        """Those of tiles.json."""
        return () if self.tiles is None else self.tiles.tensors

    def layout_mapping(self, shapes: Callable[[], Shapes]) -> Mapping[str, Any] | None:  # noqa: ARG002
        """As tiles.json records it."""
        return None if self.tiles is None else self.tiles.layout

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """Without what tiles.json records, which is about the stored tensors."""
        return replace(super().view(index, lock), tiles=None, chosen=None)


def open_chosen(chosen: Chosen, *, method: _core.ReadMethod = "auto") -> CheckpointData:
    """Open what another rank has opened and checked: shard files are opened when they are used, and not before.

    Raises:
        MismatchError: the folder is another one now, or looks like another one from here.
        DamagedFileError: a file is not what the manifest or the description says.
        CheckpointNotFoundError: it is not there, or cannot be seen yet.

    Example:
        >>> open_chosen(chosen).load(layout, rank=3)  # doctest: +SKIP
    """
    return open_folder(locate(chosen.folder), method, chosen.iteration, chosen)


def chosen(checkpoint: Checkpoint) -> Chosen | None:
    """What tells other ranks to open this very checkpoint; None if it is no iteration folder."""
    return checkpoint.data.chosen if isinstance(checkpoint.data, FolderData) else None


def open_folder(
    folder: Location, method: _core.ReadMethod, iteration: int | None = None, known: Chosen | None = None
) -> CheckpointData:
    """Open an iteration folder, or any folder of shard files.

    Args:
        folder: the folder.
        method: how files are read.
        iteration: its number; None: as its name says.
        known: what the rank that checked it has found: then it must be that very checkpoint, and no shard file is
            opened before it is used.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no file that it should have.
        DamagedFileError: a file is not what the manifest or the description says, or the save did not end.
        CoverageError: the stored shards do not cover a tensor.

    Example:
        >>> open_folder(locate("output/checkpoint/iteration_00000005"), "auto").iteration  # doctest: +SKIP
        5
    """
    for n_left in reversed(range(_MAX_TRIES)):
        with opened_proof(folder) as proof:
            try:
                return _open_proven(folder, proof, method, iteration, known)
            except ReshardError:
                # If it was saved again meanwhile, parts of two saves were looked at as if they were one.
                if n_left == 0 or proof.is_still_that_of(folder):
                    raise
    raise AssertionError  # not reached


def _open_proven(
    folder: Location, proof: Proof, method: _core.ReadMethod, iteration: int | None, known: Chosen | None
) -> CheckpointData:
    if iteration is None:
        iteration = checkpoint2.parse_iteration_folder(folder.resolved().name)
    manifest = proof.manifest
    if manifest is not None and known is None:
        manifests.check_sizes(folder, manifest)
        _warn_of_strangers(folder, manifest)
    described = _read_description(folder, manifest)
    digest = described.digest if manifest is None else manifest.digest
    if known is not None and known.digest != digest:
        raise MismatchError(
            f"{show(str(folder))} has the digest {digest} here, and {known.digest} on the rank that chose it",
            path=str(folder),
        )
    index, rest = _index(folder, described, manifest, method)
    if manifest is not None:
        manifests.set_checksums(index, folder, manifest)
    if described.tiles is not None:
        _add_tiles(index, folder, described.tiles)
    is_checkpoint2 = described.metadata is not None or described.common is not None or described.tiles is None
    if known is not None:
        unlisted = known.unlisted
    else:
        if manifest is None and (is_checkpoint2 or iteration is not None):
            _refuse_unfinished(index, folder, proof)
        unlisted = _unlisted(index, folder, rest)
    _add_unlisted(index, unlisted)
    data = FolderData(
        traits=CHECKPOINT2 if is_checkpoint2 else TILED,
        path=folder,
        index=index,
        method=method,
        iteration=iteration,
        common=described.common,
        manifest=manifest,
        lock=proof.keep_lock(),
        tiles=described.tiles,
        chosen=Chosen(str(folder), iteration, digest, unlisted),
    )
    if known is None and is_checkpoint2:
        _check_parts(data)
    return data


def _check_parts(data: FolderData) -> None:
    """Refuse a name that lies in model and in optimizer files: which of the two is meant is not known."""
    index = data.index
    parts = [_part_of_file(index.file_path(file)) for file in range(index.n_files)]
    for key in index.keys():  # noqa: SIM118  not a mapping
        if len({parts[file] for file in index.holders(key)}) > 1:
            raise DamagedFileError(
                f"`{key}` lies both in model and in optimizer files of {data.path}", path=str(data.path), key=key
            )


def _part_of_file(path: str) -> str | None:
    parsed = checkpoint2.parse_shard_file_name(locate(path).name)
    return None if parsed is None else parsed.part


def marks(folder: str | os.PathLike[str]) -> tuple[bool, bool]:
    """Whether an iteration folder was named by the tracker once, and whether it is pinned."""
    tracked, pinned = ((locate(folder) / name).exists() for name in (manifests.TRACKED_FILE, manifests.PINNED_FILE))
    return tracked, pinned


# -- the manifest


class Proof:
    """The manifest of a folder, locked against its removal, or why there is none."""

    def __init__(self, folder: Location) -> None:
        self.manifest: Manifest | None = None
        self.fault = ""
        self.is_damaged = False
        self._lock: Lock | None = None
        try:
            # Locked first: what is read then stays until the lock ends.
            self._lock = manifests.read_lock(folder)
            self.manifest = manifests.read(folder)
        except CheckpointNotFoundError:
            self.fault = f"there is no {manifests.MANIFEST_FILE}"
        except DamagedFileError as error:
            self.fault, self.is_damaged = error.message, True
        except BaseException:
            self.release()
            raise

    def keep_lock(self) -> Lock | None:
        """The lock, for whoever closes it from now on."""
        lock, self._lock = self._lock, None
        return lock

    def is_still_that_of(self, folder: Location) -> bool:
        """Whether the folder has the manifest that was read, or still has none."""
        try:
            now = manifests.read(folder).digest
        except ReshardError:
            now = None
        return now == (None if self.manifest is None else self.manifest.digest)

    def release(self) -> None:
        """End the lock, if nobody keeps it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextlib.contextmanager
def opened_proof(folder: Location) -> Iterator[Proof]:
    """The proof of a folder, its lock released at the end unless somebody keeps it."""
    proof = Proof(folder)
    try:
        yield proof
    finally:
        proof.release()


def unfinished(path: Location, name: str, proof: Proof) -> DamagedFileError:
    """The error for a file or folder of ours without a valid manifest; `name` is the file that tells."""
    return DamagedFileError(
        f"{show(str(path))} is no complete checkpoint: {show(name)} was written by this package, which ends a "
        f"save with a valid manifest, and {proof.fault}",
        path=str(path),
        hint="the save did not end, or its manifest was damaged or lost: take another iteration",
    )


# -- what describes the tensors


@dataclass(frozen=True)
class _Description:
    """The small files of an iteration folder, each read once; with a manifest they are proven."""

    metadata: bytes | None
    tiles: tiles.TilesFile | None
    common: checkpoint2.CommonInfo | None
    digest: str


def _read_description(folder: Location, manifest: Manifest | None) -> _Description:
    read: dict[str, bytes] = {}
    for name, max_bytes in (
        (checkpoint2.METADATA_FILE, MAX_METADATA_BYTES),
        (tiles.TILES_FILE, tiles.MAX_BYTES),
        (checkpoint2.COMMON_FILE, checkpoint2.MAX_COMMON_BYTES),
    ):
        if manifest is not None:
            if name in manifest.files:
                read[name] = manifests.read_plain(folder, manifest, name, max_bytes)
        # A link that leads nowhere counts as there: a description must not be passed over for being damaged.
        elif (folder / name).exists():
            read[name] = locate(folder / name).read_small(max_bytes)
    tiled, common = read.get(tiles.TILES_FILE), read.get(checkpoint2.COMMON_FILE)
    return _Description(
        read.get(checkpoint2.METADATA_FILE),
        None if tiled is None else tiles.parse(tiled, str(folder / tiles.TILES_FILE)),
        None if common is None else checkpoint2.CommonInfo.parse(common, str(folder / checkpoint2.COMMON_FILE)),
        manifests.digest_of(b"".join(f"{name} {len(data)}\n".encode() + data for name, data in read.items())),
    )


def _index(
    folder: Location, described: _Description, manifest: Manifest | None, method: _core.ReadMethod
) -> tuple[_core.Index, list[int]]:
    """An index of the shard files and of what metadata.json says of them, and the files that nothing describes."""
    index = _core.Index()
    if described.metadata is not None:
        path = str(folder / checkpoint2.METADATA_FILE)
        index = _core.Index.from_metadata(path, data=described.metadata, method=method)
    files = {locate(index.file_path(file)).name for file in range(index.n_files)}
    if described.tiles is not None:
        for tensor in described.tiles.tensors.values():
            for stored in tensor.stored:
                if stored.file not in files:
                    files.add(stored.file)
                    index.add_file(str(folder / stored.file), follow_links=False, method=method)
    names: list[str] = []
    if manifest is not None:
        parsed = {name: checkpoint2.parse_shard_file_name(name) for name in manifest.shards}
        # The model's files come first, as without a manifest.
        known = sorted((one.part != "model", one.index, name) for name, one in parsed.items() if one is not None)
        names = [name for *_, name in known if name not in files]
    elif described.metadata is None and described.tiles is None:
        names = checkpoint2.list_shard_files(folder)
    if described.metadata is None and described.tiles is None and not names:
        raise CheckpointNotFoundError(
            f"{folder} holds no checkpoint: no metadata.json, no shard files, no Hugging Face index",
            path=str(folder),
            hint="give a .safetensors file, a Hugging Face folder, a checkpoint root or an iteration folder",
        )
    return index, [index.add_file(str(folder / name), follow_links=False, method=method) for name in names]


def _add_tiles(index: _core.Index, folder: Location, described: tiles.TilesFile) -> None:
    files = {locate(index.file_path(file)).name: file for file in range(index.n_files)}
    for key, tensor in described.tensors.items():
        stored = [(files[one.file], one.name, one.shape, one.tiles) for one in tensor.stored]
        try:
            index.add_tiles(key, tensor.dtype, tensor.shape, stored, overlapping=tensor.overlapping)
        except ReshardError as error:
            error.message = f"{folder / tiles.TILES_FILE}: `{key}`: {error.message}"
            raise


def _warn_of_strangers(folder: Location, manifest: Manifest) -> None:
    strangers = [
        name
        for name in folder.names()
        if name.endswith((".safetensors", ".safetensor")) and name not in manifest.shards
    ]
    if strangers:
        more = f" and {len(strangers) - 1} more are ignored" if len(strangers) > 1 else " is ignored"
        _log.warning("%s: %s%s: the manifest does not list it", folder, show(strangers[0]), more)


def _refuse_unfinished(index: _core.Index, folder: Location, proof: Proof) -> None:
    for file in range(index.n_files):
        try:
            metadata = index.file_metadata(file)
        except ReshardError:
            continue  # what is wrong with the file is found out next
        if checkpoint2.WRITER_KEY in (metadata or {}):
            raise unfinished(folder, locate(index.file_path(file)).name, proof)


def _unlisted(index: _core.Index, folder: Location, rest: list[int]) -> Unlisted:
    """Check every file against its description; tensors that lie in files but in no description: whole on each holder.

    Args:
        index: what the descriptions say.
        folder: for messages.
        rest: the files that nothing describes.
    """
    is_described = index.n_files > len(rest)
    holders: dict[str, list[int]] = {}
    found: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    for file, name in index.check():
        holders.setdefault(name, []).append(file)
    for file in {file for files in holders.values() for file in files}:
        for name, dtype, shape, *_ in index.file_tensors(file):
            found[name, file] = dtype, shape
    for file in rest:
        for name, dtype, shape, *_ in index.file_tensors(file):
            holders.setdefault(name, []).append(file)
            found[name, file] = dtype, shape
    unlisted = []
    for name, files in holders.items():
        path = index.file_path(files[-1])
        if name in index:
            raise DamagedFileError(
                f"{path} holds `{name}`, which the description of {folder} places elsewhere", path=path, key=name
            )
        if not is_described and len(files) > 1:
            first = locate(index.file_path(files[0])).name
            raise DamagedFileError(
                f"{show(name)} lies in {first} and in {locate(path).name}, and {folder} has no metadata.json that says "
                "how",
                path=path,
                key=name,
                hint="without metadata.json only whole tensors, each in one file, can be read",
            )
        dtype, shape = found[name, files[0]]
        for file in files:
            if found[name, file] != (dtype, shape):
                other = found[name, file]
                raise DamagedFileError(
                    f"`{name}` is in no description and differs between files: {dtype} {shape} in "
                    f"{index.file_path(files[0])}, {other[0]} {other[1]} in {index.file_path(file)}",
                    path=index.file_path(file),
                    key=name,
                )
        unlisted.append((name, dtype, tuple(shape), tuple(locate(index.file_path(file)).name for file in files)))
    return tuple(unlisted)


def _add_unlisted(index: _core.Index, unlisted: Unlisted) -> None:
    numbers = {locate(index.file_path(file)).name: file for file in range(index.n_files)}
    for name, dtype, shape, files in unlisted:
        strides = [1] * len(shape)
        for dim in range(len(shape) - 1, 0, -1):
            strides[dim - 1] = strides[dim] * max(shape[dim], 1)
        tile: _core.Tile = ((0,) * len(shape), shape, 0, tuple(strides))
        index.add_tiles(name, dtype, shape, [(numbers[file], name, shape, [tile]) for file in files])
