"""Which stored tensors are those of a model: the names without wrappers, and the sets of weights that fit the model.

A wrapper such as DDP or `torch.compile` adds a part to the names of what it wraps. These parts mean nothing, wherever
they stand in a name. What stands before the names of the model, such as `ema` in `ema.layers.0.weight`, is the entry of
a set of weights. A file may hold several sets that fit, such as trained weights and their average: the caller has to
choose one of them. Reads no files.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError, MismatchError
from reshard.values.words import listed, show
from reshard.values.wrappers import WRAPPERS, bare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_OF_MODEL = frozenset(("app", "model", "model_state_dict", "state_dict"))
"""Entries that say of themselves that they hold the model."""

_MOST_SETS = 8
_MOST_PREFIXES = 16

Shape = tuple[int, ...] | None


class Known:
    """Names of a model, found with or without the parts that wrappers add.

    Example:
        >>> Known(["0.weight"]).find("module.0._orig_mod.weight")
        '0.weight'
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        by_bare: dict[str, str | None] = {}
        for name in self._names:
            # Where only a wrapper tells two names apart, both are known by their full names alone.
            by_bare[bare(name)] = None if bare(name) in by_bare else name
        self._by_bare = by_bare

    def find(self, name: str) -> str | None:
        """The name in the model, or None."""
        return name if name in self._names else self._by_bare.get(bare(name))


@dataclass
class WeightSet:
    """Stored tensors that are tensors of the model.

    Attributes:
        entry: what stands before their names, without wrappers; "" if nothing does.
        start: the same as the first of them has it, with a dot at its end.
        names: the name in the model of each, by its stored name.
        n_fit: how many of them have the shape of the model's.
        others: the first parts of the entries of other sets.
    """

    entry: str = ""
    start: str = ""
    names: dict[str, str] = field(default_factory=dict)
    n_fit: int = 0
    others: frozenset[str] = frozenset()

    def is_foreign(self, key: str) -> bool:
        """Whether a stored name lies beside the weights of another set."""
        return key.partition(".")[0] in self.others

    def holds(self, key: str) -> bool:
        """Whether a stored name lies in this entry."""
        return not self.entry or bare(key).startswith(f"{self.entry}.")

    def inner(self, key: str) -> str:
        """A stored name without the entry."""
        return bare(key).removeprefix(f"{self.entry}.") if self.entry else key


def weight_sets(stored: Mapping[str, Shape], live: Mapping[str, Shape]) -> list[WeightSet]:
    """The sets of weights that have names of the model, those that fit best first.

    Args:
        stored: the stored tensors, without those of optimizers, and their shapes; None: not known.
        live: the names of the model, likewise.

    Example:
        >>> [one.entry for one in weight_sets({"net.w": None, "ema.w": None, "ema.n": None}, {"w": None})]
        ['net', 'ema']
    """
    known = Known(live)
    found: dict[str, WeightSet] = {}
    for key, shape in stored.items():
        parts = key.split(".")
        for n in range(len(parts)):
            name = known.find(".".join(parts[n:]))
            if name is None:
                continue
            start = "".join(f"{part}." for part in parts[:n])
            entry = bare(start).removesuffix(".")
            one = found.setdefault(entry, WeightSet(entry, start))
            if key not in one.names:
                one.names[key] = name
                one.n_fit += shape is None or live[name] is None or shape == live[name]
    return sorted(found.values(), key=lambda one: (one.n_fit, len(one.names)), reverse=True)


def chosen(
    stored: Mapping[str, Shape], live: Mapping[str, Shape], *, entry: str | None = None, path: str | None = None
) -> WeightSet:
    """The set of weights that a run takes.

    Args:
        stored: as in `weight_sets`.
        live: as in `weight_sets`.
        entry: the entry to take; None: the only one that fits.
        path: the checkpoint, for errors.

    Returns:
        The set; an empty one if no name fits.

    Raises:
        ArgumentError: there is no such entry.
        MismatchError: several sets fit, or two stored names differ only in wrappers.

    Example:
        >>> chosen({"net.w": None, "ema.w": None}, {"w": None}, entry="ema").names
        {'ema.w': 'w'}
        >>> chosen({"net.w": None, "ema.w": None}, {"w": None})
        Traceback (most recent call last):
        reshard.errors.MismatchError: several sets of weights fit the model: `net` and `ema`
        hint: `InitFrom(..., entry='net')` takes the first one
    """
    sets = found = weight_sets(stored, live)
    if entry is not None:
        wanted = bare(entry.rstrip("."))
        below = [one for one in sets if one.entry == wanted] or [
            one for one in sets if not wanted or one.entry.startswith(f"{wanted}.")
        ]
        if not below:
            has = listed([show(one.entry) for one in sets if one.entry], _MOST_SETS)
            raise ArgumentError(
                f"`entry` of `init_from` is {show(entry)}, which holds no tensor of the model",
                path=path,
                hint=f"entries that do: {has}" if has else None,
            )
        sets = below
    rivals = _rivals(sets)
    if len(rivals) > 1:
        names = [show(one.entry) if one.entry else "the names without an entry" for one in rivals]
        raise MismatchError(
            f"several sets of weights fit the model: {listed(names[:-1], _MOST_SETS)} and {names[-1]}",
            path=path,
            hint=f"`InitFrom(..., entry={rivals[0].entry!r})` takes the first one",
        )
    if not rivals:
        return WeightSet()
    taken = rivals[0]
    check_distinct(taken.names, path)
    first = taken.start.partition(".")[0]
    taken.others = frozenset(one.start.partition(".")[0] for one in found) - {first, ""}
    return taken


