"""The Rust core: geometry and bytes. It handles shard files, layouts and plans; it has no notion of steps or frameworks.

Offsets, shapes and strides are in elements unless a name ends in `_bytes`. A dtype is given by its safetensors name
("BF16", "F8_E4M3", ...).

Records are named tuples, or classes where a file can have a million of them. What comes by column, such as `Index.alike`
and `array_kinds`, is a tuple of lists: a record for each tensor would take longer than the call. A result out of a few is a
member of an enum. An argument out of a few is a `Literal` where it is the word of a user, in a call or in a layout file.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

import numpy as np

Progress: TypeAlias = Callable[[int, int], object]
ReadMethod: TypeAlias = Literal["auto", "map", "read"]
_Place: TypeAlias = tuple[tuple[str, ...], int]
_T = TypeVar("_T")
_U = TypeVar("_U")

__all__ = [
    "ZEROS",
    "ArrayColumns",
    "ArrayCounts",
    "ArrayPart",
    "ArrayStack",
    "Buffer",
    "Buffers",
    "ChangedFile",
    "Changes",
    "DcpObject",
    "DeviceLayout",
    "Expression",
    "FileArray",
    "FileState",
    "FileTensor",
    "FlatLines",
    "FolderEntry",
    "GgufTensor",
    "Index",
    "IndexPattern",
    "Joined",
    "KeyGroup",
    "Layout",
    "LifecycleRule",
    "Loaded",
    "Mesh",
    "MetadataEncoder",
    "NotFinite",
    "ObjectStatus",
    "Opaque",
    "OpenedDcp",
    "PartSum",
    "Patterns",
    "Plan",
    "PlannedArray",
    "PutNew",
    "RankTensor",
    "RankTensors",
    "RemoteCounts",
    "RemoteObject",
    "Request",
    "RuleAction",
    "Snapshot",
    "SnapshotPool",
    "StoredArray",
    "StoredRegion",
    "Strategy",
    "StrategyItem",
    "StrategyLayoutItem",
    "TensorKind",
    "Tile",
    "TorchTensor",
    "UnfinishedUpload",
    "ValueCounts",
    "Written",
    "WrittenRange",
    "__version__",
    "add_quantised",
    "add_torch_wholes",
    "are_plain",
    "array_kinds",
    "begin_upload",
    "changes",
    "complete_upload",
    "crc32c",
    "decode_strategy",
    "decode_torch_object",
    "default_threads",
    "differing",
    "dtype_bits",
    "encode_strategy",
    "end_upload",
    "folder_sizes",
    "lifecycle_rules",
    "limit_requests",
    "number_groups",
    "object_names",
    "object_status",
    "objects_below",
    "open_dcp",
    "open_dcp_ranks",
    "put_new_object",
    "put_object",
    "read_dcp_paths",
    "read_gguf",
    "read_small_object",
    "read_torch_contents",
    "read_torch_file",
    "read_torch_object",
    "read_torch_ranks",
    "remote_counts",
    "remove_objects",
    "rename",
    "reordered",
    "scrub",
    "set_bucket_options",
    "set_cache",
    "shown_url",
    "sync_together",
    "unfinished_uploads",
    "upload_file",
    "write_arrays",
    "write_sums",
]

__version__: str

ZEROS: int
"""The number of a file of zeros, for `StoredArray`: its tiles are padding, and are read from no file."""

class Tile(NamedTuple):
    """A region of a global tensor and where it lies in a local array.

    Attributes:
        offset: first element of the region in the global tensor, one index a dim.
        shape: extent of the region, one a dim.
        local_offset: element of the local array at which the region begins.
        local_strides: elements of the local array between neighbours, one a global dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]

class StoredArray(NamedTuple):
    """An array in a file, and the tiles of a tensor in it.

    Attributes:
        file: number of the file in the index, or `ZEROS`.
        name: stored name of the array.
        shape: its stored shape.
        tiles: which regions of the tensor lie in it.
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

class PlannedArray(NamedTuple):
    """An array that a plan makes.

    Attributes:
        name: its name in the request.
        dtype: its dtype, after a cast.
        shape: its shape.
        n_bytes: its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int

class ArrayStack(NamedTuple):
    """Arrays of one dtype and shape that lie at equal distances in a buffer.

    Attributes:
        buffer: the memory.
        start: first byte of the first array.
        step_bytes: bytes from an array to the next one.
        dtype: their dtype.
        shape: their shape.
        numbers: their numbers in the plan.
    """

    buffer: Buffer
    start: int
    step_bytes: int
    dtype: str
    shape: tuple[int, ...]
    numbers: Sequence[int]

class FileState(NamedTuple):
    """By what a file is told from its later content.

    Attributes:
        n_bytes: its size in bytes.
        modified_ns: time of the last modification, in nanoseconds since 1970.
        inode: its inode number.
    """

    n_bytes: int
    modified_ns: int
    inode: int

class ChangedFile(NamedTuple):
    """A file that is not what it was when it was first opened.

    Attributes:
        path: its path.
        opened: its state when it was opened.
        now: its state now; None: it was removed.
    """

    path: str
    opened: FileState
    now: FileState | None

class TorchTensor(NamedTuple):
    """A tensor of a file of `torch.save`.

    Attributes:
        name: its path in the object.
        dtype: its dtype.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

class RankTensor(NamedTuple):
    """A tensor in the file of a rank.

    Attributes:
        path: the file.
        key: its name in the checkpoint.
        kind: what torch calls it.
        local: the shape of what is stored.
    """

    path: str
    key: str
    kind: TensorKind
    local: tuple[int, ...]

class DcpObject(NamedTuple):
    """A value in a folder of `torch.distributed.checkpoint` that is no tensor.

    Attributes:
        name: its flattened name.
        file: path of the data file that holds it.
        start: its first byte there.
        n_bytes: its size in bytes.
        transforms: what its bytes went through, for `read_torch_object`.
    """

    name: str
    file: str
    start: int
    n_bytes: int
    transforms: list[str]

class OpenedDcp(NamedTuple):
    """What a folder of `torch.distributed.checkpoint` holds.

    Attributes:
        tensors: the index of its tensors.
        objects: its other values.
        unsupported: name of each tensor that cannot be read, and why.
        files: name of each data file, and the bytes that it has at least.
    """

    tensors: Index
    objects: list[DcpObject]
    unsupported: list[tuple[str, str]]
    files: list[tuple[str, int]]

class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: its name.
        type: name of its type, as "Q4_K".
        type_number: number of its type.
        n_values: values of a block.
        n_bytes: bytes of a block.
        shape: its shape in elements.
    """

    name: str
    type: str
    type_number: int
    n_values: int
    n_bytes: int
    shape: tuple[int, ...]

class StrategyItem(NamedTuple):
    """An operator of a strategy file, with the names of the file.

    Attributes:
        node_name: its name.
        stage: its stage.
        parallel_strategy: how each of its inputs is divided.
    """

    node_name: str
    stage: int
    parallel_strategy: list[list[int]]

class StrategyLayoutItem(NamedTuple):
    """A parameter of a strategy file, with the names of the file; what the file declares as repeated is a list of lists.

    Attributes:
        param_name: its name.
        dev_matrix: sizes of the device axes.
        tensor_map: for each dim the axis that divides it.
        param_split_shape: shapes of the parts of a fused dim.
        indices_offset: their first indices.
        field: size of an embedding table that is divided by fields.
        opt_weight_shard_step: distance of the ranks that divide it further.
        opt_weight_shard_size: number of these ranks.
    """

    param_name: str
    dev_matrix: list[list[int]]
    tensor_map: list[list[int]]
    param_split_shape: list[list[int]]
    indices_offset: list[list[int]]
    field: int
    opt_weight_shard_step: int
    opt_weight_shard_size: int

