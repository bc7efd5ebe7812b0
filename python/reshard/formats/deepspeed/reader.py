"""A checkpoint of DeepSpeed: a root with a folder for each tag, the folder of one, or a universal folder.

`<name>` is the weight of the module in its dtype, `<name>.fp32` the weight of the optimizer, and `<name>.exp_avg` and
`<name>.exp_avg_sq` its state. Stage 3 stores no weights of the module: there `<name>.fp32` belongs to the model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from reshard import _core
from reshard.errors import CheckpointNotFoundError, UnsupportedError
from reshard.formats.base import CheckpointData
from reshard.formats.deepspeed import divided_state, names
from reshard.formats.deepspeed.divided import add_weights
from reshard.formats.deepspeed.module import Module, Tensors
from reshard.formats.deepspeed.states import (
    StateFile,
    check_agreement,
    damaged,
    param_groups,
    read_file,
    read_files,
    read_scalars,
    stage_of,
    without_tensors,
    zero_state,
)
from reshard.formats.deepspeed.universal import add_parameters
from reshard.formats.deepspeed.zero import WEIGHT, add_state, check_same_weights, step_paths, steps
from reshard.storage.location import locate
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.formats.base import PartName
    from reshard.storage.location import Location
    from reshard.storage.store import Lock

_log = logging.getLogger("reshard")

_DESCRIPTION = frozenset(
    ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
)
_PARTS = ("module.", "frozen_param_fragments.")
_N_COMPARED = 4096


class StepTensor(NamedTuple):
    """A stored tensor of one element."""

    file: str
    path: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DeepSpeedData(CheckpointData):
    """A save with the values that are no tensors.

    Attributes:
        state: these values, of the first rank.
        local_state: those of the file of each rank, where each rank has a file with the module.
        slots: the suffixes of the names of optimizer state.
        masters: keys of fp32 weights of parameters of which there is no other weight.
        copies: keys of fp32 weights of parameters whose rounded weights are stored, too.
        tied: for each further name of a parameter, the name under which it is trained.
        others: keys of tensors that do not belong to parameters.
        n_ranks: number of ranks that saved it.
        groups: names of the trained parameters, in the groups that are recorded.
        step: a tensor with the step of all parameters; None: the step is no tensor.
        has_one_step: all groups are at the same step.
    """

    state: Mapping[str, Any]
    local_state: Sequence[Mapping[str, Any]] = ()
    slots: frozenset[str] = frozenset()
    masters: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    n_ranks: int | None = None
    groups: Sequence[Sequence[str]] = ()
    step: StepTensor | None = None
    has_one_step: bool = True

    def part(self, key: str) -> PartName:
        """By the suffix of the name; an fp32 weight belongs to the model if there is no other weight."""
        if key in self.masters:
            return "model"
        return "optimizer" if key in self.others or key.rpartition(".")[2] in self.slots else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the suffix of the name."""
        parameter, dot, slot = key.rpartition(".")
        return (slot, parameter) if dot and slot in self.slots else None

    def weights(self, dtype: str | None = None) -> Mapping[str, str] | None:
        """The key of each weight of the module, where fp32 weights stand in for those of the module.

        They do where the module's are not stored, and in fp32 or wider also where these are rounded.
        """
        masters = self.masters | (self.copies if dtype in ("F32", "F64") else frozenset())
        if not masters:
            return None
        found = {}
        for key in self.index.keys():  # noqa: SIM118  an index is no mapping
            if key in masters:
                found[key.removesuffix(f".{WEIGHT}")] = key
            elif self.part(key) == "model":
                found.setdefault(key, key)
        return found | {alias: found[name] for alias, name in self.tied.items() if name in found}

    def file_name(self, file: int) -> str:
        """The path of a file in the folder: the files of a universal folder have the same names."""
        return locate(self.index.file_path(file)).relative_to(self.path)

    def world_size(self) -> int | None:
        """Number of ranks over which the state is partitioned."""
        return self.n_ranks

    def extra_state(self, rank: int) -> dict[str, Any]:
        """The values of the file with the module that are no tensors, and the options of the optimizer."""
        local = self.local_state[rank] if rank < len(self.local_state) else {}
        return {**self.state, **local}

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """A view has the names that it was given: an fp32 weight with another name is a weight like others."""
        masters = frozenset(key for key in self.masters if key in index)
        return replace(super().view(index, lock), masters=masters, copies=frozenset(), tied={})


