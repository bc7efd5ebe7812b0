"""The state of the optimizer of a save of experts or of pipeline stages, by the names of the parameters.

A pipeline stage divides its parameters between the data-parallel ranks of the stage. With experts, each group of
parameters says in its name, `ep_size_<E>`, between how many ranks the experts of a layer are divided. Data-parallel
rank `r` has those of part `r % E`, and numbers them from 0; with `use_data_before_expert_parallelism` it has those of
part `r // (ranks // E)`.

Source: `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `moe/utils.py` and `utils/groups.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.formats.deepspeed import names
from reshard.formats.deepspeed.states import (
    PARTITIONED_STAGE,
    StateFile,
    as_shape,
    check_partitions,
    check_ranks,
    damaged,
    param_groups,
    read_files,
    stage_of,
    zero_state,
)
from reshard.formats.deepspeed.zero import WEIGHT, add_group, check_same_weights, paths_of
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.formats.deepspeed.module import Tensors
    from reshard.formats.deepspeed.names import DividedFiles
    from reshard.storage.location import Location

    Shapes = Mapping[str, tuple[int, ...]]

_TIED = "tied_modules."
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)([0-9]+)(\..*)")
_EXPERT_GROUP = re.compile(r"ep_size_([1-9][0-9]{0,6})(?:_.*)?")
_N_COMPARED = 4096


class Stage(NamedTuple):
    """The optimizer of a pipeline stage, or of a model with experts.

    Attributes:
        model: the file with the state of the run.
        files: those with the state of the optimizer, by data-parallel rank.
        groups: the shapes of the parameters of each group, as the files name them.
        names: the names of the parameters in the checkpoint.
    """

    model: StateFile
    files: Sequence[StateFile]
    groups: Sequence[Shapes]
    names: Sequence[str]


def add_state(
    folder: Location, files: DividedFiles, model: Sequence[StateFile], tensors: Tensors
) -> tuple[frozenset[str], list[Stage]] | str:
    """Add the fp32 weights and the state of the optimizer of every parameter, as `<name>.<slot>`.

    Args:
        folder: the folder.
        files: their names.
        model: the files with the state of the run, by stage.
        tensors: with the weights.

    Returns:
        The slots and the stages; or the reason why the state is not read.

    Raises:
        DamagedFileError: a file is missing, is of another save, or holds something else than what is recorded.
        UnsupportedError: state that does not belong to elements of parameters.
        StorageError: the system failed to read one.
    """
    found = names.optimizer_files(files.others)
    if found is None or not found:
        return "its files do not name the parameters, as those of ZeRO do"
    stages = []
    slots: frozenset[str] = frozenset()
    for number, of_stage in enumerate(model):
        groups = _groups(of_stage)
        if any(name.startswith(_TIED) for group in groups for name in group):
            return "its stages share parameters"
        if number not in found:
            raise damaged(
                folder,
                f"it has no file `*zero_pp_rank_0_mp_rank_{number:02}_optim_states.pt`",
                "the save was not finished, or not all files were copied",
            )
        optimizer = read_files(folder, found[number])
        if stage_of(optimizer[0]) == PARTITIONED_STAGE:
            return "it is of stage 3 of ZeRO"
        counts = _counts(optimizer[0], len(groups))
        check_ranks(optimizer[0], {one.rank for one in optimizer}, max(counts))
        check_partitions(of_stage, optimizer)
        paths = paths_of(optimizer, is_partitioned=False)
        if len(paths[0]) != len(groups):
            raise damaged(
                optimizer[0].file,
                f"it has {len(paths[0])} groups of parameters, {show(of_stage.file.name)} records {len(groups)}",
            )
        known: list[str] = []
        for group, shapes in enumerate(groups):
            for ranks, renamed in _divisions(optimizer[0], group, shapes, max(counts)):
                if len(ranks) != counts[group]:
                    raise damaged(
                        optimizer[0].file,
                        f"group {group} is partitioned over {counts[group]} ranks by `partition_count`, and over "
                        f"{len(ranks)} by its name",
                    )
                held = [optimizer[rank] for rank in ranks]
                add_group(held, [paths[rank] for rank in ranks], group, shapes, tensors, renamed=renamed)
                _compare(held[0], list(renamed.values()), tensors)
                known += renamed.values()
        slots |= {slot for of_group in paths[0].values() for slot in of_group}
        stages.append(Stage(of_stage, optimizer, groups, known))
    more = sorted(set(found) - set(range(len(model))))
    if more:
        raise damaged(folder, f"it has files of the optimizer of stage {more[0]}, and {len(model)} stages")
    return slots, stages


def _groups(file: StateFile) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group."""
    recorded = file.content.get("param_shapes") or []
    groups = []
    for group in recorded if isinstance(recorded, list) else [recorded]:
        if not isinstance(group, dict) or not all(isinstance(name, str) for name in group):
            raise damaged(file.file, "`param_shapes` has no names of parameters")
        groups.append({name: as_shape(shape, file.file) for name, shape in group.items()})
    return groups


