"""Where parameters lie in the flat buffers of the distributed optimizer, which the files do not record.

The parameters of a buffer follow each other backwards in the order of the modules. A buffer consists of buckets. In a
bucket, every parameter begins at a multiple of 64 elements. A bucket ends when it has at least a given number of
elements; a word embedding that two pipeline stages share is a bucket of its own. The file holds the buckets one after
the other without the padding at their ends.

Source: `megatron/core/distributed/param_and_grad_buffer.py` and `optimizer/distrib_optimizer.py` of Megatron-Core 0.12
to 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGN = 64


class Parameter(NamedTuple):
    """A parameter of a buffer.

    Attributes:
        name: its name.
        n_elements: how many elements this rank holds of it.
        is_shared: whether it is a word embedding that two pipeline stages share.
    """

    name: str
    n_elements: int
    is_shared: bool = False


def positions(parameters: Sequence[Parameter], bucket_elements: int | None) -> tuple[dict[str, int], int]:
    """The first element of each parameter in the buffer of a file, and the length of the buffer.

    Args:
        parameters: in the order of the modules.
        bucket_elements: elements from which on a bucket ends; None: the buffer is one bucket.

    Example:
        >>> positions([Parameter("a", 100), Parameter("b", 10)], None)
        ({'b': 0, 'a': 64}, 164)
        >>> positions([Parameter("a", 100), Parameter("b", 10)], 10)
        ({'b': 0, 'a': 10}, 110)
    """
    found: dict[str, int] = {}
    before = 0  # elements of the buckets that have ended
    end = 0  # of the last parameter in the bucket, from the start of the bucket
    for parameter in reversed(parameters):
        start = -(-end // _ALIGN) * _ALIGN
        if parameter.is_shared and end > 0:
            before, start = before + start, 0  # here the padding before the embedding counts
        found[parameter.name] = before + start
        end = start + parameter.n_elements
        if parameter.is_shared or (bucket_elements is not None and end >= bucket_elements):
            before, end = before + end, 0
    return found, before + end
