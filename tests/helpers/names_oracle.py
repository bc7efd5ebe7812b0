"""What a rule of a name map means, in plain numpy: the whole that its parts make."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]


def whole_of(rule: Mapping[str, Any], parts: Mapping[tuple[int, ...], Array], turns: list[int] | None) -> Array:
    """The whole that parts make.

    Args:
        rule: the rule, as in the file.
        parts: by the number of the part in the rule and by its own indices, in the order of `lay` and then `stack`.
        turns: elements of each part in a round; None: all of it.
    """
    lay, stack = rule.get("lay", {}), rule.get("stack", {})
    ready = {}
    for member, array in parts.items():
        one = array.transpose(rule["transpose"]) if "transpose" in rule else array
        for dim in sorted(stack.values()):
            one = np.expand_dims(one, dim)
        ready[member] = one
    n_parts = max(member[0] for member in ready) + 1
    counts = [max(member[1 + n] for member in ready) + 1 for n in range(len(lay) + len(stack))]
    blocks = {}
    for own in itertools.product(*map(range, counts)):
        arrays = [ready[(k, *own)] for k in range(n_parts)]
        if n_parts == 1:
            blocks[own] = arrays[0]
            continue
        join = rule["join"]
        sizes = [array.shape[join] for array in arrays] if turns is None else turns
        pieces = []
        for r in range(arrays[0].shape[join] // sizes[0]):
            pieces += [array.take(range(r * t, r * t + t), axis=join) for array, t in zip(arrays, sizes, strict=True)]
        blocks[own] = np.concatenate(pieces, axis=join)
    # The last index first: what is left of a block's name are the indices that still tell blocks apart.
    for dim in reversed([*lay.values(), *stack.values()]):
        grouped: dict[tuple[int, ...], list[Array]] = {}
        for own, block in sorted(blocks.items()):
            grouped.setdefault(own[:-1], []).append(block)
        blocks = {own: np.concatenate(group, axis=dim) for own, group in grouped.items()}
    return np.ascontiguousarray(blocks[()])
