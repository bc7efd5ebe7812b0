"""A drop-in replacement for the `safetensors` package: `safe_open`, `load_file` and `save_file`.

It opens everything that `reshard.open` opens, so the same code reads a file, a Hugging Face folder or a sharded
checkpoint. Results are those of `safetensors`. Where `safetensors` raises `SafetensorError`, this package raises its
own errors (`reshard.errors`): `KeyNotFoundError` for an unknown tensor, `TensorIndexError` (an `IndexError`) for an
invalid index, `DamagedFileError` for an invalid file, `CheckpointNotFoundError` (a `FileNotFoundError`) for a missing
file, and `ArgumentError` otherwise. torch is imported only when a file is opened for it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypeVar, overload

import numpy as np

from reshard import _core, dtypes
from reshard.errors import ArgumentError, UnsupportedError
from reshard.opening import open as open_checkpoint
from reshard.storage.location import locate_destination
from reshard.values.argument_types import AnyText, Device
from reshard.values.arguments import checked
from reshard.values.indexing import TensorIndexError, normalize_index
from reshard.values.words import check_text, counted
from reshard.write.arrays import as_array

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import torch

    from reshard.checkpoint import Checkpoint

Numpy: TypeAlias = Literal["np", "numpy"]
Torch: TypeAlias = Literal["pt", "torch", "pytorch"]
Backend: TypeAlias = Literal["mmap", "pread"]

Array = TypeVar("Array", bound="np.ndarray | torch.Tensor")

_IS_TORCH = {"np": False, "numpy": False, "pt": True, "torch": True, "pytorch": True}
_METHODS: dict[str | None, _core.ReadMethod] = {None: "auto", "mmap": "map", "pread": "read"}


@overload
def safe_open(
    filename: str | os.PathLike[str], framework: Numpy, device: str = "cpu", *, backend: Backend | None = None
) -> SafeOpen[np.ndarray]: ...
@overload
def safe_open(
    filename: str | os.PathLike[str], framework: Torch, device: str | int = "cpu", *, backend: Backend | None = None
) -> SafeOpen[torch.Tensor]: ...
@checked
def safe_open(
    filename: str | os.PathLike[str],
    framework: Annotated[Numpy | Torch, AnyText],
    device: Device = "cpu",
    *,
    backend: Annotated[Backend, AnyText] | None = None,
) -> SafeOpen[Any]:
    """Open a checkpoint as `safetensors.safe_open` opens a file; use it in a `with` statement.

    Args:
        filename: anything that `reshard.open` takes; a file with an unknown suffix is opened as safetensors.
        framework: "np" or "numpy" for arrays; "pt", "torch" or "pytorch" for tensors.
        device: device of the tensors; for arrays "cpu".
        backend: "mmap" maps the files, "pread" reads them. By default this depends on the file system.

    Raises:
        ArgumentError: an unknown framework, backend or device.
        CheckpointNotFoundError: the path does not exist, or is not a checkpoint.
        DamagedFileError: a file violates its format.
        UnsupportedError: `framework` is torch, and torch is not installed.

    Example:
        >>> path = "model.safetensors"
        >>> save_file({"w": np.arange(12.0).reshape(3, 4)}, path)
        >>> with safe_open(path, framework="np") as f:
        ...     f.keys(), f.get_slice("w")[1:, 0]
        (['w'], array([4., 8.]))
    """
    if framework not in _IS_TORCH:
        raise ArgumentError(f"unknown framework {framework!r}", hint="accepted are " + ", ".join(_IS_TORCH))
    if backend not in _METHODS:
        raise ArgumentError(f'unknown backend {backend!r}, expected "mmap", "pread" or None')
    torch_device = _torch_device(device) if _IS_TORCH[framework] else None
    if torch_device is None and device != "cpu":
        raise ArgumentError(f"numpy arrays cannot be on device {device!r}", hint='open with framework="pt"')
    return SafeOpen(open_checkpoint(filename, method=_METHODS[backend]), torch_device, os.fsdecode(filename))


@overload
def load_file(
    filename: str | os.PathLike[str], framework: Numpy = "np", device: str = "cpu", *, backend: Backend | None = None
) -> dict[str, np.ndarray]: ...
@overload
def load_file(
    filename: str | os.PathLike[str], framework: Torch, device: str | int = "cpu", *, backend: Backend | None = None
) -> dict[str, torch.Tensor]: ...
@checked
def load_file(
    filename: str | os.PathLike[str],
    framework: Annotated[Any, AnyText] = "np",
    device: Device = "cpu",
    *,
    backend: Annotated[Backend, AnyText] | None = None,
) -> Any:
    """Load all tensors by key, as `safetensors.numpy.load_file` and `safetensors.torch.load_file`.

    Args:
        filename: as in `safe_open`.
        framework: as in `safe_open`.
        device: as in `safe_open`.
        backend: as in `safe_open`.

    Raises:
        ReshardError: as `safe_open`.

    Example:
        >>> path = "model.safetensors"
        >>> save_file({"w": np.arange(3)}, path)
        >>> load_file(path)
        {'w': array([0, 1, 2])}
    """
    with safe_open(filename, framework, device, backend=backend) as f:
        tensors = f.get_tensors()
        f._checkpoint.check_unchanged()  # noqa: SLF001
        return tensors


@checked
def save_file(
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays or tensors into one `.safetensors` file. The write is atomic, and the file is durable on return.

    An existing file is replaced. Unlike in `safetensors`, arrays and tensors may be strided, and may share memory: each
    is written in full under its own key. Tensors on a device other than the CPU, and arrays with negative strides, are
    copied first, all of them.

    Args:
        tensors: numpy arrays, torch tensors, or other objects with DLPack or the buffer protocol, by key. As in
            `safetensors`, tensors are stored with wide dtypes first, and for each dtype in the order of the keys.
        filename: the file to write; its folder must exist. Or the URL of an object in a bucket.
        metadata: text by key, for the header of the file.

    Raises:
        ArgumentError: a key or metadata is not text, or a value is neither an array nor a tensor.
        UnsupportedError: a dtype that the format lacks; a sparse, quantized or distributed tensor; `filename` is behind
            HTTP.
        StorageError: the operating system failed the write, or the service of the bucket refused it.

    Example:
        >>> path = "model.safetensors"
        >>> save_file({"w": np.eye(2, dtype=np.float32).T}, path, metadata={"format": "np"})
        >>> safe_open(path, "np").metadata()
        {'format': 'np'}
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"expected a mapping of key to array, found {type(tensors).__name__}")
    entries = []
    for key, value in tensors.items():
        check_text(key, "key of a tensor")
        if key == "__metadata__":
            raise ArgumentError("a tensor cannot have the key `__metadata__`: safetensors reserves it", key=key)
        try:
            array, dtype = as_array(value)
        except (ArgumentError, UnsupportedError) as error:
            raise type(error)(f"saving `{key}`: {error.message}", key=key, hint=error.hint) from None
        entries.append((key, dtype, dtypes.tensor_shape(dtype, array.shape), array))
    for key, text in (metadata or {}).items():
        check_text(key, "key of the metadata")
        check_text(text, f"value of the metadata `{key}`")
    entries.sort(key=lambda entry: dtypes.file_order(entry[0], entry[1]))
    target = locate_destination(os.fsdecode(filename))
    target.check_replaceable()
    # The default mode of a new file: 0666 minus the umask.
    _core.write_arrays(str(target), entries, metadata=metadata, mode=0o666)


class SafeOpen(Generic[Array]):
    """An open checkpoint with the methods of `safetensors.safe_open`. After `close` its methods raise."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | None, path: str) -> None:
        self._open: Checkpoint | None = checkpoint
        self._device = device
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint. As in `safetensors`, existing slices stay usable, and keep the files open."""
        self._open = None

    def keys(self) -> list[str]:
        """The keys, sorted."""
        return sorted(self._checkpoint.keys())

    def offset_keys(self) -> list[str]:
        """The keys in the order of their data in the files, file by file."""
        index = self._checkpoint.data.index
        keys = self._checkpoint.keys()
        # A tensor has the position of its first shard. Tensors that are stored under other names come last.
        stored = (one.name for file in range(index.n_files) for one in index.file_tensors(file))
        wanted = set(keys)
        return list(dict.fromkeys([*(name for name in stored if name in wanted), *keys]))

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the header; of several files, the entries that are equal in all. None: there is none."""
        index = self._checkpoint.data.index
        headers = [index.file_metadata(file) for file in range(index.n_files)]
        texts = [text for text in headers if text is not None]
        if not texts or len(texts) < len(headers):
            return None
        return {key: value for key, value in texts[0].items() if all(text.get(key) == value for text in texts)}

    def get_tensor(self, name: str) -> Array:
        """Read a full tensor.

        Raises:
            KeyNotFoundError: there is no tensor of this name.
        """
        check_text(name, "key of a tensor")
        checkpoint = self._checkpoint
        dtype, _ = checkpoint.data.index.info(name)
        result: Array = _result(checkpoint.read(name), dtype, self._device)
        return result

    def get_tensors(self) -> dict[str, Array]:
        """Read all tensors, in the order of `offset_keys`. Tensors that were tied when they were saved share memory."""
        checkpoint, keys = self._checkpoint, self.offset_keys()
        aliases = checkpoint.aliases
        stored = [key for key in keys if key not in aliases]
        tensors: dict[str, Any] = {}
        if self._device is None:
            tensors |= checkpoint.load(keys=stored)
        else:
            from reshard.torch.device_loads import load_on  # noqa: PLC0415 - torch is imported only when it is asked for

            tensors |= load_on(checkpoint, {key: checkpoint.data.index.info(key)[0] for key in stored}, self._device)
        tied: dict[str, Any] = {alias: tensors[name][...] for alias, name in aliases.items()}
        return {key: tied[key] if key in tied else tensors[key] for key in keys}

    def get_slice(self, name: str) -> SafeSlice[Array]:
        """A tensor of which indexing reads only the selected elements.

        Raises:
            KeyNotFoundError: there is no tensor of this name.
        """
        check_text(name, "key of a tensor")
        return SafeSlice(self._checkpoint, name, self._device)

    @property
    def _checkpoint(self) -> Checkpoint:
        if self._open is None:
            raise ArgumentError(f"{self._path} was opened with `safe_open` and is closed", path=self._path)
        return self._open


