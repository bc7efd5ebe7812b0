"""A drop-in for the `safetensors` package: `safe_open`, `load_file` and `save_file`, for code written against it.

What it opens is whatever `reshard.open` opens, so that the same code reads a file, a Hugging Face folder or a sharded
checkpoint. Results are those of `safetensors`; errors are of this package's tree (`reshard.errors`) where
`safetensors` raises its `SafetensorError`: `KeyNotFoundError` for an unknown tensor, `TensorIndexError` (an
`IndexError`) for an index, `DamagedFileError` for a bad file, `CheckpointNotFoundError` (a `FileNotFoundError`) for
none, `ArgumentError` for the rest. torch is imported when a file is opened for it, and not before.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

import numpy as np

from reshard import _core, dtypes
from reshard.arguments import checked
from reshard.errors import ArgumentError, UnsupportedError
from reshard.indexing import TensorIndexError, normalize_index
from reshard.opening import open as open_checkpoint
from reshard.words import check_text
from reshard.write.arrays import as_array

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import torch

    from reshard.checkpoint import Checkpoint

__all__ = ["SafeOpen", "SafeSlice", "load_file", "safe_open", "save_file"]

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
    framework: Numpy | Torch,
    device: str | int = "cpu",
    *,
    backend: Backend | None = None,
) -> SafeOpen[Any]:
    """Open a checkpoint as `safetensors.safe_open` opens a file; use it in a `with` statement.

    Args:
        filename: anything that `reshard.open` takes; a file of unknown suffix is tried as safetensors.
        framework: "np" or "numpy" for arrays; "pt", "torch" or "pytorch" for tensors.
        device: where tensors go; arrays are on "cpu".
        backend: "mmap" maps the files, "pread" reads them; by default the file system decides.

    Raises:
        ArgumentError: an unknown framework, backend or device.
        CheckpointNotFoundError: there is nothing of this name, or nothing that can be opened.
        DamagedFileError: a file violates its format.
        UnsupportedError: tensors are wanted and torch is not installed.

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
    framework: Any = "np",
    device: Any = "cpu",
    *,
    backend: Backend | None = None,
) -> Any:
    """All tensors by key: `safetensors.numpy.load_file` and `safetensors.torch.load_file` in one.

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
        return f.get_tensors()


@checked
def save_file(
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays or tensors into one `.safetensors` file, which appears whole and is on the disk on return.

    A file of this name is replaced. Unlike with `safetensors`, what is written may be strided, and tensors may share
    memory: each is written in full under its own key. Tensors on a device and arrays that run backwards are first
    copied, all at once.

    Args:
        tensors: numpy arrays, torch tensors, or what else has DLPack or the buffer protocol, by key. Their order does
            not matter: wide dtypes come first in the file and each dtype in the order of the keys, as `safetensors`
            has it.
        filename: the file to write; its folder must exist.
        metadata: text by key, for the file's header.

    Raises:
        ArgumentError: a key or metadata is no text, or a value is neither array nor tensor.
        UnsupportedError: a dtype that the format lacks; a sparse, quantized or distributed tensor.
        StorageError: the system refused the write.

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
            raise ArgumentError("a tensor cannot have the key `__metadata__`: the header keeps its text there", key=key)
        try:
            array, dtype = as_array(value)
        except (ArgumentError, UnsupportedError) as error:
            raise type(error)(f"saving `{key}`: {error.message}", key=key, hint=error.hint) from error
        # The buffer protocol has no word for bfloat16 and the narrow floats: the bytes travel as integers.
        buffer = array.view(f"u{array.itemsize}")
        if any(stride < 0 for stride in array.strides):
            buffer = buffer.copy()
        entries.append((key, dtype, dtypes.tensor_shape(dtype, array.shape), buffer))
    for key, text in (metadata or {}).items():
        check_text(key, "key of the metadata")
        check_text(text, f"value of the metadata `{key}`")
    entries.sort(key=lambda entry: (-dtypes.bits(entry[1]), entry[0]))
    # The mode of a file that `open` makes: 0666 less umask.
    _core.write_arrays(os.fsdecode(filename), entries, metadata=metadata, mode=0o666)


class SafeOpen(Generic[Array]):
    """An open checkpoint with the methods of `safetensors.safe_open`; unusable after `close` or a `with` statement."""

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
        """Let go of the files. Slices that were taken stay usable, as those of `safetensors` do, and keep them open."""
        self._open = None

    def keys(self) -> list[str]:
        """The keys, sorted."""
        return sorted(self._checkpoint.keys())

    def offset_keys(self) -> list[str]:
        """The keys in the order in which their data lies in the files, file after file."""
        index = self._checkpoint.data.index
        keys = self._checkpoint.keys()
        # A tensor of many shards counts where its first one lies; one that is stored under other names comes last.
        stored = (one.name for file in range(index.n_files) for one in index.file_tensors(file))
        wanted = set(keys)
        return list(dict.fromkeys([*(name for name in stored if name in wanted), *keys]))

    def metadata(self) -> dict[str, str] | None:
        """The text in the file's header; of several files, the entries on which all agree. None: there is none."""
        index = self._checkpoint.data.index
        headers = [index.file_metadata(file) for file in range(index.n_files)]
        texts = [text for text in headers if text is not None]
        if not texts or len(texts) < len(headers):
            return None
        return {key: value for key, value in texts[0].items() if all(text.get(key) == value for text in texts)}

    def get_tensor(self, name: str) -> Array:
        """One tensor, whole.

        Raises:
            KeyNotFoundError: there is no tensor of this name.
        """
        check_text(name, "key of a tensor")
        checkpoint = self._checkpoint
        dtype, _ = checkpoint.data.index.info(name)
        result: Array = _result(checkpoint.read(name), dtype, self._device)
        return result

    def get_tensors(self) -> dict[str, Array]:
        """All tensors by key, in the order of `offset_keys`. Names that were tied when they were saved share memory."""
        checkpoint, keys = self._checkpoint, self.offset_keys()
        aliases = checkpoint.aliases
        stored = [key for key in keys if key not in aliases]
        if self._device is not None and self._device.type != "cpu":
            # One at a time: the host need not hold the whole checkpoint on the way to a device.
            tensors = {key: self.get_tensor(key) for key in stored}
        else:
            arrays = checkpoint.load(keys=stored)
            dtype_of = {key: checkpoint._index.info(key)[0] for key in stored}  # noqa: SLF001
            tensors = {key: _result(arrays[key], dtype_of[key], self._device) for key in stored}
        tied: dict[str, Any] = {alias: tensors[name][...] for alias, name in aliases.items()}
        return {key: tied[key] if key in tied else tensors[key] for key in keys}

    def get_slice(self, name: str) -> SafeSlice[Array]:
        """One tensor, of which only what is asked for between brackets is read.

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
    """A tensor that is read by indexing, as `safetensors` has it.

    With numpy the index is made of integers, slices of a positive step and one `...`. Bounds of a slice may be
    negative, but not lie outside the dim (`safetensors` refuses the latter, and fails on the former). With torch the
    index is whatever torch takes, with torch's rules; for one that holds lists, tensors or masks the tensor is read
    whole. Of packed dtypes (`reshard.dtypes.array_shape`) only whole rows can be asked for.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, device: torch.device | None) -> None:
        self._dtype, self._shape = checkpoint.data.index.info(name)
        self._checkpoint = checkpoint
        self._name = name
        self._device = device

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor, in elements."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The dtype, as a header names it."""
        return self._dtype

    def __getitem__(self, index: object) -> Array:
        """What `array[index]` or `tensor[index]` of the whole one would be, in fresh memory.

        Raises:
            TensorIndexError: the tensor has no such index, or the framework offers none of this kind.
            UnsupportedError: a part of a row of a packed dtype.
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
        """What a basic index asks for."""
        if not dtypes.is_packed(self._dtype):
            # In a tuple, since `read` takes a bare None for the whole tensor.
            array = self._checkpoint.read(self._name, index if isinstance(index, tuple) else (index,))
        elif _takes_whole_rows(index, self._dtype, self._shape):
            array = self._checkpoint.read(self._name)[index]
        else:
            raise UnsupportedError(
                f"slicing `{self._name}`: {self._dtype} elements are packed, and only whole rows can be had",
                key=self._name,
                hint="index the last dim with `:`, or use `get_tensor`",
            )
        # What lies between the steps of a slice was read with it, and is let go.
        return array if array.flags.c_contiguous else array.copy()


def _takes_whole_rows(index: object, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether what an index takes of a packed tensor is rows, each in bytes of its own."""
    box = normalize_index(index, shape)
    takes_last_dim = box.post[-2:] == (slice(None), ...) and box.shape[-1] == shape[-1]
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

    return as_tensor(array, dtype if dtypes.is_packed(dtype) else None).to(device)


def _checked_for_numpy(index: object, shape: tuple[int, ...]) -> object:
    """The index with the numpy flavour of `safetensors`' own habits undone, or its refusals.

    It takes an empty list for an empty slice, and booleans and tensors of one element for integers, where numpy has
    other ideas; it refuses `None`, backward steps and slices that reach past the end, which its users may rely on.
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
        raise TensorIndexError(f"slice of dim {dim}: bound {out_of_range[0]} is out of range for {n} elements")
    if not is_forward:
        raise TensorIndexError(f"slice of dim {dim}: expected a step of at least 1, found {item.step}")


def _is_basic_for_torch(index: object) -> bool:
    """Whether torch and numpy agree on the index; torch refuses backward steps, and a boolean is a mask to it."""
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        if isinstance(item, slice) and isinstance(item.step, int) and item.step <= 0:
            raise TensorIndexError(f"torch has slices of positive steps only, found {item.step}")
        is_integer = isinstance(item, int | np.integer) and not isinstance(item, bool)
        if not (is_integer or item is None or item is Ellipsis or isinstance(item, slice)):
            return False
    return sum(item is Ellipsis for item in items) <= 1