class Strategy(NamedTuple):
    """A strategy file, with the names of the file.

    Attributes:
        current_stage: its stage.
        parallel_strategy_item: its operators.
        parallel_layout_item: its parameters.
    """

    current_stage: int
    parallel_strategy_item: list[StrategyItem]
    parallel_layout_item: list[StrategyLayoutItem]

class KeyGroup(NamedTuple):
    """Keys that differ only in their numbers.

    Attributes:
        first: the position of the first one.
        n_keys: how many they are.
        numbers: for each place of a number the distinct numbers at it, as they are written.
    """

    first: int
    n_keys: int
    numbers: list[list[str]]

class FolderEntry(NamedTuple):
    """An entry of a folder.

    Attributes:
        name: its name.
        mode: its type and permissions, as `os.stat_result.st_mode`; those of a link are its own.
        n_bytes: its size in bytes.
    """

    name: str
    mode: int
    n_bytes: int

class NotFinite(enum.StrEnum):
    """The worst value of an array. In files it is written as its value."""

    NAN = "nan"
    INFINITE = "inf"
    """Infinite, and no value is NaN."""

class TensorKind(enum.StrEnum):
    """What torch calls a tensor in the file of a rank."""

    TENSOR = "tensor"
    DTENSOR = "DTensor"
    SHARDED_TENSOR = "ShardedTensor"

class PutNew(enum.Enum):
    """What became of a request for an object that must not exist."""

    CREATED = "created"
    EXISTS = "exists"
    """Nothing was changed."""
    UNKNOWN = "unknown"
    """It may have been created."""

class RuleAction(enum.StrEnum):
    """What a rule of a bucket does by itself."""

    EXPIRE = "expire"
    """Objects are removed."""
    MOVE = "move"
    """Objects go to another storage class."""
    END_UPLOADS = "end uploads"
    """Unfinished uploads are removed."""

class PartSum(NamedTuple):
    """What a part of a file has of an array.

    Attributes:
        array: number of the array.
        n_bytes: its bytes in the part.
        crc: their CRC-32.
    """

    array: int
    n_bytes: int
    crc: int

class WrittenRange(NamedTuple):
    """A part of a file that was written.

    Attributes:
        start: its first byte in the file.
        end: its end in the file.
        n_bytes: bytes of the file.
        header_bytes: bytes of its header.
        header_checksum: crc32c of the header; of a file in a container, a number that is the same for all parts.
        checksums: those of the chunks of the part.
        not_finite: as of `Written`, for the values in the part.
        sums: of each array in the part, if the container has sums.
        first_sent: of an object, the number of the first part of the upload, from 0.
        sent: of an object, what the service says of each part of the upload, in their order; empty: it was left out.
    """

    start: int
    end: int
    n_bytes: int
    header_bytes: int
    header_checksum: int
    checksums: bytes
    not_finite: list[tuple[str, NotFinite]]
    sums: list[PartSum]
    first_sent: int
    sent: list[str]

class UnfinishedUpload(NamedTuple):
    """An upload in parts that was begun and not completed.

    Attributes:
        key: the name of the object in its bucket.
        upload_id: which upload of the object it is; empty in Azure, where an object has one.
        begun: when it was begun, as the service says it; empty if it does not.
        n_bytes: the bytes of its parts; None if they are not known.
    """

    key: str
    upload_id: str
    begun: str
    n_bytes: int | None

class LifecycleRule(NamedTuple):
    """One action of a rule of a bucket that is in force.

    Attributes:
        name: of the rule; empty without one.
        prefixes: how the names of its objects begin.
        action: what it does.
        storage_class: where it moves objects; else empty.
        when: such as "after 3 days".
        is_narrower: whether more than the name of an object decides.
    """

    name: str
    prefixes: list[str]
    action: RuleAction
    storage_class: str
    when: str
    is_narrower: bool

class RemoteCounts(NamedTuple):
    """What this process has requested of objects so far.

    Attributes:
        n_requests: requests.
        n_failed: those among them without an answer, or whose answer says that the same request can succeed later.
        fetched_bytes: bytes of their answers.
        wanted_bytes: bytes of the arrays that they were for.
        gap_bytes: gaps of fewer bytes were read when requests were planned last; 0: none were.
        n_at_once: how many requests were made at once then; 0: none were.
    """

    n_requests: int
    n_failed: int
    fetched_bytes: int
    wanted_bytes: int
    gap_bytes: int
    n_at_once: int

class ObjectStatus(NamedTuple):
    """What a bucket says of a name.

    Attributes:
        n_bytes: its size in bytes; None: it is a folder.
        e_tag: its ETag; empty for a folder.
        modified: time of the last change, in seconds since 1970.
    """

    n_bytes: int | None
    e_tag: str
    modified: int

def dtype_bits(dtype: str) -> int:
    """Return the bits of one element of a dtype. An unknown name raises UnsupportedError."""

def default_threads() -> int:
    """Return the number of threads that are used where `threads` is None."""

class _Block(Protocol):
    """A block of a fused dim: its size in elements, and whether it is divided."""

    @property
    def size(self) -> int: ...
    @property
    def is_cut(self) -> bool: ...

class _Partition(Protocol):
    """How a tensor is divided, as `reshard.layout.Partition`."""

    @property
    def cut(self) -> Sequence[Sequence[str]]: ...
    @property
    def uneven(self) -> Literal["refuse", "ceil"]: ...
    @property
    def sizes(self) -> Sequence[tuple[int, Sequence[int]]]: ...
    @property
    def blocks(self) -> Sequence[tuple[int, Sequence[_Block] | int]]: ...
    @property
    def flat(self) -> Sequence[str]: ...
    @property
    def stored(self) -> Sequence[int]: ...

class _TensorLayout(Protocol):
    """How one tensor lies on a mesh, as `reshard.layout.TensorLayout`."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def partition(self) -> _Partition: ...
    @property
    def place(self) -> Sequence[_Place]: ...

@final
class Mesh:
    """A device mesh: named axes and their sizes, the first axis varies slowest.

    `ranks` lists the global rank at each point in row-major order. By default the rank is the position.
    """

    def __new__(cls, axes: Sequence[tuple[str, int]], ranks: Sequence[int] | None = None) -> Mesh: ...
    @property
    def axes(self) -> list[tuple[str, int]]: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def n_ranks(self) -> int: ...
    def coordinates(self, rank: int) -> dict[str, int]: ...
    def fixed(self, place: Sequence[_Place]) -> dict[str, int]:
        """The coordinate at which `place` fixes each axis that it names.

        Raises:
            LayoutError: the mesh has no such axis or coordinate, or an axis is fixed at two coordinates.
        """

    def held(self, place: Sequence[_Place]) -> list[int]:
        """The ranks at the coordinates that `place` fixes, in mesh order. Raises as `fixed`."""

    def folded(self, axes: Sequence[str], place: Sequence[_Place]) -> list[int]:
        """For each rank of `held` its coordinates on some axes, first = outermost, as one number. Raises as `fixed`."""

@final
class Layout:
    """The geometry of one tensor on a mesh. The constructor checks it; the tiles of every rank follow from it.

    Args:
        mesh: the device mesh.
        layout: shape, partition and place of the tensor.

    Raises:
        LayoutError: the partition does not fit the shape or the mesh, or some part would be on no rank.
    """

    def __new__(cls, mesh: Mesh, layout: _TensorLayout) -> Layout: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_grid(self) -> bool:
        """Whether every rank holds one region of a regular grid: no `blocks`, no `flat`; the storage order may differ."""

    def holds(self, rank: int) -> bool: ...
    def holders(self) -> list[int]:
        """Return the ranks that hold a part, in mesh order."""

    def block_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's block after `cut`, in storage order, before `flat`."""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's array, in storage order; with `flat` one dim, padding included."""

    def tiles(self, rank: int) -> list[Tile]:
        """Return the rank's tiles; empty if the rank holds nothing or an empty part."""

