"""An opened checkpoint: list its tensors, read slices, load the arrays of a rank under a layout, verify it.

A `Checkpoint` is an index of stored shards (`_core.Index`) with the records of its format. `opening.open` creates it.
It contains no code for single formats, and writes nothing. Reads return the content of the files that were opened. A
file that does not match the description of its folder is refused before any byte is returned. If a manifest has the
checksums of the files, every chunk of 256 KiB that a read touches is compared with its checksum while it is copied.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import numpy as np

from reshard import _core, dtypes
from reshard.errors import (
    ArgumentError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
    UnsupportedError,
)
from reshard.formats.base import UNCHANGED_HINT, StoredTensor
from reshard.formats.outputs import as_array, as_arrays, check_out, check_outs, fill_out, keeps_order, load_all
from reshard.storage.location import locate
from reshard.values.argument_types import Part, Progress, VerifyMode
from reshard.values.arguments import check, checked
from reshard.values.indexing import normalize_index
from reshard.values.words import check_text, counted, listed, nearest, show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from reshard._core import DeviceLayout
    from reshard.formats.base import CheckpointData, UnplacedTensor
    from reshard.layout import BoundLayout, ModelLayout
    from reshard.layout.strategy import Strategy
    from reshard.names import ConfigLike, NamesLike, ResolvedTensor
    from reshard.quantised.kinds import Quantised
    from reshard.storage.location import Location

LayoutLike: TypeAlias = "ModelLayout | str | os.PathLike[str] | Mapping[str, Any]"


@dataclass(frozen=True)
class StoredShard:
    """A stored region of a tensor.

    If a name map interleaves rows of several tensors, it is the bounding box of the rows of one, so regions overlap.

    Attributes:
        offset: its first element in the global tensor, one index per dim.
        shape: its shape in elements.
        files: names of the files that hold it. Several files are replicas.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class FileInfo:
    """A shard file.

    Attributes:
        name: its path relative to the folder.
        n_bytes: its size in bytes.
    """

    name: str
    n_bytes: int


@dataclass(frozen=True)
class TensorInfo:
    """Properties of a tensor in a checkpoint.

    Attributes:
        dtype: safetensors name of the dtype, such as "BF16".
        shape: the global shape, in elements.
        n_bytes: size of the whole tensor in bytes.
        shards: its stored regions.
        part: "model" or "optimizer".
    """

    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    shards: tuple[StoredShard, ...]
    part: Literal["model", "optimizer"]


class _PlanOptions(TypedDict):
    """The options of a plan of the index."""

    dtype: str | None
    verify: bool


class _Keys(Sequence[str]):
    """The keys of an index. Each is created on access, since a file can have a million of them."""

    def __init__(self, index: _core.Index) -> None:
        self._index = index
        self._n = len(index)

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self._index.key(n) for n in range(self._n)[number]]
        return self._index.key(range(self._n)[number])

    def __iter__(self) -> Iterator[str]:
        return map(self._index.key, range(self._n))


def _state(state: _core.FileState) -> str:
    """The state of a file in words."""
    n_bytes, modified_ns, inode = state
    seconds, ns = divmod(modified_ns, 1_000_000_000)
    try:
        day = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
        when = f"{day}.{ns:09} UTC"
    except (ValueError, OverflowError, OSError):  # a time that no calendar has
        when = f"{modified_ns} ns after 1970"
    return f"{counted(n_bytes, 'byte')}, modified {when}, inode {inode}"


