"""Selects the tensors of a source that a conversion writes, and their names.

Tensors are left out and renamed by prefixes of their names. Name maps do all other renaming, fusing and splitting.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from reshard.conversion.destinations import NewNames
from reshard.errors import ArgumentError, NamesError
from reshard.formats import counter_tensors, weight_sets
from reshard.names import NameMap
from reshard.names.config_fields import config_fields
from reshard.names.model import read_config
from reshard.names.resolve import ResizedTensor, copies_left_out, numbers_joined
from reshard.names.sizes import Expression
from reshard.values.argument_types import Part
from reshard.values.arguments import plain_integer
from reshard.values.words import counted, listed, show
from reshard.values.wrappers import bare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reshard.checkpoint import Checkpoint
    from reshard.names import ConfigLike

_log = logging.getLogger("reshard")

_PATTERN = frozenset("*?[{")

_MAX_READ_BYTES = 32 << 20  # of elements that are left out, at a time


@dataclass(frozen=True)
class NewSizes:
    """New numbers of rows, that is of elements along the first dim, by the beginnings of names.

    Attributes:
        pad: tensors that end with rows of zeros: the number of rows, or a size from a model's config.json.
        trim: tensors whose rows after this number are left out.
        config: that config.json; None: there is none.
    """

    pad: Mapping[str, int | str] = field(default_factory=dict)
    trim: Mapping[str, int | str] = field(default_factory=dict)
    config: ConfigLike | None = None


@dataclass(frozen=True)
class Selection:
    """The selected tensors of a source.

    Attributes:
        source: a view of the source with the selected tensors under their new names.
        keys: names of the tensors that are written.
        counters: counters that are not written as other tensors, including those of which the source has no tensor.
        left_out: names of tensors that `drop` leaves out, after `rename`.
        copies: keys of the source that the name map leaves out as copies, and the key that each must be equal to.
        joined: keys of numbers of an optimizer that the name map leaves out, because it fuses their parameters, and the
            key that each must be equal to.
        resized: what the name map leaves out as padding or adds as padding, one sentence for each tensor.
        is_renamed: whether tensors have other names than in the source, or are fused or split.
        names: how names change, if `drop` and `rename` alone change them; None: they do not, or a name map does.
    """

    source: Checkpoint
    keys: list[str]
    counters: dict[str, np.ndarray]
    left_out: list[str]
    copies: dict[str, str]
    is_renamed: bool = False
    names: NewNames | None = None
    resized: Sequence[str] = ()
    joined: Mapping[str, str] = field(default_factory=dict)


def select(
    source: Checkpoint,
    part: Part,
    *,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    sizes: NewSizes = NewSizes(),
    names: NameMap | None = None,
    apart: Collection[str] = (),
    dtype: str | None = None,
) -> Selection:
    """Select and rename the tensors of a source.

    Args:
        source: the opened source, which stays open.
        part: "model", "optimizer" or "all".
        only: prefixes of the names of the tensors that are taken; empty: all are.
        drop: as in `new_names`; one prefix or several.
        rename: as in `new_names`.
        sizes: which tensors are padded or trimmed, after `rename`.
        names: a name map that is applied afterwards.
        apart: names of counters that are not ordinary tensors in the destination.
        dtype: the dtype to which the tensors are cast: some formats store weights in two.

    Returns:
        The selection. Its source must be closed separately.

    Raises:
        ArgumentError: no tensor is selected, or as `new_names`.
        NamesError: the name map does not fit the tensors, or it would leave out values that are no padding.
    """
    if part == "model" and (weights := source.data.weights(dtype)) is not None:
        view = source.view(weights, is_renamed=True)
        selection = select(view, part, only=only, drop=drop, rename=rename, sizes=sizes, names=names, apart=apart)
        if selection.source is not view:
            view.close()
        return replace(selection, copies={weights[a]: weights[b] for a, b in selection.copies.items()})
    if only:
        chosen = _only(source, part, (only,) if isinstance(only, str) else tuple(only))
        view = source.view({key: key for key in chosen})
        selection = select(view, part, drop=drop, rename=rename, sizes=sizes, names=names, apart=apart)
        if selection.source is not view:
            view.close()
        return replace(selection, is_renamed=True, names=None)  # the state beside them is of all tensors
    alone = _alone(source, apart)
    counters = {} if part == "model" else _counters(source, alone)
    of_part = source.keys(part)
    keys = _without(of_part, alone)
    tensors = keys if len(of_part) == len(source) else _without(source.keys(), alone)
    separate = [name for name in counters if name not in source or name in apart]
    drop = (drop,) if isinstance(drop, str) else tuple(drop)
    is_same, unplaced = not drop and not rename, source.unplaced()
    is_alike = is_same and names is None and not (sizes.pad or sizes.trim)
    if keys and is_alike and len(tensors) == len(source) and not separate and not unplaced:
        return Selection(source, keys, {}, [], {})  # without a table of 100,000 names
    states = {} if is_same else _states(source)
    new = new_names([*tensors, *separate], drop, rename, states=states)
    written = keys if is_same else [new[key] for key in keys if key in new]
    if not written:
        raise ArgumentError(
            f"{source.path} has no tensors of this part: there is nothing to write", path=str(source.path)
        )
    source._check_placed(*(key for key in unplaced if key in new))  # noqa: SLF001  the check of a read
    view = source
    if not is_same or len(tensors) < len(source):
        view = source.view({new[key]: key for key in tensors if key in new})
    copies: dict[str, str] = {}
    joined: dict[str, str] = {}
    of_sizes: list[str] = []
    # Tensors that are not written need not match a map.
    of_maps: Part = "model" if part == "model" else "all"
    if sizes.pad or sizes.trim:
        resizing = _map_of_sizes(sizes, {new[key]: key for key in tensors if key in new}, view)
        view = _mapped(view, source, resizing, of_maps, of_sizes, is_asked=True)
        written = view.keys(part)
    if names is not None:
        old = {new[key]: key for key in tensors if key in new}
        of_optimizer = set(view.keys("optimizer"))
        tied = copies_left_out(names, view.keys(of_maps), optimizer_keys=of_optimizer)
        one_of = numbers_joined(
            names, {key: view.shape(key) for key in view.keys(of_maps)}, optimizer_keys=of_optimizer
        )
        view = _mapped(view, source, names, of_maps, of_sizes)
        written = view.keys(part)
        copies = {old[a]: old[b] for a, b in tied.items()}
        joined = {old[a]: old[b] for a, b in one_of.items()}
    if source.common is not None:
        # A counter that is left out must not be written to another file.
        left_out = [name for name in counter_tensors.NAMES if name.startswith(drop)]
        view.common = replace(source.common, **dict.fromkeys(left_out))  # type: ignore[arg-type]
    left_out = []
    if drop:
        changes = dict(rename or {})
        longest_first = sorted(changes, key=len, reverse=True)
        left_out = [_renamed(key, changes, longest_first, set(), states) for key in tensors if key not in new]
    separate_counters = {new[name]: counters[name] for name in separate if name in new}
    is_mapped = names is not None or bool(sizes.pad or sizes.trim)
    is_renamed = is_mapped or any(key != name for key, name in new.items())
    how = None
    if not is_mapped and not is_same:
        of_model = set(source.keys("model"))
        how = NewNames(_renamer(drop, rename or {}, new), {a: b for a, b in new.items() if a in of_model and a != b})
    return Selection(view, written, separate_counters, left_out, copies, is_renamed, how, of_sizes, joined)


def _mapped(
    view: Checkpoint, source: Checkpoint, names: NameMap, part: Part, told: list[str], *, is_asked: bool = False
) -> Checkpoint:
    """A view after a name map, with a sentence in `told` for each tensor that it pads or trims.

    Args:
        view: the tensors so far; it is closed unless it is the source.
        source: the source.
        names: the map.
        part: the tensors to which it is applied.
        told: where the sentences are added.
        is_asked: whether values that the map leaves out are left out on purpose, whatever they are.

    Raises:
        NamesError: the map does not fit, or values that it leaves out as padding are no padding.
    """
    try:
        told += sizes_changed(view, names, part, is_asked=is_asked)
        return view.renamed(names, part=part)
    finally:
        if view is not source:
            view.close()


def sizes_changed(view: Checkpoint, names: NameMap, part: Part = "all", *, is_asked: bool = False) -> list[str]:
    """What a name map does to the tensors that it pads or trims, one sentence for each.

    Args:
        view: the tensors. What would be left out is read.
        names: the map.
        part: the tensors to which it is applied.
        is_asked: whether values that the map leaves out are left out on purpose, whatever they are.

    Raises:
        NamesError: the map does not fit, or values that it leaves out as padding are no padding.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.eye(4, 2)}, "w.safetensors")
        >>> names = NameMap.from_mapping({"rules": [{"from": "w", "to": "v", "trim": 0, "to_size": 1}]})
        >>> sizes_changed(reshard.open("w.safetensors"), names)[0]
        '`w` has shape (4, 2), and `v` (1, 2): the rest is left out as padding, of which 1 of 3 rows is not zero'
    """
    shapes = {key: view.shape(key) for key in view.keys(part)}
    told, refused = [], []
    for one in names.resized(shapes, optimizer_keys=set(view.keys("optimizer"))):
        shape = view.shape(one.key)
        new = tuple(one.n_after if dim == one.dim else n for dim, n in enumerate(shape))
        becomes = f"and {show(one.name)} {new}" if one.name != one.key else f"and gets {new}"
        what = f"{show(one.key)} has shape {shape}, {becomes}"
        if one.n_after > one.n_before:
            told.append(f"{what}: the rest is padding, all zeros")
            continue
        padding = "" if is_asked else " as padding"
        n_values = _n_not_zero(view, one)
        if n_values == 0:
            told.append(f"{what}: the rest is left out{padding}, all zeros")
            continue
        n_rows = one.n_before - one.n_after
        rows = counted(n_rows, "row") if one.dim == 0 else f"{n_rows} along dim {one.dim}"
        of = f"{n_values} of {rows} {'is' if n_values == 1 else 'are'} not zero"
        if not (is_asked or one.is_explained):
            refused.append((one, f"{what}, but the rest is no padding: {of}"))
        told.append(f"{what}: the rest is left out{padding}, of which {of}")
    if refused:
        first, what = refused[0]
        of_model = set(view.keys("model"))
        keys = {one.key: one.n_after for one, _ in refused if one.key in of_model}
        raise NamesError(
            f"{what}, and the sizes of the name map do not pad {first.n_after} to {first.n_before}",
            key=first.key,
            hint="does the config.json have the `vocab_size` of this model? "
            + (f"`select=Select(trim={keys!r})` leaves the rest out, whatever it holds" if keys else ""),
        )
    return told


def _n_not_zero(view: Checkpoint, one: ResizedTensor) -> int:
    """How many of the elements along a dim that are left out hold a byte that is not zero."""
    shape = view.shape(one.key)
    n_bytes = max(1, view[one.key].n_bytes // max(1, shape[one.dim]))
    step = max(1, _MAX_READ_BYTES // n_bytes)
    edges = [*range(one.n_after, one.n_before, step), one.n_before]
    found = 0
    for start, stop in itertools.pairwise(edges):
        array = view.read(one.key, (*(slice(None),) * one.dim, slice(start, stop)))
        rows = np.ascontiguousarray(np.moveaxis(array, one.dim, 0)).reshape(stop - start, -1).view(np.uint8)
        found += int(np.count_nonzero(rows.any(axis=1)))
    return found


def _map_of_sizes(sizes: NewSizes, old: Mapping[str, str], view: Checkpoint) -> NameMap:
    """The name map that pads and trims, with a rule for each tensor.

    Args:
        sizes: what is padded and trimmed.
        old: names before `rename`, by names after it.
        view: the tensors under the names after it.

    Raises:
        ArgumentError: no name begins with a text, a tensor is padded and trimmed, a size is not known, or a tensor has
            more rows than `pad` or fewer than `trim` gives it.
        NamesError: a name cannot be the name in a rule.
    """
    of_optimizer = set(view.keys("optimizer"))
    # State of the optimizer may be there without its parameter.
    states = [(counter_tensors.parameter_of(name), counter_tensors.parameter_of(old[name])) for name in of_optimizer]
    old = {name: key for name, key in old.items() if name not in of_optimizer} | {
        one[1]: other[1] for one, other in states if one and other
    }
    numbers = {} if sizes.config is None else read_config(sizes.config)
    rules: dict[str, dict[str, object]] = {}
    for word, asked in (("pad", sizes.pad), ("trim", sizes.trim)):
        # The longest text that a name begins with applies, as for `rename`.
        for text in sorted(asked, key=len, reverse=True):
            chosen = [name for name, key in old.items() if key.startswith(text)]
            chosen = chosen or [name for name in old if name.startswith(text)]
            if not chosen:
                raise ArgumentError(
                    f"`{word}` has {show(text)}, and no name of a weight begins with this text",
                    hint="`reshard inspect` lists the names" if _PATTERN.isdisjoint(text) else "it is not a pattern",
                )
            n = _n_rows(f"`{word}` of {show(text)}", asked[text], numbers, has_config=sizes.config is not None)
            for name in chosen:
                rule = rules.setdefault(name, {"from": name, "to": name, word: 0, "to_size": n})
                if word not in rule:
                    raise ArgumentError(f"`pad` and `trim` are both given for {show(name)}", key=name)
                shape = view.shape(name) if name in view else ()
                if shape and rule["to_size"] == n and (shape[0] > n if word == "pad" else shape[0] < n):
                    no = "leaves no rows out, and `trim` does" if word == "pad" else "adds no rows, and `pad` does"
                    raise ArgumentError(
                        f"{show(name)} has {counted(shape[0], 'row')}, and `{word}` gives it {n}: `{word}` {no}",
                        key=name,
                    )
    return NameMap.from_mapping({"rules": list(rules.values())})


def _n_rows(what: str, size: int | str, config: Mapping[str, object], *, has_config: bool) -> int:
    """A number of rows, from a number or from fields of a config.

    Raises:
        ArgumentError: the text is no size, or the config lacks a field or has something else there.
    """
    try:
        expression = Expression.parse(plain_integer(size))
        fields = config_fields(config, expression.names)
        found = {name: fields.get(name) for name in expression.names}
        missing = [show(name) for name, n in found.items() if not isinstance(n, int) or isinstance(n, bool)]
        if missing:
            where = f"config.json has no number {listed(missing)}" if has_config else "there is no config.json"
            raise ArgumentError(
                f"{what} is {show(str(size))}, and {where}",
                hint="write a number, or give `config=`, a config.json or a mapping with the field",
            )
        n = expression.value(found)  # type: ignore[arg-type]
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{what}: {error}") from None
    if n < 1:
        raise ArgumentError(f"{what} is {n}, expected at least one row")
    return n


def _renamer(drop: tuple[str, ...], rename: Mapping[str, str], new: Mapping[str, str]) -> Callable[[str], str | None]:
    """The new name of any name: of a tensor as it is written, of a module by the same prefixes."""
    longest_first = sorted(rename, key=len, reverse=True)

    def of(name: str) -> str | None:
        if name in new:
            return new[name]
        return None if name.startswith(drop) else _renamed(name, rename, longest_first, set(), {})

    return of


def of_prefixes(source: Checkpoint, entry: str | None, rename: Mapping[str, str] | None = None) -> Checkpoint:
    """A view of the weights below an entry, under their names without it, and with other prefixes.

    Args:
        source: the opened source, which stays open.
        entry: what stands before the names, such as "ema"; None: all weights.
        rename: as in `new_names`, for the names without the entry.

    Raises:
        ArgumentError: there is no such entry, or as `new_names`.
        MismatchError: two tensors would have one name.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"net.w": np.zeros(1), "ema.w": np.ones(1)}, "both.safetensors")
        >>> with reshard.open("both.safetensors") as source, of_prefixes(source, "ema", {"": "model."}) as view:
        ...     view.keys()
        ['model.w']
    """
    keys = source.keys("model")
    path = str(source.path)
    inner = {key: key for key in keys} if entry is None else weight_sets.below(keys, entry, path)
    if rename is not None:
        inner = {key: bare(name) for key, name in inner.items()}
        rename = {bare(old): new for old, new in rename.items()}
        weight_sets.check_distinct(inner, path)
    new = new_names(list(inner.values()), (), rename)
    return source.view({new[name]: key for key, name in inner.items()}, is_renamed=True)


def _only(source: Checkpoint, part: Part, only: tuple[str, ...]) -> list[str]:
    """The tensors whose names begin with one of these, and the optimizer state of these.

    Raises:
        ArgumentError: no name begins with one of them.
    """
    keys, states = source.keys(part), _states(source)
    for text in only:
        if not isinstance(text, str) or not text:
            raise ArgumentError(f"`only` takes names of tensors or prefixes of names, not {text!r}")
        if not any(key.startswith(text) for key in keys):
            raise ArgumentError(
                f"`only` has {show(text)}, and no tensor name begins with this text",
                hint="`reshard inspect` lists the names" if _PATTERN.isdisjoint(text) else "it is not a pattern",
            )
    return [key for key in keys if key.startswith(only) or (key in states and states[key][1].startswith(only))]


def _without(keys: list[str], others: Collection[str]) -> list[str]:
    return [key for key in keys if key not in others] if others else keys


def _alone(source: Checkpoint, apart: Collection[str]) -> list[str]:
    """The tensors of these names that have one element, in the order of the source."""
    if not any(name in source for name in apart):
        return []
    return [key for key in source if key in apart and math.prod(source.shape(key)) == 1]


def _counters(source: Checkpoint, alone: Collection[str]) -> dict[str, np.ndarray]:
    """The counters, from tensors of the source or from its `common`."""
    known = {} if source.common is None else counter_tensors.arrays_of(source.common)
    known = {name: array for name, array in known.items() if name not in source}
    return known | {key: source.read(key) for key in alone}


def _states(source: Checkpoint) -> dict[str, tuple[str, str]]:
    """The slot and the parameter of tensors of the optimizer part whose names end like a tensor of the model."""
    of_model = set(source.keys("model"))
    found: dict[str, tuple[str, str]] = {}
    for key in source.keys("optimizer"):
        dot = key.find(".")
        while dot >= 0 and key[dot + 1 :] not in of_model:
            dot = key.find(".", dot + 1)
        if dot >= 0:
            found[key] = key[:dot], key[dot + 1 :]
    return found


def new_names(
    keys: Sequence[str],
    drop: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    *,
    states: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, str]:
    """The new name of each tensor that stays.

    Optimizer state `<slot>.<parameter>` is renamed like its parameter, unless a longer prefix matches, and is left out
    with it. Counters keep their names unless `rename` has their full name.

    Args:
        keys: names of the tensors.
        drop: prefixes of the names of tensors that are left out.
        rename: new prefixes by old ones. The longest that matches applies; "" matches every name.
        states: slot and parameter of optimizer state by key, for slots whose names are not known.

    Raises:
        ArgumentError: a prefix is not text, or a glob that begins no name, or two tensors would have the same name.

    Example:
        >>> new_names(["w", "adam_m.w", "step_num"], rename={"": "model."})
        {'w': 'model.w', 'adam_m.w': 'adam_m.model.w', 'step_num': 'step_num'}
        >>> new_names(["layers.0.w", "layers.1.w", "head.w"], drop=["layers.1."], rename={"head.": "lm_head."})
        {'layers.0.w': 'layers.0.w', 'head.w': 'lm_head.w'}
    """
    changes = dict(rename or {})
    for text in (*drop, *changes, *changes.values()):
        if not isinstance(text, str):
            raise ArgumentError(f"`drop` and `rename` take names of tensors or prefixes of names, not {text!r}")
    if "" in drop:
        raise ArgumentError("`drop` has the prefix '', which matches every name: no tensor would be left")
    if not drop and not changes:
        return {key: key for key in keys}
    kept = [key for key in keys if not _is_dropped(key, tuple(drop), states or {})]
    unused = [text for text in drop if not any(key.startswith(text) for key in keys)]
    used: set[str] = set()
    longest_first = sorted(changes, key=len, reverse=True)
    names = {key: _renamed(key, changes, longest_first, used, states or {}) for key in kept}
    unused += [text for text in changes if text not in used]
    for text in unused:
        if not _PATTERN.isdisjoint(text):
            word = "drop" if text in drop else "rename"
            start = re.split(r"[*?[{]", text)[0]
            raise ArgumentError(
                f"`{word}` has {show(text)}, and no tensor name begins with this text: it is not a pattern",
                hint=f"{show(start)} matches every name that begins with it" if start else None,
            )
        _log.warning("no tensor name begins with %s: this prefix of `drop` or `rename` has no effect", show(text))
    seen: dict[str, str] = {}
    for old, new in names.items():
        if not new:
            raise ArgumentError(f"{show(old)} would have an empty name", key=old)
        if seen.setdefault(new, old) != old:
            raise ArgumentError(f"{show(seen[new])} and {show(old)} would both be named {show(new)}", key=old)
    return names


def _is_dropped(key: str, drop: tuple[str, ...], states: Mapping[str, tuple[str, str]]) -> bool:
    state = counter_tensors.parameter_of(key) or states.get(key)
    return key.startswith(drop) or (state is not None and state[1].startswith(drop))


def _renamed(
    key: str,
    changes: Mapping[str, str],
    longest_first: Sequence[str],
    used: set[str],
    states: Mapping[str, tuple[str, str]],
) -> str:
    old = next((text for text in longest_first if key.startswith(text)), None)
    state = counter_tensors.parameter_of(key) or states.get(key)
    if state is not None and not (old and len(old) > len(state[0])):
        # No prefix matches more than the slot: state is renamed like its parameter.
        return f"{state[0]}.{_renamed(state[1], changes, longest_first, used, states)}"
    if old is None or (counter_tensors.is_counter(key) and old != key):
        return key
    used.add(old)
    return changes[old] + key[len(old) :]