@final
class Expression:
    """A regular expression that is searched in linear time. Look-around and back-references are not supported.

    Args:
        text: the expression, in the syntax of Rust's `regex` crate: Python's syntax without those two features.
        whole: match the whole text; if False, any part of it.

    Raises:
        ArgumentError: the expression is invalid or too large.
    """

    def __new__(cls, text: str, *, whole: bool = True) -> Expression: ...
    def matches(self, text: str) -> bool: ...
    def groups(self, text: str) -> list[str | None] | None:
        """Return the text of each group; None if the expression does not match."""

@final
class Patterns:
    """Patterns over keys: globs with `*` and `?`, and `re:` followed by a regular expression for the whole key.

    Raises:
        ArgumentError: a pattern is invalid, or all expressions together are too large. A search raises it when the
            searches of these patterns have taken a minute in total.
    """

    def __new__(cls, texts: Sequence[str]) -> Patterns: ...
    @staticmethod
    def check(text: str) -> bool:
        """Check a pattern without compiling it. Return whether it is an expression with special characters."""

    def __len__(self) -> int: ...
    def find(self, key: str) -> int | None:
        """Return the number of the first pattern that matches the key; None if there is none."""

    def find_all(self, key: str) -> list[int]:
        """Return the numbers of all patterns that match the key, ascending."""

    def used(self, keys: Sequence[str]) -> list[bool]:
        """Return for each pattern whether it matches one of the keys."""

@final
class IndexPattern:
    """A pattern that contains `{i}` once, for the digits of an index."""

    def __new__(cls, text: str) -> IndexPattern: ...
    def indices(self, key: str) -> list[int]:
        """Return the possible values of the index, at most two. An index with too many digits raises ArgumentError."""

def number_groups(keys: Sequence[str], labels: Sequence[int] = ...) -> tuple[list[int], list[KeyGroup]]:
    """Group keys that differ only in their numbers: components between dots of 1 to 18 digits.

    Args:
        keys: the keys.
        labels: of each key; keys of a group have the same. Empty: all have the same.

    Returns:
        The number of the group of each key, and the groups, in the order of their first keys.
    """

@final
class Request:
    """The local arrays that are requested, each made of regions of tensors of an index."""

    def __new__(cls) -> Request: ...
    def __len__(self) -> int: ...
    def add(self, name: str, key: str, layout: Layout, rank: int) -> None:
        """Request the part of a tensor that a rank holds.

        Args:
            name: the name of the array.
            key: the tensor.
            layout: the layout of the requested array.
            rank: the global rank; it must hold a part.
        """

    @staticmethod
    def of_ranks(keys: Sequence[tuple[str, Layout]], ranks: Sequence[int]) -> list[Request]:
        """Return for each rank a request for the parts of several tensors that it holds, each under its key.

        Args:
            keys: each tensor, and the layout of the requested array.
            ranks: the global ranks; each must hold a part of each tensor.
        """

    def add_all(self, keys: Sequence[tuple[str, Layout]], rank: int) -> None:
        """Request the parts of several tensors that a rank holds, each under its key.

        Args:
            keys: each tensor, and the layout of the requested array.
            rank: the global rank; it must hold a part of each.
        """

    def add_region(self, name: str, key: str, offset: Sequence[int], shape: Sequence[int]) -> None:
        """Request a region of a tensor.

        Args:
            name: the name of the array.
            key: the tensor.
            offset: first element in each global dim.
            shape: number of elements in each global dim.
        """

    def add_joined(self, joined: Joined, rank: int) -> None:
        """Request the part of a joined array that a rank holds.

        Args:
            joined: the array; the gaps between its blocks are filled with zeros.
            rank: the global rank; it must hold a part of a key.
        """

@final
class Joined:
    """Tensors that are one 1-D array on each rank: the local blocks of those that it holds, concatenated and divided."""

    def __new__(cls, name: str, members: Sequence[tuple[str, Layout]], align: int) -> Joined:
        """Join tensors, of which a rank need not hold all.

        Args:
            name: the name of the array.
            members: `(key, layout)` of each block, in order. All layouts have the same mesh and `flat` axes.
            align: each start is rounded up to a multiple of `align` elements, and the end to the number of parts times
                `align`.
        """

    def part(self, rank: int) -> tuple[int, list[tuple[str, Tile]]]:
        """Return the elements that a rank holds, padding included, and their tiles with their keys."""

    def groups(self) -> list[tuple[int, list[int]]]:
        """Return the elements of each distinct part, and the ranks that hold it, in the order of the lowest ones."""

