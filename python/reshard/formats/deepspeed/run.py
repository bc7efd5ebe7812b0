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
    from collections.abc import Mapping

    from reshard.formats.deepspeed.reader import DeepSpeedData

_log = logging.getLogger("reshard")

_OPTIMIZER = "optimizer"
_STATE = "optimizer.state"
_GROUPS = "optimizer.param_groups"
_STEP = "step"


def index_of(data: DeepSpeedData) -> tuple[_core.Index, run_state.Values]:
    """The tensors of a save by the names of a run, and the values of its optimizer and of its scheduler.

    A weight is the one of the optimizer in fp32 where there is one: rounded, it is that of the module.

    Args:
        data: the save.

    Returns:
        `<name>` is a weight, `optimizer.state.<name>.<slot>` its state.

    Raises:
        UnsupportedError: the state of the optimizer is neither of ZeRO nor that of an optimizer of torch.
    """
    index = _core.Index()
    first = index.add_files_of(data.index)

    def add(name: str, key: str) -> None:
        stored = [_core.StoredArray(one.file + first, one.name, one.shape, one.tiles) for one in data.index.stored(key)]
        index.add_tiles(name, *data.index.info(key), stored)

    weights = data.weights("F32")
    keys = [data.index.key(n) for n in range(len(data.index))]
    if weights is None:
        weights = {key: key for key in keys if data.part(key) == "model"}
    for name, key in weights.items():
        add(name, key)
    for key in keys:
        of_slot = data.slot_of(key)
        if key in data.others and key.startswith(f"{_OPTIMIZER}."):
            add(key, key)  # of an optimizer of torch
        elif of_slot is not None and of_slot[0] != WEIGHT:
            add(f"{_STATE}.{of_slot[1]}.{of_slot[0]}", key)
    return index, _values(data, index)


def _values(data: DeepSpeedData, index: _core.Index) -> run_state.Values:
    """The options of the groups, the steps of the optimizer, and the state of the scheduler."""
    state = data.extra_state(0)
    optimizer = state.get(_OPTIMIZER)
    options: Mapping[str, Any] = optimizer if isinstance(optimizer, dict) else {}
    scheduler = state.get("lr_scheduler")
    found = {} if scheduler is None else {"lr_scheduler": scheduler}
    if not data.slots:
        if options and not {"state", "param_groups"} <= options.keys():
            raise UnsupportedError(
                f"{show(str(data.path))}: its optimizer, without ZeRO, keeps flat state of several parameters",
                path=str(data.path),
                hint="`format='deepspeed'` opens the weights",
            )
        found |= {_OPTIMIZER: options} if options else {}
        return run_state.flat_values(found, lambda _: False) if found else run_state.Values()
    values = run_state.flat_values(found, lambda _: False) if found else run_state.Values()
    by_name, paths = dict(values.by_name), dict(values.paths)
    groups = options.get("param_groups")
    groups = groups if isinstance(groups, list) and all(isinstance(one, dict) for one in groups) else []
    names = [list(group) for group in data.groups]
    if len(groups) == 1:
        names = [[name for group in names for name in group]]
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
    made = next((group[_STEP] for group in groups if type(group.get(_STEP)) is int), state.get("optimizer_step"))
    if not data.has_one_step:
        raise UnsupportedError(
            f"{show(str(data.path))}: the groups of its optimizer are at different steps",
            path=str(data.path),
            hint="`format='deepspeed'` opens the weights and the state",
        )
    step = data.step
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
