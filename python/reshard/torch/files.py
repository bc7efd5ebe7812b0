"""`load_file` and `save_file` of `safetensors.torch`, durable and on several threads.

The files are plain safetensors files, and what either package writes the other reads. Tied tensors (the same memory,
shape and strides under several names), which stock `save_file` refuses, are stored once, under the first of their
names as stock `save_model` does it, and the header says under which others they go (`ALIASES`). `load_file` gives
them back tied, and whatever else this package opens has all names; other readers find the one name. Tensors that
overlap otherwise are stored in full, each for itself. No module is known here, only tensors by name.
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
from reshard.torch.tensors import as_tensor, from_tensor
from reshard.words import check_text

__all__ = ["ALIASES", "load_file", "save_file"]

_METHODS: dict[str | None, _core.ReadMethod] = {None: "auto", "mmap": "map", "pread": "read"}


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: Literal["mmap", "pread"] | None = None,
) -> dict[str, torch.Tensor]:
    """All tensors by name, in memory of their own.

    Args:
        filename: a safetensors file, or anything else that `reshard.open` takes.
        device: where they go. To another device than the CPU they go one by one, so that the host need not hold all.
        backend: "mmap" maps the file, "pread" reads it; by default the file system decides.

    Returns:
        Tensors by name; names that were tied when they were saved here share their memory.

    Raises:
        ArgumentError: an unknown device or backend.
        CheckpointNotFoundError: there is nothing of this name.
        DamagedFileError: the file violates its format.
        UnsupportedError: this torch has no dtype for a tensor.

    Example:
        >>> w = torch.arange(6.0).reshape(2, 3)
        >>> save_file({"w": w, "tied": w, "turned": w.T}, "model.safetensors")
        >>> loaded = load_file("model.safetensors")
        >>> loaded["turned"].shape, loaded["tied"].data_ptr() == loaded["w"].data_ptr()
        (torch.Size([3, 2]), True)
    """
    if backend not in _METHODS:
        raise ArgumentError(f'unknown backend {backend!r}, expected "mmap", "pread" or None')
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"unknown device {device!r}: {error}") from error
    with open_checkpoint(filename, method=_METHODS[backend]) as checkpoint:
        aliases = checkpoint.aliases
        names = {name: checkpoint[name].dtype for name in checkpoint if name not in aliases}
        if place.type == "cpu":
            arrays = checkpoint.load(keys=names)
            tensors = {name: _as_tensor(arrays[name], dtype) for name, dtype in names.items()}
        else:
            tensors = {name: _as_tensor(checkpoint.read(name), dtype).to(place) for name, dtype in names.items()}
    return tensors | {alias: tensors[name].detach() for alias, name in aliases.items()}


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into one `.safetensors` file, which appears whole and is on the disk on return.

    A file of this name is replaced. Strided tensors are written as if they were contiguous, on the way.

    Args:
        tensors: dense ones by name, of any dtype of the format. Those on a device are first copied, all at once.
        filename: the file to write; its folder must exist.
        metadata: text by key, for the file's header.

    Raises:
        ArgumentError: a name or metadata is no text, a value is no tensor, or `ALIASES` is given as metadata.
        UnsupportedError: a dtype that the format lacks (complex128); a sparse, quantized, distributed or meta tensor.
        CheckpointNotFoundError: there is no such folder.
        StorageError: the system refused the write.

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
            raise ArgumentError("a tensor cannot be named `__metadata__`: the header keeps its text there", key=name)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"saving `{name}`: expected a tensor, found {type(tensor).__name__}", key=name)
    texts = dict(metadata or {})
    for key, text in texts.items():
        check_text(key, "key of the metadata")
        check_text(text, f"value of the metadata `{key}`")
    if ALIASES in texts:
        raise ArgumentError(f"metadata `{ALIASES}` is written by `save_file` itself")
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
            raise UnsupportedError(f"saving `{name}`: {error.message}", key=name, hint=error.hint) from error
        # The buffer protocol has no word for bfloat16 and the narrow floats: the bytes travel as integers.
        entries.append((name, dtype, dtypes.tensor_shape(dtype, array.shape), array.view(f"u{array.itemsize}")))
    entries.sort(key=lambda entry: dtypes.file_order(entry[0], entry[1]))
    # The mode of a file that `open` makes: 0666 less umask.
    _core.write_arrays(os.fsdecode(filename), entries, metadata=texts if aliases else metadata, mode=0o666)


def _as_tensor(array: object, dtype: str) -> torch.Tensor:
    return as_tensor(array, dtype if dtypes.is_packed(dtype) else None)  # type: ignore[arg-type]


def _find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Each further name of a tensor, and its first: what is the same memory, seen in the same way."""
    first: dict[object, str] = {}
    aliases = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.layout != torch.strided or tensor.device.type == "meta" or hasattr(tensor, "to_local"):
            continue
        if tensor.numel() == 0:
            continue  # there is nothing to share, and all of them lie at address 0
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        kept = first.setdefault((*view, tensor.is_conj(), tensor.is_neg()), name)
        if kept != name:
            aliases[name] = kept
    return aliases
