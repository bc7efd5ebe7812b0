"""A save as the state of a run, under the names that torch gives it: what `formats.run_state` translates."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import UnsupportedError
from reshard.formats import run_state
from reshard.formats.deepspeed.zero import WEIGHT
from reshard.values.indexing import row_major
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.formats.deepspeed.reader import DeepSpeedData

_log = logging.getLogger("reshard")

_OPTIMIZER = "optimizer"
_STATE = "optimizer.state"
_GROUPS = "optimizer.param_groups"
_STEP = "step"
_NEEDS_STEP = "exp_avg_sq"
"""The state that only optimizers of the kind of Adam have: each divides by a power of the number of steps."""
_OWN_SCHEDULER = "deepspeed_scheduler"
SCHEDULERS = ("lr_scheduler", _OWN_SCHEDULER)
"""The names of the state of a scheduler of torch, and of one of DeepSpeed, which no other scheduler can load."""


def index_of(data: DeepSpeedData) -> tuple[_core.Index, run_state.Values]:
    """The tensors of a save by the names of a run, and the values of its optimizer and of its scheduler.

    A weight is the one of the optimizer in fp32 where there is one: rounded, it is that of the module.

    Args:
        data: the save.

    Returns:
        `<name>` is a weight, `optimizer.state.<name>.<slot>` its state.

    Raises:
        UnsupportedError: the state of the optimizer is neither of ZeRO nor that of an optimizer of torch; or its groups
            of parameters or its step are not known.
    """
    _check_groups(data)
    index = _core.Index()
    index.add_files_of(data.index)
    weights = data.weights("F32")
    keys = [data.index.key(n) for n in range(len(data.index))]
    if weights is None:
        weights = {key: key for key in keys if data.part(key) == "model"}
    for name, key in weights.items():
        index.add_same(name, data.index, key)
    for key in keys:
        of_slot = data.slot_of(key)
        if key in data.others and key.startswith(f"{_OPTIMIZER}."):
            index.add_same(key, data.index, key)  # of an optimizer of torch
        elif of_slot is not None and of_slot[0] != WEIGHT:
            index.add_same(f"{_STATE}.{of_slot[1]}.{of_slot[0]}", data.index, key)
    return index, _values(data, index)


def _refused(data: DeepSpeedData, why: str) -> UnsupportedError:
    hint = "`format='deepspeed'` opens the weights and the state"
    return UnsupportedError(f"{show(str(data.path))}: {why}", path=str(data.path), hint=hint)


def _check_groups(data: DeepSpeedData) -> None:
    """Refuse the state of experts or of pipeline stages: its groups of parameters are not known."""
    if data.slots and not data.groups:
        raise _refused(data, "the groups of parameters of an optimizer of experts or of pipeline stages are not known")


def _names_of(groups: Sequence[Mapping[str, Any]], recorded: Sequence[Sequence[str]]) -> list[list[str]]:
    """The names of the parameters of each group of the options.

    Args:
        groups: the options. `params` of a group has a number for each group or, of stage 3, sub-group of parameters.
        recorded: the names in these groups or sub-groups.
    """
    parts = [group.get("params") for group in groups]
    numbers = [number for part in parts if isinstance(part, list) for number in part]
    if all(type(number) is int for number in numbers) and sorted(numbers) == list(range(len(recorded))):
        of_group = [part if isinstance(part, list) else [] for part in parts]
        return [[name for number in one for name in recorded[number]] for one in of_group]
    if len(groups) == 1:
        return [[name for group in recorded for name in group]]
    return [list(group) for group in recorded]


def _values(data: DeepSpeedData, index: _core.Index) -> run_state.Values:
    """The options of the groups, the steps of the optimizer, and the state of the scheduler."""
    state = data.extra_state(0)
    optimizer = state.get(_OPTIMIZER)
    options: Mapping[str, Any] = optimizer if isinstance(optimizer, dict) else {}
    scheduler = state.get("lr_scheduler")
    is_own = isinstance(scheduler, dict) and "last_batch_iteration" in scheduler
    found = {} if scheduler is None else {SCHEDULERS[is_own]: scheduler}
    if not data.slots:
        if options and not {"state", "param_groups"} <= options.keys():
            raise UnsupportedError(
                f"{show(str(data.path))}: its optimizer, without ZeRO, keeps flat state of several parameters",
                path=str(data.path),
                hint="`format='deepspeed'` opens the weights",
            )
        found |= {_OPTIMIZER: options} if options else {}
        return run_state.flat_values(found) if found else run_state.Values()
    values = run_state.flat_values(found) if found else run_state.Values()
    by_name, paths = dict(values.by_name), dict(values.paths)
    groups = options.get("param_groups")
    groups = groups if isinstance(groups, list) and all(isinstance(one, dict) for one in groups) else []
    names = _names_of(groups, data.groups)
    if len(groups) == len(names):
        by_name[_GROUPS] = [
            {**{key: one for key, one in group.items() if key != _STEP}, "params": of_group}
            for group, of_group in zip(groups, names, strict=True)
        ]
        paths[_GROUPS] = tuple(_GROUPS.split("."))
    elif groups:
        _log.warning(
            "%s: the options of its %d groups of parameters are left out: the parameters are recorded in %d parts",
            data.path,
            len(groups),
            len(names),
        )
    # FusedAdam begins a step in its groups at 0, and counts in the state.
    of_groups = {group[_STEP] for group in groups if type(group.get(_STEP)) is int}
    recorded = state.get("optimizer_step")
    if not data.has_one_step or (recorded is None and len(of_groups) > 1):
        raise _refused(data, "the groups of its optimizer are at different steps")
    made = next(iter(of_groups), None) if recorded is None else recorded
    step = data.step
    if _NEEDS_STEP in data.slots and step is None and made is None:
        raise _refused(data, "its optimizer records no step")
    number = None if step is None else index.add_torch_file(step.file, follow_links=False, method=data.method)
    for name in (one for group in data.groups for one in group):
        key = f"{_STATE}.{name}.{_STEP}"
        if step is not None and number is not None:
            shape = step.shape
            tile = _core.Tile((0,) * len(shape), shape, 0, row_major(shape))
            index.add_tiles(key, step.dtype, shape, [_core.StoredArray(number, step.path, shape, [tile])])
        elif made is not None:
            by_name[key], paths[key] = made, ("optimizer", "state", name, _STEP)
    return run_state.Values(by_name, paths)