def model_start(key: str, path: Sequence[str | int]) -> str:
    """What stands before the name of a tensor of the model: entries that say so, and parts that wrappers add.

    Args:
        key: the stored name.
        path: the keys that lead to it; only the last one is part of the name in the model.

    Example:
        >>> model_start("app.model.module.layers.0.w", ["app", "model", "module.layers.0.w"])
        'app.model.module.'
        >>> model_start("model.w", ["model.w"]), model_start("net.w", ["net", "w"])
        ('', '')
    """
    n_entries = len(list(itertools.takewhile(lambda part: part in _OF_MODEL | WRAPPERS, path[:-1])))
    parts = key.split(".")
    while n_entries < len(parts) - 1 and parts[n_entries] in WRAPPERS:
        n_entries += 1
    return "".join(f"{part}." for part in parts[:n_entries])


def below(keys: Sequence[str], entry: str, path: str | None = None) -> dict[str, str]:
    """The names of the tensors below an entry without it, by their stored names.

    Args:
        keys: the stored names.
        entry: what stands before the names; wrappers may stand around it.
        path: the checkpoint, for errors.

    Raises:
        ArgumentError: there is no such entry.
        MismatchError: two stored names differ only in wrappers before or behind the entry.

    Example:
        >>> below(["module.ema.w", "net.w"], "ema")
        {'module.ema.w': 'w'}
    """
    start = bare(entry.rstrip("."))
    names: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        n = next((n for n in range(1, len(parts)) if bare(".".join(parts[:n])) == start), None)
        if n is not None:
            while n < len(parts) - 1 and parts[n] in WRAPPERS:
                n += 1
            names[key] = ".".join(parts[n:])
    if not names:
        firsts = {bare(key).partition(".")[0]: None for key in keys if "." in bare(key)}
        has = listed(map(show, firsts), _MOST_SETS)
        raise ArgumentError(
            f"no tensor has the entry {show(entry)}",
            path=path,
            hint=f"entries of the checkpoint: {has}" if has else "no name has an entry",
        )
    check_distinct(names, path)
    return names


def alike(shapes: Mapping[str, Shape], paths: Mapping[str, Sequence[str | int]]) -> list[str]:
    """The entries of a file that hold sets of weights of one model, such as trained weights and their average.

    Entries are the dicts of the file, not parts of the names in them. Numbered dicts are layers of one model.

    Args:
        shapes: the stored tensors, without those of optimizers.
        paths: the keys that lead to each.

    Returns:
        The entries, the largest first; empty if there are no two such sets.

    Example:
        >>> paths = {"net.0.w": ("net", "0.w"), "ema.0.w": ("ema", "0.w"), "best": ("best",)}
        >>> alike({"net.0.w": (2,), "ema.0.w": (2,), "best": ()}, paths)
        ['net', 'ema']
    """
    sets: dict[str, set[tuple[str, Shape]]] = defaultdict(set)
    for key, shape in shapes.items():
        path = paths.get(key, ())
        if len(path) > 1 and not any(str(part)[-1:].isdigit() for part in path[:-1]):
            sets[bare(".".join(map(str, path[:-1])))].add((bare(str(path[-1])), shape))
    entries = sorted(sets, key=lambda entry: -len(sets[entry]))
    for entry in entries:
        found = [other for other in entries if 2 * len(sets[entry] & sets[other]) >= len(sets[entry])]
        if len(found) > 1:
            return found
    return []


