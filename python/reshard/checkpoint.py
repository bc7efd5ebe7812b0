"""An opened checkpoint: look at its tensors, read any slice, load any rank's arrays under any layout, prove it.

A `Checkpoint` is an index of stored shards (`_core.Index`) with what its format says beside them; `opening` makes
them. It knows formats only through their modules, moves no bytes itself, and writes nothing. What is read are the files
as they were when they were opened; a file that is not as its folder's description has it is refused before any byte of
it is handed out. Where a manifest tells the sums of the files, every 256 KiB that a read touches is compared with its
sum while it is copied.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np

from reshard import _core, dtypes
from reshard.arguments import check_given, checked
from reshard.errors import (
    ArgumentError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
    UnsupportedError,
)
from reshard.formats.own_files import opened_again, own_index
from reshard.formats.rank_file import Placed
from reshard.formats.scrub import scrub_share
from reshard.indexing import normalize_index
from reshard.layout import BoundLayout, ModelLayout, as_layout
from reshard.names import as_names, config_beside
from reshard.outputs import as_array, check_out, check_outs, fill, keeps_order, load_all
from reshard.words import check_text, listed, show

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from reshard.formats.base import CheckpointData
    from reshard.layout.like import DeviceLayout
    from reshard.layout.strategy import Strategy
    from reshard.names import ConfigLike, NamesLike, ResolvedTensor

__all__ = ["Checkpoint", "FileInfo", "Part", "StoredShard", "TensorInfo", "Verify"]

Part = Literal["all", "model", "optimizer"]
Verify = Literal["full", "touched", "structure"]
_Stored: TypeAlias = (
    tuple[str, tuple[int, ...], Placed] | tuple[str, tuple[int, ...], Placed, Mapping[int, Sequence[int]]]
)
"""dtype, global shape and stored arrays of a tensor, and factors of dims where tiles are given in such."""
LayoutLike = ModelLayout | str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class StoredShard:
    """A stored region of a tensor.

    Where a name map makes rows of several tensors take turns, it is the box around the rows of one, so boxes overlap.

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


class _Keys(Sequence[str]):
    """The keys of an index, made when they are asked for: a file can have a million, and most are never looked at."""

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