class SafeSlice(Generic[Array]):
    """A tensor that is read by indexing, as in `safetensors`.

    With numpy, an index consists of integers, slices with a positive step and at most one `...`. Bounds of a slice may
    be negative (`safetensors` fails on these), but must be within the dim. With torch, all indices of torch are
    accepted; with lists, tensors or masks the full tensor is read. Of packed dtypes (`reshard.dtypes.array_shape`) only
    full rows can be selected.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, device: torch.device | None) -> None:
        self._dtype, self._shape = checkpoint.data.index.info(name)
        self._checkpoint = checkpoint
        self._name = name
        self._device = device

    def get_shape(self) -> list[int]:
        """Shape of the full tensor, in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The name of the dtype."""
        return self._dtype

    def __getitem__(self, index: object) -> Array:
        """Read `array[index]` or `tensor[index]`, into new memory.

        Raises:
            TensorIndexError: the index is out of range, or the framework does not support it.
            UnsupportedError: the index selects a part of a row of a packed dtype.
        """
        if self._device is None:
            index = _checked_for_numpy(index, self._shape)
        elif not _is_basic_for_torch(index):
            whole = _result(self._checkpoint.read(self._name), self._dtype, _torch_device("cpu"))
            try:
                part: Array = whole[index].to(self._device)
            except (IndexError, TypeError, ValueError) as error:
                raise TensorIndexError(f"indexing `{self._name}`: {error}", key=self._name) from error
            return part
        array: Array = _result(self._read(index), self._dtype, self._device)
        return array

    def _read(self, index: Any) -> np.ndarray:
        """Read the elements of a basic index."""
        if not dtypes.is_packed(self._dtype):
            # In a tuple, because `read` with None reads the full tensor.
            array = self._checkpoint.read(self._name, index if isinstance(index, tuple) else (index,))
        elif _takes_whole_rows(index, self._dtype, self._shape):
            array = self._checkpoint.read(self._name)[index]
        else:
            raise UnsupportedError(
                f"slicing `{self._name}`: {self._dtype} elements are packed, so only full rows can be selected",
                key=self._name,
                hint="index the last dim with `:`, or use `get_tensor`",
            )
        # With a step, the elements between were read too: the copy frees them.
        return array if array.flags.c_contiguous else array.copy()


def _takes_whole_rows(index: object, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether an index selects full rows of a packed tensor that share no bytes."""
    region = normalize_index(index, shape)
    takes_last_dim = region.post[-2:] == (slice(None), ...) and region.shape[-1] == shape[-1]
    return takes_last_dim and len(dtypes.array_shape(dtype, shape)) == len(shape)


