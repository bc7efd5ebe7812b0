"""The state of optimizers by parameter name: tensors, and everything else.

A tensor in the state of parameter `P` has the key `<slot>.<P>`: `exp_avg.layers.0.w`, `step.layers.0.w`. The tensors
inside one that is made of others have the slots `<slot>:<inner name>`; its class and options are recorded as the slot
`<slot>:`. State that is not a tensor (options of the parameter groups, counters, the lists of LBFGS) is kept in a
record by parameter name, so that it does not depend on the groups and ranks that hold the parameters. Loading fills
existing state tensors and creates missing ones from the checkpoint, without an optimizer step.

This module knows neither how tensors are distributed over ranks nor any file format.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.torch.tensors import inner_tensors
from reshard.values.words import ranks_named, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

ORDERS = "orders"
"""The name of the parameters of optimizers whose `state_dict` is saved whole, in the saved state of a trainer."""

_NOT_OPTIONS = ("params", "param_names")  # entries of a parameter group that are not options
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


@dataclass(frozen=True, eq=False)
class NamedOptimizer:
    """An optimizer, with the names of its parameters.

    Attributes:
        optimizer: the optimizer of the trainer.
        local: the optimizer that holds the state: the same one, or the local optimizer of a ZeroRedundancyOptimizer.
        names: name of each of its parameters, on any rank, by `id`.
    """

    optimizer: Any
    local: Any
    names: dict[int, str]

    @property
    def kind(self) -> str:
        """Name of the class of the optimizer that holds the state."""
        return type(self.local).__name__

    def owned(self) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters whose state this rank holds, by name, each with its parameter group."""
        groups = self.local.param_groups
        return {self.names[id(p)]: (p, group) for group in groups for p in group["params"]}


@dataclass(frozen=True, eq=False)
class OptimizerRecord:
    """The state of optimizers except the tensors themselves. It is saved as the value that `to_value` returns.

    Attributes:
        groups: `{"class", "index", "options", "params"}` of each parameter group, and "started", its options before
            the first step, where they were recorded.
        slots: slots of the tensors in the state of each parameter, by parameter name.
        local: slots of further tensors that are rank-local, by parameter name.
        plain: slots, of `slots` and `local`, of plain tensors in the state of a DTensor parameter, by parameter name;
            without counters.
        state: state values that are not tensors: `{name: {slot: value}}`.
        shared: the class of each optimizer whose state has entries that belong to no parameter, and these entries, by
            its number.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    local: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plain: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shared: dict[int, tuple[str, dict[Any, Any]]] = field(default_factory=dict)

    def to_value(self) -> dict[str, Any]:
        """The record as plain values."""
        shared = [[number, kind, entries] for number, (kind, entries) in self.shared.items()]
        more = {"local": _rows(self.local), "plain": _rows(self.plain), "shared": shared}
        return {
            "groups": self.groups,
            "slots": _rows(self.slots),
            "state": self.state,
            **{kind: rows for kind, rows in more.items() if rows},
        }

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> OptimizerRecord:
        """Parse a value of `to_value`.

        Raises:
            MismatchError: the value is not such a record.
        """
        try:
            slots = _slots_of(value["slots"])
            local, plain = _slots_of(value.get("local", [])), _slots_of(value.get("plain", []))
            groups = [
                {
                    "class": str(group["class"]),
                    "index": int(group["index"]),
                    "options": {
                        str(name): option for name, option in group["options"].items() if name not in _NOT_OPTIONS
                    },
                    "params": [str(name) for name in group["params"]],
                    **({"started": dict(group["started"])} if group.get("started") else {}),
                }
                for group in value["groups"]
            ]
            state = {str(name): dict(values) for name, values in value["state"].items()}
            shared = {int(number): (str(kind), dict(entries)) for number, kind, entries in value.get("shared", [])}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MismatchError(f"`extra` holds an invalid record of the optimizer: {error!r}") from None
        return cls(groups, slots, state, local, plain, shared)


def _rows(slots: Mapping[str, tuple[str, ...]]) -> list[list[list[str]]]:
    """`[slots, names]` for each distinct set of slots: thousands of parameters share a few sets."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, of_name in slots.items():
        names.setdefault(of_name, []).append(name)
    return [[list(of_names), named] for of_names, named in names.items()]