def _rivals(sets: Sequence[WeightSet]) -> list[WeightSet]:
    """The sets that fit about as well as the best one, and hold other tensors than it."""
    if not sets:
        return []
    best = sets[0]
    size = best.n_fit or len(best.names)
    rivals = [one for one in sets if 2 * (one.n_fit if best.n_fit else len(one.names)) >= size]
    # The set whose entry is part of the entry of another one is the larger model.
    outer = next((one for one in rivals if not one.entry), best)
    if outer.n_fit == best.n_fit and len(outer.names) == len(best.names):
        best = outer
    return [
        one
        for one in rivals
        if one is best or not (best.holds(next(iter(one.names))) or one.names.keys() <= best.names.keys())
    ]


def check_distinct(names: Mapping[str, str], path: str | None) -> None:
    """Refuse two stored names of one tensor of the model.

    Args:
        names: the names in the model, by the stored ones.
        path: the checkpoint, for errors.

    Raises:
        MismatchError: there are two.

    Example:
        >>> check_distinct({"module.w": "w", "w": "w"}, None)
        Traceback (most recent call last):
        reshard.errors.MismatchError: `module.w` and `w` are both `w` of the model without the wrappers in their names
        hint: save the `state_dict()` of one of them alone
    """
    first: dict[str, str] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            raise MismatchError(
                f"{show(first[name])} and {show(key)} are both {show(name)} of the model without the wrappers in their "
                "names",
                path=path,
                key=key,
                hint="save the `state_dict()` of one of them alone",
            )


def advice(stored: Iterable[str], live: Iterable[str], n_fit: int) -> str:
    """Which change of prefixes makes more stored names fit, as a hint.

    Args:
        stored: the stored names, without those of optimizers.
        live: the names of the model.
        n_fit: how many names of the model fit as they are.

    Example:
        >>> advice(["model.a.w", "model.b.w"], ["a.w", "b.w"], 0)
        "all 2 tensors of the model fit after `names={'rename': {'model.': ''}}` of `InitFrom`"
        >>> advice(["c"], ["a.w", "b.w"], 0)
        'no `rename` in `names` of `InitFrom` makes a name of the model fit: it is another model'
    """
    stored, live = [bare(name) for name in stored], {bare(name) for name in live}
    prefixes: dict[str, list[str]] = defaultdict(list)  # what stands before each ending of a name of the model
    for name in live:
        for start, end in _cuts(name):
            if len(prefixes[end]) < _MOST_PREFIXES:
                prefixes[end].append(start)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for name in stored:
        start, end = next(((start, end) for start, end in _cuts(name) if end in prefixes), ("", ""))
        for other in prefixes.get(end, ()):
            counts[start, other] += 1
    best, change = n_fit + (n_fit > 0), None  # where others fit, one more may be by chance
    for old, new in sorted(counts, key=lambda one: (-counts[one], one))[:_MOST_PREFIXES]:
        fitting = {f"{new}{name[len(old) :]}" if name.startswith(old) else name for name in stored} & live
        if len(fitting) > best:
            best, change = len(fitting), {old: new}
    if change is not None:
        n = f"all {best}" if best == len(live) else f"{best} of {len(live)}"
        return f"{n} tensors of the model fit after `names={{'rename': {change}}}` of `InitFrom`"
    if n_fit == len(live):
        return "`strict=False` goes on without them: all tensors of the model fit"
    if n_fit:
        return f"`strict=False` loads the {n_fit} of {len(live)} tensors of the model that fit"
    return "no `rename` in `names` of `InitFrom` makes a name of the model fit: it is another model"


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """A name in two, at each dot; the longest end first."""
    yield "", name
    for n, letter in enumerate(name, start=1):
        if letter == ".":
            yield name[:n], name[n:]


def without_wrappers(
    keys: Iterable[str], known: Known, of_optimizer: Collection[str], path: str | None = None
) -> dict[str, str]:
    """The name of each tensor, without wrappers where the model has it so.

    Args:
        keys: the stored names.
        known: the names of the model.
        of_optimizer: those of optimizer state, `<slot>.<parameter>`.
        path: the checkpoint, for errors.

    Raises:
        MismatchError: two tensors would have one name.

    Example:
        >>> without_wrappers(["module.w", "m.module.w", "n"], Known(["w"]), ["m.module.w"])
        {'module.w': 'w', 'm.module.w': 'm.w', 'n': 'n'}
    """
    names: dict[str, str] = {}
    for key in keys:
        found = known.find(key)
        if found is None and key in of_optimizer:
            slot, _, parameter = key.partition(".")
            rest = known.find(parameter)
            found = None if rest is None else f"{slot}.{rest}"
        names[key] = key if found is None else found
    check_distinct(names, path)
    return names
