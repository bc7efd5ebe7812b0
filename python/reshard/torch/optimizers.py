"""The state of live optimizers by the names of parameters: tensors, and everything else.

A tensor of the state of parameter `P` is named `<slot>.<P>`: `exp_avg.layers.0.w`, `step.layers.0.w`. What is no tensor
(options of the groups, counters, the lists that LBFGS keeps) goes into a record keyed by the same names, so that it
fits whatever groups or ranks hold the parameters later. Loading fills what is there and makes what is not, from what
the checkpoint holds: no step is taken for it.

Where tensors lie on which rank is not known here, nor what a file looks like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "NamedOptimizer",
    "OptimizerRecord",
    "StateUpdate",
    "merge_records",
    "named_optimizers",
    "plain",
    "record_state",
    "saved_options",
    "set_options",
]

_OURS = ("params", "param_names")  # what a group has that is no option


@dataclass(frozen=True, eq=False)
class NamedOptimizer:
    """One optimizer.

    Attributes:
        optimizer: what the trainer has.
        local: what keeps the state: itself, or the optimizer that a ZeroRedundancyOptimizer has on this rank.
        names: of its parameters, by identity; those of all ranks.
    """

    optimizer: Any
    local: Any
    names: dict[int, str]

    @property
    def kind(self) -> str:
        """The class that made the state."""
        return type(self.local).__name__

    def owned(self) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters whose state this rank keeps, each with its group."""
        groups = self.local.param_groups
        return {self.names[id(p)]: (p, group) for group in groups for p in group["params"]}


@dataclass(frozen=True, eq=False)
class OptimizerRecord:
    """What is to be known of optimizers besides tensors; the file has it as `to_value` makes it.

    Attributes:
        groups: `{"class", "index", "options", "params"}` of each group of parameters.
        slots: the tensors that the state of each parameter has, by name.
        local: the tensors besides that every rank keeps for itself, by name.
        plain: which tensors of either kind are plain ones beside a parameter that is a DTensor; not counters.
        state: what the state of a parameter has besides: `{name: {slot: value}}`.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    local: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plain: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def to_value(self) -> dict[str, Any]:
        """The record as plain values."""
        more = {"local": _rows(self.local), "plain": _rows(self.plain)}
        return {
            "groups": self.groups,
            "slots": _rows(self.slots),
            "state": self.state,
            **{kind: rows for kind, rows in more.items() if rows},
        }

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> OptimizerRecord:
        """What `to_value` made.

        Raises:
            MismatchError: it is something else.
        """
        try:
            slots = _slots_of(value["slots"])
            local, plain = _slots_of(value.get("local", [])), _slots_of(value.get("plain", []))
            groups = [
                {
                    "class": str(group["class"]),
                    "index": int(group["index"]),
                    "options": {str(name): option for name, option in group["options"].items() if name not in _OURS},
                    "params": [str(name) for name in group["params"]],
                }
                for group in value["groups"]
            ]
            state = {str(name): dict(values) for name, values in value["state"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MismatchError(f"the record of the optimizer in `extra` is not one: {error!r}") from error
        return cls(groups, slots, state, local, plain)


def _rows(slots: Mapping[str, tuple[str, ...]]) -> list[list[list[str]]]:
    """`[slots, names]` of each set of slots: thousands of parameters have a handful."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, of_name in slots.items():
        names.setdefault(of_name, []).append(name)
    return [[list(of_names), named] for of_names, named in names.items()]


def _slots_of(rows: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """What `_rows` was made of."""
    return {str(name): tuple(map(str, slots)) for slots, names in rows for name in names}


def named_optimizers(optimizer: object, key_of: Mapping[int, str]) -> list[NamedOptimizer]:
    """The optimizers that a caller means.

    Args:
        optimizer: one of torch's, or several that share the parameters out; None: none.
        key_of: the key of each parameter of the model, by identity.

    Raises:
        ArgumentError: it is no optimizer, or holds a parameter that the model does not have or another one holds.
        UnsupportedError: its `state_dict` is its own, so what it holds is not known.
    """
    given: list[Any] = [] if optimizer is None else [optimizer]
    if isinstance(optimizer, Sequence):
        given = list(optimizer)
    optimizers: list[NamedOptimizer] = []
    taken: set[int] = set()
    for one in given:
        local = _local(one)
        names: dict[int, str] = {}
        for parameter in (p for group in one.param_groups for p in group["params"]):
            if id(parameter) not in key_of:
                raise ArgumentError(
                    f"the {type(one).__name__} holds a parameter of shape {tuple(parameter.shape)} that the model does "
                    "not have",
                    hint="make the optimizer after the model was wrapped or moved, and give all modules whose "
                    "parameters it holds: `[model, loss]`",
                )
            names[id(parameter)] = key_of[id(parameter)]
        if not taken.isdisjoint(names):
            raise ArgumentError(f"two optimizers hold {show(names[min(taken & names.keys())])}")
        taken.update(names)
        optimizers.append(NamedOptimizer(one, local, names))
    return optimizers


def _local(optimizer: Any) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"`optimizer` is a {type(optimizer).__name__}, expected a torch.optim.Optimizer or several",
            hint="`Checkpointer.resume(extra={...})` keeps anything with `state_dict` and `load_state_dict`",
        )
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        if not isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
            raise UnsupportedError(
                "a ZeroRedundancyOptimizer has no state before its first steps with `overlap_with_ddp`",
                hint="use it without `overlap_with_ddp`",
            )
        return optimizer.optim  # type: ignore[attr-defined]
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise UnsupportedError(
            f"a {type(optimizer).__name__} has a `state_dict` of its own, whose parts have no names of parameters",
            hint="give it in `Checkpointer.resume(extra={...})`, which keeps its `state_dict` of rank 0 as it is",
        )
    return optimizer