def _counts(file: StateFile, n_groups: int) -> list[int]:
    """Over how many ranks each group is partitioned."""
    recorded = zero_state(file).get("partition_count")
    counts: list[Any] = list(recorded) if isinstance(recorded, list) else [recorded] * n_groups
    if len(counts) != n_groups or not counts or not all(type(n) is int and n > 0 for n in counts):
        raise damaged(file.file, f"expected `partition_count` of {n_groups} groups, found {show(repr(recorded))}")
    return counts


def _divisions(file: StateFile, group: int, shapes: Shapes, n_ranks: int) -> list[tuple[list[int], dict[str, str]]]:
    """Which ranks divide a group between them, and the names of its parameters; one entry for each part of experts."""
    options = param_groups(zero_state(file))
    of_group = options[group] if isinstance(options, list) and group < len(options) else None
    if not isinstance(of_group, dict) or not of_group.get("moe"):
        expert = next((name for name in shapes if _EXPERT.fullmatch(name)), None)
        if expert is not None:
            raise damaged(file.file, f"group {group} has {show(expert)}, and is not recorded as one of experts")
        return [(list(range(n_ranks)), {name: name for name in shapes})]
    found = _EXPERT_GROUP.fullmatch(str(of_group.get("name")))
    n_parts = 0 if found is None else int(found[1])
    if n_parts == 0 or n_ranks % n_parts:
        raise damaged(
            file.file, f"group {group} of experts is called {show(str(of_group.get('name')))}, with {n_ranks} ranks"
        )
    local = {int(match[2]) for name in shapes if (match := _EXPERT.fullmatch(name)) is not None}
    if local != set(range(len(local))):
        raise damaged(file.file, f"group {group} has the experts {sorted(local)}, expected those from 0 on")
    divisions = []
    for part in range(n_parts):
        renamed = {name: _of_part(name, part * len(local)) for name in shapes}
        ranks = [rank for rank in range(n_ranks) if _part_of(rank, n_parts, n_ranks, file) == part]
        divisions.append((ranks, renamed))
    return divisions


def _part_of(rank: int, n_parts: int, n_ranks: int, file: StateFile) -> int:
    config = file.content.get("ds_config")
    is_data_first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism")
    return rank // (n_ranks // n_parts) if is_data_first else rank % n_parts


def _of_part(name: str, first: int) -> str:
    """The name of a parameter of an expert with the number of the expert among all."""
    found = _EXPERT.fullmatch(name)
    return name if found is None else f"{found[1]}{int(found[2]) + first}{found[3]}"


def _compare(file: StateFile, parameters: Sequence[str], tensors: Tensors) -> None:
    """Refuse fp32 weights that are not those of the module: rounded, they are equal."""
    for name in (parameters[0], parameters[-1]) if parameters else ():
        if name not in tensors.index:
            raise damaged(file.file, f"it has state of {show(name)}, and no file holds the weight", key=name)
        shape = tensors.index.shape(name)
        part = (min(shape[0], max(1, _N_COMPARED // max(1, shape[0]))), *shape[1:]) if shape else ()
        if tensors.index.shape(key := f"{name}.{WEIGHT}") != shape:
            raise damaged(file.file, f"{show(key)} has another shape than {show(name)}", key=name)
        message = f"its weights of {show(name)} are not those of the module"
        check_same_weights(file, name, part, tensors, message)
