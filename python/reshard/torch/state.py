"""The state of a trainer as arrays and back: what `save` takes and `load` gives, for live models and optimizers.

`describe` looks and copies nothing: every array is over the memory of a live tensor, and where it lies in the whole is
read off the placements. All ranks then agree on one layout. `apply` puts loaded arrays into the live tensors; what the
arrays were loaded into already (`Described.out`) is not copied again, and what does not exist yet (parameters on the
device `meta`, the state of an optimizer that has made no step) becomes the array itself.

Nothing here reads or writes a file, or knows which checkpoint is taken and when one is saved.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reshard import dtypes
from reshard.errors import ArgumentError, ReshardError, UnsupportedError
from reshard.formats import state as state_format
from reshard.group import resolve
from reshard.torch.common_layout import distinct, layout_of
from reshard.torch.modules import Named, named
from reshard.torch.optimizers import Live, Record, live_optimizers, merged, plain, record_of
from reshard.torch.placements import Partition, Placed, Row, place, row_of
from reshard.torch.restore import Report, apply
from reshard.torch.tensors import from_tensor
from reshard.words import show
from reshard.write.arrays import Shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.group import Group
    from reshard.torch.common_layout import Known

__all__ = ["Described", "LiveState", "Report", "apply", "describe"]

_MAX_SENT_BYTES = 65536  # of arrays that are no tensors of the state, such as a learning rate that is a tensor


@dataclass(frozen=True, eq=False)
class Described:
    """What this rank holds of a trainer, and how it fits into the whole.

    Attributes:
        model: this rank's part of each parameter and persistent buffer, by key; over the live memory.
        optimizer: this rank's part of each tensor of the optimizers' state, named `<slot>.<key>`; likewise.
        layout: how all ranks hold them, as the mapping of a layout file; None in a world of one, or for a reason.
        shapes: the global shape of each of this rank's tensors, in elements.
        offsets: the first element of each in the whole, one index a dim.
        extra: what else is to be saved: options and counters of the optimizers, state of objects and modules, aliases.
        aliases: other names of tied tensors, and the key of each.
        reason: why there is no layout although there are several ranks: tensors are then saved as boxes.
        save_layout: `layout` for saving. Ranks agree on parameters and state, but not always on buffers, such as
            running means: each buffer is taken from the first rank that holds it.
        live: what is described.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    layout: dict[str, object] | None
    shapes: dict[str, tuple[int, ...]]
    offsets: dict[str, tuple[int, ...]]
    extra: dict[str, Any]
    aliases: dict[str, str]
    reason: str | None
    save_layout: dict[str, object] | None
    live: LiveState = field(repr=False)
    _left: frozenset[str] = field(repr=False, default=frozenset())  # buffers that another rank saves

    def saving(self) -> dict[str, Any]:
        """The arguments that `reshard.save` needs to save this: `model`, `optimizer`, `layout`, `shapes`.

        Example:
            >>> from torch import nn
            >>> sorted(describe(nn.Linear(2, 3)).saving()["model"])
            ['bias', 'weight']
        """
        parts: list[dict[str, Any]] = []
        for part in (self.model, self.optimizer):
            own: dict[str, Any] = {key: tensor for key, tensor in part.items() if key not in self._left}
            if self.reason is not None:
                own = {key: Shard(tensor, self.shapes[key], self.offsets[key]) for key, tensor in own.items()}
            parts.append(own)
        shapes = {key: self.shapes[key] for part in parts for key in part} if self.save_layout else None
        return {"model": parts[0], "optimizer": parts[1] or None, "layout": self.save_layout, "shapes": shapes}

    def out(self) -> dict[str, np.ndarray]:
        """The live memory as arrays that can be loaded into, by key: what is contiguous and on the host.

        Example:
            >>> from torch import nn
            >>> model = nn.Linear(2, 3)
            >>> describe(model).out()["bias"][:] = 7
            >>> model.bias.tolist()
            [7.0, 7.0, 7.0]
        """
        return {
            key: from_tensor(tensor)[0]
            for key, tensor in (self.model | self.optimizer).items()
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        }


