"""The one way in: open anything, look at its tensors, read any slice, load any rank's arrays under any layout.

A `Checkpoint` is an index of stored shards (`_core.Index`) with what its format says beside them. It knows formats only
through their modules, moves no bytes itself, and writes nothing. What is read are the files as they were when they
were opened; a file that the folder's description names but that is not as described is refused before any byte of it
is handed out.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from reshard import _core, dtypes
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    KeyNotFoundError,
    MismatchError,
    ReshardError,
    StorageError,
)
from reshard.formats import checkpoint2, huggingface, tiles
from reshard.formats.files import show
from reshard.indexing import Box, normalize_index
from reshard.layout import BoundLayout, ModelLayout, as_layout

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from reshard.formats.checkpoint2 import CommonInfo

__all__ = ["Checkpoint", "FileInfo", "Part", "StoredShard", "TensorInfo", "iterations", "open"]

_log = logging.getLogger("reshard")

Format = Literal["safetensors", "huggingface", "checkpoint2"]
Part = Literal["all", "model", "optimizer"]
LayoutLike = ModelLayout | str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class StoredShard:
    """A stored region of a tensor.

    Attributes:
        offset: its first element in the global tensor, one index a dim.
        shape: its extent in elements, one a dim.
        files: names of the files that hold it; more than one are replicas.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class FileInfo:
    """A shard file.

    Attributes:
        name: its name in the folder.
        n_bytes: its size.
    """

    name: str
    n_bytes: int


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says of a tensor.

    Attributes:
        dtype: its safetensors name, such as "BF16".
        shape: the global shape, in elements.
        n_bytes: bytes of the whole tensor.
        shards: its stored regions.
        part: "model" or "optimizer".
    """

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    shards: tuple[StoredShard, ...]
    part: Literal["model", "optimizer"]


def open(path: str | os.PathLike[str], *, method: _core.ReadMethod = "auto") -> Checkpoint:  # noqa: A001
    """Open a checkpoint, whatever its format.

    Args:
        path: a `.safetensors` file (any other file is tried as one), a Hugging Face folder, the root of a Checkpoint
            2.0 tree (its newest iteration of whole structure is taken, the tracker's first), or an iteration folder.
        method: "map" maps the files, "read" reads them piece by piece, "auto" decides by the file system.

    Returns:
        The opened checkpoint. Close it, or use it as a context manager; arrays that it gave out stay valid.

    Raises:
        CheckpointNotFoundError: there is nothing at `path`, or nothing that is a checkpoint.
        DamagedFileError: what is there violates its format; of a root: every iteration does, each with its reason.
        CoverageError: the stored shards do not cover a tensor.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.eye(2, dtype=np.float32)}, "w.safetensors")
        >>> with reshard.open("w.safetensors") as checkpoint:
        ...     checkpoint.keys(), checkpoint["w"].shape
        (['w'], (2, 2))
    """
    target = Path(path)
    try:
        exists = target.exists()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise StorageError(f"looking for {target}: {error.strerror}", path=str(target), errno=error.errno) from None
    if not exists:
        raise CheckpointNotFoundError(f"there is nothing at {show(str(target))}", path=str(target))
    if not target.is_dir():
        return _open_file(target, method)
    if huggingface.detect(target):
        return _open_huggingface(target, method)
    if checkpoint2.is_root(target):
        return _open_root(target, method)
    return _open_iteration(target, method)


def iterations(path: str | os.PathLike[str]) -> checkpoint2.Candidates | None:
    """Which iterations a checkpoint root offers, in the order in which `open` tries them; no shard file is opened.

    Args:
        path: the root; anything else that can be opened is none.

    Returns:
        What the tracker says and the folders, best first; None if `path` is no root.

    Raises:
        StorageError: it cannot be listed.

    Example:
        >>> [folder for _, folder in reshard.checkpoint.iterations("output/checkpoint").folders]  # doctest: +SKIP
        ['iteration_00000010', 'iteration_00000005']
    """
    target = Path(path)
    if not target.is_dir() or huggingface.detect(target) or not checkpoint2.is_root(target):
        return None
    return checkpoint2.resolve_candidates(target)


def _open_file(path: Path, method: _core.ReadMethod) -> Checkpoint:
    index = _core.Index()
    file = index.add_file(str(path), method=method)
    for name, *_ in index.file_tensors(file):
        index.add_whole(name, file)
    return Checkpoint("safetensors", path, index)


def _open_huggingface(folder: Path, method: _core.ReadMethod) -> Checkpoint:
    index = _core.Index()
    weight_map = huggingface.read_weight_map(folder)
    if weight_map is None:
        file = index.add_file(str(folder / huggingface.SINGLE_FILE), method=method)
        for name, *_ in index.file_tensors(file):
            index.add_whole(name, file)
        return Checkpoint("huggingface", folder, index)
    # Files of a hub cache are symbolic links into its store: here links are followed.
    files = {name: index.add_file(str(folder / name), method=method) for name in dict.fromkeys(weight_map.values())}
    for key, name in weight_map.items():
        index.add_whole(key, files[name])
    return Checkpoint("huggingface", folder, index)


def _open_root(root: Path, method: _core.ReadMethod) -> Checkpoint:
    candidates = checkpoint2.resolve_candidates(root)
    if candidates.tracker_reason:
        _log.warning("%s: no tracker: %s", root, candidates.tracker_reason)
    skipped: list[tuple[str, str]] = []
    for iteration, name in candidates.folders:
        try:
            checkpoint = _open_iteration(root / name, method, iteration)
        except ReshardError as error:
            reason = _reason(error)
            _log.warning("%s passed over: %s", root / name, reason)
            skipped.append((name, reason))
            continue
        checkpoint.skipped = tuple(skipped)
        return checkpoint
    if not skipped:
        raise CheckpointNotFoundError(f"{root} holds no iteration folder", path=str(root))
    faults = "\n".join(f"  {name}: {reason}" for name, reason in skipped)
    raise DamagedFileError(f"no iteration in {root} is whole:\n{faults}", path=str(root))


def _reason(error: ReshardError) -> str:
    """Why an iteration is passed over: what is said of a file alone is told together with its name."""
    name = "" if error.path is None else Path(error.path).name
    return error.message if name in error.message else f"{name}: {error.message}"


def _open_iteration(folder: Path, method: _core.ReadMethod, iteration: int | None = None) -> Checkpoint:
    if iteration is None:
        iteration = checkpoint2.parse_iteration_folder(folder.resolve().name)
    # A link that leads nowhere counts as there: a description must not be passed over for being damaged.
    has_metadata, has_tiles, has_common = (
        os.path.lexists(folder / name)
        for name in (checkpoint2.METADATA_FILE, tiles.TILES_FILE, checkpoint2.COMMON_FILE)
    )
    if not has_metadata and not has_tiles:
        names = checkpoint2.list_shard_files(folder)
        if not names:
            raise CheckpointNotFoundError(
                f"{folder} holds no checkpoint: no metadata.json, no shard files, no Hugging Face index",
                path=str(folder),
                hint="give a .safetensors file, a Hugging Face folder, a checkpoint root or an iteration folder",
            )
        index = _core.Index()
        for name in names:
            file = index.add_file(str(folder / name), follow_links=False, method=method)
            for key, *_ in index.file_tensors(file):
                if key in index:
                    other = Path(index.file_path(index.holders(key)[0])).name
                    raise DamagedFileError(
                        f"{show(key)} lies in {other} and in {name}, and {folder} has no metadata.json that says how",
                        path=str(folder / name),
                        key=key,
                        hint="without metadata.json only whole tensors, each in one file, can be read",
                    )
                index.add_whole(key, file)
    else:
        path = str(folder / checkpoint2.METADATA_FILE)
        if has_metadata and not stat.S_ISREG(os.lstat(path).st_mode):
            # A pipe that someone planted would be waited for, a device be read without end.
            raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
        index = _core.Index.from_metadata(path, method=method) if has_metadata else _core.Index()
    described = tiles.read(folder / tiles.TILES_FILE) if has_tiles else None
    if described is not None:
        _add_tiles(index, folder, described, method)
    _add_unlisted(index, folder)
    common = checkpoint2.CommonInfo.read(folder / checkpoint2.COMMON_FILE) if has_common else None
    is_checkpoint2 = has_metadata or common is not None or not has_tiles
    checkpoint = Checkpoint("checkpoint2" if is_checkpoint2 else "safetensors", folder, index)
    checkpoint.iteration, checkpoint.common = iteration, common
    checkpoint._tiles = described  # noqa: SLF001  both are this module's
    checkpoint._check_parts()  # noqa: SLF001  both are this module's
    return checkpoint


def _add_tiles(index: _core.Index, folder: Path, described: tiles.TilesFile, method: _core.ReadMethod) -> None:
    files = {Path(index.file_path(file)).name: file for file in range(index.n_files)}
    for key, tensor in described.tensors.items():
        stored = []
        for entry in tensor.stored:
            if entry.file not in files:
                files[entry.file] = index.add_file(str(folder / entry.file), follow_links=False, method=method)
            stored.append((files[entry.file], entry.name, entry.shape, entry.tiles))
        try:
            index.add_tiles(key, tensor.dtype, tensor.shape, stored, overlapping=tensor.overlapping)
        except ReshardError as error:
            error.message = f"{folder / tiles.TILES_FILE}: `{key}`: {error.message}"
            raise


def _add_unlisted(index: _core.Index, folder: Path) -> None:
    """Check every file, and add the tensors that lie in files but in no description: whole on every holder."""
    unlisted: dict[str, list[int]] = {}
    for file, name in index.check():
        unlisted.setdefault(name, []).append(file)
    for name, files in unlisted.items():
        found = {
            file: (dtype, shape) for file in files for n, dtype, shape, *_ in index.file_tensors(file) if n == name
        }
        dtype, shape = found[files[0]]
        if name in index:
            path = index.file_path(files[0])
            raise DamagedFileError(
                f"{path} holds `{name}`, which the description of {folder} places elsewhere", path=path, key=name
            )
        for file in files:
            if found[file] != (dtype, shape):
                raise DamagedFileError(
                    f"`{name}` is in no description and differs between files: {dtype} {shape} in "
                    f"{index.file_path(files[0])}, {found[file][0]} {found[file][1]} in {index.file_path(file)}",
                    path=index.file_path(file),
                    key=name,
                )
        strides = [1] * len(shape)
        for dim in range(len(shape) - 1, 0, -1):
            strides[dim - 1] = strides[dim] * max(shape[dim], 1)
        tile: _core.Tile = ((0,) * len(shape), tuple(shape), 0, tuple(strides))
        index.add_tiles(name, dtype, shape, [(file, name, shape, [tile]) for file in files])


class Checkpoint:
    """An opened checkpoint: names, shapes, and the bytes on demand. Made by `open`; safe to read from several threads.

    Attributes:
        format: "safetensors", "huggingface" or "checkpoint2".
        path: the file or folder that is read; of a root: the iteration folder that was taken.
        iteration: the iteration, or None where the format or the folder's name has none.
        common: the content of common.json, or None.
        skipped: `(folder, reason)` of newer iterations of the root that were passed over.

    Example:
        >>> import numpy as np, reshard
        >>> path = "m.safetensors"
        >>> reshard.save_file({"w": np.arange(12, dtype=np.int32).reshape(3, 4)}, path)
        >>> checkpoint = reshard.open(path)
        >>> checkpoint.read("w", (slice(1, 3), 0))
        array([4, 8], dtype=int32)
        >>> checkpoint.load({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": [None, "tp"]}]}, rank=1)["w"].shape
        (3, 2)
        >>> checkpoint.close()
    """

    def __init__(self, format: Format, path: Path, index: _core.Index) -> None:  # noqa: A002
        self.format: Format = format
        self.path = path
        self.iteration: int | None = None
        self.common: CommonInfo | None = None
        self.skipped: tuple[tuple[str, str], ...] = ()
        self._index = index
        self._tiles: tiles.TilesFile | None = None
        self._keys = index.keys()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        iteration = "" if self.iteration is None else f", iteration {self.iteration}"
        return f"<reshard.Checkpoint {self.format}{iteration}, {len(self._keys)} tensors, {self.path}>"

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def close(self) -> None:
        """Let go of the files. Arrays and views that were given out stay valid; reading more is an error."""
        self._index.close()

    def keys(self, part: Part = "all") -> list[str]:
        """Names of the tensors, in the order of the checkpoint's description.

        Args:
            part: "model", "optimizer", or "all".

        Raises:
            ArgumentError: `part` is something else.

        Example:
            >>> checkpoint.keys("model")  # doctest: +SKIP
            ['embed.weight', 'layers.0.weight']
        """
        if part == "all":
            return list(self._keys)
        if part not in ("model", "optimizer"):
            raise ArgumentError(f'`part` is {part!r}; "model", "optimizer" or "all" are accepted')
        return [key for key in self._keys if self._part(key) == part]

    def __getitem__(self, key: str) -> TensorInfo:
        """dtype, shape, size and shards of a tensor; KeyNotFoundError if there is none of the name."""
        dtype, shape = self._index.info(key)
        shards = tuple(
            StoredShard(offset, extent, tuple(Path(self._index.file_path(file)).name for file in files))
            for offset, extent, files in self._index.shards(key)
        )
        return TensorInfo(dtype, shape, _n_bytes(dtype, shape), shards, self._part(key))

    def files(self) -> list[FileInfo]:
        """The shard files that hold the tensors, with their sizes.

        Example:
            >>> checkpoint.files()  # doctest: +SKIP
            [FileInfo(name='model.safetensors', n_bytes=4920)]
        """
        return [
            FileInfo(Path(self._index.file_path(file)).name, self._index.file_bytes(file))
            for file in range(self._index.n_files)
        ]

    def tiled_keys(self) -> list[str]:
        """The tensors that tiles.json describes: metadata.json cannot, so only this package reads them."""
        return [] if self._tiles is None else [key for key in self._keys if key in self._tiles.tensors]

    def _part(self, key: str) -> Literal["model", "optimizer"]:
        if self.format != "checkpoint2":
            return "model"
        parsed = checkpoint2.parse_shard_file_name(Path(self._index.file_path(self._index.holders(key)[0])).name)
        return "optimizer" if parsed is not None and parsed.part == "optimizer" else "model"

    def _check_parts(self) -> None:
        """Refuse a name that lies in model and in optimizer files: which of the two is wanted could not be told."""
        if self.format != "checkpoint2":
            return
        names = [Path(self._index.file_path(file)).name for file in range(self._index.n_files)]
        parsed = [checkpoint2.parse_shard_file_name(name) for name in names]
        parts = [None if p is None else p.part for p in parsed]
        for key in self._keys:
            if len({parts[file] for file in self._index.holders(key)}) > 1:
                raise DamagedFileError(
                    f"`{key}` lies both in model and in optimizer files of {self.path}", path=str(self.path), key=key
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: self._index.shape(key) for key in self._keys}

    def _device_layouts(self) -> dict[str, tuple[list[int], list[list[int]], list[str], list[int]] | None]:
        """For `ModelLayout.like`: what metadata.json says of each key's layout."""
        return {key: self._index.metadata_layout(key) for key in self._keys}

    def _layout_mapping(self) -> Mapping[str, Any] | None:
        """For `ModelLayout.like`: the layout file that tiles.json keeps."""
        return None if self._tiles is None else self._tiles.layout

    # -- reading

    def read(self, key: str, index: object = None, out: np.ndarray | None = None) -> np.ndarray:
        """Read a tensor or a slice of it; only the bytes of the slice's box are read.

        Args:
            key: name of the tensor.
            index: a basic numpy index: integers, slices, `...`, a tuple of them; None: everything.
            out: a C-contiguous array of the right shape and dtype that is filled and returned.

        Returns:
            The array. Types narrower than a byte come packed as uint8 (see `reshard.dtypes`) and only whole.

        Raises:
            KeyNotFoundError: there is no such tensor.
            ArgumentError: the index does not fit the shape.
            MismatchError: `out` has another shape or dtype.
            DamagedFileError, StorageError: while reading; the content of `out` is then undefined.

        Example:
            >>> checkpoint.read("w", (slice(0, 1024),))  # doctest: +SKIP
        """
        dtype, shape = self._index.info(key)
        if dtypes.is_packed(dtype) and index not in (None, ..., ()):
            raise ArgumentError(f"`{key}` is {dtype}, packed into bytes: it can only be read whole", key=key)
        box = normalize_index(() if index is None else index, shape)
        request = _core.Request()
        request.add_region(key, key, box.offset, box.shape)
        plan = self._index.plan(request)
        if out is not None:
            # The result's shape, of an array without memory: `out` is checked before the first byte is read.
            _check_out(key, out, dtype, np.broadcast_to(0, box.shape)[box.post].shape)
            if _keeps_order(box):
                _fill(plan, [out])
                return out
        array = _array(*plan.load()[0], dtype, box.shape)
        if not dtypes.is_packed(dtype):
            array = array[box.post]
        if out is None:
            return array
        out[...] = array
        return out

    def load(
        self,
        layout: LayoutLike | None = None,
        rank: int | None = None,
        *,
        part: Part = "all",
        keys: Collection[str] | None = None,
        out: Mapping[str, np.ndarray] | None = None,
        dtype: object = None,
        copy: bool = True,
        threads: int | None = None,
        progress: _core.Progress | None = None,
    ) -> dict[str, np.ndarray]:
        """Load the arrays of a rank under a layout, or whole tensors.

        Args:
            layout: a `ModelLayout`, a layout file or its mapping; None: whole tensors.
            rank: the rank whose arrays are wanted; may be left out where the layout has only one.
            part: "model", "optimizer" or "all".
            keys: only these tensors.
            out: C-contiguous arrays by name that are filled instead of new ones: exactly those that are loaded.
            dtype: cast the floating-point tensors to this dtype ("bfloat16", np.float32, ...); others stay.
            copy: False gives private copy-on-write views of the files where the wanted bytes lie contiguous, and
                copies elsewhere. Writing to a view changes neither the file nor another view's process. A view stays
                valid after `close()`, but not if someone truncates the file.
            threads: threads of the copy; default: the processors of this process.
            progress: called as `progress(done_bytes, total_bytes)`.

        Returns:
            The arrays by name, in the order of the checkpoint; keys that the layout joins come as one 1-D array under
            the name of the join. A rank gets only what it holds; an empty part is an array of size 0.

        Raises:
            ArgumentError: a layout of several ranks without a rank; `out` does not match.
            KeyNotFoundError: `keys` names a tensor that is not there.
            LayoutError: the layout does not fit the tensors.
            MismatchError: an array of `out` has another shape or dtype.
            CoverageError: the stored shards do not cover what is wanted.
            DamagedFileError, StorageError: while reading; the content of `out` is then undefined.

        Example:
            >>> own = checkpoint.load("layout.yaml", rank=3, part="model")  # doctest: +SKIP
        """
        request, names = self._request(layout, rank, part, keys)
        plan = self.plan(request, dtype)
        arrays = plan.arrays
        if out is not None:
            _check_outs(out, names, arrays)
            if not copy:
                raise ArgumentError("`out` and `copy=False` exclude each other: a view cannot lie in a given array")
            _fill(plan, [out[name] for name in names], threads, progress)
            return {name: out[name] for name in names}
        views: list[tuple[_core.Buffer, int] | None] = [None] * len(arrays) if copy else plan.views()
        copied = [i for i, view in enumerate(views) if view is None]
        if copied:
            for i, place in zip(copied, plan.only(copied).load(threads=threads, progress=progress), strict=True):
                views[i] = place
        return {
            name: _array(*view, stored, shape)
            for (name, stored, shape, _), view in zip(arrays, views, strict=True)
            if view is not None
        }

    def _request(
        self, layout: LayoutLike | None, rank: int | None, part: Part, keys: Collection[str] | None
    ) -> tuple[_core.Request, list[str]]:
        """What a load wants, and the names of its arrays in order."""
        wanted = self._wanted(part, keys)
        if layout is None:
            if rank is not None:
                raise ArgumentError("`rank` was given without `layout`: whole tensors are the same on every rank")
            request = _core.Request()
            for key in wanted:
                shape = self._index.shape(key)
                request.add_region(key, key, (0,) * len(shape), shape)
            return request, wanted
        bound = self.bind(layout)
        if rank is None:
            if len(bound.ranks) != 1:
                raise ArgumentError(
                    f"the layout has {len(bound.ranks)} ranks; say which one is wanted", hint="give `rank=`"
                )
            rank = bound.ranks[0]
        only = None if len(wanted) == len(self._keys) else wanted
        return bound.request(rank, only), bound.local_names(rank, only)

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor; opens nothing. KeyNotFoundError if there is none of the name.

        Example:
            >>> checkpoint.shape("w")  # doctest: +SKIP
            (4096, 1024)
        """
        return self._index.shape(key)

    def plan(self, request: _core.Request, dtype: object = None) -> _core.Plan:
        """The checked copies of a request: for code that writes or places the bytes itself.

        Raises:
            KeyNotFoundError, MismatchError, CoverageError, UnsupportedError: the request cannot be met.

        Example:
            >>> checkpoint.plan(checkpoint.bind("layout.yaml").request(3)).n_bytes  # doctest: +SKIP
        """
        return self._index.plan(request, dtype=None if dtype is None else dtypes.parse_dtype(dtype))

    def bind(self, layout: LayoutLike) -> BoundLayout:
        """Lay a layout over the tensors of this checkpoint: every key's rule applied, everything checked.

        Raises:
            LayoutError: a key without a rule, an extent that does not divide, or whatever else does not fit.

        Example:
            >>> checkpoint.bind("layout.yaml").layouts["w"].local_shape(3)  # doctest: +SKIP
        """
        return as_layout(layout).bind(self._shapes(), optimizer_keys=set(self.keys("optimizer")))

    def _wanted(self, part: Part, keys: Collection[str] | None) -> list[str]:
        wanted = self.keys(part)
        if keys is None:
            return wanted
        chosen = {keys} if isinstance(keys, str) else set(keys)
        for key in chosen:
            if key not in self._index:
                raise KeyNotFoundError(f"there is no tensor `{key}` in {self.path}", key=key, path=str(self.path))
        return [key for key in wanted if key in chosen]


def _n_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    n = dtypes.bits(dtype)
    for extent in shape:
        n *= extent
    return n // 8


def _array(buffer: _core.Buffer, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.ndarray(dtypes.array_shape(dtype, shape), dtypes.numpy_dtype(dtype), memoryview(buffer), offset)


def _keeps_order(box: Box) -> bool:
    """Whether the result has every element of the box, one after the other as in the box."""
    return all(item in (None, 0, ...) or item == slice(None) for item in box.post)


def _fill(
    plan: _core.Plan,
    out: list[np.ndarray],
    threads: int | None = None,
    progress: _core.Progress | None = None,
) -> None:
    try:
        # As bytes: numpy refuses to export the types of ml_dtypes under their own format.
        plan.fill([_bytes(array) for array in out], threads=threads, progress=progress)
    except ReshardError as error:
        error.message += " (the arrays given in `out` are undefined now)"
        raise


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _check_out(key: str, out: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    expected, expected_shape = dtypes.numpy_dtype(dtype), dtypes.array_shape(dtype, shape)
    if not isinstance(out, np.ndarray):
        raise ArgumentError(f"`out` for `{key}` is a {type(out).__name__}; a numpy array is needed", key=key)
    if out.dtype != expected or out.shape != expected_shape:
        raise MismatchError(
            f"`out` for `{key}` is {out.dtype} of shape {out.shape}; {expected} of shape {expected_shape} is needed",
            key=key,
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ArgumentError(f"`out` for `{key}` must be writable and C-contiguous", key=key)


def _check_outs(
    out: Mapping[str, np.ndarray], names: list[str], arrays: list[tuple[str, str, tuple[int, ...], int]]
) -> None:
    missing, extra = [name for name in names if name not in out], sorted(set(out) - set(names))
    if missing or extra:
        what = f"lacks {missing[:3]}" if missing else f"has {extra[:3]}, which are not loaded"
        raise ArgumentError(
            f"`out` {what}; it must hold exactly the {len(names)} arrays that are loaded",
            hint="choose tensors with `keys=` and `part=`",
        )
    for name, dtype, shape, _ in arrays:
        _check_out(name, out[name], dtype, shape)
