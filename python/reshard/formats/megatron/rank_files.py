"""The files of the model-parallel ranks, opened: where each rank stands, its arrays and its other state.

Arrays get the names that they have in the whole model: the number of a layer counts from the first pipeline stage, the
number of an expert from the first expert rank. Whether and how the arrays of several ranks make up one tensor is not
known here.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats.megatron import names
from reshard.formats.megatron.common_state import argument, iteration_in, plain
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.storage.location import Location

EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))([0-9]{1,6})(.*)", re.DOTALL)
"""The name of a tensor of one expert, around the number of the expert."""

_CHUNK = re.compile(r"model([0-9]{0,3})\.(.+)", re.DOTALL)
_LAYER = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers\.)([0-9]{1,6})(\..+)", re.DOTALL)
_MAX_RANKS = 1 << 20
_MODEL = re.compile(r"model[0-9]{0,3}")


class RankSizes(NamedTuple):
    """How many ranks there are on each axis."""

    tensor: int
    pipeline: int
    expert: int


class Weight(NamedTuple):
    """An array of a model in the file of a rank.

    Attributes:
        stored: its name in the file.
        chunk: the virtual stage.
        key: its name in the whole model.
        dtype: its safetensors name.
        shape: in elements.
    """

    stored: str
    chunk: int
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankFile:
    """The files of one model-parallel rank.

    Attributes:
        number: the number of the rank.
        tensor: its tensor-parallel rank.
        pipeline: its pipeline stage.
        expert: its expert-parallel rank.
        folder: its folder.
        file: number of the file of its weights in the index.
        state: its state without the tensors of the model.
        weights: its arrays, in the order of the modules.
    """

    number: int
    tensor: int
    pipeline: int
    expert: int
    folder: Location
    file: int
    state: Mapping[str, Any]
    weights: Sequence[Weight]


def open_rank_files(
    folder: Location, index: _core.Index, method: _core.ReadMethod
) -> tuple[list[RankFile], RankSizes, int | None]:
    """Open the files of the weights of all ranks and check that they belong together.

    Args:
        folder: the folder of one iteration.
        index: the files are added to it.
        method: how files are read.

    Returns:
        The files by rank, the numbers of ranks, and the iteration.

    Raises:
        CheckpointNotFoundError: the folder or the file of a rank is missing.
        DamagedFileError: the files are of different iterations, or do not hold the layers of one model.
    """
    found = {numbers: name for name in folder.names() if (numbers := names.numbers_of_rank(name)) is not None}
    iteration = names.iteration_of(folder.name)
    opened: dict[tuple[int, ...], tuple[int, dict[str, Any], list[Weight]]] = {}
    for numbers, name in sorted(found.items()):
        file = folder / name / names.MODEL_FILE
        if not file.exists():
            raise CheckpointNotFoundError(
                f"{show(str(folder / name))} has no `{names.MODEL_FILE}`",
                path=str(file),
                hint="the save was not finished, or the file was lost: use another iteration",
            )
        tensors, _ = _core.read_torch_file(str(file), follow_links=False)
        whole = plain(_core.read_torch_object(str(file), 0, file.stat().n_bytes), file)
        state = {key: value for key, value in whole.items() if not _MODEL.fullmatch(key)}
        iteration = iteration_in(state, file, iteration)
        number = index.add_torch_file(str(file), follow_links=False, method=method)
        opened[numbers] = number, state, _of_rank(tensors)
    states = [state for _, state, _ in opened.values()]
    sizes, positions = _positions(folder, list(found), states[0])
    local = {positions[numbers]: of_rank for numbers, (_, _, of_rank) in opened.items()}
    weights = _named(folder, local, sizes, states[0])
    files = []
    for numbers, (file_number, state, _) in opened.items():
        t, p, e = at = positions[numbers]
        number = (p * sizes.expert + e) * sizes.tensor + t
        files.append(RankFile(number, t, p, e, folder / found[numbers], file_number, state, weights[at]))
    return sorted(files, key=lambda one: one.number), sizes, iteration


_At = tuple[int, int, int]


def _positions(
    folder: Location, found: list[tuple[int, ...]], state: Mapping[str, Any]
) -> tuple[RankSizes, dict[tuple[int, ...], _At]]:
    """The numbers of ranks, and the tensor, pipeline and expert rank of each folder."""
    if len({len(numbers) for numbers in found}) > 1:
        raise DamagedFileError(
            f"the folders of ranks in {show(str(folder))} have names with different numbers of parts", path=str(folder)
        )
    n_stages, n_experts = (argument(state, f"{name}_model_parallel_size") for name in ("pipeline", "expert"))
    second_is_expert = isinstance(n_experts, int) and n_experts > 1 and n_stages in (None, 1)
    at: dict[tuple[int, ...], _At] = {}
    for numbers in found:
        first, *others = numbers
        padded = (0, *others) if len(others) == 1 and second_is_expert else (*others, 0, 0)[:2]
        at[numbers] = first, padded[0], padded[1]
    named = RankSizes(*(max(of_axis) + 1 for of_axis in zip(*at.values(), strict=True)))
    given = (argument(state, f"{name}_model_parallel_size") for name in RankSizes._fields)
    sizes = RankSizes(*(n if isinstance(n, int) and n > have else have for n, have in zip(given, named, strict=True)))
    n_ranks = sizes.tensor * sizes.pipeline * sizes.expert
    if n_ranks > _MAX_RANKS:
        raise DamagedFileError(f"{show(str(folder))} names too many ranks: {tuple(sizes)}", path=str(folder))
    missing = sorted(set(itertools.product(*map(range, sizes))).difference(at.values()))
    if missing:
        texts = listed(f"tensor rank {t}, stage {p}" + (f", expert rank {e}" if e else "") for t, p, e in missing)
        raise CheckpointNotFoundError(
            f"{show(str(folder))} lacks the folders of {len(missing)} of {n_ranks} model-parallel ranks: {texts}",
            path=str(folder),
            hint="use another iteration, or copy the missing folders",
        )
    return sizes, at


def _of_rank(tensors: Iterable[_core.TorchTensor]) -> list[Weight]:
    """The arrays of a model among those in the file of a rank, with their names in the model of that rank."""
    return [
        Weight(stored, int(match[1] or 0), match[2], dtype, shape)
        for stored, dtype, shape in tensors
        if (match := _CHUNK.fullmatch(stored)) is not None
        and not match[2].rpartition(".")[2].startswith("_extra_state")
    ]


def _named(
    folder: Location, local: Mapping[_At, Sequence[Weight]], sizes: RankSizes, state: Mapping[str, Any]
) -> dict[_At, list[Weight]]:
    """The arrays of each rank, with their names in the whole model."""
    first = _first_layers(folder, local, sizes, state)
    made: dict[_At, list[Weight]] = {}
    for (t, p, e), weights in local.items():
        n_experts = _numbers(weights, EXPERT)
        made[t, p, e] = []
        for weight in weights:
            key = weight.key
            if (expert := EXPERT.fullmatch(key)) is not None:
                n = len(n_experts[expert[1], weight.chunk])
                key = f"{expert[1]}{int(expert[2]) + e * n}{expert[3]}"
            if (match := _LAYER.fullmatch(key)) is not None:
                key = f"{match[1]}{first[match[1]][weight.chunk, p] + int(match[2])}{match[3]}"
            made[t, p, e].append(weight._replace(key=key))
    return made


def _numbers(weights: Sequence[Weight], pattern: re.Pattern[str]) -> dict[tuple[str, int], set[int]]:
    """By prefix and virtual stage, the numbers that occur in names."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for weight in weights:
        if (match := pattern.fullmatch(weight.key)) is not None:
            found[match[1], weight.chunk].add(int(match[2]))
    return found