@final
class Buffer:
    """A writable buffer of bytes: memory on huge pages, or a private copy-on-write map of a file."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class FlatLines:
    """Flat arrays one after the other, in which tensors lie one after the other."""

    @staticmethod
    def joined(arrays: Sequence[tuple[int, str, int]]) -> FlatLines:
        """One line with all of each tensor. Of each array the number of its file, its stored name and its elements."""

    @staticmethod
    def divided(files: Sequence[int], arrays: Sequence[tuple[str, int]]) -> FlatLines:
        """A line for each rank with an equal part of each tensor; the last parts are shorter or empty.

        Args:
            files: the number of the file of each rank.
            arrays: of each array of a line its stored name and its elements.
        """

    @property
    def n(self) -> int:
        """Elements of a line."""

@final
class Index:
    """Where each shard is stored: the files, and for each key its dtype, its shape and the stored tiles."""

    def __new__(cls) -> Index: ...
    @staticmethod
    def from_metadata(path: str, *, data: bytes | None = None, method: ReadMethod = "auto") -> Index:
        """Decode a `metadata.json`. The shard files are in the same folder and are not opened yet.

        Args:
            path: the path of the `metadata.json`.
            data: its content, if the caller has read it already.
            method: how the shard files are read.
        """

    @staticmethod
    def from_metadata_table(
        path: str, data: bytes, digest: str, *, method: ReadMethod = "auto", read_headers: bool = False
    ) -> Index:
        """Decode the table of a `metadata.json`, with the same result as `from_metadata`.

        Args:
            path: the path of the table. The shard files are in the same folder and are not opened yet.
            data: its content, as `MetadataEncoder.table` made it.
            digest: the digest of the `metadata.json`; a table of another one raises DamagedFileError.
            method: how the shard files are read.
            read_headers: parse headers of the files while a large table is decoded, as far as there is time. They are
                verified when the files are first needed.
        """

    # -- files
    @property
    def n_files(self) -> int: ...
    def add_file(self, path: str, *, follow_links: bool = True, method: ReadMethod = "auto") -> int:
        """Add a shard file and return its number. It is opened when it is first needed, and then kept open.

        Args:
            path: the file.
            follow_links: accept a symbolic link as the last component of the path.
            method: map the file, use positioned reads, or choose by the file system.
        """

    def add_ckpt_file(self, path: str, *, follow_links: bool = True, method: ReadMethod = "auto") -> int:
        """Add a `.ckpt` file; see `add_file`. The records of a tensor in several records are stored as `<name>#<n>`."""

    def add_gguf_file(self, path: str, *, method: ReadMethod = "auto") -> int:
        """Add a GGUF file; see `add_file`. A tensor of blocks is one of bytes, with rows of complete blocks."""

    def add_torch_file(
        self,
        path: str,
        *,
        follow_links: bool = True,
        method: ReadMethod = "auto",
        within: tuple[int, int] | None = None,
        prefix: str = ...,
    ) -> int:
        """A file of `torch.save`, whose tensors are named by their paths.

        Args:
            path: the file.
            follow_links: as in `add_file`.
            method: as in `add_file`.
            within: the first byte and the number of bytes, where it lies in another file; None: the whole file.
            prefix: what stands before the names of its tensors.
        """

    def changed_file(self, *, in_place: bool = False) -> ChangedFile | None:
        """The first file without checksums that is not what it was when it was first opened; None if there is none.

        A file that was removed with its folder is no change: what was opened is read as it was.

        Args:
            in_place: examine only the files that are open, whatever their paths name now.

        Raises:
            StorageError: a file cannot be examined.
        """

    def files_again(self, numbers: Sequence[int]) -> Index:
        """Return an index of the same files without tensors: the files with these numbers become 0, 1, ..."""

    def add_files_of(self, other: Index) -> int:
        """Add all files of another index, without its tensors, and return the number that its first file gets here.

        Raises:
            ArgumentError: checksums are recorded of a file (`set_checksums_reader`).
        """

    def set_checksums(
        self, file: int, n_bytes: int, header_bytes: int, header_checksum: int, checksums: bytes | None
    ) -> None:
        """Set the expected size and checksums of a file that is not open yet.

        Opening the file then verifies its size and header. Plans verify the chunks that they read.

        Args:
            file: its number.
            n_bytes: its size in bytes.
            header_bytes: bytes before the data: the length field and the header.
            header_checksum: crc32c of these bytes.
            checksums: crc32c of each 256 KiB chunk of the file, the last chunk may be shorter; 4 bytes each,
                little-endian. None: a plan that verifies the file asks the function of `set_checksums_reader` for them.
        """

    def set_checksums_reader(
        self, read: Callable[[list[str], bool], Sequence[tuple[int, int, int, bytes | None]]]
    ) -> None:
        """Set the function that gives the sizes and checksums of the safetensors files so far when they are needed.

        Args:
            read: called with paths of files, and whether the checksums of their chunks are needed. Returns the
                arguments of `set_checksums` after the file for each path. An error of it is raised by the method that
                needed the file. It is called from several threads.
        """

    @property
    def file_names(self) -> list[str]: ...  # without their folders
    def file_path(self, file: int) -> str: ...
    def file_bytes(self, file: int) -> int: ...
    def file_metadata(self, file: int) -> dict[str, str] | None: ...
    def file_tensors(self, file: int) -> list[FileTensor]:
        """Return the tensors of a file in the order of the data. Of a `.ckpt` file these are its records."""

    def file_arrays(self, file: int) -> list[FileArray]:
        """Return the arrays of a file, each with its stored parts: one part, unless it is stored in several records."""

    def file_strings(self, file: int) -> list[str]:
        """Return the names of values that are text. Only a `.ckpt` can have such values."""

    def verify_crc(self, file: int) -> bool:
        """Compare the content of a file with the CRC at its end, once. Return False if the file has no CRC.

        Only a `.ckpt` can have one; other files are not opened. A plan with `verify=True` verifies the CRC of its files
        before it reads other bytes.
        """

    # -- tensors
    def add_wholes(self, tensors: Sequence[tuple[str, int]]) -> None:
        """Add several tensors, as `add_whole`: each with its key and its file."""

    def add_whole_file(self, file: int) -> None:
        """Add all tensors of a file. Each is stored completely in the file, under its key.

        For a safetensors file no memory is needed per tensor.
        """

    def add_whole(self, key: str, file: int) -> None:
        """Add a tensor that is stored completely in one file, under its key, in one or several parts."""

    def add_layout(self, key: str, dtype: str, layout: Layout, files: Sequence[int]) -> None:
        """Add a tensor that is stored in the files of the ranks, under its key.

        Args:
            key: the tensor.
            dtype: its dtype.
            layout: its layout.
            files: the number of the file at each point of the mesh.
        """

    def add_flat(self, key: str, dtype: str, shape: Sequence[int], lines: FlatLines, start: int) -> None:
        """Add a tensor that lies in flat arrays, in row-major order. It takes no memory for each rank.

        Args:
            key: the tensor.
            dtype: its dtype.
            shape: its global shape.
            lines: the flat arrays.
            start: the element of the line at which it begins; of several lines, at which each part of it begins.
        """

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
        """Add a tensor by explicit tiles.

        Args:
            key: the tensor.
            dtype: its dtype.
            shape: its global shape.
            stored: the stored arrays that contain its tiles. Equal regions are replicas.
            overlapping: accept regions that overlap without being equal.
            factors: dims that the tiles describe by several dims, by dim. With `factors={d: (n0, n1)}`, index `r` of dim
                `d` is `(r // n1, r % n1)` in the tiles; the product of the factors is the extent of the dim. Interleaved
                rows of two arrays are then one tile each: `factors={0: (n, 2)}`. Factors add at most 8 dims.
        """

    def add_same(self, key: str, other: Index, name: str) -> None:
        """Add the tensor `name` of an index whose files are the first ones of this index, in the same order."""

    def keep_dtypes(self, keys: Sequence[str]) -> None:
        """Let no plan cast these tensors, whatever `dtype` is given. Keys that the index does not have are ignored.

        Args:
            keys: the tensors.
        """

    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def key(self, number: int) -> str:
        """Return the key with this number, in the order of `keys`. Raises IndexError if there is none."""

    def alike(self) -> tuple[list[int], list[int]]:
        """Return which tensors are stored alike: with the same dtype, shape and regions, each in as many files.

        Returns:
            For each key, in the order of `keys`, the number of its kind; and for each kind the number of its first key.
        """

    def places(self) -> list[int]:
        """Return where the tensors lie, as a number for each key, in the order of `keys`. Looks at no region.

        Tensors of one number have the same shape and the same regions in the same files. Those of several numbers may
        have them, too.
        """

    def not_taken(self, file: int) -> list[str]:
        """Return the names of the tensors of a file that the index does not take from it."""

    def keys(self) -> list[str]:
        """Return the keys in the order in which they were added; with `from_metadata`, in the order of the file."""

    def info(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and global shape. If only the shard files record the dtype, one of them is opened."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape. Opens no file."""

    def holders(self, key: str) -> list[int]:
        """Return the files that hold a part of the tensor, ascending. Opens no file."""

    def shards(self, key: str) -> list[StoredRegion]:
        """Return the stored regions of a tensor.

        For tiles with `factors` this is the bounding box in the dims of the tensor. Bounding boxes can overlap.
        """

    def stored(self, key: str) -> list[StoredArray]:
        """Return the stored arrays of a tensor, as `add_tiles` takes them. Opens no file.

        `add_tiles` accepts the result. Tiles with `factors` are converted to the dims of the tensor, one tile per run of
        rows; more than 4 million tiles raise UnsupportedError.
        """

    def metadata_layouts(self) -> dict[str, DeviceLayout]:
        """Return the recorded device layout of each tensor that has one; one object for all tensors of a layout."""

    def metadata_dtype(self, key: str) -> str | None:
        """Return the dtype in the spelling of metadata.json; None if it is not recorded."""

    def check_coverage(self) -> None:
        """Check that the stored regions of every key cover it without gaps. Raises CoverageError."""

    def check(self, *, threads: int | None = None) -> list[tuple[int, str]]:
        """Open every file and compare it with the index. Return `(file, name)` of the tensors that the index does not list."""

    def check_headers(self) -> list[tuple[int, str]]:
        """Like `check`; but of a file that the tensors of `metadata.json` fill, by their sizes and the length of the header,
        the header is not parsed. If the checksums of the file are set, the header is compared with its checksum.
        """

    def headers_with(self, text: bytes) -> list[int]:
        """Return the safetensors files whose headers hold a text. No header is parsed; unreadable files are left out."""

    def plan(self, request: Request, *, dtype: str | None = None, verify: bool = True) -> Plan:
        """Plan the copies from stored tiles to the requested arrays.

        Args:
            request: the requested arrays.
            dtype: cast floating-point tensors to this dtype; None: no cast.
            verify: compare every chunk that is read with its checksum, for files with checksums (`set_checksums`). A
                chunk that differs raises DamagedFileError with path, key and byte range when the plan is executed.
        """

    def write_small(
        self,
        folder: str,
        files: Sequence[tuple[str, Request]],
        *,
        dtype: str | None = None,
        metadata: Mapping[str, str] | None = None,
        threads: int | None = None,
        durable: bool = True,
        mode: int = 0o640,
    ) -> list[Written | None]:
        """Write small safetensors files, several at a time, with the bytes that `Plan.write` writes.

        Each is created under its name and written at once: until this returns, a file under its name can be incomplete,
        so the folder must not be in use. A file that exists is replaced when the new one is complete.

        Args:
            folder: the folder.
            files: the path of each below the folder, and the request for its arrays.
            dtype: as in `plan`.
            metadata: the `__metadata__` of each file.
            threads: files that are written at the same time; None: as many as there are processors.
            durable: sync each file and its folder.
            mode: permission bits of the files, less the umask.

        Returns:
            The record of each file; None for a file that is not small and was not written.
        """

    def request_arrays(self, request: Request, *, dtype: str | None = None) -> list[PlannedArray]:
        """Return the arrays of a request, as those of a plan, without a plan.

        Args:
            request: the requested arrays.
            dtype: as in `plan`.
        """

    def request_sizes(self, request: Request, *, dtype: str | None = None) -> list[int]:
        """Return the bytes of each array of a request, without a plan.

        Args:
            request: the requested arrays.
            dtype: as in `plan`.
        """

    def request_bytes(self, requests: Sequence[Request], *, dtype: str | None = None) -> list[int]:
        """Return the bytes of the arrays of each request, without a plan.

        Args:
            requests: the requested arrays.
            dtype: as in `plan`.
        """

    def whole_request(self, names: Sequence[str], keys: Sequence[str] | None = None) -> Request:
        """Return the request for whole tensors. Opens no file. It is planned in less time than one of regions.

        Args:
            names: the names of the arrays.
            keys: the tensor of each; None: the names are the keys.
        """

    def first_different(
        self,
        groups: Sequence[
            Sequence[tuple[int, int, str, tuple[int, ...], int, tuple[int, ...], str, tuple[int, ...] | None]]
        ],
    ) -> tuple[int, int] | None:
        """The first group of stored arrays of which one holds other bytes than the first one, and the number of this one.

        Args:
            groups: of each array a number that is not used, the number of the file, the stored name and shape, the first
                element in the stored array, shape and dtype, and the strides in elements, unless they are row-major.
        """

    def close(self) -> None:
        """Close the files. Views stay valid; every later read raises ArgumentError."""

