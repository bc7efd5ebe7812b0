"""The plan of an iteration, which follows from the facts that all ranks report. All functions are pure.

Rank 0 finds the global shapes (given, or computed from local shapes by the layout), checks that every rank has the
arrays that it should have, and plans. Where ranks disagree, the error names the key and the ranks.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, LayoutError, MismatchError
from reshard.formats.checkpoint2.iteration import plan_layout, plan_regions
from reshard.formats.checkpoint2.shards import RecordKind
from reshard.layout.bind import BoundLayout
from reshard.layout.invert import check_local_shapes, global_shapes, join_members
from reshard.layout.partition import TensorLayout
from reshard.layout.strategy import region_of
from reshard.values.counters import is_counter
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.formats.checkpoint2.iteration import IterationPlan
    from reshard.layout import ModelLayout
    from reshard.layout.strategy import Strategy
    from reshard.values.indexing import Region
    from reshard.write.arrays import Fact, Facts
    from reshard.write.contents import Part
    from reshard.write.rank_facts import RankFacts, Shape

_MAX_NAMED = 3


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
        >>> from reshard.write.arrays import Fact, Facts
        >>> from reshard.write.rank_facts import RankFacts
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
        return _by_regions(found, shapes, len(ranks), prefix=prefix, dedup=dedup, strict=strict)
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
    """The plan of one rank that holds whole tensors: as `_by_regions` makes it, without an object for each tensor."""
    names, kind_of = facts.names, facts.kind_of
    is_model = [kind.part == "model" for kind in facts.kinds]
    if not all(is_model):
        # The model's arrays are first.
        order = sorted(range(len(names)), key=lambda number: not is_model[kind_of[number]])
        names = tuple(map(names.__getitem__, order))
        kind_of = tuple(map(kind_of.__getitem__, order))
    kinds: list[tuple[RecordKind, Mapping[int, Region]]] = []
    for part, dtype, shape, offset, _ in facts.kinds:
        region = (0,) * len(shape) if offset is None else offset, shape
        kinds.append((RecordKind(dtype, part, TensorLayout(shape)), {0: region}))
    return plan_regions(names, kind_of, kinds, 1, prefix=prefix, dedup=dedup, strict=strict)


def _by_regions(
    found: Mapping[str, Mapping[int, Fact]], shapes: Mapping[str, Shape], n_ranks: int, *,
    prefix: str | None, dedup: bool, strict: bool,
) -> IterationPlan:  # fmt: skip
    numbers: dict[object, int] = {}
    kinds: list[tuple[RecordKind, Mapping[int, Region]]] = []
    kind_of: list[int] = []
    for name, of_ranks in found.items():
        own: dict[int, Region] = {}
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
    return plan_regions(list(found), kind_of, kinds, n_ranks, prefix=prefix, dedup=dedup, strict=strict)


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
    regions = (region_of(strategy, key, rank, shape) for rank, shape in local_shapes.items())
    return next((region[0] for region in regions if region is not None), None)


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


def _check_same(name: str, values: Mapping[int, str], text: str) -> None:
    (first, value), *others = values.items()
    for rank, other in others:
        if other != value:
            raise MismatchError(
                f"{show(name)} is {text.format(value)} on rank {first} and {text.format(other)} on rank {rank}",
                key=name,
            )


def planned_bytes(plan: IterationPlan, ranks: Sequence[RankFacts]) -> int:
    """Bytes of all arrays that the plan writes.

    Example:
        >>> from reshard.write.arrays import Fact, Facts
        >>> from reshard.write.rank_facts import RankFacts
        >>> facts = [RankFacts("host", {}, Facts.of([Fact("w", "model", "F32", (2, 3))]))]
        >>> planned_bytes(plan_iteration(facts, None, prefix=None, dedup=True, strict=False), facts)
        24
    """
    n_bytes = 0
    files: dict[int, list[Sequence[str]]] = {}
    for file in plan.files:
        files.setdefault(file.rank, []).append(file.arrays)
    for rank, facts in enumerate(ranks):
        arrays = facts.arrays
        sizes = [kind.n_bytes for kind in arrays.kinds]
        written = files.get(rank, [])
        numbers: Iterable[int] = arrays.kind_of
        if sum(map(len, written)) < len(arrays.names):
            number_of = dict(zip(arrays.names, arrays.kind_of, strict=True))
            numbers = map(number_of.__getitem__, itertools.chain.from_iterable(written))
        n_bytes += sum(map(sizes.__getitem__, numbers))
    return n_bytes
