"""Tensors that a save leaves out, and their digests: the record in the state beside the tensors.

A run that trains a part of a model need not save the rest with every save, if the program makes the rest again. The
record has the digest of each tensor that is left out. `torch.left_out` computes digests and compares them.

The digest of a tensor is the sum, modulo 2**64, of one number for each of its elements:

    mix(bits + (i + 1) * 0x9E3779B97F4A7C15)

`i` is the index of the element in the flattened global tensor (row-major), `bits` are its bytes as an unsigned
little-endian integer, all sums and products are modulo 2**64, and `mix` is the last step of the generator splitmix64:

    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31

complex128 counts as two elements of 8 bytes. A sum does not depend on the order, so the digest of a tensor is the sum
of those of its shards in any layout. It is computed from bits: values that are not numbers are equal if their bits are.
It finds other values, not an attacker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard import dtypes
from reshard.errors import DamagedFileError, ReshardError, UnsupportedError
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.conversion.source import Source

NAME = "left out"
"""The name of the record in the state beside the tensors."""


@dataclass(frozen=True)
class LeftOutTensor:
    """A tensor that a save leaves out.

    Attributes:
        dtype: safetensors name of the dtype.
        shape: the global shape, in elements.
        digest: of the whole tensor, as 16 hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def n_bytes(self) -> int:
        """The size of the whole tensor, in bytes."""
        return dtypes.n_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class LeftOut:
    """The tensors that a save leaves out.

    Attributes:
        tensors: by key.
        source: what `init_from` named when the run began; None: the program made them.

    Example:
        >>> LeftOut({"w": LeftOutTensor("BF16", (2, 3), "00" * 8)}, "pretrained").to_text()
        '1 tensor, 12 bytes, loaded from `pretrained`'
    """

    tensors: Mapping[str, LeftOutTensor]
    source: str | None = None

    @property
    def n_bytes(self) -> int:
        """The size of all of them, in bytes."""
        return sum(one.n_bytes for one in self.tensors.values())

    @classmethod
    def of(cls, extra: Mapping[str, Any], path: str = "") -> LeftOut | None:
        """The record in the state beside the tensors of a checkpoint; None: nothing is left out.

        Args:
            extra: the state.
            path: of the checkpoint, for messages.

        Raises:
            DamagedFileError: the record is not valid.
        """
        value = extra.get(NAME)
        if value is None:
            return None
        try:
            tensors = {
                str(key): LeftOutTensor(dtypes.parse_dtype(dtype), tuple(map(int, shape)), str(digest))
                for key, (dtype, shape, digest) in value["tensors"].items()
            }
            source = value["source"]
        except (AttributeError, KeyError, TypeError, ValueError, ReshardError) as error:
            raise DamagedFileError(
                f"{path}: the record of left-out tensors is not valid: {error!r}", path=path
            ) from None
        return cls(tensors, None if source is None else str(source)) if tensors else None

    @classmethod
    def of_checkpoint(cls, checkpoint: Source) -> LeftOut | None:
        """The record of a checkpoint; None: nothing is left out.

        Raises:
            DamagedFileError, UnsupportedError, StorageError: the state beside the tensors cannot be read, so it is not
                known.
        """
        if checkpoint.manifest is None:  # only saves of this package have a record
            return None
        return cls.of(checkpoint.data.encoded_state(), str(checkpoint.path))

    def to_value(self) -> dict[str, Any]:
        """The record, for the state beside the tensors."""
        return {
            "source": self.source,
            "tensors": {key: [one.dtype, list(one.shape), one.digest] for key, one in self.tensors.items()},
        }

    def to_text(self) -> str:
        """Number, size and source in words."""
        source = "made by the program" if self.source is None else f"loaded from {show(self.source)}"
        return f"{counted(len(self.tensors), 'tensor')}, {counted(self.n_bytes, 'byte')}, {source}"

    def summary(self) -> dict[str, Any]:
        """Number, size, source and names, for JSON."""
        return {
            "n_tensors": len(self.tensors),
            "n_bytes": self.n_bytes,
            "source": self.source,
            "keys": list(self.tensors),
        }

    def refusal(self, path: str, what: str) -> UnsupportedError:
        """The error of something that needs all tensors.

        Args:
            path: the checkpoint.
            what: what needs them, such as "a conversion".
        """
        return UnsupportedError(
            f"{show(path)} leaves out {listed(map(show, self.tensors))} ({self.to_text()}), and {what} needs all "
            "tensors",
            path=path,
            key=next(iter(self.tensors)),
            hint="publish the adapter of a model of peft in the run (`hf_every`); or resume the run without leaving "
            "out frozen parameters and save, which saves all tensors",
        )