def _torch_device(device: str | int) -> torch.device:
    try:
        import torch  # noqa: PLC0415 - torch is imported only when it is asked for
    except ImportError as error:
        raise UnsupportedError("torch is not installed", hint="pip install reshard[torch]") from error
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"unknown device {device!r}: {error}") from error


def _result(array: np.ndarray, dtype: str, device: torch.device | None) -> Any:
    if device is None:
        return array
    from reshard.torch.tensors import as_tensor  # noqa: PLC0415 - torch is imported only when it is asked for

    return as_tensor(array, dtype).to(device)


def _checked_for_numpy(index: object, shape: tuple[int, ...]) -> object:
    """Convert an index with the rules of `safetensors` to one for numpy.

    `safetensors` treats an empty list as an empty slice, and booleans and one-element tensors as integers; numpy does
    not. It raises for `None`, negative steps and slices past the end, which callers may rely on.
    """
    if isinstance(index, list) and not index:
        return slice(0, 0)
    items = tuple(map(_as_integer, index if isinstance(index, tuple) else (index,)))
    is_after_ellipsis = False
    for position, item in enumerate(items):
        dim = position - len(items) + len(shape) if is_after_ellipsis else position
        is_after_ellipsis |= item is Ellipsis
        if item is None:
            raise TensorIndexError(f"item {position} of the index is None, expected an integer, a slice or `...`")
        if isinstance(item, slice) and 0 <= dim < len(shape):
            _check_slice_for_numpy(item, dim, shape[dim])
    return items


def _as_integer(item: object) -> object:
    try:
        return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return item


def _check_slice_for_numpy(item: slice, dim: int, n: int) -> None:
    try:
        out_of_range = [bound for bound in (item.start, item.stop) if bound is not None and not -n <= bound <= n]
        is_forward = item.step is None or item.step > 0
    except TypeError as error:
        raise TensorIndexError(f"slice of dim {dim}: {error}") from error
    if out_of_range:
        raise TensorIndexError(
            f"slice of dim {dim}: bound {out_of_range[0]} is out of range for {counted(n, 'element')}"
        )
    if not is_forward:
        raise TensorIndexError(f"slice of dim {dim}: expected a step of at least 1, found {item.step}")


def _is_basic_for_torch(index: object) -> bool:
    """Whether the index has the same meaning in torch and numpy. torch refuses negative steps; booleans are masks."""
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        if isinstance(item, slice) and isinstance(item.step, int) and item.step <= 0:
            raise TensorIndexError(f"torch supports only slices with positive steps, found {item.step}")
        is_integer = isinstance(item, int | np.integer) and not isinstance(item, bool)
        if not (is_integer or item is None or item is Ellipsis or isinstance(item, slice)):
            return False
    return sum(item is Ellipsis for item in items) <= 1
