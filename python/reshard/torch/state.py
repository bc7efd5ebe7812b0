"""The state of a trainer (models, optimizers, objects) as arrays for `save` and `load`.

`describe` copies nothing: each array shares the memory of a tensor of the trainer, and its region follows from the
placements. All ranks then agree on one layout. `restore.apply` restores loaded arrays: arrays that were loaded into the
memory of the trainer (`Described.out`) are not copied again, and tensors that do not exist yet (parameters on device
`meta`, the state of an optimizer before its first step) use the memory of the loaded arrays.

This module reads and writes no files, and does not choose checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reshard import dtypes
from reshard.errors import ArgumentError, MismatchError, ReshardError, UnsupportedError
from reshard.formats import state as state_format
from reshard.formats.differing import MISSING, Fields, Gather, difference
from reshard.formats.replicas import RankLocal
from reshard.layout import ModelLayout
from reshard.ranks.distinct import gather_distinct
from reshard.ranks.group import resolve
from reshard.torch.common_layout import layout_of
from reshard.torch.modules import CONSTANTS, FROZEN, Named, named
from reshard.torch.objects import TENSORS, Lifted, lift
from reshard.torch.optimizers import (
    ORDERS,
    NamedOptimizer,
    OptimizerRecord,
    check_slots,
    merge_records,
    named_optimizers,
    order_of,
    plain,
    record_state,
    whole_kind,
)
from reshard.torch.placements import DigitLayout, LocalPart, Row, is_sharded, local_part, row_of
from reshard.torch.schedulers import KINDS, kind_of, unwrapped
from reshard.torch.settings import STARTED
from reshard.torch.tensors import from_tensor
from reshard.values.words import ranks_named, show
from reshard.write.arrays import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.layout import BoundLayout
    from reshard.ranks.distinct import RankValues
    from reshard.ranks.group import Group
    from reshard.torch.settings import Started

_MAX_SENT_BYTES = 65536  # for tensors in the record of an optimizer, such as a learning rate that is a tensor


@dataclass(frozen=True, eq=False)
class Described:
    """The state of a trainer on this rank, and its position in the global tensors.

    Attributes:
        model: this rank's shard of each parameter and persistent buffer, by key; shares the memory of the trainer.
        optimizer: this rank's shard of each state tensor of the optimizers, with key `<slot>.<key>`; likewise. Also of
            each tensor in the state of an object, with key `extra.<object>.<path>`.
        local: rank-local state tensors, with keys likewise: plain tensors in the state of a sharded parameter (DTensor)
            that have neither its shape nor a single element, and tensors inside of state that is made of others:
            quantized moments and their scales.
        bound: the layout of all ranks; None with one rank, or for `reason`.
        shapes: global shape of each of this rank's tensors, in elements.
        offsets: global offset of each of this rank's shards, in elements.
        extra: state to save besides tensors: options and counters of optimizers, state of objects and modules, aliases.
        aliases: other names of tied tensors, and the key of each.
        reason: why several ranks have no layout; tensors are then saved by region.
        saved: the layout for saving. Parameters and optimizer state are equal on all ranks that hold them, but
            buffers, such as running means, may differ. Each buffer is saved by the first rank that holds it; if the
            copies of other ranks differ, they are saved as rank-local state. Of buffers that DDP broadcasts only the
            copy of the sending rank is saved.
        rank: this rank.
        world_size: number of ranks.
        names: keys of the models of all ranks.
        all_aliases: other names of tensors on any rank, and the key of each.
        live: the described objects.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    local: dict[str, torch.Tensor]
    bound: BoundLayout | None
    shapes: dict[str, tuple[int, ...]]
    offsets: dict[str, tuple[int, ...]]
    extra: dict[str, Any]
    aliases: dict[str, str]
    reason: str | None
    saved: BoundLayout | None
    rank: int
    world_size: int
    names: frozenset[str] = field(repr=False)
    all_aliases: Mapping[str, str] = field(repr=False)
    live: LiveState = field(repr=False)
    _kept: _RankLocalState = field(repr=False)

    @property
    def layout(self) -> ModelLayout | None:
        """`bound` as rules, for `reshard.load` and the like; None as there."""
        mapping = None if self.bound is None else self.bound.to_mapping()
        return None if mapping is None else ModelLayout.from_mapping(mapping)

    def to_save(self) -> dict[str, torch.Tensor]:
        """The tensors that are saved, by key; not copies.

        Example:
            >>> from torch import nn
            >>> sorted(describe(nn.Linear(2, 3)).to_save())
            ['bias', 'weight']
        """
        model = {key: tensor for key, tensor in self.model.items() if key not in self._kept.received}
        return model | self.optimizer | self.local

    def saving(self, tensors: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """The arguments `model`, `optimizer`, `layout` and `rank_local` for `reshard.save`.

        Args:
            tensors: copies of the tensors of `to_save`; None: the tensors themselves.

        Example:
            >>> from torch import nn
            >>> sorted(describe(nn.Linear(2, 3)).saving()["model"])
            ['bias', 'weight']
        """
        given, kept = self.to_save() if tensors is None else tensors, self._kept
        parts: list[dict[str, Any]] = []
        for part in (self.model, self.optimizer):
            own: dict[str, Any] = {key: given[key] for key in part if key not in kept.left}
            if self.reason is not None:
                own = {key: Shard(tensor, self.shapes[key], self.offsets[key]) for key, tensor in own.items()}
            parts.append(own)
        local = None
        if kept.is_any:
            local = {
                "parts": {name: self.part_of(name) for name in sorted(kept.names) if name in self.model},
                "tensors": {key: given[key].detach().cpu() for key in self.local},
                "parameters": kept.parameters,
                "modules": kept.modules,
            }
        return {
            "model": parts[0],
            "optimizer": parts[1] or None,
            "layout": self.saved,
            "rank_local": RankLocal(
                local,
                {key: given[key] for key in self.model if key in kept.left - kept.received},
                kept.beside & self.optimizer.keys(),
            ),
        }

    def part_of(self, name: str) -> list[list[int]]:
        """Offset and shape of this rank's region of a parameter, in elements.

        Example:
            >>> from torch import nn
            >>> describe(nn.Linear(2, 3)).part_of("weight")
            [[0, 0], [3, 2]]
        """
        return [list(self.offsets[name]), list(self.model[name].shape)]

    def out(self) -> dict[str, np.ndarray]:
        """Arrays over the memory of the trainer to load into, by key: of contiguous tensors on the host.

        Of tensors that share memory, such as tied weights in an average of the model, only one has an array.

        Example:
            >>> from torch import nn
            >>> model = nn.Linear(2, 3)
            >>> describe(model).out()["bias"][:] = 7
            >>> model.bias.tolist()
            [7.0, 7.0, 7.0]
        """
        arrays = {
            key: from_tensor(tensor)[0]
            for key, tensor in (self.model | self.optimizer).items()
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        }
        end = 0
        for key, start in sorted(((key, array.ctypes.data) for key, array in arrays.items()), key=lambda one: one[1]):
            if start < end and arrays[key].nbytes:
                del arrays[key]
            else:
                end = max(end, start + arrays[key].nbytes)
        return arrays


@dataclass(frozen=True, eq=False)
class _RankLocalState:
    """The rank-local state of a rank, and the buffers that other ranks save.

    Attributes:
        left: keys of buffers that another rank saves.
        received: keys of buffers that another rank overwrites, so that this rank's copies are not saved.
        beside: keys of single-element plain tensors in the state of sharded parameters: equal on all ranks, or saved
            as rank-local state.
        names: names of parameters with rank-local state.
        parameters: state besides tensors that differs between ranks, by parameter name.
        modules: extra state of modules that differs between ranks, by module name.
        is_any: whether any rank has rank-local state.
    """

    left: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    parameters: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    is_any: bool = False


@dataclass(frozen=True, eq=False)
class LiveState:
    """The described objects.

    Attributes:
        named: the tensors of the model.
        optimizers: the optimizers.
        objects: other objects with state, by name.
        states: state tensors of the optimizers, by key.
        object_tensors: tensors in the state of the objects, by key.
        started: as in `describe`.
    """

    named: Named
    optimizers: list[NamedOptimizer]
    objects: Mapping[str, Any]
    states: dict[str, torch.Tensor]
    object_tensors: dict[str, Any] = field(default_factory=dict)
    started: Started | None = None


def describe(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: object = None,
    *,
    objects: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    group: object = None,
    timeout: float = 600.0,
    compare: bool = True,
    lifts: bool = True,
    object_name: Callable[[str], str] = "objects.{}".format,
    started: Started | None = None,
    leave_out: Collection[str] = (),
) -> Described:
    """Describe the state of a model and its optimizer on this rank, and agree with the other ranks on the layout.

    A collective call: all ranks of the group call it. Few bytes are sent: ranks compare digests, and of all ranks with
    equal partitions one sends names, shapes and partitions.

    Args:
        model: a module, plain, in DDP, `torch.compile` or activation checkpointing, with FSDP2 or tensor parallelism;
            or several modules, such as the pipeline chunks of this rank. Pipeline stages use the parameter names of
            the whole model. Tensors that are not DTensors must be equal on all ranks that hold them.
        optimizer: a torch optimizer, or several.
        objects: other objects with `state_dict` and `load_state_dict`, by name: schedulers, a GradScaler, a sampler.
            The state of rank 0 is saved, and the states of all ranks must be equal.
        mesh: the device mesh of all ranks, for tensors without one; it also names the axes.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: the default group of torch if there is one, else this process alone.
        timeout: seconds that ranks wait for each other.
        compare: raise if state that ranks share differs. Pass False if the state is about to be replaced.
        lifts: whether tensors in the state of objects are tensors of the checkpoint. Else plain ones stay in that
            state, and DTensors are refused: for formats that know weights by their names.
        object_name: name of an object in errors.
        started: the settings of the run before its first step, which are recorded.
        leave_out: keys of tensors of the model that are not described, the same on all ranks.

    Raises:
        ArgumentError: an object has no state, an optimizer belongs to another model, or the group does not have the
            ranks of the mesh.
        MismatchError: ranks hold different tensors under one name, or state that they share differs.
        UnsupportedError: FSDP1; a `Partial` placement; a tensor subclass made of other tensors; an optimizer that
            overrides `state_dict`. Raised on all ranks.
        GroupError: a rank did not answer in time.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 3)
        >>> described = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> described.shapes, described.extra["optimizer"]["groups"][0]["options"]["lr"]
        ({'weight': (3, 2), 'bias': (3,)}, 0.1)
    """
    members = resolve(group)

    def gather(fields: Fields) -> RankValues:
        return gather_distinct(members, [fields], [Fields], timeout)[0]

    try:
        own = _RankState.of(
            model, optimizer, objects or {}, mesh, members, lifts=lifts, started=started, leave_out=frozenset(leave_out)
        )
        parts = own.parts(compare=compare) if members.world_size > 1 else []
    except ReshardError as error:
        if members.world_size > 1:
            gather_distinct(members, error, (), timeout)
        raise
    if members.world_size == 1:
        local = _local_keys([own.beside])
        record = _with_local(own.record, local)
        aliases = dict(own.live.named.aliases)
        names = frozenset(own.live.named.tensors)
        constants = dict(own.live.named.constants)
        return own.described(
            _Agreed(record, own.own_state(), aliases, names, local=local, constants=constants, frozen=own.frozen()),
            members,
        )
    rows, models, optimizers, records, states, besides, digests = gather_distinct(members, parts, _PARTS, timeout)
    if compare:
        _check_objects(digests, object_name, members.world_size, own.object_states, gather)
    aliases = {}
    texts: dict[str, set[str]] = {}
    frozen: dict[str, set[str]] = {}
    for value, _ in records:
        for kind, keys in value.frozen.items():
            frozen.setdefault(kind, set()).update(keys)
        aliases |= value.aliases
        for name, text in value.constants.items():
            texts.setdefault(name, set()).add(text)
    of_model = [(value.tensors, ranks) for value, ranks in models]
    local = _local_keys([value for value, _ in besides])
    of_optimizer = [
        ({key: one for key, one in value.items() if key not in local}, ranks) for value, ranks in optimizers
    ]
    first: dict[str, int] = {}  # the rank that saves a buffer
    for value, ranks in models:
        for key in value.buffers:
            first[key] = min(first.get(key, ranks[0]), ranks[0])
    bound, reason = layout_of(rows, of_model, of_optimizer, aliases)
    saved = bound
    if bound is not None and first:
        saved, reason = layout_of(rows, _from_first(of_model, first), of_optimizer, aliases)
        bound = bound if saved is not None else None
    differing: dict[str, list[str]] = {}
    if len(states) > 1:
        sharded = {key for held, _ in of_model for key, one in held.items() if one.cuts or one.reason}
        known = gather_distinct(members, [own.state_digests()], [dict[str, dict[str, str]]], timeout)[0]
        if compare:
            _check_whole(known, sharded, own, gather)
        differing = _differing(known)
    unpacked = [(OptimizerRecord.from_value(value.record.unpacked()), ranks) for value, ranks in records]
    if compare:
        _check_shared_entries(unpacked, own.record, gather)
        check_slots(unpacked, {key for held, _ in of_model for key, one in held.items() if one.cuts or one.reason})
    agreed = _Agreed(
        record=_with_local(merge_records([record for record, _ in unpacked]), local),
        state=_states(states, own, members.rank),
        aliases=aliases,
        names=frozenset(key for held, _ in of_model for key in held),
        bound=bound,
        saved=saved,
        reason=reason,
        left=frozenset(key for key, rank in first.items() if rank != members.rank),
        local=local,
        differing=differing,
        constants={name: next(iter(found)) for name, found in texts.items() if len(found) == 1},
        frozen={kind: sorted(keys) for kind, keys in frozen.items()},
    )
    return own.described(agreed, members)


# ---------------------------------------------------------------------------------------------------- what ranks send


@dataclass(frozen=True)
class _PackedArray:
    """A small array: its safetensors dtype, its shape in elements, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


@dataclass(frozen=True)
class _Packed:
    """A value as the state files have it: text, and arrays by name."""

    text: str
    arrays: dict[str, _PackedArray]

    @classmethod
    def of(cls, value: Any, name: str) -> _Packed | None:
        """The value packed; None: its arrays are too large to be sent. Messages call it `name`."""
        text, arrays = state_format.dump(value, name)
        if sum(array.nbytes for array in arrays.values()) > _MAX_SENT_BYTES:
            return None
        packed = {
            name: _PackedArray(dtypes.name_of(array.dtype), array.shape, array.tobytes())
            for name, array in arrays.items()
        }
        return cls(text, packed)

    def unpacked(self) -> Any:
        """The value."""
        arrays = {
            name: np.frombuffer(bytearray(one.content), dtypes.numpy_dtype(one.dtype)).reshape(one.shape)
            for name, one in self.arrays.items()
        }
        return state_format.load(self.text, arrays)


@dataclass(frozen=True)
class _ModelPart:
    """The tensors of a rank's model: partitions by key, and which of them are buffers, saved or received."""

    tensors: dict[str, DigitLayout]
    buffers: tuple[str, ...]
    received: tuple[str, ...]


@dataclass(frozen=True)
class _RecordPart:
    """The record of a rank's optimizers, other names of its tensors with their keys, and options of its modules.

    Also the parameters that are frozen, or were when the run began.
    """

    record: _Packed
    aliases: dict[str, str]
    constants: dict[str, str]
    frozen: dict[str, list[str]]


@dataclass(frozen=True)
class _StatePart:
    """State of a rank besides tensors: names of either kind, the values if they are small, and a digest of them."""

    names: dict[str, tuple[str, ...]]
    values: _Packed | None
    digest: str


_PARTS: tuple[Any, ...] = (
    Row,
    _ModelPart,
    dict[str, DigitLayout],
    _RecordPart,
    _StatePart,
    dict[str, list[str]],
    dict[str, dict[str, str]],
)
"""The types of what `_RankState.parts` returns."""


# ------------------------------------------------------------------------------------------------- what one rank has


@dataclass(frozen=True, eq=False)
class _RankState:
    """The state of the trainer that this rank knows without the others."""

    live: LiveState
    row: Row
    model: dict[str, LocalPart]
    optimizer: dict[str, LocalPart]
    record: OptimizerRecord
    shapes: dict[str, tuple[int, ...]]
    object_states: dict[str, Lifted]
    beside: dict[str, list[str]]
    orders: dict[str, list[list[str]]]

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: object,
        objects: Mapping[str, Any],
        mesh: DeviceMesh | None,
        members: Group,
        *,
        lifts: bool,
        started: Started | None,
        leave_out: frozenset[str],
    ) -> _RankState:
        for name, one in objects.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise ArgumentError(
                    f"`objects` has {show(str(name))}, a {type(one).__name__} without `state_dict` and "
                    "`load_state_dict`",
                    hint="plain values can be saved in `extra`",
                )
        found = named(model)
        key_of = {id(tensor): key for key, tensor in found.tensors.items()}
        optimizers = named_optimizers(optimizer, key_of | found.wrappers)
        _refuse_trained_wrappers(found, optimizers)
        states, record = record_state(optimizers, None if started is None else started.group)
        object_states = {name: _object_state(one, name, lifts=lifts) for name, one in objects.items()}
        lifted = _lifted(object_states, {*found.tensors, *found.aliases, *states})
        tensors = [*found.tensors.values(), *states.values(), *lifted.values()]
        n_ranks = members.world_size
        if any(hasattr(tensor, "device_mesh") for tensor in tensors) or mesh is not None:
            # The ranks of a mesh are ranks of the default group.
            n_all = torch.distributed.get_world_size()
            if n_all != n_ranks:
                raise ArgumentError(
                    f"the device meshes of the tensors have {n_all} ranks, and the group has {n_ranks}",
                    hint="leave `group` out: all ranks of the job save and load together",
                )
        row = row_of(tensors, n_ranks, mesh)
        placed = [
            {key: lies for key, tensor in part.items() if (lies := local_part(tensor, row, key)) is not None}
            for part in (
                {key: one for key, one in found.tensors.items() if key not in leave_out},
                states | lifted,
            )
        ]
        shapes = {key: _shape(lies, key) for part in placed for key, lies in part.items()}
        plain = _plain_beside_distributed(optimizers, states, record)
        for key in plain:
            slot, _, name = key.partition(".")
            if states[key].ndim:
                record.plain[name] = (*record.plain.get(name, ()), slot)
        beside: dict[str, list[str]] = {"local": [], "other": []}
        for key, parameter in plain.items():
            if is_sharded(parameter):
                is_inner = ":" in key.partition(".")[0]
                beside["local" if is_inner or _is_of_part(states[key], parameter) else "other"].append(key)
        live = LiveState(found, optimizers, objects, states, lifted, started)
        orders = {
            name: order
            for name, one in objects.items()
            if whole_kind(name, one) is not None and (order := order_of(one, key_of | found.wrappers)) is not None
        }
        return cls(live, row, placed[0], placed[1], record, shapes, object_states, beside, orders)

    def frozen(self) -> dict[str, list[str]]:
        """The parameters that are frozen, or were when the run began; empty if that is not known."""
        before = None if self.live.started is None else self.live.started.frozen
        if before is None:
            return {}
        now = self.live.named.frozen
        return {"always": sorted(now & before), "started": sorted(before - now), "now": sorted(now - before)}

    def own_state(self) -> dict[str, dict[str, Any]]:
        """State of parameters and modules besides tensors, on this rank."""
        modules = {name: plain(module.get_extra_state()) for name, module in self.live.named.extra_state.items()}
        modules |= {key: plain(value) for key, value in self.live.named.own_values.items()}
        modules |= self.live.named.wrapped
        return {"parameters": self.record.state, "modules": modules}

    def state_digests(self) -> dict[str, dict[str, str]]:
        """A digest of each value of `own_state`."""
        return {
            kind: {name: state_format.digest_of(value, name) for name, value in of_kind.items()}
            for kind, of_kind in self.own_state().items()
        }

    def parts(self, *, compare: bool) -> list[Any]:
        """The values that ranks compare and exchange."""
        distributed = {key for key, tensor in self.live.named.tensors.items() if hasattr(tensor, "device_mesh")}
        model = _ModelPart(
            self._layouts(self.model),
            tuple(sorted(self.live.named.buffers - distributed - self.live.named.received)),
            tuple(sorted(self.live.named.received)),
        )
        optimizer = self._layouts(self.optimizer)
        record = replace(self.record, state={}, local={}).to_value()
        packed = _Packed.of(record, "options of the optimizer")
        if packed is None:
            raise UnsupportedError(f"the options of the optimizer hold arrays of more than {_MAX_SENT_BYTES} bytes")
        state = self.own_state()
        names = {kind: tuple(sorted(of_kind)) for kind, of_kind in state.items()}
        objects = self.object_states.items() if compare else ()
        return [
            self.row,
            model,
            optimizer,
            _RecordPart(packed, dict(self.live.named.aliases), dict(self.live.named.constants), self.frozen()),
            _StatePart(names, _Packed.of(state, "state"), state_format.digest_of(state)),
            self.beside,
            {
                "objects": {name: state_format.digest_of(one.state, name) for name, one in objects},
                "tensors": {
                    key: state_format.digest_of(tensor, key)
                    for _, one in objects
                    for key, tensor in one.plain_tensors().items()
                },
            },
        ]

    def _layouts(self, parts: Mapping[str, LocalPart]) -> dict[str, DigitLayout]:
        """How tensors are divided, in the shapes of `Described.shapes`."""
        shapes = self.shapes
        return {
            key: lies.layout if lies.layout.shape == shapes[key] else replace(lies.layout, shape=shapes[key])
            for key, lies in parts.items()
        }

    def described(self, agreed: _Agreed, members: Group) -> Described:
        both = self.model | self.optimizer
        own = {
            kind: {name: one for name, one in of_kind.items() if name in agreed.differing.get(kind, ())}
            for kind, of_kind in (self.own_state() if agreed.differing else {}).items()
        }
        kept = _RankLocalState(
            left=agreed.left,
            received=frozenset(self.live.named.received),
            beside=frozenset(self.beside["other"]) - agreed.local,
            names=frozenset({*agreed.record.local, *agreed.differing.get("parameters", ())}),
            parameters=own.get("parameters", {}),
            modules=own.get("modules", {}),
            is_any=bool(agreed.local or any(agreed.differing.values())),
        )
        extra: dict[str, Any] = {
            "aliases": agreed.aliases,
            "modules": agreed.state["modules"],
            "objects": {name: one.state for name, one in self.object_states.items()},
        }
        if agreed.constants:
            extra[CONSTANTS] = agreed.constants
        if agreed.frozen:
            extra[FROZEN] = agreed.frozen
        kinds = {name: kind_of(one) or whole_kind(name, one) for name, one in self.live.objects.items()}
        if any(kinds.values()):
            extra[KINDS] = {name: kind for name, kind in kinds.items() if kind is not None}
        if self.orders:
            extra[ORDERS] = self.orders
        if self.live.started is not None and self.live.started.schedulers:
            extra[STARTED] = self.live.started.schedulers
        entries = {name: one.entries for name, one in self.object_states.items() if one.entries}
        if entries:
            is_sharded_model = any(hasattr(tensor, "device_mesh") for tensor in self.live.named.tensors.values())
            extra[TENSORS] = {
                name: [
                    replace(one, placements=() if one.placements is None and not is_sharded_model else one.placements)
                    for one in of_name
                ]
                for name, of_name in entries.items()
            }
            extra[TENSORS] = {name: [one.to_value() for one in of_name] for name, of_name in extra[TENSORS].items()}
        if agreed.record.groups:  # of any rank: a pipeline stage may have no trained parameters
            record = replace(agreed.record, state=agreed.state["parameters"])
            extra["optimizer"] = record.to_value()
        return Described(
            model={key: lies.local for key, lies in self.model.items()},
            optimizer={key: lies.local for key, lies in self.optimizer.items() if key not in agreed.local},
            local={key: lies.local for key, lies in self.optimizer.items() if key in agreed.local},
            bound=agreed.bound,
            shapes=self.shapes,
            offsets={key: lies.offset for key, lies in both.items()},
            extra=extra,
            aliases=dict(self.live.named.aliases),
            reason=agreed.reason,
            saved=agreed.saved,
            rank=members.rank,
            world_size=members.world_size,
            names=agreed.names,
            all_aliases=agreed.aliases,
            live=self.live,
            _kept=kept,
        )