def _slots_of(rows: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """The inverse of `_rows`."""
    return {str(name): tuple(map(str, slots)) for slots, names in rows for name in names}


def named_optimizers(optimizer: object, key_of: Mapping[int, str]) -> list[NamedOptimizer]:
    """The optimizers in an `optimizer` argument, with the names of their parameters.

    Args:
        optimizer: a torch optimizer, or several with disjoint parameters; None: none.
        key_of: the key of each parameter of the model, by `id`.

    Raises:
        ArgumentError: a value is not an optimizer, or a parameter is not in the model, or in two optimizers.
        UnsupportedError: the optimizer overrides `state_dict`.
    """
    given: list[Any] = [] if optimizer is None else [optimizer]
    if isinstance(optimizer, Sequence):
        given = list(optimizer)
    optimizers: list[NamedOptimizer] = []
    assigned: set[int] = set()
    for one in map(unwrapped, given):
        local = _local(one)
        names: dict[int, str] = {}
        for parameter in (p for group in one.param_groups for p in group["params"]):
            if id(parameter) not in key_of:
                raise ArgumentError(
                    f"the {type(one).__name__} holds a parameter of shape {tuple(parameter.shape)} that the model does "
                    "not have",
                    hint="create the optimizer after the model is wrapped or moved, and pass all modules whose "
                    "parameters it holds: `[model, loss]`",
                )
            names[id(parameter)] = key_of[id(parameter)]
        if not assigned.isdisjoint(names):
            raise ArgumentError(f"two optimizers hold {show(names[min(assigned & names.keys())])}")
        assigned.update(names)
        optimizers.append(NamedOptimizer(one, local, names))
    return optimizers


def split_optimizers(optimizer: object) -> tuple[Any, dict[str, Any]]:
    """Split an `optimizer` argument into optimizers whose state is by parameter, and others by name.

    The others have a `state_dict` of their own, or hooks of it: wrappers with copies of the parameters in float32,
    composite ones.

    Example:
        >>> from torch import nn
        >>> sgd = torch.optim.SGD(nn.Linear(1, 1).parameters())
        >>> split_optimizers(sgd) == (sgd, {})
        True
    """
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    whole = {
        "optimizer" if len(given) == 1 else f"optimizer.{number}": one
        for number, one in enumerate(given)
        if one is not None and _is_whole(one)
    }
    if not whole:
        return optimizer, {}
    named = [one for one in given if one is not None and not _is_whole(one)]
    return (named or None), whole


def _is_whole(optimizer: Any) -> bool:
    optimizer = unwrapped(optimizer)
    if not callable(getattr(optimizer, "state_dict", None)) or not callable(
        getattr(optimizer, "load_state_dict", None)
    ):
        return False
    if not isinstance(optimizer, torch.optim.Optimizer):
        return True
    is_known = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
    return not is_known and _has_own_state_dict(optimizer)


def _has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether other code than that of torch's base class makes the `state_dict()`."""
    is_other = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    return is_other or any(getattr(optimizer, name, None) for name in _HOOKS)


def whole_kind(name: str, one: Any) -> str | None:
    """The class of an optimizer whose `state_dict` is saved whole; None: the object is no optimizer of torch.

    Example:
        >>> print(whole_kind("ema", {}))
        None
    """
    one = unwrapped(one)
    is_optimizer = name.partition(".")[0] == "optimizer" and isinstance(one, torch.optim.Optimizer)
    return type(one).__name__ if is_optimizer else None


def order_of(one: Any, key_of: Mapping[int, str]) -> list[list[str]] | None:
    """The names of the parameters of an optimizer, by group: its `state_dict` numbers them. None: not all are known.

    Args:
        one: the optimizer.
        key_of: as in `named_optimizers`.
    """
    groups = getattr(unwrapped(one), "param_groups", None)  # an optimizer of several has none
    if groups is None:
        return None
    names = [[key_of.get(id(p)) for p in group["params"]] for group in groups]
    return None if any(None in of_group for of_group in names) else names  # type: ignore[return-value]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that holds the state: of an `AcceleratedOptimizer` of accelerate the one inside, else the same.

    Example:
        >>> unwrapped(None) is None
        True
    """
    while type(optimizer).__name__ == "AcceleratedOptimizer":  # by name: importing the class would be slow
        optimizer = optimizer.optimizer
    return optimizer


def _local(optimizer: Any) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"`optimizer` is a {type(optimizer).__name__}, expected a torch.optim.Optimizer or several",
            hint="`Checkpointer.resume(extra={...})` saves any object with `state_dict` and `load_state_dict`",
        )
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        if not isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
            raise UnsupportedError(
                "a ZeroRedundancyOptimizer with `overlap_with_ddp` has no state before its first steps",
                hint="use it without `overlap_with_ddp`",
            )
        return optimizer.optim  # type: ignore[attr-defined]
    if _has_own_state_dict(optimizer):
        raise UnsupportedError(
            f"a {type(optimizer).__name__} overrides `state_dict`, or has hooks of it, so its state cannot be assigned "
            "to parameters",
            hint="pass it in `Checkpointer.resume(extra={...})`, which saves the `state_dict` of rank 0 unchanged",
        )
    return optimizer


def record_state(
    optimizers: Iterable[NamedOptimizer], started: Callable[[int, int], Mapping[str, Any]] | None = None
) -> tuple[dict[str, torch.Tensor], OptimizerRecord]:
    """The state tensors of optimizers by key (not copies), and the record of the rest of their state.

    Args:
        optimizers: the optimizers.
        started: called as `started(optimizer, group)` with two numbers, returns the options of the group before the
            first step.

    Raises:
        UnsupportedError: the name of a slot is empty, not text, or contains a dot or a colon.
    """
    tensors: dict[str, torch.Tensor] = {}
    record = OptimizerRecord()
    for number, live in enumerate(optimizers):
        for index, group in enumerate(live.optimizer.param_groups):
            options = {name: plain(value) for name, value in group.items() if name not in _NOT_OPTIONS}
            names = [live.names[id(p)] for p in group["params"]]
            before = {} if started is None else dict(started(number, index))
            more = {"started": before} if before else {}
            record.groups.append({"class": live.kind, "index": index, "options": options, "params": names, **more})
        if entries := shared_entries(live):
            record.shared[number] = (live.kind, {key: plain(value) for key, value in entries.items()})
        for name, (parameter, _) in live.owned().items():
            state = live.local.state.get(parameter, {})
            invalid = [slot for slot in state if not isinstance(slot, str) or not slot or {".", ":"} & {*slot}]
            if invalid:
                raise UnsupportedError(f"the state of {show(name)} has a slot named {invalid[0]!r}", key=name)
            # State with lists of tensors, whose length changes from step to step, goes into the record as a whole.
            # This is possible for plain parameters only; of a DTensor parameter the tensors stay tensors.
            is_plain = not hasattr(parameter, "device_mesh")
            has_lists = is_plain and any(isinstance(value, list | tuple | dict | set) for value in state.values())
            of_tensors, kinds = ({}, {}) if has_lists else state_tensors(state, name)
            is_rest = {slot: has_lists or not isinstance(value, torch.Tensor) for slot, value in state.items()}
            rest = {slot: plain(value) for slot, value in state.items() if is_rest[slot]}
            rest |= {f"{slot}:": kind for slot, kind in kinds.items()}
            tensors |= {f"{slot}.{name}": value for slot, value in of_tensors.items()}
            record.slots[name] = tuple(sorted(of_tensors))
            if rest:
                record.state[name] = rest
    return tensors, record


def shared_entries(live: NamedOptimizer) -> dict[Any, Any]:
    """The entries of the state of an optimizer that belong to no parameter: its `state_dict()` has them, too.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight])
        >>> optimizer.state["n_steps"] = 3
        >>> shared_entries(NamedOptimizer(optimizer, optimizer, {id(weight): "w"}))
        {'n_steps': 3}
    """
    return {key: value for key, value in live.local.state.items() if not isinstance(key, torch.Tensor)}


def set_shared(live: NamedOptimizer, entries: Mapping[Any, Any]) -> None:
    """Set such entries, on the device of the first parameter."""
    first = next((_local_device(p) for group in live.local.param_groups for p in group["params"]), torch.device("cpu"))
    for key, value in entries.items():
        live.local.state[key] = _to_device(value, first)


def state_tensors(state: Mapping[str, Any], name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors in the state of a parameter by slot, and of those that are made of others the tensors inside.

    Args:
        state: the state.
        name: the name of the parameter, for messages.

    Returns:
        The tensors; of a DTensor that is made of others those of this rank. And class and options of each slot whose
        tensor is made of others.

    Raises:
        UnsupportedError: a class does not follow the protocol `__tensor_flatten__`.

    Example:
        >>> state_tensors({"step": torch.ones(1), "n": 3}, "w")
        ({'step': tensor([1.])}, {})
    """
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    for slot, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        with torch.no_grad():
            any_value: Any = value
            local: torch.Tensor = any_value.to_local() if hasattr(value, "device_mesh") else value
        parts, kind = inner_tensors(local, f"{slot}.{name}")
        if kind:
            kinds[slot] = kind
            tensors |= {f"{slot}:{part.replace('.', ':')}": one for part, one in parts.items()}
        else:
            tensors[slot] = value
    return tensors, kinds


