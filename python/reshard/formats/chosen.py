"""How the other ranks open the checkpoint that one rank has opened and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from reshard.commit import manifest as manifests  # noqa: TC001  messages are decoded by their type hints

Unlisted: TypeAlias = tuple[tuple[str, str, tuple[int, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Chosen:
    """Identifies an iteration folder that one rank has opened and checked, so that the other ranks open the same.

    Attributes:
        folder: the folder.
        iteration: the iteration in its name.
        digest: digest of its manifest, or without a manifest of the files that describe it.
        unlisted: tensors in shard files that no file describes: `(name, dtype, shape, file names)`.
        outline: of a large manifest, so that the other ranks read only the entries that they use.
    """

    folder: str
    iteration: int | None
    digest: str
    unlisted: Unlisted = ()
    outline: manifests.Outline | None = None