@dataclass(frozen=True, eq=False)
class _Agreed:
    """The result of the exchange between all ranks.

    Attributes:
        record: the record of the optimizers, without state values.
        state: state besides tensors, of parameters and of modules, by name.
        aliases: other names of tensors, and their keys.
        names: keys of the models of all ranks.
        bound, saved, reason: as in `Described`.
        left: keys of buffers that another rank saves.
        local: keys of rank-local state tensors.
        differing: names of parameters and modules whose state besides tensors differs between ranks; it is saved as
            rank-local state.
        constants: options of the modules of all ranks, by name, where they are the same on all that have the module.
        frozen: as of `_RankState.frozen`, of all ranks.
    """

    record: OptimizerRecord
    state: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    names: frozenset[str]
    bound: BoundLayout | None = None
    saved: BoundLayout | None = None
    reason: str | None = None
    left: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    differing: dict[str, list[str]] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    frozen: dict[str, list[str]] = field(default_factory=dict)


def _refuse_trained_wrappers(found: Named, optimizers: Sequence[NamedOptimizer]) -> None:
    """Refuse optimizers of parameters that are several tensors: their state belongs to none of these.

    Raises:
        UnsupportedError: there is one.
    """
    for live in optimizers:
        for name in live.names.values():
            if name in found.wrapped:
                raise UnsupportedError(
                    f"{show(name)} is trained by a {live.kind}, and is made of several tensors: {found.wrapped[name]}",
                    key=name,
                    hint="quantised weights can be saved if they are frozen",
                )


