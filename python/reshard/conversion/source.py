"""What a conversion reads: an opened checkpoint, as far as writers of formats use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from reshard import _core
    from reshard.commit.manifest import Manifest
    from reshard.documents.common_info import CommonInfo
    from reshard.layout import BoundLayout, ModelLayout
    from reshard.storage.location import Location
    from reshard.values.argument_types import Part
    from reshard.values.traits import Traits


class SourceFile(Protocol):
    """A file of tensors: its path relative to the folder, and its size in bytes."""

    @property
    def name(self) -> str:
        """Its path relative to the folder."""

    @property
    def n_bytes(self) -> int:
        """Its size in bytes."""


class SourceTensor(Protocol):
    """A tensor: the safetensors name of its dtype."""

    @property
    def dtype(self) -> str:
        """The safetensors name of its dtype."""


class SourceData(Protocol):
    """What the reader of the source returned; `formats.base.CheckpointData` describes each of these."""

    @property
    def traits(self) -> Traits:
        """Those of its format."""

    @property
    def path(self) -> Location:
        """The file or folder that is read."""

    @property
    def index(self) -> _core.Index:
        """The stored arrays of every tensor."""

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None: there are no checksums."""

    @property
    def base_name(self) -> str | None:
        """What the names of files with these weights begin with; None: as those of a Hugging Face model."""

    def check(self, keys: Collection[str] | None) -> None:
        """Run the checks that need the contents of tensors, before a read."""

    def has_values_of_ranks(self) -> bool:
        """Whether the state beside the tensors can differ between ranks without a manifest that lists its files."""

    def encoded_state(self) -> dict[str, Any]:
        """The shared state, in which values that `torch.save` encoded are `TorchSaved`."""


class Source(Protocol):
    """An opened checkpoint; `reshard.Checkpoint` describes each of these."""

    format: str
    iteration: int | None
    common: CommonInfo | None

    @property
    def data(self) -> SourceData:
        """What its reader returned."""

    @property
    def path(self) -> Path | Location:
        """The file or folder that is read."""

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None: there are no checksums."""

    def __getitem__(self, key: str) -> SourceTensor: ...
    def keys(self, part: Part = "all") -> list[str]:
        """The names of its tensors."""

    def shape(self, key: str) -> tuple[int, ...]:
        """The global shape of a tensor, in elements."""

    def files(self) -> Sequence[SourceFile]:
        """Its files of tensors."""

    def read(self, key: str) -> np.ndarray:
        """A whole tensor."""

    def extra(self) -> Mapping[str, Any]:
        """The state beside the tensors."""

    def plan(self, request: _core.Request, dtype: object = None, *, keys: Collection[str] | None = None) -> _core.Plan:
        """See `Checkpoint.plan`."""

    def bind(self, layout: ModelLayout) -> BoundLayout:
        """A layout, bound to its tensors."""

    def check_unchanged(self) -> None:
        """Refuse what was read if another program changed the files."""