def _first_layers(
    folder: Location, local: Mapping[_At, Sequence[Weight]], sizes: RankSizes, state: Mapping[str, Any]
) -> dict[str, dict[tuple[int, int], int]]:
    """By prefix, virtual stage and stage, the number of the first layer in the whole model.

    Layers are divided over the stages, and with virtual stages over the stages of each of these in turn.
    """
    n_layers: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for (t, p, e), weights in local.items():
        for (prefix, chunk), numbers in _numbers(weights, _LAYER).items():
            n = n_layers[prefix].setdefault((chunk, p), len(numbers))
            if numbers != set(range(n)):
                raise DamagedFileError(
                    f"tensor rank {t}, stage {p}, expert rank {e} in {show(str(folder))} has the layers "
                    f"{listed(sorted(numbers))} of {show(prefix)}, expected {n} from 0 on",
                    path=str(folder),
                )
    first: dict[str, dict[tuple[int, int], int]] = {}
    for prefix, of_prefix in n_layers.items():
        first[prefix], total = {}, 0
        for chunk in range(max(chunk for chunk, _ in of_prefix) + 1):
            for stage in range(sizes.pipeline):
                first[prefix][chunk, stage] = total
                total += of_prefix.get((chunk, stage), 0)
        expected = argument(state, "num_layers") if prefix == "decoder.layers." else None
        if isinstance(expected, int) and expected != total:
            raise DamagedFileError(
                f"the files in {show(str(folder))} hold {total} layers, the run had {expected}", path=str(folder)
            )
    return first