def _shape(lies: LocalPart, key: str) -> tuple[int, ...]:
    """The global shape in elements of the format. For packed dtypes an element of torch holds several of these."""
    try:
        return dtypes.tensor_shape(dtypes.parse_dtype(lies.local.dtype), lies.layout.shape)
    except UnsupportedError as error:
        raise UnsupportedError(f"{show(key)}: {error.message}", key=key, hint=error.hint) from None


def _object_state(one: Any, name: str, *, lifts: bool) -> Lifted:
    # The state dict of a torch scheduler may contain functions.
    is_scheduler = isinstance(unwrapped(one), torch.optim.lr_scheduler.LRScheduler)
    state = one.state_dict()
    lifted = lift(state, name) if lifts else Lifted(state)
    return replace(lifted, state=plain(lifted.state, drop_functions=is_scheduler))


def _lifted(states: Mapping[str, Lifted], taken: set[str]) -> dict[str, Any]:
    """The tensors of all objects by key."""
    tensors: dict[str, Any] = {}
    for name, one in states.items():
        both = one.tensors.keys() & (taken | tensors.keys())
        if both:
            raise ArgumentError(
                f"two tensors have the key {show(min(both))}, one of them in the state of the object {show(name)}",
                key=min(both),
                hint="give the object another name",
            )
        tensors |= one.tensors
    return tensors