class Checkpoint:
    """An opened checkpoint, created by `open`. Several threads can read from it.

    Attributes:
        format: "safetensors", "huggingface", "checkpoint2", "checkpoint1" (rank folders), "mindspore" (full weights),
            "ckpt" (one such file), "torch" (files of `torch.save`), "weight-files" (under other names, and lists of
            them), "fsdp-ranks" (shards of FSDP in such files), "trainer-run" (of transformers), "dcp"
            (`torch.distributed.checkpoint`), "deepspeed" or "megatron" (Megatron-Core).
        path: the file or folder that is read; for a Checkpoint 2.0 root the iteration folder that was selected.
        iteration: the iteration, or None if the format or the folder's name has none.
        common: the counters of the run, from common.json or from tensors, or None.
        manifest: content of manifest.json, or None: then reads are not verified.
        skipped: `(folder, reason)` of iterations of the root that were tried first and could not be opened.
        strings: names of text values of a `.ckpt` file. They are not tensors and cannot be read.
        aliases: for tied tensors, which are stored once: each further name and the stored name. Both are keys.

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

    def __init__(self, data: CheckpointData) -> None:
        self.data = data
        self.format: str = data.traits.name
        self.path: Path | Location = data.path.local if data.path.is_local else data.path
        self.iteration = data.iteration
        self.common = data.common
        self.manifest = data.manifest
        self.skipped = data.skipped
        self.strings = data.strings
        self.aliases = data.aliases
        self._index = data.index
        self._file_name = functools.cache(data.file_name)  # thousands of tensors lie in each file
        own_keys = data.keys()
        self._keys: Sequence[str] = _Keys(data.index) if own_keys is None else own_keys
        self._unplaced = data.unplaced()
        self._is_scrubbed = False
        self._is_computed = False  # whether config.json says nothing of how its weights are stored
        self._reopen: Callable[[], Checkpoint] | None = None
        # The lock protects the files from retention. It is released with the object at the latest.
        self._unlock = None if data.lock is None else weakref.finalize(self, data.lock.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Checkpoint], tuple[()]]:
        """Pickles the path and the options of `open`: another process opens the same checkpoint again."""
        if self._reopen is None:
            raise TypeError(f"{self!r} is a view of a checkpoint, which is not pickled: open it in the other process")
        return self._reopen, ()

    def __repr__(self) -> str:
        iteration = "" if self.iteration is None else f", iteration {self.iteration}"
        return f"<reshard.Checkpoint {self.format}{iteration}, {counted(len(self._keys), 'tensor')}, {self.path}>"

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._index or key in self._unplaced

    def close(self) -> None:
        """Close the files. Arrays and views that were returned stay valid; further reads raise an error."""
        self._index.close()
        if self._unlock is not None:
            self._unlock()

    def check_unchanged(self) -> None:
        """Refuse what was read if another program changed the files while they were read. Called after the last read.

        Only files without checksums are examined: with a manifest, every chunk that was read has been compared. A
        folder that was removed as a whole is no change, since open files are read as they were.

        Raises:
            MismatchError: a file was modified, replaced or removed since it was opened.
            StorageError: a file cannot be examined.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.zeros(4)}, "same.safetensors")
            >>> with reshard.open("same.safetensors") as checkpoint:
            ...     reshard.save_file({"w": np.ones(4)}, "same.safetensors")
            ...     checkpoint.check_unchanged()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            reshard.errors.MismatchError: `same.safetensors` changed while it was read: ...
        """
        data = self.data
        if data.listing is not None:
            from reshard.formats.weight_map import check_saved  # noqa: PLC0415  slow to import

            check_saved(data.listing, [locate(self._index.file_path(file)) for file in range(self._index.n_files)])
        self._refuse_change(in_place=False)

    def _refuse_change(self, *, in_place: bool) -> None:
        """As `check_unchanged`; with `in_place` another file of the same name is no change."""
        change = self._index.changed_file(in_place=in_place)
        if change is None:
            return
        raise MismatchError(
            f"{show(change.path)} changed while it was read: when it was opened it had {_state(change.opened)}; "
            f"now {'it is gone' if change.now is None else f'it has {_state(change.now)}'}. What was read may be a "
            "mixture of both",
            path=change.path,
            hint=UNCHANGED_HINT,
        )

    @property
    def verified(self) -> bool:
        """Whether there is a manifest with which reads are compared. Without one, only the structure is checked."""
        return self.manifest is not None

    @property
    def strategy(self) -> Strategy | None:
        """The strategy with which rank folders were opened, or None."""
        return self.data.strategy()

    @checked
    def keys(self, part: Part = "all") -> list[str]:
        """Names of the tensors, in the order of the checkpoint's description.

        Args:
            part: "model", "optimizer", or "all".

        Raises:
            ArgumentError: `part` has another value.

        Example:
            >>> import numpy as np, reshard
            >>> _ = reshard.save("keys", 1, {"w": np.zeros(4)}, {"adam_m.w": np.zeros(4)})
            >>> with reshard.open("keys") as checkpoint:
            ...     checkpoint.keys(), checkpoint.keys("model")
            (['w', 'adam_m.w'], ['w'])
        """
        if part == "all":
            return self._all_keys()
        if part not in ("model", "optimizer"):
            raise ArgumentError(f'`part` is {part!r}; "model", "optimizer" or "all" are accepted')
        if not self.data.has_optimizer():
            return self._all_keys() if part == "model" else []
        wanted = part == "optimizer"
        flags = zip(self._all_keys(), self._in_optimizer, strict=True)
        return [key for key, in_optimizer in flags if in_optimizer == wanted]

    @functools.cached_property
    def _in_optimizer(self) -> bytes:
        """For each key whether it belongs to the optimizer: a byte, as there can be a million."""
        part = self.data.part
        return bytes(part(key) == "optimizer" for key in self._all_keys())

    def _all_keys(self) -> list[str]:
        # One call instead of one for each key.
        return self._index.keys() if isinstance(self._keys, _Keys) else list(self._keys)

    def __getitem__(self, key: str) -> TensorInfo:
        """dtype, shape, size and shards of a tensor; KeyNotFoundError if there is no tensor of this name."""
        self._check_placed(key)
        dtype, shape = self._info(key)
        shards = tuple(
            StoredShard(region.offset, region.shape, tuple(map(self._file_name, region.files)))
            for region in self._index.shards(key)
        )
        return TensorInfo(dtype, shape, dtypes.n_bytes(dtype, shape), shards, self.data.part(key))

    def files(self) -> list[FileInfo]:
        """The shard files of the tensors, with their sizes; in rank folders `rank_<number>/<name>`.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.zeros(4)}, "files.safetensors")
            >>> [file.name for file in reshard.open("files.safetensors").files()]
            ['files.safetensors']
        """
        return [FileInfo(self._file_name(file), self._index.file_bytes(file)) for file in range(self._index.n_files)]

    def tiled_keys(self) -> list[str]:
        """The tensors that tiles.json describes, since metadata.json cannot. Only this package can read them."""
        tiled = self.data.tiled_keys()
        return [key for key in self._keys if key in tiled]

    def unplaced(self) -> dict[str, UnplacedTensor]:
        """The tensors that only `stored` can read, since no strategy gives the positions of their arrays.

        Returns:
            By key the dtype and the distinct shapes of the local arrays, in elements.

        Example:
            >>> import os, numpy as np, reshard
            >>> for rank in range(2):
            ...     os.makedirs(f"ranks/rank_{rank}")
            ...     reshard.save_file({"w": np.zeros((8, 4), np.float32)}, f"ranks/rank_{rank}/net.safetensors")
            >>> reshard.open("ranks").unplaced()
            {'w': UnplacedTensor(dtype='F32', local_shapes=((8, 4),))}
        """
        return dict(self._unplaced)

    def _check_placed(self, *keys: str) -> None:
        """Refuse tensors whose arrays have no position, and keys that are not text."""
        for key in keys:
            if type(key) is not str or not key.isascii():
                check_text(key, "key of a tensor")
            if key in self._unplaced:
                shapes = " or ".join(map(str, self._unplaced[key].local_shapes[:4]))
                raise LayoutError(
                    f"each rank of {self.path} holds an array of shape {shapes} of {show(key)}, but their positions in "
                    "the tensor are not known",
                    path=str(self.path),
                    key=key,
                    hint=self.data.unplaced_hint(),
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        self._check_placed(*self._unplaced)
        return {key: self._index.shape(key) for key in self._keys}

    def _device_layouts(self) -> Mapping[str, DeviceLayout]:
        """For `ModelLayout.like`: the layout of each key from metadata.json or the strategy of rank folders."""
        return self.data.device_layouts(self._shapes)

    def _layout_mapping(self) -> Mapping[str, Any] | None:
        """For `ModelLayout.like`: the recorded layout."""
        if self.data.is_renamed:
            raise LayoutError(
                f"the tensors of {self.path} are renamed, so the recorded layout does not apply",
                path=str(self.path),
                hint="use the layout of the checkpoint without a name map",
            )
        self._check_placed(*self._unplaced)
        return self.data.layout_mapping(self._shapes)

    # -- reading

    def read(
        self, key: str, index: object = None, out: np.ndarray | None = None, *, verify: VerifyMode = "touched"
    ) -> np.ndarray:
        """Read a tensor or a slice of it. Only the bytes of the slice's bounding box are read.

        Args:
            key: name of the tensor.
            index: a basic numpy index: integers, slices, `...`, or a tuple of them; None: the whole tensor.
            out: a C-contiguous array of the same shape and dtype that is filled and returned.
            verify: as in `load`.

        Returns:
            The array. Dtypes of less than a byte are returned packed as uint8 (see `reshard.dtypes`), whole only.

        Raises:
            KeyNotFoundError: there is no such tensor.
            ArgumentError: the index does not match the shape.
            MismatchError: `out` has another shape or dtype.
            DamagedFileError, StorageError: while reading; the content of `out` is then undefined.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.arange(12).reshape(3, 4)}, "read.safetensors")
            >>> reshard.open("read.safetensors").read("w", (slice(1, 3), 0))
            array([4, 8])
        """
        self._check_placed(key)
        dtype, shape = self._info(key)
        if dtypes.is_packed(dtype) and index not in (None, ..., ()):
            raise ArgumentError(f"`{key}` is {dtype}, packed into bytes: it can only be read whole", key=key)
        region = normalize_index(() if index is None else index, shape)
        request = _core.Request()
        request.add_region(key, key, region.offset, region.shape)
        plan = self.plan(request, verify=verify, keys=[key])
        if out is not None:
            # `out` is checked before the first byte is read, with an array without memory of the result's shape.
            check_out(key, out, dtype, np.broadcast_to(0, region.shape)[region.post].shape)
            if keeps_order(region):
                fill_out(plan, [out])
                return out
        array = as_array(*plan.load()[0], dtype, region.shape)
        if not dtypes.is_packed(dtype):
            array = array[region.post]
        if out is None:
            return array
        out[...] = array
        return out

    @checked
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
        verify: VerifyMode = "touched",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, np.ndarray]:
        """Load the arrays of a rank under a layout, or whole tensors.

        Args:
            layout: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder; None: whole tensors.
            rank: the rank whose arrays are loaded; optional if the layout has one rank.
            part: "model", "optimizer" or "all".
            keys: only these tensors.
            out: C-contiguous arrays by name that are filled instead of new ones: exactly the names that are loaded.
            dtype: cast floating-point tensors to this dtype ("bfloat16", np.float32, ...); other tensors are not cast.
            copy: False returns private copy-on-write views of the files where the bytes are contiguous, and copies
                elsewhere. Writing to a view changes neither the file nor views of other processes. A view stays valid
                after `close()`, unless the file is truncated.
            verify: "touched": with a manifest, every chunk of 256 KiB that the load touches is compared with its
                checksum while it is copied, or with `copy=False` before the view is returned. "full": all shard files
                are compared once before. "structure": only sizes and headers are checked. Without a manifest, all three
                are "structure", except that a `.ckpt` file is compared with its CRC when it is first read.
            threads: number of threads that copy; default: the number of processors of this process.
            progress: called as `progress(done_bytes, total_bytes)`.

        Returns:
            The arrays by name, in the order of the checkpoint. Keys that the layout joins are one 1-D array under the
            name of the join. A rank gets only the tensors that it holds; an empty shard is an array of size 0.

        Raises:
            ArgumentError: a layout of several ranks without a rank; `out` does not match.
            KeyNotFoundError: `keys` has a name that is not in the checkpoint.
            LayoutError: the layout does not match the tensors.
            MismatchError: an array of `out` has another shape or dtype; or ranks hold different bytes of a tensor that
                the strategy of rank folders does not list.
            CoverageError: the stored shards do not cover the requested regions.
            DamagedFileError, StorageError: while reading; the content of `out` is then undefined.
            MismatchError: a file without checksums was modified meanwhile; the content of `out` is then undefined.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.arange(8)}, "load.safetensors")
            >>> layout = {"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": ["tp"]}]}
            >>> reshard.open("load.safetensors").load(layout, rank=3)
            {'w': array([6, 7])}
        """
        wanted = self._wanted(part, keys)
        if layout is None:
            if rank is not None:
                raise ArgumentError("`rank` was given without `layout`: whole tensors are the same on every rank")
            self._check_placed(*wanted)
            names = wanted
            plan = self.plan(self._index.whole_request(wanted), dtype, verify=verify, keys=wanted)
        else:
            request, names, wanted = self._request(layout, rank, wanted)
            plan = self.plan(request, dtype, verify=verify, keys=wanted)
        if out is not None:
            check_outs(out, names, plan.arrays)
            if not copy:
                raise ArgumentError("`out` and `copy=False` exclude each other: a view has its own memory")
            fill_out(plan, [out[name] for name in names], threads, progress)
            self._refuse_change(in_place=True)
            return {name: out[name] for name in names}
        if copy:
            arrays = as_arrays(names, plan.load(threads=threads, progress=progress))
            self._refuse_change(in_place=True)
            return arrays
        views = plan.views()
        copied = [i for i, view in enumerate(views) if view is None]
        if copied:
            others = plan.only(copied).load(threads=threads, progress=progress)
            for i, number in enumerate(copied):
                views[number] = others[i]
        of_views = zip(plan.arrays, views, strict=True)
        return {name: as_array(*view, dtype, shape) for (name, dtype, shape, _), view in of_views if view is not None}

    def _request(
        self, layout: LayoutLike, rank: int | None, wanted: list[str]
    ) -> tuple[_core.Request, list[str], list[str]]:
        """The request of a load, the names of its arrays in order, and the keys that they consist of."""
        bound = self.bind(layout)
        if rank is None:
            if len(bound.ranks) != 1:
                raise ArgumentError(
                    f"the layout has {counted(len(bound.ranks), 'rank')}, and `rank` is missing", hint="pass `rank=`"
                )
            rank = bound.ranks[0]
        only = None if len(wanted) == len(self._keys) else wanted
        held = set(bound.holds(rank))
        return bound.request(rank, only), bound.local_names(rank, only), [key for key in wanted if key in held]

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor in elements; opens no file. KeyNotFoundError if there is no tensor of this name.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.zeros((4, 2))}, "shape.safetensors")
            >>> reshard.open("shape.safetensors").shape("w")
            (4, 2)
        """
        self._check_placed(key)
        return self._index.shape(key)

    def plan(
        self,
        request: _core.Request,
        dtype: object = None,
        *,
        verify: VerifyMode = "touched",
        keys: Collection[str] | None = None,
    ) -> _core.Plan:
        """Plan the copies of a request, for code that writes or places the bytes itself.

        Args:
            request: the requested regions.
            dtype: as in `load`.
            verify: as in `load`; touched chunks are compared when the plan is executed.
            keys: the tensors of the request; None: any. In rank folders, copies of a tensor that the strategy does not
                list are compared now, once.

        Raises:
            KeyNotFoundError, MismatchError, CoverageError, UnsupportedError: the request cannot be satisfied.
            MismatchError: ranks hold different bytes of a tensor that the strategy does not list.
            DamagedFileError, StorageError: `verify="full"` found damage.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.zeros((4, 2), np.float32)}, "plan.safetensors")
            >>> checkpoint = reshard.open("plan.safetensors")
            >>> layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp"]}]}
            >>> checkpoint.plan(checkpoint.bind(layout).request(1)).n_bytes
            16
        """
        return self._index.plan(request, **self._plan_options(dtype, verify, keys))

    def _plan_options(self, dtype: object, verify: VerifyMode, keys: Collection[str] | None) -> _PlanOptions:
        """The options of a plan of the index, after what must be checked before it."""
        check(Checkpoint.load, verify=verify)
        if dtype is not None:
            self._refuse_cast(keys)
        if verify == "full":
            self.scrub()
        self.data.check(keys)
        return {"dtype": None if dtype is None else dtypes.parse_dtype(dtype), "verify": verify != "structure"}

    def _refuse_cast(self, keys: Collection[str] | None) -> None:
        """Refuse to cast the parts of quantised weights: the packed values would stay as they are."""
        for one in self._quantised.values():
            part = next((key for key in one.parts.values() if keys is None or key in keys), None)
            if part is not None:
                raise UnsupportedError(
                    f"{show(part)} belongs to the quantised weight {show(one.name)} ({one.kind}): a cast of its parts "
                    "alone would change its values",
                    key=part,
                    hint="`dequantised()` makes ordinary tensors of such weights; so does a conversion with `dtype=`",
                )

    @checked
    def scrub(self, share: tuple[int, int] = (0, 1), *, threads: int | None = None) -> None:
        """Compare all bytes of the shard files with the checksums of the manifest, or `.ckpt` files with their CRC.

        Files are read through the page cache, because they are loaded next. A scrub of all files is done only once.

        Args:
            share: `(i, n)`: only the i-th of n equal shares of the files, i from 0.
            threads: number of threads that read.

        Raises:
            DamagedFileError: bytes differ; the message names file, tensors and range.
            StorageError: a file cannot be read.

        Example:
            >>> import numpy as np, reshard
            >>> _ = reshard.save("scrub", 1, {"w": np.zeros(4)})
            >>> with reshard.open("scrub") as checkpoint:
            ...     checkpoint.scrub()
        """
        if self._is_scrubbed:
            return
        number, count = share
        if self.manifest is None:
            for file in range(number, self._index.n_files, count):
                self._index.verify_crc(file)
            self._is_scrubbed = count == 1
            return
        path = self.data.place
        is_folder = path.is_folder()
        folder = path if is_folder else path.parent
        from reshard.commit.scrub import scrub_share  # noqa: PLC0415  slow to import

        scrub_share(folder, self.manifest, share, None if is_folder else path.name, threads=threads)
        self._is_scrubbed = count == 1

    # -- the same files, other tensors

    def view(
        self,
        tensors: Mapping[str, StoredTensor | str] | Iterable[tuple[str, StoredTensor | str]],
        *,
        is_renamed: bool = False,
    ) -> Checkpoint:
        """The same files with other tensors, which consist of stored arrays. No tensor is read.

        Args:
            tensors: the new tensors by key: the key of a tensor of this checkpoint, or stored arrays as
                `_core.Index.stored` of this checkpoint returns them. A mapping, or an iterable of pairs.
            is_renamed: the tensors have other names than in the recorded layout.

        Returns:
            A checkpoint that must be closed separately. Reads are verified as in this checkpoint.

        Raises:
            DamagedFileError: a file is not the file that was opened.
            CoverageError, MismatchError: the stored arrays do not form such a tensor.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.arange(3)}, "view.safetensors")
            >>> with reshard.open("view.safetensors") as checkpoint, checkpoint.view({"v": "w"}) as view:
            ...     view.read("v")
            array([0, 1, 2])
        """
        data = self.data
        from reshard.formats.own_files import opened_again  # noqa: PLC0415  slow to import

        index = opened_again(self._index, range(self._index.n_files), self.manifest)
        for key, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if isinstance(tensor, str):
                index.add_same(key, self._index, tensor)
                continue
            # The description of the stored arrays has been checked for overlaps already.
            index.add_tiles(
                key, tensor.dtype, tensor.shape, tensor.stored, overlapping=True, factors=tensor.factors or None
            )
        # The files must stay while either checkpoint is open.
        is_locked = self._unlock is not None and self._unlock.alive
        lock = data.lock.duplicate() if is_locked and data.lock is not None else None
        view = Checkpoint(replace(data.view(index, lock), common=self.common, is_renamed=is_renamed))
        view._is_computed = self._is_computed
        return view

    @checked
    def renamed(
        self, names: NamesLike, *, reverse: bool = False, config: ConfigLike | None = None, part: Part = "all"
    ) -> Checkpoint:
        """The same checkpoint with tensors renamed, fused, split, stacked or transposed. No tensor is read.

        Optimizer state follows its parameter.

        Args:
            names: a `NameMap`, its file or mapping, or a preset such as "qwen3-mindspore".
            reverse: apply the map from its side `to` to its side `from`.
            config: the model's `config.json`, for sizes in the map; default: the one in the folder.
            part: only these tensors.

        Returns:
            A checkpoint that must be closed separately.

        Raises:
            NamesError: the map does not match the tensors: a part is missing, shapes do not divide, no rule matches.
            MismatchError: parts of one tensor have different dtypes.
            UnsupportedError: a tensor of a packed dtype would be split or transposed.

        Example:
            >>> import numpy as np, reshard
            >>> parts = {"q": np.zeros((4, 2), np.float32), "k": np.ones((4, 2), np.float32)}
            >>> reshard.save_file(parts, "m.safetensors")
            >>> names = {"rules": [{"from": ["q", "k"], "to": "qk", "join": 0, "turns": [2, 2]}]}
            >>> with reshard.open("m.safetensors") as checkpoint, checkpoint.renamed(names) as fused:
            ...     fused.read("qk")[:, 0]
            array([0., 0., 1., 1., 0., 0., 1., 1.], dtype=float32)
        """
        from reshard.names import as_names, config_beside  # noqa: PLC0415  slow to import, and not needed without a map

        known = as_names(names, config_beside(self.data.place) if config is None else config)
        shapes = self._shapes() if part == "all" else {key: self._index.shape(key) for key in self.keys(part)}
        tensors = (known.reversed() if reverse else known).resolve(shapes, optimizer_keys=set(self.keys("optimizer")))
        # A tensor may be split into hundreds, one after the other: its stored arrays are looked up once.
        stored_of = functools.lru_cache(maxsize=1)(self._index.stored)
        return self.view(
            (
                (made.key, StoredTensor(self._dtype_of(made), made.shape, made.stored(stored_of), made.factors))
                for made in tensors
            ),
            is_renamed=True,
        )

    def _dtype_of(self, made: ResolvedTensor) -> str:
        """The common dtype of the sources of a renamed tensor."""
        found = {source.key: self._index.info(source.key)[0] for source in made.sources}
        first, dtype = next(iter(found.items()))
        other = next((key for key in found if found[key] != dtype), None)
        if other is not None:
            raise MismatchError(
                f"{show(made.key)} would consist of {show(first)}, {dtype}, and {show(other)}, {found[other]}",
                key=other,
                hint="convert to one dtype first; `dtype=` of `convert` does this",
            )
        if dtypes.is_packed(dtype) and any(source.part_map is not None for source in made.sources):
            raise UnsupportedError(
                f"{show(first)} is {dtype}, packed into bytes: it can be renamed, but not split or transposed",
                key=first,
            )
        return dtype

    # -- arrays of one rank

    def ranks(self) -> list[int]:
        """The ranks that saved it, in ascending order, for `stored`. Empty if the files hold whole tensors.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.arange(8)}, "ranks.safetensors")
            >>> layout = {"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": ["tp"]}]}
            >>> _ = reshard.convert("ranks.safetensors", "of_four_ranks", layout=layout)
            >>> reshard.open("of_four_ranks").ranks()
            [0, 1, 2, 3]
        """
        return [] if self._own is None else list(self._own)

    @checked
    def stored(
        self, rank: int, *, keys: Collection[str] | None = None, verify: VerifyMode = "touched"
    ) -> dict[str, np.ndarray]:
        """Load the local arrays in a rank's files, without a layout.

        If each shard was written once, the files of a rank lack shards that another rank wrote.

        Args:
            rank: the rank that wrote the files.
            keys: only these arrays.
            verify: "touched" or "structure", as in `load`.

        Returns:
            The arrays by their names in the files, those of the model first. Joined arrays have the name of the join,
            flat arrays have one dim. Counters that are stored as tensors are included.

        Raises:
            ArgumentError: the rank is not in `ranks()`, or the files hold whole tensors.
            KeyNotFoundError: `keys` has a name that the rank does not hold.
            DamagedFileError, StorageError: while reading, or a file is not the file that was opened.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.arange(8)}, "whole.safetensors")
            >>> layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
            >>> _ = reshard.convert("whole.safetensors", "of_two_ranks", layout=layout)
            >>> reshard.open("of_two_ranks").stored(1)["w"]
            array([4, 5, 6, 7])
        """
        if verify not in ("touched", "structure"):
            raise ArgumentError(f'`verify` is {verify!r}; "touched" or "structure" are accepted')
        index = self._own_index(rank)
        wanted = index.keys()
        if keys is not None:
            chosen = {keys} if isinstance(keys, str) else set(keys)
            if missing := sorted(chosen.difference(wanted)):
                raise KeyNotFoundError(
                    f"rank {rank} of {self.path} holds no {show(missing[0])}", key=missing[0], path=str(self.path)
                )
            wanted = [key for key in wanted if key in chosen]
        return load_all(index.plan(index.whole_request(wanted), verify=verify != "structure"))

    def stored_info(self, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape in elements of the arrays that `stored` loads; reads headers only. Raises as `stored`.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.zeros((8, 2), np.float32)}, "info.safetensors")
            >>> layout = {"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": ["tp"]}]}
            >>> _ = reshard.convert("info.safetensors", "sharded", layout=layout)
            >>> reshard.open("sharded").stored_info(3)
            {'w': ('F32', (2, 2))}
        """
        index = self._own_index(rank)
        return {key: index.info(key) for key in index.keys()}  # noqa: SIM118  not a mapping

    @functools.cached_property
    def _own(self) -> Mapping[int, list[int]] | None:
        """Numbers of the files of each rank; None: the files hold whole tensors."""
        return self.data.rank_files()

    def _own_index(self, rank: int) -> _core.Index:
        """An index of a rank's local arrays. Every file is checked to be the file that was opened."""
        if self._own is None:
            raise ArgumentError(f"{self.path} holds whole tensors, not files of single ranks", hint="use `load`")
        if rank not in self._own:
            raise ArgumentError(
                f"rank {rank} did not save {self.path}", hint=f"it was saved by ranks {listed(self._own)}"
            )
        from reshard.formats.own_files import own_index  # noqa: PLC0415  slow to import

        return own_index(self._index, self._own[rank], self.manifest)

    # -- state beside the tensors

    def extra(self, rank: int = 0) -> dict[str, Any]:
        """The state that was saved beside the tensors, by name; decoded again at each call.

        Args:
            rank: the rank whose rank-local values are returned. If it saved none, those names are missing.

        Returns:
            The shared state and the rank-local state of this rank; empty if there is none.

        Raises:
            DamagedFileError: a file differs from the manifest, or is invalid.
            UnsupportedError: a later release wrote it.

        Example:
            >>> import numpy as np, reshard
            >>> _ = reshard.save("extra", 1, {"w": np.zeros(4)}, extra={"scheduler": {"last_epoch": 3}})
            >>> reshard.open("extra").extra()
            {'scheduler': {'last_epoch': 3}}
        """
        return self.data.extra_state(rank)

    @checked
    def bind(self, layout: LayoutLike) -> BoundLayout:
        """Apply a layout to the tensors of this checkpoint, and check it.

        Raises:
            LayoutError: a key has no rule, a dim does not divide, or the layout does not match in another way.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"w": np.zeros((8, 2))}, "bind.safetensors")
            >>> layout = {"mesh": {"tp": 4}, "rules": [{"match": "w", "cut": ["tp"]}]}
            >>> reshard.open("bind.safetensors").bind(layout).layouts["w"].local_shape(3)
            (2, 2)
        """
        from reshard.layout import as_layout  # noqa: PLC0415  slow to import, and not needed without a layout

        known, shapes, of_optimizer = as_layout(layout), self._shapes(), set(self.keys("optimizer"))
        weights = self._quantised
        if not weights:
            return known.bind(shapes, optimizer_keys=of_optimizer)
        from reshard.quantised.together import bind_together  # noqa: PLC0415  not needed without such weights

        return bind_together(known, shapes, weights.values(), optimizer_keys=of_optimizer)

    # -- quantised weights

    def quantised(self) -> dict[str, Quantised]:
        """The quantised weights: each is one logical tensor, which is stored as packed values and their parts.

        Returns:
            By the name of the weight its kind, its shape and the keys of its parts.

        Raises:
            MismatchError: a part is missing, or parts, shapes and config.json contradict each other.
            UnsupportedError: a weight is quantised in a way that is not known.

        Example:
            >>> import ml_dtypes, numpy as np, reshard
            >>> fp8, scales = np.zeros((256, 256), ml_dtypes.float8_e4m3fn), np.ones((2, 2), np.float32)
            >>> reshard.save_file({"a.weight": fp8, "a.weight_scale_inv": scales}, "fp8.safetensors")
            >>> reshard.open("fp8.safetensors").quantised()["a.weight"].parts
            {'weight': 'a.weight', 'scale': 'a.weight_scale_inv'}
        """
        return dict(self._quantised)

    @checked
    def dequantised(self) -> Checkpoint:
        """The same checkpoint with ordinary float32 tensors instead of quantised weights.

        The values are those of the library that owns the kind. They are computed in float32 when they are read, and
        `dtype=` of a load rounds them once. No tensor is read before, except packed integers that fit two ways of
        packing, until a set bit excludes one.

        Returns:
            A checkpoint that must be closed separately. Reads of parts are verified as in this checkpoint.

        Raises:
            UnsupportedError: the values of a kind are not known.
            MismatchError: as `quantised`; or a weight would have the name of another tensor.

        Example:
            >>> import ml_dtypes, numpy as np, reshard
            >>> fp8, scales = np.ones((2, 2), ml_dtypes.float8_e4m3fn), np.full((1, 1), 0.5, np.float32)
            >>> reshard.save_file({"a.weight": fp8, "a.weight_scale_inv": scales}, "small.safetensors")
            >>> with reshard.open("small.safetensors") as checkpoint, checkpoint.dequantised() as plain:
            ...     plain.load(dtype="bfloat16")
            {'a.weight': array([[0.5, 0.5],
                   [0.5, 0.5]], dtype=bfloat16)}
        """
        from reshard.quantised.dequantise import add_dequantised  # noqa: PLC0415  not needed by most reads

        weights = self._quantised
        index, stored, path = self._again()
        file = add_dequantised(index, stored, self._index, weights.values(), path, read=self.read)
        named = {one.packed: one.name for one in weights.values()}
        taken = next((name for name in named.values() if name in self._index and name not in named), None)
        if taken is not None:
            raise MismatchError(f"there is a tensor {show(taken)} beside the quantised weight of this name", key=taken)
        computed = dict.fromkeys((key for one in weights.values() for key in one.parts.values()), ())
        return self._computed(index, file, computed | {key: (name,) for key, name in named.items()})

    @checked
    def in_fp8(self, keys: Collection[str]) -> Checkpoint:
        """The same checkpoint with some weights in block-scaled FP8: codes, and scales as `<name>_scale_inv`.

        The rule is that of `quant_method: fp8` of transformers, with blocks of 128 x 128. No tensor is read: codes and
        scales are computed when they are read. Reading the values of such a checkpoint in bfloat16 and quantising them
        again gives the same bytes, if they were quantised from bfloat16.

        Args:
            keys: the weights, of 16 or 32 bits, with complete blocks.

        Returns:
            A checkpoint that must be closed separately.

        Raises:
            ArgumentError: a weight has no complete blocks, or another dtype.

        Example:
            >>> import numpy as np, reshard
            >>> reshard.save_file({"a.weight": np.full((128, 128), 3, np.float32)}, "wide.safetensors")
            >>> with reshard.open("wide.safetensors") as checkpoint, checkpoint.in_fp8(["a.weight"]) as narrow:
            ...     narrow["a.weight"].dtype, narrow.read("a.weight_scale_inv")
            ('F8_E4M3', array([[0.00669643]], dtype=float32))
        """
        from reshard.quantised.quantise import BLOCK, add_quantised, fits  # noqa: PLC0415  not needed by most reads

        for key in keys:
            if not fits(self.shape(key)):
                shape = self.shape(key)
                raise ArgumentError(f"{show(key)} of shape {shape} has no complete blocks of {BLOCK}", key=key)
        index, stored, path = self._again()
        file, names = add_quantised(index, stored, self._index, keys, path)
        return self._computed(index, file, {key: (key, scale) for key, scale in names.items()})

    @checked
    def in_nvfp4(self, form: Literal["nvfp4", "nvfp4-modelopt"]) -> Checkpoint:
        """The same checkpoint with the parts of NVFP4 weights under the names of one form.

        The bytes of codes and of scales of blocks stay. The global scale of one form is the reciprocal of that of the
        other; a conversion back gives the same bytes.

        Args:
            form: "nvfp4" for that of compressed-tensors, or "nvfp4-modelopt".

        Returns:
            A checkpoint that must be closed separately.

        Raises:
            UnsupportedError: a weight is quantised otherwise, or a global scale has no such reciprocal.
            MismatchError: a part would have the name of another tensor.

        Example:
            >>> import ml_dtypes, numpy as np, reshard
            >>> parts = {"a.weight": np.zeros((2, 8), np.uint8), "a.weight_scale_2": np.array(0.5, np.float32)}
            >>> parts["a.weight_scale"] = np.ones((2, 1), ml_dtypes.float8_e4m3fn)
            >>> reshard.save_file(parts, "modelopt.safetensors")
            >>> with reshard.open("modelopt.safetensors") as checkpoint, checkpoint.in_nvfp4("nvfp4") as other:
            ...     sorted(other), other.read("a.weight_global_scale")
            (['a.weight_global_scale', 'a.weight_packed', 'a.weight_scale'], array([2.], dtype=float32))
        """
        from reshard.quantised.nvfp4 import in_form  # noqa: PLC0415  not needed by most reads

        made = in_form(self._quantised.values(), form, self._index, self.read)
        index, stored, path = self._again()
        scales = made.scales.values()
        new = [(name, "F32", shape, "constant", (value,), ()) for name, shape, value in scales]
        file = _core.add_quantised(index, stored, path, new) if new else -1
        for key, name in made.moved.items():
            index.add_same(name, self._index, key)
        computed: dict[str, tuple[str, ...]] = dict.fromkeys(made.moved, ())
        return self._computed(index, file, computed | {key: (scale[0],) for key, scale in made.scales.items()})

    def _again(self) -> tuple[_core.Index, _core.Index, str]:
        """Two indexes of the same files without tensors, and the path of one of them."""
        from reshard.formats.own_files import opened_again  # noqa: PLC0415  slow to import

        source = self._index
        index, stored = (opened_again(source, range(source.n_files), self.manifest) for _ in range(2))
        return index, stored, source.file_path(0) if source.n_files else str(self.path)

    def _computed(self, index: _core.Index, file: int, computed: Mapping[str, tuple[str, ...]]) -> Checkpoint:
        """A checkpoint in which tensors of a file of computed values stand for others.

        Args:
            index: the index with the file, and without tensors.
            file: the number of the file.
            computed: the names in the file, by the tensor that they stand for.
        """
        for key in self._all_keys():
            if key in computed:
                for name in computed[key]:
                    index.add_whole(name, file)
            elif key not in self._unplaced:
                index.add_same(key, self._index, key)
        data = self.data
        is_locked = self._unlock is not None and self._unlock.alive
        lock = data.lock.duplicate() if is_locked and data.lock is not None else None
        # The checksums are set in the index. The file of computed values has none in the manifest.
        made = Checkpoint(replace(data.view(index, lock), common=self.common, is_renamed=True, manifest=None))
        made._is_computed = True
        return made

    @functools.cached_property
    def _quantised(self) -> Mapping[str, Quantised]:
        from reshard.quantised.stored import quantised_in  # noqa: PLC0415  not needed by most reads

        path = self.data.place
        keys = [key for key in self.keys("model") if key not in self._unplaced]
        known = self.data.quantised(keys)
        if known is not None:
            return known
        has_config = self.data.traits.is_pretrained and not self._is_computed and path.is_folder()
        return quantised_in(
            self._index,
            keys,
            path if has_config else None,
            is_whole=self._reopen is not None,  # no view, which may have other tensors
            read=lambda key: self.read(key).tobytes(),
        )

    def _info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a tensor. Raises KeyNotFoundError."""
        try:
            return self._index.info(key)
        except KeyNotFoundError:
            raise self._missing(key) from None

    def _missing(self, key: str) -> KeyNotFoundError:
        near = " or ".join(show(name) for name in nearest(key, self))
        return KeyNotFoundError(
            f"there is no tensor {show(key)} in {self.path}",
            key=key,
            path=str(self.path),
            hint=f"did you mean {near}?" if near else None,
        )

    def _wanted(self, part: Part, keys: Collection[str] | None) -> list[str]:
        if keys is None:
            return self.keys(part)
        wanted = self._keys if part == "all" else self.keys(part)  # no list of a million keys for a few
        chosen = {keys} if isinstance(keys, str) else set(keys)
        for key in chosen:
            if key not in self:
                raise self._missing(key)
        return [key for key in wanted if key in chosen]