def record_state(optimizers: Iterable[NamedOptimizer]) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """The tensors of the state by name, live; and what is to be known besides.

    Raises:
        UnsupportedError: a slot has a name that could not be read back.
    """
    tensors: dict[str, torch.Tensor] = {}
    record = OptimizerRecord()
    for live in optimizers:
        for index, group in enumerate(live.optimizer.param_groups):
            options = {name: plain(value) for name, value in group.items() if name not in _OURS}
            names = [live.names[id(p)] for p in group["params"]]
            record.groups.append({"class": live.kind, "index": index, "options": options, "params": names})
        for name, (parameter, _) in live.owned().items():
            state = live.local.state.get(parameter, {})
            odd = [slot for slot in state if not isinstance(slot, str) or not slot or "." in slot]
            if odd:
                raise UnsupportedError(f"the state of {show(name)} has a slot named {odd[0]!r}", key=name)
            # Lists of tensors, whose number changes from step to step, are kept with all that belongs to them. That
            # works for plain parameters only: tensors beside a list in the state of a distributed one stay tensors.
            is_plain = not hasattr(parameter, "device_mesh")
            is_odd = is_plain and any(isinstance(value, list | tuple | dict | set) for value in state.values())
            of_tensors = {} if is_odd else {s: v for s, v in state.items() if isinstance(v, torch.Tensor)}
            rest = {slot: plain(value) for slot, value in state.items() if slot not in of_tensors}
            tensors |= {f"{slot}.{name}": value for slot, value in of_tensors.items()}
            record.slots[name] = tuple(sorted(of_tensors))
            if rest:
                record.state[name] = rest
    return tensors, record


def merge_records(records: Sequence[OptimizerRecord]) -> OptimizerRecord:
    """One record of what several ranks know of their parameters; where they differ the first counts.

    Raises:
        MismatchError: ranks have one parameter in groups of different options.
    """
    whole = OptimizerRecord()
    where: dict[str, dict[str, Any]] = {}
    for record in records:
        for group in record.groups:
            new = [name for name in group["params"] if name not in where]
            for name in group["params"]:
                if name in where and not _same(where[name]["options"], group["options"]):
                    raise MismatchError(
                        f"the options of {show(name)} in the optimizer differ between ranks: "
                        f"{_differing(where[name]['options'], group['options'])}",
                        key=name,
                    )
            alike = (g for g in whole.groups if g["class"] == group["class"] and g["index"] == group["index"])
            home = next((g for g in alike if _same(g["options"], group["options"])), None)
            if home is None:
                home = {**group, "params": []}
                whole.groups.append(home)
            home["params"] = [*home["params"], *new]
            where |= dict.fromkeys(new, home)
        for name, slots in record.slots.items():
            whole.slots.setdefault(name, slots)
        for name, slots in record.plain.items():
            whole.plain.setdefault(name, slots)
        for name, state in record.state.items():
            whole.state.setdefault(name, state)
    return whole


