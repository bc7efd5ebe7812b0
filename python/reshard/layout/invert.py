"""Compute the global shapes of tensors from a layout and the local shapes of all ranks.

The extent of a partitioned dim is the sum of its parts: one part for each coordinate on the axes that partition it. Any
other dim has the same extent on every rank. Optimizer state is first assumed to have the shape of its parameter. If its
local shapes do not match that, it is assumed to be replicated. `check_local_shapes` verifies the result: it compares
every local shape with the layout bound to the global shapes. The global shapes of flattened tensors cannot be computed:
the caller must specify them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import LayoutError, MismatchError
from reshard.layout.patterns import Matcher
from reshard.layout.resolve import resolve, state_of
from reshard.values.counters import is_counter
from reshard.values.words import counted, show

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reshard.layout.bind import BoundLayout
    from reshard.layout.file import LayoutFile
    from reshard.layout.partition import Partition

Shape = tuple[int, ...]


def global_shapes(
    layout: LayoutFile,
    local_shapes: Mapping[str, Mapping[int, Shape]],
    known: Mapping[str, Shape],
    optimizer_keys: Collection[str] = (),
) -> dict[str, Shape]:
    """The global shape of every tensor.

    Args:
        layout: the layout.
        local_shapes: for each key, the shape of each rank's array, in storage order, in elements.
        known: known global shapes, in elements. They take precedence. They can include keys that have no local array of
            their own because they are members of a join.
        optimizer_keys: the keys that belong to the optimizer part.

    Returns:
        Global shapes by key: the keys of `local_shapes` in their order, then the remaining keys of `known`.

    Raises:
        LayoutError: no rule matches a key, ranks have different extents for the same part, or the shape of a flattened
            tensor is not specified. The message names the key and the ranks.

    Example:
        >>> from reshard.layout import ModelLayout
        >>> layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": [None, "tp"]}]})
        >>> global_shapes(layout, {"w": {0: (4, 3), 1: (4, 3)}}, {})
        {'w': (4, 6)}
    """
    return _Inverter(layout, local_shapes, known, optimizer_keys).run()


def join_members(layout: LayoutFile, name: str, keys: Iterable[str], slot: str = "") -> list[str]:
    """The keys among `keys` that are members of the join `name`; empty if the layout has no join of this name.

    Args:
        layout: the layout.
        name: the name of the join in the layout file.
        keys: the candidate keys.
        slot: the prefix of the keys of optimizer state, including its dot. Empty for parameters.

    Example:
        >>> from reshard.layout import ModelLayout
        >>> rule = {"match": "*.b", "flat": {"axes": ["dp"], "join": "biases"}}
        >>> layout = ModelLayout.from_mapping({"mesh": {"dp": 2}, "rules": [rule, {"match": "*"}]})
        >>> join_members(layout, "biases", ["l.w", "l.b"])
        ['l.b']
    """
    numbers = {n for n, rule in enumerate(layout.rules) if rule.join == name}
    matcher = _matcher(layout)
    found = []
    for key in keys if numbers else ():
        if key.startswith(slot):
            match = matcher.find(key[len(slot) :])
            if match is not None and match[0] in numbers:
                found.append(key)
    return found


def check_local_shapes(bound: BoundLayout, local_shapes: Mapping[str, Mapping[int, Shape]]) -> None:
    """Check that every rank has exactly the arrays of the layout, with the expected shapes.

    Args:
        bound: the layout, bound to all tensors of the checkpoint.
        local_shapes: for each array, its shape in elements on each rank that has it. A join has its own name.

    Raises:
        MismatchError: an array is missing, is not expected on the rank, or has an unexpected shape. The message names
            the key and the rank.
    """
    joins = {join.name: join for join in bound.joins}
    shapes: dict[tuple[int, int], Shape] = {}
    n_given: Counter[int] = Counter()
    for of_ranks in local_shapes.values():
        n_given.update(of_ranks.keys())
    for rank in bound.ranks:
        names = bound.local_names(rank)
        for name in names:
            found = local_shapes.get(name, {}).get(rank)
            if found is None:
                raise MismatchError(
                    f"rank {rank} gave no {show(name)}, of which it holds a part under the layout",
                    key=name,
                    hint="give the array, of size 0 if the part is empty, or change `place` in the layout",
                )
            if name in joins:
                n_elements, _ = bound.joined(joins[name]).part(rank)
                expected: Shape = (n_elements,)
            else:
                made = bound.layouts[name]
                if (id(made), rank) not in shapes:
                    shapes[id(made), rank] = made.local_shape(rank)
                expected = shapes[id(made), rank]
            if found != expected:
                of = "" if name in joins else f", its part of shape {bound.layouts[name].shape}"
                raise MismatchError(
                    f"{show(name)}: rank {rank} gave an array of shape {found}, the layout expects {expected}{of}",
                    key=name,
                    hint="the layout does not say how this tensor is cut",
                )
        if n_given[rank] == len(names):
            continue
        held = set(names)
        for name, of_ranks in local_shapes.items():
            if rank in of_ranks and name not in held:
                raise MismatchError(
                    f"rank {rank} gave {show(name)}, of which it holds nothing under the layout",
                    key=name,
                    hint="leave it out on that rank, or change `place` in the layout",
                )


class _Inverter:
    """The state of one computation of global shapes."""

    def __init__(
        self,
        layout: LayoutFile,
        local_shapes: Mapping[str, Mapping[int, Shape]],
        known: Mapping[str, Shape],
        optimizer_keys: Collection[str],
    ) -> None:
        self.layout = layout
        self.local_shapes = local_shapes
        self.known = known
        self.keys = [*local_shapes, *(key for key in known if key not in local_shapes)]
        optimizer = set(optimizer_keys) if layout.optimizer.follow else set()
        self.parameter = state_of([key for key in self.keys if key in optimizer], set(self.keys) - optimizer)
        self.optimizer_keys = optimizer
        self.matcher = _matcher(layout)
        self.mesh = _core.Mesh(list(layout.mesh.items()), layout.ranks)
        self.at = {rank: self.mesh.coordinates(rank) for rank in self.mesh.ranks}

    def run(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for key in self.keys:
            if key not in self.parameter:
                shapes[key] = self.known[key] if key in self.known else self._own(key)
        for key, parameter in self.parameter.items():
            shapes[key] = self.known[key] if key in self.known else self._guess(key, shapes[parameter])
        shapes = {key: shapes[key] for key in self.keys}
        guessed = {
            key for key, parameter in self.parameter.items() if key not in self.known and shapes[key] != ()
        } & self.local_shapes.keys()
        if guessed:
            layouts = resolve(self.layout, shapes, self.optimizer_keys).layouts
            for key in guessed:
                if shapes[key] == shapes[self.parameter[key]]:
                    made = _core.Layout(self.mesh, layouts[key])
                    of_ranks = self.local_shapes[key]
                    if any(not made.holds(rank) or made.local_shape(rank) != of_ranks[rank] for rank in of_ranks):
                        shapes[key] = self._same(
                            key, f"of shape {shapes[key]}, as its parameter, cut as the layout says"
                        )
        return shapes

    def _own(self, key: str) -> Shape:
        """The global shape of a key that has no parameter, from the rule that matches it."""
        shape = self._common_rank(key)
        if not shape:
            return ()
        found = self.matcher.find(key)
        if found is None:
            if is_counter(key, shape):
                return self._same(key, "a counter of one element, nor")
            raise LayoutError(
                f"no rule matches {show(key)}",
                key=key,
                hint='a last rule `match: "*"` keeps the others unsharded',
            )
        rule = self.layout.rules[found[0]]
        partition = rule.partition
        if partition.flat:
            raise LayoutError(
                f"{show(key)} is flattened by its rule, and its arrays do not tell its shape",
                key=key,
                hint=f"tell it: `shapes={{{key!r}: global_shape}}`, or `reshard.Shard(array, global_shape)`",
            )
        stored = partition.stored or tuple(range(len(shape)))
        if len(stored) != len(shape) or len(partition.cut) > len(shape):
            n = len(stored) if partition.stored else len(partition.cut)
            raise LayoutError(f"{show(key)} has {counted(len(shape), 'dim')}, its rule has {n}", key=key)
        return tuple(self._extent(key, partition, dim, stored.index(dim)) for dim in range(len(shape)))

    def _extent(self, key: str, partition: Partition, dim: int, position: int) -> int:
        """The global extent of a dim that is stored at `position` in the local arrays."""
        axes = partition.axes_of(dim)
        n_parts = math.prod(self.layout.mesh[axis] for axis in axes)
        sizes, blocks = partition.sizes_of(dim), partition.blocks_of(dim)
        of_ranks = self.local_shapes[key]
        is_plain = partition.uneven != "ceil" and sizes is None and blocks is None
        if is_plain and len(set(of_ranks.values())) == 1 and of_ranks.keys() <= self.at.keys():
            return next(iter(of_ranks.values()))[position] * n_parts
        parts: dict[tuple[int, ...], tuple[int, int]] = {}
        for rank, shape in of_ranks.items():
            if rank not in self.at:
                raise LayoutError(f"the layout has no rank {rank}, which gave {show(key)}", key=key)
            coordinates = tuple(self.at[rank][axis] for axis in axes)
            extent, first = parts.setdefault(coordinates, (shape[position], rank))
            if extent != shape[position]:
                raise LayoutError(
                    f"dim {dim} of {show(key)} has {counted(extent, 'element')} on rank {first} and "
                    f"{shape[position]} on rank "
                    f"{rank}, which under the layout hold the same part of it",
                    key=key,
                )
        if sizes is not None:
            return sum(sizes)
        if blocks is not None and not isinstance(blocks, int):
            return sum(block.size for block in blocks)
        extents = {extent for extent, _ in parts.values()}
        if partition.uneven != "ceil" and len(extents) > 1:
            (a, rank_a), (b, rank_b) = min(parts.values()), max(parts.values())
            raise LayoutError(
                f"dim {dim} of {show(key)} has {counted(a, 'element')} on rank {rank_a} and {b} on rank "
                f"{rank_b}, and its rule "
                "cuts it evenly",
                key=key,
                hint="write `uneven: ceil` in its rule, or the `sizes` of the parts",
            )
        if partition.uneven != "ceil":
            return extents.pop() * n_parts
        if len(parts) != n_parts:
            raise LayoutError(
                f"{len(parts)} of the {n_parts} parts of dim {dim} of {show(key)} were given, and they are uneven",
                key=key,
                hint="every rank gives what it holds, or tell the shape in `shapes=`",
            )
        return sum(extent for extent, _ in parts.values())

    def _guess(self, key: str, of_parameter: Shape) -> Shape:
        """The assumed global shape of optimizer state.

        It is the shape of the parameter if the number of dims of the local arrays permits it.
        """
        if key not in self.local_shapes:
            return of_parameter
        n_dims = len(next(iter(self.local_shapes[key].values())))
        rule = self.matcher.find(self.parameter[key])
        is_flat = bool(self.layout.optimizer.flat) or (
            rule is not None and bool(self.layout.rules[rule[0]].partition.flat)
        )
        if of_parameter and (n_dims == len(of_parameter) or (is_flat and n_dims == 1)):
            return of_parameter
        return self._same(key, "of its parameter's shape, nor")

    def _same(self, key: str, instead: str) -> Shape:
        """The local shape that all ranks have. Raises LayoutError if ranks have different shapes."""
        (first, shape), *others = self.local_shapes[key].items()
        for rank, other in others:
            if other != shape:
                raise LayoutError(
                    f"{show(key)} is neither {instead} the same on all ranks: {shape} on rank {first} and {other} on "
                    f"rank {rank}",
                    key=key,
                    hint="tell its shape in `shapes=`",
                )
        return shape

    def _common_rank(self, key: str) -> Shape:
        """The local shape on the first rank. Raises LayoutError if ranks have different numbers of dims."""
        (first, shape), *others = self.local_shapes[key].items()
        for rank, other in others:
            if len(other) != len(shape):
                raise LayoutError(
                    f"{show(key)} has {counted(len(shape), 'dim')} on rank {first} and {len(other)} on rank {rank}",
                    key=key,
                )
        return shape


def _matcher(layout: LayoutFile) -> Matcher:
    return Matcher([rule.match for rule in layout.rules])
