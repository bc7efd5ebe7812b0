"""The items of a plan of DCP as facts: checked between ranks, and turned into the facts of a save.

DCP removes copies of an item from the plans of all ranks but one before the storage sees the plans. So every rank adds
the facts of its items to its plan. The coordinator compares them, and finds which ranks hold copies of an item.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.checkpoint.planner import WriteItemType

from reshard import dtypes
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.formats.run_state import is_optimizer
from reshard.values.words import show
from reshard.write.arrays import Fact, Facts
from reshard.write.rank_facts import RankFacts
from reshard.write.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

    from reshard.write.contents import FileContent

Shape: TypeAlias = "tuple[int, ...]"
ItemKey: TypeAlias = "tuple[str, Shape | None]"
"""The name of an item and its offset in the tensor; None for a value that is no tensor."""

OBJECT = "object"
"""Stands for the dtype of a value that is no tensor."""


@dataclass(frozen=True)
class ItemFact:
    """One item of a rank.

    Attributes:
        key: its name and offset.
        dtype: its safetensors name, or `OBJECT`.
        shape: of the item, in elements.
        global_shape: of the whole tensor, in elements.
    """

    key: ItemKey
    dtype: str
    shape: Shape = ()
    global_shape: Shape = ()


@dataclass(frozen=True, eq=False)
class Inner:
    """What an item is made of.

    Attributes:
        tensors: its tensors by name; of a plain tensor one, with an empty name.
        text: what it is besides: its class and its options; empty for a plain tensor.
    """

    tensors: dict[str, torch.Tensor]
    text: str


@dataclass(frozen=True)
class InnerFacts:
    """What a rank reports of a tensor that is made of others.

    Attributes:
        text: its class and its options.
        dtype: its safetensors name.
        shape: in elements.
        parts: `(dtype, shape)` of the tensors inside it, by name.
    """

    text: str
    dtype: str
    shape: Shape
    parts: Mapping[str, tuple[str, Shape]]

    def to_value(self) -> dict[str, Any]:
        """The facts as the state of the iteration holds them."""
        return {"is": self.text, "dtype": self.dtype, "shape": self.shape, "parts": list(self.parts)}


@dataclass(frozen=True)
class LocalFacts:
    """What a rank adds to its plan.

    Attributes:
        host: the machine.
        items: its items, also those that other ranks write.
        options: what must be the same on all ranks, by name.
    """

    host: str
    items: tuple[ItemFact, ...]
    options: Mapping[str, object]


def key_of(item: WriteItem) -> ItemKey:
    """The name and offset of an item."""
    if item.type == WriteItemType.BYTE_IO:
        return item.index.fqn, None
    assert item.tensor_data is not None
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets)


def local_facts(plan: SavePlan, host: str, options: Mapping[str, object]) -> LocalFacts:
    """The facts of the items of a rank.

    Args:
        plan: the plan of this rank.
        host: the machine.
        options: what must be the same on all ranks.

    Raises:
        UnsupportedError: a tensor has a dtype that cannot be stored.
    """
    return LocalFacts(host, tuple(map(_fact, plan.items)), options)


def _fact(item: WriteItem) -> ItemFact:
    key, tensor = key_of(item), item.tensor_data
    if tensor is None:
        return ItemFact(key, OBJECT)
    dtype = _storable(tensor.properties.dtype, key[0])
    return ItemFact(key, dtype, tuple(tensor.chunk.sizes), tuple(tensor.size))


def _storable(dtype: object, name: str) -> str:
    """The safetensors name of a dtype. Raises UnsupportedError if the tensor `name` cannot be stored."""
    try:
        known = dtypes.parse_dtype(dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"saving {show(name)}: {error.message}", key=name, hint=error.hint) from None
    if dtypes.is_packed(known):
        raise UnsupportedError(f"saving {show(name)}: its dtype {known} is packed into bytes", key=name)
    return known


def check_ranks(ranks: Sequence[LocalFacts], planned: Sequence[SavePlan]) -> None:
    """Refuse ranks whose items do not go together, and a global plan that leaves items out.

    Args:
        ranks: the facts of each rank.
        planned: what each rank writes by the global plan.

    Raises:
        MismatchError: of one name, dtype, shape or kind differ between ranks; or an item is left out.
    """
    first: dict[object, tuple[ItemFact, int]] = {}
    for rank, facts in enumerate(ranks):
        for fact in facts.items:
            other, of_rank = first.setdefault(fact.key[0], (fact, rank))
            same_place, of_same = first.setdefault(fact.key, (fact, rank))
            for one, its_rank, is_same in (
                (other, of_rank, (other.dtype, other.global_shape) == (fact.dtype, fact.global_shape)),
                (same_place, of_same, same_place.shape == fact.shape),
            ):
                if not is_same:
                    raise MismatchError(
                        f"{show(fact.key[0])} is {_described(one)} on rank {its_rank} and {_described(fact)} on rank "
                        f"{rank}; `torch.distributed.checkpoint` would keep one of them",
                        key=fact.key[0],
                        hint="give the values of the ranks names of their own, such as `rng.<rank>`",
                    )
    written = {key_of(item) for plan in planned for item in plan.items}
    left_out = next((fact.key for facts in ranks for fact in facts.items if fact.key not in written), None)
    if left_out is not None:
        raise MismatchError(
            f"the global plan leaves out {_name(left_out)}, which a rank holds",
            key=left_out[0],
            hint="a planner leaves out values in `create_local_plan`, or the state does not hold them",
        )


def rank_facts(ranks: Sequence[LocalFacts], planned: Sequence[SavePlan]) -> tuple[list[RankFacts], list[list[int]]]:
    """The facts of what is written, as `reshard.save` takes them.

    A rank holds one part of a tensor there. Further parts of it are those of further ranks, after the real ones.

    Args:
        ranks: the facts of each rank.
        planned: what each rank writes.

    Returns:
        The facts of all these ranks; for each real rank its number and those of its further parts.
    """
    by_key = {fact.key: fact for facts in ranks for fact in facts.items}
    held: list[list[ItemFact]] = [[] for _ in ranks]
    numbers = [[rank] for rank in range(len(ranks))]
    for rank, plan in enumerate(planned):
        seen: dict[str, int] = {}
        for item in plan.items:
            fact = by_key[key_of(item)]
            if fact.dtype == OBJECT:
                continue
            n = seen[fact.key[0]] = seen.get(fact.key[0], -1) + 1
            if n == len(numbers[rank]):
                numbers[rank].append(len(held))
                held.append([])
            held[numbers[rank][n]].append(fact)
    host_of = {number: ranks[rank].host for rank, of_rank in enumerate(numbers) for number in of_rank}
    made = []
    for number, facts in enumerate(held):
        arrays = Facts.of(
            Fact(one.key[0], "optimizer" if is_optimizer(one.key[0]) else "model", one.dtype, one.shape, one.key[1])
            for one in facts
        )
        made.append(RankFacts(host_of[number], {}, arrays, {one.key[0]: one.global_shape for one in facts}))
    return made, numbers


def replicas(ranks: Sequence[LocalFacts], may_differ: Callable[[str], bool]) -> tuple[Replicas, list[list[ItemKey]]]:
    """Which ranks hold copies of which items.

    Args:
        ranks: the facts of each rank.
        may_differ: whether copies may differ, by name.

    Returns:
        The replicas, of which each item is one name; for each rank the items to compare, in order.
    """
    holders: dict[ItemKey, list[int]] = {}
    for rank, facts in enumerate(ranks):
        for fact in facts.items:
            holders.setdefault(fact.key, []).append(rank)
    copied = {key: tuple(of_key) for key, of_key in holders.items() if len(of_key) > 1}
    rows = tuple(((_name(key),), (of_key,), may_differ(key[0])) for key, of_key in copied.items())
    return Replicas(rows), [[key for key, of_key in copied.items() if rank in of_key] for rank in range(len(ranks))]


def sums_by_name(keys: Sequence[ItemKey], sums: Sequence[int]) -> dict[str, int]:
    """The checksums of the items of a rank, by the names in `replicas`."""
    return {_name(key): one for key, one in zip(keys, sums, strict=True)}


def inner_facts(name: str, inner: Inner, planned: TensorWriteData) -> InnerFacts:
    """What a rank reports of a tensor that is made of others.

    Args:
        name: its name.
        inner: what it is made of.
        planned: how it was planned.

    Raises:
        UnsupportedError: a tensor inside it has a dtype that cannot be stored.
    """
    parts = {}
    for part, tensor in inner.tensors.items():
        parts[part] = (_storable(tensor.dtype, f"{name}.{part}"), tuple(tensor.shape))
    return InnerFacts(inner.text, _storable(planned.properties.dtype, name), tuple(planned.size), parts)


def with_inner(files: Sequence[FileContent], inner: Mapping[str, InnerFacts]) -> tuple[FileContent, ...]:
    """The files of a rank with the tensors inside others in the places of these."""
    return tuple(
        replace(
            file,
            arrays=tuple(
                one
                for name in file.arrays
                for one in ([f"{name}.{part}" for part in inner[name].parts] if name in inner else [name])
            ),
        )
        for file in files
    )


def reports_with_inner(reports: Sequence[RankFacts], inner: Mapping[int, Mapping[str, InnerFacts]]) -> list[RankFacts]:
    """The reports of the ranks with the tensors inside others in the places of these.

    Args:
        reports: the reports.
        inner: the tensors that are made of others, by number of the rank.

    Raises:
        ArgumentError: another value has the name of one of them.
    """
    taken = {fact.name for report in reports for fact in report.arrays}
    made = list(reports)
    for number, of_number in inner.items():
        facts: list[Fact] = []
        shapes = dict(made[number].shapes)
        for fact in made[number].arrays:
            if fact.name not in of_number:
                facts.append(fact)
                continue
            del shapes[fact.name]
            for part, (dtype, shape) in of_number[fact.name].parts.items():
                name = f"{fact.name}.{part}"
                if name in taken:
                    raise ArgumentError(f"two tensors are named {show(name)}", key=name)
                shapes[name] = shape
                facts.append(Fact(name, fact.part, dtype, shape, (0,) * len(shape)))
        made[number] = replace(made[number], arrays=Facts.of(facts), shapes=shapes)
    return made


def _name(key: ItemKey) -> str:
    name, offset = key
    return name if offset is None or not any(offset) else f"{name} at {offset}"


def _described(fact: ItemFact) -> Any:
    if fact.dtype == OBJECT:
        return "a value that is no tensor"
    return f"{fact.dtype} of shape {fact.shape} in {fact.global_shape}"
