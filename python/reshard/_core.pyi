"""The Rust core: geometry and bytes. It knows shard files, layouts and plans; it knows no checkpoint, step or framework.

Everything here is in elements unless a name ends in `_bytes`. A dtype is its safetensors name ("BF16", "F8_E4M3", ...).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, final

from reshard.layout.partition import Place, TensorLayout

Progress: TypeAlias = Callable[[int, int], object]
ReadMethod: TypeAlias = Literal["auto", "map", "read"]

__all__ = [
    "ArrayPart",
    "Buffer",
    "Buffers",
    "DeviceLayout",
    "Expression",
    "FileArray",
    "FileTensor",
    "Index",
    "IndexPattern",
    "Layout",
    "Mesh",
    "Patterns",
    "Plan",
    "Request",
    "Snapshot",
    "SnapshotPool",
    "StoredArray",
    "StoredRegion",
    "Tile",
    "Written",
    "__version__",
    "crc32c",
    "decode_strategy",
    "default_threads",
    "dtype_bits",
    "encode_strategy",
    "rename",
    "scrub",
    "write_arrays",
]

__version__: str

class Tile(NamedTuple):
    """A box of a global tensor and where it lies in a local array.

    Attributes:
        offset: first element of the box in the global tensor, one index a dim.
        shape: extent of the box, one a dim.
        local_offset: element of the local array at which the box begins.
        local_strides: elements of the local array between neighbours, one a global dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]

class StoredArray(NamedTuple):
    """An array in a file, and the tiles of a tensor in it.

    Attributes:
        file: number of the file in the index.
        name: stored name of the array.
        shape: its stored shape.
        tiles: which boxes of the tensor lie in it.
    """

    file: int
    name: str
    shape: tuple[int, ...]
    tiles: Sequence[Tile]

class StoredRegion(NamedTuple):
    """A stored region of a tensor.

    Attributes:
        offset: its first element, one index a dim.
        shape: its extent, one a dim.
        files: numbers of the files that hold it.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    files: list[int]

@final
class FileTensor:
    """A tensor of a file; of a `.ckpt` file a record."""

    @property
    def name(self) -> str:
        """Its stored name."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int:
        """Its first byte, counted from the start of the data; of a `.ckpt` from the start of the file."""

    @property
    def end(self) -> int:
        """One past its last byte, likewise."""

class ArrayPart(NamedTuple):
    """A stored part of a local array.

    Attributes:
        name: stored name of the part.
        shape: its stored shape.
        tiles: where it lies in the local array.
    """

    name: str
    shape: tuple[int, ...]
    tiles: list[Tile]

@final
class FileArray:
    """A local array of a file."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> list[ArrayPart]:
        """Its stored parts; one, unless it was split."""

class DeviceLayout(NamedTuple):
    """The layout of a tensor over the devices of its stage, as `metadata.json` records it.

    Attributes:
        device_matrix: sizes of the device axes, outermost first.
        tensor_map: for each dim the axes that divide it, counted from the last one (0), outermost first; empty: none.
        alias_name: names of the axes.
        rank_list: the global ranks, row-major.
    """

    device_matrix: Sequence[int]
    tensor_map: Sequence[Sequence[int]]
    alias_name: Sequence[str]
    rank_list: Sequence[int]

def dtype_bits(dtype: str) -> int:
    """Bits of one element of a dtype; an unknown name is an error."""

def default_threads() -> int:
    """How many threads a copy uses when none are asked for."""

@final
class Mesh:
    """Named axes and their sizes; the first varies slowest. `ranks` is the global rank at each point, row-major."""

    def __new__(cls, axes: Sequence[tuple[str, int]], ranks: Sequence[int] | None = None) -> Mesh: ...
    @property
    def axes(self) -> list[tuple[str, int]]: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def n_ranks(self) -> int: ...
    def coordinates(self, rank: int) -> dict[str, int]: ...
    def fixed(self, place: Sequence[Place]) -> dict[str, int]:
        """The coordinate at which `place` fixes each axis that it names.

        Raises:
            LayoutError: the mesh has no such axis or coordinate, or an axis is fixed at two coordinates.
        """

    def held(self, place: Sequence[Place]) -> list[int]:
        """The ranks at the coordinates that `place` fixes, in mesh order. Raises as `fixed`."""

    def folded(self, axes: Sequence[str], place: Sequence[Place]) -> list[int]:
        """For each rank of `held` its coordinates on some axes, first = outermost, as one number. Raises as `fixed`."""

@final
class Layout:
    """The geometry of one tensor on a mesh. It is checked when it is made; the tiles of every rank follow from it.

    Args:
        mesh: the mesh.
        layout: shape, partition and place of the tensor.

    Raises:
        LayoutError: the partition does not fit the shape or the mesh, or some part would be on no rank.
    """

    def __new__(cls, mesh: Mesh, layout: TensorLayout) -> Layout: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_grid(self) -> bool:
        """Whether every rank holds one box of one grid (no blocks, no flat, storage order may differ)."""

    def holds(self, rank: int) -> bool: ...
    def holders(self) -> list[int]:
        """The ranks that hold a part, in mesh order."""

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's block after `cut`, in storage order, before `flat`."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's array, in storage order; `flat`: one dim, padding included."""

    def tiles(self, rank: int) -> list[Tile]:
        """The rank's tiles; empty if it holds nothing or an empty part."""