@final
class Buffers:
    """Memory through which files are written, reused for each file. It is allocated at the first write."""

    def __new__(cls, memory_bytes: int) -> Buffers: ...
    def prepare(self, n_bytes: int) -> None:
        """Start a thread that makes the system provide the memory for a file of this size, until the file is written.

        Args:
            n_bytes: size of the file in bytes.
        """

Container: TypeAlias = tuple[bytes, Sequence[int], Sequence[tuple[int, int]]]
"""How the arrays of a plan lie in a file of another format than safetensors:

1. the bytes before, between and behind the arrays, in the order of the file;
2. the first byte of each array, in the order of the plan;
3. `(first byte, number of the array)` of each place that gets the CRC-32 of an array: four bytes, little-endian, behind
   the array."""

@final
class Plan:
    """All copies from stored tiles to the arrays of one request. Executing a plan fails only for I/O and damage."""

    @property
    def arrays(self) -> list[PlannedArray]:
        """Its arrays, in the order of the request."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""

    @property
    def n_copies(self) -> int:
        """Number of copies between a stored and a requested region."""

    @property
    def source_bytes(self) -> dict[int, int]:
        """Bytes that are copied from each file, by file number."""

    def only(self, arrays: Sequence[int]) -> Plan:
        """Return the plan of some of the arrays, given by number."""

    def load(self, *, threads: int | None = None, progress: Progress | None = None) -> Loaded:
        """Allocate and fill memory. Return a buffer and a byte offset for each array.

        Args:
            threads: number of threads; None: `default_threads()`.
            progress: called as `progress(done_bytes, total_bytes)`.
        """

    def fill(self, out: Sequence[object], *, threads: int | None = None, progress: Progress | None = None) -> int:
        """Fill buffers of the caller. Return the number of bytes that were read from the files.

        Args:
            out: a writable C-contiguous buffer for each array.
            threads: number of threads; None: `default_threads()`.
            progress: called as `progress(done_bytes, total_bytes)`.
        """

    def are_equal(self, other: Plan, *, threads: int | None = None) -> list[bool]:
        """For each array whether it has the same bytes as the one of another plan. Both plans are read into memory.

        Args:
            other: with as many arrays.
            threads: number of threads; None: `default_threads()`.
        """

    def views(self) -> list[tuple[Buffer, int] | None]:
        """Return a private copy-on-write view of each array that is contiguous and aligned in one file, else None."""

    def write(
        self,
        path: str,
        *,
        metadata: Mapping[str, str] | None = None,
        container: Container | None = None,
        buffers: Buffers | None = None,
        threads: int | None = None,
        durable: bool = True,
        direct: bool = True,
        mode: int = 0o640,
        progress: Progress | None = None,
    ) -> Written:
        """Stream the arrays into one shard file under their names. For the other arguments see `write_arrays`.

        Args:
            path: the file.
            metadata: `__metadata__` of the header of a safetensors file.
            container: the other bytes of a file of another format; None: a safetensors file.
            buffers: memory to write through.
            threads: number of threads.
            durable: sync the file and its folder before this returns.
            direct: write with `O_DIRECT` where the file system supports it, and if not durable, where that is faster.
            mode: permission bits, reduced by the umask.
            progress: called as `progress(done_bytes, total_bytes)`.

        Raises:
            ArgumentError: the container does not fit the arrays.
        """

    def write_part(
        self,
        path: str,
        start: int,
        end: int,
        *,
        upload: str | None = None,
        metadata: Mapping[str, str] | None = None,
        container: Container | None = None,
        buffers: Buffers | None = None,
        threads: int | None = None,
        durable: bool = True,
        direct: bool = True,
        mode: int = 0o640,
        progress: Progress | None = None,
    ) -> WrittenRange:
        """Write a part of the file that `write` writes, under its name, which other processes fill at the same time.

        The sums of arrays of a container are left out: `write_sums` writes them when all parts are there. Of an object,
        parts of the upload with sums of arrays that begin in another part of the file are left out: see `send_left`.

        Args:
            path: the file.
            start: where the part begins, in bytes of the arrays. Parts that follow each other there do so in the file.
            end: where it ends; at `n_bytes` the last part does.
            upload: of an object, the upload into which other processes send parts, too. The part begins with one of the
                upload, and has complete ones.
            metadata: as in `write`; so are all others.

        Raises:
            ArgumentError: the container does not fit the arrays.
            StorageError: among others, with the error number ESTALE: the service does not have the upload.
        """

    def send_left(
        self,
        path: str,
        upload: str,
        numbers: Sequence[int],
        *,
        container: Container,
        sums: Sequence[PartSum],
        buffers: Buffers | None = None,
        threads: int | None = None,
    ) -> list[str]:
        """Send the parts of an upload that `write_part` has left out. Returns what the service says of each.

        Args:
            path: the object.
            upload: the upload.
            numbers: those of the parts, from 0.
            container: that of the file.
            sums: `sums` of all parts of the file, in its order.
            buffers: as in `write`.
            threads: as in `write`.

        Raises:
            ArgumentError: the sums are not those of all arrays.
            StorageError: as of `write_part`.
        """

@final
class Loaded:
    """The memory of the arrays of a plan: the buffer of each, and its first byte there."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> tuple[Buffer, int]: ...
    def __iter__(self) -> Iterator[tuple[Buffer, int]]: ...
    @property
    def stacks(self) -> list[ArrayStack]:
        """The same by kind."""

@final
class Written:
    """Size and checksums of a file that was written: the arguments of `Index.set_checksums`."""

    @property
    def n_bytes(self) -> int: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def header_checksum(self) -> int: ...
    @property
    def checksums(self) -> bytes: ...
    @property
    def e_tag(self) -> str | None:
        """The ETag of an object in a bucket; None for a local file."""

    @property
    def not_finite(self) -> list[tuple[str, NotFinite]]:
        """Names of the arrays with values that are not finite."""

