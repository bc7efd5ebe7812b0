"""What a save in which each rank has arrays is told beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.helpers.oracle import mesh_ranks, parameter_of, rule_of

if TYPE_CHECKING:
    from tests.helpers.strategies import Checkpoint


def told_shapes(mapping: dict[str, Any], checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """What the arrays of the ranks do not say; see the test of the inversion."""
    told = {}
    for key, shape in checkpoint.shapes.items():
        parameter = parameter_of(key, checkpoint.shapes, checkpoint.optimizer_keys)
        rule = rule_of(mapping, key, checkpoint.shapes, checkpoint.optimizer_keys)
        if bool(rule.flat) if parameter is None else checkpoint.shapes[parameter] != shape:
            told[key] = shape
        elif parameter is not None and rule.join is not None:
            # Joined state is taken to be that of all parameters in the join.
            slot = key.removesuffix(parameter)
            if any(slot + other not in checkpoint.shapes for other in _joined_with(mapping, checkpoint, parameter)):
                told[key] = shape
    return told


def _joined_with(mapping: dict[str, Any], checkpoint: Checkpoint, parameter: str) -> list[str]:
    join_of = {
        key: rule_of(mapping, key, checkpoint.shapes, checkpoint.optimizer_keys).join for key in checkpoint.shapes
    }
    return [key for key, join in join_of.items() if join == join_of[parameter]]


def states_of(mapping: dict[str, Any], checkpoint: Checkpoint) -> set[str]:
    """The keys and joins that are given as the optimizer's: a join of both parts is the model's, with all its keys."""
    joins: dict[str, list[str]] = {}
    for key in checkpoint.tensors:
        join = rule_of(mapping, key, checkpoint.shapes, checkpoint.optimizer_keys).join
        if join is not None:
            joins.setdefault(join, []).append(key)
    states = set(checkpoint.optimizer_keys)
    for join, keys in joins.items():
        if states >= set(keys):
            states.add(join)
        else:
            states -= set(keys)
    return states


def is_without_gaps(mapping: dict[str, Any]) -> bool:
    ranks = mesh_ranks(mapping)
    return sorted(ranks) == list(range(len(ranks)))
