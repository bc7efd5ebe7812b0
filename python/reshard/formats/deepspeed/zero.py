"""The flat tensors of ZeRO: fp32 weights and the state of the optimizer, partitioned over ranks.

Stages 1 and 2, and BF16_Optimizer: the parameters of a group follow each other, with `param_alignment_paddings` behind
each, and are divided between the ranks. In the files, the fp32 weights have no padding at the end; the state has.

Stage 3: each parameter is divided into equal parts. A rank holds its part of all parameters, one after the other, in
one flat tensor for each sub-group.

Source: `utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py` and `runtime/zero/stage3.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.states import PARTITIONED_STAGE, damaged, read_scalars, stage_of, zero_state
from reshard.formats.outputs import load_all
from reshard.values.words import counted, show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.formats.deepspeed.module import Module, Tensors
    from reshard.formats.deepspeed.states import StateFile

WEIGHT = "fp32"
_STEP = "step"

_ROOT = "optimizer_state_dict."
_WEIGHTS = {False: f"{_ROOT}single_partition_of_fp32_groups.", True: f"{_ROOT}fp32_flat_groups."}
_STATES = {
    False: (f"{_ROOT}base_optimizer_state.state.", f"{_ROOT}base_optimizer_state."),
    True: (f"{_ROOT}optimizer_state_dict.state.",),
}


def add_state(files: Sequence[StateFile], module: Module, tensors: Tensors) -> frozenset[str]:
    """Add the fp32 weights and the optimizer state of every trained parameter, as `<name>.<slot>`.

    Args:
        files: the file of each rank.
        module: the parameters.
        tensors: to which they are added.

    Returns:
        The slots: `fp32`, and for Adam `exp_avg` and `exp_avg_sq`.

    Raises:
        DamagedFileError: sizes do not add up, or the files of ranks differ in what they hold.
        UnsupportedError: state that does not belong to elements of parameters.
    """
    is_partitioned = stage_of(files[0]) == PARTITIONED_STAGE
    paths = paths_of(files, is_partitioned=is_partitioned)
    if is_partitioned:
        return _add_partitioned(files, paths, module, tensors)
    return _add_flat(files, paths, module, tensors)


def paths_of(files: Sequence[StateFile], *, is_partitioned: bool) -> list[dict[int, dict[str, str]]]:
    """The path of each slot of each group, or of each sub-group of stage 3, in the file of each rank.

    Raises:
        DamagedFileError: the files of ranks differ in what they hold.
        UnsupportedError: state that does not belong to elements of parameters.
    """
    first = _paths(files[0], is_partitioned=is_partitioned)
    paths = []
    for file in files:
        found = first if file.tensors is files[0].tensors else _paths(file, is_partitioned=is_partitioned)
        paths.append(found)
        for group in sorted(set(paths[0]) | set(found)):
            differs = set(paths[0].get(group, ())) ^ set(found.get(group, ()))
            if differs:
                raise damaged(
                    file.file,
                    f"group {group} has other tensors than in {show(files[0].file.name)}: {sorted(differs)}",
                    "one of the files is of another save: use another checkpoint",
                )
    return paths


def step_paths(file: StateFile) -> dict[int, str]:
    """The path of the step of each group, or of each sub-group of stage 3, where it is a tensor."""
    found = {}
    for prefix in _STATES[stage_of(file) == PARTITIONED_STAGE]:
        for path in file.tensors:
            group, _, slot = path.removeprefix(prefix).partition(".")
            if path.startswith(prefix) and group.isdecimal() and slot == _STEP:
                found[int(group)] = path
    return found


def steps(file: StateFile) -> dict[int, int | float]:
    """The step that the optimizer of a rank records for each group; empty for optimizers that record none."""
    is_partitioned = stage_of(file) == PARTITIONED_STAGE
    paths = {path: group for group, path in step_paths(file).items()}
    found = {paths[path]: value for path, value in read_scalars(file.file, paths).items()} if paths else {}
    inner = zero_state(file).get("optimizer_state_dict" if is_partitioned else "base_optimizer_state")
    states = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(states, dict):
        for group, state in states.items():
            if isinstance(group, int) and isinstance(state, dict) and isinstance(state.get(_STEP), int):
                found[group] = state[_STEP]
    return found


def _paths(file: StateFile, *, is_partitioned: bool) -> dict[int, dict[str, str]]:
    """The path of each slot of each group; for stage 3, of each sub-group."""
    found: dict[int, dict[str, str]] = {}
    for path, (_, shape) in file.tensors.items():
        prefix = _WEIGHTS[is_partitioned]
        if path.startswith(prefix):
            group, slot = path.removeprefix(prefix), WEIGHT
        else:
            prefix = next((prefix for prefix in _STATES[is_partitioned] if path.startswith(prefix)), "")
            group, _, slot = path.removeprefix(prefix).partition(".")
        if not prefix or not group.isdecimal() or not slot or (slot == _STEP and math.prod(shape) == 1):
            continue
        if len(shape) != 1:
            raise UnsupportedError(
                f"{show(str(file.file))}: {show(path)} has the shape {shape}; expected a flat tensor", key=path
            )
        found.setdefault(int(group), {})[slot] = path
    weights = sorted(group for group, slots in found.items() if WEIGHT in slots)
    if not weights or sorted(found) != weights or weights != list(range(len(weights))):
        raise damaged(
            file.file, f"it has fp32 weights of the groups {weights}, and state of the groups {sorted(found)}"
        )
    return found


class _Line(NamedTuple):
    """Flat tensors of ranks one after the other.

    Attributes:
        dtype: that of all.
        sizes: the elements of each.
        lines: they.
    """

    dtype: str
    sizes: list[int]
    lines: _core.FlatLines


def _line(parts: Sequence[tuple[StateFile, str]], tensors: Tensors) -> _Line:
    dtype = parts[0][0].tensors[parts[0][1]][0]
    arrays = []
    for file, path in parts:
        found, (n,) = file.tensors[path]
        if found != dtype:
            raise damaged(file.file, f"{show(path)} is {found}, others are {dtype}", key=path)
        arrays.append((tensors.number(file.file), path, n))
    return _Line(dtype, [n for *_, n in arrays], _core.FlatLines.joined(arrays))


def _add_flat(
    files: Sequence[StateFile], paths: Sequence[Mapping[int, Mapping[str, str]]], module: Module, tensors: Tensors
) -> frozenset[str]:
    if len(paths[0]) != len(module.groups):
        raise damaged(
            files[0].file, f"it has {len(paths[0])} groups of parameters, the model's file records {len(module.groups)}"
        )
    for group, shapes in enumerate(module.groups):
        add_group(files, paths, group, shapes, tensors)
    return frozenset(slot for slots in paths[0].values() for slot in slots)


def add_group(
    files: Sequence[StateFile],
    paths: Sequence[Mapping[int, Mapping[str, str]]],
    group: int,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Tensors,
    *,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Add the weights and the state of a group of stages 1 and 2.

    Args:
        files: the files of the ranks that divide it.
        paths: the path of each slot of each group, in each file.
        group: the number of the group.
        shapes: the shapes of its parameters, in their order.
        tensors: to which they are added.
        renamed: the names of the parameters in the checkpoint, where they have others in the files.

    Raises:
        DamagedFileError: as `add_state`.
    """
    lines = {
        slot: _line([(file, found[group][slot]) for file, found in zip(files, paths, strict=True)], tensors)
        for slot in paths[0][group]
    }
    paddings = _paddings(files[0], group, len(shapes))
    starts = []
    offset = 0
    for shape, padding in zip(shapes.values(), paddings, strict=True):
        starts.append(offset)
        offset += math.prod(shape) + padding
    for slot, line in lines.items():
        n = line.lines.n
        # As DeepSpeed: the end of a group is padded to a multiple of this, and the padding may be removed.
        align = 2 * len(files)
        if -(-n // align) != -(-offset // align):
            raise damaged(
                files[0].file.parent,
                f"{show(slot)} of group {group} has {counted(n, 'element')} on all ranks, its "
                f"{len(shapes)} parameters "
                f"have {offset}",
                "a file is of another save, or of another model",
            )
        _check_starts(files, lines[WEIGHT].sizes, line.sizes, group, slot)
        for (name, shape), start in zip(shapes.items(), starts, strict=True):
            end = start + math.prod(shape)
            key = name if renamed is None else renamed[name]
            if end > n:
                raise damaged(files[0].file.parent, f"{show(slot)} ends before the end of {show(key)}", key=key)
            tensors.index.add_flat(f"{key}.{slot}", line.dtype, shape, line.lines, start)
    _check_slices(files, group, lines[WEIGHT].sizes, dict(zip(shapes, starts, strict=True)), shapes)


def _paddings(file: StateFile, group: int, n: int) -> list[int]:
    """Elements behind each parameter of a group."""
    recorded = zero_state(file).get("param_alignment_paddings")
    if recorded is None:
        return [0] * n
    paddings = recorded[group] if isinstance(recorded, list) and group < len(recorded) else None
    if not isinstance(paddings, list) or len(paddings) != n or not all(type(p) is int and p >= 0 for p in paddings):
        raise damaged(
            file.file, f"expected {n} `param_alignment_paddings` of group {group}, found {show(repr(paddings))}"
        )
    return paddings


def _check_starts(
    files: Sequence[StateFile], weights: Sequence[int], others: Sequence[int], group: int, slot: str
) -> None:
    """The ranks hold the same ranges of the state and of the weights, except for padding at the end."""
    is_end = False
    for file, weight, other in zip(files, weights, others, strict=True):
        if weight > other or (is_end and weight):
            raise damaged(
                file.file,
                f"group {group} has {counted(weight, 'element')} of {WEIGHT} and {other} of {slot}: they do not match",
            )
        is_end = is_end or weight < other


def _check_slices(
    files: Sequence[StateFile],
    group: int,
    sizes: Sequence[int],
    starts: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Compare where parameters lie with `param_slice_mappings`, which the ranks record.

    With `round_robin_gradients` DeepSpeed records the places that the parameters had before it reordered them.
    """
    config = files[0].content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        return
    rank_start = 0
    for file, n in zip(files, sizes, strict=True):
        recorded = zero_state(file).get("param_slice_mappings")
        mapping = recorded[group] if isinstance(recorded, list) and group < len(recorded) else None
        for name, place in mapping.items() if isinstance(mapping, dict) else ():
            state = place.state if isinstance(place, _core.Opaque) else None
            if not isinstance(state, dict) or name not in starts:
                raise damaged(file.file, f"it holds a part of {show(str(name))}, which is not in group {group}")
            start = max(starts[name], rank_start)
            end = min(starts[name] + math.prod(shapes[name]), rank_start + n)
            expected = {"start": start - rank_start, "numel": end - start}
            if {key: state.get(key) for key in expected} != expected:
                raise damaged(
                    file.file,
                    f"it records that {show(name)} lies at {show(repr(dict(state)))}, the sizes of the parameters give "
                    f"{expected}",
                    "a file is of another save, or of another model",
                    key=name,
                )
        rank_start += n


def _add_partitioned(
    files: Sequence[StateFile], paths: Sequence[Mapping[int, Mapping[str, str]]], module: Module, tensors: Tensors
) -> frozenset[str]:
    shapes = {name: shape for group in module.groups for name, shape in group.items()}
    *starts, n = accumulate((-(-math.prod(shape) // len(files)) for shape in shapes.values()), initial=0)
    numbers = [tensors.number(file.file) for file in files]
    slots: dict[str, list[int]] = {}
    for group, slots_of_group in sorted(paths[0].items()):
        for slot in slots_of_group:
            slots.setdefault(slot, []).append(group)
    for slot, groups in slots.items():
        if len(groups) != len(paths[0]):
            raise damaged(files[0].file, f"only the sub-groups {groups} of {len(paths[0])} have {show(slot)}")
        parts = [paths[0][group][slot] for group in groups]
        dtype = files[0].tensors[parts[0]][0]
        sizes: list[int] = []
        for file, found in zip(files, paths, strict=True):
            if sizes and file.tensors is files[0].tensors:
                continue
            own = _sizes(file, [found[group][slot] for group in groups], dtype)
            if sum(own) != n:
                raise damaged(
                    file.file,
                    f"it has {counted(sum(own), 'element')} of {show(slot)}; the part of one of "
                    f"{counted(len(files), 'rank')} of the {len(shapes)} parameters has {n}",
                    "it is of another save, or of another model",
                )
            sizes = sizes or own
            if own != sizes:
                raise damaged(
                    file.file,
                    f"its sub-groups have {own} elements of {show(slot)}, those of {show(files[0].file.name)} {sizes}",
                    "one of the files is of another save: use another checkpoint",
                )
        lines = _core.FlatLines.divided(numbers, list(zip(parts, sizes, strict=True)))
        for (name, shape), start in zip(shapes.items(), starts, strict=True):
            tensors.index.add_flat(f"{name}.{slot}", dtype, shape, lines, start)
    return frozenset(slots)


def _sizes(file: StateFile, paths: Sequence[str], dtype: str) -> list[int]:
    """The elements of flat tensors of a file, which must have this dtype."""
    sizes = []
    for path in paths:
        found, (n,) = file.tensors[path]
        if found != dtype:
            raise damaged(file.file, f"{show(path)} is {found}, others are {dtype}", key=path)
        sizes.append(n)
    return sizes


def check_same_weights(file: StateFile, name: str, part: tuple[int, ...], tensors: Tensors, message: str) -> None:
    """Refuse fp32 weights of a parameter that are not those of the module: rounded, they are equal.

    Args:
        file: the file with the fp32 weights.
        name: the parameter.
        part: how much of it is compared, from its first element on.
        tensors: the tensors of the save.
        message: of the error.

    Raises:
        DamagedFileError: they differ.
    """
    both = []
    for key in (name, f"{name}.{WEIGHT}"):
        request = _core.Request()
        request.add_region(key, key, (0,) * len(part), part)
        plan = tensors.index.plan(request, dtype=tensors.index.info(name)[0], verify=False)
        both.append(load_all(plan)[key].tobytes())
    if both[0] != both[1]:
        raise damaged(file.file, message, "the files are of different saves: use another checkpoint", name)