@final
class SnapshotPool:
    """Huge-page memory for snapshots, reused. At most `max_free_bytes` of unused memory is kept."""

    def __new__(cls, max_free_bytes: int | None = None) -> SnapshotPool: ...
    @property
    def free_bytes(self) -> int: ...
    def reserve(self, image_bytes: Sequence[int]) -> None:
        """Allocate and touch memory for images of these sizes in bytes, by a thread; `take` waits for it."""

    def take(
        self,
        tensors: ArrayColumns | Iterable[tuple[str, str, Sequence[int], object]],
        *,
        metadata: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> Snapshot:
        """Copy arrays in parallel to the image of one shard file, header included.

        The caller may change the buffers afterwards. A forked child does not inherit the memory.

        Args:
            tensors: columns, or `(name, dtype, shape, buffer)` of each array; see `write_arrays`.
            metadata: `__metadata__` of the header.
            threads: number of threads; None: `default_threads()`.
        """

@final
class Snapshot:
    """The image of a shard file in memory of a pool. The memory returns to the pool when it is dropped or closed."""

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
        """Write the image to a file, as `write_arrays` does. Raises ArgumentError in a forked child.

        The interpreter is released while the file is written. For the arguments see `write_arrays`.
        """

    def close(self) -> None:
        """Return the memory to the pool."""

MetadataKind: TypeAlias = tuple[str, Sequence[int], int, int]
"""dtype in the spelling of the file, global shape, number of the grid, number of the list of cells."""

MetadataGrid: TypeAlias = tuple[Sequence[int], Sequence[int], int, Sequence[int]]
"""replica_id, axis_fragmentations, number of the layout, `global_offset` of each shard."""

MetadataLayout: TypeAlias = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[str], Sequence[int]]
"""device_matrix, tensor_map (the axes of each dim), alias_name, rank_list."""

MetadataCell: TypeAlias = tuple[int, Sequence[int], Sequence[int]]
"""`global_offset` of a shard, the ranks that hold it, numbers of their files."""

@final
class MetadataEncoder:
    """The text of a `metadata.json` in pieces, and its binary table.

    Iteration raises ArgumentError for a shard that is in no file.
    """

    def __new__(
        cls,
        keys: Sequence[str],
        kind_of: Sequence[int],
        kinds: Sequence[MetadataKind],
        grids: Sequence[MetadataGrid],
        layouts: Sequence[MetadataLayout],
        cells: Sequence[Sequence[MetadataCell]],
        files: Sequence[tuple[str, int, Sequence[int | None] | None]],
        shard_names: Mapping[int, tuple[str, str]],
    ) -> MetadataEncoder:
        """Begin the text.

        Args:
            keys: the names of the tensors, each once.
            kind_of: the number of the kind of each.
            kinds: the kinds.
            grids: the distinct grids.
            layouts: the distinct layouts, in the order in which tensors first have them.
            cells: the distinct lists of cells, each in the order of the text.
            files: name and rank of each file, and the numbers of the tensors in it: None stands for all, and is skipped
                in a list.
            shard_names: for tensors whose name is not plain, see `are_plain`: the JSON of the name of a shard before and
                after its number.

        Raises:
            ArgumentError: two tensors have one name.
        """

    def __iter__(self) -> MetadataEncoder: ...
    def __next__(self) -> bytes: ...
    def table(self, digest: str) -> bytes:
        """Return the table of the text, once, after its end.

        Args:
            digest: that of the text, which the table records.
        """

def decode_strategy(data: bytes) -> Strategy:
    """Return current_stage, operators and parameters of a strategy file in protobuf.

    Raises:
        DamagedFileError: the bytes are not a strategy, a field does not occur exactly once, or a number is out of its
            range. The message does not name the file.
    """

def encode_strategy(
    current_stage: int,
    parallel_strategy_item: Sequence[StrategyItem],
    parallel_layout_item: Sequence[StrategyLayoutItem],
) -> bytes:
    """Return the content of a strategy file in protobuf.

    Args:
        current_stage: the stage, not negative.
        parallel_strategy_item: the operators.
        parallel_layout_item: the parameters.
    """

def are_plain(names: Sequence[object], max_bytes: int) -> bool:
    """Whether all are of class `str`, with 1 to `max_bytes` printable ASCII characters and no quote or backslash."""

def array_kinds(arrays: Sequence[object]) -> tuple[list[tuple[np.dtype[Any], tuple[int, ...]]], list[int]] | None:
    """The distinct dtypes and shapes of numpy arrays, in the order of the arrays, and the number of each array's.

    Equal dtypes can occur more than once. None: one is no array, or of a subclass.
    """

def reordered(
    names: Sequence[str], order: Sequence[str], columns: tuple[Sequence[_T], Sequence[_U]]
) -> tuple[list[_T], list[_U]] | None:
    """The items of two columns in another order of their names; None: a name in `order` is not an object of `names`.

    Args:
        names: the names of the items.
        order: some of them, in the other order.
        columns: as many items each.
    """

@final
class ArrayColumns:
    """Arrays by column, as `write_arrays` takes them: faster for many than a tuple for each."""

    def __new__(
        cls,
        names: Sequence[str],
        kinds: Sequence[tuple[str, Sequence[int]]],
        kind_of: Sequence[int],
        memory: Sequence[object],
    ) -> ArrayColumns:
        """Arrays that share a few kinds.

        Args:
            names: their names.
            kinds: dtype and shape.
            kind_of: the number of the kind of each.
            memory: the buffer of each.

        Raises:
            ArgumentError: the columns have different lengths, or a kind is not listed.
        """

    def __len__(self) -> int: ...

def crc32c(data: object, before: int = 0) -> int:
    """Return the crc32c of a contiguous buffer, continued from the crc32c `before` of the preceding bytes."""

class ArrayCounts(NamedTuple):
    """What is wrong with the values of an array. A complex element is two values.

    Attributes:
        number: number of the array.
        n_nan: values that are NaN.
        n_infinite: values that are infinite.
        first_not_finite: number of the first value that is not finite, or None.
        n_negative: values below zero, in an array that cannot have them.
        first_negative: number of the first such value, or None.
    """

    number: int
    n_nan: int
    n_infinite: int
    first_not_finite: int | None
    n_negative: int
    first_negative: int | None

@final
class ValueCounts:
    """Counts values that are wrong in the arrays of a file: NaN, infinities, and values below zero where none can be.

    Args:
        arrays: dtype, first byte in the file, bytes, and whether a value below zero is wrong. In the order of the file.
        digests: number of an array, a dtype to which its values are cast, and bytes of the array at which ranges with
            digests begin or end.

    Raises:
        ArgumentError: the arrays overlap, or are not in the order of the file; or an array has no such digest.
    """

    def __new__(
        cls, arrays: Sequence[tuple[str, int, int, bool]], digests: Sequence[tuple[int, str, Sequence[int]]] = ...
    ) -> ValueCounts: ...
    def look(self, at: int, data: object, *, threads: int | None = None) -> None:
        """Look at the bytes of the file from `at` on: a contiguous buffer. Every byte is given once, in any order."""

    def found(self) -> list[ArrayCounts]:
        """The arrays with such values."""

    def digest(self, number: int, dtype: str, start: int, n_bytes: int) -> int | None:
        """The digest of a range of an array after the cast, when all its bytes were given; None: it was not asked for.

        Two ranges with other digests differ in a bit. With the same digest they are equal, but for a chance of 2^-64.
        """

def differing(dtype: str, a: object, b: object, *, threads: int | None = None) -> tuple[int, int | None]:
    """Return how many elements of two buffers differ in a bit, and the number of the first one. Two NaN are equal.

    Elements of less than a byte are compared by their smallest group of complete bytes.
    """

