"""Encodes `.metadata`: which tensor consists of which chunks, and where each chunk and each other value lies.

Source: `torch/distributed/checkpoint/metadata.py` and `filesystem.py` of torch 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from reshard.formats.dcp.names import SAVE_ID
from reshard.formats.torch_file.encode import Encoder, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"


class Place(NamedTuple):
    """Where an item lies: file, first byte, bytes."""

    file: str
    start: int
    n_bytes: int


class Chunk(NamedTuple):
    """A region of a tensor, in elements, and its item."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass
class Tensor:
    """A tensor: its dtype, its shape in elements, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


def encode(
    tensors: Mapping[str, Tensor], objects: Mapping[str, Place], paths: Mapping[str, Sequence[str | int]] | None = None
) -> bytes:
    """The content of `.metadata`.

    Args:
        tensors: the tensors by name.
        objects: where each value that is no tensor lies, by name.
        paths: the keys and positions that lead to a value, by name; None: nothing is recorded about them.
    """
    encoder = Encoder(4)
    _object(encoder, _METADATA, "Metadata")
    encoder.opcodes(b"}(")
    encoder.word("state_dict_metadata")
    encoder.opcodes(b"}(")
    for name in objects:
        encoder.word(name)
        _object(encoder, _METADATA, "BytesStorageMetadata")
    for name, tensor in tensors.items():
        encoder.word(name)
        _tensor(encoder, name, tensor)
    encoder.opcodes(b"u")
    encoder.word("planner_data")
    if paths is None:
        encoder.value(None)
    else:
        encoder.opcodes(b"}(")
        for name, path in paths.items():
            encoder.word(name)
            if len(path) > 3:
                encoder.opcodes(b"(")
            for part in path:
                encoder.word(part) if isinstance(part, str) else encoder.integer(part)
            encoder.close_tuple(len(path))
        encoder.opcodes(b"u")
    encoder.word("storage_data")
    encoder.opcodes(b"}(")
    for name, place in objects.items():
        _item(encoder, name, None, None, place)
    for name, tensor in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            _item(encoder, name, chunk.offset, number, chunk.place)
    encoder.opcodes(b"u")
    encoder.word("storage_meta")
    _object(encoder, _METADATA, "StorageMeta")
    encoder.opcodes(b"}(")
    for word in ("checkpoint_id", None, "save_id", SAVE_ID, "load_id", None):
        encoder.value(None) if word is None else encoder.word(word)
    encoder.word("modules")
    encoder.opcodes(b"]ub")
    encoder.word("version")
    encoder.word(_VERSION)
    encoder.opcodes(b"ub")
    return encoder.finished()


def _object(encoder: Encoder, module: str, name: str) -> None:
    """An object of a class, whose attributes follow."""
    encoder.name(module, name)
    encoder.opcodes(b")\x81")


def _tensor(encoder: Encoder, name: str, tensor: Tensor) -> None:
    _object(encoder, _METADATA, "TensorStorageMetadata")
    encoder.opcodes(b"}(")
    encoder.word("properties")
    _object(encoder, _METADATA, "TensorProperties")
    # dtype, layout, requires_grad, memory_format, pin_memory. Newer releases add strides, which older ones refuse and
    # none uses when it reads.
    encoder.opcodes(b"(")
    encoder.name("torch", torch_dtype(name, tensor.dtype))
    encoder.name("torch.serialization", "_get_layout")
    encoder.word("torch.strided")
    encoder.opcodes(b"\x85R\x89")
    encoder.name(_METADATA, "_MEM_FORMAT_ENCODING")
    encoder.opcodes(b"K\x00\x85R\x89")
    encoder.close_tuple(5)
    encoder.opcodes(b"b")
    encoder.word("size")
    _size(encoder, tensor.shape)
    encoder.word("chunks")
    encoder.opcodes(b"](")
    for chunk in tensor.chunks:
        _object(encoder, _METADATA, "ChunkStorageMetadata")
        encoder.opcodes(b"}(")
        encoder.word("offsets")
        _size(encoder, chunk.offset)
        encoder.word("sizes")
        _size(encoder, chunk.shape)
        encoder.opcodes(b"ub")
    encoder.opcodes(b"eub")


def _size(encoder: Encoder, shape: Sequence[int]) -> None:
    encoder.name("torch", "Size")
    encoder.integers(shape)
    encoder.opcodes(b"\x85R")


def _item(encoder: Encoder, name: str, offset: tuple[int, ...] | None, number: int | None, place: Place) -> None:
    _object(encoder, _METADATA, "MetadataIndex")
    encoder.opcodes(b"}(")
    encoder.word("fqn")
    encoder.word(name)
    encoder.word("index")
    encoder.value(number)
    if offset is not None:
        encoder.word("offset")
        _size(encoder, offset)
    encoder.opcodes(b"ub")
    _object(encoder, _FILESYSTEM, "_StorageInfo")
    encoder.opcodes(b"}(")
    encoder.word("relative_path")
    encoder.word(place.file)
    encoder.word("offset")
    encoder.integer(place.start)
    encoder.word("length")
    encoder.integer(place.n_bytes)
    encoder.opcodes(b"ub")
