"""The older layout of Megatron-LM: a folder for each model-parallel rank, read as one checkpoint.

The files record neither which dim of a tensor is divided nor which layers a pipeline stage holds. Both follow from the
rules of the library (`merge_rules`) and from the layers in each file. A layer has its number in the whole model. The
state of the distributed optimizer is named `<parameter>.fp32_param`, `.exp_avg` and `.exp_avg_sq` (`rank_optimizer`). A
tensor that several ranks hold is compared before it is first read (`rank_replicas`).

Ranks are numbered as in Megatron-LM: tensor ranks first, then expert ranks, then pipeline stages.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from reshard import _core
from reshard.errors import LayoutError, MismatchError
from reshard.formats.base import CheckpointData, UnplacedTensor
from reshard.formats.given_layout import given_layout
from reshard.formats.megatron import names
from reshard.formats.megatron.common_state import argument, counters_of
from reshard.formats.megatron.merge_rules import MergeRules
from reshard.formats.megatron.rank_files import RankFile, RankSizes, Weight, open_rank_files
from reshard.formats.megatron.rank_optimizer import optimizer_arrays
from reshard.formats.outputs import load_all
from reshard.formats.own_files import own_index
from reshard.formats.rank_replicas import HeldArray, ListedCopies, Replicas, are_equal, copies_of
from reshard.storage.location import locate
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.formats.base import OpenOptions, PartName
    from reshard.layout.model import ModelLayout
    from reshard.storage.location import Location
    from reshard.storage.store import Lock

_log = logging.getLogger("reshard")

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_FUSED_EXPERTS = re.compile(r".*\.experts\.weight[12]")
HINT = (
    "if the model differs from those of Megatron-LM, pass `strategy=` with a layout whose mesh is the axis `tp` and "
    "whose rules say how its tensors are divided; `Checkpoint.stored(rank)` reads the arrays of one rank"
)
"""What to do where its rules do not fit."""
_KNOWN_DIMS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    (r"embedding\.word_embeddings\.weight", 0, ("padded_vocab_size",)),
    (r"embedding\.word_embeddings\.weight", 1, ("hidden_size",)),
    (r"decoder\.layers\.[0-9]+\.mlp\.linear_fc2\.weight", 1, ("ffn_hidden_size",)),
    (r"decoder\.layers\.[0-9]+\.mlp\.linear_fc2\.weight", 0, ("hidden_size",)),
    (r"decoder\.layers\.[0-9]+\.self_attention\.linear_proj\.weight", 0, ("hidden_size",)),
    (r"decoder\.layers\.[0-9]+\.self_attention\.linear_proj\.weight", 1, ("num_attention_heads", "kv_channels")),
)
"""Dims of tensors that the arguments of the run record, as products: they show whether the rules fit the model."""


@dataclass(frozen=True, kw_only=True)
class RankFoldersData(CheckpointData):
    """The folders of all model-parallel ranks.

    Attributes:
        ranks: their files.
        sizes: how many ranks of each kind there are.
        optimizer_files: number of the file of the optimizer of each rank.
        replicas: arrays that are read as copies of each other.
        all_keys: names of all tensors; None: those of the index.
        without_place: tensors whose arrays have no known position.
    """

    ranks: Sequence[RankFile]
    sizes: RankSizes
    optimizer_files: Mapping[int, int]
    replicas: Replicas
    all_keys: tuple[str, ...] | None = None
    without_place: Mapping[str, UnplacedTensor] = field(default_factory=dict)

    def keys(self) -> Sequence[str] | None:
        """All tensors, in the order of the modules."""
        return self.all_keys

    def unplaced(self) -> Mapping[str, UnplacedTensor]:
        """Tensors without a position."""
        return self.without_place

    def part(self, key: str) -> PartName:
        """By the name."""
        return "optimizer" if names.is_state(key) else "model"

    def slot_of(self, key: str) -> tuple[str, str] | None:
        """By the suffix of the name."""
        parameter, dot, slot = key.rpartition(".")
        return (slot, parameter) if dot and names.is_state(key) else None

    def file_name(self, file: int) -> str:
        """Including the folder of the rank."""
        return locate(self.index.file_path(file)).relative_to(self.path)

    def rank_files(self) -> Mapping[int, list[int]]:
        """The weights of each rank, and its optimizer."""
        return {
            rank.number: [rank.file, *([self.optimizer_files[rank.number]] if self.optimizer_files else [])]
            for rank in self.ranks
        }

    def world_size(self) -> int | None:
        """From the arguments of the run."""
        size = argument(self.ranks[0].state, "world_size")
        return size if isinstance(size, int) else None

    def rank_axes(self) -> Mapping[str, int]:
        """Tensor ranks and pipeline stages, and expert ranks if there are some: one folder for each."""
        expert = {"ep": self.sizes.expert} if self.sizes.expert > 1 else {}
        return {"tp": self.sizes.tensor, "pp": self.sizes.pipeline, **expert}

    def extra_state(self, rank: int) -> dict[str, Any]:
        """The state in the file of a rank, with the tensors of its random states as arrays."""
        found = next((one for one in self.ranks if one.number == rank), None)
        if found is None:
            return {key: value for key, value in self.ranks[0].state.items() if key != "rng_state"}
        index = own_index(self.index, [found.file], None)
        keys = [key for key in index.keys() if key.startswith("rng_state.")]  # noqa: SIM118  not a mapping
        arrays = load_all(index.plan(index.whole_request(keys)))
        index.close()
        return {
            key: _with_arrays(value, key, arrays) if key == "rng_state" else value for key, value in found.state.items()
        }

    def check(self, keys: Collection[str] | None) -> None:
        """Compare the copies that ranks hold of the tensors."""
        self.replicas.check(self.index, self.index.keys() if keys is None else keys)

    def view(self, index: _core.Index, lock: Lock | None) -> Self:
        """The same files and copies."""
        return replace(super().view(index, lock), all_keys=None, without_place={})


def open_rank_folders(folder: Location, options: OpenOptions) -> CheckpointData:
    """Open the folder of one iteration and merge the arrays of its ranks.

    Args:
        folder: the folder.
        options: `strategy` is a layout whose rules are tried before those of Megatron-LM.

    Raises:
        CheckpointNotFoundError: the folder or a file of a rank is missing.
        DamagedFileError: files are of different iterations, or violate their format.
        LayoutError: the given layout does not fit.
        MismatchError: the rules do not fit the sizes that the arguments of the run record.
        CoverageError: ranks lack a part of a tensor.
    """
    index = _core.Index()
    ranks, sizes, iteration = open_rank_files(folder, index, options.method)
    given = given_layout(options, HINT)
    rules = MergeRules(sizes.tensor, is_gated=_is_gated(folder, ranks, given), given=given)
    ranks = _tied(index, ranks)
    shared = {_EMBEDDING} if _on_several_stages(ranks, _EMBEDDING) else set()
    optimizer = optimizer_arrays(ranks, index, shared, options.method)
    held: dict[str, list[tuple[RankFile, Weight, HeldArray]]] = {}
    shapes: dict[tuple[int, str], tuple[int, ...]] = {}
    for rank in ranks:
        for file_array in index.file_tensors(rank.file):
            shapes[rank.file, file_array.name] = tuple(file_array.shape)
        for one in rank.weights:
            array = HeldArray(
                rank.number, rank.file, one.stored, shapes[rank.file, one.stored], 0, one.shape, one.dtype
            )
            held.setdefault(one.key, []).append((rank, one, array))
    copies = ListedCopies()
    unplaced: dict[str, UnplacedTensor] = {}
    for key, arrays in (*held.items(), *optimizer.arrays.items()):
        if _has_no_rule(arrays[0][1].key, ranks[0].state, sizes.tensor, sizes.expert):
            local = tuple(dict.fromkeys(array.shape for _, _, array in arrays))
            if key in held:
                unplaced[key] = UnplacedTensor(arrays[0][2].dtype, local)
            continue
        copies[key] = _merge(folder, index, key, arrays, rules)
    index.check_coverage()
    _check_dims(folder, index, ranks[0].state)
    _report(folder, sizes.tensor * sizes.pipeline * sizes.expert, optimizer.fault, given, unplaced)
    state = ranks[0].state
    return RankFoldersData(
        traits=names.TRAITS,
        path=folder,
        index=index,
        method=options.method,
        iteration=iteration,
        common=counters_of(state, iteration),
        ranks=ranks,
        sizes=sizes,
        optimizer_files=optimizer.files,
        replicas=Replicas(index, copies, HINT),
        all_keys=tuple(key for key in (*held, *optimizer.arrays) if key in copies or key in unplaced),
        without_place=unplaced,
    )


def _is_gated(folder: Location, ranks: Sequence[RankFile], given: ModelLayout | None) -> bool:
    """Whether `linear_fc1` has gate and up rows: twice as many rows as `linear_fc2` has columns."""
    found: dict[bool, str] = {}
    for rank in ranks:
        shapes = {(one.chunk, one.key): one.shape for one in rank.weights}
        for (chunk, key), shape in shapes.items():
            second = shapes.get((chunk, key.replace("linear_fc1.weight", "linear_fc2.weight")))
            if "linear_fc1.weight" in key and second is not None and len(shape) == len(second) == 2:
                found.setdefault(shape[0] == 2 * second[1], key)
    if len(found) > 1 and given is None:
        raise LayoutError(
            f"{show(found[True])} in {show(str(folder))} is gated, {show(found[False])} is not",
            path=str(folder),
            hint=HINT,
        )
    return True in found


def _on_several_stages(ranks: Sequence[RankFile], key: str) -> bool:
    return len({rank.pipeline for rank in ranks if any(one.key == key for one in rank.weights)}) > 1


def _tied(index: _core.Index, ranks: list[RankFile]) -> list[RankFile]:
    """The ranks, with the output layer of the last stage as a copy of the word embedding if the two are tied."""
    holders = {
        key: [rank for rank in ranks if any(one.key == key for one in rank.weights)] for key in (_EMBEDDING, _OUTPUT)
    }
    stages = {key: {rank.pipeline for rank in of_key} for key, of_key in holders.items()}
    is_untied = argument(ranks[0].state, "untie_embeddings_and_output_weights")
    if not all(stages.values()) or stages[_EMBEDDING] & stages[_OUTPUT] or is_untied is True:
        return ranks
    if is_untied is None:  # an old run, or not one of Megatron-LM: its bytes tell
        by_tensor: dict[int, list[HeldArray]] = {}
        for key, of_key in holders.items():
            for rank in of_key:
                one = next(one for one in rank.weights if one.key == key)
                array = HeldArray(rank.number, rank.file, one.stored, one.shape, 0, one.shape, one.dtype)
                by_tensor.setdefault(rank.tensor, []).append(array)
        is_one = all(len({(one.shape, one.dtype) for one in arrays}) == 1 for arrays in by_tensor.values())
        if not is_one or not all(are_equal(index, arrays) for arrays in by_tensor.values()):
            return ranks
    return [
        replace(rank, weights=[one._replace(key=_EMBEDDING) if one.key == _OUTPUT else one for one in rank.weights])
        for rank in ranks
    ]


def _has_no_rule(key: str, state: Mapping[str, Any], n_tensor: int, n_expert: int) -> bool:
    """Whether the arrays of an expert are divided in a way that is not known."""
    if _FUSED_EXPERTS.fullmatch(key) is not None:
        return n_tensor * n_expert > 1
    n_expert_tensor = argument(state, "expert_tensor_parallel_size")
    return ".experts." in key and isinstance(n_expert_tensor, int) and n_expert_tensor != n_tensor


def _merge(
    folder: Location,
    index: _core.Index,
    key: str,
    arrays: Sequence[tuple[RankFile, Weight, HeldArray]],
    rules: MergeRules,
) -> list[list[HeldArray]]:
    """Add a tensor to the index. Return the groups of its arrays that are copies of each other."""
    first_rank, first_weight, first = arrays[0]
    for rank, _, array in arrays:
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise MismatchError(
                f"rank {first_rank.number} holds {show(key)} as {first.dtype} {first.shape}, rank {rank.number} as "
                f"{array.dtype} {array.shape}",
                path=str(folder),
                key=key,
                hint=HINT,
            )
    layout = rules.layout(first_weight.key, first.shape)
    held = [(array, layout.tiles(rank.tensor)) for rank, _, array in arrays]
    index.add_tiles(key, first.dtype, layout.shape, [array.tiled(tiles) for array, tiles in held])
    return copies_of(held, layout.shape)


def _check_dims(folder: Location, index: _core.Index, state: Mapping[str, Any]) -> None:
    """Compare the shapes of merged tensors with the sizes that the run recorded."""
    keys = index.keys()
    for pattern, dim, arguments in _KNOWN_DIMS:
        factors = [argument(state, name) for name in arguments]
        if not all(isinstance(factor, int) for factor in factors):
            continue
        expected = 1
        for factor in factors:
            expected *= factor
        for key in filter(re.compile(pattern).fullmatch, keys):
            shape = index.shape(key)
            if dim >= len(shape) or shape[dim] != expected:
                raise MismatchError(
                    f"merged by the rules of Megatron-LM, {show(key)} in {show(str(folder))} has shape {shape}; by the "
                    f"arguments of the run ({' x '.join(arguments)}) dim {dim} is {expected}",
                    path=str(folder),
                    key=key,
                    hint=HINT,
                )


def _report(
    folder: Location,
    n_ranks: int,
    fault: str | None,
    given: ModelLayout | None,
    unplaced: Mapping[str, UnplacedTensor],
) -> None:
    """Log what was assumed and what is left out."""
    if n_ranks > 1:
        rules = "the rules of Megatron-LM" if given is None else "the given layout and the rules of Megatron-LM"
        _log.warning(
            "%s: the files of %d ranks are merged by %s; the files do not record how tensors are divided",
            folder,
            n_ranks,
            rules,
        )
    if fault is not None:
        _log.warning(
            "%s: the state of the optimizer is left out, `Checkpoint.stored(rank)` reads it: its buffers do not record "
            "which parameter lies where, and the known rules do not fit: %s",
            folder,
            fault,
        )
    if unplaced:
        _log.warning("%s: no rule says how %s are divided", folder, listed(map(show, unplaced)))


def _with_arrays(value: object, path: str, arrays: Mapping[str, Any]) -> object:
    """A value of a file with its tensors as arrays, which are known by their paths."""
    if path in arrays:
        return arrays[path]
    if isinstance(value, dict):
        return {key: _with_arrays(one, f"{path}.{key}", arrays) for key, one in value.items()}
    if isinstance(value, list | tuple):
        made = [_with_arrays(one, f"{path}.{n}", arrays) for n, one in enumerate(value)]
        return tuple(made) if isinstance(value, tuple) else made
    return value