def plain(value: Any, *, drop_functions: bool = False) -> Any:
    """The value in the types that `extra` keeps: tensors detached and on the host, dicts without a factory.

    Args:
        value: of a state dict.
        drop_functions: leave out entries of mappings that are functions, which no file can hold.

    Raises:
        UnsupportedError: a distributed tensor is in it.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "device_mesh"):
            raise UnsupportedError(
                "a distributed tensor in a list or in the state of an object cannot be kept",
                hint="an optimizer that keeps lists of tensors (LBFGS) works with plain parameters only",
            )
        return value.detach().cpu() if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) else value
    if type(value).__name__ == "defaultdict":
        value = dict(value)
    if type(value) in (list, tuple):
        return type(value)(plain(item, drop_functions=drop_functions) for item in value)
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
        return type(value)(
            (key, plain(item, drop_functions=drop_functions))
            for key, item in value.items()
            if not (drop_functions and callable(item))
        )
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two options are equal, tensors by content."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  nan


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} is {one.get(key)!r} and {other.get(key)!r}"
        for key in sorted({*one, *other})
        if not _same(one.get(key), other.get(key))
    )


# ----------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True, eq=False)
class StateUpdate:
    """What is to become of the state of one parameter.

    Attributes:
        live: its optimizer.
        parameter: the parameter.
        group: the group that it is in.
        fill: tensors of the state that are filled or made, by slot.
        keep: what the state has besides; None: what it has now.
        drop: slots that the checkpoint does not have.
        plain: slots that are plain tensors, whatever the parameter is.
    """

    live: NamedOptimizer
    parameter: torch.Tensor
    group: dict[str, Any]
    fill: dict[str, torch.Tensor] = field(default_factory=dict)
    keep: dict[str, Any] | None = None
    drop: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    def carry_out(self, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Change the live state; `copy(live, loaded)` fills what is there."""
        everything = self.live.local.state
        if self.fill or self.keep or self.parameter in everything:
            state = everything.get(self.parameter, {})
            for slot, loaded in self.fill.items():
                present = state.get(slot)
                if isinstance(present, torch.Tensor):
                    copy(present, loaded)
                else:
                    state[slot] = self._made(slot, loaded)
            for slot in self.drop:
                state.pop(slot, None)
            for slot, value in (self.keep or {}).items():
                state[slot] = _to_device(value, _local_device(self.parameter))
            if state:
                everything[self.parameter] = state
            else:
                everything.pop(self.parameter, None)

    def _made(self, slot: str, loaded: torch.Tensor) -> torch.Tensor:
        """State as the optimizer itself would have made it, with this content."""
        parameter: Any = self.parameter
        on_host = slot == "step" and not (self.group.get("capturable") or self.group.get("fused"))
        loaded = loaded.to("cpu" if on_host else _local_device(parameter))
        if not hasattr(parameter, "device_mesh") or loaded.ndim == 0 or slot in self.plain:
            return loaded
        from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415  whoever has one has imported it

        mesh = parameter.device_mesh
        if loaded.shape == parameter.to_local().shape:
            placements, shape, stride = parameter.placements, parameter.shape, parameter.stride()
        else:
            placements, shape, stride = [Replicate()] * mesh.ndim, loaded.shape, loaded.stride()
        made: torch.Tensor = DTensor.from_local(loaded, mesh, placements, run_check=False, shape=shape, stride=stride)
        return made


def saved_options(
    optimizers: Iterable[NamedOptimizer], record: OptimizerRecord, known_name: Callable[[str], str]
) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The options that each live group had: `(group, options)`.

    Args:
        optimizers: the optimizers.
        record: what was saved.
        known_name: the name in the record of a parameter.

    Raises:
        MismatchError: parameters that are in one group now had different options.
    """
    home = {name: group for group in record.groups for name in group["params"]}
    found: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
    for live in optimizers:
        for index, group in enumerate(live.optimizer.param_groups):
            names = [name for p in group["params"] if (name := known_name(live.names[id(p)])) in home]
            saved = [home[name] for name in names]
            if not group["params"]:
                saved = [g for g in record.groups if g["class"] == live.kind and g["index"] == index][:1]
            for name, other in zip(names, saved, strict=False):
                if other is not saved[0] and not _same(other["options"], saved[0]["options"]):
                    raise MismatchError(
                        f"{show(name)} is in one group of the optimizer with {show(names[0])}, and had other options: "
                        f"{_differing(saved[0]['options'], other['options'])}",
                        key=name,
                        hint="make the groups of the optimizer as they were",
                    )
            if saved:
                found.append((group, saved[0]["options"]))  # a ZeroRedundancyOptimizer hands them on at each step
    return found


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group of an optimizer these options."""
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
            present.detach().copy_(torch.as_tensor(value))  # a captured graph knows the tensor
        else:
            group[name] = value.clone() if isinstance(value, torch.Tensor) else value


def _local_device(parameter: Any) -> torch.device:
    device: torch.device = parameter.to_local().device if hasattr(parameter, "to_local") else parameter.device
    return device


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(_to_device(item, device) for item in value)
    return {key: _to_device(item, device) for key, item in value.items()} if type(value) is dict else value
