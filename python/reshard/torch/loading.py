"""A checkpoint's arrays for this rank, read into the memory of live tensors where possible.

The caller describes the live tensors (`state.describe`), and passes the arrays to `restore.apply`. An array whose live
tensor is contiguous and on the host is read into the memory of that tensor; others get memory of their own. The choice
of the checkpoint and the meaning of the arrays are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard import _core, dtypes
from reshard.errors import LayoutError, MismatchError
from reshard.formats import counter_tensors
from reshard.formats.base import StoredTensor
from reshard.formats.dcp.run_state import Live, RunState, translated
from reshard.layout import ModelLayout, as_layout
from reshard.outputs import as_array, fill
from reshard.words import show

if TYPE_CHECKING:
    import numpy as np

    from reshard.checkpoint import Checkpoint, Part
    from reshard.formats.dcp.run_state import Values
    from reshard.options import VerifyMode
    from reshard.torch.state import Described

__all__ = ["Read", "read_for"]


@dataclass(frozen=True)
class Read:
    """The result of `read_for`.

    Attributes:
        arrays: this rank's parts, by key.
        extra: the state beside the tensors, by name, with the rank-local values of this rank.
        has_optimizer: whether the checkpoint has optimizer state.
        world_size: number of ranks that saved it; None: not known.
        notes: what a checkpoint of another program holds and is left out.
    """

    arrays: dict[str, np.ndarray]
    extra: dict[str, Any]
    has_optimizer: bool
    world_size: int | None
    notes: tuple[str, ...] = ()


def read_for(
    described: Described,
    checkpoint: Checkpoint,
    rank: int,
    *,
    part: Part = "all",
    verify: VerifyMode = "touched",
    threads: int | None = None,
) -> Read:
    """Read the parts of a checkpoint that a rank holds.

    Args:
        described: the live tensors of this rank.
        checkpoint: the checkpoint.
        rank: the rank of this process.
        part: "model", "optimizer" or "all".
        verify: as in `Checkpoint.load`.
        threads: number of threads of the copy; None: chosen by the core.

    Raises:
        LayoutError: the tensors of the checkpoint cannot be partitioned as the live ones are.
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
    values = None if checkpoint.data.is_renamed else checkpoint.data.run_values()
    if values is not None:
        return _read_of_torch(described, checkpoint, rank, values, part=part, verify=verify, threads=threads)
    # Formats without a file of counters keep them as tensors; they come as `checkpoint.common`.
    counters = (
        set(counter_tensors.NAMES) - described.model.keys() if checkpoint.data.traits.counters_as_tensors else set()
    )
    keys = [key for key in checkpoint.keys(part) if key not in counters]
    if described.reason is not None:  # there is no layout of all ranks
        request, keys = _own_request(described, checkpoint, keys)
    elif described.layout is not None:
        request = checkpoint.bind(as_layout(described.layout)).request(rank, keys)
    else:
        request = checkpoint.bind(ModelLayout.replicated()).request(0, keys)
    plan = checkpoint.plan(request, verify=verify, keys=keys)
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


def _read_of_torch(
    described: Described,
    checkpoint: Checkpoint,
    rank: int,
    values: Values,
    *,
    part: Part,
    verify: VerifyMode,
    threads: int | None,
) -> Read:
    """As `read_for`, of a checkpoint that names the state of a run as torch does."""
    state = translated(checkpoint.keys(), values, _live(described))
    checkpoint.data.check(checkpoint.keys(part))
    index = checkpoint.data.index
    tensors = {
        state.keys[key]: StoredTensor(*index.info(key), index.stored(key))
        for key in checkpoint.keys(part)
        if key in state.keys
    }
    _check_distinct(checkpoint, state)
    with checkpoint.view(tensors, is_renamed=True) as view:
        read = read_for(described, view, rank, verify=verify, threads=threads)
    trainer = (
        state.trainer if part == "all" else {name: one for name, one in state.trainer.items() if name != "optimizer"}
    )
    return replace(
        read, extra={"trainer": trainer}, has_optimizer=bool(checkpoint.keys("optimizer")), notes=state.notes
    )


def _live(described: Described) -> Live:
    """The names of the run, for `translated`."""
    live = described.live
    groups = [
        (one.kind, [[one.names[id(p)] for p in group["params"]] for group in one.optimizer.param_groups])
        for one in live.optimizers
    ]
    return Live({*described.model, *described.aliases}, groups, live.objects, live.named.extra_state)


def _check_distinct(checkpoint: Checkpoint, state: RunState) -> None:
    """Refuse two tensors that would get one name."""
    first: dict[str, str] = {}
    for key, name in state.keys.items():
        if first.setdefault(name, key) != key:
            raise MismatchError(
                f"{checkpoint.path}: {show(first[name])} and {show(key)} are both the state {show(name)} of the run",
                path=str(checkpoint.path),
                key=key,
            )


def _own_request(described: Described, checkpoint: Checkpoint, keys: list[str]) -> tuple[_core.Request, list[str]]:
    """The request for the region that this rank holds of each tensor, and the keys of these tensors.

    State of a parameter lies as the parameter; state of another shape than its parameter's is whole.
    """
    request, own_keys = _core.Request(), []
    held = described.model.keys() | described.aliases.keys()
    for key in keys:
        name = key if key in held else key.partition(".")[2]  # no slot has a dot in its name
        if name not in held:
            continue
        parameter = described.aliases.get(name, name)
        tensor, expected = described.model[parameter], described.shapes[parameter]
        shape = checkpoint.data.index.shape(key)
        if shape == expected:
            local = dtypes.tensor_shape(dtypes.parse_dtype(tensor.dtype), tuple(tensor.shape))
            request.add_region(key, key, described.offsets[parameter], local)
        elif key == name:
            raise LayoutError(
                f"{show(key)} has shape {shape} in {checkpoint.path}, and the live tensor {expected}", key=key
            )
        else:
            request.add_region(key, key, (0,) * len(shape), shape)
        own_keys.append(key)
    return request, own_keys