class Checkpoint:
    """An opened checkpoint: names, shapes, and the bytes on demand. Made by `open`; safe to read from several threads.

    Attributes:
        format: "safetensors", "huggingface", "checkpoint2", "checkpoint1" (rank folders), "mindspore" (full weights) or
            "ckpt" (one such file).
        path: the file or folder that is read; of a Checkpoint 2.0 root: the iteration folder that was taken.
        iteration: the iteration, or None where the format or the folder's name has none.
        common: the counters of the run, of common.json or of tensors that keep them, or None.
        manifest: what manifest.json says, or None: then nothing that is read can be compared with a sum.
        skipped: `(folder, reason)` of iterations of the root that were tried first and passed over.
        strings: names of values of a `.ckpt` that are text: they are no tensors and cannot be read.
        aliases: of tied tensors, which are stored once: by each further name the one that is stored. Both are keys.

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
        self.path = Path(data.path)
        self.iteration = data.iteration
        self.common = data.common
        self.manifest = data.manifest
        self.skipped = data.skipped
        self.strings = data.strings
        self.aliases = data.aliases
        self._index = data.index
        own_keys = data.keys()
        self._keys: Sequence[str] = _Keys(data.index) if own_keys is None else own_keys
        self._unplaced = data.unplaced()
        self._is_scrubbed = False
        # The lock protects the files from retention while they are read. It ends with the object at the latest.
        self._unlock = None if data.lock is None else weakref.finalize(self, data.lock.close)

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
        return key in self._index or key in self._unplaced

    def close(self) -> None:
        """Let go of the files. Arrays and views that were given out stay valid; reading more is an error."""
        self._index.close()
        if self._unlock is not None:
            self._unlock()

    @property
    def verified(self) -> bool:
        """Whether there is a manifest to compare with what is read; without one only the structure is checked."""
        return self.manifest is not None

    @property
    def strategy(self) -> Strategy | None:
        """How the run cut its tensors, where rank folders were opened with their strategy."""
        return self.data.strategy()

    @checked
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
        return [key for key in self._keys if self.data.part(key) == part]

    def __getitem__(self, key: str) -> TensorInfo:
        """dtype, shape, size and shards of a tensor; KeyNotFoundError if there is none of the name."""
        self._check_placed(key)
        dtype, shape = self._index.info(key)
        shards = tuple(
            StoredShard(offset, extent, tuple(map(self.data.file_name, files)))
            for offset, extent, files in self._index.shards(key)
        )
        return TensorInfo(dtype, shape, _n_bytes(dtype, shape), shards, self.data.part(key))

    def files(self) -> list[FileInfo]:
        """The shard files that hold the tensors, with their sizes; in rank folders `rank_<number>/<name>`.

        Example:
            >>> checkpoint.files()  # doctest: +SKIP
            [FileInfo(name='model.safetensors', n_bytes=4920)]
        """
        return [
            FileInfo(self.data.file_name(file), self._index.file_bytes(file)) for file in range(self._index.n_files)
        ]

    def tiled_keys(self) -> list[str]:
        """The tensors that tiles.json describes: metadata.json cannot, so only this package reads them."""
        tiled = self.data.tiled_keys()
        return [key for key in self._keys if key in tiled]

    def unplaced(self) -> dict[str, tuple[str, tuple[tuple[int, ...], ...]]]:
        """The tensors that only `stored` reads: no strategy tells how the ranks' arrays make them up.

        Returns:
            By key the dtype, and the shapes of the local arrays, each once, in elements.

        Example:
            >>> reshard.open("output/checkpoint").unplaced()["embed.weight"]  # doctest: +SKIP
            ('F32', ((8, 4),))
        """
        return dict(self._unplaced)

    def _check_placed(self, *keys: str) -> None:
        """Refuse tensors whose parts have no place, and what is no key of a tensor."""
        for key in keys:
            check_text(key, "key of a tensor")
            if key in self._unplaced:
                shapes = " or ".join(map(str, self._unplaced[key][1][:4]))
                raise LayoutError(
                    f"each rank of {self.path} holds an array of shape {shapes} of {show(key)}, and nothing tells how "
                    "they make up the tensor",
                    path=str(self.path),
                    key=key,
                    hint="put the strategy files of the run into a folder named strategy beside it, or give "
                    "`strategy=`; if every rank holds the whole model, open the folder of one rank",
                )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        self._check_placed(*self._unplaced)
        return {key: self._index.shape(key) for key in self._keys}

    def _device_layouts(self) -> Mapping[str, DeviceLayout]:
        """For `ModelLayout.like`: what metadata.json, or the strategy of rank folders, records of each key's layout."""
        return self.data.device_layouts(self._shapes)

    def _layout_mapping(self) -> Mapping[str, Any] | None:
        """For `ModelLayout.like`: the recorded layout."""
        if self.data.is_renamed:
            raise LayoutError(
                f"the tensors of {self.path} are seen under other names than those under which they were cut",
                path=str(self.path),
                hint="take the layout of the checkpoint as it is stored, without a name map",
            )
        self._check_placed(*self._unplaced)
        return self.data.layout_mapping(self._shapes)

    # -- reading

    def read(
        self, key: str, index: object = None, out: np.ndarray | None = None, *, verify: Verify = "touched"
    ) -> np.ndarray:
        """Read a tensor or a slice of it; only the bytes of the slice's box are read.

        Args:
            key: name of the tensor.
            index: a basic numpy index: integers, slices, `...`, a tuple of them; None: everything.
            out: a C-contiguous array of the right shape and dtype that is filled and returned.
            verify: as in `load`.

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
        self._check_placed(key)
        dtype, shape = self._index.info(key)
        if dtypes.is_packed(dtype) and index not in (None, ..., ()):
            raise ArgumentError(f"`{key}` is {dtype}, packed into bytes: it can only be read whole", key=key)
        box = normalize_index(() if index is None else index, shape)
        request = _core.Request()
        request.add_region(key, key, box.offset, box.shape)
        plan = self.plan(request, verify=verify, keys=[key])
        if out is not None:
            # The result's shape, of an array without memory: `out` is checked before the first byte is read.
            check_out(key, out, dtype, np.broadcast_to(0, box.shape)[box.post].shape)
            if keeps_order(box):
                fill(plan, [out])
                return out
        array = as_array(*plan.load()[0], dtype, box.shape)
        if not dtypes.is_packed(dtype):
            array = array[box.post]
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
        verify: Verify = "touched",
        threads: int | None = None,
        progress: _core.Progress | None = None,
    ) -> dict[str, np.ndarray]:
        """Load the arrays of a rank under a layout, or whole tensors.

        Args:
            layout: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder; None: whole tensors.
            rank: the rank whose arrays are wanted; may be left out where the layout has only one.
            part: "model", "optimizer" or "all".
            keys: only these tensors.
            out: C-contiguous arrays by name that are filled instead of new ones: exactly those that are loaded.
            dtype: cast the floating-point tensors to this dtype ("bfloat16", np.float32, ...); others stay.
            copy: False gives private copy-on-write views of the files where the wanted bytes lie contiguous, and
                copies elsewhere. Writing to a view changes neither the file nor another view's process. A view stays
                valid after `close()`, but not if someone truncates the file.
            verify: "touched": where there is a manifest, every 256 KiB that the load touches is compared with its sum
                as it is copied, with `copy=False` before a view is handed out. "full": all shard files are, once, and
                then what is touched. "structure": only sizes and headers. Without a manifest all three are the last,
                but for `.ckpt` files: one with a CRC is compared with it whole, once, the first time it is touched.
            threads: threads of the copy; default: the processors of this process.
            progress: called as `progress(done_bytes, total_bytes)`.

        Returns:
            The arrays by name, in the order of the checkpoint; keys that the layout joins come as one 1-D array under
            the name of the join. A rank gets only what it holds; an empty part is an array of size 0.

        Raises:
            ArgumentError: a layout of several ranks without a rank; `out` does not match.
            KeyNotFoundError: `keys` names a tensor that is not there.
            LayoutError: the layout does not fit the tensors.
            MismatchError: an array of `out` has another shape or dtype; or ranks hold different bytes of a tensor that
                the strategy of rank folders does not list.
            CoverageError: the stored shards do not cover what is wanted.
            DamagedFileError, StorageError: while reading; the content of `out` is then undefined.

        Example:
            >>> own = checkpoint.load("layout.yaml", rank=3, part="model")  # doctest: +SKIP
        """
        request, names, wanted = self._request(layout, rank, part, keys)
        plan = self.plan(request, dtype, verify=verify, keys=wanted)
        arrays = plan.arrays
        if out is not None:
            check_outs(out, names, arrays)
            if not copy:
                raise ArgumentError("`out` and `copy=False` exclude each other: a view cannot lie in a given array")
            fill(plan, [out[name] for name in names], threads, progress)
            return {name: out[name] for name in names}
        views: list[tuple[_core.Buffer, int] | None] = [None] * len(arrays) if copy else plan.views()
        copied = [i for i, view in enumerate(views) if view is None]
        if copied:
            for i, place in zip(copied, plan.only(copied).load(threads=threads, progress=progress), strict=True):
                views[i] = place
        return {
            name: as_array(*view, stored, shape)
            for (name, stored, shape, _), view in zip(arrays, views, strict=True)
            if view is not None
        }

    def _request(
        self, layout: LayoutLike | None, rank: int | None, part: Part, keys: Collection[str] | None
    ) -> tuple[_core.Request, list[str], list[str]]:
        """What a load wants, the names of its arrays in order, and the keys of which they are made."""
        wanted = self._wanted(part, keys)
        if layout is None:
            if rank is not None:
                raise ArgumentError("`rank` was given without `layout`: whole tensors are the same on every rank")
            self._check_placed(*wanted)
            request = _core.Request()
            for key in wanted:
                shape = self._index.shape(key)
                request.add_region(key, key, (0,) * len(shape), shape)
            return request, wanted, wanted
        bound = self.bind(layout)
        if rank is None:
            if len(bound.ranks) != 1:
                raise ArgumentError(
                    f"the layout has {len(bound.ranks)} ranks; say which one is wanted", hint="give `rank=`"
                )
            rank = bound.ranks[0]
        only = None if len(wanted) == len(self._keys) else wanted
        held = set(bound.holds(rank))
        return bound.request(rank, only), bound.local_names(rank, only), [key for key in wanted if key in held]

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor; opens nothing. KeyNotFoundError if there is none of the name.

        Example:
            >>> checkpoint.shape("w")  # doctest: +SKIP
            (4096, 1024)
        """
        self._check_placed(key)
        return self._index.shape(key)

    def plan(
        self,
        request: _core.Request,
        dtype: object = None,
        *,
        verify: Verify = "touched",
        keys: Collection[str] | None = None,
    ) -> _core.Plan:
        """The checked copies of a request: for code that writes or places the bytes itself.

        Args:
            request: what is wanted.
            dtype: as in `load`.
            verify: as in `load`; what is touched is compared when the plan is carried out.
            keys: the tensors that the request names; None: any. Of rank folders, what is read as a replica on several
                ranks because the strategy does not list it is compared now, once.

        Raises:
            KeyNotFoundError, MismatchError, CoverageError, UnsupportedError: the request cannot be met.
            MismatchError: ranks hold different bytes of a tensor that the strategy does not list.
            DamagedFileError, StorageError: `verify="full"` found damage.

        Example:
            >>> checkpoint.plan(checkpoint.bind("layout.yaml").request(3)).n_bytes  # doctest: +SKIP
        """
        check_given(verify=verify)
        if verify not in ("full", "touched", "structure"):
            raise ArgumentError(f'`verify` is {verify!r}; "full", "touched" or "structure" are accepted')
        if verify == "full":
            self.scrub()
        self.data.check(keys)
        return self._index.plan(
            request,
            dtype=None if dtype is None else dtypes.parse_dtype(dtype),
            verify=verify != "structure",
        )

    @checked
    def scrub(self, share: tuple[int, int] = (0, 1), *, threads: int | None = None) -> None:
        """Compare all bytes of the shard files with their sums, as the manifest tells them, or with their own.

        Only a `.ckpt` file can have a sum of its own; other files without a manifest have nothing to compare.

        Through the page cache: what is read here is going to be loaded. A scrub of everything is done only once.

        Args:
            share: `(i, n)`: only the i-th of n equal shares of the files, i from 0.
            threads: threads that read.

        Raises:
            DamagedFileError: bytes differ; the message names file, tensors and range.
            StorageError: a file cannot be read.

        Example:
            >>> checkpoint.scrub()  # doctest: +SKIP
        """
        if self._is_scrubbed:
            return
        number, count = share
        if self.manifest is None:
            for file in range(number, self._index.n_files, count):
                self._index.prove_file(file)
            self._is_scrubbed = count == 1
            return
        path = self.data.path
        is_folder = path.is_folder()
        folder = path if is_folder else path.parent
        scrub_share(folder, self.manifest, share, None if is_folder else path.name, threads=threads)
        self._is_scrubbed = count == 1

    # -- the same files, other tensors

    def view(
        self, tensors: Mapping[str, _Stored] | Iterable[tuple[str, _Stored]], *, is_renamed: bool = False
    ) -> Checkpoint:
        """The same files with other tensors: made of what is stored in them, without reading it.

        Args:
            tensors: dtype, global shape and stored arrays of each: `(file, stored name, stored shape, tiles)` with the
                numbers of this checkpoint's files, as `_core.Index.stored` tells them; and `factors`, if tiles are in
                those. As pairs they can come one by one.
            is_renamed: the tensors have other names than in the recorded layout.

        Returns:
            A checkpoint that stays open, and is closed, by itself. What is read of it is proven as here.

        Raises:
            DamagedFileError: a file is not the one any more that was opened.
            CoverageError, MismatchError: what is stored makes no such tensor.

        Example:
            >>> info = checkpoint["w"]  # doctest: +SKIP
            >>> checkpoint.view({"v": (info.dtype, info.shape, checkpoint._index.stored("w"))}).keys()  # doctest: +SKIP
            ['v']
        """
        data = self.data
        index = opened_again(
            self._index,
            range(self._index.n_files),
            self.manifest,
            ckpt=data.ckpt_files,
            follow_links=data.follow_links,
            method=data.method,
        )
        for key, (dtype, shape, stored, *factors) in tensors.items() if isinstance(tensors, Mapping) else tensors:
            # That regions overlap was allowed, where it was, by what described them.
            index.add_tiles(key, dtype, shape, stored, overlapping=True, factors=factors[0] if factors else None)
        # The files must not be removed while either of the two reads them.
        is_locked = self._unlock is not None and self._unlock.alive
        lock = data.lock.duplicate() if is_locked and data.lock is not None else None
        return Checkpoint(replace(data.view(index, lock), common=self.common, is_renamed=is_renamed))

    @checked
    def renamed(
        self, names: NamesLike, *, reverse: bool = False, config: ConfigLike | None = None, part: Part = "all"
    ) -> Checkpoint:
        """The same checkpoint under other names: tensors renamed, fused, split, stacked or transposed, and none read.

        State of the optimizer follows its tensor.

        Args:
            names: a `NameMap`, the path of one, its mapping, or a preset such as "qwen3-mindspore".
            reverse: go from the map's side `to` to its side `from`.
            config: the model's `config.json`, for the sizes that the map takes from it; default: the one in the folder.
            part: only these tensors.

        Returns:
            A checkpoint that stays open, and is closed, by itself.

        Raises:
            NamesError: the map does not fit the tensors: a part is missing, shapes do not divide, no rule matches.
            MismatchError: parts of one tensor have different dtypes.
            UnsupportedError: a tensor is packed into less than bytes, and would be taken apart.

        Example:
            >>> import numpy as np, reshard
            >>> parts = {"q": np.zeros((4, 2), np.float32), "k": np.ones((4, 2), np.float32)}
            >>> reshard.save_file(parts, "m.safetensors")
            >>> names = {"rules": [{"from": ["q", "k"], "to": "qk", "join": 0, "turns": [2, 2]}]}
            >>> with reshard.open("m.safetensors") as checkpoint, checkpoint.renamed(names) as fused:
            ...     fused.read("qk")[:, 0]
            array([0., 0., 1., 1., 0., 0., 1., 1.], dtype=float32)
        """
        known = as_names(names, config_beside(self.data.path) if config is None else config)
        shapes = self._shapes() if part == "all" else {key: self._index.shape(key) for key in self.keys(part)}
        tensors = (known.reversed() if reverse else known).resolve(shapes, optimizer_keys=set(self.keys("optimizer")))
        # Of a tensor that becomes hundreds, what is stored is asked once: they follow one another.
        stored_of = functools.lru_cache(maxsize=1)(self._index.stored)
        return self.view(
            ((made.key, (self._dtype_of(made), made.shape, made.stored(stored_of), made.factors)) for made in tensors),
            is_renamed=True,
        )

    def _dtype_of(self, made: ResolvedTensor) -> str:
        """The one dtype of all that a renamed tensor is made of."""
        found = {source.key: self._index.info(source.key)[0] for source in made.sources}
        first, dtype = next(iter(found.items()))
        other = next((key for key in found if found[key] != dtype), None)
        if other is not None:
            raise MismatchError(
                f"{show(made.key)} would be made of {show(first)}, {dtype}, and of {show(other)}, {found[other]}",
                key=other,
                hint="convert to one dtype first; `dtype=` of `convert` does so",
            )
        if dtypes.is_packed(dtype) and any(source.placement is not None for source in made.sources):
            raise UnsupportedError(
                f"{show(first)} is {dtype}, packed into bytes: it can get another name, and not be taken apart",
                key=first,
            )
        return dtype

    # -- what one rank stored

    def ranks(self) -> list[int]:
        """The ranks that saved it, ascending: those that `stored` takes. None where no file is a rank's own.

        Example:
            >>> checkpoint.ranks()  # doctest: +SKIP
            [0, 1, 2, 3]
        """
        return [] if self._own is None else list(self._own)

    @checked
    def stored(
        self, rank: int, *, keys: Collection[str] | None = None, verify: Verify = "touched"
    ) -> dict[str, np.ndarray]:
        """Load what a rank's own files hold, as it lies in them: local arrays, no layout asked.

        Where each shard is written once, a rank's files lack what another one wrote for it.

        Args:
            rank: the rank that wrote the files.
            keys: only these arrays.
            verify: "touched" or "structure", as in `load`.

        Returns:
            The arrays by the names of the files, the model's first; arrays that a layout joined are under the name of
            the join, flat ones have one dim, and counters that are kept as tensors are among them.

        Raises:
            ArgumentError: the rank is none of `ranks()`, or no file is a rank's own: tensors are stored whole.
            KeyNotFoundError: `keys` names what the rank does not hold.
            DamagedFileError, StorageError: while reading, or the files are not those that were opened.

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
        request = _core.Request()
        for key in wanted:
            shape = index.shape(key)
            request.add_region(key, key, (0,) * len(shape), shape)
        return load_all(index.plan(request, verify=verify != "structure"))

    def stored_info(self, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What `stored` would load, as dtype and shape in elements; reads headers only. Raises as that does.

        Example:
            >>> checkpoint.stored_info(3)["w"]  # doctest: +SKIP
            ('BF16', (1024, 4096))
        """
        index = self._own_index(rank)
        return {key: index.info(key) for key in index.keys()}  # noqa: SIM118  not a mapping

    @functools.cached_property
    def _own(self) -> Mapping[int, list[int]] | None:
        """Numbers of the files of each rank; None: the files hold whole tensors."""
        return self.data.rank_files()

    def _own_index(self, rank: int) -> _core.Index:
        """An index of a rank's own arrays; every file is the one that was opened."""
        if self._own is None:
            raise ArgumentError(
                f"{self.path} holds whole tensors: no file of it is that of one rank", hint="`load` gives them"
            )
        if rank not in self._own:
            raise ArgumentError(f"rank {rank} did not save {self.path}", hint=f"these did: {listed(self._own)}")
        return own_index(
            self._index, self._own[rank], self.manifest, ckpt=self.data.ckpt_files, method=self.data.method
        )

    # -- what lies beside the tensors

    def extra(self, rank: int = 0) -> dict[str, Any]:
        """The state that was saved beside the tensors, by name; decoded anew at each call.

        Args:
            rank: of what every rank kept for itself, this rank's part is taken. A rank that saved none, since there
                were fewer then, gets nothing under those names.

        Returns:
            Rank 0's state, with this rank's own in place of rank 0's own; empty if there is none.

        Raises:
            DamagedFileError: a file is not what the manifest says, or not of the form.
            UnsupportedError: a later release wrote it.

        Example:
            >>> checkpoint.extra(rank=3)["rng"]  # doctest: +SKIP
        """
        return self.data.extra_state(rank)

    @checked
    def bind(self, layout: LayoutLike) -> BoundLayout:
        """Lay a layout over the tensors of this checkpoint: every key's rule applied, everything checked.

        Raises:
            LayoutError: a key without a rule, an extent that does not divide, or whatever else does not fit.

        Example:
            >>> checkpoint.bind("layout.yaml").layouts["w"].local_shape(3)  # doctest: +SKIP
        """
        return as_layout(layout).bind(self._shapes(), optimizer_keys=set(self.keys("optimizer")))

    def _wanted(self, part: Part, keys: Collection[str] | None) -> list[str]:
        if keys is None:
            return self.keys(part)
        wanted = self._keys if part == "all" else self.keys(part)  # of a million keys no list is made for a few
        chosen = {keys} if isinstance(keys, str) else set(keys)
        for key in chosen:
            if key not in self:
                raise KeyNotFoundError(f"there is no tensor `{key}` in {self.path}", key=key, path=str(self.path))
        return [key for key in wanted if key in chosen]


def _n_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    n = dtypes.bits(dtype)
    for extent in shape:
        n *= extent
    return n // 8