@dataclass(frozen=True, eq=False)
class LiveState:
    """The objects that are described.

    Attributes:
        named: the tensors of the model.
        lives: the optimizers.
        objects: anything else, by name.
        states: the tensors of the optimizers' state, by key.
    """

    named: Named
    lives: list[Live]
    objects: Mapping[str, Any]
    states: dict[str, torch.Tensor]


def describe(
    model: nn.Module | Sequence[nn.Module],
    optimizer: object = None,
    *,
    objects: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    group: object = None,
    timeout: float = 600.0,
) -> Described:
    """Look at what this rank holds of a model and its optimizer, and agree with the other ranks how it fits together.

    All ranks of the group call this at the same place. Few bytes go over the wire: ranks compare digests, and one of
    each kind tells names, shapes and cuts.

    Args:
        model: a module, plain, in DDP, `torch.compile` or activation checkpointing, with FSDP2 or tensor parallelism;
            or several modules, such as the chunks of a pipeline on this rank. Stages name their parameters as the
            whole model does. Tensors without a mesh are the same on all ranks that hold them.
        optimizer: one of torch's, or several.
        objects: anything else with `state_dict` and `load_state_dict`, by name: schedulers, a GradScaler, a sampler.
            Rank 0's state is kept.
        mesh: the mesh of all ranks, where tensors do not tell it; gives its axes their names.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        timeout: seconds that ranks wait for each other.

    Raises:
        ArgumentError: objects without state, an optimizer that is not of this model, a group that is not the mesh's.
        MismatchError: ranks hold different tensors under one name.
        UnsupportedError: the first FSDP; a tensor that is a pending sum (`Partial`), or of a class that is made of
            other tensors; an optimizer with a `state_dict` of its own. Raised on all ranks.
        GroupError: a rank did not answer in time.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 3)
        >>> described = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> described.shapes, described.extra["optimizer"]["groups"][0]["options"]["lr"]
        ({'weight': (3, 2), 'bias': (3,)}, 0.1)
    """
    members = resolve(group)
    try:
        own = _Own.of(model, optimizer, objects or {}, mesh, members)
        parts: Any = own.parts() if members.world_size > 1 else []
    except ReshardError as error:
        if members.world_size > 1:
            distinct(members, error, timeout)
        raise
    if members.world_size == 1:
        return own.described(_Agreed(own.record, own.own_state(), dict(own.live.named.aliases)))
    rows, models, optimizers, records, states = distinct(members, parts, timeout)
    aliases: dict[str, str] = {}
    for value, _ in records:
        aliases |= value["aliases"]
    known_rows = [(Row.from_json(members.world_size, value), ranks) for value, ranks in rows]
    of_model = [(_partitions(value["tensors"]), ranks) for value, ranks in models]
    of_optimizer = [(_partitions(value), ranks) for value, ranks in optimizers]
    first: dict[str, int] = {}  # the rank that saves a buffer
    for value, ranks in models:
        for key in value["buffers"]:
            first[key] = min(first.get(key, ranks[0]), ranks[0])
    layout, reason = layout_of(known_rows, of_model, of_optimizer, aliases)
    save_layout = layout
    if layout is not None and first:
        save_layout, reason = layout_of(known_rows, _from_first(of_model, first), of_optimizer, aliases)
        layout = layout if save_layout is not None else None
    agreed = _Agreed(
        record=merged([Record.from_value(_unpacked(value["record"])) for value, _ in records]),
        state=_states(states, own, members.rank),
        aliases=aliases,
        layout=layout,
        save_layout=save_layout,
        reason=reason,
        left=frozenset(key for key, rank in first.items() if rank != members.rank),
    )
    return own.described(agreed)


# ------------------------------------------------------------------------------------------------- what one rank has