def open_folder(folder: Location, method: _core.ReadMethod) -> CheckpointData:
    """Open the folder of one save, or a universal folder. Raises as `reshard.open`."""
    present = folder.names()
    is_converted = names.is_universal(folder)
    divided = None if is_converted else names.divided_files(str(folder), present)
    if divided is not None:
        return _open_divided(folder, divided, method)
    if is_converted:
        # Their tensors are complete in `zero/`, whatever the ranks were.
        model_names = [name for name in present if names.is_state_file(name) and name.endswith("_model_states.pt")]
        first_rank = [name for name in model_names if "mp_rank_00" in name]
        is_divided = len(first_rank) < len(model_names)
        # A folder that `convert` wrote has the same file under the names of all stages.
        whole = [name for name in first_rank if name.startswith("mp_rank_")]
        files = names.rank_files(str(folder), whole or first_rank)
    else:
        files = names.rank_files(str(folder), present)
        is_divided = False
    if not files.model:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} has no file `*_model_states.pt`: the save was not finished",
            path=str(folder),
            hint="use another checkpoint",
        )
    model = read_files(folder, files.model)
    optimizer = read_files(folder, files.optimizer)
    check_agreement(files, model, optimizer)
    if files.is_partitioned and not (optimizer or is_converted):
        raise damaged(
            folder, "it has no files `*_optim_states.pt`, which hold the parameters", "the save was not finished"
        )
    tensors = Tensors(method)
    module = Module.add(model, tensors, is_partitioned=files.is_partitioned)
    slots: frozenset[str] = frozenset()
    state = {key: value for key, value in model[0].content.items() if key not in _DESCRIPTION}
    if is_converted:
        slots, options = _add_universal(folder, module, tensors, is_divided=is_divided)
    elif optimizer:
        slots = add_state(optimizer, module, tensors)
        options = _check_steps(model[0], optimizer, module, tensors)
    else:
        options = {}
    others = _add_others(model[0], tensors)
    trained = [name for group in module.groups for name in group]
    weights = {name for name in (*trained, *module.frozen) if name not in module.whole}
    in_fp32 = {name: key for name in (*trained, *module.frozen) if (key := f"{name}.{WEIGHT}") in tensors.index}
    tensors.index.check_coverage()
    state = {**options, **{key: value for key, value in state.items() if key != "optimizer" or value is not None}}
    state["tied"] = state.get("tied", dict(module.tied))
    local = [
        {key: without_tensors(value) for key, value in one.content.items() if key not in _DESCRIPTION | {"optimizer"}}
        for one in (model if files.is_partitioned else ())
    ]
    return DeepSpeedData(
        traits=names.TRAITS,
        path=folder,
        index=tensors.index,
        method=method,
        iteration=model[0].number("global_steps"),
        state={key: without_tensors(value) for key, value in state.items()},
        local_state=local,
        slots=slots,
        masters=frozenset(key for name, key in in_fp32.items() if name in weights),
        copies=frozenset(key for name, key in in_fp32.items() if name not in weights),
        tied=module.tied,
        others=others,
        n_ranks=len(optimizer) or model[0].number("dp_world_size"),
        groups=[list(group) for group in module.groups],
        step=_step(optimizer[0]) if optimizer else None,
        has_one_step=not optimizer or len(set(steps(optimizer[0]).values())) < 2,
    )


def _open_divided(folder: Location, files: names.DividedFiles, method: _core.ReadMethod) -> CheckpointData:
    """Open a save with a file for each expert or for each layer."""
    if not files.model:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} has no file `mp_rank_*_model_states.pt`: the save was not finished",
            path=str(folder),
            hint="use another checkpoint",
        )
    model = read_files(folder, files.model)
    if any(model[0].content.get(key) for key in ("ds_autoep_layers", "autoep_layers")):
        raise UnsupportedError(f"{show(str(folder))} has experts of AutoEP, which are not supported", path=str(folder))
    tensors = Tensors(method)
    add_weights(folder, files, model, tensors)
    tensors.index.check_coverage()
    has_state = any(name.endswith("_optim_states.pt") for name in files.others)
    has_state |= any(path.startswith("optimizer.") for path in model[0].tensors)
    added = divided_state.add_state(folder, files, model, tensors) if has_state else (frozenset[str](), [])
    options: dict[str, Any] = {}
    copies: list[str] = []
    slots: frozenset[str] = frozenset()
    if isinstance(added, str):
        what = "experts" if files.experts else "pipeline stages"
        _log.warning("%s: the weights are read; the state of the optimizer of %s is left out: %s", folder, what, added)
    else:
        slots, stages = added
        tensors.index.check_coverage()
        for stage in stages:
            module = Module(stage.groups, {}, {}, stage.names)
            options = options or _check_steps(stage.model, stage.files, module, tensors)
            copies += [f"{name}.{WEIGHT}" for name in stage.names]
    skipped = _DESCRIPTION | {"optimizer"}
    state = {key: without_tensors(value) for key, value in model[0].content.items() if key not in skipped}
    state = {**{key: without_tensors(value) for key, value in options.items()}, **state}
    return DeepSpeedData(
        traits=names.TRAITS,
        path=folder,
        index=tensors.index,
        method=method,
        iteration=model[0].number("global_steps"),
        state=state,
        slots=slots,
        copies=frozenset(copies),
        n_ranks=model[0].number("dp_world_size"),
    )


