"""The state of a run under the names of torch, translated into the names of this package. Reads no files.

    <prefix><parameter>                                  the model: `w`, `model.w`, `app.model.w`
    <optimizer>.state.<parameter>.<slot>                 its state, as `get_optimizer_state_dict` names it
    <optimizer>.param_groups.<parameter>.<option>        flattened options
    <optimizer>.param_groups                             options as a list of groups, each with its `params`
    lr_scheduler.<field>, train_state.<field>, ...       other objects

`Optimizer.state_dict()` names parameters by numbers, in the order of the groups. Here a state tensor is
`<slot>.<parameter>`, and the rest of the state is one value, `trainer`, as `reshard.torch` saves it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.documents.common_info import CommonInfo
from reshard.errors import MismatchError
from reshard.formats import weight_sets
from reshard.formats.outputs import as_array
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import numpy as np

# Other names of objects that `Checkpointer.resume` has arguments for; an optimizer with its own `state_dict` is one.
_OTHER_NAMES = {
    "scheduler": ("scheduler", "lr_scheduler", "lr_schedulers", "schedulers"),
    "optimizer": ("optim", "optim_state", "optim_state_dict", "optimizer_state", "optimizer_state_dict"),
}
# What a trainer keeps for itself: a run that has no such object goes on without it.
_OF_TRAINER = ("train_state", "dataloader", "data_loader", "trainer")
_STEPS = ("step", "global_step", "iteration")
_MAX_STEP = 1 << 62
_MAX_DIGITS = 18
_OPTIMIZER = frozenset(
    (
        "optim",
        "optim_state",
        "optim_state_dict",
        "optimizer",
        "optimizer_state",
        "optimizer_state_dict",
        "optimizer_states",  # of Lightning
        "optimizers",
    )
)
_STATE = re.compile(r"(?:^|\.)(?:state|param_groups)(?:\.|$)")
_WHOLE = re.compile(r"optimizer(?:\.([0-9]+))?")  # an optimizer of the run with a `state_dict` of its own
_SCHEDULER = re.compile(r"scheduler(?:\.[0-9]+)?")
_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class Values:
    """Values that are no tensors.

    Attributes:
        by_name: the values by their flattened names.
        paths: keys and positions that lead to a value or a tensor, by name. If missing, the dots of the name part them.
    """

    by_name: Mapping[str, object] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)

    def path(self, name: str) -> tuple[str | int, ...]:
        """Keys and positions that lead to a value."""
        return self.paths.get(name) or tuple(name.split("."))


@dataclass(frozen=True)
class Live:
    """The run that resumes.

    Attributes:
        tensors: names of the tensors of its model, with the further names of tied ones; or their shapes by name.
        groups: for each optimizer its class and the names of the parameters of each of its groups, in order.
        objects: names of its other objects with state.
        modules: names of its modules with state beside their tensors.
        states: the own state of its objects, by name, without tensors.
        with_objects: whether it restores the state of its objects.
    """

    tensors: Collection[str]
    groups: Sequence[tuple[str, Sequence[Sequence[str]]]] = ()
    objects: Collection[str] = ()
    modules: Collection[str] = ()
    states: Mapping[str, object] = field(default_factory=dict)
    with_objects: bool = True

    @property
    def lists(self) -> Collection[str]:
        """Names of the objects whose own state is a list."""
        return [name for name, state in self.states.items() if isinstance(state, list | tuple)]


@dataclass(frozen=True)
class RunState:
    """The translation.

    Attributes:
        keys: for each tensor its name in this package, by its stored name. A tensor that is the step is left out.
        places: object and path of each tensor in the state of an object of the run, by its name in this package.
        outside: stored names of tensors beside the state dict of the model that are no state of an optimizer.
        trainer: the state beside the tensors, as `reshard.torch` saves it.
        notes: what is left out.
    """

    keys: Mapping[str, str]
    trainer: Mapping[str, Any]
    places: Mapping[str, tuple[str, tuple[str | int, ...]]] = field(default_factory=dict)
    outside: Collection[str] = ()
    notes: tuple[str, ...] = ()


# -- the step


def common_of(
    index: _core.Index, objects: Collection[str], read: Callable[[str], object], iteration: int | None
) -> CommonInfo | None:
    """The counters of a checkpoint: the step that a value of the trainer says, else the number of its folder.

    Without both it is the number of steps that the optimizer made.

    Args:
        index: its tensors.
        objects: names of its other values.
        read: returns one of these.
        iteration: the number in the name of its folder, or None.

    Returns:
        None if nothing tells.
    """
    names = [name for name in (*objects, *map(index.key, range(len(index)))) if _may_be_step(name)]
    steps_of: dict[str, int] = {}
    for name in sorted(names, key=_place_of_step):
        if steps_of and _place_of_step(next(iter(steps_of)))[:2] != _place_of_step(name)[:2]:
            break
        value = read(name) if name in objects else _number(index, name)
        if type(value) is int and 0 <= value <= _MAX_STEP:
            steps_of[name] = value
    if steps_of:
        taken, made = next(iter(steps_of.items()))
        if len(set(steps_of.values())) > 1:
            several = listed([f"{show(name)} is {step}" for name, step in steps_of.items()])
            _log.warning("the checkpoint counts steps in several ways: %s; %s is taken", several, show(taken))
        return CommonInfo(step_num=made, global_step=made)
    if iteration is None:
        counters = [key for n in range(len(index)) if _is_counter(key := index.key(n))]
        steps = [value for key in counters if (value := _number(index, key)) is not None]
        iteration = max(steps, default=None)
    return None if iteration is None else CommonInfo(step_num=iteration, global_step=iteration)


def read_region(index: _core.Index, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """A region of a tensor.

    Args:
        index: the tensors.
        key: the tensor.
        offset: the first element of the region, one index a dim.
        shape: its extent.
    """
    request = _core.Request()
    request.add_region(key, key, offset, shape)
    return as_array(*index.plan(request).load()[0], index.info(key)[0], shape)


def _may_be_step(name: str) -> bool:
    first, *rest = name.split(".")
    is_plain = first not in ("dataloader", "data_loader") and "scheduler" not in first and not is_optimizer(name)
    return is_plain and (rest or [first])[-1] in _STEPS and len(rest) <= 1


def _place_of_step(name: str) -> tuple[bool, int, str]:
    """The order in which counters of steps are tried: `train_state.step`, then those that are nested least."""
    return not name.startswith("train_state."), name.count("."), name


def _is_counter(key: str) -> bool:
    return is_optimizer(key) and ".state." in key and key.endswith(".step")


def _number(index: _core.Index, key: str) -> int | None:
    """The one element of a tensor, if it is a count."""
    _, shape = index.info(key)
    if shape not in ((), (1,)):
        return None
    value = read_region(index, key, (0,) * len(shape), shape).reshape(()).item()
    is_count = isinstance(value, int | float) and 0 <= value <= _MAX_STEP and value == int(value)
    return int(value) if is_count else None


# -- the names


def model_of(
    shapes: Mapping[str, weight_sets.Shape], live: Live, *, entry: str | None = None, path: str | None = None
) -> weight_sets.WeightSet:
    """The weights of a checkpoint that are those of the run.

    Args:
        shapes: its tensors and their shapes; None: not known.
        live: the run.
        entry: the entry to take; None: the only one that fits.
        path: the checkpoint, for errors.

    Raises:
        ArgumentError, MismatchError: as `weight_sets.chosen`.

    Example:
        >>> model_of({"model.w": None, "optim.state.w.exp_avg": None}, Live(["w"])).names
        {'model.w': 'w'}
    """
    tensors = live.tensors if isinstance(live.tensors, Mapping) else dict.fromkeys(live.tensors)
    stored = {
        key: shape
        for key, shape in shapes.items()
        if not is_optimizer(key) and (key in tensors or key.partition(".")[0] not in live.objects)
    }
    return weight_sets.chosen(stored, tensors, entry=entry, path=path)


def translated(keys: Iterable[str], values: Values, live: Live, model: weight_sets.WeightSet | None = None) -> RunState:
    """The tensors and values of a checkpoint under the names of this package.

    Args:
        keys: its tensors.
        values: its other values.
        live: the run that resumes.
        model: which tensors are the weights; None: as `model_of`.

    Raises:
        MismatchError: it numbers parameters, and the run has other groups of them; or as `model_of`.

    Example:
        >>> values = Values({"optimizer.param_groups.w.lr": 0.1, "lr_scheduler.last_epoch": 3, "train_state.step": 3})
        >>> live = Live(["w"], [("SGD", [["w"]])], ["scheduler"])
        >>> state = translated(["model.w", "optimizer.state.w.momentum_buffer"], values, live)
        >>> state.keys
        {'model.w': 'w', 'optimizer.state.w.momentum_buffer': 'momentum_buffer.w'}
        >>> state.trainer["objects"], state.trainer["optimizer"]["groups"][0]["options"]
        ({'scheduler': {'last_epoch': 3}}, {'lr': 0.1})
    """
    keys = list(keys)
    values = _parted(values, live)
    model = model_of(dict.fromkeys(keys), live) if model is None else model
    # State of an optimizer beside other weights, such as those of a discriminator, belongs to these.
    foreign = {key for key in (*keys, *values.by_name) if model.is_foreign(key) and is_optimizer(key)}
    if foreign:
        values = replace(values, by_name={key: one for key, one in values.by_name.items() if key not in foreign})
    owners = _owners(live, [name for name in (*keys, *values.by_name) if name not in foreign], values)
    of_objects = {
        name: place
        for name in (*keys, *values.by_name)
        if name not in model.names and (place := _place(values.path(name), owners, live.states)) is not None
    }
    by_parameter = {name: one for name, one in values.by_name.items() if name not in of_objects}
    others = replace(values, by_name=by_parameter)
    known = _Groups.of(others, live)
    around = _around(model, values)
    places: dict[str, tuple[str, tuple[str | int, ...]]] = {}
    renamed: dict[str, str] = {}
    outside: list[str] = []
    slots: dict[str, list[str]] = {}
    for key in keys:
        if key in model.names:
            renamed[key] = model.names[key]
            continue
        if key in foreign:
            renamed[key] = key
            outside.append(key)
            continue
        if key in of_objects:
            owner, path, _ = of_objects[key]
            renamed[key] = ".".join(("extra", owner, *map(str, path)))
            places[renamed[key]] = (owner, path)
            continue
        of_state = state_of(key)
        if of_state is None and _may_be_step(key):
            continue  # the step of the decision
        if of_state is None:
            renamed[key] = model.inner(key) if model.holds(key) and not is_optimizer(key) else key
            if not key.startswith(around) and not is_optimizer(key):
                outside.append(key)
            continue
        parameter, slot = known.name(of_state[0], _head(key)), of_state[1]
        if not live.groups and known.names.find(parameter) is None:
            renamed[key] = key  # a run without an optimizer: nothing tells which parameter a number means
            continue
        renamed[key] = f"{slot}.{parameter}"
        slots.setdefault(parameter, []).append(slot)
    trainer: dict[str, Any] = {"aliases": {}, "modules": {}, "objects": {}}
    groups, states, used = _optimizer(others, live, known)
    if slots or groups:
        rows = [[sorted(of_name), [name]] for name, of_name in slots.items()]
        trainer["optimizer"] = {"groups": groups, "slots": rows, "state": states}
    of_module = {f"{module}{'.' if module else ''}_extra_state": module for module in live.modules}
    if of_module:
        modules = weight_sets.Known(of_module)
        for name in values.by_name:
            found = modules.find(model.inner(name)) if model.holds(name) else None
            if found is not None:
                trainer["modules"][of_module[found]] = values.by_name[name]
                used.add(name)
    left = _objects(values, of_objects, used, trainer["objects"])
    _check_lists(live, trainer["objects"], of_objects)
    unknown = sorted(name for name in left if name not in _OF_TRAINER and name not in _STEPS)
    trainer["objects"] |= dict.fromkeys(unknown)  # refused, or reported: the run has none of this name
    of_trainer = sorted(name for name in left if name in _OF_TRAINER)
    notes = [f"{listed(map(show, of_trainer))} of the checkpoint is not restored: the run has no such object"]
    return RunState(renamed, trainer, places, outside, tuple(notes if of_trainer else ()))


def _around(model: weight_sets.WeightSet, values: Values) -> str:
    """The part of the names that leads to the state dict of the model: `state_dict.` if that has `model.weight`."""
    path = next((values.paths.get(key, ()) for key in model.names), ())
    starts = ("".join(f"{step}." for step in path[:n]) for n in range(len(path), 0, -1))
    return next(filter(model.start.startswith, starts), "")


def is_number(text: str) -> bool:
    """Whether a part of a name is the position of a value, such as that of a parameter group.

    Example:
        >>> is_number("10"), is_number("lr"), is_number("²")
        (True, False, False)
    """
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def is_optimizer(key: str) -> bool:
    """Whether a name belongs to the state of an optimizer: its first or second part says so.

    Example:
        >>> is_optimizer("optimizer.state.w.exp_avg"), is_optimizer("app.optim.state.w"), is_optimizer("layers.0.w")
        (True, True, False)
    """
    return "optim" in key and not _OPTIMIZER.isdisjoint(key.split(".", 2)[:2])


def is_whole_optimizer(name: str) -> bool:
    """Whether an object of a run is an optimizer with a `state_dict` of its own, perhaps one of several.

    Example:
        >>> is_whole_optimizer("optimizer.1"), is_whole_optimizer("scheduler")
        (True, False)
    """
    return _WHOLE.fullmatch(name) is not None


def state_of(key: str) -> tuple[str, str] | None:
    """Parameter and slot of the state of an optimizer.

    Example:
        >>> state_of("optimizer.state.fc.w.exp_avg")
        ('fc.w', 'exp_avg')
    """
    head, found, rest = key.partition("state.") if key.startswith("state.") else key.partition(".state.")
    if not found or (head and not is_optimizer(key)):
        return None
    parameter, _, slot = rest.rpartition(".")
    return (parameter, slot) if parameter else None


@dataclass(frozen=True)
class _Groups:
    """The parameter groups that a checkpoint lists.

    Attributes:
        groups: each with its options and `params`.
        used: names of the values in them.
        numbers: the names of parameters that it numbers, by optimizer and number.
        names: the names of the run.
    """

    groups: Sequence[tuple[str, Mapping[str, Any]]]
    used: Collection[str]
    numbers: Mapping[tuple[str, str], str]
    names: weight_sets.Known

    @classmethod
    def of(cls, values: Values, live: Live) -> _Groups:
        """Find them among the values."""
        groups, used = _listed_groups(values)
        return cls(groups, used, _numbers(groups, live), weight_sets.Known(live.tensors))

    def name(self, text: str, head: str) -> str:
        """The name of a parameter of an optimizer."""
        return self.numbers.get((head, text)) or self.names.find(text) or text


def _listed_groups(values: Values) -> tuple[list[tuple[str, Mapping[str, Any]]], set[str]]:
    """The groups with what leads to their optimizer, and the names of the values in them.

    A list of groups is one value, or its groups are flattened by their position.
    """
    found: dict[str, dict[str, Any]] = {}
    used: set[str] = set()
    for name, value in values.by_name.items():
        if name.rpartition(".")[2] == "param_groups" and isinstance(value, list):
            found |= {f"{name}.{n}": group for n, group in enumerate(value) if isinstance(group, dict)}
            used.add(name)
            continue
        group, _, option = name.rpartition(".")
        head, _, number = group.rpartition(".")
        is_group = head.rpartition(".")[2] == "param_groups" and is_number(number)
        if is_group and isinstance(values.by_name.get(f"{group}.params"), list):
            found.setdefault(group, {})[option] = value
            used.add(name)
    # "...param_groups.10" comes after "...param_groups.9".
    order = sorted(found, key=lambda group: (_order(_head(group)), int(group.rpartition(".")[2])))
    return [(_head(group), found[group]) for group in order if isinstance(found[group].get("params"), list)], used


def _numbers(groups: Sequence[tuple[str, Mapping[str, Any]]], live: Live) -> dict[tuple[str, str], str]:
    """The names of numbered parameters, in the order of the optimizers of the run and of their groups."""
    saved: dict[str, list[list[object]]] = {}
    for head, group in groups:
        saved.setdefault(head, []).append(group["params"])
    if not live.groups or not all(type(one) is int for of_head in saved.values() for group in of_head for one in group):
        return {}
    sizes = [list(map(len, of_head)) for of_head in saved.values()]
    own = [list(map(len, of_optimizer)) for _, of_optimizer in live.groups]
    if saved and sizes != own:
        raise MismatchError(
            "the state of the optimizer numbers its parameters, in groups of "
            f"{' and of '.join(map(str, sizes))}; the run has groups of {' and of '.join(map(str, own))}",
            hint="create the optimizer with the parameter groups of the run that saved, several optimizers in the same "
            "order",
        )
    return {
        (head, str(n)): name
        for (head, of_head), (_, of_optimizer) in zip(saved.items(), live.groups, strict=False)
        for group, of_group in zip(of_head, of_optimizer, strict=True)
        for n, name in zip(group, of_group, strict=True)
    }


def _head(name: str) -> str:
    """What leads to the state of one optimizer: `optimizer`, or `optimizer_states.0` in a list of several."""
    return _STATE.split(name, maxsplit=1)[0]


def _order(head: str) -> tuple[str, int]:
    """The place of an optimizer among several."""
    of_list, _, number = head.rpartition(".")
    return (of_list, int(number)) if is_number(number) else (head, 0)


def _optimizer(
    values: Values, live: Live, known: _Groups
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], set[str]]:
    """Options of the parameters as groups, other values in their state, and the names that were used."""
    kind_of = {name: kind for kind, groups in live.groups for group in groups for name in group}
    default = live.groups[0][0] if live.groups else ""
    options: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[str, Any]] = {}
    used = set(known.used)
    for head, group in known.groups:
        of_group = {option: one for option, one in group.items() if option not in ("params", "param_names")}
        options |= {known.name(str(one), head): of_group for one in group["params"]}
    for name, value in values.by_name.items():
        if name in known.used:
            continue
        head, flat, rest = f".{name}".partition(".param_groups.")
        of_state = state_of(name)
        if flat and (not head or is_optimizer(name)):
            parameter, _, option = rest.rpartition(".")
            options.setdefault(parameter, {})[option] = value
        elif of_state is not None:
            states.setdefault(known.name(of_state[0], _head(name)), {})[of_state[1]] = value
        elif not (is_optimizer(name) and value in ({}, [])):
            continue
        used.add(name)
    groups = [
        {"class": kind_of.get(parameter, default), "index": 0, "options": of_parameter, "params": [parameter]}
        for parameter, of_parameter in options.items()
    ]
    return groups, states, used


def _owners(live: Live, names: Sequence[str], values: Values) -> dict[str, str]:
    """The objects of the run, by the names that a checkpoint can have for them, or by what leads to them.

    Args:
        live: the run.
        names: the tensors and values of the checkpoint.
        values: its values, with paths.

    Raises:
        MismatchError: the checkpoint has the state of other optimizers or schedulers than the run.
    """
    owners = {other: name for name in live.objects for other in (*_OTHER_NAMES.get(name, ()), name)}
    return _of_optimizers(live, names, values, owners) | _of_schedulers(live, names, values) | owners


def _of_optimizers(live: Live, names: Iterable[str], values: Values, owners: Mapping[str, str]) -> dict[str, str]:
    """The optimizers with a `state_dict` of their own, by the items of a list that are their state."""
    whole = {int(found[1] or 0): name for name in live.objects if (found := _WHOLE.fullmatch(name)) is not None}
    n_run = len(whole) + len(live.groups)
    of_state = [name for name in names if is_optimizer(name) and _STATE.search(name)]
    numbering = _numbering(of_state, values)
    placed: set[str] = set()  # inside the state of one object
    others: set[str] = set()
    items: set[str] = set()
    for name in of_state:
        path, head = values.path(name), _head(name)
        depth = next((n for n, step in enumerate(path[:2]) if is_whole_optimizer(owners.get(str(step), ""))), None)
        item = _item(path)
        if item in owners or (item is not None and (depth is None or owners[str(path[depth])] not in live.lists)):
            items.add(item or "")
        elif depth is not None:
            placed.add(".".join(map(str, path[: depth + 1])))
        elif head in numbering:
            others.add(head)
    heads = sorted((*placed, *others, *items), key=_order)
    in_order = sorted(items, key=_order)
    n_unnamed = len({*others, *items} - owners.keys())
    is_list = not others and len({_order(item)[0] for item in items}) == 1
    if n_run and len(heads) > 1 and (len(heads) != n_run or (n_unnamed > 1 and not is_list)):
        how = "" if is_list else ", which are not items of one list at the top level"
        raise MismatchError(
            f"the checkpoint has the state of {len(heads)} optimizers, {listed(map(show, heads))}{how}; the run has "
            f"{n_run}",
            hint="resume with the optimizers of the run that saved, which it saves as a list in their order; or start "
            "from the weights alone with `init_from=`",
        )
    return {in_order[n]: name for n, name in whole.items()} if len(in_order) == n_run else {}


def _item(path: tuple[str | int, ...]) -> str | None:
    """The item of a list of optimizers at the top level to which a path leads: `optimizer.0`, also as one key."""
    first = str(path[0])
    if len(path) > 1 and type(path[1]) is int and first in _OPTIMIZER:
        return f"{first}.{path[1]}"
    of_list, _, number = first.rpartition(".")
    return first if of_list in _OPTIMIZER and is_number(number) else None


def _numbering(of_state: Iterable[str], values: Values) -> set[str]:
    """What leads to the optimizers whose parameters are numbers, as their groups say, or without them their state."""
    found: dict[str, bool] = {}
    for name in of_state:
        path = values.path(name)
        if "state" in path[:-1]:
            found[_head(name)] = is_number(str(path[path.index("state") + 1]))
    for head, group in _listed_groups(values)[0]:
        found[head] = any(type(one) is int for one in group["params"])
    return {head for head, numbers in found.items() if numbers}


def _schedulers(live: Live) -> list[str]:
    """The schedulers of the run to which the items of a list can belong, in order."""
    own = sorted((name for name in live.objects if _SCHEDULER.fullmatch(name)), key=_order)
    return own if live.with_objects and not set(own) & set(live.lists) else []


def _parted(values: Values, live: Live) -> Values:
    """The values with each list of schedulers at the top level, as Lightning saves it, parted into its items."""
    by_name, paths = dict(values.by_name), dict(values.paths)
    for name, states in values.by_name.items() if _schedulers(live) else ():
        if name not in _OTHER_NAMES["scheduler"] or values.path(name) != (name,) or not isinstance(states, list):
            continue
        if all(isinstance(one, dict) for one in states):
            del by_name[name]
            by_name |= {f"{name}.{n}": one for n, one in enumerate(states)}
            paths |= {f"{name}.{n}": (name, n) for n in range(len(states))}
    return replace(values, by_name=by_name, paths=paths)


def _of_schedulers(live: Live, names: Iterable[str], values: Values) -> dict[str, str]:
    """The schedulers of the run, by the items of a list that are their state."""
    own = _schedulers(live)
    sizes: dict[str, int] = {}
    for path in map(values.path, names if own else ()):
        entry = str(path[0])
        if entry in _OTHER_NAMES["scheduler"] and len(path) > 1 and type(path[1]) is int:
            sizes[entry] = max(sizes.get(entry, 0), path[1] + 1)
    for name, size in sizes.items():
        if size != len(own):
            raise MismatchError(
                f"{show(name)} of the checkpoint has the state of {size} schedulers, and the run has {len(own)}",
                key=name,
                hint="resume with the schedulers of the run that saved, in their order",
            )
    return {f"{name}.{n}": one for name in sizes for n, one in enumerate(own)}


def _place(
    path: tuple[str | int, ...], owners: Mapping[str, str], states: Mapping[str, object]
) -> tuple[str, tuple[str | int, ...], tuple[str | int, ...]] | None:
    """The object to whose state a value belongs, the path in it, and the path that leads to it."""
    for start, end in ((0, 2), (0, 1), (1, 2)):
        owner = owners.get(".".join(map(str, path[start:end])))
        if owner is None or end > len(path):
            continue
        return owner, _with_numbers(path[end:], states.get(owner), of_optimizer=is_whole_optimizer(owner)), path[:end]
    return None


def _with_numbers(path: tuple[str | int, ...], state: object, *, of_optimizer: bool) -> tuple[str | int, ...]:
    """A path in the state of an object with the keys that are numbers, for which DCP has text.

    They are keys of a dict that has numbers in the own state of the object, or parameters in the state of an optimizer.
    """
    found: list[str | int] = []
    before: str | int = ""
    for step in path:
        of_parameter = of_optimizer and before == "state"
        # The first key tells for all: there can be one for each parameter.
        is_key = isinstance(state, dict) and state and step not in state and type(next(iter(state))) is int
        before = _Key(step) if (is_key or of_parameter) and is_number(str(step)) else step
        found.append(before)
        if isinstance(state, list | tuple):
            state = state[before] if isinstance(before, int) and before < len(state) else None
        else:
            state = state.get(before) if isinstance(state, dict) else None
    return tuple(found)


def _objects(
    values: Values,
    places: Mapping[str, tuple[str, tuple[str | int, ...], tuple[str | int, ...]]],
    used: set[str],
    found: dict[str, Any],
) -> set[str]:
    """Fill in the state of the objects of the run; returns the first keys of values that belong to none.

    There is None in the place of a tensor.

    Raises:
        MismatchError: two names of the checkpoint hold the state of one object.
    """
    left = {str(values.path(name)[0]) for name in values.by_name if name not in used and name not in places}
    source: dict[str, str] = {}
    first: dict[tuple[str | int, ...], str] = {}  # the first name with a path, or with one below it
    ends: set[tuple[str | int, ...]] = set()
    for name, (owner, rest, start) in places.items():
        if name in used:
            continue
        at = ".".join(map(str, start))
        if source.setdefault(owner, at) != at:
            raise MismatchError(
                f"{show(source[owner])} and {show(at)} of the checkpoint both are state of {show(owner)} of the run",
                key=at,
                hint="save the checkpoint with one of them alone",
            )
        path: tuple[str | int, ...] = (owner, *rest)
        inner: dict[Any, Any] = found
        above = [path[:n] for n in range(1, len(path))]
        other = next((first[one] for one in above if one in ends), first.get(path))
        if other is not None:
            raise MismatchError(
                f"{show(other)} and {show(name)} of the checkpoint are state of {show(owner)} of the run, and one of "
                "them is inside of the other",
                key=name,
                hint="save the checkpoint with one of them alone",
            )
        ends.add(path)
        first |= {one: first.get(one, name) for one in (*above, path)}
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = values.by_name.get(name)
    for owner, value in found.items():
        found[owner] = _with_lists(value)
    return left


def _check_lists(live: Live, found: Mapping[str, object], places: Mapping[str, tuple[str, Any, Any]]) -> None:
    """Refuse a list for a scheduler whose state is none: it could set attributes of any name."""
    for name in filter(_SCHEDULER.fullmatch, found if live.with_objects else ()):
        if isinstance(found[name], list) and name not in live.lists:
            key = next(key for key, (owner, _, _) in places.items() if owner == name)
            raise MismatchError(
                f"{show(key)} of the checkpoint is a list, and the state of {show(name)} of the run is none",
                key=key,
                hint="resume with the schedulers of the run that saved, or save the checkpoint without this entry",
            )


def _with_lists(value: object) -> object:
    """The value with lists, which were flattened by position."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(one) for key, one in value.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[n] for n in range(len(inner))]
    return {int(key) if type(key) is _Key else key: one for key, one in inner.items()}