@dataclass(frozen=True, eq=False)
class _Own:
    """What this rank knows by itself."""

    live: LiveState
    row: Row
    model: dict[str, Placed]
    optimizer: dict[str, Placed]
    record: Record
    shapes: dict[str, tuple[int, ...]]
    object_states: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module],
        optimizer: object,
        objects: Mapping[str, Any],
        mesh: DeviceMesh | None,
        members: Group,
    ) -> _Own:
        for name, one in objects.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise ArgumentError(
                    f"`objects` has {show(str(name))}, a {type(one).__name__} without `state_dict` and "
                    "`load_state_dict`",
                    hint="plain values can be saved in `extra`",
                )
        found = named(model)
        lives = live_optimizers(optimizer, {id(tensor): key for key, tensor in found.tensors.items()})
        states, record = record_of(lives)
        tensors = [*found.tensors.values(), *states.values()]
        n_ranks = members.world_size
        if any(hasattr(tensor, "device_mesh") for tensor in tensors) or mesh is not None:
            # Meshes speak of ranks of the default group.
            n_all = torch.distributed.get_world_size()
            if n_all != n_ranks:
                raise ArgumentError(
                    f"the tensors lie on meshes of {n_all} ranks, and the group has {n_ranks}",
                    hint="leave `group` out: all ranks of the job save and load together",
                )
        row = row_of(tensors, n_ranks, mesh)
        placed = [
            {key: lies for key, tensor in part.items() if (lies := place(tensor, row, key)) is not None}
            for part in (found.tensors, states)
        ]
        shapes = {key: _shape(lies, key) for part in placed for key, lies in part.items()}
        object_states = {name: _object_state(one) for name, one in objects.items()}
        return cls(LiveState(found, lives, objects, states), row, placed[0], placed[1], record, shapes, object_states)

    def own_state(self) -> dict[str, dict[str, Any]]:
        """What this rank would keep of parameters' and modules' state besides tensors."""
        modules = {name: plain(module.get_extra_state()) for name, module in self.live.named.extra_state.items()}
        return {"parameters": self.record.state, "modules": modules}

    def parts(self) -> list[Any]:
        """What the ranks compare and exchange."""
        distributed = {key for key, tensor in self.live.named.tensors.items() if hasattr(tensor, "device_mesh")}
        model = {
            "tensors": {key: _partition_value(lies.partition) for key, lies in self.model.items()},
            "buffers": sorted(self.live.named.buffers - distributed),
        }
        optimizer = {key: _partition_value(lies.partition) for key, lies in self.optimizer.items()}
        record = Record(self.record.groups, self.record.slots).to_value()
        state = self.own_state()
        return [
            self.row.to_json(),
            model,
            optimizer,
            {"record": _packed(record, "options of the optimizer"), "aliases": self.live.named.aliases},
            {"names": {kind: sorted(of_kind) for kind, of_kind in state.items()}, "values": _packed(state, None)},
        ]

    def described(self, agreed: _Agreed) -> Described:
        both = self.model | self.optimizer
        extra: dict[str, Any] = {
            "aliases": agreed.aliases,
            "modules": agreed.state["modules"],
            "objects": self.object_states,
        }
        if agreed.record.groups:  # of any rank: a stage of a pipeline may train nothing
            record = Record(agreed.record.groups, agreed.record.slots, agreed.state["parameters"])
            extra["optimizer"] = record.to_value()
        return Described(
            model={key: lies.local for key, lies in self.model.items()},
            optimizer={key: lies.local for key, lies in self.optimizer.items()},
            layout=agreed.layout,
            shapes=self.shapes,
            offsets={key: lies.offset for key, lies in both.items()},
            extra=extra,
            aliases=dict(self.live.named.aliases),
            reason=agreed.reason,
            save_layout=agreed.save_layout,
            live=self.live,
            _left=agreed.left,
        )


@dataclass(frozen=True, eq=False)
class _Agreed:
    """What is to be known of all ranks.

    Attributes:
        record: of the optimizers, without the state besides tensors.
        state: state besides tensors, of parameters and of modules, by name.
        aliases: other names of tensors, and their keys.
        layout, save_layout, reason: as in `Described`.
        left: buffers that another rank saves.
    """

    record: Record
    state: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    layout: dict[str, object] | None = None
    save_layout: dict[str, object] | None = None
    reason: str | None = None
    left: frozenset[str] = frozenset()


