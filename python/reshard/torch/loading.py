"""A checkpoint's arrays for this rank, as far as possible straight into live memory.

Who calls has described what is live (`state.describe`); what comes out goes to `state.apply`. An array whose live
tensor lies on the host in one piece is read into that tensor's own memory; others get memory of their own. Which
checkpoint is read is decided elsewhere, and nothing of what is read is interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard import dtypes
from reshard.formats import counter_tensors
from reshard.layout import as_layout
from reshard.layout.patterns import glob_of
from reshard.outputs import as_array, fill

if TYPE_CHECKING:
    import numpy as np

    from reshard.checkpoint import Checkpoint, Part
    from reshard.options import VerifyMode
    from reshard.torch.state import Described

__all__ = ["Read", "read_for"]


@dataclass(frozen=True)
class Read:
    """What a rank has read.

    Attributes:
        arrays: by key, this rank's parts.
        extra: the state beside the tensors, by name, with this rank's own values.
        has_optimizer: whether there is state of an optimizer.
        world_size: ranks that saved it; None: not known.
    """

    arrays: dict[str, np.ndarray]
    extra: dict[str, Any]
    has_optimizer: bool
    world_size: int | None


def read_for(
    described: Described,
    checkpoint: Checkpoint,
    rank: int,
    *,
    part: Part = "all",
    verify: VerifyMode = "touched",
    threads: int | None = None,
) -> Read:
    """Read what a rank holds of a checkpoint.

    Args:
        described: what is live on this rank.
        checkpoint: where it is read from.
        rank: of this process.
        part: "model", "optimizer" or "all".
        verify: as in `Checkpoint.load`.
        threads: threads of the copy.

    Raises:
        LayoutError: the tensors of the checkpoint cannot be cut as the live ones are.
        CoverageError, DamagedFileError, StorageError: while reading. Live tensors may have changed by then.

    Example:
        >>> import reshard, torch
        >>> from reshard.torch.state import describe
        >>> _ = reshard.save("some", 7, {"weight": torch.tensor([[5.0]])})
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with reshard.open("some") as checkpoint:
        ...     sorted(read_for(describe(model), checkpoint, rank=0).arrays)
        ['weight']
        >>> model.weight.item()
        5.0
    """
    # Formats without a file of counters keep them as tensors; they come as `checkpoint.common`.
    counters = (
        set(counter_tensors.NAMES) - described.model.keys() if checkpoint.data.traits.counters_as_tensors else set()
    )
    keys = [key for key in checkpoint.keys(part) if key not in counters]
    mapping = described.layout
    if described.reason is not None:
        mapping = _box_layout(described, rank)
        keys = _own_keys(described, keys)
    bound = checkpoint.bind(
        as_layout(mapping if mapping is not None else {"mesh": {"dp": 1}, "rules": [{"match": "*"}]})
    )
    plan = checkpoint.plan(bound.request(rank if mapping is not None else 0, keys), verify=verify, keys=keys)
    live = described.out()
    direct: list[int] = []
    other: list[int] = []
    for number, (name, dtype, shape, _) in enumerate(plan.arrays):
        is_alike = (
            name in live
            and live[name].dtype == dtypes.numpy_dtype(dtype)
            and live[name].shape == dtypes.array_shape(dtype, shape)
        )
        (direct if is_alike else other).append(number)
    arrays: dict[str, np.ndarray] = {}
    if direct:
        names = [plan.arrays[number][0] for number in direct]
        fill(plan.only(direct), [live[name] for name in names], threads)
        arrays |= {name: live[name] for name in names}
    if other:
        for number, place in zip(other, plan.only(other).load(threads=threads), strict=True):
            name, dtype, shape, _ = plan.arrays[number]
            arrays[name] = as_array(*place, dtype, shape)
    has_optimizer = any(key not in counters for key in checkpoint.keys("optimizer"))
    return Read(arrays, checkpoint.extra(rank=rank), has_optimizer, checkpoint.data.world_size())


def _own_keys(described: Described, keys: list[str]) -> list[str]:
    """The keys of a checkpoint of which this rank holds a part."""
    own = {*described.model, *described.aliases}
    return [key for key in keys if key in own or key.partition(".")[2] in own]  # no slot has a dot in it


def _box_layout(described: Described, rank: int) -> dict[str, object]:
    """A layout of which this rank's part is the box that it holds, where no layout says it for all ranks.

    Each dim of a tensor is cut in three: what lies before the box, the box, what lies behind it. The mesh has an axis a
    dim, and this rank is its middle point.
    """
    dims = max([1, *(len(shape) for shape in described.shapes.values())])
    mesh = {f"dim{d}": 3 for d in range(dims)}
    n_points = 3**dims
    # The numbers of the other points mean nothing.
    others = iter(number for number in range(n_points) if number != rank)
    ranks = [rank if point == n_points // 2 else next(others) for point in range(n_points)]
    also: dict[str, list[str]] = {}
    for alias, key in described.aliases.items():
        also.setdefault(key, []).append(alias)
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for key, tensor in (described.model | described.optimizer).items():
        offset, whole = described.offsets[key], described.shapes[key]
        box = (offset, tuple(dtypes.tensor_shape(dtypes.parse_dtype(tensor.dtype), tuple(tensor.shape))), whole)
        boxes.setdefault(box, []).extend(map(glob_of, [key, *also.get(key, ())]))
    rules: list[dict[str, object]] = []
    for (offset, own, whole), names in boxes.items():
        sizes = {
            d: [first, n, total - first - n]
            for d, (first, n, total) in enumerate(zip(offset, own, whole, strict=True))
            if n != total
        }
        rules.append(
            {"match": names, "cut": [f"dim{d}" if d in sizes else None for d in range(len(whole))], "sizes": sizes}
        )
    return {"mesh": mesh, "ranks": ranks, "rules": [*rules, {"match": "*"}]}
