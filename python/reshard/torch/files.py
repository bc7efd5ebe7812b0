"""`load_file` and `save_file` with the interface of `safetensors.torch`, durable and multi-threaded.

The files are plain safetensors files: either package reads what the other writes. Tied tensors (the same memory, shape
and strides under several names) are stored once, under the first of their names, and the header lists the other names
(`ALIASES`). The safetensors package refuses them in `save_file`, and stores them like this in `save_model`. `load_file`
and all other readers of this package return tied tensors under all names; other readers see one name. Tensors that
overlap in another way are stored in full.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch

from reshard import _core, dtypes
from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats.aliases import ALIASES, aliases_text
from reshard.opening import open as open_checkpoint
from reshard.storage.location import locate
from reshard.torch.device_loads import load_on
from reshard.torch.tensors import from_tensor, plain_tensor
from reshard.values.words import check_text

__all__ = ["ALIASES", "load_file", "save_file"]

_METHODS: dict[str | None, _core.ReadMethod] = {None: "auto", "mmap": "map", "pread": "read"}


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: Literal["mmap", "pread"] | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors by name, into new memory.

    Args:
        filename: a safetensors file, or anything else that `reshard.open` takes.
        device: device of the tensors. The host does not hold all of them at once: to a GPU they are copied through two
            buffers of pinned memory, to other devices one by one.
        backend: "mmap" maps the file, "pread" reads it. By default this depends on the file system.

    Returns:
        Tensors by name. Tensors that were tied when they were saved by this package share memory.

    Raises:
        ArgumentError: an unknown device or backend.
        CheckpointNotFoundError: the file does not exist.
        DamagedFileError: the file violates its format.
        UnsupportedError: this torch has no dtype for a tensor.

    Example:
        >>> w = torch.arange(6.0).reshape(2, 3)
        >>> save_file({"w": w, "tied": w, "transposed": w.T}, "model.safetensors")
        >>> loaded = load_file("model.safetensors")
        >>> loaded["transposed"].shape, loaded["tied"].data_ptr() == loaded["w"].data_ptr()
        (torch.Size([3, 2]), True)
    """
    if backend not in _METHODS:
        raise ArgumentError(f'unknown backend {backend!r}, expected "mmap", "pread" or None')
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"unknown device {device!r}: {error}") from error
    with open_checkpoint(filename, method=_METHODS[backend]) as checkpoint:
        aliases = checkpoint.aliases
        names = {name: checkpoint[name].dtype for name in checkpoint if name not in aliases}
        tensors = load_on(checkpoint, names, target)
    return tensors | {alias: tensors[name].detach() for alias, name in aliases.items()}


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into one `.safetensors` file. The write is atomic, and the file is synced to disk on return.

    An existing file is replaced. Strided tensors are written in contiguous order, without a contiguous copy in memory.

    Args:
        tensors: dense tensors by name, of any dtype of the format. Tensors on a device other than the CPU are copied
            to the host first, all of them.
        filename: the file to write; its folder must exist.
        metadata: text by key, for the header of the file.

    Raises:
        ArgumentError: a name or metadata is not text, a value is not a tensor, or the metadata has the key `ALIASES`.
        UnsupportedError: a dtype that the format lacks (complex128); a sparse, quantized, distributed or meta tensor.
        CheckpointNotFoundError: the folder does not exist.
        StorageError: the operating system failed the write.

    Example:
        >>> save_file({"w": torch.ones(2, 3, dtype=torch.bfloat16).T}, "model.safetensors", {"format": "pt"})
        >>> load_file("model.safetensors")["w"].shape
        torch.Size([3, 2])
    """
    if not isinstance(tensors, Mapping):
        raise ArgumentError(f"expected a mapping of name to tensor, found {type(tensors).__name__}")
    for name, tensor in tensors.items():
        check_text(name, "name of a tensor")
        if name == "__metadata__":
            raise ArgumentError("a tensor cannot be named `__metadata__`: safetensors reserves this name", key=name)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"saving `{name}`: expected a tensor, found {type(tensor).__name__}", key=name)
    tensors = {name: _plain(tensor, name) for name, tensor in tensors.items()}
    texts = dict(metadata or {})
    for key, text in texts.items():
        check_text(key, "key of the metadata")
        check_text(text, f"value of the metadata `{key}`")
    if ALIASES in texts:
        raise ArgumentError(f"the metadata key `{ALIASES}` is reserved: `save_file` writes it")
    aliases = _find_aliases(tensors)
    text_of_aliases = aliases_text(aliases) if aliases else None
    if text_of_aliases is None:
        aliases = {}
    else:
        texts[ALIASES] = text_of_aliases
    entries = []
    for name, tensor in tensors.items():
        if name in aliases:
            continue
        is_far = tensor.device.type not in {"cpu", "meta"}
        try:
            array, dtype = from_tensor(tensor.detach().cpu() if is_far else tensor)
        except UnsupportedError as error:
            raise UnsupportedError(f"saving `{name}`: {error.message}", key=name, hint=error.hint) from None
        # The buffer protocol has no format for bfloat16 and the narrow floats: pass the bytes as integers.
        entries.append((name, dtype, dtypes.tensor_shape(dtype, array.shape), array.view(f"u{array.itemsize}")))
    entries.sort(key=lambda entry: dtypes.file_order(entry[0], entry[1]))
    target = locate(os.fsdecode(filename))
    target.check_replaceable()
    # The default mode of a new file: 0666 minus the umask.
    _core.write_arrays(str(target), entries, metadata=texts if aliases else metadata, mode=0o666)


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    try:
        return plain_tensor(tensor, name)
    except UnsupportedError as error:
        raise UnsupportedError(f"saving `{name}`: {error.message}", key=name, hint=error.hint) from None


def _find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The aliases of tied tensors (same memory, dtype, shape and strides), and the first name of each."""
    first: dict[object, str] = {}
    aliases = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.layout != torch.strided or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
            continue
        if tensor.numel() == 0:
            continue  # empty tensors share no memory, and all have address 0
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        kept = first.setdefault((*view, tensor.is_conj(), tensor.is_neg()), name)
        if kept != name:
            aliases[name] = kept
    return aliases