def _shape(lies: Placed, key: str) -> tuple[int, ...]:
    """The global shape in elements of the format, of which packed dtypes have several in one of torch's."""
    try:
        return dtypes.tensor_shape(dtypes.parse_dtype(lies.local.dtype), lies.partition.shape)
    except UnsupportedError as error:
        raise UnsupportedError(f"{show(key)}: {error.message}", key=key, hint=error.hint) from None


def _object_state(one: Any) -> Any:
    # Schedulers keep functions, which torch itself leaves out of a state dict, or not.
    is_scheduler = isinstance(one, torch.optim.lr_scheduler.LRScheduler)
    return plain(one.state_dict(), drop_functions=is_scheduler)


# ----------------------------------------------------------------------------------------------------------- exchange


def _partition_value(partition: Partition) -> list[Any]:
    return [partition.shape, partition.cuts, partition.unsaid]


def _partitions(value: Mapping[str, list[Any]]) -> dict[str, Partition]:
    # A handful of kinds for thousands of keys; JSON makes lists of tuples.
    return {
        key: Partition(
            tuple(shape),
            tuple(tuple(tuple((outer, inner) for outer, inner in line) for line in lines) for lines in cuts),
            unsaid,
        )
        for key, (shape, cuts, unsaid) in value.items()
    }


def _from_first(
    known: Sequence[tuple[dict[str, Partition], Sequence[int]]], first: Mapping[str, int]
) -> list[tuple[dict[str, Partition], Sequence[int]]]:
    """The same where the tensors in `first` are held by that rank alone."""
    split: list[tuple[dict[str, Partition], Sequence[int]]] = []
    for held, ranks in known:
        split.append(({key: partition for key, partition in held.items() if key not in first}, ranks))
        alone = {key: partition for key, partition in held.items() if key in first and first[key] == ranks[0]}
        if alone:
            split.append((alone, ranks[:1]))
    return split


def _packed(value: Any, what: str | None) -> dict[str, Any] | None:
    """A value of `extra` as JSON with its arrays; where these are large an error, or None without a name for it."""
    text, arrays = state_format.dump(value, what or "state")
    if sum(array.nbytes for array in arrays.values()) > _MAX_SENT_BYTES:
        if what is None:
            return None
        raise UnsupportedError(f"the {what} hold arrays of more than {_MAX_SENT_BYTES} bytes")
    packed = {
        name: [dtypes.name_of(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]
        for name, array in arrays.items()
    }
    return {"text": text, "arrays": packed}


def _unpacked(packed: Mapping[str, Any]) -> Any:
    arrays = {
        name: np.frombuffer(bytearray(base64.b64decode(data)), dtypes.numpy_dtype(dtype)).reshape(shape)
        for name, (dtype, shape, data) in packed["arrays"].items()
    }
    return state_format.load(packed["text"], arrays)


def _states(known: Known, own: _Own, rank: int) -> dict[str, dict[str, Any]]:
    """State besides tensors of all ranks: of each name the first rank's, as everything in `extra` is.

    Large values are not sent about, and need not be if rank 0 has them: it is rank 0 that saves them.
    """
    whole: dict[str, dict[str, Any]] = {"parameters": {}, "modules": {}}
    for value, ranks in known:
        for kind, names in value["names"].items():
            new = [name for name in names if name not in whole[kind]]
            if not new:
                continue
            if value["values"] is not None:
                values = _unpacked(value["values"])[kind]
            elif ranks[0] != 0:
                raise UnsupportedError(
                    f"rank {ranks[0]} keeps large lists of tensors for {show(new[0])}, which rank 0 does not have",
                    key=new[0],
                    hint="such state (LBFGS has it) can be saved where every rank holds all parameters",
                )
            elif rank in ranks:
                values = own.own_state()[kind]
            else:
                continue
            whole[kind] |= {name: values[name] for name in new}
    return whole
