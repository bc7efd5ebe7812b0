"""What the ranks of a group hold, where most of them hold the same.

Ranks first compare digests. Of all ranks with an equal value only the first one sends it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from reshard.ranks.collective import Collective, capture
from reshard.ranks.group import session
from reshard.ranks.messages import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.ranks.group import Group

RankValues: TypeAlias = "list[tuple[Any, list[int]]]"
"""Each distinct value that ranks have, with the ranks that have it, ascending."""


def gather_distinct(
    group: Group, parts: Sequence[Any] | BaseException, types: Sequence[Any], timeout: float
) -> list[RankValues]:
    """Gather values from all ranks. For each part, return every distinct value with the ranks that have it.

    Args:
        group: the group; all its ranks must call this function.
        parts: messages, the same number on every rank; or an error of this rank, which is then raised on all ranks.
        types: the type of each part, see `messages`.
        timeout: seconds that ranks wait for each other.

    Raises:
        GroupError: a rank did not answer in time.
        ReshardError: the error of a rank.

    Example:
        >>> from reshard.ranks.group import SingleProcess
        >>> gather_distinct(SingleProcess(), [{"w": 1}, 7], [dict[str, int], int], timeout=10)
        [[({'w': 1}, [0])], [(7, [0])]]
    """
    if group.world_size == 1:
        if isinstance(parts, BaseException):
            raise parts
        return [[(part, [0])] for part in parts]
    collective = Collective(session(group, "what ranks hold"), timeout)
    encoded = parts if isinstance(parts, BaseException) else capture(lambda: [encode(part) for part in parts])
    digests = collective.share(
        encoded if isinstance(encoded, BaseException) else [_digest(part) for part in encoded], list[str]
    )
    assert not isinstance(parts, BaseException)
    assert not isinstance(encoded, BaseException)
    ranks_of: list[dict[str, list[int]]] = [{} for _ in parts]
    for rank, of_rank in enumerate(digests):
        for known, digest in zip(ranks_of, of_rank, strict=True):
            known.setdefault(digest, []).append(rank)
    # A part that is equal on all ranks is not sent.
    asked = [len(known) > 1 for known in ranks_of]
    values: dict[tuple[int, str], Any] = {}
    if any(asked):
        own = [
            _Entry(number, digest, encoded[number])
            for number, known in enumerate(ranks_of)
            for digest, ranks in known.items()
            if asked[number] and ranks[0] == group.rank
        ]
        entries = collective.combine(
            own, lambda of_ranks: list(itertools.chain.from_iterable(of_ranks)), list[_Entry], list[_Entry]
        )
        values = {(one.part, one.digest): decode(types[one.part], one.value) for one in entries}
    return [
        [(values[number, digest] if asked[number] else part, ranks) for digest, ranks in ranks_of[number].items()]
        for number, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class _Entry:
    """A part that ranks hold, by its number and digest."""

    part: int
    digest: str
    value: Any


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