class _Key(int):
    """A number that is a key of a dict; others in a path are positions in a list."""


def is_tensor(value: object) -> bool:
    """Whether a value of a file of `torch.save` is a tensor, or the shard of one.

    Example:
        >>> is_tensor([1.0])
        False
    """
    return isinstance(value, _core.Opaque) and ("_rebuild" in value.name or value.name.endswith(".ShardedTensor"))


def flat_values(value: object) -> Values:
    """The values of nested dicts by name, without tensors; lists are kept unless they hold some.

    Example:
        >>> flat_values({"a": {"b": 1, 2: [3]}}).by_name
        {'a.b': 1, 'a.2': [3]}
    """
    found: dict[str, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}

    def holds(one: object) -> bool:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
        return is_tensor(one) or any(map(holds, inner))

    def visit(path: tuple[str | int, ...], one: object) -> None:
        if is_tensor(one):
            paths[".".join(map(str, path))] = path
            return
        if isinstance(one, dict) and one:
            for key, inner in one.items():
                visit((*path, _Key(key) if type(key) is int else key), inner)
        elif isinstance(one, list | tuple) and holds(one):
            for n, inner in enumerate(one):
                visit((*path, n), inner)
        else:
            name = ".".join(map(str, path))
            found[name], paths[name] = one, path

    visit((), value)
    return Values(found, paths)
