"""A resolved layout as geometry: the core's layout of each key, and what a rank requests of a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import ArgumentError, KeyNotFoundError, LayoutError
from reshard.values.words import counted, nearest, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from reshard.layout.partition import Places, TensorLayout
    from reshard.layout.resolve import Join, Resolved, Unused

    _Array = tuple[str, list[str], Join | None]
    """The name of an array, the keys in it, and the join if it is one."""

_log = logging.getLogger("reshard")


@dataclass(frozen=True, eq=False)
class BoundLayout:
    """How each tensor of a checkpoint lies on a mesh. Layouts have this form wherever the keys are known.

    Attributes:
        mesh: the core's mesh.
        layouts: the core's layout of each key, in the order of the tensors; of a joined key with its `flat` axes.
        tensor_layouts: the values from which `layouts` was made: shape, partition and place of each key.
        joins: keys that are one array.
        warnings: rules and places that match no key, and state that `add` does not divide.
        unused: rules and places that match no key and are not optional.
        to_mapping: the same as rules, made when a checkpoint records it; it returns None if there is nothing to record.
    """

    mesh: _core.Mesh
    layouts: dict[str, _core.Layout]
    tensor_layouts: dict[str, TensorLayout]
    joins: list[Join]
    warnings: list[str]
    unused: list[Unused]
    to_mapping: Callable[[], dict[str, object] | None] = field(repr=False)

    @functools.cached_property
    def ranks(self) -> list[int]:
        """The global rank at each mesh point, row-major."""
        return list(self.mesh.ranks)

    @functools.cached_property
    def empty_joined(self) -> dict[str, list[str]]:
        """By name of a join its keys that have no elements."""
        layouts = self.tensor_layouts
        return {join.name: [key for key in join.keys if 0 in layouts[key].shape] for join in self.joins}

    @functools.cached_property
    def _joins(self) -> dict[str, Join]:
        return {join.name: join for join in self.joins}

    @functools.cached_property
    def _join_of(self) -> dict[str, Join]:
        return {key: join for join in self.joins for key in join.keys}

    def array_of(self, key: str) -> str:
        """The name of the array that holds a key: that of its join, or the key itself."""
        join = self._join_of.get(key)
        return key if join is None else join.name

    def join_named(self, array: str) -> Join | None:
        """The join that an array is; None: it is a tensor."""
        return self._joins.get(array)

    def only(self, arrays: Collection[str]) -> BoundLayout:
        """The layout of some of its arrays, in this order."""
        keys_of: dict[str, list[str]] = {}
        for key in self.layouts:
            keys_of.setdefault(self.array_of(key), []).append(key)
        keys = [key for array in arrays for key in keys_of.get(array, ())]
        return replace(
            self,
            layouts={key: self.layouts[key] for key in keys},
            tensor_layouts={key: self.tensor_layouts[key] for key in keys},
            joins=[join for join in self.joins if join.name in arrays],
        )

    def refuse_unused(self, left_out: Collection[str] = ()) -> None:
        """Refuse a layout with rules that have no effect. Called before something is written.

        Args:
            left_out: keys that are not written, but for which the layout may have rules.

        Raises:
            LayoutError: a rule or a place that is not optional matches no key; the message names the nearest keys.
        """
        unused = [one for one in self.unused if not one.matches(left_out)]
        if unused:
            more = f", and {len(unused) - 1} more take no effect" if len(unused) > 1 else ""
            raise LayoutError(
                f"{unused[0].text}{more}: the files would not be sharded as the layout says", hint=unused[0].hint
            )

    def holds(self, rank: int) -> list[str]:
        """The keys of which a rank holds a part, in the order of the tensors.

        Args:
            rank: the global rank.

        Raises:
            ArgumentError: the layout has no such rank.
        """
        return list(self._held(rank))

    def local_names(self, rank: int, keys: Collection[str] | None = None) -> list[str]:
        """Names of the arrays that a rank loads or saves, in order; a join has the position of its first key.

        Args:
            rank: the global rank.
            keys: only these keys; None: all.

        Raises:
            ArgumentError: the layout has no such rank.
            KeyNotFoundError: `keys` names a tensor that the layout was not bound to.
            LayoutError: `keys` names a part of a join.
        """
        return [name for name, _, _ in self._arrays(rank, keys)]

    def request(self, rank: int, keys: Collection[str] | None = None) -> _core.Request:
        """The request for the arrays of a rank, in the order of `local_names`. Arguments and errors as there."""
        return self._request(self._arrays(rank, keys), rank)

    def request_of(self, rank: int, names: Collection[str]) -> _core.Request:
        """The request for some arrays of a rank, in the order of `names`; joined keys have the name of their join."""
        arrays = self._all_arrays(rank)
        return self._request((arrays[name] for name in names), rank)

    def requests_of(self, arrays: Sequence[tuple[int, tuple[str, ...]]]) -> list[_core.Request]:
        """As `request_of`, for each of several ranks and the names of its arrays."""
        if self.joins:
            return [self.request_of(rank, names) for rank, names in arrays]
        by_names: dict[tuple[str, ...], list[int]] = {}
        for rank, names in arrays:
            by_names.setdefault(names, []).append(rank)
        made = {
            names: iter(_core.Request.of_ranks([(name, self.layouts[name]) for name in names], ranks))
            for names, ranks in by_names.items()
        }
        return [next(made[names]) for _, names in arrays]

    def joined(self, join: Join) -> _core.Joined:
        """The geometry of one of its joins."""
        if join.name not in self._joined:
            with _naming(join.keys[0]):
                members = [(key, self.layouts[key]) for key in join.keys if key in self.layouts]
                self._joined[join.name] = _core.Joined(join.name, members, join.align)
        return self._joined[join.name]

    def _request(self, arrays: Iterable[_Array], rank: int) -> _core.Request:
        request = _core.Request()
        alone: list[tuple[str, _core.Layout]] = []
        for name, members, join in arrays:
            if join is None:
                alone.append((name, self.layouts[name]))
                continue
            request.add_all(alone, rank)
            alone = []
            joined = self.joined(join)
            with _naming(members[0]):
                request.add_joined(joined, rank)
        request.add_all(alone, rank)
        return request

    @functools.cached_property
    def _at_place(self) -> dict[Places, _core.Layout]:
        """The layout of one tensor at each place."""
        return {layout.place: self.layouts[key] for key, layout in self.tensor_layouts.items()}

    @functools.cached_property
    def _held_at(self) -> dict[frozenset[Places], dict[str, None]]:
        """The keys at each of some places, as far as they were asked for."""
        return {}

    @functools.cached_property
    def _arrays_at(self) -> dict[int, dict[str, _Array]]:
        """The arrays of the ranks that hold some keys, by the address of these, as far as they were asked for."""
        return {}

    @functools.cached_property
    def _joined(self) -> dict[str, _core.Joined]:
        """The geometry of joins, as far as it was asked for."""
        return {}

    @functools.cached_property
    def _rank_set(self) -> frozenset[int]:
        return frozenset(self.ranks)

    def _held(self, rank: int) -> dict[str, None]:
        """The keys of which a rank holds a part: one object for all ranks that hold the same."""
        if rank not in self._rank_set:
            raise ArgumentError(
                f"the layout has no rank {rank}",
                hint=f"it has {counted(len(self.ranks), 'rank')}, from {min(self.ranks)}",
            )
        # Thousands of keys share a handful of places, and thousands of ranks hold the same keys.
        held = frozenset(place for place, layout in self._at_place.items() if layout.holds(rank))
        if held not in self._held_at:
            keys = (key for key, layout in self.tensor_layouts.items() if layout.place in held)
            self._held_at[held] = dict.fromkeys(keys)
        return self._held_at[held]

    def _all_arrays(self, rank: int) -> dict[str, _Array]:
        """All arrays of a rank, by name."""
        held = self._held(rank)
        if id(held) not in self._arrays_at:
            self._arrays_at[id(held)] = {one[0]: one for one in self._arrays_of(held, None)}
        return self._arrays_at[id(held)]

    def _arrays(self, rank: int, keys: Collection[str] | None) -> Iterable[_Array]:
        if keys is None:
            return self._all_arrays(rank).values()
        wanted = set(keys)
        for key in wanted:
            if key not in self.layouts:
                near = ", ".join(show(name) for name in nearest(key, self.layouts))
                raise KeyNotFoundError(
                    f"no tensor {show(key)}", key=key, hint=f"the nearest names are {near}" if near else None
                )
        return self._arrays_of(self._held(rank), wanted)

    def _arrays_of(self, held: Collection[str], wanted: Collection[str] | None) -> Iterator[_Array]:
        """The arrays of a rank that holds some keys; `wanted`: only these."""
        done: set[str] = set()
        for key in held:
            if wanted is not None and key not in wanted:
                continue
            join = self._join_of.get(key)
            if join is None:
                yield key, [key], None
            elif join.name not in done:
                done.add(join.name)
                members = [member for member in join.keys if member in held]
                if wanted is not None and (missing := [member for member in members if member not in wanted]):
                    raise LayoutError(
                        f"{show(key)} is asked for, but it is one array with {show(missing[0])} and others in the join "
                        f"{show(join.name)}: {len(missing)} of {len(members)} keys are missing",
                        key=key,
                        hint="ask for all keys of a join, or for none",
                    )
                yield join.name, members, join


def bound_of(
    mesh: _core.Mesh,
    resolved: Resolved,
    to_mapping: Callable[[], dict[str, object] | None] = lambda: None,
    *,
    strict: bool = False,
) -> BoundLayout:
    """The geometry of resolved layouts.

    Args:
        mesh: the mesh on which they were resolved.
        resolved: the layouts.
        to_mapping: the same as rules; not needed if no checkpoint records it.
        strict: whether a warning is an error.

    Raises:
        LayoutError: as `ModelLayout.bind`.
    """
    if resolved.warnings and strict:
        raise LayoutError("; ".join(resolved.warnings), hint="`strict=False` makes this a warning")
    for warning in resolved.warnings:
        _log_once(warning)
    made: dict[TensorLayout, _core.Layout] = {}
    of_object: dict[int, _core.Layout] = {}  # most keys share an object, and hashing one takes longer than a lookup
    layouts: dict[str, _core.Layout] = {}
    for key, layout in resolved.layouts.items():
        geometry = of_object.get(id(layout)) or made.get(layout)
        if geometry is None:
            with _naming(key):
                geometry = made[layout] = _core.Layout(mesh, layout)
        layouts[key] = of_object[id(layout)] = geometry
    return BoundLayout(mesh, layouts, resolved.layouts, resolved.joins, resolved.warnings, resolved.unused, to_mapping)


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Add the key to errors of the core about a layout."""
    try:
        yield
    except LayoutError as error:
        if error.key is not None:
            raise
        raise LayoutError(f"{show(key)}: {error.message}", path=error.path, key=key, hint=error.hint) from None


@functools.lru_cache(maxsize=1024)
def _log_once(warning: str) -> None:
    """Log a warning once in a process, though every load binds the layout again."""
    _log.warning("layout: %s", warning)