class Changes(NamedTuple):
    """How far the values of two arrays are apart.

    Attributes:
        n_different: values that differ: in a bit if the dtypes are equal, else as numbers.
        n_nan: values that are NaN on one side only.
        n_outside: values outside the tolerance; 0 without one.
        max_abs: the largest absolute difference of two values of which none is NaN.
        squares_a: the sum of the squares of the finite values of the first array.
        squares_b: that of the second array.
        squares_change: the sum of the squares of the differences that are finite.
    """

    n_different: int
    n_nan: int
    n_outside: int
    max_abs: float
    squares_a: float
    squares_b: float
    squares_change: float

def changes(
    a: tuple[str, object],
    b: tuple[str, object],
    *,
    tolerance: tuple[float, float] | None = None,
    threads: int | None = None,
) -> Changes:
    """Compare the values of two contiguous buffers of F64, F32, F16 or BF16, in double precision.

    The sums are the same on all processors, and for any number of threads.

    Args:
        a: the dtype and the buffer of the first array.
        b: those of the second one, with as many values.
        tolerance: the absolute and the relative one, as of `reshard.diff`.
        threads: number of threads.

    Raises:
        ArgumentError: a dtype is another one, or the numbers of values differ.
    """

def write_sums(
    path: str,
    container: Container,
    parts: Sequence[PartSum],
    checksums: bytes,
    *,
    durable: bool = True,
) -> bytes:
    """Write the sums of arrays into a file of which all parts were written with `Plan.write_part`.

    Args:
        path: the file.
        container: that of the file.
        parts: `sums` of all parts, in the order of the file.
        checksums: those of the chunks of all parts.
        durable: sync the file.

    Returns:
        The checksums of the chunks with the sums.

    Raises:
        ArgumentError: the parts are not those of a file in this container.
        StorageError: the file cannot be written.
    """

