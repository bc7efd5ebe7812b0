"""`reshard.mindspore.load`: the newest undamaged iteration into the parameters of a network and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np

from reshard import dtypes
from reshard.errors import ArgumentError, MismatchError
from reshard.formats import counter_tensors
from reshard.mindspore.parameters import as_parameter, as_tensor, check_alone, name_of_dtype, named_parts
from reshard.options import Verify
from reshard.ranks.group import resolve
from reshard.values.words import listed, show
from reshard.verbs.load import LoadRequest, load_with

if TYPE_CHECKING:
    import os

    from reshard.checkpoint import Checkpoint, LayoutLike
    from reshard.documents.common_info import CommonInfo
    from reshard.options import VerifyLike
    from reshard.resume import ResumeDecision


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        parameters: the parameters by name: those that were given, with their new values, or new ones. Empty if there is
            no checkpoint yet.
        iteration: the iteration that was loaded; 0 if there is none yet.
        common: the content of common.json, or None.
        extra: the state that was saved beside the tensors, by name.
        decision: which iteration was chosen, and which were skipped.
    """

    parameters: dict[str, Any]
    iteration: int
    common: CommonInfo | None
    extra: dict[str, Any]
    decision: ResumeDecision


def load(
    root: str | os.PathLike[str],
    network: Any = None,
    optimizer: Any = None,
    *,
    partial: bool = False,
    layout: LayoutLike | None = None,
    rank: int | None = None,
    verify: VerifyLike = "touched",
    group: object = None,
    timeout: float = 1800.0,
    threads: int | None = None,
) -> Loaded:
    """Load the newest undamaged iteration into the parameters of a network and its optimizer.

    Nothing is changed if it fails. A checkpoint of any framework and format can be loaded whose tensors have the names
    of the parameters.

    Args:
        root: a checkpoint root, or one of its iteration folders.
        network: a Cell, or Parameters and Tensors by name, whose values are set. None: all tensors of the checkpoint
            are returned as new Parameters, for `mindspore.load_param_into_net`.
        optimizer: the same for the optimizer. None: no tensors of an optimizer are loaded into the network.
        partial: whether the checkpoint may have tensors that are not wanted.
        layout: how the wanted tensors are sharded, as in `reshard.load`. None: they are whole.
        rank: the rank in the layout; None: this process's rank in the group.
        verify: what is compared with its checksums, as in `reshard.load`.
        group: the ranks that load together, as in `reshard.load`.
        timeout: seconds that a rank waits for the others.
        threads: threads of the copy.

    Returns:
        What was loaded. An empty or missing root is a fresh start: no parameters, and the iteration 0.

    Raises:
        MismatchError: a parameter is missing in the checkpoint, or has another shape or dtype; or the checkpoint has
            tensors that are not wanted.
        UnsupportedError: MindSpore runs in several processes without `group`.
        ReshardError: as `reshard.load`.

    Example:
        >>> from reshard.mindspore import save
        >>> network = mindspore.nn.Dense(2, 1)
        >>> _ = save("loaded", 10, network)
        >>> load("loaded", network).iteration, sorted(load("loaded").parameters)
        (10, ['bias', 'weight'])
    """
    check_alone(group)
    if network is None and optimizer is not None:
        raise ArgumentError("`optimizer` is given without `network`")
    model, state = ({}, {}) if network is None else named_parts(network, optimizer)
    wanted, mode = {**model, **state}, Verify.of(verify).on_load
    members = resolve(group)
    own = members.rank if rank is None and members.world_size > 1 else rank
    for name, one in wanted.items():
        if not isinstance(one, mindspore.Tensor):
            raise ArgumentError(f"{show(name)} is of type {type(one).__name__}, expected a Tensor", key=name)

    def read(checkpoint: Checkpoint, _decision: ResumeDecision) -> tuple[dict[str, np.ndarray], Any, dict[str, Any]]:
        keys = checkpoint.keys()
        made = _made_of_counters(checkpoint, wanted.keys() - set(keys))
        if network is not None:
            part = checkpoint.keys("all" if optimizer is not None else "model")
            _check_names(str(checkpoint.path), set(keys) | made.keys(), set(part), wanted, partial=partial)
            keys = [name for name in wanted if name not in made]
        arrays = checkpoint.load(
            layout,
            None if layout is None else own,
            keys=keys,
            verify="touched" if mode == "full" else mode,
            threads=threads,
        )
        return {**arrays, **made}, checkpoint.common, checkpoint.extra(rank=own or 0)

    decision, found = load_with(
        read, LoadRequest(root=root), group=members, scrub=mode == "full", threads=threads, timeout=timeout
    )
    if found is None:
        return Loaded({}, 0, None, {}, decision)
    arrays, common, extra = found
    if network is None:
        parameters = {name: as_parameter(one, name) for name, one in arrays.items()}
        return Loaded(parameters, decision.iteration or 0, common, extra, decision)
    for name, one in wanted.items():
        _check_value(str(decision.path), name, arrays[name], one)
    for name, one in wanted.items():
        value = as_tensor(arrays[name])
        if isinstance(one, mindspore.Parameter):
            one.set_data(value)
        else:
            one.assign_value(value)
    return Loaded(wanted, decision.iteration or 0, common, extra, decision)


def _made_of_counters(checkpoint: Checkpoint, missing: set[str]) -> dict[str, np.ndarray]:
    """`global_step` from common.json: checkpoints without redundant copies do not hold the tensor."""
    common = checkpoint.common
    if "global_step" not in missing or common is None or common.global_step is None:
        return {}
    return {"global_step": np.full(1, common.global_step, np.int32)}


def _check_names(path: str, stored: set[str], of_part: set[str], wanted: dict[str, Any], *, partial: bool) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise MismatchError(
            f"{path} lacks {listed(map(show, missing))}",
            key=missing[0],
            hint="tensors have the names of their parameters, `Parameter.name`",
        )
    unwanted = sorted(of_part - wanted.keys() - set(counter_tensors.NAMES))
    if unwanted and not partial:
        raise MismatchError(
            f"{path} has {listed(map(show, unwanted))}, which network and optimizer do not have",
            key=unwanted[0],
            hint="`partial=True` loads only what they have",
        )


def _check_value(path: str, name: str, array: np.ndarray, tensor: Any) -> None:
    """Check shape and dtype: `Parameter.set_data` accepts others without an error."""
    dtype, wanted = dtypes.name_of(array.dtype), name_of_dtype(tensor)
    if array.shape != tuple(tensor.shape) or dtype != wanted:
        raise MismatchError(
            f"{show(name)} is {dtype} with shape {array.shape} in {path}, and {wanted} with shape "
            f"{tuple(tensor.shape)} here",
            key=name,
            hint=f"cast the parameter to {dtype} before the load" if dtype != wanted else None,
        )