@final
class Expression:
    """A regular expression that is searched in linear time: no look-around, no back-references.

    Args:
        text: the expression; its syntax is that of Rust's `regex` crate, which is Python's without those two.
        whole: whether it has to match the whole text, or a part of it.

    Raises:
        ArgumentError: it is not valid or too large.
    """

    def __new__(cls, text: str, *, whole: bool = True) -> Expression: ...
    def matches(self, text: str) -> bool: ...
    def groups(self, text: str) -> list[str | None] | None:
        """What its groups match; None: it does not match."""

@final
class Patterns:
    """Patterns over keys: globs in which `*` and `?` are special, and `re:` with an expression for the whole key.

    Raises:
        ArgumentError: one is no pattern, or all expressions together are too large. A search raises it when the
            searches of these patterns have taken a minute in total.
    """

    def __new__(cls, texts: Sequence[str]) -> Patterns: ...
    @staticmethod
    def check(text: str) -> bool:
        """Check a pattern without compiling it; whether it is an expression with special characters."""

    def __len__(self) -> int: ...
    def find(self, key: str) -> int | None:
        """The number of the first pattern that matches the key."""

    def find_all(self, key: str) -> list[int]:
        """The numbers of all patterns that match the key, ascending."""

    def used(self, keys: Sequence[str]) -> list[bool]:
        """Of each pattern whether it matches one of the keys."""

@final
class IndexPattern:
    """A pattern in which `{i}` stands once, for the digits of an index."""

    def __new__(cls, text: str) -> IndexPattern: ...
    def indices(self, key: str) -> list[int]:
        """The values that the index can have; two of them if there are more. ArgumentError: it has too many digits."""

@final
class Request:
    """The local arrays that a load or a file wants, each made of regions of tensors of an index."""

    def __new__(cls) -> Request: ...
    def __len__(self) -> int: ...
    def add(self, name: str, key: str, layout: Layout, rank: int) -> None:
        """The rank's part of `key` (which the rank must hold) under `name`."""

    def add_region(self, name: str, key: str, offset: Sequence[int], shape: Sequence[int]) -> None:
        """A box of `key`, in the global dim order."""

    def add_joined(self, name: str, members: Sequence[tuple[str, Layout]], rank: int, align: int) -> None:
        """The rank's part of the local blocks of all members laid end to end: one 1-D array.

        Each start is rounded up to `align` elements and the end to parts x `align`, with zeros between. All members
        have the same `flat` axes, and the rank holds each of them.
        """

    def last(self) -> tuple[tuple[int, ...], list[tuple[str, Tile]]] | None:
        """Shape of the array that was added last, and its tiles with their keys."""