def scrub(
    path: str,
    n_bytes: int,
    checksums: bytes,
    *,
    start: int = 0,
    end: int | None = None,
    direct: bool = True,
    values: ValueCounts | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[tuple[int, int]]:
    """Read a file, or a range of it, and compare every chunk with its checksum.

    Args:
        path: the file; a symbolic link is refused.
        n_bytes: its expected size in bytes.
        checksums: as for `Index.set_checksums`.
        start: where the range begins: with a chunk.
        end: where it ends: with a chunk; None: with the file.
        direct: bypass the page cache where the file system supports it, so that the content of the disk is verified.
        values: looks at all bytes of the file in the same pass.
        threads: number of threads; None: `default_threads()`.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        The byte ranges `(start, end)` that differ; adjacent ranges are joined.

    Raises:
        DamagedFileError: the file has another size, or is not a regular file.
    """

def write_arrays(
    path: str,
    tensors: ArrayColumns | Iterable[tuple[str, str, Sequence[int], object]],
    *,
    metadata: Mapping[str, str] | None = None,
    buffers: Buffers | None = None,
    threads: int | None = None,
    durable: bool = True,
    direct: bool = True,
    mode: int = 0o640,
    progress: Progress | None = None,
) -> Written:
    """Write arrays into one shard file. The file appears under its name when it is complete, and replaces an older one.

    Args:
        path: the file.
        tensors: columns, or `(name, dtype, shape, buffer)` of each array, in the order of the data. Buffers may be
            strided; an array that runs backwards is copied.
        metadata: `__metadata__` of the header.
        buffers: memory to write through; None: allocated for this file.
        threads: number of threads; None: `default_threads()`.
        durable: sync the file and its folder before this returns.
        direct: write with `O_DIRECT` where the file system supports it, and if not durable, where that is faster.
        mode: permission bits, reduced by the umask.
        progress: called as `progress(done_bytes, total_bytes)`.
    """

def rename(source: str, target: str, *, exchange: bool) -> None:
    """Rename a file or folder to an unused name, or exchange two names atomically. Raises OSError.

    Args:
        source: the current path.
        target: the new path; without `exchange` it must not exist.
        exchange: exchange the two paths.
    """

def folder_sizes(folder: str) -> list[FolderEntry]:
    """The entries of a folder, sorted by name. Links are not followed. Raises OSError.

    Args:
        folder: the folder.
    """

def sync_together(files: Sequence[str], folders: Sequence[str]) -> None:
    """Make files and the entries of folders durable, at the same time: a journal commits them once.

    Args:
        files: regular files; a symbolic link is an error.
        folders: folders.

    Raises:
        OSError: the first path that failed, in `filename`. After it none of them counts as durable.
    """

@final
class Opaque:
    """An object of a pickle whose class is not known here. Nothing was imported or called to make it.

    Attributes:
        name: module and name of its class or function.
        arguments: the arguments of the call that would have made it, or None.
        state: what would have become its attributes, or None.
        items: `(key, value)` pairs that would have been set, or None.
        appended: values that would have been appended, or None.
    """

    name: str
    arguments: tuple[object, ...] | None
    state: object
    items: list[tuple[object, object]] | None
    appended: list[object] | None

def add_quantised(
    index: Index,
    stored: Index,
    path: str,
    weights: Sequence[tuple[str, str, Sequence[int], str, Sequence[float], Sequence[str]]],
) -> int:
    """Add a file to an index that has the values of quantised weights, and return its number.

    The file does not exist: its bytes are computed from the parts when they are read.

    Args:
        index: the index.
        stored: an index with the parts. It is empty afterwards.
        path: the name of the file in messages.
        weights: name, dtype and shape of each weight, the name of its recipe and its numbers, and the keys of its parts,
            as in `rust/formats/src/quantised/recipe.rs`.

    Raises:
        ArgumentError: the recipe does not exist, or its numbers do not fit.
        UnsupportedError: a part has a dtype that the recipe lacks.
    """

def read_gguf(path: str) -> tuple[dict[str, int | float | str], list[GgufTensor]]:
    """The header of a GGUF file: its values by key, without arrays and long texts, and its tensors."""

def read_torch_file(path: str, *, follow_links: bool = True) -> tuple[list[TorchTensor], list[tuple[str, object]]]:
    """The tensors of a file of `torch.save`, and `(path, value)` of everything else."""

@final
class RankTensors:
    """The tensors in the files of `torch.save` of ranks: parts of tensors, and copies."""

    def tensors(self, file: int | None = None) -> list[RankTensor]:
        """The tensors of a file, or of all. Those of several files that differ only in where they begin are one.

        Args:
            file: its position among the files; None: all.
        """

    def has_values(self) -> list[bool]:
        """For each file whether it has values that are no tensors."""

    def add_to(self, index: Index, keys: Sequence[str], hint: str) -> list[str]:
        """Add whole tensors to an index.

        Args:
            index: with the files.
            keys: the tensors.
            hint: what to do if the files do not hold all of a tensor.

        Returns:
            The keys of those of which several ranks hold copies.

        Raises:
            DamagedFileError: ranks describe a tensor differently.
            CoverageError: the parts of a tensor leave a hole, or overlap.
        """

    def first_different(self, index: Index, keys: Sequence[str]) -> tuple[str, *tuple[int, ...]] | None:
        """The first of some tensors of which ranks hold different bytes where they should hold copies.

        Args:
            index: with the files.
            keys: the tensors.

        Returns:
            Its key, and two ranks: the first one that holds the part, and one that holds other bytes.
        """

def read_torch_ranks(
    files: Sequence[tuple[str, int, int]], *, prefix: str = "", n_ranks: int | None = None
) -> RankTensors:
    """Read the tensors of files of `torch.save`. Several are read at once.

    Args:
        files: path, number in the index and rank of each. The rank in the ShardedTensors of a file comes first.
        prefix: what stands before the names of its tensors in the checkpoint.
        n_ranks: how many ranks there are by the names of the files, which say the rank, too; None: they say nothing.

    Raises:
        DamagedFileError: another rank wrote a file than its name says, or several; a local tensor has another shape than
            its part.
        UnsupportedError: a placement is not supported.
    """

def add_torch_wholes(index: Index, file: int) -> tuple[RankTensors, list[tuple[str, object]]]:
    """Add the tensors of a file of `torch.save` that are no shards to an index, as `add_whole`.

    The file is decoded once, for its table in the index and for what is returned.

    Args:
        index: with the file, which was added by `add_torch_file`.
        file: its number.

    Returns:
        Its shards, and `(path, value)` of everything that is no tensor.
    """

def read_torch_contents(paths: Sequence[str], *, follow_links: bool = True) -> list[tuple[list[TorchTensor], object]]:
    """The tensors of each file of `torch.save`, and its object without their content.

    One `Opaque` without arguments stands for all tensors that are made by the function of its name. Files that are
    equal apart from the content of their tensors, as many of ranks, are given the same tuple: they are compared instead
    of decoded.
    """

def read_torch_object(
    path: str, start: int, n_bytes: int, *, transforms: Sequence[str] = ..., with_tensors: bool = True
) -> object:
    """The object of `torch.save` in a range of a file, with `transforms` undone.

    Without its tensors, one `Opaque` without arguments stands for all that are made by the function of its name.
    """

def decode_torch_object(data: bytes) -> object:
    """The object of `torch.save` in these bytes."""

def open_dcp(folder: str, data: bytes, *, method: ReadMethod = "auto") -> OpenedDcp:
    """Open a folder of `torch.distributed.checkpoint` whose `.metadata` has this content."""

def open_dcp_ranks(folder: str, descriptions: Sequence[tuple[str, bytes]], *, method: ReadMethod = "auto") -> OpenedDcp:
    """As `open_dcp`, for a folder with a description of each rank, given as `(name, content)`."""

def read_dcp_paths(data: bytes) -> list[tuple[str, tuple[str | int, ...]]]:
    """The path of each flattened name in a `.metadata`: keys and positions."""

# -- objects in buckets and behind HTTP: only of a core that was compiled with the feature `remote`

@final
class RemoteObject:
    """An opened object. Every read is one of the version that was opened.

    Args:
        url: its URL.

    Raises:
        CheckpointNotFoundError: there is no such object.
        StorageError: it cannot be read.
        UnsupportedError: the server sends no ranges, or nothing by which a replaced file is noticed.
    """

    def __new__(cls, url: str) -> RemoteObject: ...
    @property
    def n_bytes(self) -> int:
        """Its size in bytes."""

    def read(self, start: int, n_bytes: int) -> bytes:
        """Bytes from a position; fewer at the end of the object.

        Raises:
            DamagedFileError: the object was replaced.
            StorageError: it cannot be read.
        """

def object_status(url: str, *, wait_s: float | None = None) -> ObjectStatus | None:
    """What is at a name.

    Args:
        url: the name.
        wait_s: seconds after which no answer counts; None: as long as requests are tried again.

    Returns:
        None if there is neither an object nor a folder.

    Raises:
        CheckpointNotFoundError: there is no such bucket.
        StorageError: the service cannot be asked.
    """

def object_names(url: str, max_pages: int | None = None) -> tuple[list[tuple[str, ObjectStatus]], bool]:
    """The names in a folder of a bucket, sorted.

    Args:
        url: the folder.
        max_pages: of at most so many pages of a list; None: all.

    Returns:
        The names, and whether these are all.

    Raises:
        CheckpointNotFoundError: there is no such folder or bucket.
        StorageError: the service cannot be asked.
        UnsupportedError: a server of files has no lists.
    """

def read_small_object(url: str, max_bytes: int) -> bytes | None:
    """The complete content of an object; None if it has more than `max_bytes` bytes.

    Raises:
        CheckpointNotFoundError: there is no such object.
        StorageError: it cannot be read.
    """

def objects_below(url: str, *, after: str = "", max_keys: int | None = None) -> list[tuple[str, ObjectStatus]]:
    """The objects below a folder, at any depth, sorted by name.

    Args:
        url: the folder; it need not exist.
        after: list only names after this one, which is relative to the folder.
        max_keys: list at most so many.

    Raises:
        StorageError: the service cannot be asked.
    """

def put_object(url: str, content: bytes) -> None:
    """Write an object by one request, in place of an older one.

    Raises:
        StorageError: the service did not confirm it; the object is the old one or the new one.
    """

def put_new_object(url: str, content: bytes) -> tuple[PutNew, Exception | None]:
    """Create an object that must not exist. A request whose answer is lost is not sent again.

    Returns:
        What became of it; with `UNKNOWN` the failure.

    Raises:
        StorageError: the service refused it; nothing was created.
    """

def upload_file(
    path: str, url: str, *, checksums: tuple[int, bytes] | None = None, progress: Progress | None = None
) -> str | None:
    """Write an object with the content of a local file; a large one in parts. Returns its ETag.

    Args:
        path: the file.
        url: the object.
        checksums: the size of the file, and the crc32c of each chunk, which is compared before it is sent.
        progress: called as `progress(done_bytes, total_bytes)`. An error of it ends the upload, and is raised.

    Raises:
        DamagedFileError: the file differs from its checksums.
        StorageError: the file cannot be read, or the service failed.
    """

def begin_upload(url: str) -> str:
    """Begin an upload in parts of an object, for several processes. Returns its ID; empty in Azure, which has none.

    Raises:
        StorageError: the service refused it.
    """

def complete_upload(url: str, upload: str, n_bytes: int, parts: list[str], *, before: str | None = None) -> str | None:
    """Make an object of the parts of an upload, see `Plan.write_part`. Returns its ETag.

    Args:
        url: the object.
        upload: the ID of the upload.
        n_bytes: bytes of the object.
        parts: what the service has said of each part, in their order.
        before: the ETag of the object that had the name when the upload was begun.

    Raises:
        ArgumentError: there are more or fewer parts than such an object has.
        StorageError: with the error number ESTALE: the service does not have the upload or a part. It is no error if the
            object is there, with this size and another ETag than before: the upload was completed.
    """

def end_upload(url: str, upload: str) -> None:
    """End an upload that is not to be completed; no error if there is none.

    Raises:
        StorageError: the service did not confirm it.
    """

def remove_objects(urls: list[str]) -> None:
    """Remove objects of one bucket; no error for those that do not exist.

    Raises:
        StorageError: the service did not confirm it for one of them, which the error names.
    """

def limit_requests(seconds: float | None) -> None:
    """Let requests of this thread end, those for statuses, lists, small objects and removals together.

    Args:
        seconds: from now; None: each request as its bucket says.
    """

def unfinished_uploads(
    urls: Sequence[str], *, is_file: bool, wait_s: float
) -> tuple[list[UnfinishedUpload], str | None]:
    """The unfinished uploads below folders of one bucket, and why these are not all.

    Args:
        urls: the folders.
        is_file: they are objects, and uploads of these are meant.
        wait_s: seconds after which no answer counts.

    Raises:
        StorageError: there are no credentials, or the environment contradicts itself.
    """

def lifecycle_rules(url: str, *, wait_s: float) -> tuple[list[LifecycleRule], str | None]:
    """The rules of a bucket about objects and uploads, and why they are not known.

    Raises:
        StorageError: there are no credentials, or the environment contradicts itself.
    """

def remote_counts() -> RemoteCounts:
    """What this process has requested of objects so far."""

def set_bucket_options(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    anonymous: bool = False,
    allow_http: bool = False,
    retry_s: float | None = None,
    cache: tuple[str, int] | None = None,
) -> None:
    """Set how a bucket is reached in this process. `cache` is as in `set_cache`, for this bucket.

    Raises:
        ArgumentError: it has other options already.
        StorageError: the folder of the cache cannot be made.
    """

def set_cache(cache: tuple[str, int] | None) -> None:
    """Keep what is read of buckets in a folder of this host: the folder, and the most bytes in it; None: nowhere.

    Raises:
        StorageError: the folder cannot be made.
    """

def shown_url(url: str) -> str:
    """A URL without what is secret in it. The complete one is used for requests that name it.

    Raises:
        ArgumentError: it is no URL of an object, a folder or a bucket.
    """
