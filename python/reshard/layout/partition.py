"""How a tensor is divided over the axes of a mesh.

A `Partition` is made once: by a rule of a layout file, from the device layouts of `metadata.json`, from a strategy, or
from the placements of live tensors. The core takes it as it is. A `TensorLayout` is a partition with the shape of a
tensor and the place of its holders. Nothing here knows keys, files or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Uneven = Literal["refuse", "ceil"]

Cut: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dim the axes that divide it, first = outermost; missing dims are not divided."""

Place: TypeAlias = tuple[tuple[str, ...], int]
"""Axes, first = outermost, and the folded coordinate on them of the ranks that hold a tensor."""

Places: TypeAlias = tuple[Place, ...]
"""Every one of them holds; empty: all ranks hold the tensor."""


@dataclass(frozen=True)
class Block:
    """One block of a fused dim: its size in elements, and whether it is divided (else it is whole on every rank)."""

    size: int
    is_cut: bool = True


Blocks: TypeAlias = tuple[Block, ...] | int
"""The blocks of a fused dim; a number n stands for n equal blocks."""


@dataclass(frozen=True)
class Partition:
    """How a tensor is divided over the axes of a mesh. Equal partitions of one shape have equal geometry.

    Attributes:
        cut: for each dim the axes that divide it, first = outermost; missing dims are not divided.
        uneven: what happens to a dim that its axes do not divide evenly: an error, or the chunks of `torch.chunk`.
        sizes: `(dim, sizes of its parts in elements)`.
        blocks: `(dim, its blocks)`; each block is divided separately.
        flat: axes over which the flattened local block is divided 1-D, first = outermost.
        stored: storage order, `stored[j]` = the global dim at storage position j; empty: the global order.
    """

    cut: Cut = ()
    uneven: Uneven = "refuse"
    sizes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    blocks: tuple[tuple[int, Blocks], ...] = ()
    flat: tuple[str, ...] = ()
    stored: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that divide the tensor: those of each dim, then those of `flat`."""
        return tuple(axis for axes in self.cut for axis in axes) + self.flat

    @property
    def is_reordered(self) -> bool:
        """Whether the dims are stored in another order than the global one."""
        return self.stored != tuple(range(len(self.stored)))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that divide a dim.

        Example:
            >>> Partition((("tp",),)).axes_of(0), Partition((("tp",),)).axes_of(1)
            (('tp',), ())
        """
        return self.cut[dim] if dim < len(self.cut) else ()

    def sizes_of(self, dim: int) -> tuple[int, ...] | None:
        """The explicit sizes of the parts of a dim, in elements; None: it has none."""
        return next((sizes for d, sizes in self.sizes if d == dim), None)

    def blocks_of(self, dim: int) -> Blocks | None:
        """The blocks of a dim; None: it is one block."""
        return next((blocks for d, blocks in self.blocks if d == dim), None)


WHOLE = Partition()
"""Every rank that holds a tensor holds all of it."""


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor lies on a mesh. Equal layouts have equal geometry.

    Attributes:
        shape: the global shape, in elements.
        partition: how it is divided.
        place: which ranks hold it.
    """

    shape: tuple[int, ...]
    partition: Partition = WHOLE
    place: Places = ()


def trimmed(cut: Iterable[tuple[str, ...]]) -> Cut:
    """A cut without the last dims that are not divided: cuts that say the same are then equal.

    Example:
        >>> trimmed([("tp",), ()])
        (('tp',),)
    """
    axes = list(cut)
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)
