"""What each rank reports of its arrays: names, dtypes and shapes, never contents.

The facts of a rank are a message. Rank 0 gathers them, and compares what must be the same on all ranks. Where ranks
disagree, the error names the key and the ranks. A format plans its files from them. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.errors import ArgumentError, MismatchError
from reshard.layout.bind import BoundLayout
from reshard.ranks.messages import recurring
from reshard.values.words import ranks_named, show
from reshard.write.arrays import Facts  # messages are decoded by their type hints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reshard.layout import ModelLayout
    from reshard.write.arrays import LocalArrays

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class ShapeRows:
    """The form of shapes in messages: their order says in which order tensors are joined.

    Attributes:
        rows: keys and shapes.
    """

    rows: tuple[tuple[str, Shape], ...]

    @classmethod
    def of(cls, value: Mapping[str, Shape]) -> ShapeRows:
        """That of shapes by key."""
        return cls(tuple(value.items()))

    def value(self) -> dict[str, Shape]:
        """The shapes by key."""
        return dict(self.rows)


@dataclass(frozen=True)
class RankFacts:
    """What one rank reports.

    Attributes:
        host: the machine; different ones need a folder that they share.
        options: what must be the same on all ranks, by name.
        arrays: its arrays.
        shapes: the global shapes that the caller gave.
        state: a digest of each value of `extra` that all ranks share.
        copies: names of arrays of which it has copies that another rank saves.
    """

    host: str
    options: dict[str, Any]
    arrays: Facts = field(metadata=recurring())
    shapes: dict[str, Shape] = field(default_factory=dict, metadata=recurring(ShapeRows))
    state: dict[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = field(default=(), metadata=recurring())


def facts_of(
    arrays: LocalArrays,
    shapes: Mapping[str, Shape],
    *,
    host: str,
    options: Mapping[str, object],
    has_layout: bool,
    may_differ: Callable[[str], bool] | None,
    state: Mapping[str, str],
    copies: Iterable[str],
) -> RankFacts:
    """The facts of this rank.

    Args:
        arrays: what it gave.
        shapes: the global shapes that the caller gave.
        host: the machine.
        options: what must be the same on all ranks.
        has_layout: whether a layout gives the offsets of arrays; else their shards do.
        may_differ: whether copies of an array may differ between ranks, by its name; None: of no array.
        state: a digest of each value of `extra` that all ranks share.
        copies: names of arrays of which it has copies that another rank saves.

    Raises:
        ArgumentError: an array has an offset besides a layout, or neither.
        MismatchError: a shard and `shapes` have different shapes.
    """
    if shapes and not has_layout:
        raise ArgumentError("`shapes` was given without `layout`", hint="give `reshard.Shard(array, shape, offset)`")
    given = dict(shapes)
    for name, global_shape in arrays.global_shapes.items():
        offset = arrays[name].offset
        if offset is not None and has_layout:
            raise ArgumentError(
                f"{show(name)} is a shard with an offset, and the layout says where it lies",
                key=name,
                hint="leave out the offset, or the layout",
            )
        if offset is None and not has_layout:
            raise ArgumentError(
                f"{show(name)} is a shard without an offset, and there is no layout to say where it lies",
                key=name,
                hint="write `reshard.Shard(array, global_shape, offset)`, or give `layout=`",
            )
        if given.setdefault(name, global_shape) != global_shape:
            raise MismatchError(
                f"{show(name)} is of shape {given[name]} in `shapes`, and {global_shape} in its shard", key=name
            )
    facts = arrays.facts
    if may_differ is not None:
        facts = Facts.of(fact._replace(may_differ=may_differ(fact.name)) for fact in facts)
    return RankFacts(host, dict(options), facts, given, dict(state), tuple(copies))


class LastMade(Generic[T]):
    """A cache of the last value, since a run saves the same tensors repeatedly. It compares what a value is made of.

    Example:
        >>> plans = LastMade[list[int]]()
        >>> plans.get({"n": 2}, lambda: [1, 2]) is plans.get({"n": 2}, lambda: [])
        True
    """

    def __init__(self) -> None:
        self._last: tuple[Any, T] | None = None

    def get(self, made_of: Any, make: Callable[[], T]) -> T:
        """The value that follows from `made_of`, a plain value; `make` is called if the last one was another."""
        last = self._last
        if last is None or last[0] != made_of:
            last = self._last = (made_of, make())
        return last[1]


def check_options(ranks: Sequence[RankFacts]) -> None:
    """Refuse ranks with different options. Raises ArgumentError, which names the option and the ranks."""
    check_same([facts.options for facts in ranks], "all ranks save the same")


def check_same(options: Sequence[Mapping[str, Any]], why: str) -> None:
    """Refuse ranks with different options.

    Args:
        options: those of rank 0, 1, 2, ... by name.
        why: the end of the message.

    Raises:
        ArgumentError: an option differs; the message names it, the ranks and both values.

    Example:
        >>> check_same([{"save_every": 5}, {"save_every": 6}], "all ranks save at the same steps")
        Traceback (most recent call last):
        reshard.errors.ArgumentError: `save_every` is 5 on rank 0 and 6 on rank 1; all ranks save at the same steps
    """
    for rank, other in enumerate(options):
        if other == options[0]:
            continue
        name = next(name for name in {**options[0], **other} if options[0].get(name) != other.get(name))
        raise ArgumentError(
            f"`{name}` is {options[0].get(name)!r:.200} on rank 0 and {other.get(name)!r:.200} on rank {rank}; {why}"
        )


def check_state(ranks: Sequence[RankFacts]) -> None:
    """Refuse values of `extra` that all ranks share and that differ. Raises MismatchError.

    Rank 0's are saved, so it may be the only one that gives a value.

    Example:
        >>> check_state([RankFacts("host", {}, (), state={"loop": "1f"}), RankFacts("host", {}, ())])
    """
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, facts in enumerate(ranks):
        for name, digest in facts.state.items():
            ranks_of.setdefault(name, {}).setdefault(digest, []).append(rank)
    hint = (
        "wrap it in `reshard.per_rank(...)` to keep each rank's (a Checkpointer takes objects so in "
        "`resume(extra={...})`), or give it on rank 0 alone"
    )
    for name, of_name in ranks_of.items():
        if name not in ranks[0].state:
            with_it = [rank for ranks_with in of_name.values() for rank in ranks_with]
            raise MismatchError(
                f"`extra` has {show(name)} on {ranks_named(sorted(with_it))} and not on rank 0, whose values are saved",
                key=name,
                hint=hint,
            )
        if len(of_name) > 1:
            raise MismatchError(differs_between_ranks(name), key=name, hint=hint)


def differs_between_ranks(name: str) -> str:
    """The message of `check_state` for a value of `extra`, to which a caller adds what differs.

    Example:
        >>> differs_between_ranks("loop")
        '`loop` in `extra` differs between ranks'
    """
    return f"{show(name)} in `extra` differs between ranks"


def layout_key(ranks: Sequence[RankFacts], layout: BoundLayout | ModelLayout | None) -> list[Any]:
    """What the plan of a save follows from besides `plan_key`: a digest of the rules, and the shapes if it is bound."""
    shapes = [one.shape for one in layout.tensor_layouts.values()] if isinstance(layout, BoundLayout) else None
    return [ranks[0].options.get("layout"), shapes]


def plan_key(ranks: Sequence[RankFacts]) -> list[Any]:
    """What the plan of a save follows from, as plain values: the facts of all ranks without host, options and state.

    Ranks that follow each other and have the same facts are counted. The names of several ranks, which can be millions,
    are represented by digests.
    """
    if len(ranks) == 1:
        one = ranks[0]
        return [one.arrays.names, one.arrays.kind_of, one.arrays.kinds, list(one.shapes.items()), one.copies]
    key: list[Any] = []
    # What all ranks that sent the same fields have is one object.
    made: dict[tuple[int, int, int], list[Any]] = {}
    for one in ranks:
        address = id(one.arrays), id(one.shapes), id(one.copies)
        own = made.get(address)
        if own is None:
            facts = one.arrays
            kinds = [list(kind) for kind in facts.kinds]
            own = made[address] = [len(facts.names), facts.digest, kinds, list(one.shapes.items()), one.copies]
        if key and key[-1][0] is own:
            key[-1][1] += 1
        else:
            key.append([own, 1])
    return key
