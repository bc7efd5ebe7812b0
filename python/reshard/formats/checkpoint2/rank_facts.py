"""What each rank reports of its arrays, and the plan of an iteration that follows from the reports of all ranks.

The facts of a rank are a message: names, dtypes and shapes, never contents. Rank 0 gathers them, finds the global
shapes (given, or computed from local shapes by the layout), checks that every rank has the arrays that it should have,
and plans. All functions are pure. Where ranks disagree, the error names the key and the ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.errors import ArgumentError, LayoutError, MismatchError
from reshard.formats.checkpoint2.iteration import plan_boxes, plan_layout
from reshard.formats.checkpoint2.shards import RecordKind
from reshard.layout.bind import BoundLayout
from reshard.layout.invert import check_local_shapes, global_shapes, join_members
from reshard.layout.partition import TensorLayout
from reshard.layout.strategy import box_of
from reshard.values.counters import is_counter
from reshard.values.words import ranks_named, show
from reshard.write.arrays import Facts  # messages are decoded by their type hints

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from reshard.formats.checkpoint2.iteration import IterationPlan
    from reshard.layout import ModelLayout
    from reshard.layout.strategy import Strategy
    from reshard.values.indexing import Box
    from reshard.write.arrays import Fact, LocalArrays
    from reshard.write.contents import Part

Shape = tuple[int, ...]
T = TypeVar("T")

_MAX_NAMED = 3


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
    arrays: Facts
    shapes: dict[str, Shape] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()


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


def plan_iteration(
    ranks: Sequence[RankFacts],
    layout: BoundLayout | ModelLayout | None,
    *,
    prefix: str | None,
    dedup: bool,
    strict: bool,
) -> IterationPlan:
    """Plan which rank writes which arrays into which file.

    Args:
        ranks: the facts of rank 0, 1, 2, ...
        layout: how the tensors are partitioned; None: the shards have offsets, or one rank holds whole tensors.
        prefix: first part of the names of the shard files.
        dedup: write each shard once instead of once for every rank that holds it.
        strict: refuse a tensor whose layout metadata.json cannot express.

    Raises:
        ArgumentError, LayoutError, MismatchError, CoverageError, UnsupportedError: the arrays of the ranks do not form
            complete tensors, or the ranks disagree; the message names key and ranks.

    Example:
        >>> from reshard.write.arrays import Fact
        >>> facts = RankFacts("host", {}, Facts.of([Fact("w", "model", "F32", (2, 3))]))
        >>> plan_iteration([facts], None, prefix=None, dedup=True, strict=False).files[0].name
        'model-0000000-0000001.safetensors'
    """
    if len(ranks) == 1 and layout is None and not ranks[0].shapes:
        return _of_one(ranks[0].arrays, prefix=prefix, dedup=dedup, strict=strict)
    found = _found(ranks)
    for name, of_ranks in found.items():
        if len(of_ranks) == 1 or len({(fact.part, fact.dtype) for fact in of_ranks.values()}) == 1:
            continue
        _check_same(name, {rank: fact.part for rank, fact in of_ranks.items()}, "of the {}")
        _check_same(name, {rank: fact.dtype for rank, fact in of_ranks.items()}, "{}")
    given: dict[str, tuple[Shape, int]] = {}
    for rank, facts in enumerate(ranks):
        for name, shape in facts.shapes.items():
            other, first = given.setdefault(name, (shape, rank))
            if other != shape:
                raise MismatchError(
                    f"the global shape of {show(name)} is {other} on rank {first} and {shape} on rank {rank}", key=name
                )
    shapes = {name: shape for name, (shape, _) in given.items()}
    if layout is None:
        return _by_boxes(found, shapes, len(ranks), prefix=prefix, dedup=dedup, strict=strict)
    return _by_layout(found, shapes, len(ranks), layout, prefix=prefix, dedup=dedup, strict=strict)


def _found(ranks: Sequence[RankFacts]) -> dict[str, dict[int, Fact]]:
    """The facts of each array by rank.

    The model's arrays are first, in the order in which ascending ranks first name them.
    """
    found: dict[str, dict[int, Fact]] = {}
    for rank, one in enumerate(ranks):
        for fact in one.arrays:
            found.setdefault(fact.name, {})[rank] = fact
    if all(kind.part == "model" for one in ranks for kind in one.arrays.kinds):
        return found
    is_model = {name: next(iter(of_ranks.values())).part == "model" for name, of_ranks in found.items()}
    return {name: found[name] for name in sorted(found, key=is_model.__getitem__, reverse=True)}


def _of_one(facts: Facts, *, prefix: str | None, dedup: bool, strict: bool) -> IterationPlan:
    """The plan of one rank that holds whole tensors: as `_by_boxes` makes it, without an object for each tensor."""
    names, kind_of = facts.names, facts.kind_of
    is_model = [kind.part == "model" for kind in facts.kinds]
    if not all(is_model):
        # The model's arrays are first.
        order = sorted(range(len(names)), key=lambda number: not is_model[kind_of[number]])
        names = tuple(map(names.__getitem__, order))
        kind_of = tuple(map(kind_of.__getitem__, order))
    kinds: list[tuple[RecordKind, Mapping[int, Box]]] = []
    for part, dtype, shape, offset, _ in facts.kinds:
        box = (0,) * len(shape) if offset is None else offset, shape
        kinds.append((RecordKind(dtype, part, TensorLayout(shape)), {0: box}))
    return plan_boxes(names, kind_of, kinds, 1, prefix=prefix, dedup=dedup, strict=strict)


def _by_boxes(
    found: Mapping[str, Mapping[int, Fact]], shapes: Mapping[str, Shape], n_ranks: int, *,
    prefix: str | None, dedup: bool, strict: bool,
) -> IterationPlan:  # fmt: skip
    numbers: dict[object, int] = {}
    kinds: list[tuple[RecordKind, Mapping[int, Box]]] = []
    kind_of: list[int] = []
    for name, of_ranks in found.items():
        own: dict[int, Box] = {}
        for rank, fact in of_ranks.items():
            if fact.offset is None and fact.shape and n_ranks > 1:
                raise ArgumentError(
                    f"rank {rank} of {n_ranks} gave {show(name)} as a plain array: whole, or a part of a tensor?",
                    key=name,
                    hint="give `layout=`, or `reshard.Shard(array, global_shape, offset)`",
                )
            offset = (0,) * len(fact.shape) if fact.offset is None else fact.offset
            own[rank] = (offset, fact.shape)
        first = next(iter(of_ranks.values()))
        whole = RecordKind(first.dtype, first.part, TensorLayout(shapes.get(name, first.shape)))
        number = numbers.setdefault((whole, tuple(own.items())), len(kinds))
        if number == len(kinds):
            kinds.append((whole, own))
        kind_of.append(number)
    return plan_boxes(list(found), kind_of, kinds, n_ranks, prefix=prefix, dedup=dedup, strict=strict)


def _by_layout(
    found: Mapping[str, Mapping[int, Fact]], given: Mapping[str, Shape], n_ranks: int,
    layout: BoundLayout | ModelLayout, *, prefix: str | None, dedup: bool, strict: bool,
) -> IterationPlan:  # fmt: skip
    if isinstance(layout, BoundLayout) and not found.keys() <= set(map(layout.array_of, layout.layouts)):
        from reshard.layout import ModelLayout  # noqa: PLC0415  slow to import

        # The caller has added arrays, for which there may be a rule.
        layout = ModelLayout.from_mapping(layout.to_mapping() or {})
    if isinstance(layout, BoundLayout):
        ranks = sorted(layout.ranks)
    else:
        ranks = sorted(layout.ranks or range(math.prod(layout.mesh.values())))
    if ranks != list(range(n_ranks)):
        raise LayoutError(
            f"the layout is one of {len(ranks)} ranks, from {ranks[0]} to {ranks[-1]}; {n_ranks} ranks save together",
            hint="every rank of the layout calls `save`, with what it holds",
        )
    bound = layout.only(found) if isinstance(layout, BoundLayout) else _bound(layout, found, given)
    for key in given.keys() & bound.tensor_layouts.keys():
        if (expected := bound.tensor_layouts[key].shape) != given[key]:
            raise MismatchError(
                f"the global shape of {show(key)} is {given[key]}, the layout expects {expected}", key=key
            )
    check_local_shapes(
        bound, {name: {rank: fact.shape for rank, fact in of_ranks.items()} for name, of_ranks in found.items()}
    )
    bound.refuse_unused()
    facts = {key: next(iter(found[bound.array_of(key)].values())) for key in bound.layouts}
    # The model first here too: otherwise members of joins would be last.
    keys_in_order = sorted(facts, key=lambda key: facts[key].part != "model")
    tensors = {key: (facts[key].dtype, facts[key].part) for key in keys_in_order}
    return plan_layout(tensors, bound, prefix=prefix, dedup=dedup, strict=strict)


def _bound(layout: ModelLayout, found: Mapping[str, Mapping[int, Fact]], given: Mapping[str, Shape]) -> BoundLayout:
    """The layout of the tensors of all ranks, whose shapes follow from those of their parts."""
    parts: dict[str, Part] = {name: next(iter(of_ranks.values())).part for name, of_ranks in found.items()}
    given, members = _with_members(layout, found, parts, given)
    unknown = [key for key in given if key not in found and not any(key in keys for keys in members.values())]
    if unknown:
        some = ", ".join(show(key) for key in unknown[:_MAX_NAMED])
        raise ArgumentError(f"`shapes` has {some}, of which no rank gave an array", key=unknown[0])
    for name, keys in members.items():
        parts |= dict.fromkeys(keys, parts[name])
    optimizer_keys = {key for key, part in parts.items() if part == "optimizer"} - members.keys()
    alone = {
        name: {rank: fact.shape for rank, fact in of_ranks.items()}
        for name, of_ranks in found.items()
        if name not in members
    }
    if layout.strategy is not None:
        # A strategy lists each tensor by its name, and gives its shape by that of any part.
        given = {
            name: shape for name, of_ranks in alone.items() if (shape := _shape_by(layout.strategy, name, of_ranks))
        } | given
    return layout.bind(global_shapes(layout, alone, given, optimizer_keys), optimizer_keys=optimizer_keys)


def _shape_by(strategy: Strategy, key: str, local_shapes: Mapping[int, Shape]) -> Shape | None:
    boxes = (box_of(strategy, key, rank, shape) for rank, shape in local_shapes.items())
    return next((box[0] for box in boxes if box is not None), None)


def _with_members(
    layout: ModelLayout, found: Mapping[str, object], parts: Mapping[str, Part], given: Mapping[str, Shape]
) -> tuple[dict[str, Shape], dict[str, list[str]]]:
    """The shapes that are known, and the keys of each array that is a join.

    State that is joined has the shapes of its parameters, which need not be given again. Where they are given, they
    say which parameters of the join have state.
    """
    joins = {rule.join for rule in layout.rules if rule.join is not None}
    alone = [key for key in given if key not in found]
    slots = _slots(joins, found, parts, given) if layout.optimizer.follow else {}
    states = {
        name: [state for key in join_members(layout, name[len(slot) :], given) if (state := slot + key) in alone]
        for name, slot in slots.items()
    }
    of_states = {state for named in states.values() for state in named}
    parameters = [key for key in alone if key not in of_states and not is_counter(key, given[key])]
    shapes = dict(given)
    members: dict[str, list[str]] = {}
    for name in found:
        if name in slots:
            slot = slots[name]
            keys = join_members(layout, name[len(slot) :], parameters)
            members[name] = states[name] or [slot + key for key in keys if slot + key not in found]
            shapes |= {
                slot + key: given[key] for key in keys if slot + key in members[name] and slot + key not in given
            }
        elif name in joins and name not in given:
            members[name] = join_members(layout, name, parameters)
        else:
            continue
        if not members[name]:
            raise ArgumentError(
                f"{show(name)} is several tensors joined into one array, and it does not say which",
                key=name,
                hint="give the global shape of each of them in `shapes=`",
            )
    return shapes, members


def _slots(
    joins: Collection[str], found: Iterable[str], parts: Mapping[str, Part], given: Mapping[str, Shape]
) -> dict[str, str]:
    """The prefix of the name of each array of joined state: what precedes the name of the join, with the dot."""
    slots = {}
    for name in found:
        if parts[name] == "optimizer" and not (name in joins and name not in given):
            fitting = [name[: -len(join)] for join in joins if name.endswith(f".{join}")]
            if fitting:
                slots[name] = min(fitting, key=len)  # the longest name of a join
    return slots


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


def _check_same(name: str, values: Mapping[int, str], text: str) -> None:
    (first, value), *others = values.items()
    for rank, other in others:
        if other != value:
            raise MismatchError(
                f"{show(name)} is {text.format(value)} on rank {first} and {text.format(other)} on rank {rank}",
                key=name,
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
    for number, one in enumerate(ranks):
        if number > 0 and one is ranks[number - 1]:
            key[-1][-1] += 1
            continue
        facts = one.arrays
        digest = hashlib.blake2b("".join(facts.names).encode("utf-8", "surrogatepass"))
        for column in (map(len, facts.names), facts.kind_of):
            digest.update(array("Q", column).tobytes())
        kinds = [list(kind) for kind in facts.kinds]
        key.append([len(facts.names), digest.hexdigest(), kinds, list(one.shapes.items()), one.copies, 1])
    return key


def planned_bytes(plan: IterationPlan, ranks: Sequence[RankFacts]) -> int:
    """Bytes of all arrays that the plan writes.

    Example:
        >>> from reshard.write.arrays import Fact
        >>> facts = [RankFacts("host", {}, Facts.of([Fact("w", "model", "F32", (2, 3))]))]
        >>> planned_bytes(plan_iteration(facts, None, prefix=None, dedup=True, strict=False), facts)
        24
    """
    n_bytes = 0
    for rank, facts in enumerate(ranks):
        arrays = facts.arrays
        sizes = [kind.n_bytes for kind in arrays.kinds]
        written = [file.arrays for file in plan.files if file.rank == rank]
        numbers: Iterable[int] = arrays.kind_of
        if sum(map(len, written)) < len(arrays.names):
            number_of = dict(zip(arrays.names, arrays.kind_of, strict=True))
            numbers = map(number_of.__getitem__, itertools.chain.from_iterable(written))
        n_bytes += sum(map(sizes.__getitem__, numbers))
    return n_bytes