def _add_universal(
    folder: Location, module: Module, tensors: Tensors, *, is_divided: bool
) -> tuple[frozenset[str], dict[str, Any]]:
    """Add the tensors of a universal folder; returns the slots and the options of the optimizer."""
    trained = {name: shape for group in module.groups for name, shape in group.items()}
    others = {**module.frozen, **{name: tensors.index.shape(name) for name in module.whole if name not in trained}}
    slots, step = add_parameters(folder, trained, others, tensors, is_divided=is_divided)
    state = read_file(folder / names.ZERO_FOLDER / names.OPTIMIZER_FILE, 0)
    options = _options(state.content)
    if step is None:  # from stage 3
        paths, file = [path for path in state.tensors if path.endswith(".step")], state.file
    else:
        paths, file = list(read_file(step, 0, is_dict=False).tensors), step
    if paths:
        options["optimizer_step"] = options["optimizer"]["step"] = _whole(max(read_scalars(file, paths).values()))
    return slots, options


def _options(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer records beside its tensors, with the words of `Checkpoint.extra`."""
    tensors = ("optimizer_state_dict", "base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups")
    kept = {key: value for key, value in state.items() if key not in tensors and key != "param_slice_mappings"}
    groups = param_groups(state)
    options: dict[str, Any] = {"optimizer": {**kept, **({} if groups is None else {"param_groups": groups})}}
    stage = state.get("zero_stage")
    if isinstance(stage, _core.Opaque) and stage.arguments:
        options["zero_stage"] = options["optimizer"]["zero_stage"] = stage.arguments[0]
    return options


def _check_steps(model: StateFile, files: Sequence[StateFile], module: Module, tensors: Tensors) -> dict[str, Any]:
    """The options of the optimizer; refuse files of another step than that of the module."""
    first = steps(files[0])
    for file in files[1:]:
        if (found := steps(file)) != first:
            raise damaged(
                file.file,
                f"its optimizer is at step {sorted(set(found.values()))}, that of {show(files[0].file.name)} at step "
                f"{sorted(set(first.values()))}",
                "one of the files is of another save: use another checkpoint",
            )
    options = _options(zero_state(files[0]))
    stage = stage_of(files[0])
    if stage is not None:
        options["zero_stage"] = stage
    made = model.number("global_steps")
    if not first:
        return options
    step = _whole(max(first.values()))
    options["optimizer_step"] = options["optimizer"]["step"] = step
    expected = None if made is None else made - (model.number("skipped_steps") or 0)
    if expected is not None and step != expected:
        _compare_weights(model, files[0], module, tensors, (step, expected))
    return options


def _step(file: StateFile) -> StepTensor | None:
    """The first tensor with a step in a file."""
    paths = step_paths(file)
    if not paths:
        return None
    path = paths[min(paths)]
    return StepTensor(str(file.file), path, *file.tensors[path])


def _whole(value: float) -> int | float:
    """A step as an integer, if it is one: torch stores it as a float."""
    return int(value) if value == int(value) else value


def _compare_weights(
    model: StateFile,
    file: StateFile,
    module: Module,
    tensors: Tensors,
    steps_of_both: tuple[int | float, int],
) -> None:
    """The optimizer's step is not that of the module. It may have been started anew: then the weights are equal."""
    step, expected = steps_of_both
    message = f"its optimizer is at step {step}, the module in {show(model.file.name)} at step {expected}"
    trained = {name: shape for group in module.groups for name, shape in group.items()}
    names_of_both = [name for name in trained if name in module.whole and trained[name]]
    if not names_of_both:
        if step > expected:
            raise damaged(file.file, message, "the files are of different saves: use another checkpoint")
        _log.warning("%s: %s", file.file, message)
        return
    for name in names_of_both[:4]:
        shape = (min(trained[name][0], max(1, _N_COMPARED // max(1, len(trained)))), *trained[name][1:])
        check_same_weights(file, name, shape, tensors, f"{message}, and the weights of {show(name)} differ")


def _add_others(file: StateFile, tensors: Tensors) -> frozenset[str]:
    """Add the tensors of a file with the module that do not belong to it, by path."""
    found = [path for path in file.tensors if not path.startswith(_PARTS)]
    for path in found:
        tensors.add_whole(path, file.file, path, file.tensors[path])
    return frozenset(found)