def _plain_beside_distributed(
    optimizers: Sequence[NamedOptimizer], states: Mapping[str, torch.Tensor], record: OptimizerRecord
) -> dict[str, torch.Tensor]:
    """Keys of plain tensors in the state of DTensor parameters, and the parameter of each."""
    return {
        key: parameter
        for live in optimizers
        for name, (parameter, _) in live.owned().items()
        if hasattr(parameter, "device_mesh")
        for key in sorted(f"{slot}.{name}" for slot in record.slots.get(name, ()))
        if key in states and not hasattr(states[key], "device_mesh")
    }


def _is_of_part(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state tensor belongs to this rank's region of a sharded parameter, so that it cannot be resharded.

    It does not if it has a single element, such as a counter, or the global shape of the parameter.
    """
    return tensor.numel() != 1 and tensor.shape != parameter.shape


def _local_keys(beside: Sequence[Mapping[str, list[str]]]) -> frozenset[str]:
    """Keys of the rank-local state tensors, from the plain state tensors of sharded parameters on all ranks.

    In a very small region a rank-local tensor may have a single element. So a slot that is rank-local for one parameter
    is rank-local for all. Where the state of a region is made of several tensors, that of another region, which may be
    too small for it, is rank-local, too.
    """
    local = {key for one in beside for key in one["local"]}
    local |= {f"{slot.partition(':')[0]}.{name}" for slot, _, name in (key.partition(".") for key in local)}
    slots = {key.partition(".")[0] for key in local}
    return frozenset(local | {key for one in beside for key in one["other"] if key.partition(".")[0] in slots})


def _with_local(record: OptimizerRecord, local: frozenset[str]) -> OptimizerRecord:
    """The record with the slots of these tensors moved from `slots` to `local`."""
    slots_of: dict[str, list[str]] = {}
    for key in sorted(local):
        slot, _, name = key.partition(".")
        slots_of.setdefault(name, []).append(slot)
    slots = {
        name: tuple(slot for slot in slots if slot not in slots_of.get(name, ()))
        for name, slots in record.slots.items()
    }
    return replace(record, slots=slots, local={name: tuple(of_name) for name, of_name in slots_of.items()})


# ----------------------------------------------------------------------------------------------------------- exchange


def _check_objects(
    known: RankValues,
    object_name: Callable[[str], str],
    world_size: int,
    own: Mapping[str, Lifted],
    gather: Gather,
) -> None:
    """Check that all ranks pass the same objects with the same state, given digests of the ranks by kind and name.

    If a state differs, the ranks exchange its fields: all of them know that it does.
    """
    hint = "wrap it in `reshard.per_rank(...)` to save the state of each rank"
    objects, tensors = ([(value[kind], ranks) for value, ranks in known] for kind in ("objects", "tensors"))
    for name in sorted({name for value, _ in objects for name in value}):
        held = sorted(rank for value, ranks in objects if name in value for rank in ranks)
        if len(held) < world_size:
            message = f"{show(object_name(name))} is given only on {ranks_named(held)}, not on all {world_size} ranks"
            raise MismatchError(message, key=name, hint=hint)
    for name in sorted({name for value, _ in objects for name in value}):
        if len({value[name] for value, _ in objects}) > 1:
            what = difference(own[name].state, gather)
            message = f"the state of {show(object_name(name))} differs between ranks: {what}"
            if name.partition(".")[0] == "scheduler":
                hint = (
                    "a scheduler is the same on all ranks: reduce the metric over the ranks before its `step(metric)`"
                )
            raise MismatchError(message, key=name, hint=hint)
    plain_tensors = {key: one for lifted in own.values() for key, one in lifted.plain_tensors().items()}
    _check_shared(
        tensors,
        show,
        lambda key: difference(plain_tensors.get(key, MISSING), gather, key),
        "leave out tensors that differ, such as the running statistics of an average under DDP; or wrap the object in "
        "`reshard.per_rank(...)` to save the state of each rank",
    )


def _check_shared(known: RankValues, what: Callable[[str], str], where: Callable[[str], str], hint: str) -> None:
    """Check that values that ranks share are equal.

    Args:
        known: `{name: digest}` of the ranks.
        what: how messages call a name.
        where: what differs in the value of a name; all ranks call it.
        hint: that of the error.
    """
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for value, ranks in known:
        for name, digest in value.items():
            ranks_of.setdefault(name, {}).setdefault(digest, []).extend(ranks)
    for name, of_name in ranks_of.items():
        if len(of_name) > 1:
            raise MismatchError(f"{what(name)} differs between ranks: {where(name)}", key=name, hint=hint)


def _check_whole(known: RankValues, sharded: set[str], own: _RankState, gather: Gather) -> None:
    """Check that the state of parameters that are not sharded is equal, given `state_digests` of the ranks."""
    whole = [
        ({name: digest for name, digest in value["parameters"].items() if name not in sharded}, ranks)
        for value, ranks in known
    ]
    state = own.own_state()["parameters"]
    _check_shared(
        whole,
        lambda name: f"the state of {show(name)} in the optimizer",
        lambda name: difference(state.get(name, MISSING), gather),
        "ranks that hold the same parameter must make the same steps",
    )


def _check_shared_entries(
    records: Sequence[tuple[OptimizerRecord, Sequence[int]]], own: OptimizerRecord, gather: Gather
) -> None:
    """Check that the entries of optimizers that belong to no parameter are equal on the ranks that have them."""
    _check_shared(
        [
            ({str(n): state_format.digest_of(entries) for n, (_, entries) in record.shared.items()}, list(ranks))
            for record, ranks in records
        ],
        lambda number: f"the state of optimizer {number} that belongs to no parameter",
        lambda number: difference(own.shared.get(int(number), ("", MISSING))[1], gather),
        "all ranks must make the same steps; an optimizer with its own `state_dict` is saved as an object",
    )


def _differing(known: RankValues) -> dict[str, list[str]]:
    """Names of parameters and modules whose state besides tensors differs between ranks.

    Args:
        known: values of `_RankState.state_digests` of the ranks.
    """
    found: dict[str, list[str]] = {}
    for kind in ("parameters", "modules"):
        names = sorted({name for value, _ in known for name in value[kind]})
        found[kind] = [name for name in names if len({v[kind][name] for v, _ in known if name in v[kind]}) > 1]
    return found


def _from_first(
    known: Sequence[tuple[dict[str, DigitLayout], Sequence[int]]], first: Mapping[str, int]
) -> list[tuple[dict[str, DigitLayout], Sequence[int]]]:
    """The same layouts as if each tensor in `first` were held only by the given rank."""
    split: list[tuple[dict[str, DigitLayout], Sequence[int]]] = []
    for held, ranks in known:
        split.append(({key: partition for key, partition in held.items() if key not in first}, ranks))
        alone = {key: partition for key, partition in held.items() if key in first and first[key] == ranks[0]}
        if alone:
            split.append((alone, ranks[:1]))
    return split


def _states(known: RankValues, own: _RankState, rank: int) -> dict[str, dict[str, Any]]:
    """State besides tensors of all ranks: of each name the first rank's, as everything in `extra` is.

    Large values are not sent. This is possible if rank 0 has them, because rank 0 saves them.
    """
    whole: dict[str, dict[str, Any]] = {"parameters": {}, "modules": {}}
    for value, ranks in known:
        for kind, names in value.names.items():
            new = [name for name in names if name not in whole[kind]]
            if not new:
                continue
            if value.values is not None:
                values = value.values.unpacked()[kind]
            elif ranks[0] != 0:
                raise UnsupportedError(
                    f"rank {ranks[0]} has large lists of tensors in the state of {show(new[0])}, which rank 0 does not "
                    "have",
                    key=new[0],
                    hint="such state (of LBFGS) can be saved if every rank holds all parameters",
                )
            elif rank in ranks:
                values = own.own_state()[kind]
            else:
                continue
            whole[kind] |= {name: values[name] for name in new}
    return whole