@final
class Buffer:
    """Owned memory (huge pages) or a private copy-on-write map of a file; a writable buffer of bytes."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Index:
    """Which shard is where: files, and for each key its dtype, its shape and the stored tiles."""

    def __new__(cls) -> Index: ...
    @staticmethod
    def from_metadata(path: str, *, data: bytes | None = None, method: ReadMethod = "auto") -> Index:
        """Decode a `metadata.json`; the shard files lie beside it and are not opened yet.

        `data` is the content of the file where the caller has read and checked it already.
        """

    # -- files
    @property
    def n_files(self) -> int: ...
    def add_file(self, path: str, *, follow_links: bool = True, method: ReadMethod = "auto") -> int:
        """A shard file; opened when it is first needed, and then kept open."""

    def add_ckpt_file(self, path: str, *, follow_links: bool = True, method: ReadMethod = "auto") -> int:
        """The same for a `.ckpt` file. A tensor stored in several records has no stored name of its own but `<name>#<n>`."""

    def set_sums(self, file: int, n_bytes: int, header_bytes: int, header_sum: int, sums: bytes) -> None:
        """What a file must be, told before it is opened: opening checks size and header, plans check what they touch.

        Args:
            file: its number.
            n_bytes: its size.
            header_bytes: bytes before the data: the length field and the header.
            header_sum: crc32c of these bytes.
            sums: crc32c of each 256 KiB chunk of the file, the last may be shorter; 4 bytes each, little-endian.
        """

    def file_path(self, file: int) -> str: ...
    def file_bytes(self, file: int) -> int: ...
    def file_metadata(self, file: int) -> dict[str, str] | None: ...
    def file_tensors(self, file: int) -> list[FileTensor]:
        """The tensors of a file in the order of the data."""

    def file_arrays(self, file: int) -> list[FileArray]:
        """The arrays of a file, each with its stored parts."""

    def file_strings(self, file: int) -> list[str]:
        """Names of values that are text; only a `.ckpt` has such."""

    def prove_file(self, file: int) -> bool:
        """Compare all bytes with the sum that the file itself has at its end, once; False if it has none.

        Only a `.ckpt` can have one; other files are not opened. Carrying out a plan does it before the first byte is read, unless `verify=False`.
        """

    # -- tensors
    def add_whole_file(self, file: int) -> None:
        """All tensors of a file lie whole in it under their own names; of a safetensors file this keeps nothing each."""

    def add_whole(self, key: str, file: int) -> None:
        """`key` is stored whole in `file` under its own name, be it in one part or several."""

    def add_layout(self, key: str, dtype: str, layout: Layout, files: Sequence[int]) -> None:
        """`key` is stored under its own name in the files of the ranks, one file id a mesh point."""

    def add_tiles(
        self,
        key: str,
        dtype: str,
        shape: Sequence[int],
        stored: Sequence[StoredArray],
        *,
        overlapping: bool = False,
        factors: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Add a tensor that consists of explicit tiles.

        Args:
            key: its name.
            dtype: its dtype.
            shape: its global shape.
            stored: the arrays in which its tiles lie. Equal regions are replicas.
            overlapping: whether regions may overlap otherwise.
            factors: a dim with factors is that many dims in the tiles, and its extent is their product. With
                `(n0, n1)`, row `r` of the tensor is `(r // n1, r % n1)`: the interleaved rows of two arrays are one
                tile each with `factors={0: (n, 2)}`. All factors together add at most 8 dims.
        """

    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def key(self, number: int) -> str:
        """The key of this number, in the order of `keys`; IndexError if there is none."""

    def keys(self) -> list[str]:
        """In the order in which they were added; of `from_metadata`, in the file's order."""

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """dtype and global shape. Where only a shard file knows the dtype, one is opened."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape; opens nothing."""

    def holders(self, key: str) -> list[int]:
        """The files that hold a part of the tensor, ascending; opens nothing."""

    def shards(self, key: str) -> list[StoredRegion]:
        """The stored regions of a tensor.

        A region that was added with `factors` is its bounding box in the dims of the tensor; such boxes can overlap.
        """

    def stored(self, key: str) -> list[StoredArray]:
        """The stored arrays of a tensor, as `add_tiles` takes them. Opens no file.

        Tiles that were added with `factors` are returned in the dims of the tensor, one tile for each run of rows; more
        than 4 million are refused.
        """

    def metadata_layout(self, key: str) -> DeviceLayout | None:
        """The recorded device layout; None: it is null, or there is no metadata.json."""

    def metadata_dtype(self, key: str) -> str | None:
        """dtype as metadata.json spells it."""

    def prove(self) -> None:
        """Prove that the stored regions of every key cover it without hole or overlap."""

    def check(self, *, threads: int | None = None) -> list[tuple[int, str]]:
        """Open every file and check it against what is expected of it; `(file, name)` of tensors nobody asked for."""

    def plan(self, request: Request, *, dtype: str | None = None, verify: bool = True) -> Plan:
        """The checked copies from stored tiles to wanted arrays. `dtype`: cast the floating-point tensors to it.

        With `verify`, carrying out the plan reads every chunk that it touches whole and checks it against its sum,
        where `set_sums` told sums; a chunk that differs is a DamagedFileError with path, key and byte range.
        """

    def close(self) -> None:
        """Let go of the files; views stay valid, everything else that reads becomes an error."""

@final
class Buffers:
    """Memory through which files are written, kept from file to file; allocated when first needed."""

    def __new__(cls, memory_bytes: int) -> Buffers: ...

