"""The state of the distributed optimizer in the folders of model-parallel ranks: parameters in flat buffers.

A file does not record which parameter lies where. The positions follow from the order of the modules and from how the
run divided its buffers (`flat_buffers`). They are used only if they give a buffer of exactly the stored length on every
rank.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from reshard import _core
from reshard.errors import CheckpointNotFoundError
from reshard.formats.megatron import names
from reshard.formats.megatron.common_state import argument
from reshard.formats.megatron.flat_buffers import Parameter, positions
from reshard.formats.megatron.rank_files import EXPERT
from reshard.formats.rank_replicas import HeldArray
from reshard.values.words import counted, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reshard.formats.megatron.rank_files import RankFile, Weight

_BUFFER = re.compile(r"(?:([0-9]{1,3})\.)?([0-9]{1,4})\.\(torch\.(\w+), torch\.\w+\)\.(\w+)")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_MIN_BUCKET = 40_000_000  # `bucket_size` of `DistributedDataParallel`, unless asked for
_BUCKET_PER_RANK = 1_000_000


class OptimizerFiles(NamedTuple):
    """What the ranks hold of the state of the optimizer.

    Attributes:
        files: number of the file of each rank in the index; empty: there are none.
        arrays: by name of the state, the arrays of the ranks, each with the name of its parameter.
        fault: why the state has no known position; None: it has.
    """

    files: Mapping[int, int]
    arrays: Mapping[str, Sequence[tuple[RankFile, Weight, HeldArray]]]
    fault: str | None


def optimizer_arrays(
    ranks: Sequence[RankFile], index: _core.Index, shared: Collection[str], method: _core.ReadMethod
) -> OptimizerFiles:
    """Open the files of the optimizer and find the state of each parameter in them.

    Args:
        ranks: the files of the weights.
        index: the files are added to it.
        shared: parameters that are buckets of their own.
        method: how files are read.

    Raises:
        CheckpointNotFoundError: only some ranks have a file.
        DamagedFileError: a file violates its format.
    """
    paths = {rank.number: rank.folder / names.OPTIMIZER_FILE for rank in ranks}
    existing = {number for number, path in paths.items() if path.exists()}
    missing = sorted(paths.keys() - existing)
    if existing and missing:
        path = paths[missing[0]]
        raise CheckpointNotFoundError(
            f"{show(str(path))} is missing, other ranks have one", path=str(path), hint="use another iteration"
        )
    if not existing:
        return OptimizerFiles({}, {}, None)
    files = {
        number: index.add_torch_file(str(path), follow_links=False, method=method) for number, path in paths.items()
    }
    arrays: dict[str, list[tuple[RankFile, Weight, HeldArray]]] = defaultdict(list)
    n_expert_ranks = 1 + max(rank.expert for rank in ranks)
    for rank in ranks:
        fault = _add(arrays, rank, n_expert_ranks, files[rank.number], shared)
        if fault is not None:
            return OptimizerFiles(files, {}, f"{paths[rank.number]}: {fault}")
    return OptimizerFiles(files, arrays, None)


_Buffers = dict[tuple[int, int, str], dict[str, tuple[str, tuple[int, ...]]]]


def _add(
    arrays: dict[str, list[tuple[RankFile, Weight, HeldArray]]],
    rank: RankFile,
    n_expert_ranks: int,
    file: int,
    shared: Collection[str],
) -> str | None:
    """Add the state of one rank. Return why it has no known position, or None."""
    tensors, objects = _core.read_torch_file(str(rank.folder / names.OPTIMIZER_FILE), follow_links=False)
    stored: _Buffers = defaultdict(dict)
    for name, dtype, shape in tensors:
        match = _BUFFER.fullmatch(name)
        if match is None or dtype != "F32" or len(shape) != 1:
            return f"{show(name)} is no flat buffer of a known form"
        stored[int(match[1] or 0), int(match[2]), match[3]][match[4]] = name, shape
    if not all(value is True for name, value in objects if name.rpartition(".")[2] == "buckets_coalesced"):
        return "its buckets are not coalesced"
    expected = _expected(rank, n_expert_ranks)
    for at, slots in stored.items():
        if at not in expected:
            return f"buffer {at[1]} of optimizer {at[0]} with parameters of {at[2]} is not one of this model"
        weights = expected[at]
        bucket = _bucket_elements(rank, weights[0].chunk)
        if isinstance(bucket, str):
            return bucket
        first, length = positions(
            [Parameter(one.stored, math.prod(one.shape), one.key in shared) for one in weights], bucket
        )
        for slot, (name, shape) in slots.items():
            if shape != (length,):
                return f"{show(name)} has {counted(shape[0], 'element')}, the parameters of the rank need {length}"
            for weight in weights:
                array = HeldArray(rank.number, file, name, shape, first[weight.stored], weight.shape, "F32")
                arrays[f"{weight.key}.{names.SLOTS.get(slot, slot)}"].append((rank, weight, array))
    return None


def _expected(rank: RankFile, n_expert_ranks: int) -> dict[tuple[int, int, str], list[Weight]]:
    """By optimizer, number of the buffer and dtype, the parameters of a rank.

    With expert ranks, the experts have an optimizer of their own. Every virtual stage has a buffer for each dtype.
    """
    buffers: dict[int, dict[tuple[int, str], list[Weight]]] = defaultdict(dict)
    for weight in rank.weights:
        optimizer = 1 if n_expert_ranks > 1 and EXPERT.fullmatch(weight.key) else 0
        buffers[optimizer].setdefault((weight.chunk, weight.dtype), []).append(weight)
    dtypes = {dtype: name for name, dtype in _DTYPES.items()}
    return {
        (optimizer, number, dtypes.get(dtype, dtype)): weights
        for optimizer, of_optimizer in buffers.items()
        for number, ((_, dtype), weights) in enumerate(
            sorted(of_optimizer.items(), key=lambda one: one[0][0])  # stable: dtypes in the order of the modules
        )
    }


def _bucket_elements(rank: RankFile, chunk: int) -> int | str | None:
    """Elements from which on a bucket ends, None for one bucket, or why that is not known."""
    state = rank.state
    if not argument(state, "overlap_grad_reduce") or rank.pipeline > 0 or chunk > 0:
        return None
    if argument(state, "ddp_num_buckets") is not None or argument(state, "overlap_param_gather_with_optimizer_step"):
        return "the run set the number of its buckets, which does not give their sizes"
    given = argument(state, "ddp_bucket_size")
    if isinstance(given, int):
        return given
    n_ranks, n_context = argument(state, "data_parallel_size"), argument(state, "context_parallel_size")
    if not isinstance(n_ranks, int):
        return "its arguments do not record the number of data-parallel ranks, on which the buckets depend"
    return max(_MIN_BUCKET, _BUCKET_PER_RANK * n_ranks * (n_context if isinstance(n_context, int) else 1))
