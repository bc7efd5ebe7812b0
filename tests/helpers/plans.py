"""Plans of the core: their layouts, sums and arrays."""

from collections.abc import Mapping
from typing import Any

from tests.helpers.strategies import (
    Checkpoint,
)

from reshard._core import Index, Plan, crc32c
from reshard.layout import ModelLayout

CHUNK_BYTES = 256 << 10


def bind(checkpoint: Checkpoint, mapping: Mapping[str, Any]) -> Any:
    return ModelLayout.from_mapping(mapping).bind(checkpoint.shapes, optimizer_keys=checkpoint.optimizer_keys)


def tell_sums(index: Index, file: int, content: bytes) -> None:
    """Say what a file must be."""
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    checksums = b"".join(crc32c(chunk).to_bytes(4, "little") for chunk in chunks)
    index.set_checksums(file, len(content), header_bytes, crc32c(content[:header_bytes]), checksums)


def loaded(plan: Plan, threads: int | None = None) -> dict[str, bytes]:
    found = {}
    for (name, _, _, n_bytes), (buffer, offset) in zip(plan.arrays, plan.load(threads=threads), strict=True):
        found[name] = memoryview(buffer)[offset : offset + n_bytes].tobytes()
    return found