@final
class Plan:
    """All copies from stored tiles to the arrays of one request; executing it fails only by I/O."""

    @property
    def arrays(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """`(name, dtype, shape, n_bytes)`"""

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""

    @property
    def n_pieces(self) -> int: ...
    @property
    def source_bytes(self) -> dict[int, int]:
        """Bytes wanted of each file."""

    def only(self, arrays: Sequence[int]) -> Plan:
        """The plan of some of the arrays, by number."""

    def load(self, *, threads: int | None = None, progress: Progress | None = None) -> list[tuple[Buffer, int]]:
        """Fresh memory, filled: a buffer and a byte offset an array."""

    def fill(self, out: Sequence[object], *, threads: int | None = None, progress: Progress | None = None) -> int:
        """Fill writable C-contiguous buffers, one an array; the bytes that were read of the files."""

    def views(self) -> list[tuple[Buffer, int] | None]:
        """Private copy-on-write views where the wanted bytes lie contiguous and aligned in one file; else None."""

    def write(
        self,
        path: str,
        *,
        metadata: Mapping[str, str] | None = None,
        buffers: Buffers | None = None,
        threads: int | None = None,
        durable: bool = True,
        direct: bool = True,
        mode: int = 0o640,
        progress: Progress | None = None,
    ) -> Written:
        """Stream the arrays into one shard file under their names. See `write_arrays`."""

@final
class Written:
    """A file that was written, and what it must be when it is read: what `Index.set_sums` takes."""

    @property
    def n_bytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def header_sum(self) -> int: ...
    @property
    def sums(self) -> bytes: ...

@final
class SnapshotPool:
    """Huge-page memory that snapshots take and give back; at most `max_free_bytes` is kept when it is not in use."""

    def __new__(cls, max_free_bytes: int | None = None) -> SnapshotPool: ...
    @property
    def free_bytes(self) -> int: ...
    def take(
        self,
        tensors: Sequence[tuple[str, str, Sequence[int], object]],
        *,
        metadata: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> Snapshot:
        """Copy `(name, dtype, shape, buffer)` in parallel: the image of one shard file, header included.

        Changing a buffer afterwards changes nothing here. The memory is not inherited by a forked child.
        """

@final
class Snapshot:
    """The image of a shard file in memory of a pool, which it returns to when dropped or closed."""

    @property
    def n_bytes(self) -> int: ...
    def write(
        self,
        path: str,
        *,
        threads: int | None = None,
        durable: bool = True,
        direct: bool = True,
        mode: int = 0o640,
        progress: Progress | None = None,
    ) -> Written:
        """Write the image as `write_arrays` would have; the interpreter is free meanwhile. An error after a fork."""

    def close(self) -> None:
        """Give the memory back."""

StrategyItem: TypeAlias = tuple[str, int, list[list[int]]]
"""An operator of a strategy file: node_name, stage, parallel_strategy."""

StrategyLayoutItem: TypeAlias = tuple[
    str, list[list[int]], list[list[int]], list[list[int]], list[list[int]], int, int, int
]
"""A parameter of a strategy file: param_name, dev_matrix, tensor_map, param_split_shape and indices_offset as lists of
messages, field, opt_weight_shard_step, opt_weight_shard_size."""

def decode_strategy(data: bytes) -> tuple[int, list[StrategyItem], list[StrategyLayoutItem]]:
    """current_stage, operators and parameters of a strategy file in protobuf.

    DamagedFileError if it is none, or a field that must stand once does not, or a number is out of its range; the
    message does not know the file.
    """

def encode_strategy(
    current_stage: int,
    parallel_strategy_item: Sequence[StrategyItem],
    parallel_layout_item: Sequence[StrategyLayoutItem],
) -> bytes:
    """The content of a strategy file in protobuf; the numbers must be in their ranges."""

def crc32c(data: object, before: int = 0) -> int:
    """crc32c of a contiguous buffer, going on from `before`."""

def scrub(
    path: str,
    n_bytes: int,
    sums: bytes,
    *,
    direct: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[tuple[int, int]]:
    """Read a whole file and compare every chunk with its sum: the byte ranges that differ, neighbours joined.

    With `direct` the page cache is passed by, where the file system allows it, so that what is proven is the disk's
    content. A file of another size is a DamagedFileError; links are not followed. Sums as told at `Index.set_sums`.
    """

def write_arrays(
    path: str,
    tensors: Sequence[tuple[str, str, Sequence[int], object]],
    *,
    metadata: Mapping[str, str] | None = None,
    buffers: Buffers | None = None,
    threads: int | None = None,
    durable: bool = True,
    direct: bool = True,
    mode: int = 0o640,
    progress: Progress | None = None,
) -> Written:
    """Write `(name, dtype, shape, buffer)` into one shard file.

    The buffers may be strided. The file appears whole under its name (a temporary beside it, renamed), replaces a
    file that was there, and with `durable` it and its folder are synced before this returns.
    """

def rename(source: str, target: str, *, exchange: bool) -> None:
    """Rename a file or folder onto a free name, or exchange two names in one step. Raises OSError."""