def first_state(live: NamedOptimizer, parameter: torch.Tensor, group: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The state that an optimizer makes for a parameter in its first step.

    A copy of the optimizer makes a step with another parameter, of the same kind and with gradients of zero. Nothing of
    the run changes, and functions that the optimizer compiles are not compiled.

    Args:
        live: the optimizer.
        parameter: the parameter.
        group: its parameter group.
        name: its name, for messages.

    Raises:
        MismatchError: the step raised an exception.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], momentum=0.9)
        >>> live = NamedOptimizer(optimizer, optimizer, {id(weight): "w"})
        >>> first_state(live, weight, optimizer.param_groups[0], "w"), dict(optimizer.state)
        ({'momentum_buffer': tensor([0., 0.])}, {})
    """
    kind = type(live.local)
    other = torch.nn.Parameter(torch.zeros_like(parameter.detach()), requires_grad=parameter.is_floating_point())
    other.grad = torch.zeros_like(other)
    options = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in group.items()}
    one = object.__new__(kind)
    one.__dict__.update(live.local.__dict__)
    one.__dict__.pop("step", None)  # a scheduler sets one that belongs to the optimizer of the run
    one.state = defaultdict(dict)
    one.param_groups = [{**options, "params": [other]}]
    one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = OrderedDict(), OrderedDict()  # those are of the run
    step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step
    device = _local_device(parameter)
    set_stance: Any = getattr(torch.compiler, "set_stance", None)
    eager = contextlib.nullcontext() if set_stance is None else set_stance("force_eager")
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), eager:
            step(one)
    except Exception as error:
        raise MismatchError(
            f"the {live.kind} does not make its state of {show(name)} before the first step: {type(error).__name__}: "
            f"{' '.join(str(error).split())}",
            key=name,
        ) from error
    state: dict[str, Any] = one.state.get(other, {})
    return state


def merge_records(records: Sequence[OptimizerRecord]) -> OptimizerRecord:
    """Merge the records of several ranks. Where they differ the first one is used.

    Raises:
        MismatchError: the groups of a parameter have different options on different ranks.
    """
    whole = OptimizerRecord()
    where: dict[str, dict[str, Any]] = {}
    for record in records:
        used: set[int] = set()  # groups of two optimizers of one class stay apart
        for group in record.groups:
            new = [name for name in group["params"] if name not in where]
            for name in group["params"]:
                if name in where and not _same(where[name]["options"], group["options"]):
                    raise MismatchError(
                        f"the options of {show(name)} in the optimizer differ between ranks: "
                        f"{_differing(where[name]['options'], group['options'])}",
                        key=name,
                    )
            same_index = (g for g in whole.groups if g["class"] == group["class"] and g["index"] == group["index"])
            alike = (g for g in same_index if id(g) not in used and _same(g["options"], group["options"]))
            target = next(alike, None)
            if target is None:
                target = {**group, "params": []}
                whole.groups.append(target)
            used.add(id(target))
            target["params"] = [*target["params"], *new]
            where |= dict.fromkeys(new, target)
        for name, slots in record.slots.items():
            whole.slots.setdefault(name, slots)
        for name, slots in record.plain.items():
            whole.plain.setdefault(name, slots)
        for name, state in record.state.items():
            whole.state.setdefault(name, state)
        for number, entries in record.shared.items():
            whole.shared.setdefault(number, entries)
    return whole


def check_slots(records: Sequence[tuple[OptimizerRecord, Sequence[int]]], sharded: Collection[str]) -> None:
    """Check that ranks that hold the same whole parameter have the same state tensors of it.

    Args:
        records: the records, and the ranks that have the same.
        sharded: names of sharded parameters, which are not compared: a region can lack what others have.

    Raises:
        MismatchError: some have other ones.
    """
    first: dict[str, tuple[tuple[str, ...], Sequence[int]]] = {}
    for record, ranks in records:
        for name, slots in record.slots.items():
            known, others = first.setdefault(name, (slots, ranks))
            if known == slots or name in sharded:
                continue
            slot = min({*known} ^ {*slots})
            with_it, without = (others, ranks) if slot in known else (ranks, others)
            raise MismatchError(
                f"{show(name)} has the state {show(slot)} in the optimizer on {ranks_named(with_it)}, and not on "
                f"{ranks_named(without)}",
                key=name,
                hint="ranks that hold the same parameter must make the same steps",
            )


def plain(value: Any, *, drop_functions: bool = False) -> Any:
    """Convert a value to the types that `extra` holds: tensors detached and on the host, plain dicts.

    Args:
        value: a value of a state dict.
        drop_functions: leave out functions in mappings.

    Raises:
        UnsupportedError: the value contains a distributed tensor, or one on device `meta`.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "device_mesh"):
            raise UnsupportedError(
                "a distributed tensor in a list or in the state of an object cannot be saved",
                hint="an optimizer that keeps lists of tensors (LBFGS) works with plain parameters only, and objects "
                "with distributed tensors in other formats than Checkpoint 1.0",
            )
        if value.is_meta:
            raise UnsupportedError("a tensor on device `meta` in the state of an object has no values to save")
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
    """Whether two options are equal; tensors are compared by content."""
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
    """The change of the state of one parameter.

    Attributes:
        live: its optimizer.
        parameter: the parameter.
        group: its parameter group.
        fill: loaded tensors by slot, which are copied into existing state or become new state.
        keep: state values that are not tensors; None: they do not change.
        drop: slots to remove, because the checkpoint does not have them.
        plain: slots whose tensors are plain even if the parameter is a DTensor.
        made: new state tensors that are made of others, by slot.
    """

    live: NamedOptimizer
    parameter: torch.Tensor
    group: dict[str, Any]
    fill: dict[str, torch.Tensor] = field(default_factory=dict)
    keep: dict[str, Any] | None = None
    drop: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def apply(self, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Change the state of the optimizer; `copy(live, loaded)` copies into an existing tensor."""
        everything = self.live.local.state
        if self.fill or self.keep or self.parameter in everything:
            state = everything.get(self.parameter, {})
            state.update(self.made)
            tensors = state_tensors(state, self.live.names[id(self.parameter)])[0]
            for slot, loaded in self.fill.items():
                present = tensors.get(slot)
                if present is not None:
                    copy(present, loaded)
                else:
                    state[slot] = self._new_state(slot, loaded)
            for slot in self.drop:
                state.pop(slot, None)
            for slot, value in (self.keep or {}).items():
                state[slot] = _to_device(value, _local_device(self.parameter))
            if type(state.get("step")) in (int, float):
                state["step"] = self._step_as_loaded(state)
            if state:
                everything[self.parameter] = state
            else:
                everything.pop(self.parameter, None)

    def _step_as_loaded(self, state: dict[str, Any]) -> Any:
        """A step that was saved as a number, as the optimizer keeps one that it loads: those of torch as a tensor."""
        live = self.live.local
        one = object.__new__(type(live))
        one.__dict__.update(live.__dict__)
        copied = {self.parameter: dict(state)}
        one.__setstate__({"state": copied, "param_groups": [{**self.group, "params": [self.parameter]}]})
        return copied[self.parameter]["step"]

    def _new_state(self, slot: str, loaded: torch.Tensor) -> torch.Tensor:
        """A state tensor on the device and with the placements that the optimizer itself would use."""
        parameter: Any = self.parameter
        on_host = slot == "step" and not (self.group.get("capturable") or self.group.get("fused"))
        loaded = loaded.to("cpu" if on_host else _local_device(parameter))
        if not hasattr(parameter, "device_mesh") or loaded.ndim == 0 or slot in self.plain:
            return loaded
        from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415  slow, and already imported if there is a DTensor

        mesh = parameter.device_mesh
        if loaded.shape == parameter.to_local().shape:
            placements, shape, stride = parameter.placements, parameter.shape, parameter.stride()
        else:
            placements, shape, stride = [Replicate()] * mesh.ndim, loaded.shape, loaded.stride()
        new: torch.Tensor = DTensor.from_local(loaded, mesh, placements, run_check=False, shape=shape, stride=stride)
        return new


def saved_groups(
    optimizers: Iterable[NamedOptimizer],
    record: OptimizerRecord,
    known_name: Callable[[str], str],
    *,
    skip: bool = False,
) -> tuple[list[tuple[dict[str, Any], Mapping[str, Any]]], list[str]]:
    """The saved group of each parameter group.

    Args:
        optimizers: the optimizers.
        record: the saved record.
        known_name: returns the name of a parameter in the record.
        skip: groups that do not match the saved ones keep their own.

    Returns:
        `(group, saved group)` of each group, and sentences about those that keep their options.

    Raises:
        MismatchError: parameters of one group were saved with different options, or parameters that were saved in one
            group are in groups with different options, and `skip` is not set.
    """
    found: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
    matched: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
    n_of_class: Counter[str] = Counter()
    for live in optimizers:
        # Options of another class of optimizer have another meaning.
        groups = [group for group in record.groups if group["class"] == live.kind]
        saved_group = {name: group for group in groups for name in group["params"]}
        empty: list[tuple[int, dict[str, Any]]] = []
        own: list[Mapping[str, Any]] = []
        for index, group in enumerate(live.optimizer.param_groups):
            if group["params"]:
                names = [known_name(live.names[id(p)]) for p in group["params"]]
                matched.append((group, {name: saved_group[name] for name in names if name in saved_group}))
                own += matched[-1][1].values()
            else:
                empty.append((index, group))
        if empty:
            same = _same_optimizer(groups, own, n_of_class[live.kind])
            found += [(group, one) for index, group in empty for one in same if one["index"] == index]
        n_of_class[live.kind] += 1
    split = _split_groups(matched)
    changed: list[str] = []
    for group, saved in matched:
        first = next(iter(saved), "")
        other = next((name for name in saved if not _same(saved[name]["options"], saved[first]["options"])), None)
        if other is not None:
            key, message = (
                other,
                (
                    f"{show(other)} and {show(first)} are in one group of the optimizer, and were saved with different "
                    f"options: {_differing(saved[first]['options'], saved[other]['options'])}"
                ),
            )
        elif id(group) in split:
            key, message = first, split[id(group)]
        else:
            # A ZeroRedundancyOptimizer passes them on to its local optimizer at each step.
            found += [(group, saved[first])] if saved else []
            continue
        if not skip:
            raise MismatchError(
                message,
                key=key,
                hint="use the same parameter groups as the run that saved; "
                '`strict={"other_optimizer": "skip"}` keeps the options of the run',
            )
        changed.append(f"{message}; the group keeps the options of the run")
    return found, changed


def _same_optimizer(
    groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], number: int
) -> Sequence[Mapping[str, Any]]:
    """The saved groups of one of several optimizers of a class.

    Args:
        groups: those of the class, in the order in which they were saved.
        own: those with parameters of the optimizer.
        number: that of the optimizer among those of the class, for one without saved parameters.
    """
    of_each: list[list[Mapping[str, Any]]] = []
    for group in groups:
        if not of_each or group["index"] <= of_each[-1][-1]["index"]:
            of_each.append([])
        of_each[-1].append(group)
    has_own = (one for one in of_each if any(group is known for group in one for known in own))
    return next(has_own, of_each[number] if number < len(of_each) else ())


def _split_groups(matched: Iterable[tuple[dict[str, Any], dict[str, dict[str, Any]]]]) -> dict[int, str]:
    """The groups, by `id`, whose options differ from those of another group with parameters of the same saved group.

    Args:
        matched: each group of the run, and the saved group of each of its parameters.

    Returns:
        What differs, as a sentence.
    """
    holders: dict[int, list[tuple[dict[str, Any], str, dict[str, Any]]]] = {}
    for group, saved in matched:
        names = {id(one): (name, one) for name, one in reversed(saved.items())}
        for key, (name, one) in names.items():
            # Options that were not saved keep their values anyway.
            own = {option: group.get(option) for option in one["options"]}
            holders.setdefault(key, []).append((group, name, own))
    split: dict[int, str] = {}
    for several in holders.values():
        for group, name, own in several:
            other = next((one for one in several if not _same(own, one[2])), None)
            if other is not None:
                split[id(group)] = (
                    f"{show(name)} and {show(other[1])} were saved in one group of the optimizer, and are in groups "
                    f"with different options: {_differing(own, other[2])}"
                )
    return split


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the options of a parameter group."""
    for name, value in options.items():
        group[name] = _set(group.get(name), value)


def _set(present: Any, value: Any) -> Any:
    """The value of an option; tensors are set in place: a captured CUDA graph refers to them."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
        present.detach().copy_(torch.as_tensor(value))
        return present
    if type(present) in (list, tuple) and type(value) in (list, tuple) and len(present) == len(value):
        return type(present)(map(_set, present, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def _local_device(parameter: Any) -> torch.device:
    device: torch.device = parameter.to_local().device if hasattr(parameter, "to_local") else parameter.device
    return device


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(_to_device(item, device) for item in value)
    return {key: _to_device(item, device) for key, item in value.items()} if type(value) is dict else value
