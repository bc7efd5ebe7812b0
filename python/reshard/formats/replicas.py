"""Copies of an array that several ranks hold: compared by their checksums before anything is written.

A layout says which ranks hold the same part of a tensor. This module checks that the bytes are the same: every rank
computes checksums of its copies, and rank 0 compares them. Copies that differ are an error on all ranks. Where the
caller allows them to differ, every rank keeps its own copy in its state, beside other rank-local state.

This module knows neither what the arrays mean nor how files are written.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard import dtypes
from reshard.errors import ArgumentError
from reshard.formats import state
from reshard.formats.checkpoint1 import state as checkpoint1_state
from reshard.layout.patterns import Pattern, glob_of
from reshard.ranks.collective import Collective, capture
from reshard.values.words import show
from reshard.write.arrays import local_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.ranks.group import Group
    from reshard.write.arrays import LocalArray, LocalArrays
    from reshard.write.replicas import Replicas, State

_THREADS = 4  # that compute checksums, unless the caller gives a number


@dataclass(frozen=True)
class RankLocal:
    """State that differs between ranks, and is saved for each: it comes back as `checkpoint.extra(rank)["rank_local"]`.

    Attributes:
        state: values as `extra` takes them; its tensors are read when they are written, if `ready` is given. None: no
            rank has any.
        copies: this rank's copies of arrays that another rank saves. They are compared with that rank's array; where
            any of them differ, every rank keeps its own.
        may_differ: names of arrays of which the same holds, although each rank gives them as replicas.

    Example:
        >>> RankLocal(state={"codes": np.zeros(2, np.uint8)}).copies
        {}
    """

    state: Mapping[str, object] | None = None
    copies: Mapping[str, object] = field(default_factory=dict)
    may_differ: Collection[str] = ()


@dataclass(eq=False)
class Copies:
    """This rank's side of the comparison, and the state that it keeps for itself.

    Attributes:
        arrays: the arrays of this rank by name, with its further copies.
        extra: its share of `extra`, as it is written.
        own: what it keeps for itself in any case; None: no rank has anything.
        is_alone: whether the state is that of Checkpoint 1.0.
        ready: waits until the arrays have their content; None: they have it.
        threads: threads that compute checksums.
    """

    arrays: Mapping[str, LocalArray]
    extra: State = None
    own: Mapping[str, object] | None = None
    is_alone: bool = False
    ready: Callable[[], object] | None = None
    threads: int | None = None
    _sums: dict[str, int] | BaseException | None = None

    @classmethod
    def of(cls, arrays: LocalArrays, rank_local: RankLocal | None, **options: Any) -> Copies:
        """Those of a save.

        Raises:
            ArgumentError: a further copy is no array, or one that is saved; a value cannot be kept.
        """
        given = rank_local or RankLocal()
        copies = local_arrays(given.copies, None)
        both = [name for name in copies if name in arrays]
        if both:
            raise ArgumentError(f"{show(both[0])} is in `copies`, and this rank saves it", key=both[0])
        if given.state:
            state.dump(given.state, "rank_local.state")  # refused before anything is written
        return cls(
            {**arrays, **copies} if copies else arrays, own=None if rank_local is None else rank_local.state, **options
        )

    @property
    def has_state(self) -> bool:
        """Whether this rank has state besides copies that differ."""
        return self.extra is not None or self.own is not None

    def freeze(self, replicas: Replicas, rank: int) -> None:
        """Compute checksums and copy what the caller may change after the call.

        Args:
            replicas: which ranks hold copies of what.
            rank: this process.
        """
        if self.own:
            text, arrays = state.dump(self.own)
            self.own = state.load(text, {name: array.copy() for name, array in arrays.items()})
        self._sums = capture(lambda: self._summed(replicas, rank))
        may = {name for names, _, may in replicas.rows if may for name in names}
        own = [(name, self.arrays[name]) for name in may if name in self.arrays]
        self.arrays = {name: one._replace(array=one.array.copy()) for name, one in own}

    def settle(self, replicas: Replicas, channel: Group, timeout: float) -> State | BaseException:
        """Compare the copies of all ranks, and make the state that this rank writes.

        Args:
            replicas: which ranks hold copies of what.
            channel: the session of the save.
            timeout: seconds that ranks wait for each other.

        Returns:
            The state; or the exception in which making it ended, which the other ranks do not know of.

        Raises:
            MismatchError: copies differ. Raised on all ranks.
            GroupError: a rank did not answer in time.
        """
        differing = self._compare(replicas, channel, timeout) if replicas.rows else []
        return capture(lambda: self._state(channel, differing))

    def _compare(self, replicas: Replicas, channel: Group, timeout: float) -> list[str]:
        """The arrays whose copies differ, and may: decided by rank 0."""
        own = capture(lambda: self._summed(replicas, channel.rank)) if self._sums is None else self._sums
        packed = own if isinstance(own, BaseException) else np.array(list(own.values()), "<u4").tobytes()
        decide = functools.partial(_decide, replicas) if channel.rank == 0 else None
        return Collective(channel, timeout).combine(packed, decide, bytes, list[str])

    def _summed(self, replicas: Replicas, rank: int) -> dict[str, int]:
        names = replicas.names(rank)
        if not names:
            return {}
        if self.ready is not None:
            self.ready()
        with ThreadPoolExecutor(self.threads or _THREADS) as pool:
            return dict(zip(names, pool.map(lambda name: self.arrays[name].crc32c(), names), strict=True))

    def _state(self, channel: Group, differing: Sequence[str]) -> State:
        if self.own is None and not differing:
            return self.extra
        if self.ready is not None:
            self.ready()
        copies = {
            name: array.array.view(dtypes.numpy_dtype(array.dtype))
            for name in differing
            if (array := self.arrays.get(name)) is not None
        }
        kept = {
            "rank": channel.rank,
            "world_size": channel.world_size,
            "state": dict(self.own or {}),
            "differing": copies,
        }
        value = {} if self.extra is None else state.load(*self.extra)
        if self.is_alone:
            return checkpoint1_state.dump(value.get("all", {}), {**value.get("own", {}), state.RANK_LOCAL: kept})
        return state.dump({**value, state.RANK_LOCAL: kept})


def _decide(replicas: Replicas, packed: list[bytes]) -> list[str]:
    """The arrays whose copies differ, given the checksums of each rank's copies, 4 bytes each."""
    sums = [
        dict(zip(replicas.names(rank), np.frombuffer(one, "<u4").tolist(), strict=True))
        for rank, one in enumerate(packed)
    ]
    return replicas.differing(sums)


def is_any_of(patterns: Collection[str], option: str = "may_differ") -> Callable[[str], bool]:
    """Whether a name is one of these, or matches a pattern among them.

    Args:
        patterns: names and patterns.
        option: the field of `Verify` that holds them, for messages.

    Raises:
        ArgumentError: one is no pattern.

    Example:
        >>> is_one = is_any_of(["*.running_mean", "scale"])
        >>> is_one("norm.running_mean"), is_one("scale"), is_one("scales")
        (True, True, False)
    """
    if isinstance(patterns, str) or not all(isinstance(one, str) for one in patterns):
        raise ArgumentError(
            f"`{option}` is not a collection of patterns", hint=f'write `verify=Verify({option}=["<pattern>"])`'
        )
    if not patterns:
        return lambda _: False
    exact = frozenset(patterns)
    try:
        compiled = [Pattern.compile(one) for one in patterns if glob_of(one) != one]
    except ValueError as error:
        raise ArgumentError(f"`{option}`: {error}") from error
    return lambda name: name in exact or any(one.matches(name) for one in compiled)
